//! Checks copies between KV blocks on GPUs and pinned host memory, and reports their bandwidth.

use std::{
    collections::VecDeque,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use kernels::{
    BlockId, BlockRead, BlockWrite, KvArena, KvFormat, KvLayout,
    arena::RemoteBlocks,
    cuda::{DeviceKv, RankedKv},
    offload::{CopiedBlocks, OffloadStream},
};

use super::bench::{Gpu, gpu, short};

const BLOCKS: u32 = 24;

/// Returns an arena over the parts of several ranks, all on one GPU, which computes digests.
fn arena(gpu: &Gpu, layout: KvLayout, ranks: usize, blocks: u32) -> Arc<KvArena> {
    let own = layout.with_heads(layout.kv_head_count / ranks);
    let part = || {
        let kv = DeviceKv::new(&gpu.context, own, blocks).unwrap();
        kv.digest_with(Arc::clone(&gpu.library)).unwrap();
        kv
    };
    let kv: Arc<dyn RemoteBlocks> = match ranks {
        1 => part(),
        _ => RankedKv::of((0..ranks).map(|_| part()).collect()).unwrap(),
    };
    KvArena::remote(kv).unwrap()
}

fn contents(block: u32, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 31 + at / 257 + block as usize * 101) as u8).collect()
}

fn reads(arena: &Arc<KvArena>, ids: &[u32]) -> Vec<BlockRead> {
    ids.iter().map(|&id| arena.read(BlockId(id)).unwrap()).collect()
}

fn writes(arena: &Arc<KvArena>, ids: &[u32]) -> Vec<BlockWrite> {
    ids.iter().map(|&id| arena.write(BlockId(id)).unwrap()).collect()
}

fn flip_last_bit(arena: &Arc<KvArena>, block: u32) {
    let mut write = arena.write(BlockId(block)).unwrap();
    *write.host_view_mut().expect("the block is in host memory").last_mut().unwrap() ^= 1;
}

/// Returns the digests of blocks that were just written.
fn loaded_digests(copied: Vec<CopiedBlocks>) -> Vec<u64> {
    let (_, mut written): (Vec<_>, Vec<_>) = copied.into_iter().unzip();
    BlockWrite::digests(&mut written).unwrap()
}

pub(crate) fn blocks_return_from_host_memory_for_any_layout_and_rank_count() {
    let gpu = gpu();
    for format in [KvFormat::F32, KvFormat::Bf16, KvFormat::Fp8] {
        for (layer_count, head_dim) in [(1, 64), (3, 128), (5, 80)] {
            let layout = KvLayout { layer_count, kv_head_count: 4, head_dim, format };
            for ranks in [1, 2, 4] {
                let device = arena(&gpu, layout, ranks, BLOCKS);
                let host = KvArena::host(layout, BLOCKS).unwrap();
                let offload = device.offload().expect("a GPU's blocks can be offloaded");
                let slices = [(0, 5), (5, BLOCKS - 5)];
                let pinned = slices.map(|(first, count)| offload.pin(&host, first, count).unwrap());
                let mut stream = offload.stream().unwrap();
                for block in 0..BLOCKS {
                    let bytes = contents(block, layout.block_bytes());
                    device.write(BlockId(block)).unwrap().copy_from_host(&bytes).unwrap();
                }
                // The slots of the blocks are not in the same order, and cross the slices.
                let (blocks, slots) = ([3, 4, 9, 0, 23], [7, 6, 4, 5, 11]);
                let sources = reads(&device, &blocks);
                let digests = BlockRead::digests(&sources).unwrap();
                let saved = stream.copy(sources, writes(&host, &slots)).unwrap();
                assert_eq!(saved.finish().unwrap().len(), blocks.len());
                assert_eq!(BlockRead::digests(&reads(&host, &slots)).unwrap(), digests);
                for (block, slot) in blocks.into_iter().zip(slots) {
                    let slot = host.read(BlockId(slot)).unwrap();
                    let expected = contents(block, layout.block_bytes());
                    assert!(slot.host_view().unwrap() == expected, "{layout}, {ranks} ranks");
                }
                let others = [12, 13, 1, 20, 2];
                // A flipped bit of host memory changes the digest of the loaded block.
                flip_last_bit(&host, slots[1]);
                let mut load = || {
                    let to = writes(&device, &others);
                    let copy = stream.copy(reads(&host, &slots), to).unwrap();
                    loaded_digests(copy.finish().unwrap())
                };
                let damaged = load();
                assert_ne!(damaged[1], digests[1], "{layout}, {ranks} ranks");
                assert_eq!((damaged[0], &damaged[2..]), (digests[0], &digests[2..]));
                flip_last_bit(&host, slots[1]);
                assert_eq!(load(), digests, "{layout}, {ranks} ranks");
                let mut found = vec![0; layout.block_bytes()];
                for (block, other) in blocks.into_iter().zip(others) {
                    device.read(BlockId(other)).unwrap().copy_to_host(&mut found).unwrap();
                    assert!(found == contents(block, found.len()), "{layout}, {ranks} ranks");
                }
                drop((stream, pinned));
            }
        }
    }
}

