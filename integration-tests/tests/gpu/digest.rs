//! Checks that digests of KV blocks and weights on the GPU equal the CPU's, and reports the
//! bandwidth of those of blocks.

use std::{sync::Arc, thread, time::Instant};

use kernels::{
    BlockId, BlockRead, Dtype, KvArena, KvFormat, KvLayout,
    arena::RemoteBlocks,
    cuda::{DeviceKv, RankedKv, weight_digest},
    digest::{self, DigestPurpose, Heads, WeightRuns},
};

use test_harness::skip;

use super::bench::{Gpu, gpu, short};

const BLOCKS: u32 = 40;

fn random(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    (0..bytes.div_ceil(4)).flat_map(|_| next().to_le_bytes()).take(bytes).collect()
}

/// Returns the KV parts of several ranks, all on one GPU. `by_kernel` selects the digest kernel
/// instead of copies to the host.
fn ranked(
    gpu: &Gpu,
    layout: KvLayout,
    ranks: usize,
    blocks: u32,
    by_kernel: bool,
) -> Arc<RankedKv> {
    let own = layout.with_heads(layout.kv_head_count / ranks);
    let parts = (0..ranks).map(|_| DeviceKv::new(&gpu.context, own, blocks).unwrap());
    let kv = RankedKv::of(parts.collect()).unwrap();
    if by_kernel {
        kv.digest_with(&gpu.library).unwrap();
    }
    kv
}

fn layouts() -> Vec<KvLayout> {
    let mut layouts = Vec::new();
    for format in [KvFormat::F32, KvFormat::Bf16, KvFormat::Fp8] {
        for kv_head_count in [1, 2, 3, 5, 8] {
            for (layer_count, head_dim) in [(1, 1), (3, 64), (2, 80), (5, 128)] {
                layouts.push(KvLayout { layer_count, kv_head_count, head_dim, format });
            }
        }
    }
    if short() { layouts.into_iter().step_by(3).collect() } else { layouts }
}

fn ids(ids: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    ids.into_iter().map(BlockId).collect()
}

pub(crate) fn block_digests_match_cpu_for_any_layout_and_rank_count() {
    let gpu = gpu();
    let lists = [
        ids([]),
        ids([3]),
        ids(0..BLOCKS),
        ids([7, 0, 39, 21, 5, 38]),
        ids((0..BLOCKS).rev().step_by(3)),
        // Takes more than one kernel launch.
        ids((0..1_300).map(|at| at * 7 % BLOCKS)),
    ];
    for layout in layouts() {
        let contents: Vec<Vec<u8>> =
            (0..BLOCKS).map(|block| random(block.into(), layout.block_bytes())).collect();
        let expected = lists.each_ref().map(|list| {
            let blocks = list.iter().enumerate();
            let terms = blocks.map(|(index, block)| {
                digest::of_block(&Heads::all(layout), index, &contents[block.index()])
            });
            terms.fold(0, u64::wrapping_add)
        });
        let mut memories: Vec<(String, Arc<dyn RemoteBlocks>)> = Vec::new();
        let alone = DeviceKv::new(&gpu.context, layout, BLOCKS).unwrap();
        alone.digest_with(gpu.library.clone()).unwrap();
        memories.push(("one GPU".to_owned(), alone));
        for ranks in [1, 2, 4].into_iter().filter(|ranks| layout.kv_head_count % ranks == 0) {
            let what = format!("{ranks} ranks");
            memories.push((what, ranked(&gpu, layout, ranks, BLOCKS, true)));
        }
        memories.push(("by copies".to_owned(), ranked(&gpu, layout, 1, BLOCKS, false)));
        for (what, memory) in memories {
            let what = format!("{layout} {} {what}", layout.format);
            let arena = KvArena::remote(memory.clone()).unwrap();
            for (block, bytes) in (0..).zip(&contents) {
                arena.write(BlockId(block)).unwrap().copy_from_host(bytes).unwrap();
            }
            for (list, expected) in lists.iter().zip(&expected) {
                assert_eq!(memory.digest(list), Ok(*expected), "{what}, {} blocks", list.len());
            }
            // Takes more digests than one call computes.
            let each = ids((0..300).map(|at| at * 7 % BLOCKS));
            let alone = |block: &BlockId| {
                digest::of_block(&Heads::all(layout), 0, &contents[block.index()])
            };
            let expected = each.iter().map(alone).collect();
            let purpose = DigestPurpose::SaveToHost;
            assert_eq!(memory.digests(&each, purpose), Ok(expected), "{what}");
            assert_eq!(memory.digests(&[], purpose), Ok(Vec::new()), "{what}");
            // Changes one byte and restores it.
            let guards =
                || ids([9, 4]).iter().map(|id| arena.read(*id).unwrap()).collect::<Vec<_>>();
            let before = BlockRead::digest(&guards()).unwrap();
            let mut changed = contents[4].clone();
            let last = changed.len() - 1;
            changed[last] ^= 1;
            arena.write(BlockId(4)).unwrap().copy_from_host(&changed).unwrap();
            assert_ne!(BlockRead::digest(&guards()).unwrap(), before, "{what}");
            arena.write(BlockId(4)).unwrap().copy_from_host(&contents[4]).unwrap();
            assert_eq!(BlockRead::digest(&guards()).unwrap(), before, "{what}");
        }
    }
}

