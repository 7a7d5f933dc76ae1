//! Splits the file descriptors of the process between the ports, and decides which connections a port keeps.
//! Pure: no socket and no clock.
//!
//! Life of a connection on a port that admits at most `ordinary_max` connections:
//! 1. Below the cap the connection is *ordinary*.
//! 2. At the cap the connection takes the slot of the longest-idle ordinary connection, which is closed. A connection
//!    is idle while it has no request in progress: a kept-alive connection, or a client that has not sent a whole
//!    request head yet.
//! 3. When every ordinary connection has a request in progress, the connection is *reserved*: it serves one probe.
//!    Other requests are rejected, unless a slot is free by then. When the reserve is full too, the longest-idle
//!    reserved connection is closed.
//! 4. A *closing* connection holds its descriptor but no slot until its task ends. Its requests are rejected. At most
//!    `reserved_max` connections are closing at a time; then the port accepts no connection until one has ended.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard},
};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::lock::lock;

/// Descriptors kept for listeners, connections to nodes, telemetry and logs.
const DESCRIPTORS_KEPT: u64 = 128;
/// Number of ports: HTTP and gRPC.
const PORTS: u64 = 2;
/// Maximum number of ordinary connections per port. A connection takes about 20 KiB.
const CONNECTIONS_MAX: u64 = 4096;
/// Maximum number of reserved connections per port, and of closing ones.
const RESERVED_MAX: u64 = 64;
/// Divisor: reserved and closing connections each take at most this fraction of a port's descriptors.
const RESERVED_FRACTION: u64 = 16;

/// Maximum numbers of open connections of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    pub ordinary_max: usize,
    /// Connections for probes while every ordinary connection has a request in progress.
    pub reserved_max: usize,
}

impl ConnectionLimits {
    /// Limits of the operator's port, whose descriptors are among [`DESCRIPTORS_KEPT`].
    pub const ADMIN: Self = Self { ordinary_max: 16, reserved_max: 1 };

    /// Returns each port's limits under this limit on open files. A low limit is logged.
    pub fn new(open_files_max: u64) -> Self {
        let limits = Self::split(open_files_max);
        if (limits.ordinary_max as u64) < CONNECTIONS_MAX {
            tracing::warn!(
                open_files_max,
                connections_max = limits.ordinary_max,
                wanted = CONNECTIONS_MAX,
                "the limit on open files bounds the connections on each port; raise it with ulimit -Hn"
            );
        }
        limits
    }

    /// Computes the limits. Each kind has at least one connection, so a low limit does not make the router
    /// unreachable.
    fn split(open_files_max: u64) -> Self {
        let each = open_files_max.saturating_sub(DESCRIPTORS_KEPT) / PORTS;
        let reserved = (each / RESERVED_FRACTION).clamp(1, RESERVED_MAX);
        let ordinary = each.saturating_sub(2 * reserved).clamp(1, CONNECTIONS_MAX);
        Self { ordinary_max: ordinary as usize, reserved_max: reserved as usize }
    }
}

/// Admission of connections to one port. Clones share their state.
#[derive(Clone)]
pub struct Slots {
    table: Arc<Mutex<Table>>,
    /// Notified whenever a connection ends.
    freed: Arc<Notify>,
}

/// Guard of a connection's entry.
pub struct Slot {
    id: u64,
    slots: Slots,
    close: CancellationToken,
    is_reserved: bool,
}

/// Decision about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Serve,
    /// The port has too many connections.
    Refuse,
}

struct Table {
    ordinary_max: usize,
    reserved_max: usize,
    entries: HashMap<u64, Entry>,
    ordinary: Class,
    reserved: Class,
    /// Counter for connection ids and for the order of idle connections.
    next: u64,
    /// Whether the port is full, so that the log reports this once.
    is_full: bool,
}

/// Connections of one kind that are not closing.
#[derive(Default)]
struct Class {
    count: usize,
    /// Ids of the idle connections, ordered by the start of their idle time.
    idle: BTreeMap<u64, u64>,
}

struct Entry {
    state: State,
    /// Number of requests in progress; HTTP/2 allows several.
    requests: u32,
    /// Key in [`Class::idle`] while there is no request in progress.
    idle_since: u64,
    close: CancellationToken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ordinary,
    Reserved,
    Closing,
}

impl Slots {
    pub fn new(ordinary_max: usize, reserved_max: usize) -> Self {
        let table = Table {
            ordinary_max,
            reserved_max,
            entries: HashMap::new(),
            ordinary: Class::default(),
            reserved: Class::default(),
            next: 0,
            is_full: false,
        };
        Self { table: Arc::new(Mutex::new(table)), freed: Arc::default() }
    }

