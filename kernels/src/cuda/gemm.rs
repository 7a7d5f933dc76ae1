//! GEMMs by cuBLASLt. Descriptors and algorithm are cached per shape.

use std::{
    collections::HashMap,
    ffi::c_void,
    mem::{self, MaybeUninit},
    ptr,
    time::Duration,
};

use cudarc::cublaslt::{
    result::{self, CublasError},
    sys,
};

use super::{
    buffer::row_stride,
    context::{Compute, Context, Event, Stream},
    driver::has_cublaslt,
    error::{CudaError, Named},
    ffi::Address,
    memory::{ALIGNMENT, Range},
    tune::{self, Algorithm, TuningResult, TuningSettings, TuningTable},
};
use crate::layout::Dtype;

/// Workspace size that NVIDIA recommends for Hopper; older GPUs need no more.
pub const WORKSPACE_BYTES: usize = 32 << 20;
/// Maximum number of shapes whose plan is cached. The cache is cleared when it is full.
const PLANS_MAX: usize = 1 << 15;

/// `out[rows][outputs] = x[rows][inputs] · w[outputs][inputs]ᵀ`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmShape {
    pub rows: usize,
    pub inputs: usize,
    pub outputs: usize,
    /// Type of `x` and `w`. Accumulation is f32.
    pub from: Dtype,
    /// Whether `x` and `w` are in FP8 (e4m3) instead, and each of their rows has a scale.
    pub is_fp8: bool,
    /// Type of `out`.
    pub to: Dtype,
    /// Elements from one row of `x` to the next.
    pub x_stride: usize,
    pub out_stride: usize,
}

impl GemmShape {
    /// Returns a shape whose row strides are those of [`CudaBuffer`](super::CudaBuffer).
    pub fn packed(rows: usize, inputs: usize, outputs: usize, from: Dtype, to: Dtype) -> Self {
        let (x_stride, out_stride) = (row_stride(inputs, from), row_stride(outputs, to));
        Self { rows, inputs, outputs, from, is_fp8: false, to, x_stride, out_stride }
    }

    /// Returns the shape with `x` and `w` in FP8, and contiguous rows of `x`.
    pub fn with_fp8(self) -> Self {
        Self { is_fp8: true, x_stride: self.inputs, ..self }
    }

    fn element_bytes(&self) -> usize {
        if self.is_fp8 { 1 } else { self.from.bytes() }
    }

    fn x_bytes(&self) -> usize {
        self.rows * self.x_stride * self.element_bytes()
    }

    fn w_bytes(&self) -> usize {
        self.outputs * self.inputs * self.element_bytes()
    }

    fn out_bytes(&self) -> usize {
        self.rows * self.out_stride * self.to.bytes()
    }
}

/// cuBLASLt for one stream: all GEMMs share one workspace.
#[derive(Debug)]
pub struct Gemm {
    handle: OwnedHandle<sys::cublasLtHandle_t>,
    workspace: Range,
    plans: HashMap<GemmShape, GemmPlan>,
    tuned: TuningTable,
}

// SAFETY: cuBLASLt handles are thread-safe; descriptors are only reached through `&mut self`.
unsafe impl Send for Gemm {}

impl Gemm {
    /// Creates the cuBLASLt handle. The context is current on the calling thread.
    ///
    /// # Errors
    /// When cuBLASLt is missing or fails to start.
    pub fn new(context: &Context, workspace: Range) -> Result<Self, CudaError> {
        if !has_cublaslt() {
            return Err(CudaError::LibraryMissing { name: "libcublasLt.so.13" });
        }
        let raw = result::create_handle().named("cublasLtCreate")?;
        let handle = OwnedHandle { raw, destroy: result::destroy_handle };
        // SAFETY: the library is loaded, and every version of it has this function.
        let version = unsafe { sys::cublasLtGetVersion() };
        let (device, driver) = (context.device(), context.driver().version());
        let machine = format!(
            "{}, sm_{}, {} SMs, driver {driver}, cuBLASLt {version}",
            device.name, device.compute, device.sm_count
        );
        Ok(Self { handle, workspace, plans: HashMap::new(), tuned: TuningTable::new(machine) })
    }

