//! Whole blocks whose heads are sharded over the devices of several ranks.

use std::{fmt, sync::Arc};

use super::RemoteBlocks;
use crate::layout::{KvHalf, KvLayout};

/// Blocks assembled from the ranks' slices in rank order. A rank's slice is `[layer][K,V][heads /
/// ranks][token][dim]`; a copy has all heads. So transfers and the block pool see whole blocks for
/// any number of ranks on either side.
pub struct BlockSlices {
    layout: KvLayout,
    slices: Vec<Arc<dyn RemoteBlocks>>,
}

impl BlockSlices {
    /// Combines the slices of all ranks.
    ///
    /// # Panics
    /// When there are no slices, or they differ in layout or block count.
    pub fn new(slices: Vec<Arc<dyn RemoteBlocks>>) -> Self {
        let first = slices.first().expect("a group has ranks");
        let (layout, block_count) = (first.layout(), first.block_count());
        let is_alike = |slice: &Arc<dyn RemoteBlocks>| {
            slice.layout() == layout && slice.block_count() == block_count
        };
        assert!(slices.iter().all(is_alike), "ranks have equal slices");
        Self { layout: layout.with_heads(layout.kv_head_count * slices.len()), slices }
    }

    /// Calls `copy(offset in the whole block, offset in the slice, bytes)` for every contiguous
    /// range of a whole block that the slice holds.
    fn ranges(&self, slice: usize, mut copy: impl FnMut(usize, usize, usize)) {
        let own = self.slices[slice].layout();
        let bytes = own.kv_head_count * own.head_bytes();
        for layer in 0..own.layer_count {
            for half in [KvHalf::Key, KvHalf::Value] {
                let first_head = slice * own.kv_head_count;
                let whole = self.layout.head_offset(layer, half, first_head);
                copy(whole, own.head_offset(layer, half, 0), bytes);
            }
        }
    }

    /// Returns the blocks that `bytes` bytes from `offset` on cover, or an error when they are not
    /// whole blocks.
    fn blocks(&self, offset: usize, bytes: usize) -> Result<std::ops::Range<usize>, String> {
        let block_bytes = self.layout.block_bytes();
        match offset.is_multiple_of(block_bytes) && bytes.is_multiple_of(block_bytes) {
            true => Ok(offset / block_bytes..(offset + bytes) / block_bytes),
            false => {
                Err(format!("{bytes} bytes at {offset} are not whole blocks of {block_bytes}"))
            }
        }
    }
}

impl RemoteBlocks for BlockSlices {
    fn layout(&self) -> KvLayout {
        self.layout
    }

    fn block_count(&self) -> u32 {
        self.slices[0].block_count()
    }

    fn read(&self, offset: usize, host: &mut [u8]) -> Result<(), String> {
        let blocks = self.blocks(offset, host.len())?;
        for (rank, slice) in self.slices.iter().enumerate() {
            // One copy of all blocks per rank: a rank's slices are contiguous.
            let own_bytes = slice.layout().block_bytes();
            let mut own = vec![0; blocks.len() * own_bytes];
            slice.read(blocks.start * own_bytes, &mut own)?;
            let wholes = host.chunks_exact_mut(self.layout.block_bytes());
            for (whole, own) in wholes.zip(own.chunks_exact(own_bytes)) {
                self.ranges(rank, |to, from, bytes| {
                    whole[to..to + bytes].copy_from_slice(&own[from..from + bytes]);
                });
            }
        }
        Ok(())
    }

    fn write(&self, offset: usize, host: &[u8]) -> Result<(), String> {
        let blocks = self.blocks(offset, host.len())?;
        for (rank, slice) in self.slices.iter().enumerate() {
            let own_bytes = slice.layout().block_bytes();
            let mut own = vec![0; blocks.len() * own_bytes];
            let wholes = host.chunks_exact(self.layout.block_bytes());
            for (whole, own) in wholes.zip(own.chunks_exact_mut(own_bytes)) {
                self.ranges(rank, |from, to, bytes| {
                    own[to..to + bytes].copy_from_slice(&whole[from..from + bytes]);
                });
            }
            slice.write(blocks.start * own_bytes, &own)?;
        }
        Ok(())
    }
}

