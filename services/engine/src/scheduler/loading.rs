//! Saves to and loads from the KV tiers, with the blocks and sequences that they concern.

use std::time::{Duration, Instant};

use kernels::{BLOCK_TOKENS, BlockId, NO_BLOCK, hit_blocks};

use super::{
    Scheduler,
    sequence::{Sequence, SequenceBlocks, SequencePhase},
    sequence_sessions::SequenceSessions,
};
use crate::{
    block_pool::BlockState,
    event::{Action, BlockHash, CacheChange, SequenceId, SequenceKind},
    kv_blocks::{CachedPrefix, CachedState, KvBlocks, blocks_of},
    tiers::{
        ChosenLoad, FinishedLoad, JobId, NoSource, SaveSource, Tier, TierConfig, TierEvent,
        TierStats, TierStores,
    },
};

impl Scheduler {
    /// Turns the tiers on. Without them the scheduler emits no [`Action::Save`] and no
    /// [`Action::Load`].
    ///
    /// # Panics
    /// When sequences have a state, which the tiers do not keep.
    pub fn with_tiers(mut self, config: TierConfig, now: Instant) -> Self {
        let groups = self.kv.groups.clone();
        assert_eq!(groups.state_entries(), 0, "tiers keep no states");
        self.tiers = Some(TierStores::new(config, groups, self.config.limits.blocks, now));
        self.sessions = config.sessions.then(SequenceSessions::default);
        self
    }

    /// Returns the statistics of a tier; `None` without this tier.
    pub fn tier_stats(&self, tier: Tier) -> Option<TierStats> {
        self.tiers.as_ref()?.stats(tier)
    }

    /// Takes the changes of a tier's blocks since the last call; each key occurs at most once.
    pub fn take_tier_changes(&mut self, tier: Tier) -> Vec<CacheChange> {
        self.tiers.as_mut().map(|tiers| tiers.take_changes(tier)).unwrap_or_default()
    }

    /// Returns the keys of the `most` blocks of a tier that were used last.
    pub fn tier_hashes(&self, tier: Tier, most: usize) -> Vec<BlockHash> {
        self.tiers.as_ref().map(|tiers| tiers.keys(tier, most)).unwrap_or_default()
    }

    /// Sets the time from which the tiers compute deadlines and ages.
    pub(super) fn set_tiers_now(&mut self, now: Instant) {
        if let Some(tiers) = &mut self.tiers {
            tiers.set_now(now);
            self.kv.pool.end_kept(now);
        }
    }

    /// Counts and offers blocks of admitted prompts and written blocks, and starts queued saves, as
    /// many as may be in flight. Call it after each step.
    pub fn start_saves(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if let Some(tiers) = &mut self.tiers {
            tiers.set_now(now);
            tiers.count_admitted();
            tiers.count_written();
        }
        self.start_queued_saves(now, actions);
    }

    /// Starts queued saves, as many as may be in flight.
    pub(super) fn start_queued_saves(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let awaited = self.awaited_blocks();
        let Some(tiers) = &mut self.tiers else { return };
        tiers.set_now(now);
        let resident = |kv: &KvBlocks, key| {
            let (block, contents) = kv.cache.get(key).ok_or(NoSource::Evicted)?;
            let is_cached = kv.pool.state(block) == BlockState::Cached;
            // Start no further copies while a sequence waits for blocks that the copies in flight
            // will release.
            let copies_keep =
                |needed: u32| needed >= kv.pool.available() && needed <= kv.pool.evictable();
            let waits = awaited.into_iter().any(copies_keep);
            if is_cached && waits { Err(NoSource::Awaited) } else { Ok((block, contents)) }
        };
        while let Some(save) = tiers.next_save(|key| resident(&self.kv, key)) {
            if let SaveSource::Block(block) = save.source {
                self.kv.pool.begin_copy(block);
            }
            actions.push(Action::Save(save));
        }
    }

