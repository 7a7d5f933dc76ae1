use super::*;

const ENDS: [u128; 3] = [1, 2, 3];
const NAMED: Option<u128> = Some(77);

/// Sessions in virtual time. The data of a session is the number of its renewed places.
struct Scene {
    sessions: Sessions<u32>,
    start: Instant,
}

impl Scene {
    fn new() -> Self {
        Self { sessions: Sessions::default(), start: Instant::now() }
    }

    /// Returns the turn that arrives after this many seconds, as the turn with that number.
    fn arrive(&mut self, seconds: u64, named: Option<u128>, ends: &[u128]) -> SessionTurn<u32> {
        let now = self.start + Duration::from_secs(seconds);
        let newest = ends.iter().rev().copied();
        self.sessions.arrived(now, seconds, named, newest, || 0, |renewed| *renewed += 1)
    }

    fn end(&mut self, turn: SessionTurn<u32>, end: Option<u128>) {
        self.sessions.ended(turn, end, |_| ());
    }

    /// Returns the place of a turn that ends at once with this block.
    fn turn(&mut self, seconds: u64, named: Option<u128>, ends: &[u128], end: u128) -> Option<u64> {
        let turn = self.arrive(seconds, named, ends);
        let place = arrival(&turn);
        self.end(turn, Some(end));
        place
    }
}

fn arrival(turn: &SessionTurn<u32>) -> Option<u64> {
    turn.place().map(|place| place.arrival)
}

#[test]
fn later_turns_have_the_place_of_their_session_whatever_their_blocks_are() {
    let mut scene = Scene::new();
    assert_eq!(scene.turn(1, NAMED, &[], 10), None, "the first turn");
    assert_eq!(scene.turn(2, Some(78), &[], 11), None);
    assert_eq!(scene.turn(3, NAMED, &[], 12), Some(1));
    assert_eq!(scene.turn(4, NAMED, &ENDS, 13), Some(1));
}

#[test]
fn unnamed_turn_continues_the_longest_answer_once() {
    let mut scene = Scene::new();
    assert_eq!(scene.turn(1, None, &[], ENDS[0]), None);
    assert_eq!(scene.turn(2, None, &[], ENDS[1]), None);
    let turns = [3, 4, 5].map(|at| scene.arrive(at, None, &ENDS));
    assert_eq!(turns.each_ref().map(arrival), [Some(2), Some(1), None]);
    assert_eq!(scene.turn(6, None, &ENDS, ENDS[2]), None, "no turn has ended");
    assert_eq!(scene.turn(7, None, &ENDS, ENDS[2]), Some(6));
}

#[test]
fn turn_beside_another_turn_of_its_session_has_a_place_of_its_own() {
    let mut scene = Scene::new();
    let [first, second] = [1, 2].map(|at| scene.arrive(at, NAMED, &[]));
    assert_eq!(arrival(&second), None);
    scene.end(first, None);
    let third = scene.arrive(3, NAMED, &[]);
    assert_eq!(arrival(&third), None, "the second turn has not ended");
    assert_eq!(third.session_place().arrival, 1);
    scene.end(second, None);
    scene.end(third, None);
    scene.sessions.check(std::iter::empty());
    assert_eq!(scene.turn(4, NAMED, &[], 10), Some(1));
}

#[test]
fn turn_that_is_put_back_may_arrive_again() {
    for named in [NAMED, None] {
        let mut scene = Scene::new();
        assert_eq!(scene.turn(1, named, &ENDS, ENDS[1]), None);
        for at in 2..5 {
            let failed = scene.arrive(at, named, &ENDS);
            assert_eq!(arrival(&failed), Some(1));
            scene.sessions.put_back(failed);
        }
        assert_eq!(scene.turn(6, named, &ENDS, 10), Some(1));
    }
}

#[test]
fn session_loses_its_place_after_a_while() {
    let mut scene = Scene::new();
    let late = PLACE_MAX.as_secs() + 1;
    assert_eq!(scene.turn(1, NAMED, &[], 10), None);
    assert_eq!(scene.turn(late - 1, NAMED, &[], 10), Some(1));
    assert_eq!(scene.turn(late, NAMED, &[], 10), Some(late));
    let turn = scene.arrive(late + 1, NAMED, &[]);
    assert_eq!((arrival(&turn), *scene.sessions.data(&turn)), (Some(late), 1));
}

/// Lets more sessions begin than are remembered.
fn forget_all(scene: &mut Scene) {
    for number in 0..3 * SESSIONS_MAX as u64 {
        scene.arrive(5 + number, Some(1000 + u128::from(number)), &[]);
    }
}

#[test]
fn turn_of_a_forgotten_session_is_no_turn_of_the_session_that_began_again() {
    let mut scene = Scene::new();
    let old = scene.arrive(1, NAMED, &[]);
    forget_all(&mut scene);
    let _new = scene.arrive(100_000, NAMED, &[]);
    scene.end(old, None);
    let beside = scene.arrive(100_001, NAMED, &[]);
    assert_eq!(arrival(&beside), None, "the new session's turn has not ended");
}

#[test]
fn session_that_was_forgotten_while_turns_ran_has_a_place_after_these_turns() {
    let mut scene = Scene::new();
    let [first, second, third] = [1, 2, 3].map(|at| scene.arrive(at, NAMED, &[]));
    scene.end(first, None);
    forget_all(&mut scene);
    scene.end(third, None);
    scene.end(second, None);
    assert_eq!(scene.turn(4, NAMED, &[], 10), Some(1));
}

#[test]
fn memory_of_sessions_is_bounded() {
    let mut scene = Scene::new();
    for number in 0..3 * SESSIONS_MAX as u64 {
        let turn = scene.arrive(number, Some(number.into()), &[]);
        scene.end(turn, None);
        scene.turn(number, None, &[], u128::MAX - u128::from(number));
        assert!(scene.sessions.recent.len() <= SESSIONS_MAX);
        assert!(scene.sessions.older.len() <= SESSIONS_MAX);
    }
}
