//! Waiting answers of a router without nodes, in virtual time.

use config::{Disaggregate, NodePolicy, Roles};

use super::*;
use crate::fair_queue::StartLimit;

const PROMPT: StartedPrompt = StartedPrompt { tokens: 100, uncached_tokens: 100 };
const LONG: Duration = Duration::from_secs(30);

/// A router and its virtual time.
struct Scene {
    router: RouterCore,
    model: Arc<str>,
    now: Instant,
}

fn tenant(name: &str) -> Flow {
    Flow::new(FlowName::Tenant(name.into()))
}

impl Scene {
    fn new(waiting_max: u32) -> Self {
        let selection = Selection {
            disaggregate: Disaggregate::Auto,
            roles: Roles::Fixed,
            policy: NodePolicy::Predicted,
        };
        let limits = RouterLimits { requests_max: 8, waiting_max };
        let router = RouterCore::new(1, selection, limits);
        Self { router, model: "model".into(), now: Instant::now() }
    }

    /// Returns limits of an answer that must start within this time.
    fn within(&self, wait_max: Duration) -> WaitLimits {
        WaitLimits { wait_max, deadline: self.now + Duration::from_secs(600) }
    }

    fn waits(&mut self, flow: &Flow, limits: WaitLimits) -> Result<WaitingPlace, Overload> {
        let identity = SessionIdentity { name: "", cache_salt: "", blocks: &[] };
        let (id, ..) = self.router.handle_arrival(self.now, &self.model, &flow.name, identity);
        let mut place = self.router.take_place(&self.model, id, flow, false)?;
        match self.waits_again(&mut place, flow, limits) {
            Ok(()) => Ok(place),
            Err(overload) => {
                self.leaves(place, flow);
                Err(overload)
            }
        }
    }

    fn waits_again(
        &mut self,
        place: &mut WaitingPlace,
        flow: &Flow,
        limits: WaitLimits,
    ) -> Result<(), Overload> {
        let request = WaitRequest {
            flow: flow.clone(),
            prompt_tokens: 100,
            output_tokens_max: 1,
            limits,
            has_begun: false,
            session_since: None,
            priority: 0,
        };
        self.router.wait_for_turn(self.now, &self.model, place, &request, PassReason::NoNode)
    }

    fn leaves(&mut self, place: WaitingPlace, flow: &Flow) {
        self.router.release_place(self.now, &self.model, &flow.name, place);
    }

    /// Returns the answers that the router wakes.
    fn woken(&mut self) -> Vec<AnswerId> {
        let outputs = std::iter::from_fn(|| self.router.poll_output());
        let wakes = outputs.map(|output| match output {
            RouterOutput::Wake(id) => id,
            output => panic!("{output:?}"),
        });
        wakes.collect()
    }

    /// Lets an answer run that took this long, alone.
    fn ran(&mut self, flow: &Flow, duration: Duration) {
        let queue = &mut self.router.model(&self.model).queue;
        let mut charge = queue.start(self.now, flow, PROMPT, 1);
        self.now += duration;
        charge.emitted(self.now, 1);
        queue.ended(self.now, &charge, ChargeEnd::Complete);
    }

    fn check(&mut self, flow: &Flow, limits: WaitLimits) -> Result<(), Overload> {
        let model = &self.model;
        let request = ArrivedRequest { flow, model, answers: 1, output_tokens_max: 1, limits };
        self.router.handle_request(self.now, &request)
    }
}

#[test]
fn turn_passes_to_the_next_flow_and_returns() {
    let (mut scene, a, b) = (Scene::new(8), Flow::new(FlowName::Shared), tenant("b"));
    let limits = scene.within(LONG);
    let mut first = scene.waits(&a, limits).unwrap();
    assert_eq!(scene.woken(), [first.id]);
    scene.waits_again(&mut first, &a, limits).unwrap();
    let second = scene.waits(&b, limits).unwrap();
    assert_eq!(scene.woken(), [second.id]);
    assert_eq!(scene.router.has_turn(&scene.model, first.id), Some(false), "its turn has passed");
    scene.router.retry_passed(scene.now, &scene.model);
    assert_eq!(scene.woken(), [first.id]);
    assert_eq!(scene.router.has_turn(&scene.model, first.id), Some(true));
    let (_, _, is_queued) = scene.router.handle_arrival(
        scene.now,
        &scene.model,
        &a.name,
        SessionIdentity { name: "", cache_salt: "", blocks: &[] },
    );
    assert!(is_queued, "a new answer comes behind them");
    scene.leaves(first, &a);
    scene.leaves(second, &b);
    scene.router.check_idle();
}

