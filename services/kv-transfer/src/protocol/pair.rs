//! Two processes that know each other.
//!
//! 1. Whoever has work first says `HELLO`, again and again for one lease. The other compares the
//!    identities and answers `HELLO_OK` or `REJECT`; one such exchange brings up both ends.
//! 2. While either side has transfers both send `HEARTBEAT`s that name them. Silence for a lease, or
//!    the end of a data connection, loses the pair and every transfer on it.
//! 3. A pair without transfers is silent and is closed after a while.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use super::{Action, Peer, Turn, identity, retry::Retry};
use crate::{
    api::{PeerAddress, TransferId},
    config::{HEARTBEAT, LEASE},
    control::{Body, Hello, HelloOk},
};

/// Who has not answered a greeting for so long has no room for the pair, or is not there. It may come yet.
const ANSWERED_IN: Duration = Duration::from_millis(500);

pub struct Pair {
    peer: Peer,
    state: State,
    /// Which of our pairs this is, and which of the peer's, once it has said so.
    session: u64,
    peer_session: Option<u64>,
    /// Those with this peer in any state, endings included.
    transfers: BTreeSet<TransferId>,
    /// The peer's last control message, or the start of our present work if that is later: who is idle need
    /// not speak.
    alive_at: Instant,
    /// Until then the peer's last heartbeat obliges us to send ours.
    peer_works_until: Instant,
    next_heartbeat: Instant,
    /// The end of the last work.
    idle_since: Instant,
    data_opened: bool,
    /// Something will be sent to the peer.
    will_send: bool,
    /// It was greeted without work, and none has come since.
    in_advance: bool,
}

enum State {
    Greeting {
        retry: Retry,
        until: Instant,
    },
    Up {
        data_endpoint: String,
        /// What both can do: first the one that was agreed on.
        transports: Vec<String>,
    },
    /// Kept for a lease, so that further commands fail at once.
    Refused {
        reason: String,
        until: Instant,
    },
}

/// What a greeting changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    Nothing,
    Up,
    /// The peer has greeted again: what it has not answered is said again.
    UpAgain,
    /// The peer has lost its end and made it anew: what was under way on the old one is over.
    Anew,
    Refused {
        reason: String,
    },
}

/// Why a pair is to be closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Close {
    Idle,
    Lost { reason: String },
}

impl Pair {
    /// We have work for the peer.
    pub fn greet(turn: &mut Turn<'_>, address: &PeerAddress, session: u64) -> Self {
        let pair = Self::new(turn, address, session);
        pair.send_hello(turn);
        pair
    }

    /// We may have work for the peer later.
    pub fn greet_in_advance(turn: &mut Turn<'_>, address: &PeerAddress, session: u64) -> Self {
        let pair = Self { in_advance: true, ..Self::new(turn, address, session) };
        pair.send_hello(turn);
        pair
    }

    /// The peer has, or will have, work for us; its `HELLO` goes to [`Pair::on_hello`] next.
    pub fn met(turn: &mut Turn<'_>, address: &PeerAddress, session: u64) -> Self {
        Self::new(turn, address, session)
    }

    fn new(turn: &mut Turn<'_>, address: &PeerAddress, session: u64) -> Self {
        turn.act(Action::Connect { peer: address.clone() });
        Self {
            peer: Peer { node_id: address.node_id.clone(), epoch: address.epoch },
            state: State::Greeting { retry: Retry::start(turn.now), until: turn.now + LEASE },
            session,
            peer_session: None,
            transfers: BTreeSet::new(),
            alive_at: turn.now,
            peer_works_until: turn.now,
            next_heartbeat: turn.now + HEARTBEAT,
            idle_since: turn.now,
            data_opened: false,
            will_send: false,
            in_advance: false,
        }
    }

    fn send_hello(&self, turn: &mut Turn<'_>) {
        let hello = Hello {
            identity: turn.local.identity.clone(),
            control_endpoint: turn.local.control_endpoint.clone(),
            data_endpoint: turn.local.data_endpoint.clone(),
            transports: turn.local.transports.clone(),
            integrity: turn.local.integrity.clone(),
            session: self.session,
            in_advance: self.in_advance,
        };
        turn.send(self.peer.epoch, Body::Hello(hello));
    }

