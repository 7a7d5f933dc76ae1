//! Signs and verifies control messages: tag, size bounds, replay guard.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use bytes::Bytes;
use prost::Message;
use proto::{auth::ReplayGuard, v1};

use super::{
    CONTROL_BYTES_MAX, ControlMessage, Credential, Keys, PROTOCOL_MAX, PROTOCOL_MIN, codec,
    keys::TAG_BYTES,
};
use crate::api::{Epoch, Peer};

/// The two frames of a signed message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedMessage {
    pub frame: Vec<u8>,
    pub tag: Vec<u8>,
}

/// A control message that is too large to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot send a control message of {bytes} bytes; expected at most {CONTROL_BYTES_MAX}")]
pub struct TooLarge {
    pub bytes: usize,
}

/// Signer of the control messages of this process. The sender threads share it.
pub struct Signer {
    keys: Keys,
    from: Peer,
    /// One counter for all messages and connections to all receivers: each receiver sees increasing numbers, also
    /// after a reconnect.
    sequence: AtomicU64,
}

impl Signer {
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

    /// Signs a message for process `to` with the next sequence number. Signing a message again
    /// gives it a new number, so the receiver does not reject a retransmission as a replay.
    pub fn sign(&self, to: Epoch, message: &ControlMessage) -> Result<SignedMessage, TooLarge> {
        let envelope = v1::ControlMessage {
            // The handshake messages are equal in all versions, so that incompatible nodes can
            // reject each other.
            protocol: PROTOCOL_MIN,
            from_node: self.from.node_id.clone(),
            from_epoch: Bytes::copy_from_slice(&self.from.epoch.to_bytes()),
            to_epoch: Bytes::copy_from_slice(&to.to_bytes()),
            sequence: self.next_sequence(),
            traceparent: codec::traceparent_to_wire(&message.traceparent),
            body: Some(codec::body_to_wire(&message.body)),
        };
        let frame = envelope.encode_to_vec();
        if frame.len() > CONTROL_BYTES_MAX {
            return Err(TooLarge { bytes: frame.len() });
        }
        let tag = self.keys.tag_control(&frame).as_ref().to_vec();
        Ok(SignedMessage { frame, tag })
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

/// Verifier of the messages that arrive at this process. The listener thread owns it.
pub struct Verifier {
    keys: Keys,
    me: Epoch,
    replay: ReplayGuard,
}

impl Verifier {
    pub fn new(keys: Keys, me: Epoch) -> Self {
        Self { keys, me, replay: ReplayGuard::default() }
    }

    /// Verifies one message and returns its sender. `frames` excludes the routing id that the socket
    /// prepends.
    pub fn verify<F: AsRef<[u8]>>(
        &mut self,
        frames: &[F],
    ) -> Result<(Peer, ControlMessage), InvalidMessage> {
        let [frame, tag] = frames else {
            return Err(InvalidMessage::Frames { frames: frames.len() });
        };
        let (frame, tag) = (frame.as_ref(), tag.as_ref());
        if frame.len() > CONTROL_BYTES_MAX {
            return Err(InvalidMessage::Size { bytes: frame.len() });
        }
        if tag.len() != TAG_BYTES || !self.keys.check_control(frame, tag) {
            return Err(InvalidMessage::Tag);
        }
        self.read(frame)
    }

    /// Parses a frame whose tag was verified.
    pub fn read(&mut self, frame: &[u8]) -> Result<(Peer, ControlMessage), InvalidMessage> {
        let envelope = v1::ControlMessage::decode(frame)
            .map_err(|_| InvalidMessage::Malformed { field: "message" })?;
        let from = Peer {
            node_id: codec::name(envelope.from_node, "from_node")?,
            epoch: Epoch::from_bytes(&envelope.from_epoch)
                .map_err(|_| InvalidMessage::Malformed { field: "from_epoch" })?,
        };
        let to = Epoch::from_bytes(&envelope.to_epoch)
            .map_err(|_| InvalidMessage::Malformed { field: "to_epoch" })?;
        if to != self.me {
            return Err(InvalidMessage::Epoch { to });
        }
        let body = codec::body_from_wire(
            envelope.body.ok_or(InvalidMessage::Malformed { field: "body" })?,
        )?;
        if !body.is_handshake() && !(PROTOCOL_MIN..=PROTOCOL_MAX).contains(&envelope.protocol) {
            return Err(InvalidMessage::Protocol { protocol: envelope.protocol });
        }
        let traceparent = codec::traceparent(envelope.traceparent)?;
        // Checked last, so that a rejected message does not use up its sequence number.
        if !self.replay.admit(from.epoch.0, envelope.sequence) {
            return Err(InvalidMessage::Replayed { from: from.epoch, sequence: envelope.sequence });
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
        api::{Identity, TransferId},
        config::ClusterSecret,
        control::{AbortCause, Body, Chunk, Done, Hello, HelloOk, Reserve},
    };

    const ME: Epoch = Epoch(2);

    fn keys(secret: &str) -> Keys {
        Keys::derive(&ClusterSecret::new(secret.as_bytes()).unwrap())
    }

    fn signer() -> Arc<Signer> {
        let from = Peer { node_id: "prefill-0".to_owned(), epoch: Epoch(1) };
        Signer::new(keys("a secret of the cluster"), from)
    }

    fn verifier() -> Verifier {
        Verifier::new(keys("a secret of the cluster"), ME)
    }

    fn ack() -> ControlMessage {
        ControlMessage::untraced(Body::Ack { transfer: TransferId(5) })
    }

    fn open(
        verifier: &mut Verifier,
        signed: &SignedMessage,
    ) -> Result<(Peer, ControlMessage), InvalidMessage> {
        verifier.verify(&[&signed.frame, &signed.tag])
    }

    fn identity() -> Identity {
        Identity {
            model_fingerprint: u128::MAX - 1,
            weight_version: 9,
            kv_layout: "layers=30".to_owned(),
            block_size: 16,
            dtype: "bf16".to_owned(),
            tp: 1,
            protocol_min: 1,
            protocol_max: 4,
        }
    }

    #[test]
    fn every_control_message_round_trips() {
        let transfer = TransferId(0x1234_5678_9abc_def0_0000_0000_0000_0001);
        let logprobs = TokenLogprobs { chosen: -0.5, top: vec![(4, -0.5), (9, -1.25)] };
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
                token: SampledToken { id: 0, logprobs: Some(logprobs) },
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
        let (signer, mut verifier) = (signer(), verifier());
        for body in bodies {
            let message = ControlMessage { traceparent: "00-ab-cd-01".to_owned(), body };
            let signed = signer.sign(ME, &message).unwrap();
            let from = Peer { node_id: "prefill-0".to_owned(), epoch: Epoch(1) };
            assert_eq!(open(&mut verifier, &signed), Ok((from, message)));
        }
    }

    #[test]
    fn wrong_frame_count_or_size_is_rejected_without_parsing() {
        let mut verifier = verifier();
        let none: [&[u8]; 0] = [];
        assert_eq!(verifier.verify(&none), Err(InvalidMessage::Frames { frames: 0 }));
        assert_eq!(verifier.verify(&[b"a", b"b", b"c"]), Err(InvalidMessage::Frames { frames: 3 }));
        let large = vec![0; CONTROL_BYTES_MAX + 1];
        assert_eq!(
            verifier.verify(&[large.as_slice(), &[0; TAG_BYTES]]),
            Err(InvalidMessage::Size { bytes: CONTROL_BYTES_MAX + 1 })
        );
    }

    #[test]
    fn another_secret_or_a_flipped_bit_is_rejected() {
        let signed = signer().sign(ME, &ack()).unwrap();
        let mut stranger = Verifier::new(keys("a secret of another cluster"), ME);
        assert_eq!(open(&mut stranger, &signed), Err(InvalidMessage::Tag));
        for bit in 0..8 * signed.frame.len() {
            let mut changed = signed.clone();
            changed.frame[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(open(&mut verifier(), &changed), Err(InvalidMessage::Tag));
        }
        let mut short = signed.clone();
        short.tag.pop();
        assert_eq!(open(&mut verifier(), &short), Err(InvalidMessage::Tag));
    }

    #[test]
    fn replayed_message_is_rejected_and_resigned_message_is_accepted() {
        let (signer, mut verifier) = (signer(), verifier());
        let first = signer.sign(ME, &ack()).unwrap();
        let second = signer.sign(ME, &ack()).unwrap();
        assert!(open(&mut verifier, &second).is_ok(), "they may overtake each other");
        assert!(open(&mut verifier, &first).is_ok());
        for signed in [&first, &second] {
            assert!(matches!(open(&mut verifier, signed), Err(InvalidMessage::Replayed { .. })));
        }
    }

    #[test]
    fn message_for_another_epoch_is_rejected() {
        let signed = signer().sign(Epoch(3), &ack()).unwrap();
        assert_eq!(open(&mut verifier(), &signed), Err(InvalidMessage::Epoch { to: Epoch(3) }));
    }

    #[test]
    fn newer_protocol_version_is_accepted_only_in_the_handshake() {
        let retagged = |message: &ControlMessage| {
            let signed = signer().sign(ME, message).unwrap();
            let mut envelope = v1::ControlMessage::decode(signed.frame.as_slice()).unwrap();
            envelope.protocol = PROTOCOL_MAX + 1;
            let frame = envelope.encode_to_vec();
            let tag = keys("a secret of the cluster").tag_control(&frame).as_ref().to_vec();
            SignedMessage { frame, tag }
        };
        let hello = Body::Reject { reason: String::new(), identity: identity() };
        assert!(open(&mut verifier(), &retagged(&ControlMessage::untraced(hello))).is_ok());
        assert_eq!(
            open(&mut verifier(), &retagged(&ack())),
            Err(InvalidMessage::Protocol { protocol: PROTOCOL_MAX + 1 })
        );
    }

    #[test]
    fn overlong_trace_context_is_dropped_and_the_message_accepted() {
        let message = ControlMessage { traceparent: "0".repeat(4000), ..ack() };
        let (_, opened) = open(&mut verifier(), &signer().sign(ME, &message).unwrap()).unwrap();
        assert_eq!(opened, ack());
    }

    #[test]
    fn message_over_the_size_bound_is_not_signed() {
        let transfers = vec![TransferId(1); CONTROL_BYTES_MAX / 18 + 1];
        let message = ControlMessage::untraced(Body::Heartbeat { transfers, awaited: Vec::new() });
        assert!(matches!(signer().sign(ME, &message), Err(TooLarge { .. })));
    }

    proptest! {
        /// Arbitrary bytes under a valid tag, as a broken peer with the secret could send them.
        #[test]
        fn arbitrary_bytes_are_rejected_without_a_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        ) {
            let keys = keys("a secret of the cluster");
            let tag = keys.tag_control(&bytes);
            let _ = verifier().verify(&[bytes.as_slice(), tag.as_ref()]);
            let mut signed = signer().sign(ME, &ack()).unwrap().frame;
            for (index, byte) in flips {
                let index = index.index(signed.len());
                signed[index] = byte;
            }
            let tag = keys.tag_control(&signed);
            let _ = verifier().verify(&[signed.as_slice(), tag.as_ref()]);
        }
    }
}
