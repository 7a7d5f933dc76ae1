//! New weights of a GPU: a second copy that is prepared beside the steps, or in the place of the weights in use.

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
    is_in_place: bool,
    /// Whether the packer holds complete weights that are not in use.
    is_prepared: AtomicBool,
}

impl Shadow {
    /// Allocates memory for a second copy of the weights of `backend`.
    pub fn new(backend: &CudaBackend) -> Result<Arc<Self>, CudaError> {
        let packer = CudaPacker::new(backend)?;
        Ok(Arc::new(Self { packer, is_in_place: false, is_prepared: AtomicBool::new(false) }))
    }

    /// Prepares weights over those of `backend`.
    pub fn in_place(backend: &CudaBackend) -> Result<Arc<Self>, CudaError> {
        let packer = CudaPacker::in_place(backend)?;
        Ok(Arc::new(Self { packer, is_in_place: true, is_prepared: AtomicBool::new(false) }))
    }

    /// Enqueues a copy of the prepared weights over those in use, unless they are in place. Returns false, and does nothing, without prepared
    /// weights.
    pub fn commit(&self, backend: &CudaBackend) -> Result<bool, CudaError> {
        let is_prepared = self.is_prepared.swap(false, Ordering::AcqRel);
        if is_prepared && !self.is_in_place {
            backend.replace_weights(&self.packer)?;
        }
        Ok(is_prepared)
    }
}

impl WeightUpdate for Shadow {
    fn is_in_place(&self) -> bool {
        self.is_in_place
    }

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
