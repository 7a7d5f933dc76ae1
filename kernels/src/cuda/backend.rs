//! The [`Backend`] operations on CUDA: each is one call of Baton's kernels or of cuBLASLt on one
//! stream.
//!
//! Operations of the [`Backend`] interface cannot fail, but GPUs can. The backend keeps the first
//! error, ignores later operations, and [`CudaBackend::check`] returns the error. Sizes that do not
//! fit are bugs of the caller and panic, as on the CPU.

mod all_reduce;
mod quantize;

use std::{
    cell::Cell,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use self::quantize::{QUANTIZED_ROWS_MIN, QuantizedRows};
use super::{
    attention::{Attention, AttentionAddresses, AttentionKind},
    buffer::{CudaBuffer, CudaMatrix, CudaVector, row_stride},
    collective::CudaGroup,
    context::{Compute, Context, Stream},
    driver::Driver,
    error::CudaError,
    experts::CudaExperts,
    ffi::{self, dtype_code},
    gemm::{Gemm, GemmShape, WORKSPACE_BYTES},
    graph::Graph,
    library::KernelLibrary,
    low_rank::{AdapterSizes, CudaLowRank, LowRankBuffers},
    memory::{ALIGNMENT, DeviceMemory, Range},
    skinny::Skinny,
    step::CudaStep,
    tune::{TuningResult, TuningSettings},
    upload::{ReaderShare, Uploads},
};
use crate::{
    backend::{
        Backend, ExpertShape, ExpertWeights, GatedActivation, GatedDelta, HeadShape, HeadWeights,
        LayerAttention, LowRankShape, NormSpan, RowSource,
    },
    layout::{Dtype, KvFormat, KvLayout, StateShape, WeightFormat},
    shard::Shard,
};

/// Options of a CUDA backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaOptions {
    /// Format of weights and activations; accumulators and the residual stream are f32.
    pub weights: WeightFormat,
    pub kv: KvFormat,
    pub attention: AttentionKind,
    /// Whether GEMMs of few rows run on Baton's kernels, which fuse the neighbouring operations,
    /// and not on cuBLASLt.
    pub fused: bool,
    /// Whether decode steps are captured as CUDA graphs and replayed.
    pub graphs: bool,
    /// Whether kernels use programmatic dependent launch, where the GPU supports it.
    pub dependent_launch: bool,
    /// SMs left to long-running kernels that run during steps, such as NCCL's. The GEMMs and
    /// attention of a decode step are split into one equal share per SM. With fewer free SMs than
    /// shares, some shares wait for others, and the step takes up to twice as long.
    pub reserved_sms: u32,
    /// Slots of LoRA adapters of a dense model.
    pub adapters: AdapterSizes,
}

impl CudaOptions {
    /// Returns the fastest options.
    pub fn new(weights: WeightFormat) -> Self {
        Self {
            weights,
            kv: weights.kv_format(),
            attention: AttentionKind::Auto,
            fused: true,
            graphs: true,
            dependent_launch: true,
            reserved_sms: 0,
            adapters: AdapterSizes::default(),
        }
    }
}

/// GPU backend: runs forward passes on one GPU.
///
/// Weights and activations have one allocation each. Objects that are created first are only
/// counted; [`CudaBackend::place`] then allocates the memory, and the same objects are created
/// again in that memory.
pub struct CudaBackend {
    context: Arc<Context>,
    library: Arc<KernelLibrary>,
    options: CudaOptions,
    compute: Arc<Stream<Compute>>,
    dtype: Dtype,
    weights: DeviceMemory,
    activations: DeviceMemory,
    adapters: DeviceMemory,
    is_placed: bool,
    gemm: Gemm,
    skinny: Skinny,
    attention: Attention,
    /// `Some` while weights are loaded.
    uploads: Mutex<Option<Uploads>>,
    fault: Mutex<Option<CudaError>>,
    group: Option<CudaGroup>,
    /// Sizes of [`Self::quantized`]: the most elements of a buffer, and the most rows.
    quantized_sizes: Cell<(usize, usize)>,
    /// `Some` once placed, with weights in FP8.
    quantized: Option<QuantizedRows>,
    /// Elements of the largest weight in INT4.
    int4_elements: Cell<usize>,
    /// Memory for the largest weight in INT4 as bf16. `Some` once placed, with such a weight.
    pub(super) widened: Option<Range>,
    /// Whether the model has experts.
    pub(super) has_experts: Cell<bool>,
    /// `Some` once placed, with slots of adapters.
    pub(super) low_rank_buffers: Option<LowRankBuffers>,
    /// Whether the running forward pass adds the updates of adapters.
    pub(super) has_adapters: Cell<bool>,
}

