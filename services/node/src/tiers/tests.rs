//! The disk tier over blocks in host memory, and the tiers that a node leaves out.

use std::{fs::OpenOptions, os::unix::fs::FileExt};

use config::LoadInput;
use engine::{
    event::{BlockHash, SequenceId},
    tiers::{BlockContents, LoadBlock, SaveSource},
};
use kernels::{BLOCK_TOKENS, BlockId, KvFormat, KvGroups, KvLayout};

use super::*;

const WITHIN: Duration = Duration::from_secs(20);

/// Returns an arena whose blocks are whole pages.
fn arena() -> Arc<KvArena> {
    arena_of(32)
}

fn arena_of(head_dim: usize) -> Arc<KvArena> {
    let layout = KvLayout { layer_count: 2, kv_head_count: 2, head_dim, format: KvFormat::F32 };
    KvArena::host(layout, 8).unwrap()
}

fn config(path: &std::path::Path) -> Config {
    let flags = [
        ("tier.disk_path", path.to_str().unwrap()),
        ("tier.disk_size", "1MiB"),
        ("tier.admission", "always"),
    ];
    let flags = flags.map(|(key, value)| (key.into(), value.into())).into();
    Config::load(LoadInput { flags, ..LoadInput::default() }).unwrap()
}

fn start(path: &std::path::Path, arena: &Arc<KvArena>) -> (TierCopies, Receiver<TierEvent>) {
    let tiers =
        OpenTiers::open(&config(path), arena, &KvGroups::default()).expect("the file can be used");
    TierCopies::start(tiers, arena, CollectWaker::default()).expect("the threads can start")
}

/// Returns the blocks that the tier has from an earlier start.
fn recovered(events: &Receiver<TierEvent>) -> Vec<RecoveredBlock> {
    let mut found = Vec::new();
    loop {
        match events.recv_timeout(WITHIN).unwrap() {
            TierEvent::Recovered { blocks, is_complete, .. } => {
                found.extend(blocks);
                if is_complete {
                    return found;
                }
            }
            event => panic!("unexpected {event:?}"),
        }
    }
}

#[test]
fn headers_that_cannot_be_read_do_not_hide_the_blocks_of_other_slots() {
    let read = |slots: Range<SlotIndex>, is_bad: fn(SlotIndex) -> bool| {
        let block = |slot: SlotIndex| match is_bad(slot) {
            true => Err(io::Error::other(format!("slot {slot}"))),
            false => Ok(slot.is_multiple_of(2).then(|| stored(slot, slot.into()))),
        };
        let mut all: Vec<SlotIndex> = Vec::new();
        let found = |blocks: Vec<RecoveredBlock>| {
            all.extend(blocks.iter().map(|block| block.slot));
            true
        };
        let result = read_headers(slots, &AtomicBool::new(false), block, found);
        (all, result.err().map(|error| error.to_string()))
    };
    assert_eq!(read(0..7, |_| false), (vec![0, 2, 4, 6], None));
    let error = |slot| Some(format!("slot {slot}"));
    assert_eq!(read(0..7, |slot| slot == 3), (vec![0, 2, 4, 6], error(3)));
    // A thread gives up after eight errors, but reports what it has found.
    assert_eq!(read(0..100, |slot| slot > 4), (vec![0, 2, 4], error(12)));
    let most = 2 * RECOVERED_MAX as SlotIndex;
    let (slots, error) = read(0..most + 2, |slot| slot == 0);
    assert_eq!((slots.len(), error), (RECOVERED_MAX, Some("slot 0".to_owned())));
}

/// Returns the block with this key, as the tests save it: odd keys are those of the second group.
fn stored(slot: SlotIndex, key: u128) -> RecoveredBlock {
    RecoveredBlock { slot, key: BlockHash(key), group: (key % 2) as u8 }
}

