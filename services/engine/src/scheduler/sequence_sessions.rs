//! The sessions of a scheduler: the KV of a turn stays in memory for as long as the gaps between
//! earlier turns predict a next turn.

use std::time::{Duration, Instant};

use sessions::SessionTurn;

use super::sequence::Arrival;
use crate::{
    event::{BlockHash, SessionHint},
    tiers::sessions::{ReturnGaps, keep_time},
};

/// Number of gaps between turns that are remembered of one session, and of all sessions.
const OWN_GAPS_MAX: usize = 8;
const ALL_GAPS_MAX: usize = 64;

/// KV places and gaps of one session.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SessionKv {
    /// The last three places, the newest first: those of the last 600 s, which is the longest time
    /// for which KV is kept.
    kept_places: [Arrival; 3],
    own: ReturnGaps,
    /// When the last turn ended; `None` before.
    ended: Option<Instant>,
}

/// A turn that has not ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SequenceTurn {
    turn: SessionTurn<SessionKv>,
    /// Time since the end of the turn before.
    gap: Option<Duration>,
}

impl SequenceTurn {
    /// Returns the place of the turn in the queue if the turn has the session's place.
    pub(super) fn place(&self) -> Option<Arrival> {
        self.turn.place().map(|place| place.arrival)
    }

    /// Returns the session's place, which orders the eviction of its kept blocks.
    pub(super) fn session_place(&self) -> Arrival {
        self.turn.session_place().arrival
    }
}

/// Sessions, by their names or by the last blocks of their last turns.
#[derive(Debug)]
pub(super) struct SequenceSessions {
    sessions: sessions::Sessions<SessionKv>,
    all: ReturnGaps,
}

impl Default for SequenceSessions {
    fn default() -> Self {
        Self { sessions: sessions::Sessions::default(), all: ReturnGaps::new(ALL_GAPS_MAX) }
    }
}

impl SequenceSessions {
    /// Returns the turn of a request with these blocks, which arrives now as number `arrival`.
    pub(super) fn arrived(
        &mut self,
        now: Instant,
        arrival: Arrival,
        hint: SessionHint,
        blocks: &[BlockHash],
    ) -> SequenceTurn {
        let own = ReturnGaps::new(OWN_GAPS_MAX);
        let new = || SessionKv { kept_places: [arrival; 3], own, ended: None };
        let renew = |kv: &mut SessionKv| {
            let [last, before, _] = kv.kept_places;
            kv.kept_places = [arrival, last, before];
        };
        let newest = blocks.iter().rev().map(|block| block.0);
        let turn = self.sessions.arrived(now, arrival, hint.session, newest, new, renew);
        let ended = turn.place().and(turn.data().ended);
        let gap = ended.map(|ended| now.saturating_duration_since(ended));
        SequenceTurn { turn, gap }
    }

    /// Returns the places under which KV of the session may be kept. Neighbours may be equal.
    pub(super) fn kept_places(&self, turn: &SequenceTurn) -> [Arrival; 3] {
        self.sessions.data(&turn.turn).kept_places
    }

    /// Records the end of a turn whose last full block is `last`. Returns the time to keep its KV
    /// ([`keep_time`]).
    pub(super) fn ended(
        &mut self,
        now: Instant,
        turn: SequenceTurn,
        hint: SessionHint,
        last: Option<BlockHash>,
        (restore, share): (Duration, f32),
    ) -> Duration {
        let Self { sessions, all } = self;
        sessions.ended(turn.turn, last.map(|last| last.0), |kv| {
            if let Some(gap) = turn.gap {
                kv.own.add_gap(gap);
                all.add_gap(gap);
            }
            let keep = hint.keep.unwrap_or_else(|| keep_time(&kv.own, all, restore, share));
            kv.own.add_end();
            all.add_end();
            kv.ended = Some(now);
            keep
        })
    }

    /// Records that a turn was removed before its end. Its request may arrive again as the same
    /// turn.
    pub(super) fn put_back(&mut self, turn: SequenceTurn) {
        self.sessions.put_back(turn.turn);
    }

    /// Panics when a session has not as many turns in progress as `turns` has entries of it.
    pub(super) fn check(&self, turns: impl Iterator<Item = u128>) {
        self.sessions.check(turns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: [BlockHash; 3] = [BlockHash(1), BlockHash(2), BlockHash(3)];
    const UNNAMED: SessionHint = SessionHint { session: None, keep: None };
    const NAMED: SessionHint = SessionHint { session: Some(77), keep: None };
    const COST: (Duration, f32) = (Duration::from_millis(200), 0.03);

    #[test]
    fn turn_that_does_not_end_leaves_its_session_as_before() {
        for hint in [UNNAMED, NAMED] {
            let (mut sessions, start) = (SequenceSessions::default(), Instant::now());
            let gap = Duration::from_secs(1);
            let turn = sessions.arrived(start, 3, hint, &BLOCKS);
            sessions.ended(start, turn, hint, Some(BLOCKS[2]), COST);
            for arrival in 4..9 {
                let failed = sessions.arrived(start + gap / 2, arrival, hint, &BLOCKS);
                assert_eq!(failed.place(), Some(3));
                sessions.put_back(failed);
            }
            let turn = sessions.arrived(start + gap, 9, hint, &BLOCKS);
            assert_eq!(turn.place(), Some(3));
            let keep = sessions.ended(start + gap, turn, hint, Some(BLOCKS[2]), COST);
            assert_eq!(keep, gap * 5 / 4, "the only gap");
        }
    }

    #[test]
    fn time_to_keep_is_learned_from_gaps_unless_the_client_sets_it() {
        for hint in [UNNAMED, NAMED] {
            let (mut sessions, mut now) = (SequenceSessions::default(), Instant::now());
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
}
