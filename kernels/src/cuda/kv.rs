//! KV blocks in GPU memory.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::{
    channel::NcclChannels,
    context::{Context, DeviceToHost, Event, HostToDevice, Role, Stream},
    digest::{Digester, DigestsInFlight},
    driver::Driver,
    error::CudaError,
    ipc::{Export, IpcMemory, Part},
    library::KernelLibrary,
    memory::{DeviceMemory, Pinned, Range},
    offload::CudaOffload,
    testing::Delays,
};
use crate::{
    arena::{BlockSlices, RemoteBlocks, digest_of_copies, digests_of_copies},
    digest::{DigestPurpose, Heads},
    layout::{BlockId, KvLayout},
    offload::BlockOffload,
    peer::{PeerChannels, PeerMemory},
};

/// The memory of an arena's KV blocks, and one extra block that padding rows write to.
#[derive(Debug)]
pub struct DeviceKv {
    layout: KvLayout,
    blocks: u32,
    data: Range,
    /// Exported memory of the owning process, for imported blocks.
    part: Option<Part>,
    context: Arc<Context>,
    copies: Mutex<Copies>,
    /// Library whose kernel gathers and scatters blocks; without it the copy engines do.
    library: OnceLock<Arc<KernelLibrary>>,
    /// GPU digest; without it blocks are copied to the host.
    digester: OnceLock<Digester>,
    /// Random delays, in tests only.
    delays: OnceLock<Delays>,
}

/// Copies of single blocks, for network transfers.
#[derive(Debug)]
struct Copies {
    context: Arc<Context>,
    up: Stream<HostToDevice>,
    down: Stream<DeviceToHost>,
    /// `None` after an error.
    staging: Option<(Pinned<u8>, Event)>,
}

impl DeviceKv {
    /// Allocates zeroed blocks.
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

