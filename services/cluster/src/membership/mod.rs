//! Where the addresses of nodes come from.

mod static_list;

use std::{
    collections::{BTreeSet, VecDeque},
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use tokio::sync::watch;

use crate::Role;

pub use static_list::StaticMembership;

/// Where a node is reached, and as what. What it really is, its record says.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeAddress {
    pub role: Role,
    /// `http://host:port`.
    pub grpc: String,
}

impl fmt::Display for NodeAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} node {}", self.role, self.grpc)
    }
}

/// One difference between two lists of members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberChange {
    Joined(NodeAddress),
    /// No longer listed: a reason to probe, no proof of death.
    Left(NodeAddress),
}

#[derive(Debug, thiserror::Error)]
pub enum MembershipError {
    #[error("{address} is listed twice")]
    Duplicate { address: NodeAddress },
    #[error("leaving took longer than {deadline:?}")]
    ShutdownDeadline { deadline: Duration },
    #[error("membership stopped: {reason}")]
    Stopped { reason: String },
}

/// A source of addresses. Its last list stays good while the source itself is away.
pub trait Membership: Send + Sync {
    /// Everything known now, each as `Joined`, then what changes.
    fn watch(&self) -> MemberWatch;

    /// The last list, in order.
    fn last_known(&self) -> Vec<NodeAddress>;

    /// Stops whatever follows the source and waits for it, at most `deadline`.
    fn shutdown(self: Box<Self>, deadline: Duration) -> Shutdown;
}

/// What [`Membership::shutdown`] returns.
pub type Shutdown = Pin<Box<dyn Future<Output = Result<(), MembershipError>> + Send>>;

/// The current list, from which watches are made. A source replaces it as a whole.
pub struct MemberList {
    list: watch::Sender<Arc<BTreeSet<NodeAddress>>>,
}

impl MemberList {
    pub fn new(members: BTreeSet<NodeAddress>) -> Self {
        Self { list: watch::Sender::new(Arc::new(members)) }
    }

    pub fn replace(&self, members: BTreeSet<NodeAddress>) {
        self.list.send_replace(Arc::new(members));
    }

    pub fn members(&self) -> Arc<BTreeSet<NodeAddress>> {
        self.list.borrow().clone()
    }

    pub fn watch(&self) -> MemberWatch {
        MemberWatch {
            list: self.list.subscribe(),
            seen: BTreeSet::new(),
            changes: VecDeque::new(),
            fresh: true,
        }
    }
}

/// Turns lists into changes. Bounded however slowly it is read: only the latest list counts.
pub struct MemberWatch {
    list: watch::Receiver<Arc<BTreeSet<NodeAddress>>>,
    seen: BTreeSet<NodeAddress>,
    changes: VecDeque<MemberChange>,
    /// The list at the time of the call to `watch` was not looked at yet.
    fresh: bool,
}

impl MemberWatch {
    /// The next change; waits for one as long as the source lives, then `None`. Dropping the future
    /// loses nothing.
    pub async fn next(&mut self) -> Option<MemberChange> {
        loop {
            if let Some(change) = self.changes.pop_front() {
                return Some(change);
            }
            if !std::mem::take(&mut self.fresh) && self.list.changed().await.is_err() {
                return None;
            }
            let latest = self.list.borrow_and_update().clone();
            let left = self.seen.difference(&latest).cloned().map(MemberChange::Left);
            let joined = latest.difference(&self.seen).cloned().map(MemberChange::Joined);
            self.changes = left.chain(joined).collect();
            self.seen = (*latest).clone();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(port: u16) -> NodeAddress {
        NodeAddress { role: Role::Decode, grpc: format!("http://127.0.0.1:{port}") }
    }

    #[tokio::test]
    async fn a_watch_begins_with_everyone_and_goes_on_with_changes() {
        let list = MemberList::new([decode(1), decode(2)].into());
        let mut watch = list.watch();
        assert_eq!(watch.next().await, Some(MemberChange::Joined(decode(1))));
        assert_eq!(watch.next().await, Some(MemberChange::Joined(decode(2))));
        list.replace([decode(2), decode(3)].into());
        assert_eq!(watch.next().await, Some(MemberChange::Left(decode(1))));
        assert_eq!(watch.next().await, Some(MemberChange::Joined(decode(3))));
        drop(list);
        assert_eq!(watch.next().await, None);
    }

    #[tokio::test]
    async fn a_slow_reader_sees_only_the_latest_list() {
        let list = MemberList::new(BTreeSet::new());
        let mut watch = list.watch();
        for port in 1..1000 {
            list.replace([decode(port)].into());
        }
        assert_eq!(watch.next().await, Some(MemberChange::Joined(decode(999))));
        list.replace(BTreeSet::new());
        list.replace([decode(999)].into());
        list.replace([decode(5)].into());
        assert_eq!(watch.next().await, Some(MemberChange::Left(decode(999))));
        assert_eq!(watch.next().await, Some(MemberChange::Joined(decode(5))));
    }
}
