//! Decides which connections a port keeps. Pure: no socket and no clock.
//!
//! Life of a connection on a port that keeps at most `ordinary_max` connections:
//! 1. On a port whose clients authenticate, a new connection is a *stranger* until its client
//!    presents a valid credential; then it is a *member*. On other ports each connection is a
//!    member.
//! 2. At the cap, a new connection takes the slot of a stranger, idle or not: the oldest one of the
//!    address that has the most strangers. Without strangers the new connection takes the slot of
//!    the longest-idle member. A connection is idle while it has no request in progress.
//! 3. Strangers of one address have at most half of the slots. Beyond, their next connection takes
//!    the slot of their oldest one.
//! 4. A stranger keeps its slot for at least [`AUTHENTICATE_MIN`], and the new connection waits as
//!    long. So every client has time to authenticate, however fast others connect.
//! 5. When every slot has a member with a request in progress, the new connection is *reserved*: it
//!    serves one request of those that the port admits to its reserve. Other requests are rejected,
//!    unless a slot is free by then. When the reserve is full too, the oldest reserved connection
//!    is closed.
//! 6. A *closing* connection holds its descriptor but no slot until its task ends. Its requests are
//!    rejected. While `closing_max` connections are closing, the port admits no connection.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, Ipv6Addr},
    time::{Duration, Instant},
};

use tokio_util::sync::CancellationToken;

/// Minimum time that a stranger keeps its slot: two round trips of 200 ms for TLS and the first
/// request, and some time for a busy machine.
const AUTHENTICATE_MIN: Duration = Duration::from_millis(500);
/// Leading bits of an IPv6 address that stand for one client, who can choose the others.
const IPV6_PREFIX_BITS: u32 = 64;

/// Maximum numbers of connections of a port, and whether its clients authenticate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotLimits {
    pub ordinary_max: usize,
    /// Connections in the reserve, while each ordinary connection is a member with a request in
    /// progress.
    pub reserved_max: usize,
    /// Connections that are closing.
    pub closing_max: usize,
    /// Whether a connection is a stranger until its client presents a valid credential.
    pub authenticates: bool,
}

/// Decision about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmissionVerdict {
    Serve,
    /// The port has too many connections.
    Refuse,
}

/// How a connection closes for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionClose {
    /// Requests in progress may finish.
    Gracefully,
    AtOnce,
}

/// When to try again to admit a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdmissionRetry {
    /// When a connection has ended.
    UntilFreed,
    /// At this time, or when a connection has ended.
    Until(Instant),
}

#[derive(Debug)]
pub(crate) struct SlotTable {
    limits: SlotLimits,
    connections: HashMap<u64, SlotOwner>,
    /// Number of strangers and members.
    ordinary_count: usize,
    /// Ids of the strangers by address. Lower ids are older.
    strangers: BTreeMap<IpAddr, BTreeSet<u64>>,
    /// Ids of the idle members, ordered by the start of their idle time.
    idle: BTreeMap<u64, u64>,
    reserved: BTreeSet<u64>,
    closing_count: usize,
    /// Counter for connection ids and for the order of idle connections.
    next: u64,
    /// Whether the port is full, so that the log reports this once.
    is_full: bool,
}

#[derive(Debug)]
struct SlotOwner {
    class: SlotClass,
    address: IpAddr,
    opened: Instant,
    is_authenticated: bool,
    /// Number of requests in progress; HTTP/2 allows several.
    requests: u32,
    /// Key in [`SlotTable::idle`] while the connection is an idle member.
    idle_since: u64,
    close: CancellationToken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotClass {
    Stranger,
    Member,
    Reserved,
    Closing(ConnectionClose),
}

/// Slot for a new connection.
enum Vacancy {
    Free,
    /// The slot of this connection.
    TakenFrom(u64),
    Reserve,
}

impl SlotTable {
    pub(crate) fn new(limits: SlotLimits) -> Self {
        Self {
            limits,
            connections: HashMap::new(),
            ordinary_count: 0,
            strangers: BTreeMap::new(),
            idle: BTreeMap::new(),
            reserved: BTreeSet::new(),
            closing_count: 0,
            next: 0,
            is_full: false,
        }
    }

