//! The sending end: announces chunks and sends those that the receiver is ready for.

use std::{
    io::{self, ErrorKind},
    net::{Shutdown, TcpStream},
    sync::Arc,
    thread,
    time::Instant,
};

use crossbeam_channel::{Receiver, Sender, bounded};
use kernels::{
    BlockRead,
    peer::{End, Moving, PeerChannel, WaitLimit},
};

use super::{
    super::{
        Shared,
        chunk_ends::{check_answers, lend, not_posted, report_sent, until_done},
        message::{Message, Messages, Polled},
        outbound::Ended,
        outbox::Outbox,
        stream::POLL,
    },
    IN_FLIGHT_MAX, JOIN_POLL, JOIN_TIMEOUT,
};
use crate::{
    api::{Epoch, TransferId},
    config::LEASE,
    transfer_kind::TransferKind,
};

/// Sends chunks until the outbox is closed or the connection ends.
pub(in crate::data) fn send_chunks(
    shared: &Shared,
    outbox: &Outbox,
    peer: Epoch,
    invitation: Vec<u8>,
    mut stream: TcpStream,
) -> io::Result<Ended> {
    let Some(channels) = shared.channels.as_deref() else {
        return Ok(Ended::Refused { reason: "this node has no GPU memory".to_owned() });
    };
    let mut answers = Messages::new(&stream, POLL)?;
    let offer = Message::Offer { export: invitation.clone(), verify: shared.transport.verify };
    offer.write(&mut stream)?;
    let deadline = Instant::now() + JOIN_TIMEOUT;
    let accepted = match answer(&mut answers, outbox, deadline)? {
        Ok(Message::Accepted { answer }) => answer,
        Ok(_) => return Err(unexpected()),
        Err(ended) => return Ok(ended),
    };
    answers.set_poll_timeout(JOIN_POLL)?;
    let cancelled = || outbox.is_closed() || answers.is_rejected_or_closed();
    let limit = WaitLimit { deadline, cancelled: &cancelled };
    let told = (&invitation[..], &accepted[..]);
    let joined = channels.join(told, End::Sender, limit);
    answers.set_poll_timeout(POLL)?;
    let channel = match joined {
        Ok(channel) => channel,
        Err(reason) => {
            // If the receiver gave a reason, that reason counts. If it closed the connection, the
            // transport is not at fault.
            match answer(&mut answers, outbox, Instant::now()) {
                Ok(Err(ended)) => return Ok(ended),
                Ok(Ok(_)) => {}
                Err(error) if error.kind() == ErrorKind::TimedOut => {}
                Err(error) => return Err(error),
            }
            send_refused(&mut stream, &mut answers, &reason);
            return Ok(Ended::Refused { reason });
        }
    };
    let verify = match answer(&mut answers, outbox, deadline)? {
        Ok(Message::Ready { verify }) => verify || shared.transport.verify,
        Ok(_) => return Err(unexpected()),
        Err(ended) => return Ok(ended),
    };
    shared.counters.set_path(peer, TransferKind::Nccl);
    let (launched, in_flight) = bounded(IN_FLIGHT_MAX);
    let result = thread::scope(|scope| {
        let named = |name: &str| thread::Builder::new().name(name.to_owned());
        named("kv-data-answers").spawn_scoped(scope, || {
            if let Err(reason) = take_answers(outbox, shared, answers, &*channel, launched) {
                outbox.break_off(reason);
            }
        })?;
        let completing = named("kv-data-done").spawn_scoped(scope, || {
            if let Err(reason) = complete_all(shared, outbox, &channel, &in_flight) {
                outbox.break_off(reason);
            }
        });
        let result = completing.and_then(|_| lend(outbox, &mut stream, IN_FLIGHT_MAX, verify));
        // Stops the other threads. Fails only if the connection has already closed.
        let _ = stream.shutdown(Shutdown::Both);
        result
    });
    // No chunk is in flight here unless an abort does not return.
    if let Err(stuck) = channel.abort() {
        tracing::error!(%peer, stuck, "cannot abort the NCCL communicator: the blocks in flight stay held");
        outbox.keep_stuck_chunks();
    }
    result?;
    Ok(Ended::Closed)
}

