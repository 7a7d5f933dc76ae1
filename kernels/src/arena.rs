//! KV memory, and the guards that borrow its blocks.
//!
//! An arena is one range of `block_count` equal blocks. Every access borrows a block first: a
//! transfer by [`BlockRead`] (shared) or [`BlockWrite`] (exclusive), a forward pass by a
//! [`StepAccess`] over many blocks. A conflicting borrow is rejected at once and never waits: the
//! block pool decides which owner may use a block, and the arena ensures that a bug in the pool
//! cannot cause a data race.
//!
//! The ranks of a node on one host share an arena in a [`SharedRegion`]. Each rank creates its own
//! [`KvArena`] over the region: see [`KvArena::shared`].
//!
//! Guards own a reference to the arena, may move to another thread, and release their borrow when
//! dropped. Blocks are zero before the first write.

mod access;
mod guards;
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
pub use guards::{BlockRead, BlockWrite};
pub use slices::BlockSlices;
pub use stream::{RowBlocks, StreamAccess, StreamStep};

use crate::{
    digest::{self, DigestPurpose, Heads},
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
    /// Computes the [`digest`] of these blocks for a transfer, by default over copies in host
    /// memory.
    fn digest(&self, blocks: &[BlockId]) -> Result<u64, String> {
        digest_of_copies(self, blocks)
    }
    /// Computes the [`digest`] of each block by itself, by default over copies in host memory.
    fn digests(&self, blocks: &[BlockId], _: DigestPurpose) -> Result<Vec<u64>, String> {
        digests_of_copies(self, blocks)
    }
    /// Returns the interface by which processes of this host read each other's blocks on the
    /// device.
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
    memory: ArenaMemory,
}

enum ArenaMemory {
    /// Owns the range that `base` points to.
    Host(MmapMut),
    /// Keeps the region alive that `base` points into.
    Shared { _region: Arc<SharedRegion> },
    /// `base` is dangling.
    Remote(Arc<dyn RemoteBlocks>),
}

// SAFETY: `base` points into `memory`, which this value owns or keeps alive and which does not
// move, or is dangling and never read. Code reaches the bytes behind `base` through guards only.
// `borrows` makes each guard exclusive or shared, with acquire ordering when it borrows and release
// ordering when it drops.
unsafe impl Send for KvArena {}
// SAFETY: every method takes `&self` and goes through `borrows`, whose atomics admit one writer or
// several readers of a block at a time.
unsafe impl Sync for KvArena {}

impl KvArena {
    /// Creates a zeroed arena in host memory. Pages take no memory before they are written or
    /// populated.
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
        Ok(Self::over(layout, block_count, base, ArenaMemory::Host(memory)))
    }

    /// Creates an arena of `block_count` blocks in memory that the ranks of a node and the node
    /// process have mapped. The arena begins `offset` bytes into the region; `offset` is a multiple
    /// of 64.
    ///
    /// **Hazard.** Arenas over the same bytes do not see each other's guards. Two rules prevent
    /// races: a rank's steps touch the rank's own heads only, and the node's single block pool
    /// never gives a block to a step and a transfer at the same time.
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
        let memory = ArenaMemory::Shared { _region: Arc::clone(region) };
        Ok(Self::over(layout, block_count, base, memory))
    }

    fn over(
        layout: KvLayout,
        block_count: u32,
        base: NonNull<u8>,
        memory: ArenaMemory,
    ) -> Arc<Self> {
        let borrows = (0..block_count).map(|_| AtomicU32::new(0)).collect();
        let block_bytes = layout.block_bytes();
        Arc::new(Self { layout, block_count, block_bytes, base, borrows, memory })
    }

    /// Creates an arena of blocks outside host memory, which can be copied but not viewed.
    pub fn remote(blocks: Arc<dyn RemoteBlocks>) -> Result<Arc<Self>, ArenaError> {
        let (layout, block_count) = (blocks.layout(), blocks.block_count());
        arena_bytes(layout, block_count)?;
        Ok(Self::over(layout, block_count, NonNull::dangling(), ArenaMemory::Remote(blocks)))
    }

    /// Returns whether blocks are in host memory.
    pub fn is_host(&self) -> bool {
        self.remote_blocks().is_none()
    }

    /// Returns the interface by which processes of this host read each other's blocks on the
    /// device.
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
            ArenaMemory::Host(_) | ArenaMemory::Shared { .. } => None,
            ArenaMemory::Remote(blocks) => Some(blocks),
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
    /// The system's error: it has too little memory, or cannot populate pages (Linux can since
    /// 5.14).
    pub fn populate(&self, first: u32, count: u32) -> io::Result<()> {
        let in_range = first.checked_add(count).is_some_and(|end| end <= self.block_count);
        assert!(
            in_range,
            "cannot populate {count} blocks from {first} on: the arena has {}",
            self.block_count
        );
        // A region reserves its memory when it is created.
        let ArenaMemory::Host(memory) = &self.memory else { return Ok(()) };
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

    /// Returns how many guards and steps hold the block. A block that is held must not get another
    /// owner.
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

    /// Computes the digest of borrowed blocks of this arena. Blocks outside host memory are
    /// digested by their device; for others `in_host_memory` returns the part that each block adds.
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

    /// Computes the digest of each borrowed block by itself, as [`Self::digest`] does for a list of
    /// one block.
    fn digests(
        &self,
        blocks: &[BlockId],
        purpose: DigestPurpose,
        mut in_host_memory: impl FnMut(usize, &Heads) -> u64,
    ) -> Result<Vec<u64>, ArenaError> {
        if let Some(remote) = self.remote_blocks() {
            let failed = |reason| ArenaError::Digest { blocks: blocks.len(), reason };
            return remote.digests(blocks, purpose).map_err(failed);
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

#[cfg(test)]
mod tests;
