//! Plans one step: how many tokens each row advances, and which rows are preempted.

use std::{collections::HashMap, mem};

use kernels::{BLOCK_TOKENS, BlockId};

use super::{
    ItlLimit, Scheduler, SchedulerConfig,
    draft_budget::{decodes, probes},
    masks::AwaitedMask,
    sequence::{Arrival, SavedState, Sequence, SequencePhase},
};
use crate::{
    event::{Action, SequenceId, SequenceKind},
    executor::Speculation,
    kv_blocks::KvBlocks,
    plan::{AdmittedRow, RowPlan, StepId, StepPlan},
    step_record::StepWork,
};

/// Minimum prefill of a bounded step, in tokens at the start of a prompt. A step admits a prompt
/// only if this much prefill is left.
const PREFILL_MIN: u32 = BLOCK_TOKENS as u32;

/// A plan under construction.
#[derive(Default)]
struct PlanBuilder {
    plan: StepPlan,
    /// The sequence of each row.
    sequences: Vec<SequenceId>,
    /// Constrained rows that sample.
    masks: Vec<AwaitedMask>,
    /// Tokens that the step may still compute.
    budget: u32,
    /// Tokens after which the step may still compute logits.
    samples_left: u32,
    /// Bound on prefill; set when the first prefill row is planned.
    prefill: Option<PrefillBudget>,
    work: StepWork,
    /// Blocks of cached states that the step copies. Their references are released when the step is
    /// collected.
    copied: Vec<BlockId>,
}

impl PlanBuilder {
    /// Moves the rows of several tokens to the front. With KV in FP8, the executor of GPUs computes
    /// attention of these rows and of the others by two kernels, and each takes consecutive rows.
    fn order_rows(&mut self) {
        let is_single = |row: &RowPlan| row.token_count == 1;
        if self.plan.rows.is_sorted_by_key(is_single) {
            return;
        }
        let rows = std::mem::take(&mut self.plan.rows).into_iter();
        let mut rows: Vec<_> = rows.zip(std::mem::take(&mut self.sequences)).collect();
        rows.sort_by_key(|(row, _)| is_single(row));
        (self.plan.rows, self.sequences) = rows.into_iter().unzip();
        if self.masks.is_empty() {
            return;
        }
        let places = self.sequences.iter().enumerate().map(|(place, &id)| (id, place));
        let places: HashMap<SequenceId, usize> = places.collect();
        self.masks.sort_by_key(|mask| places[&mask.id]);
    }
}

/// Bound on the prefill of a step, in tokens at the start of a prompt.
#[derive(Clone, Copy)]
enum PrefillBudget {
    /// No sequence decodes.
    Unlimited,
    Limited {
        left: u32,
        spent: u32,
    },
}

enum Growth {
    /// The row has blocks for the tokens that it is to compute.
    Done,
    /// No block is free now. A step in flight, a save or a transfer will release blocks.
    Wait,
    /// No block is free, and the row itself was preempted.
    Preempted,
}

impl Scheduler {
    /// Returns the next step, or `None` if `depth` steps are in flight, the last step awaits its
    /// token bitmasks, or no row can advance. The caller launches every plan, in order.
    pub fn plan(&mut self, actions: &mut Vec<Action>) -> Option<StepPlan> {
        if self.frames.len() >= self.config.limits.depth as usize || self.masks.are_awaited() {
            return None;
        }
        self.admit_receives(actions);
        self.admit_ready();
        let mut builder = PlanBuilder {
            budget: self.config.step_tokens,
            samples_left: self.config.limits.samples_max(),
            ..PlanBuilder::default()
        };
        builder.plan.rows.reserve(self.sequences.running().len());
        builder.sequences.reserve(self.sequences.running().len());
        self.advance_running(&mut builder, actions);
        // No other prompt may join a step with a split prompt: it would delay the first token.
        if !builder.sequences.iter().any(|&id| self.sequences[id].row().is_split) {
            self.advance_newcomers(&mut builder, actions);
        }
        if builder.sequences.is_empty() {
            return None;
        }
        self.speculate(&mut builder);
        builder.order_rows();
        self.planned_work = builder.work;
        let mut plan = builder.plan;
        plan.released = self.slots.take_released();
        let prefill_cost = match builder.prefill {
            None => Some(0),
            Some(PrefillBudget::Unlimited) => None,
            Some(PrefillBudget::Limited { spent, .. }) => Some(spent),
        };
        plan.step_id = self.frames.launch(plan.rows.clone(), builder.sequences, prefill_cost);
        if !builder.copied.is_empty() {
            self.frames.defer(builder.copied);
        }
        if self.config.limits.speculation.is_some()
            && let Some(tiers) = &mut self.tiers
        {
            tiers.step_launched(plan.step_id);
        }
        plan.awaits_masks = !builder.masks.is_empty();
        self.masks.launched(plan.step_id, builder.masks);
        Some(plan)
    }

