//! Opens new weights, checks them against the model in use, and prepares them.

use std::{
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use engine::executor::{PrepareError, WeightUpdate};
use model::{Checkpoint, LoadFormat, ModelConfig, ModelError, StoredWeight};
use tokio_util::sync::CancellationToken;
use weight_transfer::{CHUNK_BYTES, Plan, PlanError, Tensor, WeightVersion, digest};

use super::{standby::CANCELLED, trainer::TrainerError};
use crate::{
    memory_limit::{self, MemoryShare},
    settings::SettingsError,
};

/// Reason why new weights cannot be used. The weights in use are unchanged.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReceiveError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(
        "cannot use the weights of {path}: {field} is {found}; expected {wanted}, as in the model in use"
    )]
    OtherModel { path: String, field: &'static str, found: String, wanted: String },
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("cannot hold a second copy of the weights: {0}")]
    Memory(#[from] SettingsError),
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    #[error(transparent)]
    Trainer(#[from] TrainerError),
    #[error("cannot stop the steps before the weights change: {0}")]
    Release(&'static str),
    #[error("{CANCELLED}")]
    Cancelled,
}

/// Prepared weights.
pub(super) struct Received {
    pub version: WeightVersion,
    /// The files, which are still mapped. Unmapping gigabytes takes a while, so the caller drops them beside the update.
    pub checkpoint: Checkpoint,
}

/// Prepares the weights at `path` beside the weights in use, or in place after `release`. A second copy takes
/// `host_bytes` of the node's `share` of host memory, 0 on a GPU. Blocks. Stops early once `cancelled` is cancelled.
pub(super) fn receive(
    path: &Path,
    (model, host_bytes, share): (&ModelConfig, u64, Option<MemoryShare>),
    update: &dyn WeightUpdate,
    release: &dyn Fn() -> Result<(), ReceiveError>,
    cancelled: &CancellationToken,
) -> Result<Received, ReceiveError> {
    let check = || match cancelled.is_cancelled() {
        true => Err(ReceiveError::Cancelled),
        false => Ok(()),
    };
    check()?;
    let began = Instant::now();
    let checkpoint = Checkpoint::open(path, LoadFormat::Auto)?;
    if let Some((field, wanted, found)) = model.difference(checkpoint.config()) {
        let path = path.display().to_string();
        return Err(ReceiveError::OtherModel { path, field, found, wanted });
    }
    if !update.is_in_place() {
        memory_limit::check_more(share, host_bytes)?;
    }
    // A copy in host memory takes the place of the pages.
    let checkpoint = match host_bytes {
        0 => checkpoint.keeping_pages(),
        _ => checkpoint,
    };
    let weights = checkpoint.stored_weights()?;
    let plan = plan(&weights)?;
    if update.is_in_place() {
        release()?;
        check()?;
    }
    let opened = began.elapsed();
    // The digests read the same pages as the copy, so they are computed beside it.
    let stop = cancelled.child_token();
    let next = AtomicUsize::new(0);
    let mut packed = Duration::ZERO;
    let digests = thread::scope(|scope| {
        let work = || digests(&plan, &weights, &next, &stop);
        let threads: Vec<_> = (0..digest_threads(host_bytes)).map(|_| scope.spawn(work)).collect();
        let prepared = update.prepare(path, &checkpoint);
        packed = began.elapsed();
        if prepared.is_err() {
            stop.cancel();
        }
        let mut all = vec![0; plan.chunks().len()];
        for thread in threads {
            for (chunk, digest) in thread.join().expect("hashing does not panic") {
                all[chunk] = digest;
            }
        }
        prepared.map(|()| all)
    })?;
    // Threads that were cancelled left digests out.
    check()?;
    let version = WeightVersion::of_content(&plan, &digests);
    tracing::info!(
        bytes = plan.bytes(),
        opened_ms = opened.as_secs_f64() * 1e3,
        packed_ms = packed.as_secs_f64() * 1e3,
        received_ms = began.elapsed().as_secs_f64() * 1e3,
        "read weights from files"
    );
    drop(weights);
    Ok(Received { version, checkpoint })
}

/// Returns the number of threads that hash: one if the CPUs compute steps. On a GPU node, half of the CPUs upload the
/// weights, and 3/8 hash, at most 16.
fn digest_threads(host_bytes: u64) -> usize {
    match host_bytes {
        0 => thread::available_parallelism().map_or(1, |cpus| cpus.get() * 3 / 8).clamp(1, 16),
        _ => 1,
    }
}

/// Claims chunks from `next` on and returns their digests. Stops early once `stop` is cancelled.
fn digests(
    plan: &Plan,
    weights: &[StoredWeight<'_>],
    next: &AtomicUsize,
    stop: &CancellationToken,
) -> Vec<(usize, u128)> {
    let mut digests = Vec::new();
    while !stop.is_cancelled() {
        let index = next.fetch_add(1, Ordering::Relaxed);
        let Some(chunk) = plan.chunks().get(index) else { break };
        let pieces = chunk.pieces.iter().map(|piece| {
            let range = piece.range.start as usize..piece.range.end as usize;
            &weights[piece.tensor].bytes[range]
        });
        digests.push((index, digest(pieces)));
    }
    digests
}

fn plan(weights: &[StoredWeight<'_>]) -> Result<Plan, PlanError> {
    let tensor = |weight: &StoredWeight<'_>| Tensor {
        name: weight.name.clone(),
        dtype: weight.encoding.to_owned(),
        shape: weight.dims.clone(),
        bytes: weight.bytes.len() as u64,
    };
    Plan::new(weights.iter().map(tensor).collect(), CHUNK_BYTES)
}
