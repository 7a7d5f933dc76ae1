//! Dispatches events to the pair or transfer that they concern, and bounds the number of both.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use super::{
    Action, Counters, DataEvent, Local, Turn,
    pair::{Close, Pair},
    tombstone::{Tombstone, Tombstones},
    transfer::{Phase, Side, Transfer},
};
use crate::{
    api::{Command, Epoch, TransferFailure, TransferId},
    control::{AbortCause, Body, ControlMessage, Reserve, Source},
};

/// Borrows the fields of a `Turn` and leaves the tables free.
macro_rules! turn {
    ($core:expr, $now:expr) => {
        Turn {
            now: $now,
            local: &$core.local,
            actions: &mut $core.actions,
            counters: &mut $core.counters,
        }
    };
}

mod begin;
mod pairs;

/// Longest deadline, so that adding it to a time cannot overflow.
const DEADLINE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Blocks per reservation, so that `RESERVE` and `DONE` fit into a control message: 1.6 million
/// tokens.
pub const RESERVED_BLOCKS_MAX: usize = 100_000;

/// All pairs and transfers of one process.
pub struct Core {
    local: Local,
    pairs: BTreeMap<Epoch, Pair>,
    transfers: BTreeMap<TransferId, Transfer>,
    tombstones: Tombstones,
    actions: VecDeque<Action>,
    counters: Counters,
    /// Peers with which only `tcp` is common: connecting in advance has no benefit.
    tcp_only: BTreeSet<Epoch>,
    /// Number of pairs created so far.
    sessions: u64,
}

impl Core {
    pub fn new(local: Local) -> Self {
        Self {
            tombstones: Tombstones::new(local.limits.tombstones_max),
            local,
            pairs: BTreeMap::new(),
            transfers: BTreeMap::new(),
            actions: VecDeque::new(),
            counters: Counters::default(),
            tcp_only: BTreeSet::new(),
            sessions: 0,
        }
    }

    pub fn handle_command(&mut self, now: Instant, command: Command) {
        match command {
            Command::Receive {
                transfer,
                peer,
                prompt_hash,
                first_block,
                blocks,
                deadline,
                traceparent,
            } => {
                let deadline = deadline.min(DEADLINE_MAX);
                if blocks.len() > RESERVED_BLOCKS_MAX {
                    let reason = format!(
                        "cannot receive {} blocks; expected at most {RESERVED_BLOCKS_MAX}",
                        blocks.len()
                    );
                    let failure = TransferFailure::Aborted { reason };
                    return turn!(self, now).emit(Side::Receiver.failed(transfer, failure));
                }
                let Some(peer) = self.admit(now, transfer, &peer, Side::Receiver) else { return };
                let reserve = Reserve {
                    transfer,
                    model_fingerprint: self.local.identity.model_fingerprint,
                    weight_version: self.local.identity.weight_version,
                    prompt_hash,
                    first_block,
                    blocks,
                };
                let phase = Phase::Connecting { reserve };
                let is_up = self.pairs.get(&peer.epoch).is_some_and(Pair::is_up);
                let mut turn = turn!(self, now);
                let side = Side::Receiver;
                let mut incoming =
                    Transfer::begin(&turn, transfer, peer, side, deadline, traceparent, phase);
                if is_up {
                    incoming.on_pair_up(&mut turn);
                }
                self.insert(now, incoming);
            }
            Command::Expect { transfer, peer, prompt_hash, deadline, traceparent } => {
                let deadline = deadline.min(DEADLINE_MAX);
                if self.match_early_reserve(
                    now,
                    transfer,
                    &peer,
                    prompt_hash,
                    deadline,
                    &traceparent,
                ) {
                    return;
                }
                let Some(peer) = self.admit(now, transfer, &peer, Side::Sender) else { return };
                let (turn, side) = (turn!(self, now), Side::Sender);
                let phase = Phase::Expecting { prompt_hash };
                let outgoing =
                    Transfer::begin(&turn, transfer, peer, side, deadline, traceparent, phase);
                self.insert(now, outgoing);
            }
            Command::Written { transfer, first_block, blocks } => {
                self.with_transfer(now, transfer, |outgoing, turn| {
                    outgoing.written(turn, first_block, blocks);
                });
            }
            Command::Finish { transfer, first_index, token } => {
                self.with_transfer(now, transfer, |outgoing, turn| {
                    outgoing.finish(turn, first_index, token);
                });
            }
            Command::Connect { peer, sends, guard: _ } => self.connect(now, &peer, sends),
            Command::Abort { transfer, reason } => self.abort(now, transfer, reason),
            Command::WeightsChanged { weight_version } => {
                self.on_weights_changed(now, weight_version);
            }
        }
    }

