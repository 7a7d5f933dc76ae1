//! Admission: sequences enter the queue, and leave it with blocks.

use std::time::{Duration, Instant};

use kernels::{BLOCK_TOKENS, BlockId, KvGroups, NO_BLOCK, hit_blocks, sampling::SampledToken};

use super::{
    BlockedSequence, Scheduler,
    loading::publish,
    sequence::{Row, Sequence, SequenceBlocks, SequencePhase},
};
use crate::{
    constraint::COMPILE_TIMEOUT,
    event::{Action, NewSequence, SequenceFailure, SequenceId, SequenceKind},
    kv_blocks::{CachedPrefix, CachedState},
    tiers::TierStores,
};

/// Number of a row's results after its hand-over for which steps prefill less. With two steps in
/// flight these are three steps.
const CATCH_UP_RESULTS: u32 = 2;

impl Scheduler {
    pub(super) fn arrived(&mut self, now: Instant, new: NewSequence, actions: &mut Vec<Action>) {
        let (id, kind) = (new.id, new.kind);
        let compile_time = if new.constraint.is_some() { COMPILE_TIMEOUT } else { Duration::ZERO };
        let length_max = match self.accept(now, &new) {
            Ok(length_max) => length_max,
            Err(failure) => return actions.push(Action::Failed { id, failure }),
        };
        let arrival = self.next_arrival;
        self.next_arrival += 1;
        let mut sequence = Sequence::new(new, arrival, length_max, self.seeds);
        if let Some(sessions) = &mut self.sessions {
            let blocks = sequence.chain.hashes();
            let turn = sessions.arrived(now, arrival, sequence.session, blocks);
            sequence.arrival = turn.place().unwrap_or(arrival);
            sequence.turn = Some(turn);
        }
        self.sequences.insert(id, sequence);
        match kind {
            SequenceKind::Compute => {}
            SequenceKind::Receive => {
                self.sequences.set_alarm(id, now + self.config.reserve_timeout);
            }
            SequenceKind::Send => {
                self.transfers.expect_outgoing(id);
                // The receiver compiles the grammar before it reserves blocks.
                let ready_timeout = self.config.ready_timeout + compile_time;
                self.sequences.set_alarm(id, now + ready_timeout);
            }
        }
    }

    /// Returns the length at which a new sequence ends, or why it is rejected.
    fn accept(&self, now: Instant, new: &NewSequence) -> Result<usize, SequenceFailure> {
        let is_loading = |tiers: &TierStores| tiers.is_loading(new.id);
        if self.sequences.contains(new.id)
            || self.transfers.contains(new.id)
            || self.tiers.as_ref().is_some_and(is_loading)
        {
            return Err(SequenceFailure::Duplicate);
        }
        if new.deadline <= now {
            return Err(SequenceFailure::Deadline);
        }
        let length_max = self.length_max(new)?;
        if new.kind != SequenceKind::Compute
            && self.transfers.len() >= self.config.transfers_max as usize
        {
            let reason = format!("{} transfers are in flight", self.transfers.len());
            return Err(SequenceFailure::Busy { reason });
        }
        // Sequences that fit into free slots do not count: they wait for the next step only.
        let waiting_max = self.config.waiting_max.saturating_add(self.unclaimed_slots());
        let waiting = self.sequences.waiting().len();
        if new.kind != SequenceKind::Send && waiting >= waiting_max as usize {
            let reason = format!("{waiting} sequences wait already");
            return Err(SequenceFailure::Busy { reason });
        }
        Ok(length_max)
    }

