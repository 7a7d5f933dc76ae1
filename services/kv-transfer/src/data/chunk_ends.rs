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

/// Whether `DONE` may leave before a chunk has been answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Early {
    /// No receiver comes to the end of a chunk whose blocks were let go of.
    Always,
    /// One may, and would not notice unless chunks are verified.
    IfVerified,
}

/// Sender: says which blocks come next, at most so many chunks ahead, until the outbox is closed.
pub fn lend(
    shared: &Shared,
    outbox: &Outbox,
    stream: &mut TcpStream,
    ahead_max: usize,
    verify: bool,
    early: Early,
) -> io::Result<()> {
    while let Some(job) = outbox.next(ahead_max) {
        let blocks = job.blocks.iter().map(BlockRead::block).collect();
        let lend = Message::Lend { transfer: job.transfer, chunk: job.chunk, blocks };
        // What wrote them is done, on the device too, or they would not be here.
        let integrity = match verify {
            true => BlockRead::digest(&job.blocks).map_err(io::Error::other)?,
            false => 0,
        };
        let (transfer, chunk) = (job.transfer, job.chunk);
        // Before the message, which may be answered at once.
        outbox.lend(job, integrity);
        lend.write(stream)?;
        if verify || early == Early::Always {
            shared.report(DataEvent::Hashed { transfer, chunk, integrity });
        }
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

#[cfg(test)]
mod tests {
    use std::{
        net::TcpListener,
        sync::{Arc, atomic::AtomicU64},
        thread,
        time::{Duration, Instant},
    };

    use crossbeam_channel::bounded;
    use kernels::{BlockId, Dtype, KvArena, KvLayout};

    use super::*;
    use crate::{
        api::Epoch,
        carrier::Carrier,
        config::ClusterSecret,
        data::message::{Look, Messages},
        notice::Keys,
        resolve::Resolver,
        transport::Report,
    };

    /// Where a receiver may read blocks that the sender has let go of, nothing but a digest tells it.
    #[test]
    fn done_waits_for_answers_where_nothing_else_tells_whole_from_reused() {
        let layout = KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 8, dtype: Dtype::F32 };
        let arena = KvArena::host(layout, 1).unwrap();
        let transfer = TransferId(7);
        for (early, verify, is_told) in [
            (Early::Always, false, true),
            (Early::Always, true, true),
            (Early::IfVerified, true, true),
            (Early::IfVerified, false, false),
        ] {
            let (reports, reported) = bounded(4);
            let shared = Shared {
                me: Epoch(1),
                keys: Keys::derive(&ClusterSecret::new("the secret of this test").unwrap()),
                reports,
                resolver: Resolver::system(),
                counters: Arc::default(),
                connections: AtomicU64::new(0),
                memory: None,
                channels: None,
                offered: vec![Carrier::Tcp],
                nccl_blocks: None,
                verify,
            };
            let outbox = Outbox::new(1);
            outbox.push(transfer, 3, vec![arena.read(BlockId(0)).unwrap()]).unwrap();
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (other, _) = listener.accept().unwrap();
            let mut heard = Messages::new(&other, Duration::from_secs(20)).unwrap();
            thread::scope(|scope| {
                let lent = scope.spawn(|| lend(&shared, &outbox, &mut stream, 4, verify, early));
                let Look::Message(Message::Lend { chunk: 3, .. }) = heard.look().unwrap() else {
                    panic!("a chunk is lent")
                };
                outbox.close();
                lent.join().unwrap().unwrap();
            });
            let deadline = Instant::now() + Duration::from_millis(1);
            match reported.recv_deadline(deadline) {
                Ok(Report::Data(DataEvent::Hashed { chunk: 3, .. })) => assert!(is_told),
                Err(_) => assert!(!is_told, "{early:?}, {verify}"),
                other => panic!("{other:?}"),
            }
            assert!(matches!(outbox.give_back(transfer, 3), outbox::GivenBack::Wanted { .. }));
        }
    }
}
