//! One sequence: tokens, parameters and phase.

use std::{sync::Arc, time::Instant};

use kernels::{
    BLOCK_TOKENS, BlockId, KvGroups, hit_blocks,
    sampling::{SampledToken, Sampling, TokenLogprobs},
};

use super::{draft_budget::RowDrafts, sequence_sessions::SequenceTurn};
use crate::{
    adapter::LoadedAdapter,
    constraint::{ActiveConstraint, ConstraintFailure},
    event::{BlockHash, FinishReason, NewSequence, SequenceKind, SessionHint},
    kv_blocks::CachedState,
    plan::{Generation, Slot, StepId},
    prefix_cache::{CacheSeeds, HashChain},
    tiers::JobId,
};

/// Order of arrival; a preempted sequence keeps its place, and a turn may have the place of its
/// session.
pub(super) type Arrival = u64;

/// State of a sequence. The fields that every step reads come first and share cache lines: with
/// hundreds of rows, a step mostly waits for memory.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Sequence {
    phase: SequencePhase,
    /// Kind of the sequence. A `Receive` becomes a `Compute` when its KV has arrived, or when it
    /// needs no transfer.
    pub(super) kind: SequenceKind,
    pub(super) ignore_stop_tokens: bool,
    /// Whether the sequence may wait for a load from the KV tiers; false after such a load took too
    /// long.
    pub(super) may_load: bool,
    /// Whether some of the row's KV was computed with earlier weights. No other sequence may use
    /// this KV.
    pub(super) has_old_kv: bool,
    /// Whether the prompt began with a hit in the prefix cache or a load from the KV tiers when the
    /// sequence was first admitted.
    pub(super) continues: bool,
    /// Tokens that were cached when the sequence was first admitted.
    pub(super) cached_tokens: Option<u32>,
    /// Length at which the request ends without a stop token.
    pub(super) length_max: usize,
    /// Grammar; it has consumed the output in `tokens`.
    pub(super) constraint: Option<ActiveConstraint>,
    /// Every token known to the host. Tokens that the device has sampled since are unknown and have
    /// no entry.
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_len: usize,
    /// Tokens at arrival.
    pub(super) given_len: usize,
    pub(super) chain: HashChain,
    /// In use until the sequence leaves.
    pub(super) adapter: Option<Arc<LoadedAdapter>>,
    /// Number of leading full blocks that the KV tiers count or have counted for this sequence.
    pub(super) counted_blocks: usize,
    /// Number of leading full blocks before the end of the last window that the KV tiers count or
    /// have counted for this sequence. Of a later window, they have counted the blocks before it.
    pub(super) window_end: usize,
    pub(super) sampling: Sampling,
    /// With [`Sampling::prompt_logprobs`]: those computed so far, of the prompt tokens from the
    /// second on.
    pub(super) prompt_logprobs: Vec<TokenLogprobs>,
    /// Place in the queue: the order of arrival of the sequence, or of the session that it
    /// continues.
    pub(super) arrival: Arrival,
    pub(super) deadline: Instant,
    /// Deadline of the sequence, or the earlier deadline of its current wait.
    pub(super) alarm: Instant,
    pub(super) session: SessionHint,
    /// The turn of its session; `None` when sessions are not followed, and after the end of the
    /// turn.
    pub(super) turn: Option<SequenceTurn>,
}

#[derive(Debug)]
pub(super) enum SequencePhase {
    /// `Send`: waits for the receiver's reservation.
    AwaitingReady,
    /// Queued, without blocks.
    Waiting,
    /// `Receive`: holds its cached prefix; the transfer owns the rest.
    Reserved {
        prefix: Vec<BlockId>,
    },
    /// Holds its cached prefix and has a claim to a slot. A load from the KV tiers owns the other
    /// blocks, and is to give it the KV of `count` blocks of each KV group.
    Loading {
        prefix: Vec<BlockId>,
        count: usize,
        job: JobId,
    },
    /// Has its blocks and a claim to a slot; takes it with the next plan.
    Ready(SequenceBlocks),
    Running(Row),
}