    /// Plans the tokens of every running row, oldest row first.
    fn advance_running(&mut self, builder: &mut PlanBuilder, actions: &mut Vec<Action>) {
        let step_id = self.frames.next_step();
        self.row_lacks = 0;
        let mut index = 0;
        while let Some(&(_, id)) = self.sequences.running().get(index) {
            // Reserves one token for each younger row, so that a long prompt does not delay decode
            // rows.
            let younger = (self.sequences.running().len() - index - 1) as u32;
            let share = builder.budget - younger;
            let is_last = younger == 0 && index == 0 && self.sequences.waiting().is_empty();
            let mut sequence = self.sequences.known_mut(id);
            let samples_left = builder.samples_left - younger;
            let mut count = row_tokens(sequence, &self.config, (share, samples_left), is_last);
            count = bound_by_state(sequence, &self.kv, count);
            if self.config.itl.is_some() && (count > 1 || !sequence.decodes()) {
                let position = sequence.row().launched;
                count = self.bound_prefill(position, count, builder);
                sequence = self.sequences.known_mut(id);
            }
            if count == 0 {
                index += 1;
                continue;
            }
            let missing = sequence.row().missing_blocks(count, &self.kv.groups);
            if missing == 0 {
                if self.kv.caches_states() {
                    self.copy_states(id, builder);
                    sequence = self.sequences.known_mut(id);
                }
                // Fast path of most rows: it looks the sequence up once.
                advance(sequence, id, step_id, count, builder);
                index += 1;
                continue;
            }
            // Admission allocates the blocks of all given tokens, so only a decode row grows. Its
            // token takes no prefill budget.
            debug_assert!(count == 1 && sequence.decodes());
            match self.grow(index, id, missing, builder, actions) {
                Growth::Done => {
                    self.copy_states(id, builder);
                    self.advance(id, count, builder);
                    index += 1;
                }
                Growth::Wait => index += 1,
                Growth::Preempted => {}
            }
        }
    }

    /// Admits waiting sequences while the token budget allows, and plans their tokens.
    fn advance_newcomers(&mut self, builder: &mut PlanBuilder, actions: &mut Vec<Action>) {
        while builder.budget > 0
            && builder.samples_left > 0
            && self.prefill_left(builder) >= PREFILL_MIN
            && let Some(id) = self.admit_compute(actions)
        {
            let is_alone =
                self.sequences.running().len() == 1 && self.sequences.waiting().is_empty();
            let sequence = self.sequences.known_mut(id);
            let position = sequence.row().launched;
            let left = (builder.budget, builder.samples_left);
            let count = row_tokens(sequence, &self.config, left, is_alone);
            let count = bound_by_state(sequence, &self.kv, count);
            if count == 0 {
                continue;
            }
            let count = self.bound_prefill(position, count, builder);
            self.copy_states(id, builder);
            self.advance(id, count, builder);
        }
    }

    /// Plans copies of the state of a row that is about to advance: from the cached state that the
    /// row continues, or to a state for the prefix cache.
    fn copy_states(&mut self, id: SequenceId, builder: &mut PlanBuilder) {
        if !self.kv.caches_states() {
            return;
        }
        let headroom = self.headroom();
        let sequence = self.sequences.known_mut(id);
        let launched = sequence.row().launched;
        let key = |sequence: &Sequence| {
            let index = (launched / BLOCK_TOKENS).checked_sub(1)?;
            sequence.chain.hashes().get(index).copied()
        };
        let is_cached = key(sequence).is_some_and(|key| self.kv.cache.has_state(key));
        let saves = sequence.saves_state(launched) && !is_cached;
        let row = sequence.row_mut();
        let (state, _) = self.kv.groups.split(&row.blocks);
        let cached = mem::take(&mut row.state.cached.blocks);
        builder.plan.copies.extend(cached.iter().copied().zip(state.iter().copied()));
        builder.copied.extend(cached);
        let count = state.len() as u32;
        if !saves || self.kv.pool.available() < count + headroom {
            return;
        }
        let blocks = self.kv.allocate(count).expect("availability was checked");
        builder.plan.copies.extend(state.iter().copied().zip(blocks.iter().copied()));
        row.state.saving.push(SavedState { full_blocks: launched / BLOCK_TOKENS, blocks });
    }

