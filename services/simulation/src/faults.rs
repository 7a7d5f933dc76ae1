//! Fault injection, and the repair that follows each fault.

use std::time::Duration;

use kv_transfer::api::Epoch;

use crate::{
    event_loop::Simulation,
    events::{FaultStep, SimEvent},
    process::Process,
    process_io::{Input, ProcessState},
    scenario::Fault,
};

/// Maximum time from the drain timeout to the exit of the process.
const EXIT_MAX: Duration = Duration::from_millis(2500);

impl Simulation {
    pub(crate) fn fault_step(&mut self, step: FaultStep) {
        match step {
            FaultStep::Begin(fault) => self.begin_fault(fault),
            FaultStep::Start { host } => {
                if self.processes[self.hosts[host].process].state == ProcessState::Dead {
                    self.start_process(host);
                }
            }
            FaultStep::Resume { process } => self.resume(process),
            FaultStep::Heal { a, b } => {
                self.network.heal(a, b);
                self.outages.heal(a, b, self.clock.now());
            }
            FaultStep::DrainTimeout { process } => self.input(process, Input::EndAll),
            FaultStep::Exit { process } => self.exit(process),
            FaultStep::EtcdRecovers => self.end_etcd_outage(),
        }
    }

    fn later(&mut self, delay: Duration, step: FaultStep) {
        self.clock.after(delay, SimEvent::Fault(step));
    }

    fn begin_fault(&mut self, fault: Fault) {
        let running = |host: usize| self.hosts[host].process;
        match fault {
            Fault::Kill { host, resets_connections, restart_after } => {
                let process = running(host);
                if self.processes[process].state != ProcessState::Dead {
                    self.coverage.count("kills");
                    self.kill(process, resets_connections);
                    self.later(restart_after, FaultStep::Start { host });
                }
            }
            Fault::Pause { host, duration } => self.pause(running(host), duration),
            Fault::Partition { a, b, duration } => {
                let (a, b) = (running(a), running(b));
                if self.network.cut(a, b) {
                    self.coverage.count("partitions");
                    for (of, to) in [(a, b), (b, a)] {
                        self.outages.begin(of, Some(to), self.clock.now());
                    }
                    self.later(duration, FaultStep::Heal { a, b });
                }
            }
            Fault::CloseDataConnections { a, b } => {
                let (a, b) = (running(a), running(b));
                if self.network.disconnect(a, b) {
                    self.coverage.count("data connections closed");
                    self.report_closed(a, b, "connection reset");
                    self.report_closed(b, a, "connection reset");
                }
            }
            Fault::OutboundQueueFull { from, to } => {
                let (from, to) = (running(from), running(to));
                let peer = self.processes[to].epoch;
                let reason = "the outbound queue is full";
                self.input(from, Input::PeerFailed { peer, reason });
            }
            Fault::CloseRouterConnection { router, host } => {
                self.coverage.count("router connections closed");
                self.connection_ends(self.routers[router].nodes.connection(host));
            }
            Fault::RestartRouter { router } => {
                self.coverage.count("router restarts");
                for host in 0..self.hosts.len() {
                    self.connection_ends_at_node(self.routers[router].nodes.connection(host));
                }
                self.routers[router].restart();
                self.coordinators_die(router);
                if let Some(etcd) = &mut self.etcd {
                    etcd.forget_router(router);
                }
                self.publish_members(router);
            }
            Fault::EtcdOutage { duration } => {
                self.begin_etcd_outage();
                self.later(duration, FaultStep::EtcdRecovers);
            }
            Fault::LoseRank { host } => {
                let process = running(host);
                if self.processes[process].state == ProcessState::Running {
                    self.coverage.count("ranks lost");
                    self.input(process, Input::RankLost);
                }
            }
            Fault::UpdateWeights(plan) => self.begin_update(plan),
            Fault::Drain { host, timeout, restart_after } => {
                let process = running(host);
                let node = &self.processes[process];
                if node.state == ProcessState::Running && !node.is_draining() {
                    self.coverage.count("drains");
                    self.later(timeout, FaultStep::DrainTimeout { process });
                    let exits = timeout + EXIT_MAX;
                    self.later(exits, FaultStep::Exit { process });
                    self.later(exits + restart_after, FaultStep::Start { host });
                    self.input(process, Input::Drain { grace: timeout });
                }
            }
        }
    }

