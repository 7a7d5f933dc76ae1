//! Selects the device of a node, and starts the executor of a node or a rank.

use std::{
    env,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use cluster::TEXT_BYTES_MAX;
use config::{Config, Device, Transport};
use engine::{
    defaults::NodeDevice,
    executor::{
        cpu::CpuExecutor,
        cuda::{CudaExecutor, CudaExecutorError, CudaModel, CudaRank, KvShare},
    },
};
use kernels::{
    KvArena, KvLayout, WeightFormat,
    cpu::{CpuBackend, CpuGroup, CpuOptions},
    cuda::{
        AdapterSizes, Context, CudaBackend, CudaError, CudaOptions, DeviceKv, Driver,
        KernelLibrary, Link, RankedKv, TuningResult, TuningSettings, nccl_link_bytes,
        nccl_reserved_sms,
    },
};
use kv_transfer::PRECONNECTED_PAIRS_MAX;
use model::{Checkpoint, LoadProgress};
use tracing::{info, warn};

use crate::{
    settings::{self, BatchSizes, SettingsError},
    start_error::NodeStartError,
    tensor_parallel::RANKS_ON_GPUS,
};

/// Time between two log lines of the progress of loading.
const LOAD_LOG_INTERVAL: Duration = Duration::from_secs(5);
/// The folder of device files.
const DEVICES: &str = "/dev";

/// The device that a node computes on: a GPU, or one for each rank.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ChosenDevice<T> {
    Gpu(T),
    /// `fallback`: the reason why the CPU serves although the host has a GPU.
    Cpu {
        fallback: Option<String>,
    },
}

impl<T> ChosenDevice<T> {
    /// Chooses by `node.device` and `opened`, the result of opening the GPUs. An invalid setting is
    /// always an error.
    fn by(
        device: Device,
        opened: Result<T, NodeStartError>,
        host_has_gpu: bool,
    ) -> Result<Self, NodeStartError> {
        match opened {
            Ok(gpu) => Ok(Self::Gpu(gpu)),
            Err(error @ NodeStartError::Settings(_)) => Err(error),
            Err(error) if device != Device::Auto => Err(error),
            Err(_) if !host_has_gpu => Ok(Self::Cpu { fallback: None }),
            Err(error) => Ok(Self::Cpu { fallback: Some(one_line(&error.to_string())) }),
        }
    }
}

/// Opens the GPUs unless the CPU is set, chooses as [`ChosenDevice::by`] does, and warns of a
/// fallback.
fn choose<T>(
    device: Device,
    open: impl FnOnce() -> Result<T, NodeStartError>,
) -> Result<ChosenDevice<T>, NodeStartError> {
    if device == Device::Cpu {
        return Ok(ChosenDevice::Cpu { fallback: None });
    }
    let chosen = ChosenDevice::by(device, open(), host_has_gpu(Path::new(DEVICES)))?;
    if let ChosenDevice::Cpu { fallback: Some(reason) } = &chosen {
        warn!(reason, "the host has a GPU, but this node computes on the CPU");
    }
    Ok(chosen)
}

/// Returns the reason in one line, for a node's record.
fn one_line(reason: &str) -> String {
    let mut line = reason.replace(char::is_control, " ");
    line.truncate(line.floor_char_boundary(TEXT_BYTES_MAX));
    line
}

/// Reports whether the host has an NVIDIA driver, whose device files are `/dev/nvidia*`.
fn host_has_gpu(devices: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(devices) else { return false };
    entries.flatten().any(|entry| entry.file_name().as_encoded_bytes().starts_with(b"nvidia"))
}

/// Executor and KV arena of a GPU that is ready to serve.
pub(crate) struct ReadyGpu {
    pub executor: CudaExecutor,
    pub kv: Arc<DeviceKv>,
    pub arena: Arc<KvArena>,
}

