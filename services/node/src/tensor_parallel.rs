//! Tensor parallelism: starts the rank processes of a node, and runs one rank.
//!
//! A rank process is this program with the same arguments and the hidden flag of its [`RankSpec`].
//!
//! On CPUs the KV arena is in memory that all ranks map, with the blocks of all heads. Each rank
//! computes its own heads there, and the node's transfers see whole blocks, as with one rank. The
//! buffers of the all-reduce precede the arena in this memory.
//!
//! On GPUs each rank has its heads of every block on its own GPU and exports them to the node, so
//! the node's transfers see whole blocks, too. Through the shared memory the ranks exchange the
//! addresses of their all-reduce buffers on the GPUs.

use std::{
    ffi::OsString,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use config::{Config, Device};
use engine::executor::{
    Executor,
    cpu::CpuExecutor,
    cuda::{CudaExecutorError, CudaRank},
};
use kernels::{
    KvArena, KvLayout,
    cpu::{CpuGroup, affinity},
    cuda::{IpcMemory, RankedKv},
    peer::PeerMemory,
    shared::{RegionName, SharedRegion, sweep},
};
use model::{Checkpoint, ModelConfig};
use ranks::{GroupSettings, RankGroup, RankSpec, run_rank};
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use crate::{
    adapters,
    device::{self, ReadyGpu},
    settings::{self, BatchSizes, SettingsError},
    start_error::NodeStartError,
};

/// The purpose in the name of the region for KV and all-reduce buffers.
const PURPOSE: &str = "kv";
/// Time-out of every exchange between ranks. The node detects a dead rank far sooner.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(30);
/// Alignment of the arena in the region.
const PAGE: usize = 4096;

/// Parameters of a rank process: the model's path and the shared memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct RankStart {
    /// The path's bytes, which need not be UTF-8.
    model: Vec<u8>,
    /// File name of the region.
    region: String,
    /// Blocks of the arena in the region; 0 on GPUs.
    blocks: u32,
    /// The GPU's UUID of each rank; empty on CPUs.
    gpus: Vec<String>,
    /// Equal on all ranks, because the node derived them.
    sizes: BatchSizes,
}

impl RankStart {
    fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("texts and numbers are JSON")
    }

    /// Returns the parameters and the region's name.
    fn decode(bytes: &[u8]) -> Option<(Self, RegionName)> {
        let start: Self = serde_json::from_slice(bytes).ok()?;
        let region = RegionName::parse(&start.region)?;
        Some((start, region))
    }
}

/// Returns the arena's offset in the region.
fn arena_at(ranks: u32) -> usize {
    CpuGroup::region_bytes(ranks as usize).next_multiple_of(PAGE)
}

fn region_bytes(layout: KvLayout, blocks: u32, ranks: u32) -> usize {
    // The region and the arena in it reject impossible sizes.
    let arena = layout.block_bytes().saturating_mul(blocks as usize);
    arena_at(ranks).saturating_add(arena)
}

