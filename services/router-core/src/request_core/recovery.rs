//! Decides what follows a failed attempt or a pick without a node.
//!
//! * The next attempt runs over the prompt and all emitted tokens, and avoids the node that failed.
//!   Nodes are remembered by their epoch: a restarted node is not avoided for the failure of its
//!   predecessor.
//! * After a second failed transfer, a third failed attempt, and on the last attempt of the budget,
//!   no prefill node is picked: the attempt needs no transfer.
//! * After a second lost node in a row the next attempt waits, longer each time. If the router
//!   itself was suspended or disconnected, it detects its dead connections during this wait,
//!   instead of spending an attempt on each of them.
//! * A node whose queue of events overflowed ends its attempt like a stalled client: the request
//!   waits for its turn to pick.
//! * The budget renews whenever an attempt emitted tokens, so it bounds attempts without progress.
//! * Busy nodes cost no attempt: the request waits for a bounded time, or until its deadline if it
//!   has emitted tokens or is a further answer. Requests that found every node busy pick again in
//!   the order of a [`FairQueue`](crate::fair_queue::FairQueue).
//! * While no decode node is up, the request waits until its deadline. While no node that is up
//!   fits, a request that has emitted no token waits for a bounded time, and any other request
//!   until its deadline: a node that joins may fit.

use std::time::{Duration, Instant};

use cluster::{Epoch, NoNode};

use super::{
    RecoveryPolicy,
    failure::{AttemptFailure, AttemptSide, FailureCause},
};
use crate::fair_queue::TooLate;

/// Wait for the next attempt after a second lost node in a row, and its maximum. Each further loss
/// doubles it.
const LOST_WAIT: Duration = Duration::from_millis(100);
const LOST_WAIT_MAX: Duration = Duration::from_secs(2);
/// Failed attempts in a row after which no prefill node is picked.
const LOCAL_PREFILL_AFTER: u32 = 3;

#[derive(Debug)]
pub(super) struct Recovery {
    policy: RecoveryPolicy,
    /// Whether an attempt has emitted tokens.
    has_begun: bool,
    /// Whether the answer is a further one of its request.
    is_further: bool,
    /// Failed attempts of the whole request, without busy refusals.
    failed_total: u32,
    /// Failed attempts since the last one that emitted tokens.
    failed: u32,
    transfers_failed: u32,
    avoid_prefill: Vec<Epoch>,
    avoid_decode: Vec<Epoch>,
    waiting: Option<RecoveryWait>,
    /// Why the last pick found no decode node. Picks for which the nodes were busy do not change
    /// it.
    no_node: Option<NoNode>,
}

#[derive(Clone, Copy, Debug)]
struct RecoveryWait {
    reason: WaitReason,
    since: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WaitReason {
    /// Every decode node is busy.
    Busy,
    /// Decode nodes are up, and none of them fits the request: another model, an older release, or
    /// too short sequences.
    Unfit,
    /// No decode node is up.
    Absent,
}

/// The next step of a request without an open attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NextStep {
    /// Pick nodes at once.
    Retry,
    /// Pick nodes after this time.
    RetryAfter(Duration),
    /// Every decode node is busy: wait for the turn to pick.
    WaitForTurn,
    /// No decode node takes the request: wait for a change of nodes.
    WaitForNode {
        waited: Duration,
    },
    GiveUp(GiveUp),
}

/// Reason why the request fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GiveUp {
    /// The attempt budget is spent; the last failure.
    AttemptsSpent { attempts: u32, last: AttemptFailure },
    /// No other attempt could succeed.
    Final(AttemptFailure),
    /// Every decode node was busy for this time.
    Busy { waited: Duration },
    /// The request could no longer complete before its deadline.
    Late(TooLate),
    /// No decode node was available for this time; why the last pick found none.
    NoDecodeNode { waited: Duration, reason: NoNode },
    /// The request's deadline passed while nodes were available.
    Deadline,
}

impl Recovery {
    pub(super) fn new(policy: RecoveryPolicy, is_further: bool) -> Self {
        Self {
            policy,
            has_begun: false,
            is_further,
            failed_total: 0,
            failed: 0,
            transfers_failed: 0,
            avoid_prefill: Vec::new(),
            avoid_decode: Vec::new(),
            waiting: None,
            no_node: None,
        }
    }

