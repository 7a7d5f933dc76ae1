//! The sending end: lends blocks, and takes them back when the receiver has answered.

use std::{
    io::{self, ErrorKind},
    net::{Shutdown, TcpStream},
    thread,
    time::{Duration, Instant},
};

use super::super::{
    Shared,
    chunk_ends::{lend, not_posted},
    message::{Look, Message, Messages},
    outbound::Ended,
    outbox::{GivenBack, Outbox},
    stream::LOOK,
};
use crate::{api::Epoch, config::LEASE, protocol::DataEvent, transfer_kind::TransferKind};

/// Chunks lent and not answered: the receiver copies a few and has the next at hand.
const LENT_MAX: usize = 4;

/// How long the receiver may take to map the memory.
const MAPPING_MAX: Duration = Duration::from_secs(10);

/// Until the outbox is closed or the connection ends.
pub(in crate::data) fn lend_chunks(
    shared: &Shared,
    outbox: &Outbox,
    peer: Epoch,
    export: Vec<u8>,
    mut stream: TcpStream,
) -> io::Result<Ended> {
    let mut answers = Messages::new(&stream, LOOK)?;
    Message::Offer { export, verify: shared.verify }.write(&mut stream)?;
    let deadline = Instant::now() + MAPPING_MAX;
    let verify = match answers.next_by(deadline, || outbox.is_closed())? {
        Some(Message::Ready { verify }) => verify || shared.verify,
        Some(Message::Refused { reason }) => return Ok(Ended::Refused { reason }),
        Some(other) => return Err(out_of_turn(&other)),
        None if outbox.is_closed() => return Ok(Ended::Closed),
        None => return Err(ErrorKind::UnexpectedEof.into()),
    };
    shared.counters.takes(peer, TransferKind::Ipc);
    thread::scope(|scope| {
        thread::Builder::new().name("kv-data-answers".to_owned()).spawn_scoped(scope, || {
            if let Err(reason) = take_answers(shared, outbox, answers) {
                outbox.break_off(reason);
            }
        })?;
        let lent = lend(outbox, &mut stream, LENT_MAX, verify);
        // Ends the other thread. Fails only when the connection is gone already.
        let _ = stream.shutdown(Shutdown::Both);
        lent
    })?;
    Ok(Ended::Closed)
}

/// Until the outbox is closed; the error is for people.
fn take_answers(shared: &Shared, outbox: &Outbox, mut answers: Messages) -> Result<(), String> {
    loop {
        match answers.look().map_err(|error| error.to_string())? {
            Look::Message(Message::Pulled { transfer, chunk }) => {
                match outbox.answered(transfer, chunk)? {
                    GivenBack::Wanted { integrity, bytes } => {
                        shared.counters.sent(bytes);
                        shared.report(DataEvent::Sent { transfer, chunk, integrity });
                    }
                    GivenBack::Released => shared.report(DataEvent::SendReleased { transfer }),
                    GivenBack::Cancelled | GivenBack::Unknown => {}
                }
            }
            Look::Message(Message::NotPosted { transfer, chunk }) => {
                not_posted(shared, outbox, transfer, chunk)?;
            }
            Look::Message(other) => return Err(out_of_turn(&other).to_string()),
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

fn out_of_turn(message: &Message) -> io::Error {
    let reason = match message {
        Message::Refused { reason } => format!("the peer refuses: {reason}"),
        _ => "the peer says what is not its turn to say".to_owned(),
    };
    io::Error::new(ErrorKind::InvalidData, reason)
}
