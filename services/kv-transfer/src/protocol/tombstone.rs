//! Finished transfers, remembered for a while to answer late messages.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use crate::{
    api::TransferId,
    control::{AbortCause, Body},
};

/// Time for which a tombstone is kept. A peer retransmits for at most a lease after the transfer
/// has ended here.
const KEPT_FOR: Duration = Duration::from_secs(30);

/// Outcome of a transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Tombstone {
    /// Arrived or delivered.
    Complete,
    /// Failed, or cancelled before it was started.
    Failed { cause: AbortCause, reason: String },
}

impl Tombstone {
    /// Returns the answer to a late message of the peer.
    pub(super) fn answer(&self, transfer: TransferId) -> Body {
        match self {
            Self::Complete => Body::Ack { transfer },
            Self::Failed { cause, reason } => {
                Body::Abort { transfer, cause: *cause, reason: reason.clone() }
            }
        }
    }
}

/// A bounded table that evicts the oldest entries.
#[derive(Debug)]
pub(super) struct Tombstones {
    max: usize,
    by_transfer: BTreeMap<TransferId, Tombstone>,
    by_age: VecDeque<(Instant, TransferId)>,
}

impl Tombstones {
    pub(super) fn new(max: usize) -> Self {
        Self { max: max.max(1), by_transfer: BTreeMap::new(), by_age: VecDeque::new() }
    }

    /// Records how a transfer ended. Keeps an existing entry.
    pub(super) fn bury(&mut self, now: Instant, transfer: TransferId, tombstone: Tombstone) {
        if self.by_transfer.contains_key(&transfer) {
            return;
        }
        while self.by_age.len() >= self.max {
            self.forget_oldest();
        }
        self.by_transfer.insert(transfer, tombstone);
        self.by_age.push_back((now, transfer));
    }

    pub(super) fn get(&self, transfer: TransferId) -> Option<&Tombstone> {
        self.by_transfer.get(&transfer)
    }

    pub(super) fn forget_old(&mut self, now: Instant) {
        while self.by_age.front().is_some_and(|(at, _)| now >= *at + KEPT_FOR) {
            self.forget_oldest();
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.by_age.front().map(|(at, _)| *at + KEPT_FOR)
    }

    pub(super) fn len(&self) -> usize {
        self.by_age.len()
    }

    fn forget_oldest(&mut self) {
        if let Some((_, transfer)) = self.by_age.pop_front() {
            self.by_transfer.remove(&transfer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_entries_are_evicted_and_all_expire() {
        let start = Instant::now();
        let mut tombstones = Tombstones::new(3);
        for id in 0..5 {
            tombstones.bury(start, TransferId(id), Tombstone::Complete);
            assert!(tombstones.len() <= 3);
        }
        assert_eq!(tombstones.get(TransferId(1)), None);
        assert_eq!(tombstones.get(TransferId(4)), Some(&Tombstone::Complete));
        tombstones.forget_old(start + KEPT_FOR);
        assert_eq!((tombstones.len(), tombstones.by_transfer.len()), (0, 0));
        assert_eq!(tombstones.next_deadline(), None);
    }

    #[test]
    fn first_outcome_of_a_transfer_is_kept() {
        let now = Instant::now();
        let mut tombstones = Tombstones::new(3);
        tombstones.bury(now, TransferId(1), Tombstone::Complete);
        let (cause, reason) = (AbortCause::Unspecified, "late".to_owned());
        tombstones.bury(now, TransferId(1), Tombstone::Failed { cause, reason });
        assert_eq!(tombstones.get(TransferId(1)), Some(&Tombstone::Complete));
        assert_eq!(tombstones.len(), 1);
    }
}