/// The block table of a sequence, and the number of tokens whose KV it holds.
#[derive(Debug)]
pub(super) struct SequenceBlocks {
    pub(super) blocks: Vec<BlockId>,
    pub(super) computed: usize,
    pub(super) state: CachedState,
}

/// A sequence in the running batch. Dropped as a whole when the sequence leaves.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) slot: Slot,
    pub(super) generation: Generation,
    /// Block table, which only grows. Entries behind the window of their KV group have no block.
    pub(super) blocks: Vec<BlockId>,
    /// Tokens whose KV is written: their frames are collected.
    pub(super) computed: usize,
    /// Full blocks that were offered to the prefix cache.
    pub(super) published: usize,
    /// Upper bound: positions computed once every frame in flight is done.
    pub(super) launched: usize,
    /// Upper bound: tokens on the device once every frame in flight is done.
    pub(super) length: usize,
    pub(super) last_step: Option<StepId>,
    /// Whether a plan has admitted this row on the executor.
    pub(super) announced: bool,
    /// Whether the last sample was withdrawn because its token bitmask was late.
    pub(super) was_late: bool,
    /// Number of further results for which the row reduces the prefill of steps, because it waited
    /// for the steps in flight when its KV arrived.
    pub(super) catch_up: u32,
    /// Whether the rest of the prompt is computed in further steps, which no other prompt joins.
    pub(super) is_split: bool,
    pub(super) drafts: RowDrafts,
    pub(super) state: RowState,
}

/// Copies of the state of a row; all empty without a state.
#[derive(Debug, Default)]
pub(super) struct RowState {
    /// Cached state that the row's first step copies to the row's own blocks. Its blocks are taken
    /// then.
    pub(super) cached: CachedState,
    /// Copies of the state that steps in flight make for the prefix cache.
    pub(super) saving: Vec<SavedState>,
    /// Keys of the last states of the answer that the row has published, the newest first. The next
    /// one replaces the older one: the answer that a client or another node continues may lack the
    /// last tokens of the row.
    pub(super) published: [Option<BlockHash>; 2],
}

/// State after a number of full blocks.
#[derive(Debug)]
pub(super) struct SavedState {
    pub(super) full_blocks: usize,
    pub(super) blocks: Vec<BlockId>,
}

impl Row {
    pub(super) fn new(
        slot: Slot,
        generation: Generation,
        table: SequenceBlocks,
        length: usize,
    ) -> Self {
        let SequenceBlocks { blocks, computed, state: cached } = table;
        debug_assert!(computed < length);
        Self {
            slot,
            generation,
            blocks,
            computed,
            published: computed / BLOCK_TOKENS,
            launched: computed,
            length,
            last_step: None,
            announced: false,
            was_late: false,
            catch_up: 0,
            is_split: false,
            drafts: RowDrafts::default(),
            state: RowState { cached, ..RowState::default() },
        }
    }

    /// Returns how many blocks the table lacks for `count` more positions.
    pub(super) fn missing_blocks(&self, count: u32, groups: &KvGroups) -> u32 {
        let entries = groups.entries(self.launched + count as usize);
        entries.saturating_sub(self.blocks.len()) as u32
    }
}

impl Sequence {
    pub(super) fn new(
        new: NewSequence,
        arrival: Arrival,
        length_max: usize,
        seeds: CacheSeeds,
    ) -> Self {
        let content_hash = new.adapter.as_ref().map(|adapter| adapter.content_hash);
        let mut chain = HashChain::new(seeds, content_hash, &new.cache_salt);
        chain.extend(&new.tokens);
        let phase = match new.kind {
            SequenceKind::Send => SequencePhase::AwaitingReady,
            SequenceKind::Compute | SequenceKind::Receive => SequencePhase::Waiting,
        };
        Self {
            kind: new.kind,
            arrival,
            given_len: new.tokens.len(),
            tokens: new.tokens,
            prompt_len: new.prompt_len as usize,
            length_max,
            // A load would replace the forward passes that give the log-probabilities.
            may_load: new.sampling.prompt_logprobs.is_none(),
            sampling: new.sampling,
            prompt_logprobs: Vec::new(),
            ignore_stop_tokens: new.ignore_stop_tokens,
            constraint: new.constraint.map(ActiveConstraint::from),
            chain,
            adapter: new.adapter,
            counted_blocks: 0,
            window_end: 0,
            has_old_kv: false,
            continues: false,
            cached_tokens: None,
            deadline: new.deadline,
            alarm: new.deadline,
            session: new.session,
            turn: None,
            phase,
        }
    }

