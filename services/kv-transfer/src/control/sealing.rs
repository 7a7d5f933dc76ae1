//! Seals and opens control messages: authenticated encryption, size bounds, replay guard.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use prost::Message;
use proto::{auth::ReplayGuard, v1};
use ring::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce};

use super::{
    CONTROL_BYTES_MAX, ControlMessage, Credential, Keys, PROTOCOL_MAX, PROTOCOL_MIN, codec,
};
use crate::api::{Epoch, Peer};

const EPOCH_BYTES: usize = 16;
const SEQUENCE_BYTES: usize = 8;
/// Length of the first frame.
pub(super) const HEADER_BYTES: usize = 2 * EPOCH_BYTES + SEQUENCE_BYTES;

/// The first frame, which is not encrypted: both processes and the sequence number, from which the
/// key and the nonce of the second frame derive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    from: Epoch,
    to: Epoch,
    sequence: u64,
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..EPOCH_BYTES].copy_from_slice(&self.from.to_bytes());
        bytes[EPOCH_BYTES..2 * EPOCH_BYTES].copy_from_slice(&self.to.to_bytes());
        bytes[2 * EPOCH_BYTES..].copy_from_slice(&self.sequence.to_be_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (from, rest) = bytes.split_at_checked(EPOCH_BYTES)?;
        let (to, sequence) = rest.split_at_checked(EPOCH_BYTES)?;
        let sequence = u64::from_be_bytes(sequence.try_into().ok()?);
        let [from, to] = [from, to].map(Epoch::from_bytes);
        Some(Self { from: from.ok()?, to: to.ok()?, sequence })
    }

    /// A process counts all its messages and has a random epoch, so no nonce repeats under a key.
    fn nonce(&self) -> Nonce {
        let mut nonce = [0; NONCE_LEN];
        nonce[NONCE_LEN - SEQUENCE_BYTES..].copy_from_slice(&self.sequence.to_be_bytes());
        Nonce::assume_unique_for_key(nonce)
    }
}

/// The two frames of a sealed message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealedMessage {
    pub header: Vec<u8>,
    /// The encrypted message, then the tag over header and message.
    pub body: Vec<u8>,
}

impl SealedMessage {
    pub fn frames(&self) -> [&[u8]; 2] {
        [&self.header, &self.body]
    }
}

/// A control message that is too large to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot send a control message of {bytes} bytes; expected at most {CONTROL_BYTES_MAX}")]
pub struct TooLarge {
    pub bytes: usize,
}

/// Sealer of the control messages of this process. The sender threads share it.
pub struct Sealer {
    keys: Keys,
    from: Peer,
    /// One counter for all messages and connections to all receivers: each receiver sees increasing
    /// numbers, also after a reconnect.
    sequence: AtomicU64,
}

impl Sealer {
    pub fn new(keys: Keys, from: Peer) -> Arc<Self> {
        Arc::new(Self { keys, from, sequence: AtomicU64::new(0) })
    }

    fn next_sequence(&self) -> u64 {
        self.sequence.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns a new credential for one connection to process `to`.
    pub fn credential(&self, to: Epoch) -> Credential {
        self.keys.credential(self.from.epoch, to, self.next_sequence())
    }

    /// Seals a message for process `to` with the next sequence number. Sealing a message again
    /// gives it a new number, so the receiver does not reject a retransmission as a replay.
    pub fn seal(&self, to: Epoch, message: &ControlMessage) -> Result<SealedMessage, TooLarge> {
        let envelope = v1::ControlMessage {
            // Messages are equal in all versions that this release accepts. Receivers ignore the
            // version of handshake messages, so that incompatible nodes can reject each other.
            protocol: PROTOCOL_MIN,
            from_node: self.from.node_id.clone(),
            traceparent: codec::traceparent_to_wire(&message.traceparent),
            body: Some(codec::body_to_wire(&message.body)),
        };
        self.seal_bytes(to, envelope.encode_to_vec())
    }

    fn seal_bytes(&self, to: Epoch, mut body: Vec<u8>) -> Result<SealedMessage, TooLarge> {
        if body.len() + AES_256_GCM.tag_len() > CONTROL_BYTES_MAX {
            return Err(TooLarge { bytes: body.len() });
        }
        let header = Header { from: self.from.epoch, to, sequence: self.next_sequence() };
        let header_bytes = header.to_bytes().to_vec();
        self.keys
            .control(header.from, to)
            .seal_in_place_append_tag(header.nonce(), Aad::from(&header_bytes), &mut body)
            .expect("the message is far shorter than the maximum of the cipher");
        Ok(SealedMessage { header: header_bytes, body })
    }
}

/// Reason why a message was rejected. Rejected messages are counted and get no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidMessage {
    #[error("invalid control message: {frames} frames; expected 2")]
    Frames { frames: usize },
    #[error("invalid control message: {bytes} bytes; expected at most {CONTROL_BYTES_MAX}")]
    Size { bytes: usize },
    #[error("invalid control message: wrong tag")]
    Tag,
    #[error("invalid control message: malformed field {field}")]
    Malformed { field: &'static str },
    #[error("unsupported protocol version {protocol}; expected {PROTOCOL_MIN} to {PROTOCOL_MAX}")]
    Protocol { protocol: u32 },
    #[error("unknown epoch {to}; expected the epoch of this process")]
    Epoch { to: Epoch },
    #[error("replayed sequence number {sequence} of epoch {from}")]
    Replayed { from: Epoch, sequence: u64 },
}

impl InvalidMessage {
    /// Returns the metric label.
    pub fn label(&self) -> &'static str {
        match self {
            InvalidMessage::Frames { .. } => "frames",
            InvalidMessage::Size { .. } => "size",
            InvalidMessage::Tag => "tag",
            InvalidMessage::Malformed { .. } => "malformed",
            InvalidMessage::Protocol { .. } => "protocol",
            InvalidMessage::Epoch { .. } => "epoch",
            InvalidMessage::Replayed { .. } => "replayed",
        }
    }
}

