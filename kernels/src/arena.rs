//! KV memory, and the guards that borrow its blocks.
//!
//! An arena is one range of `block_count` equal blocks. Every access borrows a block first: a transfer by
//! [`BlockRead`] (shared) or [`BlockWrite`] (exclusive), a forward pass by a [`StepAccess`] over many
//! blocks. A conflicting borrow is rejected at once and never waits: the block pool decides which owner may
//! use a block, and the arena ensures that a bug in the pool cannot cause a data race.
//!
//! The ranks of a node on one host share an arena in a [`SharedRegion`]. Each rank creates its own
//! [`KvArena`] over the region: see [`KvArena::shared`].
//!
//! Guards own a reference to the arena, may move to another thread, and release their borrow when dropped.
//! Blocks are zero before the first write.

mod access;
mod slices;
mod stream;

use std::{
    fmt, io,
    ptr::NonNull,
    slice,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use memmap2::MmapMut;

pub use access::{Element, HeldBlock, StepAccess};
pub use slices::BlockSlices;
pub use stream::{RowBlocks, StreamAccess, StreamStep};

use crate::{
    digest::{self, Heads},
    layout::{BlockId, KvLayout},
    offload::BlockOffload,
    peer::{PeerChannels, PeerMemory},
    shared::SharedRegion,
};

/// Borrow state of a block that is being written. Any smaller number counts readers.
const WRITTEN: u32 = u32::MAX;

/// Error of a request to the arena.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    #[error("cannot create an arena of {block_count} blocks ({layout}): {reason}")]
    BadSize { block_count: u32, layout: KvLayout, reason: &'static str },
    #[error("cannot allocate {bytes} bytes for the arena: {source}")]
    OutOfMemory { bytes: usize, source: io::Error },
    #[error("block {} is out of range: the arena has {block_count}", block.0)]
    OutOfRange { block: BlockId, block_count: u32 },
    /// Another borrow of the block excludes this borrow.
    #[error("cannot borrow block {} for {wanted}: it is {state}", block.0)]
    Conflict { block: BlockId, wanted: Borrow, state: BorrowState },
    #[error("cannot copy block {}: the host buffer has {host_bytes} bytes; expected {block_bytes}", block.0)]
    LengthMismatch { block: BlockId, block_bytes: usize, host_bytes: usize },
    /// The memory of the block cannot be accessed.
    #[error("cannot copy block {}: {reason}", block.0)]
    Copy { block: BlockId, reason: String },
    #[error("cannot compute the digest of {blocks} blocks: {reason}")]
    Digest { blocks: usize, reason: String },
}

/// Kind of a borrow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Borrow {
    Read,
    Write,
}

impl fmt::Display for Borrow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Borrow::Read => "reading",
            Borrow::Write => "writing",
        })
    }
}

/// Borrow state of a block at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BorrowState {
    Free,
    Read { readers: u32 },
    Written,
}

impl BorrowState {
    fn of(raw: u32) -> Self {
        match raw {
            0 => Self::Free,
            WRITTEN => Self::Written,
            readers => Self::Read { readers },
        }
    }
}

impl fmt::Display for BorrowState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Free => f.write_str("free"),
            Self::Read { readers } => write!(f, "being read by {readers}"),
            Self::Written => f.write_str("being written"),
        }
    }
}

/// Blocks outside host memory, accessed by copies of whole blocks.
pub trait RemoteBlocks: Send + Sync {
    fn layout(&self) -> KvLayout;
    fn block_count(&self) -> u32;
    /// Copies bytes from `offset` on; the error is a message for logs.
    fn read(&self, offset: usize, host: &mut [u8]) -> Result<(), String>;
    /// Copies bytes to `offset`.
    fn write(&self, offset: usize, host: &[u8]) -> Result<(), String>;
    /// Computes the [`digest`] of these blocks, by default over copies in host memory.
    fn digest(&self, blocks: &[BlockId]) -> Result<u64, String> {
        digest_of_copies(self, blocks)
    }
    /// Computes the [`digest`] of each block by itself, by default over copies in host memory.
    fn digests(&self, blocks: &[BlockId]) -> Result<Vec<u64>, String> {
        digests_of_copies(self, blocks)
    }
    /// Returns the interface by which processes of this host read each other's blocks on the device.
    fn peer_memory(self: Arc<Self>) -> Option<Arc<dyn PeerMemory>> {
        None
    }
    /// Returns the interface to channels between GPUs.
    fn peer_channels(self: Arc<Self>) -> Option<Arc<dyn PeerChannels>> {
        None
    }
    /// Returns the interface to copies from and to pinned host memory.
    fn offload(self: Arc<Self>) -> Option<Arc<dyn BlockOffload>> {
        None
    }
}

