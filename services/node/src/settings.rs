//! Converts the node's settings to the types of engine and transfers.

use std::{fs, io, path::Path, thread::available_parallelism};

use cluster::{Epoch, ModelIdentity, NodeId, Role};
use config::{Config, ConfigError, CpuList, WeightPlace};
use engine::{
    defaults::{Defaults, DefaultsError, ModelSizes, NodeDevice, NodeTraits, SetValues},
    executor::{ExecutorLimits, Speculation},
};
use kernels::{
    KvFormat, KvLayout, Shard, WeightFormat,
    cpu::{Isa, affinity, threads::THREADS_MAX},
};
use kv_transfer::{
    ClusterSecret, SecretTooShort, TransferConfig, TransferKind, TransferLimits, TransportChoice,
    TransportConfig,
};
use model::{Checkpoint, LoadFormat, ModelConfig};
use serde::{Deserialize, Serialize};

use crate::memory_limit::MemoryShare;

/// The sections that a node reads.
pub const SECTIONS: &[config::Section] = &[
    config::Section::Model,
    config::Section::Node,
    config::Section::Tier,
    config::Section::Transfer,
    config::Section::Weights,
    config::Section::Cluster,
    config::Section::Telemetry,
];

/// A setting that is missing, or that does not fit the model or the machine.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("cluster.secret: {0}")]
    Secret(#[from] SecretTooShort),
    #[error(
        "node.kv_memory = {bytes} bytes hold {blocks} KV blocks of {block_bytes} bytes; at least 2 are needed"
    )]
    TooFewBlocks { bytes: u64, blocks: u64, block_bytes: usize },
    #[error(
        "cannot hold the KV of 16 tokens in {blocks} KV blocks; expected at least {}, one for each KV \
         group of the model and {state} for its recurrent state (node.kv_memory or node.blocks)",
        groups + state
    )]
    TooFewForGroups { blocks: u32, groups: usize, state: usize },
    #[error(
        "weights of {} MiB and KV of {} MiB exceed {share} of {} MiB; expected a smaller node.kv_memory, or a limit above {} MiB",
        weights >> 20, kv >> 20, share.limit >> 20, share.limit_for(weights.saturating_add(*kv)) >> 20
    )]
    MemoryLimit { weights: u64, kv: u64, share: MemoryShare },
    #[error("{} MiB are needed; expected at most {} MiB, the memory that is left", bytes >> 20, left >> 20)]
    NoMemory { bytes: u64, left: u64 },
    #[error("node.cpus = {cpus}: this process has no CPU {missing}; expected {allowed}")]
    NoSuchCpu { cpus: CpuList, missing: String, allowed: String },
    #[error("node.numa_node = {numa_node}: {reason}; expected {allowed}")]
    NoSuchNumaNode { numa_node: u32, reason: String, allowed: String },
    #[error("node.threads = {threads}: {key} has {cpus} CPUs, one for each; expected 1 to {cpus}")]
    TooManyThreads { threads: u32, key: &'static str, cpus: usize },
    #[error("{key}: cannot pin threads to CPUs on this machine: {reason}")]
    NoAffinity { key: &'static str, reason: io::Error },
    #[error(
        "node.tp = {tp}: the ranks must divide the model's {kv_heads} KV heads and {shared} evenly; \
         expected{on} {allowed}"
    )]
    Ranks { tp: u32, on: &'static str, kv_heads: usize, shared: String, allowed: String },
    #[error("node.expert_parallel = true: {reason}; expected auto or false")]
    ExpertParallel { reason: &'static str },
    #[error(
        "node.gpu = {gpu}: {given} GPUs are named for node.tp = {tp}; expected one for each rank, all \
         different, separated by commas"
    )]
    GpusOfRanks { gpu: String, given: usize, tp: u32 },
    #[error(
        "node.gpu = {gpu}: {fault}; expected different GPUs that reach each other's memory, one for \
         each rank"
    )]
    GpusApart { gpu: String, fault: String },
    #[error("node.tp = {tp}: this machine has {found} GPUs; expected at least one GPU per rank")]
    TooFewGpus { tp: u32, found: usize },
    #[error(transparent)]
    Defaults(#[from] DefaultsError),
    #[error("node.sequence_tokens_max = {value}: the model reaches {context_tokens} tokens")]
    BeyondContext { value: u32, context_tokens: usize },
}

