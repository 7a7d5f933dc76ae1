//! The host tier over blocks that are outside host memory as those of a GPU are.

use std::{sync::Mutex, time::Duration};

use config::TierAdmission;
use engine::{
    event::{BlockHash, SequenceId},
    executor::CollectWaker,
    tiers::{JobId, LoadBlock, LoadJob},
};
use kernels::{BLOCK_TOKENS, KvFormat, KvLayout, arena::RemoteBlocks, offload::BlockOffload};

use super::{
    super::{OpenTiers, TierCopies, open_host},
    *,
};

const WITHIN: Duration = Duration::from_secs(20);
const LAYOUT: KvLayout =
    KvLayout { layer_count: 2, kv_head_count: 2, head_dim: 32, format: KvFormat::F32 };
const BLOCKS: u32 = 150;
/// Without a reserve, the tests also pass on a machine with little free memory.
const LIMITS: PinLimits =
    PinLimits { share: None, nodes: 1, slice_bytes: SLICE_BYTES, reserve_bytes: 0 };

/// Blocks that are reached by copies only.
struct DeviceBlocks {
    bytes: Mutex<Vec<u8>>,
    copies: FakeCopies,
}

impl RemoteBlocks for DeviceBlocks {
    fn layout(&self) -> KvLayout {
        LAYOUT
    }

    fn block_count(&self) -> u32 {
        2 * BLOCKS
    }

    fn read(&self, offset: usize, host: &mut [u8]) -> Result<(), String> {
        host.copy_from_slice(&self.bytes.lock().unwrap()[offset..offset + host.len()]);
        Ok(())
    }

    fn write(&self, offset: usize, host: &[u8]) -> Result<(), String> {
        self.bytes.lock().unwrap()[offset..offset + host.len()].copy_from_slice(host);
        Ok(())
    }

    fn offload(self: Arc<Self>) -> Option<Arc<dyn BlockOffload>> {
        Some(Arc::new(self.copies.clone()))
    }
}

#[derive(Clone)]
struct FakeCopies {
    /// Receives a permit for each slice that can be pinned. Without a sender nothing more can be
    /// pinned.
    pins: Receiver<()>,
    /// `None`: copies end at once.
    gate: Option<Gate>,
}

/// Reports each call that starts the copies of a batch, and receives a permit for its return and
/// one for the end of the copies.
#[derive(Clone)]
struct Gate {
    begun: Sender<()>,
    returns: Receiver<()>,
    ends: Receiver<()>,
}

impl BlockOffload for FakeCopies {
    fn pin(&self, _: &Arc<KvArena>, _: u32, _: u32) -> Result<Box<dyn Any + Send>, String> {
        match self.pins.recv_timeout(WITHIN) {
            Ok(()) => Ok(Box::new(())),
            Err(_) => Err("out of memory".to_owned()),
        }
    }

    fn stream(&self) -> Result<Box<dyn OffloadStream>, String> {
        Ok(Box::new(self.clone()))
    }
}

impl OffloadStream for FakeCopies {
    fn copy(&mut self, from: Vec<BlockRead>, mut to: Vec<BlockWrite>) -> Result<Copy, String> {
        let mut bytes = vec![0; LAYOUT.block_bytes()];
        for (from, to) in from.iter().zip(&mut to) {
            from.copy_to_host(&mut bytes).map_err(|error| error.to_string())?;
            to.copy_from_host(&bytes).map_err(|error| error.to_string())?;
        }
        let ends = self.gate.as_ref().map(|gate| {
            gate.begun.send(()).unwrap();
            gate.returns.recv_timeout(WITHIN).unwrap();
            gate.ends.clone()
        });
        Ok(Box::new(Copied { blocks: from.into_iter().zip(to).collect(), ends }))
    }
}

/// A driver that cannot create streams.
struct NoStreams;

impl BlockOffload for NoStreams {
    fn pin(&self, _: &Arc<KvArena>, _: u32, _: u32) -> Result<Box<dyn Any + Send>, String> {
        unreachable!("without a stream nothing is pinned")
    }

    fn stream(&self) -> Result<Box<dyn OffloadStream>, String> {
        Err("out of memory".to_owned())
    }
}

struct Copied {
    blocks: Vec<CopiedBlocks>,
    ends: Option<Receiver<()>>,
}

impl TransferInFlight<CopiedBlocks> for Copied {
    fn is_done(&mut self) -> Result<bool, String> {
        Ok(true)
    }

