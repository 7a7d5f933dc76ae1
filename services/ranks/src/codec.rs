//! Plans and results as bytes: fixed fields, little-endian, one form for each.
//!
//! A row of a plan takes 12 bytes, and none when all rows are those of the plan before: a decode step
//! of 256 sequences takes 3 KB after a change and some hundred bytes without one. Decoding takes any
//! bytes: what is no message is an error that says what is wrong with it, and memory is taken for what
//! is there, not for what a count promises.

use std::sync::Arc;

use engine::{
    executor::{ExecutorError, ExecutorLimits, Speculation},
    plan::{
        AdmittedRow, Dispatch, RowFailure, RowMask, RowPlan, RowResult, Slot, StepId, StepPlan,
    },
};
use kernels::{
    BlockId,
    sampling::{SampledToken, Sampling, TokenLogprobs, TokenMask},
};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A number of a plan that has no place in the form. Configuration keeps them far below.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("slot {slot}: {field} is {value}; allowed are up to {most}", slot = slot.0)]
pub struct Unencodable {
    slot: Slot,
    field: &'static str,
    value: u32,
    most: u32,
}

/// Bytes that are no message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("the message ends within {field}")]
    Short { field: &'static str },
    #[error("{field} is {value}, which it cannot be")]
    Value { field: &'static str, value: u64 },
    #[error("{bytes} bytes follow the message")]
    Rest { bytes: usize },
}

/// What a node tells its ranks.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    /// The first: what the rank is to be, in the words of whoever starts it.
    Start(Vec<u8>),
    /// `state` is the running hash of all plans, this one included; `found` what the reader makes of
    /// what it read.
    Plan { plan: StepPlan, state: u64, found: u64 },
    /// No plan follows; what is in flight is finished.
    Stop,
}

/// What a rank answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// What the executor is made for, and what else the node is to know of it.
    Ready {
        limits: ExecutorLimits,
        says: Vec<u8>,
    },
    Step(StepAnswer),
    Failed(Failure),
}

#[derive(Clone, Debug, PartialEq)]
pub struct StepAnswer {
    pub step_id: StepId,
    /// The running hash of all plans up to this one.
    pub state: u64,
    /// The running hash of all tokens chosen up to this step.
    pub tokens: u64,
    /// Of one rank; the others' are the same.
    pub result: Option<WireResult>,
}

/// A step's result, its moments by the clock of the machine.
#[derive(Clone, Debug, PartialEq)]
pub struct WireResult {
    pub rows: Vec<RowResult>,
    pub busy_nanos: u64,
    pub dispatch: Dispatch,
    pub uploaded_bytes: u64,
    pub device_nanos: Option<(u64, u64)>,
    pub landed_nanos: Option<u64>,
}

/// Why a rank ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    Stopped { reason: String },
    BadPlan { step_id: StepId, reason: String },
}

impl From<&ExecutorError> for Failure {
    fn from(error: &ExecutorError) -> Self {
        match error {
            ExecutorError::BadPlan { step_id, reason } => {
                Self::BadPlan { step_id: *step_id, reason: reason.clone() }
            }
            ExecutorError::Stopped { reason } => Self::Stopped { reason: reason.clone() },
            ExecutorError::Group { .. } => Self::Stopped { reason: error.to_string() },
        }
    }
}

/// What both ends keep of the plans so far.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// The running hash.
    state: u64,
    /// Of the last plan.
    rows: Vec<RowPlan>,
    /// For the next one that is decoded.
    spare: Spare,
}

/// What a plan is put into, made while nobody waits for it.
#[derive(Clone, Debug, Default)]
struct Spare {
    /// The last plan's once more, or none.
    rows: Vec<RowPlan>,
    /// Empty ones.
    blocks: Vec<Vec<BlockId>>,
}

impl History {
    pub fn state(&self) -> u64 {
        self.state
    }

    /// Makes ready for a plan to be decoded. To be called when there is time.
    pub fn prepare(&mut self) {
        let Spare { rows, blocks } = &mut self.spare;
        if rows.is_empty() {
            rows.clone_from(&self.rows);
        }
        blocks.resize_with(SPARE_LISTS, || Vec::with_capacity(SPARE_LIST_BLOCKS));
    }
}

