//! Blocks of one forward pass, borrowed together.

use std::{fmt, ops::Range, slice, sync::Arc};

use half::bf16;

use super::{ArenaError, KvArena};
use crate::layout::{BLOCK_TOKENS, BlockId, KvFormat, KvHalf, KvLayout};

/// Element type of KV blocks.
///
/// # Safety
/// The type must be that of the format's elements: every bit pattern is a value, and the alignment
/// is at most the size.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    const FORMAT: KvFormat;
}

// SAFETY: any four bytes are an f32.
unsafe impl Element for f32 {
    const FORMAT: KvFormat = KvFormat::F32;
}

// SAFETY: any two bytes are a bf16.
unsafe impl Element for bf16 {
    const FORMAT: KvFormat = KvFormat::Bf16;
}

// SAFETY: any byte is a u8.
unsafe impl Element for u8 {
    const FORMAT: KvFormat = KvFormat::Fp8;
}

impl KvArena {
    /// Copies some of the arena's heads of a block to another block.
    ///
    /// # Panics
    /// When the blocks are not in host memory, they are one block, or the arena does not have these
    /// heads.
    pub fn copy_heads(
        self: &Arc<Self>,
        heads: Range<usize>,
        (from, to): (BlockId, BlockId),
    ) -> Result<(), ArenaError> {
        assert_ne!(from, to, "a block is copied to another one");
        let (layout, bytes) = (self.layout, heads.len() * self.layout.head_bytes());
        let _access = StepAccess::acquire_heads(self, heads.clone(), &[from], &[to])?;
        let [from, to] = [from, to].map(|block| self.block_ptr(block));
        for layer in 0..layout.layer_count {
            for half in [KvHalf::Key, KvHalf::Value] {
                let offset = layout.head_offset(layer, half, heads.start);
                // SAFETY: the access borrows both blocks, which are in range and not the same. It
                // checked the heads, whose bytes are one range inside each block for every layer
                // and half.
                unsafe { to.add(offset).copy_from_nonoverlapping(from.add(offset), bytes) };
            }
        }
        Ok(())
    }
}

/// Index of a block among the blocks that a [`StepAccess`] holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldBlock(u32);

/// Borrows of every block that one forward pass reads or writes, held until dropped.
///
/// A block may be listed for reading several times (sequences share prefixes) and for writing once.
/// A block that this step writes may also be read by it: within a layer, keys and values are stored
/// before attention reads them.
///
/// A rank's step accesses some heads of the blocks only, and numbers them from 0.
pub struct StepAccess {
    arena: Arc<KvArena>,
    /// The arena's heads that the step may access.
    heads: Range<usize>,
    /// Written blocks first, then read-only blocks; each block once, each part sorted.
    blocks: Vec<BlockId>,
    written_count: usize,
}

impl StepAccess {
    /// Borrows all blocks or none.
    ///
    /// # Panics
    /// When the blocks are not in host memory: then another device runs the steps.
    pub fn acquire(
        arena: &Arc<KvArena>,
        reads: &[BlockId],
        writes: &[BlockId],
    ) -> Result<Self, ArenaError> {
        Self::acquire_heads(arena, 0..arena.layout.kv_head_count, reads, writes)
    }

    /// Borrows as [`Self::acquire`] does, restricted to some of the arena's heads.
    ///
    /// # Panics
    /// As [`Self::acquire`], and when the arena does not have these heads.
    pub fn acquire_heads(
        arena: &Arc<KvArena>,
        heads: Range<usize>,
        reads: &[BlockId],
        writes: &[BlockId],
    ) -> Result<Self, ArenaError> {
        assert!(arena.is_host(), "the CPU computes on blocks in host memory");
        assert!(
            heads.start <= heads.end && heads.end <= arena.layout.kv_head_count,
            "heads {heads:?} are out of range: the arena has {}",
            arena.layout.kv_head_count
        );
        let mut written = writes.to_vec();
        written.sort_unstable();
        let mut read: Vec<BlockId> =
            reads.iter().copied().filter(|block| written.binary_search(block).is_err()).collect();
        read.sort_unstable();
        read.dedup();
        // Dropping `access` on an error releases the blocks borrowed so far.
        let mut access = Self {
            arena: Arc::clone(arena),
            heads,
            blocks: Vec::with_capacity(written.len() + read.len()),
            written_count: 0,
        };
        for block in written {
            arena.acquire_write(block)?;
            access.blocks.push(block);
            access.written_count += 1;
        }
        for block in read {
            arena.acquire_read(block)?;
            access.blocks.push(block);
        }
        Ok(access)
    }

