//! Sources of node addresses: a static list, DNS names, or [etcd](crate::etcd).

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use cluster::{MemberChange, Members, NodeAddress, Role};
use tokio::{sync::watch, task::JoinHandle};
use tokio_util::sync::DropGuard;

#[derive(Debug, thiserror::Error)]
pub enum MembershipError {
    #[error("{address} is listed twice")]
    Duplicate { address: NodeAddress },
    #[error("the membership task did not end within {deadline:?}")]
    ShutdownDeadline { deadline: Duration },
    #[error("the membership task failed: {reason}")]
    Stopped { reason: String },
}

/// A source of addresses. The last list stays valid while the source is unreachable.
pub struct Membership {
    pub(crate) list: MemberList,
    /// The task that replaces the list; a static list has none. Dropping the guard stops the task
    /// without waiting.
    pub(crate) task: Option<(DropGuard, JoinHandle<()>)>,
    pub(crate) backend: Option<MembershipBackend>,
}

/// The service that a member list comes from, and whether that service answers; clones share the
/// state.
#[derive(Clone, Debug)]
pub struct MembershipBackend {
    /// `etcd` or `dns`.
    pub name: &'static str,
    is_connected: Arc<AtomicBool>,
}

impl MembershipBackend {
    pub(crate) fn new(name: &'static str) -> Self {
        Self { name, is_connected: Arc::default() }
    }

    pub fn is_connected(&self) -> bool {
        self.is_connected.load(Ordering::Relaxed)
    }

    pub(crate) fn set_connected(&self, is_connected: bool) {
        self.is_connected.store(is_connected, Ordering::Relaxed);
    }
}

impl Membership {
    /// Creates a static list from the gRPC URLs of prefill and decode nodes. A URL that appears
    /// twice is an error.
    pub fn listed<P: Into<String>, D: Into<String>>(
        prefill: impl IntoIterator<Item = P>,
        decode: impl IntoIterator<Item = D>,
    ) -> Result<Self, MembershipError> {
        let prefill = prefill.into_iter().map(|url| (Role::Prefill, url.into()));
        let decode = decode.into_iter().map(|url| (Role::Decode, url.into()));
        let mut members = Members::new();
        for (role, grpc) in prefill.chain(decode) {
            let address = NodeAddress { role, grpc };
            if members.keys().any(|member| member.grpc == address.grpc) {
                return Err(MembershipError::Duplicate { address });
            }
            members.insert(address, None);
        }
        Ok(Self { list: MemberList::new(members), task: None, backend: None })
    }

    /// Watches the list: first each known address as `Joined`, then the changes.
    pub fn watch(&self) -> MemberWatch {
        self.list.watch()
    }

    /// Returns the service behind the list; `None` for a static list.
    pub fn backend(&self) -> Option<&MembershipBackend> {
        self.backend.as_ref()
    }

    /// Stops the task that updates the list, and waits for its end for at most `deadline`. Watches
    /// end when no task holds the list any more.
    pub async fn shutdown(self, deadline: Duration) -> Result<(), MembershipError> {
        let Self { list, task, .. } = self;
        drop(list);
        let Some((stop, task)) = task else { return Ok(()) };
        drop(stop);
        match tokio::time::timeout(deadline, task).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(MembershipError::Stopped { reason: error.to_string() }),
            Err(_) => Err(MembershipError::ShutdownDeadline { deadline }),
        }
    }
}

/// The current list and its watches; clones share both. A source replaces the whole list.
#[derive(Clone)]
pub struct MemberList {
    list: watch::Sender<Arc<Members>>,
}

impl MemberList {
    pub fn new(members: Members) -> Self {
        Self { list: watch::Sender::new(Arc::new(members)) }
    }

    pub fn replace(&self, members: Members) {
        self.list.send_replace(Arc::new(members));
    }

    pub fn members(&self) -> Arc<Members> {
        self.list.borrow().clone()
    }

    pub fn watch(&self) -> MemberWatch {
        MemberWatch {
            list: self.list.subscribe(),
            seen: Members::new(),
            changes: VecDeque::new(),
            is_first: true,
        }
    }
}

