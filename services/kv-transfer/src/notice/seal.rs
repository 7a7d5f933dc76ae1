//! Sealing and opening: the tag, the bounds and the replay guard.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use bytes::Bytes;
use prost::Message;
use proto::v1;

use super::{
    Body, Keys, NOTICE_BYTES_MAX, Notice, PROTOCOL_MAX, PROTOCOL_MIN, Source, codec,
    keys::TAG_BYTES, replay::ReplayGuard,
};
use crate::api::Epoch;

/// Two frames, ready for a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    pub frame: Vec<u8>,
    pub tag: Vec<u8>,
}

/// A notice that was too large to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a notice of {bytes} bytes cannot be sent; at most {NOTICE_BYTES_MAX} are taken")]
pub struct TooLarge {
    pub bytes: usize,
}

/// Makes notices of this process. Shared by the sender threads.
pub struct Sealer {
    keys: Keys,
    from: Source,
    /// One counter for all receivers: each sees growing numbers, also over a pair made anew.
    sequence: AtomicU64,
}

impl Sealer {
    pub fn new(keys: Keys, from: Source) -> Arc<Self> {
        Arc::new(Self { keys, from, sequence: AtomicU64::new(0) })
    }

    /// For the process `to`, at its place in the sequence. Sealing twice gives two numbers, so a
    /// repeated notice is not taken for a replayed one.
    pub fn seal(&self, to: Epoch, notice: &Notice) -> Result<Sealed, TooLarge> {
        let envelope = v1::Notice {
            // Greetings are the same in every version, so that strangers can refuse each other.
            protocol: PROTOCOL_MIN,
            from_node: self.from.node_id.clone(),
            from_epoch: Bytes::copy_from_slice(&self.from.epoch.to_bytes()),
            to_epoch: Bytes::copy_from_slice(&to.to_bytes()),
            sequence: self.sequence.fetch_add(1, Ordering::Relaxed) + 1,
            traceparent: codec::traceparent_to_wire(&notice.traceparent),
            body: Some(codec::body_to_wire(&notice.body)),
        };
        let frame = envelope.encode_to_vec();
        if frame.len() > NOTICE_BYTES_MAX {
            return Err(TooLarge { bytes: frame.len() });
        }
        let tag = self.keys.tag_notice(&frame).as_ref().to_vec();
        Ok(Sealed { frame, tag })
    }
}

/// A notice whose sender is proven.
#[derive(Clone, Debug, PartialEq)]
pub struct Opened {
    pub from: Source,
    pub notice: Notice,
}

/// Why a message was not believed. Refused messages are counted and get no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("a notice has 2 frames, this message has {frames}")]
    Frames { frames: usize },
    #[error("the frame has {bytes} bytes; at most {NOTICE_BYTES_MAX} are taken")]
    Size { bytes: usize },
    #[error("the tag does not hold")]
    Tag,
    #[error("field {field} is malformed")]
    Malformed { field: &'static str },
    #[error("protocol {protocol}; this node speaks {PROTOCOL_MIN} to {PROTOCOL_MAX}")]
    Protocol { protocol: u32 },
    #[error("meant for epoch {to}, which is not this process")]
    Epoch { to: Epoch },
    #[error("sequence number {sequence} of epoch {from} was seen or is too old")]
    Replayed { from: Epoch, sequence: u64 },
}

impl Refusal {
    /// The label under which it is counted.
    pub fn label(&self) -> &'static str {
        match self {
            Refusal::Frames { .. } => "frames",
            Refusal::Size { .. } => "size",
            Refusal::Tag => "tag",
            Refusal::Malformed { .. } => "malformed",
            Refusal::Protocol { .. } => "protocol",
            Refusal::Epoch { .. } => "epoch",
            Refusal::Replayed { .. } => "replayed",
        }
    }
}

/// Checks what arrives at this process. Owned by the listener thread.
pub struct Opener {
    keys: Keys,
    me: Epoch,
    replay: ReplayGuard,
}

impl Opener {
    pub fn new(keys: Keys, me: Epoch) -> Self {
        Self { keys, me, replay: ReplayGuard::default() }
    }