/// Tells the receiver that this node reconnects with another transport, so that the receiver does
/// not treat it as dead. Drains the receiver's messages first: closing a socket with unread data
/// would discard the message.
fn send_refused(stream: &mut TcpStream, answers: &mut Messages, reason: &str) {
    let deadline = Instant::now() + LEASE;
    let told = Message::Refused { reason: reason.to_owned() }.write(stream);
    if told.and_then(|()| stream.shutdown(Shutdown::Write)).is_ok() {
        while let Ok(Polled::Message(_) | Polled::Nothing) = answers.poll() {
            if Instant::now() >= deadline {
                break;
            }
        }
    }
}

/// Waits for the receiver's next answer. Returns `Ended` if the receiver refuses or the outbox is
/// closed.
fn answer(
    answers: &mut Messages,
    outbox: &Outbox,
    deadline: Instant,
) -> io::Result<Result<Message, Ended>> {
    match answers.next_by(deadline, || outbox.is_closed())? {
        Some(Message::Refused { reason }) => Ok(Err(Ended::Refused { reason })),
        Some(message) => Ok(Ok(message)),
        None if outbox.is_closed() => Ok(Err(Ended::Closed)),
        None => Err(ErrorKind::UnexpectedEof.into()),
    }
}

/// A chunk whose send is launched.
struct Launched {
    transfer: TransferId,
    chunk: u32,
    moving: Box<dyn Moving<BlockRead>>,
}

/// Sends chunks on `Go` until the outbox is closed. Returns the reason on failure.
fn take_answers(
    outbox: &Outbox,
    shared: &Shared,
    mut answers: Messages,
    channel: &dyn PeerChannel,
    launched: Sender<Launched>,
) -> Result<(), String> {
    loop {
        match answers.poll().map_err(|error| error.to_string())? {
            Polled::Message(Message::Go { transfer, chunk, runs }) => {
                let blocks = outbox.take_lent(transfer, chunk).ok_or_else(|| {
                    format!("protocol error: Go for chunk {chunk}, which was not announced")
                })?;
                let moving = channel.send(&runs, blocks)?;
                if launched.send(Launched { transfer, chunk, moving }).is_err() {
                    return Ok(());
                }
            }
            Polled::Message(Message::NotPosted { transfer, chunk }) => {
                not_posted(shared, outbox, transfer, chunk)?;
            }
            Polled::Message(_) => return Err(unexpected().to_string()),
            Polled::End => return Err("the peer closed the connection".to_owned()),
            Polled::Nothing if outbox.is_closed() => return Ok(()),
            Polled::Nothing => check_answers(outbox)?,
        }
    }
}

/// Waits for sends in order and reports them. Continues through the last send after an error.
fn complete_all(
    shared: &Shared,
    outbox: &Outbox,
    channel: &Arc<dyn PeerChannel>,
    in_flight: &Receiver<Launched>,
) -> Result<(), String> {
    let mut outcome = Ok(());
    for Launched { transfer, chunk, mut moving } in in_flight {
        let hopeless = |waited| {
            if outbox.is_over() {
                Some("the data connection has closed".to_owned())
            } else if waited >= LEASE {
                Some(format!("the receiver did not take chunk {chunk} for {} s", LEASE.as_secs()))
            } else {
                None
            }
        };
        let completed = until_done(&mut *moving, hopeless).and_then(|()| moving.finish());
        match completed.map(drop) {
            Ok(()) => {
                report_sent(shared, (transfer, chunk), outbox.give_back(transfer, chunk));
            }
            Err(reason) => {
                // Aborting the communicator has ended the kernels in the stream.
                if let Err(stuck) = channel.abort() {
                    tracing::error!(
                        stuck,
                        "cannot abort the NCCL communicator: the blocks in flight stay held"
                    );
                }
                outbox.break_off(reason.clone());
                outcome = outcome.and(Err(reason));
            }
        }
    }
    outcome
}

fn unexpected() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "protocol error: unexpected message")
}
