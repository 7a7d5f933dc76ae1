//! Guards of single blocks, for transfers.

use std::{fmt, ptr::NonNull, slice, sync::Arc};

use super::{ArenaError, KvArena, RemoteBlocks};
use crate::{
    digest::{self, DigestPurpose},
    layout::BlockId,
};

impl KvArena {
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

    /// Computes the [`digest`] of blocks of one arena, in this order, for a transfer.
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

    /// Computes the [`digest`] of each of these blocks of one arena by itself, for a save to host
    /// memory.
    ///
    /// # Panics
    /// When the blocks belong to several arenas.
    pub fn digests(blocks: &[Self]) -> Result<Vec<u64>, ArenaError> {
        let Some(first) = blocks.first() else { return Ok(Vec::new()) };
        assert!(blocks.iter().all(|block| Arc::ptr_eq(&block.arena, &first.arena)), "one arena");
        let ids: Vec<BlockId> = blocks.iter().map(Self::block).collect();
        first.arena.digests(&ids, DigestPurpose::SaveToHost, |index, heads| {
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

    /// Computes the digests as [`BlockRead::digests`] does, for a load from host memory.
    pub fn digests(blocks: &mut [Self]) -> Result<Vec<u64>, ArenaError> {
        let Some(first) = blocks.first() else { return Ok(Vec::new()) };
        let arena = Arc::clone(&first.arena);
        assert!(blocks.iter().all(|block| Arc::ptr_eq(&block.arena, &arena)), "one arena");
        let ids: Vec<BlockId> = blocks.iter().map(Self::block).collect();
        arena.digests(&ids, DigestPurpose::LoadFromHost, |index, heads| {
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