/// Implements [`RemoteBlocks::digest`] over copies in host memory.
pub(crate) fn digest_of_copies<B: RemoteBlocks + ?Sized>(
    remote: &B,
    blocks: &[BlockId],
) -> Result<u64, String> {
    let layout = remote.layout();
    let (heads, mut copy) = (Heads::all(layout), vec![0; layout.block_bytes()]);
    let mut sum = 0_u64;
    for (index, block) in blocks.iter().enumerate() {
        remote.read(block.index() * copy.len(), &mut copy)?;
        sum = sum.wrapping_add(digest::of_block(&heads, index, &copy));
    }
    Ok(sum)
}

/// Implements [`RemoteBlocks::digests`] over copies in host memory.
pub(crate) fn digests_of_copies<B: RemoteBlocks + ?Sized>(
    remote: &B,
    blocks: &[BlockId],
) -> Result<Vec<u64>, String> {
    blocks.iter().map(|block| digest_of_copies(remote, slice::from_ref(block))).collect()
}

/// One range of KV blocks, shared by transfers and forward passes.
pub struct KvArena {
    layout: KvLayout,
    block_count: u32,
    block_bytes: usize,
    base: NonNull<u8>,
    /// Borrow state of each block: 0, the number of readers, or [`WRITTEN`]. Only guards change it.
    borrows: Box<[AtomicU32]>,
    memory: Memory,
}

enum Memory {
    /// Owns the range that `base` points to.
    Host(MmapMut),
    /// Keeps the region alive that `base` points into.
    Shared { _region: Arc<SharedRegion> },
    /// `base` is dangling.
    Remote(Arc<dyn RemoteBlocks>),
}

// SAFETY: `base` points into `memory`, which this value owns or keeps alive and which does not move, or is dangling
// and never read. Code reaches the bytes behind `base` through guards only. `borrows` makes each guard exclusive or
// shared, with acquire ordering when it borrows and release ordering when it drops.
unsafe impl Send for KvArena {}
// SAFETY: as above; every method takes `&self` and goes through `borrows`.
unsafe impl Sync for KvArena {}

impl KvArena {
    /// Creates a zeroed arena in host memory. Pages take no memory before they are written or populated.
    pub fn host(layout: KvLayout, block_count: u32) -> Result<Arc<Self>, ArenaError> {
        let bytes = arena_bytes(layout, block_count)?;
        // Page-aligned, so aligned for every element type and for vector loads.
        let mut memory =
            MmapMut::map_anon(bytes).map_err(|source| ArenaError::OutOfMemory { bytes, source })?;
        // Huge pages mean fewer page faults on first writes and fewer TLB misses in attention. A
        // system without huge pages refuses the advice, which only costs speed.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        let base = NonNull::new(memory.as_mut_ptr()).expect("a mapping is not at address 0");
        Ok(Self::over(layout, block_count, base, Memory::Host(memory)))
    }

    /// Creates an arena of `block_count` blocks in memory that the ranks of a node and the node process have
    /// mapped. The arena begins `offset` bytes into the region; `offset` is a multiple of 64.
    ///
    /// **Hazard.** Arenas over the same bytes do not see each other's guards. Two rules prevent races:
    /// a rank's steps touch the rank's own heads only, and the node's single block pool never gives a
    /// block to a step and a transfer at the same time.
    ///
    /// # Panics
    /// When the bytes are outside the region or were claimed for another use.
    pub fn shared(
        layout: KvLayout,
        block_count: u32,
        region: &Arc<SharedRegion>,
        offset: usize,
    ) -> Result<Arc<Self>, ArenaError> {
        let bytes = arena_bytes(layout, block_count)?;
        assert!(offset.is_multiple_of(64), "offset {offset} is not a multiple of 64");
        let base = region.bytes(offset, bytes);
        let memory = Memory::Shared { _region: Arc::clone(region) };
        Ok(Self::over(layout, block_count, base, memory))
    }

