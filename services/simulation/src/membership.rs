//! etcd as the routers see it: a list of registered nodes that is published while etcd is reachable.
//!
//! A node registers shortly after its start. Its record is removed when it exits, or some time after
//! it died or was paused. During an outage nothing is published, registered or removed.

use std::{
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use cluster::{MemberChange, Members};
use membership::{MemberList, MemberWatch};

use crate::{
    event_loop::{Order, SimEvent, Simulation},
    process::ProcessState,
};

/// Time-to-live of a node's record in etcd.
const RECORD_TTL: Duration = Duration::from_secs(5);

pub struct Etcd {
    members: Members,
    list: MemberList,
    /// Each router's watch, once the router has reached etcd.
    watches: Vec<Option<MemberWatch>>,
    /// Number of outages that have not ended.
    outages: u32,
}

impl Etcd {
    pub fn new(router_count: usize) -> Self {
        Self {
            members: Members::new(),
            list: MemberList::new(Members::new()),
            watches: (0..router_count).map(|_| None).collect(),
            outages: 0,
        }
    }

    /// Drops the watch of a router process that was restarted.
    pub fn forget_router(&mut self, router: usize) {
        self.watches[router] = None;
    }

    /// Returns the changes that a router has not received yet.
    fn changes(&mut self, router: usize) -> Vec<MemberChange> {
        let watch = self.watches[router].get_or_insert_with(|| self.list.watch());
        let mut context = Context::from_waker(Waker::noop());
        std::iter::from_fn(|| match pin!(watch.next()).poll(&mut context) {
            Poll::Ready(change) => change,
            Poll::Pending => None,
        })
        .collect()
    }
}

impl Simulation {
    /// Schedules the registration of a process that started or resumed.
    pub fn register_later(&mut self, process: usize) {
        if self.etcd.is_some() {
            let delay = self.random.millis(5..=200);
            self.clock.after(delay, SimEvent::Register { process });
        }
    }

    /// Schedules the expiry of the record of a process that died or was paused.
    pub fn expire_later(&mut self, process: usize) {
        if self.etcd.is_some() {
            self.clock.after(RECORD_TTL, SimEvent::Expire { process });
        }
    }

    pub fn register(&mut self, process: usize) {
        let node = &self.processes[process];
        if node.state == ProcessState::Running {
            let address = self.scenario.addresses()[node.host].clone();
            let epoch = node.epoch;
            self.write_members(SimEvent::Register { process }, |members| {
                members.insert(address, Some(epoch));
            });
        }
    }

    pub fn expire(&mut self, process: usize) {
        if self.processes[process].state != ProcessState::Running {
            self.deregister(process);
        }
    }

    /// Removes the record, unless another process has registered with the address.
    pub fn deregister(&mut self, process: usize) {
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
        if etcd.outages > 0 {
            return self.clock.after(RECORD_TTL / 5, again);
        }
        write(&mut etcd.members);
        etcd.list.replace(etcd.members.clone());
        for router in 0..self.routers.len() {
            self.publish_members(router);
        }
    }

    /// Sends the changes of the list to a router. Without etcd the router has a static list.
    pub fn publish_members(&mut self, router: usize) {
        let changes = match &mut self.etcd {
            Some(etcd) if etcd.outages > 0 => return,
            Some(etcd) => etcd.changes(router),
            None => self.scenario.addresses().into_iter().map(MemberChange::Joined).collect(),
        };
        for change in changes {
            let delay = self.network.delay();
            self.send_in_order(Order::Members(router), delay, SimEvent::Member { router, change });
        }
    }

    pub fn begin_etcd_outage(&mut self) {
        if let Some(etcd) = &mut self.etcd {
            etcd.outages += 1;
            self.coverage.count("etcd outages");
        }
    }

    pub fn end_etcd_outage(&mut self) {
        let Some(etcd) = &mut self.etcd else { return };
        etcd.outages -= 1;
        for router in 0..self.routers.len() {
            self.publish_members(router);
        }
    }
}
