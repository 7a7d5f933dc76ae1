//! KV blocks in GPU memory.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::{
    context::{Context, DeviceToHost, Event, HostToDevice, Stream, StreamRole},
    digest::Digester,
    driver::Driver,
    error::CudaError,
    export::{IpcRange, KvExport},
    library::KernelLibrary,
    memory::{DeviceMemory, PinnedMemory, Range},
    stream_delays::StreamDelays,
};
use crate::{
    digest::{DigestPurpose, Heads},
    layout::{BlockId, KvLayout},
};

/// The memory of an arena's KV blocks, [`Self::trash_block`] and [`Self::zero_block`].
#[derive(Debug)]
pub struct DeviceKv {
    layout: KvLayout,
    blocks: u32,
    data: Range,
    /// Exported memory of the owning process, for imported blocks.
    part: Option<IpcRange>,
    context: Arc<Context>,
    copies: Mutex<HostCopies>,
    /// Library whose kernel gathers and scatters blocks; without it the copy engines do.
    library: OnceLock<Arc<KernelLibrary>>,
    /// GPU digest; without it blocks are copied to the host.
    digester: OnceLock<Digester>,
    /// Random delays, in tests only.
    delays: OnceLock<StreamDelays>,
}

/// Copies of single blocks between GPU and host, for network transfers.
#[derive(Debug)]
struct HostCopies {
    context: Arc<Context>,
    up: Stream<HostToDevice>,
    down: Stream<DeviceToHost>,
    /// `None` after an error.
    staging: Option<(PinnedMemory<u8>, Event)>,
}

impl DeviceKv {
    /// Allocated blocks beyond those of the arena.
    pub const EXTRA_BLOCKS: u32 = 2;

    /// Allocates zeroed blocks.
    pub fn new(
        context: &Arc<Context>,
        layout: KvLayout,
        blocks: u32,
    ) -> Result<Arc<Self>, CudaError> {
        let bytes = layout
            .checked_block_bytes()
            .and_then(|bytes| bytes.checked_mul(blocks as usize + Self::EXTRA_BLOCKS as usize))
            .ok_or(CudaError::OutOfMemory { what: "the KV", wanted: u64::MAX, free: 0 })?;
        let memory = DeviceMemory::new(context, "the KV", bytes)?;
        let data = memory.cut(bytes)?;
        let up = Stream::<HostToDevice>::new(context)?;
        data.fill(0, &up)?;
        up.synchronize()?;
        Self::over(context, layout, blocks, data, None)
    }

    /// Maps the blocks of another process of this host, such as a rank, by its
    /// [`PeerMemory::export`]. Each block has `layout`. Retains the context of their GPU in this
    /// process.
    ///
    /// # Errors
    /// A message for operators.
    pub fn imported(layout: KvLayout, export: &[u8]) -> Result<Arc<Self>, String> {
        let export = KvExport::from_bytes(export).ok_or("unknown export format")?;
        let [part] = &export.parts[..] else {
            return Err("the export has several ranks; expected one".into());
        };
        if export.block_bytes != layout.block_bytes() as u64 {
            let (found, wanted) = (export.block_bytes, layout.block_bytes());
            return Err(format!("its blocks have {found} bytes; expected {wanted}"));
        }
        let named = |error: CudaError| error.to_string();
        let driver = Driver::open().map_err(named)?;
        let device = driver.device(Some(&part.uuid)).map_err(named)?;
        let context = Context::new(driver, device).map_err(named)?;
        let blocks = export.block_count;
        let data =
            part.map(&context, "a rank's KV", export.block_bytes.saturating_mul(blocks.into()))?;
        Self::over(&context, layout, blocks, data, Some(part.clone())).map_err(named)
    }

    fn over(
        context: &Arc<Context>,
        layout: KvLayout,
        blocks: u32,
        data: Range,
        part: Option<IpcRange>,
    ) -> Result<Arc<Self>, CudaError> {
        let copies = HostCopies {
            context: Arc::clone(context),
            up: Stream::new(context)?,
            down: Stream::new(context)?,
            staging: Some((
                PinnedMemory::zeroed(context, "a block's copy", layout.block_bytes())?,
                Event::new(context)?,
            )),
        };
        let (context, copies) = (Arc::clone(context), Mutex::new(copies));
        let (library, digester, delays) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        Ok(Arc::new(Self {
            layout,
            blocks,
            data,
            part,
            context,
            copies,
            library,
            digester,
            delays,
        }))
    }

