use std::time::Duration;

use proptest::prelude::*;

use super::*;

const OWNER: SequenceId = SequenceId(7);

const HELD: BlockState = BlockState::Held { refs: 1 };
const RESERVED: BlockState = BlockState::Reserved { owner: OWNER };

fn allocate(pool: &mut BlockPool, count: u32) -> Vec<BlockId> {
    pool.take(count, HELD, &mut Vec::new()).expect("enough blocks")
}

#[test]
fn released_blocks_are_free_unless_their_contents_are_retained() {
    let mut pool = BlockPool::new(4);
    let blocks = allocate(&mut pool, 2);
    pool.retain(blocks[0]);
    blocks.iter().for_each(|&block| pool.release(block));
    assert_eq!(pool.state(blocks[0]), BlockState::Cached);
    assert_eq!(pool.state(blocks[1]), BlockState::Free);
    assert_eq!(pool.counts(), BlockCounts { free: 3, cached: 1, held: 0, reserved: 0 });
    pool.check();
}

#[test]
fn eviction_takes_free_blocks_first_and_then_the_longest_released() {
    let mut pool = BlockPool::new(3);
    let blocks = allocate(&mut pool, 3);
    pool.retain(blocks[0]);
    pool.retain(blocks[1]);
    // A table is released from its end.
    blocks.iter().rev().for_each(|&block| pool.release(block));
    let mut evicted = Vec::new();
    assert_eq!(pool.take(2, HELD, &mut evicted), Some(vec![blocks[2], blocks[1]]));
    assert_eq!(evicted, [blocks[1]], "the tail is evicted before the head");
    pool.check();
}

#[test]
fn a_cached_block_that_is_held_again_cannot_be_evicted() {
    let mut pool = BlockPool::new(2);
    let block = allocate(&mut pool, 1)[0];
    pool.retain(block);
    pool.release(block);
    pool.hold(block);
    assert_eq!(pool.take(2, HELD, &mut Vec::new()), None, "nothing is taken when too few");
    assert_eq!(pool.available(), 1);
    pool.check();
}

/// Takes one block and returns the evicted one.
fn evict(pool: &mut BlockPool) -> BlockId {
    let mut evicted = Vec::new();
    pool.take(1, HELD, &mut evicted).expect("a cached block is available");
    pool.check();
    evicted[0]
}

#[test]
fn kept_blocks_are_evicted_last_and_all_are_available() {
    let (mut pool, now) = (BlockPool::new(5), Instant::now());
    let blocks = allocate(&mut pool, 5);
    blocks.iter().for_each(|&block| pool.retain(block));
    pool.keep(&blocks[..2], now + Duration::from_secs(1), 7);
    pool.keep(&blocks[2..3], now + Duration::from_secs(2), 8);
    blocks.iter().rev().for_each(|&block| pool.release(block));
    pool.check();
    assert_eq!((pool.kept_blocks(), pool.available()), (3, 5));
    let order: Vec<_> = (0..5).map(|_| evict(&mut pool)).collect();
    assert_eq!(order, [4, 3, 2, 1, 0].map(|index: usize| blocks[index]));
}

#[test]
fn blocks_whose_time_has_ended_are_evicted_first_from_their_tail() {
    let (mut pool, now) = (BlockPool::new(4), Instant::now());
    let blocks = allocate(&mut pool, 4);
    blocks.iter().for_each(|&block| pool.retain(block));
    pool.keep(&blocks[2..], now + Duration::from_secs(1), 0);
    blocks.iter().rev().for_each(|&block| pool.release(block));
    pool.end_kept(now);
    assert_eq!(pool.kept_blocks(), 2);
    pool.end_kept(now + Duration::from_secs(1));
    pool.check();
    assert_eq!(pool.kept_blocks(), 0);
    let order: Vec<_> = (0..4).map(|_| evict(&mut pool)).collect();
    assert_eq!(order, [3, 2, 1, 0].map(|index: usize| blocks[index]));
}

#[test]
fn kept_block_that_is_held_again_stays_kept() {
    let (mut pool, now) = (BlockPool::new(3), Instant::now());
    let blocks = allocate(&mut pool, 3);
    blocks.iter().for_each(|&block| pool.retain(block));
    pool.keep(&blocks[..2], now + Duration::from_secs(1), 0);
    blocks.iter().rev().for_each(|&block| pool.release(block));
    pool.hold(blocks[0]);
    pool.check();
    assert_eq!(pool.kept_blocks(), 1);
    pool.release(blocks[0]);
    pool.check();
    assert_eq!(pool.kept_blocks(), 2);
    assert_eq!([evict(&mut pool), evict(&mut pool)], [blocks[2], blocks[1]]);
    // The time of a group may end before its blocks are released.
    pool.hold(blocks[0]);
    pool.end_kept(now + Duration::from_secs(1));
    pool.release(blocks[0]);
    pool.check();
    assert_eq!((pool.kept_blocks(), pool.counts().cached), (0, 1));
}