    /// Admits a connection and returns its id. May close another connection, whose `close` is
    /// cancelled then.
    pub(crate) fn admit(
        &mut self,
        now: Instant,
        address: IpAddr,
        close: CancellationToken,
    ) -> Result<u64, AdmissionRetry> {
        if self.closing_count >= self.limits.closing_max {
            return Err(AdmissionRetry::UntilFreed);
        }
        let address = of_client(address);
        let class = match self.vacancy(address) {
            Vacancy::Free => self.class_of_new(false),
            Vacancy::TakenFrom(id) => {
                self.displace(now, id)?;
                self.class_of_new(false)
            }
            Vacancy::Reserve => {
                if self.reserved.len() >= self.limits.reserved_max {
                    let oldest =
                        self.reserved.first().copied().ok_or(AdmissionRetry::UntilFreed)?;
                    self.displace(now, oldest)?;
                }
                SlotClass::Reserved
            }
        };
        let id = self.tick();
        let connection = SlotOwner {
            class,
            address,
            opened: now,
            is_authenticated: false,
            requests: 0,
            idle_since: id,
            close,
        };
        self.connections.insert(id, connection);
        self.enter_class(id);
        Ok(id)
    }

    fn vacancy(&mut self, address: IpAddr) -> Vacancy {
        let oldest = |ids: &BTreeSet<u64>| *ids.first().expect("an address has a stranger");
        match self.strangers.get(&address) {
            Some(ids) if self.fill_share(ids) => return Vacancy::TakenFrom(oldest(ids)),
            _ if self.ordinary_count < self.limits.ordinary_max => return Vacancy::Free,
            _ => {}
        }
        if !std::mem::replace(&mut self.is_full, true) {
            tracing::warn!(
                connections_max = self.limits.ordinary_max,
                "connection limit reached: each new connection closes another one"
            );
        }
        let most = self.strangers.values().max_by_key(|ids| (ids.len(), Reverse(oldest(ids))));
        match (most, self.idle.first_key_value()) {
            (Some(ids), _) => Vacancy::TakenFrom(oldest(ids)),
            (None, Some((_, id))) => Vacancy::TakenFrom(*id),
            (None, None) => Vacancy::Reserve,
        }
    }

    /// Closes a connection for a new one, unless its client still has time to authenticate.
    fn displace(&mut self, now: Instant, id: u64) -> Result<(), AdmissionRetry> {
        let connection = &self.connections[&id];
        if !self.limits.authenticates || connection.is_authenticated {
            self.close(id, ConnectionClose::Gracefully);
            return Ok(());
        }
        let until = connection.opened + AUTHENTICATE_MIN;
        if now < until {
            return Err(AdmissionRetry::Until(until));
        }
        self.close(id, ConnectionClose::AtOnce);
        Ok(())
    }

    fn close(&mut self, id: u64, closing: ConnectionClose) {
        self.change_class(id, SlotClass::Closing(closing));
        self.connections[&id].close.cancel();
    }

    pub(crate) fn closing(&self, id: u64) -> ConnectionClose {
        match self.connections.get(&id).map(|connection| connection.class) {
            Some(SlotClass::Closing(closing)) => closing,
            _ => ConnectionClose::AtOnce,
        }
    }

    pub(crate) fn is_reserved(&self, id: u64) -> bool {
        self.reserved.contains(&id)
    }

    pub(crate) fn is_authenticated(&self, id: u64) -> bool {
        self.connections.get(&id).is_some_and(|connection| connection.is_authenticated)
    }

    /// Makes a stranger a member. Returns whether the client had not authenticated before.
    pub(crate) fn authenticate(&mut self, id: u64) -> bool {
        let Some(connection) = self.connections.get_mut(&id) else { return false };
        let is_first = !std::mem::replace(&mut connection.is_authenticated, true);
        if connection.class == SlotClass::Stranger {
            self.change_class(id, SlotClass::Member);
        }
        is_first
    }

    pub(crate) fn begin_request(&mut self, id: u64, may_use_reserve: bool) -> AdmissionVerdict {
        let Some(connection) = self.connections.get_mut(&id) else {
            return AdmissionVerdict::Refuse;
        };
        connection.requests += 1;
        match connection.class {
            SlotClass::Stranger => AdmissionVerdict::Serve,
            SlotClass::Member => {
                self.idle.remove(&connection.idle_since);
                AdmissionVerdict::Serve
            }
            SlotClass::Reserved => self.begin_reserved_request(id, may_use_reserve),
            SlotClass::Closing(_) => AdmissionVerdict::Refuse,
        }
    }

    /// Returns whether these strangers of one address fill its share of the slots.
    fn fill_share(&self, strangers: &BTreeSet<u64>) -> bool {
        strangers.len() >= (self.limits.ordinary_max / 2).max(1)
    }