#[test]
fn answer_that_cannot_start_in_time_is_refused_before_it_queues() {
    let (mut scene, flow) = (Scene::new(8), tenant("a"));
    // Answers took a second for 102 tokens, one runs, and answers wait since a second.
    scene.ran(&flow, Duration::from_secs(1));
    let queue = &mut scene.router.model(&scene.model).queue;
    queue.start(scene.now, &flow, PROMPT, 1);
    let long = scene.within(LONG);
    scene.waits(&flow, long).unwrap();
    scene.now += Duration::from_secs(1);
    for _ in 0..4 {
        scene.waits(&flow, long).unwrap();
    }
    let soon = scene.within(Duration::from_secs(2));
    let refused = scene.waits(&flow, soon).unwrap_err();
    assert!(matches!(refused.full, LoadBound::Late(_)), "{refused}");
    assert!((3..=4).contains(&refused.retry_after_s), "{refused}");
    assert!(!refused.full.is_of_caller());
    let admitted = scene.router.in_flight();
    assert!((3..=4).contains(&scene.check(&flow, soon).unwrap_err().retry_after_s));
    assert_eq!(scene.router.in_flight(), admitted, "a refused request is not in flight");
    scene.check(&flow, long).unwrap();
    scene.check(&tenant("b"), soon).unwrap();
    // An answer takes a second, so that it must start before its deadline.
    let limits = WaitLimits { wait_max: LONG, deadline: scene.now + Duration::from_millis(5500) };
    let refused = scene.waits(&flow, limits).unwrap_err();
    assert_eq!(refused.retry_after_s, 1, "{refused}");
    // Another flow makes it the caller's own limit.
    scene.waits(&tenant("b"), long).unwrap();
    let refused = scene.waits(&flow, soon).unwrap_err();
    assert!(matches!(refused.full, LoadBound::Late(_)) && refused.full.is_of_caller(), "{refused}");
}

#[test]
fn refusal_for_a_short_deadline_tells_service_time_and_deadline() {
    let (mut scene, flow) = (Scene::new(8), tenant("a"));
    scene.ran(&flow, Duration::from_secs(5));
    let deadline = scene.now + Duration::from_secs(2);
    let refused = scene.waits(&flow, WaitLimits { wait_max: LONG, deadline }).unwrap_err();
    let LoadBound::Late(late) = refused.full else { panic!("{refused}") };
    let StartLimit::Deadline { time_left, service_time } = late.limit else {
        panic!("{refused}");
    };
    assert_eq!(time_left, Duration::from_secs(2), "{refused}");
    assert!(service_time >= Duration::from_secs(5), "{refused}");
    let said = format!(
        "the request cannot complete before its deadline in 2000 ms: after a wait of 0 ms for a node it would take \
         up to {} ms; expected a later deadline, a shorter prompt or fewer output tokens; retry after {} s",
        service_time.as_millis(),
        refused.retry_after_s
    );
    assert_eq!(refused.to_string(), said);
    assert!(refused.retry_after_s >= 3 && !refused.full.is_of_caller(), "{refused}");
    scene.router.check_idle();
}

#[test]
fn places_are_bounded_except_for_answers_that_have_begun() {
    let (mut scene, flow) = (Scene::new(2), Flow::new(FlowName::Shared));
    let limits = scene.within(LONG);
    let both = [(); 2].map(|()| scene.waits(&flow, limits).unwrap());
    let refused = scene.waits(&flow, limits).unwrap_err();
    assert_eq!((refused.full, refused.retry_after_s), (LoadBound::Waiting { max: 2 }, 1));
    let begun = scene.router.take_place(&scene.model, AnswerId(9), &flow, true).unwrap();
    for place in both.into_iter().chain([begun]) {
        scene.leaves(place, &flow);
    }
    scene.router.check_idle();
    scene.waits(&flow, limits).unwrap();
}

#[test]
fn closed_router_refuses_every_request() {
    let (mut scene, flow) = (Scene::new(8), Flow::new(FlowName::Shared));
    let limits = scene.within(LONG);
    for _ in 0..8 {
        scene.check(&flow, limits).unwrap();
    }
    assert_eq!(scene.check(&flow, limits).unwrap_err().full, LoadBound::InFlight { max: 8 });
    scene.router.handle_request_ended(&flow.name, 8);
    scene.check(&flow, limits).unwrap();
    scene.router.close();
    assert_eq!(scene.check(&flow, limits).unwrap_err().full, LoadBound::Stopping);
}
