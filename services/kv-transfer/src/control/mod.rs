//! The control messages between nodes: types, encoding and authentication.
//!
//! A control message is two ZeroMQ frames: a protobuf message and its HMAC tag. [`Signer`] creates
//! both frames. [`Verifier`] checks them in the listener thread, in this order: number and size of the
//! frames, tag, syntax, version, epochs, replay. No byte of the protobuf message is parsed before the tag is
//! verified.

mod authentication;
mod codec;
mod keys;
mod message;

pub use authentication::{InvalidMessage, SignedMessage, Signer, Verifier};
pub use codec::{identity_from_wire, token_to_wire};
pub use keys::{Credential, Keys};
pub use message::{AbortCause, Body, Chunk, ControlMessage, Done, Hello, HelloOk, Reserve};

/// Oldest protocol version that this release accepts. Version 2 admits each connection by a credential of its own.
pub const PROTOCOL_MIN: u32 = 2;
/// Newest protocol version that this release accepts.
pub const PROTOCOL_MAX: u32 = 2;

/// Maximum size of a message's first frame. A `RESERVE` takes less than 64 KiB for a prompt of 100,000 tokens;
/// the maximum allows a prompt of a million tokens.
pub const CONTROL_BYTES_MAX: usize = 1 << 20;
