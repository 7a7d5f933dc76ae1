//! Ranks of one model as one executor: threads of this process, each with its shard of the model,
//! over memory that they share as processes would.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use engine::{
    SchedulerConfig, StepLoop,
    executor::{CollectWaker, Executor, ExecutorError, ExecutorLimits, cpu::CpuExecutor},
    plan::{RowMask, StepId, StepPlan, StepResult},
};
use kernels::{
    BlockId, KvArena, KvGroups, KvLayout, Shard, WeightFormat,
    arena::{BlockSlices, RemoteBlocks},
    cpu::{CpuBackend, CpuGroup, CpuOptions, Isa},
    shared::{RegionName, SharedRegion},
};
use model::Checkpoint;

use super::scheduler;

/// Placement of KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kv {
    /// Whole blocks in memory that all ranks have mapped.
    Shared,
    /// Each rank has its heads in its own memory, as devices do.
    PerRank,
}

/// A rank's blocks, accessed by copies like those of a device.
struct RankBlocks(Arc<KvArena>);

impl RankBlocks {
    /// Calls `visit` with each block of the range and the block's bytes in it.
    fn each(
        &self,
        offset: usize,
        bytes: usize,
        mut visit: impl FnMut(BlockId, std::ops::Range<usize>),
    ) {
        let block_bytes = self.0.block_bytes();
        assert!(offset.is_multiple_of(block_bytes) && bytes.is_multiple_of(block_bytes));
        for (index, begin) in (0..bytes).step_by(block_bytes).enumerate() {
            visit(BlockId((offset / block_bytes + index) as u32), begin..begin + block_bytes);
        }
    }
}

impl RemoteBlocks for RankBlocks {
    fn layout(&self) -> KvLayout {
        self.0.layout()
    }

    fn block_count(&self) -> u32 {
        self.0.block_count()
    }

    fn read(&self, offset: usize, host: &mut [u8]) -> Result<(), String> {
        self.each(offset, host.len(), |block, range| {
            let block = self.0.read(block).expect("no step uses the block");
            block.copy_to_host(&mut host[range]).expect("a block's bytes");
        });
        Ok(())
    }

    fn write(&self, offset: usize, host: &[u8]) -> Result<(), String> {
        self.each(offset, host.len(), |block, range| {
            let mut block = self.0.write(block).expect("no step uses the block");
            block.copy_from_host(&host[range]).expect("a block's bytes");
        });
        Ok(())
    }
}

/// Executor that gives every plan to all ranks and asserts that their results are bit-equal.
pub(crate) struct AllRanks {
    pub ranks: Vec<CpuExecutor>,
}

impl AllRanks {
    /// Starts the ranks with the given time-out. The returned arena has whole blocks.
    pub(crate) fn start(
        checkpoint: &Checkpoint,
        limits: ExecutorLimits,
        of: usize,
        kv: Kv,
        timeout: Duration,
    ) -> (Self, Arc<KvArena>) {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let weights = WeightFormat::F32;
        let (config, dtype) = (checkpoint.config(), weights.kv_format());
        let groups = config.kv_groups(dtype);
        let layout = groups.block_layout(config.kv_layout(dtype));
        let group_bytes = CpuGroup::region_bytes(of).next_multiple_of(64);
        let bytes = group_bytes + layout.block_bytes() * limits.blocks as usize;
        let epoch = u128::from(MADE.fetch_add(1, Ordering::Relaxed));
        let name = RegionName::own(epoch, "engine_test");
        let region = SharedRegion::create(&name, bytes).expect("memory for the arena");
        let first = Shard::new(0, of).expect("not too many");
        let first = first.with_whole_experts(config.prefers_whole_experts(of));
        let shards: Vec<Shard> = first.all().collect();
        let whole = || KvArena::shared(layout, limits.blocks, &region, group_bytes);
        let arenas: Vec<Arc<KvArena>> = shards
            .iter()
            .map(|&shard| match kv {
                Kv::Shared => whole().expect("the layout is one"),
                Kv::PerRank => {
                    let own = groups.block_layout(config.kv_layout_of(dtype, shard));
                    KvArena::host(own, limits.blocks).expect("memory for the rank's heads")
                }
            })
            .collect();
        let arena = match kv {
            Kv::Shared => whole(),
            Kv::PerRank => {
                let slice = |arena: &Arc<KvArena>| {
                    Arc::new(RankBlocks(Arc::clone(arena))) as Arc<dyn RemoteBlocks>
                };
                KvArena::remote(Arc::new(BlockSlices::new(arenas.iter().map(slice).collect())))
            }
        };
        let ranks = shards.into_iter().zip(arenas).map(|(shard, arena)| {
            let options = CpuOptions { weights, threads: 1, isa: Isa::Auto };
            let group = CpuGroup::new(&region, 0, shard, timeout);
            let backend = CpuBackend::new(options).expect("the options fit this machine");
            CpuExecutor::start(checkpoint, backend.in_group(group), arena, limits, &mut |_| {})
                .expect("model, arena and limits agree")
        });
        (Self { ranks: ranks.collect() }, arena.expect("the layout is one"))
    }
}

impl Executor for AllRanks {
    fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        self.ranks.iter_mut().try_for_each(|rank| rank.launch(plan.clone()))
    }

    fn supply(&mut self, step_id: StepId, masks: Vec<RowMask>) -> Result<(), ExecutorError> {
        self.ranks.iter_mut().try_for_each(|rank| rank.supply(step_id, masks.clone()))
    }

    fn masks_are_due(&self) -> bool {
        self.ranks[0].masks_are_due()
    }

    fn collect(&mut self, timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
        let (first, others) = self.ranks.split_first_mut().expect("a group has ranks");
        let Some(result) = first.collect(timeout)? else { return Ok(None) };
        for (rank, other) in (1..).zip(others) {
            let other = loop {
                // A finished forward pass ends the wait too.
                if let Some(result) = other.collect(Duration::from_secs(300))? {
                    break result;
                }
            };
            assert_eq!((other.step_id, &other.rows), (result.step_id, &result.rows), "rank {rank}");
        }
        Ok(Some(result))
    }

    fn limits(&self) -> ExecutorLimits {
        self.ranks[0].limits()
    }

    fn kv_groups(&self) -> KvGroups {
        self.ranks[0].kv_groups()
    }

    fn waker(&self) -> CollectWaker {
        self.ranks[0].waker()
    }
}

/// Returns an engine over `of` ranks in f32, and the arena of whole blocks that a node would
/// transfer.
pub(crate) fn engine_of_ranks(
    checkpoint: &Checkpoint,
    config: SchedulerConfig,
    of: usize,
) -> (StepLoop<AllRanks>, Arc<KvArena>) {
    engine_of_ranks_with(checkpoint, config, of, Kv::Shared)
}

pub(crate) fn engine_of_ranks_with(
    checkpoint: &Checkpoint,
    config: SchedulerConfig,
    of: usize,
    kv: Kv,
) -> (StepLoop<AllRanks>, Arc<KvArena>) {
    let timeout = Duration::from_secs(300);
    let (executor, arena) = AllRanks::start(checkpoint, config.limits, of, kv, timeout);
    (StepLoop::new(scheduler(config).with_kv_groups(executor.kv_groups()), executor), arena)
}
