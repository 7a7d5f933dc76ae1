//! Copies between the blocks of GPUs and pinned blocks in host memory.
//!
//! The blocks in host memory are an arena of their own ([`KvArena::host`]), whose blocks have the
//! same bytes. The copy engines reach only pinned memory: see [`BlockOffload::pin`]. Errors are
//! text for logs.

use std::{any::Any, sync::Arc};

use crate::{
    arena::{BlockRead, BlockWrite, KvArena},
    peer::TransferInFlight,
};

/// Blocks that a copy reads and writes.
pub type CopiedBlocks = (BlockRead, BlockWrite);

/// Blocks on GPUs that can be copied to and from pinned host memory.
pub trait BlockOffload: Send + Sync {
    /// Pins `count` blocks of `host` from `first` on, which takes up to a second per gibibyte. They
    /// stay pinned until the result is dropped.
    fn pin(
        &self,
        host: &Arc<KvArena>,
        first: u32,
        count: u32,
    ) -> Result<Box<dyn Any + Send>, String>;

    /// Creates streams of the lowest priority for copies in one direction.
    fn stream(&self) -> Result<Box<dyn OffloadStream>, String>;
}

/// Streams of copies.
pub trait OffloadStream: Send {
    /// Starts to copy each block of `from` to the block at the same index of `to`. One side has
    /// blocks on GPUs, the other side pinned blocks.
    fn copy(
        &mut self,
        from: Vec<BlockRead>,
        to: Vec<BlockWrite>,
    ) -> Result<Box<dyn TransferInFlight<CopiedBlocks>>, String>;
}