    /// Returns the layout of a block with the step's heads only.
    pub fn layout(&self) -> KvLayout {
        self.arena.layout.with_heads(self.heads.len())
    }

    /// Returns the number of held blocks, read and written.
    pub fn block_count(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the index of a block among the held blocks; `None` when it is not held.
    pub fn find(&self, block: BlockId) -> Option<HeldBlock> {
        let (written, read) = self.blocks.split_at(self.written_count);
        let index = match written.binary_search(&block) {
            Ok(index) => index,
            Err(_) => self.written_count + read.binary_search(&block).ok()?,
        };
        Some(HeldBlock(index as u32))
    }

    /// Returns whether the step may write the block.
    pub fn is_written(&self, held: HeldBlock) -> bool {
        (held.0 as usize) < self.written_count
    }

    /// Returns one head as `[token][dim]`, all 16 tokens. Tokens not written yet have arbitrary
    /// values.
    ///
    /// Panics when `T` is not the arena's type.
    #[inline]
    pub fn head<T: Element>(
        &self,
        held: HeldBlock,
        layer: usize,
        half: KvHalf,
        head: usize,
    ) -> &[T] {
        let layout = self.arena.layout;
        // SAFETY: the pointer is at the head's first element, and the head's elements follow it.
        // This value borrows the block. Only `token_mut` writes it, whose callers promise that no
        // slice of the token is alive.
        unsafe {
            slice::from_raw_parts(
                self.head_ptr::<T>(held, layer, half, head),
                layout.head_elements(),
            )
        }
    }

    /// Returns the scales of one head's 16 tokens, in a block of format FP8. Tokens not written yet
    /// have arbitrary scales.
    ///
    /// # Panics
    /// As [`Self::head`].
    #[inline]
    pub fn scales(
        &self,
        held: HeldBlock,
        layer: usize,
        half: KvHalf,
        head: usize,
    ) -> &[u8; BLOCK_TOKENS] {
        // SAFETY: in FP8 the head's 16 scales follow its elements. Otherwise as in `head`.
        unsafe {
            let start = self.head_ptr::<u8>(held, layer, half, head);
            &*start.add(self.arena.layout.head_elements()).cast()
        }
    }

    /// Returns one token of one head for writing, `head_dim` elements.
    ///
    /// Panics when `T` is not the arena's type, the block is held for reading only, or an index is
    /// out of range.
    ///
    /// # Safety
    /// While the slice lives, no other slice of this token and head exists on any thread, neither
    /// from this function nor from [`Self::head`].
    #[inline]
    #[allow(clippy::mut_from_ref)] // Exclusive by the caller's promise: threads share a step.
    pub unsafe fn token_mut<T: Element>(
        &self,
        held: HeldBlock,
        layer: usize,
        half: KvHalf,
        head: usize,
        token: usize,
    ) -> &mut [T] {
        let dim = self.arena.layout.head_dim;
        self.check_write(held, token);
        // SAFETY: the checks above keep the range inside the head; the caller ensures exclusive
        // access.
        unsafe {
            let start = self.head_ptr::<T>(held, layer, half, head).add(token * dim);
            slice::from_raw_parts_mut(start, dim)
        }
    }

    /// Sets the scale of one token of one head, in a block of format FP8.
    ///
    /// Panics as [`Self::token_mut`] does.
    ///
    /// # Safety
    /// No slice from [`Self::scales`] of this head exists on any thread, and no other thread sets
    /// this scale.
    #[inline]
    pub unsafe fn set_scale(
        &self,
        held: HeldBlock,
        layer: usize,
        half: KvHalf,
        head: usize,
        (token, scale): (usize, u8),
    ) {
        self.check_write(held, token);
        // SAFETY: in FP8 the head's 16 scales follow its elements, and the token was checked; the
        // caller ensures exclusive access.
        unsafe {
            let start = self.head_ptr::<u8>(held, layer, half, head);
            start.add(self.arena.layout.head_elements() + token).write(scale);
        }
    }

    /// Returns `len` f32 of a block with recurrent states, for reading and writing: those from
    /// element `first` on of piece `piece` of a lane. Piece `layer · 2 + half` is the KV of that
    /// layer and half.
    ///
    /// Panics when the block is held for reading only, or the range is outside the piece.
    ///
    /// # Safety
    /// While the slice lives, no other slice of these elements exists on any thread.
    #[inline]
    #[allow(clippy::mut_from_ref)] // Exclusive by the caller's promise: threads share a step.
    pub(crate) unsafe fn state_mut(
        &self,
        held: HeldBlock,
        (piece, lane): (usize, usize),
        first: usize,
        len: usize,
    ) -> &mut [f32] {
        let layout = self.arena.layout;
        let half = if piece.is_multiple_of(2) { KvHalf::Key } else { KvHalf::Value };
        self.check_written(held);
        assert!((first + len) * size_of::<f32>() <= layout.head_bytes(), "inside the piece");
        // SAFETY: the checks above keep the range inside the piece. Pieces begin at multiples of 16
        // bytes of a page, so the pointer is aligned, and any four bytes are an f32. The caller
        // ensures exclusive access.
        unsafe {
            let start = self.head_start(held, piece / 2, half, lane).cast::<f32>().add(first);
            slice::from_raw_parts_mut(start, len)
        }
    }

    fn check_write(&self, held: HeldBlock, token: usize) {
        self.check_written(held);
        assert!(
            token < BLOCK_TOKENS,
            "token {token} is out of range: a block has {BLOCK_TOKENS} tokens"
        );
    }

    fn check_written(&self, held: HeldBlock) {
        assert!(
            self.is_written(held),
            "cannot write block {:?}: it is held for reading",
            self.blocks[held.index()]
        );
    }

    #[inline]
    fn head_ptr<T: Element>(
        &self,
        held: HeldBlock,
        layer: usize,
        half: KvHalf,
        head: usize,
    ) -> *mut T {
        let format = self.arena.layout.format;
        assert!(T::FORMAT == format, "the arena holds {format}");
        // The arena starts at a page boundary, and heads are whole numbers of elements, so the
        // pointer is aligned.
        self.head_start(held, layer, half, head).cast()
    }

    /// Returns the address of the first byte of one head's 16 tokens.
    #[inline]
    fn head_start(&self, held: HeldBlock, layer: usize, half: KvHalf, head: usize) -> *mut u8 {
        let layout = self.arena.layout;
        assert!(layer < layout.layer_count && head < self.heads.len(), "inside the layout");
        let block = self.arena.block_ptr(self.blocks[held.index()]);
        // SAFETY: the layout places every head inside the block's bytes.
        unsafe { block.add(layout.head_offset(layer, half, self.heads.start + head)).as_ptr() }
    }
}

impl HeldBlock {
    /// No block: an access to it panics.
    pub(crate) const NONE: Self = Self(u32::MAX);