    fn over(layout: KvLayout, block_count: u32, base: NonNull<u8>, memory: Memory) -> Arc<Self> {
        let borrows = (0..block_count).map(|_| AtomicU32::new(0)).collect();
        let block_bytes = layout.block_bytes();
        Arc::new(Self { layout, block_count, block_bytes, base, borrows, memory })
    }

    /// Creates an arena of blocks outside host memory, which can be copied but not viewed.
    pub fn remote(blocks: Arc<dyn RemoteBlocks>) -> Result<Arc<Self>, ArenaError> {
        let (layout, block_count) = (blocks.layout(), blocks.block_count());
        arena_bytes(layout, block_count)?;
        Ok(Self::over(layout, block_count, NonNull::dangling(), Memory::Remote(blocks)))
    }

    /// Returns whether blocks are in host memory.
    pub fn is_host(&self) -> bool {
        self.remote_blocks().is_none()
    }

    /// Returns the interface by which processes of this host read each other's blocks on the device.
    pub fn peer_memory(&self) -> Option<Arc<dyn PeerMemory>> {
        Arc::clone(self.remote_blocks()?).peer_memory()
    }

    /// Returns the interface to channels between GPUs.
    pub fn peer_channels(&self) -> Option<Arc<dyn PeerChannels>> {
        Arc::clone(self.remote_blocks()?).peer_channels()
    }

    /// Returns the interface to copies from and to pinned host memory.
    pub fn offload(&self) -> Option<Arc<dyn BlockOffload>> {
        Arc::clone(self.remote_blocks()?).offload()
    }

    fn remote_blocks(&self) -> Option<&Arc<dyn RemoteBlocks>> {
        match &self.memory {
            Memory::Host(_) | Memory::Shared { .. } => None,
            Memory::Remote(blocks) => Some(blocks),
        }
    }

    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    pub fn block_count(&self) -> u32 {
        self.block_count
    }

    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Populates the pages of `count` blocks from `first` on, so that their first use takes no page
    /// faults. The contents do not change, and guards may exist meanwhile.
    ///
    /// # Errors
    /// The system's error: it has too little memory, or cannot populate pages (Linux can since 5.14).
    pub fn populate(&self, first: u32, count: u32) -> io::Result<()> {
        let in_range = first.checked_add(count).is_some_and(|end| end <= self.block_count);
        assert!(
            in_range,
            "cannot populate {count} blocks from {first} on: the arena has {}",
            self.block_count
        );
        // A region reserves its memory when it is created.
        let Memory::Host(memory) = &self.memory else { return Ok(()) };
        let offset = first as usize * self.block_bytes;
        #[cfg(target_os = "linux")]
        return memory.advise_range(
            memmap2::Advice::PopulateWrite,
            offset,
            count as usize * self.block_bytes,
        );
        #[cfg(not(target_os = "linux"))]
        return Err(io::Error::new(io::ErrorKind::Unsupported, format!("{memory:?} at {offset}")));
    }

    /// Borrows a block for reading; other readers may hold it too.
    pub fn read(self: &Arc<Self>, block: BlockId) -> Result<BlockRead, ArenaError> {
        self.acquire_read(block)?;
        Ok(BlockRead { arena: Arc::clone(self), block })
    }

    /// Borrows a block for writing, exclusively.
    pub fn write(self: &Arc<Self>, block: BlockId) -> Result<BlockWrite, ArenaError> {
        self.acquire_write(block)?;
        Ok(BlockWrite { arena: Arc::clone(self), block })
    }

    /// Returns how many guards and steps hold the block. A block that is held must not get another owner.
    pub fn pins(&self, block: BlockId) -> Result<u32, ArenaError> {
        Ok(match self.state(block)? {
            BorrowState::Free => 0,
            BorrowState::Read { readers } => readers,
            BorrowState::Written => 1,
        })
    }

    /// Returns the borrow state of the block. Other threads may change it at any time.
    pub fn state(&self, block: BlockId) -> Result<BorrowState, ArenaError> {
        Ok(BorrowState::of(self.borrow_of(block)?.load(Ordering::Acquire)))
    }

    fn borrow_of(&self, block: BlockId) -> Result<&AtomicU32, ArenaError> {
        self.borrows
            .get(block.index())
            .ok_or(ArenaError::OutOfRange { block, block_count: self.block_count })
    }

