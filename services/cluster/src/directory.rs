//! A router's view of all nodes. Pure: takes events and `now`, returns actions.
//!
//! Life of a member, as [`Health`]:
//! 1. *Unknown* after joining: the directory requests an `Observe` stream, which is also the probe.
//! 2. *Up* from the stream's snapshot until the stream ends or its deltas have a gap.
//! 3. *Suspect* when the stream ends or a call loses its connection: the node is not picked and is
//!    probed at once. A node that flaps (up for less than 2 s) is probed with back-off.
//! 4. *Down* when a probe fails: probed again after 100 ms … 2 s, doubling, with jitter.
//! 5. Forgotten when the member left the membership and a probe failed. A member that left but is
//!    up stays up.
//!
//! An epoch identifies the process at an address. A new epoch is a new node: the directory drops
//! load, cached prefixes, Busy pauses and assignments of the old process.
//!
//! Each member has either a stream or a scheduled probe.
//!
//! An impossible report (more blocks than the node has, the epoch of another address, a load
//! without its sequences) ends the stream: the node is *down*, and each further impossible report
//! doubles the time until its next probe.
//!
//! Besides its health, each node has a circuit breaker ([`breaker`]). The router's measurements
//! open it ([`service`]): attempts that fail although the node is up, and an inter-token latency or
//! transfer time far off the pool's median.

mod assignments;
mod breaker;
mod candidate;
mod capacity;
mod considered;
mod eligible;
mod index;
mod member;
mod moves;
mod options;
mod requirements;
mod select;
mod service;
mod transfers;

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

use config::Roles;
use proto::v1;

use crate::{Epoch, MemberChange, NodeAddress, NodeRecord, RecordError, Role, backoff::Jitter};
use breaker::Breaker;
use index::Index;
use member::{NodeReports, Stream};
use transfers::TransferTimes;

pub use breaker::BreakerReason;
pub use considered::{Considered, ConsideredOption, IneligibleNode, Placement};
pub use eligible::NoNode;
pub use member::Member;
pub use moves::Drain;
pub use requirements::{NodeRequirements, RequiredCapacity};
pub use select::{NodeChoice, Picked, Selection};
pub use service::{BreakerChange, Failed, Link};

/// Time-out of a probe; equals the transfer lease.
pub const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum silence of a node; then the directory requests a fresh snapshot. Pings do not suffice: a
/// node with a hung engine still answers them.
pub const SILENCE_MAX: Duration = Duration::from_secs(30);
/// Maximum number of cached blocks that the directory keeps for a node: 4 MiB of hashes, the KV of
/// 4 Mi tokens. Further blocks are ignored without a log line: the hashes are only hints for node
/// selection, and such a node is large but not faulty.
pub const CACHED_BLOCKS_MAX: usize = 1 << 18;
/// Blocks of one KV tier of a node that the directory knows; further blocks are no hits for
/// predictions.
pub const TIER_BLOCKS_MAX: usize = 1 << 20;

/// Id of a member of one directory; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeKey(u64);

/// Id of an `Observe` stream; events of older streams are ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(u64);

/// Id of an attempt's assignment to a node, from [`Directory::pick`] to [`Directory::release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AssignmentId(u64);

/// Health of a member.
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
pub enum DirectoryInput {
    /// A change of the membership.
    Member(MemberChange),
    /// An event of an `Observe` stream.
    Observed { stream: StreamId, event: v1::ObserveEvent },
    /// A stream failed to open, broke, or ended.
    StreamEnded { stream: StreamId, reason: String },
    /// The call of an attempt lost its connection or reached another process.
    CallLost { assignment: AssignmentId, reason: String },
}

/// An operation for the shell to perform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectoryAction {
    /// Open an `Observe` stream to this address and pass its events with this id.
    Observe { stream: StreamId, node: NodeKey, address: NodeAddress },
    /// Drop this stream.
    StopObserving { stream: StreamId },
    /// Log and count this change.
    HealthChanged { node: NodeKey, address: NodeAddress, from: Health, to: Health, reason: String },
    /// The node began or stopped draining, was paused or resumed, or has other weights, so other
    /// requests can use it.
    ServingChanged { node: NodeKey },
    /// Log that the node's report is impossible. The node is not used.
    Rejected { address: NodeAddress, reason: String },
    /// The member is forgotten.
    Forgotten { node: NodeKey, address: NodeAddress },
}