    /// Returns whether the answer waits for busy nodes until its deadline.
    pub(super) fn outlasts_busy_nodes(&self) -> bool {
        self.has_begun || self.is_further
    }

    /// Returns the prefill nodes not to pick.
    pub(super) fn avoid_prefill(&self) -> &[Epoch] {
        &self.avoid_prefill
    }

    /// Returns the decode nodes not to pick.
    pub(super) fn avoid_decode(&self) -> &[Epoch] {
        &self.avoid_decode
    }

    /// Returns the number of the current or next attempt, from 1.
    pub(super) fn attempts(&self) -> u32 {
        self.failed_total + 1
    }

    /// Returns whether the next attempt must not need a transfer.
    pub(super) fn local_prefill(&self) -> bool {
        let is_last = self.failed + 1 >= self.policy.attempts_max;
        self.transfers_failed >= 2
            || self.failed >= LOCAL_PREFILL_AFTER
            || is_last && self.failed > 0
    }

    /// Records that a decode node took the request. Returns whether the request had been waiting.
    pub(super) fn admitted(&mut self) -> bool {
        self.waiting.take().is_some()
    }

    /// Renews the budget after the attempt emitted tokens. Failed transfers stay counted: each of
    /// them may have emitted a token 0.
    pub(super) fn progressed(&mut self) {
        self.has_begun = true;
        self.failed = 0;
        self.avoid_prefill.clear();
        self.avoid_decode.clear();
    }

    /// Handles a failed attempt with these nodes.
    pub(super) fn failed(
        &mut self,
        failure: AttemptFailure,
        prefill: Option<Epoch>,
        decode: Epoch,
        now: Instant,
    ) -> NextStep {
        match failure.cause {
            FailureCause::Deadline
            | FailureCause::Invalid
            | FailureCause::MatcherFailed
            | FailureCause::Contradiction => {
                return NextStep::GiveUp(GiveUp::Final(failure));
            }
            // The router itself ended the attempt, so no node is at fault.
            FailureCause::Migrated => {
                self.failed_total += 1;
                return NextStep::Retry;
            }
            // The directory does not return the node for a while.
            FailureCause::Busy | FailureCause::OtherWeights => {
                self.wait(WaitReason::Busy, now);
                return NextStep::Retry;
            }
            // The pair failed together; the node at fault is unknown.
            FailureCause::TransferFailed | FailureCause::Mismatch => {
                self.transfers_failed += 1;
                self.avoid_prefill.extend(prefill);
            }
            FailureCause::Lost
            | FailureCause::Draining
            | FailureCause::Stale
            | FailureCause::AnswerComplete
            | FailureCause::NoGrammar
            | FailureCause::Internal
            | FailureCause::Violation => match (failure.side, prefill) {
                (AttemptSide::Prefill, Some(prefill)) => self.avoid_prefill.push(prefill),
                (AttemptSide::Prefill, None) | (AttemptSide::Decode, _) => {
                    self.avoid_decode.push(decode)
                }
            },
            // The next attempt has another transfer id, nodes that changed their weights are as good
            // as before, and a slow reader is no fault of its node.
            FailureCause::Duplicate | FailureCause::WeightsChanged | FailureCause::SlowReader => {}
        }
        self.failed_total += 1;
        self.failed += 1;
        if self.failed >= self.policy.attempts_max {
            let attempts = self.failed;
            return NextStep::GiveUp(GiveUp::AttemptsSpent { attempts, last: failure });
        }
        match (failure.cause, self.failed) {
            (FailureCause::Lost, 2..) => {
                let factor = 2u32.saturating_pow(self.failed - 2);
                NextStep::RetryAfter(LOST_WAIT.saturating_mul(factor).min(LOST_WAIT_MAX))
            }
            (FailureCause::SlowReader, _) => self.all_busy(now),
            _ => NextStep::Retry,
        }
    }

