//! The transport of one process: which chunks may be written and read, and what they hold.
//!
//! Asserted here: nothing is written into a block that no transfer owns any more, nothing is read
//! from a block that the node has got back, and what arrives is the KV of the prompt.

use std::collections::BTreeMap;

use engine::executor::sim::{SimArena, SimBlock};
use kernels::{BLOCK_TOKENS, BlockId};
use kv_transfer::{
    api::{Command, Epoch, Event, TransferId},
    protocol::DataEvent,
};

use crate::random::mix;

pub struct Wires {
    name: String,
    arena: SimArena,
    /// The KV that each attempt's tokens must have.
    prompts: BTreeMap<TransferId, Vec<u64>>,
    /// Transfers without their final event, and blocks that they may write or read here, with their
    /// place in the prompt.
    lent: BTreeMap<TransferId, BTreeMap<BlockId, u32>>,
    posted: BTreeMap<(TransferId, u32), Vec<BlockId>>,
    /// The first bytes of the chunk are written.
    writing: BTreeMap<(TransferId, u32), Vec<BlockId>>,
    sending: BTreeMap<(TransferId, u32), (Epoch, Vec<BlockId>)>,
}

/// A chunk between two processes.
#[derive(Clone, Debug)]
pub struct Cargo {
    pub transfer: TransferId,
    pub chunk: u32,
    pub contents: Vec<SimBlock>,
}

impl Wires {
    pub fn new(name: String, arena: SimArena) -> Self {
        Self {
            name,
            arena,
            prompts: BTreeMap::new(),
            lent: BTreeMap::new(),
            posted: BTreeMap::new(),
            writing: BTreeMap::new(),
            sending: BTreeMap::new(),
        }
    }

    pub fn expect_prompt(&mut self, transfer: TransferId, prompt: Vec<u64>) {
        self.prompts.insert(transfer, prompt);
    }

    /// The core gets this command next.
    pub fn on_command(&mut self, command: &Command) {
        match command {
            Command::Receive { transfer, first_block, blocks, .. } => {
                let blocks = blocks.iter().copied().zip(*first_block..);
                self.lent.insert(*transfer, blocks.collect());
            }
            Command::Expect { transfer, .. } => {
                self.lent.insert(*transfer, BTreeMap::new());
            }
            // It may cross the end of its transfer.
            Command::Written { transfer, first_block, blocks } => {
                if let Some(lent) = self.lent.get_mut(transfer) {
                    lent.extend(blocks.iter().copied().zip(*first_block..));
                }
            }
            Command::Finish { .. }
            | Command::Abort { .. }
            | Command::Meet { .. }
            | Command::WeightsChanged { .. } => {}
        }
    }

    /// The core has said so.
    pub fn on_event(&mut self, event: &Event) {
        match event {
            Event::Ready { .. } => {}
            Event::Arrived { transfer, .. } => {
                for (&block, &index) in self.lent.get(transfer).into_iter().flatten() {
                    self.check_contents(*transfer, index, &self.arena.read(block), "arrived");
                }
                self.end(*transfer);
            }
            Event::ReceiveFailed { transfer, .. }
            | Event::Delivered { transfer, .. }
            | Event::SendFailed { transfer, .. } => self.end(*transfer),
        }
    }

    fn end(&mut self, transfer: TransferId) {
        let ended = self.lent.remove(&transfer);
        assert!(ended.is_some(), "{}: {transfer} ends twice, or never began", self.name);
    }

    pub fn post(&mut self, transfer: TransferId, chunk: u32, blocks: Vec<BlockId>) {
        for block in &blocks {
            self.check_lent(transfer, *block, "posts");
        }
        let before = self.posted.insert((transfer, chunk), blocks);
        assert_eq!(before, None, "{}: chunk {chunk} of {transfer} is posted twice", self.name);
    }

    pub fn send(&mut self, peer: Epoch, transfer: TransferId, chunk: u32, blocks: Vec<BlockId>) {
        let before = self.sending.insert((transfer, chunk), (peer, blocks));
        assert_eq!(before, None, "{}: chunk {chunk} of {transfer} is sent twice", self.name);
    }

