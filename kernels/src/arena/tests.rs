use std::thread;

use super::*;
use crate::layout::KvFormat;

fn layout() -> KvLayout {
    KvLayout { layer_count: 2, kv_head_count: 1, head_dim: 4, format: KvFormat::F32 }
}

fn arena(blocks: u32) -> Arc<KvArena> {
    KvArena::host(layout(), blocks).unwrap()
}

fn is_send<T: Send>(_: &T) {}

#[test]
fn a_new_arena_is_zeroed_and_free() {
    let arena = arena(3);
    for id in 0..3 {
        assert_eq!(arena.pins(BlockId(id)).unwrap(), 0);
        let guard = arena.read(BlockId(id)).unwrap();
        assert!(guard.host_view().unwrap().iter().all(|&byte| byte == 0));
    }
}

#[test]
fn populate_keeps_contents_and_guards() {
    let arena = arena(300);
    arena.write(BlockId(1)).unwrap().host_view_mut().unwrap().fill(7);
    let guard = arena.write(BlockId(2)).unwrap();
    for (first, count) in [(0, 300), (7, 1), (299, 1), (300, 0), (0, 0)] {
        match arena.populate(first, count) {
            Ok(()) => {}
            // Some systems cannot populate pages.
            Err(error) => eprintln!("not populated: {error}"),
        }
    }
    drop(guard);
    let view = arena.read(BlockId(1)).unwrap();
    assert!(view.host_view().unwrap().iter().all(|&byte| byte == 7));
}

#[test]
#[should_panic(expected = "the arena has 3")]
fn populate_beyond_the_arena_panics() {
    let _ = arena(3).populate(2, 2);
}

#[test]
fn readers_share_and_a_writer_is_rejected_with_the_block_id() {
    let arena = arena(2);
    let first = arena.read(BlockId(1)).unwrap();
    let second = arena.read(BlockId(1)).unwrap();
    assert_eq!(arena.pins(BlockId(1)).unwrap(), 2);
    let error = arena.write(BlockId(1)).unwrap_err();
    assert_eq!(error.to_string(), "cannot borrow block 1 for writing: it is being read by 2");
    drop((first, second));
    arena.write(BlockId(1)).unwrap();
}

#[test]
fn a_writer_excludes_other_borrows_until_dropped() {
    let arena = arena(2);
    let mut guard = arena.write(BlockId(0)).unwrap();
    is_send(&guard);
    assert_eq!(arena.pins(BlockId(0)).unwrap(), 1);
    let read = arena.read(BlockId(0)).unwrap_err();
    assert_eq!(read.to_string(), "cannot borrow block 0 for reading: it is being written");
    assert!(matches!(
        arena.write(BlockId(0)),
        Err(ArenaError::Conflict { block: BlockId(0), wanted: Borrow::Write, .. })
    ));
    guard.host_view_mut().unwrap().fill(7);
    drop(guard);
    assert!(arena.read(BlockId(0)).unwrap().host_view().unwrap().iter().all(|&byte| byte == 7));
    assert!(arena.read(BlockId(1)).unwrap().host_view().unwrap().iter().all(|&byte| byte == 0));
}

#[test]
fn an_id_out_of_range_is_an_error_everywhere() {
    let arena = arena(2);
    for id in [2, u32::MAX] {
        let block = BlockId(id);
        assert!(matches!(arena.read(block), Err(ArenaError::OutOfRange { .. })));
        assert!(matches!(arena.write(block), Err(ArenaError::OutOfRange { .. })));
        assert!(matches!(arena.pins(block), Err(ArenaError::OutOfRange { .. })));
    }
    assert_eq!(
        arena.read(BlockId(2)).unwrap_err().to_string(),
        "block 2 is out of range: the arena has 2"
    );
}

#[test]
fn copies_need_exactly_one_block_of_bytes() {
    let arena = arena(1);
    let bytes: Vec<u8> = (0..arena.block_bytes()).map(|i| i as u8).collect();
    let mut guard = arena.write(BlockId(0)).unwrap();
    assert!(matches!(guard.copy_from_host(&bytes[1..]), Err(ArenaError::LengthMismatch { .. })));
    guard.copy_from_host(&bytes).unwrap();
    drop(guard);
    let guard = arena.read(BlockId(0)).unwrap();
    let mut back = vec![0; bytes.len()];
    guard.copy_to_host(&mut back).unwrap();
    assert_eq!(back, bytes);
    assert!(guard.copy_to_host(&mut back[1..]).is_err());
}

struct FakeDeviceMemory(std::sync::Mutex<Vec<u8>>);

impl RemoteBlocks for FakeDeviceMemory {
    fn layout(&self) -> KvLayout {
        layout()
    }

    fn block_count(&self) -> u32 {
        4
    }

    fn read(&self, offset: usize, host: &mut [u8]) -> Result<(), String> {
        host.copy_from_slice(&self.0.lock().unwrap()[offset..offset + host.len()]);
        Ok(())
    }