/// Chooses the device of a node of one rank.
///
/// # Errors
/// An invalid setting or, with `node.device` = cuda, the reason why no GPU can serve.
pub(crate) fn gpu(
    config: &Config,
    weights: WeightFormat,
) -> Result<ChosenDevice<CudaBackend>, NodeStartError> {
    choose(config.node.device, || {
        let gpu = settings::gpus(&config.node)?.and_then(|names| names.first().copied());
        Ok(open_gpu(config, weights, gpu)?)
    })
}

/// Chooses the devices of a node's ranks: GPUs by UUID, or CPUs.
///
/// # Errors
/// As [`gpu`].
pub(crate) fn gpus_of_ranks(
    config: &Config,
    weights: WeightFormat,
) -> Result<ChosenDevice<Vec<String>>, NodeStartError> {
    choose(config.node.device, || find_for_ranks(config, weights))
}

/// Checks the GPUs here, so that one message reports a problem instead of one per rank.
fn find_for_ranks(config: &Config, weights: WeightFormat) -> Result<Vec<String>, NodeStartError> {
    let node = &config.node;
    let unsupported = |what, value, allowed| CudaError::Unsupported { what, value, allowed }.into();
    if weights == WeightFormat::Q8 {
        return Err(unsupported("the weights' format", weights.to_string(), "f32 and bf16"));
    }
    // With `node.device` = cuda, `tensor_parallel::check` has rejected such a number.
    if !RANKS_ON_GPUS.contains(&(node.tp as usize)) {
        return Err(unsupported("node.tp", node.tp.to_string(), "1, 2, 4 and 8 on GPUs"));
    }
    let named = settings::gpus(node)?;
    KernelLibrary::open(kernels(node).as_deref())?;
    let driver = Driver::open()?;
    let devices = match &named {
        Some(names) => {
            let devices = names.iter().map(|name| driver.device(Some(name)));
            devices.collect::<Result<Vec<_>, _>>()?
        }
        None => driver.devices()?.into_iter().take(node.tp as usize).collect(),
    };
    if devices.len() < node.tp as usize {
        // With auto the node falls back to the CPU, which serves any number of ranks.
        let error = SettingsError::TooFewGpus { tp: node.tp, found: devices.len() };
        return match node.device {
            Device::Auto => Err(unsupported("node.tp", error.to_string(), "as many GPUs")),
            _ => Err(error.into()),
        };
    }
    for (index, device) in devices.iter().enumerate() {
        for other in &devices[..index] {
            let fault = if device.uuid == other.uuid {
                format!("{} is named twice", device.uuid)
            } else if driver.link(device, other)? == Link::None {
                format!("{} and {} do not reach each other's memory", other.uuid, device.uuid)
            } else {
                continue;
            };
            return Err(match &node.gpu {
                Some(gpu) => SettingsError::GpusApart { gpu: gpu.clone(), fault }.into(),
                None => unsupported("the machine", fault, "GPUs that reach each other's memory"),
            });
        }
    }
    Ok(devices.into_iter().map(|device| device.uuid).collect())
}

/// Creates a context on each of these GPUs, by UUID.
pub(crate) fn contexts(gpus: &[String]) -> Result<Vec<Arc<Context>>, CudaError> {
    let driver = Driver::open()?;
    gpus.iter().map(|gpu| Context::new(driver, driver.device(Some(gpu))?)).collect()
}

/// Returns the memory for weights, activations and KV of the smallest of these GPUs.
pub(crate) fn memory<'a>(
    config: &Config,
    gpus: impl IntoIterator<Item = &'a Arc<Context>>,
) -> Result<NodeDevice, CudaError> {
    let node = &config.node;
    // With a set size of the KV the percentage does not apply.
    let percent = match (node.blocks, node.kv_memory) {
        (None, None) => u64::from(node.gpu_memory_percent),
        _ => 100,
    };
    let mut memory_bytes = u64::MAX;
    for gpu in gpus {
        let share = gpu.device().memory_bytes / 100 * percent;
        memory_bytes = memory_bytes.min(share.min(gpu.free_bytes()?));
    }
    let reserve = reserve(config, kv_transfer::has_rdma());
    Ok(NodeDevice::Gpu { memory_bytes: memory_bytes.saturating_sub(reserve) })
}

