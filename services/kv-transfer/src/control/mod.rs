//! The messages that cross between nodes: typed, signed and opened.
//!
//! A control message is two ZeroMQ frames: a protobuf and its tag. [`Signer`] makes them, [`Verifier`] checks
//! them in the listener thread, in this order: count and size of the frames, tag, syntax, version,
//! epochs, replay. Nothing of a frame is believed, or even parsed, before its tag holds.

mod authentication;
mod codec;
mod keys;
mod message;
mod replay;

pub use authentication::{InvalidMessage, SignedMessage, Signer, VerifiedMessage, Verifier};
pub use codec::{identity_from_wire, identity_to_wire};
pub use keys::Keys;
pub use message::{AbortCause, Body, ControlMessage, Done, Hello, HelloOk, Reserve, Source};

/// Oldest and newest message set that this release speaks.
pub const PROTOCOL_MIN: u32 = 1;
pub const PROTOCOL_MAX: u32 = 1;

/// Largest first frame. Ours stay under 64 KiB up to prompts of 100,000 tokens; the bound is what a
/// `RESERVE` over a million tokens needs.
pub const CONTROL_BYTES_MAX: usize = 1 << 20;