    pub(crate) fn start_process(&mut self, host: usize) {
        let epoch = Epoch(self.random.id().max(1));
        let plan = &self.scenario.nodes[host];
        let model = &self.scenario.models[plan.model];
        let is_checked = self.scenario.is_checked;
        let mut process = Process::start(host, plan, model, is_checked, epoch, self.clock.now());
        let index = self.processes.len();
        let before = std::mem::replace(&mut self.hosts[host].process, index);
        process.recover_disk(
            self.processes.get_mut(before).map(Process::take_disk).unwrap_or_default(),
        );
        self.by_epoch.insert(epoch, index);
        self.set_deadline(index, process.next_deadline());
        self.processes.push(process);
        self.register_later(index);
        // Some peers still connect to the endpoint of the old process and find the new epoch.
        if before != usize::MAX {
            let peer = self.processes[before].epoch;
            for process in 0..index {
                if self.random.chance(30) {
                    let reason = "the endpoint has another cluster secret or another epoch";
                    let input = Input::PeerFailed { peer, reason };
                    self.send(SimEvent::Input { process, input });
                }
            }
        }
    }

    /// Kills a process. With `resets_connections` its machine keeps running and resets the
    /// connections. Without, peers receive nothing more, as after a power failure.
    fn kill(&mut self, process: usize, resets_connections: bool) {
        let host = self.processes[process].host;
        if self.processes[process].weights.is_updating() {
            self.coverage.count("nodes lost in an update");
        }
        self.processes[process].state = ProcessState::Dead;
        self.processes[process].backlog.clear();
        self.set_deadline(process, None);
        self.outages.begin(process, None, self.clock.now());
        self.expire_later(process);
        let peers = self.network.disconnect_all(process);
        for peer in peers.into_iter().filter(|_| resets_connections) {
            self.report_closed(peer, process, "connection reset");
        }
        if resets_connections {
            for router in 0..self.routers.len() {
                let connection = self.routers[router].nodes.connection(host);
                self.send(SimEvent::ConnectionEnds(connection));
            }
        } else {
            self.expect_keep_alive_timeout(host, process);
        }
    }

    fn pause(&mut self, process: usize, duration: Duration) {
        let now = self.clock.now();
        let node = &mut self.processes[process];
        if node.state != ProcessState::Running {
            return;
        }
        self.coverage.count("pauses");
        node.state = ProcessState::Paused;
        node.pauses.push((now, None));
        let host = node.host;
        self.set_deadline(process, None);
        self.outages.begin(process, None, self.clock.now());
        self.expire_later(process);
        self.expect_keep_alive_timeout(host, process);
        self.later(duration, FaultStep::Resume { process });
    }

    fn resume(&mut self, process: usize) {
        let now = self.clock.now();
        let node = &mut self.processes[process];
        if node.state != ProcessState::Paused {
            return;
        }
        node.state = ProcessState::Running;
        node.pauses.last_mut().expect("the process was paused").1 = Some(now);
        self.outages.resume(process, now);
        self.register_later(process);
        // As in a real process, queued messages are handled before deadlines.
        for input in std::mem::take(&mut self.processes[process].backlog) {
            self.input(process, input);
        }
        self.input(process, Input::Deadline);
    }

    /// Schedules the keep-alive time-out at each router, which pings every 500 ms and waits 2 s for
    /// the answer.
    pub(crate) fn expect_keep_alive_timeout(&mut self, host: usize, process: usize) {
        for router in 0..self.routers.len() {
            let connection = self.routers[router].nodes.connection(host);
            let after = self.random.millis(2000..=2500);
            self.clock.after(after, SimEvent::KeepAlive { connection, process });
        }
    }

    /// Handles a failed executor: the process informs its peers and exits, and another process
    /// starts.
    pub(crate) fn engine_failed(&mut self, process: usize) {
        if self.processes[process].state == ProcessState::Running {
            self.coverage.count("engines failed");
            self.exit(process);
            let (restart_after, host) =
                (self.random.millis(20..=900), self.processes[process].host);
            self.later(restart_after, FaultStep::Start { host });
        }
    }

    /// Exits a draining process that has no in-flight request left.
    pub(crate) fn drained(&mut self, process: usize) {
        if self.processes[process].state == ProcessState::Running {
            let load = self.processes[process].load();
            let left = (load.running, load.waiting, load.blocks_reserved);
            assert_eq!(left, (0, 0, 0), "a drained node has no in-flight request");
            self.coverage.count("drained in time");
            self.exit(process);
        }
    }

    fn exit(&mut self, process: usize) {
        if self.processes[process].state == ProcessState::Running {
            let outputs = self.processes[process].stop(self.clock.now());
            self.follow(process, outputs);
            self.deregister(process);
            self.kill(process, true);
        } else if self.processes[process].state != ProcessState::Dead {
            self.kill(process, false);
        }
    }
}
