//! Connects, reconnects, rejects and closes pairs, with the effect on their transfers.

use std::time::Instant;

use super::Core;
use crate::{
    api::{Epoch, Peer, PeerAddress, TransferFailure, TransferId},
    config::PRECONNECTED_PAIRS_MAX,
    control::{Body, Hello},
    protocol::{
        event_context::{Action, EventContext},
        pair::{Change, Pair},
        tombstone::Tombstone,
        transfer::{Side, Transfer},
    },
};

/// Name of `tcp` in `HELLO`.
pub(super) const TCP: &str = "tcp";

impl Core {
    pub(super) fn on_hello(&mut self, from: &Peer, hello: &Hello) {
        if from.epoch == self.context.local.epoch {
            return self.context.refuse("own_epoch");
        }
        if !self.pairs.contains_key(&from.epoch) {
            let has_room =
                if hello.in_advance { self.can_preconnect() } else { self.make_room_for_pair() };
            if !has_room {
                let reason = if hello.in_advance { "no_room_in_advance" } else { "pairs_full" };
                return self.context.refuse(reason);
            }
            let address = PeerAddress {
                node_id: from.node_id.clone(),
                epoch: from.epoch,
                control_endpoint: hello.control_endpoint.clone(),
            };
            let pair = Pair::new(&mut self.context, &address, false);
            self.pairs.insert(from.epoch, pair);
        }
        self.with_pair(from.epoch, |pair, context| pair.on_hello(context, hello));
    }

    pub(super) fn with_pair(
        &mut self,
        epoch: Epoch,
        act: impl FnOnce(&mut Pair, &mut EventContext) -> Change,
    ) {
        let Some(pair) = self.pairs.get_mut(&epoch) else {
            return self.context.refuse("pair_not_up");
        };
        let change = act(pair, &mut self.context);
        let transfers: Vec<TransferId> = pair.transfers.iter().copied().collect();
        match change {
            Change::Nothing => {}
            Change::Up => {
                let (peer, transport) = (&pair.peer.node_id, pair.transport());
                tracing::info!(peer, transport, "connected to peer");
                if transport == TCP {
                    self.remember_tcp_only(epoch);
                }
                self.open_data(epoch);
                self.with_transfers(transfers, Transfer::on_pair_up);
            }
            Change::UpAgain => self.with_transfers(transfers, Transfer::resend),
            Change::Reconnected => {
                self.with_transfers(transfers, Transfer::on_pair_anew);
                self.context.act(Action::CloseData { peer: epoch });
                self.open_data(epoch);
            }
            Change::Refused { reason } => {
                let peer = pair.peer.node_id.clone();
                tracing::warn!(peer, reason, "peer rejected");
                let failure = TransferFailure::Refused { peer, reason };
                self.with_transfers(transfers, |side, context| {
                    side.on_peer_lost(context, failure.clone())
                });
            }
        }
    }

    pub(super) fn connect(&mut self, address: &PeerAddress, sends: bool) {
        // Connecting in advance has no benefit with `tcp`, whose idle pairs are closed.
        let tcp_only =
            self.context.local.transports.len() < 2 || self.tcp_only.contains(&address.epoch);
        if tcp_only || address.epoch == self.context.local.epoch {
            return;
        }
        if !self.pairs.contains_key(&address.epoch) {
            if !self.can_preconnect() {
                return;
            }
            let pair = Pair::new(&mut self.context, address, true);
            pair.send_hello(&mut self.context);
            self.pairs.insert(address.epoch, pair);
        }
        if let Some(pair) = self.pairs.get_mut(&address.epoch) {
            pair.expect_work(self.context.now, sends);
            self.open_data(address.epoch);
        }
    }

    /// Returns whether the peer may still connect. Only the transport knows whether the data
    /// connection is open.
    pub fn is_connecting(&self, now: Instant, peer: Epoch) -> bool {
        self.pairs
            .get(&peer)
            .is_some_and(|pair| pair.may_yet_answer(now) && pair.transport() != TCP)
    }

