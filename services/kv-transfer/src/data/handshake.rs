//! Authentication handshake of a data connection.
//!
//! 1. The listener sends a fresh nonce.
//! 2. The sender answers with its own nonce, both epochs, and a tag over all of them.
//! 3. The listener answers with a tag over the same fields for the other direction.
//!
//! The tag also names the transport that the connection carries. All three messages have a fixed
//! length, and the handshake has one deadline, so a stranger occupies a listener thread only
//! briefly.

use std::{
    io,
    net::TcpStream,
    time::{Duration, Instant},
};

use super::stream::{read_exact_by, write_all_by};
use crate::{api::Epoch, control::Keys, transfer_kind::TransferKind};

/// Time-out of a handshake, far longer than two round trips within a cluster.
pub const DEADLINE: Duration = Duration::from_secs(1);

const MAGIC: [u8; 8] = *b"BATONKV1";
const NONCE_BYTES: usize = 32;
const TAG_BYTES: usize = 32;
const EPOCH_BYTES: usize = 16;
const CHALLENGE_BYTES: usize = MAGIC.len() + NONCE_BYTES;
const HELLO_BYTES: usize = NONCE_BYTES + 2 * EPOCH_BYTES + TAG_BYTES;

/// Reason why a data connection was not opened.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    #[error("data connection failed during the handshake: {0}")]
    Io(#[from] io::Error),
    #[error("handshake failed: the listener is not a Baton data listener")]
    Magic,
    #[error("handshake failed: unknown epoch {to}; expected the epoch of this process")]
    Epoch { to: Epoch },
    #[error("handshake failed: invalid tag; expected the same cluster secret on both nodes")]
    Tag,
    #[error("handshake failed: the operating system returned no random numbers: {0}")]
    Random(getrandom::Error),
}

impl HandshakeError {
    /// Returns the metric label.
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

/// Returns the labels that distinguish the sender's tag from the listener's, per transport.
fn directions(kind: TransferKind) -> [&'static [u8]; 2] {
    match kind {
        TransferKind::Tcp => [b"s", b"l"],
        TransferKind::Ipc => [b"i", b"j"],
        TransferKind::Nccl => [b"n", b"m"],
    }
}

/// Runs the sender's side of the handshake with `peer`.
pub fn connect(
    stream: &mut TcpStream,
    keys: &Keys,
    me: Epoch,
    peer: Epoch,
    kind: TransferKind,
) -> Result<(), HandshakeError> {
    let [sender, listener] = directions(kind);
    let deadline = Instant::now() + DEADLINE;
    let mut challenge = [0; CHALLENGE_BYTES];
    read_exact_by(stream, &mut challenge, deadline)?;
    let (magic, listener_nonce) = challenge.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(HandshakeError::Magic);
    }
    // Both tags cover these fields and the direction.
    let terms = [listener_nonce, &nonce()?, &me.to_bytes(), &peer.to_bytes()].concat();
    let hello = [&terms[NONCE_BYTES..], &keys.tag_data(&[sender, &terms])].concat();
    write_all_by(stream, &hello, deadline)?;
    let mut tag = [0; TAG_BYTES];
    read_exact_by(stream, &mut tag, deadline)?;
    if keys.check_data(&[listener, &terms], &tag) { Ok(()) } else { Err(HandshakeError::Tag) }
}

/// Runs the listener's side. Returns the peer and the transport.
pub fn accept(
    stream: &mut TcpStream,
    keys: &Keys,
    me: Epoch,
) -> Result<(Epoch, TransferKind), HandshakeError> {
    let deadline = Instant::now() + DEADLINE;
    let listener_nonce = nonce()?;
    write_all_by(stream, &[&MAGIC[..], &listener_nonce].concat(), deadline)?;
    let mut hello = [0; HELLO_BYTES];
    read_exact_by(stream, &mut hello, deadline)?;
    let (fields, tag) = hello.split_at(HELLO_BYTES - TAG_BYTES);
    let terms = [&listener_nonce, fields].concat();
    let is_signed = |kind: &TransferKind| keys.check_data(&[directions(*kind)[0], &terms], tag);
    let kind = TransferKind::ALL.into_iter().find(is_signed).ok_or(HandshakeError::Tag)?;
    let epochs = fields[NONCE_BYTES..].as_chunks::<EPOCH_BYTES>().0;
    let [from, to] = [0, 1].map(|index| Epoch(u128::from_be_bytes(epochs[index])));
    if to != me {
        return Err(HandshakeError::Epoch { to });
    }
    write_all_by(stream, &keys.tag_data(&[directions(kind)[1], &terms]), deadline)?;
    Ok((from, kind))
}
