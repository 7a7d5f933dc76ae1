//! The data connections between nodes: what carries KV, or the word of who carries it.
//!
//! One connection per pair and direction, made by the sender, proven on both ends by tags over
//! fresh nonces (`handshake`), which also name what it carries:
//!
//! * [`tcp`]: the blocks themselves, through host memory;
//! * `ipc`: where to find them in the sender's GPU memory, from which the receiver pulls;
//! * `nccl`: when to send and receive them by kernels of both GPUs.
//!
//! Whichever it is, chunks wait in the same `outbox` at the sender and are awaited in the same
//! `inbox` at the receiver, so a pair may change from one transport to another between connections.
//! Neither encrypted nor signed frame by frame: the network between the nodes is the operator's.

mod chunk_ends;
mod handshake;
mod inbound;
mod inbox;
mod ipc;
mod message;
mod nccl;
mod outbound;
mod outbox;
mod stream;
pub mod tcp;

use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use crossbeam_channel::Sender;
use kernels::{
    BlockId, BlockRead, BlockWrite, KvArena,
    peer::{PeerChannels, PeerMemory},
};

use crate::{
    api::{Epoch, TransferId},
    config::TransportConfig,
    control::Keys,
    metrics::DataCounters,
    protocol::DataEvent,
    resolve::Resolver,
    threads::Threads,
    transfer_kind::TransferKind,
    transport::{DataError, Released, Transport, TransportEvent},
};
use inbound::Inbound;
use outbox::Outbox;

/// How long dropping a transport may take.
const DROP_MAX: Duration = Duration::from_secs(1);

/// What both directions share.
struct Shared {
    me: Epoch,
    keys: Keys,
    reports: Sender<TransportEvent>,
    resolver: Resolver,
    counters: Arc<DataCounters>,
    /// Connections so far, in either direction.
    connections: AtomicU64,
    /// How processes of this host read each other's blocks, where ours lie on a GPU.
    memory: Option<Arc<dyn PeerMemory>>,
    /// How blocks are moved together with another GPU.
    channels: Option<Arc<dyn PeerChannels>>,
    /// What this node has told its peers that it can do.
    offered: Vec<TransferKind>,
    /// Multiprocessors of a channel.
    nccl_max_ctas: Option<u32>,
    /// Whether chunks are hashed that no host memory sees.
    verify: bool,
}

impl Shared {
    fn number_connection(&self) -> u64 {
        self.connections.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Waits while the driver is behind; in vain only when it is gone.
    fn report(&self, event: DataEvent) {
        let _ = self.reports.send(TransportEvent::Data(event));
    }

    /// What the peer has to be told first so that KV can go to it by this transport; the error, for people,
    /// says why it cannot.
    fn offer(&self, kind: TransferKind) -> Result<Vec<u8>, String> {
        let nothing = || "there is no GPU memory here".to_owned();
        match kind {
            TransferKind::Tcp => Ok(Vec::new()),
            TransferKind::Ipc => self.memory.as_ref().ok_or_else(nothing)?.export(),
            TransferKind::Nccl => {
                self.channels.as_ref().ok_or_else(nothing)?.invite(self.nccl_max_ctas)
            }
        }
    }

    fn report_end(&self, peer: Epoch, connection: u64, reason: String) {
        let _ = self.reports.send(TransportEvent::Closed { peer, connection, reason });
    }
}

/// All data connections of one node.
pub struct DataConnections {
    shared: Arc<Shared>,
    arena: Arc<KvArena>,
    inbound: Inbound,
    outbound: BTreeMap<Epoch, Arc<Outbox>>,
    writers: Threads,
}

impl DataConnections {
    /// Binds the data listener and starts accepting. `connections_max` bounds the proven
    /// connections from peers.
    #[allow(clippy::too_many_arguments)] // Each is needed once, here.
    pub fn start(
        bind: SocketAddr,
        me: Epoch,
        keys: Keys,
        arena: Arc<KvArena>,
        channels: Option<Arc<dyn PeerChannels>>,
        connections_max: usize,
        reports: Sender<TransportEvent>,
        resolver: Resolver,
        counters: Arc<DataCounters>,
        offered: Vec<TransferKind>,
        transport: TransportConfig,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(bind)?;
        let connections = AtomicU64::new(0);
        let shared = Shared {
            me,
            keys,
            reports,
            resolver,
            counters,
            connections,
            memory: arena.peer_memory(),
            channels,
            offered,
            nccl_max_ctas: transport.nccl_max_ctas,
            verify: transport.verify,
        };
        let shared = Arc::new(shared);
        Ok(Self {
            inbound: Inbound::start(Arc::clone(&shared), listener, connections_max)?,
            shared,
            arena,
            outbound: BTreeMap::new(),
            writers: Threads::default(),
        })
    }