    fn index(self) -> usize {
        self.0 as usize
    }
}

impl Drop for StepAccess {
    fn drop(&mut self) {
        for (index, &block) in self.blocks.iter().enumerate() {
            if index < self.written_count {
                self.arena.release_write(block);
            } else {
                self.arena.release_read(block);
            }
        }
    }
}

impl fmt::Debug for StepAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (written, read) = self.blocks.split_at(self.written_count);
        f.debug_struct("StepAccess").field("written", &written).field("read", &read).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena() -> Arc<KvArena> {
        let layout =
            KvLayout { layer_count: 2, kv_head_count: 2, head_dim: 4, format: KvFormat::F32 };
        KvArena::host(layout, 8).unwrap()
    }

    fn ids(ids: &[u32]) -> Vec<BlockId> {
        ids.iter().copied().map(BlockId).collect()
    }

    #[test]
    fn a_step_holds_its_blocks_until_it_is_dropped() {
        let arena = arena();
        let access = StepAccess::acquire(&arena, &ids(&[5, 1, 5]), &ids(&[3, 0])).unwrap();
        assert_eq!(access.block_count(), 4);
        assert_eq!(arena.pins(BlockId(5)).unwrap(), 1);
        assert!(arena.write(BlockId(5)).is_err());
        assert!(arena.read(BlockId(5)).is_ok());
        assert!(arena.read(BlockId(3)).is_err());
        drop(access);
        for id in 0..8 {
            assert_eq!(arena.pins(BlockId(id)).unwrap(), 0);
        }
    }

