//! The receiving side of one transfer, at the decode node.
//!
//! 1. `Receive` brings the reserved blocks. `RESERVE` is sent when the pair is connected, and again
//!    until the sender names the transfer.
//! 2. Each `CHUNK` is checked against the reservation, its receive is posted, and `CTS` is sent.
//! 3. When every reserved block is written and `DONE` matches, including model and weights, `ACK`
//!    is sent and `Arrived` emitted.
//! 4. Every failure goes through `abort`.

use std::{collections::BTreeMap, time::Instant};

use super::{
    abort::AbortMessage,
    event_context::{Action, EventContext, Retry},
    transfer::{Phase, Transfer},
};
use crate::{
    api::{Event, TransferFailure, TransferStats},
    control::{Body, Chunk, Done, Reserve},
};

pub(super) struct Receiving {
    reserve: Reserve,
    /// Whether the sender has acknowledged `RESERVE`.
    pub is_named: bool,
    reserved_at: Instant,
    pub chunks: BTreeMap<u32, PostedChunk>,
    /// For each reserved block: whether a chunk covers it.
    covered: Vec<bool>,
    /// Time at which the latest chunk was written.
    written_at: Instant,
    pub done: Option<Done>,
}

pub(super) struct PostedChunk {
    /// Offset within the reservation, in blocks.
    offset: usize,
    block_count: usize,
    /// Set once the chunk is written.
    integrity: Option<u64>,
}

impl Receiving {
    /// Returns whether a posted chunk may still be written.
    pub(super) fn is_written(&self) -> bool {
        self.chunks.values().any(|chunk| chunk.integrity.is_none())
    }
}

impl Transfer {
    pub(super) fn on_pair_up(&mut self, context: &mut EventContext) {
        let Phase::Connecting { reserve } = &self.phase else { return };
        self.phase = Phase::Receiving(Receiving {
            is_named: false,
            reserved_at: context.now,
            chunks: BTreeMap::new(),
            covered: vec![false; reserve.blocks.len()],
            written_at: context.now,
            done: None,
            reserve: reserve.clone(),
        });
        self.retry = Retry::start(context.now);
        self.send_reserve(context);
    }

    pub(super) fn send_reserve(&self, context: &mut EventContext) {
        let Phase::Receiving(receiving) = &self.phase else { return };
        let reserve = Body::Reserve(receiving.reserve.clone());
        context.send_traced(self.peer.epoch, reserve, &self.traceparent);
    }

    pub(super) fn on_chunk(&mut self, context: &mut EventContext, announced: &Chunk) {
        let Chunk { chunk, first_block, block_count, bytes, .. } = *announced;
        let Phase::Receiving(receiving) = &mut self.phase else { return };
        let (transfer, reserve) = (self.id, &receiving.reserve);
        // A chunk has at least one block, so the reservation bounds this table.
        let known = receiving.chunks.get(&chunk);
        let offset = first_block.checked_sub(reserve.first_block).map(|offset| offset as usize);
        let range = offset.and_then(|offset| {
            let end = offset.checked_add(block_count as usize)?;
            (block_count > 0 && end <= reserve.blocks.len()).then_some(offset..end)
        });
        let problem = match (&range, known) {
            (Some(range), Some(known))
                if known.offset == range.start && known.block_count == range.len() =>
            {
                // Retransmitted: the answer was lost.
                return context.send(self.peer.epoch, Body::ClearToSend { transfer, chunk });
            }
            (_, Some(_)) => "it was announced with another range",
            (None, None) => "its range is not within the reservation",
            (Some(range), None) if receiving.covered[range.clone()].contains(&true) => {
                "its range overlaps another chunk"
            }
            (Some(range), None) if (range.len() * context.local.block_bytes) as u64 != bytes => {
                "its size does not match its blocks"
            }
            (Some(_), None) if chunk as usize >= reserve.blocks.len() => "its number is too large",
            (Some(range), None) => {
                receiving.covered[range.clone()].fill(true);
                receiving.chunks.insert(
                    chunk,
                    PostedChunk { offset: range.start, block_count: range.len(), integrity: None },
                );
                let (peer, blocks) = (self.peer.epoch, reserve.blocks[range.clone()].to_vec());
                context.act(Action::PostReceive { peer, transfer, chunk, blocks });
                return context.send(peer, Body::ClearToSend { transfer, chunk });
            }
        };
        let violation = format!(
            "CHUNK {chunk} of {block_count} blocks from {first_block}, {bytes} bytes: {problem}; \
             expected blocks within the {} reserved from {}",
            reserve.blocks.len(),
            reserve.first_block
        );
        self.broken(context, violation);
    }

