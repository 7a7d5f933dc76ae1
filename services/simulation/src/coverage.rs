//! Coverage: how often the runs reached each interesting state.

use std::{collections::BTreeMap, fmt};

use router::request_core::{AttemptFailure, Cause, GiveUp};

use crate::{journey::TRANSFERS_FULL, request::End};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage(BTreeMap<&'static str, u64>);

impl Coverage {
    pub fn count(&mut self, what: &'static str) {
        self.add(what, 1);
    }

    pub fn add(&mut self, what: &'static str, count: u64) {
        *self.0.entry(what).or_default() += count;
    }

    pub fn get(&self, what: &str) -> u64 {
        self.0.get(what).copied().unwrap_or(0)
    }

    pub fn merge(&mut self, other: &Coverage) {
        for (what, count) in &other.0 {
            self.add(what, *count);
        }
    }

    pub fn count_failure(&mut self, failure: &AttemptFailure) {
        if failure.message == TRANSFERS_FULL {
            self.count("transfer queue full");
        }
        self.count(match failure.cause {
            Cause::Busy => "attempt busy",
            Cause::Draining => "attempt draining",
            Cause::Lost => "attempt lost",
            Cause::TransferFailed => "attempt transfer failed",
            Cause::Deadline => "attempt deadline",
            Cause::Stale => "attempt stale",
            // Shipped nodes fail like this only by a defect.
            Cause::SlowReader
            | Cause::Mismatch
            | Cause::Duplicate
            | Cause::Internal
            | Cause::Invalid
            | Cause::Violation
            | Cause::Contradiction => panic!("{failure}"),
        });
    }

    pub fn count_end(&mut self, end: &End, attempts: u32) {
        self.count(match end {
            End::Complete if attempts > 1 => "complete after a retry",
            End::Complete => "complete",
            End::ClientLeft => "client left",
            End::GaveUp(GiveUp::AttemptsSpent { .. }) => "attempts spent",
            // The deadline passed at the router or at a node.
            End::Deadline | End::GaveUp(GiveUp::Deadline | GiveUp::Final(_)) => "deadline",
            End::GaveUp(GiveUp::Busy { .. }) => "busy",
            End::GaveUp(GiveUp::NoDecodeNode { .. }) => "no decode node",
        });
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, count) in &self.0 {
            writeln!(f, "{count:>10} {what}")?;
        }
        Ok(())
    }
}
