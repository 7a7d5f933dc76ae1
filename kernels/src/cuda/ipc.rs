//! KV blocks of another process's GPU memory, read by this one's copy engines.
//!
//! The exporter names its allocation by a handle of the driver; the importer maps it once and copies
//! out of it on streams of its own. No kernel runs, on either GPU.

use std::sync::Arc;

use cudarc::driver::sys;

use super::{
    context::{Context, Event, Role, Stream},
    copies::Copies,
    driver::Link,
    error::{CudaError, Named},
    kv::DeviceKv,
    process,
};
use crate::{
    arena::BlockWrite,
    layout::BlockId,
    peer::{Moving, PeerBlocks, PeerMemory, Run, runs},
};

/// Copies from another GPU, or another process's memory on this one.
#[derive(Debug)]
pub enum PeerToDevice {}

impl Role for PeerToDevice {}

/// Streams that a peer's chunks take turns on: while one ends the next is under way.
const STREAMS: usize = 2;

const HANDLE_BYTES: usize = 64;

/// What one process tells another of its KV's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Export {
    /// Of the process that owns the memory: the driver maps it into others only.
    process: u128,
    handle: [u8; HANDLE_BYTES],
    /// From the allocation's base to the first block.
    offset: u64,
    block_bytes: u64,
    block_count: u32,
    uuid: String,
}

/// In front of every export, with the version of what follows.
const MAGIC: [u8; 8] = *b"BATONIP2";
const FIXED_BYTES: usize = MAGIC.len() + 16 + HANDLE_BYTES + 8 + 8 + 4;

impl Export {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FIXED_BYTES + self.uuid.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&self.process.to_le_bytes());
        bytes.extend_from_slice(&self.handle);
        bytes.extend_from_slice(&self.offset.to_le_bytes());
        bytes.extend_from_slice(&self.block_bytes.to_le_bytes());
        bytes.extend_from_slice(&self.block_count.to_le_bytes());
        bytes.extend_from_slice(self.uuid.as_bytes());
        bytes
    }

    fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
            let (taken, rest) = bytes.split_first_chunk()?;
            *bytes = rest;
            Some(*taken)
        }
        if take(&mut bytes)? != MAGIC {
            return None;
        }
        Some(Self {
            process: u128::from_le_bytes(take(&mut bytes)?),
            handle: take(&mut bytes)?,
            offset: u64::from_le_bytes(take(&mut bytes)?),
            block_bytes: u64::from_le_bytes(take(&mut bytes)?),
            block_count: u32::from_le_bytes(take(&mut bytes)?),
            uuid: str::from_utf8(bytes).ok()?.to_owned(),
        })
    }
}

/// What the processes of this host may be let in on: one arena's blocks.
#[derive(Debug)]
pub struct IpcMemory {
    kv: Arc<DeviceKv>,
}

impl IpcMemory {
    pub fn new(kv: Arc<DeviceKv>) -> Self {
        Self { kv }
    }