/// Opener of the messages that arrive at this process. The listener thread owns it.
pub struct Opener {
    keys: Keys,
    me: Epoch,
    replay: ReplayGuard,
}

impl Opener {
    pub fn new(keys: Keys, me: Epoch) -> Self {
        Self { keys, me, replay: ReplayGuard::default() }
    }

    /// Opens one message and returns its sender. `frames` excludes the routing id that the socket
    /// prepends.
    pub fn open<F: AsRef<[u8]>>(
        &mut self,
        frames: &[F],
    ) -> Result<(Peer, ControlMessage), InvalidMessage> {
        let [header, body] = frames else {
            return Err(InvalidMessage::Frames { frames: frames.len() });
        };
        let (header_bytes, body) = (header.as_ref(), body.as_ref());
        if body.len() > CONTROL_BYTES_MAX {
            return Err(InvalidMessage::Size { bytes: body.len() });
        }
        let header = Header::from_bytes(header_bytes)
            .ok_or(InvalidMessage::Malformed { field: "header" })?;
        if header.to != self.me {
            return Err(InvalidMessage::Epoch { to: header.to });
        }
        let mut body = body.to_vec();
        let opened = self
            .keys
            .control(header.from, header.to)
            .open_in_place(header.nonce(), Aad::from(header_bytes), &mut body)
            .map_err(|_| InvalidMessage::Tag)?;
        self.read(header.from, header.sequence, opened)
    }

    /// Parses the message with this sequence number that process `from` sealed.
    pub fn read(
        &mut self,
        from: Epoch,
        sequence: u64,
        message: &[u8],
    ) -> Result<(Peer, ControlMessage), InvalidMessage> {
        let envelope = v1::ControlMessage::decode(message)
            .map_err(|_| InvalidMessage::Malformed { field: "message" })?;
        let from = Peer { node_id: codec::name(envelope.from_node, "from_node")?, epoch: from };
        let body = codec::body_from_wire(
            envelope.body.ok_or(InvalidMessage::Malformed { field: "body" })?,
        )?;
        if !body.is_handshake() && !(PROTOCOL_MIN..=PROTOCOL_MAX).contains(&envelope.protocol) {
            return Err(InvalidMessage::Protocol { protocol: envelope.protocol });
        }
        let traceparent = codec::traceparent(envelope.traceparent)?;
        // Checked last, so that a rejected message does not use up its sequence number.
        if !self.replay.admit(from.epoch.0, sequence) {
            return Err(InvalidMessage::Replayed { from: from.epoch, sequence });
        }
        Ok((from, ControlMessage { traceparent, body }))
    }
}

#[cfg(test)]
mod tests {
    use kernels::{
        BlockId,
        sampling::{SampledToken, TokenLogprobs},
    };
    use proptest::prelude::*;

    use super::*;
    use crate::{
        ClusterSecret,
        api::{Identity, TransferId, test_identity},
        control::{AbortCause, Body, Chunk, Done, Hello, HelloOk, Reserve},
    };

    const ME: Epoch = Epoch(2);

    fn keys(secret: &str) -> Keys {
        Keys::derive(&ClusterSecret::new(secret.as_bytes()).unwrap())
    }

    fn sealer() -> Arc<Sealer> {
        let from = Peer { node_id: "prefill-0".to_owned(), epoch: Epoch(1) };
        Sealer::new(keys("a secret of the cluster"), from)
    }

    fn opener() -> Opener {
        Opener::new(keys("a secret of the cluster"), ME)
    }