    fn finish(self: Box<Self>) -> Result<Vec<CopiedBlocks>, String> {
        match self.ends.map(|ends| ends.recv_timeout(WITHIN)) {
            None | Some(Ok(())) => Ok(self.blocks),
            Some(Err(error)) => Err(error.to_string()),
        }
    }
}

fn contents(key: u32) -> BlockContents {
    let (key, parent) = (BlockHash(key.into()), BlockHash(u128::from(key) + 1000));
    BlockContents { key, parent, tokens: [key.0 as u32; BLOCK_TOKENS], group: 0 }
}

fn kv(block: u32) -> Vec<u8> {
    (0..LAYOUT.block_bytes()).map(|at| (at * 7 + at / 256) as u8 ^ block as u8).collect()
}

/// Returns blocks for which this number of slices can be pinned.
fn device(slices: usize) -> Arc<KvArena> {
    let (permits, pins) = bounded(slices);
    (0..slices).for_each(|_| permits.send(()).unwrap());
    device_with(pins, None)
}

fn device_with(pins: Receiver<()>, gate: Option<Gate>) -> Arc<KvArena> {
    let bytes = Mutex::new(vec![0; 2 * BLOCKS as usize * LAYOUT.block_bytes()]);
    KvArena::remote(Arc::new(DeviceBlocks { bytes, copies: FakeCopies { pins, gate } })).unwrap()
}

fn events() -> (Events, Receiver<TierEvent>) {
    let (queue, events) = bounded(256);
    let cancelled = Arc::new(AtomicU64::new(0));
    (Events { queue, waker: CollectWaker::default(), cancelled }, events)
}

fn memory(arena: &Arc<KvArena>) -> HostMemory {
    HostMemory::new(arena, BLOCKS).expect("the blocks are remote").unwrap()
}

struct Node {
    arena: Arc<KvArena>,
    memory: HostMemory,
    tier: HostTier,
    events: Receiver<TierEvent>,
    /// See [`Events::cancelled`].
    cancelled: Arc<AtomicU64>,
}

impl Node {
    fn start(arena: Arc<KvArena>, limits: PinLimits) -> Self {
        let (memory, (sender, events)) = (memory(&arena), events());
        let stopping = Arc::new(AtomicBool::new(false));
        let tier = HostTier::start(&memory, limits, &arena, &sender, &stopping).unwrap();
        Self { arena, memory, tier, events, cancelled: sender.cancelled }
    }

    /// Starts a tier, and saves the first blocks to slots in the opposite order.
    fn with_saved_blocks() -> Self {
        let this = Self::start(device(1), LIMITS);
        assert_eq!(this.event(), TierEvent::Grown { tier: Tier::Host, slots: BLOCKS });
        (0..BLOCKS).for_each(|block| this.save(block, BLOCKS - 1 - block));
        this
    }

    fn event(&self) -> TierEvent {
        self.events.recv_timeout(WITHIN).unwrap()
    }

    /// Fills a block, and saves it to a slot.
    fn save(&self, block: u32, slot: SlotIndex) {
        let job = self.start_save(block, slot);
        assert_eq!(self.event(), TierEvent::Saved { job });
    }

    fn start_save(&self, block: u32, slot: SlotIndex) -> JobId {
        self.arena.write(BlockId(block)).unwrap().copy_from_host(&kv(block)).unwrap();
        let (tier, source) = (Tier::Host, SaveSource::Block(BlockId(block)));
        let job = JobId(block.into());
        let save = SaveJob { job, tier, slot, source, contents: contents(block) };
        assert!(self.tier.save(save));
        job
    }

    /// Loads all saved blocks, and returns how many of them are intact.
    fn load(&self) -> u32 {
        self.load_slots((0..BLOCKS).map(|block| (block, BLOCKS - 1 - block)))
    }

    /// Loads saved blocks from their slots, and returns how many of them are intact.
    fn load_slots(&self, slots: impl IntoIterator<Item = (u32, SlotIndex)>) -> u32 {
        self.load_as(slots.into_iter().map(|(block, slot)| (block, slot, contents(block))))
    }