/// Stream of changes to the member list. Each read compares the latest list with the list that this
/// reader saw last, so a slow reader skips the lists between and the stream needs no queue.
pub struct MemberWatch {
    list: watch::Receiver<Arc<Members>>,
    seen: Members,
    changes: VecDeque<MemberChange>,
    /// Whether the reader has not seen any list yet: its first read does not wait for a change.
    is_first: bool,
}

impl MemberWatch {
    /// Waits for the next change; `None` when the source has ended. The function is cancel-safe.
    pub async fn next(&mut self) -> Option<MemberChange> {
        loop {
            if let Some(change) = self.changes.pop_front() {
                return Some(change);
            }
            if !std::mem::take(&mut self.is_first) && self.list.changed().await.is_err() {
                return None;
            }
            let latest = self.list.borrow_and_update().clone();
            let gone = missing(&self.seen, &latest).map(MemberChange::Left);
            let come = missing(&latest, &self.seen).map(MemberChange::Joined);
            self.changes = gone.chain(come).collect();
            self.seen = (*latest).clone();
        }
    }
}

/// Returns the members of `one` that `other` lacks or lists with another process epoch.
fn missing<'a>(one: &'a Members, other: &'a Members) -> impl Iterator<Item = NodeAddress> + 'a {
    one.iter()
        .filter(|(address, process)| other.get(*address) != Some(*process))
        .map(|(address, _)| address.clone())
}

#[cfg(test)]
mod tests {
    use cluster::Epoch;

    use super::*;

    fn decode(port: u16) -> NodeAddress {
        NodeAddress { role: Role::Decode, grpc: format!("http://127.0.0.1:{port}") }
    }

    fn list<const N: usize>(ports: [u16; N]) -> Members {
        ports.map(|port| (decode(port), None)).into()
    }

    #[tokio::test]
    async fn shutdown_ends_the_watches_of_a_static_list() {
        let members = Membership::listed(["http://a:1"], ["http://b:1"]).unwrap();
        let mut watch = members.watch();
        assert_eq!(members.list.members().len(), 2);
        assert!(watch.next().await.is_some() && watch.next().await.is_some());
        members.shutdown(Duration::from_secs(1)).await.unwrap();
        assert_eq!(watch.next().await, None);
    }

    #[test]
    fn address_with_two_roles_is_rejected() {
        let twice = Membership::listed(["http://a:1"], ["http://a:1"]);
        assert!(matches!(twice, Err(MembershipError::Duplicate { .. })));
    }

    #[tokio::test]
    async fn watch_yields_all_members_then_changes() {
        let members = MemberList::new(list([1, 2]));
        let mut watch = members.watch();
        assert_eq!(watch.next().await, Some(MemberChange::Joined(decode(1))));
        assert_eq!(watch.next().await, Some(MemberChange::Joined(decode(2))));
        members.replace(list([2, 3]));
        assert_eq!(watch.next().await, Some(MemberChange::Left(decode(1))));
        assert_eq!(watch.next().await, Some(MemberChange::Joined(decode(3))));
        drop(members);
        assert_eq!(watch.next().await, None);
    }

    #[tokio::test]
    async fn slow_reader_sees_only_the_latest_list() {
        let members = MemberList::new(Members::new());
        let mut watch = members.watch();
        for port in 1..1000 {
            members.replace(list([port]));
        }
        assert_eq!(watch.next().await, Some(MemberChange::Joined(decode(999))));
        members.replace(Members::new());
        members.replace(list([999]));
        members.replace(list([5]));
        assert_eq!(watch.next().await, Some(MemberChange::Left(decode(999))));
        assert_eq!(watch.next().await, Some(MemberChange::Joined(decode(5))));
    }

    #[tokio::test]
    async fn new_process_at_a_known_address_yields_left_and_joined() {
        let process = |byte| Some(Epoch::from_bytes(&[byte; 16]).unwrap());
        let members = MemberList::new([(decode(1), process(1)), (decode(2), process(2))].into());
        let mut watch = members.watch();
        assert!(watch.next().await.is_some() && watch.next().await.is_some());
        members.replace([(decode(1), process(3)), (decode(2), process(2))].into());
        assert_eq!(watch.next().await, Some(MemberChange::Left(decode(1))));
        assert_eq!(watch.next().await, Some(MemberChange::Joined(decode(1))));
        drop(members);
        assert_eq!(watch.next().await, None);
    }
}