pub(crate) fn digests_of_several_threads_match_cpu() {
    let gpu = gpu();
    let layout =
        KvLayout { layer_count: 4, kv_head_count: 4, head_dim: 64, format: KvFormat::Bf16 };
    let rounds = if short() { 5 } else { 200 };
    for ranks in [1, 2] {
        let kv = ranked(&gpu, layout, ranks, BLOCKS, true);
        let arena = KvArena::remote(kv.clone()).unwrap();
        let terms: Vec<_> = (0..BLOCKS)
            .map(|block| {
                let bytes = random(block.into(), layout.block_bytes());
                arena.write(BlockId(block)).unwrap().copy_from_host(&bytes).unwrap();
                let term = |index: usize| digest::of_block(&Heads::all(layout), index, &bytes);
                [term(0), term(1)]
            })
            .collect();
        // Several threads of each purpose.
        thread::scope(|scope| {
            for thread in 0..8 {
                let (kv, terms) = (&kv, &terms);
                let purpose = match thread % 2 {
                    0 => DigestPurpose::SaveToHost,
                    _ => DigestPurpose::LoadFromHost,
                };
                scope.spawn(move || {
                    for round in 0..rounds {
                        let at = |step: u32| (thread * 5 + round * 7 + step * 3) % BLOCKS;
                        let each = ids((0..1 + round % BLOCKS).map(at));
                        let expected = each.iter().map(|block| terms[block.index()][0]).collect();
                        assert_eq!(kv.digests(&each, purpose), Ok(expected), "{ranks} ranks");
                        let pair = [at(0), at(1)].map(|block| terms[block as usize]);
                        let expected = pair[0][0].wrapping_add(pair[1][1]);
                        assert_eq!(kv.digest(&ids([at(0), at(1)])), Ok(expected), "{ranks} ranks");
                    }
                });
            }
        });
    }
}

pub(crate) fn digests_after_a_rejected_call_match_cpu() {
    let gpu = gpu();
    let layout =
        KvLayout { layer_count: 4, kv_head_count: 4, head_dim: 64, format: KvFormat::Bf16 };
    let kv = DeviceKv::new(&gpu.context, layout, BLOCKS).unwrap();
    kv.digest_with(gpu.library.clone()).unwrap();
    let arena = KvArena::remote(kv.clone()).unwrap();
    let expected = (0..BLOCKS).map(|block| {
        let bytes = random(block.into(), layout.block_bytes());
        arena.write(BlockId(block)).unwrap().copy_from_host(&bytes).unwrap();
        digest::of_block(&Heads::all(layout), 0, &bytes)
    });
    let expected: Vec<_> = expected.collect();
    for _ in 0..2 {
        let error = kv.digests_by_one_call(&ids((0..129).map(|at| at % BLOCKS))).unwrap_err();
        assert!(error.to_string().contains("129 digests; expected 1 to 128"), "{error}");
        assert_eq!(kv.digests_by_one_call(&ids(0..BLOCKS)), Ok(expected.clone()));
    }
}