    fn write(&self, offset: usize, host: &[u8]) -> Result<(), String> {
        self.0.lock().unwrap()[offset..offset + host.len()].copy_from_slice(host);
        Ok(())
    }
}

#[test]
fn digest_covers_contents_and_order_in_any_memory() {
    let here = arena(4);
    let remote = FakeDeviceMemory(vec![0; 4 * here.block_bytes()].into());
    let there = KvArena::remote(Arc::new(remote)).unwrap();
    for (block, other) in [(0, 2), (1, 3), (3, 0)] {
        let bytes: Vec<u8> = (0..here.block_bytes()).map(|at| (at + block) as u8).collect();
        here.write(BlockId(block as u32)).unwrap().copy_from_host(&bytes).unwrap();
        there.write(BlockId(other)).unwrap().copy_from_host(&bytes).unwrap();
    }
    let of = |arena: &Arc<KvArena>, blocks: &[u32]| {
        let mut guards: Vec<_> =
            blocks.iter().map(|block| arena.write(BlockId(*block)).unwrap()).collect();
        let written = BlockWrite::digest(&mut guards).unwrap();
        drop(guards);
        let guards: Vec<_> =
            blocks.iter().map(|block| arena.read(BlockId(*block)).unwrap()).collect();
        assert_eq!(BlockRead::digest(&guards).unwrap(), written);
        let each = BlockRead::digests(&guards).unwrap();
        let alone = |guard| BlockRead::digest(slice::from_ref(guard)).unwrap();
        assert_eq!(each, guards.iter().map(alone).collect::<Vec<_>>());
        drop(guards);
        let mut guards: Vec<_> =
            blocks.iter().map(|block| arena.write(BlockId(*block)).unwrap()).collect();
        assert_eq!(BlockWrite::digests(&mut guards).unwrap(), each);
        written
    };
    assert_eq!(of(&here, &[0, 1, 3]), of(&there, &[2, 3, 0]));
    assert_ne!(of(&here, &[0, 1, 3]), of(&there, &[3, 2, 0]));
    assert_ne!(of(&here, &[0, 1]), of(&there, &[2, 3, 0]));
    assert_eq!(of(&here, &[]), 0);
}

#[test]
fn invalid_arena_sizes_are_rejected() {
    assert!(matches!(KvArena::host(layout(), 0), Err(ArenaError::BadSize { .. })));
    for layer_count in [usize::MAX >> 12, usize::MAX] {
        let huge = KvLayout { layer_count, ..layout() };
        assert!(matches!(KvArena::host(huge, u32::MAX), Err(ArenaError::BadSize { .. })));
    }
    // The size in bytes would wrap to a small number.
    let wrapping =
        KvLayout { layer_count: (1 << 57) + 1, kv_head_count: 1, head_dim: 4, ..layout() };
    assert!(matches!(KvArena::host(wrapping, 1), Err(ArenaError::BadSize { .. })));
    let empty = KvLayout { layer_count: 0, ..layout() };
    assert_eq!(
        KvArena::host(empty, 4).unwrap_err().to_string(),
        "cannot create an arena of 4 blocks (layers=0 halves=kv heads=1 tokens=16 dim=4): it has no \
         bytes"
    );
}

#[test]
fn a_guard_keeps_the_arena_alive() {
    let arena = arena(1);
    let weak = Arc::downgrade(&arena);
    let guard = arena.read(BlockId(0)).unwrap();
    drop(arena);
    assert_eq!(guard.host_view().unwrap().len(), guard.byte_count());
    drop(guard);
    assert!(weak.upgrade().is_none());
}

/// Writers fill a block with one number. A reader that saw two numbers would have read during a
/// write.
#[test]
fn concurrent_borrowers_never_see_a_torn_block() {
    const ROUNDS: usize = 500;
    let arena = arena(2);
    let (arena, both) = (&arena, |round: usize| BlockId((round % 2) as u32));
    thread::scope(|scope| {
        for thread in 0..2 {
            scope.spawn(move || {
                for round in thread..ROUNDS + thread {
                    let mut guard = until_free(|| arena.write(both(round)));
                    guard.host_view_mut().unwrap().fill(round as u8);
                }
            });
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let guard = until_free(|| arena.read(both(round)));
                    let bytes = guard.host_view().unwrap();
                    assert!(bytes.iter().all(|byte| byte == &bytes[0]));
                }
            });
        }
    });
    assert_eq!(arena.pins(BlockId(0)).unwrap() + arena.pins(BlockId(1)).unwrap(), 0);
}

fn until_free<T>(borrow: impl Fn() -> Result<T, ArenaError>) -> T {
    loop {
        match borrow() {
            Ok(guard) => return guard,
            Err(error) => {
                assert!(matches!(error, ArenaError::Conflict { .. }), "{error}");
                thread::yield_now();
            }
        }
    }
}
