//! What follows a failed attempt: the one place where recovery is decided.
//!
//! An attempt that failed is followed by another over the prompt and everything shown, with other
//! nodes: without the one that failed, and after a second failed transfer (or on the last attempt)
//! with a decode node alone, which needs no transfer. Busy nodes cost no attempt: when all are, the
//! request waits, for a bounded time. Nodes are remembered by their epoch, so that one that was
//! restarted is not avoided for what its predecessor did. Nothing here reads a clock or a socket.

use std::time::{Duration, Instant};

use cluster::Epoch;

use super::failure::{AttemptFailure, Cause, Side};

#[derive(Clone, Copy, Debug)]
pub struct RecoveryLimits {
    /// Attempts at one request, the first included. Busy ones do not count.
    pub attempts_max: u32,
    /// How long all nodes may be busy.
    pub busy_max: Duration,
    /// How long there may be no decode node at all.
    pub absent_max: Duration,
}

#[derive(Debug)]
pub struct Recovery {
    limits: RecoveryLimits,
    /// Attempts that failed, not counting those refused as busy.
    failed: u32,
    transfers_failed: u32,
    avoid_prefill: Vec<Epoch>,
    avoid_decode: Vec<Epoch>,
    /// Since when nothing but Busy was heard. Nodes that are busy are there and those that are not
    /// there are not busy: at most one of the two clocks runs.
    busy_since: Option<Instant>,
    absent_since: Option<Instant>,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Then {
    /// Try again at once.
    Retry,
    /// Every decode node is busy: wait for room, at most for what is left, then try all again.
    WaitForRoom {
        left: Duration,
    },
    /// There is no decode node to try: wait for one to come back.
    WaitForNode,
    GiveUp(GiveUp),
}

/// Why no further attempt is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GiveUp {
    /// The attempts are used up; the last failure.
    AttemptsSpent { attempts: u32, last: AttemptFailure },
    /// No other attempt could do better.
    Final(AttemptFailure),
    /// All nodes were busy for so long.
    Busy { waited: Duration },
    /// There was no decode node for so long.
    NoDecodeNode { waited: Duration },
}

impl Recovery {
    pub fn new(limits: RecoveryLimits) -> Self {
        Self {
            limits,
            failed: 0,
            transfers_failed: 0,
            avoid_prefill: Vec::new(),
            avoid_decode: Vec::new(),
            busy_since: None,
            absent_since: None,
        }
    }

    /// Prefill nodes not to pick.
    pub fn avoid_prefill(&self) -> &[Epoch] {
        &self.avoid_prefill
    }

    /// Decode nodes not to pick.
    pub fn avoid_decode(&self) -> &[Epoch] {
        &self.avoid_decode
    }

    /// Attempts made so far and the one under way.
    pub fn attempts(&self) -> u32 {
        self.failed + 1
    }

    /// The next attempt should not need a transfer.
    pub fn decode_alone(&self) -> bool {
        let last = self.attempts() >= self.limits.attempts_max;
        self.transfers_failed >= 2 || last && self.failed > 0
    }

    /// An attempt is under way: waiting is over.
    pub fn admitted(&mut self) {
        self.busy_since = None;
        self.absent_since = None;
    }

    /// An attempt with these nodes failed.
    pub fn failed(
        &mut self,
        failure: AttemptFailure,
        prefill: Option<Epoch>,
        decode: Epoch,
        now: Instant,
    ) -> Then {
        match failure.cause {
            Cause::Deadline | Cause::SlowReader | Cause::Invalid | Cause::Contradiction => {
                return Then::GiveUp(GiveUp::Final(failure));
            }
            // The directory leaves a busy node alone for a while.
            Cause::Busy => {
                self.heard_busy(now);
                return Then::Retry;
            }
            // The pair failed together; which of them is at fault is unknown.
            Cause::TransferFailed | Cause::Mismatch => {
                self.transfers_failed += 1;
                self.avoid_prefill.extend(prefill);
            }
            Cause::Lost | Cause::Draining | Cause::Stale | Cause::Internal | Cause::Violation => {
                match (failure.side, prefill) {
                    (Side::Prefill, Some(prefill)) => self.avoid_prefill.push(prefill),
                    (Side::Prefill, None) | (Side::Decode, _) => self.avoid_decode.push(decode),
                }
            }
            // A new transfer id is all that is needed.
            Cause::Duplicate => {}
        }
        self.failed += 1;
        if self.failed >= self.limits.attempts_max {
            return Then::GiveUp(GiveUp::AttemptsSpent { attempts: self.failed, last: failure });
        }
        Then::Retry
    }

    /// Every decode node that might do is busy.
    pub fn all_busy(&mut self, now: Instant) -> Then {
        let since = self.heard_busy(now);
        let waited = now.saturating_duration_since(since);
        match self.limits.busy_max.checked_sub(waited) {
            None | Some(Duration::ZERO) => Then::GiveUp(GiveUp::Busy { waited }),
            Some(left) => Then::WaitForRoom { left },
        }
    }

    /// There is no decode node that might do.
    pub fn none_there(&mut self, now: Instant) -> Then {
        // A node that failed may have recovered: the attempts bound how often it is tried.
        self.avoid_decode.clear();
        self.busy_since = None;
        let since = *self.absent_since.get_or_insert(now);
        let waited = now.saturating_duration_since(since);
        if waited >= self.limits.absent_max {
            return Then::GiveUp(GiveUp::NoDecodeNode { waited });
        }
        Then::WaitForNode
    }

