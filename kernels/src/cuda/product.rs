//! Matrix products by cuBLASLt, with descriptors and algorithm kept for every shape met.

use std::{collections::HashMap, ffi::c_void, ptr};

use cudarc::cublaslt::{result, sys};

use super::{
    context::{Compute, Stream},
    driver::has_cublaslt,
    error::{CudaError, Named},
    memory::Range,
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

/// cuBLASLt, for one stream at a time: its workspace is shared by all products.
#[derive(Debug)]
pub struct Products {
    handle: sys::cublasLtHandle_t,
    workspace: Range,
    plans: HashMap<Product, Plan>,
}

// SAFETY: the handle may be used by every thread; descriptors are reached through `&mut self` only.
unsafe impl Send for Products {}

impl Products {
    /// The context is current on the calling thread.
    ///
    /// # Errors
    /// When cuBLASLt is not found, or does not start.
    pub fn new(workspace: Range) -> Result<Self, CudaError> {
        if !has_cublaslt() {
            return Err(CudaError::LibraryMissing { name: "libcublasLt.so.13" });
        }
        let handle = result::create_handle().named("cublasLtCreate")?;
        Ok(Self { handle, workspace, plans: HashMap::new() })
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
        let Product { rows, inputs, outputs, from, to, x_stride, out_stride } = product;
        assert!(x_stride >= inputs && out_stride >= outputs, "rows do not overlap");
        if rows == 0 {
            return Ok(());
        }
        let x = x.part(0, rows * x_stride * from.bytes());
        let w = w.part(0, outputs * inputs * from.bytes());
        let out = out.part(0, rows * out_stride * to.bytes());
        if !self.plans.contains_key(&product) {
            if self.plans.len() == PLANS_MAX {
                self.plans.clear();
            }
            let plan = Plan::new(self.handle, self.workspace.bytes(), product)?;
            self.plans.insert(product, plan);
        }
        let plan = &self.plans[&product];
        let (one, zero) = (1.0f32, 0.0f32);
        // SAFETY: the descriptors were made for matrices of these sizes, and the three ranges and
        // the workspace hold as many bytes, as was just checked. The factors are f32, as the
        // descriptor says, and read before the call returns. `out` is not read, for its factor is 0.
        unsafe {
            result::matmul(
                self.handle,
                plan.product.raw,
                ptr::from_ref(&one).cast(),
                ptr::from_ref(&zero).cast(),
                w as *const c_void,
                plan.w.raw,
                x as *const c_void,
                plan.x.raw,
                out as *const c_void,
                plan.out.raw,
                out as *mut c_void,
                plan.out.raw,
                &plan.algorithm,
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

/// What one shape needs, made once.
#[derive(Debug)]
struct Plan {
    product: Descriptor,
    w: Layout,
    x: Layout,
    out: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Plan {
    /// cuBLAS counts columns first: `w` is `[inputs]` by `[outputs]` to it and is transposed, `x` is
    /// `[inputs]` by `[rows]`, and what comes out `[outputs]` by `[rows]`.
    fn new(
        handle: sys::cublasLtHandle_t,
        workspace_bytes: usize,
        shape: Product,
    ) -> Result<Self, CudaError> {
        let Product { rows, inputs, outputs, from, to, x_stride, out_stride } = shape;
        let product = Descriptor::new()?;
        let (from, to) = (data_type(from), data_type(to));
        let w = Layout::new(from, inputs, outputs, inputs)?;
        let x = Layout::new(from, inputs, rows, x_stride)?;
        let out = Layout::new(to, outputs, rows, out_stride)?;
        let preference = Preference::new(workspace_bytes)?;
        // SAFETY: all of them are alive.
        let heuristic = unsafe {
            result::get_matmul_algo_heuristic(
                handle,
                product.raw,
                w.raw,
                x.raw,
                out.raw,
                out.raw,
                preference.raw,
            )
        }
        .named("cublasLtMatmulAlgoGetHeuristic")?;
        Ok(Self { product, w, x, out, algorithm: heuristic.algo })
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
