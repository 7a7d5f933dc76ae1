//! A router's view of all nodes: pure, events and `now` in, actions out.
//!
//! Life of a member, as [`Health`]:
//! 1. *Unknown* from joining on: an `Observe` stream is asked for, which is also the probe.
//! 2. *Up* from the stream's snapshot on, as long as the stream lasts and its deltas have no gap.
//! 3. *Suspect* when the stream ends or a call loses its connection: it is not picked any more, and
//!    probed at once. A node that flaps (up for less than 2 s) is probed with back-off instead.
//! 4. *Down* when a probe fails: probed again after 100 ms … 2 s, doubling, with jitter.
//! 5. Forgotten when it left the membership and a probe failed. Leaving alone proves nothing: a
//!    member that is up stays up.
//!
//! What stands behind an address is a process, named by its epoch. Another epoch is another node:
//! load, cached prefixes, Busy and assignments of the old one are dropped.
//!
//! Each member is either being observed or waits for its next probe, never neither.

mod member;
mod select;

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

use proto::v1;

use crate::{Epoch, Load, MemberChange, NodeAddress, NodeRecord, Role, backoff::Jitter};
use member::{Member, Verdict};

pub use select::{NoNode, NodeChoice, Wanted};

/// A node that says nothing within this time of being asked is not there: the lease of DESIGN.
pub const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// A node that told nothing for so long is asked for a fresh snapshot: an idle one has nothing to
/// tell, and one whose engine hangs answers every ping of its connection all the same.
pub const SILENCE_MAX: Duration = Duration::from_secs(30);
/// Most cached blocks believed of one node: 4 MiB of hashes here, the KV of 4 Mi tokens. They are hints:
/// a prompt whose blocks are beyond them is computed anew, or found by the node itself. More are
/// ignored in silence because nobody has to act: such a node is large, not broken, and the next
/// evictions make room for its next blocks.
pub const CACHED_BLOCKS_MAX: usize = 1 << 18;

/// Names a member of one directory; never used again after it is forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeKey(u64);

/// Names one `Observe` stream; what comes from an older one is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(u64);

/// Names one attempt's use of a node, from [`Directory::pick`] to [`Directory::release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AssignmentId(u64);

/// Whether a member can be picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Health {
    Unknown,
    Up,
    Suspect,
    Down,
}

impl Health {
    pub const ALL: [Health; 4] = [Health::Unknown, Health::Up, Health::Suspect, Health::Down];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Up => "up",
            Self::Suspect => "suspect",
            Self::Down => "down",
        }
    }
}

/// An event that a directory handles.
#[derive(Clone, Debug)]
pub enum Input {
    Member(MemberChange),
    /// One event of an `Observe` stream, as it came.
    Observed {
        stream: StreamId,
        event: v1::ObserveEvent,
    },
    /// A stream could not be opened, broke, or ended.
    StreamEnded {
        stream: StreamId,
        reason: String,
    },
    /// A call to this process lost its connection, or found another process there.
    CallLost {
        epoch: Epoch,
        reason: String,
    },
}

/// An operation for the shell to perform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Open an `Observe` stream to this address and feed what it brings under this id.
    Observe { stream: StreamId, node: NodeKey, address: NodeAddress },
    /// Drop this stream; nothing of it is wanted any more.
    StopObserving { stream: StreamId },
    /// To be logged and counted, once.
    HealthChanged { node: NodeKey, address: NodeAddress, from: Health, to: Health, reason: String },
    /// The member is gone for good.
    Forgotten { node: NodeKey, address: NodeAddress },
}

/// One member as others may see it.
#[derive(Clone, Debug)]
pub struct NodeView<'a> {
    pub node: NodeKey,
    pub address: &'a NodeAddress,
    pub health: Health,
    /// Record of the last process seen at the address.
    pub record: Option<&'a NodeRecord>,
    pub load: Load,
    pub cached_blocks: usize,
    /// This router's attempts on it.
    pub in_flight: usize,
    /// Refuses requests until then.
    pub busy_until: Option<Instant>,
    /// Why it is in its state.
    pub reason: &'a str,
}

/// All members and what is known of them.
pub struct Directory {
    members: BTreeMap<NodeKey, Member>,
    streams: HashMap<StreamId, NodeKey>,
    assignments: HashMap<AssignmentId, NodeKey>,
    jitter: Jitter,
    /// Numbers keys, streams, assignments and picks.
    counter: u64,
}

impl Directory {
    /// `seed` spreads the probes and retries of several routers; any number will do.
    pub fn new(seed: u64) -> Self {
        Self {
            members: BTreeMap::new(),
            streams: HashMap::new(),
            assignments: HashMap::new(),
            jitter: Jitter::new(seed),
            counter: 0,
        }
    }