impl CudaBackend {
    /// Opens the GPU with this UUID, or the first GPU, with the kernel library at this path.
    ///
    /// # Errors
    /// When the driver, the GPU or a library is missing or does not fit.
    pub fn open(
        gpu: Option<&str>,
        kernels: Option<&Path>,
        options: CudaOptions,
    ) -> Result<Self, CudaError> {
        let driver = Driver::open()?;
        let device = driver.device(gpu)?;
        let library = Arc::new(KernelLibrary::open(kernels)?);
        Self::new(&Context::new(driver, device)?, library, options)
    }

    /// Loads the kernels and allocates the workspaces.
    pub fn new(
        context: &Arc<Context>,
        library: Arc<KernelLibrary>,
        options: CudaOptions,
    ) -> Result<Self, CudaError> {
        let dtype = match options.weights {
            WeightFormat::F32 => Dtype::F32,
            WeightFormat::Bf16 => Dtype::Bf16,
            WeightFormat::Fp8 if context.device().compute >= 90 => Dtype::Bf16,
            WeightFormat::Fp8 | WeightFormat::Q8 => {
                return Err(CudaError::Unsupported {
                    what: "the weight format",
                    value: options.weights.to_string(),
                    allowed: "f32 or bf16, on Hopper also fp8",
                });
            }
        };
        if options.adapters.slots > 0 && dtype == Dtype::F32 {
            let (what, value) = ("model.dtype of a node with adapter slots", dtype.to_string());
            return Err(CudaError::Unsupported { what, value, allowed: "bf16 or fp8 on GPUs" });
        }
        library.initialise(context)?;
        let dependent_launch = options.dependent_launch && context.device().compute >= 90;
        let options = CudaOptions { dependent_launch, ..options };
        let sms = context.device().sm_count as i32;
        let shares = sms.saturating_sub_unsigned(options.reserved_sms).max(1);
        let workspace_bytes = WORKSPACE_BYTES + Skinny::BYTES;
        let workspace = DeviceMemory::new(context, "the GEMM workspace", workspace_bytes)?;
        let compute = Arc::new(Stream::new(context)?);
        Ok(Self {
            context: Arc::clone(context),
            options,
            dtype,
            weights: DeviceMemory::counting("the weights"),
            activations: DeviceMemory::counting("the activations"),
            adapters: DeviceMemory::counting("the adapters"),
            is_placed: false,
            gemm: Gemm::new(context, workspace.cut(WORKSPACE_BYTES)?)?,
            skinny: Skinny::new(&workspace, &library, options.fused, dependent_launch, shares)?,
            attention: Attention::new(
                context,
                &library,
                &compute,
                options.attention,
                shares,
                dependent_launch,
            )?,
            library,
            compute,
            uploads: Mutex::new(None),
            fault: Mutex::new(None),
            group: None,
            quantized_sizes: Cell::default(),
            quantized: None,
            int4_elements: Cell::default(),
            widened: None,
            has_experts: Cell::new(false),
            low_rank_buffers: None,
            has_adapters: Cell::new(false),
        })
    }

    /// Makes this backend one rank of a tensor-parallel group.
    pub fn in_group(self, group: CudaGroup) -> Self {
        Self { group: Some(group), ..self }
    }

    pub fn group(&self) -> Option<&CudaGroup> {
        self.group.as_ref()
    }

    /// Allocates memory for everything that was created so far. Those objects stay without memory
    /// and must be created again.
    pub fn place(&mut self) -> Result<(), CudaError> {
        assert!(!self.is_placed, "memory is allocated once");
        let (weights, activations) = (self.weights.used_bytes(), self.activations.used_bytes());
        self.weights = DeviceMemory::new(&self.context, "the weights", weights)?;
        self.activations = DeviceMemory::new(&self.context, "the activations", activations)?;
        if self.options.weights == WeightFormat::Fp8 {
            let (elements, rows) = self.quantized_sizes.get();
            let scales_bytes = rows * size_of::<f32>();
            let bytes = elements.next_multiple_of(ALIGNMENT) + scales_bytes;
            let memory = DeviceMemory::new(&self.context, "the quantized activations", bytes)?;
            let data = memory.cut(elements)?;
            let scales = memory.cut(scales_bytes)?;
            self.quantized = Some(QuantizedRows { data, scales, turn: Cell::default() });
        }
        if self.int4_elements.get() > 0 {
            let bytes = self.int4_elements.get() * Dtype::Bf16.bytes();
            let memory = DeviceMemory::new(&self.context, "a widened weight", bytes)?;
            self.widened = Some(memory.cut(bytes)?);
        }
        let (adapters, rows) = (self.adapters.used_bytes(), self.quantized_sizes.get().1);
        if adapters > 0 {
            self.adapters = DeviceMemory::new(&self.context, "the adapters", adapters)?;
            let sizes = self.options.adapters;
            self.low_rank_buffers = Some(LowRankBuffers::new(&self.context, sizes, rows)?);
        }
        self.is_placed = true;
        *self.uploads() = Some(Uploads::new(&self.context, ReaderShare::All)?);
        Ok(())
    }

