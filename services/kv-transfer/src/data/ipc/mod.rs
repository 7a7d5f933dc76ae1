//! KV by the receiver's copy engines, out of the sender's GPU memory, within one host.
//!
//! 1. The sender offers its memory; the receiver maps it once and answers that it is ready, or why
//!    it cannot be, upon which the sender comes again by `tcp`.
//! 2. For each chunk that is written and that the receiver has cleared the sender lends the blocks and says which
//!    they are. The receiver starts to copy them into the posted blocks, a few chunks at a time.
//! 3. When the host has seen a copy's end the receiver reports it and answers. Only then are the
//!    sender's blocks given back.
//!
//! What makes this safe:
//! * A sender that gives a transfer up waits for the answer, or for the connection's end. It lets go at
//!   the end of the connection even if the peer still copies: a copy only reads, and what it read is
//!   never published, for `DONE` leaves the sender only when each chunk was answered while it was
//!   lent.
//! * A receiver lets go of a block only when no copy writes it any more, whatever happened to the
//!   peer or the connection; it reports a chunk only if its connection is still the one in use.
//! * A chunk without an answer for a lease ends the connection.

mod receiver;
mod sender;

pub(in crate::data) use receiver::pull_chunks;
pub(in crate::data) use sender::lend_chunks;