    /// Also changes our mind: the identities are compared every time.
    pub fn on_hello(&mut self, turn: &mut Turn<'_>, hello: &Hello) -> Change {
        self.heard(turn.now);
        if self.is_of_the_past(hello.session) {
            return Change::Nothing;
        }
        if !hello.in_advance {
            // Until its `RESERVE`, or a heartbeat that names what it wants, nothing else says so.
            self.peer_works_until = self.peer_works_until.max(turn.now + HEARTBEAT);
        }
        let (ours_first, local) = (turn.local.epoch < self.peer.epoch, turn.local);
        let agreed = match identity::difference(&local.identity, &hello.identity) {
            Some(difference) => Err(difference),
            None => choose("transport", &local.transports, &hello.transports, ours_first).and_then(
                |transport| {
                    let integrity =
                        choose("integrity", &local.integrity, &hello.integrity, ours_first)?;
                    Ok((transport, integrity))
                },
            ),
        };
        let (transport, integrity) = match agreed {
            Ok(agreed) => agreed,
            Err(reason) => return self.reject(turn, reason),
        };
        let ok = HelloOk {
            identity: local.identity.clone(),
            data_endpoint: local.data_endpoint.clone(),
            transport: transport.clone(),
            integrity,
            session: self.session,
            transports: local.transports.clone(),
        };
        turn.send(self.peer.epoch, Body::HelloOk(ok));
        let transports = in_common(transport, &local.transports, &hello.transports);
        self.up(hello.data_endpoint.clone(), transports, hello.session)
    }

    fn is_of_the_past(&self, session: u64) -> bool {
        self.peer_session.is_some_and(|known| session < known)
    }

    fn up(&mut self, data_endpoint: String, transports: Vec<String>, session: u64) -> Change {
        let before = std::mem::replace(&mut self.state, State::Up { data_endpoint, transports });
        let known = self.peer_session.replace(session);
        match before {
            State::Greeting { .. } | State::Refused { .. } => Change::Up,
            State::Up { .. } if known == Some(session) => Change::UpAgain,
            State::Up { .. } => {
                self.data_opened = false;
                Change::Anew
            }
        }
    }

    pub fn on_hello_ok(&mut self, turn: &mut Turn<'_>, ok: &HelloOk) -> Change {
        self.heard(turn.now);
        let answers_again = self.is_up() && self.peer_session == Some(ok.session);
        if answers_again || self.refusal().is_some() || self.is_of_the_past(ok.session) {
            return Change::Nothing;
        }
        if let Some(difference) = identity::difference(&turn.local.identity, &ok.identity) {
            // It believes that we agree: our weights have changed since our HELLO.
            return self.reject(turn, difference);
        }
        if !turn.local.transports.contains(&ok.transport)
            || !turn.local.integrity.contains(&ok.integrity)
        {
            let reason = format!(
                "it chose transport {:?} with integrity {:?}, which were not offered",
                ok.transport, ok.integrity
            );
            return self.reject(turn, reason);
        }
        let transports = in_common(ok.transport.clone(), &turn.local.transports, &ok.transports);
        self.up(ok.data_endpoint.clone(), transports, ok.session)
    }

    /// The peer's reason, seen from here where the identities differ.
    pub fn on_reject(
        &mut self,
        turn: &mut Turn<'_>,
        reason: String,
        identity: &crate::api::Identity,
    ) -> Change {
        self.heard(turn.now);
        if matches!(self.state, State::Refused { .. }) {
            return Change::Nothing;
        }
        let reason = identity::difference(&turn.local.identity, identity).unwrap_or(reason);
        self.refuse(turn.now, reason)
    }

    fn reject(&mut self, turn: &mut Turn<'_>, reason: String) -> Change {
        let identity = turn.local.identity.clone();
        turn.send(self.peer.epoch, Body::Reject { reason: reason.clone(), identity });
        self.refuse(turn.now, reason)
    }

    fn refuse(&mut self, now: Instant, reason: String) -> Change {
        self.state = State::Refused { reason: reason.clone(), until: now + LEASE };
        Change::Refused { reason }
    }

    /// Some control message of the peer was believed.
    pub fn heard(&mut self, now: Instant) {
        self.alive_at = self.alive_at.max(now);
    }

    pub fn on_peer_works(&mut self, now: Instant) {
        self.peer_works_until = now + LEASE;
        self.idle_since = now;
    }

    /// There will be transfers with the peer.
    pub fn expect_work(&mut self, now: Instant, sends: bool) {
        self.idle_since = now;
        self.will_send |= sends;
    }

    pub fn will_send(&self) -> bool {
        self.will_send
    }

    pub fn begin(&mut self, turn: &mut Turn<'_>, transfer: TransferId) {
        if self.transfers.is_empty() {
            self.alive_at = self.alive_at.max(turn.now);
        }
        self.transfers.insert(transfer);
        if std::mem::take(&mut self.in_advance) && matches!(self.state, State::Greeting { .. }) {
            // The peer may have had no room for a greeting without work; this one has a time of its own.
            let (retry, until) = (Retry::start(turn.now), turn.now + LEASE);
            self.state = State::Greeting { retry, until };
            self.send_hello(turn);
        }
    }