    /// If saves keep some of the `needed` blocks, cancels the saves whose copies have not begun.
    pub(super) fn cancel_awaited_saves(&mut self, needed: u32, actions: &mut Vec<Action>) {
        let pool = &self.kv.pool;
        let is_awaited = |block| pool.state(block) == BlockState::Cached;
        if needed <= pool.evictable()
            && let Some(tiers) = &mut self.tiers
            && let Some(last) = tiers.cancel_saves(is_awaited)
        {
            actions.push(Action::CancelSaves { last });
        }
    }

    pub(super) fn handle_tier(&mut self, event: TierEvent, actions: &mut Vec<Action>) {
        let Some(tiers) = &mut self.tiers else { return };
        let copied = match event {
            TierEvent::Copied { job } => tiers.end_copy(job),
            TierEvent::Saved { job } => tiers.end_save(job, true),
            TierEvent::SaveFailed { job } => tiers.end_save(job, false),
            TierEvent::Loaded { job, intact, took } => {
                if let Some(finished) = tiers.end_load(job, intact, took) {
                    self.loaded(job, finished, actions);
                }
                None
            }
            TierEvent::Grown { tier, slots } => {
                tiers.grow(tier, slots);
                None
            }
            TierEvent::Recovered { tier, blocks, is_complete } => {
                tiers.recover(tier, &blocks, is_complete);
                None
            }
        };
        if let Some(block) = copied {
            self.kv.pool.end_copy(block);
        }
    }

    /// Extends a sequence's held prefix with blocks of the tiers, if loading them is faster than
    /// computing and blocks for all its tokens are available. Then returns `None`, and the sequence
    /// waits in phase `Loading` for at most `most`. Otherwise returns the prefix.
    pub(super) fn load_prefix(
        &mut self,
        id: SequenceId,
        prefix: Vec<BlockId>,
        most: Duration,
        actions: &mut Vec<Action>,
    ) -> Option<Vec<BlockId>> {
        let headroom = self.headroom();
        let Some(tiers) = &mut self.tiers else { return Some(prefix) };
        let sequence = self.sequences.known_mut(id);
        let (groups, held) = (self.kv.groups.clone(), prefix.len());
        let (resident, len) = (groups.blocks(held), sequence.tokens.len());
        let keys = &sequence.chain.hashes()[resident..hit_blocks(len).max(resident)];
        // A load reserves blocks for all tokens. A decode node that receives the KV needs fewer.
        let rest = self.kv.entries(len) - held as u32;
        let fits = self.kv.pool.available() >= rest + headroom;
        let ChosenLoad { count, slots } = match sequence.may_load && fits {
            true => tiers.choose_load(keys, resident, most),
            false => ChosenLoad::default(),
        };
        let end = resident + count;
        if sequence.counted_blocks == 0 {
            // The other blocks are counted when they are computed.
            sequence.counted_blocks = end;
            sequence.continues = end > 0;
            let keys = &sequence.chain.hashes()[..end];
            tiers.prefix_admitted(keys, resident);
            // The window of an equal prompt is counted at the first token.
            if end != hit_blocks(sequence.given_len) {
                tiers.window_written(keys, 0, false);
                sequence.window_end = end;
            }
        }
        if count == 0 {
            return Some(prefix);
        }
        let reserved = self.kv.reserve(rest, id).expect("availability was checked");
        let (chain, tokens) = (&sequence.chain, &sequence.tokens);
        let entries = groups.needed(end * BLOCK_TOKENS, resident..end);
        let target = |entry| {
            let (index, group) = groups.place(entry);
            (chain.contents(tokens, index).of_group(group), reserved[entry - held])
        };
        let mut targets: Vec<_> = entries.map(target).collect();
        // A load that only measures its tier reads the first of these blocks, and the sequence takes
        // none of them.
        let count = if slots.len() < targets.len() { 0 } else { count };
        targets.truncate(slots.len());
        let load = tiers.start_load(id, slots, targets, reserved);
        self.sequences.set_phase(id, SequencePhase::Loading { prefix, count, job: load.job });
        self.sequences.set_alarm(id, tiers.load_deadline(most));
        actions.push(Action::Load(load));
        None
    }