impl PartialEq for History {
    fn eq(&self, other: &Self) -> bool {
        (self.state, &self.rows) == (other.state, &other.rows)
    }
}

const START: u8 = 0;
const PLAN: u8 = 1;
const STOP: u8 = 2;

const READY: u8 = 0;
const STEP: u8 = 1;
const FAILED: u8 = 2;

/// How many tokens and drafts a row of a plan can have.
const TOKEN_COUNT_MAX: u32 = (1 << 24) - 1;
const DRAFTS_MAX: u32 = (1 << 7) - 1;
/// Lists of blocks that a decode step of 256 rows has in the mean; few have more than one block.
const SPARE_LISTS: usize = 16;
const SPARE_LIST_BLOCKS: usize = 4;
/// So many items of a list get their memory in one piece.
const LIST_AT_ONCE: usize = 1024;

pub fn encode_start(told: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(1 + told.len());
    bytes.push(START);
    bytes.extend_from_slice(told);
    bytes
}

pub fn encode_stop() -> Vec<u8> {
    vec![STOP]
}

/// The message, into `bytes` in place of what was there; the plan joins the history.
pub fn encode_plan(
    plan: &StepPlan,
    history: &mut History,
    bytes: &mut Vec<u8>,
) -> Result<(), Unencodable> {
    bytes.clear();
    let mut out = Out(bytes);
    out.u8(PLAN);
    // The hash, once it is known.
    out.u64(0);
    // Those of a steady decode are.
    let is_repeated = !plan.rows.is_empty() && are_same(&plan.rows, &history.rows);
    put_plan(&mut out, plan, is_repeated)?;
    history.state = next_state(history.state, &bytes[9..]);
    bytes[1..9].copy_from_slice(&history.state.to_le_bytes());
    if !is_repeated {
        history.rows.clone_from(&plan.rows);
    }
    Ok(())
}

/// Reads an order; a plan joins the history, as it was found.
pub fn decode_order(bytes: &[u8], history: &mut History) -> Result<Order, DecodeError> {
    let mut input = In(bytes);
    let order = match input.u8("the kind of order")? {
        START => Order::Start(std::mem::take(&mut input.0).to_vec()),
        PLAN => {
            let state = input.u64("the state hash")?;
            let found = next_state(history.state, input.0);
            let (mut plan, is_repeated) = take_plan(&mut input, &mut history.spare.blocks)?;
            input.end()?;
            history.state = found;
            if !is_repeated {
                history.rows.clone_from(&plan.rows);
                history.spare.rows.clear();
            } else if history.spare.rows.is_empty() {
                plan.rows.clone_from(&history.rows);
            } else {
                plan.rows = std::mem::take(&mut history.spare.rows);
            }
            return Ok(Order::Plan { plan, state, found });
        }
        STOP => Order::Stop,
        kind => return Err(bad("the kind of order", kind)),
    };
    input.end()?;
    Ok(order)
}

/// In one pass without a way out, which takes a fraction of the time where they are.
fn are_same(rows: &[RowPlan], before: &[RowPlan]) -> bool {
    let difference = |(row, before): (&RowPlan, &RowPlan)| {
        let RowPlan { slot, generation, token_count, samples, drafts_max } = *row;
        (slot.0 ^ before.slot.0)
            | (generation ^ before.generation)
            | (token_count ^ before.token_count)
            | u32::from(samples ^ before.samples)
            | (drafts_max ^ before.drafts_max)
    };
    rows.len() == before.len()
        && rows.iter().zip(before).map(difference).fold(0, |all, it| all | it) == 0
}

fn next_state(state: u64, plan: &[u8]) -> u64 {
    xxh3_64_with_seed(plan, state)
}

/// The running hash of chosen tokens with those of these rows.
pub fn next_tokens(tokens: u64, rows: &[RowResult]) -> u64 {
    let mut bytes = Vec::with_capacity(rows.len() * 16);
    let mut out = Out(&mut bytes);
    for row in rows {
        out.u32(row.slot.0);
        out.u32(row.generation);
        out.u32(row.tokens.len() as u32);
        row.tokens.iter().for_each(|token| out.u32(token.id));
        out.u8(u8::from(row.failure.is_some()));
    }
    xxh3_64_with_seed(&bytes, tokens)
}

