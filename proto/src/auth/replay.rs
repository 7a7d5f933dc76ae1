//! Rejects replayed sequence numbers, in bounded memory.

use std::collections::{BTreeMap, BTreeSet};

/// Maximum distance of a message behind the newest number. One connection keeps its order; the
/// window covers two connections that overlap during a reconnect.
const WINDOW: u64 = 1024;

/// Number of senders that are remembered. Only authenticated senders add entries.
const SENDERS_MAX: usize = 1024;

/// Sliding window over the sequence numbers of one sender, as the anti-replay window of IPsec (RFC
/// 4303).
#[derive(Clone, Debug, Default)]
struct Window {
    newest: u64,
    /// Numbers that were received, within `WINDOW` of the newest.
    seen: BTreeSet<u64>,
    /// Value of the guard's use counter at the last use, for eviction.
    used: u64,
}

impl Window {
    /// Returns whether the number is new and inside the window.
    fn admit(&mut self, sequence: u64) -> bool {
        self.newest = self.newest.max(sequence);
        let oldest = self.newest.saturating_sub(WINDOW - 1);
        if sequence < oldest || !self.seen.insert(sequence) {
            return false;
        }
        while self.seen.first().is_some_and(|first| *first < oldest) {
            self.seen.pop_first();
        }
        true
    }
}

/// The windows of all senders.
#[derive(Debug, Default)]
pub struct ReplayGuard {
    /// Windows by the sender's id, 128 random bits.
    senders: BTreeMap<u128, Window>,
    admitted: u64,
}

impl ReplayGuard {
    /// Returns whether the sender has not used this number before. Numbers start at 1.
    pub fn admit(&mut self, from: u128, sequence: u64) -> bool {
        if sequence == 0 {
            return false;
        }
        self.admitted += 1;
        if !self.senders.contains_key(&from) && self.senders.len() >= SENDERS_MAX {
            self.evict_least_recent();
        }
        let window = self.senders.entry(from).or_default();
        window.used = self.admitted;
        window.admit(sequence)
    }

    /// Evicts the least recently used sender. A replay of its old messages fails for another
    /// reason: tokens expire, and the ids of transfers are used once.
    fn evict_least_recent(&mut self) {
        if let Some(sender) =
            self.senders.iter().min_by_key(|(_, window)| window.used).map(|(sender, _)| *sender)
        {
            self.senders.remove(&sender);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn each_number_is_admitted_at_most_once_and_always_within_the_window(
            steps in prop::collection::vec((0u64..3000, 1u64..1500), 1..300),
        ) {
            let mut guard = ReplayGuard::default();
            let mut seen = BTreeSet::new();
            let mut newest = 0u64;
            for (back, ahead) in steps {
                let sequence =
                    if back % 3 == 0 { newest + ahead } else { newest.saturating_sub(back) };
                let fresh = sequence > 0 && !seen.contains(&sequence);
                let within = sequence > newest || newest - sequence < WINDOW;
                let admitted = guard.admit(1, sequence);
                prop_assert_eq!(admitted, fresh && within);
                if admitted {
                    seen.insert(sequence);
                    newest = newest.max(sequence);
                }
            }
        }
    }

    #[test]
    fn senders_are_bounded_and_the_least_recently_used_is_evicted() {
        let mut guard = ReplayGuard::default();
        for sender in 0..SENDERS_MAX as u128 {
            assert!(guard.admit(sender, 1));
        }
        assert!(guard.admit(0, 2));
        assert!(guard.admit(u128::MAX, 1));
        assert_eq!(guard.senders.len(), SENDERS_MAX);
        assert!(!guard.admit(0, 2), "was used last but one and is kept");
        assert!(!guard.senders.contains_key(&1));
    }
}
