//! What lies between the router and the nodes: connections, and what they carry.

use cluster::StreamId;

use crate::{
    nodes::Watch,
    process::{Call, Life, Step},
    router::Act,
    world::{Happening, World},
};

impl World {
    /// Does what the router wants done.
    pub fn follow_router(&mut self) {
        let (acts, watches) = self.router.take_acts();
        for act in acts {
            match act {
                Act::Call { place, call } => self.send_to(place, Happening::Call { place, call }),
                // On a connection that has ended the node knows already.
                Act::Cancel { place, connection, transfer } => {
                    if connection == self.router.nodes.connection(place) {
                        self.send_step_to(place, Step::Cancel(transfer));
                    }
                }
            }
        }
        for watch in watches {
            match watch {
                Watch::Observe { place, connection, stream } => {
                    self.send_to(place, Happening::Observe { place, connection, stream });
                }
                Watch::StopObserving { place, stream } => {
                    self.send_step_to(place, Step::StopObserving(stream));
                }
            }
        }
    }

    /// To the process that stands there now.
    fn send_step_to(&mut self, place: usize, step: Step) {
        let process = self.places[place].process;
        self.send_to(place, Happening::Step { process, step });
    }

    /// From the router: in order.
    fn send_to(&mut self, place: usize, happening: Happening) {
        let earliest = self.now + self.random.up_to(self.weather.delay_max);
        let at = earliest.max(self.places[place].reached_at);
        self.places[place].reached_at = at;
        self.at(at, happening);
    }

    pub fn call_arrives(&mut self, place: usize, call: Box<Call>) {
        let process = self.places[place].process;
        let connection = call.connection;
        if connection != self.router.nodes.connection(place) {
            return;
        }
        if self.processes[process].life == Life::Dead {
            // Connection refused.
            return self.soon(Happening::ConnectionEnds { place, connection });
        }
        self.step(process, Step::Call(call));
    }

    pub fn observe_arrives(&mut self, place: usize, connection: u64, stream: StreamId) {
        let process = self.places[place].process;
        if connection != self.router.nodes.connection(place) {
            return;
        }
        if self.processes[process].life == Life::Dead {
            return self.soon(Happening::ConnectionEnds { place, connection });
        }
        self.step(process, Step::Observe { connection, stream });
    }

    /// Both ends find out.
    pub fn connection_ends(&mut self, place: usize, connection: u64) {
        if connection != self.router.nodes.connection(place) {
            return;
        }
        self.router.connection_lost(self.now, place);
        self.calls_cut(place, connection);
    }

    /// The node finds out.
    pub fn calls_cut(&mut self, place: usize, connection: u64) {
        let process = self.places[place].process;
        let step = Step::CallsCut { connection };
        self.soon(Happening::Step { process, step });
        if let Life::Frozen = self.processes[process].life {
            self.expect_no_answer(place, process);
        }
    }
}
