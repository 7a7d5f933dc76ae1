//! The registration of nodes in etcd.
//!
//! A node registers shortly after its start. Its record is removed when it exits, or some time
//! after it died or was paused. During an outage nothing is published, registered or removed.

use std::time::Duration;

use cluster::{MemberChange, Members};

use crate::{
    event_loop::Simulation,
    events::{Order, SimEvent},
    process_io::ProcessState,
};

/// Time-to-live of a node's record in etcd.
const RECORD_TTL: Duration = Duration::from_secs(5);

impl Simulation {
    /// Schedules the registration of a process that started or resumed.
    pub(crate) fn register_later(&mut self, process: usize) {
        if self.etcd.is_some() {
            let delay = self.random.millis(5..=200);
            self.clock.after(delay, SimEvent::Register { process });
        }
    }

    /// Schedules the expiry of the record of a process that died or was paused.
    pub(crate) fn expire_later(&mut self, process: usize) {
        if self.etcd.is_some() {
            self.clock.after(RECORD_TTL, SimEvent::Expire { process });
        }
    }

    pub(crate) fn register(&mut self, process: usize) {
        let node = &self.processes[process];
        if node.state == ProcessState::Running {
            let address = self.scenario.addresses()[node.host].clone();
            let epoch = node.epoch;
            self.write_members(SimEvent::Register { process }, |members| {
                members.insert(address, Some(epoch));
            });
        }
    }

    pub(crate) fn expire(&mut self, process: usize) {
        if self.processes[process].state != ProcessState::Running {
            self.deregister(process);
        }
    }

    /// Removes the record, unless another process has registered with the address.
    pub(crate) fn deregister(&mut self, process: usize) {
        let node = &self.processes[process];
        let address = self.scenario.addresses()[node.host].clone();
        let epoch = node.epoch;
        self.write_members(SimEvent::Expire { process }, |members| {
            if members.get(&address) == Some(&Some(epoch)) {
                members.remove(&address);
            }
        });
    }

    /// Writes to etcd. During an outage `again` is scheduled instead.
    fn write_members(&mut self, again: SimEvent, write: impl FnOnce(&mut Members)) {
        let Some(etcd) = &mut self.etcd else { return };
        if !etcd.is_reachable() {
            return self.clock.after(RECORD_TTL / 5, again);
        }
        etcd.write(write);
        for router in 0..self.routers.len() {
            self.publish_members(router);
        }
    }

    /// Sends the changes of the list to a router. Without etcd the router has a static list.
    pub(crate) fn publish_members(&mut self, router: usize) {
        let changes = match &mut self.etcd {
            Some(etcd) if !etcd.is_reachable() => return,
            Some(etcd) => etcd.changes(router),
            None => self.scenario.addresses().into_iter().map(MemberChange::Joined).collect(),
        };
        for change in changes {
            let delay = self.network.delay();
            self.send_in_order(Order::Members(router), delay, SimEvent::Member { router, change });
        }
    }

    pub(crate) fn begin_etcd_outage(&mut self) {
        if let Some(etcd) = &mut self.etcd {
            etcd.begin_outage();
            self.coverage.count("etcd outages");
        }
    }

    pub(crate) fn end_etcd_outage(&mut self) {
        let Some(etcd) = &mut self.etcd else { return };
        etcd.end_outage();
        for router in 0..self.routers.len() {
            self.publish_members(router);
        }
    }
}
