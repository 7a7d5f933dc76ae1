//! One run: the virtual clock, the pending events, and the processes that handle them.
//!
//! Messages between the router and the nodes are in
//! [`router_connections`](crate::router_connections), those between nodes in
//! [`data_connections`](crate::data_connections). [`faults`](crate::faults) injects faults, and
//! [`checks`](crate::checks) asserts the invariants of the cluster.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use kv_transfer::api::{Epoch, TransferId};
use simulation_base::{Clock, ConnectionId, Due, Network, Random, mix};

use crate::{
    attempt::side_of,
    checks::Outage,
    faults::FaultStep,
    journey::Said,
    process::{Call, Output, Process, ProcessState, Step},
    router::{CallId, Router},
    scenario::Scenario,
    transport::ChunkData,
};

/// Requests arrive after this time: the router has connected to the nodes by then.
const WARM_UP: Duration = Duration::from_secs(1);
/// Faults and their repair are over by then.
const FAULTS_END: Duration = Duration::from_secs(20);
/// Nothing may be left of any request this long after the last one ended.
const SETTLE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub enum SimEvent {
    Step {
        process: usize,
        step: Step,
    },
    /// A call reaches a host and the process that runs there by then.
    Call {
        host: usize,
        call: Box<Call>,
    },
    Observe {
        host: usize,
        connection: u64,
        stream: cluster::StreamId,
    },
    /// The router receives a message of a call.
    Said {
        call: CallId,
        said: Said,
    },
    Observed {
        host: usize,
        connection: u64,
        stream: cluster::StreamId,
        event: Box<proto::v1::ObserveEvent>,
    },
    ConnectionEnds {
        host: usize,
        connection: u64,
    },
    /// The router's keep-alive times out if the process still does not answer.
    KeepAlive {
        host: usize,
        connection: u64,
        process: usize,
    },
    RequestArrives {
        request: usize,
    },
    ClientLeaves {
        request: usize,
    },
    // Data connections.
    Connect {
        from: usize,
        to: usize,
        closings: u64,
        give_up: Instant,
    },
    SendChunk {
        process: usize,
        transfer: TransferId,
        chunk: u32,
    },
    ChunkBegins {
        from: usize,
        to: usize,
        connection: ConnectionId,
        data: ChunkData,
    },
    ChunkEnds {
        from: usize,
        to: usize,
        connection: ConnectionId,
        data: ChunkData,
    },
    Release {
        process: usize,
        is_receive: bool,
        transfer: TransferId,
    },
    Fault(FaultStep),
}

/// A machine on which node processes run, one after another.
pub struct Host {
    /// The running process, or the last one.
    pub process: usize,
    /// Arrival of the router's last message: its messages keep their order.
    pub last_arrival: Instant,
}

/// A cluster in virtual time.
pub struct Simulation {
    pub scenario: Scenario,
    pub clock: Clock<SimEvent>,
    pub network: Network<usize>,
    pub random: Random,
    pub processes: Vec<Process>,
    pub by_epoch: BTreeMap<Epoch, usize>,
    pub hosts: Vec<Host>,
    pub router: Router,
    pub outages: Vec<Outage>,
    /// Transfers whose receiver has all blocks.
    pub arrived: BTreeSet<TransferId>,
    /// Next deadline of each process.
    wakes: Vec<Option<Instant>>,
    /// Arrival of the last message of each ordered stream.
    streams: BTreeMap<Stream, Instant>,
    /// Hash of the event sequence.
    pub digest: u64,
    is_traced: bool,
}

/// Messages of one stream keep their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stream {
    Call(CallId),
    Observe(cluster::StreamId),
    ToDriver(usize),
    ToEngine(usize),
}

