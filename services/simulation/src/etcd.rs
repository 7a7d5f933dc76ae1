//! etcd as the routers see it: a list of registered nodes that is published while etcd is
//! reachable.

use std::{
    pin::pin,
    task::{Context, Poll, Waker},
};

use cluster::{MemberChange, Members};
use membership::{MemberList, MemberWatch};

pub(crate) struct Etcd {
    members: Members,
    list: MemberList,
    /// Each router's watch, once the router has reached etcd.
    watches: Vec<Option<MemberWatch>>,
    /// Number of outages that have not ended.
    outages: u32,
}

impl Etcd {
    pub(crate) fn new(router_count: usize) -> Self {
        Self {
            members: Members::new(),
            list: MemberList::new(Members::new()),
            watches: (0..router_count).map(|_| None).collect(),
            outages: 0,
        }
    }

    /// Drops the watch of a router process that was restarted.
    pub(crate) fn forget_router(&mut self, router: usize) {
        self.watches[router] = None;
    }

    /// Returns the changes that a router has not received yet.
    pub(crate) fn changes(&mut self, router: usize) -> Vec<MemberChange> {
        let watch = self.watches[router].get_or_insert_with(|| self.list.watch());
        let mut context = Context::from_waker(Waker::noop());
        std::iter::from_fn(|| match pin!(watch.next()).poll(&mut context) {
            Poll::Ready(change) => change,
            Poll::Pending => None,
        })
        .collect()
    }

    pub(crate) fn is_reachable(&self) -> bool {
        self.outages == 0
    }

    pub(crate) fn begin_outage(&mut self) {
        self.outages += 1;
    }

    pub(crate) fn end_outage(&mut self) {
        self.outages -= 1;
    }

    /// Changes the list of registered nodes.
    pub(crate) fn write(&mut self, write: impl FnOnce(&mut Members)) {
        write(&mut self.members);
        self.list.replace(self.members.clone());
    }
}
