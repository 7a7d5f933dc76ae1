//! Causal attention over paged KV, several query heads to one KV head.
//!
//! Keys are taken block by block, 16 tokens at a time counted from position 0, with one running
//! maximum and sum per query ("online softmax"). That order belongs to the position, not to
//! the step, so a prompt read whole, in chunks or token by token gives the same bits.

pub(crate) mod reference;
