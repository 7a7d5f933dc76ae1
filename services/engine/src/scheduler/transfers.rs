//! Blocks that belong to transfers. A transfer may outlive its sequence.
//!
//! An outgoing transfer owns a reference and a pin on every block that was handed over to it. An
//! incoming transfer owns its reservation. Both end with
//! [`Input::TransferEnded`](crate::event::Input); an incoming transfer also ends when its KV
//! arrives.

use std::collections::BTreeMap;

use kernels::BlockId;

use crate::{
    event::{Action, SequenceId},
    kv_blocks::KvBlocks,
};

#[derive(Debug, Default)]
pub(super) struct SequenceTransfers {
    known: BTreeMap<SequenceId, SequenceTransfer>,
}

#[derive(Debug)]
struct SequenceTransfer {
    is_incoming: bool,
    /// Outgoing: number of the first block that the receiver wants, among the blocks that
    /// [`KvGroups::sent`](kernels::KvGroups::sent) returns.
    first_block: u32,
    /// Incoming: the reserved blocks. Outgoing: the blocks from `first_block` on that were handed
    /// over; the list only grows, so no block is handed over twice.
    blocks: Vec<BlockId>,
    /// Whether the node was told to abort this transfer.
    abort_sent: bool,
}

impl SequenceTransfers {
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    /// Returns whether a transfer has blocks: reserved blocks to receive, or blocks that were
    /// handed over to send.
    pub(super) fn have_blocks(&self) -> bool {
        self.known.values().any(|transfer| !transfer.blocks.is_empty())
    }

    pub(super) fn contains(&self, id: SequenceId) -> bool {
        self.known.contains_key(&id)
    }

    pub(super) fn expect_outgoing(&mut self, id: SequenceId) {
        self.insert(id, false, Vec::new());
    }

    pub(super) fn start_incoming(&mut self, id: SequenceId, blocks: Vec<BlockId>) {
        self.insert(id, true, blocks);
    }

    fn insert(&mut self, id: SequenceId, is_incoming: bool, blocks: Vec<BlockId>) {
        let transfer = SequenceTransfer { is_incoming, first_block: 0, blocks, abort_sent: false };
        self.known.insert(id, transfer);
    }

    /// Sets the first block that the receiver wants.
    pub(super) fn set_first_block(&mut self, id: SequenceId, first_block: u32) {
        if let Some(transfer) = self.known.get_mut(&id) {
            debug_assert!(!transfer.is_incoming && transfer.blocks.is_empty());
            transfer.first_block = first_block;
        }
    }

    /// Hands over the written blocks of `table` that the receiver wants and that were not handed
    /// over before. KV is written for the first `written` blocks of the prompt of `len` tokens.
    pub(super) fn hand_over(
        &mut self,
        id: SequenceId,
        table: &[BlockId],
        (len, written): (usize, usize),
        kv: &mut KvBlocks,
    ) -> Option<Action> {
        let transfer = self.known.get_mut(&id).filter(|transfer| !transfer.is_incoming)?;
        let next = transfer.first_block as usize + transfer.blocks.len();
        let blocks: Vec<_> =
            kv.groups.sent(len, 0..written).skip(next).map(|entry| table[entry]).collect();
        if blocks.is_empty() {
            return None;
        }
        kv.hold_pinned(&blocks);
        transfer.blocks.extend_from_slice(&blocks);
        Some(Action::KvWritten { id, first_block: next as u32, blocks })
    }

    /// Ends an incoming transfer whose KV is all written, and returns its reserved blocks.
    pub(super) fn arrived(&mut self, id: SequenceId) -> Option<Vec<BlockId>> {
        self.known.get(&id).filter(|transfer| transfer.is_incoming)?;
        self.known.remove(&id).map(|transfer| transfer.blocks)
    }

    /// Releases the blocks of a transfer that has no copy in flight.
    pub(super) fn ended(&mut self, id: SequenceId, kv: &mut KvBlocks) {
        match self.known.remove(&id) {
            Some(transfer) if transfer.is_incoming => kv.cancel_reservation(&transfer.blocks, id),
            Some(transfer) => kv.release_pinned(&transfer.blocks),
            None => {}
        }
    }

    /// Returns the transfers in progress.
    pub(super) fn ids(&self) -> Vec<SequenceId> {
        self.known.keys().copied().collect()
    }

    /// Marks the transfer as aborted. Returns true on the first call: then the node must be told.
    pub(super) fn abort(&mut self, id: SequenceId) -> bool {
        let transfer = self.known.get_mut(&id);
        transfer.is_some_and(|transfer| !std::mem::replace(&mut transfer.abort_sent, true))
    }

    /// Returns the blocks on which outgoing transfers have a reference and a pin.
    pub(super) fn pinned_blocks(&self) -> impl Iterator<Item = BlockId> {
        self.blocks(false).map(|(_, block)| block)
    }

    pub(super) fn reserved_blocks(&self) -> impl Iterator<Item = (SequenceId, BlockId)> {
        self.blocks(true)
    }

    fn blocks(&self, is_incoming: bool) -> impl Iterator<Item = (SequenceId, BlockId)> {
        let transfers = self.known.iter().filter(move |(_, it)| it.is_incoming == is_incoming);
        transfers.flat_map(|(&id, it)| it.blocks.iter().map(move |&block| (id, block)))
    }
}
