//! The way out to one peer: a bounded queue and the thread that owns the DEALER.

use std::{
    collections::BTreeMap,
    fmt::Display,
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
    control::{ControlMessage, Keys, Signer},
    driver::ControlLinks,
    metrics::ControlCounters,
    resolve::Resolver,
    threads::Threads,
};

/// Control messages that wait for one peer: two for each of as many transfers as a node has by default, which
/// all speak when the pair comes up, and are answered at once. A full queue is a lost peer.
const QUEUE_MAX: usize = 2048;
/// How often an idle thread looks at the state of its connection.
const LOOK: Duration = Duration::from_millis(500);
/// How long one of a name's several addresses has to answer, out of a lease of seconds.
const CONNECT: Duration = Duration::from_millis(300);

/// What every sender thread needs.
#[derive(Clone)]
pub struct Postbox {
    pub context: zmq::Context,
    pub keys: Keys,
    pub signer: Arc<Signer>,
    pub resolver: Resolver,
    pub counters: Arc<ControlCounters>,
    /// Peers that cannot be reached, and why.
    pub failures: Sender<(Epoch, String)>,
    /// Monitors attached in this context so far. A pair made anew may meet its old thread on its way
    /// out, so the peer's epoch does not name one.
    pub monitors: Arc<AtomicU64>,
}

/// Dropping it ends the thread, after a short chance for what is queued.
pub struct Outbound {
    queue: Sender<ControlMessage>,
    closing: Arc<AtomicBool>,
}

/// The queue of this peer is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{QUEUE_MAX} messages wait for it, the most")]
pub struct QueueFull;

impl Outbound {
    pub fn start(postbox: &Postbox, peer: &PeerAddress, threads: &Threads) -> io::Result<Self> {
        let (queue, messages) = bounded(QUEUE_MAX);
        let closing = Arc::new(AtomicBool::new(false));
        let sender = PeerSender {
            postbox: postbox.clone(),
            peer: peer.clone(),
            messages,
            closing: Arc::clone(&closing),
        };
        threads.spawn("kv-messages-out", move || sender.run())?;
        Ok(Self { queue, closing })
    }

    pub fn send(&self, message: ControlMessage) -> Result<(), QueueFull> {
        self.queue.try_send(message).map_err(|_| QueueFull)
    }
}

impl Drop for Outbound {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Release);
    }
}

/// The queue of each connected peer.
pub struct OutboundQueues {
    pub postbox: Postbox,
    pub queues: BTreeMap<Epoch, Outbound>,
    pub senders: Threads,
}

impl ControlLinks for OutboundQueues {
    fn open(&mut self, peer: &PeerAddress) -> Result<(), impl Display> {
        let outbound = Outbound::start(&self.postbox, peer, &self.senders)
            .map_err(|error| format!("cannot start the thread of its control messages: {error}"))?;
        self.queues.insert(peer.epoch, outbound);
        Ok::<(), String>(())
    }

    fn send(&mut self, peer: Epoch, message: ControlMessage) -> Result<(), impl Display> {
        self.queues.get(&peer).map_or(Ok(()), |queue| queue.send(message))
    }

    fn close(&mut self, peer: Epoch) {
        self.queues.remove(&peer);
    }
}

struct PeerSender {
    postbox: Postbox,
    peer: PeerAddress,
    messages: Receiver<ControlMessage>,
    closing: Arc<AtomicBool>,
}

impl PeerSender {
    fn run(self) {
        if let Err(reason) = self.send_all() {
            // The driver answers by dropping our queue; until then it is emptied.
            let _ = self.postbox.failures.try_send((self.peer.epoch, reason));
            while !matches!(self.messages.recv_timeout(LOOK), Err(RecvTimeoutError::Disconnected)) {
            }
        }
    }