    /// Returns whether the sequence was admitted before. While it waits, it was preempted.
    pub(super) fn was_admitted(&self) -> bool {
        self.cached_tokens.is_some()
    }

    /// Returns whether other sequences may use the KV. The KV of an embedded text would evict
    /// prompts that come again.
    pub(super) fn is_published(&self) -> bool {
        !self.has_old_kv && self.sampling.pooling.is_none()
    }

    /// Returns whether the sequence prefills for a peer and waits in the queue.
    pub(super) fn is_waiting_send(&self) -> bool {
        self.kind == SequenceKind::Send && matches!(self.phase, SequencePhase::Waiting)
    }

    /// Returns the tokens whose KV may be found in the prefix cache: none before the
    /// log-probabilities of the prompt are computed, which need a forward pass of every prompt
    /// token.
    pub(super) fn cacheable_tokens(&self) -> &[u32] {
        if self.sampling.prompt_logprobs.is_some() { &[] } else { &self.tokens }
    }

    /// Returns whether the next step of the row computes log-probabilities of prompt tokens.
    pub(super) fn scores_prompt(&self) -> bool {
        self.sampling.prompt_logprobs.is_some() && self.row().launched + 1 < self.prompt_len
    }

    /// Adds the log-probabilities of prompt tokens after the tokens from position `first` on. Skips
    /// those that were computed before a preemption.
    pub(super) fn add_prompt_logprobs(&mut self, first: usize, mut computed: Vec<TokenLogprobs>) {
        let known = self.prompt_logprobs.len().saturating_sub(first).min(computed.len());
        self.prompt_logprobs.extend(computed.drain(known..));
    }

    /// Takes the log-probabilities of the prompt when the first token is sampled; `None` for a
    /// sequence without them, and for later tokens.
    pub(super) fn take_prompt_logprobs(&mut self) -> Option<Vec<TokenLogprobs>> {
        self.sampling.prompt_logprobs.take()?;
        Some(std::mem::take(&mut self.prompt_logprobs))
    }

    /// Returns whether the sequence got a token on this node.
    pub(super) fn has_output(&self) -> bool {
        self.tokens.len() > self.given_len
    }

    pub(super) fn phase(&self) -> &SequencePhase {
        &self.phase
    }

    /// Replaces the phase. Only [`Sequences::set_phase`](super::sequences::Sequences::set_phase)
    /// calls it.
    pub(super) fn replace_phase(&mut self, phase: SequencePhase) -> SequencePhase {
        std::mem::replace(&mut self.phase, phase)
    }

    /// Takes the phase of a sequence that was removed.
    pub(super) fn into_phase(self) -> SequencePhase {
        self.phase
    }

    /// Returns the row of a sequence in the batch.
    pub(super) fn row_mut(&mut self) -> &mut Row {
        match &mut self.phase {
            SequencePhase::Running(row) => row,
            phase => unreachable!("a sequence of the batch is {phase:?}"),
        }
    }

    /// Returns the row of a sequence in the batch.
    pub(super) fn row(&self) -> &Row {
        match &self.phase {
            SequencePhase::Running(row) => row,
            phase => unreachable!("a sequence of the batch is {phase:?}"),
        }
    }

    /// Returns the tokens of the row that are known to the device and not launched yet.
    pub(super) fn pending(&self) -> u32 {
        let row = self.row();
        if let Some(constraint) = &self.constraint {
            // A bitmask depends on the token before it, so at most one token may be unknown. A row
            // whose bitmask was late waits for the bitmask.
            let is_known = constraint.allowed().is_some();
            if self.unknown() > 1 || (row.was_late && !is_known) {
                return 0;
            }
        }
        // The last token of a sequence needs no KV: nothing comes after it.
        if row.length >= self.length_here() { 0 } else { (row.length - row.launched) as u32 }
    }