/// Default bytes of KV in host memory.
const KV_MEMORY_BYTES: u64 = 1 << 30;

/// Returns the number of blocks of an arena in host memory: the setting, or as many as fit into the
/// default size.
pub(crate) fn block_count(node: &config::Node, layout: KvLayout) -> Result<u32, SettingsError> {
    Ok(match block_count_set(node, layout)? {
        Some(blocks) => blocks,
        None => blocks_of(KV_MEMORY_BYTES, layout)?,
    })
}

/// Returns the number of blocks if `node.blocks` or `node.kv_memory` is set.
pub(crate) fn block_count_set(
    node: &config::Node,
    layout: KvLayout,
) -> Result<Option<u32>, SettingsError> {
    match (node.blocks, node.kv_memory) {
        (Some(blocks), _) => Ok(Some(blocks)),
        (None, Some(memory)) => blocks_of(memory.bytes(), layout).map(Some),
        (None, None) => Ok(None),
    }
}

fn blocks_of(bytes: u64, layout: KvLayout) -> Result<u32, SettingsError> {
    let block_bytes = layout.block_bytes();
    // The maximum of `node.blocks`.
    let blocks = (bytes / block_bytes.max(1) as u64).min(1 << 24);
    if blocks < 2 {
        return Err(SettingsError::TooFewBlocks { bytes, blocks, block_bytes });
    }
    Ok(blocks as u32)
}

/// Returns the GPU of each rank as listed in `node.gpu`; `None` if unset: the ranks use the
/// driver's order.
pub(crate) fn gpus(node: &config::Node) -> Result<Option<Vec<&str>>, SettingsError> {
    let Some(gpu) = &node.gpu else { return Ok(None) };
    let names: Vec<&str> = gpu.split(',').map(str::trim).collect();
    if names.len() != node.tp as usize {
        let (gpu, given, tp) = (gpu.clone(), names.len(), node.tp);
        return Err(SettingsError::GpusOfRanks { gpu, given, tp });
    }
    Ok(Some(names))
}

/// Returns the shard of a rank.
///
/// # Panics
/// When the node has no such rank.
pub(crate) fn shard(node: &config::Node, model: &ModelConfig, rank: usize) -> Shard {
    let ranks = node.tp as usize;
    let set = node.expert_parallel.set();
    let has_whole_experts = set.unwrap_or_else(|| model.prefers_whole_experts(ranks));
    let shard = Shard::new(rank, ranks).expect("the settings allow so many ranks");
    shard.with_whole_experts(has_whole_experts)
}

/// Returns the traits from which the node's defaults are derived; `device` is the device of one
/// rank.
pub(crate) fn node_traits(
    config: &Config,
    role: Role,
    checkpoint: &Checkpoint,
    device: NodeDevice,
) -> Result<NodeTraits, SettingsError> {
    let (node, transfer, model) = (&config.node, &config.transfer, checkpoint.config());
    let weights = weight_format(config.model.dtype);
    let kv = kv_format(&config.model);
    let layout = model.block_layout(kv);
    let ranks = node.tp as usize;
    let shard = shard(node, model, 0);
    let kv_bytes = block_count_set(node, layout)?
        .map(|blocks| u64::from(blocks) * (layout.block_bytes() / ranks) as u64);
    let is_gpu = matches!(device, NodeDevice::Gpu { .. });
    let sizes = ModelSizes::of(checkpoint, shard, (weights, kv), is_gpu);
    let device = match device {
        NodeDevice::Gpu { memory_bytes } if has_gpu_shadow(config) => {
            let taken = sizes.weights.saturating_add(chunk_memory(config));
            NodeDevice::Gpu { memory_bytes: memory_bytes.saturating_sub(taken) }
        }
        NodeDevice::Gpu { memory_bytes } if updates_in_place(config) => {
            NodeDevice::Gpu { memory_bytes: memory_bytes.saturating_sub(chunk_memory(config)) }
        }
        device => device,
    };
    Ok(NodeTraits {
        device,
        prefers_decode: role == Role::Decode,
        model: sizes,
        set: SetValues {
            step_tokens: node.step_tokens.set(),
            chunk_tokens: node.chunk_tokens.set(),
            slots: node.slots.set(),
            waiting_max: node.waiting_max.set(),
            itl_max: node.itl_max.set(),
            transfer_bytes: transfer.chunk_bytes.set().map(config::ByteSize::bytes),
            kv_bytes,
        },
    })
}