impl Simulation {
    pub fn new(seed: u64, scenario: Scenario, is_traced: bool) -> Self {
        let mut random = Random::new(seed ^ 0x5eed);
        let roles: Vec<_> = scenario.nodes.iter().map(|node| node.role).collect();
        let clock = Clock::default();
        let start = clock.start();
        let mut simulation = Self {
            clock,
            network: Network::new(scenario.network, random.fork()),
            processes: Vec::new(),
            by_epoch: BTreeMap::new(),
            hosts: Vec::new(),
            router: Router::new(start, &roles, random.fork()),
            random,
            outages: Vec::new(),
            arrived: BTreeSet::new(),
            wakes: Vec::new(),
            streams: BTreeMap::new(),
            digest: 0,
            is_traced,
            scenario,
        };
        for host in 0..simulation.scenario.nodes.len() {
            simulation.hosts.push(Host { process: usize::MAX, last_arrival: start });
            simulation.start_process(host);
        }
        simulation.schedule_scenario();
        simulation.follow_router();
        simulation
    }

    fn schedule_scenario(&mut self) {
        let open = self.clock.start() + WARM_UP;
        for (request, plan) in self.scenario.requests.iter().enumerate() {
            self.clock.at(open + plan.at, SimEvent::RequestArrives { request });
            if let Some(after) = plan.leaves_after {
                self.clock.at(open + plan.at + after, SimEvent::ClientLeaves { request });
            }
        }
        for (at, fault) in &self.scenario.faults {
            self.clock.at(open + *at, SimEvent::Fault(FaultStep::Begin(*fault)));
        }
    }

    /// Runs until every request has ended and all its resources had time to be released.
    pub fn run(&mut self) {
        let start = self.clock.start();
        let last = self.scenario.requests.iter().map(|plan| plan.at + plan.timeout).max();
        let end = start + WARM_UP + last.unwrap_or_default();
        let faults_end = start + FAULTS_END;
        while !self.router.all_ended() || self.clock.now() < faults_end {
            let now = self.clock.now();
            assert!(now <= end.max(faults_end) + Duration::from_secs(2), "a request never ends");
            self.run_until(now + Duration::from_secs(1));
        }
        self.run_until(self.clock.now() + SETTLE);
    }

    fn run_until(&mut self, end: Instant) {
        loop {
            let wake = self.wakes.iter().enumerate().filter_map(|(id, at)| Some(((*at)?, id)));
            let wake = wake.min();
            let deadline = self.router.next_deadline();
            let next = [wake.map(|(at, _)| at), deadline].into_iter().flatten().min();
            match self.clock.advance(next, end) {
                Some(Due::Event(event)) => self.handle(event),
                Some(Due::Deadline) => match wake.filter(|(at, _)| Some(*at) == next) {
                    Some((_, process)) => self.step(process, Step::Wake),
                    None => self.router.on_deadline(self.clock.now()),
                },
                None => return,
            }
            self.follow_router();
        }
    }

    /// Schedules an event after a delay of the network.
    pub fn send(&mut self, event: SimEvent) {
        let delay = self.network.delay();
        self.clock.after(delay, event);
    }

    /// Schedules an event behind the earlier ones of its stream.
    fn send_in_order(&mut self, stream: Stream, delay: Duration, event: SimEvent) {
        let earliest = self.clock.now() + delay;
        let last = self.streams.entry(stream).or_insert(earliest);
        *last = (*last).max(earliest);
        self.clock.at(*last, event);
    }

    fn handle(&mut self, event: SimEvent) {
        self.trace(&event);
        let now = self.clock.now();
        match event {
            SimEvent::Step { process, step } => self.step(process, step),
            SimEvent::Call { host, call } => self.call_arrives(host, call),
            SimEvent::Observe { host, connection, stream } => {
                self.observe_arrives(host, connection, stream);
            }
            SimEvent::Said { call, said } => self.router.said(now, call, said),
            SimEvent::Observed { host, connection, stream, event } => {
                if connection == self.router.nodes.connection(host) {
                    self.router.observed(now, stream, *event);
                }
            }
            SimEvent::ConnectionEnds { host, connection } => {
                self.connection_ends(host, connection);
            }
            SimEvent::KeepAlive { host, connection, process } => {
                if self.processes[process].state != ProcessState::Running {
                    self.connection_ends(host, connection);
                }
            }
            SimEvent::RequestArrives { request } => {
                let plan = self.scenario.requests[request].clone();
                self.router.arrive(now, request as u64, plan);
            }
            SimEvent::ClientLeaves { request } => self.router.leave(now, request as u64),
            SimEvent::Connect { from, to, closings, give_up } => {
                self.connect(from, to, closings, give_up);
            }
            SimEvent::SendChunk { process, transfer, chunk } => {
                self.send_chunk(process, transfer, chunk);
            }
            SimEvent::ChunkBegins { from, to, connection, data } => {
                self.chunk_begins(from, to, connection, data);
            }
            SimEvent::ChunkEnds { from, to, connection, data } => {
                self.chunk_ends(from, to, connection, data);
            }
            SimEvent::Release { process, is_receive, transfer } => {
                if self.processes[process].state != ProcessState::Dead {
                    let transport = &mut self.processes[process].driver.transport;
                    let event = transport.released(is_receive, transfer);
                    self.step(process, Step::Data(event));
                }
            }
            SimEvent::Fault(step) => self.fault_step(step),
        }
    }