    /// Connected pairs stay: each `RESERVE` names the new version, and peers that have it too
    /// continue. Rejected pairs are closed, because they may match now.
    fn on_weights_changed(&mut self, now: Instant, to: u64) {
        let from = std::mem::replace(&mut self.local.identity.weight_version, to);
        if from == to {
            return;
        }
        let failure = TransferFailure::WeightsChanged { from, to };
        let transfers: Vec<TransferId> = self.transfers.keys().copied().collect();
        for id in transfers {
            self.with_transfer(now, id, |side, turn| {
                side.on_weights_changed(turn, failure.clone())
            });
        }
        let refused = self.pairs.values().filter(|pair| pair.refusal().is_some());
        let refused: Vec<Epoch> = refused.map(|pair| pair.peer().epoch).collect();
        for epoch in refused {
            self.close_pair(epoch);
        }
    }

    /// Aborts all transfers with `reason`.
    pub fn abort_all(&mut self, now: Instant, reason: &str) {
        let transfers: Vec<TransferId> = self.transfers.keys().copied().collect();
        for transfer in transfers {
            self.abort(now, transfer, reason.to_owned());
        }
    }

    pub fn handle_control(&mut self, now: Instant, from: &Source, message: ControlMessage) {
        let ControlMessage { traceparent, body } = message;
        match body {
            Body::Hello(hello) => return self.on_hello(now, from, &hello),
            Body::HelloOk(ok) => {
                return self.with_pair(now, from.epoch, |pair, turn| pair.on_hello_ok(turn, &ok));
            }
            Body::Reject { reason, identity } => {
                return self.with_pair(now, from.epoch, |pair, turn| {
                    pair.on_reject(turn, reason, &identity)
                });
            }
            _ => {}
        }
        // A peer without a completed handshake may have another model. It retransmits.
        match self.pairs.get_mut(&from.epoch) {
            Some(pair) if pair.is_up() => pair.heard(now),
            // The peer has lost the pair and aborts its transfers.
            Some(_)
                if matches!(&body, Body::Abort { transfer, .. }
                if self.transfers.contains_key(transfer)) => {}
            Some(_) | None => return turn!(self, now).refuse("pair_not_up"),
        }
        match body {
            Body::Hello(_) | Body::HelloOk(_) | Body::Reject { .. } => {}
            Body::Reserve(reserve) => self.on_reserve(now, from, reserve, traceparent),
            Body::Chunk { transfer, chunk, first_block, block_count, bytes } => {
                self.with_incoming(now, from, transfer, &traceparent, |incoming, turn| {
                    incoming.on_chunk(turn, chunk, first_block, block_count, bytes);
                });
            }
            Body::ClearToSend { transfer, chunk } => {
                self.with_outgoing_of(now, from, transfer, |outgoing, turn| {
                    outgoing.on_clear_to_send(turn, chunk);
                });
            }
            Body::Done(done) => {
                self.with_incoming(now, from, done.transfer, &traceparent, |incoming, turn| {
                    incoming.on_done(turn, done);
                });
            }
            Body::Ack { transfer } => {
                self.with_outgoing_of(now, from, transfer, |outgoing, turn| outgoing.on_ack(turn));
            }
            Body::Abort { transfer, cause, reason } => {
                self.on_abort(now, from, transfer, cause, reason);
            }
            Body::AbortAck { transfer } => self.on_abort_ack(now, from, transfer),
            Body::Heartbeat { transfers, awaited } => {
                self.on_heartbeat(now, from, &transfers, &awaited);
            }
        }
    }

