//! One run: the virtual clock, the pending events, and the processes that handle them.
//!
//! Messages between the router and the nodes are in
//! [`router_connections`](crate::router_connections), those between nodes in
//! [`data_connections`](crate::data_connections). [`updates`](crate::updates) updates the weights,
//! [`faults`](crate::faults) injects faults, and [`checks`](crate::checks) asserts the invariants
//! of the cluster.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use cluster::NodeAddress;
use kv_transfer::api::{Epoch, TransferId};
use simulation_base::{Clock, Due, Network, Random, mix};

use crate::{
    coverage::Coverage,
    etcd::Etcd,
    events::{FaultStep, Order, SimEvent},
    link_ends::LinkEnds,
    outages::Outages,
    process::Process,
    process_io::{Input, Output, ProcessState},
    router::Router,
    scenario::{RequestPlan, Scenario},
    updates::coordinators::Updates,
};

/// Requests arrive after this time: the router has connected to the nodes by then.
const WARM_UP: Duration = Duration::from_secs(1);
/// Faults and their repair are over by then.
const FAULTS_END: Duration = Duration::from_secs(20);
/// Time after the end of the last request by which all resources of requests must be released.
const SETTLE: Duration = Duration::from_secs(10);

/// A machine on which node processes run, one after another.
pub(crate) struct Host {
    /// The running process, or the last one.
    pub process: usize,
}

/// A cluster in virtual time.
pub(crate) struct Simulation {
    pub scenario: Scenario,
    pub clock: Clock<SimEvent>,
    pub network: Network<usize>,
    pub random: Random,
    pub processes: Vec<Process>,
    pub by_epoch: BTreeMap<Epoch, usize>,
    pub hosts: Vec<Host>,
    pub routers: Vec<Router>,
    pub updates: Updates,
    /// `None`: the routers have a static list of nodes.
    pub etcd: Option<Etcd>,
    pub coverage: Coverage,
    pub outages: Outages,
    /// Longest time from the loss of a peer until the blocks of a transfer with the peer were free.
    pub longest_release: Duration,
    /// Transfers whose receiver has all blocks.
    pub arrived: BTreeSet<TransferId>,
    /// Requests that follow those of the scenario, in the order of arrival.
    pub arrivals: Box<dyn Iterator<Item = RequestPlan> + Send>,
    /// Requests that have arrived from `arrivals`.
    pub arrived_requests: usize,
    /// Whether `arrivals` is at its end.
    pub has_no_arrivals: bool,
    /// Data connections as they transfer, if the scenario has their cost.
    pub link_ends: LinkEnds,
    /// Wall-clock time in which the routers handled their inputs. Measured only without checks.
    pub router_time: Duration,
    /// Next deadline of each process, and the same ordered by time.
    deadlines: Vec<Option<Instant>>,
    due: BTreeSet<(Instant, usize)>,
    /// Arrival of the last message of each order, unless equal delays keep the order.
    last_arrivals: BTreeMap<Order, Instant>,
    /// Hash of the event sequence.
    pub digest: u64,
    is_traced: bool,
    /// Whether all messages of an order have the same delay.
    has_equal_delays: bool,
    #[cfg(test)]
    pub planted: Option<crate::planted::PlantedBug>,
}

