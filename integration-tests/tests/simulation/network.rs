//! What lies between the processes: notices, and data connections.

use std::time::Duration;

use kv_transfer::{
    api::{Epoch, TransferId},
    notice::Notice,
};

use crate::{
    process::{Life, Step},
    wires::Cargo,
    world::{Happening, World},
};

/// How soon a chunk looks again for a connection that is being made.
const LOOK_AGAIN: Duration = Duration::from_millis(3);

impl World {
    pub fn is_cut(&self, a: usize, b: usize) -> bool {
        self.cuts.contains(&(a.min(b), a.max(b)))
    }

    pub fn send_notice(&mut self, from: usize, to: Epoch, notice: Notice) {
        let to = self.by_epoch[&to];
        if self.is_cut(from, to) || self.random.chance(self.weather.loss) {
            return;
        }
        let source = self.processes[from].source();
        if self.random.chance(self.weather.duplication) {
            let step = Step::Notice(source.clone(), Box::new(notice.clone()));
            self.soon(Happening::Step { process: to, step });
        }
        self.soon(Happening::Step { process: to, step: Step::Notice(source, Box::new(notice)) });
    }

    pub fn open_data(&mut self, from: usize, to: Epoch) {
        let to = self.by_epoch[&to];
        self.soon(Happening::Opened { from, to });
    }

    pub fn opened(&mut self, from: usize, to: usize) {
        let (maker, taker) = (&self.processes[from], &self.processes[to]);
        if taker.life == Life::Dead || !taker.admits(maker.epoch) {
            self.closed(from, to, "connection refused");
        } else if maker.life != Life::Dead && !self.is_cut(from, to) {
            self.counter += 1;
            self.links.insert((from, to), self.counter);
        }
    }

    /// `at` finds its connection with `peer` ended.
    pub fn closed(&mut self, at: usize, peer: usize, reason: &'static str) {
        let peer = self.processes[peer].epoch;
        let closings = self.processes[at].closings(peer);
        let step = Step::Closed { peer, closings, reason };
        self.soon(Happening::Step { process: at, step });
    }

    /// Both directions end; whoever did not do it finds out, if words still pass.
    pub fn close_data(&mut self, process: usize, peer: Epoch) {
        let peer = self.by_epoch[&peer];
        let mut had_link = false;
        for link in [(process, peer), (peer, process)] {
            had_link |= self.links.remove(&link).is_some();
        }
        if had_link && !self.is_cut(process, peer) {
            self.closed(peer, process, "connection closed");
        }
    }

    pub fn depart(&mut self, process: usize, transfer: TransferId, chunk: u32) {
        let node = &self.processes[process];
        let Some(peer) = node.wires.destination(transfer, chunk) else { return };
        let to = self.by_epoch[&peer];
        let link = self.links.get(&(process, to)).copied();
        let (Some(link), Life::Running) = (link, node.life) else {
            if node.life != Life::Dead {
                self.after(LOOK_AGAIN, Happening::Depart { process, transfer, chunk });
            }
            return;
        };
        let (mut cargo, sent) = self.processes[process].wires.depart(transfer, chunk);
        if self.random.chance(self.weather.damage) {
            self.router.tally.count("chunks damaged");
            cargo.contents[0][0] ^= 1 << self.random.below(64);
        }
        self.step(process, Step::Data(sent));
        self.soon(Happening::Land { from: process, to, link, cargo });
    }

    /// The first bytes come in. What comes for a frozen process waits in its socket.
    pub fn land(&mut self, from: usize, to: usize, link: u64, cargo: Cargo) {
        if self.links.get(&(from, to)) != Some(&link) || self.is_cut(from, to) {
            return;
        }
        match self.processes[to].life {
            Life::Dead => {}
            Life::Frozen { .. } => {
                self.after(LOOK_AGAIN, Happening::Land { from, to, link, cargo });
            }
            Life::Running => {
                if self.processes[to].wires.land(&cargo) {
                    self.soon(Happening::Landed { from, to, link, cargo });
                }
            }
        }
    }

    pub fn landed(&mut self, from: usize, to: usize, link: u64, cargo: Cargo) {
        if self.links.get(&(from, to)) != Some(&link) || self.is_cut(from, to) {
            return;
        }
        match self.processes[to].life {
            Life::Dead => {}
            Life::Frozen { .. } => {
                self.after(LOOK_AGAIN, Happening::Landed { from, to, link, cargo });
            }
            Life::Running => {
                if let Some(received) = self.processes[to].wires.landed(&cargo) {
                    self.step(to, Step::Data(received));
                }
            }
        }
    }
}
