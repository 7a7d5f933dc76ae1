//! What goes wrong, and how it is mended.

use std::time::Duration;

use kv_transfer::api::Epoch;

use crate::{
    checks::Silence,
    process::{Life, Process, Step},
    scenario::Blow,
    world::{Happening, World},
};

/// A node that drains tells its peers why their transfers end, and goes by then.
const LEAVES_WITHIN: Duration = Duration::from_millis(2500);

#[derive(Clone, Copy, Debug)]
pub enum Trouble {
    Blow(Blow),
    /// A process starts where none is.
    Start {
        place: usize,
    },
    Thaw {
        process: usize,
    },
    Heal {
        a: usize,
        b: usize,
    },
    /// The time to drain is over, or that for leaving.
    DrainEnds {
        process: usize,
    },
    Leave {
        process: usize,
    },
}

impl World {
    pub fn trouble(&mut self, trouble: Trouble) {
        match trouble {
            Trouble::Blow(blow) => self.blow(blow),
            Trouble::Start { place } => {
                if self.processes[self.places[place].process].life == Life::Dead {
                    self.start_process(place);
                }
            }
            Trouble::Thaw { process } => self.thaw(process),
            Trouble::Heal { a, b } => {
                self.cuts.remove(&(a, b));
                self.end_silences(|silence| silence.to.is_some() && [a, b].contains(&silence.of));
            }
            Trouble::DrainEnds { process } => self.step(process, Step::EndAll),
            Trouble::Leave { process } => self.leave(process),
        }
    }

    fn blow(&mut self, blow: Blow) {
        let standing = |place: usize| self.places[place].process;
        match blow {
            Blow::Kill { place, is_heard, back_after } => {
                let process = standing(place);
                if self.processes[process].life != Life::Dead {
                    self.router.tally.count("kills");
                    self.die(process, is_heard);
                    self.after(back_after, Happening::Trouble(Trouble::Start { place }));
                }
            }
            Blow::Freeze { place, for_ } => self.freeze(standing(place), for_),
            Blow::Cut { a, b, for_ } => {
                let (a, b) = (standing(a).min(standing(b)), standing(a).max(standing(b)));
                if self.cuts.insert((a, b)) {
                    self.router.tally.count("cuts");
                    for (of, to) in [(a, b), (b, a)] {
                        self.fall_silent(of, Some(to));
                    }
                    self.after(for_, Happening::Trouble(Trouble::Heal { a, b }));
                }
            }
            Blow::BreakData { a, b } => {
                let (a, b) = (standing(a), standing(b));
                let mut had_link = false;
                for link in [(a, b), (b, a)] {
                    had_link |= self.links.remove(&link).is_some();
                }
                if had_link {
                    self.router.tally.count("data connections broken");
                    self.closed(a, b, "connection reset");
                    self.closed(b, a, "connection reset");
                }
            }
            Blow::QueueFull { from, to } => {
                let (from, to) = (standing(from), standing(to));
                let peer = self.processes[to].epoch;
                self.step(from, Step::PeerFailed { peer, reason: "256 notices wait for it" });
            }
            Blow::BreakCalls { place } => {
                self.router.tally.count("calls cut");
                self.connection_ends(place, self.router.nodes.connection(place));
            }
            Blow::RestartRouter => {
                self.router.tally.count("router restarts");
                for place in 0..self.places.len() {
                    self.calls_cut(place, self.router.nodes.connection(place));
                }
                self.router.restart(self.now);
            }
            Blow::Drain { place, patience, back_after } => {
                let process = standing(place);
                let node = &self.processes[process];
                if node.life == Life::Running && !node.engine.is_draining() {
                    self.router.tally.count("drains");
                    self.after(patience, Happening::Trouble(Trouble::DrainEnds { process }));
                    let leaves = patience + LEAVES_WITHIN;
                    self.after(leaves, Happening::Trouble(Trouble::Leave { process }));
                    let back = leaves + back_after;
                    self.after(back, Happening::Trouble(Trouble::Start { place }));
                    self.step(process, Step::Drain);
                }
            }
        }
    }