impl Simulation {
    pub(crate) fn new(seed: u64, scenario: Scenario, is_traced: bool) -> Self {
        let mut random = Random::new(seed ^ 0x5eed);
        let addresses: Vec<NodeAddress> = scenario.addresses();
        let routers = (0..scenario.router_count)
            .map(|router| {
                let Scenario { selection, limits, .. } = scenario;
                Router::new(router, &addresses, selection, limits, random.fork())
            })
            .collect();
        let mut simulation = Self {
            clock: Clock::default(),
            network: Network::new(scenario.network, random.fork()),
            processes: Vec::new(),
            by_epoch: BTreeMap::new(),
            hosts: Vec::new(),
            etcd: scenario.has_etcd.then(|| Etcd::new(scenario.router_count)),
            routers,
            updates: Updates::new(seed, &scenario),
            coverage: Coverage::default(),
            random,
            outages: Outages::default(),
            longest_release: Duration::ZERO,
            arrived: BTreeSet::new(),
            arrivals: Box::new(std::iter::empty()),
            arrived_requests: 0,
            has_no_arrivals: false,
            link_ends: LinkEnds::default(),
            router_time: Duration::ZERO,
            deadlines: Vec::new(),
            due: BTreeSet::new(),
            last_arrivals: BTreeMap::new(),
            digest: 0,
            is_traced,
            has_equal_delays: scenario.network.has_equal_delays()
                && scenario.thread_delay_max.is_zero(),
            #[cfg(test)]
            planted: None,
            scenario,
        };
        for host in 0..simulation.scenario.nodes.len() {
            simulation.hosts.push(Host { process: usize::MAX });
            simulation.start_process(host);
        }
        for router in 0..simulation.routers.len() {
            simulation.publish_members(router);
        }
        simulation.schedule_scenario();
        simulation.follow_routers();
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
    pub(crate) fn run(&mut self) {
        let start = self.clock.start();
        let last = self.scenario.requests.iter().map(|plan| plan.at + plan.timeout).max();
        let end = start + WARM_UP + last.unwrap_or_default();
        let last_arrival = self.scenario.requests.iter().map(|plan| WARM_UP + plan.at).max();
        let faults_end = start + FAULTS_END.max(last_arrival.unwrap_or_default());
        while !self.routers.iter().all(Router::all_ended) || self.clock.now() < faults_end {
            let now = self.clock.now();
            assert!(now <= end.max(faults_end) + Duration::from_secs(2), "a request never ends");
            self.run_until(now + Duration::from_secs(1));
        }
        self.run_until(self.clock.now() + SETTLE);
    }

    pub(crate) fn run_until(&mut self, end: Instant) {
        loop {
            let process = self.due.first().map(|&(at, id)| (at, Deadline::Process(id)));
            let routers = self.routers.iter().enumerate();
            let routers = routers
                .filter_map(|(id, router)| Some((router.next_deadline()?, Deadline::Router(id))));
            let next = process.into_iter().chain(routers).min();
            match self.clock.advance(next.map(|(at, _)| at), end) {
                Some(Due::Event(event)) => self.handle(event),
                Some(Due::Deadline) => match next.expect("the clock moved to it").1 {
                    Deadline::Process(process) => self.input(process, Input::Deadline),
                    Deadline::Router(router) => {
                        self.in_router(router, Router::on_deadline);
                    }
                },
                None => return,
            }
            self.follow_routers();
        }
    }

    /// Schedules an event after a delay of the network.
    pub(crate) fn send(&mut self, event: SimEvent) {
        let delay = self.network.delay();
        self.clock.after(delay, event);
    }

    /// Schedules an event behind the earlier ones of its order.
    pub(crate) fn send_in_order(&mut self, order: Order, delay: Duration, event: SimEvent) {
        let earliest = self.clock.now() + delay;
        if self.has_equal_delays {
            return self.clock.at(earliest, event);
        }
        let last = self.last_arrivals.entry(order).or_insert(earliest);
        *last = (*last).max(earliest);
        self.clock.at(*last, event);
    }

    fn handle(&mut self, event: SimEvent) {
        self.trace(&event);
        let now = self.clock.now();
        match event {
            SimEvent::Input { process, input } => self.input(process, input),
            SimEvent::Call { connection, key, call } => self.call_arrives(connection, key, call),
            SimEvent::Observe(stream) => self.observe_arrives(stream),
            SimEvent::Message { router, key, message } => {
                self.in_router(router, |router, now| router.message(now, key, message));
            }
            SimEvent::Observed { stream, event } => {
                if self.is_open(stream.connection) {
                    self.in_router(stream.connection.router, |router, now| {
                        router.observed(now, stream.id, event.map(|event| *event));
                    });
                }
            }
            SimEvent::ConnectionEnds(connection) => self.connection_ends(connection),
            SimEvent::KeepAlive { connection, process } => {
                if self.processes[process].state != ProcessState::Running {
                    self.connection_ends(connection);
                }
            }
            SimEvent::Member { router, change } => self.routers[router].member(now, change),
            SimEvent::Register { process } => self.register(process),
            SimEvent::Expire { process } => self.expire(process),
            SimEvent::RequestArrives { request } => {
                let plan = self.scenario.requests[request].clone();
                self.request_arrives(request, plan);
            }
            SimEvent::NextRequest(plan) => {
                self.request_arrives(self.arrived_requests, *plan);
                self.arrived_requests += 1;
                self.schedule_arrival();
            }
            SimEvent::ClientLeaves { request } => {
                let router = self.scenario.requests[request].router;
                self.routers[router].client_left(now, request);
            }
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
            SimEvent::Release { process, transfer } => {
                if self.processes[process].state != ProcessState::Dead {
                    let transport = &mut self.processes[process].transfers.transport;
                    let event = transport.released(transfer);
                    self.input(process, Input::Data(event));
                }
            }
            SimEvent::Update(event) => self.update_event(event),
            SimEvent::Fault(step) => self.fault_step(step),
        }
    }

    /// Schedules the next request of `arrivals`, if any.
    pub(crate) fn schedule_arrival(&mut self) {
        match self.arrivals.next() {
            Some(plan) => {
                let at = self.clock.start() + WARM_UP + plan.at;
                self.clock.at(at, SimEvent::NextRequest(Box::new(plan)));
            }
            None => self.has_no_arrivals = true,
        }
    }

    fn request_arrives(&mut self, request: usize, plan: RequestPlan) {
        let model = self.scenario.models[plan.model].name.clone();
        let is_checked = self.scenario.is_checked;
        self.in_router(plan.router, |router, now| {
            router.request(now, request, model, plan, is_checked);
        });
    }

    /// Gives an input to a router, and measures how long the router handles it.
    fn in_router(&mut self, router: usize, input: impl FnOnce(&mut Router, Instant)) {
        let now = self.clock.now();
        if self.scenario.is_checked {
            return input(&mut self.routers[router], now);
        }
        let started = Instant::now();
        input(&mut self.routers[router], now);
        self.router_time += started.elapsed();
    }

    /// Gives the input to the process: at once, or when the paused process resumes.
    pub(crate) fn input(&mut self, process: usize, input: Input) {
        let now = self.clock.now();
        let node = &mut self.processes[process];
        match node.state {
            ProcessState::Dead => return,
            ProcessState::Paused => return node.backlog.push(input),
            ProcessState::Running => {}
        }
        let outputs = node.handle(now, input);
        let deadline = node.next_deadline();
        self.set_deadline(process, deadline);
        if self.scenario.is_checked {
            self.check_weights(process);
        }
        #[cfg(test)]
        let outputs = match self.planted {
            Some(bug) => bug.mutate(outputs),
            None => outputs,
        };
        self.follow(process, outputs);
    }

    pub(crate) fn set_deadline(&mut self, process: usize, deadline: Option<Instant>) {
        if self.deadlines.len() <= process {
            self.deadlines.resize(process + 1, None);
        }
        let before = std::mem::replace(&mut self.deadlines[process], deadline);
        if before != deadline {
            if let Some(before) = before {
                self.due.remove(&(before, process));
            }
            self.due.extend(deadline.map(|at| (at, process)));
        }
    }

    pub(crate) fn follow(&mut self, process: usize, outputs: Vec<Output>) {
        for output in outputs {
            match output {
                Output::Message { connection, key, message } => {
                    // On a closed connection nothing arrives.
                    if self.is_open(connection) {
                        let router = connection.router;
                        let event = SimEvent::Message { router, key, message };
                        let delay = self.network.delay();
                        self.send_in_order(Order::Call(key), delay, event);
                    }
                }
                Output::Observed { stream, event } => {
                    let event = SimEvent::Observed { stream, event: event.map(Box::new) };
                    let delay = self.network.delay();
                    self.send_in_order(Order::Observe(stream), delay, event);
                }
                Output::Command(command) => {
                    let input = Input::Command(command);
                    self.send_between_threads(Order::Commands(process), process, input);
                }
                Output::Arrived(transfer) => {
                    if self.scenario.is_checked {
                        self.arrived.insert(transfer);
                    }
                }
                Output::TransferEvent(event) => {
                    if self.scenario.is_checked {
                        self.check_event(&event);
                    }
                    let input = Input::Transfer(event);
                    self.send_between_threads(Order::TransferEvents(process), process, input);
                }
                Output::ControlMessage { to, message } => self.send_control(process, to, message),
                Output::OpenData { to } => self.open_data(process, to),
                Output::CloseData { peer } => self.close_data(process, peer),
                Output::SendChunk { transfer, chunk } => {
                    self.send(SimEvent::SendChunk { process, transfer, chunk });
                }
                Output::Release { transfer } => {
                    let delay = self.random.up_to(self.scenario.release_delay_max);
                    let event = SimEvent::Release { process, transfer };
                    self.clock.after(delay, event);
                }
                Output::HoldEnded { transfer, hold } => {
                    if self.scenario.is_checked {
                        self.check_hold(process, transfer, &hold);
                    }
                }
                Output::Weights(output) => self.weights_output(process, output),
                Output::Drained => self.drained(process),
                Output::EngineFailed => self.engine_failed(process),
            }
        }
    }

    fn send_between_threads(&mut self, order: Order, process: usize, input: Input) {
        let delay = self.random.up_to(self.scenario.thread_delay_max);
        self.send_in_order(order, delay, SimEvent::Input { process, input });
    }

    fn trace(&mut self, event: &SimEvent) {
        let at = self.clock.elapsed();
        let kind = match event {
            SimEvent::Input { process, .. } => 16 + *process as u64,
            SimEvent::Message { .. } => 1,
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

/// The owner of a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Deadline {
    Process(usize),
    Router(usize),
}
