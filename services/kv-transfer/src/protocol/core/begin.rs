//! Starts transfers: by a command, by a peer's `RESERVE`, in either order.

use std::time::Duration;

use super::{Core, DEADLINE_MAX, pairs::TCP};
use crate::{
    api::{Epoch, Peer, PeerAddress, TransferFailure, TransferId},
    config::TCP_CHUNK_BYTES_MAX,
    control::{Body, Reserve},
    protocol::{
        pair::Pair,
        tombstone::Tombstone,
        transfer::{Phase, Side, Transfer},
    },
};

impl Core {
    /// Finds or creates the pair for a new transfer. Returns false if the transfer has failed
    /// instead, or if this is its second start.
    pub(super) fn admit(&mut self, id: TransferId, address: &PeerAddress, side: Side) -> bool {
        if self.transfers.get(&id).is_some_and(|known| known.is_begun) {
            // The first start stays valid; nodes reject the second one themselves.
            tracing::warn!(transfer = %id, "ignoring the second start of a transfer");
            return false;
        }
        let admission = self.admission(id, address);
        if let Err(failure) = &admission {
            self.context.emit(side.failed(id, failure.clone()));
        }
        admission.is_ok()
    }

    fn admission(&mut self, id: TransferId, address: &PeerAddress) -> Result<(), TransferFailure> {
        let aborted = |reason: String| Err(TransferFailure::Aborted { reason });
        if let Some(early) = self.transfers.get(&id) {
            let peer = early.peer.node_id.clone();
            let violation = "RESERVE for a transfer that this node receives".to_owned();
            return Err(TransferFailure::Protocol { peer, violation });
        }
        match self.tombstones.get(id) {
            Some(Tombstone::Failed { cause, reason }) => {
                return Err(address.peer().ended_before(*cause, reason));
            }
            Some(Tombstone::Complete) => {
                return aborted("a transfer with this id is already complete".to_owned());
            }
            None => {}
        }
        if address.epoch == self.context.local.epoch {
            return aborted("the peer is this process; expected another node".to_owned());
        }
        let known = self.transfers.len();
        if known >= self.context.local.limits.transfers_max {
            return aborted(format!("{known} transfers are in progress, the maximum"));
        }
        if let Some(pair) = self.pairs.get(&address.epoch) {
            let Some(reason) = pair.refusal() else { return Ok(()) };
            let (peer, reason) = (address.node_id.clone(), reason.to_owned());
            return Err(TransferFailure::Refused { peer, reason });
        }
        if !self.make_room_for_pair() {
            let peers = self.pairs.len();
            return aborted(format!("{peers} peers have transfers with this node, the maximum"));
        }
        let pair = Pair::new(&mut self.context, address, false);
        pair.send_hello(&mut self.context);
        self.pairs.insert(address.epoch, pair);
        Ok(())
    }

    /// Adds an admitted transfer that the node has started.
    pub(super) fn begin(
        &mut self,
        id: TransferId,
        peer: Peer,
        deadline: Duration,
        traceparent: String,
        phase: Phase,
    ) {
        let deadline = deadline.min(DEADLINE_MAX);
        self.insert(Transfer::begin(&self.context, id, peer, deadline, traceparent, phase));
    }

    fn insert(&mut self, transfer: Transfer) {
        if let Some(pair) = self.pairs.get_mut(&transfer.peer.epoch) {
            pair.begin(&mut self.context, transfer.id);
            if transfer.side == Side::Sender {
                pair.open_data(&mut self.context);
            }
        }
        self.transfers.insert(transfer.id, transfer);
        debug_assert!(self.transfers.len() <= self.context.local.limits.transfers_max);
    }

    /// Returns whether the peer of a `Send` has sent its `RESERVE` before, or has aborted the
    /// transfer since. Drops a `RESERVE` by a peer that the router did not name.
    pub(super) fn has_reserve(&mut self, id: TransferId, address: &PeerAddress) -> bool {
        let Some(outgoing) = self.transfers.get(&id).filter(|known| !known.is_begun) else {
            return false;
        };
        if outgoing.peer.epoch == address.epoch || !outgoing.is_early() {
            return true;
        }
        let stranger = outgoing.peer.epoch;
        let reason = format!("the router paired this transfer with {}", address.node_id);
        self.context.send(stranger, Body::give_up(id, reason));
        self.transfers.remove(&id);
        if let Some(pair) = self.pairs.get_mut(&stranger) {
            pair.end(self.context.now, id);
        }
        false
    }

    pub(super) fn on_reserve(&mut self, from: &Peer, reserve: Reserve, traceparent: String) {
        let id = reserve.transfer;
        let abort = match self.transfers.get(&id) {
            Some(known) if known.side == Side::Sender && known.peer.epoch == from.epoch => {
                if self.may_act(from, id, Some(Side::Sender)) {
                    let chunk_bytes_max = self.chunk_bytes_max(from.epoch);
                    self.with_transfer(id, |side, context| {
                        side.on_reserve(context, chunk_bytes_max, reserve, traceparent)
                    });
                }
                return;
            }
            Some(_) => Body::give_up(id, "the transfer id is in use with another peer".to_owned()),
            None => match self.tombstones.get(id) {
                Some(Tombstone::Complete) => return,
                Some(failed) => failed.answer(id),
                None => {
                    let (known, early) = (self.transfers.len(), self.early_count());
                    let limits = self.context.local.limits;
                    if early < limits.early_max && known < limits.transfers_max {
                        let peer = from.clone();
                        return self.insert(Transfer::early(
                            &self.context,
                            peer,
                            reserve,
                            traceparent,
                        ));
                    }
                    let reason = match known < limits.transfers_max {
                        true => {
                            format!("{early} RESERVEs wait for their Prefill calls, the maximum")
                        }
                        false => format!("{known} transfers are known, the maximum"),
                    };
                    Body::give_up(id, reason)
                }
            },
        };
        self.context.send_traced(from.epoch, abort, &traceparent);
    }

    /// Returns the maximum size of a chunk for this peer.
    pub(super) fn chunk_bytes_max(&self, peer: Epoch) -> usize {
        let set = self.context.local.limits.chunk_bytes_max;
        match self.pairs.get(&peer) {
            Some(pair) if pair.transport() == TCP => set.min(TCP_CHUNK_BYTES_MAX),
            _ => set,
        }
    }

    pub(super) fn early_count(&self) -> usize {
        self.transfers.values().filter(|transfer| transfer.is_early()).count()
    }
}
