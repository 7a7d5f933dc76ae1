//! The ranks of one model as one executor: threads of this process, each with its part of the model,
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
    plan::{StepPlan, StepResult},
};
use kernels::{
    KvArena, Shard, WeightFormat,
    cpu::{CpuBackend, CpuOptions, Group, Isa},
    shared::{RegionName, SharedRegion},
};
use model::Checkpoint;

use super::scheduler;

/// Gives every plan to all ranks and compares what they bring, to the bit.
pub struct Together {
    pub ranks: Vec<CpuExecutor>,
}

impl Together {
    /// With `patience` for each other.
    pub fn start(
        checkpoint: &Checkpoint,
        limits: ExecutorLimits,
        of: usize,
        patience: Duration,
    ) -> (Self, Arc<KvArena>) {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let weights = WeightFormat::F32;
        let layout = checkpoint.config().kv_layout(weights.kv_dtype());
        let group_bytes = Group::region_bytes(of).next_multiple_of(64);
        let bytes = group_bytes + layout.block_bytes() * limits.blocks as usize;
        let epoch = u128::from(MADE.fetch_add(1, Ordering::Relaxed));
        let name = RegionName::own(epoch, "engine_test");
        let region = SharedRegion::create(&name, bytes).expect("memory for the arena");
        let arena = || {
            let arena = KvArena::shared(layout, limits.blocks, &region, group_bytes);
            arena.expect("the layout is one")
        };
        let shards = Shard::new(0, of).expect("not too many").all();
        let ranks = shards.map(|shard| {
            let options = CpuOptions { weights, threads: 1, isa: Isa::Auto };
            let group = Group::new(&region, 0, shard, patience);
            let backend = CpuBackend::new(options).expect("the options fit this machine");
            let backend = backend.in_group(group);
            CpuExecutor::start(checkpoint, backend, arena(), limits)
                .expect("model, arena and limits agree")
        });
        (Self { ranks: ranks.collect() }, arena())
    }
}

impl Executor for Together {
    fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        self.ranks.iter_mut().try_for_each(|rank| rank.launch(plan.clone()))
    }

    fn collect(&mut self, timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
        let (first, others) = self.ranks.split_first_mut().expect("a group has ranks");
        let Some(result) = first.collect(timeout)? else { return Ok(None) };
        for (rank, other) in (1..).zip(others) {
            let other = other.collect(Duration::from_secs(300))?.expect("all do the same");
            assert_eq!((other.step_id, &other.rows), (result.step_id, &result.rows), "rank {rank}");
        }
        Ok(Some(result))
    }

    fn limits(&self) -> ExecutorLimits {
        self.ranks[0].limits()
    }

    fn waker(&self) -> CollectWaker {
        self.ranks[0].waker()
    }
}

/// An engine over `of` ranks in f32, and the arena of whole blocks that a node would move.
pub fn engine_of_ranks(
    checkpoint: &Checkpoint,
    config: SchedulerConfig,
    of: usize,
) -> (StepLoop<Together>, Arc<KvArena>) {
    let patience = Duration::from_secs(300);
    let (executor, arena) = Together::start(checkpoint, config.limits, of, patience);
    (StepLoop::new(scheduler(config), executor), arena)
}