    /// Waits for all weight uploads and releases the upload buffers.
    pub fn finish_loading(&self) -> Result<(), CudaError> {
        self.check()?;
        self.uploads().take().map_or(Ok(()), |mut uploads| uploads.finish())
    }

    pub(super) fn weights_memory(&self) -> &DeviceMemory {
        &self.weights
    }

    /// Tunes these GEMM shapes. Call this after loading and before the first forward pass, because
    /// tuning overwrites the activations.
    pub fn tune(
        &mut self,
        shapes: impl Iterator<Item = GemmShape>,
        tuning: &TuningSettings,
    ) -> Result<TuningResult, CudaError> {
        let (weights, out) = (self.weights.everything(), self.activations.everything());
        self.gemm.tune(shapes, tuning, &weights, &out, &self.compute)
    }

    /// Returns the first error of the operations so far, or of the group. Errors of kernels in
    /// flight are returned when their stream is synchronized.
    pub fn check(&self) -> Result<(), CudaError> {
        let fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        fault.clone().map_or(Ok(()), Err)?;
        self.group.as_ref().map_or(Ok(()), CudaGroup::check)
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Returns whether there are weights in INT4.
    pub fn has_int4(&self) -> bool {
        self.int4_elements.get() > 0
    }

    /// Returns the type of weights and activations.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub fn library(&self) -> &Arc<KernelLibrary> {
        &self.library
    }

    /// Returns the stream of the kernels.
    pub fn compute(&self) -> &Arc<Stream<Compute>> {
        &self.compute
    }

    /// Returns the options in force, without those that the GPU does not support.
    pub fn options(&self) -> &CudaOptions {
        &self.options
    }

    /// Returns whether a decode step can be [captured](Self::capture): attention of these heads
    /// plans nothing on the host.
    pub fn can_capture(&self, heads: HeadShape) -> bool {
        self.attention.can_be_captured(heads, self.options.kv)
    }

    /// Captures a forward pass as a CUDA graph. The forward pass must have run once before.
    ///
    /// # Errors
    /// The first error of `work`.
    pub fn capture(&mut self, work: impl FnOnce(&mut Self)) -> Result<Graph, CudaError> {
        let compute = Arc::clone(&self.compute);
        Graph::capture(&compute, || {
            work(self);
            self.check()
        })
    }

    pub(super) fn skinny_parts(&self) -> &Skinny {
        &self.skinny
    }

    /// Returns the bytes of weights and of activations.
    pub fn memory_bytes(&self) -> (usize, usize) {
        (self.weights.used_bytes(), self.activations.used_bytes())
    }

    fn uploads(&self) -> MutexGuard<'_, Option<Uploads>> {
        self.uploads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the first error.
    pub(super) fn note(&self, outcome: Result<(), CudaError>) {
        if let Err(error) = outcome {
            let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
            fault.get_or_insert(error);
        }
    }

    /// Returns whether an operation has failed; later operations are ignored.
    pub(super) fn is_faulty(&self) -> bool {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Launches a kernel, unless an operation has failed, and keeps its error.
    pub(super) fn run(
        &self,
        launch: impl FnOnce(&KernelLibrary, &Stream<Compute>) -> Result<(), CudaError>,
    ) {
        if !self.is_faulty() {
            self.note(launch(&self.library, &self.compute));
        }
    }

    /// Returns memory for activations.
    pub(super) fn cut_activations(&self, bytes: usize) -> Range {
        self.cut(&self.activations, bytes)
    }

    /// Cuts a range, or returns an empty range after an error.
    fn cut(&self, memory: &DeviceMemory, bytes: usize) -> Range {
        memory.cut(bytes).unwrap_or_else(|error| {
            self.note(Err(error));
            DeviceMemory::counting("nothing").cut(bytes).expect("counting has no end")
        })
    }

    fn typed_buffer(&self, rows_max: usize, width: usize, dtype: Dtype) -> CudaBuffer {
        let stride = row_stride(width, dtype);
        let bytes = rows_max.checked_mul(stride).and_then(|count| count.checked_mul(dtype.bytes()));
        let bytes = bytes.expect("a buffer fits the address space");
        let data = self.cut(&self.activations, bytes);
        let (elements, rows) = self.quantized_sizes.get();
        let quantized_rows = rows_max.max(QUANTIZED_ROWS_MIN);
        self.quantized_sizes.set((elements.max(quantized_rows * width), rows.max(rows_max)));
        let (pending, quantized) = (Cell::new(None), Cell::new(None));
        CudaBuffer { data, rows_max, width, stride, dtype, pending, quantized }
    }
}

impl Backend for CudaBackend {
    type Matrix = CudaMatrix;
    type Vector = CudaVector;
    type Buffer = CudaBuffer;
    type Step = CudaStep;
    type ExpertBuffers = CudaExperts;
    type LowRank = CudaLowRank;