    #[test]
    fn heads_are_copied_from_block_to_block() {
        for format in [KvFormat::F32, KvFormat::Bf16, KvFormat::Fp8] {
            let layout = KvLayout { layer_count: 3, kv_head_count: 4, head_dim: 2, format };
            let arena = KvArena::host(layout, 3).unwrap();
            let bytes: Vec<u8> = (0..layout.block_bytes()).map(|at| at as u8 | 1).collect();
            arena.write(BlockId(1)).unwrap().copy_from_host(&bytes).unwrap();
            arena.copy_heads(1..3, (BlockId(1), BlockId(2))).unwrap();
            let mut copy = vec![0; bytes.len()];
            arena.read(BlockId(2)).unwrap().copy_to_host(&mut copy).unwrap();
            let expected: Vec<u8> = bytes
                .chunks(layout.head_bytes())
                .enumerate()
                .flat_map(|(head, bytes)| {
                    let is_copied = (1..3).contains(&(head % 4));
                    bytes.iter().map(move |byte| if is_copied { *byte } else { 0 })
                })
                .collect();
            assert_eq!(copy, expected, "{format}");
            let _reader = arena.read(BlockId(2)).unwrap();
            assert!(arena.copy_heads(0..4, (BlockId(1), BlockId(2))).is_err());
        }
    }

    #[test]
    fn a_rejected_step_borrows_nothing() {
        let arena = arena();
        let reader = arena.read(BlockId(4)).unwrap();
        let error = StepAccess::acquire(&arena, &ids(&[1, 2]), &ids(&[3, 4, 5])).unwrap_err();
        assert!(matches!(error, ArenaError::Conflict { block: BlockId(4), .. }));
        assert!(StepAccess::acquire(&arena, &ids(&[1, 9]), &[]).is_err());
        assert!(StepAccess::acquire(&arena, &[], &ids(&[2, 2])).is_err());
        drop(reader);
        for id in 0..8 {
            assert_eq!(arena.pins(BlockId(id)).unwrap(), 0, "block {id}");
        }
    }

    #[test]
    fn a_step_may_read_a_block_that_it_writes() {
        let arena = arena();
        let access = StepAccess::acquire(&arena, &ids(&[3, 2]), &ids(&[3])).unwrap();
        assert!(access.is_written(access.find(BlockId(3)).unwrap()));
        assert!(!access.is_written(access.find(BlockId(2)).unwrap()));
        assert_eq!(access.find(BlockId(7)), None);
    }