    fn loaded(&mut self, job: JobId, finished: FinishedLoad, actions: &mut Vec<Action>) {
        let FinishedLoad { load, intact } = finished;
        let id = load.id;
        let (mut prefix, count) = match self.sequences.get(id).map(Sequence::phase) {
            Some(SequencePhase::Loading { prefix, count, job: awaited }) if *awaited == job => {
                (prefix.clone(), *count)
            }
            _ => return self.kv.cancel_reservation(&load.blocks, id),
        };
        let (groups, held) = (self.kv.groups.clone(), prefix.len());
        let resident = groups.blocks(held);
        let needed = |end: usize| groups.needed(end * BLOCK_TOKENS, resident..end);
        let end = match intact == needed(resident + count).count() {
            true => resident + count,
            // An earlier token attends to blocks that the load does not have.
            false if groups.has_windows() => resident,
            false => resident + intact,
        };
        let sequence = &self.sequences[id];
        if let Some(tiers) = &mut self.tiers {
            tiers.count_hits(&load, needed(end).count());
        }
        let (covered, rest) = load.blocks.split_at((end - resident) * groups.count());
        let computed = end * BLOCK_TOKENS;
        self.kv.release_behind(&mut prefix, computed);
        prefix.resize(held + covered.len(), NO_BLOCK);
        for entry in needed(end) {
            let block = covered[entry - held];
            prefix[entry] = block;
            self.kv.accept(&[block], id);
            self.kv.publish(&sequence.chain, &sequence.tokens, groups.place(entry), block);
        }
        let behind = covered.iter().zip(&prefix[held..]).filter(|(_, entry)| **entry == NO_BLOCK);
        let behind: Vec<_> = behind.map(|(block, _)| *block).collect();
        self.kv.cancel_reservation(&behind, id);
        let tokens = ((end - resident) * BLOCK_TOKENS) as u32;
        actions.push(Action::Loaded { id, tokens });
        if sequence.kind == SequenceKind::Receive {
            let prefix = CachedPrefix { table: prefix, state: CachedState::default() };
            return self.reserve_rest(id, prefix, rest.to_vec(), actions);
        }
        self.kv.accept(rest, id);
        prefix.extend_from_slice(rest);
        self.report_admission(id, &prefix, computed, actions);
        self.sequences.clear_alarm(id);
        let table = SequenceBlocks { blocks: prefix, computed, state: CachedState::default() };
        self.sequences.set_phase(id, SequencePhase::Ready(table));
    }

    /// Handles the time-out of a load: returns the sequence to its queue, and lets it load nothing
    /// any more.
    pub(super) fn give_up_load(&mut self, now: Instant, id: SequenceId, actions: &mut Vec<Action>) {
        self.leave_load(id, actions);
        let sequence = self.sequences.known_mut(id);
        sequence.may_load = false;
        if sequence.kind == SequenceKind::Receive {
            self.sequences.set_alarm(id, now + self.config.reserve_timeout);
        }
    }

    /// Returns a sequence to its queue. Its load keeps its blocks until it ends.
    pub(super) fn leave_load(&mut self, id: SequenceId, actions: &mut Vec<Action>) {
        let loading = self.sequences.set_phase(id, SequencePhase::Waiting);
        let SequencePhase::Loading { prefix, .. } = loading else {
            unreachable!("the caller checked the phase");
        };
        self.kv.release(&prefix);
        self.sequences.clear_alarm(id);
        actions.push(Action::Loaded { id, tokens: 0 });
    }

