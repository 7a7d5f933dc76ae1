//! Mixtures of experts: routing, two grouped GEMMs, and the weighted sum. All counts stay on the
//! device, so that steps can be captured.
//!
//! Up to [`FEW_ROWS_MAX`] rows, a row's result does not depend on the other rows. With more rows
//! the router's GEMM runs on cuBLASLt, which adds in another order.

use super::{
    backend::{CudaBackend, wide},
    buffer::{CudaBuffer, CudaMatrix, CudaVector, DeferredNorm},
    error::CudaError,
    ffi,
    gemm::GemmShape,
    library::KernelLibrary,
    memory::Range,
};
use crate::{
    backend::{ExpertChoice, ExpertShape, ExpertWeights},
    layout::Dtype,
};

/// `BATON_EXPERTS_MAX`: maximum experts of a layer.
pub const EXPERTS_MAX: usize = 512;
/// `BATON_EXPERTS_CHOSEN_MAX`: maximum experts of a row.
pub const EXPERTS_CHOSEN_MAX: usize = 32;
/// Maximum rows of the router's own GEMM.
const FEW_ROWS_MAX: usize = 256;

/// Intermediate values of a mixture of experts. An assignment is a row and one of its experts.
#[derive(Debug)]
pub struct CudaExperts {
    rows_max: usize,
    shape: ExpertShape,
    /// f32 `[rows][experts]`, of many rows.
    logits: Range,
    /// i32 `[rows][chosen]`.
    expert_of: Range,
    /// f32 `[rows][chosen]`.
    weights: Range,
    /// f32 `[rows]`: the factors of the rows' deferred norms.
    scales: Range,
    /// i32 `[experts + 1]`: first position of each expert in `order`.
    offsets: Range,
    /// i32: assignments by expert.
    order: Range,
    /// i32: CTAs that have arrived.
    arrivals: Range,
    /// bf16 `[assignments][size]`, by expert.
    activated: Range,
    /// bf16 `[assignments][hidden]`, by row.
    outputs: Range,
}

impl CudaExperts {
    /// Returns whether the kernels make this choice: by a softmax over all experts.
    pub fn supports(choice: &ExpertChoice) -> bool {
        *choice == ExpertChoice::softmax(choice.count, choice.is_normalized)
    }

    /// Allocates memory by `cut`, which returns a range of so many bytes.
    pub(super) fn place(rows_max: usize, shape: ExpertShape, cut: impl Fn(usize) -> Range) -> Self {
        let assignments = rows_max * shape.chosen;
        let floats = |count: usize| cut(count * size_of::<f32>());
        let numbers = |count: usize| cut(count * size_of::<i32>());
        let activations = |width: usize| cut(assignments * width * Dtype::Bf16.bytes());
        Self {
            rows_max,
            shape,
            logits: floats(if rows_max > FEW_ROWS_MAX { rows_max * shape.count } else { 0 }),
            expert_of: numbers(assignments),
            weights: floats(assignments),
            scales: floats(rows_max),
            offsets: numbers(shape.count + 1),
            order: numbers(assignments),
            arrivals: numbers(1),
            activated: activations(shape.size),
            outputs: activations(shape.hidden),
        }
    }

    /// Writes the initial values.
    pub(super) fn clear(&self) -> Result<(), CudaError> {
        self.arrivals.write(0, &[0_i32])
    }
}

/// The same matrix of all experts: the first one, and the elements from one to the next.
struct Stacked<'a> {
    first: &'a CudaMatrix,
    stride: usize,
}

