//! The receiving end: one thread starts copies, another sees their ends.

use std::{
    io::{self, ErrorKind},
    net::{Shutdown, TcpStream},
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, bounded};
use kernels::{
    BlockWrite,
    peer::{Moving, PeerBlocks},
};

use super::super::{
    Shared,
    chunk_ends::{give_back, give_up, look_at},
    inbound::Ended,
    inbox::Inbox,
    message::{Look, Message, Messages},
    stream::LOOK,
};
use crate::{
    api::{Epoch, TransferId},
    config::LEASE,
    transfer_kind::TransferKind,
};

/// Copies that wait for their end to be seen, beside the one that is looked at.
const PULLS_WAITING_MAX: usize = 2;

/// For so long an end is looked for without a pause: longer than most copies take.
const SPIN: Duration = Duration::from_millis(2);
/// The pause between looks from then on.
const PAUSE: Duration = Duration::from_micros(50);
/// A copy that takes longer is spoken of: the GPU has a fault, and its blocks are not given back.
const PULL_MAX: Duration = Duration::from_secs(10);

/// A chunk that is to be answered.
struct Flight {
    transfer: TransferId,
    chunk: u32,
    /// The copy under way; `None` when nobody waits for the chunk.
    pull: Option<Box<dyn Moving<BlockWrite>>>,
}

/// Until the peer closes between two messages, or something breaks.
pub(in crate::data) fn pull_chunks(
    shared: &Shared,
    inbox: &Inbox,
    peer: Epoch,
    connection: u64,
    stream: &mut TcpStream,
) -> io::Result<Ended> {
    let mut messages = Messages::new(stream, LOOK)?;
    let closed = || inbox.is_closed();
    let (export, verify) = match messages.next_by(Instant::now() + LEASE, closed)? {
        Some(Message::Offer { export, verify }) => (export, verify || shared.verify),
        Some(_) => return Err(invalid("it offers no memory".to_owned())),
        None => return Ok(Ended::Closed),
    };
    let imported = match &shared.memory {
        Some(memory) => memory.import(&export),
        None => Err("there is no GPU memory here".to_owned()),
    };
    let mut memory = match imported {
        Ok(memory) => memory,
        Err(reason) => {
            tracing::warn!(%peer, reason, "KV does not come from this peer by ipc");
            shared.counters.fell_back(TransferKind::Ipc);
            Message::Refused { reason }.write(stream)?;
            return Ok(Ended::Refused);
        }
    };
    Message::Ready { verify: shared.verify }.write(stream)?;
    shared.counters.takes(peer, TransferKind::Ipc);
    let (flights, under_way) = bounded(PULLS_WAITING_MAX);
    let mut answers = stream.try_clone()?;
    thread::scope(|scope| {
        let landing = || {
            let landed = land(shared, inbox, connection, &under_way, &mut answers, verify);
            // Ends the other thread's reading. Fails only when the connection is gone already.
            let _ = answers.shutdown(Shutdown::Both);
            landed
        };
        let landing = thread::Builder::new()
            .name("kv-data-landing".to_owned())
            .spawn_scoped(scope, landing)?;
        let mut departed = Ok(());
        loop {
            match depart(shared, inbox, &mut *memory, &mut messages) {
                Ok(Departed::Flight(flight)) => {
                    if flights.send(flight).is_err() {
                        break;
                    }
                }
                Ok(Departed::Nothing) => {}
                Ok(Departed::End) => break,
                Err(error) => {
                    departed = Err(error);
                    break;
                }
            }
        }
        drop(flights);
        let landed = landing.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")));
        departed.and(landed)
    })?;
    Ok(Ended::Closed)
}

enum Departed {
    Flight(Flight),
    Nothing,
    End,
}

/// Takes one message, and starts the copy that it asks for.
fn depart(
    shared: &Shared,
    inbox: &Inbox,
    memory: &mut dyn PeerBlocks,
    messages: &mut Messages,
) -> io::Result<Departed> {
    let (transfer, chunk, from) = match messages.look()? {
        Look::Message(Message::Lend { transfer, chunk, blocks }) => (transfer, chunk, blocks),
        Look::Message(_) => return Err(invalid("it says what is not its turn to say".to_owned())),
        Look::Nothing if inbox.is_closed() => return Ok(Departed::End),
        Look::Nothing => return Ok(Departed::Nothing),
        Look::End => return Ok(Departed::End),
    };
    let Some(to) = inbox.take(transfer, chunk) else {
        // Cancelled here while it was on its way.
        shared.counters.refuse("frame_not_posted");
        return Ok(Departed::Flight(Flight { transfer, chunk, pull: None }));
    };
    let pulled = if from.len() == to.len() {
        memory.pull(&from, to)
    } else {
        let reason = format!("{} blocks where {} were posted", from.len(), to.len());
        // Before they are given back.
        drop(to);
        Err(reason)
    };
    match pulled {
        Ok(pull) => Ok(Departed::Flight(Flight { transfer, chunk, pull: Some(pull) })),
        Err(reason) => {
            let reason = format!("chunk {chunk}: {reason}");
            give_up(shared, inbox, (transfer, chunk), reason.clone());
            Err(invalid(reason))
        }
    }
}

/// Sees the ends of copies, in their order, and answers them; to the last, whatever breaks.
fn land(
    shared: &Shared,
    inbox: &Inbox,
    connection: u64,
    flights: &Receiver<Flight>,
    answers: &mut TcpStream,
    verify: bool,
) -> io::Result<()> {
    let mut outcome = Ok(());
    for Flight { transfer, chunk, pull } in flights {
        let answer = match pull {
            Some(pull) => land_one(shared, inbox, connection, transfer, chunk, pull, verify)
                .map(|()| Message::Pulled { transfer, chunk }),
            None => Ok(Message::NotPosted { transfer, chunk }),
        };
        outcome = outcome.and_then(|()| answer?.write(answers));
        if outcome.is_err() {
            // The other thread is to hear of it now, and what is under way still lands. Fails only
            // when the connection is gone already.
            let _ = answers.shutdown(Shutdown::Both);
        }
    }
    outcome
}

/// Waits for the end of a copy, gives its blocks back and reports it.
fn land_one(
    shared: &Shared,
    inbox: &Inbox,
    connection: u64,
    transfer: TransferId,
    chunk: u32,
    mut pull: Box<dyn Moving<BlockWrite>>,
    verify: bool,
) -> io::Result<()> {
    let landed = until_done(&mut *pull)
        .and_then(|()| pull.finish())
        .and_then(|blocks| look_at(blocks, verify));
    match landed {
        Ok(landed) => {
            give_back(shared, inbox, connection, (transfer, chunk), landed);
            Ok(())
        }
        Err(reason) => {
            let reason = format!("chunk {chunk}: {reason}");
            give_up(shared, inbox, (transfer, chunk), reason.clone());
            Err(io::Error::other(reason))
        }
    }
}

/// Looks for the end again and again: a call that waits for it is woken late.
fn until_done(pull: &mut dyn Moving<BlockWrite>) -> Result<(), String> {
    let start = Instant::now();
    let mut spoken = false;
    while !pull.is_done()? {
        let waited = start.elapsed();
        if waited < SPIN {
            thread::yield_now();
            continue;
        }
        if waited > PULL_MAX && !spoken {
            tracing::error!(seconds = PULL_MAX.as_secs(), "a copy between GPUs does not end");
            spoken = true;
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason)
}