    pub fn start_process(&mut self, place: usize) {
        let epoch = Epoch(self.random.id().max(1));
        let plan = &self.scenario.nodes[place];
        let (process, index) = (Process::start(place, plan, epoch, self.now), self.processes.len());
        let before = std::mem::replace(&mut self.places[place].process, index);
        self.by_epoch.insert(epoch, index);
        self.set_wake(index, process.next_wake());
        self.processes.push(process);
        // Whoever still speaks to the old one may be told that another stands there.
        if before != usize::MAX {
            let peer = self.processes[before].epoch;
            for process in 0..index {
                if self.random.chance(30) {
                    let reason = "it has another cluster secret or another epoch";
                    let step = Step::PeerFailed { peer, reason };
                    self.soon(Happening::Step { process, step });
                }
            }
        }
    }

    /// `is_heard`: the machine lives and resets the connections of the dead process.
    fn die(&mut self, process: usize, is_heard: bool) {
        let place = self.processes[process].place;
        self.processes[process].life = Life::Dead;
        self.processes[process].backlog.clear();
        self.set_wake(process, None);
        self.fall_silent(process, None);
        let links: Vec<_> = self.links.keys().copied().collect();
        for (from, to) in links.into_iter().filter(|(from, to)| [from, to].contains(&&process)) {
            self.links.remove(&(from, to));
            if is_heard {
                let peer = if from == process { to } else { from };
                self.closed(peer, process, "connection reset");
            }
        }
        let connection = self.router.nodes.connection(place);
        if is_heard {
            self.soon(Happening::ConnectionEnds { place, connection });
        } else {
            self.expect_no_answer(place, process);
        }
    }

    fn freeze(&mut self, process: usize, for_: Duration) {
        let node = &mut self.processes[process];
        if node.life != Life::Running {
            return;
        }
        self.router.tally.count("freezes");
        node.life = Life::Frozen;
        node.freezes.push((self.now, None));
        let place = node.place;
        self.set_wake(process, None);
        self.fall_silent(process, None);
        self.expect_no_answer(place, process);
        self.after(for_, Happening::Trouble(Trouble::Thaw { process }));
    }

    fn thaw(&mut self, process: usize) {
        let now = self.now;
        let node = &mut self.processes[process];
        if node.life != Life::Frozen {
            return;
        }
        node.life = Life::Running;
        node.freezes.last_mut().expect("it was frozen").1 = Some(now);
        self.end_silences(|silence| silence.of == process && silence.to.is_none());
        // What came meanwhile is taken before any deadline is looked at.
        for step in std::mem::take(&mut self.processes[process].backlog) {
            self.step(process, step);
        }
        self.step(process, Step::Wake);
    }

    /// The router asks every 500 ms whether the connection lives, and waits 2 s for an answer.
    pub fn expect_no_answer(&mut self, place: usize, process: usize) {
        let connection = self.router.nodes.connection(place);
        let after = self.random.millis(2000..=2500);
        self.after(after, Happening::KeepAlive { place, connection, process });
    }

    /// Nothing is in work at a node that drains: it goes in order.
    pub fn drained(&mut self, process: usize) {
        if self.processes[process].life == Life::Running {
            let load = self.processes[process].load();
            let left = (load.running, load.waiting, load.blocks_reserved);
            assert_eq!(left, (0, 0, 0), "a drained node has nothing in work");
            self.router.tally.count("drained in time");
            self.leave(process);
        }
    }

    fn leave(&mut self, process: usize) {
        if self.processes[process].life == Life::Running {
            let mut outs = Vec::new();
            self.processes[process].driver.stop(self.now, &mut outs);
            self.follow(process, outs);
            self.die(process, true);
        } else if self.processes[process].life != Life::Dead {
            self.die(process, false);
        }
    }

    fn fall_silent(&mut self, of: usize, to: Option<usize>) {
        self.silences.push(Silence { of, to, from: self.now, until: None });
    }

    fn end_silences(&mut self, ends: impl Fn(&Silence) -> bool) {
        let now = self.now;
        for silence in &mut self.silences {
            if silence.until.is_none() && ends(silence) {
                silence.until = Some(now);
            }
        }
    }
}
