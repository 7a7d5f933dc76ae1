//! Moves sequences to new weights. Afterwards KV of the old weights is used only by a sequence that
//! keeps its own KV.

use super::{
    Scheduler,
    sequence::{Sequence, SequencePhase},
};
use crate::{
    event::{Action, FinishReason, InFlight, SequenceFailure, SequenceKind},
    prefix_cache::CacheSeeds,
};

impl Scheduler {
    /// Drains the batch: admits no sequence until the weights change or [`Self::admit_again`],
    /// except preempted sequences, which finish like the sequences of the batch. Fails waiting
    /// senders at once, because the change would fail them and their receivers hold blocks.
    pub fn stop_admitting(&mut self, actions: &mut Vec<Action>) {
        self.is_admitting = false;
        let waits = |sequence: &Sequence| {
            sequence.kind == SequenceKind::Send
                && !matches!(sequence.phase(), SequencePhase::Running(_))
        };
        self.fail_where(waits, actions);
    }

    /// Fails every sequence and aborts every transfer, because the node has no valid weights.
    pub fn fail_all(&mut self, actions: &mut Vec<Action>) {
        self.fail_where(|_| true, actions);
        for id in self.transfers.ids() {
            self.abort_transfer(id, "the node has no weights", actions);
        }
    }

    /// Admits sequences again.
    pub fn admit_again(&mut self) {
        self.is_admitting = true;
    }

    /// Returns whether a sequence is in the batch or will join it while the batch drains, or KV is
    /// being transferred.
    pub fn has_running(&self) -> bool {
        !self.sequences.running().is_empty()
            || self.sequences.claims() > 0
            || self.transfers.have_blocks()
            || self.sequences.first_preempted().is_some()
    }

    /// Fails every sequence for which `applies` returns true, oldest first.
    fn fail_where(&mut self, applies: impl Fn(&Sequence) -> bool, actions: &mut Vec<Action>) {
        for id in self.sequences.by_age(applies) {
            self.fail(id, SequenceFailure::WeightsChanged, actions);
        }
    }

    /// Changes to the cache keys of new weights. Sequences that this node computes alone are
    /// recomputed over all their tokens, or keep their KV if they run, have output and `in_flight`
    /// is `KeepKv`. Sequences of transfers fail, and every transfer is aborted: the peer may have
    /// the old weights. Drops cached blocks and queued saves. Admits waiting sequences again.
    ///
    /// # Panics
    /// When a step is in flight.
    pub fn change_weights(
        &mut self,
        seeds: CacheSeeds,
        in_flight: InFlight,
        actions: &mut Vec<Action>,
    ) {
        assert!(self.frames.is_empty(), "weights change between steps");
        self.seeds = seeds;
        self.is_admitting = true;
        self.empty_batch(in_flight, actions);
        // No sequence looks up blocks of the old weights, and the prefix cache is about to drop
        // them.
        if let Some(tiers) = &mut self.tiers {
            tiers.drop_pending();
        }
        for sequence in self.sequences.values_mut() {
            sequence.chain.reseed(seeds, &sequence.tokens);
            // Computed with the old weights; a sequence that continues computes them again.
            sequence.prompt_logprobs.clear();
            // The blocks of the new keys have not occurred in this request.
            sequence.counted_blocks = 0;
            sequence.window_end = 0;
            sequence.continues = false;
        }
        // Transfers that are being aborted still hold blocks. Their keys are those of the old
        // weights, so no lookup finds them.
        self.kv.drop_cached();
    }

    /// Removes every sequence from the batch, unless `in_flight` keeps its KV. Sequences of
    /// transfers fail, and every transfer is aborted. The other removed sequences wait for
    /// admission.
    ///
    /// # Panics
    /// When a step is in flight.
    pub fn empty_batch(&mut self, in_flight: InFlight, actions: &mut Vec<Action>) {
        assert!(self.frames.is_empty(), "sequences leave the batch between steps");
        self.row_lacks = 0;
        let is_transferred = |sequence: &Sequence| {
            matches!(sequence.kind, SequenceKind::Send | SequenceKind::Receive)
        };
        self.fail_where(is_transferred, actions);
        // A transfer may outlive its sequence.
        for id in self.transfers.ids() {
            self.abort_transfer(id, "the weights changed", actions);
        }
        if in_flight == InFlight::Abort {
            self.end_with_output(actions);
        }
        let is_loading =
            |sequence: &Sequence| matches!(sequence.phase(), SequencePhase::Loading { .. });
        for id in self.sequences.by_age(is_loading) {
            self.leave_load(id, actions);
        }
        for (_, id) in self.sequences.ready().to_vec() {
            let ready = self.sequences.set_phase(id, SequencePhase::Waiting);
            let SequencePhase::Ready(table) = ready else {
                unreachable!("a sequence in `ready` is ready");
            };
            self.release_table(&table);
        }
        for (_, id) in self.sequences.running().to_vec() {
            let sequence = self.sequences.known_mut(id);
            if in_flight == InFlight::KeepKv && sequence.next_index() > 0 {
                sequence.has_old_kv = true;
            } else {
                self.preempt(id);
            }
        }
    }

    /// Ends the sequences whose next token would follow tokens of other weights.
    fn end_with_output(&mut self, actions: &mut Vec<Action>) {
        for id in self.sequences.by_age(|sequence| sequence.next_index() > 0) {
            self.end_turn(id);
            self.remove(id);
            actions.push(Action::Finished { id, reason: Some(FinishReason::Abort) });
        }
    }
}
