//! Transport `ipc`: the receiver's copy engines copy KV from the sender's GPU memory (CUDA IPC),
//! within one host.
//!
//! 1. The sender offers its memory. The receiver maps the memory once per connection and answers
//!    `Ready`. If mapping fails, the receiver answers `Refused` with the reason, and the sender
//!    reconnects with another transport.
//! 2. When a chunk's KV is computed and the receiver has allowed the chunk (control message `CTS`),
//!    the sender lends the chunk's blocks (`Lend`). The receiver copies them into the blocks that
//!    it has posted for the chunk, a few chunks at a time.
//! 3. When a copy has finished, the receiver reports the chunk to its driver and answers `Pulled`.
//!    Only then does the sender release the lent blocks.
//!
//! Safety:
//! * A sender that aborts a transfer keeps lent blocks until the receiver answers or the connection
//!   ends. After the connection has ended, the receiver may still read released blocks. The result
//!   of such a copy is never used: the sender sends `DONE` only if the receiver has answered every
//!   chunk before its blocks were released.
//! * A receiver releases a block only after every copy into the block has finished. Copies of a
//!   connection that was closed or replaced are reported as failed.
//! * If the receiver does not answer a chunk within one lease, the sender closes the connection.

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
    chunk_ends::{
        PolledLend, Step, start_and_complete, unexpected, until_done, verify_and_release,
    },
    invalid,
    message::{Message, Messages},
    stream::POLL,
};
use crate::{config::LEASE, transfer_kind::TransferKind, transport::ChunkId};

/// Maximum number of lent chunks that the receiver has not answered. With several chunks, the
/// receiver always has a next chunk to copy.
const LENT_MAX: usize = 4;

/// Time-out of the sender while the receiver maps the memory.
const MAP_TIMEOUT: Duration = Duration::from_secs(10);

/// Capacity of the queue of copies in flight whose completion is not polled yet: copies complete in
/// order, and only the oldest one is polled.
const COPIES_QUEUED_MAX: usize = 2;
/// Time after which a running copy is logged as an error: the GPU is probably faulty. The blocks
/// stay borrowed until the copy finishes.
const COPY_WARN_AFTER: Duration = Duration::from_secs(10);

/// Sender: lends the chunks of the outbox until the outbox is closed or the connection ends.
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
            outgoing.take_answers(answers, LEASE, |message| match message {
                Message::Pulled { chunk } => {
                    outgoing.report(chunk, outbox.answered(chunk)?);
                    Ok(())
                }
                message => Err(unexpected(&message, "an answer to Lend").to_string()),
            });
        })?;
        let lent = outgoing.lend(&mut stream, LENT_MAX, verify);
        // Ends the thread that takes answers. Fails only if the connection has already closed.
        let _ = stream.shutdown(Shutdown::Both);
        lent
    })?;
    Ok(Ended::Closed)
}

/// A lent chunk that the receiver has not answered.
struct UnansweredChunk {
    chunk: ChunkId,
    /// The copy in flight; `None` if no receive was posted for the chunk.
    copy: Option<Box<dyn TransferInFlight<BlockWrite>>>,
}

/// Receiver: copies lent chunks until an error occurs, or the connection is closed between two
/// messages.
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
    let complete = |UnansweredChunk { chunk, copy }| {
        let answer = match copy {
            Some(copy) => {
                complete_copy(incoming, chunk, copy, verify)?;
                Message::Pulled { chunk }
            }
            None => Message::NotPosted { chunk },
        };
        answer.write(&mut answers)
    };
    start_and_complete(stream, COPIES_QUEUED_MAX, &AtomicBool::new(false), start, complete)
}

/// Polls for a message, and starts the copy of the chunk that the message lends.
fn start_copy(
    incoming: &Incoming<'_>,
    memory: &mut dyn PeerBlocks,
    messages: &mut Messages,
) -> io::Result<Step<UnansweredChunk>> {
    let (chunk, from, to) = match incoming.receive_lend(messages)? {
        PolledLend::Chunk { chunk, from, to } => (chunk, from, to),
        PolledLend::NotPosted { chunk } => {
            return Ok(Step::Started(UnansweredChunk { chunk, copy: None }));
        }
        PolledLend::Nothing => return Ok(Step::Nothing),
        PolledLend::End(Ended::Refused { .. }) => {
            return Err(invalid("protocol error: unexpected message; expected Lend".to_owned()));
        }
        PolledLend::End(ended) => return Ok(Step::End(ended)),
    };
    let started = if from.len() == to.len() {
        memory.pull(&from, to)
    } else {
        let reason =
            format!("{} blocks were lent; expected the {} that were posted", from.len(), to.len());
        // The posted blocks must be released before the chunk is reported.
        drop(to);
        Err(reason)
    };
    match started {
        Ok(copy) => Ok(Step::Started(UnansweredChunk { chunk, copy: Some(copy) })),
        Err(reason) => {
            let reason = format!("chunk {}: {reason}", chunk.index);
            incoming.report(chunk, Err(reason.clone()));
            Err(invalid(reason))
        }
    }
}

/// Waits for a copy, releases the copied blocks, and reports the chunk to the driver.
fn complete_copy(
    incoming: &Incoming<'_>,
    chunk: ChunkId,
    mut copy: Box<dyn TransferInFlight<BlockWrite>>,
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
    let completed = until_done(&mut *copy, log_slow)
        .and_then(|()| copy.finish())
        .and_then(|blocks| verify_and_release(blocks, verify))
        .map_err(|reason| format!("chunk {}: {reason}", chunk.index));
    incoming.report(chunk, completed.clone().and_then(|moved| incoming.if_current(moved)));
    completed.map(drop).map_err(io::Error::other)
}