    /// Since when.
    fn heard_busy(&mut self, now: Instant) -> Instant {
        self.absent_since = None;
        *self.busy_since.get_or_insert(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: RecoveryLimits = RecoveryLimits {
        attempts_max: 4,
        busy_max: Duration::from_secs(30),
        absent_max: Duration::from_secs(2),
    };

    fn failure(side: Side, cause: Cause) -> AttemptFailure {
        AttemptFailure { side, cause, message: "why".into() }
    }

    fn epoch(number: u8) -> Epoch {
        Epoch::from_bytes(&[number; 16]).unwrap()
    }

    /// A prefill and a decode node.
    fn nodes() -> (Epoch, Epoch) {
        (epoch(1), epoch(101))
    }

    #[test]
    fn the_node_that_failed_is_avoided() {
        let now = Instant::now();
        let (prefill, decode) = nodes();
        for (side, cause) in [
            (Side::Prefill, Cause::Lost),
            (Side::Prefill, Cause::Draining),
            (Side::Decode, Cause::Lost),
            (Side::Decode, Cause::Internal),
            (Side::Decode, Cause::Stale),
        ] {
            let mut recovery = Recovery::new(LIMITS);
            let then = recovery.failed(failure(side, cause), Some(prefill), decode, now);
            assert_eq!(then, Then::Retry);
            assert_eq!(recovery.avoid_prefill().contains(&prefill), side == Side::Prefill);
            assert_eq!(recovery.avoid_decode().contains(&decode), side == Side::Decode);
            assert!(!recovery.decode_alone());
        }
    }

    #[test]
    fn a_second_failed_transfer_leads_to_a_decode_node_alone() {
        let now = Instant::now();
        let (prefill, decode) = nodes();
        let mut recovery = Recovery::new(LIMITS);
        let failed = || failure(Side::Decode, Cause::TransferFailed);
        recovery.failed(failed(), Some(prefill), decode, now);
        assert_eq!(recovery.avoid_prefill(), [prefill]);
        assert!(recovery.avoid_decode().is_empty() && !recovery.decode_alone());
        recovery.failed(failed(), Some(epoch(2)), decode, now);
        assert!(recovery.decode_alone());
    }

    #[test]
    fn the_attempts_are_a_budget_and_the_last_one_needs_no_transfer() {
        let now = Instant::now();
        let (_, decode) = nodes();
        let mut recovery = Recovery::new(LIMITS);
        let lost = || failure(Side::Prefill, Cause::Lost);
        for number in 1..=3 {
            assert!(!recovery.decode_alone());
            assert_eq!(recovery.failed(lost(), Some(epoch(number)), decode, now), Then::Retry);
        }
        assert!(recovery.decode_alone());
        assert_eq!(
            recovery.failed(lost(), None, decode, now),
            Then::GiveUp(GiveUp::AttemptsSpent { attempts: 4, last: lost() })
        );
    }

    #[test]
    fn what_no_other_node_can_mend_is_final() {
        let now = Instant::now();
        let (_, decode) = nodes();
        for cause in [Cause::Deadline, Cause::Invalid, Cause::Contradiction, Cause::SlowReader] {
            let failure = failure(Side::Decode, cause);
            assert_eq!(
                Recovery::new(LIMITS).failed(failure.clone(), None, decode, now),
                Then::GiveUp(GiveUp::Final(failure))
            );
        }
    }

    #[test]
    fn busy_nodes_cost_no_attempt_but_a_bounded_time() {
        let start = Instant::now();
        let (prefill, decode) = nodes();
        let mut recovery = Recovery::new(LIMITS);
        for second in 0..30 {
            let now = start + Duration::from_secs(second);
            let busy = failure(Side::Decode, Cause::Busy);
            assert_eq!(recovery.failed(busy, Some(prefill), decode, now), Then::Retry);
            assert!(recovery.avoid_decode().is_empty() && recovery.attempts() == 1);
            let left = Duration::from_secs(30 - second);
            assert_eq!(recovery.all_busy(now), Then::WaitForRoom { left });
        }
        let waited = LIMITS.busy_max;
        assert_eq!(recovery.all_busy(start + waited), Then::GiveUp(GiveUp::Busy { waited }));
        recovery.admitted();
        assert_eq!(recovery.all_busy(start + waited), Then::WaitForRoom { left: waited });
    }

    #[test]
    fn an_absent_decode_node_is_awaited_for_a_bounded_time() {
        let start = Instant::now();
        let (_, decode) = nodes();
        let mut recovery = Recovery::new(LIMITS);
        recovery.failed(failure(Side::Decode, Cause::Lost), None, decode, start);
        assert_eq!(recovery.none_there(start), Then::WaitForNode);
        assert!(recovery.avoid_decode().is_empty());
        let waited = LIMITS.absent_max;
        assert_eq!(
            recovery.none_there(start + waited),
            Then::GiveUp(GiveUp::NoDecodeNode { waited })
        );
    }

    #[test]
    fn busy_nodes_are_there_and_absent_nodes_are_not_busy() {
        let start = Instant::now();
        let later = start + LIMITS.busy_max - Duration::from_secs(1);
        let (_, decode) = nodes();

        let mut recovery = Recovery::new(LIMITS);
        assert_eq!(recovery.none_there(start), Then::WaitForNode);
        recovery.all_busy(start);
        assert_eq!(recovery.none_there(later), Then::WaitForNode);

        let mut recovery = Recovery::new(LIMITS);
        assert_eq!(recovery.none_there(start), Then::WaitForNode);
        recovery.failed(failure(Side::Decode, Cause::Busy), None, decode, start);
        assert_eq!(recovery.none_there(later), Then::WaitForNode);

        let mut recovery = Recovery::new(LIMITS);
        recovery.all_busy(start);
        assert_eq!(recovery.none_there(start), Then::WaitForNode);
        assert_eq!(recovery.all_busy(later), Then::WaitForRoom { left: LIMITS.busy_max });
    }
}
