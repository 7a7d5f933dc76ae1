//! The connection between two processes.
//!
//! 1. The side that has a transfer first sends `HELLO`, repeatedly for one lease. The other side
//!    compares the identities and answers `HELLO_OK` or `REJECT`. One such exchange connects both
//!    sides.
//! 2. While either side has transfers, both sides send `HEARTBEAT`s that name the transfers. A side
//!    that receives nothing for a lease, or loses a data connection, fails the pair and all its
//!    transfers.
//! 3. A pair without transfers sends nothing and is closed after `pair_idle`.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use super::event_context::{Action, EventContext, Local, Retry};
use crate::{
    api::{Epoch, Identity, Peer, PeerAddress, TransferId},
    config::{HEARTBEAT, LEASE},
    control::{Body, Hello, HelloOk},
};

/// Time within which a peer usually answers `HELLO`. A slower peer probably has its maximum number
/// of pairs and may answer later.
const EXPECTED_ANSWER_TIME: Duration = Duration::from_millis(500);

pub struct Pair {
    pub peer: Peer,
    state: State,
    /// Number of this connection attempt, and the peer's number once known.
    session: u64,
    peer_session: Option<u64>,
    /// All transfers with this peer, including those being aborted.
    pub transfers: BTreeSet<TransferId>,
    /// Time of the peer's last control message, or the start of the first current transfer if that
    /// is later, because an idle peer sends nothing.
    alive_at: Instant,
    /// Time until which this node sends heartbeats because the peer has transfers.
    peer_works_until: Instant,
    next_heartbeat: Instant,
    /// Time at which either side last had or expected transfers.
    pub(super) idle_since: Instant,
    data_opened: bool,
    /// Whether this node will send chunks to the peer.
    pub(super) will_send: bool,
    /// Whether the pair was created in advance and has had no transfer.
    in_advance: bool,
}

enum State {
    /// `HELLO` is sent again until the peer answers, or until the time `until`.
    Connecting { retry: Retry, until: Instant },
    /// Connected. `transports` are the common transports, beginning with the agreed transport.
    Up { data_endpoint: String, transports: Vec<String> },
    /// Rejected. Kept for a lease, so that further commands fail at once.
    Refused { reason: String, until: Instant },
}

/// Effect of a handshake message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The message was late or repeated.
    Nothing,
    /// The pair is connected.
    Up,
    /// The peer has repeated `HELLO`: unanswered messages are retransmitted.
    UpAgain,
    /// The peer has reconnected: transfers on the old connection have failed.
    Reconnected,
    /// The peers rejected each other.
    Refused { reason: String },
}

/// Reason to close a pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Close {
    Idle,
    Lost { reason: String },
}

impl Pair {
    /// Creates a pair that is not connected. `in_advance`: this node has no transfer with the peer
    /// yet.
    pub fn new(context: &mut EventContext, address: &PeerAddress, in_advance: bool) -> Self {
        context.act(Action::Connect { peer: address.clone() });
        context.pairs_created += 1;
        Self {
            peer: address.peer(),
            state: State::Connecting {
                retry: Retry::start(context.now),
                until: context.now + LEASE,
            },
            session: context.pairs_created,
            peer_session: None,
            transfers: BTreeSet::new(),
            alive_at: context.now,
            peer_works_until: context.now,
            next_heartbeat: context.now + HEARTBEAT,
            idle_since: context.now,
            data_opened: false,
            will_send: false,
            in_advance,
        }
    }

    pub fn send_hello(&self, context: &mut EventContext) {
        let hello = Hello {
            identity: context.local.identity.clone(),
            control_endpoint: context.local.control_endpoint.clone(),
            data_endpoint: context.local.data_endpoint.clone(),
            transports: context.local.transports.clone(),
            integrity: context.local.integrity.clone(),
            session: self.session,
            in_advance: self.in_advance,
        };
        context.send(self.peer.epoch, Body::Hello(hello));
    }

    /// Handles `HELLO`. Compares the identities.
    pub fn on_hello(&mut self, context: &mut EventContext, hello: &Hello) -> Change {
        self.heard(context.now);
        if self.is_stale_session(hello.session) {
            return Change::Nothing;
        }
        if !hello.in_advance {
            // Keeps the pair until the peer's `RESERVE` or heartbeat arrives.
            self.peer_works_until = self.peer_works_until.max(context.now + HEARTBEAT);
        }
        let (transport, integrity) = match agree(&context.local, self.peer.epoch, hello) {
            Ok(agreed) => agreed,
            Err(reason) => return self.reject(context, reason),
        };
        let local = &context.local;
        let transports = in_common(transport.clone(), &local.transports, &hello.transports);
        let ok = HelloOk {
            identity: local.identity.clone(),
            data_endpoint: local.data_endpoint.clone(),
            transport,
            integrity,
            session: self.session,
            transports: local.transports.clone(),
        };
        context.send(self.peer.epoch, Body::HelloOk(ok));
        self.up(hello.data_endpoint.clone(), transports, hello.session)
    }