    pub fn handle(&mut self, now: Instant, input: Input, actions: &mut Vec<Action>) {
        match input {
            Input::Member(MemberChange::Joined(address)) => self.joined(now, address, actions),
            Input::Member(MemberChange::Left(address)) => self.left(&address, actions),
            Input::Observed { stream, event } => self.observed(now, stream, event, actions),
            Input::StreamEnded { stream, reason } => {
                let Some(key) = self.streams.remove(&stream) else { return };
                self.member(key).stream = None;
                self.lost(now, key, reason, actions);
            }
            Input::CallLost { epoch, reason } => {
                if let Some(key) = self.up_with_epoch(epoch) {
                    self.stop_observing(key, actions);
                    self.lost(now, key, reason, actions);
                }
            }
        }
        self.check();
    }

    /// When to call [`Directory::on_deadline`] if nothing else happens first.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.members.values().filter_map(Member::deadline).min()
    }

    /// Probes what is due, asks nodes that are silent for too long again, and gives up on probes that were not answered.
    pub fn on_deadline(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let due = |member: &Member| member.deadline().is_some_and(|deadline| deadline <= now);
        let keys: Vec<_> =
            self.members.iter().filter(|(_, member)| due(member)).map(|(key, _)| *key).collect();
        for key in keys {
            if self.member(key).is_synced() {
                // It counts as up until the answer is late.
                self.stop_observing(key, actions);
                self.observe(now, key, actions);
            } else if self.member(key).stream.is_some() {
                self.stop_observing(key, actions);
                let reason = format!("no snapshot within {PROBE_TIMEOUT:?}");
                self.lost(now, key, reason, actions);
            } else {
                self.observe(now, key, actions);
            }
        }
        self.check();
    }

    /// Every member, in the order of joining.
    pub fn nodes(&self) -> impl Iterator<Item = NodeView<'_>> {
        self.members.iter().map(|(key, member)| member.view(*key))
    }

    /// How many members have this role and health.
    pub fn count(&self, role: Role, health: Health) -> usize {
        let matches = |member: &&Member| member.address.role == role && member.health == health;
        self.members.values().filter(matches).count()
    }

    /// Records of the nodes of this role that can be picked: up and not draining.
    pub fn serving(&self, role: Role) -> impl Iterator<Item = &NodeRecord> {
        self.members.values().filter_map(move |member| {
            let seen = member.serving()?;
            (member.address.role == role).then_some(&*seen.record)
        })
    }

    /// Cached blocks that are known of the nodes of this role that can be picked.
    pub fn cached_blocks(&self, role: Role) -> usize {
        let of_role = self.members.values().filter(|member| member.address.role == role);
        of_role.filter_map(|member| Some(member.serving()?.cached.len())).sum()
    }

    fn joined(&mut self, now: Instant, address: NodeAddress, actions: &mut Vec<Action>) {
        let known = self.members.iter_mut().find(|(_, member)| member.address == address);
        if let Some((key, member)) = known {
            let (key, returned) = (*key, !std::mem::replace(&mut member.listed, true));
            // Its return to the list says that it can serve: do not wait for the next probe.
            if returned && member.stream.is_none() {
                self.observe(now, key, actions);
            }
            return;
        }
        let key = NodeKey(self.next());
        self.members.insert(key, Member::new(address));
        self.observe(now, key, actions);
    }

    fn left(&mut self, address: &NodeAddress, actions: &mut Vec<Action>) {
        let known = self.members.iter_mut().find(|(_, member)| member.address == *address);
        let Some((key, member)) = known else { return };
        member.listed = false;
        // An open stream, or the probe in progress, decides.
        if member.stream.is_none() {
            let key = *key;
            self.forget(key, actions);
        }
    }

    fn observed(
        &mut self,
        now: Instant,
        stream: StreamId,
        event: v1::ObserveEvent,
        actions: &mut Vec<Action>,
    ) {
        let Some(key) = self.streams.get(&stream).copied() else { return };
        let (member_epoch, verdict) = {
            let member = self.members.get_mut(&key).expect("every stream has its member");
            (member.epoch(), member.observed(now, event))
        };
        match verdict {
            Verdict::Applied => {}
            Verdict::Snapshot { epoch } => {
                if member_epoch.is_some_and(|before| before != epoch) {
                    self.assignments.retain(|_, assigned| *assigned != key);
                    self.member(key).forget_process();
                }
                if let Some(twin) = self.twin_of(key, epoch) {
                    let reason = format!("it is the same process as {}", self.member(twin).address);
                    self.reject(now, key, reason, actions);
                    return;
                }
                let was_up = self.member(key).health == Health::Up && member_epoch == Some(epoch);
                self.set_health(key, Health::Up, format!("process {epoch} answers"), actions);
                if !was_up {
                    self.member(key).up_since = Some(now);
                }
            }
            Verdict::Resync { reason } => {
                self.stop_observing(key, actions);
                self.lost(now, key, reason, actions);
            }
            Verdict::Reject { reason } => self.reject(now, key, reason, actions),
        }
    }

    /// The stream of this member is gone. Probes at once what was up for a while, else later.
    fn lost(&mut self, now: Instant, key: NodeKey, reason: String, actions: &mut Vec<Action>) {
        let member = self.members.get_mut(&key).expect("callers hold a key of a member");
        let was_up = member.health == Health::Up;
        if !was_up && !member.listed {
            return self.forget(key, actions);
        }
        let delay = member.failed(now, &mut self.jitter);
        let health = if was_up { Health::Suspect } else { Health::Down };
        self.set_health(key, health, reason, actions);
        if delay.is_zero() {
            self.observe(now, key, actions);
        } else {
            self.member(key).retry_at = Some(now + delay);
        }
    }

    /// What answers there is not what it should be; asking at once would change nothing.
    fn reject(&mut self, now: Instant, key: NodeKey, reason: String, actions: &mut Vec<Action>) {
        self.stop_observing(key, actions);
        let member = self.members.get_mut(&key).expect("callers hold a key of a member");
        if !member.listed {
            return self.forget(key, actions);
        }
        member.retry_at = Some(now + member.rejected(&mut self.jitter));
        self.set_health(key, Health::Down, reason, actions);
    }

    fn observe(&mut self, now: Instant, key: NodeKey, actions: &mut Vec<Action>) {
        let stream = StreamId(self.next());
        let member = self.member(key);
        member.retry_at = None;
        member.stream = Some(member::Stream::asked(stream, now + PROBE_TIMEOUT));
        let address = member.address.clone();
        self.streams.insert(stream, key);
        actions.push(Action::Observe { stream, node: key, address });
    }

    fn stop_observing(&mut self, key: NodeKey, actions: &mut Vec<Action>) {
        if let Some(stream) = self.member(key).stream.take() {
            self.streams.remove(&stream.id);
            actions.push(Action::StopObserving { stream: stream.id });
        }
    }

    fn forget(&mut self, key: NodeKey, actions: &mut Vec<Action>) {
        self.stop_observing(key, actions);
        self.assignments.retain(|_, assigned| *assigned != key);
        if let Some(member) = self.members.remove(&key) {
            actions.push(Action::Forgotten { node: key, address: member.address });
        }
    }

    fn set_health(&mut self, key: NodeKey, to: Health, reason: String, actions: &mut Vec<Action>) {
        let member = self.member(key);
        let from = std::mem::replace(&mut member.health, to);
        member.reason.clone_from(&reason);
        if from != to {
            let address = member.address.clone();
            actions.push(Action::HealthChanged { node: key, address, from, to, reason });
        }
    }

    fn up_with_epoch(&self, epoch: Epoch) -> Option<NodeKey> {
        let is = |member: &Member| member.health == Health::Up && member.epoch() == Some(epoch);
        self.members.iter().find(|(_, member)| is(member)).map(|(key, _)| *key)
    }

    /// Another member that is up as the same process: one address is listed under two names.
    fn twin_of(&self, key: NodeKey, epoch: Epoch) -> Option<NodeKey> {
        let is = |member: &Member| member.health == Health::Up && member.epoch() == Some(epoch);
        self.members
            .iter()
            .find(|(other, member)| **other != key && is(member))
            .map(|(key, _)| *key)
    }

    fn member(&mut self, key: NodeKey) -> &mut Member {
        self.members.get_mut(&key).expect("callers hold a key of a member")
    }

    fn next(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    /// Asserts the invariants that hold after every call.
    fn check(&self) {
        for (key, member) in &self.members {
            assert!(
                member.stream.is_some() != member.retry_at.is_some(),
                "{} is observed or waits for its probe",
                member.address
            );
            assert!(member.unseen.len() <= member.in_flight);
            if let Some(stream) = &member.stream {
                assert_eq!(self.streams.get(&stream.id), Some(key));
            }
            if member.health == Health::Up {
                assert!(member.seen.is_some() && member.stream.is_some());
            }
        }
        assert!(self.streams.len() <= self.members.len());
    }
}
