//! Copies between KV blocks on GPUs and pinned blocks in host memory, by the copy engines.
//!
//! A block in host memory has all heads, with any number of ranks. Each rank's GPU copies its
//! heads.

use std::{any::Any, sync::Arc};

use cudarc::driver::sys;

use super::{
    context::{Context, Event, Stream, StreamRole},
    copies::UnorderedCopies,
    driver_calls::FREE_USUAL,
    error::{CudaError, Named},
    ipc::{Strides, shared_heads},
    kv::DeviceKv,
    moves::copy_rows,
    stream_progress::{StreamMark, StreamProgress},
};
use crate::{
    arena::{BlockRead, BlockWrite, KvArena, RemoteBlocks},
    layout::BlockId,
    offload::{BlockOffload, CopiedBlocks, OffloadStream},
    peer::TransferInFlight,
};

/// Copies between a GPU and host memory.
#[derive(Debug)]
enum Offload {}

impl StreamRole for Offload {}

/// The blocks of one GPU, or of the ranks' GPUs.
pub(super) struct CudaOffload {
    /// The whole blocks that the parts belong to.
    blocks: Arc<dyn RemoteBlocks>,
    /// Parts in rank order.
    parts: Vec<Arc<DeviceKv>>,
}

impl CudaOffload {
    pub(super) fn new(blocks: Arc<dyn RemoteBlocks>, parts: Vec<Arc<DeviceKv>>) -> Self {
        Self { blocks, parts }
    }
}

impl BlockOffload for CudaOffload {
    fn pin(
        &self,
        host: &Arc<KvArena>,
        first: u32,
        count: u32,
    ) -> Result<Box<dyn Any + Send>, String> {
        let context = Arc::clone(self.parts.first().expect("a group has ranks").context());
        let pinned = RegisteredHost::new(context, host, first, count);
        pinned.map(|it| Box::new(it) as Box<_>).map_err(|error| error.to_string())
    }

    fn stream(&self) -> Result<Box<dyn OffloadStream>, String> {
        let layout = self.blocks.layout();
        let of = self.parts.len();
        let lanes = self.parts.iter().enumerate().map(|(rank, kv)| {
            let strides = shared_heads(layout, (rank, of), (0, 1));
            Ok(GpuCopies {
                strides: strides.expect("a rank has heads of the whole block"),
                stream: Stream::relaxed(kv.context())?,
                progress: StreamProgress::new(kv.context())?,
                kv: Arc::clone(kv),
            })
        });
        let lanes = lanes.collect::<Result<Vec<_>, CudaError>>();
        let lanes = lanes.map_err(|error| error.to_string())?;
        Ok(Box::new(CudaOffloadStream { blocks: Arc::clone(&self.blocks), lanes }))
    }
}

/// A range of host memory that every GPU of this process may copy from and to.
struct RegisteredHost {
    context: Arc<Context>,
    base: *mut u8,
    /// Keeps the memory mapped.
    _host: Arc<KvArena>,
}

// SAFETY: the driver allows the calls on every thread, and the pointer is not dereferenced.
unsafe impl Send for RegisteredHost {}

impl RegisteredHost {
    fn new(
        context: Arc<Context>,
        host: &Arc<KvArena>,
        first: u32,
        count: u32,
    ) -> Result<Self, CudaError> {
        let (base, bytes) = host.host_range(BlockId(first), count);
        context.bind()?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the range is mapped as long as `_host` lives, which is until it is unregistered.
        let code = unsafe { sys::cuMemHostRegister_v2(base.as_ptr().cast(), bytes, flags) };
        code.named("cuMemHostRegister")?;
        Ok(Self { context, base: base.as_ptr(), _host: Arc::clone(host) })
    }
}

impl Drop for RegisteredHost {
    fn drop(&mut self) {
        let _call = self.context.calls().begin(FREE_USUAL);
        let _ = self.context.bind();
        // SAFETY: the range was registered once, and every copy holds its blocks' guards until its
        // end.
        let _ = unsafe { sys::cuMemHostUnregister(self.base.cast()) };
    }
}

/// Copies of one GPU.
struct GpuCopies {
    kv: Arc<DeviceKv>,
    /// The GPU's heads (from) in a whole block (to).
    strides: Strides,
    stream: Stream<Offload>,
    progress: StreamProgress,
}

