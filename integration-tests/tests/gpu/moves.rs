//! Gather and scatter of KV blocks: the kernel and the copies match the CPU for any heads.

use std::sync::Arc;

use kernels::{BlockId, KvArena, KvFormat, KvLayout, cuda::DeviceKv};

use super::bench::{gpu, short};

/// More blocks than one launch takes.
const BLOCKS: u32 = 600;

fn bytes_of(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed ^ 0x9e37_79b9_7f4a_7c15;
    let mut bytes = Vec::with_capacity(count + 8);
    while bytes.len() < count {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&(state ^ state >> 29).to_be_bytes());
    }
    bytes.truncate(count);
    bytes
}

/// Returns block ids in random order, with some contiguous runs.
fn scattered(seed: u64, count: usize) -> Vec<BlockId> {
    let mut ids: Vec<BlockId> = (0..BLOCKS).map(BlockId).collect();
    let mut state = seed;
    for last in (1..ids.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // Some swaps are skipped, so that some runs stay contiguous.
        if state >> 61 < 5 {
            ids.swap(last, (state >> 33) as usize % (last + 1));
        }
    }
    ids.truncate(count);
    ids
}

/// Returns the byte range of the heads in a block, for each layer's keys and values.
fn places(layout: KvLayout, first: usize, count: usize) -> impl Iterator<Item = (usize, usize)> {
    let head = layout.head_bytes();
    let rows = 0..2 * layout.layer_count;
    rows.map(move |row| {
        let begin = (row * layout.kv_head_count + first) * head;
        (begin, begin + count * head)
    })
}

pub(crate) fn gather_and_scatter_of_heads_match_cpu() {
    let gpu = gpu();
    // All heads and ranges of heads. Some heads have few bytes or a size that is not a power of
    // two.
    for (layer_count, kv_head_count, head_dim) in [(1, 1, 8), (3, 2, 24), (7, 3, 40), (2, 5, 64)] {
        for format in [KvFormat::Bf16, KvFormat::F32, KvFormat::Fp8] {
            if short() && format == KvFormat::F32 {
                continue;
            }
            let layout = KvLayout { layer_count, kv_head_count, head_dim, format };
            for kernel in [false, true] {
                let kv = DeviceKv::new(&gpu.context, layout, BLOCKS).unwrap();
                if kernel {
                    kv.move_with(Arc::clone(&gpu.library)).unwrap();
                }
                let arena = KvArena::remote(kv.clone()).unwrap();
                let mut held: Vec<Vec<u8>> =
                    (0..BLOCKS).map(|id| bytes_of(id.into(), layout.block_bytes())).collect();
                for (id, bytes) in (0..BLOCKS).zip(&held) {
                    arena.write(BlockId(id)).unwrap().copy_from_host(bytes).unwrap();
                }
                let what =
                    format!("{layout} {format}, {}", if kernel { "kernel" } else { "copies" });
                for first in 0..kv_head_count {
                    for count in 1..=kv_head_count - first {
                        let seed = (first * 10 + count) as u64;
                        let heads = first..first + count;
                        for blocks in [1, 7, BLOCKS as usize] {
                            let ids = scattered(seed, blocks);
                            let found = kv.gather(heads.clone(), &ids).unwrap();
                            let mut wanted = Vec::with_capacity(found.len());
                            for id in &ids {
                                for (begin, end) in places(layout, first, count) {
                                    wanted.extend_from_slice(&held[id.index()][begin..end]);
                                }
                            }
                            assert!(found == wanted, "{what}: heads {heads:?} of {blocks} blocks");
                        }
                        // Scatters to other blocks, so that a write to a wrong place is detected.
                        let ids = scattered(seed + 100, BLOCKS as usize / 2);
                        let moved = layout.block_bytes() / kv_head_count * count;
                        let new = bytes_of(seed, ids.len() * moved);
                        kv.scatter(heads.clone(), &ids, &new).unwrap();
                        for (id, new) in ids.iter().zip(new.chunks(moved)) {
                            let (block, mut rest) = (&mut held[id.index()], new);
                            for (begin, end) in places(layout, first, count) {
                                let (row, after) = rest.split_at(end - begin);
                                block[begin..end].copy_from_slice(row);
                                rest = after;
                            }
                        }
                    }
                }
                let mut found = vec![0; layout.block_bytes()];
                for (id, wanted) in (0..BLOCKS).zip(&held) {
                    arena.read(BlockId(id)).unwrap().copy_to_host(&mut found).unwrap();
                    assert!(found == *wanted, "{what}: block {id} after the last scatter");
                }
            }
        }
    }
}