    fn acquire_read(&self, block: BlockId) -> Result<(), ArenaError> {
        self.acquire(block, Borrow::Read, |raw| (raw < WRITTEN - 1).then(|| raw + 1))
    }

    fn acquire_write(&self, block: BlockId) -> Result<(), ArenaError> {
        self.acquire(block, Borrow::Write, |raw| (raw == 0).then_some(WRITTEN))
    }

    /// Changes the block's borrow state by `change`, which returns `None` for a conflict.
    fn acquire(
        &self,
        block: BlockId,
        wanted: Borrow,
        change: impl Fn(u32) -> Option<u32>,
    ) -> Result<(), ArenaError> {
        let borrow = self.borrow_of(block)?;
        let changed = borrow.fetch_update(Ordering::Acquire, Ordering::Relaxed, change);
        let conflict = |raw| ArenaError::Conflict { block, wanted, state: BorrowState::of(raw) };
        changed.map(drop).map_err(conflict)
    }

    fn release_read(&self, block: BlockId) {
        let before = self.borrows[block.index()].fetch_sub(1, Ordering::Release);
        debug_assert!(before != 0 && before != WRITTEN, "a reader gives back what it borrowed");
    }

    fn release_write(&self, block: BlockId) {
        let before = self.borrows[block.index()].swap(0, Ordering::Release);
        debug_assert_eq!(before, WRITTEN, "a writer gives back what it borrowed");
    }

    fn is_of<B: RemoteBlocks + ?Sized>(&self, blocks: &B) -> bool {
        self.remote_blocks().is_some_and(|ours| std::ptr::addr_eq(Arc::as_ptr(ours), blocks))
    }

    /// Copies a borrowed block that is outside host memory.
    fn copy_remote(&self, block: BlockId, host: &mut [u8]) -> Result<(), ArenaError> {
        let blocks = self.remote_blocks().expect("blocks in host memory have a view");
        let read = blocks.read(block.index() * self.block_bytes, host);
        read.map_err(|reason| ArenaError::Copy { block, reason })
    }

    /// Computes the digest of borrowed blocks of this arena. Blocks outside host memory are digested by
    /// their device; for others `in_host_memory` returns the part that each block adds.
    fn digest(
        &self,
        blocks: &[BlockId],
        in_host_memory: impl FnMut((usize, &Heads)) -> u64,
    ) -> Result<u64, ArenaError> {
        if let Some(remote) = self.remote_blocks() {
            let failed = |reason| ArenaError::Digest { blocks: blocks.len(), reason };
            return remote.digest(blocks).map_err(failed);
        }
        let heads = Heads::all(self.layout);
        let indices = (0..blocks.len()).map(|index| (index, &heads));
        Ok(indices.map(in_host_memory).fold(0, u64::wrapping_add))
    }

    /// Computes the digest of each borrowed block by itself, as [`Self::digest`] does for a list of one block.
    fn digests(
        &self,
        blocks: &[BlockId],
        mut in_host_memory: impl FnMut(usize, &Heads) -> u64,
    ) -> Result<Vec<u64>, ArenaError> {
        if let Some(remote) = self.remote_blocks() {
            let failed = |reason| ArenaError::Digest { blocks: blocks.len(), reason };
            return remote.digests(blocks).map_err(failed);
        }
        let heads = Heads::all(self.layout);
        Ok((0..blocks.len()).map(|index| in_host_memory(index, &heads)).collect())
    }

    /// Returns the first byte and the size of `count` blocks in host memory.
    pub(crate) fn host_range(&self, first: BlockId, count: u32) -> (NonNull<u8>, usize) {
        let in_range = first.0.checked_add(count).is_some_and(|end| end <= self.block_count);
        assert!(in_range && count > 0, "cannot pin {count} blocks from {} on", first.0);
        (self.block_ptr(first), count as usize * self.block_bytes)
    }

    /// Returns the first byte of a block in host memory.
    fn block_ptr(&self, block: BlockId) -> NonNull<u8> {
        assert!(block.0 < self.block_count, "only blocks in range are borrowed");
        debug_assert!(self.is_host(), "remote blocks have no address here");
        // SAFETY: the offset is inside the mapping of block_count × block_bytes, whose size fits
        // an isize.
        unsafe { self.base.add(block.index() * self.block_bytes) }
    }
}

