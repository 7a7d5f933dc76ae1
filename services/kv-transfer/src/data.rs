//! The data connections between nodes. They carry the KV itself, or the messages that coordinate
//! its copy.
//!
//! Each pair has one group of connections per direction, opened by the sender. A group of `tcp` has
//! up to `transfer.tcp_connections`, with TLS twice as many; other groups have one. Both ends prove
//! the cluster secret by tags over fresh nonces (`handshake`), which also name the transport:
//!
//! * [`tcp`]: the blocks themselves, through host memory;
//! * `ipc`: the ids of the blocks in the sender's GPU memory, from which the receiver copies them;
//! * `nccl`: the messages on which both sides launch send and receive kernels.
//!
//! All transports share the sender's `outbox` and the receiver's `inbox`, so a pair may change its
//! transport when it reconnects. With certificates of the cluster, `tcp` connections speak TLS. All
//! other frames are neither encrypted nor signed: the network between the nodes must be trusted.

mod chunk_ends;
mod handshake;
mod in_flight;
mod inbound;
mod inbox;
mod ipc;
mod message;
mod nccl;
mod outbound;
mod outbox;
mod staging;
mod stream;
pub(crate) mod tcp;
mod tls;

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use credentials::{ClusterTls, Reloaded};
use crossbeam_channel::Sender;
use kernels::{
    BlockId, BlockRead, BlockWrite, KvArena,
    peer::{PeerChannels, PeerMemory},
};

use crate::{
    api::{Epoch, TransferId},
    control::Keys,
    metrics::Metrics,
    protocol::DataEvent,
    resolve::Resolver,
    threads::Threads,
    transfer_config::TransportConfig,
    transfer_kind::TransferKind,
    transport::{ChunkId, DataError, Released, Transport, TransportEvent},
};
use in_flight::ChunkOutcome;
use inbound::Inbound;
use inbox::{Inbox, Peers};
use outbox::Outbox;
pub(crate) use staging::StagingPool;

/// Time-out of dropping a transport.
const DROP_MAX: Duration = Duration::from_secs(1);

/// State shared by both directions.
pub(crate) struct Shared {
    pub me: Epoch,
    pub keys: Keys,
    pub events: Sender<TransportEvent>,
    pub resolver: Resolver,
    pub metrics: Arc<Metrics>,
    /// Last number of a group of connections or of a reader, in either direction.
    pub connections: AtomicU64,
    /// Maps GPU memory between processes of this host; `None` without a GPU.
    pub memory: Option<Arc<dyn PeerMemory>>,
    /// Opens NCCL communicators between two GPUs; `None` without a GPU.
    pub channels: Option<Arc<dyn PeerChannels>>,
    /// Transports that this node offers in `HELLO`.
    pub offered: Vec<TransferKind>,
    pub transport: TransportConfig,
    /// Pinned memory for `tcp`, if the blocks are on GPUs.
    pub staging: StagingPool,
    /// Encrypts `tcp` connections, if the cluster has certificates.
    pub tls: Option<Arc<Reloaded<ClusterTls>>>,
}

impl Shared {
    fn gpu_memory(&self) -> Result<&dyn PeerMemory, String> {
        self.memory.as_deref().ok_or_else(|| "this node has no GPU memory".to_owned())
    }

    fn gpu_channels(&self) -> Result<&dyn PeerChannels, String> {
        self.channels.as_deref().ok_or_else(|| "this node has no GPU memory".to_owned())
    }

    fn number_connection(&self) -> u64 {
        self.connections.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Blocks while the driver's queue is full. Fails only after the driver has stopped.
    fn report(&self, event: DataEvent) {
        let _ = self.events.send(TransportEvent::Data(event));
    }

    /// Returns what the peer needs to know to use this transport, or the reason why this node
    /// cannot use it.
    fn offer(&self, kind: TransferKind) -> Result<Vec<u8>, String> {
        match kind {
            TransferKind::Tcp => Ok(Vec::new()),
            TransferKind::Ipc => self.gpu_memory()?.export(),
            TransferKind::Nccl => self.gpu_channels()?.invite(self.transport.nccl_max_ctas),
        }
    }

    fn report_end(&self, peer: Epoch, connection: u64, reason: String) {
        let _ = self.events.send(TransportEvent::Closed { peer, connection, reason });
    }
}

/// Integrity value and size in bytes of a chunk that was sent or received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    integrity: u64,
    bytes: u64,
}

/// The sending end of a connection.
pub(crate) struct Outgoing<'a> {
    shared: &'a Shared,
    outbox: &'a Outbox,
    peer: Epoch,
}

impl Outgoing<'_> {
    /// Reports a chunk whose blocks are no longer read.
    pub(crate) fn report(&self, chunk: ChunkId, outcome: ChunkOutcome<Moved>) {
        let ChunkId { transfer, index } = chunk;
        match outcome {
            ChunkOutcome::Moved(Moved { integrity, bytes }) => {
                self.shared.metrics.count(|counts| {
                    counts.bytes_sent += bytes;
                    counts.chunks_sent += 1;
                });
                self.shared.report(DataEvent::Sent { transfer, chunk: index, integrity });
            }
            ChunkOutcome::Released => self.shared.report(DataEvent::Released { transfer }),
            ChunkOutcome::Cancelled => {}
        }
    }
}

/// The receiving end of a connection.
pub(crate) struct Incoming<'a> {
    shared: &'a Shared,
    inbox: &'a Inbox,
    peer: Epoch,
    /// Number of the connection.
    connection: u64,
}

