//! Test nodes: transfers, an arena and the received events.

use std::{
    any::Any,
    collections::BTreeMap,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, unbounded};
use kernels::{
    BlockId, BlockRead, BlockWrite, KvArena, KvFormat, KvLayout,
    arena::RemoteBlocks,
    offload::{BlockOffload, CopiedBlocks, OffloadStream},
    peer::{
        ChannelEnd, PeerBlocks, PeerChannel, PeerChannels, PeerMemory, TransferInFlight, WaitLimit,
    },
    sampling::SampledToken,
};
use kv_transfer::{
    ClusterSecret, TransferConfig, TransferLimits, Transfers, TransportConfig,
    api::{Command, Epoch, Event, Identity, PeerAddress, TransferId},
    config::LEASE,
};

pub(crate) const SECRET: &str = "the secret of these tests";
pub(crate) const BLOCK_COUNT: u32 = 256;
/// Time-out of every wait in these tests; far above every asserted bound.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(10);

static NEXT: AtomicU64 = AtomicU64::new(1);

/// Returns a number that is unique in this process.
pub(crate) fn fresh() -> u128 {
    NEXT.fetch_add(1, Ordering::Relaxed).into()
}

/// 16 KiB per block.
pub(crate) fn layout() -> KvLayout {
    KvLayout { layer_count: 4, kv_head_count: 2, head_dim: 16, format: KvFormat::F32 }
}

pub(crate) fn identity() -> Identity {
    Identity {
        model_fingerprint: 0xfeed,
        weight_version: 1,
        kv_layout: layout().to_string(),
        block_size: 16,
        dtype: "f32".to_owned(),
        tp: 1,
        protocol_min: kv_transfer::control::PROTOCOL_MIN,
        protocol_max: kv_transfer::control::PROTOCOL_MAX,
    }
}

pub(crate) fn config(name: &str, secret: &str, identity: Identity) -> TransferConfig {
    TransferConfig {
        node_id: name.to_owned(),
        epoch: Epoch((std::process::id() as u128) << 64 | fresh()),
        identity,
        secret: ClusterSecret::new(secret).unwrap(),
        control_bind: "127.0.0.1:0".parse().unwrap(),
        data_bind: "127.0.0.1:0".parse().unwrap(),
        advertise_host: "127.0.0.1".to_owned(),
        // Several chunks per transfer: eight blocks each.
        limits: TransferLimits { chunk_bytes_max: 128 << 10, ..TransferLimits::default() },
        transport: TransportConfig::default(),
        host: Some("this host".to_owned()),
        tls: None,
    }
}

/// Fake device memory: it can be copied but not accessed directly.
struct FakeDeviceMemory {
    bytes: Mutex<Vec<u8>>,
    /// How peers access the blocks, if they can.
    reach: Option<Reach>,
}

/// Simulated access of the processes of one host to each other's GPU memory.
#[derive(Clone, Debug)]
pub(crate) struct Reach {
    /// While false, copies stay in flight.
    pub open: Arc<AtomicBool>,
    /// Started copies.
    pub begun: Arc<AtomicU64>,
    /// Mapped memories and joined communicators.
    pub reached: Arc<AtomicU64>,
    /// Reason why mapping the memory of peers fails.
    pub refused: Option<&'static str>,
    /// Reason why communicators are rejected.
    pub apart: Option<&'static str>,
    /// Reason why joining a communicator fails.
    pub fails: Option<&'static str>,
    /// Whether sends complete at once.
    pub hasty: bool,
    /// Whether joining hangs until the caller gives up.
    pub hangs: bool,
    /// Started joins.
    pub joining: Arc<AtomicU64>,
    /// Reason why communicators cannot be created, reported on first use.
    pub unloaded: Option<&'static str>,
    /// Whether communicators are unavailable from the start.
    pub channelless: bool,
    /// Whether copies corrupt a byte.
    pub damages: bool,
    /// Rate of the probe transfer of communicators, in bytes/s.
    pub probed_rate: u64,
}

impl Default for Reach {
    fn default() -> Self {
        Self {
            open: Arc::new(AtomicBool::new(true)),
            begun: Arc::default(),
            reached: Arc::default(),
            refused: None,
            apart: None,
            fails: None,
            hasty: false,
            hangs: false,
            joining: Arc::default(),
            unloaded: None,
            channelless: false,
            damages: false,
            probed_rate: 128_000_000_000,
        }
    }
}

/// Exported memories of this process, by the number in the export.
static EXPORTED: Mutex<BTreeMap<u64, Weak<FakeDeviceMemory>>> = Mutex::new(BTreeMap::new());

