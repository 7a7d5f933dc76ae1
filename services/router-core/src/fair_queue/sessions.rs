//! Sessions: a later turn of a conversation queues as if it had arrived with the conversation's first turn.
//!
//! If turns queued by their own arrival, many conversations would advance together, and nodes would evict the KV of one
//! conversation for another. Nodes queue by the arrival of conversations too, but under load requests wait in the
//! router.
//!
//! The rules are those of the nodes' schedulers. Requests that name a session are turns of that session. Otherwise a
//! prompt continues the answer that ended with one of the prompt's blocks; each such end is continued once. A turn that
//! arrives while another turn of its session is in progress has a place of its own. A session keeps its place for
//! [`PLACE_MAX`]. Each router knows only its own requests.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    mem,
    time::{Duration, Instant},
};

use super::FlowName;

/// Time from a session's first turn for which later turns have its place. Nodes have the same limit.
const PLACE_MAX: Duration = Duration::from_secs(300);
/// Maximum number of sessions in one generation.
const SESSIONS_MAX: usize = 8192;
/// Maximum number of blocks of a prompt that are searched for the end of an earlier turn, from the prompt's end: 65,536
/// tokens, which take 0.1 ms. The end of the last turn lies farther back only if the new turn adds more tokens.
const SEARCHED_BLOCKS_MAX: usize = 4096;

/// The part of a request that identifies its session.
#[derive(Clone, Copy, Debug)]
pub struct SessionMarks<'a> {
    /// Name of the session; empty if the client names none.
    pub name: &'a str,
    /// Equal names under different salts are different sessions.
    pub cache_salt: &'a str,
    /// Cache keys of the prompt's full blocks, which depend on the salt.
    pub blocks: &'a [u128],
}

#[derive(Clone, Copy, Debug)]
struct Session {
    /// Number of the first turn, which identifies the session.
    first: u64,
    /// Arrival of the turn whose place later turns have.
    since: Instant,
    /// Number of turns of a named session that have not ended.
    running: u32,
}

/// A turn of a session that has not ended.
#[derive(Debug)]
pub struct SessionTurn {
    /// Number of the flow.
    flow: u128,
    /// The session when the turn arrived.
    session: Session,
    /// Key of a named session.
    named: Option<u128>,
    /// Key of the last turn's end, which an unnamed turn continues.
    continued: Option<u128>,
    since: Option<Instant>,
}

impl SessionTurn {
    /// Returns the arrival of the session if the turn has the session's place.
    pub fn since(&self) -> Option<Instant> {
        self.since
    }
}

/// The sessions of one model, by their names or by the last blocks of their answers. A full generation replaces the
/// older one, so memory is bounded.
#[derive(Debug, Default)]
pub struct Sessions {
    recent: HashMap<u128, Session>,
    older: HashMap<u128, Session>,
    /// Number of turns that have arrived.
    turns: u64,
    /// Hash of flows and names. Its seed is random, so no client can choose equal hashes.
    hash: RandomState,
}

impl Sessions {
    /// Returns the turn of a request that arrives now.
    pub fn arrived(
        &mut self,
        now: Instant,
        flow: &FlowName,
        marks: SessionMarks<'_>,
    ) -> SessionTurn {
        let SessionMarks { name, cache_salt, blocks } = marks;
        let number = |part: u8| u128::from(self.hash.hash_one((part, flow, cache_salt, name)));
        let named = (!name.is_empty()).then(|| (number(0) << 64) | number(1));
        let flow = u128::from(self.hash.hash_one(flow));
        let (continued, known) = match named {
            Some(key) => (None, self.take(key)),
            None => {
                let newest = blocks.iter().rev().take(SEARCHED_BLOCKS_MAX);
                let mut newest = newest.map(|block| key_of_block(flow, *block));
                newest.find_map(|key| Some((key, self.take(key)?))).unzip()
            }
        };
        self.turns += 1;
        let new = Session { first: self.turns, since: now, running: 0 };
        let mut session = known.unwrap_or(new);
        if now.saturating_duration_since(session.since) >= PLACE_MAX {
            session.since = now;
        }
        let follows = known.is_some() && session.running == 0;
        if let Some(key) = named {
            session.running += 1;
            self.insert(key, session);
        }
        SessionTurn { flow, session, named, continued, since: follows.then_some(session.since) }
    }

