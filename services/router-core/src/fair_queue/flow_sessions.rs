//! The sessions of a router: which session the turn of a caller belongs to.

use std::{
    hash::{BuildHasher, RandomState},
    time::Instant,
};

pub use sessions::SessionTurn;

use super::FlowName;

/// Maximum number of blocks of a prompt that are searched for the end of an earlier turn, from the
/// prompt's end: 65,536 tokens, which take 0.1 ms. The end of the last turn lies farther back only
/// if the new turn adds more tokens.
const SEARCHED_BLOCKS_MAX: usize = 4096;

/// The part of a request that identifies its session.
#[derive(Clone, Copy, Debug)]
pub struct SessionIdentity<'a> {
    /// Name of the session; empty if the client names none.
    pub name: &'a str,
    /// Equal names under different salts are different sessions.
    pub cache_salt: &'a str,
    /// Cache keys of the prompt's full blocks, which depend on the salt.
    pub blocks: &'a [u128],
}

/// The sessions of one model. Equal names and prompts of two flows are two sessions.
#[derive(Debug, Default)]
pub(crate) struct FlowSessions {
    sessions: sessions::Sessions<()>,
    /// Number of turns that have arrived.
    turns: u64,
    /// Hash of flows and names. Its seed is random, so no client can choose equal hashes.
    hash: RandomState,
}

impl FlowSessions {
    /// Returns the turn of a request that arrives now.
    pub(crate) fn arrived(
        &mut self,
        now: Instant,
        flow: &FlowName,
        identity: SessionIdentity<'_>,
    ) -> SessionTurn<()> {
        let SessionIdentity { name, cache_salt, blocks } = identity;
        let number = |part: u8| u128::from(self.hash.hash_one((part, flow, cache_salt, name)));
        let named = (!name.is_empty()).then(|| (number(0) << 64) | number(1));
        let flow = self.key_of_flow(flow);
        let newest = blocks.iter().rev().take(SEARCHED_BLOCKS_MAX);
        let ends = newest.map(|block| block ^ flow);
        self.turns += 1;
        self.sessions.arrived(now, self.turns, named, ends, || (), |()| ())
    }

    /// Records the end of a turn whose last full block is `last`. `None`: the turn failed, and its
    /// request may arrive again as the same turn.
    pub(crate) fn ended(&mut self, turn: SessionTurn<()>, flow: &FlowName, last: Option<u128>) {
        match last {
            Some(block) => {
                let end = block ^ self.key_of_flow(flow);
                self.sessions.ended(turn, Some(end), |()| ());
            }
            None => self.sessions.put_back(turn),
        }
    }

    fn key_of_flow(&self, flow: &FlowName) -> u128 {
        u128::from(self.hash.hash_one(flow))
    }

    /// Panics if a named session has a turn that has not ended.
    pub(crate) fn check_idle(&self) {
        self.sessions.check(std::iter::empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: [u128; 3] = [1, 2, 3];
    const NAMED: SessionIdentity<'_> = SessionIdentity { name: "a", cache_salt: "", blocks: &[] };
    const UNNAMED: SessionIdentity<'_> =
        SessionIdentity { name: "", cache_salt: "", blocks: &BLOCKS };

    /// Returns whether a turn has the place of its session. The turn ends at once with this block.
    fn follows(
        sessions: &mut FlowSessions,
        key: &str,
        identity: SessionIdentity<'_>,
        last: u128,
    ) -> bool {
        let flow = FlowName::Key(key.into());
        let turn = sessions.arrived(Instant::now(), &flow, identity);
        let follows = turn.place().is_some();
        sessions.ended(turn, &flow, Some(last));
        follows
    }

    #[test]
    fn session_of_another_key_or_salt_is_another_session() {
        let mut sessions = FlowSessions::default();
        for identity in [NAMED, UNNAMED] {
            assert!(!follows(&mut sessions, "key", identity, BLOCKS[2]));
            assert!(!follows(&mut sessions, "other", identity, BLOCKS[2]));
            assert!(follows(&mut sessions, "key", identity, BLOCKS[2]));
        }
        let salted = SessionIdentity { cache_salt: "salt", ..NAMED };
        assert!(!follows(&mut sessions, "key", salted, 10));
        sessions.check_idle();
    }

    #[test]
    fn search_for_the_end_of_a_turn_is_bounded() {
        let mut sessions = FlowSessions::default();
        let none = SessionIdentity { blocks: &[], ..UNNAMED };
        assert!(!follows(&mut sessions, "key", none, 0));
        let blocks: Vec<u128> = (0..=SEARCHED_BLOCKS_MAX as u128).collect();
        let far = SessionIdentity { blocks: &blocks, ..UNNAMED };
        assert!(!follows(&mut sessions, "key", far, 9_999));
        let near = SessionIdentity { blocks: &blocks[..SEARCHED_BLOCKS_MAX], ..UNNAMED };
        assert!(follows(&mut sessions, "key", near, 9_998));
    }
}
