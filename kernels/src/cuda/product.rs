//! Matrix products by cuBLASLt, with descriptors and algorithm kept for every shape met.

use std::{
    collections::HashMap,
    ffi::c_void,
    mem::{self, MaybeUninit},
    ptr,
    time::Duration,
};

use cudarc::cublaslt::{result, sys};

use super::{
    buffer::row_stride,
    context::{Compute, Context, Event, Stream},
    driver::has_cublaslt,
    error::{CudaError, Named},
    ffi::Address,
    memory::{ALIGNMENT, Range},
    tune::{self, Algorithm, Candidates, Table, Tuned, Tuning},
};
use crate::layout::Dtype;

/// What NVIDIA advises for Hopper; no algorithm of older GPUs wants more.
pub const WORKSPACE_BYTES: usize = 32 << 20;
/// Shapes whose plan is kept. Only the rows of a step vary, so more is a defect of no consequence.
const PLANS_MAX: usize = 1 << 15;

/// `out[rows][outputs] = x[rows][inputs] · w[outputs][inputs]ᵀ`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    pub rows: usize,
    pub inputs: usize,
    pub outputs: usize,
    /// Of `x` and `w`. Sums are f32 in any case, and full f32 where this is f32.
    pub from: Dtype,
    /// Of `out`.
    pub to: Dtype,
    /// Elements from one row to the next.
    pub x_stride: usize,
    pub out_stride: usize,
}

impl Product {
    /// Of rows that are as far apart as those of buffers.
    pub fn packed(rows: usize, inputs: usize, outputs: usize, from: Dtype, to: Dtype) -> Self {
        let (x_stride, out_stride) = (row_stride(inputs, from), row_stride(outputs, to));
        Self { rows, inputs, outputs, from, to, x_stride, out_stride }
    }

    fn x_bytes(&self) -> usize {
        self.rows * self.x_stride * self.from.bytes()
    }

    fn w_bytes(&self) -> usize {
        self.outputs * self.inputs * self.from.bytes()
    }

    fn out_bytes(&self) -> usize {
        self.rows * self.out_stride * self.to.bytes()
    }
}

/// cuBLASLt, for one stream at a time: its workspace is shared by all products.
#[derive(Debug)]
pub struct Products {
    handle: sys::cublasLtHandle_t,
    workspace: Range,
    plans: HashMap<Product, Plan>,
    tuned: Table,
}

// SAFETY: the handle may be used by every thread; descriptors are reached through `&mut self` only.
unsafe impl Send for Products {}

impl Products {
    /// The context is current on the calling thread.
    ///
    /// # Errors
    /// When cuBLASLt is not found, or does not start.
    pub fn new(context: &Context, workspace: Range) -> Result<Self, CudaError> {
        if !has_cublaslt() {
            return Err(CudaError::LibraryMissing { name: "libcublasLt.so.13" });
        }
        let handle = result::create_handle().named("cublasLtCreate")?;
        // SAFETY: the library is there, and the function in every version of it.
        let version = unsafe { sys::cublasLtGetVersion() };
        let (device, driver) = (context.device(), context.driver().version());
        let machine = format!(
            "{}, sm_{}, {} SMs, driver {driver}, cuBLASLt {version}",
            device.name, device.compute, device.sm_count
        );
        Ok(Self { handle, workspace, plans: HashMap::new(), tuned: Table::new(machine) })
    }

    /// Puts one product into `stream`.
    ///
    /// # Panics
    /// When a range is smaller than its matrix: a defect.
    pub fn run(
        &mut self,
        product: Product,
        x: &Range,
        w: &Range,
        out: &Range,
        stream: &Stream<Compute>,
    ) -> Result<(), CudaError> {
        let Product { rows, inputs, outputs, x_stride, out_stride, .. } = product;
        assert!(x_stride >= inputs && out_stride >= outputs, "rows do not overlap");
        if rows == 0 {
            return Ok(());
        }
        let x = x.part(0, product.x_bytes());
        let w = w.part(0, product.w_bytes());
        let out = out.part(0, product.out_bytes());
        if !self.plans.contains_key(&product) {
            if self.plans.len() == PLANS_MAX {
                self.plans.clear();
            }
            let plan = self.plan(product)?;
            self.plans.insert(product, plan);
        }
        let Plan { shape, algorithm } = &self.plans[&product];
        // SAFETY: the three were just found to hold the product's matrices.
        unsafe { self.launch(shape, algorithm, x, w, out, stream) }
    }

    /// Times what cuBLASLt names for each of the products that is not known yet; `run` takes the
    /// quickest from then on. `weights` and `out` are read and written as if they were the products'
    /// own; products that they do not hold stay as they are.
    ///
    /// Nothing was run yet, so that a shape's algorithm is one and the same for good.
    pub fn tune(
        &mut self,
        products: impl Iterator<Item = Product>,
        tuning: &Tuning,
        weights: &Range,
        out: &Range,
        stream: &Stream<Compute>,
    ) -> Result<Tuned, CudaError> {
        assert!(self.plans.is_empty(), "tuning comes before the first product");
        let events = [Event::timed(stream.context())?, Event::timed(stream.context())?];
        // Taken out while the products' timing borrows the rest.
        let mut table = mem::replace(&mut self.tuned, Table::new(String::new()));
        let outcome = tune::tune(&mut table, products, tuning, |product| {
            self.time(product, weights, out, stream, &events)
        });
        self.tuned = table;
        outcome
    }