    /// Loads blocks that should have these contents, and returns how many of them are intact.
    fn load_as(&self, slots: impl IntoIterator<Item = (u32, SlotIndex, BlockContents)>) -> u32 {
        let blocks = slots.into_iter().map(|(block, slot, contents)| {
            let (tier, block) = (Tier::Host, BlockId(BLOCKS + block));
            LoadBlock { tier, slot, block, contents }
        });
        let load = LoadJob { job: JobId(1000), id: SequenceId(1), blocks: blocks.collect() };
        assert_eq!(self.tier.load(&Arc::new(SharedLoad::new(load))), None);
        let TierEvent::Loaded { intact, .. } = self.event() else { panic!("the load ends") };
        intact
    }

    /// Flips one bit of the slot of a block.
    fn damage(&self, block: u32) {
        self.flip(block, LAYOUT.block_bytes() - 1);
    }

    fn flip(&self, block: u32, byte: usize) {
        let mut slot = self.memory.slots.write(BlockId(BLOCKS - 1 - block)).unwrap();
        slot.host_view_mut().unwrap()[byte] ^= 1;
    }
}

#[test]
fn memory_without_room_for_a_block_or_beyond_the_limit_leaves_the_node_without_the_tier() {
    let arena = device(0);
    let opens = |bytes, limit| open_host(bytes, limit, &arena).is_some();
    let block = LAYOUT.block_bytes() as u64;
    assert!(opens(block, None) && opens(block, Some(block)));
    assert!(!opens(block - 1, None) && !opens(block, Some(block - 1)));
}

#[test]
fn slots_of_pinned_slices_are_used_while_other_slices_wait_or_fail() {
    let (permits, pins) = bounded(1);
    let slots = BLOCKS / 3;
    let limits = PinLimits { slice_bytes: slots as usize * LAYOUT.block_bytes(), ..LIMITS };
    // The start does not wait for the first slice.
    let node = Node::start(device_with(pins, None), limits);
    assert!(node.events.try_recv().is_err(), "no slice is pinned");
    permits.send(()).unwrap();
    assert_eq!(node.event(), TierEvent::Grown { tier: Tier::Host, slots });
    (0..slots).for_each(|block| node.save(block, block));
    assert_eq!(node.load_slots((0..slots).map(|block| (block, block))), slots);
    drop(permits);
    let Node { tier, events, .. } = node;
    // Joins the thread that pins.
    drop(tier);
    assert!(events.try_recv().is_err(), "the tier does not grow further");
}

#[test]
fn memory_that_cannot_be_pinned_has_no_slots_and_the_reason_is_reported() {
    // A share of 1 MiB, which this process uses already.
    let used = Some(MemoryShare { limit: 1 << 40, nodes_per_container: 1 << 20 });
    let left = "the memory that is left; expected free memory, ";
    for (slices, limits, reason) in [
        (1, PinLimits { share: used, ..LIMITS }, left),
        // More nodes than any machine has memory for.
        (1, PinLimits { nodes: u32::MAX, ..LIMITS }, left),
        // A larger reserve than any machine has memory.
        (1, PinLimits { reserve_bytes: 1 << 50, ..LIMITS }, left),
        (0, LIMITS, "out of memory; expected free memory, "),
    ] {
        let (sender, events) = events();
        let is_stopping = AtomicBool::new(false);
        let pinned = pin(&memory(&device(slices)), limits, &sender, &is_stopping);
        assert!(pinned.slices.is_empty() && events.try_recv().is_err());
        let failure = pinned.failure.expect("nothing is pinned");
        assert!(failure.starts_with("cannot pin more than 0 bytes of tier.host_memory: "));
        assert!(failure.contains(reason), "{failure}");
    }
}

#[test]
fn tier_without_streams_is_left_out() {
    let arena = device(0);
    let host = Some(HostMemory { offload: Arc::new(NoStreams), ..memory(&arena) });
    let (admission, pin_limits) = (TierAdmission::Always, LIMITS);
    let tiers = OpenTiers { host, disk: None, admission, sessions: true, pin_limits };
    assert!(TierCopies::start(tiers, &arena, CollectWaker::default()).is_none());
}

#[test]
fn cancelled_save_fails_before_its_copy_and_later_saves_succeed() {
    let node = Node::start(device(1), LIMITS);
    assert_eq!(node.event(), TierEvent::Grown { tier: Tier::Host, slots: BLOCKS });
    node.cancelled.store(4, Ordering::Relaxed);
    let job = node.start_save(3, 3);
    assert_eq!(node.event(), TierEvent::SaveFailed { job });
    node.save(4, 4);
    assert_eq!(node.load_slots([(3, 3)]), 0);
    assert_eq!(node.load_slots([(4, 4)]), 1);
}

