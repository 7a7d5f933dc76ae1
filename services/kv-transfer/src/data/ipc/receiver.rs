//! The receiving end: one thread starts copies, another waits for their completion.

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
    chunk_ends::{give_back, report_failure, verify_and_release},
    inbound::Ended,
    inbox::Inbox,
    message::{Message, Messages, Polled},
    stream::POLL,
};
use crate::{
    api::{Epoch, TransferId},
    config::LEASE,
    transfer_kind::TransferKind,
};

/// Started copies queued behind the one whose completion is polled.
const COPIES_QUEUED_MAX: usize = 2;

/// Busy-poll for this long: longer than most copies take.
const SPIN: Duration = Duration::from_millis(2);
/// Interval between polls after that.
const PAUSE: Duration = Duration::from_micros(50);
/// A copy that takes longer is logged: the GPU is faulty, and the blocks stay held.
const COPY_WARN_AFTER: Duration = Duration::from_secs(10);

/// A chunk to be answered.
struct Copy {
    transfer: TransferId,
    chunk: u32,
    /// The copy in copy; `None` if no receive was posted for the chunk.
    pull: Option<Box<dyn Moving<BlockWrite>>>,
}

/// Receives chunks until the peer closes the connection between two messages, or an error occurs.
pub(in crate::data) fn pull_chunks(
    shared: &Shared,
    inbox: &Inbox,
    peer: Epoch,
    connection: u64,
    stream: &mut TcpStream,
) -> io::Result<Ended> {
    let mut messages = Messages::new(stream, POLL)?;
    let closed = || inbox.is_closed();
    let (export, verify) = match messages.next_by(Instant::now() + LEASE, closed)? {
        Some(Message::Offer { export, verify }) => (export, verify || shared.verify),
        Some(_) => {
            return Err(invalid("protocol error: unexpected message; expected Offer".to_owned()));
        }
        None => return Ok(Ended::Closed),
    };
    let imported = match &shared.memory {
        Some(memory) => memory.import(&export),
        None => Err("this node has no GPU memory".to_owned()),
    };
    let mut memory = match imported {
        Ok(memory) => memory,
        Err(reason) => {
            tracing::warn!(%peer, reason, "cannot receive from this peer by ipc");
            shared.counters.fell_back(TransferKind::Ipc);
            Message::Refused { reason }.write(stream)?;
            return Ok(Ended::Refused);
        }
    };
    Message::Ready { verify: shared.verify }.write(stream)?;
    shared.counters.set_path(peer, TransferKind::Ipc);
    let (started, completions) = bounded(COPIES_QUEUED_MAX);
    let mut answers = stream.try_clone()?;
    thread::scope(|scope| {
        let completing = || {
            let completed =
                complete_all(shared, inbox, connection, &completions, &mut answers, verify);
            // Wakes the other thread from its read. Fails only if the connection has already
            // closed.
            let _ = answers.shutdown(Shutdown::Both);
            completed
        };
        let completing = thread::Builder::new()
            .name("kv-data-done".to_owned())
            .spawn_scoped(scope, completing)?;
        let mut result = Ok(());
        loop {
            match start_copy(shared, inbox, &mut *memory, &mut messages) {
                Ok(Started::Copy(copy)) => {
                    if started.send(copy).is_err() {
                        break;
                    }
                }
                Ok(Started::Nothing) => {}
                Ok(Started::End) => break,
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        drop(started);
        let completed =
            completing.join().unwrap_or_else(|_| Err(io::Error::other("thread panicked")));
        result.and(completed)
    })?;
    Ok(Ended::Closed)
}

enum Started {
    Copy(Copy),
    Nothing,
    End,
}

/// Reads one message and starts the copy that it asks for.
fn start_copy(
    shared: &Shared,
    inbox: &Inbox,
    memory: &mut dyn PeerBlocks,
    messages: &mut Messages,
) -> io::Result<Started> {
    let (transfer, chunk, from) = match messages.poll()? {
        Polled::Message(Message::Lend { transfer, chunk, blocks }) => (transfer, chunk, blocks),
        Polled::Message(_) => {
            return Err(invalid("protocol error: unexpected message; expected Lend".to_owned()));
        }
        Polled::Nothing if inbox.is_closed() => return Ok(Started::End),
        Polled::Nothing => return Ok(Started::Nothing),
        Polled::End => return Ok(Started::End),
    };
    let Some(to) = inbox.take(transfer, chunk) else {
        // The transfer was cancelled here while the message was in flight.
        shared.counters.refuse("frame_not_posted");
        return Ok(Started::Copy(Copy { transfer, chunk, pull: None }));
    };
    let pulled = if from.len() == to.len() {
        memory.pull(&from, to)
    } else {
        let reason =
            format!("{} blocks were lent; expected the {} that were posted", from.len(), to.len());
        // The guards must be dropped before the chunk is reported.
        drop(to);
        Err(reason)
    };
    match pulled {
        Ok(pull) => Ok(Started::Copy(Copy { transfer, chunk, pull: Some(pull) })),
        Err(reason) => {
            let reason = format!("chunk {chunk}: {reason}");
            report_failure(shared, inbox, (transfer, chunk), reason.clone());
            Err(invalid(reason))
        }
    }
}

/// Waits for copies in order and answers them. Continues through the last copy after an error.
fn complete_all(
    shared: &Shared,
    inbox: &Inbox,
    connection: u64,
    started: &Receiver<Copy>,
    answers: &mut TcpStream,
    verify: bool,
) -> io::Result<()> {
    let mut outcome = Ok(());
    for Copy { transfer, chunk, pull } in started {
        let answer = match pull {
            Some(pull) => complete_one(shared, inbox, connection, transfer, chunk, pull, verify)
                .map(|()| Message::Pulled { transfer, chunk }),
            None => Ok(Message::NotPosted { transfer, chunk }),
        };
        outcome = outcome.and_then(|()| answer?.write(answers));
        if outcome.is_err() {
            // Wakes the other thread at once; copies in flight still complete. Fails only if the
            // connection has already closed.
            let _ = answers.shutdown(Shutdown::Both);
        }
    }
    outcome
}

/// Waits for a copy, releases its blocks and reports it.
fn complete_one(
    shared: &Shared,
    inbox: &Inbox,
    connection: u64,
    transfer: TransferId,
    chunk: u32,
    mut pull: Box<dyn Moving<BlockWrite>>,
    verify: bool,
) -> io::Result<()> {
    let completed = until_done(&mut *pull)
        .and_then(|()| pull.finish())
        .and_then(|blocks| verify_and_release(blocks, verify));
    match completed {
        Ok(completed) => {
            give_back(shared, inbox, connection, (transfer, chunk), completed);
            Ok(())
        }
        Err(reason) => {
            let reason = format!("chunk {chunk}: {reason}");
            report_failure(shared, inbox, (transfer, chunk), reason.clone());
            Err(io::Error::other(reason))
        }
    }
}

/// Polls for completion, because a blocking wait wakes up late.
fn until_done(pull: &mut dyn Moving<BlockWrite>) -> Result<(), String> {
    let start = Instant::now();
    let mut logged = false;
    while !pull.is_done()? {
        let waited = start.elapsed();
        if waited < SPIN {
            thread::yield_now();
            continue;
        }
        if waited > COPY_WARN_AFTER && !logged {
            tracing::error!(
                seconds = COPY_WARN_AFTER.as_secs(),
                "a copy between GPUs does not finish"
            );
            logged = true;
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason)
}