/// All members with their last reports.
pub struct Directory {
    members: BTreeMap<NodeKey, Member>,
    index: Index,
    streams: HashMap<StreamId, NodeKey>,
    assignments: HashMap<AssignmentId, Assignment>,
    selection: Selection,
    transfers: TransferTimes,
    /// Circuit breakers of pairs, prefill node first, whose last transfer failed.
    pair_breakers: BTreeMap<(NodeKey, NodeKey), Breaker>,
    breaker_changes: Vec<BreakerChange>,
    /// Time that the router adds to every predicted time to first token, in milliseconds; fitted to
    /// measured times.
    overhead_ms: f64,
    jitter: Jitter,
    /// Counter for the ids of members, streams, assignments and picks.
    counter: u64,
}

/// An attempt on one node.
#[derive(Debug)]
struct Assignment {
    node: NodeKey,
    /// Stream of the node at the pick. Each stream has a connection of its own.
    stream: StreamId,
    uncached_tokens: u64,
    /// On the decode node, until the first token.
    forecast: Option<Forecast>,
}

/// A predicted time to first token.
#[derive(Debug)]
struct Forecast {
    at: Instant,
    ttft_ms: f64,
}

impl Directory {
    /// Creates an empty directory. `seed` spreads the probes of several routers; any number is
    /// valid.
    pub fn new(seed: u64, selection: Selection) -> Self {
        Self {
            members: BTreeMap::new(),
            index: Index::default(),
            streams: HashMap::new(),
            assignments: HashMap::new(),
            selection,
            transfers: TransferTimes::default(),
            pair_breakers: BTreeMap::new(),
            breaker_changes: Vec::new(),
            overhead_ms: 0.0,
            jitter: Jitter::new(seed),
            counter: 0,
        }
    }

    pub fn handle(
        &mut self,
        now: Instant,
        input: DirectoryInput,
        actions: &mut Vec<DirectoryAction>,
    ) {
        match input {
            // Most events only change one member: checking all would cost more than the event.
            DirectoryInput::Observed { stream, event } => {
                let Some(key) = self.streams.get(&stream).copied() else { return };
                let before = self.serves(key);
                self.observed(now, key, event, actions);
                self.reindex(key);
                // A change of health says so by itself.
                if before
                    .zip(self.serves(key))
                    .is_some_and(|(before, after)| before.0 == after.0 && before.1 != after.1)
                {
                    actions.push(DirectoryAction::ServingChanged { node: key });
                }
                return self.check_member(key);
            }
            DirectoryInput::Member(MemberChange::Joined(address)) => {
                self.joined(now, address, actions)
            }
            DirectoryInput::Member(MemberChange::Left(address)) => self.left(&address, actions),
            DirectoryInput::StreamEnded { stream, reason } => {
                let Some(key) = self.streams.remove(&stream) else { return };
                self.member(key).stream = None;
                self.lost(now, key, reason, actions);
                self.reindex(key);
            }
            DirectoryInput::CallLost { assignment, reason } => {
                if let Some(key) = self.node_of_lost_call(assignment) {
                    self.stop_observing(key, actions);
                    self.lost(now, key, reason, actions);
                    self.reindex(key);
                }
            }
        }
        self.check();
    }

    /// Starts due probes, requests snapshots from silent nodes, and fails unanswered probes.
    pub fn on_deadline(&mut self, now: Instant, actions: &mut Vec<DirectoryAction>) {
        for key in self.due(now) {
            if self.member(key).is_synced() {
                // The node stays up until the answer is late.
                self.stop_observing(key, actions);
                self.observe(now, key, actions);
            } else if self.member(key).stream.is_some() {
                self.stop_observing(key, actions);
                let reason = format!("no snapshot within {PROBE_TIMEOUT:?}");
                self.lost(now, key, reason, actions);
            } else {
                self.observe(now, key, actions);
            }
            self.reindex(key);
            self.check_member(key);
        }
    }