#[test]
fn common_prefix_is_kept_until_the_latest_time_of_its_conversations() {
    let (mut pool, now) = (BlockPool::new(3), Instant::now());
    let after = |seconds| now + Duration::from_secs(seconds);
    let blocks = allocate(&mut pool, 3);
    blocks.iter().for_each(|&block| pool.retain(block));
    // Block 0 begins two conversations: blocks 0 and 1 at place 5, blocks 0 and 2 at place 6.
    pool.keep(&blocks[..2], after(9), 5);
    pool.keep(&[blocks[0], blocks[2]], after(4), 6);
    blocks.iter().rev().for_each(|&block| pool.release(block));
    pool.end_kept(after(4));
    pool.check();
    assert_eq!(pool.kept_blocks(), 2);
    // The next turn of the first conversation is the last: no other conversation keeps its block 1.
    blocks[..2].iter().for_each(|&block| pool.hold(block));
    pool.stop_keeping(&blocks[..2], 5);
    blocks[..2].iter().rev().for_each(|&block| pool.release(block));
    pool.check();
    assert_eq!(pool.kept_blocks(), 1);
    pool.end_kept(after(9));
    assert_eq!(pool.kept_blocks(), 0);
}

#[test]
fn groups_without_cached_blocks_are_not_searched() {
    let (mut pool, until) = (BlockPool::new(3), Instant::now() + Duration::from_secs(1));
    let blocks = allocate(&mut pool, 3);
    blocks.iter().for_each(|&block| pool.retain(block));
    for (&block, place) in blocks.iter().zip([3, 2, 1]) {
        pool.keep(&[block], until, place);
    }
    assert_eq!((pool.kept.len(), pool.evictable_groups.len()), (3, 0), "the blocks are held");
    blocks.iter().for_each(|&block| pool.release(block));
    assert_eq!(pool.evictable_groups.len(), 3);
    pool.hold(blocks[0]);
    assert_eq!(evict(&mut pool), blocks[1], "the conversation that arrived last");
    assert_eq!((pool.kept.len(), pool.evictable_groups.len()), (2, 1));
}

#[test]
fn turns_that_return_or_whose_blocks_are_evicted_leave_no_group() {
    let (mut pool, now) = (BlockPool::new(2), Instant::now());
    let blocks = allocate(&mut pool, 2);
    blocks.iter().for_each(|&block| pool.retain(block));
    for turn in 0..5000 {
        pool.keep(&blocks[..1], now + Duration::from_secs(600 + turn), turn % 7);
        pool.release(blocks[0]);
        pool.hold(blocks[0]);
        pool.check();
    }
    pool.keep(&blocks[1..], now + Duration::from_secs(1), 9);
    assert_eq!((pool.kept.len(), pool.kept_until.len()), (2, 2));
    blocks.iter().for_each(|&block| pool.release(block));
    assert_eq!(pool.kept_blocks(), 2);
    evict(&mut pool);
    evict(&mut pool);
    assert_eq!((pool.kept.len(), pool.kept_until.len()), (0, 0));
}

#[test]
fn block_that_a_save_reads_is_not_evicted() {
    let mut pool = BlockPool::new(3);
    let blocks = allocate(&mut pool, 3);
    blocks.iter().for_each(|&block| pool.retain(block));
    pool.begin_copy(blocks[0]);
    blocks.iter().for_each(|&block| pool.release(block));
    assert_eq!(pool.available(), 2);
    let mut evicted = Vec::new();
    assert_eq!(pool.take(3, HELD, &mut evicted), None);
    assert_eq!(pool.take(1, HELD, &mut evicted), Some(vec![blocks[1]]));
    pool.check();
    pool.end_copy(blocks[0]);
    assert_eq!(pool.take(1, HELD, &mut evicted), Some(vec![blocks[0]]), "its place was kept");
    pool.check();
}

#[test]
fn a_reservation_becomes_held_or_free_and_never_cached() {
    let mut pool = BlockPool::new(2);
    let blocks = pool.take(2, RESERVED, &mut Vec::new()).expect("two are free");
    pool.accept(blocks[0], OWNER);
    pool.cancel_reservation(blocks[1], OWNER);
    assert_eq!(pool.counts(), BlockCounts { free: 1, cached: 0, held: 1, reserved: 0 });
    pool.check();
}

#[test]
#[should_panic(expected = "unpin it before releasing its reference")]
fn the_last_reference_cannot_be_released_while_dma_is_in_flight() {
    let mut pool = BlockPool::new(1);
    let block = allocate(&mut pool, 1)[0];
    pool.pin(block);
    pool.release(block);
}

#[test]
#[should_panic(expected = "cannot be held")]
fn a_reserved_block_cannot_be_held() {
    let mut pool = BlockPool::new(1);
    let block = pool.take(1, RESERVED, &mut Vec::new()).expect("one is free")[0];
    pool.hold(block);
}

