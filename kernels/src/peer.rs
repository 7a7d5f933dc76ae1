//! Blocks of other processes on this host, read without passing through host memory.
//!
//! One process exports a handle of its blocks as bytes; another process imports the handle and pulls blocks
//! into its own. The destination blocks stay borrowed until the copy is over, even if the caller is dropped.
//! The exporter must not write the source blocks meanwhile: a pull from changing blocks copies undefined
//! bytes without a fault.
//!
//! Alternatively both processes make a channel and send and receive blocks through it.

use std::{sync::Arc, time::Instant};

use crate::{
    arena::{BlockRead, BlockWrite},
    layout::BlockId,
};

/// Upper bound on the bytes of an export.
pub const EXPORT_BYTES_MAX: usize = 4096;

/// Blocks that other processes of this host can read. Errors are messages for logs.
pub trait PeerMemory: Send + Sync {
    /// Returns the handle by which a process can read our blocks; at most [`EXPORT_BYTES_MAX`].
    fn export(&self) -> Result<Vec<u8>, String>;

    /// Opens the blocks of the process that exported them. They must have the size of ours.
    fn import(&self, export: &[u8]) -> Result<Box<dyn PeerBlocks>, String>;
}

/// The blocks of another process.
pub trait PeerBlocks: Send {
    /// Starts to copy each block of `from` into its place in `to`. The blocks of `to` must be ours,
    /// and as many as those of `from`.
    fn pull(
        &mut self,
        from: &[BlockId],
        to: Vec<BlockWrite>,
    ) -> Result<Box<dyn Moving<BlockWrite>>, String>;
}

/// Blocks that a copy in flight reads or writes. They stay borrowed until it ends: dropping this value waits
/// for the end, or aborts the copy.
pub trait Moving<B>: Send {
    /// Returns whether the copy has ended.
    fn is_done(&mut self) -> Result<bool, String>;

    /// Returns the blocks. To be called when the copy has ended.
    fn finish(self: Box<Self>) -> Result<Vec<B>, String>;
}

/// End of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Sender,
    Receiver,
}

/// Deadline of a wait for the other end, and a way to cancel the wait.
#[derive(Clone, Copy)]
pub struct Patience<'a> {
    pub deadline: Instant,
    /// Returns whether the wait is cancelled; polled during the wait.
    pub given_up: &'a (dyn Fn() -> bool + Sync),
}

impl From<Instant> for Patience<'static> {
    fn from(deadline: Instant) -> Self {
        Self { deadline, given_up: &|| false }
    }
}

/// Makes channels to other GPUs. Errors are messages for logs.
pub trait PeerChannels: Send + Sync {
    /// Opens what channels are made by. The error says why there will be none.
    fn open(&self) -> Result<(), String>;

    /// Loads to the GPUs what else is loaded while the first channel is made. The error says why that was in vain.
    fn prepare(&self) -> Result<(), String>;

    /// What the receiver needs to join the sender that tells it; at most [`EXPORT_BYTES_MAX`].
    /// `multiprocessors`: how many the channel takes at most of each GPU while it moves blocks; unset: as many as
    /// it likes. Of two ends the smaller number holds.
    fn invite(&self, multiprocessors: Option<u32>) -> Result<Vec<u8>, String>;

    /// What the sender needs in turn, which has invited so; at most [`EXPORT_BYTES_MAX`]. The error says
    /// why this end cannot join.
    fn accept(&self, invitation: &[u8], multiprocessors: Option<u32>) -> Result<Vec<u8>, String>;

    /// Joins the other end, which does the same, or gives up with the patience. No other channel waits
    /// meanwhile. `told`: the invitation, and the answer to it.
    fn join(
        &self,
        told: (&[u8], &[u8]),
        end: End,
        patience: Patience<'_>,
    ) -> Result<Arc<dyn PeerChannel>, String>;
}

/// One end of a channel. What is sent and received on it is in one order, the same at both ends; each
/// operation waits for its other half, in vain if need be, until the channel is aborted.
pub trait PeerChannel: Send + Sync {
    /// Starts to send our blocks. Both ends pass the same `runs`: the lengths of the runs of blocks that are
    /// contiguous on both sides.
    fn send(
        &self,
        runs: &[u32],
        blocks: Vec<BlockRead>,
    ) -> Result<Box<dyn Moving<BlockRead>>, String>;

    /// Starts to receive into our blocks.
    fn receive(
        &self,
        runs: &[u32],
        blocks: Vec<BlockWrite>,
    ) -> Result<Box<dyn Moving<BlockWrite>>, String>;

    /// Ends the channel and everything under way on it. Nothing moves any more when it returns; the
    /// error says that this could not be brought about.
    fn abort(&self) -> Result<(), String>;
}

/// Adjacent blocks in both memories, copied at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub from: BlockId,
    pub to: BlockId,
    pub count: u32,
}

/// Returns the fewest runs that the two lists allow without reordering.
pub fn runs(pairs: impl IntoIterator<Item = (BlockId, BlockId)>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (from, to) in pairs {
        if let Some(last) = runs.last_mut() {
            let next = |first: BlockId| first.0.checked_add(last.count);
            if next(last.from) == Some(from.0) && next(last.to) == Some(to.0) {
                last.count += 1;
                continue;
            }
        }
        runs.push(Run { from, to, count: 1 });
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_blocks_that_are_adjacent_on_both_sides_are_one_run() {
        let of = |pairs: &[(u32, u32)]| -> Vec<(u32, u32, u32)> {
            runs(pairs.iter().map(|&(from, to)| (BlockId(from), BlockId(to))))
                .iter()
                .map(|run| (run.from.0, run.to.0, run.count))
                .collect()
        };
        assert_eq!(of(&[]), []);
        assert_eq!(of(&[(3, 7), (4, 8), (5, 9)]), [(3, 7, 3)]);
        assert_eq!(of(&[(3, 7), (4, 9), (5, 10), (9, 11)]), [(3, 7, 1), (4, 9, 2), (9, 11, 1)]);
        assert_eq!(of(&[(3, 7), (2, 6)]), [(3, 7, 1), (2, 6, 1)], "backwards is not adjacent");
        assert_eq!(of(&[(u32::MAX, u32::MAX), (0, 0)]), [(u32::MAX, u32::MAX, 1), (0, 0, 1)]);
    }
}