    fn length_max(&self, new: &NewSequence) -> Result<usize, SequenceFailure> {
        let invalid = |reason: String| Err(SequenceFailure::Invalid { reason });
        let (len, prompt_len) = (new.tokens.len(), new.prompt_len as usize);
        if prompt_len == 0 || prompt_len > len {
            return invalid(format!(
                "invalid prompt_len: {prompt_len}; expected 1 to {len} (tokens)"
            ));
        }
        if let Err(error) = new.sampling.validate() {
            return invalid(error.to_string());
        }
        let vocabulary = self.config.limits.vocabulary;
        if let Some(position) = new.tokens.iter().position(|&token| token >= vocabulary) {
            let token = new.tokens[position];
            return invalid(format!(
                "invalid tokens[{position}]: {token}; expected less than {vocabulary} (vocabulary)"
            ));
        }
        // A sender prefills the given tokens only; the receiver checks the length of the output.
        let tokens_max = match new.kind {
            SequenceKind::Send => self.config.limits.sequence_tokens as usize,
            SequenceKind::Compute | SequenceKind::Receive => self.sequence_tokens_max(),
        };
        if len >= tokens_max || len > self.sequence_tokens_max() {
            return invalid(format!(
                "invalid sequence: {len} tokens; expected at most {}",
                self.sequence_tokens_max().min(tokens_max - 1)
            ));
        }
        let length_max = prompt_len.saturating_add(new.max_tokens as usize).min(tokens_max);
        if len >= length_max {
            let output = len - prompt_len;
            return invalid(format!(
                "invalid max_tokens: {}; expected more than {output} (generated)",
                new.max_tokens
            ));
        }
        Ok(length_max)
    }

    pub(super) fn transfer_ready(
        &mut self,
        id: SequenceId,
        first_block: u32,
        block_count: u32,
        actions: &mut Vec<Action>,
    ) {
        let Some(sequence) = self.sequences.get(id) else { return };
        if !matches!(sequence.phase(), SequencePhase::AwaitingReady) {
            return;
        }
        let len = sequence.tokens.len();
        let sent = self.kv.groups.sent(len, 0..len.div_ceil(BLOCK_TOKENS)).count() as u32;
        if block_count == 0 || first_block.checked_add(block_count) != Some(sent) {
            return self.fail(id, SequenceFailure::TransferFailed, actions);
        }
        // Reject the sender now: the change of the weights would fail it, and its receiver would
        // hold blocks until then.
        if !self.is_admitting {
            return self.fail(id, SequenceFailure::WeightsChanged, actions);
        }
        self.sequences.set_phase(id, SequencePhase::Waiting);
        self.transfers.set_first_block(id, first_block);
        self.sequences.clear_alarm(id);
    }

    pub(super) fn kv_arrived(
        &mut self,
        id: SequenceId,
        first_index: u32,
        token: SampledToken,
        actions: &mut Vec<Action>,
    ) {
        let Some(reserved) = self.transfers.arrived(id) else { return };
        let matches = |sequence: &&mut Sequence| {
            first_index == sequence.next_index() && token.id < self.config.limits.vocabulary
        };
        let Some(sequence) = self.sequences.get_mut(id).filter(matches) else {
            // The sequence was aborted, or the token is invalid; no write of the transfer can land.
            self.kv.cancel_reservation(&reserved, id);
            if self.sequences.contains(id) {
                self.fail(id, SequenceFailure::TransferFailed, actions);
            }
            return;
        };
        self.kv.accept(&reserved, id);
        let SequencePhase::Reserved { prefix } = sequence.phase() else {
            unreachable!("a sequence with an incoming transfer is reserved");
        };
        let (mut blocks, computed) = (prefix.clone(), sequence.tokens.len());
        let first = self.kv.groups.blocks(prefix.len());
        blocks.resize(self.kv.groups.entries(computed), NO_BLOCK);
        let entries = self.kv.groups.sent(computed, first..computed.div_ceil(BLOCK_TOKENS));
        entries.zip(reserved).for_each(|(entry, block)| blocks[entry] = block);
        for index in 0..computed / BLOCK_TOKENS {
            publish(&mut self.kv, &mut self.tiers, sequence, index, &blocks);
        }
        sequence.kind = SequenceKind::Compute;
        // The prefill peer computed them and sends them to the router.
        sequence.take_prompt_logprobs();
        let finish = sequence.take_token(token.id);
        let table = SequenceBlocks { blocks, computed, state: CachedState::default() };
        self.sequences.set_phase(id, SequencePhase::Ready(table));
        self.prompt_written(id);
        let finish = match finish {
            Ok(finish) => finish,
            Err(failure) => return self.fail(id, failure.into(), actions),
        };
        let sequence = &self.sequences[id];
        actions.push(Action::Tokens {
            id,
            first_index,
            tokens: vec![token],
            cached_tokens: sequence.cached_tokens.unwrap_or(0),
            prompt_logprobs: None,
        });
        match finish {
            None => self.request_mask(id),
            Some(_) => {
                self.end_turn(id);
                self.remove(id);
                actions.push(Action::Finished { id, reason: finish });
            }
        }
    }

