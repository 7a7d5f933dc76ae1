//! The transport of one process: its connections, its chunks in flight and their contents.
//!
//! Asserts that no chunk is written to a block after its transfer has ended, that no chunk is read
//! from such a block, and that the arrived blocks hold the KV of the prompt.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use engine::executor::sim::{SimArena, SimBlock, block_after, kv_of};
use kernels::{BLOCK_TOKENS, BlockId, KvGroups};
use kv_transfer::{
    TransferKind,
    api::{Command, Epoch, Event, PeerAddress, TransferId},
    control::ControlMessage,
    driver::ControlLinks,
    protocol::DataEvent,
    transport::{ChunkId, DataError, Released, Transport},
};
use simulation_base::mix;

use crate::process_io::Output;

pub(crate) struct SimTransport {
    name: String,
    /// The node's KV; `None` if KV is neither kept nor checked.
    arena: Option<SimArena>,
    groups: KvGroups,
    /// Actions for the network.
    pub outputs: Vec<Output>,
    /// Peers that may connect.
    admitted: BTreeSet<Epoch>,
    /// How often the connections with each peer were closed here.
    closings: BTreeMap<Epoch, u64>,
    /// Expected KV of each transfer's prompt.
    prompts: BTreeMap<TransferId, Vec<u64>>,
    /// Transfers without their final event. Each may access these blocks; the value is the block's
    /// number among the blocks of the prompt that are sent.
    registered: BTreeMap<TransferId, BTreeMap<BlockId, u32>>,
    posted: BTreeMap<(TransferId, u32), Vec<BlockId>>,
    /// Receives whose chunk has begun to arrive.
    writing: BTreeMap<(TransferId, u32), Vec<BlockId>>,
    sending: BTreeMap<(TransferId, u32), (Epoch, Vec<BlockId>)>,
}

/// A chunk in flight between two processes.
#[derive(Clone, Debug)]
pub(crate) struct ChunkData {
    pub transfer: TransferId,
    pub chunk: u32,
    pub block_count: usize,
    /// Empty if the nodes keep no KV.
    pub contents: Vec<SimBlock>,
}

impl SimTransport {
    pub(crate) fn new(name: String, arena: Option<SimArena>, groups: KvGroups) -> Self {
        Self {
            name,
            arena,
            groups,
            outputs: Vec::new(),
            admitted: BTreeSet::new(),
            closings: BTreeMap::new(),
            prompts: BTreeMap::new(),
            registered: BTreeMap::new(),
            posted: BTreeMap::new(),
            writing: BTreeMap::new(),
            sending: BTreeMap::new(),
        }
    }

    /// Returns whether the peer may connect.
    pub(crate) fn admits(&self, peer: Epoch) -> bool {
        self.admitted.contains(&peer)
    }

    /// Returns the number of the current connection with this peer. Each close begins another
    /// number.
    pub(crate) fn connection(&self, peer: Epoch) -> u64 {
        self.closings.get(&peer).copied().unwrap_or(0)
    }

    pub(crate) fn expect_prompt(
        &mut self,
        transfer: TransferId,
        prompt: &[u32],
        weight_version: u64,
    ) {
        if self.arena.is_some() {
            self.prompts.insert(transfer, kv_of(prompt, weight_version));
        }
    }

    /// Tracks a command. Must be called before the core handles the command.
    pub(crate) fn on_command(&mut self, command: &Command) {
        if self.arena.is_none() {
            return;
        }
        match command {
            Command::Receive { transfer, first_block, blocks, .. } => {
                let blocks = blocks.iter().copied().zip(*first_block..);
                self.registered.insert(*transfer, blocks.collect());
            }
            Command::Send { transfer, .. } => {
                self.registered.insert(*transfer, BTreeMap::new());
            }
            // The transfer may have ended meanwhile.
            Command::Written { transfer, first_block, blocks } => {
                if let Some(registered) = self.registered.get_mut(transfer) {
                    registered.extend(blocks.iter().copied().zip(*first_block..));
                }
            }
            Command::Finish { .. }
            | Command::Abort { .. }
            | Command::ChangeWeights { .. }
            | Command::Connect { .. } => {}
        }
    }