    fn ack() -> ControlMessage {
        ControlMessage::untraced(Body::Ack { transfer: TransferId(5) })
    }

    fn open(
        opener: &mut Opener,
        sealed: &SealedMessage,
    ) -> Result<(Peer, ControlMessage), InvalidMessage> {
        opener.open(&sealed.frames())
    }

    fn identity() -> Identity {
        Identity {
            model_fingerprint: u128::MAX - 1,
            weight_version: 9,
            protocol_max: 4,
            ..test_identity()
        }
    }

    #[test]
    fn every_control_message_round_trips() {
        let transfer = TransferId(0x1234_5678_9abc_def0_0000_0000_0000_0001);
        let logprobs = TokenLogprobs { chosen: -0.5, top: vec![(4, -0.5), (9, -1.25)], rank: None };
        let bodies = [
            Body::Hello(Hello {
                identity: identity(),
                control_endpoint: "tcp://[::1]:1".to_owned(),
                data_endpoint: "tcp://host:2".to_owned(),
                transports: vec!["nccl".to_owned(), "tcp".to_owned()],
                integrity: vec!["xxh3".to_owned()],
                session: 8,
                in_advance: true,
            }),
            Body::HelloOk(HelloOk {
                identity: identity(),
                data_endpoint: "tcp://host:2".to_owned(),
                transport: "tcp".to_owned(),
                integrity: "xxh3".to_owned(),
                session: u64::MAX,
                transports: vec!["ipc@host".to_owned(), "tcp".to_owned()],
            }),
            Body::Reject { reason: "other model".to_owned(), identity: identity() },
            Body::Reserve(Reserve {
                transfer,
                model_fingerprint: 3,
                weight_version: 4,
                prompt_hash: 5,
                first_block: 6,
                blocks: vec![BlockId(7), BlockId(0), BlockId(u32::MAX)],
            }),
            Body::Chunk(Chunk {
                transfer,
                chunk: 1,
                first_block: 2,
                block_count: 3,
                bytes: u64::MAX,
            }),
            Body::ClearToSend { transfer, chunk: 0 },
            Body::Done(Done {
                transfer,
                chunk_count: 2,
                first_index: 20,
                token: SampledToken { id: 0, logprobs: Some(logprobs), pooled: None },
                integrity: vec![0, u64::MAX],
                model_fingerprint: 3,
                weight_version: 4,
            }),
            Body::Ack { transfer },
            Body::Abort {
                transfer,
                cause: AbortCause::Unspecified,
                reason: "the client left".to_owned(),
            },
            Body::Abort {
                transfer,
                cause: AbortCause::Mismatch,
                reason: "other weights".to_owned(),
            },
            Body::AbortAck { transfer },
            Body::Heartbeat { transfers: vec![transfer], awaited: vec![TransferId(0)] },
        ];
        let (sealer, mut opener) = (sealer(), opener());
        for body in bodies {
            let message = ControlMessage { traceparent: "00-ab-cd-01".to_owned(), body };
            let sealed = sealer.seal(ME, &message).unwrap();
            let from = Peer { node_id: "prefill-0".to_owned(), epoch: Epoch(1) };
            assert_eq!(open(&mut opener, &sealed), Ok((from, message)));
        }
    }

    #[test]
    fn wrong_frame_count_or_size_is_rejected_without_parsing() {
        let mut opener = opener();
        let none: [&[u8]; 0] = [];
        assert_eq!(opener.open(&none), Err(InvalidMessage::Frames { frames: 0 }));
        assert_eq!(opener.open(&[b"a", b"b", b"c"]), Err(InvalidMessage::Frames { frames: 3 }));
        let large = vec![0; CONTROL_BYTES_MAX + 1];
        assert_eq!(
            opener.open(&[&[0; HEADER_BYTES], large.as_slice()]),
            Err(InvalidMessage::Size { bytes: CONTROL_BYTES_MAX + 1 })
        );
    }