    fn exported(&self) -> Result<Export, CudaError> {
        let context = self.kv.context();
        context.bind()?;
        let address = self.kv.data().address();
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: the address is that of a live allocation; two numbers are written.
        unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut bytes, address) }
            .named("cuMemGetAddressRange")?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: as above; one handle is written. It lets a process of this host map the memory,
        // which lasts as long as this process has it.
        unsafe { sys::cuIpcGetMemHandle(&mut handle, base) }.named("cuIpcGetMemHandle")?;
        Ok(Export {
            process: process::mark(),
            handle: handle.reserved.map(|byte| byte as u8),
            offset: address - base,
            block_bytes: self.kv.layout().block_bytes() as u64,
            block_count: self.kv.block_count(),
            uuid: context.device().uuid.clone(),
        })
    }

    fn imported(&self, export: &Export) -> Result<CudaPeerBlocks, String> {
        let context = self.kv.context();
        let own = &context.device().uuid;
        let theirs = &export.uuid;
        if export.process == process::mark() {
            return Err("the driver maps no memory into the process that owns it".to_owned());
        }
        let block_bytes = self.kv.layout().block_bytes();
        if export.block_bytes != block_bytes as u64 {
            let bytes = export.block_bytes;
            return Err(format!("its blocks have {bytes} bytes, ours {block_bytes}"));
        }
        if own != theirs {
            let named = |error: CudaError| error.to_string();
            let devices = context.driver().devices().map_err(named)?;
            let Some(peer) = devices.iter().find(|device| device.uuid == *theirs) else {
                return Err(format!("this process is not shown GPU {theirs}"));
            };
            if context.driver().link(context.device(), peer).map_err(named)? == Link::None {
                return Err(format!("GPU {own} has no access to the memory of GPU {theirs}"));
            }
        }
        let memory = Imported::open(context, export)
            .map_err(|error| format!("GPU {own} cannot map the memory of GPU {theirs}: {error}"))?;
        let stream = |_| Stream::new(context);
        let streams = (0..STREAMS).map(stream).collect::<Result<Vec<_>, _>>();
        Ok(CudaPeerBlocks {
            kv: Arc::clone(&self.kv),
            memory: Arc::new(memory),
            streams: streams.map_err(|error| error.to_string())?.into(),
            block_bytes,
            next_stream: 0,
        })
    }
}

impl PeerMemory for IpcMemory {
    fn export(&self) -> Result<Vec<u8>, String> {
        self.exported().map(|export| export.to_bytes()).map_err(|error| error.to_string())
    }

    fn import(&self, export: &[u8]) -> Result<Box<dyn PeerBlocks>, String> {
        let export = Export::from_bytes(export)
            .ok_or("it exports memory in a way that this build does not know")?;
        Ok(Box::new(self.imported(&export)?))
    }
}

/// Another process's blocks, mapped into this one until it is dropped.
#[derive(Debug)]
struct Imported {
    /// As the driver mapped the whole allocation.
    base: sys::CUdeviceptr,
    first_block: sys::CUdeviceptr,
    block_count: u32,
    context: Arc<Context>,
}