    /// Handles a pick that found no decode node.
    pub(super) fn no_node(&mut self, reason: &NoNode, now: Instant) -> NextStep {
        let wait_reason = match reason {
            NoNode::Busy { .. } => return self.all_busy(now),
            NoNode::NoneFits { .. }
            | NoNode::NoGrammar { .. }
            | NoNode::NoPooling { .. }
            | NoNode::NoSampling { .. }
            | NoNode::NoAdapter { .. }
            | NoNode::TooLong { .. } => WaitReason::Unfit,
            NoNode::NoneListed { .. }
            | NoNode::OtherModel { .. }
            | NoNode::NoneUp { .. }
            | NoNode::Draining { .. }
            | NoNode::Excluded { .. }
            | NoNode::Broken { .. } => WaitReason::Absent,
        };
        // A node that failed may have recovered: the budget bounds how often it is tried.
        self.avoid_decode.clear();
        let waited = self.wait(wait_reason, now);
        let is_bounded = wait_reason == WaitReason::Unfit && !self.has_begun;
        if is_bounded && waited >= self.policy.busy_timeout {
            let reason = reason.clone();
            return NextStep::GiveUp(GiveUp::NoDecodeNode { waited, reason });
        }
        self.no_node = Some(reason.clone());
        NextStep::WaitForNode { waited }
    }

    /// Handles a pick for which every decode node is busy.
    pub(super) fn all_busy(&mut self, now: Instant) -> NextStep {
        let waited = self.wait(WaitReason::Busy, now);
        match self.policy.busy_timeout.checked_sub(waited) {
            None | Some(Duration::ZERO) if !self.outlasts_busy_nodes() => {
                NextStep::GiveUp(GiveUp::Busy { waited })
            }
            _ => NextStep::WaitForTurn,
        }
    }

    /// Returns since when the request waits for a node.
    pub(super) fn waits_since(&self) -> Option<Instant> {
        self.waiting.map(|waiting| waiting.since)
    }

    /// Returns when the wait for a busy node ends. `None`: at the deadline.
    pub(super) fn busy_until(&self) -> Option<Instant> {
        let waiting = self.waiting.filter(|_| !self.outlasts_busy_nodes())?;
        Some(waiting.since + self.policy.busy_timeout)
    }

    /// Handles a deadline that passed while the request waited for a node.
    pub(super) fn no_decode_node(&mut self, now: Instant) -> GiveUp {
        let reason = self.no_node.take().expect("the request waits because of a pick");
        GiveUp::NoDecodeNode { waited: self.waited(now), reason }
    }

    /// Returns how long the request has waited.
    pub(super) fn waited(&self, now: Instant) -> Duration {
        self.waiting.map_or(Duration::ZERO, |waiting| now.saturating_duration_since(waiting.since))
    }

    /// Returns how long the request has waited for this reason without a break.
    fn wait(&mut self, reason: WaitReason, now: Instant) -> Duration {
        let since = match self.waiting {
            Some(waiting) if waiting.reason == reason => waiting.since,
            _ => now,
        };
        self.waiting = Some(RecoveryWait { reason, since });
        now.saturating_duration_since(since)
    }
}

#[cfg(test)]
mod tests {
    use cluster::Role;

    use super::*;

    const POLICY: RecoveryPolicy = RecoveryPolicy {
        attempts_max: 4,
        busy_timeout: Duration::from_secs(30),
        idle_timeout: Duration::from_secs(60),
    };
    const NONE_UP: NoNode = NoNode::NoneUp { role: Role::Decode, listed: 1 };

    fn failure(side: AttemptSide, cause: FailureCause) -> AttemptFailure {
        AttemptFailure { side, cause, message: "why".into() }
    }

    fn epoch(number: u8) -> Epoch {
        Epoch::from_bytes(&[number; 16]).unwrap()
    }

    fn retry_after(ms: u64) -> NextStep {
        NextStep::RetryAfter(Duration::from_millis(ms))
    }

    #[test]
    fn no_prefill_node_is_picked_after_three_failed_attempts() {
        let policy = RecoveryPolicy { attempts_max: 8, ..POLICY };
        let (mut recovery, now) = (Recovery::new(policy, false), Instant::now());
        for number in 1..=3 {
            assert!(!recovery.local_prefill());
            let failure = failure(AttemptSide::Prefill, FailureCause::Duplicate);
            recovery.failed(failure, Some(epoch(number)), epoch(101), now);
        }
        assert!(recovery.local_prefill());
    }

