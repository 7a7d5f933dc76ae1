//! Number of KV blocks that fit on a GPU.

use kernels::{KvGroups, KvLayout, cuda::DeviceKv};

use super::CudaExecutorError;

/// Shares of a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShare {
    /// Percentage of the GPU's memory for weights, activations, the batch and KV.
    pub percent: u32,
    /// Bytes of this share reserved for later allocations: CUDA graphs and lazily loaded code.
    pub reserve: u64,
}

/// A GPU's memory in bytes after weights and activations are allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvRoom {
    pub total: u64,
    /// Allocated by this process.
    pub taken: u64,
    pub free: u64,
    /// Needed by the batch.
    pub batch: u64,
}

/// Returns the blocks of this layout, with the layers of one KV group, that fit into the share, or
/// into the free memory if other processes use more.
///
/// # Errors
/// When the blocks hold fewer than `tokens_min` tokens.
pub fn kv_blocks(
    room: KvRoom,
    share: KvShare,
    (layout, groups): (KvLayout, &KvGroups),
    tokens_min: u32,
) -> Result<u32, CudaExecutorError> {
    let KvRoom { total, taken, free, batch } = room;
    let taken = taken.saturating_add(batch);
    let share_bytes = (u128::from(total) * u128::from(share.percent) / 100) as u64;
    let left = share_bytes.saturating_sub(taken).min(free.saturating_sub(batch));
    let left = left.saturating_sub(share.reserve);
    let block_bytes = layout.checked_block_bytes().map_or(u64::MAX, |bytes| bytes as u64);
    let extra = u64::from(DeviceKv::EXTRA_BLOCKS);
    let blocks = (left / block_bytes.max(1)).saturating_sub(extra).min(BLOCKS_MAX);
    let blocks_min = (groups.entries(tokens_min as usize) as u64).max(2);
    if blocks < blocks_min {
        return Err(CudaExecutorError::KvTooSmall {
            left,
            free,
            tokens: tokens_min,
            wanted: (blocks_min + extra).saturating_mul(block_bytes),
        });
    }
    Ok(blocks as u32)
}

/// Maximum blocks that the configuration can address.
const BLOCKS_MAX: u64 = 1 << 24;

#[cfg(test)]
mod tests {
    use kernels::KvFormat;

    use super::*;

    const GIB: u64 = 1 << 30;

    /// 2 MiB per block, as Llama 3.1 8B in bf16.
    const LAYOUT: KvLayout =
        KvLayout { layer_count: 32, kv_head_count: 8, head_dim: 128, format: KvFormat::Bf16 };

    fn room(taken: u64, free: u64, batch: u64) -> KvRoom {
        KvRoom { total: 140 * GIB, taken: taken * GIB, free: free * GIB, batch: batch * GIB }
    }

    fn share(percent: u32, reserve: u64) -> KvShare {
        KvShare { percent, reserve: reserve * GIB }
    }

    #[test]
    fn kv_blocks_fit_the_share_and_the_free_memory() {
        let cases = [
            // 126 - 16 of weights - 1 of batch - 1 in reserve, in GiB.
            (room(16, 123, 1), share(90, 1), 108),
            (room(16, 123, 1), share(45, 1), 45),
            (room(16, 123, 0), share(100, 0), 123),
            // Another process with the same share allocated before, or at the same time.
            (room(16, 60, 1), share(45, 1), 45),
            // Another process has 100 GiB: less is free than the share would leave.
            (room(16, 23, 1), share(90, 1), 21),
            (room(16, 23, 1), share(30, 1), 21),
            (room(16, 23, 1), share(20, 1), 10),
        ];
        for (room, share, gib) in cases {
            let blocks = kv_blocks(room, share, (LAYOUT, &KvGroups::default()), 16).unwrap();
            assert_eq!(u64::from(blocks), gib * 512 - 2, "{room:?} {share:?}");
        }
        let small = KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 2, ..LAYOUT };
        let blocks =
            kv_blocks(room(0, 139, 0), share(90, 0), (small, &KvGroups::default()), 16).unwrap();
        assert_eq!(u64::from(blocks), BLOCKS_MAX);
    }

    #[test]
    fn memory_for_less_than_one_sequence_is_rejected_with_the_sizes() {
        // 1 GiB: 510 blocks and two extra blocks, 8,160 tokens.
        let layout = (LAYOUT, &KvGroups::default());
        let one = |percent, tokens| kv_blocks(room(16, 2, 1), share(percent, 0), layout, tokens);
        assert_eq!(one(90, 8_160).unwrap(), 510);
        let error = one(90, 8_161).unwrap_err().to_string();
        let sizes = ["8161 tokens", "1075838976", "1073741824", "2147483648"];
        // The buffers of the batch take memory for each slot and each token of a step.
        let settings = ["node.gpu_memory_percent", "node.slots", "node.step_tokens"];
        for word in sizes.into_iter().chain(settings) {
            assert!(error.contains(word), "{error:?} lacks {word:?}");
        }
        // The share is used up already.
        assert!(one(12, 1).is_err());
        let empty = room(0, 0, 1);
        assert!(kv_blocks(empty, share(90, 1), layout, 1).is_err());
    }
}
