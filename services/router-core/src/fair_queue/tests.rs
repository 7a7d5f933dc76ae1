use proptest::prelude::*;

use super::{
    predict::{OUTPUT_TOKENS_FIRST, cost},
    *,
};

fn key(name: &str) -> Flow {
    Flow::new(FlowName::Key(name.into()))
}

/// Returns the start of a request without a session.
fn must_start(by: Instant, may_be_late: bool) -> Start {
    Start { by, may_be_late, may_wait: true, priority: 0, by_of_session: by }
}

/// Returns a prompt without a cached prefix.
fn uncached(tokens: u32) -> StartedPrompt {
    StartedPrompt { tokens, uncached_tokens: tokens }
}

/// A cluster with a fixed number of slots, in virtual time. Each request holds its slot for
/// `service`.
struct Scene {
    queue: FairQueue<u32>,
    now: Instant,
    slots: usize,
    running: Vec<(Instant, Charge)>,
    flows: HashMap<u32, (Flow, u32)>,
    joined: u32,
    served: Vec<u32>,
}

const SERVICE: Duration = Duration::from_secs(1);

impl Scene {
    fn new(slots: usize) -> Self {
        Self {
            queue: FairQueue::default(),
            now: Instant::now(),
            slots,
            running: Vec::new(),
            flows: HashMap::new(),
            joined: 0,
            served: Vec::new(),
        }
    }

    /// Adds a request without output.
    fn join(&mut self, flow: &Flow, prompt_tokens: u32) -> u32 {
        self.joined += 1;
        let (id, cost) = (self.joined, cost(prompt_tokens, 0.0));
        self.flows.insert(id, (flow.clone(), prompt_tokens));
        let start = must_start(self.now + Duration::from_secs(3000), true);
        self.queue.insert(self.now, id, flow, cost, start);
        id
    }

    fn join_many(&mut self, flow: &Flow, prompt_tokens: u32, count: u32) {
        for _ in 0..count {
            self.join(flow, prompt_tokens);
        }
    }

    /// Gives turns while slots are free.
    fn give_turns(&mut self) {
        while let Some(id) = self.queue.next_turn(self.now) {
            if self.running.len() == self.slots {
                self.queue.passed(id, PassReason::NoNode);
                continue;
            }
            let (flow, prompt_tokens) = self.flows[&id].clone();
            let charge = self.queue.start(self.now, &flow, uncached(prompt_tokens), 0);
            self.queue.leave(id);
            self.running.push((self.now + SERVICE, charge));
            self.served.push(id);
        }
    }

    /// Moves to the end of the first running request.
    fn step(&mut self) {
        self.running.sort_by_key(|running| std::cmp::Reverse(running.0));
        let Some((at, charge)) = self.running.pop() else { return };
        self.now = at;
        self.queue.ended(self.now, &charge, ChargeEnd::Complete);
        self.queue.retry_passed();
        self.give_turns();
    }

    fn count_served(&self, flow: &Flow) -> usize {
        self.served.iter().filter(|id| self.flows[id].0.name == flow.name).count()
    }
}

#[test]
fn flows_are_served_by_weight_and_cost() {
    let mut scene = Scene::new(4);
    let (a, b) = (key("a"), Flow { weight: 3, ..key("b") });
    for _ in 0..400 {
        scene.join(&a, 100);
        scene.join(&b, 200);
    }
    scene.give_turns();
    for _ in 0..200 {
        scene.step();
    }
    // `b` has three times the weight, and its requests cost twice as much.
    let (of_a, of_b) = (scene.count_served(&a) as f64, scene.count_served(&b) as f64);
    assert!((of_b / of_a - 1.5).abs() < 0.1, "{of_a} {of_b}");
}