    #[test]
    fn waits_after_lost_nodes_are_bounded() {
        let policy = RecoveryPolicy { attempts_max: u32::MAX, ..POLICY };
        let (mut recovery, now) = (Recovery::new(policy, false), Instant::now());
        let mut next = NextStep::Retry;
        for number in 1..=200 {
            next = recovery.failed(
                failure(AttemptSide::Decode, FailureCause::Lost),
                None,
                epoch(number),
                now,
            );
        }
        assert_eq!(next, NextStep::RetryAfter(LOST_WAIT_MAX));
    }

    /// Returns a prefill and a decode node.
    fn nodes() -> (Epoch, Epoch) {
        (epoch(1), epoch(101))
    }

    #[test]
    fn the_node_that_failed_is_avoided() {
        let now = Instant::now();
        let (prefill, decode) = nodes();
        for (side, cause) in [
            (AttemptSide::Prefill, FailureCause::Lost),
            (AttemptSide::Prefill, FailureCause::Draining),
            (AttemptSide::Decode, FailureCause::Lost),
            (AttemptSide::Decode, FailureCause::Internal),
            (AttemptSide::Decode, FailureCause::Stale),
        ] {
            let mut recovery = Recovery::new(POLICY, false);
            let next = recovery.failed(failure(side, cause), Some(prefill), decode, now);
            assert_eq!(next, NextStep::Retry);
            assert_eq!(recovery.avoid_prefill().contains(&prefill), side == AttemptSide::Prefill);
            assert_eq!(recovery.avoid_decode().contains(&decode), side == AttemptSide::Decode);
            assert!(!recovery.local_prefill());
        }
    }

    #[test]
    fn a_second_failed_transfer_leads_to_a_decode_node_alone() {
        let now = Instant::now();
        let (prefill, decode) = nodes();
        let mut recovery = Recovery::new(POLICY, false);
        let failed = || failure(AttemptSide::Decode, FailureCause::TransferFailed);
        recovery.failed(failed(), Some(prefill), decode, now);
        assert_eq!(recovery.avoid_prefill(), [prefill]);
        assert!(recovery.avoid_decode().is_empty() && !recovery.local_prefill());
        recovery.failed(failed(), Some(epoch(2)), decode, now);
        assert!(recovery.local_prefill());
    }

    #[test]
    fn attempts_are_bounded_and_the_last_one_needs_no_transfer() {
        let now = Instant::now();
        let (_, decode) = nodes();
        let mut recovery = Recovery::new(POLICY, false);
        let lost = || failure(AttemptSide::Prefill, FailureCause::Lost);
        let waits = [NextStep::Retry, retry_after(100), retry_after(200)];
        for (number, next) in (1..).zip(waits) {
            assert!(!recovery.local_prefill());
            assert_eq!(recovery.failed(lost(), Some(epoch(number)), decode, now), next);
        }
        assert!(recovery.local_prefill());
        assert_eq!(
            recovery.failed(lost(), None, decode, now),
            NextStep::GiveUp(GiveUp::AttemptsSpent { attempts: 4, last: lost() })
        );
    }

    #[test]
    fn request_failures_are_not_retried() {
        let now = Instant::now();
        let (_, decode) = nodes();
        for cause in [FailureCause::Deadline, FailureCause::Invalid, FailureCause::Contradiction] {
            let failure = failure(AttemptSide::Decode, cause);
            assert_eq!(
                Recovery::new(POLICY, false).failed(failure.clone(), None, decode, now),
                NextStep::GiveUp(GiveUp::Final(failure))
            );
        }
    }

    #[test]
    fn an_attempt_that_emitted_tokens_renews_the_budget() {
        let now = Instant::now();
        let mut recovery = Recovery::new(POLICY, false);
        let lost = || failure(AttemptSide::Decode, FailureCause::Lost);
        for number in 1..=100 {
            recovery.progressed();
            assert_eq!(recovery.failed(lost(), None, epoch(number), now), NextStep::Retry);
            assert_eq!(recovery.avoid_decode(), [epoch(number)]);
        }
        assert_eq!(recovery.attempts(), 101);
        for (number, next) in (101..).zip([retry_after(100), retry_after(200)]) {
            assert_eq!(recovery.failed(lost(), None, epoch(number), now), next);
        }
        assert_eq!(
            recovery.failed(lost(), None, epoch(103), now),
            NextStep::GiveUp(GiveUp::AttemptsSpent { attempts: 4, last: lost() })
        );
    }