    fn send_all(&self) -> Result<(), String> {
        let endpoint = &self.peer.control_endpoint;
        let failed = |doing: &str, error: &dyn std::fmt::Display| {
            format!("message endpoint {endpoint}: {doing}: {error}")
        };
        let Postbox { context, keys, monitors, resolver, .. } = &self.postbox;
        // Resolved here and not by libzmq, whose one thread serves all pairs.
        let addresses = resolver.resolve(endpoint).map_err(|error| failed("resolve", &error))?;
        let address = first_that_answers(&addresses);
        let dealer = sockets::outbound(context, keys, self.peer.epoch, address)
            .map_err(|error| failed("socket", &error))?;
        let monitor = Monitor::attach(context, monitors, &dealer)
            .map_err(|error| failed("monitor", &error))?;
        dealer.connect(&format!("tcp://{address}")).map_err(|error| failed("connect", &error))?;
        loop {
            match self.messages.recv_timeout(LOOK) {
                Ok(message) => {
                    self.send(&dealer, &message).map_err(|error| failed("send", &error))?
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            if monitor.was_turned_away() {
                return Err(failed("connect", &"it has another cluster secret or another epoch"));
            }
        }
    }

    /// A control message that cannot leave is dropped: what matters is said again.
    fn send(&self, dealer: &zmq::Socket, message: &ControlMessage) -> zmq::Result<()> {
        let signed = match self.postbox.signer.sign(self.peer.epoch, message) {
            Ok(signed) => signed,
            Err(error) => {
                tracing::error!(%error, peer = self.peer.node_id, "a message was dropped");
                return Ok(());
            }
        };
        // On the way out nobody waits for a peer that is not there.
        let flags = if self.closing.load(Ordering::Acquire) { zmq::DONTWAIT } else { 0 };
        match dealer.send_multipart([&signed.frame, &signed.tag], flags) {
            Ok(()) => {
                self.postbox.counters.sent();
                Ok(())
            }
            Err(zmq::Error::EAGAIN | zmq::Error::EINTR) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// libzmq connects to one address. A name may have several, of which some lead nowhere (IPv6 beside
/// IPv4); a name with one costs no attempt. When none answers now, the first is kept trying.
fn first_that_answers(addresses: &[SocketAddr]) -> SocketAddr {
    let answers = |address: &&SocketAddr| TcpStream::connect_timeout(address, CONNECT).is_ok();
    let several = addresses.len() > 1;
    *several.then(|| addresses.iter().find(answers)).flatten().unwrap_or(&addresses[0])
}

/// Hears from libzmq how the connection fares.
struct Monitor {
    events: zmq::Socket,
}

impl Monitor {
    fn attach(
        context: &zmq::Context,
        monitors: &AtomicU64,
        dealer: &zmq::Socket,
    ) -> zmq::Result<Self> {
        let number = monitors.fetch_add(1, Ordering::Relaxed);
        let endpoint = format!("inproc://kv-transfer-monitor-{number}");
        dealer.monitor(&endpoint, zmq::SocketEvent::HANDSHAKE_FAILED_AUTH.to_raw().into())?;
        let events = context.socket(zmq::PAIR)?;
        events.set_linger(0)?;
        events.connect(&endpoint)?;
        Ok(Self { events })
    }

    /// The only event asked for is that the peer's door stayed shut.
    fn was_turned_away(&self) -> bool {
        self.events.recv_multipart(zmq::DONTWAIT).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, time::Instant};

    use super::*;
    use crate::{
        api::TransferId,
        config::ClusterSecret,
        control::{Body, Source},
    };

    fn postbox() -> (Postbox, Receiver<(Epoch, String)>) {
        let keys = Keys::derive(&ClusterSecret::new("the secret of this test").unwrap());
        let (failures, failed) = bounded(4);
        let from = Source { node_id: "me".to_owned(), epoch: Epoch(1) };
        let postbox = Postbox {
            context: zmq::Context::new(),
            signer: Signer::new(keys.clone(), from),
            keys,
            resolver: Resolver::system(),
            counters: Arc::default(),
            failures,
            monitors: Arc::default(),
        };
        (postbox, failed)
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
    fn a_queue_that_nobody_empties_is_refused_at_its_bound_and_ends() {
        let (postbox, _failed) = postbox();
        let threads = Threads::default();
        // Nobody listens on the discard port.
        let outbound = Outbound::start(&postbox, &peer("tcp://127.0.0.1:9"), &threads).unwrap();
        let taken = (0..2 * QUEUE_MAX).take_while(|_| outbound.send(message()).is_ok()).count();
        assert!((QUEUE_MAX..QUEUE_MAX + 16).contains(&taken), "{taken}");
        drop(outbound);
        assert!(threads.join_all(Instant::now() + Duration::from_secs(10)).is_empty());
    }

    #[test]
    fn an_endpoint_that_is_none_is_reported() {
        let (postbox, failed) = postbox();
        let threads = Threads::default();
        let outbound = Outbound::start(&postbox, &peer("ipc://somewhere"), &threads).unwrap();
        let (epoch, reason) = failed.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(epoch, Epoch(2));
        assert!(reason.contains("ipc://somewhere") && reason.contains("tcp://"), "{reason}");
        drop(outbound);
        assert!(threads.join_all(Instant::now() + Duration::from_secs(5)).is_empty());
    }

    #[test]
    fn a_name_that_nobody_has_is_reported() {
        let (postbox, failed) = postbox();
        let threads = Threads::default();
        let nowhere = peer("tcp://nowhere.invalid:9");
        let outbound = Outbound::start(&postbox, &nowhere, &threads).unwrap();
        let (epoch, reason) = failed.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(epoch, Epoch(2));
        assert!(reason.contains("resolve: ") && reason.contains("nowhere.invalid"), "{reason}");
        drop(outbound);
        assert!(threads.join_all(Instant::now() + Duration::from_secs(5)).is_empty());
    }

    #[test]
    fn of_several_addresses_the_first_that_answers_is_taken() {
        let listener = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (open, other) = (listener(), listener());
        let [open_at, other_at] = [&open, &other].map(|it| it.local_addr().unwrap());
        let closed_at = listener().local_addr().unwrap();
        assert_eq!(first_that_answers(&[closed_at, open_at, other_at]), open_at);
        assert_eq!(first_that_answers(&[closed_at]), closed_at);
        assert_eq!(first_that_answers(&[closed_at, closed_at]), closed_at);
    }

    #[test]
    fn ways_to_the_same_peer_may_overlap() {
        let (postbox, failed) = postbox();
        let threads = Threads::default();
        let peer = peer("tcp://127.0.0.1:9");
        // As when a pair is made anew while the thread of the one before still sends.
        let ways: Vec<Outbound> =
            (0..3).map(|_| Outbound::start(&postbox, &peer, &threads).unwrap()).collect();
        drop(ways);
        assert!(threads.join_all(Instant::now() + Duration::from_secs(5)).is_empty());
        assert_eq!(failed.try_recv().ok(), None);
    }
}