/// Direction of copies, and whether digests are computed as the host tier of a node does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    Copy,
    Save,
    Load,
}

/// Blocks that each direction uses, one after the other.
const DIRECTION_BLOCKS: u32 = 128;
/// Blocks of 2 MiB in a batch of saves of a node: 4 MiB.
const SAVE_BATCH: u32 = 2;
/// Blocks of 2 MiB in a batch of a load: 32 MiB.
const LOAD_BATCH: u32 = 16;

/// Copies batches of `batch` blocks for a while, two batches at a time, and returns the gigabytes
/// per second.
fn rate(
    stream: &mut dyn OffloadStream,
    (from, to): (&Arc<KvArena>, &Arc<KvArena>),
    work: Work,
    batch: u32,
) -> f64 {
    let first = if from.offload().is_some() { 0 } else { DIRECTION_BLOCKS };
    let within = Duration::from_millis(if short() { 50 } else { 500 });
    let (started, mut bytes) = (Instant::now(), 0);
    let mut in_flight = VecDeque::new();
    for at in (0..DIRECTION_BLOCKS).step_by(batch as usize).cycle() {
        let ids: Vec<u32> = (first + at..first + at + batch).collect();
        if in_flight.len() == 2 {
            let done: Box<dyn kernels::peer::TransferInFlight<_>> =
                in_flight.pop_front().expect("two batches are in flight");
            let copied = done.finish().unwrap();
            bytes += copied.len() * from.block_bytes();
            if work == Work::Load {
                assert_eq!(loaded_digests(copied).len(), batch as usize);
            }
        }
        if started.elapsed() >= within {
            break;
        }
        let sources = reads(from, &ids);
        if work == Work::Save {
            assert_eq!(BlockRead::digests(&sources).unwrap().len(), batch as usize);
        }
        in_flight.push_back(stream.copy(sources, writes(to, &ids)).unwrap());
    }
    let rate = bytes as f64 / started.elapsed().as_secs_f64();
    in_flight.into_iter().for_each(|copy| drop(copy.finish().unwrap()));
    rate / 1e9
}

pub(crate) fn offload_bandwidth_is_reported() {
    let gpu = gpu();
    // Blocks of an 8B model: 2 MiB.
    let layout =
        KvLayout { layer_count: 32, kv_head_count: 8, head_dim: 128, format: KvFormat::Bf16 };
    let blocks = 2 * DIRECTION_BLOCKS;
    for ranks in [1, 2] {
        let (device, host) =
            (arena(&gpu, layout, ranks, blocks), KvArena::host(layout, blocks).unwrap());
        let offload = device.offload().unwrap();
        let started = Instant::now();
        let _pinned = offload.pin(&host, 0, blocks).unwrap();
        let pin_seconds = started.elapsed().as_secs_f64();
        println!("{ranks} ranks on one GPU: pinning 512 MiB took {pin_seconds:.2} s");
        let (mut down, mut up) = (offload.stream().unwrap(), offload.stream().unwrap());
        let (saves, loads) = ((&device, &host), (&host, &device));
        println!(
            "GB/s, {ranks} ranks on one GPU | blocks of a save batch | save | load | both ways: save | load | sum"
        );
        let works =
            [("copies", Work::Copy, Work::Copy), ("copies with digests", Work::Save, Work::Load)];
        for (name, save_work, load_work) in works {
            let load = rate(&mut *up, loads, load_work, LOAD_BATCH);
            for batch in [SAVE_BATCH, SAVE_BATCH / 2] {
                let save = rate(&mut *down, saves, save_work, batch);
                let (both_save, both_load) = thread::scope(|scope| {
                    let save = scope.spawn(|| rate(&mut *down, saves, save_work, batch));
                    let load = scope.spawn(|| rate(&mut *up, loads, load_work, LOAD_BATCH));
                    (save.join().unwrap(), load.join().unwrap())
                });
                println!(
                    "{name} | {batch} | {save:.1} | {load:.1} | {both_save:.1} | {both_load:.1} | {:.1}",
                    both_save + both_load
                );
            }
        }
    }
}