/// Starts the ranks on these GPUs (by UUID, with this process's contexts) or on CPUs, waits until
/// they are ready, and returns them with the arena that they compute into.
pub(crate) fn start(
    config: &Config,
    epoch: u128,
    path: &Path,
    checkpoint: &Checkpoint,
    gpus: Option<Vec<String>>,
    sizes: BatchSizes,
) -> Result<(RankGroup, Arc<KvArena>), NodeStartError> {
    let (model, of) = (checkpoint.config(), config.node.tp);
    let layout = model.block_layout(settings::kv_format(&config.model));
    let groups = model.kv_groups(layout.format);
    // On GPUs the default is as many blocks as fit.
    let blocks = match &gpus {
        Some(_) => settings::block_count_set(&config.node, layout)?.unwrap_or(u32::MAX),
        None => settings::block_count(&config.node, layout)?,
    };
    // An invalid setting is reported here once instead of by each rank.
    settings::executor_limits(config, sizes, model, blocks)?;
    for name in sweep() {
        info!(
            owner = name.owner,
            purpose = name.purpose,
            "removed the shared memory of a dead node"
        );
    }
    let name = RegionName::own(epoch, PURPOSE);
    let start = |blocks, gpus| {
        let model = path.as_os_str().as_encoded_bytes().to_vec();
        let start = RankStart { model, region: name.file_name(), blocks, gpus, sizes };
        let settings = GroupSettings {
            kv_groups: groups.clone(),
            ..GroupSettings::new(epoch, of, start.encode())
        };
        RankGroup::start(settings, RankSpec::command)
    };
    let (group, arena) = match gpus {
        None => {
            let region = SharedRegion::create(&name, region_bytes(layout, blocks, of))?;
            let arena = KvArena::shared(layout, blocks, &region, arena_at(of))?;
            let group = start(blocks, Vec::new())?;
            // Every rank has opened it.
            region.unlink();
            (group, arena)
        }
        Some(gpus) => {
            let region = SharedRegion::create(&name, CudaRank::region_bytes(of as usize))?;
            let mut group = start(0, gpus)?;
            region.unlink();
            group.set_polling(config.node.gpu_poll);
            let kv = RankedKv::imported(layout, &group.ready_messages())
                .map_err(NodeStartError::RankedKv)?;
            device::load_kv_kernels(&config.node, &kv);
            (group, KvArena::remote(kv)?)
        }
    };
    info!(ranks = of, processes = ?group.process_ids(), "the ranks are ready");
    Ok((group, arena))
}

/// The numbers of ranks that the GPU all-reduce supports.
pub(crate) const RANKS_ON_GPUS: [usize; 4] = [1, 2, 4, 8];

/// Checks that the model and the device allow the number of ranks and expert parallelism.
pub(crate) fn check(model: &ModelConfig, node: &config::Node) -> Result<(), SettingsError> {
    let is_gpu = node.device == Device::Cuda;
    let has_whole_experts = settings::shard(node, model, 0).has_whole_experts();
    let shared = match (model.experts(), has_whole_experts) {
        (None, true) => {
            return Err(SettingsError::ExpertParallel { reason: "the model has no experts" });
        }
        (Some(_), true) if is_gpu => {
            return Err(SettingsError::ExpertParallel { reason: "GPUs have no such kernels" });
        }
        (Some(experts), true) => format!("{} experts", experts.count),
        (_, false) => "the rows of its feed-forward network".to_owned(),
    };
    let allowed = model.rank_counts(has_whole_experts);
    let allowed = allowed.filter(|count| !is_gpu || RANKS_ON_GPUS.contains(count));
    let allowed = allowed.collect::<Vec<_>>();
    if allowed.contains(&(node.tp as usize)) {
        return Ok(());
    }
    let allowed: Vec<String> = allowed.iter().map(usize::to_string).collect();
    let (tp, kv_heads, allowed) = (node.tp, model.kv_head_count, allowed.join(", "));
    let on = if is_gpu { " on GPUs" } else { "" };
    Err(SettingsError::Ranks { tp, on, kv_heads, shared, allowed })
}

/// Runs a rank process after its settings are read.
pub(crate) fn run(spec: &RankSpec, config: &Config) -> Result<(), ranks::RankError> {
    run_rank(spec, |start| {
        let (start, region) = RankStart::decode(start)
            .ok_or("invalid start message of a rank; expected one of this program's version")?;
        let made: Result<(Box<dyn Executor>, _), NodeStartError> =
            match start.gpus.get(spec.rank as usize) {
                Some(gpu) => on_gpu(spec, config, &start, &region, gpu),
                None => on_cpu(spec, config, &start, &region)
                    .map(|executor| (Box::new(executor) as Box<dyn Executor>, Vec::new())),
            };
        made.map_err(|error| error.to_string())
    })
}

