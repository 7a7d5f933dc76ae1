//! The control messages between nodes: types, encoding and authentication.
//!
//! A control message is two ZeroMQ frames: a header with both epochs and the sequence number, and a
//! protobuf message that AES-256-GCM encrypts and authenticates together with the header. Each pair
//! of processes has a key per direction, which derives from the cluster secret. [`Sealer`] creates
//! both frames. [`Opener`] checks them in the listener thread, in this order: number and size of
//! the frames, receiver, tag, syntax, version, replay. No byte of the protobuf message is parsed
//! before the tag is verified.

mod codec;
mod keys;
mod message;
mod sealing;

pub use codec::{identity_from_wire, logprobs_to_wire, token_to_wire};
pub use keys::{Credential, Keys};
pub use message::{
    AbortCause, Body, CONTROL_REFUSALS, Chunk, ControlMessage, Done, Hello, HelloOk, Reserve,
};
pub use sealing::{InvalidMessage, Opener, SealedMessage, Sealer};

/// Oldest protocol version that this release accepts. Version 4 sends KV by several `tcp`
/// connections.
pub const PROTOCOL_MIN: u32 = 4;
/// Newest protocol version that this release accepts.
pub const PROTOCOL_MAX: u32 = 4;

/// Maximum size of a message's second frame. A `RESERVE` takes less than 64 KiB for a prompt of
/// 100,000 tokens; the maximum allows a prompt of a million tokens.
pub const CONTROL_BYTES_MAX: usize = 1 << 20;