/// Returns the size of an arena in bytes, or an error when the size is zero or overflows.
fn arena_bytes(layout: KvLayout, block_count: u32) -> Result<usize, ArenaError> {
    let bad = |reason| ArenaError::BadSize { block_count, layout, reason };
    // If the size overflowed, blocks would lie outside the mapping.
    let too_large = || bad("its bytes exceed the address space");
    let block_bytes = layout.checked_block_bytes().ok_or_else(too_large)?;
    if block_count == 0 || block_bytes == 0 {
        return Err(bad("it has no bytes"));
    }
    block_bytes
        .checked_mul(block_count as usize)
        .filter(|bytes| isize::try_from(*bytes).is_ok())
        .ok_or_else(too_large)
}

impl fmt::Debug for KvArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvArena")
            .field("layout", &self.layout)
            .field("block_count", &self.block_count)
            .finish_non_exhaustive()
    }
}

/// A block borrowed for reading. Dropping it releases the block.
pub struct BlockRead {
    arena: Arc<KvArena>,
    block: BlockId,
}

impl BlockRead {
    pub fn block(&self) -> BlockId {
        self.block
    }

    /// Returns the block's size in bytes.
    pub fn byte_count(&self) -> usize {
        self.arena.block_bytes
    }

    /// Returns the block's bytes, or `None` when they are not in host memory.
    pub fn host_view(&self) -> Option<&[u8]> {
        // SAFETY: the block is in range and, while this guard lives, no other guard can write it.
        self.arena.is_host().then(|| unsafe {
            slice::from_raw_parts(self.arena.block_ptr(self.block).as_ptr(), self.arena.block_bytes)
        })
    }

    /// Returns whether the block is one of `blocks`.
    pub fn lies_in<B: RemoteBlocks + ?Sized>(&self, blocks: &B) -> bool {
        self.arena.is_of(blocks)
    }

    /// Returns the block's first byte in host memory, for copies while this guard lives.
    pub(crate) fn host_address(&self) -> NonNull<u8> {
        self.arena.block_ptr(self.block)
    }

    /// Copies the whole block into `host`.
    pub fn copy_to_host(&self, host: &mut [u8]) -> Result<(), ArenaError> {
        check_length(self.block, self.byte_count(), host.len())?;
        match self.host_view() {
            Some(bytes) => {
                host.copy_from_slice(bytes);
                Ok(())
            }
            None => self.arena.copy_remote(self.block, host),
        }
    }

    /// Computes the [`digest`] of blocks of one arena, in this order.
    ///
    /// # Panics
    /// When the blocks belong to several arenas.
    pub fn digest(blocks: &[Self]) -> Result<u64, ArenaError> {
        let Some(first) = blocks.first() else { return Ok(0) };
        assert!(blocks.iter().all(|block| Arc::ptr_eq(&block.arena, &first.arena)), "one arena");
        let ids: Vec<BlockId> = blocks.iter().map(Self::block).collect();
        first.arena.digest(&ids, |(index, heads)| {
            let view = blocks[index].host_view().expect("blocks in host memory have a view");
            digest::of_block(heads, index, view)
        })
    }

    /// Computes the [`digest`] of each of these blocks of one arena by itself.
    ///
    /// # Panics
    /// When the blocks belong to several arenas.
    pub fn digests(blocks: &[Self]) -> Result<Vec<u64>, ArenaError> {
        let Some(first) = blocks.first() else { return Ok(Vec::new()) };
        assert!(blocks.iter().all(|block| Arc::ptr_eq(&block.arena, &first.arena)), "one arena");
        let ids: Vec<BlockId> = blocks.iter().map(Self::block).collect();
        first.arena.digests(&ids, |index, heads| {
            let view = blocks[index].host_view().expect("blocks in host memory have a view");
            digest::of_block(heads, 0, view)
        })
    }
}

impl Drop for BlockRead {
    fn drop(&mut self) {
        self.arena.release_read(self.block);
    }
}

impl fmt::Debug for BlockRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BlockRead").field(&self.block.0).finish()
    }
}

/// A block borrowed for writing. Dropping it releases the block and keeps the bytes written so far.
pub struct BlockWrite {
    arena: Arc<KvArena>,
    block: BlockId,
}

impl BlockWrite {
    pub fn block(&self) -> BlockId {
        self.block
    }

    /// Returns the block's size in bytes.
    pub fn byte_count(&self) -> usize {
        self.arena.block_bytes
    }

