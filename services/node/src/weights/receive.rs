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
use weight_transfer::{CHUNK_BYTES, ChunkDigest, Plan, PlanError, Tensor, WeightVersion};

use super::{engine::ChangeError, standby::CANCELLED, trainer::address::TrainerError};
use crate::{
    memory_limit::{self, HostBytes, MemoryShare},
    settings::SettingsError,
};

/// Bytes that a thread reads and hashes at a time, few enough for the CPU's cache.
const READ_BYTES: usize = 256 << 10;

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
    Release(ChangeError),
    #[error("{CANCELLED}")]
    Cancelled,
}

/// Prepares the weights at `path`, beside the weights in use or in place after `release`, and
/// returns their version. A second copy must fit into the node's `share` of host memory beside
/// `host_bytes`. Blocks. Stops early once `cancelled` is cancelled.
pub(super) fn receive(
    path: &Path,
    (model, host_bytes, share): (&ModelConfig, HostBytes, Option<MemoryShare>),
    update: &dyn WeightUpdate,
    release: &dyn Fn() -> Result<(), ReceiveError>,
    cancelled: &CancellationToken,
) -> Result<WeightVersion, ReceiveError> {
    let check = || match cancelled.is_cancelled() {
        true => Err(ReceiveError::Cancelled),
        false => Ok(()),
    };
    check()?;
    let began = Instant::now();
    let is_cancelled = cancelled.clone();
    let checkpoint =
        Checkpoint::open(path, LoadFormat::Auto)?.cancelled_by(move || is_cancelled.is_cancelled());
    if let Some((field, wanted, found)) = model.difference(checkpoint.config()) {
        let path = path.display().to_string();
        return Err(ReceiveError::OtherModel { path, field, found, wanted });
    }
    if !update.is_in_place() {
        memory_limit::check_second_copy(share, host_bytes)?;
    }
    let weights = checkpoint.stored_weights()?;
    let plan = plan(&weights)?;
    if update.is_in_place() {
        release()?;
        check()?;
    }
    let opened = began.elapsed();
    // The digests read the same bytes as the copy, so they are computed beside it while the page
    // cache has them.
    let stop = cancelled.child_token();
    let next = AtomicUsize::new(0);
    let mut packed = Duration::ZERO;
    let digests = thread::scope(|scope| {
        let work = || digests(&plan, &weights, &next, &stop);
        let threads: Vec<_> =
            (0..digest_threads(host_bytes.weights)).map(|_| scope.spawn(work)).collect();
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
    });
    // Threads that were cancelled left digests out.
    check()?;
    let digests = digests?;
    // The digests are those of the packed bytes only if both were read from the same files.
    checkpoint.check_unchanged()?;
    let version = WeightVersion::of_content(&plan, &digests);
    tracing::info!(
        bytes = plan.bytes(),
        opened_ms = opened.as_secs_f64() * 1e3,
        packed_ms = packed.as_secs_f64() * 1e3,
        received_ms = began.elapsed().as_secs_f64() * 1e3,
        "read weights from files"
    );
    Ok(version)
}

/// Returns the number of threads that hash: one if the CPUs compute steps. On a GPU node, half of
/// the CPUs upload the weights, and 3/8 hash, at most 16.
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
    let mut buffer = vec![0; READ_BYTES];
    while !stop.is_cancelled() {
        let index = next.fetch_add(1, Ordering::Relaxed);
        let Some(chunk) = plan.chunks().get(index) else { break };
        let mut digest = ChunkDigest::default();
        for piece in &chunk.pieces {
            for begin in piece.range.clone().step_by(READ_BYTES) {
                let bytes = (piece.range.end - begin).min(READ_BYTES as u64) as usize;
                weights[piece.tensor].read(begin, &mut buffer[..bytes]);
                digest.update(&buffer[..bytes]);
            }
        }
        digests.push((index, digest.finish()));
    }
    digests
}

