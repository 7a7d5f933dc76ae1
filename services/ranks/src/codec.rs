//! Plans and results as bytes, by postcard.
//!
//! A plan leaves out its rows if they equal the rows of the previous plan: a decode step of 256
//! unchanged sequences takes about 100 bytes. Decoding accepts any bytes: malformed bytes give a
//! typed error, and memory is allocated for the elements that the bytes contain, not for the number
//! that a length prefix states.

use std::borrow::Cow;

use engine::{
    executor::{ExecutorError, ExecutorLimits},
    plan::{AdmittedRow, Dispatch, RowMask, RowPlan, RowResult, Slot, StepId, StepPlan},
};
use kernels::{BlockId, backend::ExpertLoad};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Malformed message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("malformed message: {0}")]
    Malformed(#[from] postcard::Error),
    #[error("unknown message kind: {kind}")]
    Kind { kind: u8 },
    #[error("{bytes} bytes follow the message")]
    TrailingBytes { bytes: usize },
}

/// Message from the node to its ranks.
#[derive(Clone, Debug, PartialEq)]
pub enum RankOrder {
    /// First message: the rank's configuration, as bytes that the node and the rank agree on.
    Start(Vec<u8>),
    /// `state` is the writer's running hash of all plans and bitmasks, this plan included; `found`
    /// is the reader's.
    Plan { plan: StepPlan, state: u64, found: u64 },
    /// Token bitmasks of the previous plan, with running hashes as in a plan.
    Masks { step_id: StepId, masks: Vec<RowMask>, state: u64, found: u64 },
    /// A change of the weights while no step is in flight, with running hashes as in a plan.
    Weights { change: WeightChange, state: u64, found: u64 },
    /// Last message: the rank finishes the steps in flight.
    Stop,
}

/// Change of a rank's weights between two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WeightChange {
    /// Releases the weights in use.
    Release,
    /// Switches to the prepared weights.
    Commit,
}

/// Message from a rank to the node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RankAnswer {
    /// Limits of the rank's executor, and bytes that the node and the rank agree on.
    ///
    /// `updates_in_place`: whether updates overwrite the weights in use; `None`: the weights cannot
    /// change.
    Ready { limits: ExecutorLimits, updates_in_place: Option<bool>, ready_message: Vec<u8> },
    /// The rank has run a step.
    Step(StepAnswer),
    /// The forward pass of this step has finished, and its sampling awaits token bitmasks. Rank 0
    /// sends it.
    MasksDue { step_id: StepId },
    /// The rank has changed its weights. `state`: the running hash with the change.
    WeightsChanged { state: u64 },
    /// Last message: the rank ends.
    Failed(Failure),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepAnswer {
    pub step_id: StepId,
    /// Running hash of all plans and bitmasks up to this plan.
    pub state: u64,
    /// Running hash of all tokens sampled up to this step.
    pub tokens: u64,
    /// Rank 0 sends the result; the results of the other ranks are equal.
    pub result: Option<WireResult>,
}

/// Result of a step, with times on the machine's monotonic clock.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WireResult {
    pub rows: Vec<RowResult>,
    pub busy_nanos: u64,
    pub dispatch: Dispatch,
    pub uploaded_bytes: u64,
    pub experts: ExpertLoad,
    pub device_nanos: Option<(u64, u64)>,
    pub results_nanos: Option<u64>,
}

/// Reason why a rank ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// State that writer and reader each keep of the plans and bitmasks so far. Equal after the same
/// messages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlanHistory {
    /// Running hash of all plans and bitmasks.
    state: u64,
    /// Rows of the last plan.
    rows: Vec<RowPlan>,
}

impl PlanHistory {
    pub fn state(&self) -> u64 {
        self.state
    }
}

/// A [`StepPlan`] on the wire.
#[derive(Serialize, Deserialize)]
struct WirePlan<'a> {
    step_id: StepId,
    drafts_max: u32,
    drafts: Cow<'a, [(Slot, Vec<u32>)]>,
    awaits_masks: bool,
    /// `None`: the rows of the previous plan.
    rows: Option<Cow<'a, [RowPlan]>>,
    released: Cow<'a, [Slot]>,
    admitted: Cow<'a, [AdmittedRow]>,
    extended: Cow<'a, [(Slot, Vec<BlockId>)]>,
    copies: Cow<'a, [(BlockId, BlockId)]>,
}

const START: u8 = 0;
const PLAN: u8 = 1;
const STOP: u8 = 2;
const MASKS: u8 = 3;
const WEIGHTS: u8 = 4;

pub fn encode_start(config: &[u8]) -> Vec<u8> {
    [&[START], config].concat()
}

pub fn encode_stop() -> Vec<u8> {
    vec![STOP]
}