    /// Returns whether the block is one of `blocks`.
    pub fn lies_in<B: RemoteBlocks + ?Sized>(&self, blocks: &B) -> bool {
        self.arena.is_of(blocks)
    }

    /// Returns the block's first byte in host memory, for copies while this guard lives.
    pub(crate) fn host_address(&self) -> NonNull<u8> {
        self.arena.block_ptr(self.block)
    }

    /// Returns the block's bytes, or `None` when they are not in host memory.
    pub fn host_view_mut(&mut self) -> Option<&mut [u8]> {
        // SAFETY: the block is in range, this guard is its only borrower, and `&mut self` makes
        // the slice the only one of this guard.
        self.arena.is_host().then(|| unsafe {
            slice::from_raw_parts_mut(
                self.arena.block_ptr(self.block).as_ptr(),
                self.arena.block_bytes,
            )
        })
    }

    /// Overwrites the whole block from `host`.
    pub fn copy_from_host(&mut self, host: &[u8]) -> Result<(), ArenaError> {
        check_length(self.block, self.byte_count(), host.len())?;
        if let Some(blocks) = self.arena.remote_blocks() {
            return blocks
                .write(self.block.index() * self.arena.block_bytes, host)
                .map_err(|reason| ArenaError::Copy { block: self.block, reason });
        }
        let bytes = self.host_view_mut().expect("blocks in host memory have a view");
        bytes.copy_from_slice(host);
        Ok(())
    }

    /// Computes the digest as [`BlockRead::digest`] does.
    pub fn digest(blocks: &mut [Self]) -> Result<u64, ArenaError> {
        let Some(first) = blocks.first() else { return Ok(0) };
        let arena = Arc::clone(&first.arena);
        assert!(blocks.iter().all(|block| Arc::ptr_eq(&block.arena, &arena)), "one arena");
        let ids: Vec<BlockId> = blocks.iter().map(Self::block).collect();
        arena.digest(&ids, |(index, heads)| {
            let view = blocks[index].host_view_mut().expect("blocks in host memory have a view");
            digest::of_block(heads, index, view)
        })
    }

    /// Computes the digests as [`BlockRead::digests`] does.
    pub fn digests(blocks: &mut [Self]) -> Result<Vec<u64>, ArenaError> {
        let Some(first) = blocks.first() else { return Ok(Vec::new()) };
        let arena = Arc::clone(&first.arena);
        assert!(blocks.iter().all(|block| Arc::ptr_eq(&block.arena, &arena)), "one arena");
        let ids: Vec<BlockId> = blocks.iter().map(Self::block).collect();
        arena.digests(&ids, |index, heads| {
            let view = blocks[index].host_view_mut().expect("blocks in host memory have a view");
            digest::of_block(heads, 0, view)
        })
    }
}

impl Drop for BlockWrite {
    fn drop(&mut self) {
        self.arena.release_write(self.block);
    }
}

impl fmt::Debug for BlockWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BlockWrite").field(&self.block.0).finish()
    }
}