    /// Maps the blocks of another process of this host, such as a rank, by its [`PeerMemory::export`]. Each
    /// block has `layout`. Retains the context of their GPU in this process.
    ///
    /// # Errors
    /// A message for operators.
    pub fn imported(layout: KvLayout, export: &[u8]) -> Result<Arc<Self>, String> {
        let export = Export::from_bytes(export).ok_or("unknown export format")?;
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
        part: Option<Part>,
    ) -> Result<Arc<Self>, CudaError> {
        let copies = Copies {
            context: Arc::clone(context),
            up: Stream::new(context)?,
            down: Stream::new(context)?,
            staging: Some((
                Pinned::zeroed(context, "a block's copy", layout.block_bytes())?,
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
    pub(super) fn part(&self) -> Result<Part, CudaError> {
        match &self.part {
            Some(part) => Ok(part.clone()),
            None => Part::of(&self.context, &self.data),
        }
    }

    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Returns the number of blocks, without the extra block.
    pub fn block_count(&self) -> u32 {
        self.blocks
    }

    pub(super) fn data(&self) -> &Range {
        &self.data
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Sets the library whose kernel gathers and scatters blocks, instead of one copy per piece. Only the first
    /// call has an effect.
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

    /// Sets the library that computes digests of blocks on the GPU, and loads its kernel. Only the first call
    /// has an effect.
    ///
    /// # Errors
    /// When the library has no digest kernel for this GPU, or its kernel computes fewer digests in a call.
    pub fn digest_with(&self, library: Arc<KernelLibrary>) -> Result<(), CudaError> {
        let digester = Digester::new(&self.context, library)?;
        // A library that computes fewer digests in a call returns an error.
        let (heads, blocks) = (Heads::all(self.layout), [BlockId(0); Digester::BLOCKS_MAX]);
        digester.start_each(&self.data, &heads, &blocks, DigestPurpose::Transfer)?.finish()?;
        let _ = self.digester.set(digester);
        Ok(())
    }

    /// Adds random delays to streams that transfer blocks between GPUs, in tests. Only the first call has an
    /// effect.
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
        let Some(digester) = self.digester() else { return digest_of_copies(self, blocks) };
        let digest = digester.start(&self.data, &Heads::all(self.layout), blocks);
        let digest = digest.and_then(DigestsInFlight::finish);
        digest.map(|digests| digests[0]).map_err(|error| error.to_string())
    }

    fn digests(&self, blocks: &[BlockId], purpose: DigestPurpose) -> Result<Vec<u64>, String> {
        let Some(digester) = self.digester() else { return digests_of_copies(self, blocks) };
        let heads = Heads::all(self.layout);
        let mut digests = Vec::with_capacity(blocks.len());
        for blocks in blocks.chunks(Digester::BLOCKS_MAX) {
            let started = digester.start_each(&self.data, &heads, blocks, purpose);
            let finished = started.and_then(DigestsInFlight::finish);
            digests.extend(finished.map_err(|error| error.to_string())?);
        }
        Ok(digests)
    }

    fn peer_memory(self: Arc<Self>) -> Option<Arc<dyn PeerMemory>> {
        Some(Arc::new(IpcMemory::new(self)))
    }

    fn peer_channels(self: Arc<Self>) -> Option<Arc<dyn PeerChannels>> {
        Some(Arc::new(NcclChannels::new(self.clone(), vec![self])))
    }

    fn offload(self: Arc<Self>) -> Option<Arc<dyn BlockOffload>> {
        Some(Arc::new(CudaOffload::new(self.clone(), vec![self])))
    }
}

/// The KV blocks of a tensor-parallel node: each rank has its heads of every block on its own GPU.
#[derive(Debug)]
pub struct RankedKv {
    blocks: BlockSlices,
    parts: Vec<Arc<DeviceKv>>,
}

impl RankedKv {
    /// Maps the blocks that the ranks have [exported](DeviceKv::imported), in rank order; a block of all heads
    /// has `layout`.
    ///
    /// # Errors
    /// A message for operators.
    pub fn imported(layout: KvLayout, exports: &[Vec<u8>]) -> Result<Arc<Self>, String> {
        let own = layout.with_heads(layout.kv_head_count / exports.len().max(1));
        let parts = exports.iter().zip(0..).map(|(export, rank): (_, usize)| {
            DeviceKv::imported(own, export)
                .map_err(|error| format!("cannot map the KV of rank {rank}: {error}"))
        });
        Self::of(parts.collect::<Result<Vec<_>, _>>()?)
    }

    /// Combines the ranks' blocks, in rank order. All ranks have equal layouts.
    ///
    /// # Errors
    /// A message for operators.
    pub fn of(parts: Vec<Arc<DeviceKv>>) -> Result<Arc<Self>, String> {
        let first = parts.first().ok_or("no ranks; expected at least one")?.block_count();
        if let Some(other) = parts.iter().map(|part| part.block_count()).find(|&it| it != first) {
            return Err(format!(
                "the ranks have {first} and {other} blocks; expected equal counts"
            ));
        }
        let slices = parts.iter().map(|part| Arc::clone(part) as Arc<dyn RemoteBlocks>);
        Ok(Arc::new(Self { blocks: BlockSlices::new(slices.collect()), parts }))
    }

    /// Calls [`DeviceKv::digest_with`] for every rank.
    ///
    /// # Errors
    /// See [`DeviceKv::digest_with`].
    pub fn digest_with(&self, library: &Arc<KernelLibrary>) -> Result<(), CudaError> {
        self.parts.iter().try_for_each(|part| part.digest_with(Arc::clone(library)))
    }

    /// Adds up the digests that `start` launches for each rank. Returns `None` when a rank has no digest kernel.
    fn digest_parts<'a>(
        &'a self,
        start: impl Fn(&'a Digester, &'a Range, &Heads) -> Result<DigestsInFlight<'a>, CudaError>,
    ) -> Option<Result<Vec<u64>, String>> {
        let digesters = self.parts.iter().map(|part| part.digester());
        let digesters = digesters.collect::<Option<Vec<_>>>()?;
        let whole = self.layout();
        let own_heads = whole.kv_head_count / self.parts.len();
        let started =
            self.parts.iter().zip(digesters).enumerate().map(|(rank, (part, digester))| {
                let heads = Heads::some(whole, rank * own_heads, own_heads);
                start(digester, &part.data, &heads)
            });
        // All ranks' digests run concurrently.
        let started: Vec<_> = started.collect();
        // Every digest is waited for, even if one fails.
        let parts: Vec<_> =
            started.into_iter().map(|part| part.and_then(DigestsInFlight::finish)).collect();
        let sums = parts.into_iter().reduce(|sums, part| {
            let (sums, part) = (sums?, part?);
            Ok(sums.iter().zip(part).map(|(sum, part)| sum.wrapping_add(part)).collect())
        });
        let sums = sums.expect("a node has ranks");
        Some(sums.map_err(|error| error.to_string()))
    }

    /// Calls [`DeviceKv::move_with`] for every rank.
    pub fn move_with(&self, library: &Arc<KernelLibrary>) -> Result<(), CudaError> {
        self.parts.iter().try_for_each(|part| part.move_with(Arc::clone(library)))
    }

    /// Calls [`DeviceKv::delay_streams`] for every rank.
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
        match self.digest_parts(|digester, data, heads| digester.start(data, heads, blocks)) {
            Some(digests) => Ok(digests?[0]),
            None => digest_of_copies(self, blocks),
        }
    }

    fn digests(&self, blocks: &[BlockId], purpose: DigestPurpose) -> Result<Vec<u64>, String> {
        let mut digests = Vec::with_capacity(blocks.len());
        for some in blocks.chunks(Digester::BLOCKS_MAX) {
            let parts = self.digest_parts(|digester, data, heads| {
                digester.start_each(data, heads, some, purpose)
            });
            match parts {
                Some(part) => digests.extend(part?),
                None => return digests_of_copies(self, blocks),
            }
        }
        Ok(digests)
    }

    fn peer_memory(self: Arc<Self>) -> Option<Arc<dyn PeerMemory>> {
        let parts = self.parts.clone();
        Some(Arc::new(IpcMemory::of_parts(self, parts)))
    }

    fn peer_channels(self: Arc<Self>) -> Option<Arc<dyn PeerChannels>> {
        let parts = self.parts.clone();
        Some(Arc::new(NcclChannels::new(self, parts)))
    }

    fn offload(self: Arc<Self>) -> Option<Arc<dyn BlockOffload>> {
        let parts = self.parts.clone();
        Some(Arc::new(CudaOffload::new(self, parts)))
    }
}

impl Copies {
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