    /// Returns all members in the order of joining.
    pub fn nodes(&self) -> impl Iterator<Item = &Member> {
        self.members.values()
    }

    /// Returns whether the node takes the calls of this role, as far as its record is known.
    pub fn takes(&self, member: &Member, role: Role) -> bool {
        let takes_both = || member.record().is_some_and(|record| record.both_roles);
        member.address.role == role || (self.selection.roles == Roles::Fluid && takes_both())
    }

    /// Returns the records of the nodes that take the calls of this role and can be picked: up and
    /// not draining.
    pub fn serving(&self, role: Role) -> impl Iterator<Item = &NodeRecord> {
        self.members.values().filter_map(move |member| {
            let seen = member.serving()?;
            self.takes(member, role).then_some(&*seen.record)
        })
    }

    /// Returns the number of nodes of this model that decode, can be picked and are not paused.
    pub fn running_decode_nodes(&self, model: &str) -> usize {
        let runs = |member: &&Member| {
            let serves = |seen: &NodeReports| seen.record.model == model && !seen.is_paused();
            self.takes(member, Role::Decode) && member.serving().is_some_and(serves)
        };
        self.members.values().filter(runs).count()
    }

    fn joined(&mut self, now: Instant, address: NodeAddress, actions: &mut Vec<DirectoryAction>) {
        let known = self.members.iter_mut().find(|(_, member)| member.address == address);
        if let Some((key, member)) = known {
            let (key, returned) = (*key, !std::mem::replace(&mut member.listed, true));
            // A member that joins again can serve: probe it at once.
            if returned && member.stream.is_none() {
                self.observe(now, key, actions);
                self.reindex(key);
            }
            return;
        }
        let key = NodeKey(self.next());
        self.members.insert(key, Member::new(key, address));
        self.observe(now, key, actions);
        self.reindex(key);
    }

    fn left(&mut self, address: &NodeAddress, actions: &mut Vec<DirectoryAction>) {
        let known = self.members.iter_mut().find(|(_, member)| member.address == *address);
        let Some((key, member)) = known else { return };
        member.listed = false;
        // An open stream or the probe in progress decides whether the member is forgotten.
        if member.stream.is_none() {
            let key = *key;
            self.forget(key, actions);
            self.reindex(key);
        }
    }

    fn observed(
        &mut self,
        now: Instant,
        key: NodeKey,
        event: v1::ObserveEvent,
        actions: &mut Vec<DirectoryAction>,
    ) {
        let member = self.member(key);
        let epoch_before = member.epoch();
        let epoch = match member.observed(now, event) {
            Ok(None) => return,
            Ok(Some(epoch)) => epoch,
            // An event was lost; a new stream is needed.
            Err(error @ RecordError::SequenceGap { .. }) => {
                self.stop_observing(key, actions);
                return self.lost(now, key, error.to_string(), actions);
            }
            Err(error) => return self.reject(now, key, error.to_string(), actions),
        };
        if epoch_before.is_some_and(|before| before != epoch) {
            self.forget_assignments(key);
            self.member(key).forget_process();
        }
        // One process may be listed under two addresses.
        let twin = self.up_with_epoch(epoch).find(|other| *other != key);
        if let Some(twin) = twin {
            let reason = format!("it is the same process as {}", self.member(twin).address);
            return self.reject(now, key, reason, actions);
        }
        let was_up = self.member(key).health == Health::Up && epoch_before == Some(epoch);
        self.set_health(key, Health::Up, format!("process {epoch} answers"), actions);
        if !was_up {
            self.member(key).up_since = Some(now);
        }
    }

    /// Returns the member's health, and the weights with which it accepts requests and whether it
    /// is paused.
    fn serves(&self, key: NodeKey) -> Option<(Health, Option<(u64, bool)>)> {
        let member = self.members.get(&key)?;
        let accepts = |seen: &NodeReports| (seen.record.identity.weight_version, seen.is_paused());
        Some((member.health, member.serving().map(accepts)))
    }

