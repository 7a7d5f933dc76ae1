//! Coverage: how often the runs reached each interesting state.

use std::{collections::BTreeMap, fmt};

use cluster::{BreakerChange, BreakerReason};
use proto::v1::{decode_event, prefill_event};
use router_core::{AttemptFailure, FailureCause, GiveUp, LoadBound, Overload};

use crate::router::End;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage(BTreeMap<&'static str, u64>);

impl Coverage {
    pub fn count(&mut self, state: &'static str) {
        self.add(state, 1);
    }

    pub fn add(&mut self, state: &'static str, count: u64) {
        *self.0.entry(state).or_default() += count;
    }

    pub fn get(&self, state: &str) -> u64 {
        self.0.get(state).copied().unwrap_or(0)
    }

    pub fn merge(&mut self, other: &Coverage) {
        for (state, count) in &other.0 {
            self.add(state, *count);
        }
    }

    pub(crate) fn count_decode_event(&mut self, event: &Option<decode_event::Event>) {
        if let Some(decode_event::Event::Reserved(reserved)) = event {
            self.count(if reserved.local_prefill { "reserved, local prefill" } else { "reserved" });
        }
    }

    pub(crate) fn count_prefill_event(&mut self, event: &Option<prefill_event::Event>) {
        if let Some(prefill_event::Event::Token(token)) = event
            && token.finish.is_some()
        {
            self.count("token 0 finished");
        }
    }

    pub(crate) fn count_failure(&mut self, failure: &AttemptFailure) {
        self.count(match failure.cause {
            FailureCause::Busy => "attempt busy",
            FailureCause::Draining => "attempt draining",
            FailureCause::Migrated => "attempt migrated",
            FailureCause::Lost => "attempt lost",
            FailureCause::TransferFailed => "attempt transfer failed",
            FailureCause::Deadline => "attempt deadline",
            FailureCause::Stale => "attempt stale",
            // A node whose executor failed.
            FailureCause::Internal => "attempt internal",
            FailureCause::OtherWeights => "attempt other weights",
            // Two nodes connected while only one had committed an update.
            FailureCause::Mismatch if failure.to_string().contains("weight_version") => {
                "attempt mismatch"
            }
            FailureCause::WeightsChanged => "attempt weights changed",
            // A shipped node fails like this only because of a bug.
            FailureCause::SlowReader
            | FailureCause::Mismatch
            | FailureCause::Duplicate
            | FailureCause::Invalid
            | FailureCause::Violation
            | FailureCause::AnswerComplete
            | FailureCause::MatcherFailed
            | FailureCause::NoGrammar
            | FailureCause::Contradiction => panic!("{failure}"),
        });
    }

    pub(crate) fn count_end(&mut self, end: &End, attempts: u32) {
        self.count(match end {
            End::Complete if attempts > 1 => "complete after a retry",
            End::Complete => "complete",
            End::ClientLeft => "client left",
            End::Failed(GiveUp::AttemptsSpent { .. }) => "attempts spent",
            // The deadline passed at the router or at a node.
            End::Failed(GiveUp::Deadline | GiveUp::Final(_)) => "deadline",
            End::Failed(GiveUp::Busy { .. } | GiveUp::Late(_)) => "busy",
            End::Failed(GiveUp::NoDecodeNode { .. }) => "no decode node",
            End::Refused(Overload {
                full: LoadBound::InFlight { .. } | LoadBound::ShareInFlight { .. },
                ..
            }) => "refused, in flight",
            End::Refused(Overload {
                full: LoadBound::Waiting { .. } | LoadBound::ShareWaiting { .. },
                ..
            }) => "refused, waiting",
            End::Refused(_) => "refused",
        });
    }

    pub(crate) fn count_breaker(&mut self, change: &BreakerChange) {
        let Some(opened) = change.opened else { return };
        self.count(match (&change.partner, opened) {
            (Some(_), _) => "breaker of a pair opened",
            (None, BreakerReason::Slow) => "slow node excluded",
            (None, _) => "breaker of a node opened",
        });
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (state, count) in &self.0 {
            writeln!(f, "{count:>10} {state}")?;
        }
        Ok(())
    }
}
