//! What must hold of the cluster as a whole: while it runs, and when nothing is left to do.

use std::time::{Duration, Instant};

use kv_transfer::{
    api::{Event, TransferId},
    config::LEASE,
};

use crate::{engine_thread::Tenure, process::Life, tally::Tally, world::World};

/// Everything of a lost peer is back within this time.
const BACK: Duration = Duration::from_millis(500).saturating_add(LEASE);

/// `of` did not speak to `to`, or to anyone.
#[derive(Clone, Copy, Debug)]
pub struct Silence {
    pub of: usize,
    pub to: Option<usize>,
    pub from: Instant,
    pub until: Option<Instant>,
}

impl World {
    /// A sender may fail where its receiver has everything, since the last word is always
    /// uncertain; never the other way round.
    pub fn check_event(&mut self, event: &Event) {
        match event {
            Event::Arrived { transfer, .. } => {
                assert!(self.arrived.insert(*transfer), "{transfer} arrived twice");
            }
            Event::Delivered { transfer, .. } => {
                assert!(self.arrived.contains(transfer), "{transfer} was delivered, not arrived");
            }
            Event::Ready { .. } | Event::ReceiveFailed { .. } | Event::SendFailed { .. } => {}
        }
    }

    /// The scheduler of `process` has the blocks of a transfer back: in time, if its peer was lost.
    pub fn check_tenure(&self, process: usize, transfer: TransferId, tenure: &Tenure) {
        // Late words of the dead prove life.
        if self.weather.straggling > 0 {
            return;
        }
        let peer = self.by_epoch[&tenure.peer];
        let slack = 2 * self.weather.hop_max + Duration::from_millis(1);
        let froze = &self.processes[process].freezes;
        for silence in self.silences.iter().filter(|silence| silence.of == peer) {
            if silence.to.is_some_and(|to| to != process) {
                continue;
            }
            let from = silence.from.max(tenure.since);
            if silence.until.is_some_and(|until| until <= from + BACK) {
                continue;
            }
            // One that was frozen itself starts to count when it goes on.
            let thawed = froze
                .iter()
                .filter(|(at, until)| *at <= from + BACK && until.is_none_or(|until| until > from));
            let thawed = thawed.filter_map(|(_, until)| *until).max();
            let bound = thawed.unwrap_or(from).max(from) + BACK + slack;
            assert!(
                self.now <= bound,
                "{} got the blocks of {transfer} back {:?} too late: {} fell silent after {:?}, now {:?}",
                self.processes[process].name,
                self.now - bound,
                self.processes[peer].name,
                silence.from - self.start,
                self.now - self.start,
            );
        }
    }

    /// At the end: nothing is left anywhere.
    pub fn check_quiet(&self) {
        for request in self.router.requests() {
            request.check_ended();
        }
        for place in &self.places {
            let process = &self.processes[place.process];
            assert_eq!(process.life, Life::Running, "{} is back", process.name);
            process.check_quiet();
        }
        self.router.check_quiet();
    }

    /// What was seen, and a number that equal runs share.
    pub fn outcome(&self) -> (Tally, u64) {
        let mut tally = self.router.tally.clone();
        for process in &self.processes {
            let counters = process.driver.core.counters();
            tally.add("arrived", counters.arrived);
            tally.add("receive failed", counters.receive_failed);
            tally.add("delivered", counters.delivered);
            tally.add("send failed", counters.send_failed);
            tally.add("notices resent", counters.notices_resent);
            tally.add("preemptions", process.engine.scheduler().preemptions());
        }
        tally.add("processes", self.processes.len() as u64);
        (tally, self.digest)
    }
}
