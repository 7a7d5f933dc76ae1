//! Steps that the connections of several transports share.
//!
//! Chunks of `ipc` and `nccl` are verified by the digest of their blocks ([`kernels::digest`]),
//! which GPUs compute in place. `tcp` instead hashes the bytes as they pass through host memory.

use std::{
    io::{self, ErrorKind},
    net::{Shutdown, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::bounded;
use kernels::{BlockId, BlockRead, BlockWrite, peer::TransferInFlight};

use super::{
    Ended, Incoming, Moved, Outgoing,
    in_flight::ChunkOutcome,
    invalid,
    message::{Message, Messages, Polled},
};
use crate::{config::LEASE, protocol::DataEvent, transport::ChunkId};

/// Time of busy polling: longer than most chunks take.
const SPIN: Duration = Duration::from_millis(2);
/// Interval between polls after that.
const PAUSE: Duration = Duration::from_micros(50);

impl Outgoing<'_> {
    /// Waits for the receiver's next answer. Returns `Ended` if the receiver refuses or the outbox
    /// is closed.
    pub(crate) fn answer(
        &self,
        answers: &mut Messages,
        deadline: Instant,
    ) -> io::Result<Result<Message, Ended>> {
        match answers.next_by(deadline, || self.outbox.is_closed())? {
            Some(Message::Refused { reason }) => Ok(Err(Ended::Refused { reason })),
            Some(message) => Ok(Ok(message)),
            None if self.outbox.is_closed() => Ok(Err(Ended::Closed)),
            None => Err(ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Announces the blocks of queued chunks, at most `ahead_max` unanswered chunks at a time,
    /// until the outbox is closed.
    pub(crate) fn lend(
        &self,
        stream: &mut TcpStream,
        ahead_max: usize,
        verify: bool,
    ) -> io::Result<()> {
        while let Some(job) = self.outbox.next(ahead_max) {
            let blocks = job.blocks.iter().map(BlockRead::block).collect();
            let lend = Message::Lend { chunk: job.chunk, blocks };
            // The kernels that wrote the blocks have finished, also on the device; otherwise the
            // chunk would not be queued.
            let integrity = match verify {
                true => BlockRead::digest(&job.blocks).map_err(io::Error::other)?,
                false => 0,
            };
            // Recorded before the message is sent, because the answer may come at once.
            self.outbox.lend(job, integrity);
            lend.write(stream)?;
        }
        Ok(())
    }

    /// Handles answers until the outbox is closed. Breaks the connection on failure, and if the
    /// oldest chunk in flight has had no answer for `time_out`. `handle` gets the answers of one
    /// transport.
    pub(crate) fn take_answers(
        &self,
        mut answers: Messages,
        time_out: Duration,
        mut handle: impl FnMut(Message) -> Result<(), String>,
    ) {
        loop {
            let handled = match answers.poll() {
                Ok(Polled::Message(Message::NotPosted { chunk })) => self.not_posted(chunk),
                Ok(Polled::Message(message)) => handle(message),
                Ok(Polled::End) => Err("the peer closed the connection".to_owned()),
                Ok(Polled::Nothing) if self.outbox.is_closed() => return,
                Ok(Polled::Nothing) => match self.outbox.oldest() {
                    Some(since) if since.elapsed() >= time_out => Err(format!(
                        "received no answer to a chunk for {} ms",
                        time_out.as_millis()
                    )),
                    _ => Ok(()),
                },
                Err(error) => Err(error.to_string()),
            };
            if let Err(reason) = handled {
                return self.outbox.break_off(reason);
            }
        }
    }

    /// Handles the answer that the receiver has not posted this chunk.
    fn not_posted(&self, chunk: ChunkId) -> Result<(), String> {
        let ChunkId { transfer, index } = chunk;
        match self.outbox.answered(chunk)? {
            ChunkOutcome::Moved(_) => {
                let reason = format!("the peer no longer waits for chunk {index}");
                self.shared.report(DataEvent::Failed { transfer, reason });
            }
            ChunkOutcome::Released => self.shared.report(DataEvent::Released { transfer }),
            ChunkOutcome::Cancelled => {}
        }
        Ok(())
    }
}

/// Result of one step of the thread that starts chunks.
pub(super) enum Step<C> {
    Started(C),
    Nothing,
    End(Ended),
}

/// Outcome of polling for the sender's `Lend`.
pub(crate) enum PolledLend {
    /// The sender's blocks `from` are ready; `to` were posted for them.
    Chunk { chunk: ChunkId, from: Vec<BlockId>, to: Vec<BlockWrite> },
    /// No receive is posted: the transfer was cancelled here while the message was in flight.
    NotPosted { chunk: ChunkId },
    /// No message arrived.
    Nothing,
    /// The connection has ended.
    End(Ended),
}

impl Incoming<'_> {
    /// Waits for `Offer`. Returns its payload and whether to hash chunks; `None` if the connection
    /// closes first.
    pub(crate) fn receive_offer(
        &self,
        messages: &mut Messages,
    ) -> io::Result<Option<(Vec<u8>, bool)>> {
        match messages.next_by(Instant::now() + LEASE, || self.inbox.is_closed())? {
            Some(Message::Offer { export, verify }) => {
                Ok(Some((export, verify || self.shared.transport.verify)))
            }
            Some(message) => Err(unexpected(&message, "Offer")),
            None => Ok(None),
        }
    }

    /// Polls for `Lend` and takes the blocks that were posted for the chunk.
    pub(crate) fn receive_lend(&self, messages: &mut Messages) -> io::Result<PolledLend> {
        let (chunk, from) = match messages.poll()? {
            Polled::Message(Message::Lend { chunk, blocks }) => (chunk, blocks),
            Polled::Message(Message::Refused { reason }) => {
                return Ok(PolledLend::End(Ended::Refused { reason }));
            }
            Polled::Message(message) => return Err(unexpected(&message, "Lend")),
            Polled::Nothing if !self.inbox.is_closed() => return Ok(PolledLend::Nothing),
            Polled::Nothing | Polled::End => return Ok(PolledLend::End(Ended::Closed)),
        };
        Ok(match self.take(chunk) {
            Some(to) => PolledLend::Chunk { chunk, from, to },
            None => PolledLend::NotPosted { chunk },
        })
    }

    pub(crate) fn is_current(&self) -> bool {
        self.inbox.is_current(self.connection)
    }

    /// Fails if the chunk was written by a connection that is no longer the current one.
    pub(crate) fn if_current(&self, moved: Moved) -> Result<Moved, String> {
        let closed = || "the data connection was closed".to_owned();
        self.is_current().then_some(moved).ok_or_else(closed)
    }
}

/// Receiver: starts chunks on this thread and completes them in order on a second one, until
/// `start` ends or either fails. Completes every started chunk. Sets `ended` when no further chunk
/// starts.
pub(super) fn start_and_complete<C: Send>(
    stream: &TcpStream,
    queued_max: usize,
    ended: &AtomicBool,
    mut start: impl FnMut() -> io::Result<Step<C>>,
    mut complete: impl FnMut(C) -> io::Result<()> + Send,
) -> io::Result<Ended> {
    let (started, completions) = bounded(queued_max);
    thread::scope(|scope| {
        let complete_all = move || {
            let mut outcome = Ok(());
            for chunk in completions {
                let completed = complete(chunk);
                outcome = outcome.and(completed);
                if outcome.is_err() {
                    // Wakes the other thread from its read. Fails only if the connection has
                    // already closed.
                    ended.store(true, Ordering::Release);
                    let _ = stream.shutdown(Shutdown::Both);
                }
            }
            outcome
        };
        let completing = thread::Builder::new()
            .name("kv-data-done".to_owned())
            .spawn_scoped(scope, complete_all)?;
        let result = loop {
            match start() {
                Ok(Step::Started(chunk)) => {
                    if started.send(chunk).is_err() {
                        break Ok(Ended::Closed);
                    }
                }
                Ok(Step::Nothing) => {}
                Ok(Step::End(ended)) => break Ok(ended),
                Err(error) => break Err(error),
            }
        };
        // The connection has ended, so chunks that still wait for the sender cannot complete.
        ended.store(true, Ordering::Release);
        drop(started);
        let completed =
            completing.join().unwrap_or_else(|_| Err(io::Error::other("thread panicked")));
        completed.and(result)
    })
}

/// Polls until the operation has finished, or until `hopeless` returns the reason why it never
/// will. Does not block, because a blocked thread would wake up late.
pub(super) fn until_done<B>(
    moving: &mut dyn TransferInFlight<B>,
    mut hopeless: impl FnMut(Duration) -> Option<String>,
) -> Result<(), String> {
    let start = Instant::now();
    while !moving.is_done()? {
        let waited = start.elapsed();
        if waited < SPIN {
            thread::yield_now();
            continue;
        }
        if let Some(reason) = hopeless(waited) {
            return Err(reason);
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}

pub(super) fn unexpected(message: &Message, expected: &str) -> io::Error {
    invalid(match message {
        Message::Refused { reason } => format!("rejected by the peer: {reason}"),
        _ => format!("protocol error: unexpected message; expected {expected}"),
    })
}

/// Hashes received blocks if `verify` is set, and releases the blocks.
pub(super) fn verify_and_release(
    mut blocks: Vec<BlockWrite>,
    verify: bool,
) -> Result<Moved, String> {
    let bytes = blocks.iter().map(|block| block.byte_count() as u64).sum();
    let integrity = match verify {
        true => BlockWrite::digest(&mut blocks).map_err(|error| error.to_string())?,
        false => 0,
    };
    Ok(Moved { integrity, bytes })
}
