//! Predicted against actual waits in virtual time. Nodes share their rate among their running
//! requests.

use super::{
    predict::{WaitLimits, cost},
    *,
};

/// Step of the virtual clock.
const TICK: Duration = Duration::from_millis(10);
const PROMPT_TOKENS: (u32, u32) = (50, 350);
const OUTPUT_TOKENS: (u32, u32) = (20, 180);
const OUTPUT_TOKENS_MAX: u32 = 256;
/// Requests that a node serves at once.
const SLOTS: usize = 16;
/// Cost that a node serves per second.
const NODE_RATE: f64 = 1600.0;
/// Requests that a node serves per second: their mean cost is 400.
const NODE_REQUESTS: f64 = 4.0;

#[derive(Clone, Copy)]
struct Request {
    prompt_tokens: u32,
    output_tokens: u32,
    arrival: Instant,
    predicted: Option<Duration>,
}

struct Running {
    id: usize,
    charge: Charge,
    left: f64,
}

/// Wait of a request that started.
#[derive(Clone, Copy, Debug)]
struct Wait {
    /// Arrival, in seconds since the start.
    at: f64,
    predicted: f64,
    actual: f64,
}

struct Cluster {
    queue: FairQueue<usize>,
    flow: Flow,
    wait_max: Duration,
    start: Instant,
    now: Instant,
    next_arrival: Instant,
    random: u64,
    /// Running requests of each node.
    nodes: Vec<Vec<Running>>,
    requests: Vec<Request>,
    waits: Vec<Wait>,
    refused: usize,
    late: usize,
    complete: usize,
}

impl Cluster {
    fn new(nodes: usize, wait_max: Duration) -> Self {
        let now = Instant::now();
        Self {
            queue: FairQueue::default(),
            flow: Flow::new(FlowName::Shared),
            wait_max,
            start: now,
            now,
            next_arrival: now,
            random: 88_172_645_463_325_252,
            nodes: (0..nodes).map(|_| Vec::new()).collect(),
            requests: Vec::new(),
            waits: Vec::new(),
            refused: 0,
            late: 0,
            complete: 0,
        }
    }