    /// `frames` are those of one message, without the routing id that the socket puts before them.
    pub fn open<F: AsRef<[u8]>>(&mut self, frames: &[F]) -> Result<Opened, Refusal> {
        let [frame, tag] = frames else {
            return Err(Refusal::Frames { frames: frames.len() });
        };
        let (frame, tag) = (frame.as_ref(), tag.as_ref());
        if frame.len() > NOTICE_BYTES_MAX {
            return Err(Refusal::Size { bytes: frame.len() });
        }
        if tag.len() != TAG_BYTES || !self.keys.check_notice(frame, tag) {
            return Err(Refusal::Tag);
        }
        self.read(frame)
    }

    /// What comes after the tag: reads a frame of somebody who knows the cluster's secret.
    pub fn read(&mut self, frame: &[u8]) -> Result<Opened, Refusal> {
        let envelope =
            v1::Notice::decode(frame).map_err(|_| Refusal::Malformed { field: "notice" })?;
        let from = Source {
            node_id: codec::name(envelope.from_node, "from_node")?,
            epoch: Epoch::from_bytes(&envelope.from_epoch)
                .map_err(|_| Refusal::Malformed { field: "from_epoch" })?,
        };
        let to = Epoch::from_bytes(&envelope.to_epoch)
            .map_err(|_| Refusal::Malformed { field: "to_epoch" })?;
        if to != self.me {
            return Err(Refusal::Epoch { to });
        }
        let body =
            codec::body_from_wire(envelope.body.ok_or(Refusal::Malformed { field: "body" })?)?;
        let greeting = matches!(body, Body::Hello(_) | Body::HelloOk(_) | Body::Reject { .. });
        if !greeting && !(PROTOCOL_MIN..=PROTOCOL_MAX).contains(&envelope.protocol) {
            return Err(Refusal::Protocol { protocol: envelope.protocol });
        }
        let traceparent = codec::traceparent(envelope.traceparent)?;
        // Last, so that a notice that cannot be used does not use up its number.
        if !self.replay.admit(from.epoch, envelope.sequence) {
            return Err(Refusal::Replayed { from: from.epoch, sequence: envelope.sequence });
        }
        Ok(Opened { from, notice: Notice { traceparent, body } })
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
        notice::{AbortCause, Done, Hello, HelloOk, Reserve},
    };

    const ME: Epoch = Epoch(2);

    fn keys(secret: &str) -> Keys {
        Keys::derive(&ClusterSecret::new(secret.as_bytes()).unwrap())
    }

    fn sealer() -> Arc<Sealer> {
        let from = Source { node_id: "prefill-0".to_owned(), epoch: Epoch(1) };
        Sealer::new(keys("a secret of the cluster"), from)
    }

    fn opener() -> Opener {
        Opener::new(keys("a secret of the cluster"), ME)
    }

    fn ack() -> Notice {
        Notice::untraced(Body::Ack { transfer: TransferId(5) })
    }