    /// Returns the memory's export for other processes.
    pub(super) fn part(&self) -> Result<IpcRange, CudaError> {
        match &self.part {
            Some(part) => Ok(part.clone()),
            None => IpcRange::of(&self.context, &self.data),
        }
    }

    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Returns the number of blocks of the arena, without trash block and zero block.
    pub fn block_count(&self) -> u32 {
        self.blocks
    }

    /// Returns the block that padding rows write to.
    pub(super) fn trash_block(&self) -> u32 {
        self.blocks
    }

    /// Returns the block of zeros that stands in for blocks behind windows.
    pub(super) fn zero_block(&self) -> u32 {
        self.blocks + 1
    }

    pub(super) fn data(&self) -> &Range {
        &self.data
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Sets the library whose kernel gathers and scatters blocks, instead of one copy per piece.
    /// Only the first call has an effect.
    pub fn move_with(&self, library: Arc<KernelLibrary>) -> Result<(), CudaError> {
        self.context.bind()?;
        // SAFETY: a context is current.
        let code = unsafe { (library.functions().baton_load_moves)() };
        library.check("baton_load_moves", code)?;
        let _ = self.library.set(library);
        Ok(())
    }

    pub(super) fn digester(&self) -> Option<&Digester> {
        self.digester.get()
    }

    pub(super) fn library(&self) -> Option<&KernelLibrary> {
        self.library.get().map(|library| &**library)
    }

    /// Sets the library that computes digests of blocks on the GPU, and loads its kernel. Only the
    /// first call has an effect.
    ///
    /// # Errors
    /// When the library has no digest kernel for this GPU, or its kernel computes fewer digests in
    /// a call.
    pub fn digest_with(&self, library: Arc<KernelLibrary>) -> Result<(), CudaError> {
        let digester = Digester::new(&self.context, library)?;
        // A library that computes fewer digests in a call returns an error.
        let (heads, blocks) = (Heads::all(self.layout), [BlockId(0); Digester::BLOCKS_MAX]);
        digester.start_each(&self.data, &heads, &blocks, DigestPurpose::Transfer)?.finish()?;
        let _ = self.digester.set(digester);
        Ok(())
    }

    /// Adds random delays to streams that transfer blocks between GPUs, in tests. Only the first
    /// call has an effect.
    pub fn delay_streams(&self, delays: StreamDelays) {
        let _ = self.delays.set(delays);
    }

    /// Copies bytes at an offset in the blocks to the host.
    pub(super) fn copy_to_host(&self, offset: usize, host: &mut [u8]) -> Result<(), CudaError> {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        copies.read(&self.data, offset, host)
    }

    /// Copies bytes of the host to an offset in the blocks.
    pub(super) fn copy_from_host(&self, offset: usize, host: &[u8]) -> Result<(), CudaError> {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        copies.write(&self.data, offset, host)
    }

    /// Delays the stream by a random time, in tests only.
    pub(super) fn delay_in_tests<R: StreamRole>(
        &self,
        stream: &Stream<R>,
    ) -> Result<(), CudaError> {
        self.delays.get().map_or(Ok(()), |delays| delays.pass(stream))
    }
}

impl HostCopies {
    fn read(&mut self, data: &Range, offset: usize, host: &mut [u8]) -> Result<(), CudaError> {
        self.context.bind()?;
        let (pinned, done) = self.staging.take().ok_or(CudaError::EarlierCallFailed)?;
        let copy = pinned.download(host.len(), data, offset, &self.down, done)?;
        let (pinned, done) = copy.finish()?;
        host.copy_from_slice(&pinned[..host.len()]);
        self.staging = Some((pinned, done));
        Ok(())
    }

    fn write(&mut self, data: &Range, offset: usize, host: &[u8]) -> Result<(), CudaError> {
        self.context.bind()?;
        let (mut pinned, done) = self.staging.take().ok_or(CudaError::EarlierCallFailed)?;
        pinned[..host.len()].copy_from_slice(host);
        let copy = pinned.upload(host.len(), data, offset, &self.up, done)?;
        self.staging = Some(copy.finish()?);
        Ok(())
    }
}
