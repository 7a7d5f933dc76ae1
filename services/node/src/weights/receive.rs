//! Opens new weights, checks them against the model in use, and prepares them.

use std::{
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use engine::{
    defaults,
    executor::{PrepareError, WeightUpdate},
};
use kernels::{Shard, WeightFormat};
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

/// How the CPUs of a node pack weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuPacking {
    pub weights: WeightFormat,
    /// Shard of the first rank.
    pub shard: Shard,
}

impl CpuPacking {
    /// Returns the bytes of the packed weights of all ranks.
    fn bytes(self, checkpoint: &Checkpoint) -> u64 {
        let Self { weights, shard } = self;
        shard.rank_count() as u64 * defaults::weight_bytes(checkpoint, shard, weights, false)
    }
}

/// Device and memory of the node, which new weights must fit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UpdateLimits {
    /// `None`: the node computes on GPUs.
    pub cpu: Option<CpuPacking>,
    /// [`Checkpoint::int4_layout`] of the weights in use.
    pub int4_layout: u64,
    /// Host memory in use.
    pub host_bytes: HostBytes,
    /// The node's share of host memory.
    pub share: Option<MemoryShare>,
}

/// Prepares the weights at `path`, beside the weights in use or in place after `release`, and
/// returns their version. Nothing is released before the model was found to fit `limits`. Blocks.
/// Stops early once `cancelled` is cancelled.
pub(super) fn receive(
    path: &Path,
    (model, limits): (&ModelConfig, UpdateLimits),
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
    let UpdateLimits { cpu, int4_layout, host_bytes, share } = limits;
    match cpu {
        // Packed weights of a GPU keep their addresses.
        None if checkpoint.int4_layout() != int4_layout => {
            let reason = "other matrices are in INT4 or have other groups; expected those of the \
                          weights in use";
            return Err(PrepareError::Device(reason.to_owned()).into());
        }
        None => {}
        Some(cpu) if !update.is_in_place() => {
            memory_limit::check_second_copy(share, host_bytes, cpu.bytes(&checkpoint))?;
        }
        Some(_) => {}
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
    use model::{LayerWeight, TransformerWeights, Weight, WeightShape};
    use serde_json::{Map, Value, json};

    use super::*;

    /// Writes a model with zeros as weights, and returns the file of the weights.
    fn write_model(folder: &Path) -> File {
        write_tensors(folder, |_, _| None)
    }

    /// Writes a model as [`write_model`] does, but with the output projections of attention in
    /// INT4.
    fn write_int4(folder: &Path) {
        write_tensors(folder, |weight, config| {
            let WeightShape::Matrix { rows, cols } = weight.shape(config) else { return None };
            matches!(weight, Weight::Layer(_, LayerWeight::AttentionOutput)).then(|| {
                vec![
                    ("qweight", "I32", [cols / 8, rows], 4),
                    ("qzeros", "I32", [1, rows / 8], 4),
                    ("scales", "F16", [1, rows], 2),
                ]
            })
        });
        let path = folder.join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config["quantization_config"] =
            json!({"quant_method": "gptq", "bits": 4, "group_size": -1});
        fs::write(path, config.to_string()).unwrap();
    }

    /// A tensor's last name, type, shape, and bytes of an element.
    type TensorOf = (&'static str, &'static str, [usize; 2], usize);

    /// Writes a model with zeros as weights, in bf16 or with the tensors that `stored` returns.
    fn write_tensors(
        folder: &Path,
        stored: impl Fn(Weight, &ModelConfig) -> Option<Vec<TensorOf>>,
    ) -> File {
        let config = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../model/tests/fixtures/tiny_llama3/config.json");
        fs::copy(&config, folder.join("config.json")).unwrap();
        let model = Checkpoint::open(&config, LoadFormat::Dummy { seed: 7 }).unwrap();
        let (mut header, mut end) = (Map::new(), 0);
        for weight in Weight::all(model.config()) {
            let name = weight.hugging_face_name(model.config());
            let dims = weight.shape(model.config()).dims();
            let mut add = |name: String, dtype: &str, dims: Vec<u64>, bytes: u64| {
                let begin = end;
                end += bytes * dims.iter().product::<u64>();
                let entry = json!({"dtype": dtype, "shape": dims, "data_offsets": [begin, end]});
                header.insert(name, entry);
            };
            match stored(weight, model.config()) {
                None => add(name, "BF16", dims, 2),
                Some(tensors) => tensors.into_iter().for_each(|(last, dtype, dims, bytes)| {
                    let name = name.replace("weight", last);
                    add(name, dtype, dims.map(|len| len as u64).to_vec(), bytes as u64);
                }),
            }
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

    /// Device with memory for a second copy.
    struct Shadow;

    impl WeightUpdate for Shadow {
        fn is_in_place(&self) -> bool {
            false
        }

        fn prepare(&self, _: &Path, _: &Checkpoint) -> Result<(), PrepareError> {
            Ok(())
        }

        fn discard(&self) {}
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
            (model.config(), UpdateLimits::default()),
            &AbortedDevice(cancelled.clone()),
            &|| Ok(()),
            &cancelled,
        );
        assert!(matches!(outcome, Err(ReceiveError::Cancelled)));
    }

    #[test]
    fn gpus_refuse_other_matrices_in_int4_before_they_release_theirs() {
        let folder = tempfile::tempdir().unwrap();
        write_int4(folder.path());
        let model = Checkpoint::open(folder.path(), LoadFormat::Auto).unwrap();
        let receive = |limits: UpdateLimits, is_released: bool| {
            let release = || match is_released {
                true => Ok(()),
                false => panic!("the weights in use are kept"),
            };
            let cancelled = CancellationToken::new();
            receive(folder.path(), (model.config(), limits), &Device(None), &release, &cancelled)
        };
        let plain = UpdateLimits::default();
        let error = receive(plain, false).unwrap_err().to_string();
        assert!(error.contains("other matrices are in INT4 or have other groups"), "{error}");
        let cpu = Some(CpuPacking { weights: WeightFormat::F32, shard: Shard::WHOLE });
        receive(UpdateLimits { cpu, ..plain }, true).unwrap();
        receive(UpdateLimits { int4_layout: model.int4_layout(), ..plain }, true).unwrap();
    }

    #[test]
    fn second_copy_has_the_size_of_the_new_weights() {
        let (plain, int4) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_model(plain.path());
        write_int4(int4.path());
        let model = Checkpoint::open(plain.path(), LoadFormat::Auto).unwrap();
        let cpu = CpuPacking { weights: WeightFormat::F32, shard: Shard::WHOLE };
        let bytes = cpu.bytes(&model);
        assert_eq!(bytes, 4 * model.config().parameter_count());
        let small = cpu.bytes(&Checkpoint::open(int4.path(), LoadFormat::Auto).unwrap());
        // Three matrices of 32 rows and 64 columns, with a group for each row.
        assert_eq!(bytes - small, 3 * 32 * (64 * 4 - 64 / 2 - 5));
        // The process may use 1 TiB, of which KV leaves the weights in use and the smaller copy.
        let share = MemoryShare { limit: 1 << 40, nodes_per_container: 1 };
        let host_bytes = HostBytes { weights: small, kv: (1 << 40) - 2 * small };
        let limits =
            UpdateLimits { cpu: Some(cpu), int4_layout: 0, host_bytes, share: Some(share) };
        let receive = |folder: &Path| {
            let cancelled = CancellationToken::new();
            receive(folder, (model.config(), limits), &Shadow, &|| Ok(()), &cancelled)
        };
        receive(int4.path()).unwrap();
        let error = receive(plain.path()).unwrap_err();
        assert!(matches!(error, ReceiveError::Memory(_)), "{error}");
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
                (&model, UpdateLimits::default()),
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