/// Returns the executor and the handle of the rank's KV for the node.
fn on_gpu(
    spec: &RankSpec,
    config: &Config,
    start: &RankStart,
    region: &RegionName,
    gpu: &str,
) -> Result<(Box<dyn Executor>, Vec<u8>), NodeStartError> {
    let checkpoint = opened(config, start)?;
    let weights = settings::weight_format(config.model.dtype);
    let layout = checkpoint.config().block_layout(settings::kv_format(&config.model));
    let shard = settings::shard(&config.node, checkpoint.config(), spec.rank as usize);
    CudaRank::open(region, shard)?.start(|rank| {
        let gpu = device::open_gpu(config, weights, Some(gpu))?;
        let ReadyGpu { executor, kv, .. } =
            device::start_gpu(gpu, config, &checkpoint, layout, start.sizes, Some(rank))?;
        adapters::load_rank(config, executor.adapter_slots().as_deref())?;
        let handle = IpcMemory::new(kv).export().map_err(CudaExecutorError::Connect)?;
        info!(rank = spec.rank, of = spec.of, "loaded the rank's part of the weights onto its GPU");
        Ok((Box::new(executor) as Box<dyn Executor>, handle))
    })
}

fn opened(config: &Config, start: &RankStart) -> Result<Checkpoint, NodeStartError> {
    let load_format = settings::load_format(config.model.load_format);
    let model = PathBuf::from(OsString::from_vec(start.model.clone()));
    let checkpoint = Checkpoint::open(&model, load_format)?;
    check(checkpoint.config(), &config.node)?;
    Ok(checkpoint)
}

fn on_cpu(
    spec: &RankSpec,
    config: &Config,
    start: &RankStart,
    region: &RegionName,
) -> Result<CpuExecutor, NodeStartError> {
    let (threads, cpus) = settings::threads(&config.node)?;
    let (threads, cpus) = share(threads, &cpus, spec);
    // As in a node without ranks: the CPUs that read the weights pack them.
    let confined = cpus.first().map(|cpu| affinity::confine(&[*cpu])).transpose();
    let _confined = confined.map_err(NodeStartError::Affinity)?;
    let checkpoint = opened(config, start)?;
    let layout = checkpoint.config().block_layout(settings::kv_format(&config.model));
    let bytes = region_bytes(layout, start.blocks, spec.of);
    let region = SharedRegion::open(region, bytes)?;
    let arena = KvArena::shared(layout, start.blocks, &region, arena_at(spec.of))?;
    let shard = settings::shard(&config.node, checkpoint.config(), spec.rank as usize);
    let group = CpuGroup::new(&region, 0, shard, EXCHANGE_TIMEOUT);
    let cpus = (threads, &cpus[..]);
    let executor = device::start_cpu(config, &checkpoint, cpus, &arena, start.sizes, Some(group))?;
    adapters::load_rank(config, executor.adapter_slots().as_deref())?;
    info!(rank = spec.rank, of = spec.of, "loaded the rank's part of the weights");
    Ok(executor)
}

