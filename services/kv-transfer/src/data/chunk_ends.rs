//! Start and end of a chunk, shared by `ipc` and `nccl`.
//!
//! Chunks are verified by the digest of their blocks ([`kernels::digest`]), which GPUs compute in
//! place. `tcp` instead hashes the bytes as they pass through host memory.

use std::{io, net::TcpStream};

use kernels::{BlockRead, BlockWrite};

use super::{Shared, inbox, inbox::Inbox, message::Message, outbox, outbox::Outbox};
use crate::{api::TransferId, protocol::DataEvent};

/// Integrity value and size in bytes of a written chunk.
pub type Landed = (u64, u64);

/// Sender: announces the blocks of queued chunks, at most `ahead_max` unanswered chunks at a time,
/// until the outbox is closed.
pub fn lend(
    outbox: &Outbox,
    stream: &mut TcpStream,
    ahead_max: usize,
    verify: bool,
) -> io::Result<()> {
    while let Some(job) = outbox.next(ahead_max) {
        let blocks = job.blocks.iter().map(BlockRead::block).collect();
        let lend = Message::Lend { transfer: job.transfer, chunk: job.chunk, blocks };
        // The kernels that wrote the blocks have finished, also on the device; otherwise the chunk
        // would not be queued.
        let integrity = match verify {
            true => BlockRead::digest(&job.blocks).map_err(io::Error::other)?,
            false => 0,
        };
        // Recorded before the message is sent, because the answer may come at once.
        outbox.lend(job, integrity);
        lend.write(stream)?;
    }
    Ok(())
}

/// Sender: handles the answer that the receiver has not posted this chunk.
pub fn not_posted(
    shared: &Shared,
    outbox: &Outbox,
    transfer: TransferId,
    chunk: u32,
) -> Result<(), String> {
    match outbox.answered(transfer, chunk)? {
        outbox::GivenBack::Wanted { .. } => {
            let reason = format!("the peer no longer waits for chunk {chunk}");
            shared.report(DataEvent::Failed { transfer, reason });
        }
        outbox::GivenBack::Released => shared.report(DataEvent::Released { transfer }),
        outbox::GivenBack::Cancelled | outbox::GivenBack::Unknown => {}
    }
    Ok(())
}

/// Receiver: hashes written blocks if asked to, and releases them.
pub fn verify_and_release(mut blocks: Vec<BlockWrite>, verify: bool) -> Result<Landed, String> {
    let bytes = blocks.iter().map(|block| block.byte_count() as u64).sum();
    let integrity = match verify {
        true => BlockWrite::digest(&mut blocks).map_err(|error| error.to_string())?,
        false => 0,
    };
    Ok((integrity, bytes))
}

/// Receiver: reports a written chunk, after the guards of its blocks were dropped.
pub fn give_back(
    shared: &Shared,
    inbox: &Inbox,
    connection: u64,
    (transfer, chunk): (TransferId, u32),
    (integrity, bytes): Landed,
) {
    let given_back = inbox.give_back(transfer, chunk);
    if given_back == inbox::GivenBack::Wanted && inbox.is_current(connection) {
        shared.counters.received(bytes);
        shared.report(DataEvent::Received { transfer, chunk, integrity });
    } else {
        report_unwritten(shared, transfer, given_back, "the data connection was closed".to_owned());
    }
}

/// Receiver: reports a chunk that failed, after all writes to its blocks have ended.
pub fn report_failure(
    shared: &Shared,
    inbox: &Inbox,
    (transfer, chunk): (TransferId, u32),
    reason: String,
) {
    report_unwritten(shared, transfer, inbox.give_back(transfer, chunk), reason);
}

fn report_unwritten(
    shared: &Shared,
    transfer: TransferId,
    given_back: inbox::GivenBack,
    reason: String,
) {
    match given_back {
        inbox::GivenBack::Wanted => shared.report(DataEvent::Failed { transfer, reason }),
        inbox::GivenBack::Released => shared.report(DataEvent::Released { transfer }),
        inbox::GivenBack::Cancelled => {}
    }
}
