//! The receiving end: one thread starts copies, another waits for their completion.

use std::{io, net::TcpStream, sync::atomic::AtomicBool, time::Duration};

use kernels::{
    BlockWrite,
    peer::{Moving, PeerBlocks},
};

use super::super::{
    Ended, Incoming,
    chunk_ends::{Lend, Step, invalid, start_and_complete, until_done, verify_and_release},
    message::{Message, Messages},
    stream::POLL,
};
use crate::{transfer_kind::TransferKind, transport::ChunkId};

/// Started copies queued behind the one whose completion is polled.
const COPIES_QUEUED_MAX: usize = 2;
/// A copy that takes longer is logged: the GPU is faulty, and the blocks stay held.
const COPY_WARN_AFTER: Duration = Duration::from_secs(10);

/// A chunk to be answered.
struct Copy {
    chunk: ChunkId,
    /// The copy in flight; `None` if no receive was posted for the chunk.
    pull: Option<Box<dyn Moving<BlockWrite>>>,
}

/// Receives chunks until the peer closes the connection between two messages, or an error occurs.
pub(in crate::data) fn pull_chunks(
    incoming: &Incoming<'_>,
    stream: &mut TcpStream,
) -> io::Result<Ended> {
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
    mut pull: Box<dyn Moving<BlockWrite>>,
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
