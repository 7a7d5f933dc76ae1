//! Opens the model of a node, and packs its weights on the device.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cluster::{Epoch, ModelIdentity, Role};
use config::{Config, hub};
use engine::{
    defaults::{self, Defaults, NodeDevice, NodeTraits},
    executor::{Executor, StepTimes},
};
use kernels::{KvArena, KvLayout, Shard, WeightFormat, cpu::affinity};
use model::{Checkpoint, ModelConfig, ModelError};
use telemetry::Metrics;
use tracing::info;

use crate::{
    adapters::NodeAdapters,
    attempt::SAMPLING_VERSION,
    device::{self, ChosenDevice, ReadyGpu},
    identity,
    memory_limit::{self, HostBytes, MemoryShare},
    settings::{self, BatchSizes, SettingsError},
    start_error::NodeStartError,
    tensor_parallel,
    weights::CpuPacking,
};

/// Time-out of fetching and loading the model. `/live` answers meanwhile, so no probe ends a load
/// that hangs.
const LOAD_MAX: Duration = Duration::from_secs(3600);

/// An opened model.
pub(crate) struct Loaded {
    pub path: PathBuf,
    pub model: ModelConfig,
    pub host_bytes: HostBytes,
    /// `None`: on GPUs.
    pub cpu: Option<CpuPacking>,
    /// [`Checkpoint::int4_layout`] of the weights.
    pub int4_layout: u64,
    pub arena: Arc<KvArena>,
    pub identity: ModelIdentity,
    pub defaults: Defaults,
    /// CPUs of the compute threads; empty means any CPU.
    pub cpus: Vec<u32>,
    /// Reason why the CPU serves although the host has a GPU.
    pub cpu_fallback: Option<String>,
    /// Whether the executor returns pooled values: only with one rank.
    pub pooling: bool,
    /// Newest version of [`proto::v1::Sampling`] that the executor supports.
    pub sampling_version: u32,
    pub adapters: NodeAdapters,
}

/// Fetches, opens and packs the model within [`LOAD_MAX`], and exports how long that took. Returns
/// the device beside it.
pub(crate) async fn load(
    role: Role,
    config: &Config,
    epoch: Epoch,
    metrics: &Metrics,
) -> Result<(Loaded, Box<dyn Executor>), NodeStartError> {
    let began = Instant::now();
    let loading = tokio::time::timeout(LOAD_MAX, load_off_thread(role, config.clone(), epoch.0));
    let loaded = loading.await.map_err(|_| NodeStartError::LoadTimeout { within: LOAD_MAX })??;
    let load_time = began.elapsed().as_secs_f64();
    metrics.observe_f64("baton.model.load.duration", move |it| it.observe(load_time, &[]));
    Ok(loaded)
}

/// Opens and packs the model, off the async threads.
async fn load_off_thread(
    role: Role,
    config: Config,
    epoch: u128,
) -> Result<(Loaded, Box<dyn Executor>), NodeStartError> {
    // Checked before a download that may take hours.
    let threads = settings::threads(&config.node)?;
    let path = config.hub.obtain(config.model.required_path()?, hub::Parts::All).await?;
    tokio::task::spawn_blocking(move || load_blocking(role, &config, epoch, &path, threads))
        .await
        .map_err(NodeStartError::Load)?
}

