//! A model whose weights are on the GPU, before an executor runs it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kernels::{
    Backend, KvLayout, WeightFormat,
    cuda::{CudaBackend, DeviceBatch, TuningResult, TuningSettings},
};
use model::{Checkpoint, Limits, LoadProgress, Transformer};

use super::{
    CudaExecutorError, ExecutorLimits, KvRoom, KvShare, batch_limits, check_model, gemm_shapes,
    kv_blocks, shadow::CudaShadow,
};

/// Model whose weights are on the GPU.
pub struct CudaModel {
    pub(super) model: Transformer<CudaBackend>,
    pub(super) backend: CudaBackend,
    times: LoadTimes,
    pub(super) shadow: Option<Arc<CudaShadow>>,
}

/// Duration of each stage of loading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadTimes {
    /// Time to allocate GPU memory and staging buffers.
    pub place: Duration,
    /// Time to upload the weights.
    pub weights: Duration,
}

impl CudaModel {
    /// Allocates the memory of weights and activations and loads the weights. Calls `progress`
    /// after every matrix.
    ///
    /// # Errors
    /// When a weight cannot be read, the weights exceed the GPU's memory, or the kernels do not
    /// support a size or a format of the model.
    pub fn load(
        checkpoint: &Checkpoint,
        mut backend: CudaBackend,
        limits: &ExecutorLimits,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, CudaExecutorError> {
        let compute = backend.context().device().compute;
        check_model(checkpoint, backend.shard(), (backend.options(), compute))?;
        let largest_step = Limits {
            rows_max: limits.step_tokens as usize,
            sampled_max: limits.samples_max() as usize,
            adapter_slots: backend.options().adapters.slots,
        };
        let started = Instant::now();
        // Only computes the memory: no weight is read.
        drop(Transformer::load(checkpoint, &backend, largest_step, &mut |_| ())?);
        backend.place()?;
        let place = started.elapsed();
        let model = Transformer::load(checkpoint, &backend, largest_step, progress)?;
        backend.finish_loading()?;
        let times = LoadTimes { place, weights: started.elapsed() - place };
        Ok(Self { model, backend, times, shadow: None })
    }

    /// Allocates memory for a second copy of the weights, so that the weights can be updated while
    /// steps run. `chunks`: number and bytes of the buffers that a trainer's broadcasts fill.
    pub fn allocate_shadow(&mut self, chunks: (usize, usize)) -> Result<(), CudaExecutorError> {
        self.shadow = Some(CudaShadow::new(self.model.config(), &self.backend, chunks)?);
        Ok(())
    }

    /// Lets the weights be updated in place, while no step runs.
    /// `chunks`: as for [`Self::allocate_shadow`].
    pub fn update_in_place(&mut self, chunks: (usize, usize)) -> Result<(), CudaExecutorError> {
        self.shadow = Some(CudaShadow::in_place(self.model.config(), &self.backend, chunks)?);
        Ok(())
    }

    pub fn times(&self) -> LoadTimes {
        self.times
    }

    pub fn backend(&self) -> &CudaBackend {
        &self.backend
    }

    /// Tunes the GEMM algorithms for steps within these limits.
    pub fn tune(
        &mut self,
        limits: &ExecutorLimits,
        tuning: &TuningSettings,
    ) -> Result<TuningResult, CudaExecutorError> {
        let (config, shard) = (self.model.config(), self.model.shard());
        let is_fp8 = self.backend.options().weights == WeightFormat::Fp8;
        let shapes = gemm_shapes(config, shard, (self.backend.dtype(), is_fp8), limits);
        Ok(self.backend.tune(shapes.into_iter(), tuning)?)
    }

    /// Returns the number of KV blocks that fit into the memory that an executor of these limits
    /// leaves free.
    ///
    /// # Errors
    /// When a sequence of `tokens_min` tokens does not fit.
    pub fn kv_blocks(
        &self,
        limits: &ExecutorLimits,
        layout: KvLayout,
        share: KvShare,
        tokens_min: u32,
    ) -> Result<u32, CudaExecutorError> {
        let (context, config) = (self.backend.context(), self.model.config());
        let groups = config.kv_groups(layout.format);
        let room = KvRoom {
            total: context.device().memory_bytes,
            taken: context.taken_bytes(),
            free: context.free_bytes()?,
            batch: DeviceBatch::bytes(
                &self.backend,
                &batch_limits(limits, config),
                (layout, &groups),
            ) as u64,
        };
        kv_blocks(room, share, (layout, &groups), tokens_min)
    }
}
