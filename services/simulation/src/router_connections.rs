//! Connections between the routers and the nodes, and the messages on them.

use crate::{
    calls::{CallKey, NodeCall},
    event_loop::Simulation,
    events::{Order, SimEvent},
    nodes::{Connection, NodesAction, Stream},
    process_io::{Input, ProcessState},
    router::RouterAction,
};

impl Simulation {
    /// Performs the actions of every router.
    pub(crate) fn follow_routers(&mut self) {
        for router in 0..self.routers.len() {
            for action in self.routers[router].take_actions() {
                self.router_action(action);
            }
        }
    }

    fn router_action(&mut self, action: RouterAction) {
        match action {
            RouterAction::Call { connection, key, call } => {
                self.send_to_host(connection, SimEvent::Call { connection, key, call });
            }
            // The end of a connection has cancelled its calls already.
            RouterAction::Cancel { connection, key } if self.is_open(connection) => {
                self.send_to_process(connection, Input::Cancel(key));
            }
            RouterAction::Cancel { .. } => {}
            RouterAction::Nodes(NodesAction::Observe(stream)) => {
                self.send_to_host(stream.connection, SimEvent::Observe(stream));
            }
            RouterAction::Nodes(NodesAction::StopObserving(stream)) => {
                self.send_to_process(stream.connection, Input::StopObserving(stream));
            }
        }
    }

    /// Returns whether the router still uses the connection.
    pub(crate) fn is_open(&self, connection: Connection) -> bool {
        self.routers[connection.router].nodes.is_open(connection)
    }

    /// Sends to the process that runs on the host now.
    fn send_to_process(&mut self, connection: Connection, input: Input) {
        let process = self.hosts[connection.host].process;
        self.send_to_host(connection, SimEvent::Input { process, input });
    }

    /// Sends behind the router's earlier messages to this host.
    fn send_to_host(&mut self, connection: Connection, event: SimEvent) {
        let delay = self.network.delay();
        self.send_in_order(Order::ToHost(connection), delay, event);
    }

    pub(crate) fn call_arrives(
        &mut self,
        connection: Connection,
        key: CallKey,
        call: Box<NodeCall>,
    ) {
        if let Some(process) = self.connected_process(connection) {
            self.input(process, Input::Call { connection, key, call });
        }
    }

    pub(crate) fn observe_arrives(&mut self, stream: Stream) {
        if let Some(process) = self.connected_process(stream.connection) {
            self.input(process, Input::Observe(stream));
        }
    }

    /// Returns the process that a message on this connection reaches. A host without a process
    /// refuses the connection.
    fn connected_process(&mut self, connection: Connection) -> Option<usize> {
        if !self.is_open(connection) {
            return None;
        }
        let process = self.hosts[connection.host].process;
        if self.processes[process].state == ProcessState::Dead {
            self.send(SimEvent::ConnectionEnds(connection));
            return None;
        }
        Some(process)
    }

    /// Tells both ends that the connection has ended.
    pub(crate) fn connection_ends(&mut self, connection: Connection) {
        if self.is_open(connection) {
            self.connection_ends_at_node(connection);
            let now = self.clock.now();
            self.routers[connection.router].connection_lost(now, connection.host);
        }
    }

    /// Tells the node that a router's connection has ended.
    pub(crate) fn connection_ends_at_node(&mut self, connection: Connection) {
        let process = self.hosts[connection.host].process;
        self.send(SimEvent::Input { process, input: Input::ConnectionEnded(connection) });
        if self.processes[process].state == ProcessState::Paused {
            self.expect_keep_alive_timeout(connection.host, process);
        }
    }
}