impl RemoteBlocks for FakeDeviceMemory {
    fn layout(&self) -> KvLayout {
        layout()
    }

    fn block_count(&self) -> u32 {
        BLOCK_COUNT
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
        Some(Arc::new(ImmediateCopies))
    }

    fn peer_memory(self: Arc<Self>) -> Option<Arc<dyn PeerMemory>> {
        let reach = self.reach.clone()?;
        Some(Arc::new(Reachable { blocks: self, reach }))
    }

    fn peer_channels(self: Arc<Self>) -> Option<Arc<dyn PeerChannels>> {
        let reach = self.reach.clone().filter(|reach| !reach.channelless)?;
        Some(Arc::new(Joining { reach }))
    }
}

/// Copies to and from host memory that end before the call returns.
struct ImmediateCopies;

impl BlockOffload for ImmediateCopies {
    fn pin(&self, _: &Arc<KvArena>, _: u32, _: u32) -> Result<Box<dyn Any + Send>, String> {
        Ok(Box::new(()))
    }

    fn stream(&self) -> Result<Box<dyn OffloadStream>, String> {
        Ok(Box::new(ImmediateCopies))
    }
}

impl OffloadStream for ImmediateCopies {
    fn copy(
        &mut self,
        from: Vec<BlockRead>,
        mut to: Vec<BlockWrite>,
    ) -> Result<Box<dyn TransferInFlight<CopiedBlocks>>, String> {
        for (from, to) in from.iter().zip(&mut to) {
            let mut bytes = vec![0; from.byte_count()];
            from.copy_to_host(&mut bytes).map_err(|error| error.to_string())?;
            to.copy_from_host(&bytes).map_err(|error| error.to_string())?;
        }
        Ok(Box::new(EndedCopy(from.into_iter().zip(to).collect())))
    }
}

struct EndedCopy(Vec<CopiedBlocks>);

impl TransferInFlight<CopiedBlocks> for EndedCopy {
    fn is_done(&mut self) -> Result<bool, String> {
        Ok(true)
    }

    fn finish(self: Box<Self>) -> Result<Vec<CopiedBlocks>, String> {
        Ok(self.0)
    }
}

struct Joining {
    reach: Reach,
}

/// State shared by the two ranks of a fake communicator: each operation waits for its peer.
#[derive(Default)]
struct FakeChannel {
    /// Blocks of each sent chunk until it is received.
    sent: Mutex<BTreeMap<u64, Vec<Vec<u8>>>>,
    received: AtomicU64,
    joined: AtomicU64,
}

static JOINTS: Mutex<BTreeMap<u64, Arc<FakeChannel>>> = Mutex::new(BTreeMap::new());

impl PeerChannels for Joining {
    fn open(&self) -> Result<(), String> {
        Ok(())
    }

    fn prepare(&self) -> Result<(), String> {
        Ok(())
    }

    fn invite(&self, _: Option<u32>) -> Result<Vec<u8>, String> {
        if let Some(reason) = self.reach.unloaded {
            return Err(reason.to_owned());
        }
        let number = fresh() as u64;
        JOINTS.lock().unwrap().insert(number, Arc::default());
        Ok(number.to_be_bytes().to_vec())
    }

    fn accept(&self, invitation: &[u8], _: Option<u32>) -> Result<Vec<u8>, String> {
        self.reach.apart.map_or(Ok(answer_to(invitation)), |reason| Err(reason.to_owned()))
    }

