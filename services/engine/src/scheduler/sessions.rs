//! Conversations: a later turn keeps the queue place of its conversation's first turn, and the KV stays in memory for
//! as long as the gaps between earlier turns predict a next turn.
//!
//! If turns ran in order of their own arrival, many conversations would advance together, and their KV would not fit
//! into memory: each turn would load or compute KV that another turn has evicted. In order of the conversations'
//! arrival the oldest conversations finish first, and their KV stays in memory.
//!
//! Requests that name a session are turns of that session. Otherwise a prompt continues the request that ended with one
//! of the prompt's blocks. Each such end is continued once, so that parallel requests with a common prefix keep
//! separate places. A turn that arrives while another turn of its session is in progress has a place of its own too:
//! otherwise a session with parallel turns could delay every other request. A conversation keeps its place for
//! [`PLACE_MAX`], which bounds the delay of other requests.

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

/// A conversation of any number of turns.
#[derive(Clone, Debug, PartialEq)]
struct Conversation {
    /// Arrival of the first turn, which identifies the conversation.
    first: Arrival,
    /// Place in the queue.
    arrival: Arrival,
    /// When the conversation got this place.
    since: Instant,
    /// The last three places, the newest first: those of the last 600 s, which is the longest time for which KV is kept.
    kept_places: [Arrival; 3],
    own: Returns,
    /// When the last turn ended; `None` before.
    ended: Option<Instant>,
    /// Number of turns of a session that have not ended.
    running: u32,
}

impl Conversation {
    /// Returns the conversation of a first turn.
    fn new(arrival: Arrival, now: Instant) -> Self {
        let own = Returns::new(OWN_GAPS_MAX);
        Self {
            first: arrival,
            arrival,
            since: now,
            kept_places: [arrival; 3],
            own,
            ended: None,
            running: 0,
        }
    }
}

/// A turn of a conversation that has not ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ConversationTurn {
    /// Place of the turn in the queue.
    pub arrival: Arrival,
    /// The conversation when the turn arrived.
    conversation: Conversation,
    /// Key of the conversation; `None` for a first turn without a session.
    key: Option<u128>,
    /// Time since the end of the turn before.
    gap: Option<Duration>,
}