    /// Launches one GEMM on `stream`.
    ///
    /// # Panics
    /// When a range is smaller than its matrix, which is a bug in the caller.
    pub fn run(
        &mut self,
        shape: GemmShape,
        x: &Range,
        w: &Range,
        out: &Range,
        stream: &Stream<Compute>,
    ) -> Result<(), CudaError> {
        self.run_scaled(shape, (x, None), (w, None), out, stream)
    }

    /// Launches one GEMM in FP8. `x` and `w` have an f32 scale for each row.
    ///
    /// # Panics
    /// As [`Gemm::run`].
    pub fn run_fp8(
        &mut self,
        shape: GemmShape,
        (x, x_scales): (&Range, &Range),
        (w, w_scales): (&Range, &Range),
        out: &Range,
        stream: &Stream<Compute>,
    ) -> Result<(), CudaError> {
        assert!(shape.is_fp8, "the shape is one of FP8");
        self.run_scaled(shape, (x, Some(x_scales)), (w, Some(w_scales)), out, stream)
    }

    fn run_scaled(
        &mut self,
        shape: GemmShape,
        (x, x_scales): (&Range, Option<&Range>),
        (w, w_scales): (&Range, Option<&Range>),
        out: &Range,
        stream: &Stream<Compute>,
    ) -> Result<(), CudaError> {
        let GemmShape { rows, inputs, outputs, x_stride, out_stride, .. } = shape;
        assert_eq!(shape.is_fp8, x_scales.is_some(), "only FP8 has scales");
        assert!(x_stride >= inputs && out_stride >= outputs, "rows do not overlap");
        if rows == 0 {
            return Ok(());
        }
        let x = x.part(0, shape.x_bytes());
        let w = w.part(0, shape.w_bytes());
        let out = out.part(0, shape.out_bytes());
        let scales = |range: Option<&Range>, rows: usize| {
            range.map(|range| range.part(0, rows * size_of::<f32>()))
        };
        let scales = scales(x_scales, rows).zip(scales(w_scales, outputs));
        if !self.plans.contains_key(&shape) {
            if self.plans.len() == PLANS_MAX {
                self.plans.clear();
            }
            let plan = self.plan(shape)?;
            self.plans.insert(shape, plan);
        }
        let GemmPlan { descriptors, algorithm } = &self.plans[&shape];
        descriptors.set_scales(scales)?;
        // SAFETY: the ranges hold the shape's matrices and scales, as `part` has checked.
        unsafe { self.launch(descriptors, algorithm, (x, w, out), stream) }
    }

    /// Times cuBLASLt's candidate algorithms for each shape that has no tuned algorithm yet; `run`
    /// uses the fastest. Timing reads `weights` and overwrites `out`. A shape that does not fit
    /// into them keeps the heuristic's algorithm.
    ///
    /// Tuning precedes the first GEMM, so the algorithm of a shape never changes.
    pub fn tune(
        &mut self,
        shapes: impl Iterator<Item = GemmShape>,
        tuning: &TuningSettings,
        weights: &Range,
        out: &Range,
        stream: &Stream<Compute>,
    ) -> Result<TuningResult, CudaError> {
        assert!(self.plans.is_empty(), "tuning precedes the first GEMM");
        let events = [Event::timed(stream.context())?, Event::timed(stream.context())?];
        // The closure below borrows `self`, so the table is moved out.
        let mut table = mem::replace(&mut self.tuned, TuningTable::new(String::new()));
        let outcome = tune::tune(&mut table, shapes, tuning, |shape| {
            self.time(shape, weights, out, stream, &events)
        });
        self.tuned = table;
        outcome
    }

    /// Returns the fastest algorithm, its time and the time of the heuristic's algorithm. Returns
    /// `None` when the ranges are too small or there is no algorithm.
    fn time(
        &self,
        shape: GemmShape,
        weights: &Range,
        out: &Range,
        stream: &Stream<Compute>,
        events: &[Event; 2],
    ) -> Result<Option<(Algorithm, Duration, Duration)>, CudaError> {
        if shape.rows == 0
            || out.bytes() < shape.out_bytes()
            || weights.bytes() < shape.x_bytes().max(shape.w_bytes())
        {
            return Ok(None);
        }
        let descriptors = Descriptors::new(shape, self.workspace.address())?;
        // Any numbers serve as scales.
        descriptors.set_scales(shape.is_fp8.then(|| (weights.address(), weights.address())))?;
        let algorithms =
            descriptors.algorithms::<CANDIDATES>(self.handle.raw, self.workspace.bytes())?;
        let mut timed = TimedGemm {
            gemm: self,
            shape,
            descriptors,
            algorithms,
            weights,
            out,
            stream,
            events,
            turn: 0,
            has_run: [false; CANDIDATES],
        };
        let chosen = tune::choose(timed.algorithms.len(), |candidate| timed.time(candidate))?;
        Ok(chosen.map(|(best, time, first)| (timed.algorithms[best].data, time, first)))
    }

