//! Messages on data connections of `ipc` and `nccl`: a header, then the body.
//!
//! | bytes | field |
//! | --- | --- |
//! | 0..4 | `BKI1` |
//! | 4..8 | kind, little-endian |
//! | 8..12 | bytes of the body, little-endian |
//! | 12..20 | xxh3-64 of bytes 0..12 and the body, little-endian |
//!
//! Numbers in bodies are little-endian; transfer ids are big-endian.

use std::{
    io::{self, ErrorKind, Read},
    net::TcpStream,
    time::{Duration, Instant},
};

use kernels::{BlockId, peer::EXPORT_BYTES_MAX};
use xxhash_rust::xxh3::Xxh3;

use super::stream::{is_pause, read_exact_by, write_all_by};
use crate::{api::TransferId, config::LEASE, transport::ChunkId};

const MAGIC: [u8; 4] = *b"BKI1";
const HEADER_BYTES: usize = 20;
const CHECKED_BYTES: usize = 12;
/// Maximum length of a body in bytes. The longest body is a list of more blocks than a transfer may
/// have.
const BODY_BYTES_MAX: usize = 1 << 20;
/// The kind of [`Message::Refused`].
const REFUSED: u32 = 3;
/// Maximum length of a reason in bytes. Longer reasons are truncated.
const REASON_BYTES_MAX: usize = 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// Sender: the handle of its memory (`ipc`) or an invitation to a communicator (`nccl`).
    /// `verify`: the sender wants chunks hashed.
    Offer { export: Vec<u8>, verify: bool },
    /// Receiver: the memory is mapped, or the communicator joined. `verify`: the receiver wants
    /// chunks hashed.
    Ready { verify: bool },
    /// Either side: the transport does not work here.
    Refused { reason: String },
    /// Sender: this chunk is ready, in these blocks.
    Lend { chunk: ChunkId, blocks: Vec<BlockId> },
    /// Receiver: the blocks are copied.
    Pulled { chunk: ChunkId },
    /// Receiver: no receive is posted for this chunk.
    NotPosted { chunk: ChunkId },
    /// Receiver: the sender may send this chunk. `runs` are the lengths of the block ranges that
    /// are contiguous on both sides.
    Go { chunk: ChunkId, runs: Vec<u32> },
    /// Receiver: it joins the communicator. The sender needs `answer` to join too.
    Accepted { answer: Vec<u8> },
}

impl Message {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let of_chunk = |chunk: &ChunkId, numbers: &[u32]| {
            let mut body = chunk.transfer.to_bytes().to_vec();
            body.extend_from_slice(&chunk.index.to_le_bytes());
            body.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
            body
        };
        let (kind, body): (u32, Vec<u8>) = match self {
            Message::Offer { export, verify } => (1, [&[u8::from(*verify)], &export[..]].concat()),
            Message::Ready { verify } => (2, vec![u8::from(*verify)]),
            Message::Refused { reason } => {
                let end = reason.floor_char_boundary(REASON_BYTES_MAX.min(reason.len()));
                (REFUSED, reason[..end].into())
            }
            Message::Lend { chunk, blocks } => {
                let blocks: Vec<u32> = blocks.iter().map(|block| block.0).collect();
                (4, of_chunk(chunk, &blocks))
            }
            Message::Pulled { chunk } => (5, of_chunk(chunk, &[])),
            Message::NotPosted { chunk } => (6, of_chunk(chunk, &[])),
            Message::Go { chunk, runs } => (7, of_chunk(chunk, runs)),
            Message::Accepted { answer } => (8, answer.clone()),
        };
        let head = [MAGIC, kind.to_le_bytes(), (body.len() as u32).to_le_bytes()].concat();
        let check = check(&head, &body);
        [&head[..], &check, &body].concat()
    }

    fn from_body(kind: u32, body: &[u8]) -> Option<Self> {
        let of_chunk = || -> Option<(ChunkId, &[u8])> {
            let (transfer, rest) = body.split_at_checked(16)?;
            let (index, rest) = rest.split_first_chunk()?;
            let transfer = TransferId::from_bytes(transfer)?;
            Some((ChunkId { transfer, index: u32::from_le_bytes(*index) }, rest))
        };
        let alone = || of_chunk().filter(|(_, rest)| rest.is_empty());
        let flag = |byte: u8| (byte < 2).then_some(byte == 1);
        Some(match kind {
            1 => {
                let (verify, export) = body.split_first()?;
                if export.len() > EXPORT_BYTES_MAX {
                    return None;
                }
                Message::Offer { export: export.to_vec(), verify: flag(*verify)? }
            }
            2 => match body {
                [verify] => Message::Ready { verify: flag(*verify)? },
                _ => return None,
            },
            REFUSED => Message::Refused { reason: str::from_utf8(body).ok()?.to_owned() },
            4 => {
                let (chunk, blocks) = of_chunk()?;
                let blocks = numbers(blocks)?.into_iter().map(BlockId).collect();
                Message::Lend { chunk, blocks }
            }
            5 => alone().map(|(chunk, _)| Message::Pulled { chunk })?,
            6 => alone().map(|(chunk, _)| Message::NotPosted { chunk })?,
            7 => {
                let (chunk, runs) = of_chunk()?;
                Message::Go { chunk, runs: numbers(runs)? }
            }
            8 if body.len() <= EXPORT_BYTES_MAX => Message::Accepted { answer: body.to_vec() },
            _ => return None,
        })
    }

    pub(crate) fn write(&self, stream: &mut TcpStream) -> io::Result<()> {
        write_all_by(stream, &self.to_bytes(), Instant::now() + LEASE)
    }
}