    fn matrix(&self, source: &dyn RowSource) -> CudaMatrix {
        let formats = (self.options.weights, self.dtype);
        let matrix = CudaMatrix::place(source, formats, |bytes| self.cut(&self.weights, bytes));
        if matrix.int4_block.is_some() {
            self.int4_elements.update(|most| most.max(matrix.rows * matrix.cols));
        }
        if self.is_placed && !self.is_faulty() {
            let mut uploads = self.uploads();
            let uploads =
                uploads.as_mut().expect("weights are loaded between place and finish_loading");
            self.note(uploads.matrix(source, &matrix));
        }
        matrix
    }

    fn vector(&self, values: &[f32]) -> CudaVector {
        let data = self.cut(&self.weights, size_of_val(values));
        if self.is_placed && !self.is_faulty() {
            self.note(data.write(0, values));
        }
        CudaVector { data, len: values.len() }
    }

    fn buffer(&self, rows_max: usize, width: usize) -> CudaBuffer {
        self.typed_buffer(rows_max, width, self.dtype)
    }

    fn wide_buffer(&self, rows_max: usize, width: usize) -> CudaBuffer {
        self.typed_buffer(rows_max, width, Dtype::F32)
    }

    fn expert_buffers(&self, rows_max: usize, shape: ExpertShape) -> CudaExperts {
        let buffers = self.place_experts(rows_max, shape);
        if self.is_placed && !self.is_faulty() {
            self.note(buffers.clear());
        }
        buffers
    }

    fn delta_buffer(&self, rows_max: usize, shape: StateShape) -> CudaBuffer {
        self.place_delta(rows_max, shape)
    }

    fn low_rank(&self, slots: usize, shape: &LowRankShape) -> CudaLowRank {
        let sizes = AdapterSizes { slots, ..self.options.adapters };
        CudaLowRank::place(sizes, shape, |bytes| self.cut(&self.adapters, bytes))
    }

    fn has_adapters(&self, step: &CudaStep) -> bool {
        // Quantization reads the flag: updates need the rows in bf16.
        self.has_adapters.set(step.has_adapters());
        step.has_adapters()
    }

    fn add_low_rank(
        &mut self,
        rows: usize,
        x: &CudaBuffer,
        updates: &CudaLowRank,
        step: &CudaStep,
        out: &mut CudaBuffer,
    ) {
        let update = self.low_rank_args(rows, updates, step);
        self.add_update(rows, x, &update, out);
    }

    fn rows(&self, step: &CudaStep) -> usize {
        step.rows()
    }

    fn sampled_rows(&self, step: &CudaStep) -> usize {
        step.samples()
    }

    fn kv_layout(&self, step: &CudaStep) -> KvLayout {
        step.kv_layout()
    }

    fn embed(
        &mut self,
        table: &CudaMatrix,
        vocabulary: usize,
        scale: f32,
        step: &CudaStep,
        out: &mut CudaBuffer,
    ) {
        let own = self.shard().tokens(vocabulary);
        assert_eq!(table.rows, own.len(), "embed: the table has a row for each token of the rank");
        assert_eq!(out.width, table.cols, "embed: widths differ");
        wide(out);
        let (rows, width) = (step.rows(), out.width);
        let to = out.data.part(0, out.bytes(rows));
        self.use_dependent_launch();
        let (dtype, rows, width) = (dtype_code(self.dtype), rows as i32, width as i32);
        let (first, count) = (own.start as i32, own.len() as i32);
        self.run(|library, stream| {
            let (table, tokens) = (table.data.address(), step.arrays().row_tokens);
            // SAFETY: the step has this many tokens, the buffer this many rows, and the table
            // `count` rows. The kernel reads no row for a token outside the table.
            unsafe {
                launch!(
                    library,
                    stream,
                    baton_embed(dtype, table, first, count, scale, tokens, to, rows, width)
                )
            }
        });
    }

