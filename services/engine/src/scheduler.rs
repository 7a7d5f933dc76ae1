//! Plans each step and assigns the KV blocks. Pure: inputs, results and `now` go in, actions and
//! plans come out. No clock, thread, socket or device.
//!
//! Life of a sequence in the scheduler (the [`event`](crate::event) docs describe the node's view):
//! 1. `handle(Arrived)` rejects or queues the sequence. A `Send` waits until its transfer is ready,
//!    a `Receive` until blocks can be reserved (at once where possible), a `Compute` until a plan
//!    admits it.
//! 2. Admission looks up the prefix cache and takes every block of the known tokens, so that
//!    prefill never waits for blocks in the middle of a prompt.
//! 3. `plan` gives each running row its part of the step's token budget. There are no prefill and
//!    decode phases: a row has one or many tokens that are not computed yet.
//! 4. `complete` processes the result: the row's KV is written, full blocks enter the prefix cache,
//!    blocks behind a sliding window are released, and a sampled token may end the sequence.
//!
//! A plan is made before the results of the steps in flight are known, so positions and lengths of
//! a running row are upper bounds. A stop is detected one step late. The block for the surplus
//! token was taken when its row was planned, and is released when the result of the surplus step
//! has been collected.
//!
//! When a row needs a block and none is available, the row that arrived last is preempted. It loses
//! slot and blocks and returns to its place in the queue; its computed blocks stay cached until
//! evicted. The oldest row can preempt every other row, and a sequence never needs more than the
//! whole pool, so the oldest row always finishes. Only a `Send` and the blocks of transfers cannot
//! be preempted. Their blocks are released without preemption: a `Send` has all its blocks from the
//! start, and takes them only after its receiver has reserved blocks. On a node that has reserved
//! blocks itself, a `Send` that would wait for blocks or a slot fails as busy instead. So nodes
//! cannot deadlock by waiting for each other's blocks.
//!
//! Files: `sequences` holds the sequences by phase, `waiting` their queue. `admission` fills and
//! empties the queue. `running` plans a step, with its draft tokens in `draft_budget` and its token
//! bitmasks in `masks`. `completion` processes the result of a step. `transfers` tracks the blocks
//! of transfers. `weights` moves sequences to other weights. `loading` connects the KV tiers.

mod admission;
mod completion;
mod config;
mod draft_budget;
mod loading;
mod masks;
mod measured_steps;
mod running;
mod sequence;
mod sequence_sessions;
mod sequences;
mod testing;
mod transfers;
mod waiting;
mod weights;

use std::time::Instant;

use kernels::{BLOCK_TOKENS, KvGroups};

pub use config::{ItlLimit, SchedulerConfig, SchedulerConfigError};
use masks::MaskRequests;
use measured_steps::MeasuredSteps;
use running::attention_pairs;
use sequence::{Arrival, Row, Sequence, SequenceBlocks, SequencePhase};
use sequence_sessions::SequenceSessions;
use sequences::Sequences;
use transfers::SequenceTransfers;

use crate::{
    block_pool::BlockCounts,
    event::{
        Action, BlockHash, CacheChange, Input, Load, SequenceFailure, SequenceId, SequenceKind,
    },
    frames::{Frames, Slots},
    kv_blocks::KvBlocks,
    prefix_cache::CacheSeeds,
    step_record::StepWork,
    tiers::TierStores,
};

#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    seeds: CacheSeeds,
    kv: KvBlocks,
    sequences: Sequences,
    /// The last sequence that could not be admitted for lack of blocks.
    blocked: Option<BlockedSequence>,
    /// Available blocks that a running row needed in the last plan and that saves keep; 0 without
    /// such a row.
    row_lacks: u32,
    slots: Slots,
    frames: Frames,
    masks: MaskRequests,
    measured_steps: MeasuredSteps,
    transfers: SequenceTransfers,
    /// KV tiers; `None` when they are off.
    tiers: Option<TierStores>,
    /// Conversations whose later turns keep their place; `None` when each turn has a place of its
    /// own.
    sessions: Option<SequenceSessions>,
    next_arrival: Arrival,
    preemptions: u64,
    planned_work: StepWork,
    /// False while the batch drains. Then only preempted sequences join it.
    is_admitting: bool,
}

/// Waiting sequence that found too few KV blocks. It is not tried again until `headroom` or the
/// block pool changes.
#[derive(Debug)]
struct BlockedSequence {
    id: SequenceId,
    /// Available blocks that the sequence needs, `headroom` included.
    needed: u32,
    headroom: u32,
    /// [`BlockPool::changes`](crate::block_pool::BlockPool::changes) at the last try.
    pool_changes: u64,
}