    #[test]
    fn stored_tokens_are_where_the_layout_says() {
        let arena = arena();
        let layout = arena.layout();
        let access = StepAccess::acquire(&arena, &[], &ids(&[6])).unwrap();
        let held = access.find(BlockId(6)).unwrap();
        let token = [1.0_f32, 2.0, 3.0, 4.0];
        // SAFETY: one thread, and no slice is alive.
        unsafe { access.token_mut(held, 1, KvHalf::Value, 1, 15) }.copy_from_slice(&token);
        assert_eq!(access.head::<f32>(held, 1, KvHalf::Value, 1)[60..], token);
        drop(access);
        let guard = arena.read(BlockId(6)).unwrap();
        let at = layout.head_offset(1, KvHalf::Value, 1) + 60 * 4;
        assert_eq!(guard.host_view().unwrap()[at..at + 4], 1.0_f32.to_ne_bytes());
        assert_eq!(layout.block_bytes(), at + 16);
    }

    #[test]
    fn steps_of_ranks_store_their_heads_at_their_offsets() {
        use crate::{cpu::testing::region, shard::Shard};

        let layout =
            KvLayout { layer_count: 2, kv_head_count: 4, head_dim: 4, format: KvFormat::F32 };
        let region = region(128 + 3 * layout.block_bytes());
        let arena = || KvArena::shared(layout, 3, &region, 128).unwrap();
        for shard in Shard::new(0, 2).unwrap().all() {
            // Each rank has an arena with its own borrows, as in separate processes.
            let heads = shard.part(layout.kv_head_count);
            let access =
                StepAccess::acquire_heads(&arena(), heads.clone(), &[], &ids(&[1])).unwrap();
            assert_eq!(access.layout(), layout.with_heads(2));
            let held = access.find(BlockId(1)).unwrap();
            for (layer, half) in [(0, KvHalf::Key), (1, KvHalf::Value)] {
                for head in 0..2 {
                    let value = (10 * layer + heads.start + head) as f32 + 1.0;
                    // SAFETY: one thread, and no slice is alive.
                    unsafe { access.token_mut(held, layer, half, head, 3) }.fill(value);
                    assert_eq!(access.head::<f32>(held, layer, half, head)[12], value);
                }
            }
        }
        // The node's own arena sees whole blocks.
        let (node, mut bytes) = (arena(), vec![0; layout.block_bytes()]);
        node.read(BlockId(1)).unwrap().copy_to_host(&mut bytes).unwrap();
        for (layer, half) in [(0, KvHalf::Key), (1, KvHalf::Value)] {
            for head in 0..4 {
                let at = layout.head_offset(layer, half, head) + 12 * 4;
                let found = f32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
                assert_eq!(found, (10 * layer + head) as f32 + 1.0);
            }
        }
        assert_eq!(node.read(BlockId(0)).unwrap().host_view().unwrap()[0], 0);
    }

    #[test]
    #[should_panic(expected = "inside the layout")]
    fn a_head_of_another_rank_is_rejected() {
        let arena = arena();
        let access = StepAccess::acquire_heads(&arena, 0..1, &ids(&[1]), &[]).unwrap();
        access.head::<f32>(access.find(BlockId(1)).unwrap(), 0, KvHalf::Key, 1);
    }

    #[test]
    #[should_panic(expected = "held for reading")]
    fn a_block_held_for_reading_cannot_be_written_to() {
        let arena = arena();
        let access = StepAccess::acquire(&arena, &ids(&[1]), &[]).unwrap();
        let held = access.find(BlockId(1)).unwrap();
        // SAFETY: the call panics before it returns a slice.
        unsafe { access.token_mut::<f32>(held, 0, KvHalf::Key, 0, 0) };
    }

    #[test]
    #[should_panic(expected = "the arena holds f32")]
    fn a_wrong_element_type_is_rejected() {
        let arena = arena();
        let access = StepAccess::acquire(&arena, &ids(&[1]), &[]).unwrap();
        access.head::<bf16>(access.find(BlockId(1)).unwrap(), 0, KvHalf::Key, 0);
    }
}
