//! The sending end: says what it has, and sends when the receiver is ready for it.

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
    peer::{End, Moving, Patience, PeerChannel},
};

use super::{
    super::{
        Shared,
        chunk_ends::{lend, not_posted},
        message::{Look, Message, Messages},
        outbound::Ended,
        outbox::{GivenBack, Outbox},
        stream::LOOK,
    },
    GLANCE, JOINING_MAX, UNDER_WAY_MAX, until_done,
};
use crate::{
    api::{Epoch, TransferId},
    config::LEASE,
    protocol::DataEvent,
    transfer_kind::TransferKind,
};

/// Until the outbox is closed or the connection ends.
pub(in crate::data) fn send_chunks(
    shared: &Shared,
    outbox: &Outbox,
    peer: Epoch,
    invitation: Vec<u8>,
    mut stream: TcpStream,
) -> io::Result<Ended> {
    let Some(channels) = shared.channels.as_deref() else {
        return Ok(Ended::Refused { reason: "there is no GPU memory here".to_owned() });
    };
    let mut answers = Messages::new(&stream, LOOK)?;
    let offer = Message::Offer { export: invitation.clone(), verify: shared.verify };
    offer.write(&mut stream)?;
    let deadline = Instant::now() + JOINING_MAX;
    let accepted = match answer(&mut answers, outbox, deadline)? {
        Ok(Message::Accepted { answer }) => answer,
        Ok(_) => return Err(out_of_turn()),
        Err(ended) => return Ok(ended),
    };
    answers.set_look(GLANCE)?;
    let given_up = || outbox.is_closed() || answers.is_turned_down();
    let patience = Patience { deadline, given_up: &given_up };
    let told = (&invitation[..], &accepted[..]);
    let joined = channels.join(told, End::Sender, patience);
    answers.set_look(LOOK)?;
    let channel = match joined {
        Ok(channel) => channel,
        Err(reason) => {
            // The receiver's reason, where that was it; or it has left, which says nothing of the transport.
            match answer(&mut answers, outbox, Instant::now()) {
                Ok(Err(ended)) => return Ok(ended),
                Ok(Ok(_)) => {}
                Err(error) if error.kind() == ErrorKind::TimedOut => {}
                Err(error) => return Err(error),
            }
            take_leave(&mut stream, &mut answers, &reason);
            return Ok(Ended::Refused { reason });
        }
    };
    let verify = match answer(&mut answers, outbox, deadline)? {
        Ok(Message::Ready { verify }) => verify || shared.verify,
        Ok(_) => return Err(out_of_turn()),
        Err(ended) => return Ok(ended),
    };
    shared.counters.takes(peer, TransferKind::Nccl);
    let (departed, under_way) = bounded(UNDER_WAY_MAX);
    let said = thread::scope(|scope| {
        let named = |name: &str| thread::Builder::new().name(name.to_owned());
        named("kv-data-answers").spawn_scoped(scope, || {
            if let Err(reason) = take_answers(outbox, shared, answers, &*channel, departed) {
                outbox.break_off(reason);
            }
        })?;
        let landing = named("kv-data-landing").spawn_scoped(scope, || {
            if let Err(reason) = land(shared, outbox, &channel, &under_way) {
                outbox.break_off(reason);
            }
        });
        let said = landing.and_then(|_| lend(outbox, &mut stream, UNDER_WAY_MAX, verify));
        // Ends the other threads. Fails only when the connection is gone already.
        let _ = stream.shutdown(Shutdown::Both);
        said
    });
    // Nothing is under way any more, or there is an abort that does not come back.
    if let Err(stuck) = channel.abort() {
        tracing::error!(%peer, stuck, "a channel between GPUs does not end");
        outbox.keep_what_goes();
    }
    said?;
    Ok(Ended::Closed)
}

/// Tells the receiver that we come again by another transport, so that it does not take us for dead. What it
/// has said meanwhile is read, for else the end of the connection would overtake this. In vain only where it
/// has gone itself.
fn take_leave(stream: &mut TcpStream, answers: &mut Messages, reason: &str) {
    let deadline = Instant::now() + LEASE;
    let told = Message::Refused { reason: reason.to_owned() }.write(stream);
    if told.and_then(|()| stream.shutdown(Shutdown::Write)).is_ok() {
        while let Ok(Look::Message(_) | Look::Nothing) = answers.look() {
            if Instant::now() >= deadline {
                break;
            }
        }
    }
}

/// What the receiver answers to the invitation, or when it has joined, or that this is the end.
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

/// A chunk whose half of the operation is in the stream.
struct Departed {
    transfer: TransferId,
    chunk: u32,
    moving: Box<dyn Moving<BlockRead>>,
}

/// Sends what the receiver is ready for, until the outbox is closed; the error is for people.
fn take_answers(
    outbox: &Outbox,
    shared: &Shared,
    mut answers: Messages,
    channel: &dyn PeerChannel,
    departed: Sender<Departed>,
) -> Result<(), String> {
    loop {
        match answers.look().map_err(|error| error.to_string())? {
            Look::Message(Message::Go { transfer, chunk, runs }) => {
                let blocks = outbox.take_lent(transfer, chunk).ok_or_else(|| {
                    format!("it is ready for chunk {chunk}, which is not its turn")
                })?;
                let moving = channel.send(&runs, blocks)?;
                if departed.send(Departed { transfer, chunk, moving }).is_err() {
                    return Ok(());
                }
            }
            Look::Message(Message::NotPosted { transfer, chunk }) => {
                not_posted(shared, outbox, transfer, chunk)?;
            }
            Look::Message(_) => return Err(out_of_turn().to_string()),
            Look::End => return Err("the peer closed it".to_owned()),
            Look::Nothing if outbox.is_closed() => return Ok(()),
            Look::Nothing => {
                if outbox.oldest().is_some_and(|since| since.elapsed() >= LEASE) {
                    return Err(format!("no answer to a chunk for {} s", LEASE.as_secs()));
                }
            }
        }
    }
}

/// Sees the ends of operations, in their order; to the last, whatever breaks.
fn land(
    shared: &Shared,
    outbox: &Outbox,
    channel: &Arc<dyn PeerChannel>,
    under_way: &Receiver<Departed>,
) -> Result<(), String> {
    let mut outcome = Ok(());
    for Departed { transfer, chunk, mut moving } in under_way {
        let in_vain = |waited| {
            if outbox.is_over() {
                Some("the data connection has ended".to_owned())
            } else if waited >= LEASE {
                Some(format!("chunk {chunk} was not taken for {} s", LEASE.as_secs()))
            } else {
                None
            }
        };
        let landed = until_done(&mut *moving, in_vain).and_then(|()| moving.finish());
        match landed.map(drop) {
            Ok(()) => match outbox.give_back(transfer, chunk) {
                GivenBack::Wanted { integrity, bytes } => {
                    shared.counters.sent(bytes);
                    shared.report(DataEvent::Sent { transfer, chunk, integrity });
                }
                GivenBack::Released => shared.report(DataEvent::SendReleased { transfer }),
                GivenBack::Cancelled | GivenBack::Unknown => {}
            },
            Err(reason) => {
                // What was in the stream has been ended with the channel, by whoever dropped it.
                if let Err(stuck) = channel.abort() {
                    tracing::error!(stuck, "a channel between GPUs does not end");
                }
                outbox.break_off(reason.clone());
                outcome = outcome.and(Err(reason));
            }
        }
    }
    outcome
}

fn out_of_turn() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "the peer says what is not its turn to say")
}
