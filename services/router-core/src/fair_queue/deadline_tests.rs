//! Refusals of requests that cannot complete before their deadlines, in virtual time.

use super::*;

const TICK: Duration = Duration::from_millis(100);
/// Default of `router.timeout`.
const DEADLINE: Duration = Duration::from_secs(600);
/// Tokens of long prompts.
const LONG: u32 = 8192;

/// A node that always has free slots.
struct Scene {
    queue: FairQueue<u32>,
    flow: Flow,
    now: Instant,
    running: Vec<(Instant, Charge)>,
    joined: u32,
}

impl Scene {
    fn new() -> Self {
        Self {
            queue: FairQueue::default(),
            flow: Flow::new(FlowName::Shared),
            now: Instant::now(),
            running: Vec::new(),
            joined: 0,
        }
    }

    fn limits(&self, deadline: Duration) -> WaitLimits {
        WaitLimits { wait_max: Duration::from_secs(30), deadline: self.now + deadline }
    }

    /// Adds a request to the queue.
    fn join(
        &mut self,
        prompt_tokens: u32,
        output_tokens_max: u32,
        deadline: Duration,
    ) -> Result<u32, TooLate> {
        self.joined += 1;
        let request = WaitRequest {
            flow: self.flow.clone(),
            prompt_tokens,
            output_tokens_max,
            limits: self.limits(deadline),
            has_begun: false,
            session_since: None,
            priority: 0,
        };
        self.queue.join(self.now, self.joined, &request).map(|_| self.joined)
    }

    /// Starts a request, which ends after this time. Each token takes the same share of this time.
    fn start(&mut self, prompt: StartedPrompt, output_tokens: u32, time: Duration) {
        let mut charge = self.queue.start(self.now, &self.flow, prompt, output_tokens);
        charge.emitted(self.now + time / output_tokens, output_tokens);
        self.running.push((self.now + time, charge));
    }

    /// Starts a request without a cached prefix, which ends after this time.
    fn start_uncached(&mut self, prompt_tokens: u32, output_tokens: u32, time: Duration) {
        let prompt = StartedPrompt { tokens: prompt_tokens, uncached_tokens: prompt_tokens };
        self.start(prompt, output_tokens, time);
    }

    /// Advances the clock by this time, and ends the requests whose time is over.
    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.running.sort_by_key(|(end, _)| *end);
        let ended = self.running.partition_point(|(end, _)| *end <= self.now);
        for (end, charge) in self.running.drain(..ended) {
            self.queue.ended(end, &charge, ChargeEnd::Complete);
        }
    }

    /// Adds a prompt with one output token to the empty queue, which gives it a turn at once.
    fn assert_is_not_late(&mut self, prompt_tokens: u32, deadline: Duration) {
        let id = self.join(prompt_tokens, 1, deadline).unwrap();
        let soon = self.now + Duration::from_millis(1);
        assert_eq!(self.queue.take_late(soon), None, "request {id} has {deadline:?}");
        self.queue.leave(id);
    }

    /// Runs a prompt with one output token.
    fn prompt(&mut self, uncached_tokens: u32, time: Duration) {
        self.assert_is_not_late(LONG, DEADLINE);
        self.start(StartedPrompt { tokens: LONG, uncached_tokens }, 1, time);
    }

    /// Runs streams and, at the same time, prompts with one output token, most of them cached. In
    /// proportion to their costs, cached prompts take far more time than streams, and uncached
    /// prompts far less.
    fn run_mix(&mut self, rounds: u32) {
        for _ in 0..rounds {
            for _ in 0..16 {
                self.start_uncached(1024, 800, TICK * 110);
            }
            for tick in 0..110 {
                match tick % 4 {
                    0 => self.prompt(LONG, Duration::from_millis(340)),
                    _ => self.prompt(1, Duration::from_millis(140)),
                }
                self.pass(TICK);
            }
        }
    }
}

#[test]
fn prompts_with_one_output_token_are_not_late_beside_long_answers() {
    let mut scene = Scene::new();
    scene.run_mix(4);
    // A prompt that waits makes no other prompt late.
    scene.join(LONG, 1, DEADLINE).unwrap();
    scene.join(LONG, 1, DEADLINE).unwrap();
}

#[test]
fn prompts_beside_long_answers_may_have_short_deadlines() {
    let mut scene = Scene::new();
    scene.run_mix(4);
    for (prompt_tokens, seconds) in [(LONG, 2), (16 * LONG, 60)] {
        scene.assert_is_not_late(prompt_tokens, Duration::from_secs(seconds));
    }
}

