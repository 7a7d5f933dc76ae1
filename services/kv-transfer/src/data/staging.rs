//! Pinned host memory through which `tcp` moves the blocks of GPUs.
//!
//! A ring has two slots. The copy engine of the GPU fills or empties one while a thread moves the
//! bytes of the other one through its socket. Each chunk in flight has a ring. A node keeps the
//! rings of its peak. Where none is left, a chunk goes through pageable memory, block by block:
//! slower, but no pair waits for the rings of a stopped peer.

use std::{
    any::Any,
    collections::VecDeque,
    io,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex},
};

use kernels::{
    BlockId, BlockRead, BlockWrite, KvArena, KvLayout,
    offload::{BlockOffload, CopiedBlocks, OffloadStream},
    peer::TransferInFlight,
};

use crate::threads::locked;

/// Bytes of a slot, rounded up to whole blocks. The copies of all connections queue on one stream,
/// so the first bytes of a chunk leave earlier with smaller slots.
const SLOT_BYTES: usize = 2 << 20;
/// Slots of a ring: one in the socket, one in the copy engine.
const SLOTS: usize = 2;
/// Maximum number of rings of a node: 256 MiB with blocks of up to 2 MiB.
const RINGS_MAX: usize = 64;

/// The copy of one slot.
type SlotCopy = Box<dyn TransferInFlight<CopiedBlocks>>;

/// The rings of one node.
pub(crate) struct StagingPool {
    /// `None` if blocks are in host memory.
    offload: Option<Arc<dyn BlockOffload>>,
    layout: KvLayout,
    rings: Mutex<Rings>,
}

#[derive(Default)]
struct Rings {
    free: Vec<StagingRing>,
    /// Rings that exist, free or in use.
    count: usize,
    /// Whether pinning has failed: no further ring is created.
    has_failed: bool,
    /// `None` before the first ring.
    streams: Option<Streams>,
}

/// The streams of all rings. With a stream for each ring, the GPU would have more streams than
/// hardware queues, and copies would wait for the steps of the model.
#[derive(Clone)]
struct Streams {
    from_device: Arc<Mutex<Box<dyn OffloadStream>>>,
    to_device: Arc<Mutex<Box<dyn OffloadStream>>>,
}

impl StagingPool {
    pub(crate) fn new(arena: &KvArena) -> Self {
        Self { offload: arena.offload(), layout: arena.layout(), rings: Mutex::default() }
    }

    /// Creates a ring, so that the first chunk does not wait for it. Does nothing if blocks are in
    /// host memory or a ring exists.
    pub(crate) fn prepare(&self) {
        let is_needed = self.offload.is_some() && locked(&self.rings).count == 0;
        if is_needed {
            drop(self.take());
        }
    }

    /// Calls `send` with the bytes of all blocks in order, a slot or a block at a time, until
    /// `send` returns false. Returns the last result of `send`. Releases the blocks in every case.
    pub(crate) fn send(
        &self,
        blocks: Vec<BlockRead>,
        mut send: impl FnMut(&[&[u8]]) -> io::Result<bool>,
    ) -> io::Result<bool> {
        if let Some(mut ring) = self.take() {
            return ring.send(blocks, send);
        }
        let mut bytes = vec![0; self.layout.block_bytes()];
        for block in blocks {
            block.copy_to_host(&mut bytes).map_err(io::Error::other)?;
            if !send(&[&bytes])? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Calls `receive` with memory for the bytes of all blocks in order, a slot or a block at a
    /// time, until `receive` returns false, and copies the bytes to the blocks. Returns the last
    /// result of `receive`. Afterwards no copy is in flight, and the blocks are released in every
    /// case.
    pub(crate) fn receive(
        &self,
        blocks: Vec<BlockWrite>,
        mut receive: impl FnMut(&mut [&mut [u8]]) -> io::Result<bool>,
    ) -> io::Result<bool> {
        if let Some(mut ring) = self.take() {
            return ring.receive(blocks, receive);
        }
        let mut bytes = vec![0; self.layout.block_bytes()];
        for mut block in blocks {
            if !receive(&mut [&mut bytes])? {
                return Ok(false);
            }
            block.copy_from_host(&bytes).map_err(io::Error::other)?;
        }
        Ok(true)
    }

    /// Takes a free ring, or pins the memory of a new one. Returns `None` if the maximum number is
    /// in use, or no memory can be pinned.
    fn take(&self) -> Option<PooledRing<'_>> {
        let mut rings = locked(&self.rings);
        if let Some(ring) = rings.free.pop() {
            return Some(PooledRing { pool: self, ring: Some(ring) });
        }
        if rings.count >= RINGS_MAX || rings.has_failed {
            return None;
        }
        rings.count += 1;
        drop(rings);
        match self.create() {
            Ok(ring) => Some(PooledRing { pool: self, ring: Some(ring) }),
            Err(reason) => {
                tracing::warn!(
                    reason,
                    "cannot pin host memory for tcp; using pageable memory, which is slower"
                );
                let mut rings = locked(&self.rings);
                rings.count -= 1;
                rings.has_failed = true;
                None
            }
        }
    }

    fn create(&self) -> Result<StagingRing, String> {
        let offload = self.offload.as_ref();
        let offload = offload.ok_or("the device has no copies to pinned host memory")?;
        let slot_blocks = SLOT_BYTES.div_ceil(self.layout.block_bytes());
        let block_count = (SLOTS * slot_blocks) as u32;
        let host = KvArena::host(self.layout, block_count).map_err(|error| error.to_string())?;
        let pinned = offload.pin(&host, 0, block_count)?;
        let streams = self.streams(&**offload)?;
        Ok(StagingRing { streams, _pinned: pinned, host, slot_blocks, next: 0 })
    }

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
struct PooledRing<'a> {
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
    }
}

