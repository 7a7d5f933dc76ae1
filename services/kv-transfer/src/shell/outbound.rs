//! The control messages to one peer: a bounded queue and the thread that owns the DEALER.

use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use super::sockets;
use crate::{
    api::{Epoch, PeerAddress},
    control::{ControlMessage, Sealer},
    driver::{ControlLinks, Input},
    metrics::Metrics,
    resolve::Resolver,
    threads::Threads,
};

/// Queue bound: two messages for each transfer of a node with default settings, because all
/// transfers send when the pair connects. A full queue means that the peer is lost.
const QUEUE_MAX: usize = 2048;
/// Interval at which an idle thread checks its connection.
const CONNECTION_POLL: Duration = Duration::from_millis(500);
/// Connect time-out for one of several addresses, well under a lease.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(300);

/// State shared by all sender threads.
#[derive(Clone)]
pub(super) struct OutboundContext {
    pub context: zmq::Context,
    pub sealer: Arc<Sealer>,
    pub resolver: Resolver,
    pub metrics: Arc<Metrics>,
    /// Unreachable peers.
    pub failures: Sender<Input>,
    /// Number of monitors attached so far. It names their endpoints: the peer's epoch is not
    /// unique, because a reconnect may overlap with the previous thread.
    pub monitors: Arc<AtomicU64>,
}

/// Queue to the sender thread. Dropping it stops the thread after the linger time.
pub(super) struct Outbound {
    queue: Sender<ControlMessage>,
    closing: Arc<AtomicBool>,
}

impl Outbound {
    pub(super) fn start(
        shared: &OutboundContext,
        peer: &PeerAddress,
        threads: &Threads,
    ) -> io::Result<Self> {
        let (queue, messages) = bounded(QUEUE_MAX);
        let closing = Arc::new(AtomicBool::new(false));
        let sender = PeerSender {
            shared: shared.clone(),
            peer: peer.clone(),
            messages,
            closing: Arc::clone(&closing),
        };
        threads.spawn("kv-control-out", move || sender.run())?;
        Ok(Self { queue, closing })
    }

    /// Fails if the queue is full.
    pub(super) fn send(&self, message: ControlMessage) -> Result<(), String> {
        self.queue.try_send(message).map_err(|_| {
            format!("{QUEUE_MAX} control messages are queued for the peer, the maximum")
        })
    }
}

impl Drop for Outbound {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Release);
    }
}

/// The queue of each connected peer.
pub(super) struct OutboundQueues {
    pub context: OutboundContext,
    pub queues: BTreeMap<Epoch, Outbound>,
    pub senders: Threads,
}

impl ControlLinks for OutboundQueues {
    fn open(&mut self, peer: &PeerAddress) -> Result<(), String> {
        let outbound = Outbound::start(&self.context, peer, &self.senders)
            .map_err(|error| format!("cannot start the thread for control messages: {error}"))?;
        self.queues.insert(peer.epoch, outbound);
        Ok(())
    }

    fn send(&mut self, peer: Epoch, message: ControlMessage) -> Result<(), String> {
        self.queues.get(&peer).map_or(Ok(()), |queue| queue.send(message))
    }

    fn close(&mut self, peer: Epoch) {
        self.queues.remove(&peer);
    }
}

/// Socket with one credential, and its monitor.
struct Connection {
    dealer: zmq::Socket,
    events: zmq::Socket,
}

impl Connection {
    /// Returns the number of the next event without blocking.
    fn next_event(&self) -> Option<u16> {
        let event = self.events.recv_multipart(zmq::DONTWAIT).ok()?;
        // Two bytes of the event, four of its value.
        Some(u16::from_ne_bytes(event.first()?.get(..2)?.try_into().ok()?))
    }
}

/// Reason why no further message is sent over a connection.
enum SenderEnd {
    /// The queue was dropped.
    Closed,
    /// The connection was lost, and libzmq reconnected.
    CredentialUsedUp,
    /// The peer rejected a new credential.
    Rejected,
}

