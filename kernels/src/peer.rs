//! Blocks of other processes on this host, read without passing through host memory.
//!
//! One process exports its blocks as bytes that it may tell another; that one imports them and pulls
//! from them into blocks of its own. What is pulled into stays borrowed until the copy is over,
//! whatever becomes of the caller; what is pulled from is the exporter's to keep still, and whoever
//! pulls from blocks that change meanwhile gets bytes without meaning and no fault.

use crate::{arena::BlockWrite, layout::BlockId};

/// Longest export.
pub const EXPORT_BYTES_MAX: usize = 4096;

/// Blocks that other processes of this host can be let in on. Errors are for people.
pub trait PeerMemory: Send + Sync {
    /// What a process needs to know to read our blocks; at most [`EXPORT_BYTES_MAX`].
    fn export(&self) -> Result<Vec<u8>, String>;

    /// The blocks of the process that exported them. They must have the size of ours.
    fn import(&self, export: &[u8]) -> Result<Box<dyn PeerBlocks>, String>;
}

/// The blocks of another process.
pub trait PeerBlocks: Send {
    /// Starts to copy each block of `from` into its place in `to`. The blocks of `to` must be ours,
    /// and as many as those of `from`.
    fn pull(&mut self, from: &[BlockId], to: Vec<BlockWrite>) -> Result<Box<dyn Pull>, String>;
}

/// A copy under way. Dropping it waits for its end.
pub trait Pull: Send {
    /// Whether the copy is over.
    fn is_done(&mut self) -> Result<bool, String>;

    /// Waits for the end, and gives the blocks back.
    fn finish(self: Box<Self>) -> Result<Vec<BlockWrite>, String>;
}

/// Adjacent blocks in both memories, copied at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub from: BlockId,
    pub to: BlockId,
    pub count: u32,
}

/// As few runs as the two lists allow without reordering.
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