    fn is_stale_session(&self, session: u64) -> bool {
        self.peer_session.is_some_and(|known| session < known)
    }

    fn up(&mut self, data_endpoint: String, transports: Vec<String>, session: u64) -> Change {
        let before = std::mem::replace(&mut self.state, State::Up { data_endpoint, transports });
        let known = self.peer_session.replace(session);
        match before {
            State::Connecting { .. } | State::Refused { .. } => Change::Up,
            State::Up { .. } if known == Some(session) => Change::UpAgain,
            State::Up { .. } => {
                self.data_opened = false;
                Change::Reconnected
            }
        }
    }

    pub fn on_hello_ok(&mut self, context: &mut EventContext, ok: &HelloOk) -> Change {
        self.heard(context.now);
        let answers_again = self.is_up() && self.peer_session == Some(ok.session);
        if answers_again || self.refusal().is_some() || self.is_stale_session(ok.session) {
            return Change::Nothing;
        }
        if let Some(difference) = context.local.identity.difference(&ok.identity) {
            // The peer accepted, although the identities differ.
            return self.reject(context, difference);
        }
        if !context.local.transports.contains(&ok.transport)
            || !context.local.integrity.contains(&ok.integrity)
        {
            let reason = format!(
                "the peer chose transport {:?} with integrity {:?}; expected offered ones",
                ok.transport, ok.integrity
            );
            return self.reject(context, reason);
        }
        let transports = in_common(ok.transport.clone(), &context.local.transports, &ok.transports);
        self.up(ok.data_endpoint.clone(), transports, ok.session)
    }

    /// Handles `REJECT`. Uses the local view of the difference if the identities differ.
    pub fn on_reject(
        &mut self,
        context: &mut EventContext,
        reason: String,
        identity: &Identity,
    ) -> Change {
        self.heard(context.now);
        if matches!(self.state, State::Refused { .. }) {
            return Change::Nothing;
        }
        let reason = context.local.identity.difference(identity).unwrap_or(reason);
        self.refuse(context.now, reason)
    }

    fn reject(&mut self, context: &mut EventContext, reason: String) -> Change {
        let identity = context.local.identity.clone();
        context.send(self.peer.epoch, Body::Reject { reason: reason.clone(), identity });
        self.refuse(context.now, reason)
    }

    fn refuse(&mut self, now: Instant, reason: String) -> Change {
        self.state = State::Refused { reason: reason.clone(), until: now + LEASE };
        Change::Refused { reason }
    }

    /// Records a verified control message of the peer.
    pub fn heard(&mut self, now: Instant) {
        self.alive_at = self.alive_at.max(now);
    }

    pub fn on_peer_works(&mut self, now: Instant) {
        self.peer_works_until = now + LEASE;
        self.idle_since = now;
    }

    /// Records that transfers with the peer are expected.
    pub fn expect_work(&mut self, now: Instant, sends: bool) {
        self.idle_since = now;
        self.will_send |= sends;
    }

    pub fn begin(&mut self, context: &mut EventContext, transfer: TransferId) {
        if self.transfers.is_empty() {
            self.alive_at = self.alive_at.max(context.now);
        }
        self.transfers.insert(transfer);
        if std::mem::take(&mut self.in_advance) && matches!(self.state, State::Connecting { .. }) {
            // The peer may have rejected a pair without transfers, so this `HELLO` gets its own
            // time-out.
            let (retry, until) = (Retry::start(context.now), context.now + LEASE);
            self.state = State::Connecting { retry, until };
            self.send_hello(context);
        }
    }

    pub fn end(&mut self, now: Instant, transfer: TransferId) {
        if self.transfers.remove(&transfer) {
            self.idle_since = now;
        }
    }

    /// Opens the data connection to the peer once, when the pair is connected.
    pub fn open_data(&mut self, context: &mut EventContext) {
        if let State::Up { data_endpoint, transports } = &self.state
            && !std::mem::replace(&mut self.data_opened, true)
        {
            let (endpoint, transports) = (data_endpoint.clone(), transports.clone());
            context.act(Action::OpenData { peer: self.peer.epoch, endpoint, transports });
        }
    }

