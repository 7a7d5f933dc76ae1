//! The receiving end: one thread launches receives, another waits for their completion.

use std::{
    io::{self, ErrorKind},
    net::{Shutdown, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Instant,
};

use crossbeam_channel::{Receiver, bounded};
use kernels::{
    BlockWrite,
    peer::{End, Moving, PeerChannel, WaitLimit, runs},
};

use super::{
    super::{
        Shared,
        chunk_ends::{give_back, report_failure, verify_and_release},
        inbound::Ended,
        inbox::Inbox,
        message::{Message, Messages, Polled},
        stream::POLL,
    },
    IN_FLIGHT_MAX, JOIN_POLL, JOIN_TIMEOUT, until_done,
};
use crate::{
    api::{Epoch, TransferId},
    config::LEASE,
    protocol::DataEvent,
    transfer_kind::TransferKind,
};

/// A chunk whose receive is launched.
struct Launched {
    transfer: TransferId,
    chunk: u32,
    moving: Box<dyn Moving<BlockWrite>>,
}

/// Receives chunks until the peer closes the connection between two messages, or an error occurs.
pub(in crate::data) fn receive_chunks(
    shared: &Shared,
    inbox: &Inbox,
    peer: Epoch,
    connection: u64,
    stream: &mut TcpStream,
) -> io::Result<Ended> {
    let mut messages = Messages::new(stream, POLL)?;
    let closed = || inbox.is_closed();
    let (invitation, verify) = match messages.next_by(Instant::now() + LEASE, closed)? {
        Some(Message::Offer { export, verify }) => (export, verify || shared.verify),
        Some(_) => {
            return Err(invalid("protocol error: unexpected message; expected Offer".to_owned()));
        }
        None => return Ok(Ended::Closed),
    };
    let joined = match shared.channels.as_deref() {
        None => Err("this node has no GPU memory".to_owned()),
        Some(channels) => match channels.accept(&invitation, shared.nccl_max_ctas) {
            Ok(answer) => {
                // The sender joins at the same time as this node.
                Message::Accepted { answer: answer.clone() }.write(stream)?;
                messages.set_poll_timeout(JOIN_POLL)?;
                let cancelled = || !inbox.is_current(connection) || messages.has_input_or_closed();
                let deadline = Instant::now() + JOIN_TIMEOUT;
                let limit = WaitLimit { deadline, cancelled: &cancelled };
                let told = (&invitation[..], &answer[..]);
                channels.join(told, End::Receiver, limit)
            }
            Err(reason) => Err(reason),
        },
    };
    let channel = match joined {
        Ok(channel) => channel,
        // This node closed the connection, so the transport is not at fault.
        Err(_) if !inbox.is_current(connection) => return Ok(Ended::Closed),
        Err(reason) => {
            return match messages.poll()? {
                Polled::Nothing => {
                    refused(shared, peer, &reason);
                    Message::Refused { reason }.write(stream)?;
                    Ok(Ended::Refused)
                }
                // The sender reconnects with another transport.
                Polled::Message(Message::Refused { reason }) => {
                    refused(shared, peer, &reason);
                    Ok(Ended::Refused)
                }
                Polled::Message(_) => Err(invalid("protocol error: unexpected message".to_owned())),
                // The sender has died or no longer needs the connection.
                Polled::End => Ok(Ended::Closed),
            };
        }
    };
    messages.set_poll_timeout(POLL)?;
    Message::Ready { verify: shared.verify }.write(stream)?;
    shared.counters.set_path(peer, TransferKind::Nccl);
    // Two more chunks are in flight besides the queue: the one whose completion is polled, and the
    // one that waits for room.
    let (launched, in_flight) = bounded(IN_FLIGHT_MAX - 2);
    let (ended, other_end) = (AtomicBool::new(false), stream.try_clone()?);
    thread::scope(|scope| {
        let completing = || {
            let completed = complete_all(
                shared, inbox, connection, &channel, &in_flight, &other_end, &ended, verify,
            );
            // Wakes the other thread from its read. Fails only if the connection has already
            // closed.
            let _ = other_end.shutdown(Shutdown::Both);
            completed
        };
        let completing = thread::Builder::new()
            .name("kv-data-done".to_owned())
            .spawn_scoped(scope, completing)?;
        let mut result = Ok(Ended::Closed);
        loop {
            match launch_receive(shared, inbox, &*channel, &mut messages, stream) {
                Ok(Step::Launched(chunk)) => {
                    if launched.send(chunk).is_err() {
                        break;
                    }
                }
                Ok(Step::Nothing) => {}
                Ok(Step::End) => break,
                Ok(Step::Refused { reason }) => {
                    refused(shared, peer, &reason);
                    result = Ok(Ended::Refused);
                    break;
                }
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        // The sender sends nothing more, so receives in flight cannot complete.
        ended.store(true, Ordering::Release);
        drop(launched);
        let completed =
            completing.join().unwrap_or_else(|_| Err(io::Error::other("thread panicked")));
        completed.and(result)
    })
}

/// Records that NCCL does not work with this peer.
fn refused(shared: &Shared, peer: Epoch, reason: &str) {
    tracing::warn!(%peer, reason, "cannot receive from this peer by nccl");
    shared.counters.fell_back(TransferKind::Nccl);
}

enum Step {
    Launched(Launched),
    Nothing,
    End,
    /// The sender did not join and reconnects with another transport.
    Refused {
        reason: String,
    },
}

/// Reads one message, tells the sender to go, and launches the receive.
///
/// The order matters. Aborting another communicator waits for the whole GPU, and every CUDA driver
/// call then waits for that abort. A receive launched before its sender was told would block all of
/// them for ever.
fn launch_receive(
    shared: &Shared,
    inbox: &Inbox,
    channel: &dyn PeerChannel,
    messages: &mut Messages,
    stream: &mut TcpStream,
) -> io::Result<Step> {
    let (transfer, chunk, from) = match messages.poll()? {
        Polled::Message(Message::Lend { transfer, chunk, blocks }) => (transfer, chunk, blocks),
        Polled::Message(Message::Refused { reason }) => return Ok(Step::Refused { reason }),
        Polled::Message(_) => return Err(invalid("protocol error: unexpected message".to_owned())),
        Polled::Nothing if inbox.is_closed() => return Ok(Step::End),
        Polled::Nothing => return Ok(Step::Nothing),
        Polled::End => return Ok(Step::End),
    };
    let Some(to) = inbox.take(transfer, chunk) else {
        // The transfer was cancelled here while the message was in flight.
        shared.counters.refuse("frame_not_posted");
        Message::NotPosted { transfer, chunk }.write(stream)?;
        return Ok(Step::Nothing);
    };
    if from.len() != to.len() {
        let reason = format!(
            "chunk {chunk}: {} blocks were announced; expected the {} that were posted",
            from.len(),
            to.len()
        );
        // The guards must be dropped before the chunk is reported.
        drop(to);
        fail(shared, inbox, channel, (transfer, chunk), reason.clone());
        return Err(invalid(reason));
    }
    let pairs = from.iter().copied().zip(to.iter().map(BlockWrite::block));
    let runs: Vec<u32> = runs(pairs).iter().map(|run| run.count).collect();
    if let Err(error) = (Message::Go { transfer, chunk, runs: runs.clone() }).write(stream) {
        drop(to);
        fail(shared, inbox, channel, (transfer, chunk), error.to_string());
        return Err(error);
    }
    match channel.receive(&runs, to) {
        Ok(moving) => Ok(Step::Launched(Launched { transfer, chunk, moving })),
        Err(reason) => {
            // Closing the connection ends the sender's half.
            let reason = format!("chunk {chunk}: {reason}");
            fail(shared, inbox, channel, (transfer, chunk), reason.clone());
            Err(invalid(reason))
        }
    }
}

/// Waits for receives in order and reports them. Continues through the last receive after an error.
#[allow(clippy::too_many_arguments)] // Body of a thread.
fn complete_all(
    shared: &Shared,
    inbox: &Inbox,
    connection: u64,
    channel: &Arc<dyn PeerChannel>,
    in_flight: &Receiver<Launched>,
    other_end: &TcpStream,
    ended: &AtomicBool,
    verify: bool,
) -> io::Result<()> {
    let mut outcome = Ok(());
    for Launched { transfer, chunk, mut moving } in in_flight {
        let hopeless = |waited| {
            if inbox.is_closed() || ended.load(Ordering::Acquire) {
                Some("the data connection has closed".to_owned())
            } else if waited >= LEASE {
                Some(format!("received nothing for {} s", LEASE.as_secs()))
            } else {
                None
            }
        };
        let completed = until_done(&mut *moving, hopeless).and_then(|()| moving.finish());
        let completed = completed.and_then(|blocks| verify_and_release(blocks, verify));
        match completed {
            Ok(completed) => give_back(shared, inbox, connection, (transfer, chunk), completed),
            Err(reason) => {
                let reason = format!("chunk {chunk}: {reason}");
                fail(shared, inbox, &**channel, (transfer, chunk), reason.clone());
                outcome = outcome.and(Err(io::Error::other(reason)));
                // Ends the other thread's read, and with it the connection.
                ended.store(true, Ordering::Release);
            }
        }
        if outcome.is_err() {
            // Wakes the other thread at once. Fails only if the connection has already closed.
            let _ = other_end.shutdown(Shutdown::Both);
        }
    }
    outcome
}

/// Aborts the communicator and with it the receives in its stream, then releases the chunk's
/// blocks. If the abort does not return, the blocks stay held and the chunk is reported as failed.
fn fail(
    shared: &Shared,
    inbox: &Inbox,
    channel: &dyn PeerChannel,
    (transfer, chunk): (TransferId, u32),
    reason: String,
) {
    if let Err(stuck) = channel.abort() {
        tracing::error!(
            stuck,
            "cannot abort the NCCL communicator: the blocks in flight stay held"
        );
        let reason = format!("{reason}; {stuck}");
        return shared.report(DataEvent::Failed { transfer, reason });
    }
    report_failure(shared, inbox, (transfer, chunk), reason);
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason)
}
