//! Conversations: a later turn keeps the queue place of its conversation's first turn, and the KV stays in memory for
//! as long as the gaps between earlier turns predict a next turn.
//!
//! If turns ran in order of their own arrival, many conversations would advance together, and their KV would not fit
//! into memory: each turn would load or compute KV that another turn has evicted. In order of the conversations'
//! arrival the oldest conversations finish first, and their KV stays in memory.
//!
//! Requests that name a session are turns of that session. Otherwise a prompt continues the request that ended with one
//! of the prompt's blocks. Each such end is continued once, so that parallel requests with a common beginning keep
//! separate places. A conversation keeps its place for [`PLACE_MAX`], which bounds the delay of other requests.

use std::{
    mem,
    time::{Duration, Instant},
};

use foldhash::HashMap;

use super::sequence::Arrival;
use crate::{
    event::{BlockHash, SessionHint},
    tiers::sessions::{Returns, keep_time},
};

/// Time from a conversation's first turn for which later turns keep its place.
const PLACE_MAX: Duration = Duration::from_secs(300);
/// Maximum number of conversations in one generation.
const CONVERSATIONS_MAX: usize = 8192;
/// Number of gaps between turns that are remembered of one conversation, and of all conversations.
const OWN_GAPS_MAX: usize = 8;
const ALL_GAPS_MAX: usize = 64;

/// A conversation, as its turns carry it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Conversation {
    /// Place in the queue.
    pub arrival: Arrival,
    /// When the conversation's first turn arrived.
    pub since: Instant,
    own: Returns,
    /// When the last turn ended; `None` while a turn runs.
    ended: Option<Instant>,
}

impl Conversation {
    /// Returns the conversation of a first turn.
    pub fn new(arrival: Arrival, now: Instant) -> Self {
        Self { arrival, since: now, own: Returns::new(OWN_GAPS_MAX), ended: None }
    }
}

/// Conversations, by their session or by the last block of their last turn. A full generation replaces the older one, so
/// memory is bounded.
#[derive(Debug)]
pub(super) struct Sessions {
    recent: HashMap<u128, Conversation>,
    older: HashMap<u128, Conversation>,
    all: Returns,
}

impl Default for Sessions {
    fn default() -> Self {
        let all = Returns::new(ALL_GAPS_MAX);
        Self { recent: HashMap::default(), older: HashMap::default(), all }
    }
}

impl Sessions {
    /// Returns the conversation of a turn with these blocks, which arrives now and would be the `arrival`th.
    pub fn arrived(
        &mut self,
        now: Instant,
        arrival: Arrival,
        hint: SessionHint,
        blocks: &[BlockHash],
    ) -> Conversation {
        let known = match hint.session {
            Some(session) => self.take(session),
            None => blocks.iter().rev().find_map(|block| self.take(block.0)),
        };
        let mut conversation = known.unwrap_or_else(|| Conversation::new(arrival, now));
        if let Some(ended) = conversation.ended.take() {
            let gap = now.saturating_duration_since(ended);
            conversation.own.add_gap(gap);
            self.all.add_gap(gap);
        }
        if now.saturating_duration_since(conversation.since) >= PLACE_MAX {
            (conversation.arrival, conversation.since) = (arrival, now);
        }
        if let Some(session) = hint.session {
            // Parallel turns of a session share its place.
            self.insert(session, conversation.clone());
        }
        conversation
    }

    /// Records the end of a turn whose last block is `last`. Returns the time to keep its KV ([`keep_time`]).
    pub fn ended(
        &mut self,
        now: Instant,
        mut conversation: Conversation,
        hint: SessionHint,
        last: BlockHash,
        (restore, share): (Duration, f32),
    ) -> Duration {
        let keep =
            hint.keep.unwrap_or_else(|| keep_time(&conversation.own, &self.all, restore, share));
        conversation.own.add_end();
        self.all.add_end();
        conversation.ended = Some(now);
        self.insert(hint.session.unwrap_or(last.0), conversation);
        keep
    }

    fn take(&mut self, key: u128) -> Option<Conversation> {
        self.recent.remove(&key).or_else(|| self.older.remove(&key))
    }