    /// Admits a connection; closes another one if the port is full.
    pub fn admit(&self) -> Slot {
        let close = CancellationToken::new();
        let (id, state) = self.lock().admit(close.clone());
        Slot { id, slots: self.clone(), close, is_reserved: state == State::Reserved }
    }

    /// Waits until the port may accept one more connection.
    pub async fn has_descriptor(&self) {
        loop {
            let freed = self.freed.notified();
            if self.lock().has_descriptor() {
                return;
            }
            freed.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }
}

impl Slot {
    /// Returns the number of the connection, unique on its port.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns whether the connection is reserved for a probe.
    pub fn is_reserved(&self) -> bool {
        self.is_reserved
    }

    /// Waits until the connection must close. Requests in progress may finish first.
    pub async fn closing(&self) {
        self.close.cancelled().await;
    }

    /// Counts a request after its head has arrived. The caller must call [`Self::end_request`] for any verdict.
    pub fn begin_request(&self, is_probe: bool) -> Verdict {
        self.slots.lock().begin_request(self.id, is_probe)
    }

    /// Ends a request whose response was written or dropped.
    pub fn end_request(&self) {
        self.slots.lock().end_request(self.id);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.lock().remove(self.id);
        self.slots.freed.notify_waiters();
    }
}

impl Table {
    fn admit(&mut self, close: CancellationToken) -> (u64, State) {
        let id = self.tick();
        let state = if self.take_ordinary_slot() {
            State::Ordinary
        } else {
            if self.reserved.count >= self.reserved_max {
                self.close_longest_idle(State::Reserved);
            }
            State::Reserved
        };
        self.entries.insert(id, Entry { state, requests: 0, idle_since: id, close });
        let class = self.class(state);
        class.count += 1;
        class.idle.insert(id, id);
        (id, state)
    }

    /// Frees an ordinary slot if possible.
    fn take_ordinary_slot(&mut self) -> bool {
        if self.ordinary.count < self.ordinary_max {
            return true;
        }
        if !std::mem::replace(&mut self.is_full, true) {
            tracing::warn!(
                connections_max = self.ordinary_max,
                "connection limit reached: each new connection closes the longest-idle one"
            );
        }
        self.close_longest_idle(State::Ordinary)
    }

    fn close_longest_idle(&mut self, state: State) -> bool {
        let Some((_, id)) = self.class(state).idle.pop_first() else { return false };
        self.class(state).count -= 1;
        self.close(id);
        true
    }

    /// Marks a connection as closing after it left its class.
    fn close(&mut self, id: u64) {
        let entry = self.entries.get_mut(&id).expect("classes name open connections");
        entry.state = State::Closing;
        entry.close.cancel();
    }

    fn begin_request(&mut self, id: u64, is_probe: bool) -> Verdict {
        let Entry { state, requests, idle_since, .. } =
            self.entries.get_mut(&id).expect("a connection has its entry until it ends");
        *requests += 1;
        let (state, was_idle, since) = (*state, *requests == 1, *idle_since);
        if state == State::Closing {
            return Verdict::Refuse;
        }
        if was_idle {
            self.class(state).idle.remove(&since);
        }
        if state == State::Ordinary {
            return Verdict::Serve;
        }
        self.reserved.count -= 1;
        if self.take_ordinary_slot() {
            self.ordinary.count += 1;
            self.entries.get_mut(&id).expect("the id was found above").state = State::Ordinary;
            return Verdict::Serve;
        }
        self.close(id);
        if is_probe { Verdict::Serve } else { Verdict::Refuse }
    }

    fn end_request(&mut self, id: u64) {
        let now = self.tick();
        let Some(entry) = self.entries.get_mut(&id) else { return };
        entry.requests -= 1;
        if entry.requests == 0 && entry.state != State::Closing {
            entry.idle_since = now;
            let state = entry.state;
            self.class(state).idle.insert(now, id);
        }
    }

    fn remove(&mut self, id: u64) {
        let Some(entry) = self.entries.remove(&id) else { return };
        if entry.state != State::Closing {
            let class = self.class(entry.state);
            class.count -= 1;
            class.idle.remove(&entry.idle_since);
        }
        if self.ordinary.count * 2 < self.ordinary_max {
            self.is_full = false;
        }
    }

    fn has_descriptor(&self) -> bool {
        let closing = self.entries.len() - self.ordinary.count - self.reserved.count;
        closing < self.reserved_max
    }

    fn class(&mut self, state: State) -> &mut Class {
        match state {
            State::Ordinary => &mut self.ordinary,
            State::Reserved => &mut self.reserved,
            State::Closing => unreachable!("a closing connection has no slot"),
        }
    }