    /// The quickest algorithm, what it takes and what the first guess takes; `None` where memory or
    /// algorithms are missing.
    fn time(
        &self,
        product: Product,
        weights: &Range,
        out: &Range,
        stream: &Stream<Compute>,
        events: &[Event; 2],
    ) -> Result<Option<(Algorithm, Duration, Duration)>, CudaError> {
        if product.rows == 0
            || out.bytes() < product.out_bytes()
            || weights.bytes() < product.x_bytes().max(product.w_bytes())
        {
            return Ok(None);
        }
        let shape = Shape::new(product)?;
        let algorithms = shape.algorithms::<CANDIDATES>(self.handle, self.workspace.bytes())?;
        let mut timed = Timed {
            products: self,
            product,
            shape,
            algorithms,
            weights,
            out,
            stream,
            events,
            turn: 0,
            has_run: [false; CANDIDATES],
        };
        let chosen = tune::choose(&mut timed)?;
        Ok(chosen.map(|(best, time, first)| (timed.algorithms[best].data, time, first)))
    }

    fn plan(&self, product: Product) -> Result<Plan, CudaError> {
        let shape = Shape::new(product)?;
        let (handle, workspace) = (self.handle, self.workspace.bytes());
        // What comes from a file, or of another number of rows, is asked about before it is used.
        let tuned = self.tuned.get(&product).map(|data| sys::cublasLtMatmulAlgo_t { data });
        let algorithm = match tuned.filter(|algorithm| shape.takes(handle, algorithm, workspace)) {
            Some(algorithm) => algorithm,
            None => {
                let first = shape.algorithms::<1>(handle, workspace)?.first().copied();
                first.ok_or(CudaError::Call {
                    call: "cublasLtMatmulAlgoGetHeuristic",
                    code: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as i32,
                    reason: format!("no algorithm for {product:?}"),
                })?
            }
        };
        Ok(Plan { shape, algorithm })
    }

    /// # Safety
    /// The addresses are of memory that holds the shape's matrices, and no other work touches the
    /// last while this does.
    unsafe fn launch(
        &self,
        shape: &Shape,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        x: Address,
        w: Address,
        out: Address,
        stream: &Stream<Compute>,
    ) -> Result<(), CudaError> {
        let (one, zero) = (1.0f32, 0.0f32);
        // SAFETY: the descriptors were made for matrices of these sizes, which the caller has at the
        // three addresses, and the workspace has the bytes that are said. The factors are f32, as the
        // descriptor says, and read before the call returns. `out` is not read, for its factor is 0.
        unsafe {
            result::matmul(
                self.handle,
                shape.product.raw,
                ptr::from_ref(&one).cast(),
                ptr::from_ref(&zero).cast(),
                w as *const c_void,
                shape.w.raw,
                x as *const c_void,
                shape.x.raw,
                out as *const c_void,
                shape.out.raw,
                out as *mut c_void,
                shape.out.raw,
                algorithm,
                self.workspace.address() as *mut c_void,
                self.workspace.bytes(),
                stream.raw().cast(),
            )
        }
        .named("cublasLtMatmul")
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// Algorithms that are timed for a shape.
const CANDIDATES: usize = 8;
/// Products between two events, so that what launching costs is hidden behind them; those of many rows
/// hide it alone.
const LAUNCHES: usize = 3;
const LAUNCHES_ROWS_MAX: usize = 512;

/// The algorithms of one shape, on memory of the model's.
struct Timed<'a> {
    products: &'a Products,
    product: Product,
    shape: Shape,
    algorithms: Vec<sys::cublasLtMatmulAlgo_t>,
    weights: &'a Range,
    out: &'a Range,
    stream: &'a Stream<Compute>,
    events: &'a [Event; 2],
    turn: usize,
    /// By algorithm: its code is loaded.
    has_run: [bool; CANDIDATES],
}

impl Timed<'_> {
    /// Weights that were not read for a while: the model's other matrices.
    fn next_w(&mut self) -> Address {
        let bytes = self.product.w_bytes();
        let places = self.weights.bytes() / bytes.next_multiple_of(ALIGNMENT).max(1);
        self.turn += 1;
        let place = self.turn % places.max(1);
        self.weights.part(place * bytes.next_multiple_of(ALIGNMENT), bytes)
    }

    /// False where the algorithm is refused after all.
    fn launch(&mut self, candidate: usize) -> bool {
        let w = self.next_w();
        let x = self.weights.part(0, self.product.x_bytes());
        let out = self.out.part(0, self.product.out_bytes());
        let algorithm = &self.algorithms[candidate];
        // SAFETY: the three are parts of the product's sizes, and whoever tunes wants nothing of `out`.
        unsafe { self.products.launch(&self.shape, algorithm, x, w, out, self.stream) }.is_ok()
    }
}