    #[test]
    fn another_secret_or_a_flipped_bit_is_rejected() {
        let sealed = sealer().seal(ME, &ack()).unwrap();
        let mut stranger = Opener::new(keys("a secret of another cluster"), ME);
        assert_eq!(open(&mut stranger, &sealed), Err(InvalidMessage::Tag));
        for bit in 0..8 * HEADER_BYTES {
            let mut changed = sealed.clone();
            changed.header[bit / 8] ^= 1 << (bit % 8);
            let error = open(&mut opener(), &changed).unwrap_err();
            let is_expected = match error {
                InvalidMessage::Tag => !(EPOCH_BYTES..2 * EPOCH_BYTES).contains(&(bit / 8)),
                InvalidMessage::Epoch { .. } => (EPOCH_BYTES..2 * EPOCH_BYTES).contains(&(bit / 8)),
                // No process has the epoch 0.
                InvalidMessage::Malformed { field: "header" } => bit / 8 < 2 * EPOCH_BYTES,
                _ => false,
            };
            assert!(is_expected, "bit {bit}: {error}");
        }
        for bit in 0..8 * sealed.body.len() {
            let mut changed = sealed.clone();
            changed.body[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(open(&mut opener(), &changed), Err(InvalidMessage::Tag));
        }
        for length in 0..sealed.body.len() {
            let body = sealed.body[..length].to_vec();
            let short = SealedMessage { body, ..sealed.clone() };
            assert_eq!(open(&mut opener(), &short), Err(InvalidMessage::Tag));
        }
        let header = sealed.header[1..].to_vec();
        let short = SealedMessage { header, ..sealed };
        let malformed = InvalidMessage::Malformed { field: "header" };
        assert_eq!(open(&mut opener(), &short), Err(malformed));
    }

    #[test]
    fn sealed_message_reveals_no_field_and_equal_messages_differ() {
        let reason = "the client left".to_owned();
        let body = Body::Abort { transfer: TransferId(5), cause: AbortCause::Unspecified, reason };
        let message = ControlMessage::untraced(body);
        let sealer = sealer();
        let [first, second] = [0; 2].map(|_| sealer.seal(ME, &message).unwrap());
        for word in [&b"the client left"[..], b"prefill-0"] {
            assert!(!first.body.windows(word.len()).any(|bytes| bytes == word));
        }
        // Equal bytes at equal places would reveal a repeated keystream.
        let equal = first.body.iter().zip(&second.body).filter(|(one, other)| one == other);
        assert!(equal.count() < first.body.len() / 4);
    }

    #[test]
    fn replayed_message_is_rejected_and_resealed_message_is_accepted() {
        let (sealer, mut opener) = (sealer(), opener());
        let first = sealer.seal(ME, &ack()).unwrap();
        let second = sealer.seal(ME, &ack()).unwrap();
        assert!(open(&mut opener, &second).is_ok(), "they may overtake each other");
        assert!(open(&mut opener, &first).is_ok());
        for sealed in [&first, &second] {
            assert!(matches!(open(&mut opener, sealed), Err(InvalidMessage::Replayed { .. })));
        }
    }

    #[test]
    fn message_for_another_epoch_is_rejected() {
        let sealed = sealer().seal(Epoch(3), &ack()).unwrap();
        assert_eq!(open(&mut opener(), &sealed), Err(InvalidMessage::Epoch { to: Epoch(3) }));
    }

    #[test]
    fn newer_protocol_version_is_accepted_only_in_the_handshake() {
        let newer = |body: &Body| {
            let envelope = v1::ControlMessage {
                protocol: PROTOCOL_MAX + 1,
                from_node: "prefill-0".to_owned(),
                traceparent: String::new(),
                body: Some(codec::body_to_wire(body)),
            };
            sealer().seal_bytes(ME, envelope.encode_to_vec()).unwrap()
        };
        let reject = Body::Reject { reason: String::new(), identity: identity() };
        assert!(open(&mut opener(), &newer(&reject)).is_ok());
        assert_eq!(
            open(&mut opener(), &newer(&ack().body)),
            Err(InvalidMessage::Protocol { protocol: PROTOCOL_MAX + 1 })
        );
    }

    #[test]
    fn overlong_trace_context_is_dropped_and_the_message_accepted() {
        let message = ControlMessage { traceparent: "0".repeat(4000), ..ack() };
        let (_, opened) = open(&mut opener(), &sealer().seal(ME, &message).unwrap()).unwrap();
        assert_eq!(opened, ack());
    }

    #[test]
    fn message_over_the_size_bound_is_not_sealed() {
        let transfers = vec![TransferId(1); CONTROL_BYTES_MAX / 18 + 1];
        let message = ControlMessage::untraced(Body::Heartbeat { transfers, awaited: Vec::new() });
        assert!(matches!(sealer().seal(ME, &message), Err(TooLarge { .. })));
    }

    proptest! {
        /// Arbitrary bytes that are sealed, as a broken peer with the secret could send them.
        #[test]
        fn arbitrary_bytes_are_rejected_without_a_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        ) {
            let sealer = sealer();
            let _ = open(&mut opener(), &sealer.seal_bytes(ME, bytes).unwrap());
            let ack = v1::ControlMessage {
                protocol: PROTOCOL_MIN,
                from_node: "prefill-0".to_owned(),
                traceparent: String::new(),
                body: Some(codec::body_to_wire(&ack().body)),
            };
            let mut bytes = ack.encode_to_vec();
            for (index, byte) in flips {
                let index = index.index(bytes.len());
                bytes[index] = byte;
            }
            let _ = open(&mut opener(), &sealer.seal_bytes(ME, bytes).unwrap());
        }
    }
}