pub fn encode_answer(answer: &Answer) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut out = Out(&mut bytes);
    match answer {
        Answer::Ready { limits, says } => {
            out.u8(READY);
            put_limits(&mut out, limits);
            out.bytes(says);
        }
        Answer::Step(step) => {
            out.u8(STEP);
            put_step(&mut out, step);
        }
        Answer::Failed(failure) => {
            out.u8(FAILED);
            let (kind, step_id, reason) = match failure {
                Failure::Stopped { reason } => (0, 0, reason),
                Failure::BadPlan { step_id, reason } => (1, *step_id, reason),
            };
            out.u8(kind);
            out.u64(step_id);
            out.text(reason);
        }
    }
    bytes
}

pub fn decode_answer(bytes: &[u8]) -> Result<Answer, DecodeError> {
    let mut input = In(bytes);
    let answer = match input.u8("the kind of answer")? {
        READY => {
            let limits = take_limits(&mut input)?;
            let count = input.u32("what a rank says")? as usize;
            let says = input.bytes(count, "what a rank says")?.to_vec();
            Answer::Ready { limits, says }
        }
        STEP => Answer::Step(take_step(&mut input)?),
        FAILED => {
            let kind = input.u8("the kind of failure")?;
            let step_id = input.u64("the failed step")?;
            let reason = input.text("the reason")?;
            Answer::Failed(match kind {
                0 => Failure::Stopped { reason },
                1 => Failure::BadPlan { step_id, reason },
                _ => return Err(bad("the kind of failure", kind)),
            })
        }
        kind => return Err(bad("the kind of answer", kind)),
    };
    input.end()?;
    Ok(answer)
}

fn put_plan(out: &mut Out<'_>, plan: &StepPlan, is_repeated: bool) -> Result<(), Unencodable> {
    let StepPlan { step_id, released, admitted, extended, rows, masks, drafts_max } = plan;
    let rows: &[RowPlan] = if is_repeated { &[] } else { rows };
    out.u64(*step_id);
    out.u32(*drafts_max);
    out.u8(u8::from(is_repeated));
    for count in [released.len(), admitted.len(), extended.len(), rows.len(), masks.len()] {
        out.u32(count as u32);
    }
    released.iter().for_each(|slot| out.u32(slot.0));
    for row in admitted {
        out.u32(row.slot.0);
        out.u32(row.generation);
        out.u32(row.prompt_len);
        out.u32(row.computed);
        out.u8(u8::from(row.constrained));
        out.u32s(&row.tokens);
        out.blocks(&row.blocks);
        put_sampling(out, &row.sampling);
    }
    for (slot, blocks) in extended {
        out.u32(slot.0);
        out.blocks(blocks);
    }
    for row in rows {
        let RowPlan { slot, generation, token_count, samples, drafts_max } = *row;
        for (field, value, most) in
            [("token_count", token_count, TOKEN_COUNT_MAX), ("drafts_max", drafts_max, DRAFTS_MAX)]
        {
            if value > most {
                return Err(Unencodable { slot, field, value, most });
            }
        }
        out.u32(slot.0);
        out.u32(generation);
        out.u32(token_count | drafts_max << 24 | u32::from(samples) << 31);
    }
    for mask in masks {
        out.u32(mask.slot.0);
        out.u32(mask.length);
        out.u32s(mask.allowed.words());
    }
    Ok(())
}

