//! The whole cluster on one clock: a queue of what will happen, and whoever it happens to.
//!
//! Here is the time, and who hears of what. [`calls`](crate::calls) lie between the router and the
//! nodes, [`network`](crate::network) between the nodes; [`blows`](crate::blows) are what goes wrong,
//! [`checks`](crate::checks) what must hold nevertheless.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use kv_transfer::api::{Epoch, TransferId};

use crate::{
    attempt::side_of,
    blows::Trouble,
    checks::Silence,
    journey::Said,
    process::{Call, Life, Out, Process, Step},
    random::{Random, mix},
    router::{CallId, Router},
    scenario::{Scenario, Weather},
    wires::Cargo,
};

/// The last request ends by its deadline; this much later nothing may be left of any.
const QUIET: Duration = Duration::from_secs(10);
/// More happenings than this at one instant are an endless loop.
const AT_ONCE_MAX: u32 = 20_000;

/// Something that will happen.
#[derive(Debug)]
pub enum Happening {
    /// At one process.
    Step {
        process: usize,
        step: Step,
    },
    /// A call reaches a place, whoever stands there now.
    Call {
        place: usize,
        call: Box<Call>,
    },
    Observe {
        place: usize,
        connection: u64,
        stream: cluster::StreamId,
    },
    /// The router hears.
    Said {
        call: CallId,
        said: Said,
    },
    Observed {
        place: usize,
        connection: u64,
        stream: cluster::StreamId,
        event: Box<proto::v1::ObserveEvent>,
    },
    ConnectionEnds {
        place: usize,
        connection: u64,
    },
    /// No answer to the router's keep-alive, if it is still so.
    KeepAlive {
        place: usize,
        connection: u64,
        process: usize,
    },
    Arrive {
        request: usize,
    },
    Leave {
        request: usize,
    },
    // Data connections.
    Connect {
        from: usize,
        to: usize,
        closings: u64,
        give_up: Instant,
    },
    Depart {
        process: usize,
        transfer: TransferId,
        chunk: u32,
    },
    Land {
        from: usize,
        to: usize,
        link: u64,
        cargo: Cargo,
    },
    Landed {
        from: usize,
        to: usize,
        link: u64,
        cargo: Cargo,
    },
    Release {
        process: usize,
        is_receive: bool,
        transfer: TransferId,
    },
    Trouble(Trouble),
}

/// Where nodes run, one after the other.
pub struct Place {
    /// The one that stands there, or stood there last.
    pub process: usize,
    /// When the last of the router's messages arrives there: they keep their order.
    pub reached_at: Instant,
}

pub struct World {
    pub scenario: Scenario,
    pub weather: Weather,
    pub start: Instant,
    pub now: Instant,
    pub random: Random,
    pub processes: Vec<Process>,
    pub by_epoch: BTreeMap<Epoch, usize>,
    pub places: Vec<Place>,
    pub router: Router,
    /// Number of the data connection from the first process to the second, while there is one.
    pub links: BTreeMap<(usize, usize), u64>,
    /// Pairs of processes between which nothing passes, and since when; until when, for the past.
    pub cuts: BTreeSet<(usize, usize)>,
    pub silences: Vec<Silence>,
    /// Transfers whose receiver has everything.
    pub arrived: BTreeSet<TransferId>,
    pub counter: u64,
    queue: BTreeMap<(Instant, u64), Happening>,
    /// When each process wakes by itself.
    wakes: Vec<Option<Instant>>,
    /// When the last message of one order arrives: words of a call, of a stream, between threads.
    orders: BTreeMap<Order, Instant>,
    /// A number that equal runs share.
    pub digest: u64,
    is_traced: bool,
}

/// Messages of one kind keep their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Order {
    Call(CallId),
    Stream(cluster::StreamId),
    ToDriver(usize),
    ToEngine(usize),
}

