//! The messages that cross between nodes: typed, sealed and opened.
//!
//! A notice is two ZeroMQ frames: a protobuf and its tag. [`Sealer`] makes them, [`Opener`] checks
//! them in the listener thread, in this order: count and size of the frames, tag, syntax, version,
//! epochs, replay. Nothing of a frame is believed, or even parsed, before its tag holds.

mod codec;
mod keys;
mod message;
mod replay;
mod seal;

pub use codec::{identity_from_wire, identity_to_wire};
pub use keys::Keys;
pub use message::{AbortCause, Body, Done, Hello, HelloOk, Notice, Reserve, Source};
pub use seal::{Opened, Opener, Refusal, Sealed, Sealer};

/// Oldest and newest message set that this release speaks.
pub const PROTOCOL_MIN: u32 = 1;
pub const PROTOCOL_MAX: u32 = 1;

/// Largest first frame. Ours stay under 64 KiB up to prompts of 100,000 tokens; the bound is what a
/// `RESERVE` over a million tokens needs.
pub const NOTICE_BYTES_MAX: usize = 1 << 20;
