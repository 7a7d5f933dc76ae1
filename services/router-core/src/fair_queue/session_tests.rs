//! Order of turns of sessions, in virtual time.

use super::*;

/// One slot. Each request holds it for a second.
struct Scene {
    queue: FairQueue<u32>,
    now: Instant,
    joined: u32,
    running: Option<Charge>,
    flows: HashMap<u32, Flow>,
    served: Vec<u32>,
}

const SERVICE: Duration = Duration::from_secs(1);
const WAIT_MAX: Duration = Duration::from_secs(1000);

fn key(name: &str) -> Flow {
    Flow::new(FlowName::Key(name.into()))
}

impl Scene {
    /// Starts with a running request of a flow.
    fn new(flow: &Flow) -> Self {
        let mut scene = Self {
            queue: FairQueue::default(),
            now: Instant::now(),
            joined: 0,
            running: None,
            flows: HashMap::new(),
            served: Vec::new(),
        };
        scene.join(flow, None, WAIT_MAX);
        scene.step();
        scene
    }

    /// Adds a request, a turn of a session that arrived at `session_since`.
    fn join(&mut self, flow: &Flow, session_since: Option<Instant>, wait_max: Duration) -> u32 {
        self.join_with(flow, session_since, wait_max, 0)
    }

    fn join_with(
        &mut self,
        flow: &Flow,
        session_since: Option<Instant>,
        wait_max: Duration,
        priority: i32,
    ) -> u32 {
        self.joined += 1;
        let request = WaitRequest {
            flow: flow.clone(),
            prompt_tokens: 100,
            output_tokens_max: 0,
            limits: WaitLimits { wait_max, deadline: self.now + 10 * WAIT_MAX },
            has_begun: wait_max.is_zero(),
            session_since,
            priority,
        };
        self.queue.join(self.now, self.joined, &request).unwrap();
        self.flows.insert(self.joined, flow.clone());
        self.joined
    }

    /// Moves to the end of the running request, and starts the next one.
    fn step(&mut self) {
        self.now += SERVICE;
        if let Some(charge) = self.running.take() {
            self.queue.ended(self.now, &charge, ChargeEnd::Complete);
        }
        let Some(id) = self.queue.next_turn(self.now) else { return };
        let prompt = StartedPrompt { tokens: 100, uncached_tokens: 100 };
        self.running = Some(self.queue.start(self.now, &self.flows[&id], prompt, 0));
        self.queue.leave(id);
        self.served.push(id);
    }
}

#[test]
fn later_turn_comes_before_requests_that_arrived_after_its_session() {
    let flow = key("a");
    let mut scene = Scene::new(&flow);
    let since = scene.now;
    scene.now += SERVICE;
    let first = scene.join(&flow, None, WAIT_MAX);
    scene.now += SERVICE;
    let [younger, older, new] = [Some(since + SERVICE / 2), Some(since), None]
        .map(|session_since| scene.join(&flow, session_since, WAIT_MAX));
    // An answer that has emitted tokens comes before all others.
    let begun = scene.join(&flow, None, Duration::ZERO);
    (0..5).for_each(|_| scene.step());
    assert_eq!(scene.served[1..], [begun, older, younger, first, new]);
}

#[test]
fn earlier_deadline_comes_before_an_older_session() {
    let flow = key("a");
    let mut scene = Scene::new(&flow);
    let since = scene.now;
    scene.now += SERVICE;
    let turn = scene.join(&flow, Some(since), WAIT_MAX);
    let urgent = scene.join(&flow, None, WAIT_MAX / 2);
    (0..2).for_each(|_| scene.step());
    assert_eq!(scene.served[1..], [urgent, turn]);
}

#[test]
fn new_request_starts_although_old_sessions_always_have_turns() {
    let flow = key("a");
    let mut scene = Scene::new(&flow);
    let since = scene.now;
    scene.now += SERVICE;
    let wait_max = 16 * SERVICE;
    let new = scene.join(&flow, None, wait_max);
    let mut turns = 0;
    while !scene.served.contains(&new) {
        scene.join(&flow, Some(since), wait_max);
        scene.step();
        turns += 1;
        assert!(turns <= 8, "half of the allowed wait: {:?}", scene.served);
    }
    assert!(turns > 1, "old sessions come first otherwise");
}

#[test]
fn lower_priority_number_comes_first_within_the_flow_and_starves_no_request() {
    let (flow, other) = (key("a"), key("b"));
    let mut scene = Scene::new(&flow);
    let since = scene.now;
    scene.now += SERVICE;
    let turn = scene.join(&flow, Some(since), WAIT_MAX);
    let [late, first] = [7, -3].map(|priority| scene.join_with(&flow, None, WAIT_MAX, priority));
    let of_other = scene.join_with(&other, None, WAIT_MAX, 7);
    let begun = scene.join_with(&flow, None, Duration::ZERO, 7);
    (0..5).for_each(|_| scene.step());
    // A priority changes nothing between flows: the other one has been served less.
    assert_eq!(scene.served[1..], [of_other, begun, first, turn, late]);

    let wait_max = 16 * SERVICE;
    let late = scene.join_with(&flow, None, wait_max, 7);
    let mut starts = 0;
    while !scene.served.contains(&late) {
        scene.join_with(&flow, None, wait_max, -3);
        scene.step();
        starts += 1;
        assert!(starts <= 8, "half of the allowed wait: {:?}", scene.served);
    }
    assert!(starts > 1, "the lower number comes first otherwise");
}

#[test]
fn sessions_take_no_share_of_another_flow() {
    let (sessions, other) = (key("sessions"), key("other"));
    let mut scene = Scene::new(&other);
    let since = scene.now;
    for _ in 0..100 {
        scene.join(&sessions, Some(since), WAIT_MAX);
        scene.join(&other, None, WAIT_MAX);
    }
    (0..100).for_each(|_| scene.step());
    let of_other = scene.served[1..].iter().filter(|id| scene.flows[*id] == other).count();
    assert!((49..=51).contains(&of_other), "{of_other}");
}

#[test]
fn later_turns_make_no_request_late() {
    let flow = key("a");
    let mut scene = Scene::new(&flow);
    let since = scene.now;
    scene.now += SERVICE;
    let wait_max = 30 * SERVICE;
    let mut turns = vec![scene.join(&flow, Some(since), wait_max)];
    for second in 0..200 {
        // A session always has one turn in the queue, and new requests need a quarter of the
        // capacity.
        if scene.served.contains(turns.last().unwrap()) {
            turns.push(scene.join(&flow, Some(since), wait_max));
        }
        if second % 4 == 0 {
            scene.join(&flow, None, wait_max);
        }
        scene.step();
        assert_eq!(scene.queue.take_late(scene.now), None, "after {second} s");
    }
    let served = scene.served.iter().filter(|id| turns.contains(id)).count();
    assert!(served > 100, "{served} turns");
}

#[test]
fn begun_answer_that_no_node_takes_leaves_sessions_their_places() {
    let flow = key("a");
    let mut scene = Scene::new(&flow);
    let since = scene.now;
    scene.now += SERVICE;
    scene.join(&flow, None, WAIT_MAX);
    let turn = scene.join(&flow, Some(since), WAIT_MAX);
    let begun = scene.join(&flow, None, Duration::ZERO);
    assert_eq!(scene.queue.next_turn(scene.now), Some(begun));
    scene.queue.passed(begun, PassReason::NoNode);
    assert_eq!(scene.queue.next_turn(scene.now), Some(turn));
}
