//! Dispatches events to the pair or transfer that they concern, and bounds the number of both.

mod begin;
mod pairs;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use super::{
    event_context::{Action, Counters, DataEvent, EventContext, Local, RESERVED_BLOCKS_MAX},
    pair::{Close, Pair},
    tombstone::{Tombstone, Tombstones},
    transfer::{Phase, Side, Transfer},
};
use crate::{
    api::{Command, Epoch, Peer, TransferFailure, TransferId},
    config::ANSWER_TIMEOUT_MAX,
    control::{AbortCause, Body, ControlMessage, Reserve},
};

/// Longest deadline, so that adding it to a time cannot overflow.
const DEADLINE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// All pairs and transfers of one process.
pub struct Core {
    context: EventContext,
    pairs: BTreeMap<Epoch, Pair>,
    transfers: BTreeMap<TransferId, Transfer>,
    tombstones: Tombstones,
    /// Peers with which only `tcp` is common: connecting in advance has no benefit.
    tcp_only: BTreeSet<Epoch>,
}

impl Core {
    pub fn new(now: Instant, local: Local) -> Self {
        Self {
            tombstones: Tombstones::new(local.limits.tombstones_max),
            context: EventContext {
                now,
                local,
                actions: VecDeque::new(),
                counters: Counters::default(),
                pairs_created: 0,
            },
            pairs: BTreeMap::new(),
            transfers: BTreeMap::new(),
            tcp_only: BTreeSet::new(),
        }
    }

    pub fn handle_command(&mut self, now: Instant, command: Command) {
        self.context.now = now;
        match command {
            Command::Receive {
                transfer,
                peer,
                prompt_hash,
                first_block,
                blocks,
                answer_timeout,
                deadline,
                traceparent,
            } => {
                if blocks.len() > RESERVED_BLOCKS_MAX {
                    let reason = format!(
                        "cannot receive {} blocks; expected at most {RESERVED_BLOCKS_MAX}",
                        blocks.len()
                    );
                    let failure = TransferFailure::Aborted { reason };
                    return self.context.emit(Side::Receiver.failed(transfer, failure));
                }
                let identity = &self.context.local.identity;
                let reserve = Reserve {
                    transfer,
                    model_fingerprint: identity.model_fingerprint,
                    weight_version: identity.weight_version,
                    prompt_hash,
                    first_block,
                    blocks,
                };
                let phase = Phase::Connecting { reserve };
                if self.admit(transfer, &peer, Side::Receiver) {
                    self.begin(transfer, peer.peer(), deadline, traceparent, phase);
                    self.with_transfer(transfer, |incoming, context| {
                        incoming.begin_lease(context.now, answer_timeout.min(ANSWER_TIMEOUT_MAX));
                    });
                    if self.pairs.get(&peer.epoch).is_some_and(Pair::is_up) {
                        self.with_transfer(transfer, Transfer::on_pair_up);
                    }
                }
            }
            Command::Send { transfer, peer, prompt_hash, deadline, traceparent } => {
                if self.has_reserve(transfer, &peer) {
                    let chunk_bytes_max = self.chunk_bytes_max(peer.epoch);
                    self.with_transfer(transfer, |outgoing, context| {
                        let deadline = deadline.min(DEADLINE_MAX);
                        outgoing.on_expect(
                            context,
                            chunk_bytes_max,
                            prompt_hash,
                            deadline,
                            traceparent,
                        );
                    });
                } else if self.admit(transfer, &peer, Side::Sender) {
                    let phase = Phase::Expecting { prompt_hash };
                    self.begin(transfer, peer.peer(), deadline, traceparent, phase);
                }
            }
            Command::Written { transfer, first_block, blocks } => {
                self.with_transfer(transfer, |side, context| {
                    side.written(context, first_block, blocks)
                });
            }
            Command::Finish { transfer, first_index, token } => {
                self.with_transfer(transfer, |side, context| {
                    side.finish(context, first_index, token)
                });
            }
            Command::Connect { peer, sends, guard: _ } => self.connect(&peer, sends),
            Command::ChangeWeights { weight_version } => {
                self.context.local.identity.weight_version = weight_version;
            }
            Command::Abort { transfer, reason } => self.abort(transfer, reason),
        }
    }

    /// Aborts all transfers with `reason`.
    pub fn abort_all(&mut self, now: Instant, reason: &str) {
        self.context.now = now;
        self.with_transfers(self.ids(), |side, context| side.abort(context, reason.to_owned()));
    }