impl World {
    pub fn new(seed: u64, scenario: Scenario, is_traced: bool) -> Self {
        let start = Instant::now();
        let mut random = Random::new(seed ^ 0x5eed);
        let roles: Vec<_> = scenario.nodes.iter().map(|node| node.role).collect();
        let mut world = Self {
            weather: scenario.weather,
            start,
            now: start,
            processes: Vec::new(),
            by_epoch: BTreeMap::new(),
            places: Vec::new(),
            router: Router::new(start, &roles, random.fork()),
            random,
            links: BTreeMap::new(),
            cuts: BTreeSet::new(),
            silences: Vec::new(),
            arrived: BTreeSet::new(),
            counter: 0,
            queue: BTreeMap::new(),
            wakes: Vec::new(),
            orders: BTreeMap::new(),
            digest: 0,
            is_traced,
            scenario,
        };
        for place in 0..world.scenario.nodes.len() {
            world.places.push(Place { process: usize::MAX, reached_at: start });
            world.start_process(place);
        }
        // Requests come once the router has seen the nodes.
        let open = start + Duration::from_secs(1);
        for request in 0..world.scenario.requests.len() {
            let plan = &world.scenario.requests[request];
            let (at, leaves_after) = (open + plan.at, plan.leaves_after);
            world.at(at, Happening::Arrive { request });
            if let Some(after) = leaves_after {
                world.at(at + after, Happening::Leave { request });
            }
        }
        for (at, blow) in world.scenario.blows.clone() {
            world.at(open + at, Happening::Trouble(Trouble::Blow(blow)));
        }
        world.follow_router();
        world
    }

    /// Until every request has ended and nothing more can come of any.
    pub fn run(&mut self) {
        let last = self.scenario.requests.iter().map(|plan| plan.at + plan.timeout).max();
        let end = self.start + Duration::from_secs(1) + last.unwrap_or_default();
        let blows = self.start + Duration::from_secs(20);
        while !self.router.all_ended() || self.now < blows {
            let step = self.now + Duration::from_secs(1);
            self.run_until(step);
            assert!(self.now <= end.max(blows) + Duration::from_secs(2), "a request never ends");
        }
        self.run_until(self.now + QUIET);
    }

    fn run_until(&mut self, end: Instant) {
        let (mut at_once, mut last) = (0, self.now);
        loop {
            let wake = self.wakes.iter().enumerate().filter_map(|(id, at)| Some(((*at)?, id)));
            let wake = wake.min();
            let deadline = self.router.next_deadline();
            let queued = self.queue.first_key_value().map(|(key, _)| key.0);
            let next = [wake.map(|(at, _)| at), deadline, queued].into_iter().flatten().min();
            let Some(at) = next.filter(|at| *at <= end) else { break };
            self.now = self.now.max(at);
            at_once = if self.now == last { at_once + 1 } else { 0 };
            last = self.now;
            assert!(at_once < AT_ONCE_MAX, "time stands still");
            if queued == Some(at) {
                let (_, happening) = self.queue.pop_first().expect("there is a first");
                self.happen(happening);
            } else if let Some((_, process)) = wake.filter(|(wake, _)| *wake == at) {
                self.step(process, Step::Wake);
            } else {
                self.router.on_deadline(self.now);
            }
            self.follow_router();
        }
        self.now = end;
    }

    pub fn at(&mut self, at: Instant, happening: Happening) {
        self.counter += 1;
        self.queue.insert((at.max(self.now), self.counter), happening);
    }

    pub fn after(&mut self, delay: Duration, happening: Happening) {
        self.at(self.now + delay, happening);
    }

    /// After a delay of the network.
    pub fn soon(&mut self, happening: Happening) {
        let delay = self.random.up_to(self.weather.delay_max);
        self.after(delay, happening);
    }

    /// After what was sent in the same order.
    fn in_order(&mut self, order: Order, delay_max: Duration, happening: Happening) {
        let earliest = self.now + self.random.up_to(delay_max);
        let last = self.orders.entry(order).or_insert(earliest);
        *last = (*last).max(earliest);
        let at = *last;
        self.at(at, happening);
    }

