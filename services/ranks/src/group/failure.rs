//! Reasons why a group fails or cannot start.

use std::{fmt, io, time::Duration};

use engine::{executor::ExecutorLimits, plan::StepId};
use kernels::shared::SharedError;

use crate::ring::RingError;

/// Reason why a group failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RankFailure {
    #[error("{name} ended: {how}")]
    Ended { name: RankName, how: String },
    #[error("{name} sent no heartbeat for {} ms", silence.as_millis())]
    Silent { name: RankName, silence: Duration },
    #[error("{name}: {reason}")]
    Reported { name: RankName, reason: String },
    #[error("{name} does not fit step {step_id}: {reason}")]
    BadPlan { name: RankName, step_id: StepId, reason: String },
    /// The first step in which ranks differ.
    #[error("step {step_id}: {what} of {ranks} differ from those of rank 0", ranks = listed(ranks))]
    Differ { step_id: StepId, what: &'static str, ranks: Vec<u32> },
    #[error("the ranks have different limits: rank 0 has {first:?}, rank {rank} has {other:?}")]
    Limits { first: ExecutorLimits, rank: u32, other: ExecutorLimits },
    #[error("{name} sent an unexpected message: {what}")]
    Unexpected { name: RankName, what: String },
    #[error("cannot use a shared ring: {0}")]
    Ring(#[from] RingError),
    #[error("cannot start {name}: {reason}")]
    Start { name: RankName, reason: String },
    #[error("{name} was not ready after {} s", within.as_secs())]
    NotReady { name: RankName, within: Duration },
}

/// A rank in messages: `rank 0 of 2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankName {
    pub rank: u32,
    pub of: u32,
}

impl RankName {
    pub(super) fn sent(self, what: impl Into<String>) -> RankFailure {
        RankFailure::Unexpected { name: self, what: what.into() }
    }
}

impl fmt::Display for RankName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.of)
    }
}

fn listed(ranks: &[u32]) -> String {
    let numbers: Vec<String> = ranks.iter().map(u32::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", numbers.join(", "))
}

/// Reason why a group cannot start.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    #[error(transparent)]
    Region(#[from] SharedError),
    #[error("cannot start a thread: {0}")]
    Thread(#[from] io::Error),
    #[error("the ranks did not start: {0}")]
    Failed(#[from] RankFailure),
}
