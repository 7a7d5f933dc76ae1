//! The sending end: lends blocks and releases them when the receiver has answered.

use std::{
    io,
    net::{Shutdown, TcpStream},
    thread,
    time::{Duration, Instant},
};

use super::super::{
    Ended, Outgoing,
    chunk_ends::unexpected,
    message::{Message, Messages},
    stream::POLL,
};
use crate::transfer_kind::TransferKind;

/// Unanswered chunks: the receiver copies a few and has the next ones queued.
const LENT_MAX: usize = 4;

/// Time-out for the receiver to map the memory.
const MAP_TIMEOUT: Duration = Duration::from_secs(10);

/// Sends chunks until the outbox is closed or the connection ends.
pub(in crate::data) fn lend_chunks(
    outgoing: &Outgoing<'_>,
    export: Vec<u8>,
    mut stream: TcpStream,
) -> io::Result<Ended> {
    let Outgoing { shared, outbox, peer } = *outgoing;
    let mut answers = Messages::new(&stream, POLL)?;
    Message::Offer { export, verify: shared.transport.verify }.write(&mut stream)?;
    let verify = match outgoing.answer(&mut answers, Instant::now() + MAP_TIMEOUT)? {
        Ok(Message::Ready { verify }) => verify || shared.transport.verify,
        Ok(message) => return Err(unexpected(&message, "Ready")),
        Err(ended) => return Ok(ended),
    };
    shared.metrics.set_path(peer, TransferKind::Ipc);
    thread::scope(|scope| {
        thread::Builder::new().name("kv-data-answers".to_owned()).spawn_scoped(scope, || {
            outgoing.take_answers(answers, |message| match message {
                Message::Pulled { chunk } => {
                    outgoing.report(chunk, outbox.answered(chunk)?);
                    Ok(())
                }
                message => Err(unexpected(&message, "an answer to Lend").to_string()),
            });
        })?;
        let lent = outgoing.lend(&mut stream, LENT_MAX, verify);
        // Stops the other thread. Fails only if the connection has already closed.
        let _ = stream.shutdown(Shutdown::Both);
        lent
    })?;
    Ok(Ended::Closed)
}