fn numbers(bytes: &[u8]) -> Option<Vec<u32>> {
    let (numbers, rest) = bytes.as_chunks();
    rest.is_empty().then(|| numbers.iter().map(|number| u32::from_le_bytes(*number)).collect())
}

fn check(head: &[u8], body: &[u8]) -> [u8; 8] {
    let mut hash = Xxh3::new();
    hash.update(head);
    hash.update(body);
    hash.digest().to_le_bytes()
}

/// Reader of the messages of one connection.
pub(crate) struct Messages {
    stream: TcpStream,
    poll: Duration,
}

/// Result of polling the connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Polled {
    Message(Message),
    Nothing,
    /// The peer closed the connection between two messages.
    End,
}

impl Messages {
    /// `poll` is the time-out of one poll for the first byte.
    pub(crate) fn new(stream: &TcpStream, poll: Duration) -> io::Result<Self> {
        let stream = stream.try_clone()?;
        stream.set_read_timeout(Some(poll))?;
        Ok(Self { stream, poll })
    }

    /// Sets the time-out of [`Messages::poll`] and of the peeking methods.
    pub(crate) fn set_poll_timeout(&mut self, poll: Duration) -> io::Result<()> {
        self.poll = poll;
        self.stream.set_read_timeout(Some(poll))
    }

    /// Returns whether the peer has closed the connection or sent `Refused`.
    pub(crate) fn is_rejected_or_closed(&self) -> bool {
        self.peek_header(|header| {
            header.get(4..8).is_some_and(|kind| kind == REFUSED.to_le_bytes())
        })
    }

    /// Returns whether the peer has closed the connection or sent anything.
    pub(crate) fn has_input_or_closed(&self) -> bool {
        self.peek_header(|_| true)
    }

    fn peek_header(&self, matters: impl Fn(&[u8]) -> bool) -> bool {
        let mut header = [0; HEADER_BYTES];
        match self.stream.peek(&mut header) {
            Ok(0) => true,
            Ok(count) => matters(&header[..count]),
            Err(error) => !is_pause(&error),
        }
    }

    pub(crate) fn poll(&mut self) -> io::Result<Polled> {
        let mut header = [0; HEADER_BYTES];
        let first = match self.stream.read(&mut header) {
            Ok(0) => return Ok(Polled::End),
            Ok(count) => count,
            Err(error) if is_pause(&error) => return Ok(Polled::Nothing),
            Err(error) => return Err(error),
        };
        let deadline = Instant::now() + LEASE;
        let message = self.rest(header, first, deadline);
        self.stream.set_read_timeout(Some(self.poll))?;
        message.map(Polled::Message)
    }

    fn rest(
        &mut self,
        mut header: [u8; HEADER_BYTES],
        first: usize,
        deadline: Instant,
    ) -> io::Result<Message> {
        let invalid = |what: String| io::Error::new(ErrorKind::InvalidData, what);
        read_exact_by(&mut self.stream, &mut header[first..], deadline)?;
        let number = |at: usize| {
            let bytes = [header[at], header[at + 1], header[at + 2], header[at + 3]];
            u32::from_le_bytes(bytes)
        };
        let body_bytes = number(8) as usize;
        if header[..4] != MAGIC || body_bytes > BODY_BYTES_MAX {
            return Err(invalid("invalid message header; expected BKI1".to_owned()));
        }
        let mut body = vec![0; body_bytes];
        read_exact_by(&mut self.stream, &mut body, deadline)?;
        if check(&header[..CHECKED_BYTES], &body) != header[CHECKED_BYTES..] {
            return Err(invalid("message failed its integrity check".to_owned()));
        }
        let kind = number(4);
        Message::from_body(kind, &body)
            .ok_or_else(|| invalid(format!("malformed message of kind {kind}")))
    }