/// Returns a rank's share of the node's threads and CPUs: as even as possible, at least one thread.
fn share(threads: usize, cpus: &[u32], spec: &RankSpec) -> (usize, Vec<u32>) {
    let (rank, of) = (spec.rank as usize, spec.of as usize);
    let part = |count: usize| rank * count / of..(rank + 1) * count / of;
    if threads < of && rank == 0 {
        warn!(
            threads,
            ranks = of,
            "each rank needs at least one thread: more threads run than node.threads"
        );
    }
    let threads = part(threads).len().max(1);
    match cpus.len() {
        0 => (threads, Vec::new()),
        // Some ranks share a CPU.
        count if count < of => (1, vec![cpus[rank % count]]),
        count => (part(count).len(), cpus[part(count)].to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use config::LoadInput;
    use kernels::Shard;
    use model::{ExpertSpec, FeedForward, LoadFormat};

    use super::*;

    fn spec(rank: u32, of: u32) -> RankSpec {
        RankSpec { region: RegionName::own(1, "ranks"), rank, of }
    }

    #[test]
    fn rank_start_round_trips_and_invalid_bytes_are_rejected() {
        let model = vec![b'/', 0xff, b'a'];
        let gpus = vec!["GPU-1".to_owned(), "GPU-2".to_owned()];
        let region = RegionName::own(3, PURPOSE);
        let sizes = BatchSizes { slots: 3, step_tokens: 40 };
        let start = RankStart { model, region: region.file_name(), blocks: 17, gpus, sizes };
        assert_eq!(RankStart::decode(&start.encode()), Some((start.clone(), region)));
        let text = String::from_utf8(start.encode()).unwrap();
        for (from, to) in [("17", "-1"), ("baton", "bacon"), ("model", "muddle"), ("{", "")] {
            assert_eq!(RankStart::decode(text.replace(from, to).as_bytes()), None, "{to}");
        }
    }

    /// Returns the shard of rank 0, or the reason why the model refuses the settings.
    fn checked(model: &ModelConfig, flags: &[(&str, &str)]) -> Result<Shard, String> {
        let flags = flags.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        let config = Config::load(LoadInput { flags, ..LoadInput::default() }).unwrap();
        check(model, &config.node).map_err(|error| error.to_string())?;
        Ok(settings::shard(&config.node, model, 0))
    }

    #[test]
    fn whole_experts_are_chosen_where_ranks_do_not_divide_their_width() {
        let model = |name: &str| {
            let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
            let checkpoint = Checkpoint::open(fixtures.join(name), LoadFormat::Dummy { seed: 1 });
            checkpoint.unwrap().config().clone()
        };
        // 6 experts of 16 rows, and 2 KV heads.
        let experts = model("architectures/qwen3_moe");
        let ExpertSpec { count, size, .. } = experts.experts().unwrap();
        assert_eq!((count, size, experts.kv_head_count), (6, 16, 2));
        let mut odd = experts.clone();
        for layer in &mut odd.layers {
            let FeedForward::Experts(spec) = &mut layer.feed_forward else { continue };
            spec.size = 15;
        }
        const TWO: (&str, &str) = ("node.tp", "2");
        const ON: (&str, &str) = ("node.expert_parallel", "true");
        const OFF: (&str, &str) = ("node.expert_parallel", "false");
        for (model, flags, has_whole_experts) in [
            (&experts, &[][..], false),
            (&experts, &[ON], true),
            (&experts, &[TWO], false),
            (&experts, &[TWO, ON], true),
            (&odd, &[TWO], true),
            (&odd, &[OFF], false),
        ] {
            let shard = checked(model, flags).unwrap();
            assert_eq!(shard.has_whole_experts(), has_whole_experts, "{flags:?}");
        }
        let dense = model("tiny_llama3");
        const FOUR: (&str, &str) = ("node.tp", "4");
        const CUDA: (&str, &str) = ("node.device", "cuda");
        for (model, flags, reason) in [
            (
                &dense,
                &[ON][..],
                "node.expert_parallel = true: the model has no experts; expected auto or false",
            ),
            (
                &experts,
                &[TWO, ON, CUDA],
                "node.expert_parallel = true: GPUs have no such kernels; expected auto or false",
            ),
            (
                &odd,
                &[TWO, OFF],
                "node.tp = 2: the ranks must divide the model's 2 KV heads and the rows of its feed-forward network evenly; expected 1",
            ),
            (
                &experts,
                &[FOUR, ON],
                "node.tp = 4: the ranks must divide the model's 2 KV heads and 6 experts evenly; expected 1, 2",
            ),
        ] {
            assert_eq!(checked(model, flags).unwrap_err(), reason);
        }
    }

    #[test]
    fn ranks_share_threads_and_cpus() {
        for (threads, cpus, of, expected) in [
            (8, vec![], 2, vec![(4, vec![]), (4, vec![])]),
            (1, vec![], 2, vec![(1, vec![]), (1, vec![])]),
            (3, vec![7, 5, 6], 2, vec![(1, vec![7]), (2, vec![5, 6])]),
            (1, vec![4], 2, vec![(1, vec![4]), (1, vec![4])]),
        ] {
            let shares: Vec<_> =
                (0..of).map(|rank| share(threads, &cpus, &spec(rank, of))).collect();
            assert_eq!(shares, expected, "{threads} threads, CPUs {cpus:?}");
        }
    }
}
