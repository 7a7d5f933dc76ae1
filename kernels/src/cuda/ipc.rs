//! Copies KV blocks out of another process's GPU memory with the copy engines (CUDA IPC).
//!
//! The exporter names its allocations by IPC handles. The importer maps each allocation once and copies on its
//! own streams. No kernel runs on either GPU.
//!
//! A node has one part per rank, with the rank's heads of all blocks. Its peer may have another number of
//! ranks: each receiving GPU copies its heads out of every peer part that has some of these heads.

use std::sync::Arc;

use cudarc::driver::sys;

use super::{
    context::{Context, Event, Role, Stream},
    copies::Copies,
    driver::Link,
    error::{CudaError, Named},
    kv::DeviceKv,
    memory::Range,
    moves::copy_rows,
    parallel::in_parallel,
};
use crate::{
    arena::{BlockWrite, RemoteBlocks},
    layout::{BlockId, KvLayout},
    peer::{PeerBlocks, PeerMemory, Run, TransferInFlight, runs},
    shard::RANKS_MAX,
};

/// Copies from another GPU, or from another process's memory on this GPU.
#[derive(Debug)]
pub enum PeerToDevice {}

impl Role for PeerToDevice {}

/// Streams per peer part, used in turn, so that one copy is in flight while another ends.
const STREAMS: usize = 2;

/// Bytes of a CUDA IPC handle.
pub const HANDLE_BYTES: usize = 64;
const UUID_BYTES: usize = 40;

/// GPU memory that processes of this host may map: one rank's heads of all blocks, or an all-reduce arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    handle: [u8; HANDLE_BYTES],
    /// Offset of the memory in its allocation, in bytes.
    offset: u64,
    pub uuid: String,
}

/// Export of a process's KV memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Export {
    /// Bytes of a block of all heads.
    pub block_bytes: u64,
    pub block_count: u32,
    /// Parts in rank order.
    pub parts: Vec<Part>,
}

/// Prefix of every export, with the version of the format.
const MAGIC: [u8; 8] = *b"BATONIP4";

impl Export {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&self.block_bytes.to_le_bytes());
        bytes.extend_from_slice(&self.block_count.to_le_bytes());
        for part in &self.parts {
            bytes.extend_from_slice(&part.to_bytes());
        }
        bytes
    }

    /// Parses an export. Returns `None` for another version or other bytes.
    pub fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        if take(&mut bytes)? != MAGIC {
            return None;
        }
        let block_bytes = u64::from_le_bytes(take(&mut bytes)?);
        let block_count = u32::from_le_bytes(take(&mut bytes)?);
        let mut parts = Vec::new();
        while !bytes.is_empty() && parts.len() < RANKS_MAX {
            parts.push(Part::take(&mut bytes)?);
        }
        let is_whole = bytes.is_empty() && !parts.is_empty();
        is_whole.then_some(Self { block_bytes, block_count, parts })
    }
}

/// Takes the next `N` bytes of a message, or returns `None` if fewer are left.
pub(super) fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*taken)
}