    pub fn handle_data(&mut self, now: Instant, event: DataEvent) {
        match event {
            DataEvent::Sent { transfer, chunk, integrity } => {
                self.with_transfer(now, transfer, |outgoing, turn| {
                    outgoing.on_sent(turn, chunk, integrity);
                });
            }
            DataEvent::Received { transfer, chunk, integrity } => {
                self.with_transfer(now, transfer, |incoming, turn| {
                    incoming.on_received(turn, chunk, integrity);
                });
            }
            DataEvent::Released { transfer } => {
                self.with_transfer(now, transfer, |side, turn| side.on_released(turn));
            }
            DataEvent::Failed { transfer, reason } => {
                self.with_transfer(now, transfer, |side, turn| side.on_data_failed(turn, reason));
            }
            DataEvent::Closed { peer, reason } => self.handle_peer_failed(now, peer, &reason),
        }
    }

    /// Handles a local failure of the connection: its queue is full or a data connection has
    /// closed.
    pub fn handle_peer_failed(&mut self, now: Instant, peer: Epoch, reason: &str) {
        self.lose_pair(now, peer, reason);
    }

    /// Handles due deadlines. Must be called at [`Core::next_deadline`]; extra calls do no harm.
    pub fn on_deadline(&mut self, now: Instant) {
        self.tombstones.forget_old(now);
        for transfer in self.transfers.values_mut() {
            transfer.on_deadline(&mut turn!(self, now));
        }
        self.bury_all(now);
        let epochs: Vec<Epoch> = self.pairs.keys().copied().collect();
        for epoch in epochs {
            let Some(pair) = self.pairs.get_mut(&epoch) else { continue };
            match pair.on_deadline(&mut turn!(self, now)) {
                Some(Close::Idle) => self.close_pair(epoch),
                Some(Close::Lost { reason }) => self.lose_pair(now, epoch, &reason),
                None if pair.is_heartbeat_due(now) => self.send_heartbeat(now, epoch),
                None => {}
            }
        }
    }

