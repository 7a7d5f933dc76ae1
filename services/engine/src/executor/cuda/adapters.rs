//! LoRA adapters of a GPU, copied into its memory while steps run.

use std::path::Path;

use kernels::{
    Shard,
    cuda::{CudaLowRank, LowRankWriter},
};
use model::{Adapter, AdapterTable, ModelConfig, ModelError};

use crate::{adapter_slots::AdapterSlots, executor::ExecutorError};

/// The adapters of the model, or of one rank's shard of it.
pub(super) struct CudaAdapters {
    pub table: AdapterTable<CudaLowRank>,
    /// `None`: the executor has no slots, so only errors of [`AdapterSlots::open`] are of interest.
    pub writer: Option<LowRankWriter>,
    pub config: ModelConfig,
    pub shard: Shard,
}

impl AdapterSlots for CudaAdapters {
    fn open(&self, folder: &Path, rank_max: u32) -> Result<Adapter, ModelError> {
        Adapter::open(folder, &self.config, self.shard, rank_max as usize)
    }

    fn set(&self, slot: u32, adapter: Option<Adapter>) -> Result<(), ExecutorError> {
        let writer = self.writer.as_ref().expect("an executor with a slot has a writer");
        let Some(adapter) = adapter else { return Ok(writer.write(slot as usize, 0, [])?) };
        // Steps only read the addresses, so the lock blocks none.
        let table = self.table.read();
        assert_eq!(table.len(), adapter.layers().len(), "an adapter has the layers of its model");
        let matrices = table.iter().zip(adapter.layers()).flat_map(|(matrices, updates)| {
            let updates = updates.each().map(Vec::as_slice);
            matrices.each().into_iter().zip(updates)
        });
        Ok(writer.write(slot as usize, adapter.rank(), matrices)?)
    }

    fn bytes(&self, _adapter: &Adapter) -> u64 {
        0
    }
}