    fn rms_norm(
        &mut self,
        rows: usize,
        x: &CudaBuffer,
        weight: &CudaVector,
        eps: f32,
        out: &mut CudaBuffer,
    ) {
        assert!(x.width == weight.len && out.width == weight.len, "rms_norm: widths differ");
        wide(x);
        if self.quantize_norm(rows, (x, None), (weight, eps), out) {
            return;
        }
        out.forget();
        let (from, to) = (x.data.part(0, x.bytes(rows)), out.data.part(0, out.bytes(rows)));
        let (dtype, rows, width) = (dtype_code(out.dtype), rows as i32, weight.len as i32);
        self.run(|library, stream| {
            let norm = weight.data.address();
            // SAFETY: the three ranges have the sizes checked above.
            unsafe {
                launch!(library, stream, baton_rms_norm(dtype, from, norm, eps, to, rows, width))
            }
        });
    }

    fn rms_norm_in_place(
        &mut self,
        rows: usize,
        x: &mut CudaBuffer,
        weight: &CudaVector,
        eps: f32,
    ) {
        assert_eq!(x.width, weight.len, "rms_norm_in_place: widths differ");
        assert_eq!(x.width, x.stride, "rms_norm_in_place: the rows are contiguous");
        x.forget();
        let (data, norm) = (x.data.part(0, x.bytes(rows)), weight.data.address());
        let (dtype, rows, width) = (dtype_code(x.dtype), rows as i32, x.width as i32);
        self.run(|library, stream| {
            // SAFETY: the two ranges have the sizes checked above.
            unsafe {
                launch!(
                    library,
                    stream,
                    baton_rms_norm_in_place(dtype, data, norm, eps, rows, width)
                )
            }
        });
    }

    fn add_rms_norm(
        &mut self,
        rows: usize,
        residual: &mut CudaBuffer,
        x: &CudaBuffer,
        weight: &CudaVector,
        eps: f32,
        out: &mut CudaBuffer,
    ) {
        let width = weight.len;
        assert!(
            residual.width == width && x.width == width && out.width == width,
            "add_rms_norm: widths differ"
        );
        wide(residual);
        assert_eq!(x.dtype, out.dtype, "add_rms_norm: types of addend and output differ");
        if self.quantize_norm(rows, (residual, Some(x)), (weight, eps), out) {
            return;
        }
        out.forget();
        let sum = residual.data.part(0, residual.bytes(rows));
        let (from, to) = (x.data.part(0, x.bytes(rows)), out.data.part(0, out.bytes(rows)));
        let (dtype, rows, width) = (dtype_code(out.dtype), rows as i32, width as i32);
        self.run(|library, stream| {
            let norm = weight.data.address();
            // SAFETY: the four ranges have the sizes checked above.
            unsafe {
                launch!(
                    library,
                    stream,
                    baton_add_rms_norm(dtype, sum, from, norm, eps, to, rows, width)
                )
            }
        });
    }

    fn matmul(&mut self, rows: usize, x: &CudaBuffer, w: &CudaMatrix, out: &mut CudaBuffer) {
        assert!(
            rows <= x.rows_max && rows <= out.rows_max,
            "matmul: a buffer has fewer than {rows} rows"
        );
        assert_eq!(x.width, w.cols, "matmul: input width and matrix columns differ");
        assert_eq!(out.width, w.rows, "matmul: output width and matrix rows differ");
        assert_eq!(x.dtype, w.dtype, "matmul: types of input and matrix differ");
        assert!(w.scales.is_some() || x.is_mirrored(), "matmul: the rows are only in FP8");
        assert!(!w.is_mxfp4, "matmul: only experts have weights in MXFP4");
        if self.is_faulty() {
            return;
        }
        // The skinny kernels apply a deferred norm, and take weights in FP8 and INT4. A rank's GEMMs
        // defer no norms, but a rank uses the same kernel.
        let is_packed = w.scales.is_some() || w.int4_block.is_some();
        if x.pending.get().is_some() || self.group.is_some() || is_packed {
            if self.skinny_matmul(rows, (x, w, None), out) {
                return;
            }
            if w.scales.is_none() {
                self.finish_rows(rows, x);
            }
        }
        out.forget();
        let shape = GemmShape {
            rows,
            inputs: w.cols,
            outputs: w.rows,
            from: w.dtype,
            is_fp8: false,
            to: out.dtype,
            x_stride: x.stride,
            out_stride: out.stride,
        };
        let outcome = match &w.scales {
            None => {
                let w = match w.int4_block {
                    None => &w.data,
                    Some(block) => {
                        self.widen(w, block);
                        self.widened.as_ref().expect("placed with the weights")
                    }
                };
                self.gemm.run(shape, &x.data, w, &out.data, &self.compute)
            }
            Some(scales) => {
                self.quantized(rows, x, 1);
                let quantized = self.quantized.as_ref().expect("placed with the weights");
                let x = (&quantized.data, &quantized.scales);
                self.gemm.run_fp8(shape.with_fp8(), x, (&w.data, scales), &out.data, &self.compute)
            }
        };
        self.note(outcome);
    }