    pub(super) fn transfer_ended(&mut self, id: SequenceId, actions: &mut Vec<Action>) {
        self.transfers.ended(id, &mut self.kv);
        // A `Receive` that outlives its transfer has become a `Compute`.
        let waits = |sequence: &Sequence| match sequence.phase() {
            SequencePhase::Reserved { .. } => true,
            _ => sequence.kind == SequenceKind::Send,
        };
        if self.sequences.get(id).is_some_and(waits) {
            self.fail(id, SequenceFailure::TransferFailed, actions);
        }
    }

    /// Reserves blocks for waiting receivers, in order, while blocks are available.
    pub(super) fn admit_receives(&mut self, actions: &mut Vec<Action>) {
        while self.is_admitting
            && let Some(id) = self.sequences.waiting().next_receive()
            && self.admit_receive(id, actions)
        {}
    }

    fn admit_receive(&mut self, id: SequenceId, actions: &mut Vec<Action>) -> bool {
        if self.unclaimed_slots() == 0 {
            return false;
        }
        let Some((CachedPrefix { table, state }, rest)) = self.hold_prefix(id, actions) else {
            return false;
        };
        // The prefill peer waits for the reservation, so a load has the same time-out as a wait for
        // blocks. Both waits together stay below the peer's time-out (`ready_timeout`).
        let most = self.config.reserve_timeout;
        let Some(table) = self.load_prefix(id, table, most, actions) else { return true };
        let rest = self.kv.reserve(rest, id).expect("availability was checked");
        self.reserve_rest(id, CachedPrefix { table, state }, rest, actions);
        true
    }

    /// Holds the cached blocks of the sequence's prefix, and returns them with the number of blocks
    /// that the sequence needs beside them. Returns `None` if too few blocks are available for the
    /// rest.
    fn hold_prefix(
        &mut self,
        id: SequenceId,
        actions: &mut Vec<Action>,
    ) -> Option<(CachedPrefix, u32)> {
        if self.still_lacks_blocks(id) {
            return None;
        }
        match self.fit_prefix(id) {
            Ok((prefix, rest)) => {
                self.blocked.take_if(|blocked| blocked.id == id);
                self.kv.hold(&prefix.table);
                self.kv.hold(&prefix.state.blocks);
                Some((prefix, rest))
            }
            Err(needed) => {
                let (headroom, pool_changes) = (self.headroom(), self.kv.pool.changes());
                self.blocked = Some(BlockedSequence { id, needed, headroom, pool_changes });
                self.cancel_awaited_saves(needed, actions);
                None
            }
        }
    }

    /// Returns whether the sequence lacked blocks at its last try, and nothing has changed since.
    /// A look-up of a long prefix in the prefix cache at every input would delay the steps.
    pub(super) fn still_lacks_blocks(&self, id: SequenceId) -> bool {
        let now = (id, self.headroom(), self.kv.pool.changes());
        self.blocked.as_ref().is_some_and(|it| (it.id, it.headroom, it.pool_changes) == now)
    }

    /// Returns the cached blocks of the sequence's prefix and the number of blocks that the
    /// sequence needs beside them, or the number of blocks that would have to be available.
    pub(super) fn fit_prefix(&self, id: SequenceId) -> Result<(CachedPrefix, u32), u32> {
        let (sequence, groups) = (&self.sequences[id], &self.kv.groups);
        let (len, receives) = (sequence.tokens.len(), sequence.kind == SequenceKind::Receive);
        let (chain, tokens) = (&sequence.chain, sequence.cacheable_tokens());
        let is_received = |cached| receives && !is_less_than_a_block(len, groups, cached);
        let prefix = self.kv.cached_prefix(chain, tokens, is_received);
        let fit = self.fit(len, receives, prefix);
        // A cached state takes blocks beside the sequence's own. The pool may never have both.
        match fit {
            Err(needed) if groups.state_entries() > 0 && needed > self.kv.pool.total() => {
                self.fit(len, receives, CachedPrefix::default())
            }
            fit => fit,
        }
    }

