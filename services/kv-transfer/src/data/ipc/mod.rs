//! KV copied by the receiver's copy engines from the sender's GPU memory (CUDA IPC), within one
//! host.
//!
//! 1. The sender offers its memory. The receiver maps it once and answers `Ready`, or `Refused`
//!    with the reason; the sender then reconnects with another transport.
//! 2. For each written and cleared chunk the sender lends the blocks (`Lend`). The receiver starts
//!    to copy them into the posted blocks, a few chunks at a time.
//! 3. When a copy has finished, the receiver reports the chunk and answers `Pulled`. Only then does
//!    the sender release its blocks.
//!
//! Safety:
//! * A sender that aborts a transfer waits for the answer or for the end of the connection. It
//!   releases the blocks at the end of the connection even if the peer still copies. Such a copy
//!   only reads, and its result is never used: the sender sends `DONE` only if every chunk was
//!   answered while it was lent.
//! * A receiver releases a block only when no copy writes it any more. It reports a chunk only if
//!   its connection is still the current one.
//! * A chunk without an answer for one lease closes the connection.

mod receiver;
mod sender;

pub(in crate::data) use receiver::pull_chunks;
pub(in crate::data) use sender::lend_chunks;