    fn store_kv(
        &mut self,
        layer: usize,
        shape: HeadShape,
        weights: HeadWeights<'_, CudaVector>,
        qkv: &mut CudaBuffer,
        step: &mut CudaStep,
    ) {
        self.check_heads(shape, qkv, step);
        assert!(layer < step.kv_layout().layer_count, "the KV cache has no layer {layer}");
        let rotary_dim = weights.frequencies.len * 2;
        assert!(rotary_dim <= shape.head_dim, "RoPE has one frequency per pair");
        let (query_norm, key_norm) = match weights.norm_span {
            NormSpan::Head => (shape.head_dim, shape.head_dim),
            NormSpan::Projection => (shape.query_width(), shape.kv_heads * shape.head_dim),
        };
        assert!(
            self.group.is_none() || weights.norms.is_none() || weights.norm_span == NormSpan::Head,
            "a rank has the norms of its heads"
        );
        let address = |vector: Option<&CudaVector>, len: usize| {
            vector.map_or(0, |vector| {
                assert_eq!(vector.len, len, "length of a head weight or bias");
                vector.data.address()
            })
        };
        let rows = step.rows();
        let data = qkv.data.part(0, qkv.bytes(rows));
        let args = ffi::RopeArgs {
            qkv: data,
            queries: data,
            query_stride: qkv.stride as i64,
            bias: address(weights.bias, shape.qkv_width()),
            query_norm: address(weights.norms.map(|norms| norms.0), query_norm),
            key_norm: address(weights.norms.map(|norms| norms.1), key_norm),
            frequencies: weights.frequencies.data.address(),
            positions: step.arrays().row_positions,
            destinations: step.layer_arrays(layer).row_destinations,
            norm_eps: weights.eps,
            query_heads: shape.query_heads as i32,
            layer: step.layer_in_block(layer) as i32,
            rows: rows as i32,
            rotary_dim: rotary_dim as i32,
            norms_all_heads: (weights.norm_span == NormSpan::Projection).into(),
        };
        self.run(|library, stream| {
            // SAFETY: the buffer has the step's rows, the vectors were checked, and the step's KV
            // destinations are blocks that the step may write. Positions and destinations, which the
            // kernel reads early, were written before the GEMM or the copy that wrote the rows.
            unsafe { launch!(library, stream, baton_rope_store_kv(step.kv(), &args)) }
        });
    }

    fn attention(
        &mut self,
        attention: LayerAttention,
        sinks: Option<&CudaVector>,
        qkv: &CudaBuffer,
        step: &CudaStep,
        out: &mut CudaBuffer,
    ) {
        let LayerAttention { layer, heads, .. } = attention;
        self.check_heads(heads, qkv, step);
        assert_eq!(out.width, heads.query_width(), "attention: output and query width differ");
        assert_eq!(out.width, out.stride, "attention: the output is contiguous");
        assert!(layer < step.kv_layout().layer_count, "the KV cache has no layer {layer}");
        if step.rows() == 0 || self.is_faulty() {
            return;
        }
        let sinks = sinks.map_or(0, |sinks| {
            assert_eq!(sinks.len, heads.query_heads, "attention: a sink for each query head");
            sinks.data.address()
        });
        let addresses = AttentionAddresses {
            queries: qkv.data.part(0, qkv.bytes(step.rows())),
            query_stride: qkv.stride,
            sinks,
            out: out.data.part(0, out.bytes(step.rows())),
        };
        let outcome = self.attention.run(&self.library, &self.compute, step, attention, addresses);
        self.note(outcome);
    }

    fn apply_gate(&mut self, rows: usize, gate: &CudaBuffer, x: &mut CudaBuffer) {
        self.run_gate(rows, gate, x);
    }

    fn gated_delta(
        &mut self,
        delta: GatedDelta<'_, CudaVector>,
        projected: &CudaBuffer,
        rates: &CudaBuffer,
        mixed: &mut CudaBuffer,
        step: &mut CudaStep,
        out: &mut CudaBuffer,
    ) {
        self.run_delta(delta, [projected, rates, mixed, out], step);
    }