impl Part {
    pub const BYTES: usize = HANDLE_BYTES + 8 + UUID_BYTES;

    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut uuid = [0; UUID_BYTES];
        uuid[..self.uuid.len()].copy_from_slice(self.uuid.as_bytes());
        let fields: [&[u8]; 3] = [&self.handle, &self.offset.to_le_bytes(), &uuid];
        fields.concat().try_into().expect("the fields have the sum of these lengths")
    }

    /// Parses a part from the front of a message.
    pub fn take(bytes: &mut &[u8]) -> Option<Self> {
        Some(Self {
            handle: take(bytes)?,
            offset: u64::from_le_bytes(take(bytes)?),
            uuid: {
                let padded: [u8; UUID_BYTES] = take(bytes)?;
                str::from_utf8(&padded).ok()?.trim_end_matches('\0').to_owned()
            },
        })
    }

    /// Exports memory that this process has allocated.
    pub fn of(context: &Context, data: &Range) -> Result<Self, CudaError> {
        context.bind()?;
        let address = data.address();
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: the address is that of a live allocation; two numbers are written.
        unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut bytes, address) }
            .named("cuMemGetAddressRange")?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: as above; one handle is written. It lets processes of this host map the memory until this
        // process frees it.
        unsafe { sys::cuIpcGetMemHandle(&mut handle, base) }.named("cuIpcGetMemHandle")?;
        Ok(Self {
            handle: handle.reserved.map(|byte| byte as u8),
            offset: address - base,
            uuid: context.device().uuid.clone(),
        })
    }

    /// Maps `bytes` bytes of the memory for this GPU; `what` names the memory in errors.
    pub fn map(
        &self,
        context: &Arc<Context>,
        what: &'static str,
        bytes: u64,
    ) -> Result<Range, String> {
        let memory = ExportedMemory {
            uuid: self.uuid.clone(),
            handle: self.handle,
            offset: self.offset,
            bytes,
        };
        memory.map(context, what)
    }
}

/// GPU memory that another process of this host has exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportedMemory {
    /// GPU that has the memory.
    pub uuid: String,
    /// CUDA IPC handle of the memory's allocation.
    pub handle: [u8; HANDLE_BYTES],
    /// Offset of the memory in its allocation, in bytes.
    pub offset: u64,
    pub bytes: u64,
}

