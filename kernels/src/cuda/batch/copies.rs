//! Copies of blocks before a step: recurrent states that are cached or continued.

use std::collections::HashSet;

use super::DeviceBatch;
use crate::{
    cuda::{backend::CudaBackend, error::CudaError, library::KernelLibrary},
    layout::BlockId,
};

impl DeviceBatch {
    /// Copies the first block of each pair to the second one, in order, before the next work of the
    /// compute stream.
    ///
    /// # Errors
    /// When a block is not in the arena, or after a GPU error.
    pub fn copy_blocks(
        &self,
        backend: &CudaBackend,
        copies: &[(BlockId, BlockId)],
    ) -> Result<(), CudaError> {
        let kv = &self.memory.blocks;
        let last = copies.iter().map(|(from, to)| from.0.max(to.0)).max().unwrap_or(0);
        if last >= kv.block_count() {
            let (what, value) = ("a block of a copy", last.to_string());
            return Err(CudaError::Unsupported { what, value, allowed: "a block of the arena" });
        }
        for copies in independent(copies) {
            let pairs: Vec<i32> =
                copies.iter().flat_map(|(from, to)| [from.0 as i32, to.0 as i32]).collect();
            let (blocks, bytes) = (kv.data().address(), kv.layout().block_bytes() as i64);
            // SAFETY: the blocks are in the arena, whose memory has these bytes for each. The pairs
            // are read before the call returns. No block that is written is in another pair.
            unsafe {
                launch!(
                    backend.library(),
                    backend.compute(),
                    baton_copy_blocks(blocks, bytes, pairs.as_ptr(), copies.len() as i32)
                )
            }?;
        }
        Ok(())
    }
}

/// Splits the copies into parts whose copies may run in any order.
fn independent(mut copies: &[(BlockId, BlockId)]) -> Vec<&[(BlockId, BlockId)]> {
    let mut parts = Vec::new();
    while !copies.is_empty() {
        let (mut read, mut written) = (HashSet::new(), HashSet::new());
        let is_dependent = |(from, to): &(BlockId, BlockId)| {
            let is_dependent = written.contains(from) || read.contains(to) || !written.insert(*to);
            read.insert(*from);
            is_dependent
        };
        let (part, rest) =
            copies.split_at(copies.iter().position(is_dependent).unwrap_or(copies.len()));
        parts.push(part);
        copies = rest;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_copied_blocks_run_later() {
        let ids = |pairs: &[(u32, u32)]| -> Vec<(BlockId, BlockId)> {
            pairs.iter().map(|(from, to)| (BlockId(*from), BlockId(*to))).collect()
        };
        for (pairs, expected) in [
            (&[][..], &[][..]),
            (&[(0, 1), (0, 2), (3, 4)], &[3]),
            (&[(0, 1), (2, 3), (1, 4), (5, 0)], &[2, 2]),
            (&[(0, 1), (2, 0), (0, 3)], &[1, 1, 1]),
            (&[(0, 1), (2, 1)], &[1, 1]),
        ] {
            let pairs = ids(pairs);
            let parts = independent(&pairs);
            assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), expected);
            assert_eq!(parts.concat(), pairs);
        }
    }
}
