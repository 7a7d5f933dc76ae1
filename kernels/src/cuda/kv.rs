//! KV blocks in the GPU's memory.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::{
    channel::NcclChannels,
    context::{Context, DeviceToHost, Event, HostToDevice, Role, Stream},
    digest::{DigestInFlight, Digester},
    driver::Driver,
    error::CudaError,
    ipc::{Export, IpcMemory, Part},
    library::KernelLibrary,
    memory::{DeviceMemory, Pinned, Range},
    probe::Delays,
};
use crate::{
    arena::{BlockSlices, RemoteBlocks, digest_of_copies},
    digest::Heads,
    layout::{BlockId, KvLayout},
    peer::{PeerChannels, PeerMemory},
};

/// The memory of an arena's blocks, and one block more, which rows that nobody wants write to.
#[derive(Debug)]
pub struct DeviceKv {
    layout: KvLayout,
    blocks: u32,
    data: Range,
    /// Where another process has it, if one does.
    part: Option<Part>,
    context: Arc<Context>,
    copies: Mutex<Copies>,
    /// Whose kernels move blocks to and from staging; copies do where there is none.
    library: OnceLock<Arc<KernelLibrary>>,
    /// Copies to the host take its place where there is none.
    digester: OnceLock<Digester>,
    /// For tests.
    delays: OnceLock<Delays>,
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
        let up = Stream::<HostToDevice>::new(context)?;
        data.fill(0, &up)?;
        up.synchronize()?;
        Self::over(context, layout, blocks, data, None)
    }

    /// The blocks of a process of this host, such as a rank, by what its [`PeerMemory::export`] says:
    /// each has `layout`, as there. Their GPU is made ready for this process.
    ///
    /// # Errors
    /// For people.
    pub fn imported(layout: KvLayout, export: &[u8]) -> Result<Arc<Self>, String> {
        let export = Export::from_bytes(export).ok_or("the export is none of this build")?;
        let [part] = &export.parts[..] else { return Err("the export has several parts".into()) };
        if export.block_bytes != layout.block_bytes() as u64 {
            let (found, wanted) = (export.block_bytes, layout.block_bytes());
            return Err(format!("its blocks have {found} bytes, not {wanted}"));
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
        part: Option<Part>,
    ) -> Result<Arc<Self>, CudaError> {
        let copies = Copies {
            context: Arc::clone(context),
            up: Stream::new(context)?,
            down: Stream::new(context)?,
            staging: Some((
                Pinned::zeroed(context, "a block's way", layout.block_bytes())?,
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

    /// For other processes.
    pub(super) fn part(&self) -> Result<Part, CudaError> {
        match &self.part {
            Some(part) => Ok(part.clone()),
            None => Part::of(&self.context, &self.data),
        }
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

    /// From now on blocks go to and from staging by a kernel of this library, and not by copies, of which
    /// each has its price. The first call counts.
    pub fn move_with(&self, library: Arc<KernelLibrary>) -> Result<(), CudaError> {
        self.context.bind()?;
        // SAFETY: a context is current.
        let code = unsafe { (library.functions().baton_load_moves)() };
        library.check("baton_load_moves", code)?;
        let _ = self.library.set(library);
        Ok(())
    }

    pub(super) fn library(&self) -> Option<&KernelLibrary> {
        self.library.get().map(|library| &**library)
    }

    /// From now on digests of blocks are computed on the GPU, by a kernel of this library, which is loaded
    /// now. The first call counts.
    ///
    /// # Errors
    /// When the library has no such kernel for this GPU.
    pub fn digest_with(&self, library: Arc<KernelLibrary>) -> Result<(), CudaError> {
        let digester = Digester::new(&self.context, library)?;
        digester.start(&self.data, &Heads::all(self.layout), &[BlockId(0)])?.finish()?;
        let _ = self.digester.set(digester);
        Ok(())
    }

    /// For tests: from now on streams that move blocks between GPUs take their time. The first call counts.
    pub fn delay_streams(&self, delays: Delays) {
        let _ = self.delays.set(delays);
    }

    pub(super) fn pass_time<R: Role>(&self, stream: &Stream<R>) -> Result<(), CudaError> {
        self.delays.get().map_or(Ok(()), |delays| delays.pass(stream))
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

    fn digest(&self, blocks: &[BlockId]) -> Result<u64, String> {
        let Some(digester) = self.digester.get() else { return digest_of_copies(self, blocks) };
        let digest = digester.start(&self.data, &Heads::all(self.layout), blocks);
        digest.and_then(DigestInFlight::finish).map_err(|error| error.to_string())
    }

    fn peer_memory(self: Arc<Self>) -> Option<Arc<dyn PeerMemory>> {
        Some(Arc::new(IpcMemory::new(self)))
    }

    fn peer_channels(self: Arc<Self>) -> Option<Arc<dyn PeerChannels>> {
        Some(Arc::new(NcclChannels::new(self.clone(), vec![self])))
    }
}

/// The blocks of a node with ranks: each rank has its heads of every block on a GPU of its own.
#[derive(Debug)]
pub struct RankedKv {
    blocks: BlockSlices,
    parts: Vec<Arc<DeviceKv>>,
}

impl RankedKv {
    /// Of what the ranks have [exported](DeviceKv::imported), in their order; a whole block has `layout`.
    ///
    /// # Errors
    /// For people.
    pub fn imported(layout: KvLayout, exports: &[Vec<u8>]) -> Result<Arc<Self>, String> {
        let own = layout.with_heads(layout.kv_head_count / exports.len().max(1));
        let parts = exports.iter().zip(0..).map(|(export, rank): (_, usize)| {
            DeviceKv::imported(own, export)
                .map_err(|error| format!("the KV of rank {rank}: {error}"))
        });
        Self::of(parts.collect::<Result<Vec<_>, _>>()?)
    }

    /// Of the ranks' own, in their order, which have equal layouts.
    ///
    /// # Errors
    /// For people.
    pub fn of(parts: Vec<Arc<DeviceKv>>) -> Result<Arc<Self>, String> {
        let first = parts.first().ok_or("there is no rank")?.block_count();
        if let Some(other) = parts.iter().map(|part| part.block_count()).find(|&it| it != first) {
            return Err(format!("the ranks have {first} and {other} blocks"));
        }
        let slices = parts.iter().map(|part| Arc::clone(part) as Arc<dyn RemoteBlocks>);
        Ok(Arc::new(Self { blocks: BlockSlices::new(slices.collect()), parts }))
    }

    /// As [`DeviceKv::digest_with`], for every rank's part.
    ///
    /// # Errors
    /// As there.
    pub fn digest_with(&self, library: &Arc<KernelLibrary>) -> Result<(), CudaError> {
        self.parts.iter().try_for_each(|part| part.digest_with(Arc::clone(library)))
    }

    /// `None` when not every part has a kernel for it.
    fn digest_parts(&self, blocks: &[BlockId]) -> Option<Result<u64, CudaError>> {
        let digesters = self.parts.iter().map(|part| part.digester.get());
        let digesters = digesters.collect::<Option<Vec<_>>>()?;
        let whole = self.layout();
        let own_heads = whole.kv_head_count / self.parts.len();
        let started =
            self.parts.iter().zip(digesters).enumerate().map(|(rank, (part, digester))| {
                let heads = Heads::some(whole, rank * own_heads, own_heads);
                digester.start(&part.data, &heads, blocks)
            });
        // All at once, each on its GPU.
        let started: Vec<_> = started.collect();
        // To the end of each, whatever another says.
        let parts: Vec<_> =
            started.into_iter().map(|part| part.and_then(DigestInFlight::finish)).collect();
        Some(parts.into_iter().try_fold(0_u64, |sum, part| Ok(sum.wrapping_add(part?))))
    }

    /// As [`DeviceKv::move_with`], on each GPU.
    pub fn move_with(&self, library: &Arc<KernelLibrary>) -> Result<(), CudaError> {
        self.parts.iter().try_for_each(|part| part.move_with(Arc::clone(library)))
    }

    /// As [`DeviceKv::delay_streams`], on each GPU.
    pub fn delay_streams(&self, mut delays: impl FnMut() -> Delays) {
        self.parts.iter().for_each(|part| part.delay_streams(delays()));
    }
}

impl RemoteBlocks for RankedKv {
    fn layout(&self) -> KvLayout {
        self.blocks.layout()
    }

    fn block_count(&self) -> u32 {
        self.blocks.block_count()
    }

    fn read(&self, offset: usize, host: &mut [u8]) -> Result<(), String> {
        self.blocks.read(offset, host)
    }

    fn write(&self, offset: usize, host: &[u8]) -> Result<(), String> {
        self.blocks.write(offset, host)
    }

    fn digest(&self, blocks: &[BlockId]) -> Result<u64, String> {
        match self.digest_parts(blocks) {
            Some(digest) => digest.map_err(|error| error.to_string()),
            None => digest_of_copies(self, blocks),
        }
    }

    fn peer_memory(self: Arc<Self>) -> Option<Arc<dyn PeerMemory>> {
        let parts = self.parts.clone();
        Some(Arc::new(IpcMemory::of_parts(self, parts)))
    }

    fn peer_channels(self: Arc<Self>) -> Option<Arc<dyn PeerChannels>> {
        let parts = self.parts.clone();
        Some(Arc::new(NcclChannels::new(self, parts)))
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
