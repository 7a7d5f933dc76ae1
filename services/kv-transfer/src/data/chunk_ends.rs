//! What `ipc` and `nccl` do alike with a chunk: how the sender lends it, how the receiver gives it back.
//!
//! Chunks are verified by the digest of their blocks ([`kernels::digest`]), which GPUs compute where the
//! blocks lie. (`tcp` has all bytes in host memory in order, and hashes them as they pass.)

use std::{io, net::TcpStream};

use kernels::{BlockRead, BlockWrite};

use super::{Shared, inbox, inbox::Inbox, message::Message, outbox, outbox::Outbox};
use crate::{api::TransferId, protocol::DataEvent};

/// Integrity and bytes of a chunk whose blocks are written.
pub type Landed = (u64, u64);

/// Sender: says which blocks come next, at most so many chunks ahead, until the outbox is closed.
pub fn lend(
    outbox: &Outbox,
    stream: &mut TcpStream,
    ahead_max: usize,
    verify: bool,
) -> io::Result<()> {
    while let Some(job) = outbox.next(ahead_max) {
        let blocks = job.blocks.iter().map(BlockRead::block).collect();
        let lend = Message::Lend { transfer: job.transfer, chunk: job.chunk, blocks };
        // What wrote them is done, on the device too, or they would not be here.
        let integrity = match verify {
            true => BlockRead::digest(&job.blocks).map_err(io::Error::other)?,
            false => 0,
        };
        // Before the message, which may be answered at once.
        outbox.lend(job, integrity);
        lend.write(stream)?;
    }
    Ok(())
}

/// Sender: the receiver has nowhere to put this chunk. The error is for people.
pub fn not_posted(
    shared: &Shared,
    outbox: &Outbox,
    transfer: TransferId,
    chunk: u32,
) -> Result<(), String> {
    match outbox.answered(transfer, chunk)? {
        outbox::GivenBack::Wanted { .. } => {
            let reason = format!("chunk {chunk} is not awaited any more");
            shared.report(DataEvent::Failed { transfer, reason });
        }
        outbox::GivenBack::Released => shared.report(DataEvent::SendReleased { transfer }),
        outbox::GivenBack::Cancelled | outbox::GivenBack::Unknown => {}
    }
    Ok(())
}

/// Receiver: looks at blocks that are written, and lets go of them. The error is for people.
pub fn look_at(mut blocks: Vec<BlockWrite>, verify: bool) -> Result<Landed, String> {
    let bytes = blocks.iter().map(|block| block.byte_count() as u64).sum();
    let integrity = match verify {
        true => BlockWrite::digest(&mut blocks).map_err(|error| error.to_string())?,
        false => 0,
    };
    Ok((integrity, bytes))
}

/// Receiver: the chunk is written, and no guard is in the way of whoever borrows its blocks.
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
        report_failed(shared, transfer, given_back, "the data connection was closed".to_owned());
    }
}

/// Receiver: the chunk is not written, and nothing writes its blocks any more.
pub fn give_up(
    shared: &Shared,
    inbox: &Inbox,
    (transfer, chunk): (TransferId, u32),
    reason: String,
) {
    report_failed(shared, transfer, inbox.give_back(transfer, chunk), reason);
}

fn report_failed(
    shared: &Shared,
    transfer: TransferId,
    given_back: inbox::GivenBack,
    reason: String,
) {
    match given_back {
        inbox::GivenBack::Wanted => shared.report(DataEvent::Failed { transfer, reason }),
        inbox::GivenBack::Released => shared.report(DataEvent::ReceiveReleased { transfer }),
        inbox::GivenBack::Cancelled => {}
    }
}