/// Returns whether a GPU holds a second copy of the weights for updates.
pub(crate) fn has_gpu_shadow(config: &Config) -> bool {
    config.weights.place == WeightPlace::Shadow
}

/// Returns whether updates overwrite the weights in use.
pub(crate) fn updates_in_place(config: &Config) -> bool {
    config.weights.place == WeightPlace::InPlace
}

/// Returns the number and the size in bytes of the buffers for chunks of weights that a trainer
/// broadcasts; 0 with tensor parallelism, which supports no broadcasts.
pub(crate) fn chunk_buffers(config: &Config) -> (usize, usize) {
    let buffers = if config.node.tp == 1 { config.weights.buffers as usize } else { 0 };
    (buffers, config.weights.chunk_bytes.bytes() as usize)
}

fn chunk_memory(config: &Config) -> u64 {
    let (buffers, bytes) = chunk_buffers(config);
    (buffers as u64).saturating_mul(bytes as u64)
}

/// Largest batch of an executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BatchSizes {
    pub slots: u32,
    pub step_tokens: u32,
}

impl From<&Defaults> for BatchSizes {
    fn from(defaults: &Defaults) -> Self {
        Self { slots: defaults.slots, step_tokens: defaults.step_tokens_max }
    }
}

/// Returns the limits of the executor.
pub(crate) fn executor_limits(
    config: &Config,
    sizes: BatchSizes,
    model: &ModelConfig,
    blocks: u32,
) -> Result<ExecutorLimits, SettingsError> {
    let node = &config.node;
    let context_tokens = model.context_tokens;
    let sequence_tokens = match node.sequence_tokens_max {
        Some(value) if value as usize > context_tokens => {
            return Err(SettingsError::BeyondContext { value, context_tokens });
        }
        Some(value) => value,
        None => u32::try_from(context_tokens).unwrap_or(u32::MAX),
    };
    let groups = model.kv_groups(kv_format(&config.model));
    let pool_tokens = u32::try_from(groups.tokens(blocks as usize)).unwrap_or(u32::MAX);
    if pool_tokens == 0 {
        let (groups, state) = (groups.count(), groups.state_entries());
        return Err(SettingsError::TooFewForGroups { blocks, groups, state });
    }
    Ok(ExecutorLimits {
        slots: sizes.slots,
        step_tokens: sizes.step_tokens,
        sequence_tokens: sequence_tokens.min(pool_tokens),
        blocks,
        depth: node.depth,
        vocabulary: u32::try_from(model.vocab_size).unwrap_or(u32::MAX),
        // The state after a rejected token cannot be undone.
        speculation: speculation(node).filter(|_| groups.state_entries() == 0),
    })
}

fn speculation(node: &config::Node) -> Option<Speculation> {
    match node.speculate {
        config::Speculate::Off => None,
        config::Speculate::Ngram => Some(Speculation {
            row_drafts: node.speculate_tokens,
            step_tokens: node.speculate_step_tokens,
            ngram_min: node.speculate_ngram_min,
            ngram_max: node.speculate_ngram_max,
            uniform: false,
        }),
    }
}

/// Slots of adapters of a node on CPUs, where an empty slot takes no memory. Eight adapters of rank
/// 16 for a model of 8B parameters take 1.3 GB.
const CPU_ADAPTER_SLOTS: usize = 8;

/// Returns the number of slots of adapters. A slot takes memory of a GPU even without an adapter.
pub(crate) fn adapter_slots(model: &config::Model, is_gpu: bool) -> usize {
    let listed = model.adapters.len();
    let derived = if is_gpu { listed } else { listed.max(CPU_ADAPTER_SLOTS) };
    model.adapter_slots.set().map_or(derived, |slots| slots as usize)
}

pub(crate) fn weight_format(dtype: config::Dtype) -> WeightFormat {
    match dtype {
        config::Dtype::F32 => WeightFormat::F32,
        config::Dtype::Bf16 => WeightFormat::Bf16,
        config::Dtype::Q8 => WeightFormat::Q8,
        config::Dtype::Fp8 => WeightFormat::Fp8,
    }
}