    /// Records the end of a turn whose last full block is `last`. `None`: the turn failed, and its request may arrive again
    /// as the same turn.
    pub fn ended(&mut self, turn: &SessionTurn, last: Option<u128>) {
        let Some(named) = turn.named else {
            let end = last.map(|block| key_of_block(turn.flow, block));
            if let Some(key) = end.or(turn.continued) {
                self.insert(key, turn.session);
            }
            return;
        };
        let Some(mut session) = self.take(named) else { return };
        // The session may have been forgotten since this turn arrived, and may have begun again.
        if session.first == turn.session.first {
            session.running = session.running.saturating_sub(1);
        }
        self.insert(named, session);
    }

    /// Panics if a named session has a turn that has not ended.
    pub fn check_idle(&self) {
        for session in self.recent.values().chain(self.older.values()) {
            assert_eq!(session.running, 0, "turns of a session have not ended");
        }
    }

    fn take(&mut self, key: u128) -> Option<Session> {
        self.recent.remove(&key).or_else(|| self.older.remove(&key))
    }

    fn insert(&mut self, key: u128, session: Session) {
        if self.recent.len() >= SESSIONS_MAX {
            self.older = mem::take(&mut self.recent);
        }
        self.recent.insert(key, session);
    }
}

/// Returns the key of a conversation that ended with this block. Equal prompts of two flows are two conversations.
fn key_of_block(flow: u128, block: u128) -> u128 {
    block ^ flow
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: [u128; 3] = [1, 2, 3];
    const NAMED: SessionMarks<'_> = SessionMarks { name: "a", cache_salt: "", blocks: &[] };
    const UNNAMED: SessionMarks<'_> = SessionMarks { name: "", cache_salt: "", blocks: &BLOCKS };

    fn key(name: &str) -> FlowName {
        FlowName::Key(name.into())
    }

    /// Sessions in virtual time.
    struct Scene {
        sessions: Sessions,
        start: Instant,
    }

    impl Scene {
        fn new() -> Self {
            Self { sessions: Sessions::default(), start: Instant::now() }
        }

        fn arrive(&mut self, seconds: u64, flow: &str, marks: SessionMarks<'_>) -> SessionTurn {
            let now = self.start + Duration::from_secs(seconds);
            self.sessions.arrived(now, &key(flow), marks)
        }

        /// Returns the place of a turn, in seconds since the start.
        fn place(&self, turn: &SessionTurn) -> Option<u64> {
            turn.since().map(|since| (since - self.start).as_secs())
        }

        /// Returns the place of a turn that ends at once with this block.
        fn turn(&mut self, seconds: u64, marks: SessionMarks<'_>, last: u128) -> Option<u64> {
            let turn = self.arrive(seconds, "key", marks);
            self.sessions.ended(&turn, Some(last));
            self.place(&turn)
        }
    }

    #[test]
    fn later_turns_have_the_place_of_their_session_whatever_their_blocks_are() {
        let mut scene = Scene::new();
        assert_eq!(scene.turn(1, NAMED, 10), None, "the first turn");
        assert_eq!(scene.turn(2, SessionMarks { name: "b", ..NAMED }, 11), None);
        assert_eq!(scene.turn(3, NAMED, 12), Some(1));
        assert_eq!(scene.turn(4, SessionMarks { blocks: &BLOCKS, ..NAMED }, 13), Some(1));
    }

    #[test]
    fn unnamed_turn_continues_the_longest_answer_once() {
        let mut scene = Scene::new();
        let none = SessionMarks { blocks: &[], ..UNNAMED };
        assert_eq!(scene.turn(1, none, BLOCKS[0]), None);
        assert_eq!(scene.turn(2, none, BLOCKS[1]), None);
        let turns = [3, 4, 5].map(|at| scene.arrive(at, "key", UNNAMED));
        let places = turns.map(|turn| scene.place(&turn));
        assert_eq!(places, [Some(2), Some(1), None]);
        assert_eq!(scene.turn(6, UNNAMED, BLOCKS[2]), None, "no turn has ended");
        assert_eq!(scene.turn(7, UNNAMED, BLOCKS[2]), Some(6));
    }

    #[test]
    fn search_for_the_end_of_a_turn_is_bounded() {
        let mut scene = Scene::new();
        let none = SessionMarks { blocks: &[], ..UNNAMED };
        assert_eq!(scene.turn(1, none, 0), None);
        let blocks: Vec<u128> = (0..=SEARCHED_BLOCKS_MAX as u128).collect();
        assert_eq!(scene.turn(2, SessionMarks { blocks: &blocks, ..UNNAMED }, 9_999), None, "far");
        let blocks = &blocks[..SEARCHED_BLOCKS_MAX];
        assert_eq!(scene.turn(3, SessionMarks { blocks, ..UNNAMED }, 9_998), Some(1));
    }

    #[test]
    fn turn_beside_another_turn_of_its_session_has_a_place_of_its_own() {
        let mut scene = Scene::new();
        let turns = [1, 2].map(|at| scene.arrive(at, "key", NAMED));
        assert_eq!(scene.place(&turns[1]), None);
        scene.sessions.ended(&turns[0], None);
        let third = scene.arrive(3, "key", NAMED);
        assert_eq!(scene.place(&third), None, "the second turn has not ended");
        for turn in [&turns[1], &third] {
            scene.sessions.ended(turn, None);
        }
        assert_eq!(scene.turn(4, NAMED, 10), Some(1));
    }

    #[test]
    fn session_of_another_key_or_salt_is_another_session() {
        let mut scene = Scene::new();
        for marks in [NAMED, UNNAMED] {
            let first = scene.arrive(1, "key", marks);
            scene.sessions.ended(&first, Some(BLOCKS[2]));
            let other_key = scene.arrive(2, "other", marks);
            assert_eq!(scene.place(&other_key), None);
            assert_eq!(scene.turn(3, marks, BLOCKS[2]), Some(1));
        }
        assert_eq!(scene.turn(4, SessionMarks { cache_salt: "salt", ..NAMED }, 10), None);
    }

    #[test]
    fn failed_turn_may_arrive_again() {
        let mut scene = Scene::new();
        for marks in [NAMED, UNNAMED] {
            assert_eq!(scene.turn(1, marks, BLOCKS[1]), None);
            for at in 2..5 {
                let failed = scene.arrive(at, "key", marks);
                assert_eq!(scene.place(&failed), Some(1));
                scene.sessions.ended(&failed, None);
            }
            assert_eq!(scene.turn(6, marks, 10), Some(1));
        }
    }

    #[test]
    fn session_loses_its_place_after_a_while() {
        let mut scene = Scene::new();
        let late = PLACE_MAX.as_secs() + 1;
        assert_eq!(scene.turn(1, NAMED, 10), None);
        assert_eq!(scene.turn(late - 1, NAMED, 10), Some(1));
        assert_eq!(scene.turn(late, NAMED, 10), Some(late));
        assert_eq!(scene.turn(late + 1, NAMED, 10), Some(late));
    }

    #[test]
    fn memory_of_sessions_is_bounded() {
        let mut scene = Scene::new();
        let old = [1, 2].map(|at| scene.arrive(at, "key", NAMED));
        for number in 0..2 * SESSIONS_MAX as u128 {
            let name = number.to_string();
            scene.arrive(3, "key", SessionMarks { name: &name, ..NAMED });
            scene.turn(3, SessionMarks { blocks: &[], ..UNNAMED }, 1000 + number);
            assert!(scene.sessions.recent.len() <= SESSIONS_MAX);
            assert!(scene.sessions.older.len() <= SESSIONS_MAX);
        }
        // The session was forgotten and begins again: its old turns are not turns of the new session.
        let new = scene.arrive(4, "key", NAMED);
        assert_eq!(scene.place(&new), None);
        old.iter().for_each(|turn| scene.sessions.ended(turn, None));
        let beside = scene.arrive(5, "key", NAMED);
        assert_eq!(scene.place(&beside), None, "the new session's turn has not ended");
    }
}
