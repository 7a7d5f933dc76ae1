//! Blocks that belong to transfers. A transfer may outlive its sequence.
//!
//! An outgoing transfer owns a reference and a pin on every block that was handed over to it. An incoming
//! transfer owns its reservation. Both end with [`Input::TransferEnded`](crate::event::Input); an incoming
//! transfer also ends when its KV arrives.

use std::collections::BTreeMap;

use kernels::BlockId;

use crate::{event::SequenceId, kv_blocks::KvBlocks};

#[derive(Debug, Default)]
pub(super) struct Transfers {
    known: BTreeMap<SequenceId, Transfer>,
}

#[derive(Debug)]
struct Transfer {
    side: Side,
    /// The node was told to abort this transfer.
    abort_told: bool,
}

#[derive(Debug)]
enum Side {
    Outgoing(Outgoing),
    Incoming { blocks: Vec<BlockId> },
}

/// Prompt blocks from `first_block` on that were handed over. The list only grows, so no block is handed
/// over twice.
#[derive(Debug, Default)]
struct Outgoing {
    first_block: u32,
    handed_over: Vec<BlockId>,
}

impl Transfers {
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    pub(super) fn contains(&self, id: SequenceId) -> bool {
        self.known.contains_key(&id)
    }

    pub(super) fn expect_outgoing(&mut self, id: SequenceId) {
        let side = Side::Outgoing(Outgoing::default());
        self.known.insert(id, Transfer { side, abort_told: false });
    }

    pub(super) fn start_incoming(&mut self, id: SequenceId, blocks: Vec<BlockId>) {
        let side = Side::Incoming { blocks };
        self.known.insert(id, Transfer { side, abort_told: false });
    }

    /// Sets the first block that the receiver wants.
    pub(super) fn set_first_block(&mut self, id: SequenceId, first_block: u32) {
        if let Some(outgoing) = self.outgoing(id) {
            debug_assert!(outgoing.handed_over.is_empty());
            outgoing.first_block = first_block;
        }
    }

    /// Hands over those of the first `written` blocks of `table` that the receiver wants and that were
    /// not handed over before. Returns the index of the first, and the blocks.
    pub(super) fn hand_over(
        &mut self,
        id: SequenceId,
        table: &[BlockId],
        written: usize,
        kv: &mut KvBlocks,
    ) -> Option<(u32, Vec<BlockId>)> {
        let outgoing = self.outgoing(id)?;
        let next = outgoing.first_block as usize + outgoing.handed_over.len();
        if next >= written {
            return None;
        }
        let blocks = table[next..written].to_vec();
        kv.hold_pinned(&blocks);
        outgoing.handed_over.extend_from_slice(&blocks);
        Some((next as u32, blocks))
    }

    /// Ends a transfer whose KV is all written, and returns its reserved blocks.
    pub(super) fn arrived(&mut self, id: SequenceId) -> Option<Vec<BlockId>> {
        match self.known.get(&id)?.side {
            Side::Outgoing(_) => None,
            Side::Incoming { .. } => match self.known.remove(&id)?.side {
                Side::Incoming { blocks } => Some(blocks),
                Side::Outgoing(_) => None,
            },
        }
    }

    /// Releases the blocks of a transfer that has no copy in flight.
    pub(super) fn ended(&mut self, id: SequenceId, kv: &mut KvBlocks) {
        match self.known.remove(&id).map(|transfer| transfer.side) {
            Some(Side::Outgoing(outgoing)) => kv.release_pinned(&outgoing.handed_over),
            Some(Side::Incoming { blocks }) => kv.cancel_reservation(&blocks, id),
            None => {}
        }
    }

    /// Returns true the first time, when the node must be told to abort this transfer.
    pub(super) fn abort(&mut self, id: SequenceId) -> bool {
        let transfer = self.known.get_mut(&id);
        transfer.is_some_and(|transfer| !std::mem::replace(&mut transfer.abort_told, true))
    }

    /// Returns the blocks on which a transfer has a reference and a pin.
    pub(super) fn pinned_blocks(&self) -> impl Iterator<Item = BlockId> {
        self.known.values().flat_map(|transfer| match &transfer.side {
            Side::Outgoing(outgoing) => outgoing.handed_over.iter().copied(),
            Side::Incoming { .. } => [].iter().copied(),
        })
    }

    pub(super) fn reserved_blocks(&self) -> impl Iterator<Item = (SequenceId, BlockId)> {
        self.known.iter().flat_map(|(&id, transfer)| {
            let blocks = match &transfer.side {
                Side::Outgoing(_) => &[],
                Side::Incoming { blocks } => blocks.as_slice(),
            };
            blocks.iter().map(move |&block| (id, block))
        })
    }

    fn outgoing(&mut self, id: SequenceId) -> Option<&mut Outgoing> {
        match &mut self.known.get_mut(&id)?.side {
            Side::Outgoing(outgoing) => Some(outgoing),
            Side::Incoming { .. } => None,
        }
    }
}
