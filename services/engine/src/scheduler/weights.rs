//! Moves sequences to other weights. No KV of the old weights is used afterwards.

use super::{
    Scheduler,
    sequence::{Arrival, Phase, Sequence},
};
use crate::{
    event::{Action, SequenceFailure, SequenceId, SequenceKind},
    prefix_cache::CacheSeeds,
};

impl Scheduler {
    /// Continues with the keys of other weights. Sequences that this node computes alone lose their KV and are
    /// recomputed over all their tokens. Sequences of transfers fail, and every transfer is aborted: the peer may
    /// have the old weights. Cached blocks are dropped.
    ///
    /// # Panics
    /// When a step is in flight.
    pub fn change_weights(&mut self, seeds: CacheSeeds, actions: &mut Vec<Action>) {
        assert!(self.frames.is_empty(), "weights change between steps");
        self.seeds = seeds;
        let of_transfers = |kind| matches!(kind, SequenceKind::Send | SequenceKind::Receive);
        let mut failed: Vec<(Arrival, SequenceId)> = self
            .sequences
            .iter()
            .filter(|(_, sequence)| of_transfers(sequence.kind))
            .map(|(&id, sequence)| (sequence.arrival, id))
            .collect();
        failed.sort_unstable();
        for (_, id) in failed {
            self.fail(id, SequenceFailure::WeightsChanged, actions);
        }
        // A transfer may outlive its sequence.
        for id in self.transfers.ids() {
            self.abort_transfer(id, "the weights changed", actions);
        }
        let is_loading = |sequence: &Sequence| matches!(sequence.phase, Phase::Loading { .. });
        let mut loading: Vec<(Arrival, SequenceId)> = self
            .sequences
            .iter()
            .filter(|(_, sequence)| is_loading(sequence))
            .map(|(&id, sequence)| (sequence.arrival, id))
            .collect();
        loading.sort_unstable();
        for (_, id) in loading {
            self.leave_load(id);
        }
        for (_, id) in std::mem::take(&mut self.ready) {
            let sequence = self.sequences.get_mut(&id).expect("a ready sequence is known");
            let Phase::Ready(table) = std::mem::replace(&mut sequence.phase, Phase::Waiting) else {
                unreachable!("a sequence in `ready` is ready");
            };
            self.kv.release(&table.blocks);
            self.waiting.push_compute(sequence.arrival, id);
        }
        for (_, id) in self.running.clone() {
            self.preempt(id);
        }
        for sequence in self.sequences.values_mut() {
            sequence.chain.reseed(seeds, &sequence.tokens);
        }
        // Transfers that are being aborted still hold blocks. Their keys are those of the old weights, so no lookup
        // finds them.
        self.kv.drop_cached();
    }
}