fn plan(weights: &[StoredWeight<'_>]) -> Result<Plan, PlanError> {
    let tensor = |weight: &StoredWeight<'_>| Tensor {
        name: weight.name.clone(),
        dtype: weight.encoding.to_owned(),
        shape: weight.dims.clone(),
        bytes: weight.bytes(),
    };
    Plan::new(weights.iter().map(tensor).collect(), CHUNK_BYTES)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        io::{Seek, SeekFrom, Write},
        time::SystemTime,
    };

    use kernels::{
        WeightFormat,
        cpu::{CpuBackend, CpuOptions, Isa},
    };
    use model::{TransformerWeights, Weight};
    use serde_json::{Map, json};

    use super::*;

    /// Writes a model with zeros as weights, and returns the file of the weights.
    fn write_model(folder: &Path) -> File {
        let config = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../model/tests/fixtures/tiny_llama3/config.json");
        fs::copy(&config, folder.join("config.json")).unwrap();
        let model = Checkpoint::open(&config, LoadFormat::Dummy { seed: 7 }).unwrap();
        let (mut header, mut end) = (Map::new(), 0);
        for weight in Weight::all(model.config()) {
            let shape = weight.shape(model.config());
            let begin = end;
            end += 2 * shape.elements();
            let entry =
                json!({"dtype": "BF16", "shape": shape.dims(), "data_offsets": [begin, end]});
            header.insert(weight.hugging_face_name(model.config()), entry);
        }
        let header = serde_json::to_vec(&header).unwrap();
        let mut file = File::create(folder.join("model.safetensors")).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(&header).unwrap();
        file.write_all(&vec![0; end as usize]).unwrap();
        // Clocks of file systems are coarse: a write right now could leave the time of the last
        // write as it is.
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        file
    }

    /// Device. If there is a file, it is written to while the device packs the weights.
    struct Device(Option<File>);

    impl WeightUpdate for Device {
        fn is_in_place(&self) -> bool {
            true
        }

        fn prepare(&self, _: &Path, _: &Checkpoint) -> Result<(), PrepareError> {
            if let Some(mut file) = self.0.as_ref() {
                file.seek(SeekFrom::End(-2)).unwrap();
                file.write_all(&[0x80, 0x3f]).unwrap();
            }
            Ok(())
        }

        fn discard(&self) {}
    }

    /// Device on which the update is aborted before the weights are packed.
    struct AbortedDevice(CancellationToken);

    impl WeightUpdate for AbortedDevice {
        fn is_in_place(&self) -> bool {
            true
        }

        fn prepare(&self, _: &Path, checkpoint: &Checkpoint) -> Result<(), PrepareError> {
            self.0.cancel();
            let options = CpuOptions { weights: WeightFormat::F32, threads: 1, isa: Isa::Auto };
            let packer = CpuBackend::new(options).unwrap();
            let packed = TransformerWeights::pack(checkpoint, &packer, &mut |_| ());
            assert!(matches!(packed, Err(ModelError::Cancelled)));
            Ok(packed.map(drop)?)
        }

        fn discard(&self) {}
    }

    #[test]
    fn aborted_update_stops_packing() {
        let folder = tempfile::tempdir().unwrap();
        write_model(folder.path());
        let model = Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap();
        let cancelled = CancellationToken::new();
        let outcome = receive(
            folder.path(),
            (model.config(), HostBytes::default(), None),
            &AbortedDevice(cancelled.clone()),
            &|| Ok(()),
            &cancelled,
        );
        assert!(matches!(outcome, Err(ReceiveError::Cancelled)));
    }

    #[test]
    fn weights_that_change_while_they_are_read_are_rejected() {
        let outcome = |is_written: bool| {
            let folder = tempfile::tempdir().unwrap();
            let file = write_model(folder.path());
            let model = Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap();
            let device = Device(is_written.then_some(file));
            let (model, cancelled) = (model.config().clone(), CancellationToken::new());
            receive(
                folder.path(),
                (&model, HostBytes::default(), None),
                &device,
                &|| Ok(()),
                &cancelled,
            )
        };
        assert!(outcome(false).is_ok());
        let error = outcome(true).unwrap_err().to_string();
        assert!(error.contains("model.safetensors: the file changed"), "{error}");
    }
}