    fn insert(&mut self, key: u128, conversation: Conversation) {
        if self.recent.len() >= CONVERSATIONS_MAX {
            self.older = mem::take(&mut self.recent);
        }
        self.recent.insert(key, conversation);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: [BlockHash; 3] = [BlockHash(1), BlockHash(2), BlockHash(3)];
    const UNNAMED: SessionHint = SessionHint { session: None, keep: None };
    const NAMED: SessionHint = SessionHint { session: Some(77), keep: None };
    const COST: (Duration, f32) = (Duration::from_millis(200), 0.03);

    fn places(sessions: &mut Sessions, now: Instant, hint: SessionHint) -> [Arrival; 3] {
        [100, 101, 102].map(|arrival| sessions.arrived(now, arrival, hint, &BLOCKS).arrival)
    }

    #[test]
    fn continued_conversation_keeps_its_place_once() {
        let (mut sessions, now) = (Sessions::default(), Instant::now());
        for (arrival, last) in [(3, BLOCKS[0]), (5, BLOCKS[1])] {
            sessions.ended(now, Conversation::new(arrival, now), UNNAMED, last, COST);
        }
        assert_eq!(places(&mut sessions, now, UNNAMED), [5, 3, 102], "the longest beginning first");
    }

    #[test]
    fn turns_of_a_session_share_its_place_whatever_their_blocks_are() {
        let (mut sessions, now) = (Sessions::default(), Instant::now());
        let first = sessions.arrived(now, 3, NAMED, &[]);
        assert_eq!(places(&mut sessions, now, NAMED), [3; 3], "in parallel");
        sessions.ended(now, first, NAMED, BLOCKS[0], COST);
        assert_eq!(places(&mut sessions, now, NAMED), [3; 3]);
        assert_eq!(places(&mut sessions, now, UNNAMED), [100, 101, 102]);
    }

    #[test]
    fn conversation_without_end_loses_its_place() {
        let (mut sessions, since) = (Sessions::default(), Instant::now());
        let (soon, late) = (since + Duration::from_secs(1), since + PLACE_MAX);
        sessions.arrived(since, 3, NAMED, &[]);
        assert_eq!(sessions.arrived(soon, 4, NAMED, &[]).arrival, 3);
        assert_eq!(sessions.arrived(late, 5, NAMED, &[]).arrival, 5);
        assert_eq!(sessions.arrived(late + PLACE_MAX / 2, 6, NAMED, &[]).arrival, 5);
    }

    #[test]
    fn time_to_keep_is_learned_from_gaps_unless_the_client_sets_it() {
        for hint in [UNNAMED, NAMED] {
            let (mut sessions, mut now) = (Sessions::default(), Instant::now());
            let gap = Duration::from_secs(1);
            let mut keeps = Vec::new();
            for arrival in 0..4 {
                let turn = sessions.arrived(now, arrival, hint, &BLOCKS);
                keeps.push(sessions.ended(now, turn, hint, BLOCKS[2], COST));
                now += gap;
            }
            assert_eq!(keeps, [Duration::ZERO, gap * 5 / 4, gap * 5 / 4, gap * 5 / 4]);
            let asked = SessionHint { keep: Some(gap * 100), ..hint };
            let turn = sessions.arrived(now, 9, asked, &BLOCKS);
            assert_eq!(sessions.ended(now, turn, asked, BLOCKS[2], COST), gap * 100);
        }
    }

    #[test]
    fn memory_of_sessions_is_bounded() {
        let (mut sessions, now) = (Sessions::default(), Instant::now());
        for number in 0..3 * CONVERSATIONS_MAX as u64 {
            let hint = SessionHint { session: Some(number.into()), keep: None };
            let turn = sessions.arrived(now, number, hint, &[]);
            sessions.ended(now, turn, UNNAMED, BlockHash(u128::MAX - u128::from(number)), COST);
            assert!(sessions.recent.len() <= CONVERSATIONS_MAX);
            assert!(sessions.older.len() <= CONVERSATIONS_MAX);
        }
    }
}