    fn plan(&self, shape: GemmShape) -> Result<GemmPlan, CudaError> {
        let descriptors = Descriptors::new(shape, self.workspace.address())?;
        let (handle, workspace) = (self.handle.raw, self.workspace.bytes());
        // A tuned algorithm may come from a file or from another row count, so cuBLASLt checks it
        // first.
        let tuned = self.tuned.get(&shape).map(|data| sys::cublasLtMatmulAlgo_t { data });
        let algorithm =
            match tuned.filter(|algorithm| descriptors.takes(handle, algorithm, workspace)) {
                Some(algorithm) => algorithm,
                None => {
                    let first = descriptors.algorithms::<1>(handle, workspace)?.first().copied();
                    first.ok_or(CudaError::Call {
                        call: "cublasLtMatmulAlgoGetHeuristic",
                        code: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as i32,
                        reason: format!("no algorithm for {shape:?}"),
                    })?
                }
            };
        Ok(GemmPlan { descriptors, algorithm })
    }

    /// # Safety
    /// The addresses point to memory that holds the shape's matrices, so do those of the scales in
    /// the descriptors, and no other work accesses `out` meanwhile.
    unsafe fn launch(
        &self,
        descriptors: &Descriptors,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        (x, w, out): (Address, Address, Address),
        stream: &Stream<Compute>,
    ) -> Result<(), CudaError> {
        let (one, zero) = (1.0f32, 0.0f32);
        // SAFETY: the caller's matrices have the sizes of the descriptors, and the workspace has
        // the size that is passed. The scale factors are f32, as the descriptor says, and are read
        // before the call returns. `out` is not read because beta is 0.
        unsafe {
            result::matmul(
                self.handle.raw,
                descriptors.operation.raw,
                ptr::from_ref(&one).cast(),
                ptr::from_ref(&zero).cast(),
                w as *const c_void,
                descriptors.w.raw,
                x as *const c_void,
                descriptors.x.raw,
                out as *const c_void,
                descriptors.out.raw,
                out as *mut c_void,
                descriptors.out.raw,
                algorithm,
                self.workspace.address() as *mut c_void,
                self.workspace.bytes(),
                stream.raw().cast(),
            )
        }
        .named("cublasLtMatmul")
    }
}

/// Algorithms timed per shape.
const CANDIDATES: usize = 8;
/// GEMMs between two timing events, to hide the launch latency. With more rows than
/// `LAUNCHES_ROWS_MAX`, one GEMM is long enough to hide it.
const LAUNCHES: usize = 3;
const LAUNCHES_ROWS_MAX: usize = 512;

/// The candidate algorithms of one shape, timed on the model's weights.
struct TimedGemm<'a> {
    gemm: &'a Gemm,
    shape: GemmShape,
    descriptors: Descriptors,
    algorithms: Vec<sys::cublasLtMatmulAlgo_t>,
    weights: &'a Range,
    out: &'a Range,
    stream: &'a Stream<Compute>,
    events: &'a [Event; 2],
    turn: usize,
    /// Whether each algorithm has run once, so that its code is loaded.
    has_run: [bool; CANDIDATES],
}