impl Incoming<'_> {
    /// Takes the blocks that were posted for a chunk, which now begins to arrive. [`Self::report`]
    /// ends it.
    pub(crate) fn take(&self, chunk: ChunkId) -> Option<Vec<BlockWrite>> {
        let blocks = self.inbox.take(chunk);
        match blocks {
            Some(_) => self.shared.metrics.chunk_began(self.peer),
            None => self.shared.metrics.refuse_data("frame_not_posted"),
        }
        blocks
    }

    /// Reports a chunk that was written or has failed, after the guards of its blocks were dropped.
    pub(crate) fn report(&self, chunk: ChunkId, written: Result<Moved, String>) {
        let bytes = written.as_ref().map_or(0, |moved| moved.bytes);
        self.shared.metrics.chunk_ended(self.peer, bytes);
        let ChunkId { transfer, index } = chunk;
        let event = match (self.inbox.end_chunk(chunk), written) {
            (ChunkOutcome::Moved(()), Ok(Moved { integrity, bytes })) => {
                self.shared.metrics.count(|counts| {
                    counts.bytes_received += bytes;
                    counts.chunks_received += 1;
                });
                DataEvent::Received { transfer, chunk: index, integrity }
            }
            (ChunkOutcome::Moved(()), Err(reason)) => DataEvent::Failed { transfer, reason },
            (ChunkOutcome::Released, _) => DataEvent::Released { transfer },
            (ChunkOutcome::Cancelled, _) => return,
        };
        self.shared.report(event);
    }
}

/// End of a connection without an error.
pub(crate) enum Ended {
    /// The peer or this node closed the connection.
    Closed,
    /// The transport does not work between these two nodes. No chunk was moved.
    Refused { reason: String },
}

pub(crate) fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

/// All data connections of one node.
pub(crate) struct DataConnections {
    shared: Arc<Shared>,
    arena: Arc<KvArena>,
    inbound: Inbound,
    peers: Arc<Peers>,
    outbound: BTreeMap<Epoch, Arc<Outbox>>,
    writers: Threads,
}

impl DataConnections {
    /// Binds the data listener and starts to accept. `connections_max` bounds the authenticated
    /// connections from peers.
    pub(crate) fn start(
        shared: Shared,
        bind: SocketAddr,
        arena: Arc<KvArena>,
        connections_max: usize,
    ) -> io::Result<Self> {
        let (shared, peers) = (Arc::new(shared), Arc::<Peers>::default());
        Ok(Self {
            inbound: Inbound::start(Arc::clone(&shared), peers.clone(), bind, connections_max)?,
            peers,
            shared,
            arena,
            outbound: BTreeMap::new(),
            writers: Threads::default(),
        })
    }

    /// Returns the bound address.
    pub(crate) fn address(&self) -> SocketAddr {
        self.inbound.address
    }
}

impl DataConnections {
    fn close_outbound(&mut self, peer: Epoch) {
        if let Some(outbox) = self.outbound.remove(&peer) {
            outbox.close();
        }
    }
}

impl Transport for DataConnections {
    fn admit(&mut self, peer: Epoch) {
        self.peers.admit(peer);
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
                // Without an outbox every chunk for this peer fails with `NotOpen`.
                tracing::error!(%error, %peer, "cannot start a thread for a data connection");
            }
        }
    }

    fn send(&mut self, peer: Epoch, chunk: ChunkId, blocks: &[BlockId]) -> Result<(), DataError> {
        let outbox = self.outbound.get(&peer).ok_or(DataError::NotOpen)?;
        let blocks = blocks
            .iter()
            .map(|block| self.arena.read(*block))
            .collect::<Result<Vec<BlockRead>, _>>()?;
        outbox.push(chunk, blocks)
    }

    fn post(&mut self, peer: Epoch, chunk: ChunkId, blocks: &[BlockId]) -> Result<(), DataError> {
        let blocks = blocks
            .iter()
            .map(|block| self.arena.write(*block))
            .collect::<Result<Vec<BlockWrite>, _>>()?;
        let inbox = self.peers.inbox(peer).ok_or(DataError::NotOpen)?;
        inbox.post(chunk, blocks);
        Ok(())
    }

    fn cancel(&mut self, peer: Epoch, transfer: TransferId) -> Released {
        let sends = self.outbound.get(&peer).map(|outbox| outbox.cancel(transfer));
        let receives = self.peers.inbox(peer).map(|inbox| inbox.cancel(transfer));
        match (sends, receives) {
            (None | Some(Released::Now), None | Some(Released::Now)) => Released::Now,
            _ => Released::Later,
        }
    }

    fn dismiss(&mut self, peer: Epoch) {
        self.close_outbound(peer);
        self.shared.metrics.forget(peer);
        self.peers.dismiss(peer);
    }

    fn is_present(&self, peer: Epoch, connection: u64) -> bool {
        self.outbound.get(&peer).is_some_and(|outbox| outbox.connection == connection)
            || self.peers.inbox(peer).is_some_and(|it| it.connection() == connection)
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
    /// Cleans up after a failed start; the driver shuts down a transport in use.
    fn drop(&mut self) {
        let unfinished = self.shutdown(Instant::now() + DROP_MAX);
        if !unfinished.is_empty() {
            tracing::error!(?unfinished, "data threads still run after the deadline");
        }
    }
}
