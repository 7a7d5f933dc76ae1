//! Authentication handshake of a data connection.
//!
//! 1. The listener sends a fresh nonce.
//! 2. The sender answers with its own nonce, both epochs, the group of the connection, and a tag
//!    over all of them.
//! 3. The listener answers with a tag over the same fields for the other direction.
//!
//! The tag also names the transport that the connection carries. If the cluster has certificates, a
//! `tcp` connection starts TLS after the second message, and the third message is encrypted; its
//! tag then covers the TLS connection too. All three messages have a fixed length, and the
//! handshake has one deadline, so a stranger occupies a listener thread only briefly.

use std::{
    io,
    net::TcpStream,
    time::{Duration, Instant},
};

use credentials::ClusterTls;

use super::{
    stream::{read_exact_by, write_all_by},
    tls::{self, TlsReceiver, TlsSender},
};
use crate::{api::Epoch, control::Keys, transfer_kind::TransferKind};

/// Time-out of a handshake, far longer than two round trips within a cluster.
pub(super) const DEADLINE: Duration = Duration::from_secs(1);

const MAGIC: [u8; 8] = *b"BATONKV2";
const NONCE_BYTES: usize = 32;
const TAG_BYTES: usize = 32;
const EPOCH_BYTES: usize = 16;
const CHALLENGE_BYTES: usize = MAGIC.len() + NONCE_BYTES;
const GROUP_BYTES: usize = 8;
const HELLO_BYTES: usize = NONCE_BYTES + 2 * EPOCH_BYTES + GROUP_BYTES + TAG_BYTES;

/// Reason why a data connection was not opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error("data connection failed during the handshake: {0}")]
    Io(#[from] io::Error),
    #[error("handshake failed: the listener is not a Baton data listener")]
    Magic,
    #[error("handshake failed: unknown epoch {to}; expected the epoch of this process")]
    Epoch { to: Epoch },
    #[error("handshake failed: invalid tag; expected the same cluster secret on both nodes")]
    Tag,
    #[error(
        "handshake failed: TLS: {0}; expected certificates of one cluster on both nodes: equal cluster.tls_ca and \
         cluster.tls_name"
    )]
    Tls(io::Error),
    #[error(
        "handshake failed: only one of this process and process {peer} speaks TLS; expected cluster.tls_cert on \
         both"
    )]
    OneSided { peer: Epoch },
    #[error("handshake failed: the operating system returned no random numbers: {0}")]
    Random(getrandom::Error),
}

impl HandshakeError {
    /// Returns the metric label.
    pub(super) fn label(&self) -> &'static str {
        match self {
            HandshakeError::Io(_) => "handshake_io",
            HandshakeError::Magic => "handshake_magic",
            HandshakeError::Epoch { .. } => "handshake_epoch",
            HandshakeError::Tag => "handshake_tag",
            HandshakeError::Tls(_) | HandshakeError::OneSided { .. } => "handshake_tls",
            HandshakeError::Random(_) => "handshake_random",
        }
    }
}

fn nonce() -> Result<[u8; NONCE_BYTES], HandshakeError> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(HandshakeError::Random)?;
    Ok(nonce)
}

/// Returns the labels that distinguish the sender's tag from the listener's, per transport and with
/// or without TLS.
fn directions(kind: TransferKind, is_tls: bool) -> [&'static [u8]; 2] {
    match (kind, is_tls) {
        (TransferKind::Tcp, false) => [b"s", b"l"],
        (TransferKind::Tcp, true) => [b"t", b"u"],
        (TransferKind::Ipc, _) => [b"i", b"j"],
        (TransferKind::Nccl, _) => [b"n", b"m"],
    }
}

/// The sender of a connection, and the fields of its hello.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sender {
    pub me: Epoch,
    pub peer: Epoch,
    pub kind: TransferKind,
    /// Number that the connections of a group share. Later groups of a process have larger numbers.
    pub group: u64,
}