/// Loads the kernels that gather blocks and those that compute digests of KV on the ranks' GPUs.
/// The node's process needs no other kernel.
pub(crate) fn load_kv_kernels(node: &config::Node, kv: &RankedKv) {
    let library = KernelLibrary::open(kernels(node).as_deref()).map(Arc::new);
    if let Err(error) = library.as_ref().map_err(Clone::clone).and_then(|it| kv.move_with(it)) {
        warn!(%error, "KV for nccl is gathered by copies instead of a kernel");
    }
    warn_of_host_digests(library.and_then(|library| kv.digest_with(&library)));
}

/// Warns that the host computes the digests of KV, because the GPU cannot.
fn warn_of_host_digests(digested: Result<(), CudaError>) {
    if let Err(error) = digested {
        warn!(%error, "digests of KV are computed on the host instead of the GPU");
    }
}

/// Opens the GPU with this UUID, or the first.
pub(crate) fn open_gpu(
    config: &Config,
    weights: WeightFormat,
    gpu: Option<&str>,
) -> Result<CudaBackend, CudaError> {
    let node = &config.node;
    let (kv, reserved_sms) = (settings::kv_format(&config.model), reserved_sms(config));
    let slots = settings::adapter_slots(&config.model, true);
    let adapters = AdapterSizes { slots, rank_max: config.model.adapter_rank_max as usize };
    let options = CudaOptions { kv, reserved_sms, adapters, ..CudaOptions::new(weights) };
    let backend = CudaBackend::open(gpu, kernels(node).as_deref(), options)?;
    let device = backend.context().device();
    let kernels = backend.library().build();
    info!(gpu = device.uuid, name = device.name, kernels, "found a GPU");
    Ok(backend)
}

fn kernels(node: &config::Node) -> Option<PathBuf> {
    node.kernels.clone().or_else(|| KernelLibrary::in_folder_of(&env::current_exe().ok()?))
}