fn load_blocking(
    role: Role,
    config: &Config,
    epoch: u128,
    path: &Path,
    (threads, cpus): (usize, Vec<u32>),
) -> Result<(Loaded, Box<dyn Executor>), NodeStartError> {
    // This thread packs the weights, and the compute thread inherits its CPU: pages that forward
    // passes read are first touched on that NUMA node. Rank processes would inherit the CPU too, so
    // each pins itself.
    let own_cpu = cpus.first().filter(|_| config.node.tp == 1);
    let confined = own_cpu.map(|cpu| affinity::confine(&[*cpu])).transpose();
    let _confined = confined.map_err(NodeStartError::Affinity)?;
    let checkpoint = Checkpoint::open(path, settings::load_format(config.model.load_format))?;
    let checkpoint = checkpoint.hashing_packed();
    let model = checkpoint.config();
    info!(
        path = %path.display(),
        format = checkpoint.description(),
        parameters = model.parameter_count(),
        layers = model.layer_count,
        vocabulary = model.vocab_size,
        context_tokens = model.context_tokens,
        "opened the model"
    );
    thread::scope(|scope| {
        // Packing hashes the weights. This process packs none for ranks, so it hashes them while
        // the ranks load.
        let beside_ranks = (config.node.tp > 1).then(|| {
            scope.spawn(|| {
                let _confined = (!cpus.is_empty()).then(|| affinity::confine(&cpus));
                checkpoint.model_fingerprint()
            })
        });
        let fingerprint = || match beside_ranks {
            Some(fingerprint) => fingerprint.join().expect("hashing does not panic"),
            None => checkpoint.model_fingerprint(),
        };
        load_weights(role, config, epoch, path, (threads, cpus.clone()), &checkpoint, fingerprint)
    })
}

/// Packs the weights on the device that the settings name, and measures its steps.
fn load_weights(
    role: Role,
    config: &Config,
    epoch: u128,
    path: &Path,
    (threads, cpus): (usize, Vec<u32>),
    checkpoint: &Checkpoint,
    fingerprint: impl FnOnce() -> Result<u128, ModelError>,
) -> Result<(Loaded, Box<dyn Executor>), NodeStartError> {
    let started = Instant::now();
    let (model, tp) = (checkpoint.config(), config.node.tp);
    let weights = settings::weight_format(config.model.dtype);
    let layout = model.block_layout(settings::kv_format(&config.model));
    tensor_parallel::check(model, &config.node)?;
    let traits = |device| settings::node_traits(config, role, checkpoint, device);
    let (mut executor, arena, traits, cpus, cpu_fallback): (Box<dyn Executor>, _, _, _, _) = if tp
        > 1
    {
        let (gpus, cpu_fallback) = match device::gpus_of_ranks(config, weights)? {
            ChosenDevice::Gpu(gpus) => (Some(gpus), None),
            ChosenDevice::Cpu { fallback } => (None, fallback),
        };
        // This process's CUDA contexts take memory too, so they exist before the ranks measure the
        // memory left for KV.
        let contexts = gpus.as_deref().map(device::contexts).transpose()?;
        let traits = traits(match &contexts {
            Some(contexts) => device::memory(config, contexts)?,
            None => NodeDevice::Cpu,
        })?;
        let sizes = batch_sizes(&traits)?;
        if gpus.is_none() {
            checked_blocks(config, layout, u64::from(tp) * traits.model.weights)?;
        }
        let (executor, arena) =
            tensor_parallel::start(config, epoch, path, checkpoint, gpus, sizes)?;
        (Box::new(executor), arena, traits, Vec::new(), cpu_fallback)
    } else {
        match device::gpu(config, weights)? {
            ChosenDevice::Gpu(backend) => {
                let traits = traits(device::memory(config, [backend.context()])?)?;
                let sizes = batch_sizes(&traits)?;
                let ReadyGpu { executor, arena, .. } =
                    device::start_gpu(backend, config, checkpoint, layout, sizes, None)?;
                (Box::new(executor), arena, traits, Vec::new(), None)
            }
            ChosenDevice::Cpu { fallback } => {
                let traits = traits(NodeDevice::Cpu)?;
                let sizes = batch_sizes(&traits)?;
                let blocks = checked_blocks(config, layout, traits.model.weights)?;
                let arena = KvArena::host(layout, blocks)?;
                let threads = (threads, &cpus[..]);
                let executor = device::start_cpu(config, checkpoint, threads, &arena, sizes, None)?;
                (Box::new(executor), arena, traits, cpus, fallback)
            }
        }
    };
    let is_gpu = matches!(traits.device, NodeDevice::Gpu { .. });
    let cpu =
        (!is_gpu).then(|| CpuPacking { weights, shard: settings::shard(&config.node, model, 0) });
    let host_bytes = host_bytes(&traits, tp, kv_bytes(layout, arena.block_count()));
    log_dequantized(checkpoint, settings::shard(&config.node, model, 0), (weights, is_gpu));
    let slots = executor.adapter_slots();
    let adapters = NodeAdapters::start(config, model, is_gpu, slots, host_bytes)?;
    let fingerprint = fingerprint()?;
    // The weights are those of one version of the files.
    checkpoint.check_unchanged()?;
    info!(
        dtype = %weights,
        kv_dtype = %layout.format,
        fingerprint = format_args!("{fingerprint:032x}"),
        ranks = tp,
        blocks = arena.block_count(),
        block_bytes = layout.block_bytes(),
        seconds = format_args!("{:.3}", started.elapsed().as_secs_f64()),
        "loaded the weights"
    );
    let times =
        traits.needs_step_times().then(|| StepTimes::measure(&mut *executor)).transpose()?;
    let defaults = defaults::derive(&traits, times.as_ref()).map_err(SettingsError::from)?;
    log_reasons(&defaults);
    let identity =
        identity::model_identity(fingerprint, weights, layout, &model.kv_groups(layout.format));
    let loaded = Loaded {
        path: path.to_owned(),
        model: model.clone(),
        host_bytes,
        cpu,
        int4_layout: checkpoint.int4_layout(),
        arena,
        identity,
        defaults,
        cpus,
        cpu_fallback,
        pooling: tp == 1,
        adapters,
        // Executors of several GPUs were not tested with these sampling parameters.
        sampling_version: if is_gpu && tp > 1 { 0 } else { SAMPLING_VERSION },
    };
    Ok((loaded, executor))
}