    /// Moves a reserved connection to an ordinary slot, if one is free or has an idle member, and
    /// its address may have another stranger. Otherwise the connection closes after this request.
    fn begin_reserved_request(&mut self, id: u64, may_use_reserve: bool) -> AdmissionVerdict {
        let class = self.class_of_new(self.is_authenticated(id));
        let of_address = self.strangers.get(&self.connections[&id].address);
        let has_no_share =
            class == SlotClass::Stranger && of_address.is_some_and(|it| self.fill_share(it));
        if has_no_share || self.ordinary_count >= self.limits.ordinary_max {
            let idle = self.idle.first_key_value().filter(|_| !has_no_share);
            let Some((_, idle)) = idle else {
                self.close(id, ConnectionClose::Gracefully);
                return if may_use_reserve {
                    AdmissionVerdict::Serve
                } else {
                    AdmissionVerdict::Refuse
                };
            };
            self.close(*idle, ConnectionClose::Gracefully);
        }
        self.change_class(id, class);
        AdmissionVerdict::Serve
    }

    pub(crate) fn end_request(&mut self, id: u64) {
        let now = self.tick();
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.requests -= 1;
        if connection.requests == 0 && connection.class == SlotClass::Member {
            connection.idle_since = now;
            self.idle.insert(now, id);
        }
    }

    pub(crate) fn remove(&mut self, id: u64) {
        if self.connections.contains_key(&id) {
            self.leave_class(id);
            self.connections.remove(&id);
        }
        if self.ordinary_count * 2 < self.limits.ordinary_max {
            self.is_full = false;
        }
    }

    fn class_of_new(&self, is_authenticated: bool) -> SlotClass {
        match self.limits.authenticates && !is_authenticated {
            true => SlotClass::Stranger,
            false => SlotClass::Member,
        }
    }

    fn change_class(&mut self, id: u64, class: SlotClass) {
        self.leave_class(id);
        self.connections.get_mut(&id).expect("the connection is open").class = class;
        self.enter_class(id);
    }

    fn enter_class(&mut self, id: u64) {
        let connection = &self.connections[&id];
        match connection.class {
            SlotClass::Stranger => {
                self.ordinary_count += 1;
                self.strangers.entry(connection.address).or_default().insert(id);
            }
            SlotClass::Member => {
                self.ordinary_count += 1;
                if connection.requests == 0 {
                    self.idle.insert(connection.idle_since, id);
                }
            }
            SlotClass::Reserved => {
                self.reserved.insert(id);
            }
            SlotClass::Closing(_) => self.closing_count += 1,
        }
    }

    fn leave_class(&mut self, id: u64) {
        let connection = &self.connections[&id];
        match connection.class {
            SlotClass::Stranger => {
                self.ordinary_count -= 1;
                let ids = self.strangers.get_mut(&connection.address);
                let ids = ids.expect("each stranger is listed by its address");
                ids.remove(&id);
                if ids.is_empty() {
                    self.strangers.remove(&connection.address);
                }
            }
            SlotClass::Member => {
                self.ordinary_count -= 1;
                self.idle.remove(&connection.idle_since);
            }
            SlotClass::Reserved => {
                self.reserved.remove(&id);
            }
            SlotClass::Closing(_) => self.closing_count -= 1,
        }
    }

    fn tick(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// Returns the address that stands for a client.
fn of_client(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let mask = u128::MAX << (128 - IPV6_PREFIX_BITS);
            IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & mask))
        }
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A table, its time, and the tokens of its connections.
    struct TestSlots {
        table: SlotTable,
        now: Instant,
        tokens: HashMap<u64, CancellationToken>,
    }

    impl TestSlots {
        fn new(ordinary_max: usize, reserved_max: usize, authenticates: bool) -> Self {
            let closing_max = reserved_max;
            let limits = SlotLimits { ordinary_max, reserved_max, closing_max, authenticates };
            let (table, tokens) = (SlotTable::new(limits), HashMap::new());
            Self { table, now: Instant::now(), tokens }
        }

        fn try_admit(&mut self, address: [u8; 4]) -> Result<u64, AdmissionRetry> {
            let token = CancellationToken::new();
            let id = self.table.admit(self.now, address.into(), token.clone())?;
            self.tokens.insert(id, token);
            Ok(id)
        }

        fn admit(&mut self) -> u64 {
            self.try_admit([10, 0, 0, 1]).unwrap()
        }

        fn is_closing(&self, id: u64) -> bool {
            self.tokens[&id].is_cancelled()
        }

        fn end(&mut self, id: u64) {
            self.table.remove(id);
        }
    }

