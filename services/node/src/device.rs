//! Which device a node computes on, and the executor of a GPU.

use std::{
    env,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use config::{Config, Device, Speculate};
use engine::executor::cuda::{CudaExecutor, CudaExecutorError, CudaModel, KvShare};
use kernels::{
    KvArena, KvLayout, WeightFormat,
    cuda::{CudaBackend, CudaError, CudaOptions, DeviceKv, Tuned, Tuning},
};
use model::Checkpoint;
use tracing::{info, warn};

use crate::{load_log::LoadLog, node::StartError, settings};

/// The kernel library's name beside the program.
const KERNELS_FILE: &str = "libbaton_kernels.so";

/// A GPU that can serve.
pub(crate) struct Gpu {
    backend: CudaBackend,
}

/// The GPU that the node is to compute on; `None`: the CPU.
///
/// # Errors
/// With `node.device` = cuda, why there is none. With auto that is logged, and the CPU serves.
pub(crate) fn gpu(config: &Config, weights: WeightFormat) -> Result<Option<Gpu>, StartError> {
    let device = config.node.device;
    if device == Device::Cpu {
        return Ok(None);
    }
    match open(config, weights) {
        Ok(gpu) => Ok(Some(gpu)),
        Err(error) if device == Device::Auto => {
            info!(reason = %error, "the CPU serves");
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

fn open(config: &Config, weights: WeightFormat) -> Result<Gpu, CudaError> {
    let node = &config.node;
    if node.speculate != Speculate::Off {
        let (what, value) = ("node.speculate", node.speculate.to_string());
        return Err(CudaError::Unsupported { what, value, allowed: "off" });
    }
    let path = node.kernels.clone().or_else(kernels_beside_us);
    let options = CudaOptions::new(weights);
    let backend = CudaBackend::open(node.gpu.as_deref(), path.as_deref(), options)?;
    let device = backend.context().device();
    let kernels = backend.library().build();
    info!(gpu = device.uuid, name = device.name, kernels, "found a GPU");
    Ok(Gpu { backend })
}

fn kernels_beside_us() -> Option<PathBuf> {
    let path = env::current_exe().ok()?.with_file_name(KERNELS_FILE);
    path.exists().then_some(path)
}

impl Gpu {
    /// Loads the weights and takes the memory for KV: as many blocks as are set, else as fit.
    pub(crate) fn start(
        self,
        config: &Config,
        checkpoint: &Checkpoint,
        layout: KvLayout,
    ) -> Result<(CudaExecutor, Arc<KvArena>), StartError> {
        let node = &config.node;
        let context = Arc::clone(self.backend.context());
        let set = settings::block_count_set(node, layout)?;
        let limits_of = |blocks| settings::executor_limits(node, checkpoint.config(), blocks);
        let limits = limits_of(set.unwrap_or(u32::MAX))?;
        let mut log = LoadLog::new();
        let mut progress = |progress| log.at(progress);
        let mut model = CudaModel::load(checkpoint, self.backend, &limits, &mut progress)?;
        let times = model.times();
        let mut tuned = Tuned::default();
        if !node.gpu_tune.is_zero() {
            let folder = node.gpu_tune_dir.clone().or_else(|| config.cache.clone());
            tuned = model.tune(&limits, &Tuning { folder, within: node.gpu_tune })?;
            for reason in &tuned.faults {
                warn!(reason, "tuned products are not kept");
            }
        }
        let limits = match set {
            Some(_) => limits,
            None => {
                let share =
                    KvShare { percent: node.gpu_memory_percent, reserve: node.gpu_reserve.bytes() };
                // Without a wish, what one step reads: with less a node is of no use.
                let one_step = (checkpoint.config().context_tokens as u32).min(limits.step_tokens);
                let tokens_min = node.sequence_tokens_max.unwrap_or(one_step);
                limits_of(model.kv_blocks(&limits, layout, share, tokens_min)?)?
            }
        };
        let kv = DeviceKv::new(&context, layout, limits.blocks).map_err(CudaExecutorError::from)?;
        let arena = KvArena::remote(kv.clone())?;
        let free = context.free_bytes()?;
        let started = Instant::now();
        let mut executor = CudaExecutor::start(model, kv, &arena, limits)?;
        executor.poll(node.gpu_poll);
        let free_at_end = context.free_bytes()?;
        info!(
            memory_seconds = seconds(times.place),
            weights_seconds = seconds(times.weights),
            tune_seconds = seconds(tuned.took),
            products_timed = tuned.times.len(),
            products_left = tuned.left,
            executor_seconds = seconds(started.elapsed()),
            kv_bytes = u64::from(limits.blocks) * layout.block_bytes() as u64,
            executor_bytes = free.saturating_sub(free_at_end),
            free_bytes = free_at_end,
            "the GPU is ready"
        );
        Ok((executor, arena))
    }
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use config::LoadInput;

    use super::*;

    fn chosen(device: &str) -> Result<bool, String> {
        let flags = [("node.device", device), ("node.kernels", "/no/such/kernels.so")];
        let flags = flags.map(|(key, value)| (key.into(), value.into())).into();
        let config = Config::load(LoadInput { flags, ..LoadInput::default() }).unwrap();
        let gpu = gpu(&config, WeightFormat::Bf16);
        gpu.map(|gpu| gpu.is_some()).map_err(|error| error.to_string())
    }

    /// With kernels that are not there no machine has a GPU that can serve.
    #[test]
    fn the_cpu_serves_where_no_gpu_can_unless_one_is_demanded() {
        assert_eq!((chosen("cpu"), chosen("auto")), (Ok(false), Ok(false)));
        let error = chosen("cuda").unwrap_err();
        assert!(error.starts_with("node.device: "), "{error}");
    }
}