    /// Returns when to call [`Core::on_deadline`] if no other event occurs.
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let transfers = self.transfers.values().filter_map(Transfer::next_deadline);
        let pair_idle = self.local.limits.pair_idle;
        let pairs = self.pairs.values().map(|pair| pair.next_deadline(now, pair_idle));
        transfers.chain(pairs).chain(self.tombstones.next_deadline()).min()
    }

    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Returns the number of transfers whose final event has not been emitted.
    pub fn active_count(&self) -> usize {
        self.transfers.values().filter(|transfer| transfer.is_unfinished()).count()
    }

    pub fn pairs(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.values()
    }

    /// Returns the table sizes: transfers, early ones among them, tombstones.
    pub fn table_sizes(&self) -> (usize, usize, usize) {
        (self.transfers.len(), self.early_count(), self.tombstones.len())
    }

    fn abort(&mut self, now: Instant, transfer: TransferId, reason: String) {
        if !self.transfers.contains_key(&transfer) {
            // A transfer may be cancelled before it starts.
            let tombstone = Tombstone::Failed { cause: AbortCause::Unspecified, reason };
            return self.tombstones.bury(now, transfer, tombstone);
        }
        self.with_transfer(now, transfer, |side, turn| side.abort(turn, reason));
    }

    fn on_abort(
        &mut self,
        now: Instant,
        from: &Source,
        transfer: TransferId,
        cause: AbortCause,
        reason: String,
    ) {
        if !self.transfers.contains_key(&transfer) {
            let reason = format!("{} aborted: {reason}", from.node_id);
            self.tombstones.bury(now, transfer, Tombstone::Failed { cause, reason });
            return turn!(self, now).send(from.epoch, Body::AbortAck { transfer });
        }
        self.with_transfer_of(now, from, transfer, |side, turn| side.on_abort(turn, cause, reason));
    }

    fn on_abort_ack(&mut self, now: Instant, from: &Source, transfer: TransferId) {
        if self.transfers.contains_key(&transfer) {
            self.with_transfer_of(now, from, transfer, |side, _| side.on_abort_ack());
        }
    }

    fn bury(&mut self, now: Instant, id: TransferId) {
        let Some(transfer) = self.transfers.get(&id) else { return };
        let Some(tombstone) = transfer.tombstone() else { return };
        let peer = transfer.peer.epoch;
        self.transfers.remove(&id);
        self.tombstones.bury(now, id, tombstone);
        if let Some(pair) = self.pairs.get_mut(&peer) {
            pair.end(now, id);
        }
    }

    fn bury_all(&mut self, now: Instant) {
        let over: Vec<TransferId> = self
            .transfers
            .iter()
            .filter(|(_, transfer)| transfer.tombstone().is_some())
            .map(|(id, _)| *id)
            .collect();
        for id in over {
            self.bury(now, id);
        }
    }

    fn with_transfer(
        &mut self,
        now: Instant,
        id: TransferId,
        act: impl FnOnce(&mut Transfer, &mut Turn<'_>),
    ) {
        if let Some(transfer) = self.transfers.get_mut(&id) {
            act(transfer, &mut turn!(self, now));
            self.bury(now, id);
        }
    }

    /// Handles a control message: only the peer of a transfer may act on it.
    fn with_transfer_of(
        &mut self,
        now: Instant,
        from: &Source,
        id: TransferId,
        act: impl FnOnce(&mut Transfer, &mut Turn<'_>),
    ) {
        match self.transfers.get_mut(&id) {
            Some(transfer) if transfer.peer.epoch == from.epoch => {
                transfer.renew(now);
                self.with_transfer(now, id, act);
            }
            Some(_) => turn!(self, now).refuse("not_its_peer"),
            None => turn!(self, now).refuse("transfer_unknown"),
        }
    }

    fn with_outgoing_of(
        &mut self,
        now: Instant,
        from: &Source,
        id: TransferId,
        act: impl FnOnce(&mut Transfer, &mut Turn<'_>),
    ) {
        self.with_transfer_of(now, from, id, |transfer, turn| match transfer.side {
            Side::Sender => act(transfer, turn),
            Side::Receiver => turn.refuse("wrong_side"),
        });
    }

    /// Handles `CHUNK` and `DONE`. A sender whose transfer has ended here gets the outcome, with
    /// its own trace context.
    fn with_incoming(
        &mut self,
        now: Instant,
        from: &Source,
        transfer: TransferId,
        traceparent: &str,
        act: impl FnOnce(&mut Transfer, &mut Turn<'_>),
    ) {
        if self.transfers.contains_key(&transfer) {
            return self.with_transfer_of(now, from, transfer, |transfer, turn| {
                match transfer.side {
                    Side::Receiver => act(transfer, turn),
                    Side::Sender => turn.refuse("wrong_side"),
                }
            });
        }
        let answer = match self.tombstones.get(transfer) {
            Some(Tombstone::Complete) => Body::Ack { transfer },
            Some(Tombstone::Failed { cause, reason }) => {
                Body::Abort { transfer, cause: *cause, reason: reason.clone() }
            }
            None => Body::give_up(transfer, "unknown transfer".to_owned()),
        };
        turn!(self, now).send_traced(from.epoch, answer, traceparent);
    }
}