#[test]
fn flow_that_returns_is_next_and_its_credit_is_bounded() {
    let mut scene = Scene::new(1);
    let (flood, other) = (key("flood"), key("other"));
    scene.join(&other, 100);
    scene.join_many(&flood, 100, 100);
    scene.give_turns();
    (0..51).for_each(|_| scene.step());
    let first = scene.join(&other, 100);
    scene.step();
    assert_eq!(scene.served.last(), Some(&first));
    scene.join_many(&other, 100, 40);
    let before = scene.count_served(&flood);
    (0..12).for_each(|_| scene.step());
    assert_eq!(
        scene.count_served(&flood) - before,
        0,
        "the credit is about 12 requests after 50 ended ones"
    );
    (0..22).for_each(|_| scene.step());
    let served = scene.count_served(&flood) - before;
    assert!((9..=12).contains(&served), "then they alternate: {served}");
}

#[test]
fn higher_priority_comes_first_and_starves_nobody() {
    let mut scene = Scene::new(1);
    let (low, high) = (key("low"), Flow { priority: 5, ..key("high") });
    for _ in 0..200 {
        scene.join(&low, 100);
        scene.join(&high, 100);
    }
    scene.give_turns();
    (0..79).for_each(|_| scene.step());
    let of_low = scene.count_served(&low);
    assert_eq!(of_low, 10, "of 80 starts");
}

#[test]
fn request_that_must_start_first_comes_first_in_its_flow() {
    let mut scene = Scene::new(1);
    let flow = key("a");
    scene.join(&flow, 1);
    scene.give_turns();
    let ids = [3, 1, 2].map(|seconds| {
        let id = scene.join(&flow, 1);
        scene.queue.leave(id);
        let start_by = scene.now + Duration::from_secs(seconds);
        scene.queue.insert(scene.now, id, &flow, 1.0, must_start(start_by, true));
        id
    });
    (0..3).for_each(|_| scene.step());
    assert_eq!(scene.served[1..], [ids[1], ids[2], ids[0]]);
}

#[test]
fn request_that_can_no_longer_start_in_time_is_returned() {
    let mut queue = FairQueue::<u32>::default();
    let (now, flow) = (Instant::now(), key("a"));
    let after = |seconds| now + Duration::from_secs(seconds);
    queue.insert(now, 1, &flow, 1.0, must_start(after(1), true));
    queue.insert(now, 2, &flow, 1.0, must_start(after(5), true));
    // A started answer goes on.
    queue.insert(now, 3, &key("b"), 1.0, must_start(now, false));
    assert_eq!(queue.take_late(after(1)), None);
    assert_eq!((queue.take_late(after(2)), queue.take_late(after(2))), (Some(1), None));
    assert_eq!(queue.take_late(after(6)), Some(2));
    assert_eq!(queue.take_late(after(60)), None);
}

#[test]
fn started_answer_hides_no_late_request_of_its_flow() {
    let mut queue = FairQueue::<u32>::default();
    let (now, flow) = (Instant::now(), key("a"));
    let after = |seconds| now + Duration::from_secs(seconds);
    queue.insert(now, 1, &flow, 1.0, must_start(now, false));
    queue.insert(now, 2, &flow, 1.0, must_start(after(1), true));
    assert_eq!((queue.take_late(after(2)), queue.take_late(after(2))), (Some(2), None));
}

#[test]
fn turns_at_the_same_time_are_bounded() {
    let mut queue = FairQueue::<u32>::default();
    let (now, flows) = (Instant::now(), 40);
    for index in 0..flows {
        queue.insert(now, index, &key(&index.to_string()), 1.0, must_start(now, true));
    }
    let give = |queue: &mut FairQueue<u32>| -> Vec<u32> {
        std::iter::from_fn(|| queue.next_turn(now)).collect()
    };
    let first = give(&mut queue);
    assert_eq!(first.len(), TURNS_MAX.1);
    // A passed turn counts until the owner asks again; a request that leaves makes place for
    // another one.
    queue.passed(first[0], PassReason::NoNode);
    assert!(give(&mut queue).is_empty());
    queue.leave(first[1]);
    assert_eq!(give(&mut queue).len(), 1);
    queue.retry_passed();
    assert_eq!(give(&mut queue), first[..1]);
}

