//! KV blocks in the GPU's memory.

use std::sync::{Arc, Mutex, PoisonError};

use super::{
    channel::NcclChannels,
    context::{Context, DeviceToHost, Event, HostToDevice, Stream},
    error::CudaError,
    ipc::IpcMemory,
    memory::{DeviceMemory, Pinned, Range},
};
use crate::{
    arena::RemoteBlocks,
    layout::KvLayout,
    peer::{PeerChannels, PeerMemory},
};

/// The memory of an arena's blocks, and one block more, which rows that nobody wants write to.
#[derive(Debug)]
pub struct DeviceKv {
    layout: KvLayout,
    blocks: u32,
    data: Range,
    context: Arc<Context>,
    copies: Mutex<Copies>,
}

/// Copies of single blocks, by whoever moves KV over a network.
#[derive(Debug)]
struct Copies {
    context: Arc<Context>,
    up: Stream<HostToDevice>,
    down: Stream<DeviceToHost>,
    /// `None` after a fault.
    staging: Option<(Pinned<u8>, Event)>,
}

impl DeviceKv {
    /// Zeroed.
    pub fn new(
        context: &Arc<Context>,
        layout: KvLayout,
        blocks: u32,
    ) -> Result<Arc<Self>, CudaError> {
        let bytes = layout
            .checked_block_bytes()
            .and_then(|bytes| bytes.checked_mul(blocks as usize + 1))
            .ok_or(CudaError::OutOfMemory { what: "the KV", wanted: u64::MAX, free: 0 })?;
        let memory = DeviceMemory::new(context, "the KV", bytes)?;
        let data = memory.cut(bytes)?;
        let up = Stream::new(context)?;
        data.fill(0, &up)?;
        up.synchronize()?;
        let copies = Copies {
            context: Arc::clone(context),
            up,
            down: Stream::new(context)?,
            staging: Some((
                Pinned::zeroed(context, "a block's way", layout.block_bytes())?,
                Event::new(context)?,
            )),
        };
        let context = Arc::clone(context);
        Ok(Arc::new(Self { layout, blocks, data, context, copies: Mutex::new(copies) }))
    }

    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Without the one more.
    pub fn block_count(&self) -> u32 {
        self.blocks
    }

    pub(super) fn data(&self) -> &Range {
        &self.data
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl RemoteBlocks for DeviceKv {
    fn layout(&self) -> KvLayout {
        self.layout
    }

    fn block_count(&self) -> u32 {
        self.blocks
    }

    fn read(&self, offset: usize, host: &mut [u8]) -> Result<(), String> {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        copies.read(&self.data, offset, host).map_err(|error| error.to_string())
    }

    fn write(&self, offset: usize, host: &[u8]) -> Result<(), String> {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        copies.write(&self.data, offset, host).map_err(|error| error.to_string())
    }

    fn peer_memory(self: Arc<Self>) -> Option<Arc<dyn PeerMemory>> {
        Some(Arc::new(IpcMemory::new(self)))
    }

    fn peer_channels(self: Arc<Self>) -> Option<Arc<dyn PeerChannels>> {
        Some(Arc::new(NcclChannels::new(self)))
    }
}

const FAULTY: CudaError = CudaError::RangeFull { what: "a copy after a fault", wanted: 1, left: 0 };

impl Copies {
    fn read(&mut self, data: &Range, offset: usize, host: &mut [u8]) -> Result<(), CudaError> {
        self.context.bind()?;
        let (pinned, done) = self.staging.take().ok_or(FAULTY)?;
        let copy = pinned.download(host.len(), data, offset, &self.down, done)?;
        let (pinned, done) = copy.finish()?;
        host.copy_from_slice(&pinned[..host.len()]);
        self.staging = Some((pinned, done));
        Ok(())
    }

    fn write(&mut self, data: &Range, offset: usize, host: &[u8]) -> Result<(), CudaError> {
        self.context.bind()?;
        let (mut pinned, done) = self.staging.take().ok_or(FAULTY)?;
        pinned[..host.len()].copy_from_slice(host);
        let copy = pinned.upload(host.len(), data, offset, &self.up, done)?;
        self.staging = Some(copy.finish()?);
        Ok(())
    }
}
