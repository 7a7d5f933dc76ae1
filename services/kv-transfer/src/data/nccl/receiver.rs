//! The receiving end: one thread launches receives, another waits for their completion.

use std::{
    io,
    net::TcpStream,
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use kernels::{
    BlockWrite,
    peer::{ChannelEnd, PeerChannel, TransferInFlight, WaitLimit, runs},
};

use super::{
    super::{
        Ended, Incoming,
        chunk_ends::{PolledLend, Step, start_and_complete, unexpected, verify_and_release},
        invalid,
        message::{Message, Messages, Polled},
        stream::POLL,
    },
    IN_FLIGHT_MAX, JOIN_POLL, JOIN_TIMEOUT, abort, complete, too_slow,
};
use crate::{protocol::DataEvent, transfer_kind::TransferKind, transport::ChunkId};

/// A chunk whose receive is launched.
struct Launched {
    chunk: ChunkId,
    moving: Box<dyn TransferInFlight<BlockWrite>>,
}

/// Receives chunks until the peer closes the connection between two messages, or an error occurs.
pub(in crate::data) fn receive_chunks(
    incoming: &Incoming<'_>,
    stream: &mut TcpStream,
) -> io::Result<Ended> {
    let Incoming { shared, inbox, peer, .. } = *incoming;
    let mut messages = Messages::new(stream, POLL)?;
    let Some((invitation, verify)) = incoming.receive_offer(&mut messages)? else {
        return Ok(Ended::Closed);
    };
    let accepted = shared.gpu_channels().and_then(|channels| {
        Ok((channels, channels.accept(&invitation, shared.transport.nccl_max_ctas)?))
    });
    let joined = match accepted {
        Ok((channels, answer)) => {
            // The sender joins at the same time as this node.
            Message::Accepted { answer: answer.clone() }.write(stream)?;
            messages.set_poll_timeout(JOIN_POLL)?;
            let cancelled = || !incoming.is_current() || messages.has_input_or_closed();
            let deadline = Instant::now() + JOIN_TIMEOUT;
            let limit = WaitLimit { deadline, cancelled: &cancelled };
            let joined = channels.join((&invitation, &answer), ChannelEnd::Receiver, limit);
            joined.and_then(|channel| {
                let slow = too_slow(shared.transport.choice, channel.probed_rate());
                slow.map_or(Ok(channel), Err)
            })
        }
        Err(reason) => Err(reason),
    };
    let channel = match joined {
        Ok(channel) => channel,
        // This node closed the connection, so the transport is not at fault.
        Err(_) if !incoming.is_current() => return Ok(Ended::Closed),
        Err(reason) => {
            return match messages.poll()? {
                Polled::Nothing => {
                    log_refusal(incoming, &reason);
                    Message::Refused { reason: reason.clone() }.write(stream)?;
                    Ok(Ended::Refused { reason })
                }
                // The sender reconnects with another transport.
                Polled::Message(Message::Refused { reason }) => {
                    log_refusal(incoming, &reason);
                    Ok(Ended::Refused { reason })
                }
                Polled::Message(message) => Err(unexpected(&message, "Refused")),
                // The sender has died or no longer needs the connection.
                Polled::End => Ok(Ended::Closed),
            };
        }
    };
    messages.set_poll_timeout(POLL)?;
    Message::Ready { verify: shared.transport.verify }.write(stream)?;
    shared.metrics.set_path(peer, TransferKind::Nccl);
    shared.metrics.probed(peer, channel.probed_rate());
    // Two more chunks are in flight besides those in the queue: the chunk whose completion is
    // polled, and the chunk that waits to enter the queue.
    let queued_max = IN_FLIGHT_MAX - 2;
    let (ended, mut answers) = (AtomicBool::new(false), stream.try_clone()?);
    let launch = || launch_receive(incoming, &*channel, &mut messages, &mut answers);
    let complete = |Launched { chunk, moving }| {
        let is_over = || inbox.is_closed() || ended.load(Ordering::Acquire);
        let completed = complete(moving, is_over, "received nothing");
        match completed.and_then(|blocks| verify_and_release(blocks, verify)) {
            Ok(moved) => {
                incoming.report(chunk, incoming.if_current(moved));
                Ok(())
            }
            Err(reason) => {
                let reason = format!("chunk {}: {reason}", chunk.index);
                fail(incoming, &*channel, chunk, reason.clone());
                Err(io::Error::other(reason))
            }
        }
    };
    start_and_complete(stream, queued_max, &ended, launch, complete)
}

/// Records that NCCL does not work with this peer.
fn log_refusal(incoming: &Incoming<'_>, reason: &str) {
    let Incoming { shared, peer, .. } = *incoming;
    tracing::warn!(%peer, reason, "cannot receive from this peer by nccl");
    shared.metrics.fell_back(TransferKind::Nccl);
}

/// Reads one message, answers `Go`, and launches the receive.
///
/// The order matters. Aborting another communicator waits for the whole GPU, and every CUDA driver
/// call then waits for that abort. A receive that was launched before its `Go` was sent would block
/// all of them forever.
fn launch_receive(
    incoming: &Incoming<'_>,
    channel: &dyn PeerChannel,
    messages: &mut Messages,
    stream: &mut TcpStream,
) -> io::Result<Step<Launched>> {
    let (chunk, from, to) = match incoming.receive_lend(messages)? {
        PolledLend::Chunk { chunk, from, to } => (chunk, from, to),
        PolledLend::NotPosted { chunk } => {
            Message::NotPosted { chunk }.write(stream)?;
            return Ok(Step::Nothing);
        }
        PolledLend::Nothing => return Ok(Step::Nothing),
        PolledLend::End(ended) => {
            // The sender did not join and reconnects with another transport.
            if let Ended::Refused { reason } = &ended {
                log_refusal(incoming, reason);
            }
            return Ok(Step::End(ended));
        }
    };
    if from.len() != to.len() {
        let reason = format!(
            "chunk {}: {} blocks were announced; expected the {} that were posted",
            chunk.index,
            from.len(),
            to.len()
        );
        // The guards must be dropped before the chunk is reported.
        drop(to);
        fail(incoming, channel, chunk, reason.clone());
        return Err(invalid(reason));
    }
    let pairs = from.iter().copied().zip(to.iter().map(BlockWrite::block));
    let runs: Vec<u32> = runs(pairs).iter().map(|run| run.count).collect();
    if let Err(error) = (Message::Go { chunk, runs: runs.clone() }).write(stream) {
        drop(to);
        fail(incoming, channel, chunk, error.to_string());
        return Err(error);
    }
    match channel.receive(&runs, to) {
        Ok(moving) => Ok(Step::Started(Launched { chunk, moving })),
        Err(reason) => {
            // Closing the connection ends the sender's half.
            let reason = format!("chunk {}: {reason}", chunk.index);
            fail(incoming, channel, chunk, reason.clone());
            Err(invalid(reason))
        }
    }
}

/// Ends the receives in the stream, then releases the chunk's blocks. If the abort does not return,
/// the blocks stay held and the chunk is reported as failed.
fn fail(incoming: &Incoming<'_>, channel: &dyn PeerChannel, chunk: ChunkId, reason: String) {
    if let Err(stuck) = abort(channel) {
        let reason = format!("{reason}; {stuck}");
        // No report ends this chunk, and the measured period must not last forever.
        incoming.shared.metrics.chunk_ended(incoming.peer, 0);
        return incoming.shared.report(DataEvent::Failed { transfer: chunk.transfer, reason });
    }
    incoming.report(chunk, Err(reason));
}