/// The plan, and whether it has the rows of the plan before, which are not in it then.
fn take_plan(
    input: &mut In<'_>,
    spare: &mut Vec<Vec<BlockId>>,
) -> Result<(StepPlan, bool), DecodeError> {
    let step_id = input.u64("step_id")?;
    let drafts_max = input.u32("drafts_max")?;
    let is_repeated = input.flag("whether rows are those of the plan before")?;
    let mut counts = [0; 5];
    for count in &mut counts {
        *count = input.u32("a count")?;
    }
    let [released, admitted, extended, rows, masks] = counts;
    if is_repeated && rows > 0 {
        let (field, value) = ("the number of rows beside those of the plan before", rows.into());
        return Err(DecodeError::Value { field, value });
    }
    let plan = StepPlan {
        step_id,
        released: input.list(released, 4, |input| Ok(Slot(input.u32("released")?)))?,
        admitted: input.list(admitted, 70, take_admitted)?,
        extended: input.list(extended, 8, |input| {
            let slot = Slot(input.u32("an extended slot")?);
            let mut blocks = spare.pop().unwrap_or_default();
            blocks.extend(input.words("extended blocks")?.map(BlockId));
            Ok((slot, blocks))
        })?,
        rows: input.list(rows, 12, |input| {
            let (slot, generation) = (Slot(input.u32("a row")?), input.u32("a row")?);
            let packed = input.u32("a row")?;
            Ok(RowPlan {
                slot,
                generation,
                token_count: packed & TOKEN_COUNT_MAX,
                samples: packed >> 31 == 1,
                drafts_max: packed >> 24 & DRAFTS_MAX,
            })
        })?,
        masks: input.list(masks, 12, |input| {
            let (slot, length) = (Slot(input.u32("a mask")?), input.u32("a mask")?);
            let words = input.u32s("a mask")?;
            // All that its words have room for.
            let vocabulary = u32::try_from(words.len() * 32).unwrap_or(u32::MAX);
            Ok(RowMask { slot, length, allowed: Arc::new(TokenMask::new(words, vocabulary)) })
        })?,
        drafts_max,
    };
    Ok((plan, is_repeated))
}

fn take_admitted(input: &mut In<'_>) -> Result<AdmittedRow, DecodeError> {
    Ok(AdmittedRow {
        slot: Slot(input.u32("an admitted slot")?),
        generation: input.u32("an admitted generation")?,
        prompt_len: input.u32("prompt_len")?,
        computed: input.u32("computed")?,
        constrained: input.flag("constrained")?,
        tokens: input.u32s("admitted tokens")?,
        blocks: input.blocks("admitted blocks")?,
        sampling: take_sampling(input)?,
    })
}

fn put_sampling(out: &mut Out<'_>, sampling: &Sampling) {
    let Sampling { temperature, top_k, top_p, min_p, seed, .. } = sampling;
    let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } = sampling;
    let Sampling { stop_token_ids, min_tokens, logprobs, .. } = sampling;
    out.f32(*temperature);
    out.u32(*top_k);
    out.f32(*top_p);
    out.f32(*min_p);
    out.u64(*seed);
    out.f32(*repetition_penalty);
    out.f32(*presence_penalty);
    out.f32(*frequency_penalty);
    out.u32s(stop_token_ids);
    out.u32(*min_tokens);
    out.option(*logprobs, |out, count| out.u32(count));
}

fn take_sampling(input: &mut In<'_>) -> Result<Sampling, DecodeError> {
    Ok(Sampling {
        temperature: input.f32("temperature")?,
        top_k: input.u32("top_k")?,
        top_p: input.f32("top_p")?,
        min_p: input.f32("min_p")?,
        seed: input.u64("seed")?,
        repetition_penalty: input.f32("repetition_penalty")?,
        presence_penalty: input.f32("presence_penalty")?,
        frequency_penalty: input.f32("frequency_penalty")?,
        stop_token_ids: input.u32s("stop_token_ids")?,
        min_tokens: input.u32("min_tokens")?,
        logprobs: input.option("logprobs", |input| input.u32("logprobs"))?,
    })
}

fn put_limits(out: &mut Out<'_>, limits: &ExecutorLimits) {
    let ExecutorLimits { slots, step_tokens, sequence_tokens, blocks, depth, .. } = *limits;
    let ExecutorLimits { vocabulary, speculation, .. } = *limits;
    for value in [slots, step_tokens, sequence_tokens, blocks, depth, vocabulary] {
        out.u32(value);
    }
    out.option(speculation, |out, it| {
        let Speculation { row_drafts, step_tokens, ngram_min, ngram_max } = it;
        [row_drafts, step_tokens, ngram_min, ngram_max].into_iter().for_each(|it| out.u32(it));
    });
}