    /// Returns the prefill budget that is left in the step, in tokens at the start of a prompt.
    fn prefill_left(&self, builder: &mut PlanBuilder) -> u32 {
        let Some(itl) = &self.config.itl else { return u32::MAX };
        let budget = builder.prefill.get_or_insert_with(|| {
            // A reserved sequence counts as decoding: its KV usually arrives during this step or
            // the next.
            let any = |is: fn(&Sequence) -> bool| {
                self.sequences.running().iter().any(|&(_, id)| is(&self.sequences[id]))
            };
            if self.sequences.reserved_count() == 0 && !any(Sequence::decodes) {
                return PrefillBudget::Unlimited;
            }
            let catches_up = any(|sequence| sequence.row().catch_up > 0);
            let max = if catches_up { itl.max / 2 } else { itl.max };
            let left = ItlLimit { max, ..*itl }.prefill_tokens(self.measured_steps.decode_extra());
            PrefillBudget::Limited { left, spent: 0 }
        });
        match budget {
            PrefillBudget::Unlimited => u32::MAX,
            PrefillBudget::Limited { left, .. } => *left,
        }
    }

    /// Returns how many of the `count` prompt tokens from `position` on fit into the step's prefill
    /// budget. Subtracts their cost from the budget.
    fn bound_prefill(&self, position: usize, count: u32, builder: &mut PlanBuilder) -> u32 {
        let left_before = self.prefill_left(builder);
        let (Some(itl), Some(PrefillBudget::Limited { left, spent })) =
            (&self.config.itl, &mut builder.prefill)
        else {
            return count;
        };
        let most = itl.tokens_at(position, left_before);
        // Late in a long prompt a single token may cost more than the budget. The prompt must
        // advance nevertheless.
        let most = if left_before >= PREFILL_MIN { most.max(1) } else { most };
        let count = count.min(most);
        let cost = itl.cost_at(position, count);
        *left = left.saturating_sub(cost);
        *spent = spent.saturating_add(cost);
        count
    }

    /// Extends the row's table by `missing` blocks, and preempts younger rows if needed.
    fn grow(
        &mut self,
        index: usize,
        id: SequenceId,
        missing: u32,
        builder: &mut PlanBuilder,
        actions: &mut Vec<Action>,
    ) -> Growth {
        loop {
            if let Some(blocks) = self.kv.allocate(missing) {
                self.append(id, blocks, builder);
                return Growth::Done;
            }
            // Do not preempt yet: blocks of steps in flight and of saves may suffice.
            if self.frames.has_deferred() {
                return Growth::Wait;
            }
            if self.kv.pool.evictable() >= missing {
                self.row_lacks = missing;
                self.cancel_awaited_saves(missing, actions);
                return Growth::Wait;
            }
            match self.victim(index) {
                Some(younger) if younger != id => self.preempt(younger),
                Some(_) => {
                    self.preempt(id);
                    return Growth::Preempted;
                }
                // Transfers and senders hold the remaining blocks and will release them.
                None => return Growth::Wait,
            }
        }
    }

    fn append(&mut self, id: SequenceId, blocks: Vec<BlockId>, builder: &mut PlanBuilder) {
        let row = self.sequences.row_mut(id);
        row.blocks.extend_from_slice(&blocks);
        if !row.announced {
            return;
        }
        let slot = row.slot;
        // A row at a block boundary may get blocks for its token, and then further blocks for its
        // draft tokens.
        match builder.plan.extended.iter_mut().find(|(extended, _)| *extended == slot) {
            Some((_, added)) => added.extend(blocks),
            None => builder.plan.extended.push((slot, blocks)),
        }
    }

    /// Returns the sequence to preempt so that the row at `index` gets blocks: the youngest row
    /// from `index` on. Returns the row at `index` itself only if an older row that is not a sender
    /// is running. A sender is never preempted: it has all its blocks and finishes without more.
    /// The blocks that it transfers stay held, so a preempted sender might never get blocks again.
    fn victim(&self, index: usize) -> Option<SequenceId> {
        let displaceable =
            |&&(_, id): &&(Arrival, SequenceId)| self.sequences[id].kind != SequenceKind::Send;
        let (older, others) = self.sequences.running().split_at(index);
        let &(_, youngest) = others.iter().rfind(displaceable)?;
        let another_row_remains = || older.iter().any(|entry| displaceable(&entry));
        (youngest != others[0].1 || another_row_remains()).then_some(youngest)
    }