struct PeerSender {
    shared: OutboundContext,
    peer: PeerAddress,
    messages: Receiver<ControlMessage>,
    closing: Arc<AtomicBool>,
}

impl PeerSender {
    fn run(self) {
        if let Err(reason) = self.send_all() {
            // The driver reacts by dropping the queue; until then the thread drains it.
            let failed = Input::PeerFailed { peer: self.peer.epoch, reason };
            let _ = self.shared.failures.try_send(failed);
            while !matches!(
                self.messages.recv_timeout(CONNECTION_POLL),
                Err(RecvTimeoutError::Disconnected)
            ) {}
        }
    }

    fn send_all(&self) -> Result<(), String> {
        let endpoint = &self.peer.control_endpoint;
        let failed = |doing: &str, error: &dyn std::fmt::Display| {
            format!("control endpoint {endpoint}: cannot {doing}: {error}")
        };
        // Resolved here because libzmq would resolve on its only I/O thread, which serves all
        // pairs.
        let addresses =
            self.shared.resolver.resolve(endpoint).map_err(|error| failed("resolve", &error))?;
        let address = first_reachable(&addresses);
        loop {
            let connection = self.connect(address).map_err(|error| failed("connect", &error))?;
            match self.send_over(&connection).map_err(|error| failed("send", &error))? {
                SenderEnd::Closed => return Ok(()),
                SenderEnd::CredentialUsedUp => {}
                SenderEnd::Rejected => {
                    return Err(failed(
                        "connect",
                        &"rejected by the peer; expected the same cluster secret and the epoch of its process",
                    ));
                }
            }
        }
    }

    /// Opens a socket with a new credential.
    fn connect(&self, address: SocketAddr) -> zmq::Result<Connection> {
        let OutboundContext { context, monitors, sealer, .. } = &self.shared;
        let dealer = sockets::outbound(context, &sealer.credential(self.peer.epoch), address)?;
        let events = monitor(context, monitors, &dealer)?;
        dealer.connect(&format!("tcp://{address}"))?;
        Ok(Connection { dealer, events })
    }

    fn send_over(&self, connection: &Connection) -> zmq::Result<SenderEnd> {
        let mut connected = false;
        loop {
            match self.messages.recv_timeout(CONNECTION_POLL) {
                Ok(message) => self.send(&connection.dealer, &message)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(SenderEnd::Closed),
            }
            while let Some(event) = connection.next_event() {
                if event != zmq::SocketEvent::CONNECTED.to_raw() {
                    return Ok(SenderEnd::Rejected);
                }
                // libzmq reconnects with the same credential, which the listener accepts once.
                if std::mem::replace(&mut connected, true) {
                    return Ok(SenderEnd::CredentialUsedUp);
                }
            }
        }
    }

