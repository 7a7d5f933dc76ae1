//! Executor without arithmetic, in virtual time.
//!
//! The "KV" of a position is a fingerprint of all tokens up to it, and the next token is a hash of
//! the last fingerprint. The executor therefore detects at once a step that reads a block which was
//! not written, was written by another sequence or was reused too early. Outputs can be compared
//! token by token across chunking, preemption, recompute and transfer. A hash decides which draft
//! tokens are accepted; their KV is written either way. A step is computed when it is collected,
//! not when it is launched, because a device may also read and write KV that late.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use kernels::{
    BLOCK_TOKENS, BlockId, KvGroups,
    sampling::{SampledToken, Sampling, TokenMask},
};

use super::{
    Executor, ExecutorError, ExecutorLimits,
    batch::{Batch, BatchRow, ScheduledRow},
};
use crate::{
    event::InFlight,
    plan::{RowFailure, RowMask, RowResult, Span, StepId, StepPlan, StepResult, StepRun},
};

/// Cost of a step in virtual time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostModel {
    /// Cost of any step: kernel launches, and reading the weights once.
    pub step: Duration,
    /// Cost of each token of the step.
    pub token: Duration,
    /// Cost of each token of KV that a row attends to.
    pub context_token: Duration,
}

impl Default for CostModel {
    /// Returns the costs of roughly a small model on a small machine.
    fn default() -> Self {
        Self {
            step: Duration::from_millis(5),
            token: Duration::from_micros(500),
            context_token: Duration::from_nanos(200),
        }
    }
}

/// Simulated contents of one block.
pub type SimBlock = [u64; BLOCK_TOKENS];

/// Simulated KV memory of one node; clones share it. Unwritten positions are 0.
#[derive(Clone, Debug)]
pub struct SimArena {
    blocks: Arc<Mutex<Vec<SimBlock>>>,
}

impl SimArena {
    pub fn new(block_count: u32) -> Self {
        Self { blocks: Arc::new(Mutex::new(vec![[0; BLOCK_TOKENS]; block_count as usize])) }
    }

    pub fn read(&self, block: BlockId) -> SimBlock {
        self.lock()[block.index()]
    }

    pub fn write(&self, block: BlockId, contents: SimBlock) {
        self.lock()[block.index()] = contents;
    }

