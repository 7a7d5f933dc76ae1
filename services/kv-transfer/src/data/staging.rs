//! Pinned host memory through which `tcp` moves the blocks of GPUs.
//!
//! A ring has two slots. The copy engine of the GPU fills or empties one while a thread moves the bytes of the other one
//! through its socket. Each connection takes a ring for one chunk at a time, so a node pins as much memory
//! as its chunks in flight need, and a stopped peer keeps a ring for at most one lease.

use std::{
    any::Any,
    collections::VecDeque,
    io,
    ops::{Deref, DerefMut},
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Instant,
};

use kernels::{
    BlockId, BlockRead, BlockWrite, KvArena, KvLayout,
    offload::{BlockOffload, CopiedBlocks, OffloadStream},
    peer::TransferInFlight,
};

use crate::{config::LEASE, threads::locked};

/// Bytes of a slot, rounded up to whole blocks. The first bytes of a chunk wait for the copy of a slot, and for those of
/// the other connections.
const SLOT_BYTES: usize = 2 << 20;
/// Slots of a ring: one in the socket, one in the copy engine.
const SLOTS: usize = 2;
/// Rings of a node: 256 MiB with blocks of up to 2 MiB.
const RINGS_MAX: usize = 64;

/// The copy of one slot.
type SlotCopy = Box<dyn TransferInFlight<CopiedBlocks>>;

/// The rings of one node.
pub struct StagingPool {
    /// `None` if blocks are in host memory.
    offload: Option<Arc<dyn BlockOffload>>,
    layout: KvLayout,
    rings: Mutex<Rings>,
    returned: Condvar,
}

#[derive(Default)]
struct Rings {
    free: Vec<StagingRing>,
    /// Rings that exist, free or in use.
    count: usize,
    /// `None` before the first ring.
    streams: Option<Streams>,
}

/// The streams of all rings. With a stream for each ring, the GPU would have more streams than hardware queues, and
/// copies would wait for the steps of the model.
#[derive(Clone)]
struct Streams {
    from_device: Arc<Mutex<Box<dyn OffloadStream>>>,
    to_device: Arc<Mutex<Box<dyn OffloadStream>>>,
}

impl StagingPool {
    pub fn new(arena: &KvArena) -> Self {
        Self {
            offload: arena.offload(),
            layout: arena.layout(),
            rings: Mutex::default(),
            returned: Condvar::new(),
        }
    }

    /// Takes a free ring, or pins the memory of a new one. Blocks for at most one lease while all are in use.
    pub fn take(&self) -> io::Result<PooledRing<'_>> {
        let deadline = Instant::now() + LEASE;
        let mut rings = locked(&self.rings);
        while rings.free.is_empty() && rings.count >= RINGS_MAX {
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                let reason = format!("all {RINGS_MAX} staging rings of tcp are in use");
                return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
            }
            (rings, _) =
                self.returned.wait_timeout(rings, rest).unwrap_or_else(PoisonError::into_inner);
        }
        let ring = match rings.free.pop() {
            Some(ring) => ring,
            None => {
                rings.count += 1;
                drop(rings);
                self.create().inspect_err(|_| locked(&self.rings).count -= 1)?
            }
        };
        Ok(PooledRing { pool: self, ring: Some(ring) })
    }

    /// Creates a ring, so that the first chunk does not wait for it. Does nothing if blocks are in host memory or a ring
    /// exists.
    pub fn prepare(&self) {
        if self.offload.is_some()
            && locked(&self.rings).count == 0
            && let Err(error) = self.take()
        {
            tracing::warn!(%error, "cannot pin host memory for tcp");
        }
    }

    fn create(&self) -> io::Result<StagingRing> {
        let offload = self.offload.as_ref().ok_or_else(|| {
            io::Error::other("the device of the blocks has no copies to pinned host memory")
        })?;
        let slot_blocks = SLOT_BYTES.div_ceil(self.layout.block_bytes());
        let block_count = (SLOTS * slot_blocks) as u32;
        let host = KvArena::host(self.layout, block_count).map_err(io::Error::other)?;
        let pinned = offload.pin(&host, 0, block_count).map_err(io::Error::other)?;
        let streams = self.streams(&**offload).map_err(io::Error::other)?;
        Ok(StagingRing { streams, _pinned: pinned, host, slot_blocks, next: 0 })
    }
}

impl StagingPool {
    fn streams(&self, offload: &dyn BlockOffload) -> Result<Streams, String> {
        let mut rings = locked(&self.rings);
        if let Some(streams) = &rings.streams {
            return Ok(streams.clone());
        }
        let stream = || offload.stream().map(|stream| Arc::new(Mutex::new(stream)));
        let streams = Streams { from_device: stream()?, to_device: stream()? };
        Ok(rings.streams.insert(streams).clone())
    }
}

