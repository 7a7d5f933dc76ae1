//! KV blocks in GPU memory as [`RemoteBlocks`]: of one GPU, and of the GPUs of a tensor-parallel
//! node.

use std::sync::Arc;

use super::{
    channel::NcclChannels,
    digest::{Digester, DigestsInFlight},
    error::CudaError,
    ipc::IpcMemory,
    kv::DeviceKv,
    library::KernelLibrary,
    memory::Range,
    offload::CudaOffload,
    stream_delays::StreamDelays,
};
use crate::{
    arena::{BlockSlices, RemoteBlocks, digest_of_copies, digests_of_copies},
    digest::{DigestPurpose, Heads},
    layout::{BlockId, KvLayout},
    offload::BlockOffload,
    peer::{PeerChannels, PeerMemory},
};

impl RemoteBlocks for DeviceKv {
    fn layout(&self) -> KvLayout {
        self.layout()
    }

    fn block_count(&self) -> u32 {
        self.block_count()
    }

    fn read(&self, offset: usize, host: &mut [u8]) -> Result<(), String> {
        self.copy_to_host(offset, host).map_err(|error| error.to_string())
    }

    fn write(&self, offset: usize, host: &[u8]) -> Result<(), String> {
        self.copy_from_host(offset, host).map_err(|error| error.to_string())
    }

    fn digest(&self, blocks: &[BlockId]) -> Result<u64, String> {
        let Some(digester) = self.digester() else { return digest_of_copies(self, blocks) };
        let digest = digester.start(self.data(), &Heads::all(self.layout()), blocks);
        let digest = digest.and_then(DigestsInFlight::finish);
        digest.map(|digests| digests[0]).map_err(|error| error.to_string())
    }

    fn digests(&self, blocks: &[BlockId], purpose: DigestPurpose) -> Result<Vec<u64>, String> {
        let Some(digester) = self.digester() else { return digests_of_copies(self, blocks) };
        let heads = Heads::all(self.layout());
        let mut digests = Vec::with_capacity(blocks.len());
        for blocks in blocks.chunks(Digester::BLOCKS_MAX) {
            let started = digester.start_each(self.data(), &heads, blocks, purpose);
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
    /// Maps the blocks that the ranks have [exported](DeviceKv::imported), in rank order; a block
    /// of all heads has `layout`.
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

    /// Adds up the digests that `start` launches for each rank. Returns `None` when a rank has no
    /// digest kernel.
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
                start(digester, part.data(), &heads)
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
    pub fn delay_streams(&self, mut delays: impl FnMut() -> StreamDelays) {
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