    fn lock(&self) -> MutexGuard<'_, Vec<SimBlock>> {
        // Plain numbers: a panic elsewhere leaves them valid.
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the KV of every position of `tokens`.
pub fn fingerprints(tokens: &[u32]) -> Vec<u64> {
    let mut all = Vec::with_capacity(tokens.len());
    extend_fingerprints(&mut all, tokens);
    all
}

/// Returns the KV of every position of `tokens` under weights of this version. The tokens that
/// follow do not depend on the version.
pub fn kv_of(tokens: &[u32], weight_version: u64) -> Vec<u64> {
    let salt = salt(weight_version);
    fingerprints(tokens).into_iter().map(|kv| kv ^ salt).collect()
}

/// Returns what the block of this entry of a block table holds after tokens with the KV `kv`. A KV
/// block may have further positions.
pub fn block_after(groups: &KvGroups, entry: usize, kv: &[u64]) -> SimBlock {
    if entry < groups.state_entries() {
        return state_after(entry, kv.last().copied().unwrap_or(0));
    }
    let first = groups.place(entry).0 * BLOCK_TOKENS;
    let mut block = [0; BLOCK_TOKENS];
    let kv = &kv[first..kv.len().min(first + BLOCK_TOKENS)];
    block[..kv.len()].copy_from_slice(kv);
    block
}

/// Returns the contents of a block of the state after a token with this KV.
fn state_after(entry: usize, kv: u64) -> SimBlock {
    std::array::from_fn(|position| mix(kv ^ (entry * BLOCK_TOKENS + position) as u64))
}

/// Returns the salt of the fingerprints: 0 for the weights of the start, otherwise an even number,
/// so that KV is never 0.
fn salt(weight_version: u64) -> u64 {
    if weight_version == 1 { 0 } else { mix(weight_version) & !1 }
}

/// Returns the token that follows `tokens`, one of `allowed` if given; `None` when every token is
/// masked.
pub fn next_token(
    tokens: &[u32],
    prompt_len: usize,
    sampling: &Sampling,
    allowed: Option<&TokenMask>,
    vocabulary: u32,
) -> Option<u32> {
    let last = fingerprints(tokens).last().copied().unwrap_or(0);
    choose(last, tokens.len() - prompt_len, sampling, allowed, vocabulary)
}

fn extend_fingerprints(all: &mut Vec<u64>, tokens: &[u32]) {
    let mut last = all.last().copied().unwrap_or(0x9e37_79b9_7f4a_7c15);
    for &token in &tokens[all.len()..] {
        // Never 0, which means "not written".
        last = mix(last ^ u64::from(token).wrapping_add(1)) | 1;
        all.push(last);
    }
}

/// Samples a token by hash. The seed is used only if the temperature is above 0. Stop tokens are
/// masked until `min_tokens` tokens are generated.
fn choose(
    last: u64,
    output_len: usize,
    sampling: &Sampling,
    allowed: Option<&TokenMask>,
    vocabulary: u32,
) -> Option<u32> {
    let seed = if sampling.temperature > 0.0 { sampling.seed } else { 0 };
    let first = (mix(last ^ mix(seed)) % u64::from(vocabulary)) as u32;
    let masked = output_len < sampling.min_tokens as usize;
    let may_be_chosen = |token: &u32| {
        (!masked || !sampling.stop_token_ids.contains(token))
            && allowed.is_none_or(|allowed| allowed.allows(*token))
    };
    (first..vocabulary).chain(0..first).find(may_be_chosen)
}

/// Returns draft tokens by hash: of eight hash values, five give a correct token, two a wrong one,
/// and one ends the list.
fn draft(row: &BatchRow, most: usize, vocabulary: u32) -> Vec<u32> {
    let mut history = fingerprints(&row.tokens);
    let mut known = row.tokens.clone();
    while known.len() < row.tokens.len() + most {
        let last = history.last().copied().unwrap_or(0);
        let output_len = known.len() - row.prompt_len;
        let Some(right) = choose(last, output_len, &row.sampling, None, vocabulary) else {
            break;
        };
        match mix(!last) % 8 {
            0 => break,
            1 | 2 => known.push((right + 1) % vocabulary),
            _ => known.push(right),
        }
        extend_fingerprints(&mut history, &known);
    }
    known.split_off(row.tokens.len())
}

/// Computes one step of SplitMix64.
fn mix(mut value: u64) -> u64 {
    value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[derive(Debug)]
struct SimulatedStep {
    at: Instant,
    plan: StepPlan,
    /// `None` until the step is supplied with its token bitmasks.
    masks: Option<Vec<RowMask>>,
}

#[derive(Debug)]
pub struct SimExecutor {
    limits: ExecutorLimits,
    cost: CostModel,
    batch: Batch,
    kv_groups: KvGroups,
    /// Fingerprints of each slot's tokens.
    histories: Vec<Vec<u64>>,
    arena: SimArena,
    weight_version: u64,
    /// Weight version that the next commit uses, and whether rows keep their KV at the commit.
    prepared: Option<(u64, bool)>,
    /// KV of earlier weights that each slot's row has kept: first position after it, and weight
    /// version.
    kept_kv: Vec<Vec<(usize, u64)>>,
    launched: VecDeque<SimulatedStep>,
    /// Whether the oldest step waits for its token bitmasks only.
    masks_are_due: bool,
    /// The oldest step, computed but not due yet.
    computed: Option<(Instant, StepResult)>,
    now: Instant,
    idle_from: Instant,
}

impl SimExecutor {
    /// Creates an executor whose virtual time begins at `start`.
    pub fn new(limits: ExecutorLimits, cost: CostModel, start: Instant) -> Self {
        Self {
            limits,
            cost,
            batch: Batch::new(limits),
            kv_groups: KvGroups::default(),
            histories: vec![Vec::new(); limits.slots as usize],
            arena: SimArena::new(limits.blocks),
            weight_version: 1,
            prepared: None,
            kept_kv: vec![Vec::new(); limits.slots as usize],
            launched: VecDeque::new(),
            masks_are_due: false,
            computed: None,
            now: start,
            idle_from: start,
        }
    }

    /// Sets the KV groups. Each group has the KV of a position in a block of its own, and no step
    /// reads the blocks behind its window. A state is the KV of its last token.
    pub fn with_kv_groups(self, kv_groups: KvGroups) -> Self {
        Self { batch: self.batch.with_kv_groups(kv_groups.clone()), kv_groups, ..self }
    }

    /// Returns the KV memory, for the simulated transfer.
    pub fn arena(&self) -> SimArena {
        self.arena.clone()
    }

    /// Prepares weights of this version. After the commit, reading KV of other weights is an error,
    /// like KV of other tokens. With [`InFlight::KeepKv`] the rows of the batch read the KV that
    /// they have at the commit.
    pub fn prepare_weights(&mut self, version: u64, in_flight: InFlight) {
        self.prepared = Some((version, in_flight == InFlight::KeepKv));
    }

    /// Advances virtual time.
    pub fn advance(&mut self, time: Duration) {
        self.now += time;
    }

    fn compute(
        &mut self,
        plan: &StepPlan,
        masks: Vec<RowMask>,
    ) -> Result<(Duration, Vec<RowResult>), ExecutorError> {
        let vocabulary = self.limits.vocabulary;
        let mut scheduled =
            self.batch.apply(plan, |_| None, |row, most| draft(row, most, vocabulary))?;
        for admitted in &plan.admitted {
            self.histories[admitted.slot.0 as usize] = fingerprints(&admitted.tokens);
            self.kept_kv[admitted.slot.0 as usize].clear();
        }
        for row in scheduled.iter().filter(|row| row.draft_count > 0) {
            let history = &mut self.histories[row.slot.0 as usize];
            extend_fingerprints(history, &self.batch.row(row.slot).tokens);
        }
        let bad = |reason| ExecutorError::BadPlan { step_id: plan.step_id, reason };
        for &(from, to) in &plan.copies {
            self.arena.write(to, self.arena.read(from));
        }
        self.check_writes(&scheduled).map_err(bad)?;
        self.batch.supply(&mut scheduled, masks).map_err(bad)?;
        let mut cost = self.cost.step;
        let mut results = Vec::with_capacity(scheduled.len());
        for row in &scheduled {
            self.check_reads(row).map_err(bad)?;
            self.write_kv(row);
            cost += self.cost.token * row.token_count as u32;
            cost += self.cost.context_token * row.end() as u32;
            if row.is_late {
                let history = &mut self.histories[row.slot.0 as usize];
                history.truncate(self.batch.row(row.slot).tokens.len());
            }
            results.push(match row.samples && !row.is_late {
                true => self.sample(row),
                false => self.batch.unsampled(row),
            });
        }
        Ok((cost, results))
    }

    /// Checks that no row writes a block that is in another row's table.
    fn check_writes(&self, scheduled: &[ScheduledRow]) -> Result<(), String> {
        let mut writers = HashMap::new();
        for row in scheduled {
            let table = &self.batch.row(row.slot).blocks;
            let written = row.start / BLOCK_TOKENS..row.end().div_ceil(BLOCK_TOKENS);
            let (state, _) = self.kv_groups.split(table);
            for &block in state.iter().chain(&table[self.kv_groups.entries_of(written)]) {
                if writers.insert(block, row.slot).is_some() {
                    return Err(format!("block {} is written twice in one step", block.0));
                }
            }
        }
        for (slot, row) in self.batch.rows() {
            let blocks = self.kv_groups.blocks(row.blocks.len());
            let state = 0..self.kv_groups.split(&row.blocks).0.len();
            for entry in state.chain(self.kv_groups.needed(row.position, 0..blocks)) {
                let block = row.blocks[entry];
                if writers.get(&block).is_some_and(|&writer| writer != slot) {
                    return Err(format!(
                        "block {} is written while slot {} has it in its table",
                        block.0, slot.0
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks that every earlier position in the windows of the row holds the KV of the row's
    /// tokens.
    fn check_reads(&self, row: &ScheduledRow) -> Result<(), String> {
        let table = &self.batch.row(row.slot).blocks;
        let history = &self.histories[row.slot.0 as usize];
        let kept = &self.kept_kv[row.slot.0 as usize];
        let arena = self.arena.lock();
        let blocks = 0..row.start.div_ceil(BLOCK_TOKENS);
        let entries = self.kv_groups.needed(row.start, blocks);
        let reads = entries.flat_map(|entry| {
            let first = self.kv_groups.place(entry).0 * BLOCK_TOKENS;
            (first..row.start.min(first + BLOCK_TOKENS)).map(move |position| (position, entry))
        });
        for (position, entry) in reads {
            let (block, expected) = (table[entry], history[position]);
            let found = arena[block.index()][position % BLOCK_TOKENS];
            let kept = kept.iter().find(|(end, _)| position < *end);
            let weight_version = kept.map_or(self.weight_version, |(_, version)| *version);
            if found != expected ^ salt(weight_version) {
                return Err(format!(
                    "slot {} reads position {position} from block {}, which holds {}",
                    row.slot.0,
                    block.0,
                    if found == 0 { "nothing" } else { "the KV of other tokens" }
                ));
            }
        }
        let Some(last) = row.start.checked_sub(1) else { return Ok(()) };
        let kept = kept.iter().find(|(end, _)| last < *end);
        let weight_version = kept.map_or(self.weight_version, |(_, version)| *version);
        let kv = history[last] ^ salt(weight_version);
        for (entry, block) in self.kv_groups.split(table).0.iter().enumerate() {
            if arena[block.index()] != state_after(entry, kv) {
                return Err(format!(
                    "slot {} reads block {entry} of the state after token {last} from block {}, \
                     which holds something else",
                    row.slot.0, block.0
                ));
            }
        }
        Ok(())
    }

    fn write_kv(&self, row: &ScheduledRow) {
        let table = &self.batch.row(row.slot).blocks;
        let history = &self.histories[row.slot.0 as usize];
        let mut arena = self.arena.lock();
        for position in row.start..row.end() {
            let kv = history[position] ^ salt(self.weight_version);
            let index = position / BLOCK_TOKENS;
            for block in &table[self.kv_groups.entries_of(index..index + 1)] {
                arena[block.index()][position % BLOCK_TOKENS] = kv;
            }
            for (entry, block) in self.kv_groups.split(table).0.iter().enumerate() {
                arena[block.index()] = state_after(entry, kv);
            }
        }
    }

    fn sample(&mut self, scheduled: &ScheduledRow) -> RowResult {
        let vocabulary = self.limits.vocabulary;
        let history = &mut self.histories[scheduled.slot.0 as usize];
        let row = self.batch.row(scheduled.slot);
        let answers = scheduled.sampled_lengths().enumerate().map(|(index, length)| {
            let (output_len, allowed) = (length - row.prompt_len, row.allowed.get(index));
            let allowed = allowed.map(Arc::as_ref);
            choose(history[length - 1], output_len, &row.sampling, allowed, vocabulary)
                .map(|id| SampledToken { id, logprobs: None, pooled: None })
                .ok_or_else(|| RowFailure::Sampling { reason: "every token is masked".to_owned() })
        });
        let answers: Vec<_> = answers.collect();
        history.truncate(scheduled.end() - scheduled.draft_count);
        let result = self.batch.sampled(scheduled, answers);
        extend_fingerprints(history, &self.batch.row(scheduled.slot).tokens);
        result
    }
}

impl Executor for SimExecutor {
    fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        let in_flight = self.launched.len() + usize::from(self.computed.is_some());
        if in_flight >= self.limits.depth as usize {
            let reason = format!("{in_flight} steps are in flight already");
            return Err(ExecutorError::BadPlan { step_id: plan.step_id, reason });
        }
        let masks = (!plan.awaits_masks).then(Vec::new);
        self.launched.push_back(SimulatedStep { at: self.now, plan, masks });
        Ok(())
    }

    fn supply(&mut self, step_id: StepId, masks: Vec<RowMask>) -> Result<(), ExecutorError> {
        let last = self.launched.back_mut().filter(|last| last.plan.step_id == step_id);
        match last.filter(|last| last.masks.is_none()) {
            Some(last) => last.masks = Some(masks),
            None => {
                let reason = "the step awaits no bitmasks".to_owned();
                return Err(ExecutorError::BadPlan { step_id, reason });
            }
        }
        self.masks_are_due = false;
        Ok(())
    }

    fn masks_are_due(&self) -> bool {
        self.masks_are_due
    }

    /// Advances virtual time to the end of the oldest step, or by `timeout` if that comes first.
    fn collect(&mut self, timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
        if self.computed.is_none()
            && let Some(SimulatedStep { at, plan, masks }) = self.launched.pop_front()
        {
            let Some(masks) = masks else {
                self.launched.push_front(SimulatedStep { at, plan, masks });
                self.masks_are_due = true;
                return Ok(None);
            };
            let (busy, rows) = self.compute(&plan, masks)?;
            let begin = self.idle_from.max(at);
            self.idle_from = begin + busy;
            let device = Some(Span { begin, end: self.idle_from });
            let run = StepRun { device, results_at: Some(self.idle_from), ..StepRun::default() };
            let result = StepResult { step_id: plan.step_id, rows, busy, run };
            self.computed = Some((self.idle_from, result));
        }
        let give_up = self.now + timeout;
        match self.computed.take() {
            Some((due, result)) if due <= give_up => {
                self.now = self.now.max(due);
                Ok(Some(result))
            }
            waiting => {
                self.computed = waiting;
                self.now = give_up;
                Ok(None)
            }
        }
    }

    fn commit_weights(&mut self) -> Result<(), ExecutorError> {
        assert!(self.launched.is_empty(), "weights change between steps");
        let Some((version, keeps_kv)) = self.prepared.take() else { return Ok(()) };
        let before = std::mem::replace(&mut self.weight_version, version);
        if !keeps_kv {
            self.kept_kv.iter_mut().for_each(Vec::clear);
            return Ok(());
        }
        for (slot, row) in self.batch.rows() {
            self.kept_kv[slot.0 as usize].push((row.position, before));
        }
        Ok(())
    }

    fn limits(&self) -> ExecutorLimits {
        self.limits
    }

    fn now(&self) -> Instant {
        self.now
    }
}