    /// Blocks until the next message or `deadline`. Returns `None` when the connection closes or
    /// `closed` returns true.
    pub(crate) fn next_by(
        &mut self,
        deadline: Instant,
        closed: impl Fn() -> bool,
    ) -> io::Result<Option<Message>> {
        loop {
            match self.poll()? {
                Polled::Message(message) => return Ok(Some(message)),
                Polled::End => return Ok(None),
                Polled::Nothing if closed() => return Ok(None),
                Polled::Nothing if Instant::now() >= deadline => {
                    return Err(io::Error::new(
                        ErrorKind::TimedOut,
                        "timed out waiting for an answer",
                    ));
                }
                Polled::Nothing => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        net::{Shutdown, TcpListener},
    };

    use super::*;

    fn all() -> Vec<Message> {
        let chunk = ChunkId { transfer: TransferId(7 << 100), index: 3 };
        vec![
            Message::Offer { export: vec![1, 2, 3], verify: true },
            Message::Ready { verify: false },
            Message::Refused { reason: "no access".to_owned() },
            Message::Lend { chunk, blocks: vec![BlockId(1), BlockId(u32::MAX)] },
            Message::Pulled { chunk },
            Message::NotPosted { chunk },
            Message::Go { chunk, runs: vec![1, 7] },
            Message::Accepted { answer: vec![4, 5] },
        ]
    }

    /// Returns the messages that the other end of a connection reads from these bytes.
    fn read(bytes: &[u8]) -> io::Result<Vec<Message>> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut sender = TcpStream::connect(listener.local_addr()?)?;
        let (receiver, _) = listener.accept()?;
        sender.write_all(bytes)?;
        sender.shutdown(Shutdown::Write)?;
        let mut messages = Messages::new(&receiver, Duration::from_secs(10))?;
        let mut read = Vec::new();
        loop {
            match messages.poll()? {
                Polled::Message(message) => read.push(message),
                Polled::End => return Ok(read),
                Polled::Nothing => panic!("the sender has ended"),
            }
        }
    }

    #[test]
    fn every_message_round_trips() {
        let bytes: Vec<u8> = all().iter().flat_map(Message::to_bytes).collect();
        assert_eq!(read(&bytes).unwrap(), all());
    }

    #[test]
    fn peek_consumes_nothing_and_detects_refused() {
        let deadline = Instant::now() + Duration::from_secs(10);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connected = || {
            let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (stream, _) = listener.accept().unwrap();
            (peer, Messages::new(&stream, Duration::from_millis(1)).unwrap())
        };
        let until = |is_so: &dyn Fn() -> bool| {
            while !is_so() {
                assert!(Instant::now() < deadline);
            }
        };
        let (mut peer, mut messages) = connected();
        assert!(!messages.has_input_or_closed() && !messages.is_rejected_or_closed());
        let ready = Message::Ready { verify: false };
        peer.write_all(&ready.to_bytes()).unwrap();
        until(&|| messages.has_input_or_closed());
        assert!(!messages.is_rejected_or_closed(), "the queue accepts messages");
        assert_eq!(messages.poll().unwrap(), Polled::Message(ready));
        let refused = Message::Refused { reason: "no".to_owned() };
        peer.write_all(&refused.to_bytes()).unwrap();
        until(&|| messages.is_rejected_or_closed());
        assert_eq!(messages.poll().unwrap(), Polled::Message(refused));
        let (peer, messages) = connected();
        drop(peer);
        until(&|| messages.is_rejected_or_closed() && messages.has_input_or_closed());
    }

    #[test]
    fn changed_or_truncated_message_is_rejected() {
        for message in all() {
            let bytes = message.to_bytes();
            for at in 0..bytes.len() {
                let mut changed = bytes.clone();
                changed[at] ^= 0x40;
                assert!(read(&changed).is_err(), "{message:?} changed at {at}");
            }
            assert!(read(&bytes[..bytes.len() - 1]).is_err(), "{message:?} cut");
        }
    }

    #[test]
    fn bodies_of_invalid_length_are_rejected() {
        for (kind, body) in [
            (1, &[][..]),
            (1, &[2]),
            (2, &[]),
            (2, &[1, 1]),
            (5, &[0; 21]),
            (7, &[0; 22]),
            (9, &[]),
        ] {
            assert_eq!(Message::from_body(kind, body), None, "{kind} {body:?}");
        }
        assert_eq!(Message::from_body(4, &[0; 22]), None, "half a block id");
        assert_eq!(Message::from_body(1, &vec![0; EXPORT_BYTES_MAX + 2]), None);
        assert_eq!(Message::from_body(8, &vec![0; EXPORT_BYTES_MAX + 1]), None);
    }
}