fn contents(key: u128) -> BlockContents {
    let RecoveredBlock { key, group, .. } = stored(0, key);
    let (parent, tokens) = (BlockHash(key.0 + 100), [key.0 as u32; BLOCK_TOKENS]);
    BlockContents { key, parent, tokens, group }
}

fn save(job: u64, key: u128, block: u32) -> SaveJob {
    let (job, slot, block) = (JobId(job), block, BlockId(block));
    let (tier, source) = (Tier::Disk, SaveSource::Block(block));
    SaveJob { job, tier, slot, source, contents: contents(key) }
}

fn load(job: u64, slots: &[(SlotIndex, u128)]) -> LoadJob {
    let blocks = slots.iter().zip(4..).map(|(&(slot, key), block)| {
        let (tier, block) = (Tier::Disk, BlockId(block));
        LoadBlock { tier, slot, block, contents: contents(key) }
    });
    LoadJob { job: JobId(job), id: SequenceId(1), blocks: blocks.collect() }
}

#[test]
fn saved_blocks_are_loaded_bit_for_bit_after_a_restart() {
    save_and_load(&arena());
}

#[test]
fn saved_blocks_that_are_not_whole_pages_are_loaded_bit_for_bit() {
    save_and_load(&arena_of(10));
}

fn save_and_load(arena: &Arc<KvArena>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv");
    let (copies, events) = start(&path, arena);
    assert_eq!(recovered(&events), []);
    for block in 0..3 {
        let mut write = arena.write(BlockId(block)).unwrap();
        let bytes = write.host_view_mut().unwrap();
        bytes.iter_mut().zip(0..).for_each(|(byte, at): (_, u32)| *byte = (at * 7 + block) as u8);
        drop(write);
        assert_eq!(copies.save(save(block.into(), u128::from(block) + 10, block)), None);
        let mut taken: Vec<_> = (0..2).map(|_| events.recv_timeout(WITHIN).unwrap()).collect();
        taken.sort_by_key(|event| matches!(event, TierEvent::Saved { .. }));
        let job = JobId(block.into());
        assert_eq!(taken, [TierEvent::Copied { job }, TierEvent::Saved { job }]);
    }
    drop(copies);
    let (copies, events) = start(&path, arena);
    let mut found = recovered(&events);
    found.sort_unstable_by_key(|block| block.slot);
    assert_eq!(found, [10, 11, 12].map(|key| stored(key as u32 - 10, key)));
    assert_eq!(copies.load(load(9, &[(0, 10), (1, 11), (2, 12)])), None);
    let TierEvent::Loaded { job: JobId(9), intact: 3, .. } = events.recv_timeout(WITHIN).unwrap()
    else {
        panic!("three blocks are intact");
    };
    for block in 0..3 {
        let read = |block| arena.read(BlockId(block)).unwrap();
        let (saved, loaded) = (read(block), read(block + 4));
        assert_eq!(saved.host_view(), loaded.host_view());
    }
}

/// Saves blocks 0 and 1 under the keys 10 and 11.
fn save_two(copies: &TierCopies, events: &Receiver<TierEvent>) {
    for block in 0..2 {
        assert_eq!(copies.save(save(block.into(), u128::from(block) + 10, block)), None);
        (0..2).for_each(|_| _ = events.recv_timeout(WITHIN).unwrap());
    }
}

#[test]
fn load_ends_before_the_first_block_that_the_tier_does_not_have() {
    let folder = tempfile::tempdir().unwrap();
    let (path, arena) = (folder.path().join("kv"), arena());
    let (copies, events) = start(&path, &arena);
    recovered(&events);
    save_two(&copies, &events);
    assert_eq!(copies.load(load(9, &[(0, 10), (1, 99), (0, 10)])), None);
    let event = events.recv_timeout(WITHIN).unwrap();
    assert!(matches!(event, TierEvent::Loaded { intact: 1, .. }), "{event:?}");
}

