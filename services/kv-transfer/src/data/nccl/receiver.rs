//! The receiving end: one thread makes ready for chunks, another sees their ends.

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
    peer::{End, Moving, Patience, PeerChannel, runs},
};

use super::{
    super::{
        Shared,
        chunk_ends::{give_back, give_up, look_at},
        inbound::Ended,
        inbox::Inbox,
        message::{Look, Message, Messages},
        stream::LOOK,
    },
    GLANCE, JOINING_MAX, UNDER_WAY_MAX, until_done,
};
use crate::{
    api::{Epoch, TransferId},
    config::LEASE,
    protocol::DataEvent,
    transfer_kind::TransferKind,
};

/// A chunk whose half of the operation is in the stream.
struct Awaited {
    transfer: TransferId,
    chunk: u32,
    moving: Box<dyn Moving<BlockWrite>>,
}

/// Until the peer closes between two messages, or something breaks.
pub(in crate::data) fn receive_chunks(
    shared: &Shared,
    inbox: &Inbox,
    peer: Epoch,
    connection: u64,
    stream: &mut TcpStream,
) -> io::Result<Ended> {
    let mut messages = Messages::new(stream, LOOK)?;
    let closed = || inbox.is_closed();
    let (invitation, verify) = match messages.next_by(Instant::now() + LEASE, closed)? {
        Some(Message::Offer { export, verify }) => (export, verify || shared.verify),
        Some(_) => return Err(invalid("it does not invite".to_owned())),
        None => return Ok(Ended::Closed),
    };
    let joined = match shared.channels.as_deref() {
        None => Err("there is no GPU memory here".to_owned()),
        Some(channels) => match channels.accept(&invitation, shared.nccl_max_ctas) {
            Ok(answer) => {
                // It joins while we do.
                Message::Accepted { answer: answer.clone() }.write(stream)?;
                messages.set_look(GLANCE)?;
                let given_up = || !inbox.is_current(connection) || messages.is_disturbed();
                let deadline = Instant::now() + JOINING_MAX;
                let patience = Patience { deadline, given_up: &given_up };
                let told = (&invitation[..], &answer[..]);
                channels.join(told, End::Receiver, patience)
            }
            Err(reason) => Err(reason),
        },
    };
    let channel = match joined {
        Ok(channel) => channel,
        // Given up here: that says nothing of the transport.
        Err(_) if !inbox.is_current(connection) => return Ok(Ended::Closed),
        Err(reason) => {
            return match messages.look()? {
                Look::Nothing => {
                    refused(shared, peer, &reason);
                    Message::Refused { reason }.write(stream)?;
                    Ok(Ended::Refused)
                }
                // It comes again by another transport.
                Look::Message(Message::Refused { reason }) => {
                    refused(shared, peer, &reason);
                    Ok(Ended::Refused)
                }
                Look::Message(_) => Err(invalid("it says what is not its turn to say".to_owned())),
                // It has died, or wants nothing any more.
                Look::End => Ok(Ended::Closed),
            };
        }
    };
    messages.set_look(LOOK)?;
    Message::Ready { verify: shared.verify }.write(stream)?;
    shared.counters.takes(peer, TransferKind::Nccl);
    // Beside the one whose end is looked for, and the one that is made ready before it waits for room.
    let (awaited, under_way) = bounded(UNDER_WAY_MAX - 2);
    let (ended, other_end) = (AtomicBool::new(false), stream.try_clone()?);
    thread::scope(|scope| {
        let landing = || {
            let landed =
                land(shared, inbox, connection, &channel, &under_way, &other_end, &ended, verify);
            // Ends the other thread's reading. Fails only when the connection is gone already.
            let _ = other_end.shutdown(Shutdown::Both);
            landed
        };
        let landing = thread::Builder::new()
            .name("kv-data-landing".to_owned())
            .spawn_scoped(scope, landing)?;
        let mut prepared = Ok(Ended::Closed);
        loop {
            match prepare(shared, inbox, &*channel, &mut messages, stream) {
                Ok(Prepared::Awaited(chunk)) => {
                    if awaited.send(chunk).is_err() {
                        break;
                    }
                }
                Ok(Prepared::Nothing) => {}
                Ok(Prepared::End) => break,
                Ok(Prepared::Refused { reason }) => {
                    refused(shared, peer, &reason);
                    prepared = Ok(Ended::Refused);
                    break;
                }
                Err(error) => {
                    prepared = Err(error);
                    break;
                }
            }
        }
        // Nobody sends any more: what is under way waits in vain.
        ended.store(true, Ordering::Release);
        drop(awaited);
        let landed = landing.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")));
        landed.and(prepared)
    })
}

