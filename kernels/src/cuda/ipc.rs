//! Copies KV blocks out of another process's GPU memory with the copy engines (CUDA IPC).
//!
//! The exporter names its allocations by IPC handles. The importer maps each allocation once and
//! copies on its own streams. No kernel runs on either GPU.
//!
//! A node has one part per rank, with the rank's heads of all blocks. Its peer may have another
//! number of ranks: each receiving GPU copies its heads out of every peer part that has some of
//! these heads.

use std::sync::Arc;

use super::{
    context::{Event, Stream, StreamRole},
    copies::UnorderedCopies,
    error::CudaError,
    export::KvExport,
    kv::DeviceKv,
    memory::Range,
    moves::copy_rows,
    parallel::in_parallel,
};
use crate::{
    arena::{BlockWrite, RemoteBlocks},
    layout::{BlockId, KvLayout},
    peer::{BlockRun, PeerBlocks, PeerMemory, TransferInFlight, runs},
};

/// Copies from another GPU, or from another process's memory on this GPU.
#[derive(Debug)]
pub enum PeerToDevice {}

impl StreamRole for PeerToDevice {}

/// Streams per peer part, used in turn, so that one copy is in flight while another ends.
const STREAMS: usize = 2;

/// An arena's blocks, exported to the processes of this host.
pub struct IpcMemory {
    /// The whole blocks that these parts belong to.
    blocks: Arc<dyn RemoteBlocks>,
    /// Parts in rank order.
    parts: Vec<Arc<DeviceKv>>,
}

impl IpcMemory {
    /// Exports the blocks of a single rank, or of a node without ranks.
    pub fn new(kv: Arc<DeviceKv>) -> Self {
        Self { blocks: kv.clone(), parts: vec![kv] }
    }

    /// Exports blocks whose heads are sharded over these parts, in rank order.
    pub(super) fn of_parts(blocks: Arc<dyn RemoteBlocks>, parts: Vec<Arc<DeviceKv>>) -> Self {
        Self { blocks, parts }
    }

    fn exported(&self) -> Result<KvExport, CudaError> {
        Ok(KvExport {
            block_bytes: self.blocks.layout().block_bytes() as u64,
            block_count: self.blocks.block_count(),
            parts: self.parts.iter().map(|part| part.part()).collect::<Result<_, _>>()?,
        })
    }

    fn imported(&self, export: &KvExport) -> Result<CudaPeerBlocks, String> {
        let layout = self.blocks.layout();
        let block_bytes = layout.block_bytes() as u64;
        if export.block_bytes != block_bytes {
            let bytes = export.block_bytes;
            return Err(format!("its blocks have {bytes} bytes; expected {block_bytes}"));
        }
        let (ours, theirs) = (self.parts.len(), export.parts.len());
        if !layout.kv_head_count.is_multiple_of(theirs) {
            let heads = layout.kv_head_count;
            return Err(format!("cannot split {heads} heads equally over {theirs} ranks"));
        }
        // Retaining the context of a GPU takes long, so all GPUs are initialized concurrently.
        let ends = in_parallel("ipc-map", 0..ours, |rank, _| self.end(export, rank))?;
        Ok(CudaPeerBlocks {
            blocks: Arc::clone(&self.blocks),
            block_count: export.block_count,
            ends: ends.into(),
            next_stream: 0,
        })
    }

    /// Maps the heads that one of our parts receives from all peer parts.
    fn end(&self, export: &KvExport, rank: usize) -> Result<ReceivingEnd, String> {
        let (layout, kv) = (self.blocks.layout(), &self.parts[rank]);
        let (ours, theirs) = (self.parts.len(), export.parts.len());
        let bytes = export.block_bytes / theirs as u64 * u64::from(export.block_count);
        let mut pieces = Vec::new();
        for (their_rank, part) in export.parts.iter().enumerate() {
            let shared = shared_heads(layout, (their_rank, theirs), (rank, ours));
            let Some(strides) = shared else { continue };
            let memory = part.map(kv.context(), "the peer's KV", bytes)?;
            pieces.push(PeerPart { memory, strides });
        }
        let stream = |_| Stream::new(kv.context());
        let streams = (0..STREAMS).map(stream).collect::<Result<Vec<_>, _>>();
        let streams = streams.map_err(|error| error.to_string())?;
        Ok(ReceivingEnd { kv: Arc::clone(kv), pieces, streams })
    }
}

