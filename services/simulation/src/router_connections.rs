//! Connections between the router and the nodes, and the messages on them.

use cluster::StreamId;

use crate::{
    event_loop::{SimEvent, Simulation},
    nodes::Watch,
    process::{Call, ProcessState, Step},
    router::Act,
};

impl Simulation {
    /// Performs the router's actions.
    pub fn follow_router(&mut self) {
        let (acts, watches) = self.router.take_acts();
        for act in acts {
            match act {
                Act::Call { host, call } => self.send_to(host, SimEvent::Call { host, call }),
                // The end of a connection has cancelled its calls already.
                Act::Cancel { host, connection, transfer } => {
                    if connection == self.router.nodes.connection(host) {
                        self.send_step_to(host, Step::Cancel(transfer));
                    }
                }
            }
        }
        for watch in watches {
            match watch {
                Watch::Observe { host, connection, stream } => {
                    self.send_to(host, SimEvent::Observe { host, connection, stream });
                }
                Watch::StopObserving { host, stream } => {
                    self.send_step_to(host, Step::StopObserving(stream));
                }
            }
        }
    }

    /// Sends to the process that runs on the host now.
    fn send_step_to(&mut self, host: usize, step: Step) {
        let process = self.hosts[host].process;
        self.send_to(host, SimEvent::Step { process, step });
    }

    /// Sends to a host, behind the router's earlier messages to that host.
    fn send_to(&mut self, host: usize, event: SimEvent) {
        let earliest = self.clock.now() + self.network.delay();
        let last = &mut self.hosts[host].last_arrival;
        *last = (*last).max(earliest);
        self.clock.at(*last, event);
    }

    pub fn call_arrives(&mut self, host: usize, call: Box<Call>) {
        let process = self.hosts[host].process;
        let connection = call.connection;
        if connection != self.router.nodes.connection(host) {
            return;
        }
        if self.processes[process].state == ProcessState::Dead {
            // Connection refused.
            return self.send(SimEvent::ConnectionEnds { host, connection });
        }
        self.step(process, Step::Call(call));
    }

    pub fn observe_arrives(&mut self, host: usize, connection: u64, stream: StreamId) {
        let process = self.hosts[host].process;
        if connection != self.router.nodes.connection(host) {
            return;
        }
        if self.processes[process].state == ProcessState::Dead {
            return self.send(SimEvent::ConnectionEnds { host, connection });
        }
        self.step(process, Step::Observe { connection, stream });
    }

    /// Tells both ends that the connection has ended.
    pub fn connection_ends(&mut self, host: usize, connection: u64) {
        if connection != self.router.nodes.connection(host) {
            return;
        }
        self.router.connection_lost(self.clock.now(), host);
        self.calls_cut(host, connection);
    }

    /// Tells the node that the router's connection has ended.
    pub fn calls_cut(&mut self, host: usize, connection: u64) {
        let process = self.hosts[host].process;
        let step = Step::CallsCut { connection };
        self.send(SimEvent::Step { process, step });
        if let ProcessState::Paused = self.processes[process].state {
            self.expect_keep_alive_timeout(host, process);
        }
    }
}
