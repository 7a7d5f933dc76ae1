//! A second copy of a GPU's weights, prepared beside the steps.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use kernels::cuda::{CudaBackend, CudaError, CudaPacker};
use model::{Checkpoint, LlamaWeights};

use super::super::{PrepareError, WeightUpdate};

pub(super) struct Shadow {
    packer: CudaPacker,
    /// Whether the packer holds complete weights that are not in use.
    is_prepared: AtomicBool,
}

impl Shadow {
    /// Allocates memory for a second copy of the weights of `backend`.
    pub fn new(backend: &CudaBackend) -> Result<Arc<Self>, CudaError> {
        let packer = CudaPacker::new(backend)?;
        Ok(Arc::new(Self { packer, is_prepared: AtomicBool::new(false) }))
    }

    /// Enqueues a copy of the prepared weights over those in use. Returns false, and does nothing, without prepared
    /// weights.
    pub fn commit(&self, backend: &CudaBackend) -> Result<bool, CudaError> {
        let is_prepared = self.is_prepared.swap(false, Ordering::AcqRel);
        if is_prepared {
            backend.replace_weights(&self.packer)?;
        }
        Ok(is_prepared)
    }
}

impl WeightUpdate for Shadow {
    fn prepare(&self, _path: &Path, checkpoint: &Checkpoint) -> Result<(), PrepareError> {
        self.discard();
        let failed = |error: CudaError| PrepareError::Device(error.to_string());
        self.packer.begin().map_err(failed)?;
        let packed = LlamaWeights::pack(checkpoint, &self.packer, &mut |_| ());
        // The uploads end also if a weight could not be read.
        let finished = self.packer.finish();
        packed?;
        finished.map_err(failed)?;
        self.is_prepared.store(true, Ordering::Release);
        Ok(())
    }

    /// The memory stays allocated for the next update.
    fn discard(&self) {
        self.is_prepared.store(false, Ordering::Release);
    }
}