    /// With the port that was really bound.
    pub fn address(&self) -> SocketAddr {
        self.inbound.address()
    }
}

impl Transport for DataConnections {
    fn admit(&mut self, peer: Epoch) {
        self.inbound.admit(peer);
    }

    fn open(&mut self, peer: Epoch, endpoint: &str, kinds: Vec<TransferKind>) {
        self.close_outbound(peer);
        let outbox = Arc::new(Outbox::new(self.shared.number_connection()));
        let (shared, endpoint) = (Arc::clone(&self.shared), endpoint.to_owned());
        let writer = {
            let (shared, outbox) = (Arc::clone(&shared), Arc::clone(&outbox));
            move || outbound::run(&shared, &outbox, peer, &endpoint, &kinds)
        };
        match self.writers.spawn("kv-data-out", writer) {
            Ok(()) => {
                self.outbound.insert(peer, outbox);
            }
            Err(error) => {
                // Without an outbox each chunk for this peer fails as not open.
                tracing::error!(%error, %peer, "no thread for a data connection");
            }
        }
    }

    fn send(
        &mut self,
        peer: Epoch,
        transfer: TransferId,
        chunk: u32,
        blocks: &[BlockId],
    ) -> Result<(), DataError> {
        let outbox = self.outbound.get(&peer).ok_or(DataError::NotOpen)?;
        let blocks = blocks
            .iter()
            .map(|block| self.arena.read(*block))
            .collect::<Result<Vec<BlockRead>, _>>()?;
        outbox.push(transfer, chunk, blocks)
    }

    fn post(
        &mut self,
        peer: Epoch,
        transfer: TransferId,
        chunk: u32,
        blocks: &[BlockId],
    ) -> Result<(), DataError> {
        let blocks = blocks
            .iter()
            .map(|block| self.arena.write(*block))
            .collect::<Result<Vec<BlockWrite>, _>>()?;
        self.inbound.post(peer, transfer, chunk, blocks)
    }

    fn cancel_send(&mut self, peer: Epoch, transfer: TransferId) -> Released {
        self.outbound.get(&peer).map_or(Released::Now, |outbox| outbox.cancel(transfer))
    }

    fn cancel_receive(&mut self, peer: Epoch, transfer: TransferId) -> Released {
        self.inbound.cancel(peer, transfer)
    }

    fn close(&mut self, peer: Epoch) {
        self.close_outbound(peer);
        self.shared.counters.forget(peer);
        // A fresh inbox: whatever still uses the one before has lost it.
        self.inbound.dismiss(peer);
        self.inbound.admit(peer);
    }

    fn dismiss(&mut self, peer: Epoch) {
        self.close_outbound(peer);
        self.shared.counters.forget(peer);
        self.inbound.dismiss(peer);
    }

    fn is_present(&self, peer: Epoch, connection: u64) -> bool {
        self.outbound.get(&peer).is_some_and(|outbox| outbox.connection() == connection)
            || self.inbound.is_present(peer, connection)
    }

    fn shutdown(&mut self, deadline: Instant) -> Vec<String> {
        for outbox in std::mem::take(&mut self.outbound).into_values() {
            outbox.close();
        }
        let mut unfinished = self.inbound.shutdown(deadline);
        unfinished.extend(self.writers.join_all(deadline));
        unfinished
    }
}

impl Drop for DataConnections {
    /// For a start that fails halfway; a transport in use is shut down by its driver.
    fn drop(&mut self) {
        let unfinished = self.shutdown(Instant::now() + DROP_MAX);
        if !unfinished.is_empty() {
            tracing::error!(?unfinished, "data threads did not end");
        }
    }
}

impl DataConnections {
    fn close_outbound(&mut self, peer: Epoch) {
        if let Some(outbox) = self.outbound.remove(&peer) {
            outbox.close();
        }
    }
}