/// Runs the sender's side of the handshake. Returns the TLS end of a `tcp` connection if the
/// cluster has certificates.
pub(super) fn connect(
    stream: &mut TcpStream,
    keys: &Keys,
    tls: Option<&ClusterTls>,
    Sender { me, peer, kind, group }: Sender,
) -> Result<Option<TlsSender>, HandshakeError> {
    let tls = tls.filter(|_| kind == TransferKind::Tcp);
    let [sender, listener] = directions(kind, tls.is_some());
    let deadline = Instant::now() + DEADLINE;
    let mut challenge = [0; CHALLENGE_BYTES];
    read_exact_by(stream, &mut challenge, deadline)?;
    let (magic, listener_nonce) = challenge.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(HandshakeError::Magic);
    }
    // Both tags cover these fields and the direction.
    let (nonce, group) = (nonce()?, group.to_be_bytes());
    let terms = [listener_nonce, &nonce, &me.to_bytes(), &peer.to_bytes(), &group].concat();
    let hello = [&terms[NONCE_BYTES..], &keys.tag_data(&[sender, &terms])].concat();
    write_all_by(stream, &hello, deadline)?;
    let mut tag = [0; TAG_BYTES];
    let Some(tls) = tls else {
        read_exact_by(stream, &mut tag, deadline)?;
        let is_valid = keys.check_data(&[listener, &terms], &tag);
        return if is_valid { Ok(None) } else { Err(HandshakeError::Tag) };
    };
    let (mut encrypted, binding) =
        tls::connect(tls, stream, deadline).map_err(HandshakeError::Tls)?;
    // The listener checks this node's certificate last, so the reason of a rejection arrives here.
    read_exact_by(&mut encrypted, &mut tag, deadline).map_err(HandshakeError::Tls)?;
    match keys.check_data(&[listener, &terms, &binding], &tag) {
        true => Ok(Some(encrypted)),
        false => Err(HandshakeError::Tag),
    }
}

/// The sender of an authenticated connection.
pub(super) struct Accepted {
    pub peer: Epoch,
    pub kind: TransferKind,
    pub group: u64,
    pub tls: Option<Box<TlsReceiver>>,
}

/// Runs the listener's side.
pub(super) fn accept(
    stream: &mut TcpStream,
    keys: &Keys,
    tls: Option<&ClusterTls>,
    me: Epoch,
) -> Result<Accepted, HandshakeError> {
    let deadline = Instant::now() + DEADLINE;
    let listener_nonce = nonce()?;
    write_all_by(stream, &[&MAGIC[..], &listener_nonce].concat(), deadline)?;
    let mut hello = [0; HELLO_BYTES];
    read_exact_by(stream, &mut hello, deadline)?;
    let (fields, tag) = hello.split_at(HELLO_BYTES - TAG_BYTES);
    let terms = [&listener_nonce, fields].concat();
    let kinds = TransferKind::ALL.into_iter().flat_map(|kind| [(kind, false), (kind, true)]);
    let is_signed = |(kind, is_tls): &(TransferKind, bool)| {
        keys.check_data(&[directions(*kind, *is_tls)[0], &terms], tag)
    };
    let (kind, is_tls) = kinds.into_iter().find(is_signed).ok_or(HandshakeError::Tag)?;
    let (epochs, group) = fields[NONCE_BYTES..].as_chunks::<EPOCH_BYTES>();
    let group = u64::from_be_bytes(group.try_into().expect("a hello has a fixed length"));
    let [peer, to] = [0, 1].map(|index| Epoch(u128::from_be_bytes(epochs[index])));
    if to != me {
        return Err(HandshakeError::Epoch { to });
    }
    let listener = directions(kind, is_tls)[1];
    match tls.filter(|_| kind == TransferKind::Tcp) {
        Some(tls) if is_tls => {
            let (mut encrypted, binding) =
                tls::accept(tls, stream, deadline).map_err(HandshakeError::Tls)?;
            let tag = keys.tag_data(&[listener, &terms, &binding]);
            write_all_by(&mut encrypted, &tag, deadline)?;
            tls::flush(&mut encrypted)?;
            Ok(Accepted { peer, kind, group, tls: Some(Box::new(encrypted)) })
        }
        None if !is_tls => {
            write_all_by(stream, &keys.tag_data(&[listener, &terms]), deadline)?;
            Ok(Accepted { peer, kind, group, tls: None })
        }
        _ => Err(HandshakeError::OneSided { peer }),
    }
}