    /// Returns how many tokens of the row are not known to the host, if every draft token is
    /// accepted.
    pub(super) fn unknown(&self) -> usize {
        self.row().length - self.tokens.len()
    }

    /// Returns whether the sequence decodes on this node: the device has sampled its first token,
    /// or samples the token in a step in flight.
    pub(super) fn decodes(&self) -> bool {
        self.kind != SequenceKind::Send && self.row().length > self.given_len
    }

    /// Returns whether the state after this number of tokens is to be cached: for an equal prompt, for
    /// prompts that begin like this one and an earlier one, and for what follows the answer.
    pub(super) fn saves_state(&self, tokens: usize) -> bool {
        let full_blocks = tokens / BLOCK_TOKENS;
        let at_end = full_blocks == hit_blocks(self.given_len);
        let is_shared = full_blocks == self.row().state.cached.shared_blocks;
        tokens > 0
            && tokens.is_multiple_of(BLOCK_TOKENS)
            && (at_end || is_shared || tokens >= self.given_len)
            && self.is_published()
    }

    /// Returns whether the row has a grammar, and the bitmask of its next sample is not computed.
    pub(super) fn lacks_mask(&self) -> bool {
        let allowed = self.constraint.as_ref().map(|constraint| constraint.allowed());
        allowed.is_some_and(|allowed| allowed.is_none() || self.unknown() > 0)
    }

    /// Returns how many tokens the row may compute before its state is cached next.
    pub(super) fn tokens_before_saved_state(&self) -> u32 {
        if !self.is_published() {
            return u32::MAX;
        }
        let row = self.row();
        let saved = [row.state.cached.shared_blocks, hit_blocks(self.given_len)];
        let left = saved.map(|blocks| (blocks * BLOCK_TOKENS).saturating_sub(row.launched) as u32);
        left.into_iter().filter(|left| *left > 0).min().unwrap_or(u32::MAX)
    }

    /// Returns the length at which this node's part ends: a sender samples one token.
    pub(super) fn length_here(&self) -> usize {
        match self.kind {
            SequenceKind::Send => self.given_len + 1,
            SequenceKind::Compute | SequenceKind::Receive => self.length_max,
        }
    }

    /// Returns the index of the next token in the whole answer.
    pub(super) fn next_index(&self) -> u32 {
        (self.tokens.len() - self.prompt_len) as u32
    }

    fn push(&mut self, token: u32) {
        self.tokens.push(token);
        self.chain.extend(&self.tokens);
    }

    /// Appends the tokens of a step up to the token that ends the request, and truncates `tokens`
    /// there.
    pub(super) fn take_output(
        &mut self,
        tokens: &mut Vec<SampledToken>,
    ) -> Result<Option<FinishReason>, ConstraintFailure> {
        for index in 0..tokens.len() {
            let finish = self.take_token(tokens[index].id)?;
            if finish.is_some() {
                tokens.truncate(index + 1);
                return Ok(finish);
            }
        }
        Ok(None)
    }

    /// Appends the next token and returns whether it ends the request.
    pub(super) fn take_token(
        &mut self,
        token: u32,
    ) -> Result<Option<FinishReason>, ConstraintFailure> {
        self.push(token);
        let finish = self.finish_reason();
        // A stop token is not part of the answer.
        if finish != Some(FinishReason::Stop)
            && let Some(constraint) = &mut self.constraint
            && constraint.accept(token)?
        {
            return Ok(Some(FinishReason::Stop));
        }
        Ok(finish)
    }

    /// Returns why the last token ends the request, if it does. Does not check the grammar.
    fn finish_reason(&self) -> Option<FinishReason> {
        let last = self.tokens.last()?;
        if !self.ignore_stop_tokens && self.sampling.stop_token_ids.contains(last) {
            Some(FinishReason::Stop)
        } else if self.tokens.len() >= self.length_max {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    /// Stores the number of cached tokens at the first admission. Tokens that earlier attempts
    /// generated count, too.
    pub(super) fn set_cached(&mut self, tokens: usize) {
        self.cached_tokens.get_or_insert(tokens as u32);
    }
}
