//! New weights of a GPU: a second copy that is prepared while steps run, or an update in place.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use kernels::{
    Packer, WeightFormat,
    cuda::{ChunkCopies, ChunkSource, CudaBackend, CudaError, CudaPacker},
    peer::WaitLimit,
};
use model::{Checkpoint, ModelConfig, TransformerWeights};

use super::{
    super::{
        ChunkReceiver, DeclaredTensor, PrepareError, ReceivedWeights, TensorPiece, WeightUpdate,
    },
    scatter::Scatter,
};

pub(super) struct CudaShadow {
    packer: CudaPacker,
    config: ModelConfig,
    has_int4: bool,
    is_in_place: bool,
    /// Whether the packer holds complete weights that are not in use.
    is_prepared: AtomicBool,
}

impl CudaShadow {
    /// Allocates memory for a second copy of the weights of `backend`.
    pub(super) fn new(
        config: &ModelConfig,
        backend: &CudaBackend,
        chunks: (usize, usize),
    ) -> Result<Arc<Self>, CudaError> {
        let packer = CudaPacker::new(backend, chunks)?;
        Ok(Self::with(packer, config, (backend.has_int4(), false)))
    }

    /// Lets updates overwrite the weights of `backend`.
    pub(super) fn in_place(
        config: &ModelConfig,
        backend: &CudaBackend,
        chunks: (usize, usize),
    ) -> Result<Arc<Self>, CudaError> {
        let packer = CudaPacker::in_place(backend, chunks)?;
        Ok(Self::with(packer, config, (backend.has_int4(), true)))
    }

    fn with(
        packer: CudaPacker,
        config: &ModelConfig,
        (has_int4, is_in_place): (bool, bool),
    ) -> Arc<Self> {
        let (config, is_prepared) = (config.clone(), AtomicBool::new(false));
        Arc::new(Self { packer, config, has_int4, is_in_place, is_prepared })
    }

    /// Enqueues a copy of the prepared weights over the weights in use, unless they are in place
    /// already. Does nothing and returns false without prepared weights.
    pub(super) fn commit(&self, backend: &CudaBackend) -> Result<bool, CudaError> {
        let is_prepared = self.is_prepared.swap(false, Ordering::AcqRel);
        if is_prepared && !self.is_in_place {
            backend.replace_weights(&self.packer)?;
        }
        Ok(is_prepared)
    }
}

impl WeightUpdate for CudaShadow {
    fn is_in_place(&self) -> bool {
        self.is_in_place
    }

    fn prepare(&self, _path: &Path, checkpoint: &Checkpoint) -> Result<(), PrepareError> {
        self.discard();
        self.packer.begin().map_err(failed)?;
        let packed = TransformerWeights::pack(checkpoint, &self.packer, &mut |_| ());
        // Wait for the uploads even if a weight could not be read.
        let finished = self.packer.finish();
        packed?;
        finished.map_err(failed)?;
        self.is_prepared.store(true, Ordering::Release);
        Ok(())
    }

    fn receive(
        &self,
        tensors: &[DeclaredTensor],
        source: ChunkSource<'_>,
    ) -> Result<Box<dyn ChunkReceiver + '_>, PrepareError> {
        if self.packer.format() == WeightFormat::Fp8 {
            let found = "the node's weights are in FP8";
            return Err(PrepareError::Unsupported { found, expected: "files (disk or tcp)" });
        }
        if self.config.has_mxfp4_experts() {
            let found = "the node's experts are in MXFP4";
            return Err(PrepareError::Unsupported { found, expected: "files (disk or tcp)" });
        }
        if self.has_int4 {
            let found = "the node's weights are in INT4";
            return Err(PrepareError::Unsupported { found, expected: "files (disk or tcp)" });
        }
        self.discard();
        self.packer.begin().map_err(failed)?;
        let (shard, dtype) = (self.packer.pack_shard(), self.packer.dtype());
        let place = |bytes| self.packer.place(bytes).map_err(failed);
        let scatter = Scatter::new(&self.config, shard, dtype, tensors, place)?;
        let (host_bytes, digests) = (scatter.host_bytes(), scatter.digest_count());
        let copies = self.packer.copy_chunks(source, host_bytes, digests);
        let copies = copies.map_err(PrepareError::Device)?;
        Ok(Box::new(ShadowReceiver { shadow: self, scatter, copies }))
    }

    fn leave_trainer(&self) {
        self.packer.leave_trainer();
    }

    /// Keeps the memory allocated for the next update.
    fn discard(&self) {
        self.is_prepared.store(false, Ordering::Release);
    }
}

fn failed(error: CudaError) -> PrepareError {
    PrepareError::Device(error.to_string())
}

/// Weights that arrive in chunks.
struct ShadowReceiver<'a> {
    shadow: &'a CudaShadow,
    scatter: Scatter,
    copies: ChunkCopies<'a>,
}

impl ChunkReceiver for ShadowReceiver<'_> {
    fn scatter(&mut self, buffer: usize, pieces: &[TensorPiece]) -> Result<(), PrepareError> {
        self.copies.scatter(buffer, &self.scatter.work(pieces)).map_err(failed)
    }

    fn fill(
        &mut self,
        buffer: usize,
        bytes: usize,
        limit: WaitLimit<'_>,
    ) -> Result<(), PrepareError> {
        let filled = self.copies.fill(buffer, bytes, limit);
        filled.map_err(|error| PrepareError::Device(error.to_string()))
    }

    fn wait(&mut self, buffer: usize, limit: WaitLimit<'_>) -> Result<(), PrepareError> {
        self.copies.wait(buffer, limit).map_err(failed)
    }

    fn finish(&mut self, limit: WaitLimit<'_>) -> Result<ReceivedWeights, PrepareError> {
        let Self { shadow, scatter, copies } = self;
        let copied = copies.finish(limit).map_err(failed)?;
        let upload = |values: &[f32], to| shadow.packer.upload(values, to).map_err(failed);
        let digests = scatter.finish(&copied, upload);
        // Wait for the uploads even if a weight is not finite.
        let finished = shadow.packer.finish();
        let digests = digests?;
        finished.map_err(failed)?;
        shadow.is_prepared.store(true, Ordering::Release);
        Ok(ReceivedWeights { digests, bytes: scatter.bytes() })
    }
}