#[derive(Clone, Debug)]
enum Operation {
    Allocate(u32),
    Reserve(u32),
    Hold(usize),
    Release(usize),
    Retain(usize),
    Pin(usize),
    Unpin(usize),
    Accept(usize),
    Cancel(usize),
    BeginCopy(usize),
    EndCopy(usize),
    Keep(usize, u64),
    StopKeeping(u64),
    EndKept(u64),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        (0..4u32).prop_map(Operation::Allocate),
        (0..4u32).prop_map(Operation::Reserve),
        any::<usize>().prop_map(Operation::Hold),
        any::<usize>().prop_map(Operation::Release),
        any::<usize>().prop_map(Operation::Retain),
        any::<usize>().prop_map(Operation::Pin),
        any::<usize>().prop_map(Operation::Unpin),
        any::<usize>().prop_map(Operation::Accept),
        any::<usize>().prop_map(Operation::Cancel),
        any::<usize>().prop_map(Operation::BeginCopy),
        any::<usize>().prop_map(Operation::EndCopy),
        (any::<usize>(), 0..9u64).prop_map(|(index, until)| Operation::Keep(index, until)),
        (0..5u64).prop_map(Operation::StopKeeping),
        (0..9u64).prop_map(Operation::EndKept),
    ]
}

proptest! {
    #[test]
    fn counts_lists_and_states_agree_after_any_operations(
        operations in prop::collection::vec(operation(), 0..200),
    ) {
        let (mut pool, start) = (BlockPool::new(9), Instant::now());
        // Model of the pool: block -> (references, pins).
        let mut held: Vec<(BlockId, u32, u32)> = Vec::new();
        let mut reserved: Vec<BlockId> = Vec::new();
        let mut copying: Vec<BlockId> = Vec::new();
        for operation in operations {
            let pick = |index: usize, len: usize| (len > 0).then(|| index % len);
            match operation {
                Operation::Allocate(count) => {
                    let available = pool.available();
                    match pool.take(count, HELD, &mut Vec::new()) {
                        Some(blocks) => held.extend(blocks.iter().map(|&block| (block, 1, 0))),
                        None => prop_assert!(available < count),
                    }
                }
                Operation::Reserve(count) => {
                    if let Some(blocks) = pool.take(count, RESERVED, &mut Vec::new()) {
                        reserved.extend(blocks);
                    }
                }
                Operation::Hold(index) => {
                    if let Some(index) = pick(index, held.len()) {
                        pool.hold(held[index].0);
                        held[index].1 += 1;
                    }
                }
                Operation::Release(index) => {
                    if let Some(index) = pick(index, held.len())
                        && held[index].2 < held[index].1
                    {
                        pool.release(held[index].0);
                        held[index].1 -= 1;
                        if held[index].1 == 0 {
                            held.swap_remove(index);
                        }
                    }
                }
                Operation::Retain(index) => {
                    if let Some(index) = pick(index, held.len()) {
                        pool.retain(held[index].0);
                    }
                }
                Operation::Pin(index) => {
                    if let Some(index) = pick(index, held.len())
                        && held[index].2 < held[index].1
                    {
                        pool.pin(held[index].0);
                        held[index].2 += 1;
                    }
                }
                Operation::Unpin(index) => {
                    if let Some(index) = pick(index, held.len())
                        && held[index].2 > 0
                    {
                        pool.unpin(held[index].0);
                        held[index].2 -= 1;
                    }
                }
                Operation::Accept(index) => {
                    if let Some(index) = pick(index, reserved.len()) {
                        let block = reserved.swap_remove(index);
                        pool.accept(block, OWNER);
                        held.push((block, 1, 0));
                    }
                }
                Operation::Cancel(index) => {
                    if let Some(index) = pick(index, reserved.len()) {
                        pool.cancel_reservation(reserved.swap_remove(index), OWNER);
                    }
                }
                Operation::BeginCopy(index) => {
                    let block = BlockId((index % 9) as u32);
                    if pool.is_retained(block) && !pool.is_copying(block) {
                        pool.begin_copy(block);
                        copying.push(block);
                    }
                }
                Operation::Keep(index, until) => {
                    let blocks: Vec<_> = held.iter().map(|&(block, ..)| block).collect();
                    let until = start + Duration::from_secs(until);
                    pool.keep(&blocks[pick(index, blocks.len()).unwrap_or(0)..], until, index as u64 % 5);
                }
                Operation::StopKeeping(place) => {
                    let blocks: Vec<_> = held.iter().map(|&(block, ..)| block).collect();
                    pool.stop_keeping(&blocks, place);
                }
                Operation::EndKept(until) => pool.end_kept(start + Duration::from_secs(until)),
                Operation::EndCopy(index) => {
                    if let Some(index) = pick(index, copying.len()) {
                        pool.end_copy(copying.swap_remove(index));
                    }
                }
            }
            pool.check();
            for &(block, refs, pins) in &held {
                prop_assert_eq!(pool.state(block), BlockState::Held { refs });
                prop_assert_eq!(pool.pins(block), pins);
            }
            for &block in &copying {
                prop_assert!(pool.is_retained(block), "a save reads block {}", block.0);
            }
        }
    }
}
