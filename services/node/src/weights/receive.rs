//! Opens new weights, checks them against the model in use, and prepares them.

use std::{path::Path, thread};

use engine::executor::{PrepareError, WeightUpdate};
use model::{Checkpoint, LoadFormat, ModelConfig, ModelError, StoredWeight};
use tokio_util::sync::CancellationToken;
use weight_transfer::{CHUNK_BYTES, Chunk, Plan, PlanError, Tensor, WeightVersion, digest};

use super::standby::CANCELLED;
use crate::{memory_limit, settings::SettingsError};

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
    #[error("{CANCELLED}")]
    Cancelled,
}

/// Prepares the weights at `path` beside those in use and returns their version. A copy takes `host_bytes` of host
/// memory. Blocks. Stops early once `cancelled` is cancelled.
pub(super) fn receive(
    path: &Path,
    (model, host_bytes): (&ModelConfig, u64),
    update: &dyn WeightUpdate,
    cancelled: &CancellationToken,
) -> Result<WeightVersion, ReceiveError> {
    let check = || match cancelled.is_cancelled() {
        true => Err(ReceiveError::Cancelled),
        false => Ok(()),
    };
    check()?;
    let checkpoint = Checkpoint::open(path, LoadFormat::Auto)?;
    if let Some((field, wanted, found)) = model.difference(checkpoint.config()) {
        let path = path.display().to_string();
        return Err(ReceiveError::OtherModel { path, field, found, wanted });
    }
    let weights = checkpoint.stored_weights()?;
    memory_limit::check_more(host_bytes)?;
    let plan = plan(&weights)?;
    // The digests read the same pages as the copy, so they are computed beside it.
    let stop = cancelled.child_token();
    let digests = thread::scope(|scope| {
        let threads = digest_threads(host_bytes);
        let digests: Vec<_> = (0..threads)
            .map(|first| {
                let (plan, weights, stop) = (&plan, &weights, &stop);
                scope.spawn(move || digests(plan, weights, first, threads, stop))
            })
            .collect();
        let prepared = update.prepare(path, &checkpoint);
        if prepared.is_err() {
            stop.cancel();
        }
        let mut all = vec![0; plan.chunks().len()];
        for (first, digests) in digests.into_iter().enumerate() {
            let digests = digests.join().expect("hashing does not panic");
            for (digest, to) in digests.into_iter().zip(all.iter_mut().skip(first).step_by(threads))
            {
                *to = digest;
            }
        }
        prepared.map(|()| all)
    })?;
    // Threads that were cancelled left digests out.
    check()?;
    Ok(WeightVersion::of_content(&plan, &digests))
}

/// Returns the number of threads that hash: one where the CPUs compute steps, otherwise half of the CPUs.
fn digest_threads(host_bytes: u64) -> usize {
    match host_bytes {
        0 => thread::available_parallelism().map_or(1, |cpus| cpus.get() / 2).clamp(1, 16),
        _ => 1,
    }
}

/// Returns the digests of every `step`th chunk from `first` on. Stops early once `stop` is cancelled.
fn digests(
    plan: &Plan,
    weights: &[StoredWeight<'_>],
    first: usize,
    step: usize,
    stop: &CancellationToken,
) -> Vec<u128> {
    let chunks = plan.chunks().iter().skip(first).step_by(step);
    let chunks = chunks.take_while(|_| !stop.is_cancelled());
    let digest = |chunk: &Chunk| {
        digest(chunk.pieces.iter().map(|piece| {
            let range = piece.range.start as usize..piece.range.end as usize;
            &weights[piece.tensor].bytes[range]
        }))
    };
    chunks.map(digest).collect()
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