    /// Sends due messages except heartbeats. Returns a reason if the pair is to be closed.
    pub fn on_deadline(&mut self, context: &mut EventContext) -> Option<Close> {
        let seconds = LEASE.as_secs();
        let has_work = self.has_work();
        match &mut self.state {
            State::Connecting { until, .. } if context.now >= *until => {
                let reason = format!("the peer has not answered HELLO for {seconds} s");
                Some(Close::Lost { reason })
            }
            State::Connecting { retry, .. } => {
                if retry.is_due(context.now) {
                    context.counters.control_resent += 1;
                    self.send_hello(context);
                }
                None
            }
            State::Refused { until, .. } => (context.now >= *until).then_some(Close::Idle),
            State::Up { .. } if has_work => (context.now >= self.alive_at + LEASE).then(|| {
                Close::Lost { reason: format!("received nothing from the peer for {seconds} s") }
            }),
            State::Up { .. } => {
                (context.now >= self.idle_at(context.local.limits.pair_idle)).then_some(Close::Idle)
            }
        }
    }

    /// Returns whether to send a heartbeat now, and then sets the next time.
    pub fn is_heartbeat_due(&mut self, now: Instant) -> bool {
        let is_due = self.heartbeat_at(now).is_some_and(|at| now >= at);
        if is_due {
            self.next_heartbeat = now + HEARTBEAT;
        }
        is_due
    }

    fn heartbeat_at(&self, now: Instant) -> Option<Instant> {
        let needed = self.is_up() && (self.has_work() || now < self.peer_works_until);
        needed.then_some(self.next_heartbeat)
    }

    pub fn next_deadline(&self, now: Instant, pair_idle: Duration) -> Instant {
        let end = match &self.state {
            State::Connecting { retry, until } => retry.at.min(*until),
            State::Refused { until, .. } => *until,
            State::Up { .. } if self.has_work() => self.alive_at + LEASE,
            State::Up { .. } => self.idle_at(pair_idle),
        };
        self.heartbeat_at(now).map_or(end, |heartbeat| heartbeat.min(end))
    }

    /// Returns when an idle pair is closed. Transfers of the peer also keep the pair open.
    fn idle_at(&self, pair_idle: Duration) -> Instant {
        self.idle_since.max(self.peer_works_until) + pair_idle
    }

    fn has_work(&self) -> bool {
        !self.transfers.is_empty()
    }

    pub fn is_up(&self) -> bool {
        matches!(self.state, State::Up { .. })
    }

    /// Returns whether the pair is connected or may connect soon.
    pub fn may_yet_answer(&self, now: Instant) -> bool {
        match &self.state {
            State::Connecting { until, .. } => now + LEASE < *until + EXPECTED_ANSWER_TIME,
            State::Up { .. } => true,
            State::Refused { .. } => false,
        }
    }

    pub fn is_idle(&self, now: Instant) -> bool {
        !self.has_work() && now >= self.peer_works_until
    }

    /// Returns the reason if the peers rejected each other.
    pub fn refusal(&self) -> Option<&str> {
        match &self.state {
            State::Refused { reason, .. } => Some(reason),
            State::Connecting { .. } | State::Up { .. } => None,
        }
    }

    /// Returns the agreed transport; empty while not connected.
    pub fn transport(&self) -> &str {
        match &self.state {
            State::Up { transports, .. } => transports.first().map_or("", String::as_str),
            State::Connecting { .. } | State::Refused { .. } => "",
        }
    }
}

/// Returns the transport and the integrity method for a pair, or the reason to reject the peer.
fn agree(local: &Local, peer: Epoch, hello: &Hello) -> Result<(String, String), String> {
    if let Some(difference) = local.identity.difference(&hello.identity) {
        return Err(difference);
    }
    let ours_first = local.epoch < peer;
    let transport = choose("transport", &local.transports, &hello.transports, ours_first)?;
    let integrity = choose("integrity", &local.integrity, &hello.integrity, ours_first)?;
    Ok((transport, integrity))
}

/// Returns `chosen`, then the other common transports in local order.
fn in_common(chosen: String, ours: &[String], theirs: &[String]) -> Vec<String> {
    let others =
        ours.iter().filter(|transport| **transport != chosen && theirs.contains(transport));
    let others: Vec<String> = others.cloned().collect();
    std::iter::once(chosen).chain(others).collect()
}

/// Returns the first common method in the order of the process with the smaller epoch, so that both
/// sides choose the same method if their `HELLO`s cross.
fn choose(
    what: &str,
    ours: &[String],
    theirs: &[String],
    ours_first: bool,
) -> Result<String, String> {
    let (first, second) = if ours_first { (ours, theirs) } else { (theirs, ours) };
    first.iter().find(|method| second.contains(method)).cloned().ok_or_else(|| {
        format!(
            "no common {what}: this node offers {}, the peer {}",
            ours.join(", "),
            theirs.join(", ")
        )
    })
}