#[test]
fn cancelled_saves_wait_for_the_oldest_batch_of_copies_only() {
    let (permits, pins) = bounded(1);
    permits.send(()).unwrap();
    let ((begun, begins), (end, ends)) = (bounded(BATCHES), bounded(BATCHES));
    let (may_return, returns) = bounded(1);
    let node = Node::start(device_with(pins, Some(Gate { begun, returns, ends })), LIMITS);
    assert_eq!(node.event(), TierEvent::Grown { tier: Tier::Host, slots: BLOCKS });
    // Each save is queued before the thread looks for more work, so that every batch in flight has
    // one save.
    let mut copying = vec![node.start_save(0, 0)];
    for block in 1..BATCHES as u32 {
        begins.recv_timeout(WITHIN).unwrap();
        copying.push(node.start_save(block, block));
        may_return.send(()).unwrap();
    }
    begins.recv_timeout(WITHIN).unwrap();
    // More saves than a batch has.
    let blocks = BATCHES as u32..HOST_SAVES_MAX as u32;
    assert!(blocks.len() > save_batch(LAYOUT.block_bytes()));
    let queued: Vec<_> = blocks.map(|block| node.start_save(block, block)).collect();
    node.cancelled.store(HOST_SAVES_MAX as u64, Ordering::Relaxed);
    may_return.send(()).unwrap();
    end.send(()).unwrap();
    assert_eq!(node.event(), TierEvent::Saved { job: copying[0] });
    for job in queued {
        assert_eq!(node.event(), TierEvent::SaveFailed { job });
    }
    for &job in &copying[1..] {
        end.send(()).unwrap();
        assert_eq!(node.event(), TierEvent::Saved { job });
    }
}

#[test]
fn batch_of_saves_has_4_mib_if_its_blocks_fit_the_queue() {
    for (block_bytes, blocks) in
        [(5 << 20, 1), (4 << 20, 1), (3 << 20, 2), (2 << 20, 2), (512 << 10, 8), (16 << 10, 16)]
    {
        assert_eq!(save_batch(block_bytes), blocks, "{block_bytes} bytes");
    }
}

#[test]
fn saved_blocks_are_loaded_bit_for_bit() {
    let node = Node::with_saved_blocks();
    assert_eq!(node.load(), BLOCKS);
    let mut found = vec![0; LAYOUT.block_bytes()];
    for block in 0..BLOCKS {
        node.arena.read(BlockId(BLOCKS + block)).unwrap().copy_to_host(&mut found).unwrap();
        assert_eq!(found, kv(block), "block {block}");
    }
}

#[test]
fn load_ends_before_the_first_damaged_slot() {
    for first in [140, 128, 127, 5, 0] {
        let node = Node::with_saved_blocks();
        node.damage(first);
        node.damage(145);
        assert_eq!(node.load(), first);
    }
}

#[test]
fn every_flipped_byte_and_every_other_block_is_a_miss() {
    const BLOCK: u32 = 3;
    const SLOT: SlotIndex = BLOCKS - 1 - BLOCK;
    let node = Node::with_saved_blocks();
    for byte in (0..LAYOUT.block_bytes()).step_by(97) {
        node.flip(BLOCK, byte);
        assert_eq!(node.load_slots([(BLOCK, SLOT)]), 0, "byte {byte}");
        node.flip(BLOCK, byte);
    }
    let own = contents(BLOCK);
    let other_key = BlockContents { key: BlockHash(99), ..own };
    let other_parent = BlockContents { parent: BlockHash(99), ..own };
    let other_tokens = BlockContents { tokens: [99; BLOCK_TOKENS], ..own };
    for other in [other_key, other_parent, other_tokens] {
        assert_eq!(node.load_as([(BLOCK, SLOT, other)]), 0, "{other:?}");
    }
    assert_eq!(node.load_slots([(BLOCK, SLOT)]), 1);
}

#[test]
fn damaged_slot_is_not_copied_to_the_disk() {
    let node = Node::with_saved_blocks();
    node.damage(3);
    let mut copy = vec![0; LAYOUT.block_bytes()];
    let mut copied = |block| node.memory.copy(BLOCKS - 1 - block, &contents(block), &mut copy);
    assert_eq!(copied(4), Ok(()));
    assert!(copied(3).unwrap_err().contains("is damaged"));
    assert!(node.memory.copy(0, &contents(0), &mut copy).is_err(), "another block");
}