    fn happen(&mut self, happening: Happening) {
        self.note(&happening);
        let now = self.now;
        match happening {
            Happening::Step { process, step } => self.step(process, step),
            Happening::Call { place, call } => self.call_arrives(place, call),
            Happening::Observe { place, connection, stream } => {
                self.observe_arrives(place, connection, stream);
            }
            Happening::Said { call, said } => self.router.said(now, call, said),
            Happening::Observed { place, connection, stream, event } => {
                if connection == self.router.nodes.connection(place) {
                    self.router.observed(now, stream, *event);
                }
            }
            Happening::ConnectionEnds { place, connection } => {
                self.connection_ends(place, connection);
            }
            Happening::KeepAlive { place, connection, process } => {
                if self.processes[process].life != Life::Running {
                    self.connection_ends(place, connection);
                }
            }
            Happening::Arrive { request } => {
                let plan = self.scenario.requests[request].clone();
                self.router.arrive(now, request as u64, plan);
            }
            Happening::Leave { request } => self.router.leave(now, request as u64),
            Happening::Connect { from, to, closings, give_up } => {
                self.connect(from, to, closings, give_up);
            }
            Happening::Depart { process, transfer, chunk } => {
                self.depart(process, transfer, chunk);
            }
            Happening::Land { from, to, link, cargo } => self.land(from, to, link, cargo),
            Happening::Landed { from, to, link, cargo } => self.landed(from, to, link, cargo),
            Happening::Release { process, is_receive, transfer } => {
                if self.processes[process].life != Life::Dead {
                    let event = self.processes[process].driver.wires.released(is_receive, transfer);
                    self.step(process, Step::Data(event));
                }
            }
            Happening::Trouble(trouble) => self.trouble(trouble),
        }
    }

    /// Makes it happen at the process, now or when it thaws.
    pub fn step(&mut self, process: usize, step: Step) {
        let node = &mut self.processes[process];
        match node.life {
            Life::Dead => return,
            Life::Frozen => return node.backlog.push(step),
            Life::Running => {}
        }
        let mut outs = Vec::new();
        node.happen(self.now, step, &mut outs);
        self.wakes[process] = node.next_wake();
        self.follow(process, outs);
    }

    pub fn set_wake(&mut self, process: usize, wake: Option<Instant>) {
        if self.wakes.len() <= process {
            self.wakes.resize(process + 1, None);
        }
        self.wakes[process] = wake;
    }

    pub fn follow(&mut self, process: usize, outs: Vec<Out>) {
        let hop_max = self.weather.hop_max;
        for out in outs {
            match out {
                Out::Say(transfer, said) => {
                    let side = side_of(self.processes[process].record.role);
                    let call = CallId { transfer, side };
                    let happening = Happening::Said { call, said };
                    self.in_order(Order::Call(call), self.weather.delay_max, happening);
                }
                Out::Observed { connection, stream, event } => {
                    let (place, event) = (self.processes[process].place, Box::new(event));
                    let happening = Happening::Observed { place, connection, stream, event };
                    self.in_order(Order::Stream(stream), self.weather.delay_max, happening);
                }
                Out::ToDriver(command) => {
                    let step = Step::Command(command);
                    let happening = Happening::Step { process, step };
                    self.in_order(Order::ToDriver(process), hop_max, happening);
                }
                Out::ToEngine(event) => {
                    self.check_event(&event);
                    let step = Step::Transfer(event);
                    let happening = Happening::Step { process, step };
                    self.in_order(Order::ToEngine(process), hop_max, happening);
                }
                Out::Notice { to, notice } => self.send_notice(process, to, notice),
                Out::OpenData { to } => self.open_data(process, to),
                Out::CloseData { peer } => self.close_data(process, peer),
                Out::Depart { transfer, chunk } => {
                    self.soon(Happening::Depart { process, transfer, chunk });
                }
                Out::Release { is_receive, transfer } => {
                    let delay = self.random.up_to(self.weather.release_max);
                    self.after(delay, Happening::Release { process, is_receive, transfer });
                }
                Out::Returned { transfer, tenure } => {
                    self.check_tenure(process, transfer, &tenure);
                }
                Out::Drained => self.drained(process),
            }
        }
    }

    fn note(&mut self, happening: &Happening) {
        let at = self.now - self.start;
        let kind = match happening {
            Happening::Step { process, .. } => 16 + *process as u64,
            Happening::Said { .. } => 1,
            Happening::Observed { .. } => 2,
            Happening::Land { .. } => 3,
            _ => 4,
        };
        self.digest = mix(self.digest.wrapping_mul(31) ^ kind ^ (at.as_nanos() as u64) << 8);
        if self.is_traced {
            eprintln!("{:>11.3} ms {happening:?}", at.as_secs_f64() * 1e3);
        }
    }
}
