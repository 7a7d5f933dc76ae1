//! The sending end of a data connection: a thread that connects and writes chunks.
//!
//! If the agreed transport fails, the thread reconnects with the next transport that both nodes
//! offer, and with `tcp` last. It skips transports that this node cannot use.

use std::{
    io,
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use socket2::SockRef;

use super::{
    Ended, Outgoing, Shared, handshake, ipc, nccl,
    outbox::Outbox,
    tcp::{self, Connected},
};
use crate::{
    api::Epoch,
    config::{LEASE, TCP_CONNECTIONS_MAX},
    protocol::DataEvent,
    transfer_kind::TransferKind,
};

const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
const CONNECT_PAUSE: Duration = Duration::from_millis(50);

/// Runs the writer thread until the connection ends.
pub(super) fn run(
    shared: &Shared,
    outbox: &Outbox,
    peer: Epoch,
    endpoint: &str,
    kinds: &[TransferKind],
) {
    let reason = match carry(shared, outbox, peer, endpoint, kinds) {
        Ok(()) => "closed".to_owned(),
        Err(reason) => reason,
    };
    let (cancelled, reason) = outbox.end(reason);
    for transfer in cancelled {
        shared.report(DataEvent::Released { transfer });
    }
    if let Some(reason) = reason {
        let reason = format!("data connection to {endpoint}: {reason}");
        shared.report_end(peer, outbox.connection, reason);
    }
}

/// Sends chunks until the outbox is closed or the connection ends.
fn carry(
    shared: &Shared,
    outbox: &Outbox,
    peer: Epoch,
    endpoint: &str,
    kinds: &[TransferKind],
) -> Result<(), String> {
    let outgoing = Outgoing { shared, outbox, peer };
    let mut others = kinds.iter().copied();
    let agreed = others.next().unwrap_or(TransferKind::Tcp);
    let (mut kind, mut offer) = match shared.offer(agreed) {
        Ok(offer) => (agreed, offer),
        Err(reason) => fall_back(shared, peer, agreed, &reason, &mut others),
    };
    loop {
        // Another transport has a group of its own.
        let group = shared.number_connection();
        let connected = connect(&outgoing, endpoint, (kind, group))
            .map_err(|error| format!("cannot connect: {error}"))?;
        let Some(connected) = connected else { return Ok(()) };
        let ended = match kind {
            TransferKind::Tcp => {
                shared.metrics.set_path(peer, kind);
                // One core encrypts about half as much as it sends without TLS.
                let factor = if shared.tls.is_some() { 2 } else { 1 };
                let connections_max = factor * shared.transport.tcp_connections as usize;
                let connections_max = connections_max.min(TCP_CONNECTIONS_MAX);
                connected.0.peer_addr().and_then(|address| {
                    let connect = |number| {
                        let group = (kind, group);
                        connect_once(&outgoing, group, number, &[address], Instant::now())
                    };
                    tcp::send_chunks(&outgoing, connected, connections_max, connect)
                        .map(|()| Ended::Closed)
                })
            }
            TransferKind::Ipc => ipc::lend_chunks(&outgoing, offer, connected.0),
            TransferKind::Nccl => nccl::send_chunks(&outgoing, offer, connected.0),
        };
        match ended.map_err(|error| error.to_string())? {
            Ended::Closed => return Ok(()),
            Ended::Refused { reason } => {
                outbox.disconnected();
                (kind, offer) = fall_back(shared, peer, kind, &reason, &mut others);
            }
        }
    }
}

/// Returns the next transport that this node can use, and its offer.
fn fall_back(
    shared: &Shared,
    peer: Epoch,
    failed: TransferKind,
    reason: &str,
    others: &mut impl Iterator<Item = TransferKind>,
) -> (TransferKind, Vec<u8>) {
    let possible = |kind| match shared.offer(kind) {
        Ok(offer) => Some((kind, offer)),
        Err(reason) => {
            tracing::debug!(%peer, transport = %kind, reason, "skipping a transport that this node cannot use");
            None
        }
    };
    let (next, offer) = others.find_map(possible).unwrap_or((TransferKind::Tcp, Vec::new()));
    tracing::warn!(%peer, transport = %failed, %next, reason, "transport failed; falling back");
    shared.metrics.fell_back(failed);
    (next, offer)
}

/// Connects, and retries for one lease. Returns `None` if the outbox was closed meanwhile.
fn connect(
    outgoing: &Outgoing<'_>,
    endpoint: &str,
    group: (TransferKind, u64),
) -> io::Result<Option<Connected>> {
    let Outgoing { shared, outbox, .. } = *outgoing;
    let deadline = Instant::now() + LEASE;
    let addresses = shared.resolver.resolve(endpoint).map_err(io::Error::other)?;
    loop {
        let error = match connect_once(outgoing, group, 0, &addresses, deadline) {
            Ok(connected) => return Ok(connected),
            Err(error) => error,
        };
        // The peer completed the control handshake, so a refused connection means that its process
        // has ended. Other errors may come from a busy listener.
        if error.kind() == io::ErrorKind::ConnectionRefused || Instant::now() >= deadline {
            return Err(error);
        }
        if !outbox.pause(CONNECT_PAUSE) {
            return Ok(None);
        }
    }
}

/// Opens connection `number` of the group. Tries each address until `deadline`, and at least the
/// first. Returns `None` if the outbox was closed, or the group has ended, meanwhile.
fn connect_once(
    outgoing: &Outgoing<'_>,
    (kind, group): (TransferKind, u64),
    number: usize,
    addresses: &[SocketAddr],
    deadline: Instant,
) -> io::Result<Option<Connected>> {
    let Outgoing { shared, outbox, peer } = *outgoing;
    let tls = shared.tls.as_ref().map(|tls| tls.current());
    let sender = handshake::Sender { me: shared.me, peer, kind, group };
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for address in addresses {
        let made = TcpStream::connect_timeout(address, CONNECT_TIMEOUT).and_then(|mut stream| {
            stream.set_nodelay(true)?;
            // Without TCP_USER_TIMEOUT the kernel reports a dead connection after about 15 minutes.
            SockRef::from(&stream).set_tcp_user_timeout(Some(LEASE))?;
            // Before the handshake, which then ends with the outbox.
            if !outbox.connected(number, &stream)? {
                return Ok(None);
            }
            let tls = handshake::connect(&mut stream, &shared.keys, tls.as_deref(), sender)
                .map_err(io::Error::other)?;
            Ok(Some((stream, tls)))
        });
        match made {
            Ok(made) => return Ok(made),
            Err(error) => last = error,
        }
        if Instant::now() >= deadline {
            break;
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::AtomicU64};

    use crossbeam_channel::bounded;
    use kernels::{KvArena, KvFormat, KvLayout};

    use super::*;
    use crate::{
        ClusterSecret, TransportConfig, control::Keys, data::StagingPool, resolve::Resolver,
        transport::TransportEvent,
    };

    #[test]
    fn unresolvable_name_closes_the_connection() {
        let layout =
            KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 8, format: KvFormat::F32 };
        let (events, received) = bounded(4);
        let shared = Shared {
            me: Epoch(1),
            keys: Keys::derive(&ClusterSecret::new("the secret of this test").unwrap()),
            events,
            resolver: Resolver::system(),
            metrics: Arc::default(),
            connections: AtomicU64::new(0),
            memory: None,
            channels: None,
            offered: vec![TransferKind::Tcp],
            transport: TransportConfig::default(),
            staging: StagingPool::new(&KvArena::host(layout, 1).unwrap()),
            tls: None,
        };
        let outbox = Outbox::new(shared.number_connection());
        run(&shared, &outbox, Epoch(2), "tcp://nowhere.invalid:9", &[TransferKind::Tcp]);
        let Ok(TransportEvent::Closed { peer, connection, reason }) = received.try_recv() else {
            panic!("the close is received");
        };
        assert_eq!((peer, connection), (Epoch(2), outbox.connection));
        assert!(
            reason.contains("cannot connect: ") && reason.contains("nowhere.invalid"),
            "{reason}"
        );
    }
}