    /// Returns the next number of a xorshift generator, from 0 to 1.
    fn random(&mut self) -> f64 {
        for shift in [13, -7, 17_i32] {
            let shifted = match shift > 0 {
                true => self.random << shift,
                false => self.random >> -shift,
            };
            self.random ^= shifted;
        }
        (self.random >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn within(&mut self, (least, most): (u32, u32)) -> u32 {
        least + (self.random() * f64::from(most - least + 1)) as u32
    }

    /// Offers this load, in multiples of the rate of one node, with random arrivals.
    fn run(&mut self, seconds: u64, nodes_of_load: f64) {
        let until = self.now + Duration::from_secs(seconds);
        while self.now < until {
            self.now += TICK;
            self.serve();
            while self.next_arrival <= self.now {
                self.arrive();
                let pause = -(1.0 - self.random()).ln() / (nodes_of_load * NODE_REQUESTS);
                self.next_arrival += Duration::from_secs_f64(pause);
            }
            self.queue.retry_passed();
            self.give_turns();
        }
    }

    fn serve(&mut self) {
        let mut ended = Vec::new();
        for node in &mut self.nodes {
            let served = NODE_RATE * TICK.as_secs_f64() / node.len().max(8) as f64;
            node.iter_mut().for_each(|running| running.left -= served);
            ended.extend(node.extract_if(.., |running| running.left <= 0.0));
        }
        for mut running in ended {
            running.charge.emitted(self.now, self.requests[running.id].output_tokens);
            self.queue.ended(self.now, &running.charge, ChargeEnd::Complete);
            self.complete += 1;
        }
    }

    fn wait_request(&self, id: usize, has_begun: bool) -> WaitRequest {
        let deadline = self.now + Duration::from_secs(3600);
        WaitRequest {
            flow: self.flow.clone(),
            prompt_tokens: self.requests[id].prompt_tokens,
            output_tokens_max: OUTPUT_TOKENS_MAX,
            limits: WaitLimits { wait_max: self.wait_max, deadline },
            has_begun,
            session_since: None,
            priority: 0,
        }
    }

    fn arrive(&mut self) {
        let id = self.requests.len();
        let request = Request {
            prompt_tokens: self.within(PROMPT_TOKENS),
            output_tokens: self.within(OUTPUT_TOKENS),
            arrival: self.now,
            predicted: self.queue.wait(&self.flow),
        };
        self.requests.push(request);
        let joined = self.queue.join(self.now, id, &self.wait_request(id, false));
        self.refused += usize::from(joined.is_err());
    }

    fn give_turns(&mut self) {
        while self.queue.take_late(self.now).is_some() {
            self.late += 1;
        }
        while let Some(id) = self.queue.next_turn(self.now) {
            let free = self.nodes.iter_mut().filter(|node| node.len() < SLOTS);
            let Some(node) = free.min_by_key(|node| node.len()) else {
                self.queue.passed(id, PassReason::NoNode);
                continue;
            };
            let Request { prompt_tokens, output_tokens, arrival, predicted } = self.requests[id];
            let prompt = StartedPrompt { tokens: prompt_tokens, uncached_tokens: prompt_tokens };
            let charge = self.queue.start(self.now, &self.flow, prompt, OUTPUT_TOKENS_MAX);
            self.queue.leave(id);
            node.push(Running { id, charge, left: cost(prompt_tokens, output_tokens.into()) });
            self.waits.extend(predicted.map(|predicted| Wait {
                at: (arrival - self.start).as_secs_f64(),
                predicted: predicted.as_secs_f64(),
                actual: (self.now - arrival).as_secs_f64(),
            }));
        }
    }

    fn add_nodes(&mut self, count: usize) {
        self.nodes.extend((0..count).map(|_| Vec::new()));
    }

    /// Ends a node: its requests queue again before all others.
    fn kill_node(&mut self) {
        for running in self.nodes.pop().expect("there is a node") {
            self.queue.ended(self.now, &running.charge, ChargeEnd::Cut);
            self.requests[running.id].predicted = None;
            let mut request = self.wait_request(running.id, true);
            request.limits.wait_max = Duration::ZERO;
            self.queue.join(self.now, running.id, &request).expect("started answers are accepted");
        }
    }

    /// Returns the mean error, the mean absolute error and the mean of the actual wait, in seconds,
    /// of the requests that arrived in these seconds.
    fn errors(&self, name: &str, from: f64, to: f64) -> (f64, f64, f64) {
        let waits: Vec<_> = self.waits.iter().filter(|it| (from..to).contains(&it.at)).collect();
        let mean = |value: &dyn Fn(&Wait) -> f64| {
            waits.iter().map(|wait| value(wait)).sum::<f64>() / waits.len() as f64
        };
        let bias = mean(&|wait| wait.predicted - wait.actual);
        let error = mean(&|wait| (wait.predicted - wait.actual).abs());
        let actual = mean(&|wait| wait.actual);
        eprintln!(
            "{name}, {from} to {to} s: {} requests started after {actual:.2} s, predicted {:+.2} s, mean absolute error \
             {error:.2} s; {} complete, {} refused, {} late",
            waits.len(),
            bias,
            self.complete,
            self.refused,
            self.late
        );
        (bias, error, actual)
    }
}

#[test]
fn predicted_wait_is_accurate_at_three_times_the_capacity() {
    let mut cluster = Cluster::new(2, Duration::from_secs(30));
    cluster.run(120, 6.0);
    for (from, to) in [(2.0, 20.0), (20.0, 120.0)] {
        let (bias, error, actual) = cluster.errors("steady", from, to);
        assert!(bias.abs() < 0.1 * actual && error < 0.12 * actual, "{bias} {error} {actual}");
    }
    // All slots are busy, and few requests are admitted in vain.
    assert!(cluster.complete as f64 > 0.9 * 120.0 * 2.0 * NODE_REQUESTS, "{}", cluster.complete);
    assert!(cluster.late * 30 < cluster.refused, "{} {}", cluster.late, cluster.refused);
}

#[test]
fn predicted_wait_follows_new_nodes_at_once_and_refuses_nothing_that_fits() {
    let mut cluster = Cluster::new(1, Duration::from_secs(30));
    cluster.run(25, 2.0);
    cluster.add_nodes(2);
    cluster.run(60, 2.8);
    let (_, error, _) = cluster.errors("scaled", 25.1, 35.0);
    assert!(error < 1.0, "{error}");
    let (_, error, _) = cluster.errors("scaled", 35.0, 85.0);
    assert!(error < 1.0, "{error}");
    assert_eq!((cluster.refused, cluster.late), (0, 0));
}

#[test]
fn predicted_wait_follows_the_loss_of_a_node() {
    let mut cluster = Cluster::new(3, Duration::from_secs(300));
    cluster.run(60, 3.3);
    cluster.kill_node();
    cluster.run(90, 2.5);
    let (bias, error, actual) = cluster.errors("one of three nodes lost", 60.0, 100.0);
    assert!(bias.abs() < 0.2 * actual && error < 0.2 * actual, "{bias} {error} {actual}");
    assert_eq!((cluster.refused, cluster.late), (0, 0));
}