    /// Sends one message, or drops it if the peer is unreachable: important messages are
    /// retransmitted.
    fn send(&self, dealer: &zmq::Socket, message: &ControlMessage) -> zmq::Result<()> {
        let sealed = match self.shared.sealer.seal(self.peer.epoch, message) {
            Ok(sealed) => sealed,
            Err(error) => {
                tracing::error!(%error, peer = self.peer.node_id, "dropping a control message");
                return Ok(());
            }
        };
        // Never blocks on an unreachable peer while closing.
        let flags = if self.closing.load(Ordering::Acquire) { zmq::DONTWAIT } else { 0 };
        match dealer.send_multipart(sealed.frames(), flags) {
            Ok(()) => {
                self.shared.metrics.count(|counts| counts.control_sent += 1);
                Ok(())
            }
            Err(zmq::Error::EAGAIN | zmq::Error::EINTR) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// Returns the first address that accepts a connection, else the first address. libzmq connects to
/// one address only, and a name may have unusable ones (IPv6 as well as IPv4). A single address is
/// not probed.
fn first_reachable(addresses: &[SocketAddr]) -> SocketAddr {
    let answers =
        |address: &&SocketAddr| TcpStream::connect_timeout(address, CONNECT_TIMEOUT).is_ok();
    let several = addresses.len() > 1;
    *several.then(|| addresses.iter().find(answers)).flatten().unwrap_or(&addresses[0])
}

/// Returns a socket that gets a message for each connection and if the peer rejects the ZAP
/// credential.
fn monitor(
    context: &zmq::Context,
    monitors: &AtomicU64,
    dealer: &zmq::Socket,
) -> zmq::Result<zmq::Socket> {
    let number = monitors.fetch_add(1, Ordering::Relaxed);
    let endpoint = format!("inproc://kv-transfer-monitor-{number}");
    let wanted = [zmq::SocketEvent::CONNECTED, zmq::SocketEvent::HANDSHAKE_FAILED_AUTH];
    dealer.monitor(&endpoint, wanted.iter().map(|event| i32::from(event.to_raw())).sum())?;
    let events = context.socket(zmq::PAIR)?;
    events.set_linger(0)?;
    events.connect(&endpoint)?;
    Ok(events)
}

#[cfg(test)]
mod tests {
    use std::{
        net::{Shutdown, TcpListener},
        sync::Mutex,
        thread,
        time::Instant,
    };

    use super::*;
    use crate::{
        ClusterSecret,
        api::{Peer, TransferId},
        control::{Body, Keys},
        shell::listener::Listener,
        threads::locked,
    };

    fn shared() -> (OutboundContext, Receiver<Input>) {
        let keys = Keys::derive(&ClusterSecret::new("the secret of this test").unwrap());
        let (failures, failed) = bounded(4);
        let from = Peer { node_id: "me".to_owned(), epoch: Epoch(1) };
        let shared = OutboundContext {
            context: zmq::Context::new(),
            sealer: Sealer::new(keys, from),
            resolver: Resolver::system(),
            metrics: Arc::default(),
            failures,
            monitors: Arc::default(),
        };
        (shared, failed)
    }

    fn peer(control_endpoint: &str) -> PeerAddress {
        PeerAddress {
            node_id: "peer".to_owned(),
            epoch: Epoch(2),
            control_endpoint: control_endpoint.to_owned(),
        }
    }

    fn message() -> ControlMessage {
        ControlMessage::untraced(Body::Ack { transfer: TransferId(1) })
    }

    #[test]
    fn full_queue_rejects_messages_and_its_thread_ends() {
        let (shared, _failed) = shared();
        let threads = Threads::default();
        // No process listens on the discard port.
        let outbound = Outbound::start(&shared, &peer("tcp://127.0.0.1:9"), &threads).unwrap();
        let taken = (0..2 * QUEUE_MAX).take_while(|_| outbound.send(message()).is_ok()).count();
        assert!((QUEUE_MAX..QUEUE_MAX + 16).contains(&taken), "{taken}");
        drop(outbound);
        assert!(threads.join_all(Instant::now() + Duration::from_secs(10)).is_empty());
    }

    #[test]
    fn invalid_endpoint_is_reported() {
        let (shared, failed) = shared();
        let threads = Threads::default();
        let outbound = Outbound::start(&shared, &peer("ipc://somewhere"), &threads).unwrap();
        let Ok(Input::PeerFailed { peer: Epoch(2), reason }) =
            failed.recv_timeout(Duration::from_secs(20))
        else {
            panic!("no failure of the peer is reported");
        };
        assert!(reason.contains("ipc://somewhere") && reason.contains("tcp://"), "{reason}");
        drop(outbound);
        assert!(threads.join_all(Instant::now() + Duration::from_secs(5)).is_empty());
    }

    #[test]
    fn unresolvable_name_is_reported() {
        let (shared, failed) = shared();
        let threads = Threads::default();
        let nowhere = peer("tcp://nowhere.invalid:9");
        let outbound = Outbound::start(&shared, &nowhere, &threads).unwrap();
        let Ok(Input::PeerFailed { peer: Epoch(2), reason }) =
            failed.recv_timeout(Duration::from_secs(20))
        else {
            panic!("no failure of the peer is reported");
        };
        assert!(
            reason.contains("cannot resolve") && reason.contains("nowhere.invalid"),
            "{reason}"
        );
        drop(outbound);
        assert!(threads.join_all(Instant::now() + Duration::from_secs(5)).is_empty());
    }

    #[test]
    fn first_reachable_address_is_used() {
        let listener = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (open, other) = (listener(), listener());
        let [open_at, other_at] = [&open, &other].map(|it| it.local_addr().unwrap());
        let closed_at = listener().local_addr().unwrap();
        assert_eq!(first_reachable(&[closed_at, open_at, other_at]), open_at);
        assert_eq!(first_reachable(&[closed_at]), closed_at);
        assert_eq!(first_reachable(&[closed_at, closed_at]), closed_at);
    }

    /// Relays connections to `target`. [`Relay::cut`] closes them.
    struct Relay {
        address: SocketAddr,
        streams: Arc<Mutex<Vec<TcpStream>>>,
    }

    impl Relay {
        fn start(target: SocketAddr) -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let streams: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
            let shared = Arc::clone(&streams);
            // Ends with the test process.
            thread::spawn(move || {
                for client in listener.incoming() {
                    let (client, server) = (client.unwrap(), TcpStream::connect(target).unwrap());
                    for (from, to) in [(&client, &server), (&server, &client)] {
                        let (mut from, mut to) =
                            (from.try_clone().unwrap(), to.try_clone().unwrap());
                        thread::spawn(move || io::copy(&mut from, &mut to));
                    }
                    locked(&shared).extend([client, server]);
                }
            });
            Self { address, streams }
        }

        fn cut(&self) {
            for stream in locked(&self.streams).drain(..) {
                // Fails if the other end was faster.
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }

    #[test]
    fn lost_connection_is_opened_again_with_a_new_credential() {
        let (shared, failed) = shared();
        let keys = Keys::derive(&ClusterSecret::new("the secret of this test").unwrap());
        let (messages, received) = bounded(1000);
        let bind = "127.0.0.1:0".parse().unwrap();
        let metrics = Arc::default();
        let listener =
            Listener::start(&zmq::Context::new(), bind, keys, Epoch(2), messages, metrics).unwrap();
        let relay = Relay::start(SocketAddr::new(bind.ip(), listener.port));
        let threads = Threads::default();
        let peer = peer(&format!("tcp://{}", relay.address));
        let outbound = Outbound::start(&shared, &peer, &threads).unwrap();
        for _ in 0..3 {
            let deadline = Instant::now() + Duration::from_secs(20);
            loop {
                assert!(Instant::now() < deadline, "no message arrives");
                outbound.send(message()).unwrap();
                if received.recv_timeout(Duration::from_millis(20)).is_ok() {
                    break;
                }
            }
            relay.cut();
            // Messages that arrived before the cut.
            while received.recv_timeout(Duration::from_millis(20)).is_ok() {}
        }
        assert!(failed.is_empty(), "{:?}", failed.try_recv());
        drop(outbound);
        assert!(threads.join_all(Instant::now() + Duration::from_secs(5)).is_empty());
    }

    #[test]
    fn sender_threads_for_one_peer_may_overlap() {
        let (shared, failed) = shared();
        let threads = Threads::default();
        let peer = peer("tcp://127.0.0.1:9");
        // Happens when a pair reconnects while its previous thread still sends.
        let senders: Vec<Outbound> =
            (0..3).map(|_| Outbound::start(&shared, &peer, &threads).unwrap()).collect();
        drop(senders);
        assert!(threads.join_all(Instant::now() + Duration::from_secs(5)).is_empty());
        assert!(failed.is_empty());
    }
}
