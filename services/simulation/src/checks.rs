//! Invariants of the cluster as a whole: during the run, and after the last request.

use std::time::Duration;

use engine::event::InFlight;
use kv_transfer::{
    api::{Event, TransferId},
    config::LEASE,
};

use crate::{
    Outcome,
    event_loop::Simulation,
    process::OFFER_AGAIN,
    process_io::{ProcessState, TransferHold},
    scenario::Fault,
};

/// All blocks of a transfer with a lost peer are free within this time.
pub(crate) const BLOCKS_FREE_MAX: Duration = Duration::from_millis(500).saturating_add(LEASE);

impl Simulation {
    /// Checks an event. A sender may fail although its receiver has every block, because the last
    /// ACK may be lost. A sender never succeeds without its receiver.
    pub(crate) fn check_event(&self, event: &Event) {
        if let Event::Delivered { transfer, .. } = event {
            let has_arrived = self.arrived.contains(transfer);
            assert!(has_arrived, "{transfer} was delivered but did not arrive");
        }
    }

    /// Checks that blocks of a transfer with a lost peer were released in time.
    pub(crate) fn check_hold(&mut self, process: usize, transfer: TransferId, hold: &TransferHold) {
        // A late message of a dead process extends the lease.
        if self.network.faults.lateness > 0 {
            return;
        }
        let peer = self.by_epoch[&hold.peer];
        let plan = &self.scenario.nodes[self.processes[process].host];
        let hop = self.scenario.thread_delay_max;
        // A short queue between the threads makes events wait for each other.
        let queued = plan.transfers.transfers_max.div_ceil(plan.transfer_events_max) as u32;
        let slack = 2 * hop + (queued - 1) * (hop + OFFER_AGAIN) + Duration::from_millis(1);
        let paused = &self.processes[process].pauses;
        for outage in self.outages.between(peer, process) {
            let from = outage.from.max(hold.since);
            if outage.until.is_some_and(|until| until <= from + BLOCKS_FREE_MAX) {
                continue;
            }
            // A process that was paused itself counts from its resumption.
            let resumed = paused.iter().filter(|(at, until)| {
                *at <= from + BLOCKS_FREE_MAX && until.is_none_or(|until| until > from)
            });
            let resumed = resumed.filter_map(|(_, until)| *until).max();
            self.longest_release = self.longest_release.max(self.clock.now() - from);
            let bound = resumed.unwrap_or(from).max(from) + BLOCKS_FREE_MAX + slack;
            assert!(
                self.clock.now() <= bound,
                "{} freed the blocks of {transfer} {:?} too late: {} was lost after {:?}, now {:?}",
                self.processes[process].name,
                self.clock.now() - bound,
                self.processes[peer].name,
                outage.from - self.clock.start(),
                self.clock.now() - self.clock.start(),
            );
        }
    }

    /// Checks after the run that no resource of any request is left.
    pub(crate) fn check_idle(&self) {
        for host in &self.hosts {
            let process = &self.processes[host.process];
            assert_eq!(process.state, ProcessState::Running, "{} was restarted", process.name);
            process.check_idle();
        }
        let ends_requests = |(_, fault): &(Duration, Fault)| matches!(fault, Fault::UpdateWeights(plan) if plan.in_flight == InFlight::Abort);
        let may_end_requests = self.scenario.faults.iter().any(ends_requests);
        for router in &self.routers {
            router.check_idle();
            let ended = router.coverage.get("ended by an update");
            assert!(ended == 0 || may_end_requests, "no update ends requests");
        }
        self.updates.check_idle();
    }

    /// Returns the coverage and the digest of the event sequence.
    pub(crate) fn outcome(&self) -> Outcome {
        let mut coverage = self.coverage.clone();
        for router in &self.routers {
            coverage.merge(&router.coverage);
        }
        for process in &self.processes {
            let counters = process.transfers.core.counters();
            coverage.add("arrived", counters.arrived);
            coverage.add("receive failed", counters.receive_failed);
            coverage.add("delivered", counters.delivered);
            coverage.add("send failed", counters.send_failed);
            coverage.add("control messages resent", counters.control_resent);
            coverage.merge(&process.coverage);
            coverage.merge(&process.weights.coverage);
        }
        coverage.add("processes", self.processes.len() as u64);
        let gaps = self.routers.iter().map(|router| router.longest_gap);
        let decode_gaps = self.routers.iter().map(|router| router.longest_decode_gap);
        Outcome {
            coverage,
            pauses: self.routers.iter().flat_map(|router| router.pauses()).collect(),
            longest_gap: gaps.max().unwrap_or_default(),
            longest_decode_gap: decode_gaps.max().unwrap_or_default(),
            picks: self.routers.iter().flat_map(|router| router.picks.clone()).collect(),
            longest_release: self.longest_release,
            digest: self.digest,
        }
    }
}