impl TimedGemm<'_> {
    /// Returns the next weight range, so that the weights are not in the L2 cache.
    fn next_w(&mut self) -> Address {
        let bytes = self.shape.w_bytes();
        let places = self.weights.bytes() / bytes.next_multiple_of(ALIGNMENT).max(1);
        self.turn += 1;
        let place = self.turn % places.max(1);
        self.weights.part(place * bytes.next_multiple_of(ALIGNMENT), bytes)
    }

    /// Launches one GEMM. Returns false when cuBLASLt rejects the algorithm.
    fn launch(&mut self, candidate: usize) -> bool {
        let w = self.next_w();
        let x = self.weights.part(0, self.shape.x_bytes());
        let out = self.out.part(0, self.shape.out_bytes());
        let algorithm = &self.algorithms[candidate];
        // SAFETY: the three ranges have the shape's sizes, and nothing else reads `out` during
        // tuning.
        unsafe { self.gemm.launch(&self.descriptors, algorithm, (x, w, out), self.stream) }.is_ok()
    }

    /// Returns the time of one GEMM, or `None` when the algorithm does not support the shape.
    fn time(&mut self, candidate: usize) -> Result<Option<Duration>, CudaError> {
        let has_run = mem::replace(&mut self.has_run[candidate], true);
        if !has_run && !self.launch(candidate) {
            return Ok(None);
        }
        let launches = if self.shape.rows <= LAUNCHES_ROWS_MAX { LAUNCHES } else { 1 };
        let [begin, end] = self.events;
        begin.record(self.stream)?;
        for _ in 0..launches {
            if !self.launch(candidate) {
                return Ok(None);
            }
        }
        end.record(self.stream)?;
        end.synchronize()?;
        let milliseconds = end.milliseconds_since(begin)? / launches as f32;
        Ok(Some(Duration::from_secs_f32(milliseconds / 1000.0)))
    }
}

/// Descriptors and algorithm of one shape.
#[derive(Debug)]
struct GemmPlan {
    descriptors: Descriptors,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// cuBLASLt descriptors of one shape.
#[derive(Debug)]
struct Descriptors {
    operation: OwnedHandle<sys::cublasLtMatmulDesc_t>,
    w: OwnedHandle<sys::cublasLtMatrixLayout_t>,
    x: OwnedHandle<sys::cublasLtMatrixLayout_t>,
    out: OwnedHandle<sys::cublasLtMatrixLayout_t>,
}

impl Descriptors {
    /// cuBLAS is column-major: `w` is `[inputs]` by `[outputs]` and transposed, `x` is `[inputs]`
    /// by `[rows]`, and `out` is `[outputs]` by `[rows]`. `scales` is any address: without one
    /// there is no algorithm for FP8.
    fn new(shape: GemmShape, scales: Address) -> Result<Self, CudaError> {
        let GemmShape { rows, inputs, outputs, from, is_fp8, to, x_stride, out_stride } = shape;
        let from = if is_fp8 { sys::cudaDataType::CUDA_R_8F_E4M3 } else { data_type(from) };
        let to = data_type(to);
        let descriptors = Self {
            operation: operation(is_fp8)?,
            w: layout(from, inputs, outputs, inputs)?,
            x: layout(from, inputs, rows, x_stride)?,
            out: layout(to, outputs, rows, out_stride)?,
        };
        descriptors.set_scales(is_fp8.then_some((scales, scales)))?;
        Ok(descriptors)
    }

    /// Sets the addresses of the scales of `x` and `w`, which the next launch reads.
    fn set_scales(&self, scales: Option<(Address, Address)>) -> Result<(), CudaError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let Some((x, w)) = scales else { return Ok(()) };
        // cuBLAS's first matrix is `w`.
        let addresses = [
            (Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, w),
            (Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, x),
        ];
        addresses.into_iter().try_for_each(|(attribute, address)| {
            set_attribute(self.operation.raw, attribute, &address)
        })
    }

    /// Returns at most `COUNT` algorithms, the heuristic's first choice first.
    fn algorithms<const COUNT: usize>(
        &self,
        handle: sys::cublasLtHandle_t,
        workspace_bytes: usize,
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, CudaError> {
        let preference = preference(workspace_bytes)?;
        let mut found = [MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed(); COUNT];
        let mut count = 0;
        // SAFETY: all descriptors are alive, and `found` has room for `COUNT` results.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.operation.raw,
                self.w.raw,
                self.x.raw,
                self.out.raw,
                self.out.raw,
                preference.raw,
                COUNT as i32,
                found.as_mut_ptr().cast(),
                &mut count,
            )
        };
        status.result().named("cublasLtMatmulAlgoGetHeuristic")?;
        let count = usize::try_from(count).unwrap_or(0).min(COUNT);
        // SAFETY: the call succeeded and initialized `count` results.
        let found = found[..count].iter().map(|found| unsafe { found.assume_init() });
        let is_usable = |found: &sys::cublasLtMatmulHeuristicResult_t| {
            found.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS
        };
        Ok(found.filter(is_usable).map(|found| found.algo).collect())
    }

    /// Returns whether `algorithm` can compute this shape within the workspace.
    fn takes(
        &self,
        handle: sys::cublasLtHandle_t,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        workspace_bytes: usize,
    ) -> bool {
        let mut found = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        // SAFETY: all descriptors are alive, and there is room for one result.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                handle,
                self.operation.raw,
                self.w.raw,
                self.x.raw,
                self.out.raw,
                self.out.raw,
                algorithm,
                found.as_mut_ptr(),
            )
        };
        // SAFETY: all-zero bytes are a valid result.
        let found = unsafe { found.assume_init() };
        status.result().is_ok() && found.workspaceSize <= workspace_bytes
    }
}