    /// Hands the input to the process: at once, or when the paused process resumes.
    pub fn step(&mut self, process: usize, step: Step) {
        let now = self.clock.now();
        let node = &mut self.processes[process];
        match node.state {
            ProcessState::Dead => return,
            ProcessState::Paused => return node.backlog.push(step),
            ProcessState::Running => {}
        }
        let mut outputs = Vec::new();
        node.handle(now, step, &mut outputs);
        self.wakes[process] = node.next_wake();
        self.follow(process, outputs);
    }

    pub fn set_wake(&mut self, process: usize, wake: Option<Instant>) {
        if self.wakes.len() <= process {
            self.wakes.resize(process + 1, None);
        }
        self.wakes[process] = wake;
    }

    pub fn follow(&mut self, process: usize, outputs: Vec<Output>) {
        let thread_delay_max = self.scenario.thread_delay_max;
        for output in outputs {
            match output {
                Output::Say(transfer, said) => {
                    let side = side_of(self.processes[process].record.role);
                    let call = CallId { transfer, side };
                    let delay = self.network.delay();
                    self.send_in_order(Stream::Call(call), delay, SimEvent::Said { call, said });
                }
                Output::Observed { connection, stream, event } => {
                    let (host, event) = (self.processes[process].host, Box::new(event));
                    let event = SimEvent::Observed { host, connection, stream, event };
                    let delay = self.network.delay();
                    self.send_in_order(Stream::Observe(stream), delay, event);
                }
                Output::ToDriver(command) => {
                    let event = SimEvent::Step { process, step: Step::Command(command) };
                    let delay = self.random.up_to(thread_delay_max);
                    self.send_in_order(Stream::ToDriver(process), delay, event);
                }
                Output::ToEngine(event) => {
                    self.check_event(&event);
                    let event = SimEvent::Step { process, step: Step::Transfer(event) };
                    let delay = self.random.up_to(thread_delay_max);
                    self.send_in_order(Stream::ToEngine(process), delay, event);
                }
                Output::ControlMessage { to, message } => self.send_control(process, to, message),
                Output::OpenData { to } => self.open_data(process, to),
                Output::CloseData { peer } => self.close_data(process, peer),
                Output::SendChunk { transfer, chunk } => {
                    self.send(SimEvent::SendChunk { process, transfer, chunk });
                }
                Output::Release { is_receive, transfer } => {
                    let delay = self.random.up_to(self.scenario.release_delay_max);
                    let event = SimEvent::Release { process, is_receive, transfer };
                    self.clock.after(delay, event);
                }
                Output::Returned { transfer, hold } => self.check_hold(process, transfer, &hold),
                Output::Drained => self.drained(process),
            }
        }
    }

    fn trace(&mut self, event: &SimEvent) {
        let at = self.clock.elapsed();
        let kind = match event {
            SimEvent::Step { process, .. } => 16 + *process as u64,
            SimEvent::Said { .. } => 1,
            SimEvent::Observed { .. } => 2,
            SimEvent::ChunkBegins { .. } => 3,
            _ => 4,
        };
        self.digest = mix(self.digest.wrapping_mul(31) ^ kind ^ (at.as_nanos() as u64) << 8);
        if self.is_traced {
            eprintln!("{:>11.3} ms {event:?}", at.as_secs_f64() * 1e3);
        }
    }
}
