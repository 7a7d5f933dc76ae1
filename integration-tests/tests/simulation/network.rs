//! What lies between the processes: notices, and data connections.

use std::time::{Duration, Instant};

use kv_transfer::{
    api::{Epoch, TransferId},
    config::LEASE,
    notice::Notice,
    protocol::DataEvent,
};

use crate::{
    process::{Life, Step},
    wires::Cargo,
    world::{Happening, World},
};

/// How soon a chunk looks again for a connection that is being made.
const LOOK_AGAIN: Duration = Duration::from_millis(3);
/// A straggler comes when both leases of its transfer may be over.
const STRAGGLES_MAX: Duration = Duration::from_secs(6);
/// Between two tries to connect.
const CONNECT_AGAIN: Duration = Duration::from_millis(50);

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
        let step = Step::Notice(source, Box::new(notice));
        let happening = Happening::Step { process: to, step };
        if self.random.chance(self.weather.straggling) {
            self.router.tally.count("notices straggled");
            let delay = self.random.up_to(STRAGGLES_MAX);
            return self.after(delay, happening);
        }
        self.soon(happening);
    }

    pub fn open_data(&mut self, from: usize, to: Epoch) {
        let closings = self.processes[from].driver.closings(to);
        let to = self.by_epoch[&to];
        let give_up = self.now + LEASE;
        self.soon(Happening::Connect { from, to, closings, give_up });
    }

    /// The connection is made, or tried again for a lease.
    pub fn connect(&mut self, from: usize, to: usize, closings: u64, give_up: Instant) {
        let (maker, taker) = (&self.processes[from], &self.processes[to]);
        if maker.life == Life::Dead || maker.driver.closings(taker.epoch) != closings {
            return;
        }
        if self.is_cut(from, to) {
            if self.now < give_up {
                return self
                    .after(CONNECT_AGAIN, Happening::Connect { from, to, closings, give_up });
            }
            self.closed(from, to, "connection timed out");
        } else if taker.life == Life::Dead || !taker.driver.admits(maker.epoch) {
            self.closed(from, to, "connection refused");
        } else {
            self.counter += 1;
            self.links.insert((from, to), self.counter);
        }
    }

    /// `at` finds its connection with `peer` ended.
    pub fn closed(&mut self, at: usize, peer: usize, reason: &'static str) {
        let peer = self.processes[peer].epoch;
        let closings = self.processes[at].driver.closings(peer);
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
        let Some(peer) = node.driver.wires.destination(transfer, chunk) else { return };
        let to = self.by_epoch[&peer];
        let link = self.links.get(&(process, to)).copied();
        let (Some(link), Life::Running) = (link, node.life) else {
            if node.life != Life::Dead {
                self.after(LOOK_AGAIN, Happening::Depart { process, transfer, chunk });
            }
            return;
        };
        if self.random.chance(self.weather.failure) {
            let reason = "the block cannot be read".to_owned();
            return self.step(process, Step::Data(DataEvent::Failed { transfer, reason }));
        }
        let (mut cargo, sent) = self.processes[process].driver.wires.depart(transfer, chunk);
        if self.random.chance(self.weather.damage) {
            self.router.tally.count("chunks damaged");
            cargo.contents[0][0] ^= 1 << self.random.below(64);
        }
        self.step(process, Step::Data(sent));
        self.soon(Happening::Land { from: process, to, link, cargo });
    }

    /// The first bytes come in.
    pub fn land(&mut self, from: usize, to: usize, link: u64, cargo: Cargo) {
        match self.passage(from, to, link) {
            Passage::Lost => {}
            Passage::Later => self.after(LOOK_AGAIN, Happening::Land { from, to, link, cargo }),
            Passage::Free => {
                if self.processes[to].driver.wires.land(&cargo) {
                    self.soon(Happening::Landed { from, to, link, cargo });
                }
            }
        }
    }

    /// The last bytes come in.
    pub fn landed(&mut self, from: usize, to: usize, link: u64, cargo: Cargo) {
        match self.passage(from, to, link) {
            Passage::Lost => {}
            Passage::Later => self.after(LOOK_AGAIN, Happening::Landed { from, to, link, cargo }),
            Passage::Free => {
                if let Some(received) = self.processes[to].driver.wires.landed(&cargo) {
                    self.step(to, Step::Data(received));
                }
            }
        }
    }

    /// Data connections lose nothing while they last. What comes for a frozen process waits in its
    /// socket, and across a cut it is sent again until it gets through.
    fn passage(&self, from: usize, to: usize, link: u64) -> Passage {
        if self.links.get(&(from, to)) != Some(&link) {
            return Passage::Lost;
        }
        match self.processes[to].life {
            Life::Dead => Passage::Lost,
            Life::Frozen => Passage::Later,
            Life::Running if self.is_cut(from, to) => Passage::Later,
            Life::Running => Passage::Free,
        }
    }
}

enum Passage {
    Free,
    Later,
    Lost,
}