    pub fn handle_control(&mut self, now: Instant, from: &Peer, message: ControlMessage) {
        self.context.now = now;
        let ControlMessage { traceparent, body } = message;
        if !body.is_handshake() && !self.accepts(from, &body) {
            return self.context.refuse("pair_not_up");
        }
        match body {
            Body::Hello(hello) => self.on_hello(from, &hello),
            Body::HelloOk(ok) => {
                self.with_pair(from.epoch, |pair, context| pair.on_hello_ok(context, &ok))
            }
            Body::Reject { reason, identity } => {
                self.with_pair(from.epoch, |pair, context| {
                    pair.on_reject(context, reason, &identity)
                });
            }
            Body::Reserve(reserve) => self.on_reserve(from, reserve, traceparent),
            Body::Chunk(chunk) => {
                self.with_incoming(from, chunk.transfer, &traceparent, |side, context| {
                    side.on_chunk(context, &chunk)
                });
            }
            Body::ClearToSend { transfer, chunk } => {
                if self.may_act(from, transfer, Some(Side::Sender)) {
                    self.with_transfer(transfer, |side, context| {
                        side.on_clear_to_send(context, chunk)
                    });
                }
            }
            Body::Done(done) => {
                self.with_incoming(from, done.transfer, &traceparent, |side, context| {
                    side.on_done(context, done)
                });
            }
            Body::Ack { transfer } => {
                if self.may_act(from, transfer, Some(Side::Sender)) {
                    self.with_transfer(transfer, Transfer::on_ack);
                }
            }
            Body::Abort { transfer, cause, reason } => {
                self.on_abort(from, transfer, cause, reason);
            }
            Body::AbortAck { transfer } => {
                if self.transfers.contains_key(&transfer) && self.may_act(from, transfer, None) {
                    self.with_transfer(transfer, |side, _| side.on_abort_ack());
                }
            }
            Body::Heartbeat { transfers, awaited } => self.on_heartbeat(from, &transfers, &awaited),
        }
    }

    pub fn handle_data(&mut self, now: Instant, event: DataEvent) {
        self.context.now = now;
        match event {
            DataEvent::Sent { transfer, chunk, integrity } => {
                self.with_transfer(transfer, |side, context| {
                    side.on_sent(context, chunk, integrity)
                });
            }
            DataEvent::Received { transfer, chunk, integrity } => {
                self.with_transfer(transfer, |side, context| {
                    side.on_received(context, chunk, integrity)
                });
            }
            DataEvent::Released { transfer } => {
                self.with_transfer(transfer, Transfer::on_released);
            }
            DataEvent::Failed { transfer, reason } => {
                self.with_transfer(transfer, |side, context| side.on_data_failed(context, reason));
            }
        }
    }

    /// Handles a local failure of the connection: its queue is full or a data connection has
    /// closed.
    pub fn handle_peer_failed(&mut self, now: Instant, peer: Epoch, reason: &str) {
        self.context.now = now;
        self.lose_pair(peer, reason);
    }

    /// Handles due deadlines. Must be called at [`Core::next_deadline`]; extra calls do no harm.
    pub fn on_deadline(&mut self, now: Instant) {
        self.context.now = now;
        self.tombstones.forget_old(now);
        self.with_transfers(self.ids(), Transfer::on_deadline);
        let epochs: Vec<Epoch> = self.pairs.keys().copied().collect();
        for epoch in epochs {
            let Some(pair) = self.pairs.get_mut(&epoch) else { continue };
            match pair.on_deadline(&mut self.context) {
                Some(Close::Idle) => self.close_pair(epoch),
                Some(Close::Lost { reason }) => self.lose_pair(epoch, &reason),
                None if pair.is_heartbeat_due(now) => self.send_heartbeat(epoch),
                None => {}
            }
        }
    }