    pub(super) fn on_received(&mut self, context: &mut EventContext, chunk: u32, integrity: u64) {
        let Phase::Receiving(receiving) = &mut self.phase else { return };
        if let Some(received) = receiving.chunks.get_mut(&chunk) {
            received.integrity = Some(integrity);
            receiving.written_at = context.now;
            self.complete_when_all_agrees(context);
        }
    }

    pub(super) fn on_done(&mut self, context: &mut EventContext, done: Done) {
        let Phase::Receiving(receiving) = &mut self.phase else { return };
        if receiving.done.is_some() {
            return;
        }
        let (chunks, reserved) = (done.chunk_count as usize, receiving.reserve.blocks.len());
        if chunks > reserved || done.integrity.len() != chunks {
            let violation = format!(
                "DONE names {chunks} chunks with {} integrity values; expected one per chunk and at most {reserved} chunks",
                done.integrity.len()
            );
            return self.broken(context, violation);
        }
        receiving.done = Some(done);
        self.complete_when_all_agrees(context);
    }

    /// Completes the transfer once `DONE` and all blocks have arrived, in any order.
    fn complete_when_all_agrees(&mut self, context: &mut EventContext) {
        let Phase::Receiving(receiving) = &self.phase else { return };
        let Some(done) = &receiving.done else { return };
        let (fingerprint, version) = (done.model_fingerprint, done.weight_version);
        if let Some(reason) = context.local.identity.weights_difference(fingerprint, version) {
            let failure = TransferFailure::Refused {
                peer: self.peer.node_id.clone(),
                reason: format!("DONE: {reason}"),
            };
            return self.fail(context, failure, AbortMessage::Abort);
        }
        if receiving.chunks.len() < done.integrity.len() || receiving.is_written() {
            return;
        }
        let reserved = receiving.reserve.blocks.len();
        let covered = receiving.covered.iter().filter(|covered| **covered).count();
        // Chunk numbers are unique, so equal counts and numbers below the count mean equal sets.
        let numbers_agree = receiving.chunks.len() == done.integrity.len()
            && receiving.chunks.keys().all(|number| (*number as usize) < done.integrity.len());
        if !numbers_agree || covered != reserved {
            let violation = format!(
                "DONE after {} chunks with {covered} of {reserved} blocks; it names {} chunks",
                receiving.chunks.len(),
                done.chunk_count
            );
            return self.broken(context, violation);
        }
        let damaged = receiving.chunks.iter().find_map(|(number, chunk)| {
            (chunk.integrity != Some(done.integrity[*number as usize])).then_some(*number)
        });
        if let Some(chunk) = damaged {
            return self.fail(context, TransferFailure::Damaged { chunk }, AbortMessage::Abort);
        }
        let event = Event::Arrived {
            transfer: self.id,
            first_index: done.first_index,
            token: done.token.clone(),
            stats: TransferStats {
                bytes: (reserved * context.local.block_bytes) as u64,
                chunks: done.chunk_count,
                elapsed: receiving.written_at.saturating_duration_since(receiving.reserved_at),
            },
        };
        let ack = Body::Ack { transfer: self.id };
        context.send_traced(self.peer.epoch, ack, &self.traceparent);
        self.phase = Phase::Complete;
        context.emit(event);
    }
}