    /// Posted chunks are forgotten; one that is being written goes on until [`Self::released`].
    pub fn cancel_receive(&mut self, transfer: TransferId) {
        self.posted.retain(|(id, _), _| *id != transfer);
    }

    pub fn cancel_send(&mut self, transfer: TransferId) {
        self.sending.retain(|(id, _), _| *id != transfer);
    }

    pub fn released(&mut self, is_receive: bool, transfer: TransferId) -> DataEvent {
        if !is_receive {
            return DataEvent::SendReleased { transfer };
        }
        self.writing.retain(|(id, _), _| *id != transfer);
        DataEvent::ReceiveReleased { transfer }
    }

    /// Where a chunk that waits to leave is to go.
    pub fn destination(&self, transfer: TransferId, chunk: u32) -> Option<Epoch> {
        self.sending.get(&(transfer, chunk)).map(|(peer, _)| *peer)
    }

    /// A chunk leaves.
    pub fn depart(&mut self, transfer: TransferId, chunk: u32) -> (Cargo, DataEvent) {
        let (_, blocks) = self.sending.remove(&(transfer, chunk)).expect("it has a destination");
        let contents: Vec<SimBlock> = blocks
            .iter()
            .map(|&block| {
                let index = self.check_lent(transfer, block, "reads");
                let contents = self.arena.read(block);
                self.check_contents(transfer, index, &contents, "leaves");
                contents
            })
            .collect();
        let integrity = digest(&contents);
        (Cargo { transfer, chunk, contents }, DataEvent::Sent { transfer, chunk, integrity })
    }

    /// The first bytes of a chunk come in; true when it is expected.
    pub fn land(&mut self, cargo: &Cargo) -> bool {
        let key = (cargo.transfer, cargo.chunk);
        let Some(blocks) = self.posted.remove(&key) else { return false };
        self.write(cargo, &blocks, blocks.len() / 2);
        self.writing.insert(key, blocks);
        true
    }

    /// The last bytes come in.
    pub fn landed(&mut self, cargo: &Cargo) -> Option<DataEvent> {
        let Cargo { transfer, chunk, ref contents } = *cargo;
        let blocks = self.writing.remove(&(transfer, chunk))?;
        self.write(cargo, &blocks, blocks.len());
        Some(DataEvent::Received { transfer, chunk, integrity: digest(contents) })
    }

    pub fn check_quiet(&self) {
        assert!(self.lent.is_empty(), "{}: {:?} are lent", self.name, self.lent);
        assert!(self.posted.is_empty(), "{}: {:?} are posted", self.name, self.posted);
        assert!(self.sending.is_empty(), "{}: {:?} wait to leave", self.name, self.sending);
    }

    fn write(&self, cargo: &Cargo, blocks: &[BlockId], count: usize) {
        for (&block, &contents) in blocks.iter().zip(&cargo.contents).take(count) {
            self.check_lent(cargo.transfer, block, "writes");
            self.arena.write(block, contents);
        }
    }

    /// The block's place in the prompt.
    fn check_lent(&self, transfer: TransferId, block: BlockId, verb: &str) -> u32 {
        let lent = self.lent.get(&transfer).and_then(|blocks| blocks.get(&block));
        let name = &self.name;
        *lent.unwrap_or_else(|| panic!("{name} {verb} {block:?}, which {transfer} has not"))
    }

    /// Every position of the prompt that block `index` has.
    fn check_contents(&self, transfer: TransferId, index: u32, contents: &SimBlock, what: &str) {
        let prompt = &self.prompts[&transfer];
        let expected = prompt.chunks(BLOCK_TOKENS).nth(index as usize).expect("in the prompt");
        assert_eq!(
            contents[..expected.len()],
            *expected,
            "{}: block {index} of {transfer} {what} with other contents",
            self.name
        );
    }
}

fn digest(contents: &[SimBlock]) -> u64 {
    contents.iter().flatten().fold(0, |sum: u64, number| mix(sum.wrapping_mul(31) ^ number))
}
