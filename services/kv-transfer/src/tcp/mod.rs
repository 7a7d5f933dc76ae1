//! KV over TCP: from the arena's blocks into the arena's blocks, for hosts without a GPU.
//!
//! One connection per pair and direction, made by the sender, proven on both ends by tags over
//! fresh nonces ([`handshake`]), then a sequence of frames ([`frame`]). Each connection has one
//! thread at either end: [`outbound`] writes straight from borrowed blocks, [`inbound`] reads
//! straight into the posted ones. Neither encrypted nor sealed frame by frame: the network between
//! the nodes is the operator's, and each chunk's xxh3 travels in the sealed `DONE`.

mod frame;
mod handshake;
mod inbound;
mod outbound;
mod stream;

use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::Instant,
};

use crossbeam_channel::Sender;
use kernels::{BlockId, BlockRead, BlockWrite, KvArena};

use crate::{
    api::{Epoch, TransferId},
    metrics::DataCounters,
    notice::Keys,
    protocol::DataEvent,
    threads::Threads,
    transport::{DataError, Released, Transport},
};
use inbound::Inbound;
use outbound::Outbox;

/// What both directions share.
struct Shared {
    me: Epoch,
    keys: Keys,
    events: Sender<DataEvent>,
    counters: Arc<DataCounters>,
}

pub struct Tcp {
    shared: Arc<Shared>,
    arena: Arc<KvArena>,
    inbound: Inbound,
    outbound: BTreeMap<Epoch, Arc<Outbox>>,
    writers: Threads,
}

impl Tcp {
    /// Binds the data listener and starts accepting. `connections_max` bounds the proven
    /// connections from peers.
    pub fn start(
        bind: SocketAddr,
        me: Epoch,
        keys: Keys,
        arena: Arc<KvArena>,
        connections_max: usize,
        events: Sender<DataEvent>,
        counters: Arc<DataCounters>,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(bind)?;
        let shared = Arc::new(Shared { me, keys, events, counters });
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

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn open(&mut self, peer: Epoch, endpoint: &str) {
        self.close_outbound(peer);
        let outbox = Arc::new(Outbox::default());
        let (shared, endpoint) = (Arc::clone(&self.shared), endpoint.to_owned());
        let writer = {
            let (shared, outbox) = (Arc::clone(&shared), Arc::clone(&outbox));
            move || outbound::run(&shared, &outbox, peer, &endpoint)
        };
        match self.writers.spawn("kv-data-out", writer) {
            Ok(()) => {
                self.outbound.insert(peer, outbox);
            }
            Err(error) => {
                // The driver drains this channel and must not wait for itself; if it is full the
                // chunks for this peer fail one by one instead.
                let reason = format!("no thread for its data connection: {error}");
                let _ = shared.events.try_send(DataEvent::Closed { peer, reason });
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
        self.inbound.post(peer, transfer, chunk, blocks);
        Ok(())
    }

    fn cancel_send(&mut self, peer: Epoch, transfer: TransferId) -> Released {
        self.outbound.get(&peer).map_or(Released::Now, |outbox| outbox.cancel(transfer))
    }

    fn cancel_receive(&mut self, peer: Epoch, transfer: TransferId) -> Released {
        self.inbound.cancel(peer, transfer)
    }

    fn close(&mut self, peer: Epoch) {
        self.close_outbound(peer);
        self.inbound.close(peer);
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

impl Tcp {
    fn close_outbound(&mut self, peer: Epoch) {
        if let Some(outbox) = self.outbound.remove(&peer) {
            outbox.close();
        }
    }
}
