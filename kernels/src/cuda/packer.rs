//! Packs new weights on the GPU: into a second copy while the backend computes, or over the weights
//! in use.

use std::{
    mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{
    backend::CudaBackend,
    buffer::{CudaMatrix, CudaVector},
    context::Context,
    error::CudaError,
    library::KernelLibrary,
    memory::{DeviceMemory, Range},
    upload::{ReaderShare, Uploads},
    weight_chunks::{Broadcasts, ChunkStaging},
};
use crate::{
    backend::{Backend, Packer, RowSource},
    layout::{Dtype, WeightFormat},
    shard::Shard,
};

/// Packs into memory for a second copy of a backend's weights, or into the memory of the weights in
/// use. New weights must be packed in the order in which the backend packed its own. Then every
/// weight has the same offset in both memories, and one copy replaces all weights.
pub struct CudaPacker {
    context: Arc<Context>,
    format: WeightFormat,
    dtype: Dtype,
    shard: Shard,
    memory: DeviceMemory,
    /// Reused by all updates: the driver may wait for the steps in flight when it frees pinned
    /// memory.
    uploads: Mutex<Uploads>,
    /// Allocated by the first update by chunks, and then reused for the same reason.
    pub(super) staging: Mutex<Option<ChunkStaging>>,
    /// The idle communicator of the last update, for the next update of the same trainer.
    kept: Mutex<Option<Broadcasts>>,
    /// Memory that a trainer's broadcasts fill.
    chunk_buffers: Vec<Range>,
    library: Arc<KernelLibrary>,
    fault: Mutex<Option<CudaError>>,
    /// Whether copies of an update did not end: they may write the memory at any time.
    is_stuck: AtomicBool,
}

impl CudaPacker {
    /// Allocates memory for a second copy of the weights of `backend`, which has loaded them, for
    /// its uploads, and for `chunks`: number and bytes of chunk buffers.
    pub fn new(backend: &CudaBackend, chunks: (usize, usize)) -> Result<Self, CudaError> {
        let (weights, _) = backend.memory_bytes();
        let memory =
            DeviceMemory::new(backend.context(), "the second copy of the weights", weights)?;
        Self::into(memory, backend, chunks)
    }

    /// Packs over the weights in use of `backend`. No kernel may read them meanwhile.
    pub fn in_place(backend: &CudaBackend, chunks: (usize, usize)) -> Result<Self, CudaError> {
        Self::into(backend.weights_memory().alias("the weights"), backend, chunks)
    }

    fn into(
        memory: DeviceMemory,
        backend: &CudaBackend,
        (chunk_count, chunk_bytes): (usize, usize),
    ) -> Result<Self, CudaError> {
        let context = Arc::clone(backend.context());
        let chunk = |_| {
            let memory = DeviceMemory::new(&context, "a chunk of new weights", chunk_bytes)?;
            memory.cut(chunk_bytes)
        };
        let chunk_buffers = (0..chunk_count).map(chunk).collect::<Result<_, CudaError>>()?;
        Ok(Self {
            format: backend.options().weights,
            dtype: backend.dtype(),
            shard: backend.shard(),
            memory,
            uploads: Mutex::new(Uploads::new(&context, ReaderShare::Half)?),
            staging: Mutex::default(),
            kept: Mutex::default(),
            chunk_buffers,
            library: Arc::clone(backend.library()),
            context,
            fault: Mutex::default(),
            is_stuck: AtomicBool::new(false),
        })
    }

    /// Starts an update, which overwrites the weights packed before. Fails if copies of an earlier
    /// update did not end.
    pub fn begin(&self) -> Result<(), CudaError> {
        if self.is_stuck.load(Ordering::Acquire) {
            return Err(CudaError::WeightsStuck);
        }
        self.context.bind()?;
        self.memory.reset();
        *self.fault() = None;
        Ok(())
    }

    /// Waits until every weight is in GPU memory, and returns the first error.
    pub fn finish(&self) -> Result<(), CudaError> {
        let uploaded = self.uploads().finish();
        self.fault().clone().map_or(uploaded, Err)
    }

    /// Returns the packed weights.
    pub(super) fn everything(&self) -> Range {
        self.memory.everything()
    }

    /// Allocates the next `bytes` bytes of the memory, and returns their offset.
    pub fn place(&self, bytes: usize) -> Result<usize, CudaError> {
        let offset = self.memory.used_bytes();
        self.memory.cut(bytes)?;
        Ok(offset)
    }

    /// Enqueues an upload of a vector to an offset in the memory.
    pub fn upload(&self, values: &[f32], offset: usize) -> Result<(), CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        self.uploads().bytes(bytes, &self.everything().slice(offset, bytes.len()))
    }

    /// Records that copies of an update did not end. Every later update fails.
    pub(super) fn mark_stuck(&self) {
        self.is_stuck.store(true, Ordering::Release);
    }

    /// Ends the communicator that was kept for another update of the same trainer. Takes half a
    /// second.
    pub fn leave_trainer(&self) {
        drop(self.exchange_kept(None));
    }

    /// Keeps `broadcasts`, an idle communicator, for the next update. Returns the communicator kept
    /// so far.
    pub(super) fn exchange_kept(&self, broadcasts: Option<Broadcasts>) -> Option<Broadcasts> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        mem::replace(&mut *kept, broadcasts)
    }

    /// Returns the memory that a trainer's broadcasts fill.
    pub(super) fn chunk_buffers(&self) -> &[Range] {
        &self.chunk_buffers
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub fn format(&self) -> WeightFormat {
        self.format
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn library(&self) -> &Arc<KernelLibrary> {
        &self.library
    }

    fn cut(&self, bytes: usize) -> Range {
        self.memory.cut(bytes).unwrap_or_else(|error| {
            self.note(Err(error));
            DeviceMemory::counting("nothing").cut(bytes).expect("counting has no end")
        })
    }

    /// Keeps the first error.
    fn note(&self, outcome: Result<(), CudaError>) {
        if let Err(error) = outcome {
            self.fault().get_or_insert(error);
        }
    }

    fn fault(&self) -> MutexGuard<'_, Option<CudaError>> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn uploads(&self) -> MutexGuard<'_, Uploads> {
        self.uploads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CudaBackend {
    /// Enqueues a copy of packed weights over the weights in use, after the work enqueued so far.
    /// The addresses of the weights stay, so captured graphs stay valid.
    pub fn replace_weights(&self, packer: &CudaPacker) -> Result<(), CudaError> {
        let (to, from) = (self.weights_memory().everything(), packer.everything());
        to.copy(0, &from, 0, from.bytes(), self.compute())
    }
}

impl Packer for CudaPacker {
    type Matrix = CudaMatrix;
    type Vector = CudaVector;

    fn pack_matrix(&self, source: &dyn RowSource) -> CudaMatrix {
        let matrix = CudaMatrix::place(source, (self.format, self.dtype), |bytes| self.cut(bytes));
        if self.fault().is_none() {
            let uploaded = self.uploads().matrix(source, &matrix);
            self.note(uploaded);
        }
        matrix
    }

    fn pack_vector(&self, values: &[f32]) -> CudaVector {
        let data = self.cut(size_of_val(values));
        if self.fault().is_none() {
            let uploaded = self.uploads().bytes(bytemuck::cast_slice(values), &data);
            self.note(uploaded);
        }
        CudaVector { data, len: values.len() }
    }

    fn pack_shard(&self) -> Shard {
        self.shard
    }
}