pub(crate) fn kv_format(model: &config::Model) -> KvFormat {
    match model.kv_dtype {
        config::KvDtype::Auto => weight_format(model.dtype).kv_format(),
        config::KvDtype::Bf16 => KvFormat::Bf16,
        config::KvDtype::Fp8 => KvFormat::Fp8,
    }
}

pub(crate) fn isa(isa: config::Isa) -> Isa {
    match isa {
        config::Isa::Auto => Isa::Auto,
        config::Isa::Amx => Isa::Amx,
        config::Isa::Avx512Bf16 => Isa::Avx512Bf16,
        config::Isa::Avx512 => Isa::Avx512,
        config::Isa::Avx2 => Isa::Avx2,
        config::Isa::Portable => Isa::Portable,
        config::Isa::Reference => Isa::Reference,
    }
}

pub(crate) fn load_format(format: config::LoadFormat) -> LoadFormat {
    match format {
        config::LoadFormat::Auto => LoadFormat::Auto,
        // One seed: every node of a cluster has the same weights.
        config::LoadFormat::Dummy => LoadFormat::Dummy { seed: 0 },
    }
}

/// Linux's folder of NUMA nodes.
const NUMA_NODES: &str = "/sys/devices/system/node";

/// Returns the number of compute threads and the CPUs that they are pinned to, if any.
pub(crate) fn threads(node: &config::Node) -> Result<(usize, Vec<u32>), SettingsError> {
    threads_on(node, affinity::allowed(), Path::new(NUMA_NODES))
}

fn threads_on(
    node: &config::Node,
    allowed: io::Result<Vec<u32>>,
    numa_nodes: &Path,
) -> Result<(usize, Vec<u32>), SettingsError> {
    let key = match (&node.cpus, node.numa_node) {
        (Some(_), _) => "node.cpus",
        (None, Some(_)) => "node.numa_node",
        (None, None) => {
            let all = || available_parallelism().map_or(1, usize::from);
            return Ok((node.threads.map_or_else(all, |threads| threads as usize), Vec::new()));
        }
    };
    let allowed = allowed.map_err(|reason| SettingsError::NoAffinity { key, reason })?;
    let mut cpus = match (&node.cpus, node.numa_node) {
        (Some(cpus), _) => listed(cpus, &allowed)?,
        (None, numa_node) => of_numa_node(numa_node.unwrap_or(0), &allowed, numa_nodes)?,
    };
    if let Some(threads) = node.threads {
        if threads as usize > cpus.len() {
            return Err(SettingsError::TooManyThreads { threads, key, cpus: cpus.len() });
        }
        cpus.truncate(threads as usize);
    }
    cpus.truncate(THREADS_MAX);
    Ok((cpus.len(), cpus))
}

fn listed(cpus: &CpuList, allowed: &[u32]) -> Result<Vec<u32>, SettingsError> {
    let missing: Vec<u32> =
        cpus.cpus().iter().copied().filter(|cpu| !allowed.contains(cpu)).collect();
    if missing.is_empty() {
        return Ok(cpus.cpus().to_vec());
    }
    let (missing, allowed) = (shown(&missing), shown(allowed));
    Err(SettingsError::NoSuchCpu { cpus: cpus.clone(), missing, allowed })
}

/// Returns the CPUs of the NUMA node that this process may use.
fn of_numa_node(
    numa_node: u32,
    allowed: &[u32],
    numa_nodes: &Path,
) -> Result<Vec<u32>, SettingsError> {
    let no_such = |reason: String| SettingsError::NoSuchNumaNode {
        numa_node,
        reason,
        allowed: existing_numa_nodes(numa_nodes),
    };
    let file = numa_nodes.join(format!("node{numa_node}")).join("cpulist");
    let text = fs::read_to_string(&file)
        .map_err(|error| no_such(format!("cannot read {}: {error}", file.display())))?;
    // A NUMA node without CPUs has an empty list.
    let cpus = CpuList::parse(&text);
    let cpus = cpus.as_ref().map(CpuList::cpus).unwrap_or_default();
    let usable: Vec<u32> = cpus.iter().copied().filter(|cpu| allowed.contains(cpu)).collect();
    if usable.is_empty() {
        return Err(no_such("this process may use none of its CPUs".to_owned()));
    }
    Ok(usable)
}