    fn add_bias(&mut self, rows: usize, bias: &CudaVector, x: &mut CudaBuffer) {
        assert_eq!(bias.len, x.width, "add_bias: the bias is as wide as a row");
        assert_eq!(x.width, x.stride, "add_bias: the rows are contiguous");
        x.forget();
        let (to, from) = (x.data.part(0, x.bytes(rows)), bias.data.address());
        let (dtype, rows, width) = (dtype_code(x.dtype), rows as i32, x.width as i32);
        self.run(|library, stream| {
            // SAFETY: the two ranges have the sizes checked above.
            unsafe { launch!(library, stream, baton_add_bias(dtype, to, from, rows, width)) }
        });
    }

    fn activate(
        &mut self,
        activation: GatedActivation,
        rows: usize,
        gate_up: &CudaBuffer,
        out: &mut CudaBuffer,
    ) {
        let width = out.width;
        assert_eq!(gate_up.width, 2 * width, "activate: gate and up have the output's width");
        assert_eq!(gate_up.dtype, out.dtype, "activate: types differ");
        let code = match activation {
            GatedActivation::Silu if self.quantize_gated(rows, gate_up, out) => return,
            GatedActivation::Silu => ffi::SILU,
            GatedActivation::GeluTanh => ffi::GELU_TANH,
            GatedActivation::ClampedSwiGlu { .. } => unreachable!("only experts have it"),
        };
        out.forget();
        let from = gate_up.data.part(0, gate_up.bytes(rows));
        let to = out.data.part(0, out.bytes(rows));
        let (dtype, rows, width) = (dtype_code(out.dtype), rows as i32, width as i32);
        self.run(|library, stream| {
            // SAFETY: the two ranges have the sizes checked above.
            unsafe { launch!(library, stream, baton_activate(dtype, code, from, to, rows, width)) }
        });
    }

    fn shard(&self) -> Shard {
        let shard = |group: &CudaGroup| Shard::new(group.rank(), group.ranks());
        self.group.as_ref().and_then(shard).unwrap_or(Shard::WHOLE)
    }

    fn experts(
        &mut self,
        rows: usize,
        x: &CudaBuffer,
        weights: &ExpertWeights<'_, CudaMatrix, CudaVector>,
        buffers: &mut CudaExperts,
        out: &mut CudaBuffer,
    ) {
        self.run_experts(rows, x, weights, buffers);
        self.combine(rows, x.rows_of(rows), weights, buffers, None, out);
    }

    fn experts_onto_residual(
        &mut self,
        rows: usize,
        normed: &mut CudaBuffer,
        weights: &ExpertWeights<'_, CudaMatrix, CudaVector>,
        (buffers, delta): (&mut CudaExperts, &mut CudaBuffer),
        residual: &mut CudaBuffer,
        norm: (&CudaVector, f32),
    ) {
        self.run_experts(rows, normed, weights, buffers);
        let x = normed.rows_of(rows);
        if self.group.is_some() {
            // A rank's experts return a partial sum.
            self.combine(rows, x, weights, buffers, None, delta);
            self.all_reduce_onto_residual(rows, delta, residual, norm, normed);
        } else {
            self.combine(rows, x, weights, buffers, Some((residual, norm)), normed);
        }
    }

    fn all_reduce(&mut self, rows: usize, x: &mut CudaBuffer) {
        let Some(group) = &self.group else { return };
        assert_eq!(x.pending.get(), None, "all_reduce: the input has a deferred norm");
        if !self.is_faulty() {
            self.note(self.all_reduce_rows(group, rows, x));
        }
    }

    fn gather_sampled(&mut self, x: &CudaBuffer, step: &CudaStep, out: &mut CudaBuffer) {
        assert!(x.width == out.width && x.dtype == out.dtype, "gather_sampled: row types differ");
        assert_eq!(x.pending.get(), None, "gather_sampled: the input has a deferred norm");
        assert!(step.rows() <= x.rows_max, "gather_sampled: the input lacks rows of the step");
        let rows = step.samples();
        let to = out.data.part(0, out.bytes(rows));
        let (dtype, rows, width) = (dtype_code(out.dtype), rows as i32, out.width as i32);
        self.run(|library, stream| {
            let (from, indices) = (x.data.address(), step.arrays().sampled_rows);
            // SAFETY: sampled rows are rows of the step, which the input has.
            unsafe {
                launch!(library, stream, baton_gather_rows(dtype, from, indices, to, rows, width))
            }
        });
    }