    /// Remembers that only `tcp` is common. A process does not change its offer.
    fn remember_tcp_only(&mut self, epoch: Epoch) {
        self.tcp_only.insert(epoch);
        if self.tcp_only.len() > self.context.local.limits.pairs_max {
            // Evict any entry: the next handshake adds it again.
            self.tcp_only.pop_first();
        }
    }

    /// Opens the data connection if this node will send chunks to the peer.
    fn open_data(&mut self, epoch: Epoch) {
        let Some(pair) = self.pairs.get_mut(&epoch) else { return };
        let mut sends = pair.transfers.iter().filter_map(|id| self.transfers.get(id));
        let has_work = sends.any(|known| known.side == Side::Sender && !known.is_over());
        if has_work || (pair.will_send && pair.transport() != TCP) {
            pair.open_data(&mut self.context);
        }
    }

    pub(super) fn lose_pair(&mut self, epoch: Epoch, reason: &str) {
        let Some(pair) = self.pairs.remove(&epoch) else { return };
        let (peer, transfers) = (&pair.peer.node_id, pair.transfers.len());
        if transfers > 0 {
            tracing::warn!(peer, transfers, reason, "lost peer");
        } else {
            tracing::debug!(peer, reason, "lost idle peer");
        }
        let failure = pair.peer.lost(reason.to_owned());
        let transfers = pair.transfers.iter().copied().collect();
        self.with_transfers(transfers, |side, context| side.on_peer_lost(context, failure.clone()));
        self.context.act(Action::Disconnect { peer: epoch });
    }

    pub(super) fn close_pair(&mut self, epoch: Epoch) {
        if self.pairs.remove(&epoch).is_some() {
            self.context.act(Action::Disconnect { peer: epoch });
        }
    }

    /// Returns whether another pair without transfers is allowed. Such a pair evicts no pair. Half
    /// of the table is reserved for requests, because their pairs would evict such a pair again.
    fn can_preconnect(&self) -> bool {
        let uses_gpu_memory = |pair: &&Pair| pair.transport() != TCP;
        self.pairs.values().filter(uses_gpu_memory).count() < PRECONNECTED_PAIRS_MAX
            && self.pairs.len() < self.context.local.limits.pairs_max.div_ceil(2)
    }

    /// Closes the longest idle pair if the table is full. Returns whether a pair can be added.
    pub(super) fn make_room_for_pair(&mut self) -> bool {
        if self.pairs.len() < self.context.local.limits.pairs_max {
            return true;
        }
        let idle = self
            .pairs
            .values()
            .filter(|pair| pair.is_idle(self.context.now))
            .min_by_key(|pair| pair.idle_since)
            .map(|pair| pair.peer.epoch);
        match idle {
            Some(epoch) => {
                self.close_pair(epoch);
                true
            }
            None => false,
        }
    }

    pub(super) fn send_heartbeat(&mut self, epoch: Epoch) {
        let Some(pair) = self.pairs.get(&epoch) else { return };
        let (mut transfers, mut awaited) = (Vec::new(), Vec::new());
        for id in &pair.transfers {
            match self.transfers.get(id) {
                Some(transfer) if transfer.is_awaiting() => awaited.push(*id),
                Some(transfer) if transfer.is_wanted() => transfers.push(*id),
                Some(_) | None => {}
            }
        }
        self.context.send(epoch, Body::Heartbeat { transfers, awaited });
    }

    pub(super) fn on_heartbeat(
        &mut self,
        from: &Peer,
        transfers: &[TransferId],
        awaited: &[TransferId],
    ) {
        if transfers.is_empty() && awaited.is_empty() {
            return;
        }
        if let Some(pair) = self.pairs.get_mut(&from.epoch) {
            pair.on_peer_works(self.context.now);
        }
        for id in transfers {
            if let Some(transfer) = self.transfers.get_mut(id)
                && transfer.peer.epoch == from.epoch
            {
                transfer.renew(self.context.now);
            }
        }
        // The peer may never have received the `ABORT` of a transfer that it still wants.
        for id in transfers.iter().chain(awaited) {
            if let Some(failed @ Tombstone::Failed { .. }) = self.tombstones.get(*id) {
                self.context.send(from.epoch, failed.answer(*id));
            }
        }
    }
}
