//! Transport `ipc`: the receiver's copy engines copy KV from the sender's GPU memory (CUDA IPC),
//! within one host.
//!
//! 1. The sender offers its memory. The receiver maps it once and answers `Ready`, or `Refused`
//!    with the reason; the sender then reconnects with another transport.
//! 2. When a chunk's KV is computed and its `CTS` has arrived, the sender lends the blocks
//!    (`Lend`). The receiver starts to copy them into the posted blocks, a few chunks at a time.
//! 3. When a copy has finished, the receiver reports the chunk and answers `Pulled`. Only then does
//!    the sender release its blocks.
//!
//! Safety:
//! * A sender that aborts a transfer waits for the answer or for the end of the connection. It
//!   releases the blocks at the end of the connection even if the peer still copies. Such a copy
//!   only reads, and its result is never used: the sender sends `DONE` only if every chunk was
//!   answered while it was lent.
//! * A receiver releases a block only after every copy into it has finished. It reports a chunk
//!   only if its connection is still the current one.
//! * A chunk without an answer for one lease closes the connection.

use std::{
    io,
    net::{Shutdown, TcpStream},
    sync::atomic::AtomicBool,
    thread,
    time::{Duration, Instant},
};

use kernels::{
    BlockWrite,
    peer::{PeerBlocks, TransferInFlight},
};

use super::{
    Ended, Incoming, Outgoing,
    chunk_ends::{Lend, Step, start_and_complete, unexpected, until_done, verify_and_release},
    invalid,
    message::{Message, Messages},
    stream::POLL,
};
use crate::{transfer_kind::TransferKind, transport::ChunkId};

/// Maximum number of unanswered chunks: the receiver copies some while the next chunks are queued.
const LENT_MAX: usize = 4;

/// Time-out for the receiver to map the memory.
const MAP_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of copies in flight behind the copy whose completion is polled.
const COPIES_QUEUED_MAX: usize = 2;
/// A copy that takes longer is logged: the GPU is probably faulty, and the blocks stay held.
const COPY_WARN_AFTER: Duration = Duration::from_secs(10);

/// Sends chunks until the outbox is closed or the connection ends.
pub(super) fn lend_chunks(
    outgoing: &Outgoing<'_>,
    export: Vec<u8>,
    mut stream: TcpStream,
) -> io::Result<Ended> {
    let Outgoing { shared, outbox, peer } = *outgoing;
    let mut answers = Messages::new(&stream, POLL)?;
    Message::Offer { export, verify: shared.transport.verify }.write(&mut stream)?;
    let verify = match outgoing.answer(&mut answers, Instant::now() + MAP_TIMEOUT)? {
        Ok(Message::Ready { verify }) => verify || shared.transport.verify,
        Ok(message) => return Err(unexpected(&message, "Ready")),
        Err(ended) => return Ok(ended),
    };
    shared.metrics.set_path(peer, TransferKind::Ipc);
    thread::scope(|scope| {
        thread::Builder::new().name("kv-data-answers".to_owned()).spawn_scoped(scope, || {
            outgoing.take_answers(answers, |message| match message {
                Message::Pulled { chunk } => {
                    outgoing.report(chunk, outbox.answered(chunk)?);
                    Ok(())
                }
                message => Err(unexpected(&message, "an answer to Lend").to_string()),
            });
        })?;
        let lent = outgoing.lend(&mut stream, LENT_MAX, verify);
        // Stops the other thread. Fails only if the connection has already closed.
        let _ = stream.shutdown(Shutdown::Both);
        lent
    })?;
    Ok(Ended::Closed)
}

/// A chunk to be answered.
struct Copy {
    chunk: ChunkId,
    /// The copy in flight; `None` if no receive was posted for the chunk.
    pull: Option<Box<dyn TransferInFlight<BlockWrite>>>,
}

/// Receives chunks until the peer closes the connection between two messages, or an error occurs.
pub(super) fn pull_chunks(incoming: &Incoming<'_>, stream: &mut TcpStream) -> io::Result<Ended> {
    let Incoming { shared, peer, .. } = *incoming;
    let mut messages = Messages::new(stream, POLL)?;
    let Some((export, verify)) = incoming.receive_offer(&mut messages)? else {
        return Ok(Ended::Closed);
    };
    let mut memory = match shared.gpu_memory().and_then(|memory| memory.import(&export)) {
        Ok(memory) => memory,
        Err(reason) => {
            tracing::warn!(%peer, reason, "cannot receive from this peer by ipc");
            shared.metrics.fell_back(TransferKind::Ipc);
            Message::Refused { reason: reason.clone() }.write(stream)?;
            return Ok(Ended::Refused { reason });
        }
    };
    Message::Ready { verify: shared.transport.verify }.write(stream)?;
    shared.metrics.set_path(peer, TransferKind::Ipc);
    let mut answers = stream.try_clone()?;
    let start = || start_copy(incoming, &mut *memory, &mut messages);
    let complete = |Copy { chunk, pull }| {
        let answer = match pull {
            Some(pull) => {
                complete_one(incoming, chunk, pull, verify)?;
                Message::Pulled { chunk }
            }
            None => Message::NotPosted { chunk },
        };
        answer.write(&mut answers)
    };
    start_and_complete(stream, COPIES_QUEUED_MAX, &AtomicBool::new(false), start, complete)
}

/// Reads one message and starts the copy that it asks for.
fn start_copy(
    incoming: &Incoming<'_>,
    memory: &mut dyn PeerBlocks,
    messages: &mut Messages,
) -> io::Result<Step<Copy>> {
    let (chunk, from, to) = match incoming.receive_lend(messages)? {
        Lend::Chunk { chunk, from, to } => (chunk, from, to),
        Lend::NotPosted { chunk } => {
            return Ok(Step::Started(Copy { chunk, pull: None }));
        }
        Lend::Nothing => return Ok(Step::Nothing),
        Lend::End(Ended::Refused { .. }) => {
            return Err(invalid("protocol error: unexpected message; expected Lend".to_owned()));
        }
        Lend::End(ended) => return Ok(Step::End(ended)),
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
        Ok(pull) => Ok(Step::Started(Copy { chunk, pull: Some(pull) })),
        Err(reason) => {
            let reason = format!("chunk {}: {reason}", chunk.index);
            incoming.report(chunk, Err(reason.clone()));
            Err(invalid(reason))
        }
    }
}

/// Waits for a copy, releases its blocks and reports it.
fn complete_one(
    incoming: &Incoming<'_>,
    chunk: ChunkId,
    mut pull: Box<dyn TransferInFlight<BlockWrite>>,
    verify: bool,
) -> io::Result<()> {
    let mut logged = false;
    let log_slow = |waited| {
        if waited > COPY_WARN_AFTER && !std::mem::replace(&mut logged, true) {
            let seconds = COPY_WARN_AFTER.as_secs();
            tracing::error!(seconds, "a copy between GPUs does not finish");
        }
        None
    };
    let completed = until_done(&mut *pull, log_slow)
        .and_then(|()| pull.finish())
        .and_then(|blocks| verify_and_release(blocks, verify))
        .map_err(|reason| format!("chunk {}: {reason}", chunk.index));
    incoming.report(chunk, completed.clone().and_then(|moved| incoming.if_current(moved)));
    completed.map(drop).map_err(io::Error::other)
}
