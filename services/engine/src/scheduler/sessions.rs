//! Conversations that continue: a later turn keeps the place in the queue of its conversation's first turn.
//!
//! With turns in order of their own arrival, many conversations advance together, and their KV does not fit the memory
//! at once: each turn loads or computes the KV that another turn has evicted. In order of the conversations' arrival the
//! oldest conversations finish first, and their KV stays.
//!
//! A prompt continues the request that ended with one of the prompt's blocks. Each end is continued once, so that
//! parallel requests with a common beginning keep their own places. A conversation has its place for
//! [`PLACE_MAX`], so that conversations without end delay nobody for longer.

use std::{
    mem,
    time::{Duration, Instant},
};

use foldhash::HashMap;

use super::sequence::Arrival;
use crate::event::BlockHash;

/// Time from a conversation's first turn for which later turns keep its place.
const PLACE_MAX: Duration = Duration::from_secs(300);
/// Ends of one generation.
const ENDS_MAX: usize = 8192;

/// Place of a conversation in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub arrival: Arrival,
    /// When the conversation's first turn arrived.
    pub since: Instant,
}

/// The last blocks of finished requests. A full generation replaces the older one, so memory is bounded.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    recent: HashMap<BlockHash, Place>,
    older: HashMap<BlockHash, Place>,
}

impl Sessions {
    /// Notes that a request of a conversation has ended with the block `last`.
    pub fn ended(&mut self, last: BlockHash, place: Place) {
        if self.recent.len() >= ENDS_MAX {
            self.older = mem::take(&mut self.recent);
        }
        self.recent.insert(last, place);
    }

    /// Returns the place of the conversation that a prompt with these blocks continues.
    pub fn continued(&mut self, now: Instant, blocks: &[BlockHash]) -> Option<Place> {
        let take = |block| self.recent.remove(block).or_else(|| self.older.remove(block));
        let place = blocks.iter().rev().find_map(take)?;
        (now.saturating_duration_since(place.since) < PLACE_MAX).then_some(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: [BlockHash; 3] = [BlockHash(1), BlockHash(2), BlockHash(3)];

    #[test]
    fn continued_conversation_keeps_its_place_once() {
        let (mut sessions, now) = (Sessions::default(), Instant::now());
        let place = |arrival| Place { arrival, since: now };
        sessions.ended(BLOCKS[0], place(3));
        sessions.ended(BLOCKS[1], place(5));
        assert_eq!(sessions.continued(now, &BLOCKS), Some(place(5)), "the longest beginning");
        assert_eq!(sessions.continued(now, &BLOCKS), Some(place(3)));
        assert_eq!(sessions.continued(now, &BLOCKS), None);
    }

    #[test]
    fn conversation_without_end_loses_its_place() {
        let (mut sessions, since) = (Sessions::default(), Instant::now());
        sessions.ended(BLOCKS[0], Place { arrival: 3, since });
        assert_eq!(sessions.continued(since + PLACE_MAX, &BLOCKS), None);
    }

    #[test]
    fn memory_of_sessions_is_bounded() {
        let (mut sessions, since) = (Sessions::default(), Instant::now());
        for end in 0..5 * ENDS_MAX as u128 {
            sessions.ended(BlockHash(end), Place { arrival: 0, since });
            assert!(sessions.recent.len() <= ENDS_MAX && sessions.older.len() <= ENDS_MAX);
        }
    }
}