    /// Tracks an event. Must be called for every event of the core.
    pub(crate) fn on_event(&mut self, event: &Event) {
        let Some(arena) = &self.arena else { return };
        match event {
            Event::Ready { .. } => {}
            Event::Arrived { transfer, .. } => {
                for (&block, &index) in self.registered.get(transfer).into_iter().flatten() {
                    self.check_contents(*transfer, index, &arena.read(block), "arrived");
                }
                self.end(*transfer);
            }
            Event::ReceiveFailed { transfer, .. }
            | Event::Delivered { transfer, .. }
            | Event::SendFailed { transfer, .. } => self.end(*transfer),
        }
    }

    fn end(&mut self, transfer: TransferId) {
        let ended = self.registered.remove(&transfer);
        assert!(ended.is_some(), "{}: {transfer} ends twice, or never began", self.name);
    }

    pub(crate) fn released(&mut self, transfer: TransferId) -> DataEvent {
        self.writing.retain(|(id, _), _| *id != transfer);
        DataEvent::Released { transfer }
    }

    /// Returns the peer of a chunk that was not sent yet.
    pub(crate) fn destination(&self, transfer: TransferId, chunk: u32) -> Option<Epoch> {
        self.sending.get(&(transfer, chunk)).map(|(peer, _)| *peer)
    }

    /// Reads the chunk's blocks.
    pub(crate) fn send_chunk(
        &mut self,
        transfer: TransferId,
        chunk: u32,
    ) -> (ChunkData, DataEvent) {
        let (_, blocks) =
            self.sending.remove(&(transfer, chunk)).expect("the chunk has a destination");
        let read = |arena: &SimArena| {
            let contents = blocks.iter().map(|&block| {
                let index = self.check_registered(transfer, block, "reads");
                let contents = arena.read(block);
                self.check_contents(transfer, index, &contents, "leaves");
                contents
            });
            contents.collect()
        };
        let contents: Vec<SimBlock> = self.arena.as_ref().map(read).unwrap_or_default();
        let (integrity, block_count) = (digest(&contents), blocks.len());
        let data = ChunkData { transfer, chunk, block_count, contents };
        (data, DataEvent::Sent { transfer, chunk, integrity })
    }

    /// Writes the first half of a chunk. Returns false when no receive is posted for the chunk.
    pub(crate) fn chunk_begins(&mut self, data: &ChunkData) -> bool {
        let key = (data.transfer, data.chunk);
        let Some(blocks) = self.posted.remove(&key) else { return false };
        self.write(data, &blocks, blocks.len() / 2);
        self.writing.insert(key, blocks);
        true
    }

    /// Writes the rest of a chunk, unless its receive was released.
    pub(crate) fn chunk_ends(&mut self, data: &ChunkData) -> Option<DataEvent> {
        let ChunkData { transfer, chunk, ref contents, .. } = *data;
        let blocks = self.writing.remove(&(transfer, chunk))?;
        self.write(data, &blocks, blocks.len());
        Some(DataEvent::Received { transfer, chunk, integrity: digest(contents) })
    }

    pub(crate) fn check_idle(&self) {
        assert!(self.registered.is_empty(), "{}: {:?} are registered", self.name, self.registered);
        assert!(self.posted.is_empty(), "{}: {:?} are posted", self.name, self.posted);
        assert!(self.sending.is_empty(), "{}: {:?} wait to be sent", self.name, self.sending);
    }

    fn write(&self, data: &ChunkData, blocks: &[BlockId], count: usize) {
        let Some(arena) = &self.arena else { return };
        for (&block, &contents) in blocks.iter().zip(&data.contents).take(count) {
            self.check_registered(data.transfer, block, "writes");
            arena.write(block, contents);
        }
    }