impl ConversationTurn {
    /// Returns the conversation's place, which orders the eviction of its kept blocks.
    pub fn place(&self) -> Arrival {
        self.conversation.arrival
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
    /// Returns the turn of a request with these blocks, which arrives now and would be the `arrival`th.
    pub fn arrived(
        &mut self,
        now: Instant,
        arrival: Arrival,
        hint: SessionHint,
        blocks: &[BlockHash],
    ) -> ConversationTurn {
        let (key, known) = match hint.session {
            Some(session) => (Some(session), self.take(session)),
            None => {
                let mut newest = blocks.iter().rev();
                newest.find_map(|block| Some((block.0, self.take(block.0)?))).unzip()
            }
        };
        let mut conversation = known.unwrap_or_else(|| Conversation::new(arrival, now));
        if now.saturating_duration_since(conversation.since) >= PLACE_MAX {
            (conversation.arrival, conversation.since) = (arrival, now);
            let [last, before, _] = conversation.kept_places;
            conversation.kept_places = [arrival, last, before];
        }
        let follows = conversation.running == 0;
        let ended = conversation.ended.filter(|_| follows);
        let gap = ended.map(|ended| now.saturating_duration_since(ended));
        let place = if follows { conversation.arrival } else { arrival };
        if let Some(session) = hint.session {
            conversation.running += 1;
            self.insert(session, conversation.clone());
        }
        ConversationTurn { arrival: place, conversation, key, gap }
    }

    /// Returns the places under which KV of the conversation may be kept. Neighbours may be equal.
    pub fn kept_places(&self, turn: &ConversationTurn, hint: SessionHint) -> [Arrival; 3] {
        let find = |session: u128| self.recent.get(&session).or_else(|| self.older.get(&session));
        hint.session.and_then(find).unwrap_or(&turn.conversation).kept_places
    }

    /// Records the end of a turn whose last full block is `last`. Returns the time to keep its KV ([`keep_time`]).
    pub fn ended(
        &mut self,
        now: Instant,
        turn: ConversationTurn,
        hint: SessionHint,
        last: Option<BlockHash>,
        (restore, share): (Duration, f32),
    ) -> Duration {
        let gap = turn.gap;
        let mut conversation = self.leave(turn.conversation, hint);
        if let Some(gap) = gap {
            conversation.own.add_gap(gap);
            self.all.add_gap(gap);
        }
        let keep =
            hint.keep.unwrap_or_else(|| keep_time(&conversation.own, &self.all, restore, share));
        conversation.own.add_end();
        self.all.add_end();
        conversation.ended = Some(now);
        if let Some(key) = hint.session.or(last.map(|last| last.0)) {
            self.insert(key, conversation);
        }
        keep
    }

    /// Records that a turn was removed before its end. Its request may arrive again as the same turn.
    pub fn put_back(&mut self, turn: ConversationTurn, hint: SessionHint) {
        let conversation = self.leave(turn.conversation, hint);
        if let Some(key) = turn.key {
            self.insert(key, conversation);
        }
    }

    /// Returns the conversation with one running turn less. Other turns of a session may have changed it meanwhile.
    fn leave(&mut self, carried: Conversation, hint: SessionHint) -> Conversation {
        let known = hint.session.and_then(|session| self.take(session));
        let first = carried.first;
        // The other turns that ran when this turn arrived may have ended since.
        let mut conversation = known.unwrap_or(Conversation { running: 1, ..carried });
        // The session may have been forgotten since this turn arrived, and may have begun again.
        if conversation.first == first {
            conversation.running = conversation.running.saturating_sub(1);
        }
        conversation
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

    /// Panics when a session has not as many turns in progress as `turns` has entries of it.
    pub fn check(&self, turns: impl Iterator<Item = u128>) {
        let mut running: HashMap<u128, u32> = HashMap::default();
        turns.for_each(|session| *running.entry(session).or_default() += 1);
        for (key, conversation) in self.recent.iter().chain(&self.older) {
            let expected = running.get(key).copied().unwrap_or(0);
            assert_eq!(conversation.running, expected, "turns of session {key:x}");
        }
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
            let turn = sessions.arrived(now, arrival, UNNAMED, &[]);
            sessions.ended(now, turn, UNNAMED, Some(last), COST);
        }
        assert_eq!(places(&mut sessions, now, UNNAMED), [5, 3, 102], "the longest beginning first");
    }

    #[test]
    fn turns_of_a_session_have_its_place_one_after_another_whatever_their_blocks_are() {
        let (mut sessions, now) = (Sessions::default(), Instant::now());
        let first = sessions.arrived(now, 3, NAMED, &[]);
        let beside = sessions.arrived(now, 4, NAMED, &[]);
        assert_eq!((first.arrival, beside.arrival), (3, 4), "in parallel");
        sessions.ended(now, first, NAMED, Some(BLOCKS[0]), COST);
        let third = sessions.arrived(now, 5, NAMED, &[]);
        assert_eq!(third.arrival, 5, "the second turn has not ended");
        for turn in [beside, third] {
            sessions.ended(now, turn, NAMED, Some(BLOCKS[0]), COST);
        }
        assert_eq!(places(&mut sessions, now, NAMED), [3, 101, 102]);
        assert_eq!(places(&mut sessions, now, UNNAMED), [100, 101, 102]);
    }

    /// Lets more sessions arrive than are remembered.
    fn forget_all(sessions: &mut Sessions, now: Instant) {
        for number in 0..3 * CONVERSATIONS_MAX as u64 {
            let other = SessionHint { session: Some(1000 + u128::from(number)), keep: None };
            sessions.arrived(now, 1000 + number, other, &[]);
        }
    }

    #[test]
    fn turn_of_a_forgotten_session_is_no_turn_of_the_session_that_began_again() {
        let (mut sessions, now) = (Sessions::default(), Instant::now());
        let old = sessions.arrived(now, 3, NAMED, &[]);
        forget_all(&mut sessions, now);
        let new = sessions.arrived(now, 100_000, NAMED, &[]);
        sessions.ended(now, old, NAMED, None, COST);
        let beside = sessions.arrived(now, 100_001, NAMED, &[]);
        assert_eq!((new.arrival, beside.arrival), (100_000, 100_001), "the new turn has not ended");
    }

    #[test]
    fn session_that_was_forgotten_while_turns_ran_has_a_place_after_these_turns() {
        let (mut sessions, now) = (Sessions::default(), Instant::now());
        let [first, second, third] =
            [3, 4, 5].map(|arrival| sessions.arrived(now, arrival, NAMED, &[]));
        sessions.ended(now, first, NAMED, None, COST);
        forget_all(&mut sessions, now);
        for turn in [third, second] {
            sessions.ended(now, turn, NAMED, None, COST);
        }
        assert_eq!(places(&mut sessions, now, NAMED), [3, 101, 102]);
    }

    #[test]
    fn conversation_loses_its_place_after_a_while() {
        let (mut sessions, since) = (Sessions::default(), Instant::now());
        let mut place = |at, arrival| {
            let turn = sessions.arrived(at, arrival, NAMED, &[]);
            let place = turn.arrival;
            sessions.ended(at, turn, NAMED, None, COST);
            place
        };
        let late = since + PLACE_MAX;
        assert_eq!(place(since, 3), 3);
        assert_eq!(place(since + Duration::from_secs(1), 4), 3);
        assert_eq!(place(late, 5), 5);
        assert_eq!(place(late + PLACE_MAX / 2, 6), 5);
    }

    #[test]
    fn turn_that_does_not_end_leaves_its_conversation_as_before() {
        for hint in [UNNAMED, NAMED] {
            let (mut sessions, start) = (Sessions::default(), Instant::now());
            let gap = Duration::from_secs(1);
            let turn = sessions.arrived(start, 3, hint, &BLOCKS);
            sessions.ended(start, turn, hint, Some(BLOCKS[2]), COST);
            for arrival in 4..9 {
                let failed = sessions.arrived(start + gap / 2, arrival, hint, &BLOCKS);
                assert_eq!(failed.arrival, 3);
                sessions.put_back(failed, hint);
            }
            let turn = sessions.arrived(start + gap, 9, hint, &BLOCKS);
            assert_eq!(turn.arrival, 3);
            let keep = sessions.ended(start + gap, turn, hint, Some(BLOCKS[2]), COST);
            assert_eq!(keep, gap * 5 / 4, "the only gap");
        }
    }

    #[test]
    fn time_to_keep_is_learned_from_gaps_unless_the_client_sets_it() {
        for hint in [UNNAMED, NAMED] {
            let (mut sessions, mut now) = (Sessions::default(), Instant::now());
            let gap = Duration::from_secs(1);
            let mut keeps = Vec::new();
            for arrival in 0..4 {
                let turn = sessions.arrived(now, arrival, hint, &BLOCKS);
                keeps.push(sessions.ended(now, turn, hint, Some(BLOCKS[2]), COST));
                now += gap;
            }
            assert_eq!(keeps, [Duration::ZERO, gap * 5 / 4, gap * 5 / 4, gap * 5 / 4]);
            let asked = SessionHint { keep: Some(gap * 100), ..hint };
            let turn = sessions.arrived(now, 9, asked, &BLOCKS);
            assert_eq!(sessions.ended(now, turn, asked, Some(BLOCKS[2]), COST), gap * 100);
        }
    }

    #[test]
    fn memory_of_sessions_is_bounded() {
        let (mut sessions, now) = (Sessions::default(), Instant::now());
        for number in 0..3 * CONVERSATIONS_MAX as u64 {
            let hint = SessionHint { session: Some(number.into()), keep: None };
            let turn = sessions.arrived(now, number, hint, &[]);
            let last = BlockHash(u128::MAX - u128::from(number));
            sessions.ended(now, turn, UNNAMED, Some(last), COST);
            assert!(sessions.recent.len() <= CONVERSATIONS_MAX);
            assert!(sessions.older.len() <= CONVERSATIONS_MAX);
        }
    }
}