/// Loads the weights and allocates the KV cache: the configured number of blocks, or as many as
/// fit. `layout` is the layout of a whole block; a rank has its part of every block and of the
/// weights.
pub(crate) fn start_gpu(
    backend: CudaBackend,
    config: &Config,
    checkpoint: &Checkpoint,
    layout: KvLayout,
    sizes: BatchSizes,
    mut rank: Option<&mut CudaRank>,
) -> Result<ReadyGpu, NodeStartError> {
    let node = &config.node;
    let backend = match &mut rank {
        Some(rank) => rank.join(backend)?,
        None => backend,
    };
    let (context, library) = (Arc::clone(backend.context()), Arc::clone(backend.library()));
    let is_rank = rank.is_some();
    let of = backend.group().map_or(1, |group| group.ranks());
    let set = settings::block_count_set(node, layout)?;
    let limits_of = |blocks| {
        let model = checkpoint.config();
        settings::executor_limits(config, sizes, model, blocks)
    };
    let limits = limits_of(set.unwrap_or(u32::MAX))?;
    let mut model = CudaModel::load(checkpoint, backend, &limits, &mut load_log())?;
    let times = model.times();
    let mut tuned = TuningResult::default();
    if !node.gpu_tune.is_zero() {
        let folder = node.gpu_tune_dir.clone().or_else(|| config.cache.clone());
        tuned = model.tune(&limits, &TuningSettings { folder, within: node.gpu_tune })?;
        for reason in &tuned.faults {
            warn!(reason, "cannot store the tuned GEMMs");
        }
    }
    if settings::has_gpu_shadow(config) {
        // Before the KV cache, which takes the memory that is left.
        model.allocate_shadow(settings::chunk_buffers(config))?;
    }
    if settings::updates_in_place(config) {
        model.update_in_place(settings::chunk_buffers(config))?;
    }
    let own_layout = layout.with_heads(layout.kv_head_count / of);
    let fitting = match set {
        Some(blocks) => blocks,
        None => {
            let reserve = reserve(config, kv_transfer::has_rdma());
            let share = KvShare { percent: node.gpu_memory_percent, reserve };
            // The default minimum is the KV of one full step: a node with less KV cannot serve.
            let one_step = (checkpoint.config().context_tokens as u32).min(limits.step_tokens);
            let tokens_min = node.sequence_tokens_max.unwrap_or(one_step);
            model.kv_blocks(&limits, own_layout, share, tokens_min)?
        }
    };
    // Barrier of all ranks: an all-reduce would time out while a rank still loads or tunes.
    let limits = limits_of(rank.map_or(Ok(fitting), |rank| rank.least(fitting))?)?;
    let kv = DeviceKv::new(&context, own_layout, limits.blocks).map_err(CudaExecutorError::from)?;
    if !is_rank {
        // Peers may require integrity values, and the host tier needs digests. With ranks, the node
        // process loads these kernels.
        warn_of_host_digests(kv.digest_with(Arc::clone(&library)));
        kv.move_with(library).map_err(CudaExecutorError::from)?;
    }
    let arena = KvArena::remote(kv.clone())?;
    let free = context.free_bytes()?;
    let started = Instant::now();
    let mut executor = CudaExecutor::start(model, kv.clone(), &arena, limits)?;
    executor.set_polling(node.gpu_poll);
    let free_at_end = context.free_bytes()?;
    info!(
        memory_seconds = times.place.as_secs_f64(),
        weights_seconds = times.weights.as_secs_f64(),
        tune_seconds = tuned.took.as_secs_f64(),
        gemms_tuned = tuned.times.len(),
        gemms_left = tuned.left,
        executor_seconds = started.elapsed().as_secs_f64(),
        kv_bytes = u64::from(limits.blocks) * own_layout.block_bytes() as u64,
        executor_bytes = free.saturating_sub(free_at_end),
        free_bytes = free_at_end,
        "the GPU is ready"
    );
    Ok(ReadyGpu { executor, kv, arena })
}

/// Starts the executor on these threads and CPUs. The backend of a rank joins the group of its
/// node.
pub(crate) fn start_cpu(
    config: &Config,
    checkpoint: &Checkpoint,
    (threads, cpus): (usize, &[u32]),
    arena: &Arc<KvArena>,
    sizes: BatchSizes,
    group: Option<CpuGroup>,
) -> Result<CpuExecutor, NodeStartError> {
    let node = &config.node;
    let blocks = arena.block_count();
    let model = checkpoint.config();
    let limits = settings::executor_limits(config, sizes, model, blocks)?;
    let weights = settings::weight_format(config.model.dtype);
    let options = CpuOptions { weights, threads, isa: settings::isa(node.isa) };
    let mut backend = CpuBackend::on(options, cpus)?;
    info!(
        isa = backend.isa_name(),
        threads,
        cpus = settings::shown_cpus(cpus),
        "computes on the CPU"
    );
    if let Some(group) = group {
        backend = backend.in_group(group);
    }
    let executor = CpuExecutor::start(checkpoint, backend, arena.clone(), limits, &mut load_log())?;
    if settings::updates_in_place(config) {
        executor.update_in_place();
    }
    Ok(executor)
}

/// Returns a callback that logs the progress of loading the weights, at most every
/// [`LOAD_LOG_INTERVAL`].
fn load_log() -> impl FnMut(LoadProgress) {
    let mut last = Instant::now();
    move |LoadProgress { parameters_done, parameters_total }| {
        if is_due(&mut last, Instant::now()) && parameters_done < parameters_total {
            let percent = 100 * u128::from(parameters_done) / u128::from(parameters_total);
            info!(percent, parameters = parameters_done, "loading the weights");
        }
    }
}

