//! Members from DNS: each address of a name is a member, as with a headless Service of Kubernetes.
//!
//! Every name is looked up once a second by the system's resolver. A failed lookup keeps the last
//! addresses: the resolver does not distinguish a name without addresses from a name server that
//! does not answer, and the router probes the nodes itself. An address that is missing from an
//! answer leaves like a node that is missing from etcd.

use std::{collections::BTreeSet, io, net::SocketAddr, time::Duration};

use cluster::{Members, NodeAddress, Role};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{MemberList, Membership, MembershipBackend};

/// Time from the start of a lookup to the next one.
const EVERY: Duration = Duration::from_secs(1);
/// Deadline of a lookup. A resolver that does not answer is reported then.
const LOOKUP_MAX: Duration = Duration::from_secs(2);
/// Maximum number of addresses of a name; further addresses are ignored.
const ADDRESSES_MAX: usize = 1024;

/// A name whose addresses are the nodes of a role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsName {
    pub role: Role,
    /// `host:port`.
    pub authority: String,
}

/// The outcome of a lookup; an error is its text.
type Answer = Result<Vec<SocketAddr>, String>;

/// An event to log once.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DnsReport {
    Found { addresses: usize },
    Failed { reason: String },
}

/// A name and its last known addresses.
struct ResolvedName {
    name: DnsName,
    addresses: BTreeSet<SocketAddr>,
    /// `None` before the first answer.
    has_answer: Option<bool>,
}

impl ResolvedName {
    /// Takes the outcome of a lookup. Returns a report if lookups began to succeed or to fail.
    fn handle(&mut self, answer: Answer) -> Option<DnsReport> {
        let answer = answer.and_then(|addresses| match addresses.is_empty() {
            true => Err("the name has no address".to_owned()),
            false => Ok(addresses),
        });
        let had_answer = self.has_answer.replace(answer.is_ok());
        match answer {
            Ok(addresses) => {
                self.addresses = addresses.into_iter().take(ADDRESSES_MAX).collect();
                let addresses = self.addresses.len();
                (had_answer != Some(true)).then_some(DnsReport::Found { addresses })
            }
            Err(reason) => (had_answer != Some(false)).then_some(DnsReport::Failed { reason }),
        }
    }

    fn log(&self, report: DnsReport) {
        let DnsName { role, authority } = &self.name;
        match report {
            DnsReport::Found { addresses } => {
                tracing::info!("cluster.{role} = dns:{authority} has {addresses} addresses");
            }
            DnsReport::Failed { reason } => tracing::warn!(
                "cannot resolve cluster.{role} = dns:{authority}: {reason}; keeping its last {} addresses; \
                 expected a name with the address of each node",
                self.addresses.len()
            ),
        }
    }
}

/// Returns the listed members and the addresses of all names.
fn members(listed: &Members, names: &[ResolvedName]) -> Members {
    let of = |resolved: &ResolvedName| {
        let role = resolved.name.role;
        let address = |at: &SocketAddr| (NodeAddress { role, grpc: format!("http://{at}") }, None);
        resolved.addresses.iter().map(address).collect::<Vec<_>>()
    };
    listed.clone().into_iter().chain(names.iter().flat_map(of)).collect()
}

impl Membership {
    /// Adds the addresses of these names to a static list, from now on. Must run inside a tokio
    /// runtime.
    pub fn resolving(self, names: Vec<DnsName>) -> Self {
        self.resolving_by(names, |authority| async move {
            Ok(tokio::net::lookup_host(authority).await?.collect())
        })
    }

    fn resolving_by<F, L>(self, names: Vec<DnsName>, lookup: F) -> Self
    where
        F: Fn(String) -> L + Clone + Send + 'static,
        L: Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'static,
    {
        if names.is_empty() {
            return self;
        }
        let (list, stop) = (self.list, CancellationToken::new());
        let backend = MembershipBackend::new("dns");
        let follow = follow(list.clone(), names, lookup, backend.clone());
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            tokio::select! {
                () = stopped.cancelled() => {}
                () = follow => {}
            }
        });
        Self { list, task: Some((stop.drop_guard(), task)), backend: Some(backend) }
    }
}

/// Looks all names up until dropped, and replaces the list when an answer changes it.
async fn follow<F, L>(list: MemberList, names: Vec<DnsName>, lookup: F, backend: MembershipBackend)
where
    F: Fn(String) -> L + Clone + Send + 'static,
    L: Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'static,
{
    let listed = list.members();
    let (answers, mut answered) = mpsc::channel(names.len());
    let mut lookups = JoinSet::new();
    for (index, name) in names.iter().enumerate() {
        lookups.spawn(look_up(index, name.authority.clone(), lookup.clone(), answers.clone()));
    }
    let resolved = |name| ResolvedName { name, addresses: BTreeSet::new(), has_answer: None };
    let mut names: Vec<ResolvedName> = names.into_iter().map(resolved).collect();
    while let Some((index, answer)) = answered.recv().await {
        let report = names[index].handle(answer);
        if let Some(report) = report {
            names[index].log(report);
        }
        backend.set_connected(names.iter().all(|name| name.has_answer == Some(true)));
        let members = members(&listed, &names);
        if members != *list.members() {
            list.replace(members);
        }
    }
}