    #[test]
    fn a_new_connection_at_the_cap_closes_the_longest_idle_one() {
        let mut port = TestSlots::new(3, 1, false);
        let [busy, first, second] = [(); 3].map(|()| port.admit());
        assert_eq!(port.table.begin_request(busy, false), AdmissionVerdict::Serve);
        // The first connection became idle when its request ended. The second connection has been
        // idle for longer.
        assert_eq!(port.table.begin_request(first, false), AdmissionVerdict::Serve);
        port.table.end_request(first);
        let new = port.admit();
        assert!(!port.table.is_reserved(new));
        assert_eq!([busy, first, second].map(|id| port.is_closing(id)), [false, false, true]);
        // A request that arrives too late is refused.
        assert_eq!(port.table.begin_request(second, true), AdmissionVerdict::Refuse);
        port.table.end_request(second);
        port.end(second);
        assert_eq!(port.table.begin_request(new, false), AdmissionVerdict::Serve);
    }

    #[test]
    fn a_probe_is_served_once_while_every_ordinary_connection_is_busy() {
        let mut port = TestSlots::new(1, 2, false);
        let busy = port.admit();
        assert_eq!(port.table.begin_request(busy, false), AdmissionVerdict::Serve);
        let [probe, other] = [(); 2].map(|()| port.admit());
        assert!(port.table.is_reserved(probe) && port.table.is_reserved(other));
        assert_eq!(port.table.begin_request(probe, true), AdmissionVerdict::Serve);
        assert_eq!(port.table.begin_request(other, false), AdmissionVerdict::Refuse);
        assert!(port.is_closing(probe) && port.is_closing(other));
        assert_eq!(
            port.table.begin_request(probe, true),
            AdmissionVerdict::Refuse,
            "it is closing"
        );
        assert!(!port.is_closing(busy));
    }

    #[test]
    fn a_reserved_connection_becomes_ordinary_once_a_slot_is_free() {
        let mut port = TestSlots::new(1, 1, false);
        let busy = port.admit();
        assert_eq!(port.table.begin_request(busy, false), AdmissionVerdict::Serve);
        let waiting = port.admit();
        port.table.end_request(busy);
        assert_eq!(port.table.begin_request(waiting, false), AdmissionVerdict::Serve);
        assert_eq!([busy, waiting].map(|id| port.is_closing(id)), [true, false]);
    }

    #[test]
    fn a_full_reserve_closes_its_oldest_connection() {
        let mut port = TestSlots::new(1, 1, false);
        let busy = port.admit();
        assert_eq!(port.table.begin_request(busy, false), AdmissionVerdict::Serve);
        let silent = port.admit();
        let probe = port.admit();
        assert!(port.is_closing(silent));
        assert_eq!(
            port.try_admit([10, 0, 0, 1]),
            Err(AdmissionRetry::UntilFreed),
            "it has not ended"
        );
        port.end(silent);
        assert_eq!(port.table.begin_request(probe, true), AdmissionVerdict::Serve);
        port.end(probe);
        port.admit();
    }

    #[test]
    fn strangers_give_way_before_members_and_have_time_to_authenticate() {
        let mut port = TestSlots::new(3, 1, true);
        let member = port.admit();
        assert!(port.table.authenticate(member));
        assert!(!port.table.authenticate(member), "it has authenticated before");
        let [first, second] = [[10, 0, 0, 2], [10, 0, 0, 3]].map(|it| port.try_admit(it).unwrap());
        // A request without a credential does not protect a connection.
        assert_eq!(port.table.begin_request(first, false), AdmissionVerdict::Serve);
        let until = port.now + AUTHENTICATE_MIN;
        assert_eq!(port.try_admit([10, 0, 0, 4]), Err(AdmissionRetry::Until(until)));
        port.now = until;
        let third = port.try_admit([10, 0, 0, 4]).unwrap();
        assert_eq!([member, first, second].map(|id| port.is_closing(id)), [false, true, false]);
        assert_eq!(port.table.closing(first), ConnectionClose::AtOnce);
        port.end(first);
        // Without strangers, an idle member gives way, and may finish.
        for id in [second, third] {
            port.table.authenticate(id);
            assert_eq!(port.table.begin_request(id, false), AdmissionVerdict::Serve);
        }
        port.admit();
        assert_eq!(port.table.closing(member), ConnectionClose::Gracefully);
        assert_eq!([member, second, third].map(|id| port.is_closing(id)), [true, false, false]);
    }