#[test]
fn deadline_below_the_service_time_is_refused_in_a_mix_of_requests() {
    let mut scene = Scene::new();
    scene.run_mix(4);
    let at_once = Duration::from_millis(1);
    for _ in 0..2 {
        let StartLimit::Deadline { time_left, service_time } =
            scene.join(LONG, 1, at_once).unwrap_err().limit
        else {
            panic!("router.waiting_timeout is longer than the deadline");
        };
        assert_eq!(time_left, at_once);
        assert!(service_time > at_once, "{service_time:?}");
        // Behind another request it is refused, too.
        scene.join(LONG, 1, DEADLINE).unwrap();
    }
}

#[test]
fn request_that_cannot_complete_before_its_deadline_is_refused() {
    let mut scene = Scene::new();
    let second = Duration::from_secs(1);
    for _ in 0..100 {
        scene.start_uncached(100, 50, second);
        scene.pass(second);
    }
    scene.start_uncached(100, 50, second);
    scene.join(100, 50, DEADLINE).unwrap();
    // Each request takes a second.
    let refused = scene.join(100, 50, second * 9 / 10).unwrap_err();
    assert_eq!(refused.limit.wait_max(), Duration::ZERO);
    scene.join(100, 50, 3 * second).unwrap();
}

#[test]
fn early_check_counts_no_more_output_than_the_request_allows() {
    let mut scene = Scene::new();
    let second = Duration::from_secs(1);
    for _ in 0..100 {
        scene.start_uncached(10, 1000, 10 * second);
        scene.pass(10 * second);
    }
    scene.start_uncached(10, 1000, 10 * second);
    scene.join(10, 1000, DEADLINE).unwrap();
    let Scene { queue, flow, now, .. } = &scene;
    let check =
        |output_tokens_max| queue.check(*now, flow, output_tokens_max, scene.limits(5 * second));
    check(1).unwrap();
    assert_eq!(check(1000).unwrap_err().limit.wait_max(), Duration::ZERO, "an answer takes 10 s");
}

#[test]
fn long_prompt_of_another_flow_is_not_late_beside_cached_prompts() {
    let runs = (0..20_u64).flat_map(|seed| [2, 5, 200].map(|requests| (seed, requests)));
    for (seed, requests) in runs {
        let mut random = seed * 7919 + 1;
        let mut next = |most: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % most
        };
        let mut scene = Scene::new();
        for _ in 0..requests {
            let uncached_tokens = 1 + next(16) as u32;
            let time = Duration::from_millis(50 + next(600));
            scene.start(StartedPrompt { tokens: LONG, uncached_tokens }, 1, time);
            scene.pass(time);
        }
        scene.flow = Flow::new(FlowName::Tenant("new".into()));
        for (tokens, deadline) in [(LONG, DEADLINE / 10), (12 * LONG, DEADLINE)] {
            let id = scene.join(tokens, 1, deadline).unwrap();
            let soon = scene.now + Duration::from_millis(1);
            assert_eq!(
                scene.queue.take_late(soon),
                None,
                "seed {seed}, {requests} requests, {tokens} tokens"
            );
            scene.queue.leave(id);
        }
    }
}

/// A node stalls for a time below the deadline, so that its requests complete late. Afterwards it
/// is as fast as before.
#[test]
fn stall_of_all_running_requests_refuses_later_ones_for_a_minute_at_most() {
    let mut scene = Scene::new();
    let (usual, deadline) = (Duration::from_millis(100), Duration::from_secs(8));
    for _ in 0..100 {
        scene.start_uncached(100, 1, usual);
        scene.pass(usual);
    }
    (0..64).for_each(|_| scene.start_uncached(100, 1, deadline - Duration::from_secs(1)));
    scene.pass(deadline);
    let (mut seconds, mut started) = (0, 0);
    while started < 100 {
        seconds += 1;
        assert!(seconds <= 300, "{started} requests started");
        if let Ok(id) = scene.join(100, 1, deadline) {
            scene.queue.leave(id);
            scene.start_uncached(100, 1, usual);
            started += 1;
        }
        scene.pass(Duration::from_secs(1));
    }
    assert!((110..170).contains(&seconds), "{seconds} s");
}

#[test]
fn request_that_took_three_hundred_times_as_long_refuses_no_later_one() {
    let mut scene = Scene::new();
    let usual = Duration::from_millis(100);
    for _ in 0..100 {
        scene.start_uncached(100, 1, usual);
        scene.pass(usual);
    }
    scene.start_uncached(100, 1, 300 * usual);
    scene.pass(300 * usual);
    scene.assert_is_not_late(100, Duration::from_secs(8));
}

#[test]
fn short_prompts_beside_long_ones_may_have_short_deadlines() {
    let mut scene = Scene::new();
    for index in 0..200 {
        let (tokens, seconds) = if index % 4 == 0 { (100, 0.1) } else { (8 * LONG, 10.0) };
        let time = Duration::from_secs_f64(seconds);
        scene.start_uncached(tokens, 1, time);
        scene.pass(time);
    }
    scene.assert_is_not_late(100, Duration::from_secs(4));
}