    fn advance(&mut self, id: SequenceId, count: u32, builder: &mut PlanBuilder) {
        let step_id = self.frames.next_step();
        let sequence = self.sequences.known_mut(id);
        advance(sequence, id, step_id, count, builder);
    }

    /// Grants draft tokens to the rows of a decode step, oldest row first, if they pay off. Draft
    /// tokens use only the rest of the step's budget and free blocks, so no row waits or is
    /// preempted for them. All granted draft tokens count as launched until the result tells how
    /// many were accepted.
    fn speculate(&mut self, builder: &mut PlanBuilder) {
        let Some(Speculation { row_drafts, step_tokens, .. }) = self.config.limits.speculation
        else {
            return;
        };
        if !decodes(&builder.plan.rows) {
            return;
        }
        let used = self.config.step_tokens - builder.budget;
        let left = step_tokens.min(self.config.step_tokens).saturating_sub(used);
        let rows = builder.sequences.len() as u32;
        let row_drafts = self.config.limits.row_drafts(rows, row_drafts.min(left));
        let wanted = |sequence: &Sequence| {
            let row = sequence.row();
            let most = match &sequence.constraint {
                _ if sequence.kind == SequenceKind::Send => 0,
                None => row.drafts.most,
                Some(constraint) => constraint.drafts(sequence.unknown() - 1).len() as u32,
            };
            let to_the_end = sequence.length_here() - row.length;
            most.min(row_drafts).min(to_the_end as u32)
        };
        let (mut most, mut expected) = (0, 0.0);
        for &id in &builder.sequences {
            let sequence = &self.sequences[id];
            let count = wanted(sequence);
            most = most.max(count);
            expected += sequence.row().drafts.expected(count);
        }
        let bound = match () {
            () if most == 0 => return,
            () if !self.config.measures_drafts => most,
            () if self.measured_steps.drafts_pay_off(builder.sequences.len(), most, expected) => {
                most
            }
            () if probes(self.frames.next_step()) => 1,
            () => return,
        };
        let counts: Vec<_> =
            builder.sequences.iter().map(|&id| wanted(&self.sequences[id]).min(bound)).collect();
        builder.plan.drafts_max = left;
        let mut known_left = left;
        for (index, wanted) in counts.into_iter().enumerate() {
            let id = builder.sequences[index];
            let is_known = self.sequences[id].constraint.is_some();
            let wanted = if is_known { wanted.min(known_left) } else { wanted };
            let count = self.cover(id, wanted as usize, builder);
            builder.plan.rows[index].drafts_max = count;
            if count > 0 && is_known {
                known_left -= count;
                self.add_known_drafts(id, count as usize, builder);
            }
            let row = self.sequences.row_mut(id);
            row.launched += count as usize;
            row.length += count as usize;
        }
    }

    /// Adds the draft tokens of a constrained row to the plan.
    fn add_known_drafts(&self, id: SequenceId, count: usize, builder: &mut PlanBuilder) {
        let sequence = &self.sequences[id];
        let constraint = sequence.constraint.as_ref().expect("the caller looked it up");
        let drafts: Vec<u32> = constraint.drafts(sequence.unknown() - 1).take(count).collect();
        let awaited = builder.masks.iter_mut().find(|awaited| awaited.id == id);
        awaited
            .expect("a constrained row that samples awaits a bitmask")
            .drafts
            .clone_from(&drafts);
        builder.plan.drafts.push((sequence.row().slot, drafts));
    }

    /// Returns how many of `count` further positions fit into the row's blocks. Adds missing blocks
    /// if every row of the batch could still get one more block of each KV group.
    fn cover(&mut self, id: SequenceId, count: usize, builder: &mut PlanBuilder) -> u32 {
        let headroom = self.headroom();
        let missing = self.sequences[id].row().missing_blocks(count as u32, &self.kv.groups);
        if missing > 0
            && self.kv.pool.available() >= missing + headroom
            && let Some(blocks) = self.kv.allocate(missing)
        {
            self.append(id, blocks, builder);
        }
        let row = self.sequences[id].row();
        count.min(self.kv.groups.tokens(row.blocks.len()) - row.launched) as u32
    }

    /// Preempts a sequence: it loses its slot and blocks, and returns to its place in the queue.
    /// The results of its steps in flight are dropped. Recomputation gives the same tokens.
    pub(super) fn preempt(&mut self, id: SequenceId) {
        let has_old_kv = std::mem::take(&mut self.sequences.known_mut(id).has_old_kv);
        let running = self.sequences.set_phase(id, SequencePhase::Waiting);
        let SequencePhase::Running(row) = running else {
            unreachable!("only running rows are preempted");
        };
        self.preemptions += 1;
        if !has_old_kv {
            self.offer_preempted(id, row.published);
        }
        self.vacate(row);
    }
}