    #[test]
    fn transfers_that_fail_after_token_0_still_lead_to_a_decode_node_alone() {
        let now = Instant::now();
        let (prefill, decode) = nodes();
        let mut recovery = Recovery::new(POLICY, false);
        for _ in 0..2 {
            assert!(!recovery.local_prefill());
            recovery.progressed();
            let failure = failure(AttemptSide::Decode, FailureCause::TransferFailed);
            recovery.failed(failure, Some(prefill), decode, now);
        }
        assert!(recovery.local_prefill());
    }

    #[test]
    fn busy_nodes_use_no_attempt_and_waiting_is_bounded() {
        let start = Instant::now();
        let (prefill, decode) = nodes();
        let mut recovery = Recovery::new(POLICY, false);
        assert_eq!(recovery.all_busy(start), NextStep::WaitForTurn);
        for second in 0..30 {
            let now = start + Duration::from_secs(second);
            let busy = failure(AttemptSide::Decode, FailureCause::Busy);
            assert_eq!(recovery.failed(busy, Some(prefill), decode, now), NextStep::Retry);
            assert!(recovery.avoid_decode().is_empty() && recovery.attempts() == 1);
            assert_eq!(recovery.all_busy(now), NextStep::WaitForTurn);
        }
        let waited = POLICY.busy_timeout;
        assert_eq!(recovery.all_busy(start + waited), NextStep::GiveUp(GiveUp::Busy { waited }));
        assert!(recovery.admitted());
        assert_eq!(recovery.all_busy(start + waited), NextStep::WaitForTurn);
    }

    #[test]
    fn waiting_for_an_absent_decode_node_ends_only_at_the_deadline() {
        let start = Instant::now();
        let (_, decode) = nodes();
        let mut recovery = Recovery::new(POLICY, false);
        recovery.failed(failure(AttemptSide::Decode, FailureCause::Lost), None, decode, start);
        for waited in [Duration::ZERO, POLICY.busy_timeout, Duration::from_secs(3600)] {
            let next = recovery.no_node(&NONE_UP, start + waited);
            assert_eq!(next, NextStep::WaitForNode { waited });
            assert!(recovery.avoid_decode().is_empty());
        }
    }

    #[test]
    fn waiting_for_nodes_that_fit_is_bounded() {
        let start = Instant::now();
        let mut recovery = Recovery::new(POLICY, false);
        let unfit = NoNode::NoneFits { role: Role::Decode };
        let zero = Duration::ZERO;
        assert_eq!(recovery.no_node(&unfit, start), NextStep::WaitForNode { waited: zero });
        let waited = POLICY.busy_timeout;
        assert_eq!(
            recovery.no_node(&unfit, start + waited),
            NextStep::GiveUp(GiveUp::NoDecodeNode { waited, reason: unfit })
        );
    }

    #[test]
    fn a_wait_restarts_when_its_reason_changes() {
        let start = Instant::now();
        let later = start + POLICY.busy_timeout - Duration::from_secs(1);
        let (_, decode) = nodes();
        let zero = Duration::ZERO;

        let mut recovery = Recovery::new(POLICY, false);
        recovery.no_node(&NONE_UP, start);
        recovery.all_busy(start);
        assert_eq!(recovery.no_node(&NONE_UP, later), NextStep::WaitForNode { waited: zero });

        let mut recovery = Recovery::new(POLICY, false);
        recovery.no_node(&NONE_UP, start);
        recovery.failed(failure(AttemptSide::Decode, FailureCause::Busy), None, decode, start);
        assert_eq!(recovery.no_node(&NONE_UP, later), NextStep::WaitForNode { waited: zero });

        let mut recovery = Recovery::new(POLICY, false);
        recovery.all_busy(start);
        recovery.no_node(&NONE_UP, start);
        recovery.all_busy(later);
        assert_eq!(recovery.busy_until(), Some(later + POLICY.busy_timeout));
    }
}