    /// Returns the block's number among the blocks of the prompt that are sent.
    fn check_registered(&self, transfer: TransferId, block: BlockId, verb: &str) -> u32 {
        let registered = self.registered.get(&transfer).and_then(|blocks| blocks.get(&block));
        let name = &self.name;
        *registered
            .unwrap_or_else(|| panic!("{name} {verb} {block:?}, which {transfer} does not own"))
    }

    /// Compares a block with the KV of the prompt.
    fn check_contents(&self, transfer: TransferId, number: u32, contents: &SimBlock, what: &str) {
        let prompt = &self.prompts[&transfer];
        let mut sent = self.groups.sent(prompt.len(), 0..prompt.len().div_ceil(BLOCK_TOKENS));
        let entry = sent.nth(number as usize).expect("in the prompt");
        let expected = block_after(&self.groups, entry, prompt);
        let written = expected.iter().position(|kv| *kv == 0).unwrap_or(BLOCK_TOKENS);
        assert_eq!(
            contents[..written],
            expected[..written],
            "{}: entry {entry} of {transfer} {what} with other contents",
            self.name
        );
    }
}

fn digest(contents: &[SimBlock]) -> u64 {
    contents.iter().flatten().fold(0, |sum: u64, number| mix(sum.wrapping_mul(31) ^ number))
}

impl Transport for SimTransport {
    fn admit(&mut self, peer: Epoch) {
        self.admitted.insert(peer);
    }

    fn open(&mut self, peer: Epoch, _endpoint: &str, _kinds: Vec<TransferKind>) {
        self.outputs.push(Output::OpenData { to: peer });
    }

    fn send(&mut self, peer: Epoch, chunk: ChunkId, blocks: &[BlockId]) -> Result<(), DataError> {
        let ChunkId { transfer, index: chunk } = chunk;
        let before = self.sending.insert((transfer, chunk), (peer, blocks.to_vec()));
        assert_eq!(before, None, "{}: chunk {chunk} of {transfer} is sent twice", self.name);
        self.outputs.push(Output::SendChunk { transfer, chunk });
        Ok(())
    }

    fn post(&mut self, _peer: Epoch, chunk: ChunkId, blocks: &[BlockId]) -> Result<(), DataError> {
        let ChunkId { transfer, index: chunk } = chunk;
        for block in blocks.iter().filter(|_| self.arena.is_some()) {
            self.check_registered(transfer, *block, "posts");
        }
        let before = self.posted.insert((transfer, chunk), blocks.to_vec());
        assert_eq!(before, None, "{}: chunk {chunk} of {transfer} is posted twice", self.name);
        Ok(())
    }

    /// Cancels the chunks of a transfer. A chunk that has begun to arrive continues until
    /// [`Self::released`].
    fn cancel(&mut self, _peer: Epoch, transfer: TransferId) -> Released {
        self.sending.retain(|(id, _), _| *id != transfer);
        self.posted.retain(|(id, _), _| *id != transfer);
        self.outputs.push(Output::Release { transfer });
        Released::Later
    }

    fn dismiss(&mut self, peer: Epoch) {
        self.admitted.remove(&peer);
        *self.closings.entry(peer).or_default() += 1;
        self.outputs.push(Output::CloseData { peer });
    }

    fn is_present(&self, peer: Epoch, connection: u64) -> bool {
        self.connection(peer) == connection
    }

    fn shutdown(&mut self, _deadline: Instant) -> Vec<String> {
        Vec::new()
    }
}

/// The outbound control messages of one process. The network delivers them.
#[derive(Default)]
pub(crate) struct SimLinks {
    pub outputs: Vec<Output>,
}

impl ControlLinks for SimLinks {
    fn open(&mut self, _peer: &PeerAddress) -> Result<(), String> {
        Ok(())
    }

    fn send(&mut self, peer: Epoch, message: ControlMessage) -> Result<(), String> {
        self.outputs.push(Output::ControlMessage { to: peer, message });
        Ok(())
    }

    fn close(&mut self, _peer: Epoch) {}
}