pub(crate) fn weight_digests_match_cpu_and_count_values_that_are_not_finite() {
    let gpu = gpu();
    // A warp takes 1,024 words of 16 bytes. Of random elements, one in 256 is infinite or NaN.
    let mut parts =
        vec![(0, 16, 16, 0), (7, 16, 64, 32), (3, 8208, 16_400, 8192), (5000, 48, 96, 0)];
    for words in [1, 31, 32, 33, 1023, 1024, 1025, 2049, 65_537] {
        parts.push((1, words * 16, words * 16, 0));
        parts.push((3, words * 16, words * 48, words * 16));
    }
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for &(runs, run_bytes, run_stride, first) in &parts {
            let part = WeightRuns { runs, run_bytes, run_stride, first };
            let mut bytes = random(run_stride as u64, part.bytes());
            for _ in 0..2 {
                let expected = (digest::of_weight(&part, &bytes), not_finite(dtype, &bytes));
                let found = weight_digest(&gpu.library, &gpu.context, dtype, &part, &bytes);
                assert_eq!(found.unwrap(), expected, "{dtype} {part:?}");
                // Changes one element, which may become or no longer be a NaN.
                if let Some(last) = bytes.last_mut() {
                    *last ^= 0x7f;
                }
            }
            let nan = vec![0xff; part.bytes()];
            let (_, count) = weight_digest(&gpu.library, &gpu.context, dtype, &part, &nan).unwrap();
            assert_eq!(count, (part.bytes() / dtype.bytes()) as u64, "{dtype} {part:?}");
        }
    }
}

/// Returns the number of elements that are infinite or NaN.
fn not_finite(dtype: Dtype, bytes: &[u8]) -> u64 {
    let values = bytes.chunks_exact(dtype.bytes()).map(|bytes| match dtype {
        Dtype::F32 => f32::from_le_bytes(bytes.try_into().unwrap()),
        Dtype::Bf16 => half::bf16::from_le_bytes(bytes.try_into().unwrap()).to_f32(),
    });
    values.filter(|value| !value.is_finite()).count() as u64
}

/// Prints the bandwidth of digests and asserts nothing.
pub(crate) fn digest_bandwidth_is_reported() {
    let gpu = gpu();
    if short() {
        skip("BATON_TEST_SHORT is set");
    }
    // KV layout of an 8B model: 2 MiB a block.
    let layout =
        KvLayout { layer_count: 32, kv_head_count: 8, head_dim: 128, format: KvFormat::Bf16 };
    for ranks in [1, 2, 4, 8] {
        let kv = ranked(&gpu, layout, ranks, 512, true);
        let mut seconds = Vec::new();
        for blocks in [16_u32, 128, 512] {
            // No two blocks are adjacent.
            let list = ids((0..blocks).map(|at| at * 37 % 512));
            let mut times = (0..30).map(|_| {
                let began = Instant::now();
                kv.digest(&list).unwrap();
                began.elapsed().as_secs_f64()
            });
            let best = times.by_ref().skip(5).fold(f64::MAX, f64::min);
            let bytes = f64::from(blocks) * layout.block_bytes() as f64;
            println!(
                "digest, {ranks} parts on one GPU, {} MiB: {:.1} us, {:.0} GB/s",
                bytes / f64::from(1 << 20),
                best * 1e6,
                bytes / best / 1e9
            );
            seconds.push((bytes, best));
        }
        let (more, less) = (seconds[2], seconds[1]);
        let rate = (more.0 - less.0) / (more.1 - less.1) / 1e9;
        println!("digest, {ranks} parts: {rate:.0} GB/s without the fixed time of a call");
    }
}