impl Imported {
    fn open(context: &Arc<Context>, export: &Export) -> Result<Self, CudaError> {
        context.bind()?;
        let mut base = 0;
        let handle = sys::CUipcMemHandle { reserved: export.handle.map(|byte| byte as _) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: one address is written; the driver refuses handles that it did not make, and those
        // whose memory is gone.
        unsafe { sys::cuIpcOpenMemHandle_v2(&mut base, handle, flags) }
            .named("cuIpcOpenMemHandle")?;
        let mut memory =
            Self { base, first_block: base, block_count: 0, context: Arc::clone(context) };
        let (mut start, mut bytes) = (0, 0);
        // SAFETY: the address was mapped just now; two numbers are written.
        unsafe { sys::cuMemGetAddressRange_v2(&mut start, &mut bytes, base) }
            .named("cuMemGetAddressRange")?;
        // What the peer says of its memory is not believed beyond what is mapped.
        let room = (bytes as u64).saturating_sub(base - start).checked_sub(export.offset);
        let needed = export.block_bytes.checked_mul(export.block_count.into());
        if needed.is_none_or(|needed| room.is_none_or(|room| needed > room)) {
            let (what, wanted) = ("the peer's KV", needed.unwrap_or(u64::MAX));
            return Err(CudaError::RangeFull { what, wanted, left: room.unwrap_or(0) });
        }
        memory.first_block = base + export.offset;
        memory.block_count = export.block_count;
        Ok(memory)
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        // After a fault both fail, and the mapping is gone with the context.
        let _ = self.context.bind();
        // SAFETY: mapped once, let go once, and no copy is under way: each holds it.
        let _ = unsafe { sys::cuIpcCloseMemHandle(self.base) };
    }
}

/// Blocks of a peer, and the streams on which they are copied.
struct CudaPeerBlocks {
    kv: Arc<DeviceKv>,
    memory: Arc<Imported>,
    streams: Arc<[Stream<PeerToDevice>]>,
    block_bytes: usize,
    next_stream: usize,
}

impl CudaPeerBlocks {
    fn start(&mut self, runs: &[Run]) -> Result<Event, CudaError> {
        let context = self.kv.context();
        context.bind()?;
        let mut copies = Copies::default();
        for run in runs {
            let bytes = run.count as usize * self.block_bytes;
            let to = self.kv.data().part(run.to.index() * self.block_bytes, bytes);
            let from = self.memory.first_block + (run.from.index() * self.block_bytes) as u64;
            copies.add(to, from, bytes);
        }
        let stream = &self.streams[self.next_stream % self.streams.len()];
        self.next_stream += 1;
        let mark = Event::new(context)?;
        // SAFETY: each part is inside its range; those that are written are borrowed until the mark
        // is seen, each by one guard, and the mapping lives as long.
        let put = unsafe { copies.put(stream) };
        if let Err(error) = put.and_then(|()| mark.record(stream)) {
            // Without a mark only the stream can be waited for: nothing may be written later.
            let _ = stream.synchronize();
            return Err(error);
        }
        Ok(mark)
    }
}

impl PeerBlocks for CudaPeerBlocks {
    fn pull(
        &mut self,
        from: &[BlockId],
        to: Vec<BlockWrite>,
    ) -> Result<Box<dyn Moving<BlockWrite>>, String> {
        assert_eq!(from.len(), to.len(), "each block has its place");
        assert!(to.iter().all(|block| block.lies_in(&*self.kv)), "only own blocks are written");
        if let Some(block) = from.iter().find(|block| block.0 >= self.memory.block_count) {
            let BlockId(block) = block;
            return Err(format!("the peer has {} blocks, not {block}", self.memory.block_count));
        }
        let runs = runs(from.iter().copied().zip(to.iter().map(BlockWrite::block)));
        let mark = self.start(&runs).map_err(|error| error.to_string())?;
        let memory = Arc::clone(&self.memory);
        let streams = Arc::clone(&self.streams);
        Ok(Box::new(CudaPull { mark, to: Some(to), _streams: streams, _memory: memory }))
    }
}

/// Copies with a mark behind them. The fields go in this order, once the mark was seen.
struct CudaPull {
    mark: Event,
    to: Option<Vec<BlockWrite>>,
    _streams: Arc<[Stream<PeerToDevice>]>,
    _memory: Arc<Imported>,
}

impl Moving<BlockWrite> for CudaPull {
    fn is_done(&mut self) -> Result<bool, String> {
        self.mark.is_done().map_err(|error| error.to_string())
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<BlockWrite>, String> {
        self.mark.synchronize().map_err(|error| error.to_string())?;
        Ok(self.to.take().unwrap_or_default())
    }
}

impl Drop for CudaPull {
    fn drop(&mut self) {
        // After a fault, which ended the context, nothing is written any more.
        let _ = self.mark.synchronize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_comes_out_as_it_went_in_and_nothing_else_is_taken_for_one() {
        let export = Export {
            process: 7,
            handle: std::array::from_fn(|index| index as u8),
            offset: 512,
            block_bytes: 2 << 20,
            block_count: 99,
            uuid: "GPU-1f2e3d4c-0506-0708-090a-0b0c0d0e0fff".to_owned(),
        };
        let bytes = export.to_bytes();
        assert!(bytes.len() <= crate::peer::EXPORT_BYTES_MAX);
        assert_eq!(Export::from_bytes(&bytes), Some(export));
        for length in 0..FIXED_BYTES {
            assert_eq!(Export::from_bytes(&bytes[..length]), None);
        }
        let mut other = bytes.clone();
        other[7] += 1;
        assert_eq!(Export::from_bytes(&other), None);
    }
}