    fn join(
        &self,
        (invitation, answer): (&[u8], &[u8]),
        _: ChannelEnd,
        limit: WaitLimit<'_>,
    ) -> Result<Arc<dyn PeerChannel>, String> {
        self.reach.joining.fetch_add(1, Ordering::AcqRel);
        if let Some(reason) = self.reach.fails {
            return Err(reason.to_owned());
        }
        while self.reach.hangs && !(limit.cancelled)() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(answer, answer_to(invitation), "both ends have the receiver's answer");
        let number = u64::from_be_bytes(invitation.try_into().map_err(|_| "no invitation")?);
        let joint = JOINTS.lock().unwrap().get(&number).cloned().ok_or("no invitation")?;
        joint.joined.fetch_add(1, Ordering::AcqRel);
        while joint.joined.load(Ordering::Acquire) < 2 {
            if Instant::now() >= limit.deadline || (limit.cancelled)() {
                return Err("the peer did not join".to_owned());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.reach.reached.fetch_add(1, Ordering::AcqRel);
        let (reach, operations) = (self.reach.clone(), AtomicU64::new(0));
        Ok(Arc::new(JointEnd { joint, reach, operations, aborted: Arc::default() }))
    }
}

fn answer_to(invitation: &[u8]) -> Vec<u8> {
    invitation.iter().map(|byte| !byte).collect()
}

struct JointEnd {
    joint: Arc<FakeChannel>,
    reach: Reach,
    operations: AtomicU64,
    /// Set for this rank only: the peer detects it by a time-out.
    aborted: Arc<AtomicBool>,
}

/// One rank's half of an operation.
struct PendingOperation<B> {
    joint: Arc<FakeChannel>,
    reach: Reach,
    number: u64,
    runs: Vec<u32>,
    blocks: Option<Vec<B>>,
    aborted: Arc<AtomicBool>,
    receive: fn(&mut PendingOperation<B>) -> Result<bool, String>,
    done: bool,
}

impl JointEnd {
    fn half<B>(
        &self,
        runs: &[u32],
        blocks: Vec<B>,
        receive: fn(&mut PendingOperation<B>) -> Result<bool, String>,
    ) -> Result<PendingOperation<B>, String> {
        assert_eq!(runs.iter().sum::<u32>() as usize, blocks.len());
        if self.aborted.load(Ordering::Acquire) {
            return Err("the channel was aborted".to_owned());
        }
        self.reach.begun.fetch_add(1, Ordering::Release);
        Ok(PendingOperation {
            joint: self.joint.clone(),
            reach: self.reach.clone(),
            number: self.operations.fetch_add(1, Ordering::AcqRel),
            runs: runs.to_vec(),
            blocks: Some(blocks),
            aborted: self.aborted.clone(),
            receive,
            done: false,
        })
    }
}

impl PeerChannel for JointEnd {
    fn send(
        &self,
        runs: &[u32],
        blocks: Vec<BlockRead>,
    ) -> Result<Box<dyn TransferInFlight<BlockRead>>, String> {
        let half = self.half(runs, blocks, |half| {
            Ok(half.reach.hasty || half.joint.received.load(Ordering::Acquire) > half.number)
        })?;
        let mut bytes = Vec::new();
        for block in half.blocks.iter().flatten() {
            let mut copy = vec![0; block.byte_count()];
            block.copy_to_host(&mut copy).map_err(|error| error.to_string())?;
            bytes.push(copy);
        }
        self.joint.sent.lock().unwrap().insert(half.number, bytes);
        Ok(Box::new(half))
    }

    fn receive(
        &self,
        runs: &[u32],
        blocks: Vec<BlockWrite>,
    ) -> Result<Box<dyn TransferInFlight<BlockWrite>>, String> {
        let half = self.half(runs, blocks, |half: &mut PendingOperation<BlockWrite>| {
            let Some(bytes) = half.joint.sent.lock().unwrap().remove(&half.number) else {
                return Ok(false);
            };
            for (to, mut copy) in half.blocks.iter_mut().flatten().zip(bytes) {
                copy[0] ^= u8::from(half.reach.damages);
                to.copy_from_host(&copy).map_err(|error| error.to_string())?;
            }
            half.joint.received.store(half.number + 1, Ordering::Release);
            Ok(true)
        })?;
        Ok(Box::new(half))
    }

    fn probed_rate(&self) -> u64 {
        self.reach.probed_rate
    }

    fn abort(&self) -> Result<(), String> {
        self.aborted.store(true, Ordering::Release);
        Ok(())
    }
}

impl<B: Send + 'static> TransferInFlight<B> for PendingOperation<B> {
    fn is_done(&mut self) -> Result<bool, String> {
        if self.aborted.load(Ordering::Acquire) {
            return Err("the channel was aborted".to_owned());
        }
        if !self.done && self.reach.open.load(Ordering::Acquire) {
            self.done = (self.receive)(self)?;
        }
        Ok(self.done)
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<B>, String> {
        assert!(self.done, "it was done");
        assert!(!self.runs.is_empty());
        Ok(self.blocks.take().unwrap_or_default())
    }
}

impl<B> Drop for PendingOperation<B> {
    fn drop(&mut self) {
        if self.blocks.is_some() {
            self.aborted.store(true, Ordering::Release);
        }
    }
}

struct Reachable {
    blocks: Arc<FakeDeviceMemory>,
    reach: Reach,
}

impl PeerMemory for Reachable {
    fn export(&self) -> Result<Vec<u8>, String> {
        let number = fresh() as u64;
        EXPORTED.lock().unwrap().insert(number, Arc::downgrade(&self.blocks));
        Ok(number.to_be_bytes().to_vec())
    }

    fn import(&self, export: &[u8]) -> Result<Box<dyn PeerBlocks>, String> {
        if let Some(reason) = self.reach.refused {
            return Err(reason.to_owned());
        }
        let number = u64::from_be_bytes(export.try_into().map_err(|_| "not an export")?);
        let exported = EXPORTED.lock().unwrap().get(&number).and_then(Weak::upgrade);
        let from = exported.ok_or("unknown export")?;
        self.reach.reached.fetch_add(1, Ordering::AcqRel);
        Ok(Box::new(ReachedBlocks { from, reach: self.reach.clone() }))
    }
}

struct ReachedBlocks {
    from: Arc<FakeDeviceMemory>,
    reach: Reach,
}

impl PeerBlocks for ReachedBlocks {
    fn pull(
        &mut self,
        from: &[BlockId],
        to: Vec<BlockWrite>,
    ) -> Result<Box<dyn TransferInFlight<BlockWrite>>, String> {
        let sources = from.to_vec();
        self.reach.begun.fetch_add(1, Ordering::Release);
        Ok(Box::new(Copying { memory: self.from.clone(), sources, to, reach: self.reach.clone() }))
    }
}

struct Copying {
    memory: Arc<FakeDeviceMemory>,
    sources: Vec<BlockId>,
    to: Vec<BlockWrite>,
    reach: Reach,
}

impl TransferInFlight<BlockWrite> for Copying {
    fn is_done(&mut self) -> Result<bool, String> {
        if !self.reach.open.load(Ordering::Acquire) {
            return Ok(false);
        }
        for (source, to) in self.sources.drain(..).zip(&mut self.to) {
            let mut copy = vec![0; to.byte_count()];
            self.memory.read(source.index() * copy.len(), &mut copy)?;
            copy[0] ^= u8::from(self.reach.damages);
            to.copy_from_host(&copy).map_err(|error| error.to_string())?;
        }
        Ok(true)
    }

    fn finish(self: Box<Self>) -> Result<Vec<BlockWrite>, String> {
        assert!(self.sources.is_empty(), "it was done");
        Ok(self.to)
    }
}

pub(crate) struct Node {
    pub transfers: Transfers,
    pub arena: Arc<KvArena>,
    pub events: Receiver<Event>,
    pub address: PeerAddress,
}

impl Node {
    pub(crate) fn start(name: &str) -> Self {
        Self::start_with(name, SECRET, identity())
    }

    pub(crate) fn start_with(name: &str, secret: &str, identity: Identity) -> Self {
        Self::start_in(name, secret, identity, layout())
    }

    pub(crate) fn start_in(name: &str, secret: &str, identity: Identity, layout: KvLayout) -> Self {
        Self::start_on(name, secret, identity, KvArena::host(layout, BLOCK_COUNT).unwrap())
    }

    /// Starts a node with blocks in fake device memory.
    pub(crate) fn start_remote(name: &str) -> Self {
        Self::start_on(name, SECRET, identity(), elsewhere(None))
    }

    /// Starts a node with blocks in fake device memory that peers can access.
    pub(crate) fn start_reaching(name: &str, reach: Reach, transport: TransportConfig) -> Self {
        Self::start_reaching_on(Some("this host"), name, reach, transport)
    }

    /// Starts such a node on another host, by its id.
    pub(crate) fn start_reaching_on(
        host: Option<&str>,
        name: &str,
        reach: Reach,
        transport: TransportConfig,
    ) -> Self {
        let host = host.map(str::to_owned);
        let config = TransferConfig { transport, host, ..config(name, SECRET, identity()) };
        Self::start_of(config, elsewhere(Some(reach)))
    }

    fn start_on(name: &str, secret: &str, identity: Identity, arena: Arc<KvArena>) -> Self {
        Self::start_of(config(name, secret, identity), arena)
    }

    pub(crate) fn start_of(config: TransferConfig, arena: Arc<KvArena>) -> Self {
        let (sender, events) = unbounded();
        let (name, epoch) = (config.node_id.clone(), config.epoch);
        let transfers = Transfers::start(config, Arc::clone(&arena), sender).unwrap();
        let address = PeerAddress {
            node_id: name,
            epoch,
            control_endpoint: transfers.control_endpoint().to_owned(),
        };
        Self { transfers, arena, events, address }
    }

    pub(crate) fn receive(
        &self,
        transfer: TransferId,
        peer: &Node,
        first_block: u32,
        blocks: &[BlockId],
    ) {
        self.receive_from(transfer, peer.address.clone(), first_block, blocks);
    }

    pub(crate) fn receive_from(
        &self,
        transfer: TransferId,
        peer: PeerAddress,
        first_block: u32,
        blocks: &[BlockId],
    ) {
        let command = Command::Receive {
            transfer,
            peer,
            prompt_hash: transfer.0,
            first_block,
            blocks: blocks.to_vec(),
            answer_timeout: LEASE,
            deadline: WAIT_TIMEOUT,
            traceparent: "00-receive".to_owned(),
        };
        self.transfers.command(command).unwrap();
    }

    pub(crate) fn expect(&self, transfer: TransferId, peer: &Node) {
        self.expect_from(transfer, peer.address.clone());
    }

    pub(crate) fn expect_from(&self, transfer: TransferId, peer: PeerAddress) {
        let command = Command::Send {
            transfer,
            peer,
            prompt_hash: transfer.0,
            deadline: WAIT_TIMEOUT,
            traceparent: "00-expect".to_owned(),
        };
        self.transfers.command(command).unwrap();
    }

    pub(crate) fn written(&self, transfer: TransferId, first_block: u32, blocks: &[BlockId]) {
        let blocks = blocks.to_vec();
        self.transfers.command(Command::Written { transfer, first_block, blocks }).unwrap();
    }

    pub(crate) fn finish(&self, transfer: TransferId) {
        let token = SampledToken { id: 42, logprobs: None, pooled: None };
        self.transfers.command(Command::Finish { transfer, first_index: 3, token }).unwrap();
    }

    pub(crate) fn event(&self) -> Event {
        self.events
            .recv_timeout(WAIT_TIMEOUT)
            .unwrap_or_else(|_| panic!("no event comes: {:?}", self.transfers.metrics()))
    }

    /// Writes a pattern that depends on the transfer and the prompt's block.
    pub(crate) fn compute(&self, transfer: TransferId, first_block: u32, blocks: &[BlockId]) {
        for (index, block) in blocks.iter().enumerate() {
            let pattern = pattern(transfer, first_block + index as u32);
            let mut guard = self.arena.write(*block).unwrap();
            guard.copy_from_host(&pattern).unwrap();
        }
    }

    pub(crate) fn assert_holds(&self, transfer: TransferId, first_block: u32, blocks: &[BlockId]) {
        for (index, block) in blocks.iter().enumerate() {
            let guard = self.arena.read(*block).unwrap();
            let expected = pattern(transfer, first_block + index as u32);
            let mut found = vec![0; expected.len()];
            guard.copy_to_host(&mut found).unwrap();
            assert!(found == expected, "{block:?} of {transfer}");
        }
    }

    /// Asserts that no guard is held.
    pub(crate) fn assert_free(&self) {
        for block in 0..BLOCK_COUNT {
            assert_eq!(self.arena.pins(BlockId(block)).unwrap(), 0, "block {block}");
        }
    }
}

pub(crate) fn elsewhere(reach: Option<Reach>) -> Arc<KvArena> {
    let bytes = Mutex::new(vec![0; layout().block_bytes() * BLOCK_COUNT as usize]);
    KvArena::remote(Arc::new(FakeDeviceMemory { bytes, reach })).unwrap()
}

pub(crate) fn blocks(range: std::ops::Range<u32>) -> Vec<BlockId> {
    range.map(BlockId).collect()
}

fn pattern(transfer: TransferId, block: u32) -> Vec<u8> {
    let mut state = transfer.0 as u64 ^ (u64::from(block) << 32) ^ 0x9e37_79b9_7f4a_7c15;
    let mut bytes = Vec::with_capacity(layout().block_bytes());
    while bytes.len() < layout().block_bytes() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        bytes.extend_from_slice(&state.to_be_bytes());
    }
    bytes
}

/// Runs one complete transfer. Returns how long the receiver waited.
pub(crate) fn run_transfer(
    sender: &Node,
    receiver: &Node,
    from: &[BlockId],
    to: &[BlockId],
) -> Duration {
    let transfer = TransferId(fresh());
    let start = Instant::now();
    sender.expect(transfer, receiver);
    receiver.receive(transfer, sender, 0, to);
    match sender.event() {
        Event::Ready { transfer: ready, .. } => assert_eq!(ready, transfer),
        other => panic!("{other:?}"),
    }
    sender.compute(transfer, 0, from);
    sender.written(transfer, 0, from);
    sender.finish(transfer);
    match receiver.event() {
        Event::Arrived { transfer: arrived, .. } => assert_eq!(arrived, transfer),
        other => panic!("{other:?}"),
    }
    let elapsed = start.elapsed();
    receiver.assert_holds(transfer, 0, to);
    assert!(matches!(sender.event(), Event::Delivered { .. }));
    elapsed
}