/// Encodes a plan into `bytes`, replacing their contents. Adds the plan to the history.
pub fn encode_plan(plan: &StepPlan, history: &mut PlanHistory, bytes: &mut Vec<u8>) {
    let is_repeated = are_same(&plan.rows, &history.rows);
    let wire = WirePlan {
        step_id: plan.step_id,
        drafts_max: plan.drafts_max,
        drafts: Cow::Borrowed(&plan.drafts),
        awaits_masks: plan.awaits_masks,
        rows: (!is_repeated).then_some(Cow::Borrowed(&plan.rows)),
        released: Cow::Borrowed(&plan.released),
        admitted: Cow::Borrowed(&plan.admitted),
        extended: Cow::Borrowed(&plan.extended),
        copies: Cow::Borrowed(&plan.copies),
    };
    encode_hashed(PLAN, &wire, history, bytes);
    if !is_repeated {
        history.rows.clone_from(&plan.rows);
    }
}

/// Encodes token bitmasks into `bytes`, replacing their contents. Adds the bitmasks to the history.
pub fn encode_masks(
    step_id: StepId,
    masks: &[RowMask],
    history: &mut PlanHistory,
    bytes: &mut Vec<u8>,
) {
    encode_hashed(MASKS, &(step_id, masks), history, bytes);
}

/// Encodes a change of the weights into `bytes`, replacing their contents. Adds the change to the
/// history.
pub fn encode_weight_change(change: WeightChange, history: &mut PlanHistory, bytes: &mut Vec<u8>) {
    encode_hashed(WEIGHTS, &change, history, bytes);
}

/// Encodes the kind, the running hash of the history with this message, and the message.
fn encode_hashed(
    kind: u8,
    message: &impl Serialize,
    history: &mut PlanHistory,
    bytes: &mut Vec<u8>,
) {
    let mut buffer = std::mem::take(bytes);
    buffer.clear();
    // The hash follows once the message is encoded.
    buffer.extend_from_slice(&[kind, 0, 0, 0, 0, 0, 0, 0, 0]);
    *bytes = postcard::to_extend(message, buffer).expect("a vector takes every message");
    history.state = next_state(history.state, &bytes[9..]);
    bytes[1..9].copy_from_slice(&history.state.to_le_bytes());
}

/// Decodes an order. Adds plans and bitmasks to the history.
pub fn decode_order(bytes: &[u8], history: &mut PlanHistory) -> Result<RankOrder, DecodeError> {
    let end = || DecodeError::Malformed(postcard::Error::DeserializeUnexpectedEnd);
    let (kind, bytes) = bytes.split_first().ok_or_else(end)?;
    match *kind {
        START => Ok(RankOrder::Start(bytes.to_vec())),
        PLAN => {
            let (state, bytes) = bytes.split_first_chunk().ok_or_else(end)?;
            let wire: WirePlan<'_> = decode(bytes)?;
            if let Some(rows) = wire.rows {
                history.rows = rows.into_owned();
            }
            let plan = StepPlan {
                step_id: wire.step_id,
                released: wire.released.into_owned(),
                admitted: wire.admitted.into_owned(),
                extended: wire.extended.into_owned(),
                copies: wire.copies.into_owned(),
                rows: history.rows.clone(),
                awaits_masks: wire.awaits_masks,
                drafts_max: wire.drafts_max,
                drafts: wire.drafts.into_owned(),
            };
            history.state = next_state(history.state, bytes);
            let state = u64::from_le_bytes(*state);
            Ok(RankOrder::Plan { plan, state, found: history.state })
        }
        MASKS => {
            let (state, bytes) = bytes.split_first_chunk().ok_or_else(end)?;
            let (step_id, masks) = decode(bytes)?;
            history.state = next_state(history.state, bytes);
            let state = u64::from_le_bytes(*state);
            Ok(RankOrder::Masks { step_id, masks, state, found: history.state })
        }
        WEIGHTS => {
            let (state, bytes) = bytes.split_first_chunk().ok_or_else(end)?;
            let change = decode(bytes)?;
            history.state = next_state(history.state, bytes);
            let state = u64::from_le_bytes(*state);
            Ok(RankOrder::Weights { change, state, found: history.state })
        }
        STOP if bytes.is_empty() => Ok(RankOrder::Stop),
        STOP => Err(DecodeError::TrailingBytes { bytes: bytes.len() }),
        kind => Err(DecodeError::Kind { kind }),
    }
}

pub fn encode_answer(answer: &RankAnswer) -> Vec<u8> {
    postcard::to_stdvec(answer).expect("a vector takes every answer")
}

pub fn decode_answer(bytes: &[u8]) -> Result<RankAnswer, DecodeError> {
    decode(bytes)
}

pub(crate) fn decode<'de, T: Deserialize<'de>>(bytes: &'de [u8]) -> Result<T, DecodeError> {
    match postcard::take_from_bytes(bytes)? {
        (message, []) => Ok(message),
        (_, rest) => Err(DecodeError::TrailingBytes { bytes: rest.len() }),
    }
}

/// Compares without an early exit, which takes a fraction of the time when the rows are equal.
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

/// Returns the running hash of sampled tokens, `rows` included.
pub fn hash_tokens(tokens: u64, rows: &[RowResult]) -> u64 {
    let mut bytes = Vec::with_capacity(rows.len() * 20);
    for row in rows {
        let head = [row.slot.0, row.generation, row.tokens.len() as u32];
        for word in head.into_iter().chain(row.tokens.iter().map(|token| token.id)) {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.push(u8::from(row.failure.is_some()));
    }
    xxh3_64_with_seed(&bytes, tokens)
}