#[test]
fn charge_is_corrected_by_the_tokens_that_were_used() {
    let mut queue = FairQueue::<u32>::default();
    let (now, flow) = (Instant::now(), key("a"));
    assert_eq!(queue.cost(&flow.name, 10, 20), 50.0);
    let charged = queue.cost(&flow.name, 10, 4096);
    assert_eq!(charged, 10.0 + 2.0 * OUTPUT_TOKENS_FIRST);
    let mut charge = queue.start(now, &flow, uncached(10), 4096);
    assert_eq!(queue.flows[&flow.name].virtual_time, charged);
    charge.emitted(now, 5);
    queue.ended(now + SERVICE, &charge, ChargeEnd::Complete);
    assert_eq!(queue.flows[&flow.name].virtual_time, 20.0);
    assert_eq!(queue.cost(&flow.name, 10, 4096), 20.0, "answers of this flow have 5 tokens");
    for end in [ChargeEnd::Cut, ChargeEnd::Refused] {
        let charge = queue.start(now, &flow, uncached(10), 4096);
        queue.ended(now + SERVICE, &charge, end);
        assert_eq!(queue.cost(&flow.name, 10, 4096), 20.0, "{end:?} is no complete answer");
    }
}

#[test]
fn attempt_that_a_node_refused_costs_nothing() {
    let mut queue = FairQueue::<u32>::default();
    let (now, flow) = (Instant::now(), key("a"));
    for (emitted, end, cost) in [
        (0, ChargeEnd::Refused, 0.0),
        (0, ChargeEnd::Cut, 100.0),
        (5, ChargeEnd::Cut, 110.0),
        (5, ChargeEnd::Refused, 10.0),
    ] {
        let before = queue.flows.get(&flow.name).map_or(0.0, |flow| flow.virtual_time);
        let mut charge = queue.start(now, &flow, uncached(100), 4096);
        charge.emitted(now, emitted);
        queue.ended(now, &charge, end);
        assert_eq!(queue.flows[&flow.name].virtual_time - before, cost, "{end:?}");
    }
}

#[test]
fn reserve_of_the_service_time_grows_with_its_variation() {
    let mut queue = FairQueue::<u32>::default();
    let (now, flow) = (Instant::now(), key("a"));
    let tokens = CountedTokens { uncached: 10, output: 5.0 };
    let none = queue.service_time.with_reserve(now, tokens);
    assert_eq!(none, Duration::ZERO, "nothing was measured");
    let mut ended = |milliseconds: u64| {
        let mut charge = queue.start(now, &flow, uncached(10), 5);
        charge.emitted(now, 5);
        queue.ended(now + Duration::from_millis(milliseconds), &charge, ChargeEnd::Complete);
        queue.service_time.with_reserve(now, tokens)
    };
    let steady = (0..100).map(|_| ended(1000)).last().unwrap();
    assert_eq!(steady.as_millis(), 1000);
    let varied =
        (0..100).map(|index| ended(if index % 2 == 0 { 500 } else { 1500 })).last().unwrap();
    assert!((1800..2200).contains(&varied.as_millis()), "{varied:?}");
    let short = queue.service_time.with_reserve(now, CountedTokens { output: 1.4, ..tokens });
    assert!(
        (180..220).contains(&short.as_millis()),
        "errors of long answers leave short ones: {short:?}"
    );
}

#[test]
fn flood_of_a_new_flow_comes_after_a_flow_that_did_not_queue() {
    let mut scene = Scene::new(1);
    let (good, flood) = (key("good"), key("flood"));
    for _ in 0..50 {
        scene.join(&good, 100);
        scene.give_turns();
        scene.step();
    }
    scene.join_many(&flood, 100, 40);
    scene.join_many(&good, 100, 40);
    scene.give_turns();
    (0..8).for_each(|_| scene.step());
    assert_eq!(scene.count_served(&flood), 0);
}

#[test]
fn new_flow_has_the_credit_of_one_request() {
    let mut scene = Scene::new(1);
    let (flood, other) = (key("flood"), key("other"));
    scene.join_many(&flood, 100, 100);
    scene.give_turns();
    (0..50).for_each(|_| scene.step());
    scene.join_many(&other, 100, 40);
    let before = scene.count_served(&flood);
    (0..20).for_each(|_| scene.step());
    let served = scene.count_served(&flood) - before;
    assert!((9..=11).contains(&served), "they alternate: {served}");
}