fn check_length(block: BlockId, block_bytes: usize, host_bytes: usize) -> Result<(), ArenaError> {
    if block_bytes == host_bytes {
        Ok(())
    } else {
        Err(ArenaError::LengthMismatch { block, block_bytes, host_bytes })
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::layout::Dtype;

    fn layout() -> KvLayout {
        KvLayout { layer_count: 2, kv_head_count: 1, head_dim: 4, dtype: Dtype::F32 }
    }

    fn arena(blocks: u32) -> Arc<KvArena> {
        KvArena::host(layout(), blocks).unwrap()
    }

    fn is_send<T: Send>(_: &T) {}

    #[test]
    fn a_new_arena_is_zeroed_and_free() {
        let arena = arena(3);
        for id in 0..3 {
            assert_eq!(arena.pins(BlockId(id)).unwrap(), 0);
            let guard = arena.read(BlockId(id)).unwrap();
            assert!(guard.host_view().unwrap().iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn populate_keeps_contents_and_guards() {
        let arena = arena(300);
        arena.write(BlockId(1)).unwrap().host_view_mut().unwrap().fill(7);
        let guard = arena.write(BlockId(2)).unwrap();
        for (first, count) in [(0, 300), (7, 1), (299, 1), (300, 0), (0, 0)] {
            match arena.populate(first, count) {
                Ok(()) => {}
                // Some systems cannot populate pages.
                Err(error) => eprintln!("not populated: {error}"),
            }
        }
        drop(guard);
        let view = arena.read(BlockId(1)).unwrap();
        assert!(view.host_view().unwrap().iter().all(|&byte| byte == 7));
    }

    #[test]
    #[should_panic(expected = "the arena has 3")]
    fn populate_beyond_the_arena_panics() {
        let _ = arena(3).populate(2, 2);
    }

    #[test]
    fn readers_share_and_a_writer_is_rejected_with_the_block_id() {
        let arena = arena(2);
        let first = arena.read(BlockId(1)).unwrap();
        let second = arena.read(BlockId(1)).unwrap();
        assert_eq!(arena.pins(BlockId(1)).unwrap(), 2);
        let error = arena.write(BlockId(1)).unwrap_err();
        assert_eq!(error.to_string(), "cannot borrow block 1 for writing: it is being read by 2");
        drop((first, second));
        arena.write(BlockId(1)).unwrap();
    }

    #[test]
    fn a_writer_excludes_other_borrows_until_dropped() {
        let arena = arena(2);
        let mut guard = arena.write(BlockId(0)).unwrap();
        is_send(&guard);
        assert_eq!(arena.pins(BlockId(0)).unwrap(), 1);
        let read = arena.read(BlockId(0)).unwrap_err();
        assert_eq!(read.to_string(), "cannot borrow block 0 for reading: it is being written");
        assert!(matches!(
            arena.write(BlockId(0)),
            Err(ArenaError::Conflict { block: BlockId(0), wanted: Borrow::Write, .. })
        ));
        guard.host_view_mut().unwrap().fill(7);
        drop(guard);
        assert!(arena.read(BlockId(0)).unwrap().host_view().unwrap().iter().all(|&byte| byte == 7));
        assert!(arena.read(BlockId(1)).unwrap().host_view().unwrap().iter().all(|&byte| byte == 0));
    }

    #[test]
    fn an_id_out_of_range_is_an_error_everywhere() {
        let arena = arena(2);
        for id in [2, u32::MAX] {
            let block = BlockId(id);
            assert!(matches!(arena.read(block), Err(ArenaError::OutOfRange { .. })));
            assert!(matches!(arena.write(block), Err(ArenaError::OutOfRange { .. })));
            assert!(matches!(arena.pins(block), Err(ArenaError::OutOfRange { .. })));
        }
        assert_eq!(
            arena.read(BlockId(2)).unwrap_err().to_string(),
            "block 2 is out of range: the arena has 2"
        );
    }

    #[test]
    fn copies_need_exactly_one_block_of_bytes() {
        let arena = arena(1);
        let bytes: Vec<u8> = (0..arena.block_bytes()).map(|i| i as u8).collect();
        let mut guard = arena.write(BlockId(0)).unwrap();
        assert!(matches!(
            guard.copy_from_host(&bytes[1..]),
            Err(ArenaError::LengthMismatch { .. })
        ));
        guard.copy_from_host(&bytes).unwrap();
        drop(guard);
        let guard = arena.read(BlockId(0)).unwrap();
        let mut back = vec![0; bytes.len()];
        guard.copy_to_host(&mut back).unwrap();
        assert_eq!(back, bytes);
        assert!(guard.copy_to_host(&mut back[1..]).is_err());
    }

    struct FakeDeviceMemory(std::sync::Mutex<Vec<u8>>);

    impl RemoteBlocks for FakeDeviceMemory {
        fn layout(&self) -> KvLayout {
            layout()
        }

        fn block_count(&self) -> u32 {
            4
        }

        fn read(&self, offset: usize, host: &mut [u8]) -> Result<(), String> {
            host.copy_from_slice(&self.0.lock().unwrap()[offset..offset + host.len()]);
            Ok(())
        }

        fn write(&self, offset: usize, host: &[u8]) -> Result<(), String> {
            self.0.lock().unwrap()[offset..offset + host.len()].copy_from_slice(host);
            Ok(())
        }
    }

    #[test]
    fn digest_covers_contents_and_order_in_any_memory() {
        let here = arena(4);
        let remote = FakeDeviceMemory(vec![0; 4 * here.block_bytes()].into());
        let there = KvArena::remote(Arc::new(remote)).unwrap();
        for (block, other) in [(0, 2), (1, 3), (3, 0)] {
            let bytes: Vec<u8> = (0..here.block_bytes()).map(|at| (at + block) as u8).collect();
            here.write(BlockId(block as u32)).unwrap().copy_from_host(&bytes).unwrap();
            there.write(BlockId(other)).unwrap().copy_from_host(&bytes).unwrap();
        }
        let of = |arena: &Arc<KvArena>, blocks: &[u32]| {
            let mut guards: Vec<_> =
                blocks.iter().map(|block| arena.write(BlockId(*block)).unwrap()).collect();
            let written = BlockWrite::digest(&mut guards).unwrap();
            drop(guards);
            let guards: Vec<_> =
                blocks.iter().map(|block| arena.read(BlockId(*block)).unwrap()).collect();
            assert_eq!(BlockRead::digest(&guards).unwrap(), written);
            let each = BlockRead::digests(&guards).unwrap();
            let alone = |guard| BlockRead::digest(slice::from_ref(guard)).unwrap();
            assert_eq!(each, guards.iter().map(alone).collect::<Vec<_>>());
            drop(guards);
            let mut guards: Vec<_> =
                blocks.iter().map(|block| arena.write(BlockId(*block)).unwrap()).collect();
            assert_eq!(BlockWrite::digests(&mut guards).unwrap(), each);
            written
        };
        assert_eq!(of(&here, &[0, 1, 3]), of(&there, &[2, 3, 0]));
        assert_ne!(of(&here, &[0, 1, 3]), of(&there, &[3, 2, 0]));
        assert_ne!(of(&here, &[0, 1]), of(&there, &[2, 3, 0]));
        assert_eq!(of(&here, &[]), 0);
    }

    #[test]
    fn invalid_arena_sizes_are_rejected() {
        assert!(matches!(KvArena::host(layout(), 0), Err(ArenaError::BadSize { .. })));
        for layer_count in [usize::MAX >> 12, usize::MAX] {
            let huge = KvLayout { layer_count, ..layout() };
            assert!(matches!(KvArena::host(huge, u32::MAX), Err(ArenaError::BadSize { .. })));
        }
        // The size in bytes would wrap to a small number.
        let wrapping =
            KvLayout { layer_count: (1 << 57) + 1, kv_head_count: 1, head_dim: 4, ..layout() };
        assert!(matches!(KvArena::host(wrapping, 1), Err(ArenaError::BadSize { .. })));
        let empty = KvLayout { layer_count: 0, ..layout() };
        assert_eq!(
            KvArena::host(empty, 4).unwrap_err().to_string(),
            "cannot create an arena of 4 blocks (layers=0 halves=kv heads=1 tokens=16 dim=4): it has no \
             bytes"
        );
    }

    #[test]
    fn a_guard_keeps_the_arena_alive() {
        let arena = arena(1);
        let weak = Arc::downgrade(&arena);
        let guard = arena.read(BlockId(0)).unwrap();
        drop(arena);
        assert_eq!(guard.host_view().unwrap().len(), guard.byte_count());
        drop(guard);
        assert!(weak.upgrade().is_none());
    }

    /// Writers fill a block with one number. A reader that saw two numbers would have read during a
    /// write.
    #[test]
    fn concurrent_borrowers_never_see_a_torn_block() {
        const ROUNDS: usize = 500;
        let arena = arena(2);
        let (arena, both) = (&arena, |round: usize| BlockId((round % 2) as u32));
        thread::scope(|scope| {
            for thread in 0..2 {
                scope.spawn(move || {
                    for round in thread..ROUNDS + thread {
                        let mut guard = until_free(|| arena.write(both(round)));
                        guard.host_view_mut().unwrap().fill(round as u8);
                    }
                });
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let guard = until_free(|| arena.read(both(round)));
                        let bytes = guard.host_view().unwrap();
                        assert!(bytes.iter().all(|byte| byte == &bytes[0]));
                    }
                });
            }
        });
        assert_eq!(arena.pins(BlockId(0)).unwrap() + arena.pins(BlockId(1)).unwrap(), 0);
    }

    fn until_free<T>(borrow: impl Fn() -> Result<T, ArenaError>) -> T {
        loop {
            match borrow() {
                Ok(guard) => return guard,
                Err(error) => {
                    assert!(matches!(error, ArenaError::Conflict { .. }), "{error}");
                    thread::yield_now();
                }
            }
        }
    }
}