#[test]
fn block_that_a_load_found_damaged_is_not_found_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (path, arena) = (folder.path().join("kv"), arena());
    let (copies, events) = start(&path, &arena);
    recovered(&events);
    save_two(&copies, &events);
    // The first page of the file and the header of the first slot come before its block.
    let (mut byte, at) = ([0], 2 * 4096);
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    file.sync_all().unwrap();
    assert_eq!(copies.load(load(9, &[(0, 10)])), None);
    let event = events.recv_timeout(WITHIN).unwrap();
    assert!(matches!(event, TierEvent::Loaded { intact: 0, .. }), "{event:?}");
    drop(copies);
    let (_copies, events) = start(&path, &arena);
    assert_eq!(recovered(&events), [stored(1, 11)]);
}

#[test]
fn disk_that_becomes_read_only_fails_saves_and_serves_loads() {
    let folder = tempfile::tempdir().unwrap();
    let (path, arena) = (folder.path().join("kv"), arena());
    let (copies, events) = start(&path, &arena);
    recovered(&events);
    assert_eq!(copies.save(save(0, 10, 0)), None);
    (0..2).for_each(|_| _ = events.recv_timeout(WITHIN).unwrap());
    drop(copies);
    let started = start_with(&path, &arena, |disk| disk.read_only(&path));
    let (copies, events) = started.expect("the threads can start");
    assert_eq!(recovered(&events), [stored(0, 10)]);
    assert_eq!(copies.save(save(1, 11, 1)), None);
    let mut taken: Vec<_> = (0..2).map(|_| events.recv_timeout(WITHIN).unwrap()).collect();
    taken.sort_by_key(|event| matches!(event, TierEvent::SaveFailed { .. }));
    let job = JobId(1);
    assert_eq!(taken, [TierEvent::Copied { job }, TierEvent::SaveFailed { job }]);
    assert_eq!(copies.load(load(9, &[(0, 10)])), None);
    let event = events.recv_timeout(WITHIN).unwrap();
    assert!(matches!(event, TierEvent::Loaded { intact: 1, .. }), "{event:?}");
}

#[test]
fn saves_and_loads_do_not_wait_for_threads_that_hang() {
    let folder = tempfile::tempdir().unwrap();
    let (copies, events) = start(&folder.path().join("kv"), &arena());
    recovered(&events);
    // Nobody takes the results. So the threads hang when the queue of events is full.
    let queued = events.clone();
    let (refused, is_refused) = bounded(1);
    let engine = thread::spawn(move || {
        let mut job = 0;
        while queued.len() < EVENTS_MAX {
            job += 1;
            copies.save(save(job, 10, 0));
            thread::yield_now();
        }
        let fails = |event: Option<TierEvent>| event.is_some();
        let saves = (1..=100).filter(|number| fails(copies.save(save(job + number, 10, 0))));
        let saves = saves.count();
        let loads = (1..=100).filter(|&number| fails(copies.load(load(number, &[(0, 10)]))));
        refused.send((saves, loads.count())).unwrap();
        copies
    });
    let (saves, loads) = is_refused.recv_timeout(WITHIN).expect("no call waits");
    assert!(saves > 0 && loads > 0, "the queues are full: {saves} {loads}");
    drop(events);
    drop(engine.join().unwrap());
}

#[test]
fn failed_copies_do_not_end_the_saves() {
    let folder = tempfile::tempdir().unwrap();
    let (path, arena) = (folder.path().join("kv"), arena());
    let (copies, events) = start(&path, &arena);
    recovered(&events);
    let write = arena.write(BlockId(0)).unwrap();
    for number in 0..=tiers::SAVES_MAX as u64 {
        assert_eq!(copies.save(save(number, 10, 0)), None);
        let event = events.recv_timeout(WITHIN).unwrap();
        assert_eq!(event, TierEvent::SaveFailed { job: JobId(number) });
    }
    drop(write);
    assert_eq!(copies.save(save(99, 10, 0)), None);
    let event = events.recv_timeout(WITHIN).unwrap();
    assert_ne!(event, TierEvent::SaveFailed { job: JobId(99) });
}

