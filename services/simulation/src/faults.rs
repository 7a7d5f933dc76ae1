//! Fault injection, and the repair that follows each fault.

use std::time::Duration;

use kv_transfer::api::Epoch;

use crate::{
    checks::Outage,
    event_loop::{SimEvent, Simulation},
    process::{Process, ProcessState, Step},
    scenario::Fault,
};

/// A drained node aborts its transfers and exits within this time.
const EXIT_MAX: Duration = Duration::from_millis(2500);

#[derive(Clone, Copy, Debug)]
pub enum FaultStep {
    Begin(Fault),
    /// A new process starts on a host whose process is dead.
    Start {
        host: usize,
    },
    Resume {
        process: usize,
    },
    Heal {
        a: usize,
        b: usize,
    },
    /// The drain timeout is over: everything in flight ends.
    DrainTimeout {
        process: usize,
    },
    Exit {
        process: usize,
    },
}

impl Simulation {
    pub fn fault_step(&mut self, step: FaultStep) {
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
                self.end_outages(|outage| outage.to.is_some() && [a, b].contains(&outage.of));
            }
            FaultStep::DrainTimeout { process } => self.step(process, Step::EndAll),
            FaultStep::Exit { process } => self.exit(process),
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
                    self.router.coverage.count("kills");
                    self.kill(process, resets_connections);
                    self.later(restart_after, FaultStep::Start { host });
                }
            }
            Fault::Pause { host, duration } => self.pause(running(host), duration),
            Fault::Partition { a, b, duration } => {
                let (a, b) = (running(a), running(b));
                if self.network.cut(a, b) {
                    self.router.coverage.count("partitions");
                    for (of, to) in [(a, b), (b, a)] {
                        self.begin_outage(of, Some(to));
                    }
                    self.later(duration, FaultStep::Heal { a, b });
                }
            }
            Fault::CloseDataConnections { a, b } => {
                let (a, b) = (running(a), running(b));
                if self.network.disconnect(a, b) {
                    self.router.coverage.count("data connections closed");
                    self.report_closed(a, b, "connection reset");
                    self.report_closed(b, a, "connection reset");
                }
            }
            Fault::OutboundQueueFull { from, to } => {
                let (from, to) = (running(from), running(to));
                let peer = self.processes[to].epoch;
                let reason = "the outbound queue is full";
                self.step(from, Step::PeerFailed { peer, reason });
            }
            Fault::CloseRouterConnection { host } => {
                self.router.coverage.count("router connections closed");
                self.connection_ends(host, self.router.nodes.connection(host));
            }
            Fault::RestartRouter => {
                self.router.coverage.count("router restarts");
                for host in 0..self.hosts.len() {
                    self.calls_cut(host, self.router.nodes.connection(host));
                }
                self.router.restart(self.clock.now());
            }
            Fault::Drain { host, timeout, restart_after } => {
                let process = running(host);
                let node = &self.processes[process];
                if node.state == ProcessState::Running && !node.engine.is_draining() {
                    self.router.coverage.count("drains");
                    self.later(timeout, FaultStep::DrainTimeout { process });
                    let exits = timeout + EXIT_MAX;
                    self.later(exits, FaultStep::Exit { process });
                    self.later(exits + restart_after, FaultStep::Start { host });
                    self.step(process, Step::Drain);
                }
            }
        }
    }

    pub fn start_process(&mut self, host: usize) {
        let epoch = Epoch(self.random.id().max(1));
        let plan = &self.scenario.nodes[host];
        let process = Process::start(host, plan, epoch, self.clock.now());
        let index = self.processes.len();
        let before = std::mem::replace(&mut self.hosts[host].process, index);
        self.by_epoch.insert(epoch, index);
        self.set_wake(index, process.next_wake());
        self.processes.push(process);
        // Peers of the old process may be told that the endpoint has another epoch now.
        if before != usize::MAX {
            let peer = self.processes[before].epoch;
            for process in 0..index {
                if self.random.chance(30) {
                    let reason = "the endpoint has another cluster secret or another epoch";
                    let step = Step::PeerFailed { peer, reason };
                    self.send(SimEvent::Step { process, step });
                }
            }
        }
    }

    /// Kills a process. With `resets_connections` its machine lives and resets the connections;
    /// without, as after a power cut, peers hear nothing more.
    fn kill(&mut self, process: usize, resets_connections: bool) {
        let host = self.processes[process].host;
        self.processes[process].state = ProcessState::Dead;
        self.processes[process].backlog.clear();
        self.set_wake(process, None);
        self.begin_outage(process, None);
        let peers = self.network.disconnect_all(process);
        for peer in peers.into_iter().filter(|_| resets_connections) {
            self.report_closed(peer, process, "connection reset");
        }
        let connection = self.router.nodes.connection(host);
        if resets_connections {
            self.send(SimEvent::ConnectionEnds { host, connection });
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
        self.router.coverage.count("pauses");
        node.state = ProcessState::Paused;
        node.pauses.push((now, None));
        let host = node.host;
        self.set_wake(process, None);
        self.begin_outage(process, None);
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
        self.end_outages(|outage| outage.of == process && outage.to.is_none());
        // The shell takes queued messages before it looks at deadlines.
        for step in std::mem::take(&mut self.processes[process].backlog) {
            self.step(process, step);
        }
        self.step(process, Step::Wake);
    }

    /// The router pings each connection every 500 ms and waits 2 s for the answer.
    pub fn expect_keep_alive_timeout(&mut self, host: usize, process: usize) {
        let connection = self.router.nodes.connection(host);
        let after = self.random.millis(2000..=2500);
        self.clock.after(after, SimEvent::KeepAlive { host, connection, process });
    }

    /// A draining node has no in-flight request any more: its process exits.
    pub fn drained(&mut self, process: usize) {
        if self.processes[process].state == ProcessState::Running {
            let load = self.processes[process].load();
            let left = (load.running, load.waiting, load.blocks_reserved);
            assert_eq!(left, (0, 0, 0), "a drained node has no in-flight request");
            self.router.coverage.count("drained in time");
            self.exit(process);
        }
    }

    fn exit(&mut self, process: usize) {
        if self.processes[process].state == ProcessState::Running {
            let mut outputs = Vec::new();
            self.processes[process].driver.stop(self.clock.now(), &mut outputs);
            self.follow(process, outputs);
            self.kill(process, true);
        } else if self.processes[process].state != ProcessState::Dead {
            self.kill(process, false);
        }
    }

    fn begin_outage(&mut self, of: usize, to: Option<usize>) {
        self.outages.push(Outage { of, to, from: self.clock.now(), until: None });
    }

    fn end_outages(&mut self, ends: impl Fn(&Outage) -> bool) {
        let now = self.clock.now();
        for outage in &mut self.outages {
            if outage.until.is_none() && ends(outage) {
                outage.until = Some(now);
            }
        }
    }
}