/// Slots of pinned memory. One thread uses them in turn.
struct StagingRing {
    streams: Streams,
    _pinned: Box<dyn Any + Send>,
    host: Arc<KvArena>,
    slot_blocks: usize,
    /// Index of the next slot.
    next: usize,
}

impl StagingRing {
    /// Implements [`StagingPool::send`]. Copies the next slot while `send` runs.
    fn send(
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

    /// Implements [`StagingPool::receive`]. Copies the filled slot to its blocks while `receive`
    /// runs.
    fn receive(
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

#[cfg(test)]
mod tests {
    use kernels::{KvFormat, arena::RemoteBlocks};

    use super::*;

    const LAYOUT: KvLayout =
        KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 8, format: KvFormat::F32 };

    /// Device memory with copies to pinned memory that end at once, or without any.
    struct Device {
        bytes: Mutex<Vec<u8>>,
        can_pin: bool,
    }

    impl RemoteBlocks for Device {
        fn layout(&self) -> KvLayout {
            LAYOUT
        }

        fn block_count(&self) -> u32 {
            8
        }

        fn read(&self, offset: usize, host: &mut [u8]) -> Result<(), String> {
            host.copy_from_slice(&self.bytes.lock().unwrap()[offset..offset + host.len()]);
            Ok(())
        }

        fn write(&self, offset: usize, host: &[u8]) -> Result<(), String> {
            self.bytes.lock().unwrap()[offset..offset + host.len()].copy_from_slice(host);
            Ok(())
        }

        fn offload(self: Arc<Self>) -> Option<Arc<dyn BlockOffload>> {
            Some(self)
        }
    }

    impl BlockOffload for Device {
        fn pin(&self, _: &Arc<KvArena>, _: u32, _: u32) -> Result<Box<dyn Any + Send>, String> {
            if self.can_pin { Ok(Box::new(())) } else { Err("too little memory".to_owned()) }
        }

        fn stream(&self) -> Result<Box<dyn OffloadStream>, String> {
            Ok(Box::new(EndedCopies))
        }
    }

    struct EndedCopies;

    impl OffloadStream for EndedCopies {
        fn copy(
            &mut self,
            from: Vec<BlockRead>,
            mut to: Vec<BlockWrite>,
        ) -> Result<SlotCopy, String> {
            let mut bytes = vec![0; LAYOUT.block_bytes()];
            for (from, to) in from.iter().zip(&mut to) {
                from.copy_to_host(&mut bytes).unwrap();
                to.copy_from_host(&bytes).unwrap();
            }
            Ok(Box::new(EndedCopy(from.into_iter().zip(to).collect())))
        }
    }

    struct EndedCopy(Vec<CopiedBlocks>);

    impl TransferInFlight<CopiedBlocks> for EndedCopy {
        fn is_done(&mut self) -> Result<bool, String> {
            Ok(true)
        }

        fn finish(self: Box<Self>) -> Result<Vec<CopiedBlocks>, String> {
            Ok(self.0)
        }
    }

    /// Moves all blocks of one arena to another one through both pools, and compares the bytes.
    fn check_moves(from: (&StagingPool, &Arc<KvArena>), to: (&StagingPool, &Arc<KvArena>)) {
        let mut expected = Vec::new();
        for block in (0..8).map(BlockId) {
            let bytes: Vec<u8> =
                (0..LAYOUT.block_bytes()).map(|at| (at as u32 ^ block.0) as u8).collect();
            from.1.write(block).unwrap().copy_from_host(&bytes).unwrap();
            expected.extend(bytes);
        }
        let mut moved: Vec<u8> = Vec::new();
        let blocks = (0..8).map(|block| from.1.read(BlockId(block)).unwrap()).collect();
        let sent = from.0.send(blocks, |views| {
            moved.extend(views.concat());
            Ok(true)
        });
        assert!(sent.unwrap() && moved == expected);
        let blocks = (0..8).map(|block| to.1.write(BlockId(block)).unwrap()).collect();
        let mut rest = &moved[..];
        let received = to.0.receive(blocks, |views| {
            for view in views {
                let (bytes, later) = rest.split_at(view.len());
                view.copy_from_slice(bytes);
                rest = later;
            }
            Ok(true)
        });
        assert!(received.unwrap() && rest.is_empty());
        let mut found = vec![0; LAYOUT.block_bytes()];
        for (block, expected) in (0..8).zip(expected.chunks(LAYOUT.block_bytes())) {
            to.1.read(BlockId(block)).unwrap().copy_to_host(&mut found).unwrap();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn chunks_without_a_ring_go_through_pageable_memory() {
        let device = |can_pin| {
            let bytes = Mutex::new(vec![0; 8 * LAYOUT.block_bytes()]);
            let arena = KvArena::remote(Arc::new(Device { bytes, can_pin })).unwrap();
            (StagingPool::new(&arena), arena)
        };
        let ((one, one_arena), (other, other_arena)) = (device(true), device(true));
        let (unpinned, unpinned_arena) = device(false);
        check_moves((&one, &one_arena), (&other, &other_arena));
        assert_eq!(locked(&one.rings).count, 1);
        check_moves((&one, &one_arena), (&unpinned, &unpinned_arena));
        assert!(locked(&unpinned.rings).has_failed);
        // A stopped peer holds all rings.
        let held: Vec<_> = std::iter::from_fn(|| one.take()).collect();
        assert_eq!(held.len(), RINGS_MAX);
        check_moves((&one, &one_arena), (&one, &one_arena));
        drop(held);
        assert_eq!(locked(&one.rings).free.len(), RINGS_MAX);
    }
}
