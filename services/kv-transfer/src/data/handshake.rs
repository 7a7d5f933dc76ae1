//! How the two ends of a data connection prove to each other who they are.
//!
//! 1. The listener greets with a fresh nonce.
//! 2. The sender answers with a nonce of its own, both epochs, and a tag over all of it.
//! 3. The listener answers with a tag over the same, made for the other direction.
//!
//! The tags are made for one transport each: the one that holds names what the connection is for.
//!
//! All three have a fixed length, and the whole has one deadline, so that whoever connects can keep
//! a listener thread for a moment only.

use std::{
    io,
    net::TcpStream,
    time::{Duration, Instant},
};

use super::stream::{read_exact_by, write_all_by};
use crate::{api::Epoch, control::Keys, transfer_kind::TransferKind};

/// Two round trips inside a cluster, many times over.
pub const DEADLINE: Duration = Duration::from_secs(1);

const MAGIC: [u8; 8] = *b"BATONKV1";
const NONCE_BYTES: usize = 32;
const TAG_BYTES: usize = 32;
const EPOCH_BYTES: usize = 16;
const GREETING_BYTES: usize = MAGIC.len() + NONCE_BYTES;
const HELLO_BYTES: usize = NONCE_BYTES + 2 * EPOCH_BYTES + TAG_BYTES;

/// Why a data connection was not made.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    #[error("data connection: {0}")]
    Io(#[from] io::Error),
    #[error("the listener is none of ours")]
    Magic,
    #[error("the connection is meant for epoch {to}, which is not this process")]
    Epoch { to: Epoch },
    #[error("the tag does not hold: the other end has another secret")]
    Tag,
    #[error("no random numbers: {0}")]
    Random(getrandom::Error),
}

impl HandshakeError {
    /// The label under which it is counted.
    pub fn label(&self) -> &'static str {
        match self {
            HandshakeError::Io(_) => "handshake_io",
            HandshakeError::Magic => "handshake_magic",
            HandshakeError::Epoch { .. } => "handshake_epoch",
            HandshakeError::Tag => "handshake_tag",
            HandshakeError::Random(_) => "handshake_random",
        }
    }
}

fn nonce() -> Result<[u8; NONCE_BYTES], HandshakeError> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(HandshakeError::Random)?;
    Ok(nonce)
}

/// What both tags cover, but for the direction.
struct Terms {
    listener_nonce: [u8; NONCE_BYTES],
    sender_nonce: [u8; NONCE_BYTES],
    from: [u8; EPOCH_BYTES],
    to: [u8; EPOCH_BYTES],
}

impl Terms {
    fn parts<'a>(&'a self, direction: &'a [u8; 1]) -> [&'a [u8]; 5] {
        [direction, &self.listener_nonce, &self.sender_nonce, &self.from, &self.to]
    }
}

/// What the sender's and the listener's tags cover beside the terms.
fn directions(kind: TransferKind) -> [&'static [u8; 1]; 2] {
    match kind {
        TransferKind::Tcp => [b"s", b"l"],
        TransferKind::Ipc => [b"i", b"j"],
        TransferKind::Nccl => [b"n", b"m"],
    }
}

/// The sender's end. `me` connects to what should be `peer`.
pub fn connect(
    stream: &mut TcpStream,
    keys: &Keys,
    me: Epoch,
    peer: Epoch,
    kind: TransferKind,
) -> Result<(), HandshakeError> {
    let [sender, listener] = directions(kind);
    let deadline = Instant::now() + DEADLINE;
    let mut greeting = [0; GREETING_BYTES];
    read_exact_by(stream, &mut greeting, deadline)?;
    let (magic, listener_nonce) = greeting.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(HandshakeError::Magic);
    }
    let mut terms = Terms {
        listener_nonce: [0; NONCE_BYTES],
        sender_nonce: nonce()?,
        from: me.to_bytes(),
        to: peer.to_bytes(),
    };
    terms.listener_nonce.copy_from_slice(listener_nonce);
    let mut hello = Vec::with_capacity(HELLO_BYTES);
    hello.extend_from_slice(&terms.sender_nonce);
    hello.extend_from_slice(&terms.from);
    hello.extend_from_slice(&terms.to);
    hello.extend_from_slice(&keys.tag_data(&terms.parts(sender)));
    write_all_by(stream, &hello, deadline)?;
    let mut tag = [0; TAG_BYTES];
    read_exact_by(stream, &mut tag, deadline)?;
    if keys.check_data(&terms.parts(listener), &tag) { Ok(()) } else { Err(HandshakeError::Tag) }
}

/// The listener's end: who connects, and for what.
pub fn accept(
    stream: &mut TcpStream,
    keys: &Keys,
    me: Epoch,
) -> Result<(Epoch, TransferKind), HandshakeError> {
    let deadline = Instant::now() + DEADLINE;
    let listener_nonce = nonce()?;
    let mut greeting = [0; GREETING_BYTES];
    greeting[..MAGIC.len()].copy_from_slice(&MAGIC);
    greeting[MAGIC.len()..].copy_from_slice(&listener_nonce);
    write_all_by(stream, &greeting, deadline)?;
    let mut hello = [0; HELLO_BYTES];
    read_exact_by(stream, &mut hello, deadline)?;
    let (sender_nonce, rest) = hello.split_at(NONCE_BYTES);
    let (from, rest) = rest.split_at(EPOCH_BYTES);
    let (to, hello_tag) = rest.split_at(EPOCH_BYTES);
    let mut terms = Terms {
        listener_nonce,
        sender_nonce: [0; NONCE_BYTES],
        from: [0; EPOCH_BYTES],
        to: [0; EPOCH_BYTES],
    };
    terms.sender_nonce.copy_from_slice(sender_nonce);
    terms.from.copy_from_slice(from);
    terms.to.copy_from_slice(to);
    let mut tag = [0; TAG_BYTES];
    tag.copy_from_slice(hello_tag);
    let holds = |kind: &TransferKind| keys.check_data(&terms.parts(directions(*kind)[0]), &tag);
    let kind = TransferKind::ALL.into_iter().find(holds).ok_or(HandshakeError::Tag)?;
    let to = Epoch(u128::from_be_bytes(terms.to));
    if to != me {
        return Err(HandshakeError::Epoch { to });
    }
    write_all_by(stream, &keys.tag_data(&terms.parts(directions(kind)[1])), deadline)?;
    Ok((Epoch(u128::from_be_bytes(terms.from)), kind))
}