    pub fn end(&mut self, now: Instant, transfer: TransferId) {
        if self.transfers.remove(&transfer) {
            self.idle_since = now;
        }
    }

    /// Makes the data connection to the peer, once, when the pair is up.
    pub fn open_data(&mut self, turn: &mut Turn<'_>) {
        if let State::Up { data_endpoint, transports } = &self.state
            && !std::mem::replace(&mut self.data_opened, true)
        {
            let (endpoint, transports) = (data_endpoint.clone(), transports.clone());
            turn.act(Action::OpenData { peer: self.peer.epoch, endpoint, transports });
        }
    }

    /// Sends what is due apart from heartbeats, and says when the pair is over.
    pub fn on_deadline(&mut self, turn: &mut Turn<'_>) -> Option<Close> {
        let seconds = LEASE.as_secs();
        let has_work = self.has_work();
        match &mut self.state {
            State::Greeting { until, .. } if turn.now >= *until => {
                let reason = format!("it has not answered HELLO for {seconds} s");
                Some(Close::Lost { reason })
            }
            State::Greeting { retry, .. } => {
                if retry.is_due(turn.now) {
                    turn.counters.control_resent += 1;
                    self.send_hello(turn);
                }
                None
            }
            State::Refused { until, .. } => (turn.now >= *until).then_some(Close::Idle),
            State::Up { .. } if has_work => (turn.now >= self.alive_at + LEASE).then(|| {
                Close::Lost { reason: format!("nothing was heard of it for {seconds} s") }
            }),
            State::Up { .. } => {
                (turn.now >= self.idle_at(turn.local.limits.pair_idle)).then_some(Close::Idle)
            }
        }
    }

    /// True when a heartbeat is to be sent now; the next time is then set.
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
            State::Greeting { retry, until } => retry.at().min(*until),
            State::Refused { until, .. } => *until,
            State::Up { .. } if self.has_work() => self.alive_at + LEASE,
            State::Up { .. } => self.idle_at(pair_idle),
        };
        self.heartbeat_at(now).map_or(end, |heartbeat| heartbeat.min(end))
    }

    /// A peer with work keeps the pair, even if we have none.
    fn idle_at(&self, pair_idle: Duration) -> Instant {
        self.idle_since.max(self.peer_works_until) + pair_idle
    }

    fn has_work(&self) -> bool {
        !self.transfers.is_empty()
    }

    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    pub fn transfers(&self) -> &BTreeSet<TransferId> {
        &self.transfers
    }

    pub fn is_up(&self) -> bool {
        matches!(self.state, State::Up { .. })
    }

    /// False where there is no pair to be hoped for soon.
    pub fn may_yet_answer(&self, now: Instant) -> bool {
        match &self.state {
            State::Greeting { until, .. } => now + LEASE < *until + ANSWERED_IN,
            State::Up { .. } => true,
            State::Refused { .. } => false,
        }
    }

    pub fn is_idle(&self, now: Instant) -> bool {
        !self.has_work() && now >= self.peer_works_until
    }

    pub fn idle_since(&self) -> Instant {
        self.idle_since
    }

    /// Why no KV is exchanged with this peer.
    pub fn refusal(&self) -> Option<&str> {
        match &self.state {
            State::Refused { reason, .. } => Some(reason),
            State::Greeting { .. } | State::Up { .. } => None,
        }
    }

    /// The transport that was agreed on; empty while the pair is not up.
    pub fn transport(&self) -> &str {
        match &self.state {
            State::Up { transports, .. } => transports.first().map_or("", String::as_str),
            State::Greeting { .. } | State::Refused { .. } => "",
        }
    }
}

/// The transport that was chosen, and what else both can do, in our order.
fn in_common(chosen: String, ours: &[String], theirs: &[String]) -> Vec<String> {
    let others =
        ours.iter().filter(|transport| **transport != chosen && theirs.contains(transport));
    let others: Vec<String> = others.cloned().collect();
    std::iter::once(chosen).chain(others).collect()
}

/// The first method that both can do, in the order of the one with the smaller epoch: both ends
/// choose the same when their greetings cross.
fn choose(
    what: &str,
    ours: &[String],
    theirs: &[String],
    ours_first: bool,
) -> Result<String, String> {
    let (first, second) = if ours_first { (ours, theirs) } else { (theirs, ours) };
    first.iter().find(|method| second.contains(method)).cloned().ok_or_else(|| {
        format!("no {what} in common: {} against {}", ours.join(", "), theirs.join(", "))
    })
}