fn existing_numa_nodes(numa_nodes: &Path) -> String {
    let entries = fs::read_dir(numa_nodes).into_iter().flatten().flatten();
    let number =
        |entry: fs::DirEntry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok();
    let mut there: Vec<u32> = entries.filter_map(number).collect();
    there.sort_unstable();
    if there.is_empty() {
        "none, for this system lists no NUMA nodes".into()
    } else {
        shown(&there)
    }
}

/// Formats the CPUs for logs.
pub(crate) fn shown_cpus(cpus: &[u32]) -> String {
    if cpus.is_empty() { "any".to_owned() } else { shown(cpus) }
}

/// Formats numbers as the settings list them.
fn shown(numbers: &[u32]) -> String {
    let text: Vec<String> = numbers.iter().map(u32::to_string).collect();
    CpuList::parse(&text.join(",")).map_or_else(|| text.join(","), |list| list.to_string())
}

pub(crate) fn secret(cluster: &config::Cluster) -> Result<ClusterSecret, SettingsError> {
    Ok(ClusterSecret::new(cluster.required_secret()?.reveal().as_bytes())?)
}

/// Returns limits that allow every transfer that the scheduler may start.
pub(crate) fn transfer_limits(chunk_bytes: u64, transfers_max: u32) -> TransferLimits {
    let defaults = TransferLimits::default();
    TransferLimits {
        transfers_max: defaults.transfers_max.max(transfers_max as usize),
        chunk_bytes_max: chunk_bytes as usize,
        ..defaults
    }
}

pub(crate) fn transport_choice(transport: config::Transport) -> TransportChoice {
    match transport {
        config::Transport::Auto => TransportChoice::Auto,
        config::Transport::Tcp => TransportChoice::Only(TransferKind::Tcp),
        config::Transport::Ipc => TransportChoice::Only(TransferKind::Ipc),
        config::Transport::Nccl => TransportChoice::Only(TransferKind::Nccl),
    }
}

/// Returns the configuration of this node's transfers.
pub(crate) fn transfer_config(
    config: &Config,
    node_id: &NodeId,
    epoch: Epoch,
    identity: &ModelIdentity,
    limits: TransferLimits,
) -> Result<TransferConfig, SettingsError> {
    let transfer = &config.transfer;
    let transport = TransportConfig {
        choice: transport_choice(transfer.transport),
        verify: transfer.verify,
        nccl_max_ctas: Some(transfer.nccl_max_ctas),
        tcp_connections: transfer.tcp_connections,
        has_rdma: kv_transfer::has_rdma(),
    };
    Ok(TransferConfig {
        node_id: node_id.as_str().to_owned(),
        epoch,
        identity: identity.clone(),
        secret: secret(&config.cluster)?,
        control_bind: transfer.control,
        data_bind: transfer.data,
        advertise_host: transfer.advertised_host(),
        limits,
        transport,
        host: kv_transfer::host_id(),
        tls: None,
    })
}

/// Returns the default node id: role and port.
pub(crate) fn default_node_id(role: Role, grpc_port: u16) -> String {
    format!("{role}-{grpc_port}")
}

#[cfg(test)]
mod tests {
    use config::LoadInput;

    use super::*;

