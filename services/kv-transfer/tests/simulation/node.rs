//! One simulated node: a core, its blocks, and the transfer that owns each block.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use kernels::BlockId;
use kv_transfer::{
    TransferLimits,
    api::{Epoch, Event, Identity, TransferId},
    protocol::{Core, Local},
};

use simulation_base::Random;

use crate::world::{BLOCK_BYTES, Step};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessState {
    Running,
    Paused,
    Dead,
}

/// The contents of a block without KV.
pub(crate) const BLANK: u64 = 0;

pub(crate) struct Node {
    pub name: String,
    pub epoch: Epoch,
    pub core: Core,
    /// Version of the engine's weights.
    pub weight_version: u64,
    pub state: ProcessState,
    /// Inputs that arrived while the process was paused.
    pub inbox: Vec<Step>,
    pub memory: Vec<u64>,
    /// The transfer that may access each block.
    pub owners: BTreeMap<BlockId, TransferId>,
    /// Blocks of each transfer, in the order of the prompt.
    pub taken: BTreeMap<TransferId, Vec<BlockId>>,
    pub free: Vec<BlockId>,
    pub posted: BTreeMap<(TransferId, u32), Vec<BlockId>>,
    pub writing: BTreeMap<(TransferId, u32), Vec<BlockId>>,
    pub sending: BTreeMap<(TransferId, u32), (Epoch, Vec<BlockId>)>,
    /// Number of times that this node has closed its data connections with each peer. The end of an
    /// earlier connection is ignored.
    pub closings: BTreeMap<usize, u64>,
    /// Peers that may connect here.
    pub admitted: BTreeSet<usize>,
    /// Every event, with its time.
    pub events: Vec<(Instant, Event)>,
    pub begun: BTreeMap<TransferId, Instant>,
    /// When the node aborted each transfer, begun or not.
    pub aborted: BTreeMap<TransferId, Instant>,
    pub ended: BTreeMap<TransferId, (Instant, bool)>,
}

impl Node {
    pub(crate) fn new(index: usize, block_count: u32, limits: TransferLimits) -> Self {
        Self::on_host("here", index, block_count, limits)
    }

    /// Returns the contents of blocks, which this transfer must own.
    pub(crate) fn read(&self, transfer: TransferId, blocks: &[BlockId]) -> Vec<u64> {
        let read = |block: &BlockId| {
            let (name, owner) = (&self.name, self.owners.get(block));
            assert_eq!(owner, Some(&transfer), "{name} reads {block:?}, which it has back");
            self.memory[block.index()]
        };
        blocks.iter().map(read).collect()
    }

    /// Creates a node on `host`. Nodes of one host offer `ipc`.
    pub(crate) fn on_host(
        host: &str,
        index: usize,
        block_count: u32,
        limits: TransferLimits,
    ) -> Self {
        let name = format!("node-{index}");
        // The order of the epochs is random.
        let epoch = Epoch(Random::new(index as u64 + 1).next().into());
        let local = Local {
            epoch,
            identity: identity(),
            control_endpoint: format!("tcp://{name}:1"),
            data_endpoint: format!("tcp://{name}:2"),
            transports: vec![format!("ipc@{host}"), "tcp".to_owned()],
            integrity: vec!["xxh3".to_owned()],
            block_bytes: BLOCK_BYTES,
            limits,
        };
        Self {
            name,
            epoch,
            weight_version: local.identity.weight_version,
            core: Core::new(Instant::now(), local),
            state: ProcessState::Running,
            inbox: Vec::new(),
            memory: vec![BLANK; block_count as usize],
            owners: BTreeMap::new(),
            taken: BTreeMap::new(),
            free: (0..block_count).rev().map(BlockId).collect(),
            posted: BTreeMap::new(),
            writing: BTreeMap::new(),
            sending: BTreeMap::new(),
            closings: BTreeMap::new(),
            admitted: BTreeSet::new(),
            events: Vec::new(),
            begun: BTreeMap::new(),
            aborted: BTreeMap::new(),
            ended: BTreeMap::new(),
        }
    }

    /// Takes blocks for a transfer; `None` when too few blocks are free.
    pub(crate) fn take(&mut self, transfer: TransferId, count: u32) -> Option<Vec<BlockId>> {
        let rest = self.free.len().checked_sub(count as usize)?;
        let blocks = self.free.split_off(rest);
        for block in &blocks {
            self.owners.insert(*block, transfer);
        }
        self.taken.insert(transfer, blocks.clone());
        Some(blocks)
    }

    /// Frees the blocks of a transfer. They are overwritten at once, and are taken next.
    pub(crate) fn free_blocks(&mut self, transfer: TransferId) {
        for block in self.taken.remove(&transfer).unwrap_or_default() {
            self.owners.remove(&block);
            self.memory[block.index()] = u64::MAX;
            self.free.push(block);
        }
    }

    pub(crate) fn write(&mut self, transfer: TransferId, blocks: &[BlockId], contents: &[u64]) {
        for (block, content) in blocks.iter().zip(contents) {
            assert_eq!(
                self.owners.get(block),
                Some(&transfer),
                "{} gets a write of {transfer} into {block:?}, which it has back",
                self.name
            );
            self.memory[block.index()] = *content;
        }
    }

    pub(crate) fn free_count(&self) -> usize {
        self.free.len()
    }
}

pub(crate) fn identity() -> Identity {
    Identity {
        model_fingerprint: 0xfeed,
        weight_version: 3,
        kv_layout: "layers=2".to_owned(),
        block_size: 16,
        dtype: "f32".to_owned(),
        tp: 1,
        protocol_min: 1,
        protocol_max: 1,
    }
}