impl Scheduler {
    pub fn new(config: SchedulerConfig, seeds: CacheSeeds) -> Result<Self, SchedulerConfigError> {
        config.validate()?;
        Ok(Self {
            config,
            seeds,
            kv: KvBlocks::new(config.limits.blocks, config.prefix_cache),
            sequences: Sequences::default(),
            blocked: None,
            row_lacks: 0,
            slots: Slots::new(config.limits.slots),
            frames: Frames::default(),
            masks: MaskRequests::default(),
            measured_steps: MeasuredSteps::default(),
            transfers: SequenceTransfers::default(),
            tiers: None,
            sessions: None,
            next_arrival: 0,
            preemptions: 0,
            planned_work: StepWork::default(),
            is_admitting: true,
        })
    }

    /// Sets the KV groups. By default one group keeps the KV of all tokens.
    ///
    /// # Panics
    /// When the tiers are on: they need the groups. With a state, when rows may have draft tokens: the
    /// state after a rejected token cannot be undone.
    pub fn with_kv_groups(mut self, groups: KvGroups) -> Self {
        assert!(self.tiers.is_none(), "the KV groups are set before the tiers");
        if groups.state_entries() > 0 {
            assert_eq!(self.config.limits.speculation, None, "a state after draft tokens");
            self.kv.cache.needs_states = true;
        }
        self.kv.groups = groups;
        self
    }

    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Processes one input. Ignores a late input: its sequence is unknown, or is in a phase that
    /// does not expect the input.
    pub fn handle(&mut self, now: Instant, input: Input, actions: &mut Vec<Action>) {
        self.set_tiers_now(now);
        match input {
            Input::Arrived(new) => self.arrived(now, new, actions),
            Input::Abort { id } => {
                // The router also cancels a request at a stop string, so a cancelled turn with
                // output has ended.
                if self.sequences.get(id).is_some_and(Sequence::has_output) {
                    self.end_turn(id);
                }
                self.remove(id);
                self.abort_transfer(id, "the request was cancelled", actions);
            }
            Input::TransferReady { id, first_block, block_count } => {
                self.transfer_ready(id, first_block, block_count, actions)
            }
            Input::KvArrived { id, first_index, token } => {
                self.kv_arrived(id, first_index, token, actions)
            }
            Input::TransferEnded { id } => self.transfer_ended(id, actions),
            Input::Tier(event) => self.handle_tier(event, actions),
        }
        self.admit_receives(actions);
        if self.frames.is_empty() && self.sequences.ready().is_empty() {
            // No step follows that would count blocks.
            self.start_saves(now, actions);
        } else {
            self.start_queued_saves(now, actions);
        }
    }

