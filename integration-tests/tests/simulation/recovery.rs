//! What follows a failed attempt, by the rules of `services/router/src/journey/recovery.rs`.

use std::time::{Duration, Instant};

use cluster::{Epoch, Role};
use proto::v1::FailureKind;

use crate::journey::Failed;

/// As the router's configuration has them.
const ATTEMPTS_MAX: u32 = 4;
const BUSY_MAX: Duration = Duration::from_secs(30);
const ABSENT_MAX: Duration = Duration::from_secs(2);

/// Which node of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    Prefill,
    Decode,
}

impl Side {
    pub fn of(role: Role) -> Self {
        match role {
            Role::Prefill => Self::Prefill,
            Role::Decode => Self::Decode,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    Busy,
    Draining,
    Lost,
    TransferFailed,
    Deadline,
    Stale,
}

impl Cause {
    /// Panics at what can only be a defect of our nodes.
    pub fn of(kind: Failed) -> Self {
        match kind {
            Failed::Stale => Self::Stale,
            Failed::Reported(FailureKind::Busy) => Self::Busy,
            Failed::Reported(FailureKind::TransferFailed) => Self::TransferFailed,
            Failed::Reported(FailureKind::Deadline) => Self::Deadline,
            Failed::Reported(FailureKind::Draining) => Self::Draining,
            Failed::Reported(kind) => panic!("a node fails with {kind:?}"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub side: Side,
    pub cause: Cause,
    pub message: String,
}

#[derive(Debug, Default)]
pub struct Recovery {
    failed: u32,
    transfers_failed: u32,
    avoid_prefill: Vec<Epoch>,
    avoid_decode: Vec<Epoch>,
    busy_since: Option<Instant>,
    absent_since: Option<Instant>,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Then {
    Retry,
    WaitForRoom { left: Duration },
    WaitForNode,
    GiveUp(GiveUp),
}

/// Why a request ended without its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GiveUp {
    AttemptsSpent { last: Failure },
    Deadline,
    Busy,
    NoDecodeNode,
}

impl Recovery {
    pub fn avoid_prefill(&self) -> &[Epoch] {
        &self.avoid_prefill
    }

    pub fn avoid_decode(&self) -> &[Epoch] {
        &self.avoid_decode
    }

    pub fn attempts(&self) -> u32 {
        self.failed + 1
    }

    pub fn decode_alone(&self) -> bool {
        self.transfers_failed >= 2 || self.attempts() >= ATTEMPTS_MAX && self.failed > 0
    }

    pub fn admitted(&mut self) {
        self.busy_since = None;
        self.absent_since = None;
    }

    pub fn failed(
        &mut self,
        failure: Failure,
        prefill: Option<Epoch>,
        decode: Epoch,
        now: Instant,
    ) -> Then {
        match failure.cause {
            Cause::Deadline => return Then::GiveUp(GiveUp::Deadline),
            Cause::Busy => {
                self.busy_since.get_or_insert(now);
                return Then::Retry;
            }
            Cause::TransferFailed => {
                self.transfers_failed += 1;
                self.avoid_prefill.extend(prefill);
            }
            Cause::Lost | Cause::Draining | Cause::Stale => match (failure.side, prefill) {
                (Side::Prefill, Some(prefill)) => self.avoid_prefill.push(prefill),
                (Side::Prefill, None) | (Side::Decode, _) => self.avoid_decode.push(decode),
            },
        }
        self.failed += 1;
        if self.failed >= ATTEMPTS_MAX {
            return Then::GiveUp(GiveUp::AttemptsSpent { last: failure });
        }
        Then::Retry
    }

    pub fn all_busy(&mut self, now: Instant) -> Then {
        let since = *self.busy_since.get_or_insert(now);
        match BUSY_MAX.checked_sub(now.saturating_duration_since(since)) {
            None | Some(Duration::ZERO) => Then::GiveUp(GiveUp::Busy),
            Some(left) => Then::WaitForRoom { left },
        }
    }

    pub fn none_there(&mut self, now: Instant) -> Then {
        self.avoid_decode.clear();
        let since = *self.absent_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= ABSENT_MAX {
            return Then::GiveUp(GiveUp::NoDecodeNode);
        }
        Then::WaitForNode
    }
}
