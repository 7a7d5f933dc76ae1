//! The receiving end of data connections: a listener thread, and one thread per connection that
//! authenticates the peer and then receives.

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

use socket2::SockRef;

use super::{
    Ended, Incoming, Shared,
    handshake::{self, Accepted, HandshakeError},
    inbox::Peers,
    ipc,
    message::{Message, Messages},
    nccl,
    stream::{POLL, is_pause},
    tcp,
};
use crate::{
    config::{LEASE, TCP_CONNECTIONS_MAX},
    threads::{Permit, Threads},
    transfer_kind::TransferKind,
};

/// Connections in handshake. Each lasts at most the handshake's deadline.
const HANDSHAKES_MAX: usize = 128;

/// Longest wait of one accept() call.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(1);

/// The listener and its threads.
pub(super) struct Inbound {
    acceptor: Arc<Acceptor>,
    pub address: SocketAddr,
    accepting: Threads,
}

impl Inbound {
    pub(super) fn start(
        shared: Arc<Shared>,
        peers: Arc<Peers>,
        bind: SocketAddr,
        connections_max: usize,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(bind)?;
        // accept() honours the receive time-out, so the thread checks `stop` regularly.
        SockRef::from(&listener).set_read_timeout(Some(ACCEPT_TIMEOUT))?;
        let address = listener.local_addr()?;
        let acceptor = Arc::new(Acceptor {
            shared,
            peers,
            listener,
            stop: AtomicBool::new(false),
            readers: Threads::default(),
            handshakes: Arc::default(),
            connections: Arc::default(),
            connections_max,
        });
        let accepting = Threads::default();
        let thread = Arc::clone(&acceptor);
        accepting.spawn("kv-data-accept", move || thread.run())?;
        Ok(Self { acceptor, address, accepting })
    }

    pub(super) fn shutdown(&self, deadline: Instant) -> Vec<String> {
        let Acceptor { stop, listener, peers, readers, .. } = &*self.acceptor;
        stop.store(true, Ordering::Release);
        // Wakes accept() on systems that support it; the time-out wakes it on all others.
        let _ = SockRef::from(listener).shutdown(Shutdown::Both);
        peers.dismiss_all();
        let mut unfinished = self.accepting.join_all(deadline);
        unfinished.extend(readers.join_all(deadline));
        unfinished
    }
}

struct Acceptor {
    shared: Arc<Shared>,
    peers: Arc<Peers>,
    listener: TcpListener,
    stop: AtomicBool,
    readers: Threads,
    handshakes: Arc<AtomicUsize>,
    connections: Arc<AtomicUsize>,
    connections_max: usize,
}

impl Acceptor {
    fn run(&self) {
        while !self.stop.load(Ordering::Acquire) {
            match self.listener.accept() {
                Ok((stream, _)) => self.admit(stream),
                Err(error) if is_pause(&error) => {}
                Err(error) => {
                    if !self.stop.load(Ordering::Acquire) {
                        tracing::warn!(%error, "cannot accept data connections");
                        // Usually out of file descriptors: wait for other connections to close.
                        thread::sleep(POLL);
                    }
                }
            }
        }
    }

    fn admit(&self, stream: TcpStream) {
        let Some(permit) = Permit::take(&self.handshakes, HANDSHAKES_MAX) else {
            return self.shared.metrics.refuse_data("handshakes_full");
        };
        let (shared, peers) = (Arc::clone(&self.shared), Arc::clone(&self.peers));
        let (connections, connections_max) = (Arc::clone(&self.connections), self.connections_max);
        let reader = move || {
            let mut stream = stream;
            // Fails only if the connection has closed; the handshake then fails too.
            let _ = stream.set_nodelay(true);
            let tls = shared.tls.as_ref().map(|tls| tls.current());
            match handshake::accept(&mut stream, &shared.keys, tls.as_deref(), shared.me) {
                Ok(accepted) => {
                    drop(permit);
                    match Permit::take(&connections, connections_max) {
                        Some(_permit) => read_connection(&shared, &peers, accepted, stream),
                        None => shared.metrics.refuse_data("connections_full"),
                    }
                }
                Err(error) => {
                    match error {
                        HandshakeError::OneSided { .. } => {
                            let address = stream.peer_addr().ok().map(tracing::field::display);
                            tracing::warn!(address, %error, "data connection rejected");
                        }
                        _ => tracing::debug!(%error, "data connection rejected"),
                    }
                    shared.metrics.refuse_data(error.label());
                }
            }
        };
        if let Err(error) = self.readers.spawn("kv-data-in", reader) {
            tracing::warn!(%error, "cannot start a thread for a data connection");
            self.shared.metrics.refuse_data("no_thread");
        }
    }
}

/// Runs the reader thread of one authenticated connection.
fn read_connection(
    shared: &Shared,
    peers: &Peers,
    Accepted { peer, kind, group, tls }: Accepted,
    mut stream: TcpStream,
) {
    let Some(inbox) = peers.inbox(peer) else {
        return shared.metrics.refuse_data("peer_not_admitted");
    };
    let connections_max = if kind == TransferKind::Tcp { TCP_CONNECTIONS_MAX } else { 1 };
    let group = (group, connections_max);
    let reader = match inbox.enter(group, shared.number_connection(), &stream) {
        Ok(Some(reader)) => reader,
        Ok(None) => return,
        Err(error) => return tracing::warn!(%error, "cannot use a data connection"),
    };
    let connection = reader.connection;
    let incoming = Incoming { shared, inbox: &inbox, peer, connection };
    let mut has_frames = false;
    let ended = match kind {
        excluded if !shared.offered.contains(&excluded) => refuse(&incoming, excluded, &mut stream),
        TransferKind::Tcp => {
            shared.metrics.set_path(peer, kind);
            shared.staging.prepare();
            let read = match tls {
                Some(mut tls) => tcp::read_frames(&incoming, &mut *tls, &mut has_frames),
                None => tcp::read_frames(&incoming, &mut stream, &mut has_frames),
            };
            read.map(|()| Ended::Closed)
        }
        TransferKind::Ipc => ipc::pull_chunks(&incoming, &mut stream),
        TransferKind::Nccl => nccl::receive_chunks(&incoming, &mut stream),
    };
    inbox.leave(reader);
    if kind == TransferKind::Tcp && !reader.is_first() && !has_frames {
        // The sender can do without a further connection, and opens another one.
        return;
    }
    let reason = match ended {
        Ok(Ended::Closed) => "the peer closed the data connection".to_owned(),
        // The peer knows the reason and reconnects with another transport.
        Ok(Ended::Refused { .. }) => return,
        Err(error) => format!("data connection from the peer: {error}"),
    };
    // The driver ignores the event if it has closed or replaced this connection.
    shared.report_end(peer, connection, reason);
}

/// Rejects a connection whose transport this node has not offered.
fn refuse(
    incoming: &Incoming<'_>,
    kind: TransferKind,
    stream: &mut TcpStream,
) -> io::Result<Ended> {
    let Incoming { shared, inbox, peer, .. } = *incoming;
    tracing::warn!(%peer, transport = %kind, "peer requested a transport that this node does not offer");
    shared.metrics.refuse_data("transport_not_offered");
    let mut messages = Messages::new(stream, POLL)?;
    match messages.next_by(Instant::now() + LEASE, || inbox.is_closed())? {
        Some(_) => {
            let reason = format!("this node does not offer {kind}");
            Message::Refused { reason: reason.clone() }.write(stream)?;
            Ok(Ended::Refused { reason })
        }
        None => Ok(Ended::Closed),
    }
}