impl PeerMemory for IpcMemory {
    fn export(&self) -> Result<Vec<u8>, String> {
        self.exported().map(|export| export.to_bytes()).map_err(|error| error.to_string())
    }

    fn import(&self, export: &[u8]) -> Result<Box<dyn PeerBlocks>, String> {
        let export = KvExport::from_bytes(export)
            .ok_or("unknown export format; expected an export of the same build")?;
        Ok(Box::new(self.imported(&export)?))
    }
}

/// The common bytes of a block of one part and a block of another part. A block has runs, one per
/// layer's keys or values, and each run has its common bytes at the same offset. Blocks are
/// contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Strides {
    /// Bytes from one run to the next, and the offset of the common bytes in a run.
    pub from: (usize, usize),
    pub to: (usize, usize),
    pub bytes: usize,
    /// Runs of a block.
    pub runs: usize,
}

impl Strides {
    pub(super) fn is_contiguous(&self) -> bool {
        self.from.0 == self.bytes && self.to.0 == self.bytes
    }
}

/// Returns the heads that two ranks of different rank counts have in common, or `None` if there are
/// none.
pub(super) fn shared_heads(
    layout: KvLayout,
    (from, from_of): (usize, usize),
    (to, to_of): (usize, usize),
) -> Option<Strides> {
    let head_bytes = layout.head_bytes();
    let (from_heads, to_heads) = (layout.kv_head_count / from_of, layout.kv_head_count / to_of);
    let first = (from * from_heads).max(to * to_heads);
    let end = ((from + 1) * from_heads).min((to + 1) * to_heads);
    (first < end).then(|| Strides {
        from: (from_heads * head_bytes, (first - from * from_heads) * head_bytes),
        to: (to_heads * head_bytes, (first - to * to_heads) * head_bytes),
        bytes: (end - first) * head_bytes,
        runs: 2 * layout.layer_count,
    })
}

/// Copies from one mapped peer part to one of our parts.
#[derive(Debug)]
struct PeerPart {
    memory: Range,
    strides: Strides,
}

impl PeerPart {
    /// # Safety
    /// See [`UnorderedCopies::put`]: nothing else accesses the destination blocks until the copies
    /// complete.
    unsafe fn put<R: StreamRole>(
        &self,
        runs: &[BlockRun],
        to: &Range,
        stream: &Stream<R>,
    ) -> Result<(), CudaError> {
        let strides = &self.strides;
        let block_bytes = |(stride, _): (usize, usize)| stride * strides.runs;
        let mut copies = UnorderedCopies::default();
        for run in runs {
            let count = run.count as usize;
            // Both are checked as whole blocks.
            let part = |range: &Range, block: BlockId, stride| {
                let bytes = block_bytes(stride);
                range.part(block.index() * bytes, count * bytes)
            };
            let from = part(&self.memory, run.from, strides.from);
            let to = part(to, run.to, strides.to);
            if strides.is_contiguous() {
                copies.add(to, from, count * block_bytes(strides.to));
                continue;
            }
            let (from, to) =
                ((from, strides.from.0, strides.from.1), (to, strides.to.0, strides.to.1));
            // SAFETY: the rows of both are inside their blocks, as just checked. The caller
            // guarantees the rest.
            unsafe { copy_rows(from, to, strides.bytes, count * strides.runs, stream) }?;
        }
        if strides.is_contiguous() {
            // SAFETY: the copies are inside the checked parts of both memories, which stay mapped.
            // Nothing else accesses the destination blocks until the copies complete (`# Safety`).
            unsafe { copies.put(stream) }?;
        }
        Ok(())
    }
}

/// One of our parts, with its copies from the peer's parts.
#[derive(Debug)]
struct ReceivingEnd {
    kv: Arc<DeviceKv>,
    pieces: Vec<PeerPart>,
    streams: Vec<Stream<PeerToDevice>>,
}

/// Mapped blocks of a peer, and the streams of the copies.
struct CudaPeerBlocks {
    blocks: Arc<dyn RemoteBlocks>,
    block_count: u32,
    ends: Arc<[ReceivingEnd]>,
    next_stream: usize,
}