/// Returns the token pairs of attention for `tokens` tokens after `computed` tokens.
pub(super) fn attention_pairs(computed: u64, tokens: u64) -> u64 {
    tokens * computed + tokens * (tokens + 1) / 2
}

/// Returns how many tokens a row may compute in a step that has `budget` tokens and `samples_left`
/// tokens with logits left, before its bound on prefill.
fn row_tokens(
    sequence: &mut Sequence,
    config: &SchedulerConfig,
    (budget, samples_left): (u32, u32),
    is_alone: bool,
) -> u32 {
    let mut count = sequence.pending().min(budget).min(config.chunk_tokens);
    if sequence.scores_prompt() {
        count = count.min(samples_left);
    }
    if is_alone { part_to_send(sequence, count, config.tail_tokens) } else { count }
}

/// Returns how many of the row's next `count` tokens the step computes if the model has a recurrent
/// state. The state after a token cannot be undone, so a row whose bitmask might be late waits for
/// it. A step ends where the state is to be cached.
fn bound_by_state(sequence: &Sequence, kv: &KvBlocks, count: u32) -> u32 {
    let row = sequence.row();
    let samples = row.launched + count as usize == row.length;
    match kv.groups.state_entries() {
        0 => count,
        _ if samples && sequence.lacks_mask() => 0,
        _ if kv.caches_states() => count.min(sequence.tokens_before_saved_state()),
        _ => count,
    }
}

/// Returns how many of the next `count` tokens of a sender's prompt the step computes. The end of a
/// long prompt is computed in parts of two and one `tail_tokens`, so that the KV of each part is
/// sent while the next one is computed. Up to twice `tail_tokens` are one part: a further step
/// would cost as much time as the transfer saves. A prompt that shares its steps is not split,
/// because its first part would not end sooner.
fn part_to_send(sequence: &mut Sequence, count: u32, tail_tokens: Option<u32>) -> u32 {
    let Some(tail) = tail_tokens.filter(|_| sequence.kind == SequenceKind::Send) else {
        return count;
    };
    let pending = sequence.pending();
    let after = match pending {
        _ if pending > tail.saturating_mul(5) => 3 * tail,
        _ if pending > tail.saturating_mul(2) => tail,
        _ => return count,
    };
    let row = sequence.row_mut();
    // Blocks are sent when they are full.
    let end = (row.launched + (pending - after) as usize).next_multiple_of(BLOCK_TOKENS);
    let part = ((end - row.launched) as u32).min(count);
    row.is_split = part < count;
    part
}

/// Adds the row to the step.
fn advance(
    sequence: &mut Sequence,
    id: SequenceId,
    step_id: StepId,
    count: u32,
    builder: &mut PlanBuilder,
) {
    let scores_prompt = sequence.scores_prompt();
    let is_constrained = sequence.constraint.is_some();
    let is_new = !std::mem::replace(&mut sequence.row_mut().announced, true);
    if is_new {
        let row = sequence.row();
        builder.plan.admitted.push(AdmittedRow {
            slot: row.slot,
            generation: row.generation,
            tokens: sequence.tokens.clone(),
            prompt_len: sequence.prompt_len as u32,
            computed: row.computed as u32,
            blocks: row.blocks.clone(),
            sampling: sequence.sampling.clone(),
            constrained: is_constrained,
            adapter: sequence.adapter.as_ref().map(|adapter| adapter.slot),
        });
    }
    let row = sequence.row_mut();
    let before = row.launched as u64;
    row.launched += count as usize;
    let samples = row.launched == row.length;
    let work = &mut builder.work;
    if samples && count == 1 {
        work.decode_rows += 1;
        work.context_tokens += before + 1;
    } else {
        work.prefill_tokens += count;
        work.prefill_pairs += attention_pairs(before, count.into());
    }
    if samples {
        if is_constrained {
            let (slot, generation) = (row.slot, row.generation);
            let (length, drafts) = (row.length, Vec::new());
            builder.masks.push(AwaitedMask { id, slot, generation, length, drafts });
        }
        row.length += 1;
        row.was_late = false;
    }
    row.last_step = Some(step_id);
    let (slot, generation) = (row.slot, row.generation);
    builder.budget -= count;
    builder.samples_left -= if scores_prompt { count } else { u32::from(samples) };
    let token_count = count;
    builder.plan.rows.push(RowPlan { slot, generation, token_count, samples, drafts_max: 0 });
    builder.sequences.push(id);
}
