//! Starts transfers: by a command, by a peer's `RESERVE`, in either order.

use std::time::{Duration, Instant};

use super::Core;
use crate::{
    api::{PeerAddress, TransferFailure, TransferId},
    control::{Body, Reserve, Source},
    protocol::{
        Peer, Turn,
        pair::Pair,
        tombstone::Tombstone,
        transfer::{Side, Transfer},
    },
};

impl Core {
    /// Finds or creates the pair for a new transfer; `None` if the transfer has failed instead.
    pub(super) fn admit(
        &mut self,
        now: Instant,
        transfer: TransferId,
        address: &PeerAddress,
        side: Side,
    ) -> Option<Peer> {
        match self.transfers.get(&transfer) {
            Some(early) if !early.is_begun => {
                let peer = early.peer.node_id.clone();
                let detail = "RESERVE for a transfer that this node receives".to_owned();
                let failure = TransferFailure::Protocol { peer, detail };
                turn!(self, now).emit(side.failed(transfer, failure));
                return None;
            }
            Some(_) => {
                // The first start stays valid; nodes reject the second one themselves.
                tracing::warn!(%transfer, "ignoring the second start of a transfer");
                return None;
            }
            None => {}
        }
        let peer = Peer { node_id: address.node_id.clone(), epoch: address.epoch };
        match self.admission(now, transfer, &peer, address) {
            Ok(()) => Some(peer),
            Err(failure) => {
                turn!(self, now).emit(side.failed(transfer, failure));
                None
            }
        }
    }

    fn admission(
        &mut self,
        now: Instant,
        transfer: TransferId,
        peer: &Peer,
        address: &PeerAddress,
    ) -> Result<(), TransferFailure> {
        match self.tombstones.get(transfer) {
            Some(Tombstone::Failed { cause, reason }) => {
                return Err(peer.ended_before(*cause, reason));
            }
            Some(Tombstone::Complete) => {
                let reason = "a transfer with this id is already complete".to_owned();
                return Err(TransferFailure::Aborted { reason });
            }
            None => {}
        }
        if address.epoch == self.local.epoch {
            let reason = "the peer is this process; expected another node".to_owned();
            return Err(TransferFailure::Aborted { reason });
        }
        if self.transfers.len() >= self.local.limits.transfers_max {
            let reason = format!("{} transfers are in progress, the maximum", self.transfers.len());
            return Err(TransferFailure::Aborted { reason });
        }
        if let Some(pair) = self.pairs.get(&address.epoch) {
            return match pair.refusal() {
                Some(reason) => Err(TransferFailure::Refused {
                    peer: address.node_id.clone(),
                    reason: reason.to_owned(),
                }),
                None => Ok(()),
            };
        }
        if !self.make_room_for_pair(now) {
            let reason =
                format!("{} peers have transfers with this node, the maximum", self.pairs.len());
            return Err(TransferFailure::Aborted { reason });
        }
        self.sessions += 1;
        let pair = Pair::connect(&mut turn!(self, now), address, self.sessions);
        self.pairs.insert(address.epoch, pair);
        Ok(())
    }

    pub(super) fn insert(&mut self, now: Instant, transfer: Transfer) {
        if let Some(pair) = self.pairs.get_mut(&transfer.peer.epoch) {
            pair.begin(&mut turn!(self, now), transfer.id);
            if transfer.side == Side::Sender {
                pair.open_data(&mut turn!(self, now));
            }
        }
        self.transfers.insert(transfer.id, transfer);
        debug_assert!(self.transfers.len() <= self.local.limits.transfers_max);
    }

    /// Matches `Expect` with an earlier `RESERVE`. Returns false if there is none.
    pub(super) fn match_early_reserve(
        &mut self,
        now: Instant,
        transfer: TransferId,
        address: &PeerAddress,
        prompt_hash: u128,
        deadline: Duration,
        traceparent: &str,
    ) -> bool {
        let Some(outgoing) = self.transfers.get(&transfer).filter(|known| !known.is_begun) else {
            return false;
        };
        if outgoing.peer.epoch == address.epoch || !outgoing.is_early() {
            self.with_transfer(now, transfer, |outgoing, turn| {
                outgoing.on_expect(turn, prompt_hash, deadline, traceparent.to_owned());
            });
            return true;
        }
        // Another peer has reserved under this id, not the peer that the router named.
        let stranger = outgoing.peer.epoch;
        let reason = format!("the router paired this transfer with {}", address.node_id);
        turn!(self, now).send(stranger, Body::give_up(transfer, reason));
        self.transfers.remove(&transfer);
        if let Some(pair) = self.pairs.get_mut(&stranger) {
            pair.end(now, transfer);
        }
        false
    }

    pub(super) fn on_reserve(
        &mut self,
        now: Instant,
        from: &Source,
        reserve: Reserve,
        traceparent: String,
    ) {
        let transfer = reserve.transfer;
        match self.transfers.get(&transfer) {
            Some(known) if known.side == Side::Sender && known.peer.epoch == from.epoch => {
                return self.with_outgoing_of(now, from, transfer, |outgoing, turn| {
                    outgoing.on_reserve(turn, reserve, traceparent);
                });
            }
            Some(_) => {
                let reason = "the transfer id is in use with another peer".to_owned();
                let abort = Body::give_up(transfer, reason);
                return turn!(self, now).send_traced(from.epoch, abort, &traceparent);
            }
            None => {}
        }
        if let Some(tombstone) = self.tombstones.get(transfer) {
            if let Tombstone::Failed { cause, reason } = tombstone {
                let abort = Body::Abort { transfer, cause: *cause, reason: reason.clone() };
                turn!(self, now).send_traced(from.epoch, abort, &traceparent);
            }
            return;
        }
        let limits = self.local.limits;
        if self.early_count() >= limits.early_max || self.transfers.len() >= limits.transfers_max {
            let reason = format!("{} transfers are known, the maximum", self.transfers.len());
            let abort = Body::give_up(transfer, reason);
            return turn!(self, now).send_traced(from.epoch, abort, &traceparent);
        }
        let peer = Peer { node_id: from.node_id.clone(), epoch: from.epoch };
        let early = Transfer::early(&turn!(self, now), peer, reserve, traceparent);
        self.insert(now, early);
    }

    pub(super) fn early_count(&self) -> usize {
        self.transfers.values().filter(|transfer| transfer.is_early()).count()
    }
}