fn take_limits(input: &mut In<'_>) -> Result<ExecutorLimits, DecodeError> {
    Ok(ExecutorLimits {
        slots: input.u32("slots")?,
        step_tokens: input.u32("step_tokens")?,
        sequence_tokens: input.u32("sequence_tokens")?,
        blocks: input.u32("blocks")?,
        depth: input.u32("depth")?,
        vocabulary: input.u32("vocabulary")?,
        speculation: input.option("speculation", |input| {
            Ok(Speculation {
                row_drafts: input.u32("row_drafts")?,
                step_tokens: input.u32("step_tokens")?,
                ngram_min: input.u32("ngram_min")?,
                ngram_max: input.u32("ngram_max")?,
            })
        })?,
    })
}

fn put_step(out: &mut Out<'_>, step: &StepAnswer) {
    out.u64(step.step_id);
    out.u64(step.state);
    out.u64(step.tokens);
    out.option(step.result.as_ref(), |out, result| {
        out.u64(result.busy_nanos);
        out.u64(result.uploaded_bytes);
        let (kind, rows) = match result.dispatch {
            Dispatch::Eager => (0, 0),
            Dispatch::Graph { rows } => (1, rows),
            Dispatch::Fallback => (2, 0),
        };
        out.u8(kind);
        out.u32(rows);
        out.option(result.device_nanos, |out, (begin, end)| {
            out.u64(begin);
            out.u64(end);
        });
        out.option(result.landed_nanos, |out, nanos| out.u64(nanos));
        out.u32(result.rows.len() as u32);
        result.rows.iter().for_each(|row| put_row(out, row));
    });
}

fn take_step(input: &mut In<'_>) -> Result<StepAnswer, DecodeError> {
    Ok(StepAnswer {
        step_id: input.u64("step_id")?,
        state: input.u64("the state hash")?,
        tokens: input.u64("the token hash")?,
        result: input.option("the result", |input| {
            let busy_nanos = input.u64("busy")?;
            let uploaded_bytes = input.u64("uploaded_bytes")?;
            let (kind, graph_rows) = (input.u8("dispatch")?, input.u32("dispatch")?);
            let dispatch = match kind {
                0 => Dispatch::Eager,
                1 => Dispatch::Graph { rows: graph_rows },
                2 => Dispatch::Fallback,
                _ => return Err(bad("dispatch", kind)),
            };
            let device_nanos =
                input.option("device", |input| Ok((input.u64("device")?, input.u64("device")?)))?;
            let landed_nanos = input.option("landed", |input| input.u64("landed"))?;
            let count = input.u32("rows")?;
            let rows = input.list(count, 17, take_row)?;
            Ok(WireResult {
                rows,
                busy_nanos,
                dispatch,
                uploaded_bytes,
                device_nanos,
                landed_nanos,
            })
        })?,
    })
}

fn put_row(out: &mut Out<'_>, row: &RowResult) {
    out.u32(row.slot.0);
    out.u32(row.generation);
    out.u32(row.drafted);
    match &row.failure {
        None => out.u8(0),
        Some(RowFailure::Sampling { reason }) => {
            out.u8(1);
            out.text(reason);
        }
        Some(RowFailure::NoMask { position }) => {
            out.u8(2);
            out.u32(*position);
        }
        Some(RowFailure::Logits { reason }) => {
            out.u8(3);
            out.text(reason);
        }
    }
    out.u32(row.tokens.len() as u32);
    for token in &row.tokens {
        out.u32(token.id);
        out.option(token.logprobs.as_ref(), |out, logprobs| {
            out.f32(logprobs.chosen);
            out.u32(logprobs.top.len() as u32);
            for (id, logprob) in &logprobs.top {
                out.u32(*id);
                out.f32(*logprob);
            }
        });
    }
}

fn take_row(input: &mut In<'_>) -> Result<RowResult, DecodeError> {
    let (slot, generation) = (Slot(input.u32("a row")?), input.u32("a row")?);
    let drafted = input.u32("drafted")?;
    let failure = match input.u8("a row's failure")? {
        0 => None,
        1 => Some(RowFailure::Sampling { reason: input.text("a row's failure")? }),
        2 => Some(RowFailure::NoMask { position: input.u32("a row's failure")? }),
        3 => Some(RowFailure::Logits { reason: input.text("a row's failure")? }),
        kind => return Err(bad("a row's failure", kind)),
    };
    let count = input.u32("a row's tokens")?;
    let tokens = input.list(count, 5, |input| {
        let id = input.u32("a token")?;
        let logprobs = input.option("logprobs", |input| {
            let chosen = input.f32("logprobs")?;
            let count = input.u32("logprobs")?;
            let top = input
                .list(count, 8, |input| Ok((input.u32("logprobs")?, input.f32("logprobs")?)))?;
            Ok(TokenLogprobs { chosen, top })
        })?;
        Ok(SampledToken { id, logprobs })
    })?;
    Ok(RowResult { slot, generation, tokens, drafted, failure })
}

