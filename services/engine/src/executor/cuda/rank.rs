//! How the ranks of a node come together on their GPUs, before any of them computes.
//!
//! They tell each other over memory of the host that all have mapped; what they sum they then write into
//! each other's GPUs.

use std::{mem::ManuallyDrop, time::Duration};

use kernels::{
    Shard,
    cpu::{Group as Exchange, GroupError},
    cuda::{CudaBackend, Group, GroupArena, GroupHandle},
    shared::{RegionName, SharedError, SharedRegion},
};

use super::CudaExecutorError;

/// What is summed at a time: longer messages go in parts. Whole steps of decoding are far shorter, and a
/// longer part would not be quicker.
const MESSAGE_BYTES: usize = 16 << 20;
/// How long a sum waits for another rank. That one is gone is noticed sooner, by the node; a rank that
/// loads its kernels for the first time takes its time.
const SUM_PATIENCE: Duration = Duration::from_secs(30);
/// Until all ranks have loaded weights of any size; a rank that cannot is noticed sooner, by the node.
const LOAD_PATIENCE: Duration = Duration::from_secs(1800);

/// One rank among those of its node.
pub struct CudaRank {
    exchange: Exchange,
}

impl CudaRank {
    pub fn new(exchange: Exchange) -> Self {
        Self { exchange }
    }

    /// In memory that the ranks' node has made for this.
    pub fn open(region: &RegionName, shard: Shard) -> Result<Self, SharedError> {
        let region = SharedRegion::open(region, Self::region_bytes(shard.of()))?;
        Ok(Self::new(Exchange::new(&region, 0, shard, LOAD_PATIENCE)))
    }

    /// What the ranks tell each other their places in.
    pub fn region_bytes(ranks: usize) -> usize {
        Exchange::region_bytes(ranks)
    }

    /// Has this rank's executor made. After an error the rank stays among the others: they would say that
    /// it has left, and not why.
    pub fn start<T, E>(self, make: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E> {
        let mut rank = ManuallyDrop::new(self);
        let made = make(&mut rank)?;
        drop(ManuallyDrop::into_inner(rank));
        Ok(made)
    }

    /// The backend as this rank's. Comes back once all ranks have theirs.
    pub fn join(&mut self, backend: CudaBackend) -> Result<CudaBackend, CudaExecutorError> {
        let (shard, exchange) = (self.exchange.shard(), &mut self.exchange);
        join(backend, shard, |own| {
            let all = exchange.all_gather(own).map_err(|error| error.to_string())?;
            // Nobody has a piece when there is none to have.
            Ok(all.chunks(own.len().max(1)).map(<[u8]>::to_vec).collect())
        })
    }

    /// The least of what all ranks say: so much is there on every GPU.
    pub fn least(&mut self, own: u32) -> Result<u32, CudaExecutorError> {
        let together = |error: GroupError| CudaExecutorError::Together(error.to_string());
        let all = self.exchange.all_gather(&own.to_le_bytes()).map_err(together)?;
        let numbers = all.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
        Ok(numbers.min().unwrap_or(own))
    }
}

/// The backend as one rank's, where `exchange` brings what every rank has said, in their order, once all
/// have.
pub fn join(
    backend: CudaBackend,
    shard: Shard,
    mut exchange: impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, String>,
) -> Result<CudaBackend, CudaExecutorError> {
    let place = (shard.rank(), shard.of());
    let arena = GroupArena::new(backend.context(), backend.library(), place, MESSAGE_BYTES)?;
    let said = exchange(&arena.handle().to_bytes()).map_err(CudaExecutorError::Together)?;
    let handles = said.iter().map(|bytes| GroupHandle::from_bytes(bytes));
    let handles = handles.collect::<Option<Vec<_>>>().ok_or_else(|| {
        CudaExecutorError::Together("a rank is of another build than this one".to_owned())
    })?;
    let group = Group::new(arena, &handles, SUM_PATIENCE)?;
    // Nobody writes into an arena that its rank has not prepared.
    exchange(&[0]).map_err(CudaExecutorError::Together)?;
    Ok(backend.in_group(group))
}