#[test]
fn predicted_wait_counts_the_usual_uncached_part_of_prompts() {
    let (mut queue, flow, start) = (FairQueue::<u32>::default(), key("a"), Instant::now());
    let prompt = StartedPrompt { tokens: 1000, uncached_tokens: 100 };
    for second in 0..50 {
        let charge = queue.start(start + SERVICE * second, &flow, prompt, 0);
        queue.ended(start + SERVICE * (second + 1), &charge, ChargeEnd::Complete);
    }
    let now = start + SERVICE * 50;
    let _running = queue.start(now, &flow, prompt, 0);
    let limits = WaitLimits { wait_max: 60 * SERVICE, deadline: now + 600 * SERVICE };
    for id in 0..10 {
        let request = WaitRequest {
            flow: flow.clone(),
            prompt_tokens: 1000,
            output_tokens_max: 0,
            limits,
            has_begun: false,
            session_since: None,
            priority: 0,
        };
        queue.join(now, id, &request).unwrap();
    }
    let wait = queue.wait(&flow).unwrap().as_secs_f64();
    assert!((wait - 10.0).abs() < 0.1, "each of ten requests takes a second: {wait}");
}

#[test]
fn predicted_wait_is_the_time_of_the_requests_that_come_first() {
    let mut scene = Scene::new(4);
    let (flood, other) = (key("flood"), key("other"));
    assert_eq!(scene.queue.wait(&flood), None, "nothing was measured");
    scene.join_many(&flood, 100, 208);
    scene.give_turns();
    (0..104).for_each(|_| scene.step());
    // 100 requests are queued; four of them are served in each second.
    assert_eq!(scene.queue.wait(&flood).unwrap().as_secs(), 25);
    assert_eq!(scene.queue.drain_time(None).unwrap().as_secs(), 25);
    assert_eq!(scene.queue.drain_time(Some(&flood.name)).unwrap().as_secs(), 25);
    assert_eq!(scene.queue.queue_time(scene.now).as_secs(), 25);
    // A new flow waits for one request of the other flow.
    assert!(scene.queue.wait(&other).unwrap() <= Duration::from_millis(250));
    let high = Flow { priority: 1, ..key("high") };
    assert_eq!(scene.queue.wait(&high).unwrap(), Duration::ZERO);
}

#[test]
fn burst_is_refused_only_after_its_queue_has_lasted() {
    let (mut scene, flow) = (Scene::new(1), key("a"));
    scene.join_many(&flow, 10, 2);
    scene.give_turns();
    scene.step();
    // One short request runs. At its rate each of these would take 100 s.
    let limits = WaitLimits {
        wait_max: Duration::from_secs(10),
        deadline: scene.now + Duration::from_secs(3000),
    };
    let (prompt_tokens, output_tokens_max, has_begun) = (1000, 1, false);
    let request = WaitRequest {
        flow,
        prompt_tokens,
        output_tokens_max,
        limits,
        has_begun,
        session_since: None,
        priority: 0,
    };
    for id in 100..140 {
        scene.queue.join(scene.now, id, &request).unwrap();
    }
    let later = scene.now + Duration::from_secs(2);
    let refused = scene.queue.join(later, 200, &request).unwrap_err();
    assert!(refused.wait > refused.limit.wait_max(), "{refused:?}");
    (100..140).for_each(|id| scene.queue.leave(id));
    scene.queue.join(later, 200, &request).unwrap();
}

#[test]
fn attempts_that_fail_together_do_not_lengthen_the_predicted_wait() {
    let (mut scene, flow) = (Scene::new(8), key("a"));
    scene.join_many(&flow, 100, 300);
    scene.give_turns();
    (0..200).for_each(|_| scene.step());
    let before = scene.queue.wait(&flow).unwrap();
    for (_, charge) in scene.running.drain(1..) {
        scene.queue.ended(scene.now, &charge, ChargeEnd::Cut);
    }
    let after = scene.queue.wait(&flow).unwrap();
    assert!(after < before + SERVICE, "{before:?} {after:?}");
}