    fn open(opener: &mut Opener, sealed: &Sealed) -> Result<Opened, Refusal> {
        opener.open(&[&sealed.frame, &sealed.tag])
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
    fn every_notice_comes_out_as_it_went_in() {
        let transfer = TransferId(0x1234_5678_9abc_def0_0000_0000_0000_0001);
        let logprobs = TokenLogprobs { chosen: -0.5, top: vec![(4, -0.5), (9, -1.25)] };
        let bodies = [
            Body::Hello(Hello {
                identity: identity(),
                notice_endpoint: "tcp://[::1]:1".to_owned(),
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
            Body::Chunk { transfer, chunk: 1, first_block: 2, block_count: 3, bytes: u64::MAX },
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
                cause: AbortCause::GivenUp,
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
            let notice = Notice { traceparent: "00-ab-cd-01".to_owned(), body };
            let opened = open(&mut opener, &sealer.seal(ME, &notice).unwrap()).unwrap();
            assert_eq!(opened.notice, notice);
            assert_eq!(opened.from.node_id, "prefill-0");
            assert_eq!(opened.from.epoch, Epoch(1));
        }
    }

    #[test]
    fn what_is_not_two_frames_of_bounded_size_is_refused_unread() {
        let mut opener = opener();
        let none: [&[u8]; 0] = [];
        assert_eq!(opener.open(&none), Err(Refusal::Frames { frames: 0 }));
        assert_eq!(opener.open(&[b"a", b"b", b"c"]), Err(Refusal::Frames { frames: 3 }));
        let large = vec![0; NOTICE_BYTES_MAX + 1];
        assert_eq!(
            opener.open(&[large.as_slice(), &[0; TAG_BYTES]]),
            Err(Refusal::Size { bytes: NOTICE_BYTES_MAX + 1 })
        );
    }

    #[test]
    fn another_secret_or_a_changed_bit_is_refused() {
        let sealed = sealer().seal(ME, &ack()).unwrap();
        let mut stranger = Opener::new(keys("a secret of another cluster"), ME);
        assert_eq!(open(&mut stranger, &sealed), Err(Refusal::Tag));
        for bit in 0..8 * sealed.frame.len() {
            let mut changed = sealed.clone();
            changed.frame[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(open(&mut opener(), &changed), Err(Refusal::Tag));
        }
        let mut short = sealed.clone();
        short.tag.pop();
        assert_eq!(open(&mut opener(), &short), Err(Refusal::Tag));
    }

    #[test]
    fn a_repeated_message_is_refused_and_a_message_sealed_again_is_not() {
        let (sealer, mut opener) = (sealer(), opener());
        let first = sealer.seal(ME, &ack()).unwrap();
        let second = sealer.seal(ME, &ack()).unwrap();
        assert!(open(&mut opener, &second).is_ok(), "they may overtake each other");
        assert!(open(&mut opener, &first).is_ok());
        for sealed in [&first, &second] {
            assert!(matches!(open(&mut opener, sealed), Err(Refusal::Replayed { .. })));
        }
    }

    #[test]
    fn a_message_for_another_process_is_refused() {
        let sealed = sealer().seal(Epoch(3), &ack()).unwrap();
        assert_eq!(open(&mut opener(), &sealed), Err(Refusal::Epoch { to: Epoch(3) }));
    }

    #[test]
    fn a_later_protocol_may_greet_and_nothing_else() {
        let retagged = |notice: &Notice| {
            let sealed = sealer().seal(ME, notice).unwrap();
            let mut envelope = v1::Notice::decode(sealed.frame.as_slice()).unwrap();
            envelope.protocol = PROTOCOL_MAX + 1;
            let frame = envelope.encode_to_vec();
            let tag = keys("a secret of the cluster").tag_notice(&frame).as_ref().to_vec();
            Sealed { frame, tag }
        };
        let hello = Body::Reject { reason: String::new(), identity: identity() };
        assert!(open(&mut opener(), &retagged(&Notice::untraced(hello))).is_ok());
        assert_eq!(
            open(&mut opener(), &retagged(&ack())),
            Err(Refusal::Protocol { protocol: PROTOCOL_MAX + 1 })
        );
    }

    #[test]
    fn an_overlong_trace_context_costs_the_trace_not_the_notice() {
        let notice = Notice { traceparent: "0".repeat(4000), ..ack() };
        let opened = open(&mut opener(), &sealer().seal(ME, &notice).unwrap()).unwrap();
        assert_eq!(opened.notice, ack());
    }

    #[test]
    fn a_notice_over_the_bound_is_not_sealed() {
        let transfers = vec![TransferId(1); NOTICE_BYTES_MAX / 18 + 1];
        let notice = Notice::untraced(Body::Heartbeat { transfers, awaited: Vec::new() });
        assert!(matches!(sealer().seal(ME, &notice), Err(TooLarge { .. })));
    }

    proptest! {
        /// Bytes under a valid tag, as a broken peer with the secret could send them.
        #[test]
        fn any_bytes_are_refused_without_a_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        ) {
            let keys = keys("a secret of the cluster");
            let tag = keys.tag_notice(&bytes);
            let _ = opener().open(&[bytes.as_slice(), tag.as_ref()]);
            let mut sealed = sealer().seal(ME, &ack()).unwrap().frame;
            for (index, byte) in flips {
                let index = index.index(sealed.len());
                sealed[index] = byte;
            }
            let tag = keys.tag_notice(&sealed);
            let _ = opener().open(&[sealed.as_slice(), tag.as_ref()]);
        }
    }
}