    /// Returns threads and CPUs on a machine with the NUMA nodes below, where this process may use
    /// CPUs 0 to 5 of 8.
    fn found(flags: &[(&str, &str)]) -> Result<(usize, Vec<u32>), String> {
        let flags = flags.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        let config = Config::load(LoadInput { flags, ..LoadInput::default() }).unwrap();
        let nodes = tempfile::tempdir().unwrap();
        for (node, cpus) in
            [("node0", "0-3\n"), ("node1", "4-7\n"), ("node2", "\n"), ("node3", "6-7\n")]
        {
            fs::create_dir(nodes.path().join(node)).unwrap();
            fs::write(nodes.path().join(node).join("cpulist"), cpus).unwrap();
        }
        fs::write(nodes.path().join("online"), "0-3\n").unwrap();
        threads_on(&config.node, Ok((0..6).collect()), nodes.path())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn each_rank_needs_its_own_gpu() {
        let found = |gpu: &str, tp: &str| {
            let flags = [("node.gpu", gpu), ("node.tp", tp)];
            let flags = flags.map(|(key, value)| (key.into(), value.into())).into();
            let config = Config::load(LoadInput { flags, ..LoadInput::default() }).unwrap();
            let names = gpus(&config.node).map_err(|error| error.to_string())?;
            Ok::<_, String>(names.unwrap().join(" "))
        };
        assert_eq!(found("GPU-1", "1"), Ok("GPU-1".into()));
        assert_eq!(found("GPU-1, GPU-2", "2"), Ok("GPU-1 GPU-2".into()));
        let error = found("GPU-1", "2").unwrap_err();
        assert!(error.contains("GPU-1: 1 GPUs are named for node.tp = 2"), "{error}");
        assert!(found("GPU-1,GPU-2", "1").is_err());
        assert!(gpus(&Config::load(LoadInput::default()).unwrap().node).unwrap().is_none());
    }

    #[test]
    fn memory_of_weight_updates_is_subtracted_from_the_memory_of_a_gpu() {
        const MEMORY: u64 = 80 << 30;
        const CHUNKS: u64 = 3 * (4 << 20);
        let config = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../model/tests/fixtures/tiny_llama3/config.json");
        let model = model::Checkpoint::open(config, LoadFormat::Dummy { seed: 7 }).unwrap();
        for (place, tp, copies, chunks) in [
            ("auto", "1", 0, 0),
            ("shadow", "1", 1, CHUNKS),
            ("in_place", "1", 0, CHUNKS),
            ("shadow", "2", 1, 0),
            ("in_place", "2", 0, 0),
        ] {
            let flags = [
                ("weights.place", place),
                ("node.tp", tp),
                ("weights.buffers", "3"),
                ("weights.chunk_bytes", "4MiB"),
            ];
            let flags = flags.map(|(key, value)| (key.into(), value.into())).into();
            let config = Config::load(LoadInput { flags, ..LoadInput::default() }).unwrap();
            let device = NodeDevice::Gpu { memory_bytes: MEMORY };
            let traits = node_traits(&config, Role::Decode, &model, device).unwrap();
            let left = MEMORY - copies * traits.model.weights - chunks;
            assert_eq!(traits.device, NodeDevice::Gpu { memory_bytes: left }, "{place}, {tp} GPUs");
        }
    }

    #[test]
    fn threads_follow_node_cpus_or_node_numa_node() {
        for (flags, cpus) in [
            (&[("node.cpus", "5,0-2")][..], &[5, 0, 1, 2][..]),
            (&[("node.cpus", "5,0-2"), ("node.threads", "2")], &[5, 0]),
            (&[("node.numa_node", "0")], &[0, 1, 2, 3]),
            // This process may not use two CPUs of the second NUMA node.
            (&[("node.numa_node", "1")], &[4, 5]),
            (&[("node.numa_node", "0"), ("node.threads", "3")], &[0, 1, 2]),
        ] {
            assert_eq!(found(flags), Ok((cpus.len(), cpus.to_vec())), "{flags:?}");
        }
        assert_eq!(found(&[("node.threads", "9")]), Ok((9, vec![])));
        assert!(found(&[]).is_ok_and(|(threads, cpus)| threads > 0 && cpus.is_empty()));
    }

    #[test]
    fn unknown_cpu_or_numa_node_is_rejected_with_the_allowed_ones() {
        for (flags, words) in [
            (&[("node.cpus", "4-9")][..], &["node.cpus = 4-9", "no CPU 6-9", "expected 0-5"][..]),
            (&[("node.numa_node", "7")], &["node.numa_node = 7", "node7/cpulist", "expected 0-3"]),
            (&[("node.numa_node", "2")], &["node.numa_node = 2", "none of its CPUs"]),
            (&[("node.numa_node", "3")], &["node.numa_node = 3", "none of its CPUs"]),
            (
                &[("node.numa_node", "1"), ("node.threads", "3")],
                &["node.threads = 3", "node.numa_node has 2 CPUs", "expected 1 to 2"],
            ),
        ] {
            let error = found(flags).expect_err("it is not there");
            for word in words {
                assert!(error.contains(word), "{error:?} lacks {word:?}");
            }
            assert!(!error.contains('\n'), "{error}");
        }
    }
}