    fn project_heads(
        &mut self,
        layer: usize,
        shape: HeadShape,
        (x, w, updates): (&CudaBuffer, &CudaMatrix, Option<&CudaLowRank>),
        weights: HeadWeights<'_, CudaVector>,
        qkv: &mut CudaBuffer,
        step: &mut CudaStep,
    ) {
        self.check_heads(shape, qkv, step);
        let rows = step.rows();
        let update = updates.map(|updates| self.low_rank_args(rows, updates, step));
        if self.skinny_heads(layer, shape, (x, w, update), &weights, qkv, step) {
            return;
        }
        // The same kernel after a norm that is not deferred.
        let has_norms = weights.norms.is_some() && !self.is_faulty();
        if !has_norms || !self.skinny_matmul(rows, (x, w, update), qkv) {
            self.matmul_updated(rows, (x, w, update), qkv);
        }
        self.store_kv(layer, shape, weights, qkv, step);
    }

    fn project_onto_residual(
        &mut self,
        rows: usize,
        (x, w, bias): (&CudaBuffer, &CudaMatrix, Option<&CudaVector>),
        adapters: Option<(&CudaLowRank, &CudaStep)>,
        (delta, residual): (&mut CudaBuffer, &mut CudaBuffer),
        (norm, eps): (&CudaVector, f32),
        out: &mut CudaBuffer,
    ) {
        let is_whole = self.group.is_none();
        let update = adapters.map(|(updates, step)| self.low_rank_args(rows, updates, step));
        let operands = (x, w, update);
        if is_whole && self.skinny_onto_residual(rows, operands, bias, residual, (norm, eps), out) {
            return;
        }
        self.matmul_updated(rows, operands, delta);
        if !is_whole && bias.is_none() {
            // A rank's GEMM returns a partial sum.
            return self.all_reduce_onto_residual(rows, delta, residual, (norm, eps), out);
        }
        self.all_reduce(rows, delta);
        if let Some(bias) = bias {
            self.add_bias(rows, bias, delta);
        }
        self.add_rms_norm(rows, residual, delta, norm, eps, out);
    }

    fn project_gated(
        &mut self,
        activation: GatedActivation,
        rows: usize,
        (x, w): (&CudaBuffer, &CudaMatrix),
        adapters: Option<(&CudaLowRank, &CudaStep)>,
        gate_up: &mut CudaBuffer,
        out: &mut CudaBuffer,
    ) {
        let update = adapters.map(|(updates, step)| self.low_rank_args(rows, updates, step));
        let is_fused =
            activation == GatedActivation::Silu && self.skinny_gated(rows, (x, w, update), out);
        if !is_fused {
            self.matmul_updated(rows, (x, w, update), gate_up);
            self.activate(activation, rows, gate_up, out);
        }
    }
}

impl CudaBackend {
    /// Runs a GEMM without scales on cuBLASLt, into a range.
    pub(super) fn gemm_onto(
        &mut self,
        shape: GemmShape,
        (x, w): (&CudaBuffer, &CudaMatrix),
        out: &Range,
    ) {
        let outcome = self.gemm.run(shape, &x.data, &w.data, out, &self.compute);
        self.note(outcome);
    }

    /// Sets the library's switch for programmatic dependent launch, which all backends share.
    pub(super) fn use_dependent_launch(&self) {
        // SAFETY: the function sets a number.
        unsafe {
            (self.library.functions().baton_programmatic_launch)(
                self.options.dependent_launch.into(),
            );
        }
    }

    /// Panics when the heads do not match the KV layout, which is a bug of the model, never of a
    /// request.
    fn check_heads(&self, shape: HeadShape, qkv: &CudaBuffer, step: &CudaStep) {
        let layout = step.kv_layout();
        assert!(
            shape.kv_heads > 0 && shape.query_heads.is_multiple_of(shape.kv_heads),
            "invalid attention heads {shape:?}"
        );
        assert_eq!(qkv.width, shape.qkv_width(), "a fused row has queries, keys and values");
        assert!(
            layout.kv_head_count == shape.kv_heads && layout.head_dim == shape.head_dim,
            "the KV layout ({layout}) differs from the layer's heads {shape:?}"
        );
        assert_eq!(self.options.kv, layout.format, "the KV blocks have the backend's format");
        assert!(layout.format.fits(qkv.dtype), "types of activations and KV differ");
    }
}

pub(super) fn wide(buffer: &CudaBuffer) {
    assert_eq!(buffer.dtype, Dtype::F32, "the residual stream is f32");
    assert_eq!(buffer.width, buffer.stride, "the residual stream is contiguous");
}
