//! The sending end: lends blocks and releases them when the receiver has answered.

use std::{
    io::{self, ErrorKind},
    net::{Shutdown, TcpStream},
    thread,
    time::{Duration, Instant},
};

use super::super::{
    Shared,
    chunk_ends::{check_answers, lend, not_posted, report_sent},
    message::{Message, Messages, Polled},
    outbound::Ended,
    outbox::Outbox,
    stream::POLL,
};
use crate::{api::Epoch, transfer_kind::TransferKind};

/// Unanswered chunks: the receiver copies a few and has the next ones queued.
const LENT_MAX: usize = 4;

/// Time-out for the receiver to map the memory.
const MAP_TIMEOUT: Duration = Duration::from_secs(10);

/// Sends chunks until the outbox is closed or the connection ends.
pub(in crate::data) fn lend_chunks(
    shared: &Shared,
    outbox: &Outbox,
    peer: Epoch,
    export: Vec<u8>,
    mut stream: TcpStream,
) -> io::Result<Ended> {
    let mut answers = Messages::new(&stream, POLL)?;
    Message::Offer { export, verify: shared.transport.verify }.write(&mut stream)?;
    let deadline = Instant::now() + MAP_TIMEOUT;
    let verify = match answers.next_by(deadline, || outbox.is_closed())? {
        Some(Message::Ready { verify }) => verify || shared.transport.verify,
        Some(Message::Refused { reason }) => return Ok(Ended::Refused { reason }),
        Some(other) => return Err(unexpected(&other)),
        None if outbox.is_closed() => return Ok(Ended::Closed),
        None => return Err(ErrorKind::UnexpectedEof.into()),
    };
    shared.counters.set_path(peer, TransferKind::Ipc);
    thread::scope(|scope| {
        thread::Builder::new().name("kv-data-answers".to_owned()).spawn_scoped(scope, || {
            if let Err(reason) = take_answers(shared, outbox, answers) {
                outbox.break_off(reason);
            }
        })?;
        let lent = lend(outbox, &mut stream, LENT_MAX, verify);
        // Stops the other thread. Fails only if the connection has already closed.
        let _ = stream.shutdown(Shutdown::Both);
        lent
    })?;
    Ok(Ended::Closed)
}

/// Handles answers until the outbox is closed. Returns the reason on failure.
fn take_answers(shared: &Shared, outbox: &Outbox, mut answers: Messages) -> Result<(), String> {
    loop {
        match answers.poll().map_err(|error| error.to_string())? {
            Polled::Message(Message::Pulled { transfer, chunk }) => {
                report_sent(shared, (transfer, chunk), outbox.answered(transfer, chunk)?);
            }
            Polled::Message(Message::NotPosted { transfer, chunk }) => {
                not_posted(shared, outbox, transfer, chunk)?;
            }
            Polled::Message(other) => return Err(unexpected(&other).to_string()),
            Polled::End => return Err("the peer closed the connection".to_owned()),
            Polled::Nothing if outbox.is_closed() => return Ok(()),
            Polled::Nothing => check_answers(outbox)?,
        }
    }
}

fn unexpected(message: &Message) -> io::Error {
    let reason = match message {
        Message::Refused { reason } => format!("rejected by the peer: {reason}"),
        _ => "protocol error: unexpected message; expected an answer to Lend".to_owned(),
    };
    io::Error::new(ErrorKind::InvalidData, reason)
}