impl CudaPeerBlocks {
    /// Enqueues the copies and returns one event per part.
    fn start(&mut self, runs: &[BlockRun]) -> Result<Vec<Event>, CudaError> {
        let turn = self.next_stream;
        self.next_stream += 1;
        let start = |end: &ReceivingEnd| {
            end.kv.context().bind()?;
            let stream = &end.streams[turn % end.streams.len()];
            let mark = Event::new(end.kv.context())?;
            end.kv.delay_in_tests(stream)?;
            for piece in &end.pieces {
                // SAFETY: the caller holds a write guard of each destination block until the event
                // is seen, and the mapping lives as long.
                unsafe { piece.put(runs, end.kv.data(), stream) }?;
            }
            mark.record(stream)?;
            Ok(mark)
        };
        let marks: Result<_, CudaError> = self.ends.iter().map(start).collect();
        if marks.is_err() {
            // Without events only the streams can be waited for: nothing may be written later.
            for end in self.ends.iter() {
                let _ = end.streams[turn % end.streams.len()].synchronize();
            }
        }
        marks
    }
}

impl PeerBlocks for CudaPeerBlocks {
    fn pull(
        &mut self,
        from: &[BlockId],
        to: Vec<BlockWrite>,
    ) -> Result<Box<dyn TransferInFlight<BlockWrite>>, String> {
        assert_eq!(from.len(), to.len(), "one destination per block");
        assert!(to.iter().all(|block| block.lies_in(&*self.blocks)), "a destination is not ours");
        if let Some(block) = from.iter().find(|block| block.0 >= self.block_count) {
            let BlockId(block) = block;
            return Err(format!(
                "unknown peer block {block}; expected less than {}",
                self.block_count
            ));
        }
        let runs = runs(from.iter().copied().zip(to.iter().map(BlockWrite::block)));
        let marks = self.start(&runs).map_err(|error| error.to_string())?;
        Ok(Box::new(CudaPull { marks, to: Some(to), _ends: Arc::clone(&self.ends) }))
    }
}

/// Copies in flight with their events. The fields are dropped in this order after the events
/// completed.
struct CudaPull {
    marks: Vec<Event>,
    to: Option<Vec<BlockWrite>>,
    _ends: Arc<[ReceivingEnd]>,
}

impl TransferInFlight<BlockWrite> for CudaPull {
    fn is_done(&mut self) -> Result<bool, String> {
        for mark in &self.marks {
            if !mark.is_done().map_err(|error| error.to_string())? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<BlockWrite>, String> {
        let seen = self.marks.iter().try_for_each(Event::synchronize);
        seen.map_err(|error| error.to_string())?;
        Ok(self.to.take().unwrap_or_default())
    }
}

impl Drop for CudaPull {
    fn drop(&mut self) {
        for mark in &self.marks {
            // After an error that ended the context, no write is in flight.
            let _ = mark.synchronize();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::KvFormat;

    /// Copies as the driver does, row by row.
    #[test]
    fn heads_are_mapped_between_any_two_rank_counts() {
        let layout =
            KvLayout { layer_count: 3, kv_head_count: 8, head_dim: 2, format: KvFormat::Bf16 };
        let head = layout.head_bytes();
        // Returns for each byte of a rank's block its head, layer, and keys or values.
        let named = |rank: usize, of: usize| -> Vec<u16> {
            let heads = layout.kv_head_count / of;
            let runs = 0..2 * layout.layer_count;
            runs.flat_map(|run| (0..heads).map(move |own| (run * 100 + rank * heads + own) as u16))
                .flat_map(|name| std::iter::repeat_n(name, head))
                .collect()
        };
        for (from_of, to_of) in [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (8, 1), (4, 4)] {
            for to in 0..to_of {
                let mut found = vec![u16::MAX; layout.block_bytes() / to_of];
                for from in 0..from_of {
                    let Some(strides) = shared_heads(layout, (from, from_of), (to, to_of)) else {
                        continue;
                    };
                    assert_eq!(strides.is_contiguous(), from_of == to_of);
                    let source = named(from, from_of);
                    for run in 0..strides.runs {
                        let at = |(stride, first): (usize, usize)| run * stride + first;
                        let (from, to) = (at(strides.from), at(strides.to));
                        found[to..to + strides.bytes]
                            .copy_from_slice(&source[from..from + strides.bytes]);
                    }
                }
                assert_eq!(found, named(to, to_of), "{from_of} to {to_of}, rank {to}");
            }
        }
    }
}