    /// Returns when to call [`Core::on_deadline`] if no other event occurs.
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let transfers = self.transfers.values().filter_map(Transfer::next_deadline);
        let pair_idle = self.context.local.limits.pair_idle;
        let pairs = self.pairs.values().map(|pair| pair.next_deadline(now, pair_idle));
        transfers.chain(pairs).chain(self.tombstones.next_deadline()).min()
    }

    pub fn poll_action(&mut self) -> Option<Action> {
        self.context.actions.pop_front()
    }

    pub fn counters(&self) -> &Counters {
        &self.context.counters
    }

    /// Returns the number of transfers whose final event has not been emitted.
    pub fn active_count(&self) -> usize {
        self.transfers.values().filter(|transfer| transfer.is_unfinished()).count()
    }

    pub fn pairs(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.values()
    }

    pub fn has_pair(&self, peer: Epoch) -> bool {
        self.pairs.contains_key(&peer)
    }

    /// Returns the table sizes: transfers, early ones among them, tombstones.
    pub fn table_sizes(&self) -> (usize, usize, usize) {
        (self.transfers.len(), self.early_count(), self.tombstones.len())
    }

    fn abort(&mut self, transfer: TransferId, reason: String) {
        if self.transfers.contains_key(&transfer) {
            return self.with_transfer(transfer, |side, context| side.abort(context, reason));
        }
        // A transfer may be cancelled before it starts.
        let tombstone = Tombstone::Failed { cause: AbortCause::Unspecified, reason };
        self.tombstones.bury(self.context.now, transfer, tombstone);
    }

    fn on_abort(&mut self, from: &Peer, transfer: TransferId, cause: AbortCause, reason: String) {
        if !self.transfers.contains_key(&transfer) {
            let reason = format!("{} aborted: {reason}", from.node_id);
            self.tombstones.bury(self.context.now, transfer, Tombstone::Failed { cause, reason });
            self.context.send(from.epoch, Body::AbortAck { transfer });
        } else if self.may_act(from, transfer, None) {
            self.with_transfer(transfer, |side, context| side.on_abort(context, cause, reason));
        }
    }

    fn ids(&self) -> Vec<TransferId> {
        self.transfers.keys().copied().collect()
    }

    /// Lets a transfer act, and replaces a finished one by a tombstone.
    fn with_transfer(
        &mut self,
        id: TransferId,
        act: impl FnOnce(&mut Transfer, &mut EventContext),
    ) {
        let Some(transfer) = self.transfers.get_mut(&id) else { return };
        act(transfer, &mut self.context);
        let Some(tombstone) = transfer.tombstone() else { return };
        let peer = transfer.peer.epoch;
        self.transfers.remove(&id);
        self.tombstones.bury(self.context.now, id, tombstone);
        if let Some(pair) = self.pairs.get_mut(&peer) {
            pair.end(self.context.now, id);
        }
    }

    fn with_transfers(
        &mut self,
        ids: Vec<TransferId>,
        mut act: impl FnMut(&mut Transfer, &mut EventContext),
    ) {
        for id in ids {
            self.with_transfer(id, &mut act);
        }
    }

    /// Returns whether to handle a control message about transfers. A peer without a completed
    /// handshake may have another model; it retransmits. A peer that has lost the pair may still
    /// abort its transfers.
    fn accepts(&mut self, from: &Peer, body: &Body) -> bool {
        match self.pairs.get_mut(&from.epoch) {
            Some(pair) if pair.is_up() => {
                pair.heard(self.context.now);
                true
            }
            Some(_) => {
                matches!(body, Body::Abort { transfer, .. } if self.transfers.contains_key(transfer))
            }
            None => false,
        }
    }

    /// Returns whether a control message may act on the transfer: only the transfer's peer may send
    /// it, and only to a node on the transfer's `side`. Renews the lease.
    fn may_act(&mut self, from: &Peer, id: TransferId, side: Option<Side>) -> bool {
        let refused = match self.transfers.get_mut(&id) {
            None => "transfer_unknown",
            Some(transfer) if transfer.peer.epoch != from.epoch => "not_its_peer",
            Some(transfer) => {
                transfer.renew(self.context.now);
                if side.is_none_or(|side| side == transfer.side) {
                    return true;
                }
                "wrong_side"
            }
        };
        self.context.refuse(refused);
        false
    }

    /// Handles `CHUNK` and `DONE`. A sender whose transfer has ended here gets the outcome, with
    /// its own trace context.
    fn with_incoming(
        &mut self,
        from: &Peer,
        transfer: TransferId,
        traceparent: &str,
        act: impl FnOnce(&mut Transfer, &mut EventContext),
    ) {
        if self.transfers.contains_key(&transfer) {
            if self.may_act(from, transfer, Some(Side::Receiver)) {
                self.with_transfer(transfer, act);
            }
            return;
        }
        let unknown = || Body::give_up(transfer, "unknown transfer".to_owned());
        let ended = self.tombstones.get(transfer);
        let answer = ended.map_or_else(unknown, |ended| ended.answer(transfer));
        self.context.send_traced(from.epoch, answer, traceparent);
    }
}