impl Candidates for Timed<'_> {
    type Error = CudaError;

    fn count(&self) -> usize {
        self.algorithms.len()
    }

    fn time(&mut self, candidate: usize) -> Result<Option<Duration>, CudaError> {
        let has_run = mem::replace(&mut self.has_run[candidate], true);
        if !has_run && !self.launch(candidate) {
            return Ok(None);
        }
        let launches = if self.product.rows <= LAUNCHES_ROWS_MAX { LAUNCHES } else { 1 };
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

/// What one shape runs by, made once.
#[derive(Debug)]
struct Plan {
    shape: Shape,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// One shape in cuBLASLt's words.
#[derive(Debug)]
struct Shape {
    product: Descriptor,
    w: Layout,
    x: Layout,
    out: Layout,
}

impl Shape {
    /// cuBLAS counts columns first: `w` is `[inputs]` by `[outputs]` to it and is transposed, `x` is
    /// `[inputs]` by `[rows]`, and what comes out `[outputs]` by `[rows]`.
    fn new(product: Product) -> Result<Self, CudaError> {
        let Product { rows, inputs, outputs, from, to, x_stride, out_stride } = product;
        let (from, to) = (data_type(from), data_type(to));
        Ok(Self {
            product: Descriptor::new()?,
            w: Layout::new(from, inputs, outputs, inputs)?,
            x: Layout::new(from, inputs, rows, x_stride)?,
            out: Layout::new(to, outputs, rows, out_stride)?,
        })
    }

    /// At most so many that might be the quickest, cuBLASLt's favourite first.
    fn algorithms<const COUNT: usize>(
        &self,
        handle: sys::cublasLtHandle_t,
        workspace_bytes: usize,
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, CudaError> {
        let preference = Preference::new(workspace_bytes)?;
        let mut found = [MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed(); COUNT];
        let mut count = 0;
        // SAFETY: all descriptors are alive, and there is room for as many results as are asked for.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.product.raw,
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
        // SAFETY: so many were written; the call succeeded, so that their states are known ones.
        let found = found[..count].iter().map(|found| unsafe { found.assume_init() });
        let is_usable = |found: &sys::cublasLtMatmulHeuristicResult_t| {
            found.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS
        };
        Ok(found.filter(is_usable).map(|found| found.algo).collect())
    }

    /// Whether an algorithm from elsewhere can compute this shape in so much workspace.
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
                self.product.raw,
                self.w.raw,
                self.x.raw,
                self.out.raw,
                self.out.raw,
                algorithm,
                found.as_mut_ptr(),
            )
        };
        // SAFETY: zeroes are a result too: a success that wants no workspace.
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

#[derive(Debug)]
struct Descriptor {
    raw: sys::cublasLtMatmulDesc_t,
}

impl Descriptor {
    /// f32 sums, the first matrix transposed.
    fn new() -> Result<Self, CudaError> {
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let raw = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F)
            .named("cublasLtMatmulDescCreate")?;
        let descriptor = Self { raw };
        // CUBLAS_OP_T.
        let transposed = 1u32;
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        // SAFETY: the attribute is a 32-bit number, and read before the call returns.
        unsafe {
            result::set_matmul_desc_attribute(
                raw,
                attribute,
                ptr::from_ref(&transposed).cast(),
                size_of::<u32>(),
            )
        }
        .named("cublasLtMatmulDescSetAttribute")?;
        Ok(descriptor)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        let _ = unsafe { result::destroy_matmul_desc(self.raw) };
    }
}

#[derive(Debug)]
struct Layout {
    raw: sys::cublasLtMatrixLayout_t,
}

impl Layout {
    /// `stride` elements from one column to the next.
    fn new(
        dtype: sys::cudaDataType,
        rows: usize,
        columns: usize,
        stride: usize,
    ) -> Result<Self, CudaError> {
        let raw = result::create_matrix_layout(dtype, rows as u64, columns as u64, stride as i64)
            .named("cublasLtMatrixLayoutCreate")?;
        Ok(Self { raw })
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        let _ = unsafe { result::destroy_matrix_layout(self.raw) };
    }
}

struct Preference {
    raw: sys::cublasLtMatmulPreference_t,
}

impl Preference {
    fn new(workspace_bytes: usize) -> Result<Self, CudaError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let raw = result::create_matmul_pref().named("cublasLtMatmulPreferenceCreate")?;
        let preference = Self { raw };
        // SAFETY: the attribute is a size, and read before the call returns.
        unsafe {
            result::set_matmul_pref_attribute(
                raw,
                Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                ptr::from_ref(&workspace_bytes).cast(),
                size_of::<usize>(),
            )
        }
        .named("cublasLtMatmulPreferenceSetAttribute")?;
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(self.raw) };
    }
}