#[test]
fn cancelled_save_fails_before_its_copy_and_later_saves_succeed() {
    let folder = tempfile::tempdir().unwrap();
    let (copies, events) = start(&folder.path().join("kv"), &arena());
    recovered(&events);
    copies.cancel_saves(JobId(5));
    assert_eq!(copies.save(save(5, 10, 0)), None);
    let event = events.recv_timeout(WITHIN).unwrap();
    assert_eq!(event, TierEvent::SaveFailed { job: JobId(5) });
    assert_eq!(copies.save(save(6, 10, 0)), None);
    let taken: Vec<_> = (0..2).map(|_| events.recv_timeout(WITHIN).unwrap()).collect();
    assert!(taken.contains(&TierEvent::Saved { job: JobId(6) }), "{taken:?}");
}

#[test]
fn load_without_a_thread_ends_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (mut copies, _events) = start(&folder.path().join("kv"), &arena());
    copies.disk.as_mut().expect("the disk tier is on").loads.stop();
    let Some(TierEvent::Loaded { job: JobId(9), intact: 0, .. }) =
        copies.load(load(9, &[(0, 10), (1, 11)]))
    else {
        panic!("the load fails");
    };
}

#[test]
fn opening_on_a_hung_file_system_times_out() {
    let (resume, hung) = bounded::<()>(0);
    let open = move || {
        let _ = hung.recv_timeout(WITHIN);
        Err(DiskError::InUse)
    };
    let error = open_within(Duration::ZERO, open).unwrap_err().to_string();
    assert_eq!(error, "cannot open it: the file system did not answer within 0 s");
    drop(resume);
}

#[test]
fn headers_that_are_read_for_long_are_reported() {
    let (reader, all_have_ended) = bounded(0);
    let mut is_reported = false;
    report_if_slow(&all_have_ended, Duration::ZERO, || is_reported = true);
    assert!(is_reported, "a thread reads");
    drop(reader);
    report_if_slow(&all_have_ended, WITHIN, || panic!("all threads have ended"));
}

/// Starts the tiers with a changed disk.
fn start_with(
    path: &std::path::Path,
    arena: &Arc<KvArena>,
    change: impl FnOnce(DiskFile) -> DiskFile,
) -> Option<(TierCopies, Receiver<TierEvent>)> {
    let mut tiers =
        OpenTiers::open(&config(path), arena, &KvGroups::default()).expect("the file can be used");
    tiers.disk = tiers.disk.map(change);
    TierCopies::start(tiers, arena, CollectWaker::default())
}

#[test]
fn disk_without_memory_for_buffers_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let (path, arena) = (folder.path().join("kv"), arena());
    assert!(start_with(&path, &arena, DiskFile::with_endless_slots).is_none());
    // The file is closed.
    let (copies, events) = start(&path, &arena);
    assert!(copies.config().disk_slots > 0);
    assert_eq!(recovered(&events), []);
}

#[test]
fn unusable_file_leaves_the_node_without_the_tier() {
    let folder = tempfile::tempdir().unwrap();
    let arena = arena();
    let missing = folder.path().join("none/kv");
    assert!(OpenTiers::open(&config(&missing), &arena, &KvGroups::default()).is_none());
    assert!(OpenTiers::open(&Config::default(), &arena, &KvGroups::default()).is_none());
    let usable = config(&folder.path().join("kv"));
    assert!(OpenTiers::open(&usable, &arena, &KvGroups::default()).is_some());
    let mut on_host = Config::default();
    on_host.tier.host_memory = config::ByteSize::mib(1);
    assert!(
        OpenTiers::open(&on_host, &arena, &KvGroups::default()).is_none(),
        "the arena is in host memory"
    );
}
