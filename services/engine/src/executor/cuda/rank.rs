//! Connects the ranks of a node on their GPUs at the start.
//!
//! The ranks exchange handles through shared host memory. Afterwards their collectives write
//! directly into the memory of each other's GPUs.

use std::{mem::ManuallyDrop, time::Duration};

use kernels::{
    Shard,
    cpu::{CpuGroup, CpuGroupError},
    cuda::{CudaBackend, CudaGroup, GroupArena, GroupHandle},
    shared::{RegionName, SharedError, SharedRegion},
};

use super::CudaExecutorError;

/// Bytes of one all-reduce; longer messages are split. A decode step's message is far shorter, and
/// larger parts are not faster.
const MESSAGE_BYTES: usize = 16 << 20;
/// Deadline of an all-reduce. The node detects a dead rank earlier; a rank that loads its kernels
/// for the first time may take seconds.
const ALL_REDUCE_TIMEOUT: Duration = Duration::from_secs(30);
/// Deadline of the exchange at start, which covers loading weights of any size. The node detects a
/// failed rank earlier.
const LOAD_TIMEOUT: Duration = Duration::from_secs(1800);

/// One GPU rank of a node.
pub struct CudaRank {
    exchange: CpuGroup,
}

impl CudaRank {
    pub fn new(exchange: CpuGroup) -> Self {
        Self { exchange }
    }

    /// Creates the rank in shared memory that the node has created.
    pub fn open(region: &RegionName, shard: Shard) -> Result<Self, SharedError> {
        let region = SharedRegion::open(region, Self::region_bytes(shard.rank_count()))?;
        Ok(Self::new(CpuGroup::new(&region, 0, shard, LOAD_TIMEOUT)))
    }

    /// Returns the bytes of the collective over shared host memory.
    pub fn region_bytes(ranks: usize) -> usize {
        CpuGroup::region_bytes(ranks)
    }

    /// Creates this rank's executor with `make`. After an error the rank stays in the exchange;
    /// otherwise the other ranks would report that this rank left instead of the error.
    pub fn start<T, E>(self, make: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E> {
        let mut rank = ManuallyDrop::new(self);
        let made = make(&mut rank)?;
        drop(ManuallyDrop::into_inner(rank));
        Ok(made)
    }

    /// Turns `backend` into this rank's backend. Returns once all ranks have done so.
    pub fn join(&mut self, backend: CudaBackend) -> Result<CudaBackend, CudaExecutorError> {
        let (shard, exchange) = (self.exchange.shard(), &mut self.exchange);
        join(backend, shard, |own| {
            let all = exchange.all_gather(own).map_err(|error| error.to_string())?;
            // All ranks send messages of one length.
            Ok(all.chunks(own.len()).map(<[u8]>::to_vec).collect())
        })
    }

    /// Returns the minimum of `own` over all ranks.
    pub fn least(&mut self, own: u32) -> Result<u32, CudaExecutorError> {
        let failed = |error: CpuGroupError| CudaExecutorError::Connect(error.to_string());
        let all = self.exchange.all_gather(&own.to_le_bytes()).map_err(failed)?;
        let numbers = all.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
        Ok(numbers.min().unwrap_or(own))
    }
}

/// Turns `backend` into the backend of one rank. `exchange` all-gathers bytes in rank order.
pub fn join(
    backend: CudaBackend,
    shard: Shard,
    mut exchange: impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, String>,
) -> Result<CudaBackend, CudaExecutorError> {
    let place = (shard.rank(), shard.rank_count());
    let arena = GroupArena::new(backend.context(), backend.library(), place, MESSAGE_BYTES)?;
    let handles = exchange(&arena.handle().to_bytes()).map_err(CudaExecutorError::Connect)?;
    let handles = handles.iter().map(|bytes| GroupHandle::from_bytes(bytes));
    let handles = handles.collect::<Option<Vec<_>>>().ok_or_else(|| {
        CudaExecutorError::Connect("a rank is of another build than this one".to_owned())
    })?;
    let group = CudaGroup::new(arena, &handles, ALL_REDUCE_TIMEOUT)?;
    // No rank writes into the memory of another before that rank has prepared it.
    exchange(&[0]).map_err(CudaExecutorError::Connect)?;
    Ok(backend.in_group(group))
}