    /// Keeps the queue place and the KV of a finished turn for the next turn of its session. Call
    /// it before the sequence releases its blocks.
    pub(super) fn end_turn(&mut self, id: SequenceId) {
        let published = match self.sequences[id].phase() {
            SequencePhase::Running(row) => row.published,
            SequencePhase::Ready(table) => table.computed / BLOCK_TOKENS,
            _ => 0,
        };
        if published > self.sequences[id].window_end {
            self.window_written(id, published);
        }
        let (Some(sessions), Some(tiers)) = (&mut self.sessions, &self.tiers) else { return };
        let sequence = self.sequences.known_mut(id);
        let Some(turn) = sequence.turn.take() else { return };
        let last = sequence.chain.hashes().last().copied();
        let table: &[BlockId] = match sequence.phase() {
            SequencePhase::Running(row) => &row.blocks,
            SequencePhase::Ready(table) => &table.blocks,
            _ => &[],
        };
        let covered = self.kv.groups.blocks(table.len());
        let blocks = &blocks_of(table).collect::<Vec<_>>();
        let share = blocks.len() as f32 / self.config.limits.blocks as f32;
        let cost = (tiers.restore_time(covered, blocks.len()), share);
        let place = turn.session_place();
        let mut kept_places = sessions.kept_places(&turn).to_vec();
        kept_places.dedup();
        let keep = sessions.ended(tiers.now(), turn, sequence.session, last, cost);
        // This turn ended the keep time of the previous turns.
        for kept_place in kept_places {
            self.kv.pool.stop_keeping(blocks, kept_place);
        }
        // The next turn cannot use KV of earlier weights.
        if !keep.is_zero() && !sequence.has_old_kv {
            self.kv.pool.keep(blocks, tiers.now() + keep, place);
        }
    }

    /// Lets the tiers offer the window before the end of a prompt whose KV is written. Call it at
    /// the sequence's first token: later, blocks behind the window of the answer are evicted. So a
    /// sequence with output that is recomputed with new weights offers the window of its answer
    /// only.
    pub(super) fn prompt_written(&mut self, id: SequenceId) {
        self.window_written(id, hit_blocks(self.sequences[id].given_len));
    }

    /// Lets the tiers offer the window before the end of the sequence's first `blocks` blocks of
    /// each group.
    fn window_written(&mut self, id: SequenceId, blocks: usize) {
        let sequence = self.sequences.known_mut(id);
        if let Some(tiers) = self.tiers.as_mut().filter(|_| sequence.is_published()) {
            let keys = &sequence.chain.hashes()[..blocks];
            tiers.window_written(keys, sequence.window_end, sequence.continues);
            sequence.window_end = blocks;
        }
    }

    /// Lets the tiers offer the blocks of a preempted sequence after the launch of the step,
    /// because the sequence will return.
    pub(super) fn offer_preempted(&mut self, id: SequenceId, published: usize) {
        let Some(tiers) = &mut self.tiers else { return };
        let chain = &self.sequences[id].chain;
        for index in 0..published {
            tiers.block_written(chain.hashes()[index], chain.parent(index), true, true);
        }
        tiers.window_written(&chain.hashes()[..published], published, true);
    }
}

/// Adds block `index` of each group, whose KV is written, to the prefix cache and to the written
/// blocks of the tiers. Does nothing if no other sequence may use the KV.
pub(super) fn publish(
    kv: &mut KvBlocks,
    tiers: &mut Option<TierStores>,
    sequence: &mut Sequence,
    index: usize,
    table: &[BlockId],
) {
    if !sequence.is_published() {
        return;
    }
    let blocks = &table[kv.groups.entries_of(index..index + 1)];
    for (group, &block) in blocks.iter().enumerate().filter(|(_, block)| **block != NO_BLOCK) {
        kv.publish(&sequence.chain, &sequence.tokens, (index, group), block);
    }
    let Some(tiers) = tiers.as_mut().filter(|_| blocks[0] != NO_BLOCK) else { return };
    let (key, parent) = (sequence.chain.hashes()[index], sequence.chain.parent(index));
    let is_counted = index < sequence.counted_blocks;
    sequence.counted_blocks = sequence.counted_blocks.max(index + 1);
    tiers.block_written(key, parent, is_counted, sequence.continues);
}