    #[test]
    fn address_with_the_most_strangers_gives_way() {
        let mut port = TestSlots::new(5, 1, true);
        let alone = port.try_admit([10, 0, 0, 9]).unwrap();
        let many: Vec<_> = (0..4).map(|i| port.try_admit([10, 0, 0, i / 2]).unwrap()).collect();
        port.now += AUTHENTICATE_MIN;
        port.try_admit([10, 0, 0, 8]).unwrap();
        assert!(port.is_closing(many[0]) && !port.is_closing(alone));
    }

    #[test]
    fn strangers_of_one_address_have_half_of_the_slots() {
        let mut port = TestSlots::new(4, 1, true);
        let strangers = [(); 2].map(|()| port.admit());
        let until = port.now + AUTHENTICATE_MIN;
        assert_eq!(port.try_admit([10, 0, 0, 1]), Err(AdmissionRetry::Until(until)));
        let other = port.try_admit([10, 0, 0, 2]).unwrap();
        port.now = until;
        port.admit();
        assert!(port.is_closing(strangers[0]) && !port.is_closing(other));
        // All addresses of an IPv6 client count as one.
        let client = |bits: u128| of_client(Ipv6Addr::from_bits(bits).into());
        assert_eq!(client(7 << 64 | 1), client(7 << 64 | 2));
        assert_ne!(client(7 << 64), client(8 << 64));
        assert_eq!(of_client("::ffff:10.0.0.1".parse().unwrap()), IpAddr::from([10, 0, 0, 1]));
    }

    #[test]
    fn reserve_of_a_port_with_authentication_waits_for_its_oldest_connection() {
        let mut port = TestSlots::new(1, 1, true);
        let member = port.admit();
        port.table.authenticate(member);
        port.table.begin_request(member, false);
        let reserved = port.admit();
        assert_eq!(
            port.try_admit([10, 0, 0, 2]),
            Err(AdmissionRetry::Until(port.now + AUTHENTICATE_MIN))
        );
        assert_eq!(port.table.begin_request(reserved, true), AdmissionVerdict::Serve);
        assert_eq!(port.table.closing(reserved), ConnectionClose::Gracefully);
    }

    proptest! {
        #[test]
        fn classes_stay_within_their_bounds(
            (ordinary_max, reserved_max, authenticates) in (1usize..5, 1usize..4, any::<bool>()),
            steps in prop::collection::vec((0usize..6, 0usize..12, any::<bool>()), 0..200),
        ) {
            let mut port = TestSlots::new(ordinary_max, reserved_max, authenticates);
            let mut open: Vec<(u64, u32)> = Vec::new();
            for (step, index, is_probe) in steps {
                let index = index.checked_rem(open.len()).unwrap_or(0);
                match step {
                    0 => if let Ok(id) = port.try_admit([10, 0, 0, index as u8]) {
                        // A probe on a fresh connection always gets through.
                        let served = !is_probe || port.table.begin_request(id, true) == AdmissionVerdict::Serve;
                        prop_assert!(served);
                        open.push((id, u32::from(is_probe)));
                    }
                    1 if !open.is_empty() => {
                        port.table.begin_request(open[index].0, is_probe);
                        open[index].1 += 1;
                    }
                    2 if !open.is_empty() && open[index].1 > 0 => {
                        port.table.end_request(open[index].0);
                        open[index].1 -= 1;
                    }
                    3 if !open.is_empty() => port.end(open.swap_remove(index).0),
                    4 if authenticates && !open.is_empty() => {
                        port.table.authenticate(open[index].0);
                    }
                    5 => port.now += AUTHENTICATE_MIN / 2,
                    _ => {}
                }
                let table = &port.table;
                prop_assert_eq!(table.connections.len(), open.len());
                prop_assert!(table.ordinary_count <= ordinary_max);
                prop_assert!(table.reserved.len() <= reserved_max);
                let (strangers, reserved) =
                    (table.strangers.values().map(BTreeSet::len).sum::<usize>(), table.reserved.len());
                prop_assert!(table.strangers.values().all(|ids| (1..=(ordinary_max / 2).max(1)).contains(&ids.len())));
                prop_assert_eq!(table.ordinary_count + reserved + table.closing_count, open.len());
                let is_idle_member = |(id, requests): &&(u64, u32)| {
                    *requests == 0 && table.connections[id].class == SlotClass::Member
                };
                prop_assert_eq!(table.idle.len(), open.iter().filter(is_idle_member).count());
                prop_assert!(authenticates || strangers == 0);
            }
        }
    }
}