/// Looks one name up again and again. A lookup occupies a thread until the resolver gives up, so
/// each name has at most one lookup in flight.
async fn look_up<F, L>(
    index: usize,
    authority: String,
    lookup: F,
    answers: mpsc::Sender<(usize, Answer)>,
) where
    F: Fn(String) -> L,
    L: Future<Output = io::Result<Vec<SocketAddr>>>,
{
    loop {
        let next = Instant::now() + EVERY;
        let mut call = std::pin::pin!(lookup(authority.clone()));
        let answer = match timeout(LOOKUP_MAX, &mut call).await {
            Ok(answer) => answer.map_err(|error| error.to_string()),
            Err(_) => {
                let late = Err(format!("no answer within {LOOKUP_MAX:?}"));
                // Fails only when the follower has ended.
                let _ = answers.send((index, late)).await;
                call.await.map_err(|error| error.to_string())
            }
        };
        if answers.send((index, answer)).await.is_err() {
            return;
        }
        sleep_until(next).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use cluster::MemberChange;

    use super::*;
    use crate::MemberWatch;

    fn name(authority: &str) -> DnsName {
        DnsName { role: Role::Decode, authority: authority.to_owned() }
    }

    fn node(text: &str) -> NodeAddress {
        NodeAddress { role: Role::Decode, grpc: format!("http://{text}") }
    }

    async fn change(watch: &mut MemberWatch) -> MemberChange {
        timeout(Duration::from_secs(600), watch.next()).await.expect("a change").unwrap()
    }

    #[derive(Clone)]
    enum Scripted {
        Addresses(&'static [&'static str]),
        Fails,
        Hangs,
    }

    /// Returns a membership of one name whose lookups have the outcome that the test sets, and the
    /// number of lookups.
    fn scripted() -> (Membership, Arc<Mutex<(Scripted, usize)>>) {
        let script = Arc::new(Mutex::new((Scripted::Addresses(&[]), 0)));
        let asked = script.clone();
        let listed = Membership::listed(["http://a:1"; 0], ["http://10.0.0.9:1"]).unwrap();
        let membership = listed.resolving_by(vec![name("d:1")], move |authority| {
            assert_eq!(authority, "d:1");
            let mut script = asked.lock().unwrap();
            script.1 += 1;
            let script = script.0.clone();
            async move {
                match script {
                    Scripted::Addresses(all) => {
                        Ok(all.iter().map(|at| at.parse().unwrap()).collect())
                    }
                    Scripted::Fails => Err(io::Error::other("no such name")),
                    Scripted::Hangs => {
                        tokio::time::sleep(60 * LOOKUP_MAX).await;
                        Err(io::Error::other("gave up"))
                    }
                }
            }
        });
        (membership, script)
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_join_and_leave_with_the_answers() {
        let (membership, script) = scripted();
        script.lock().unwrap().0 = Scripted::Addresses(&["10.0.0.1:1", "[fd00::1]:1"]);
        let mut watch = membership.watch();
        assert_eq!(change(&mut watch).await, MemberChange::Joined(node("10.0.0.9:1")));
        assert_eq!(change(&mut watch).await, MemberChange::Joined(node("10.0.0.1:1")));
        assert_eq!(change(&mut watch).await, MemberChange::Joined(node("[fd00::1]:1")));
        script.lock().unwrap().0 = Scripted::Addresses(&["10.0.0.2:1", "[fd00::1]:1"]);
        assert_eq!(change(&mut watch).await, MemberChange::Left(node("10.0.0.1:1")));
        assert_eq!(change(&mut watch).await, MemberChange::Joined(node("10.0.0.2:1")));
        membership.shutdown(Duration::from_secs(1)).await.unwrap();
        assert_eq!(watch.next().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn failed_or_hung_lookup_keeps_the_last_addresses() {
        let (membership, script) = scripted();
        script.lock().unwrap().0 = Scripted::Addresses(&["10.0.0.1:1"]);
        let mut watch = membership.watch();
        assert_eq!(change(&mut watch).await, MemberChange::Joined(node("10.0.0.9:1")));
        assert_eq!(change(&mut watch).await, MemberChange::Joined(node("10.0.0.1:1")));
        assert!(membership.backend().unwrap().is_connected());
        for outcome in [Scripted::Fails, Scripted::Addresses(&[]), Scripted::Hangs] {
            *script.lock().unwrap() = (outcome, 0);
            let unchanged = timeout(20 * EVERY, watch.next()).await;
            assert!(unchanged.is_err(), "{unchanged:?}");
            assert!(!membership.backend().unwrap().is_connected());
            let members = membership.list.members();
            assert!(members.keys().eq([&node("10.0.0.1:1"), &node("10.0.0.9:1")]), "{members:?}");
        }
        // Lookups of a resolver that hangs do not pile up.
        assert_eq!(script.lock().unwrap().1, 1);
    }

    #[test]
    fn outcome_is_reported_when_it_changes() {
        let mut resolved =
            ResolvedName { name: name("d:1"), addresses: BTreeSet::new(), has_answer: None };
        let found = |count: u16| Ok((0..count).map(|port| ([10, 0, 0, 1], port).into()).collect());
        let failed = |reason: &str| Some(DnsReport::Failed { reason: reason.to_owned() });
        assert_eq!(resolved.handle(Ok(Vec::new())), failed("the name has no address"));
        assert_eq!(resolved.handle(Err("no such name".into())), None);
        assert_eq!(resolved.handle(found(2)), Some(DnsReport::Found { addresses: 2 }));
        assert_eq!(resolved.handle(found(3)), None);
        assert_eq!(resolved.handle(Err("late".into())), failed("late"));
        assert_eq!(resolved.addresses.len(), 3);
        assert_eq!(
            resolved.handle(found(5000)),
            Some(DnsReport::Found { addresses: ADDRESSES_MAX })
        );
    }
}