    /// Handles the end of a member's stream: probes a stable node at once, others after a delay.
    fn lost(
        &mut self,
        now: Instant,
        key: NodeKey,
        reason: String,
        actions: &mut Vec<DirectoryAction>,
    ) {
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

    /// Handles an invalid answer: the next probe follows after a delay.
    fn reject(
        &mut self,
        now: Instant,
        key: NodeKey,
        reason: String,
        actions: &mut Vec<DirectoryAction>,
    ) {
        self.stop_observing(key, actions);
        let member = self.members.get_mut(&key).expect("callers hold a key of a member");
        if !member.listed {
            return self.forget(key, actions);
        }
        member.retry_at = Some(now + member.rejected(now, &mut self.jitter));
        // Each probe of such a node is answered alike.
        if member.health != Health::Down || member.reason != reason {
            let address = member.address.clone();
            actions.push(DirectoryAction::Rejected { address, reason: reason.clone() });
        }
        self.set_health(key, Health::Down, reason, actions);
    }

    fn observe(&mut self, now: Instant, key: NodeKey, actions: &mut Vec<DirectoryAction>) {
        let stream = StreamId(self.next());
        let member = self.member(key);
        member.retry_at = None;
        let deadline = now + PROBE_TIMEOUT;
        member.stream = Some(Stream { id: stream, last: None, deadline });
        let address = member.address.clone();
        self.streams.insert(stream, key);
        actions.push(DirectoryAction::Observe { stream, node: key, address });
    }

    fn stop_observing(&mut self, key: NodeKey, actions: &mut Vec<DirectoryAction>) {
        if let Some(stream) = self.member(key).stream.take() {
            self.streams.remove(&stream.id);
            actions.push(DirectoryAction::StopObserving { stream: stream.id });
        }
    }

    fn forget(&mut self, key: NodeKey, actions: &mut Vec<DirectoryAction>) {
        self.stop_observing(key, actions);
        self.forget_assignments(key);
        if let Some(member) = self.members.remove(&key) {
            actions.push(DirectoryAction::Forgotten { node: key, address: member.address });
        }
    }

    /// Drops the attempts, transfer times and breakers of a dead process.
    fn forget_assignments(&mut self, key: NodeKey) {
        self.assignments.retain(|_, assigned| assigned.node != key);
        self.forget_pairs(key);
    }

    fn set_health(
        &mut self,
        key: NodeKey,
        to: Health,
        reason: String,
        actions: &mut Vec<DirectoryAction>,
    ) {
        let member = self.member(key);
        let from = std::mem::replace(&mut member.health, to);
        member.reason.clone_from(&reason);
        if from != to {
            let address = member.address.clone();
            actions.push(DirectoryAction::HealthChanged { node: key, address, from, to, reason });
        }
    }

    fn up_with_epoch(&self, epoch: Epoch) -> impl Iterator<Item = NodeKey> {
        let is =
            move |member: &Member| member.health == Health::Up && member.epoch() == Some(epoch);
        self.members.iter().filter(move |(_, member)| is(member)).map(|(key, _)| *key)
    }

    fn member(&mut self, key: NodeKey) -> &mut Member {
        self.members.get_mut(&key).expect("callers hold a key of a member")
    }

    fn next(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    /// Asserts the directory's invariants.
    fn check(&self) {
        self.members.keys().for_each(|key| self.check_member(*key));
    }

    /// Asserts the invariants of one member, unless it was forgotten.
    fn check_member(&self, key: NodeKey) {
        let Some(member) = self.members.get(&key) else { return };
        assert!(
            member.stream.is_some() != member.retry_at.is_some(),
            "{} has neither a stream nor a scheduled probe",
            member.address
        );
        assert!(member.unseen.len() <= member.in_flight);
        assert!(self.is_indexed(key, member), "the index of {} is out of date", member.address);
        if let Some(stream) = &member.stream {
            assert_eq!(self.streams.get(&stream.id), Some(&key));
        }
        if member.health == Health::Up {
            assert!(member.seen.is_some() && member.stream.is_some());
        }
        assert!(self.streams.len() <= self.members.len());
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