impl fmt::Debug for BlockSlices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockSlices({} of {} ranks)", self.layout, self.slices.len())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{
        arena::KvArena,
        layout::{BlockId, KvFormat},
    };

    /// Stand-in for a device's memory, on the host.
    struct HostSlices {
        layout: KvLayout,
        bytes: Mutex<Vec<u8>>,
    }

    const BLOCKS: u32 = 3;

    impl RemoteBlocks for HostSlices {
        fn layout(&self) -> KvLayout {
            self.layout
        }

        fn block_count(&self) -> u32 {
            BLOCKS
        }

        fn read(&self, offset: usize, host: &mut [u8]) -> Result<(), String> {
            host.copy_from_slice(&self.bytes.lock().unwrap()[offset..offset + host.len()]);
            Ok(())
        }

        fn write(&self, offset: usize, host: &[u8]) -> Result<(), String> {
            self.bytes.lock().unwrap()[offset..offset + host.len()].copy_from_slice(host);
            Ok(())
        }
    }

    fn group(layout: KvLayout, ranks: usize) -> (Vec<Arc<HostSlices>>, Arc<KvArena>) {
        let own = layout.with_heads(layout.kv_head_count / ranks);
        let bytes = vec![0xee; own.block_bytes() * BLOCKS as usize];
        let slices: Vec<_> = (0..ranks)
            .map(|_| Arc::new(HostSlices { layout: own, bytes: Mutex::new(bytes.clone()) }))
            .collect();
        let remote = slices.iter().map(|slice| Arc::clone(slice) as Arc<dyn RemoteBlocks>);
        let blocks = BlockSlices::new(remote.collect());
        assert_eq!(blocks.layout(), layout);
        (slices, KvArena::remote(Arc::new(blocks)).unwrap())
    }

    #[test]
    fn blocks_convert_between_any_numbers_of_ranks() {
        for format in [KvFormat::F32, KvFormat::Bf16, KvFormat::Fp8] {
            let layout = KvLayout { layer_count: 3, kv_head_count: 4, head_dim: 2, format };
            let block: Vec<u8> =
                (0..layout.block_bytes()).map(|at| (at * 7 + at / 251) as u8).collect();
            for (from, to) in [(1, 2), (2, 4), (4, 1), (4, 4), (2, 1)] {
                let (_, sends) = group(layout, from);
                let (received, receives) = group(layout, to);
                sends.write(BlockId(1)).unwrap().copy_from_host(&block).unwrap();
                let mut wire = vec![0; block.len()];
                sends.read(BlockId(1)).unwrap().copy_to_host(&mut wire).unwrap();
                assert_eq!(wire, block);
                receives.write(BlockId(2)).unwrap().copy_from_host(&wire).unwrap();
                receives.read(BlockId(2)).unwrap().copy_to_host(&mut wire).unwrap();
                assert_eq!(wire, block);
                // Each rank has its heads in its own layout, and no other bytes changed.
                for (rank, slice) in received.iter().enumerate() {
                    let (own, bytes) = (slice.layout, slice.bytes.lock().unwrap());
                    let mine = &bytes[2 * own.block_bytes()..];
                    for head in 0..own.kv_head_count {
                        let at =
                            |layout: KvLayout, head| layout.head_offset(2, KvHalf::Value, head);
                        let length = layout.head_bytes();
                        let whole = at(layout, rank * own.kv_head_count + head);
                        let found = &mine[at(own, head)..][..length];
                        assert_eq!(found, &block[whole..whole + length]);
                    }
                    assert!(bytes[..2 * own.block_bytes()].iter().all(|&byte| byte == 0xee));
                }
            }
        }
    }

    #[test]
    fn parts_of_blocks_are_rejected() {
        let layout =
            KvLayout { layer_count: 1, kv_head_count: 2, head_dim: 2, format: KvFormat::F32 };
        let own: Arc<dyn RemoteBlocks> = Arc::new(HostSlices {
            layout: layout.with_heads(1),
            bytes: Mutex::new(vec![0; layout.block_bytes() / 2 * BLOCKS as usize]),
        });
        let blocks = BlockSlices::new(vec![Arc::clone(&own), own]);
        let error = blocks.read(8, &mut [0; 8]).unwrap_err();
        assert_eq!(error, format!("8 bytes at 8 are not whole blocks of {}", layout.block_bytes()));
        assert!(blocks.write(0, &vec![0; layout.block_bytes() + 4]).is_err());
    }
}