    /// Returns the prefix of a sequence of `len` tokens and the number of blocks that the sequence
    /// needs beside it, or the number of blocks that would have to be available.
    fn fit(
        &self,
        len: usize,
        receives: bool,
        prefix: CachedPrefix,
    ) -> Result<(CachedPrefix, u32), u32> {
        let (groups, cached) = (&self.kv.groups, prefix.table.len());
        let rest = match receives && !self.is_prefilled_here(len, &prefix) {
            true => groups.sent(len, groups.blocks(cached)..len.div_ceil(BLOCK_TOKENS)).count(),
            false => groups.entries(len) - cached + groups.split(&prefix.table).0.len(),
        };
        self.kv.fits(&prefix, rest as u32, self.headroom())?;
        Ok((prefix, rest as u32))
    }

    /// Returns whether a decode node prefills the rest of a prompt of `len` tokens itself, because
    /// it has the state and the rest is less than a block.
    fn is_prefilled_here(&self, len: usize, prefix: &CachedPrefix) -> bool {
        let groups = &self.kv.groups;
        let has_state = prefix.state.blocks.len() == groups.split(&prefix.table).0.len();
        has_state && is_less_than_a_block(len, groups, prefix.table.len())
    }

    /// Requests the KV of the reserved blocks `rest` from the prefill peer, or computes it here if
    /// it is less than a block.
    pub(super) fn reserve_rest(
        &mut self,
        id: SequenceId,
        prefix: CachedPrefix,
        mut rest: Vec<BlockId>,
        actions: &mut Vec<Action>,
    ) {
        let len = self.sequences[id].tokens.len();
        let local_prefill = self.is_prefilled_here(len, &prefix);
        let CachedPrefix { mut table, state } = prefix;
        let sequence = self.sequences.known_mut(id);
        let computed = self.kv.groups.tokens(table.len());
        sequence.set_cached(computed);
        let cached_tokens = sequence.cached_tokens.unwrap_or(0);
        if local_prefill {
            self.kv.accept(&rest, id);
            self.kv.complete(&mut table, &rest);
            sequence.kind = SequenceKind::Compute;
            let table = SequenceBlocks { blocks: table, computed, state };
            self.sequences.set_phase(id, SequencePhase::Ready(table));
        } else {
            debug_assert!(state.blocks.is_empty(), "the state is received");
            let cached = computed / BLOCK_TOKENS;
            let groups = &self.kv.groups;
            let first_block = groups.sent(len, 0..cached).count();
            let sent = groups.sent(len, 0..len.div_ceil(BLOCK_TOKENS)).count();
            // These blocks were reserved for a load; the transfer does not write them.
            let surplus = rest.split_off(sent - first_block);
            self.kv.cancel_reservation(&surplus, id);
            self.kv.release_behind(&mut table, hit_blocks(len) * BLOCK_TOKENS);
            self.sequences.set_phase(id, SequencePhase::Reserved { prefix: table });
            self.transfers.start_incoming(id, rest.clone());
            let first_block = first_block as u32;
            actions.push(Action::Reserve { id, cached_tokens, first_block, blocks: rest });
        }
        self.sequences.clear_alarm(id);
        actions.push(Action::Admitted { id, cached_tokens, local_prefill });
    }

    /// Moves sequences that have their blocks into the batch.
    pub(super) fn admit_ready(&mut self) {
        while let Some(&(_, id)) = self.sequences.ready().first() {
            let (slot, generation) = self.slots.occupy().expect("its slot was claimed");
            let given_len = self.sequences[id].given_len;
            let row = self.sequences.join_batch(id, slot, generation);
            // Only token 0, which the prefill peer sampled, is not computed.
            let is_handed_over = row.length > given_len && row.computed + 1 == row.length;
            row.catch_up = if is_handed_over { CATCH_UP_RESULTS } else { 0 };
        }
    }

    /// Returns the sequence that may try to join the batch now. While the batch drains, this is a
    /// preempted sequence.
    fn next_compute(&self) -> Option<SequenceId> {
        match self.is_admitting {
            true => self.sequences.waiting().next_compute(),
            false => self.sequences.first_preempted(),
        }
    }

