//! Runs the ranks of a model. Threads stand in for the rank processes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use kernels::{
    KvArena, Shard, WeightFormat,
    cpu::CpuGroup,
    shared::{RegionName, SharedRegion},
};
use model::Checkpoint;

use super::sequence::{BLOCKS, Runner};

pub(crate) fn shards(of: usize) -> impl Iterator<Item = Shard> {
    group(of).all()
}

/// Returns the first rank of a group.
pub(crate) fn group(of: usize) -> Shard {
    Shard::new(0, of).unwrap()
}

pub(crate) fn region(purpose: &str, bytes: usize) -> Arc<SharedRegion> {
    static MADE: AtomicU64 = AtomicU64::new(0);
    let epoch = u128::from(MADE.fetch_add(1, Ordering::Relaxed));
    SharedRegion::create(&RegionName::own(epoch, purpose), bytes).unwrap()
}

/// Runs every rank of the group of `first`. Returns their results and the shared arena of whole
/// blocks.
pub(crate) fn together<T: Send>(
    checkpoint: &Checkpoint,
    weights: WeightFormat,
    first: Shard,
    purpose: &str,
    run: impl Fn(&mut Runner) -> T + Sync,
) -> (Vec<T>, Arc<KvArena>) {
    let layout = checkpoint.config().kv_layout(weights.kv_format());
    let group_bytes = CpuGroup::region_bytes(first.rank_count()).next_multiple_of(64);
    let bytes = group_bytes + layout.block_bytes() * BLOCKS as usize;
    let region = region(purpose, bytes);
    let arena = || KvArena::shared(layout, BLOCKS, &region, group_bytes).unwrap();
    let brought = thread::scope(|scope| {
        let ranks: Vec<_> = first
            .all()
            .map(|shard| {
                let group = CpuGroup::new(&region, 0, shard, Duration::from_secs(120));
                let (run, arena) = (&run, arena());
                scope.spawn(move || {
                    let mut runner = Runner::rank(checkpoint, weights, group, arena, 64);
                    assert_eq!(runner.shard(), shard);
                    run(&mut runner)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    (brought, arena())
}

/// Concatenates every row's logits over the ranks.
pub(crate) fn whole_rows(ranks: &[Vec<Vec<f32>>]) -> Vec<Vec<f32>> {
    (0..ranks[0].len())
        .map(|row| ranks.iter().flat_map(|rows| rows[row].iter().copied()).collect())
        .collect()
}
