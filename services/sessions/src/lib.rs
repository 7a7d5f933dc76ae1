//! Sessions: a later turn of a conversation has the queue place of the conversation's first turn.
//! Pure.
//!
//! If turns queued by their own arrival, many conversations would advance together, and their KV
//! would not fit into memory: each turn would load or compute KV that another turn has evicted. In
//! order of the sessions' arrival the oldest sessions finish first, and their KV stays in memory.
//! Nodes and routers both queue in this order: under load requests wait in the router. Each knows
//! only its own requests.
//!
//! Requests that name a session are turns of that session. Otherwise a prompt continues the answer
//! that ended with one of the prompt's blocks; each such end is continued once, so that parallel
//! requests with a common prefix keep separate places. A turn that arrives while another turn of
//! its session has not ended has a place of its own: otherwise a session with parallel turns could
//! delay every other request. A session keeps its place for [`PLACE_MAX`], which bounds the delay
//! of other requests.
//!
//! The owner gives each session a 128-bit key: of its name, or of the block with which its last
//! turn ended.

#![forbid(unsafe_code)]

use std::{
    mem,
    time::{Duration, Instant},
};

use foldhash::HashMap;

/// Time from a session's first turn for which later turns have its place.
pub const PLACE_MAX: Duration = Duration::from_secs(300);
/// Maximum number of sessions in one generation.
pub const SESSIONS_MAX: usize = 8192;

/// Place of a session in a queue: the arrival of the turn whose place later turns have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionPlace {
    /// Number of the turn among all turns.
    pub arrival: u64,
    pub at: Instant,
}

#[derive(Clone, Debug, PartialEq)]
struct Session<D> {
    /// Number of the first turn, which identifies the session.
    first: u64,
    place: SessionPlace,
    /// Number of turns of a named session that have not ended.
    running: u32,
    data: D,
}

/// A turn of a session that has not ended. `D`: what the owner keeps of each session.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionTurn<D> {
    /// The session when the turn arrived.
    session: Session<D>,
    /// Whether the turn continues the session, so that it has the session's place.
    follows: bool,
    /// Key of a named session.
    named: Option<u128>,
    /// Key of the end that an unnamed turn continues.
    continued: Option<u128>,
}

impl<D> SessionTurn<D> {
    /// Returns the place of the turn if the turn has the session's place. Otherwise the turn has a
    /// place of its own.
    pub fn place(&self) -> Option<SessionPlace> {
        self.follows.then_some(self.session.place)
    }

    /// Returns the place of the session, which the turn may not have.
    pub fn session_place(&self) -> SessionPlace {
        self.session.place
    }

    /// Returns the data of the session when the turn arrived.
    pub fn data(&self) -> &D {
        &self.session.data
    }
}

/// The sessions by their keys. A full generation replaces the older one, so memory is bounded.
#[derive(Debug)]
pub struct Sessions<D> {
    recent: HashMap<u128, Session<D>>,
    older: HashMap<u128, Session<D>>,
}

impl<D> Default for Sessions<D> {
    fn default() -> Self {
        Self { recent: HashMap::default(), older: HashMap::default() }
    }
}

impl<D: Clone> Sessions<D> {
    /// Returns the turn of a request that arrives now as number `arrival`. `named`: key of the
    /// session that the request names. `ends`: keys of the ends that an unnamed request may
    /// continue, the preferred end first. `renew` changes the data of a session that gets a new
    /// place. A new session has the data `new`.
    pub fn arrived(
        &mut self,
        now: Instant,
        arrival: u64,
        named: Option<u128>,
        mut ends: impl Iterator<Item = u128>,
        new: impl FnOnce() -> D,
        renew: impl FnOnce(&mut D),
    ) -> SessionTurn<D> {
        let (continued, known) = match named {
            Some(key) => (None, self.take(key)),
            None => ends.find_map(|key| Some((key, self.take(key)?))).unzip(),
        };
        let place = SessionPlace { arrival, at: now };
        let follows = known.as_ref().is_some_and(|session| session.running == 0);
        let mut session =
            known.unwrap_or_else(|| Session { first: arrival, place, running: 0, data: new() });
        if now.saturating_duration_since(session.place.at) >= PLACE_MAX {
            session.place = place;
            renew(&mut session.data);
        }
        if let Some(key) = named {
            session.running += 1;
            self.insert(key, session.clone());
        }
        SessionTurn { session, follows, named, continued }
    }

    /// Returns the data of the turn's session, which other turns of the session may have changed
    /// since the turn arrived.
    pub fn data<'a>(&'a self, turn: &'a SessionTurn<D>) -> &'a D {
        let find = |key: u128| self.recent.get(&key).or_else(|| self.older.get(&key));
        &turn.named.and_then(find).unwrap_or(&turn.session).data
    }

    /// Records the end of a turn, and changes the data of its session. `end`: key of the end, which
    /// a later unnamed turn may continue.
    pub fn ended<T>(
        &mut self,
        turn: SessionTurn<D>,
        end: Option<u128>,
        change: impl FnOnce(&mut D) -> T,
    ) -> T {
        let named = turn.named;
        let mut session = self.leave(turn);
        let result = change(&mut session.data);
        if let Some(key) = named.or(end) {
            self.insert(key, session);
        }
        result
    }

    /// Records that a turn was removed before its end. Its request may arrive again as the same
    /// turn.
    pub fn put_back(&mut self, turn: SessionTurn<D>) {
        let key = turn.named.or(turn.continued);
        let session = self.leave(turn);
        if let Some(key) = key {
            self.insert(key, session);
        }
    }

    /// Returns the turn's session with one running turn less.
    fn leave(&mut self, turn: SessionTurn<D>) -> Session<D> {
        let known = turn.named.and_then(|key| self.take(key));
        let first = turn.session.first;
        // The other turns that ran when this turn arrived may have ended since.
        let mut session = known.unwrap_or(Session { running: 1, ..turn.session });
        // The session may have been forgotten since this turn arrived, and may have begun again.
        if session.first == first {
            session.running = session.running.saturating_sub(1);
        }
        session
    }

    fn take(&mut self, key: u128) -> Option<Session<D>> {
        self.recent.remove(&key).or_else(|| self.older.remove(&key))
    }

    fn insert(&mut self, key: u128, session: Session<D>) {
        if self.recent.len() >= SESSIONS_MAX {
            self.older = mem::take(&mut self.recent);
        }
        self.recent.insert(key, session);
    }

    /// Panics when a session has not as many turns that have not ended as `running` has entries of
    /// its key.
    pub fn check(&self, running: impl Iterator<Item = u128>) {
        let mut expected: HashMap<u128, u32> = HashMap::default();
        running.for_each(|key| *expected.entry(key).or_default() += 1);
        for (key, session) in self.recent.iter().chain(&self.older) {
            let expected = expected.get(key).copied().unwrap_or(0);
            assert_eq!(session.running, expected, "turns of session {key:x}");
        }
    }
}

#[cfg(test)]
mod tests;