/// Returns whether a log line is due. If so, restarts the interval at `now`.
fn is_due(last: &mut Instant, now: Instant) -> bool {
    let is_due = now.saturating_duration_since(*last) >= LOAD_LOG_INTERVAL;
    if is_due {
        *last = now;
    }
    is_due
}

/// Returns the GPU memory in bytes that the KV cache leaves free: `node.gpu_reserve`, and with
/// transport `nccl`, or `auto` on a host with RDMA adapters, the memory of the nccl links of the
/// pairs that connect in advance.
fn reserve(config: &Config, has_rdma: bool) -> u64 {
    let choice = settings::transport_choice(config.transfer.transport);
    let may_use_nccl =
        choice.offers_nccl_between_hosts(has_rdma, config.cluster.tls_cert.is_some());
    let pairs = if may_use_nccl { PRECONNECTED_PAIRS_MAX as u64 } else { 0 };
    config.node.gpu_reserve.bytes() + pairs * nccl_link_bytes(config.transfer.nccl_max_ctas)
}

/// Returns the SMs that decode steps leave to NCCL: those of one pair, because two transfers at a
/// time are rare. With ranks it is 0: NCCL's kernels run in the node's process, which shares the
/// GPU with the rank by time slices.
fn reserved_sms(config: &Config) -> u32 {
    match config.transfer.transport {
        Transport::Nccl if config.node.tp == 1 => nccl_reserved_sms(config.transfer.nccl_max_ctas),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use config::LoadInput;

    use super::*;

    fn configured(flags: &[(&str, &str)]) -> Config {
        let flags = flags.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        Config::load(LoadInput { flags, ..LoadInput::default() }).unwrap()
    }

    #[test]
    fn nccl_pairs_have_gpu_memory_in_addition_to_the_reserve() {
        let reserved = |flags: &[_]| reserve(&configured(flags), false);
        assert_eq!(reserved(&[]), 1 << 30);
        assert_eq!(
            reserved(&[("transfer.transport", "ipc"), ("node.gpu_reserve", "2GiB")]),
            2 << 30
        );
        let nccl = ("transfer.transport", "nccl");
        let of_a_pair = |flags: &[_]| (reserved(flags) - (1 << 30)) / PRECONNECTED_PAIRS_MAX as u64;
        // Three slots of 64 MiB, and 6 MiB of NCCL's own memory for each CTA of two communicators.
        assert_eq!(of_a_pair(&[nccl]), (192 + 6 * 4) << 20);
        assert_eq!(of_a_pair(&[nccl, ("transfer.nccl_max_ctas", "16")]), (192 + 6 * 32) << 20);
        // With RDMA adapters auto may use nccl.
        let with_rdma = |flags: &[_]| reserve(&configured(flags), true);
        assert_eq!(with_rdma(&[]), reserved(&[nccl]));
        assert_eq!(with_rdma(&[("transfer.transport", "tcp")]), 1 << 30);
    }

    #[test]
    fn sms_are_reserved_for_nccl_only() {
        let spare = |flags: &[_]| reserved_sms(&configured(flags));
        let nccl = ("transfer.transport", "nccl");
        assert_eq!(spare(&[]), 0);
        assert_eq!(spare(&[nccl]), 4);
        for (set, spared) in [("1", 2), ("2", 2), ("3", 2), ("4", 4)] {
            assert_eq!(spare(&[nccl, ("transfer.nccl_max_ctas", set)]), spared, "{set}");
        }
        assert_eq!(spare(&[nccl, ("transfer.nccl_max_ctas", "8")]), 0, "steps would be longer");
        assert_eq!(spare(&[nccl, ("node.tp", "2")]), 0, "a rank's process has turns of its own");
    }

    fn chosen(device: &str) -> Result<bool, String> {
        let flags = [("node.device", device), ("node.kernels", "/no/such/kernels.so")];
        let flags = flags.map(|(key, value)| (key.into(), value.into())).into();
        let config = Config::load(LoadInput { flags, ..LoadInput::default() }).unwrap();
        let gpu = gpu(&config, WeightFormat::Bf16);
        gpu.map(|chosen| matches!(chosen, ChosenDevice::Gpu(_))).map_err(|error| error.to_string())
    }

    /// Without the kernel library no machine has a GPU that can serve.
    #[test]
    fn auto_device_falls_back_to_the_cpu_and_cuda_does_not() {
        assert_eq!((chosen("cpu"), chosen("auto")), (Ok(false), Ok(false)));
        let error = chosen("cuda").unwrap_err();
        assert!(error.starts_with("node.device: "), "{error}");
    }

    #[test]
    fn invalid_gpu_ranks_are_rejected_with_the_reason() {
        let chosen = |device: &str, tp: &str, weights| {
            let flags =
                [("node.device", device), ("node.tp", tp), ("node.kernels", "/no/such/kernels.so")];
            let flags = flags.map(|(key, value)| (key.into(), value.into())).into();
            let config = Config::load(LoadInput { flags, ..LoadInput::default() }).unwrap();
            let chosen = gpus_of_ranks(&config, weights);
            chosen.map(|it| matches!(it, ChosenDevice::Gpu(_))).map_err(|error| error.to_string())
        };
        assert_eq!(chosen("cpu", "2", WeightFormat::Bf16), Ok(false));
        assert_eq!(chosen("auto", "2", WeightFormat::Bf16), Ok(false));
        for (tp, weights, words) in [
            ("3", WeightFormat::Bf16, "1, 2, 4 and 8 on GPUs"),
            ("2", WeightFormat::Q8, "f32 and bf16"),
            ("2", WeightFormat::Bf16, "/no/such/kernels.so"),
        ] {
            let error = chosen("cuda", tp, weights).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn the_cpu_is_a_fallback_only_on_a_host_with_a_gpu() {
        let missing = || {
            let (what, value) = ("the weights' format", "q8\n".to_owned());
            Err::<(), _>(CudaError::Unsupported { what, value, allowed: "f32 and bf16" }.into())
        };
        let by = |device, opened, host_has_gpu| {
            ChosenDevice::by(device, opened, host_has_gpu).map_err(|error| error.to_string())
        };
        assert_eq!(by(Device::Auto, Ok(()), true), Ok(ChosenDevice::Gpu(())));
        assert_eq!(by(Device::Auto, missing(), false), Ok(ChosenDevice::Cpu { fallback: None }));
        assert!(by(Device::Cuda, missing(), true).is_err());
        let Ok(ChosenDevice::Cpu { fallback: Some(reason) }) = by(Device::Auto, missing(), true)
        else {
            panic!("the host has a GPU");
        };
        assert!(reason.contains("q8") && !reason.contains('\n'), "{reason:?}");
        assert_eq!(one_line(&"ä".repeat(200)).len(), TEXT_BYTES_MAX);
    }

    #[test]
    fn progress_is_logged_once_per_interval() {
        let start = Instant::now();
        let mut last = start;
        let is_due = |seconds: &u64| is_due(&mut last, start + Duration::from_secs(*seconds));
        assert_eq!((0..20).filter(is_due).collect::<Vec<u64>>(), [5, 10, 15]);
    }

    #[test]
    fn a_host_has_a_gpu_when_its_driver_has_device_files() {
        let devices = tempfile::tempdir().unwrap();
        assert!(!host_has_gpu(devices.path()) && !host_has_gpu(&devices.path().join("none")));
        std::fs::write(devices.path().join("null"), "").unwrap();
        assert!(!host_has_gpu(devices.path()));
        std::fs::write(devices.path().join("nvidiactl"), "").unwrap();
        assert!(host_has_gpu(devices.path()));
    }
}