fn data_type(dtype: Dtype) -> sys::cudaDataType {
    match dtype {
        Dtype::F32 => sys::cudaDataType::CUDA_R_32F,
        Dtype::Bf16 => sys::cudaDataType::CUDA_R_16BF,
    }
}

/// A cuBLASLt object, which is destroyed once.
#[derive(Debug)]
struct OwnedHandle<T: Copy> {
    raw: T,
    destroy: unsafe fn(T) -> Result<(), CublasError>,
}

impl<T: Copy> Drop for OwnedHandle<T> {
    fn drop(&mut self) {
        // SAFETY: the object was created with this value, and nothing uses it from now on.
        let _ = unsafe { (self.destroy)(self.raw) };
    }
}

/// Creates a descriptor: f32 accumulation, first matrix transposed, with `is_fp8` a scale for each
/// row of `x` and `w`.
fn operation(is_fp8: bool) -> Result<OwnedHandle<sys::cublasLtMatmulDesc_t>, CudaError> {
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
    let raw = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F)
        .named("cublasLtMatmulDescCreate")?;
    let operation = OwnedHandle { raw, destroy: result::destroy_matmul_desc };
    // CUBLAS_OP_T.
    set_attribute(raw, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &1u32)?;
    if is_fp8 {
        let rows = sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
        set_attribute(raw, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &(rows as u32))?;
        set_attribute(raw, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &(rows as u32))?;
        // Fast accumulation keeps about 14 bits of a sum. Its error is a tenth of the error of
        // rounding inputs and weights to FP8.
        set_attribute(raw, Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &1i8)?;
    }
    Ok(operation)
}

/// Sets an attribute whose type has the size of `value`.
fn set_attribute<T: Copy>(
    raw: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<(), CudaError> {
    let (value, bytes) = (ptr::from_ref(value).cast(), size_of::<T>());
    // SAFETY: the value has the passed size and is read before the call returns.
    unsafe { result::set_matmul_desc_attribute(raw, attribute, value, bytes) }
        .named("cublasLtMatmulDescSetAttribute")
}

/// Creates a matrix layout; `stride` elements lie between two columns.
fn layout(
    dtype: sys::cudaDataType,
    rows: usize,
    columns: usize,
    stride: usize,
) -> Result<OwnedHandle<sys::cublasLtMatrixLayout_t>, CudaError> {
    let raw = result::create_matrix_layout(dtype, rows as u64, columns as u64, stride as i64)
        .named("cublasLtMatrixLayoutCreate")?;
    Ok(OwnedHandle { raw, destroy: result::destroy_matrix_layout })
}

/// Creates a preference for algorithms that need no more workspace.
fn preference(
    workspace_bytes: usize,
) -> Result<OwnedHandle<sys::cublasLtMatmulPreference_t>, CudaError> {
    use sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
    let raw = result::create_matmul_pref().named("cublasLtMatmulPreferenceCreate")?;
    let preference = OwnedHandle { raw, destroy: result::destroy_matmul_pref };
    let (value, bytes) = (ptr::from_ref(&workspace_bytes).cast(), size_of::<usize>());
    let attribute = CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
    // SAFETY: the attribute is a `size_t` that is read before the call returns.
    unsafe { result::set_matmul_pref_attribute(raw, attribute, value, bytes) }
        .named("cublasLtMatmulPreferenceSetAttribute")?;
    Ok(preference)
}