/// Logs how many matrices in INT4 do not stay packed.
fn log_dequantized(checkpoint: &Checkpoint, shard: Shard, (weights, is_gpu): (WeightFormat, bool)) {
    let dequantized = defaults::int4_sizes(checkpoint, shard, weights, is_gpu).dequantized;
    if is_gpu && weights != WeightFormat::Bf16 && checkpoint.has_int4() {
        info!(
            "all matrices in INT4 are converted to {weights}; expected model.dtype = \"bf16\" to \
             keep them packed"
        );
    } else if is_gpu && dequantized > 0 {
        info!(
            dequantized,
            "matrices in INT4 are dequantized: output heads, and matrices with groups of other \
             columns than neighbours or with parts that differ in format or groups"
        );
    } else if dequantized > 0 {
        info!(
            dequantized,
            "matrices in INT4 are dequantized: parts of a fused matrix differ in format or groups"
        );
    }
}

/// Returns the number of KV blocks of a CPU node whose weights take `weights` bytes.
///
/// # Errors
/// Weights and KV exceed the memory limit.
fn checked_blocks(config: &Config, layout: KvLayout, weights: u64) -> Result<u32, NodeStartError> {
    let blocks = settings::block_count(&config.node, layout)?;
    let share = MemoryShare::of_node(config.node.nodes_per_container);
    memory_limit::check(share, weights, kv_bytes(layout, blocks))?;
    Ok(blocks)
}

fn kv_bytes(layout: KvLayout, blocks: u32) -> u64 {
    u64::from(blocks) * layout.block_bytes() as u64
}

fn log_reasons(defaults: &Defaults) {
    let reasons: Vec<String> = defaults.reasons.iter().map(ToString::to_string).collect();
    info!("derived the settings that are auto: {}", reasons.join("; "));
}

/// Returns the memory of the host that weights and KV take.
fn host_bytes(traits: &NodeTraits, tp: u32, kv: u64) -> HostBytes {
    match traits.device {
        NodeDevice::Cpu => HostBytes { weights: u64::from(tp) * traits.model.weights, kv },
        NodeDevice::Gpu { .. } => HostBytes::default(),
    }
}

/// Returns the batch for which the executor allocates memory.
fn batch_sizes(traits: &NodeTraits) -> Result<BatchSizes, SettingsError> {
    Ok(BatchSizes::from(&defaults::derive(traits, None)?))
}