/// The transport does not work with this peer.
fn refused(shared: &Shared, peer: Epoch, reason: &str) {
    tracing::warn!(%peer, reason, "KV does not come from this peer by nccl");
    shared.counters.fell_back(TransferKind::Nccl);
}

enum Prepared {
    Awaited(Awaited),
    Nothing,
    End,
    /// The other end did not join, and comes again by another transport.
    Refused {
        reason: String,
    },
}

/// Takes one message, says that the sender may go, and puts the receive that it is about into the stream.
///
/// In this order: an abort of another channel waits for the whole GPU, and who calls the driver then waits for
/// the abort. A receive in the stream whose sender has not been told would keep all of them for ever.
fn prepare(
    shared: &Shared,
    inbox: &Inbox,
    channel: &dyn PeerChannel,
    messages: &mut Messages,
    stream: &mut TcpStream,
) -> io::Result<Prepared> {
    let (transfer, chunk, from) = match messages.look()? {
        Look::Message(Message::Lend { transfer, chunk, blocks }) => (transfer, chunk, blocks),
        Look::Message(Message::Refused { reason }) => return Ok(Prepared::Refused { reason }),
        Look::Message(_) => return Err(invalid("it says what is not its turn to say".to_owned())),
        Look::Nothing if inbox.is_closed() => return Ok(Prepared::End),
        Look::Nothing => return Ok(Prepared::Nothing),
        Look::End => return Ok(Prepared::End),
    };
    let Some(to) = inbox.take(transfer, chunk) else {
        // Cancelled here while it was on its way.
        shared.counters.refuse("frame_not_posted");
        Message::NotPosted { transfer, chunk }.write(stream)?;
        return Ok(Prepared::Nothing);
    };
    if from.len() != to.len() {
        let reason = format!("chunk {chunk}: {} blocks where {} were posted", from.len(), to.len());
        // Before they are given back.
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
        Ok(moving) => Ok(Prepared::Awaited(Awaited { transfer, chunk, moving })),
        Err(reason) => {
            // The sender, which goes, is ended by the end of the connection.
            let reason = format!("chunk {chunk}: {reason}");
            fail(shared, inbox, channel, (transfer, chunk), reason.clone());
            Err(invalid(reason))
        }
    }
}

/// Sees the ends of operations, in their order; to the last, whatever breaks.
#[allow(clippy::too_many_arguments)] // It is the body of a thread.
fn land(
    shared: &Shared,
    inbox: &Inbox,
    connection: u64,
    channel: &Arc<dyn PeerChannel>,
    under_way: &Receiver<Awaited>,
    other_end: &TcpStream,
    ended: &AtomicBool,
    verify: bool,
) -> io::Result<()> {
    let mut outcome = Ok(());
    for Awaited { transfer, chunk, mut moving } in under_way {
        let in_vain = |waited| {
            if inbox.is_closed() || ended.load(Ordering::Acquire) {
                Some("the data connection has ended".to_owned())
            } else if waited >= LEASE {
                Some(format!("nothing came for {} s", LEASE.as_secs()))
            } else {
                None
            }
        };
        let landed = until_done(&mut *moving, in_vain).and_then(|()| moving.finish());
        let landed = landed.and_then(|blocks| look_at(blocks, verify));
        match landed {
            Ok(landed) => give_back(shared, inbox, connection, (transfer, chunk), landed),
            Err(reason) => {
                let reason = format!("chunk {chunk}: {reason}");
                fail(shared, inbox, &**channel, (transfer, chunk), reason.clone());
                outcome = outcome.and(Err(io::Error::other(reason)));
                // The other thread's reading ends, and with it the connection.
                ended.store(true, Ordering::Release);
            }
        }
        if outcome.is_err() {
            // The other thread is to hear of it now. Fails only when the connection is gone already.
            let _ = other_end.shutdown(Shutdown::Both);
        }
    }
    outcome
}

/// Ends the channel, and with it what is in its stream: nothing writes the blocks any more, which are
/// given back. Where it does not end they are not, and nobody is told that they were.
fn fail(
    shared: &Shared,
    inbox: &Inbox,
    channel: &dyn PeerChannel,
    (transfer, chunk): (TransferId, u32),
    reason: String,
) {
    if let Err(stuck) = channel.abort() {
        tracing::error!(stuck, "a channel between GPUs does not end");
        let reason = format!("{reason}; {stuck}");
        return shared.report(DataEvent::Failed { transfer, reason });
    }
    give_up(shared, inbox, (transfer, chunk), reason);
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason)
}