#[test]
fn flow_over_its_share_is_known_while_another_one_is_active() {
    let mut scene = Scene::new(8);
    let (flood, other) = (key("flood"), key("other"));
    scene.join_many(&flood, 100, 40);
    scene.give_turns();
    (0..8).for_each(|_| scene.step());
    assert!(!scene.queue.is_over_share(scene.now, &flood.name), "it is alone");
    let id = scene.join(&other, 100);
    assert!(scene.queue.is_over_share(scene.now, &flood.name));
    assert!(!scene.queue.is_over_share(scene.now, &other.name));
    scene.queue.leave(id);
    assert!(scene.queue.is_over_share(scene.now + ACTIVE_FOR / 2, &flood.name));
    assert!(!scene.queue.is_over_share(scene.now + ACTIVE_FOR, &flood.name));
}

#[test]
fn new_flow_is_over_its_share_once_it_is_served_beside_present_flows() {
    let mut scene = Scene::new(32);
    let (old, new) = (key("old"), key("new"));
    for _ in 0..50 {
        scene.join(&old, 100);
        scene.give_turns();
        scene.step();
    }
    scene.join(&new, 100);
    assert!(!scene.queue.is_over_share(scene.now, &new.name), "nothing was served to it");
    scene.give_turns();
    assert!(scene.queue.is_over_share(scene.now, &new.name));
    // The other flow uses more.
    for _ in 0..20 {
        scene.join_many(&old, 100, 4);
        scene.give_turns();
        (0..4).for_each(|_| scene.step());
    }
    assert!(!scene.queue.is_over_share(scene.now, &new.name));
}

#[test]
fn turn_passes_to_other_requests_until_nodes_may_have_capacity_again() {
    let mut queue = FairQueue::<u32>::default();
    let (start, flow) = (Instant::now(), key("a"));
    let start_by = start + Duration::from_secs(60);
    (0..9).for_each(|id| queue.insert(start, id, &flow, 1.0, must_start(start_by, true)));
    let turns = |queue: &mut FairQueue<u32>| {
        queue.retry_passed();
        let mut turns = Vec::new();
        while let Some(id) = queue.next_turn(start) {
            assert_eq!(queue.next_turn(start), None, "one turn of a flow at a time");
            queue.passed(id, PassReason::NoNode);
            turns.push(id);
        }
        turns
    };
    assert_eq!(turns(&mut queue), [0, 1, 2, 3]);
    assert_eq!(queue.next_turn(start), None);
    assert_eq!(turns(&mut queue), [0, 1, 2, 3]);
    queue.leave(0);
    assert_eq!(turns(&mut queue), [1, 2, 3, 4]);
}

/// Requests 0 to 4 wait for the node with their prefix. Each other request starts elsewhere.
#[test]
fn requests_that_wait_by_choice_take_no_turn_of_other_requests() {
    let mut queue = FairQueue::<u32>::default();
    let (start, flow) = (Instant::now(), key("a"));
    let start_by = start + Duration::from_secs(60);
    (0..8).for_each(|id| queue.insert(start, id, &flow, 1.0, must_start(start_by, true)));
    let mut turns = Vec::new();
    while let Some(id) = queue.next_turn(start) {
        queue.passed(id, if id < 5 { PassReason::ByChoice } else { PassReason::NoNode });
        turns.push(id);
    }
    assert_eq!(turns, [0, 1, 2, 3, 4, 5, 6, 7]);
    // Their turns are bounded, too.
    (8..200).for_each(|id| queue.insert(start, id, &flow, 1.0, must_start(start_by, true)));
    queue.retry_passed();
    let mut turns = 0;
    while let Some(id) = queue.next_turn(start) {
        queue.passed(id, PassReason::ByChoice);
        turns += 1;
    }
    assert_eq!(turns, TURNS_BY_CHOICE_MAX);
}