/// A ring that returns to its pool on drop.
pub struct PooledRing<'a> {
    pool: &'a StagingPool,
    /// `None` once dropped.
    ring: Option<StagingRing>,
}

impl Deref for PooledRing<'_> {
    type Target = StagingRing;

    fn deref(&self) -> &StagingRing {
        self.ring.as_ref().expect("the ring is returned on drop")
    }
}

impl DerefMut for PooledRing<'_> {
    fn deref_mut(&mut self) -> &mut StagingRing {
        self.ring.as_mut().expect("the ring is returned on drop")
    }
}

impl Drop for PooledRing<'_> {
    fn drop(&mut self) {
        locked(&self.pool.rings).free.extend(self.ring.take());
        self.pool.returned.notify_one();
    }
}

/// Slots of pinned memory. One thread uses them in turn.
pub struct StagingRing {
    streams: Streams,
    _pinned: Box<dyn Any + Send>,
    host: Arc<KvArena>,
    slot_blocks: usize,
    /// Index of the next slot.
    next: usize,
}

impl StagingRing {
    /// Calls `send` with the bytes of all blocks, slot by slot in order, until `send` returns false. Copies the next slot
    /// meanwhile. Returns the last result of `send`; the blocks are released in every case.
    pub fn send(
        &mut self,
        blocks: Vec<BlockRead>,
        mut send: impl FnMut(&[&[u8]]) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let mut batches = batches(blocks, self.slot_blocks);
        let mut next_copy = |ring: &mut Self| -> io::Result<Option<SlotCopy>> {
            let Some(batch) = batches.next() else { return Ok(None) };
            let slot = ring.next_slot(batch.len())?;
            let copy = locked(&ring.streams.from_device).copy(batch, slot);
            copy.map(Some).map_err(io::Error::other)
        };
        let mut copy = next_copy(self)?;
        while let Some(filling) = copy {
            let copied = filling.finish().map_err(io::Error::other)?;
            copy = next_copy(self)?;
            let mut slot: Vec<BlockWrite> = copied.into_iter().map(|(_, host)| host).collect();
            let views = slot.iter_mut().filter_map(BlockWrite::host_view_mut);
            if !send(&views.map(|view| &*view).collect::<Vec<_>>())? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Calls `receive` with memory for the bytes of all blocks, slot by slot in order, until `receive` returns false.
    /// Copies the filled slots to the blocks meanwhile. Returns the last result of `receive`. No copy is in flight
    /// afterwards, and the blocks are released in every case.
    pub fn receive(
        &mut self,
        blocks: Vec<BlockWrite>,
        mut receive: impl FnMut(&mut [&mut [u8]]) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let finish = |copy: SlotCopy| copy.finish().map(drop).map_err(io::Error::other);
        let mut copies: VecDeque<SlotCopy> = VecDeque::new();
        for batch in batches(blocks, self.slot_blocks) {
            if copies.len() == SLOTS {
                copies.pop_front().map_or(Ok(()), finish)?;
            }
            let mut slot = self.next_slot(batch.len())?;
            let views = slot.iter_mut().filter_map(BlockWrite::host_view_mut);
            if !receive(&mut views.collect::<Vec<_>>())? {
                return Ok(false);
            }
            let filled: Vec<BlockId> = slot.iter().map(BlockWrite::block).collect();
            drop(slot);
            let filled = filled.into_iter().map(|block| self.host.read(block));
            let filled = filled.collect::<Result<_, _>>().map_err(io::Error::other)?;
            let copy = locked(&self.streams.to_device).copy(filled, batch);
            copies.push_back(copy.map_err(io::Error::other)?);
        }
        copies.into_iter().try_for_each(finish)?;
        Ok(true)
    }

    /// Borrows the first blocks of the next slot.
    fn next_slot(&mut self, block_count: usize) -> io::Result<Vec<BlockWrite>> {
        let first = self.next * self.slot_blocks;
        self.next = (self.next + 1) % SLOTS;
        let blocks =
            (first..first + block_count).map(|block| self.host.write(BlockId(block as u32)));
        blocks.collect::<Result<_, _>>().map_err(io::Error::other)
    }
}

/// Splits the blocks into batches of at most `size`.
fn batches<B>(blocks: Vec<B>, size: usize) -> impl Iterator<Item = Vec<B>> {
    let mut blocks = blocks.into_iter();
    std::iter::from_fn(move || {
        let batch: Vec<B> = blocks.by_ref().take(size).collect();
        (!batch.is_empty()).then_some(batch)
    })
}
