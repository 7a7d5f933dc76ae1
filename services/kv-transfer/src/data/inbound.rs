//! The receiving end: a listener, and one thread per connection that finds out who is there and then
//! reads what the peer sends.

use std::{
    io,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kernels::BlockWrite;
use socket2::SockRef;

use super::{
    Shared, handshake,
    inbox::{Inbox, Peers},
    ipc,
    message::{Message, Messages},
    nccl,
    stream::{LOOK, is_pause},
    tcp,
};
use crate::{
    api::{Epoch, TransferId},
    config::LEASE,
    threads::Threads,
    transfer_kind::TransferKind,
    transport::{DataError, Released},
};

/// Connections that have not proven yet who they are. Each may take a handshake's deadline.
const HANDSHAKES_MAX: usize = 128;

/// How long the acceptor sits in one accept().
const ACCEPT_LOOK: Duration = Duration::from_secs(1);

pub struct Inbound {
    peers: Arc<Peers>,
    address: SocketAddr,
    listener: Arc<TcpListener>,
    stop: Arc<AtomicBool>,
    acceptor: Threads,
    readers: Arc<Threads>,
}

impl Inbound {
    pub fn start(
        shared: Arc<Shared>,
        listener: TcpListener,
        connections_max: usize,
    ) -> io::Result<Self> {
        let inbound = Self {
            address: listener.local_addr()?,
            peers: Arc::default(),
            listener: Arc::new(listener),
            stop: Arc::default(),
            acceptor: Threads::default(),
            readers: Arc::default(),
        };
        // accept() honours the receive timeout, so that the thread looks up now and then.
        SockRef::from(&*inbound.listener).set_read_timeout(Some(ACCEPT_LOOK))?;
        let acceptor = Acceptor {
            shared,
            peers: Arc::clone(&inbound.peers),
            listener: Arc::clone(&inbound.listener),
            stop: Arc::clone(&inbound.stop),
            readers: Arc::clone(&inbound.readers),
            handshakes: Arc::default(),
            connections: Arc::default(),
            connections_max,
        };
        inbound.acceptor.spawn("kv-data-accept", move || acceptor.run())?;
        Ok(inbound)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn admit(&self, peer: Epoch) {
        self.peers.admit(peer);
    }

    pub fn post(
        &self,
        peer: Epoch,
        transfer: TransferId,
        chunk: u32,
        blocks: Vec<BlockWrite>,
    ) -> Result<(), DataError> {
        let inbox = self.peers.inbox(peer).ok_or(DataError::NotOpen)?;
        inbox.post(transfer, chunk, blocks);
        Ok(())
    }

    pub fn cancel(&self, peer: Epoch, transfer: TransferId) -> Released {
        self.peers.inbox(peer).map_or(Released::Now, |inbox| inbox.cancel(transfer))
    }

    pub fn dismiss(&self, peer: Epoch) {
        self.peers.dismiss(peer);
    }

    pub fn is_present(&self, peer: Epoch, connection: u64) -> bool {
        self.peers.inbox(peer).is_some_and(|inbox| inbox.connection() == connection)
    }

    pub fn shutdown(&self, deadline: Instant) -> Vec<String> {
        self.stop.store(true, Ordering::Release);
        // Wakes accept() at once where the system allows it; its timeout does everywhere.
        let _ = SockRef::from(&*self.listener).shutdown(Shutdown::Both);
        self.peers.dismiss_all();
        let mut unfinished = self.acceptor.join_all(deadline);
        unfinished.extend(self.readers.join_all(deadline));
        unfinished
    }
}

struct Acceptor {
    shared: Arc<Shared>,
    peers: Arc<Peers>,
    listener: Arc<TcpListener>,
    stop: Arc<AtomicBool>,
    readers: Arc<Threads>,
    handshakes: Arc<AtomicUsize>,
    connections: Arc<AtomicUsize>,
    connections_max: usize,
}

/// Counts one of a bounded number until it is dropped.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(counter: &Arc<AtomicUsize>, max: usize) -> Option<Self> {
        counter
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |taken| {
                (taken < max).then_some(taken + 1)
            })
            .is_ok()
            .then(|| Self(Arc::clone(counter)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Acceptor {
    fn run(self) {
        while !self.stop.load(Ordering::Acquire) {
            match self.listener.accept() {
                Ok((stream, _)) => self.admit(stream),
                Err(error) if is_pause(&error) => {}
                Err(error) => {
                    if !self.stop.load(Ordering::Acquire) {
                        tracing::warn!(%error, "no data connection could be accepted");
                        // Out of descriptors, most likely: give others time to end.
                        thread::sleep(LOOK);
                    }
                }
            }
        }
    }

    fn admit(&self, stream: TcpStream) {
        let Some(place) = Place::take(&self.handshakes, HANDSHAKES_MAX) else {
            return self.shared.counters.refuse("handshakes_full");
        };
        let (shared, peers) = (Arc::clone(&self.shared), Arc::clone(&self.peers));
        let (connections, connections_max) = (Arc::clone(&self.connections), self.connections_max);
        let reader = move || {
            let mut stream = stream;
            // Fails only when the connection is gone, which the handshake finds out.
            let _ = stream.set_nodelay(true);
            match handshake::accept(&mut stream, &shared.keys, shared.me) {
                Ok((peer, kind)) => {
                    drop(place);
                    match Place::take(&connections, connections_max) {
                        Some(_place) => read_connection(&shared, &peers, peer, kind, stream),
                        None => shared.counters.refuse("connections_full"),
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "a data connection was refused");
                    shared.counters.refuse(error.label());
                }
            }
        };
        if let Err(error) = self.readers.spawn("kv-data-in", reader) {
            tracing::warn!(%error, "no thread for a data connection");
            self.shared.counters.refuse("no_thread");
        }
    }
}

/// The reader thread of one proven connection, from entering the inbox to its end.
fn read_connection(
    shared: &Shared,
    peers: &Peers,
    peer: Epoch,
    kind: TransferKind,
    mut stream: TcpStream,
) {
    let Some(inbox) = peers.inbox(peer) else {
        return shared.counters.refuse("peer_not_admitted");
    };
    let connection = shared.number_connection();
    match inbox.enter(connection, &stream) {
        Ok(true) => {}
        Ok(false) => return,
        Err(error) => return tracing::warn!(%error, "a data connection could not be used"),
    }
    let ended = match kind {
        excluded if !shared.offered.contains(&excluded) => {
            refuse(shared, &inbox, peer, excluded, &mut stream)
        }
        TransferKind::Tcp => {
            shared.counters.takes(peer, kind);
            tcp::read_frames(shared, &inbox, &mut stream).map(|()| Ended::Closed)
        }
        TransferKind::Ipc => ipc::pull_chunks(shared, &inbox, peer, connection, &mut stream),
        TransferKind::Nccl => nccl::receive_chunks(shared, &inbox, peer, connection, &mut stream),
    };
    inbox.leave(connection);
    let reason = match ended {
        Ok(Ended::Closed) => "it closed the data connection".to_owned(),
        // The peer has been told why, and comes again by another transport.
        Ok(Ended::Refused) => return,
        Err(error) => format!("data connection from it: {error}"),
    };
    // The driver, which knows what it has closed meanwhile, finds out whether this one mattered.
    shared.report_end(peer, connection, reason);
}

/// Answers whoever comes by a transport that this node has not offered.
fn refuse(
    shared: &Shared,
    inbox: &Inbox,
    peer: Epoch,
    kind: TransferKind,
    stream: &mut TcpStream,
) -> io::Result<Ended> {
    tracing::warn!(%peer, %kind, "a peer comes by a kind that this node has not offered");
    shared.counters.refuse("carrier_not_offered");
    let mut messages = Messages::new(stream, LOOK)?;
    match messages.next_by(Instant::now() + LEASE, || inbox.is_closed())? {
        Some(_) => {
            let reason = format!("this node does not offer {kind}");
            Message::Refused { reason }.write(stream)?;
            Ok(Ended::Refused)
        }
        None => Ok(Ended::Closed),
    }
}

/// How a connection ended that nothing is wrong with.
pub enum Ended {
    Closed,
    /// It cannot carry anything: nothing was ever taken from it.
    Refused,
}