#[test]
fn flows_without_requests_are_bounded() {
    let mut queue = FairQueue::<u32>::default();
    let now = Instant::now();
    for index in 0..3 * IDLE_FLOWS_MAX as u32 {
        let flow = Flow::new(FlowName::Tenant(index.to_string().into()));
        queue.insert(now, index, &flow, 1.0, must_start(now, true));
        queue.leave(index);
    }
    assert!(queue.flows.len() <= IDLE_FLOWS_MAX + 1);
}

proptest! {
    /// No request waits longer than the served cost of its flow's share allows: with `n` flows of
    /// equal weight, a flow's k-th request starts before any other flow has started k + 2 requests
    /// after it joined.
    #[test]
    fn no_flow_delays_another_beyond_its_share(
        floods in 1..5usize,
        flood_requests in 1..60u32,
        slots in 1..6usize,
        warm_up in 0..40usize,
        own_requests in 1..10u32,
    ) {
        let mut scene = Scene::new(slots);
        let flows: Vec<Flow> = (0..floods).map(|flow| key(&format!("flood-{flow}"))).collect();
        for _ in 0..flood_requests {
            flows.iter().for_each(|flow| scene.join_many(flow, 100, 1));
        }
        scene.give_turns();
        (0..warm_up).for_each(|_| scene.step());
        let own = key("own");
        let ids: Vec<u32> = (0..own_requests).map(|_| scene.join(&own, 100)).collect();
        let before: Vec<usize> = flows.iter().map(|flow| scene.count_served(flow)).collect();
        scene.give_turns();
        for (index, id) in ids.iter().enumerate() {
            while !scene.served.contains(id) {
                prop_assert!(!scene.running.is_empty(), "the queue stalls");
                scene.step();
            }
            for (flow, before) in flows.iter().zip(&before) {
                let served = scene.count_served(flow) - before;
                prop_assert!(served <= index + 2, "{served} before request {index}");
            }
        }
        while !scene.running.is_empty() {
            scene.step();
        }
        prop_assert!(scene.queue.is_empty(), "every request was served");
        prop_assert_eq!(scene.served.len(), scene.joined as usize);
        prop_assert!(scene.queue.flows.values().all(FlowState::is_idle));
    }

    /// Weights, costs, priorities and cancellations in any order keep the accounts of the queue.
    #[test]
    fn every_request_is_served_or_leaves(
        events in prop::collection::vec((0..4u8, 1..5u32, 0..3u32, 1..900u32), 1..120),
        slots in 1..4usize,
    ) {
        let mut scene = Scene::new(slots);
        let mut left = 0;
        for (kind, weight, priority, tokens) in events {
            let flow = Flow { weight, priority, ..key(&weight.to_string()) };
            match kind {
                0 | 1 => scene.join_many(&flow, tokens, 1),
                2 => {
                    let first = scene.queue.places.keys().min().copied();
                    if let Some(id) = first {
                        scene.queue.leave(id);
                        left += 1;
                    }
                }
                _ => scene.step(),
            }
            scene.give_turns();
            let queued: usize = scene.queue.flows.values().map(|flow| flow.queue.len()).sum();
            prop_assert_eq!(queued, scene.queue.places.len());
            prop_assert_eq!(queued, scene.queue.may_be_late.len());
            let waiting = scene.queue.flows.iter().filter(|(_, flow)| !flow.queue.is_empty());
            let mut waiting: Vec<_> = waiting.collect();
            waiting.sort_by(|(_, a), (_, b)| {
                let by_time = a.virtual_time.total_cmp(&b.virtual_time);
                b.priority.cmp(&a.priority).then(by_time).then(a.started.cmp(&b.started))
            });
            let waiting: Vec<_> = waiting.into_iter().map(|(name, _)| name).collect();
            prop_assert_eq!(scene.queue.order.flows(false).collect::<Vec<_>>(), waiting);
        }
        while !scene.running.is_empty() {
            scene.step();
        }
        prop_assert!(scene.queue.is_empty() && scene.queue.passed.is_empty());
        prop_assert_eq!(scene.served.len() + left, scene.joined as usize);
        for flow in scene.queue.flows.values() {
            prop_assert!(flow.is_idle() && flow.queued_cost == 0.0);
        }
    }
}