    /// Moves the next sequence of the queue into the batch if a slot and blocks are free. Sequences
    /// before it may begin to wait for a load.
    pub(super) fn admit_compute(&mut self, actions: &mut Vec<Action>) -> Option<SequenceId> {
        loop {
            let id = self.next_compute()?;
            if self.unclaimed_slots() == 0 {
                self.refuse_sends(actions);
                return None;
            }
            let Some((CachedPrefix { table, state }, rest)) = self.hold_prefix(id, actions) else {
                if self.is_admitting {
                    self.sequences.compute_lacks_blocks();
                }
                self.refuse_sends(actions);
                return None;
            };
            let Some(mut blocks) = self.load_prefix(id, table, Duration::MAX, actions) else {
                continue;
            };
            let computed = self.kv.groups.tokens(blocks.len());
            let rest = self.kv.allocate(rest).expect("availability was checked");
            self.kv.complete(&mut blocks, &rest);
            self.report_admission(id, &blocks, computed, actions);
            let (slot, generation) = self.slots.occupy().expect("a slot is unclaimed");
            let table = SequenceBlocks { blocks, computed, state };
            let row = Row::new(slot, generation, table, self.sequences[id].tokens.len());
            self.sequences.set_phase(id, SequencePhase::Running(row));
            return Some(id);
        }
    }

    /// Fails the waiting `Send`s as busy if this node holds reservations. Called when blocks or
    /// slots are lacking. Otherwise two nodes that prefill for each other could deadlock: each node
    /// keeps its blocks reserved until KV arrives from a `Send` that waits for blocks on the other
    /// node.
    fn refuse_sends(&mut self, actions: &mut Vec<Action>) {
        if self.sequences.reserved_count() == 0 {
            return;
        }
        for id in self.sequences.waiting_sends() {
            let reason = "no room to prefill for a peer beside reservations".to_owned();
            self.fail(id, SequenceFailure::Busy { reason }, actions);
        }
    }

    /// Reports that a sequence has `blocks`, which hold the KV of its first `computed` tokens.
    pub(super) fn report_admission(
        &mut self,
        id: SequenceId,
        blocks: &[BlockId],
        computed: usize,
        actions: &mut Vec<Action>,
    ) {
        let sequence = self.sequences.known_mut(id);
        if sequence.cached_tokens.is_none() {
            sequence.set_cached(computed);
            if sequence.kind == SequenceKind::Compute {
                let cached_tokens = sequence.cached_tokens.unwrap_or(0);
                actions.push(Action::Admitted { id, cached_tokens, local_prefill: true });
            }
        }
        if sequence.kind == SequenceKind::Send {
            let written = (sequence.given_len, computed / BLOCK_TOKENS);
            actions.extend(self.transfers.hand_over(id, blocks, written, &mut self.kv));
        }
    }

    /// Returns the slots that are neither occupied nor claimed by a sequence with blocks.
    fn unclaimed_slots(&self) -> u32 {
        self.slots.free_count() - self.sequences.claims()
    }

    /// Returns the available blocks that a running row needs, and those that a waiting sequence
    /// needs; 0 when none waits for blocks.
    pub(super) fn awaited_blocks(&self) -> [u32; 2] {
        let blocked = self.blocked.as_ref().filter(|_| self.unclaimed_slots() > 0);
        // The row may have ended since the last plan.
        let row_lacks = if self.sequences.running().is_empty() { 0 } else { self.row_lacks };
        [row_lacks, blocked.map_or(0, |it| it.needed)]
    }

    /// Returns the blocks to leave for the batch: one of each KV group for each row, so that a new
    /// row is not preempted in the next step. 0 when the batch is empty.
    pub(super) fn headroom(&self) -> u32 {
        let (running, ready) = (self.sequences.running(), self.sequences.ready());
        let rows = (running.len() + ready.len()) as u32 + self.sequences.loading_count();
        rows * self.kv.groups.count() as u32
    }
}

/// Returns whether the rest of a prompt is less than a block. `len`: tokens of the prompt.
/// `cached`: table entries of its cached prefix.
fn is_less_than_a_block(len: usize, groups: &KvGroups, cached: usize) -> bool {
    len - groups.tokens(cached) < BLOCK_TOKENS
}
