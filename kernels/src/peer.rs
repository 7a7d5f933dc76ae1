//! KV transfer between processes of one host without passing through host memory.
//!
//! With [`PeerMemory`] one process exports handles of its blocks. Another process imports the
//! handles and copies blocks into its own. The destination blocks stay borrowed until the copy is
//! complete. The exporter must keep the source blocks unchanged; copying a block that changes gives
//! garbage, but no fault.
//!
//! With [`PeerChannels`] both processes create a channel and move blocks through it together.

use std::{sync::Arc, time::Instant};

use crate::{
    arena::{BlockRead, BlockWrite},
    layout::BlockId,
};

/// Longest export.
pub const EXPORT_BYTES_MAX: usize = 4096;

/// Blocks that other processes of this host can map. Errors are text for logs.
pub trait PeerMemory: Send + Sync {
    /// Returns the handles by which another process reads these blocks, at most
    /// [`EXPORT_BYTES_MAX`] bytes.
    fn export(&self) -> Result<Vec<u8>, String>;

    /// Maps the exporting process's blocks, which must have the size of our blocks.
    fn import(&self, export: &[u8]) -> Result<Box<dyn PeerBlocks>, String>;
}

/// The blocks of another process.
pub trait PeerBlocks: Send {
    /// Starts to copy each block of `from` to the block at the same index of `to`. The blocks of
    /// `to` must be ours, as many as those of `from`.
    fn pull(
        &mut self,
        from: &[BlockId],
        to: Vec<BlockWrite>,
    ) -> Result<Box<dyn TransferInFlight<BlockWrite>>, String>;
}

/// A copy or transfer in flight, with the blocks that it reads or writes. The blocks are returned
/// only after its end: dropping it waits for the end or aborts.
pub trait TransferInFlight<B>: Send {
    /// Returns whether the copy has ended.
    fn is_done(&mut self) -> Result<bool, String>;

    /// Returns the blocks. The copy must have ended.
    fn finish(self: Box<Self>) -> Result<Vec<B>, String>;
}

/// Side of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChannelEnd {
    Sender,
    Receiver,
}

/// When to stop waiting for the other end.
#[derive(Clone, Copy)]
pub struct WaitLimit<'a> {
    pub deadline: Instant,
    /// Returns whether waiting has become pointless. Polled.
    pub cancelled: &'a (dyn Fn() -> bool + Sync),
}

impl From<Instant> for WaitLimit<'static> {
    fn from(deadline: Instant) -> Self {
        Self { deadline, cancelled: &|| false }
    }
}

/// Factory of channels to other GPUs, through which both ends move blocks together. Errors are text
/// for logs.
pub trait PeerChannels: Send + Sync {
    /// Opens the library that channels need.
    fn open(&self) -> Result<(), String>;

    /// Loads the library's kernels to the GPUs, so that the first channel does not have to.
    fn prepare(&self) -> Result<(), String>;

    /// Returns the sender's half of the handshake, at most [`EXPORT_BYTES_MAX`] bytes. `max_ctas`
    /// limits the SMs that the channel uses on each GPU while it moves blocks; the smaller limit of
    /// both ends holds.
    fn invite(&self, max_ctas: Option<u32>) -> Result<Vec<u8>, String>;

    /// Returns the receiver's half of the handshake, at most [`EXPORT_BYTES_MAX`] bytes, or why
    /// this end cannot join.
    fn accept(&self, invitation: &[u8], max_ctas: Option<u32>) -> Result<Vec<u8>, String>;

    /// Connects to the other end, which does the same. Delays no other channel. `handshake` is the
    /// invitation and its answer.
    fn join(
        &self,
        handshake: (&[u8], &[u8]),
        end: ChannelEnd,
        limit: WaitLimit<'_>,
    ) -> Result<Arc<dyn PeerChannel>, String>;
}

/// One end of a channel. Both ends issue the same operations in the same order. An operation waits
/// for its counterpart until the channel is aborted.
pub trait PeerChannel: Send + Sync {
    /// Starts to send our blocks. Both ends pass the same `runs`: the lengths of ranges of blocks
    /// that are contiguous on both sides.
    fn send(
        &self,
        runs: &[u32],
        blocks: Vec<BlockRead>,
    ) -> Result<Box<dyn TransferInFlight<BlockRead>>, String>;

    /// Starts to receive into our blocks.
    fn receive(
        &self,
        runs: &[u32],
        blocks: Vec<BlockWrite>,
    ) -> Result<Box<dyn TransferInFlight<BlockWrite>>, String>;

    /// Returns the rate of the probe transfer that both ends made when they joined, in bytes/s.
    fn probed_rate(&self) -> u64;

    /// Aborts the channel and its operations. After `Ok` no copy is in flight; after an error
    /// copies may still be in flight.
    fn abort(&self) -> Result<(), String>;
}

/// A range of blocks that is contiguous in both memories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRun {
    pub from: BlockId,
    pub to: BlockId,
    pub count: u32,
}

/// Returns the fewest runs that cover the pairs in order.
pub fn runs(pairs: impl IntoIterator<Item = (BlockId, BlockId)>) -> Vec<BlockRun> {
    let mut runs: Vec<BlockRun> = Vec::new();
    for (from, to) in pairs {
        if let Some(last) = runs.last_mut() {
            let next = |first: BlockId| first.0.checked_add(last.count);
            if next(last.from) == Some(from.0) && next(last.to) == Some(to.0) {
                last.count += 1;
                continue;
            }
        }
        runs.push(BlockRun { from, to, count: 1 });
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_is_contiguous_on_both_sides() {
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
