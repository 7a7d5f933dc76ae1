//! The sending end: announces chunks and sends those that the receiver is ready for.

use std::{
    io::{self, ErrorKind},
    net::{Shutdown, TcpStream},
    thread,
    time::Instant,
};

use crossbeam_channel::{Receiver, bounded};
use kernels::{
    BlockRead,
    peer::{ChannelEnd, PeerChannel, TransferInFlight, WaitLimit},
};

use super::{
    super::{
        Ended, Outgoing,
        chunk_ends::unexpected,
        message::{Message, Messages, Polled},
        stream::POLL,
    },
    CHUNK_TIMEOUT, IN_FLIGHT_MAX, JOIN_POLL, JOIN_TIMEOUT, abort, complete,
};
use crate::{config::LEASE, transfer_kind::TransferKind, transport::ChunkId};

/// Sends chunks until the outbox is closed or the connection ends.
pub(in crate::data) fn send_chunks(
    outgoing: &Outgoing<'_>,
    invitation: Vec<u8>,
    mut stream: TcpStream,
) -> io::Result<Ended> {
    let Outgoing { shared, outbox, peer } = *outgoing;
    let channels = match shared.gpu_channels() {
        Ok(channels) => channels,
        Err(reason) => return Ok(Ended::Refused { reason }),
    };
    let mut answers = Messages::new(&stream, POLL)?;
    let offer = Message::Offer { export: invitation.clone(), verify: shared.transport.verify };
    offer.write(&mut stream)?;
    let deadline = Instant::now() + JOIN_TIMEOUT;
    let accepted = match outgoing.answer(&mut answers, deadline)? {
        Ok(Message::Accepted { answer }) => answer,
        Ok(message) => return Err(unexpected(&message, "Accepted")),
        Err(ended) => return Ok(ended),
    };
    answers.set_poll_timeout(JOIN_POLL)?;
    let cancelled = || outbox.is_closed() || answers.is_rejected_or_closed();
    let limit = WaitLimit { deadline, cancelled: &cancelled };
    let joined = channels.join((&invitation, &accepted), ChannelEnd::Sender, limit);
    answers.set_poll_timeout(POLL)?;
    let channel = match joined {
        Ok(channel) => channel,
        Err(reason) => {
            // If the receiver gave a reason, that reason counts. If it closed the connection, the
            // transport is not at fault.
            match outgoing.answer(&mut answers, Instant::now()) {
                Ok(Err(ended)) => return Ok(ended),
                Ok(Ok(_)) => {}
                Err(error) if error.kind() == ErrorKind::TimedOut => {}
                Err(error) => return Err(error),
            }
            send_refused(&mut stream, &mut answers, &reason);
            return Ok(Ended::Refused { reason });
        }
    };
    let verify = match outgoing.answer(&mut answers, deadline)? {
        Ok(Message::Ready { verify }) => verify || shared.transport.verify,
        Ok(message) => return Err(unexpected(&message, "Ready")),
        Err(ended) => return Ok(ended),
    };
    shared.metrics.set_path(peer, TransferKind::Nccl);
    let (launched, in_flight) = bounded(IN_FLIGHT_MAX);
    let result = thread::scope(|scope| {
        let named = |name: &str| thread::Builder::new().name(name.to_owned());
        let channel = &*channel;
        named("kv-data-answers").spawn_scoped(scope, move || {
            outgoing.take_answers(answers, CHUNK_TIMEOUT, |message| match message {
                Message::Go { chunk, runs } => {
                    let blocks = outbox.take_lent(chunk).ok_or_else(|| {
                        format!("protocol error: Go for unannounced chunk {}", chunk.index)
                    })?;
                    let moving = channel.send(&runs, blocks)?;
                    let sent = launched.send(Launched { chunk, moving });
                    sent.map_err(|_| "the thread that completes sends has ended".to_owned())
                }
                message => Err(unexpected(&message, "an answer to Lend").to_string()),
            });
        })?;
        let completing = named("kv-data-done").spawn_scoped(scope, || {
            if let Err(reason) = complete_all(outgoing, channel, &in_flight) {
                outbox.break_off(reason);
            }
        });
        let result = completing.and_then(|_| outgoing.lend(&mut stream, IN_FLIGHT_MAX, verify));
        // Stops the other threads. Fails only if the connection has already closed.
        let _ = stream.shutdown(Shutdown::Both);
        result
    });
    // No chunk is in flight here unless an abort does not return.
    if abort(&*channel).is_err() {
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
    let sent = Message::Refused { reason: reason.to_owned() }.write(stream);
    if sent.and_then(|()| stream.shutdown(Shutdown::Write)).is_ok() {
        while let Ok(Polled::Message(_) | Polled::Nothing) = answers.poll() {
            if Instant::now() >= deadline {
                break;
            }
        }
    }
}

/// A chunk whose send is launched.
struct Launched {
    chunk: ChunkId,
    moving: Box<dyn TransferInFlight<BlockRead>>,
}

/// Waits for sends in order and reports them. Continues through the last send after an error.
fn complete_all(
    outgoing: &Outgoing<'_>,
    channel: &dyn PeerChannel,
    in_flight: &Receiver<Launched>,
) -> Result<(), String> {
    let outbox = outgoing.outbox;
    let mut outcome = Ok(());
    for Launched { chunk, moving } in in_flight {
        let late = format!("the receiver did not take chunk {}", chunk.index);
        match complete(moving, || outbox.is_over(), &late).map(drop) {
            Ok(()) => outgoing.report(chunk, outbox.end_chunk(chunk)),
            Err(reason) => {
                // Ends the kernels in the stream. The connection's end handles a stuck abort.
                let _ = abort(channel);
                outbox.break_off(reason.clone());
                outcome = outcome.and(Err(reason));
            }
        }
    }
    outcome
}
