//! Check of the scheduler's invariants, for tests and the simulation.

use foldhash::HashMap;
use kernels::{BlockId, NO_BLOCK};

use super::{Scheduler, sequence::SequencePhase};
use crate::{
    block_pool::BlockState::{Cached, Free, Held, Reserved},
    kv_blocks::{KvBlocks, blocks_of},
};

impl Scheduler {
    /// Panics when owners, references, pins and counts disagree.
    pub fn check(&self) {
        self.kv.check();
        let pool = &self.kv.pool;
        let mut refs = vec![0; pool.total() as usize];
        let mut pins = vec![0; pool.total() as usize];
        let mut count = |blocks: &[BlockId]| {
            for block in blocks_of(blocks) {
                refs[block.index()] += 1;
            }
        };
        self.sequences.check();
        if let Some(blocked) = &self.blocked {
            let phase = self.sequences.get(blocked.id).map(|sequence| sequence.phase());
            assert!(matches!(phase, Some(SequencePhase::Waiting)), "{blocked:?} does not wait");
        }
        for (id, sequence) in self.sequences.iter() {
            match sequence.phase() {
                SequencePhase::AwaitingReady => assert!(self.transfers.contains(id)),
                SequencePhase::Waiting => {
                    assert!(!self.still_lacks_blocks(id) || self.fit_prefix(id).is_err());
                }
                SequencePhase::Reserved { prefix } => {
                    assert!(self.transfers.contains(id));
                    count(prefix);
                }
                SequencePhase::Loading { prefix, .. } => count(prefix),
                SequencePhase::Ready(table) => {
                    count(&table.blocks);
                    count(&table.state.blocks);
                }
                SequencePhase::Running(row) => {
                    assert!(self.slots.is_current(row.slot, row.generation));
                    assert!(row.computed <= row.launched && row.launched <= row.length);
                    assert!(row.length <= sequence.length_here());
                    assert!(sequence.tokens.len() <= row.length);
                    assert!(row.launched <= self.kv.groups.tokens(row.blocks.len()));
                    let blocks = self.kv.groups.blocks(row.blocks.len());
                    for entry in self.kv.groups.needed(row.computed, 0..blocks) {
                        assert_ne!(row.blocks[entry], NO_BLOCK, "entry {entry} is needed");
                    }
                    count(&row.blocks);
                    count(&row.state.cached.blocks);
                    row.state.saving.iter().for_each(|saving| count(&saving.blocks));
                }
            }
        }
        self.frames.deferred().for_each(&mut count);
        for block in self.transfers.pinned_blocks() {
            refs[block.index()] += 1;
            pins[block.index()] += 1;
        }
        let mut reservations = HashMap::default();
        let loads = self.tiers.iter().flat_map(|tiers| tiers.reserved_blocks());
        for (owner, block) in self.transfers.reserved_blocks().chain(loads) {
            assert_eq!(reservations.insert(block, owner), None, "block {} twice", block.0);
        }
        for block in (0..pool.total()).map(BlockId) {
            let expected = refs[block.index()];
            match pool.state(block) {
                Free | Cached => assert_eq!(expected, 0, "block {} is free and held", block.0),
                Held { refs } => assert_eq!(refs, expected, "references of block {}", block.0),
                Reserved { owner } => assert_eq!(reservations.remove(&block), Some(owner)),
            }
            assert_eq!(pool.pins(block), pins[block.index()], "pins of block {}", block.0);
        }
        assert!(reservations.is_empty(), "a transfer owns a block that is not reserved");
        self.check_tiers();
        if let Some(sessions) = &self.sessions {
            let turns = self.sequences.values().filter(|it| it.turn.is_some());
            sessions.check(turns.filter_map(|it| it.session.session));
        }
        let running = self.sequences.running().len() as u32;
        assert_eq!(self.slots.free_count() + running, self.slots.total());
        assert!(running + self.sequences.claims() <= self.slots.total());
    }

    /// Returns the blocks whose contents are undefined.
    pub fn free_blocks(&self) -> Vec<BlockId> {
        let all = (0..self.kv.pool.total()).map(BlockId);
        all.filter(|&block| self.kv.pool.state(block) == Free).collect()
    }

    /// Panics when a save reads a block that the pool does not keep for it.
    fn check_tiers(&self) {
        let Some(tiers) = &self.tiers else { return };
        tiers.check();
        let mut copied: Vec<_> = tiers.copied_blocks().collect();
        copied.sort_unstable();
        let all = (0..self.kv.pool.total()).map(BlockId);
        let kept: Vec<_> = all.filter(|&block| self.kv.pool.is_copying(block)).collect();
        assert_eq!(copied, kept);
    }
}

impl KvBlocks {
    /// Panics when pool and cache disagree. The cost is linear in the pool.
    fn check(&self) {
        self.pool.check();
        let mut retained = 0;
        for block in (0..self.pool.total()).map(BlockId) {
            let known = self.cache.contains_block(block);
            assert_eq!(known, self.pool.is_retained(block), "block {}", block.0);
            retained += usize::from(known);
        }
        assert_eq!(retained, self.cache.len());
    }
}