impl<'a> Stacked<'a> {
    /// # Panics
    /// When the matrices are not equally far apart, or are no bf16 matrices, which is a bug.
    fn new(
        mut matrices: impl Iterator<Item = &'a CudaMatrix>,
        (rows, cols): (usize, usize),
    ) -> Self {
        let first = matrices.next().expect("a mixture has experts");
        let (base, mut stride) = (first.data.address(), rows * cols * Dtype::Bf16.bytes());
        for (index, matrix) in (1..).zip(matrices) {
            let distance = (matrix.data.address() - base) as usize;
            if index == 1 {
                stride = distance;
            }
            assert_eq!(distance, index * stride, "experts are equally far apart");
            assert!((matrix.rows, matrix.cols) == (rows, cols), "experts have equal sizes");
        }
        assert!((first.rows, first.cols) == (rows, cols), "the experts do not match the buffers");
        assert!(first.dtype == Dtype::Bf16 && first.scales.is_none(), "experts are in bf16");
        Self { first, stride: stride / Dtype::Bf16.bytes() }
    }
}

impl CudaBackend {
    /// Computes the experts' outputs and their weights.
    pub(super) fn mix(
        &mut self,
        rows: usize,
        x: &CudaBuffer,
        weights: &ExpertWeights<'_, CudaMatrix, CudaVector>,
        buffers: &CudaExperts,
    ) {
        let ExpertShape { count, chosen, hidden, size } = buffers.shape;
        let &ExpertWeights { router, experts, choice, .. } = weights;
        assert!(rows <= buffers.rows_max, "{rows} rows exceed the buffers' {}", buffers.rows_max);
        assert_eq!((experts.len(), choice.count), (count, chosen), "experts: counts differ");
        assert!(CudaExperts::supports(&choice), "experts: the kernels have no such choice");
        assert!(weights.bias.is_none() && weights.shared.is_none(), "experts: no such weights");
        assert_eq!((router.rows, router.cols), (count, hidden), "experts: the router's size");
        assert!(x.width == hidden && x.dtype == Dtype::Bf16, "experts: the type of the input");
        if rows == 0 || self.is_faulty() {
            return;
        }
        self.use_dependent_launch();
        let is_many = rows > FEW_ROWS_MAX;
        if is_many {
            self.finish_rows(rows, x);
            self.route_many(rows, x, weights, buffers);
        } else {
            self.route_few(rows, x, weights, buffers);
        }
        let is_scaled = !is_many && x.pending.take().is_some();
        let gate_up = Stacked::new(experts.iter().map(|expert| &expert.0), (2 * size, hidden));
        let down = Stacked::new(experts.iter().map(|expert| &expert.1), (hidden, size));
        let shared = ffi::ExpertGemmArgs {
            offsets: buffers.offsets.address(),
            order: buffers.order.address(),
            rows: rows as i32,
            experts: count as i32,
            count: chosen as i32,
            grid: self.skinny_parts().sms,
            pdl: self.skinny_parts().starts_early.into(),
            ..ffi::ExpertGemmArgs::default()
        };
        self.expert_gemm(ffi::ExpertGemmArgs {
            weight: gate_up.first.data.address(),
            weight_stride: gate_up.stride as i64,
            x: x.data.part(0, x.bytes(rows)),
            x_stride: x.stride as i64,
            scales: if is_scaled { buffers.scales.address() } else { 0 },
            out: buffers.activated.part(0, rows * chosen * size * Dtype::Bf16.bytes()),
            out_stride: size as i64,
            n: 2 * size as i32,
            depth: hidden as i32,
            is_gate_up: 1,
            ..shared
        });
        self.expert_gemm(ffi::ExpertGemmArgs {
            weight: down.first.data.address(),
            weight_stride: down.stride as i64,
            x: buffers.activated.address(),
            x_stride: size as i64,
            out: buffers.outputs.part(0, rows * chosen * hidden * Dtype::Bf16.bytes()),
            out_stride: hidden as i64,
            n: hidden as i32,
            depth: size as i32,
            ..shared
        });
    }