fn bad(field: &'static str, value: u8) -> DecodeError {
    DecodeError::Value { field, value: value.into() }
}

struct Out<'a>(&'a mut Vec<u8>);

impl Out<'_> {
    fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn f32(&mut self, value: f32) {
        self.u32(value.to_bits());
    }

    fn u32s(&mut self, values: &[u32]) {
        self.u32(values.len() as u32);
        values.iter().for_each(|value| self.u32(*value));
    }

    fn blocks(&mut self, blocks: &[BlockId]) {
        self.u32(blocks.len() as u32);
        blocks.iter().for_each(|block| self.u32(block.0));
    }

    fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.u32(bytes.len() as u32);
        self.0.extend_from_slice(bytes);
    }

    fn option<T>(&mut self, value: Option<T>, put: impl FnOnce(&mut Self, T)) {
        self.u8(u8::from(value.is_some()));
        if let Some(value) = value {
            put(self, value);
        }
    }
}

struct In<'a>(&'a [u8]);

impl In<'_> {
    fn bytes(&mut self, count: usize, field: &'static str) -> Result<&[u8], DecodeError> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or(DecodeError::Short { field })?;
        self.0 = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], DecodeError> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or(DecodeError::Short { field })?;
        self.0 = rest;
        Ok(*bytes)
    }

    fn u8(&mut self, field: &'static str) -> Result<u8, DecodeError> {
        Ok(self.array::<1>(field)?[0])
    }

    fn u32(&mut self, field: &'static str) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    fn u64(&mut self, field: &'static str) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    fn f32(&mut self, field: &'static str) -> Result<f32, DecodeError> {
        Ok(f32::from_bits(self.u32(field)?))
    }

    fn flag(&mut self, field: &'static str) -> Result<bool, DecodeError> {
        match self.u8(field)? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(bad(field, value)),
        }
    }

    /// As many as are said to follow.
    fn words(&mut self, field: &'static str) -> Result<impl Iterator<Item = u32>, DecodeError> {
        let count = self.u32(field)? as usize;
        let bytes = self.bytes(count.saturating_mul(4), field)?;
        Ok(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)))
    }

    fn u32s(&mut self, field: &'static str) -> Result<Vec<u32>, DecodeError> {
        Ok(self.words(field)?.collect())
    }

    fn blocks(&mut self, field: &'static str) -> Result<Vec<BlockId>, DecodeError> {
        Ok(self.words(field)?.map(BlockId).collect())
    }

    fn text(&mut self, field: &'static str) -> Result<String, DecodeError> {
        let count = self.u32(field)? as usize;
        // It goes to people: what is no text of it is shown as such.
        Ok(String::from_utf8_lossy(self.bytes(count, field)?).into_owned())
    }

    fn option<T>(
        &mut self,
        field: &'static str,
        take: impl FnOnce(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<Option<T>, DecodeError> {
        if self.flag(field)? { take(self).map(Some) } else { Ok(None) }
    }

    /// `bytes_min`: what each of them takes at least, so that no count is believed beyond that.
    fn list<T>(
        &mut self,
        count: u32,
        bytes_min: usize,
        mut take: impl FnMut(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<Vec<T>, DecodeError> {
        let count = count as usize;
        if count > self.0.len() / bytes_min {
            return Err(DecodeError::Short { field: "a list" });
        }
        // An item may be larger than its bytes: beyond this they come to prove themselves.
        let mut list = Vec::with_capacity(count.min(LIST_AT_ONCE));
        for _ in 0..count {
            list.push(take(self)?);
        }
        Ok(list)
    }

    fn end(self) -> Result<(), DecodeError> {
        match self.0.len() {
            0 => Ok(()),
            bytes => Err(DecodeError::Rest { bytes }),
        }
    }
}