impl ExportedMemory {
    /// Maps the memory for this GPU; `what` names the memory in errors.
    pub(super) fn map(&self, context: &Arc<Context>, what: &'static str) -> Result<Range, String> {
        let (own, theirs) = (&context.device().uuid, &self.uuid);
        if own != theirs {
            let named = |error: CudaError| error.to_string();
            let devices = context.driver().devices().map_err(named)?;
            let Some(peer) = devices.iter().find(|device| device.uuid == *theirs) else {
                return Err(format!("GPU {theirs} is not visible to this process"));
            };
            if context.driver().link(context.device(), peer).map_err(named)? == Link::None {
                return Err(format!("GPU {own} has no peer access to GPU {theirs}"));
            }
        }
        let handle = sys::CUipcMemHandle { reserved: self.handle.map(|byte| byte as _) };
        Range::mapped(context, what, handle, (self.offset, self.bytes))
            .map_err(|error| format!("GPU {own} cannot map the memory of GPU {theirs}: {error}"))
    }
}

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

    fn exported(&self) -> Result<Export, CudaError> {
        Ok(Export {
            block_bytes: self.blocks.layout().block_bytes() as u64,
            block_count: self.blocks.block_count(),
            parts: self.parts.iter().map(|part| part.part()).collect::<Result<_, _>>()?,
        })
    }

    fn imported(&self, export: &Export) -> Result<CudaPeerBlocks, String> {
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
    fn end(&self, export: &Export, rank: usize) -> Result<ReceivingEnd, String> {
        let (layout, kv) = (self.blocks.layout(), &self.parts[rank]);
        let (ours, theirs) = (self.parts.len(), export.parts.len());
        let bytes = export.block_bytes / theirs as u64 * u64::from(export.block_count);
        let mut pieces = Vec::new();
        for (their_rank, part) in export.parts.iter().enumerate() {
            let shared = shared_heads(layout, (their_rank, theirs), (rank, ours));
            let Some(strides) = shared else { continue };
            let memory = part.map(kv.context(), "the peer's KV", bytes)?;
            pieces.push(Piece { memory, strides });
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
        let export = Export::from_bytes(export)
            .ok_or("unknown export format; expected an export of the same build")?;
        Ok(Box::new(self.imported(&export)?))
    }
}

/// The common bytes of a block of one part and a block of another part. A block has runs, one per layer's keys
/// or values, and each run has its common bytes at the same offset. Blocks are contiguous.
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

/// Returns the heads that two ranks of different rank counts have in common, or `None` if there are none.
pub(super) fn shared_heads(
    layout: KvLayout,
    (from, from_of): (usize, usize),
    (to, to_of): (usize, usize),
) -> Option<Strides> {
    let head_bytes = layout.head_elements() * layout.dtype.bytes();
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
struct Piece {
    memory: Range,
    strides: Strides,
}

impl Piece {
    /// # Safety
    /// See [`Copies::put`]: nothing else accesses the destination blocks until the copies complete.
    unsafe fn put<R: Role>(
        &self,
        runs: &[Run],
        to: &Range,
        stream: &Stream<R>,
    ) -> Result<(), CudaError> {
        let strides = &self.strides;
        let block_bytes = |(stride, _): (usize, usize)| stride * strides.runs;
        let mut copies = Copies::default();
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
            // SAFETY: the rows of both are inside their blocks, as just checked. The caller guarantees the
            // rest.
            unsafe { copy_rows(from, to, strides.bytes, count * strides.runs, stream) }?;
        }
        if strides.is_contiguous() {
            // SAFETY: as above.
            unsafe { copies.put(stream) }?;
        }
        Ok(())
    }
}

/// One of our parts, with its copies from the peer's parts.
#[derive(Debug)]
struct ReceivingEnd {
    kv: Arc<DeviceKv>,
    pieces: Vec<Piece>,
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
    fn start(&mut self, runs: &[Run]) -> Result<Vec<Event>, CudaError> {
        let turn = self.next_stream;
        self.next_stream += 1;
        let start = |end: &ReceivingEnd| {
            end.kv.context().bind()?;
            let stream = &end.streams[turn % end.streams.len()];
            let mark = Event::new(end.kv.context())?;
            end.kv.pass_time(stream)?;
            for piece in &end.pieces {
                // SAFETY: the caller holds a write guard of each destination block until the event is seen,
                // and the mapping lives as long.
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

/// Copies in flight with their events. The fields are dropped in this order after the events completed.
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
pub(super) mod tests {
    use super::*;
    use crate::layout::Dtype;

    pub fn part(number: u8) -> Part {
        Part {
            handle: std::array::from_fn(|index| index as u8 + number),
            offset: 512,
            uuid: "GPU-1f2e3d4c-0506-0708-090a-0b0c0d0e0fff".to_owned(),
        }
    }

    #[test]
    fn export_round_trips_and_other_bytes_are_rejected() {
        for ranks in [1, 2, RANKS_MAX as u8] {
            let parts = (0..ranks).map(part).collect();
            let export = Export { block_bytes: 2 << 20, block_count: 99, parts };
            let bytes = export.to_bytes();
            assert!(bytes.len() <= crate::peer::EXPORT_BYTES_MAX);
            assert_eq!(Export::from_bytes(&bytes), Some(export));
            let part_bytes = (bytes.len() - 20) / usize::from(ranks);
            for length in 0..bytes.len() {
                let is_shorter_group = length > 20 && (length - 20).is_multiple_of(part_bytes);
                assert_eq!(Export::from_bytes(&bytes[..length]).is_some(), is_shorter_group);
            }
            let mut other = bytes.clone();
            other[7] += 1;
            assert_eq!(Export::from_bytes(&other), None);
        }
        let parts = (0..=RANKS_MAX as u8).map(part).collect();
        let export = Export { block_bytes: 2 << 20, block_count: 99, parts };
        assert_eq!(Export::from_bytes(&export.to_bytes()), None);
    }

    /// Copies as the driver does, row by row.
    #[test]
    fn heads_are_mapped_between_any_two_rank_counts() {
        let layout = KvLayout { layer_count: 3, kv_head_count: 8, head_dim: 2, dtype: Dtype::Bf16 };
        let head = layout.head_elements() * layout.dtype.bytes();
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