    /// Adds the experts' outputs: to the residual stream, and `out` is its RMS norm, or into `out`.
    pub(super) fn combine(
        &self,
        rows: usize,
        count: usize,
        buffers: &CudaExperts,
        onto: Option<(&mut CudaBuffer, (&CudaVector, f32))>,
        out: &mut CudaBuffer,
    ) {
        let width = buffers.shape.hidden;
        assert!(out.width == width && out.stride == width, "experts: the width of the output");
        assert_eq!(out.dtype, Dtype::Bf16, "experts: the type of the output");
        out.pending.set(None);
        let (mut residual, mut norm, mut eps) = (0, 0, 0.0);
        if let Some((buffer, (weight, epsilon))) = onto {
            wide(buffer);
            assert!(buffer.width == width && weight.len == width, "experts: widths differ");
            residual = buffer.data.part(0, buffer.bytes(rows));
            (norm, eps) = (weight.data.address(), epsilon);
        }
        let (outputs, weights) = (buffers.outputs.address(), buffers.weights.address());
        let to = out.data.part(0, out.bytes(rows));
        let (count, rows, width) = (count as i32, rows as i32, width as i32);
        self.run(|library, stream| {
            // SAFETY: the ranges have the rows and widths checked above.
            unsafe {
                launch!(
                    library,
                    stream,
                    baton_combine_experts(
                        outputs, weights, count, residual, norm, eps, to, rows, width
                    )
                )
            }
        });
    }

    /// Returns the arguments of routing without input and logits.
    fn route_args(
        rows: usize,
        weights: &ExpertWeights<'_, CudaMatrix, CudaVector>,
        buffers: &CudaExperts,
    ) -> ffi::RouteArgs {
        ffi::RouteArgs {
            expert_of: buffers.expert_of.address(),
            weights: buffers.weights.address(),
            scales: buffers.scales.address(),
            offsets: buffers.offsets.address(),
            order: buffers.order.address(),
            arrivals: buffers.arrivals.address(),
            rows: rows as i32,
            hidden: buffers.shape.hidden as i32,
            experts: buffers.shape.count as i32,
            count: buffers.shape.chosen as i32,
            is_normalized: weights.choice.is_normalized.into(),
            ..ffi::RouteArgs::default()
        }
    }

    /// Computes logits and choices of few rows. Applies a deferred norm of the rows.
    fn route_few(
        &self,
        rows: usize,
        x: &CudaBuffer,
        weights: &ExpertWeights<'_, CudaMatrix, CudaVector>,
        buffers: &CudaExperts,
    ) {
        let mut args = Self::route_args(rows, weights, buffers);
        assert_eq!(weights.router.dtype, Dtype::Bf16, "the router is in bf16");
        args.x = x.data.part(0, x.bytes(rows));
        args.x_stride = x.stride as i64;
        args.router = weights.router.data.address();
        if let Some(DeferredNorm { count, eps, .. }) = x.pending.get() {
            args.squares = self.skinny_parts().squares.part(0, rows * count * size_of::<f32>());
            args.squares_count = count as i32;
            args.eps = eps;
        }
        self.route(args);
    }

    /// Computes logits and choices of many rows.
    fn route_many(
        &mut self,
        rows: usize,
        x: &CudaBuffer,
        weights: &ExpertWeights<'_, CudaMatrix, CudaVector>,
        buffers: &CudaExperts,
    ) {
        let ExpertShape { count, hidden, .. } = buffers.shape;
        let shape = GemmShape {
            x_stride: x.stride,
            out_stride: count,
            ..GemmShape::packed(rows, hidden, count, Dtype::Bf16, Dtype::F32)
        };
        self.gemm_onto(shape, (x, weights.router), &buffers.logits);
        let logits = buffers.logits.address();
        self.route(ffi::RouteArgs { logits, ..Self::route_args(rows, weights, buffers) });
    }

    fn route(&self, args: ffi::RouteArgs) {
        self.run(|library, stream| {
            // SAFETY: the ranges have the sizes checked in `mix`, and the number of arrivals is 0
            // between calls.
            unsafe { launch!(library, stream, baton_route(&args)) }
        });
    }

    fn expert_gemm(&self, args: ffi::ExpertGemmArgs) {
        self.run(|library, stream| {
            // SAFETY: weights, inputs and outputs have the sizes checked in `mix`. Routing, which
            // has written the lists, was launched before gate and up, and so at least two kernels
            // before down.
            unsafe { launch!(library, stream, baton_expert_gemm(&args)) }
        });
    }
}