impl GpuCopies {
    /// Enqueues the copies of these pairs of a GPU's block and host memory.
    ///
    /// # Safety
    /// Nothing else writes the sources or accesses the destinations until the mark is reached.
    unsafe fn put(
        &mut self,
        pairs: &[(BlockId, sys::CUdeviceptr)],
        is_save: bool,
    ) -> Result<(StreamMark, Event), CudaError> {
        self.kv.context().bind()?;
        self.kv.delay_in_tests(&self.stream)?;
        let strides = self.strides;
        let own_bytes = strides.from.0 * strides.runs;
        let mut copies = UnorderedCopies::default();
        for &(block, host) in pairs {
            let device = self.kv.data().part(block.index() * own_bytes, own_bytes);
            if strides.is_contiguous() {
                let (to, from) = if is_save { (host, device) } else { (device, host) };
                copies.add(to, from, own_bytes);
                continue;
            }
            let device = (device, strides.from.0, strides.from.1);
            let host = (host, strides.to.0, strides.to.1);
            let (from, to) = if is_save { (device, host) } else { (host, device) };
            // SAFETY: the rows of both are inside their blocks. The caller guarantees the rest.
            unsafe { copy_rows(from, to, strides.bytes, strides.runs, &self.stream) }?;
        }
        if strides.is_contiguous() {
            // SAFETY: the copies are inside their blocks. Nothing else writes the sources or
            // accesses the destinations until the mark is reached (`# Safety`).
            unsafe { copies.put(&self.stream) }?;
        }
        let done = Event::new(self.kv.context())?;
        done.record(&self.stream)?;
        Ok((self.progress.mark(&self.stream)?, done))
    }
}

struct CudaOffloadStream {
    blocks: Arc<dyn RemoteBlocks>,
    lanes: Vec<GpuCopies>,
}

impl OffloadStream for CudaOffloadStream {
    fn copy(
        &mut self,
        from: Vec<BlockRead>,
        to: Vec<BlockWrite>,
    ) -> Result<Box<dyn TransferInFlight<CopiedBlocks>>, String> {
        assert_eq!(from.len(), to.len(), "one destination per block");
        let is_save = from.first().is_some_and(|block| block.lies_in(&*self.blocks));
        let ours = |block: &BlockRead| block.lies_in(&*self.blocks) == is_save;
        assert!(from.iter().all(ours), "all sources are on one side");
        assert!(
            to.iter().all(|block| block.lies_in(&*self.blocks) != is_save),
            "all destinations are on the other side"
        );
        let pairs: Vec<_> = from
            .iter()
            .zip(&to)
            .map(|(from, to)| match is_save {
                true => (from.block(), to.host_address()),
                false => (to.block(), from.host_address()),
            })
            .map(|(block, host)| (block, host.as_ptr() as sys::CUdeviceptr))
            .collect();
        let marks = self.lanes.iter_mut().map(|lane| {
            // SAFETY: the guards are held until the mark is reached, and pinned memory has one
            // address for host and GPU.
            unsafe { lane.put(&pairs, is_save) }
        });
        let marks: Result<Vec<_>, CudaError> = marks.collect();
        match marks {
            Ok(marks) => Ok(Box::new(CudaOffloadCopy { marks, blocks: Some((from, to)) })),
            Err(error) => {
                // Without marks only the streams can be waited for: nothing may be written later.
                for lane in &self.lanes {
                    let _ = lane.stream.synchronize();
                }
                Err(error.to_string())
            }
        }
    }
}

/// A copy in flight.
struct CudaOffloadCopy {
    marks: Vec<(StreamMark, Event)>,
    blocks: Option<(Vec<BlockRead>, Vec<BlockWrite>)>,
}

impl CudaOffloadCopy {
    fn is_done(&self) -> bool {
        self.marks.iter().all(|(mark, _)| mark.is_reached())
    }

    /// Waits for the copies of all ranks. There is no deadline, because the blocks cannot be used
    /// while a copy may write them. If the device hangs, steps hang too, and the engine thread
    /// reports it.
    fn wait(&self) -> Result<(), CudaError> {
        let waits: Vec<_> = self.marks.iter().map(|(mark, done)| mark.wait(done)).collect();
        waits.into_iter().collect()
    }
}

impl TransferInFlight<CopiedBlocks> for CudaOffloadCopy {
    fn is_done(&mut self) -> Result<bool, String> {
        Ok(Self::is_done(self))
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<CopiedBlocks>, String> {
        self.wait().map_err(|error| error.to_string())?;
        let (from, to) = self.blocks.take().expect("`finish` is called once");
        Ok(from.into_iter().zip(to).collect())
    }
}

impl Drop for CudaOffloadCopy {
    fn drop(&mut self) {
        if self.blocks.is_some() {
            let _ = self.wait();
        }
    }
}