    fn tick(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn is_closing(slot: &Slot) -> bool {
        slot.close.is_cancelled()
    }

    #[test]
    fn a_new_connection_at_the_cap_closes_the_longest_idle_one() {
        let slots = Slots::new(3, 1);
        let [busy, first, second] = [(); 3].map(|()| slots.admit());
        assert_eq!(busy.begin_request(false), Verdict::Serve);
        // The first connection became idle when its request ended. The second connection has been idle for longer.
        assert_eq!(first.begin_request(false), Verdict::Serve);
        first.end_request();
        let new = slots.admit();
        assert!(!new.is_reserved());
        assert_eq!([&busy, &first, &second].map(is_closing), [false, false, true]);
        // A request that arrives too late is refused.
        assert_eq!(second.begin_request(true), Verdict::Refuse);
        second.end_request();
        drop(second);
        assert_eq!(new.begin_request(false), Verdict::Serve);
    }

    #[test]
    fn a_probe_is_served_once_while_every_ordinary_connection_is_busy() {
        let slots = Slots::new(1, 2);
        let busy = slots.admit();
        assert_eq!(busy.begin_request(false), Verdict::Serve);
        let [probe, other] = [(); 2].map(|()| slots.admit());
        assert!(probe.is_reserved() && other.is_reserved());
        assert_eq!(probe.begin_request(true), Verdict::Serve);
        assert_eq!(other.begin_request(false), Verdict::Refuse);
        assert!(is_closing(&probe) && is_closing(&other));
        assert_eq!(probe.begin_request(true), Verdict::Refuse, "the connection is closing");
        assert!(!is_closing(&busy));
    }

    #[test]
    fn a_reserved_connection_becomes_ordinary_once_a_slot_is_free() {
        let slots = Slots::new(1, 1);
        let busy = slots.admit();
        assert_eq!(busy.begin_request(false), Verdict::Serve);
        let waiting = slots.admit();
        busy.end_request();
        assert_eq!(waiting.begin_request(false), Verdict::Serve);
        assert_eq!([&busy, &waiting].map(is_closing), [true, false]);
    }

    #[test]
    fn a_full_reserve_closes_its_longest_idle_connection() {
        let slots = Slots::new(1, 1);
        let busy = slots.admit();
        assert_eq!(busy.begin_request(false), Verdict::Serve);
        let silent = slots.admit();
        assert!(slots.lock().has_descriptor());
        let probe = slots.admit();
        assert!(is_closing(&silent));
        assert!(!slots.lock().has_descriptor(), "the closing connection has not ended");
        drop(silent);
        assert!(slots.lock().has_descriptor());
        assert_eq!(probe.begin_request(true), Verdict::Serve);
    }

    proptest! {
        #[test]
        fn classes_stay_within_their_bounds(
            (ordinary_max, reserved_max) in (1usize..5, 1usize..4),
            steps in prop::collection::vec((0usize..4, 0usize..12, any::<bool>()), 0..200),
        ) {
            let slots = Slots::new(ordinary_max, reserved_max);
            let mut open: Vec<(Slot, u32)> = Vec::new();
            for (step, index, is_probe) in steps {
                let index = index.checked_rem(open.len()).unwrap_or(0);
                match step {
                    0 if slots.lock().has_descriptor() => {
                        let slot = slots.admit();
                        // A probe on a fresh connection always gets through.
                        let served = !is_probe || slot.begin_request(true) == Verdict::Serve;
                        prop_assert!(served);
                        open.push((slot, u32::from(is_probe)));
                    }
                    1 if !open.is_empty() => {
                        open[index].0.begin_request(is_probe);
                        open[index].1 += 1;
                    }
                    2 if !open.is_empty() && open[index].1 > 0 => {
                        open[index].0.end_request();
                        open[index].1 -= 1;
                    }
                    3 if !open.is_empty() => drop(open.swap_remove(index)),
                    _ => {}
                }
                let table = slots.lock();
                prop_assert_eq!(table.entries.len(), open.len());
                prop_assert!(table.ordinary.count <= ordinary_max);
                prop_assert!(table.reserved.count <= reserved_max);
                let idle = table.ordinary.idle.len() + table.reserved.idle.len();
                let expected = open.iter().filter(|(slot, requests)| !is_closing(slot) && *requests == 0);
                prop_assert_eq!(idle, expected.count());
            }
        }
    }

    #[test]
    fn both_ports_and_the_kept_descriptors_fit_under_the_limit() {
        for (open_files_max, ordinary_max, reserved_max) in [
            (0, 1, 1),
            (DESCRIPTORS_KEPT, 1, 1),
            (DESCRIPTORS_KEPT + 6, 1, 1),
            (256, 56, 4),
            (1024, 392, 28),
            (20_000, 4096, 64),
            (u64::MAX, 4096, 64),
        ] {
            let limits = ConnectionLimits::split(open_files_max);
            assert_eq!(limits, ConnectionLimits { ordinary_max, reserved_max }, "{open_files_max}");
        }
    }
}