    /// Returns when to call [`Self::on_deadline`] if no input arrives before.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.sequences.next_alarm().map(|(alarm, _)| alarm)
    }

    /// Fails the sequences whose deadline has passed, and ends the wait for loads that take too
    /// long.
    pub fn on_deadline(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.set_tiers_now(now);
        while let Some((alarm, id)) = self.sequences.next_alarm()
            && alarm <= now
        {
            let sequence = &self.sequences[id];
            let failure = if sequence.deadline <= now {
                SequenceFailure::Deadline
            } else if matches!(sequence.phase(), SequencePhase::AwaitingReady) {
                SequenceFailure::TransferFailed
            } else if matches!(sequence.phase(), SequencePhase::Loading { .. }) {
                self.give_up_load(now, id, actions);
                continue;
            } else {
                debug_assert_eq!(sequence.kind, SequenceKind::Receive);
                let reason = format!(
                    "no room for the KV of {} tokens within {:?}",
                    sequence.tokens.len(),
                    self.config.reserve_timeout
                );
                SequenceFailure::Busy { reason }
            };
            self.fail(id, failure, actions);
        }
        self.admit_receives(actions);
    }

    pub fn load(&self) -> Load {
        let BlockCounts { free, cached, held, reserved } = self.kv.pool.counts();
        let (mut pending_prompt_tokens, mut pending_prompt_pairs) = (0, 0);
        let (mut prefilling, mut context_tokens) = (0, 0);
        for sequence in self.sequences.values() {
            let computed = match sequence.phase() {
                SequencePhase::Reserved { .. } => sequence.given_len,
                SequencePhase::Loading { prefix, count, .. } => {
                    self.kv.groups.tokens(prefix.len()) + count * BLOCK_TOKENS
                }
                SequencePhase::AwaitingReady | SequencePhase::Waiting => 0,
                SequencePhase::Ready(table) => table.computed,
                SequencePhase::Running(row) => {
                    match sequence.decodes() {
                        true => context_tokens += row.computed as u64,
                        false => prefilling += 1,
                    }
                    row.computed
                }
            };
            let pending = sequence.given_len.saturating_sub(computed) as u64;
            pending_prompt_tokens += pending;
            pending_prompt_pairs += attention_pairs(computed as u64, pending);
        }
        Load {
            running: self.sequences.running().len() as u32,
            prefilling,
            waiting: (self.sequences.len() - self.sequences.running().len()) as u32,
            pending_prompt_tokens,
            pending_prompt_pairs,
            context_tokens,
            blocks_free: free,
            blocks_cached: cached,
            blocks_kept: self.kv.pool.kept_blocks(),
            blocks_held: held,
            blocks_reserved: reserved,
        }
    }

    /// Returns the work of the last planned step.
    pub fn planned_work(&self) -> StepWork {
        self.planned_work
    }

    /// Takes the changes of the prefix cache since the last call; each key occurs at most once.
    pub fn take_cache_changes(&mut self) -> Vec<CacheChange> {
        self.kv.cache.take_changes()
    }

    /// Returns the keys of all cached blocks: the snapshot that later changes refer to.
    pub fn cached_hashes(&self) -> Vec<BlockHash> {
        self.kv.cache.hashes()
    }

    /// Drops all cached blocks that no sequence, transfer or copy uses, and returns their number.
    /// The tiers keep their blocks.
    pub fn reset_prefix_cache(&mut self) -> u32 {
        self.kv.drop_cached()
    }

    /// Returns whether the KV of a sequence is on its way from a prefill peer.
    pub fn expects_kv(&self) -> bool {
        self.config.waits_for_kv && self.sequences.reserved_count() > 0
    }

    /// Returns whether no sequence, transfer, step, save or load is left.
    pub fn is_idle(&self) -> bool {
        let has_no_copy = self.tiers.as_ref().is_none_or(TierStores::is_idle);
        self.sequences.is_empty()
            && self.transfers.len() == 0
            && self.frames.is_empty()
            && has_no_copy
    }

    /// Returns the number of preemptions since the start.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    pub fn kv_groups(&self) -> &KvGroups {
        &self.kv.groups
    }

    /// Returns the length of the longest sequence that can run here: the model's limit, or the
    /// pool's.
    pub fn sequence_tokens_max(&self) -> usize {
        let pool = self.kv.groups.tokens(self.config.limits.blocks as usize);
        pool.min(self.config.limits.sequence_tokens as usize)
    }

    /// Removes a sequence in any phase, if it is here. Its transfer continues. A request whose turn
    /// has not ended may arrive again.
    fn remove(&mut self, id: SequenceId) {
        let Some(mut sequence) = self.sequences.remove(id) else { return };
        self.blocked.take_if(|blocked| blocked.id == id);
        if let (Some(sessions), Some(turn)) = (&mut self.sessions, sequence.turn.take()) {
            sessions.put_back(turn);
        }
        match sequence.into_phase() {
            SequencePhase::AwaitingReady | SequencePhase::Waiting => {}
            SequencePhase::Reserved { prefix } | SequencePhase::Loading { prefix, .. } => {
                self.kv.release(&prefix);
            }
            SequencePhase::Ready(table) => self.release_table(&table),
            SequencePhase::Running(row) => self.vacate(row),
        }
    }

    /// Releases a row's slot and blocks. Blocks that a step in flight may use are released when the
    /// step's result has been collected.
    fn vacate(&mut self, row: Row) {
        self.slots.vacate(row.slot, row.announced);
        let mut blocks = row.blocks;
        blocks.extend(row.state.cached.blocks);
        blocks.extend(row.state.saving.into_iter().flat_map(|saving| saving.blocks));
        match row.last_step {
            Some(step) if self.frames.is_in_flight(step) => self.frames.defer(blocks),
            _ => self.kv.release(&blocks),
        }
    }

    /// Releases the blocks of a sequence that did not join the batch.
    fn release_table(&mut self, table: &SequenceBlocks) {
        self.kv.release(&table.blocks);
        self.kv.release(&table.state.blocks);
    }

    fn fail(&mut self, id: SequenceId, failure: SequenceFailure, actions: &mut Vec<Action>) {
        self.remove(id);
        self.abort_transfer(id, &failure.to_string(), actions);
        actions.push(Action::Failed { id, failure });
    }

    /// Emits `AbortTransfer` once for each transfer.
    fn abort_transfer(&mut self, id: SequenceId, reason: &str, actions: &mut Vec<Action>) {
        if self.transfers.abort(id) {
            actions.push(Action::AbortTransfer { id, reason: reason.to_owned() });
        }
    }
}
