//! Mixtures of experts: routing, two grouped GEMMs, and the weighted sum. All counts stay on the
//! device, so that steps can be captured.
//!
//! Up to [`FEW_ROWS_MAX`] rows, a row's result does not depend on the other rows, except for the
//! part of a shared expert. With more rows, the router's GEMM runs on cuBLASLt, whose order of
//! addition is different, and inputs of experts in FP8 are rounded to FP8.

mod mxfp4;

use super::{
    backend::{CudaBackend, wide},
    buffer::{CudaBuffer, CudaMatrix, CudaVector, DeferredNorm},
    error::CudaError,
    ffi::{self, Address},
    gemm::GemmShape,
    library::KernelLibrary,
    memory::Range,
};
use crate::{
    backend::{Backend, ExpertScore, ExpertShape, ExpertWeights, GatedActivation, SharedExpert},
    layout::{Dtype, WeightFormat},
};

/// `BATON_EXPERTS_MAX`: maximum experts of a layer.
pub const EXPERTS_MAX: usize = 512;
/// `BATON_EXPERTS_CHOSEN_MAX`: maximum experts of a row.
pub const EXPERTS_CHOSEN_MAX: usize = 32;
/// Maximum groups of experts.
pub const EXPERT_GROUPS_MAX: usize = 32;
/// Maximum rows of the router's own GEMM.
const FEW_ROWS_MAX: usize = 256;

/// Columns of the activations in FP8 that share a factor.
const FACTOR_COLUMNS: usize = 64;
/// FP8 numbers whose sum is an element of the input, with few rows. Two keep the precision of bf16.
const PARTS: usize = 2;

/// Intermediate values of a mixture of experts. An assignment is a row and one of its experts.
#[derive(Debug)]
pub struct CudaExperts {
    rows_max: usize,
    shape: ExpertShape,
    /// f32 `[rows][experts]`, only for more than [`FEW_ROWS_MAX`] rows.
    logits: Range,
    /// i32 `[rows][chosen]`.
    expert_of: Range,
    /// f32 `[rows][chosen]`.
    weights: Range,
    /// f32 `[rows]`: the scale of a row's deferred norm, times the scale of its parts in `split`.
    scales: Range,
    /// i32 `[experts + 1]`: first position of each expert in `order`.
    offsets: Range,
    /// i32 `[assignments]`: the assignments, sorted by expert.
    order: Range,
    /// i32: CTAs that have arrived in a running `baton_route`; 0 between calls.
    arrivals: Range,
    /// bf16 `[assignments][size]`, or up to `PARTS` rows in FP8 for each assignment, in the order of
    /// `order`.
    activated: Range,
    /// bf16 `[assignments][hidden]`, in the order of the rows.
    outputs: Range,
    /// `Some` with weights in FP8.
    fp8: Option<Fp8Inputs>,
    shared: Option<SharedBuffers>,
}

/// Inputs of experts' GEMMs in FP8.
#[derive(Debug)]
struct Fp8Inputs {
    /// FP8 `[rows][PARTS][hidden]`, up to [`FEW_ROWS_MAX`] rows.
    split: Range,
    /// f32 `[assignments][factor_stride]`, in the order of `order`.
    factors: Range,
    factor_stride: usize,
}

/// Intermediate values of the shared expert.
#[derive(Debug)]
struct SharedBuffers {
    gate_up: CudaBuffer,
    activated: CudaBuffer,
    output: CudaBuffer,
}

impl CudaExperts {
    /// Writes the initial values.
    pub(super) fn clear(&self) -> Result<(), CudaError> {
        self.arrivals.write(0, &[0_i32])
    }
}

/// The experts' weight matrices at equal distances: the first expert's matrix, and the stride in
/// bytes.
struct Stacked<'a> {
    first: &'a CudaMatrix,
    stride: usize,
}

impl<'a> Stacked<'a> {
    /// # Panics
    /// When the stride between the matrices, their sizes or types differ, which is a bug.
    fn new(
        mut matrices: impl Iterator<Item = &'a CudaMatrix>,
        (rows, cols): (usize, usize),
    ) -> Self {
        let scales_of = |matrix: &CudaMatrix| matrix.scales.as_ref().map(Range::address);
        let first = matrices.next().expect("a mixture has experts");
        let (base, base_scales) = (first.data.address(), scales_of(first));
        let mut stride = first.data.bytes();
        for (index, matrix) in (1..).zip(matrices) {
            let distance = (matrix.data.address() - base) as usize;
            if index == 1 {
                stride = distance;
            }
            let scales = base_scales.map(|scales| scales + (index * stride) as u64);
            assert!(
                distance == index * stride && scales_of(matrix) == scales,
                "experts are equally far apart"
            );
            assert!((matrix.rows, matrix.cols) == (rows, cols), "experts have equal sizes");
            assert_eq!(matrix.is_mxfp4, first.is_mxfp4, "experts: formats differ");
        }
        assert!((first.rows, first.cols) == (rows, cols), "the experts do not match the buffers");
        assert!(first.dtype == Dtype::Bf16, "experts compute with bf16");
        assert!(first.int4_block.is_none(), "there are no kernels for experts in INT4");
        Self { first, stride }
    }

    fn is_fp8(&self) -> bool {
        self.first.scales.is_some()
    }

    /// Adds weights and scales to the arguments of a GEMM.
    fn args(&self, args: ffi::ExpertGemmArgs) -> ffi::ExpertGemmArgs {
        let element_bytes = if self.is_fp8() { 1 } else { Dtype::Bf16.bytes() };
        ffi::ExpertGemmArgs {
            weight: self.first.data.address(),
            weight_stride: (self.stride / element_bytes) as i64,
            weight_scales: self.first.scales.as_ref().map_or(0, Range::address),
            weight_scales_stride: (self.stride / size_of::<f32>()) as i64,
            n: self.first.rows as i32,
            depth: self.first.cols as i32,
            ..args
        }
    }
}

/// Inputs of the experts' GEMMs.
struct Inputs {
    x: Address,
    x_stride: usize,
    /// Address of the rows' scales, or 0.
    scales: Address,
    /// FP8 rows for each row of `x`; 0 if `x` is in bf16.
    parts: usize,
}

impl CudaBackend {
    /// Creates the intermediate values of a mixture.
    pub(super) fn place_experts(&self, rows_max: usize, shape: ExpertShape) -> CudaExperts {
        self.has_experts.set(true);
        let assignments = rows_max * shape.chosen;
        let cut = |bytes| self.cut_activations(bytes);
        let floats = |count: usize| cut(count * size_of::<f32>());
        let numbers = |count: usize| cut(count * size_of::<i32>());
        let activations = |width: usize| cut(assignments * width * Dtype::Bf16.bytes());
        let factor_stride = shape.size.div_ceil(FACTOR_COLUMNS).next_multiple_of(2);
        let is_fp8 = self.options().weights == WeightFormat::Fp8;
        let buffer = |width| self.buffer(rows_max, width);
        CudaExperts {
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
            fp8: is_fp8.then(|| Fp8Inputs {
                split: cut(rows_max.min(FEW_ROWS_MAX) * PARTS * shape.hidden),
                factors: floats(assignments * factor_stride),
                factor_stride,
            }),
            shared: (shape.shared > 0).then(|| SharedBuffers {
                gate_up: buffer(2 * shape.shared),
                activated: buffer(shape.shared),
                output: buffer(shape.hidden),
            }),
        }
    }

    /// Computes the experts' outputs and their weights.
    pub(super) fn run_experts(
        &mut self,
        rows: usize,
        x: &CudaBuffer,
        weights: &ExpertWeights<'_, CudaMatrix, CudaVector>,
        buffers: &mut CudaExperts,
    ) {
        let ExpertShape { count, chosen, hidden, size, .. } = buffers.shape;
        let &ExpertWeights { router, experts, choice, .. } = weights;
        assert!(rows <= buffers.rows_max, "{rows} rows exceed the buffers' {}", buffers.rows_max);
        assert_eq!((experts.len(), choice.count), (count, chosen), "experts: counts differ");
        assert_eq!((router.rows, router.cols), (count, hidden), "experts: the router's size");
        assert!(x.width == hidden && x.dtype == Dtype::Bf16, "experts: the type of the input");
        let gate_up = Stacked::new(experts.iter().map(|expert| &expert.0), (2 * size, hidden));
        let down = Stacked::new(experts.iter().map(|expert| &expert.1), (hidden, size));
        assert_eq!(gate_up.is_fp8(), down.is_fp8(), "experts: formats differ");
        let is_mxfp4 = gate_up.first.is_mxfp4;
        assert_eq!(is_mxfp4, down.first.is_mxfp4, "experts: formats differ");
        assert!(
            is_mxfp4 || weights.biases.is_empty() && weights.activation == GatedActivation::Silu,
            "experts: only experts in MXFP4 have biases and a clamped SwiGLU"
        );
        if rows == 0 || self.is_faulty() {
            return;
        }
        if let Some(shared) = &weights.shared {
            let buffers = buffers.shared.as_mut().expect("buffers of the shared expert");
            self.run_shared(rows, x, shared, buffers);
        }
        self.use_dependent_launch();
        let inputs = if rows > FEW_ROWS_MAX {
            self.finish_rows(rows, x);
            self.route_many(rows, x, weights, buffers);
            self.inputs_of_many(rows, x, gate_up.is_fp8())
        } else {
            self.route_few(rows, x, weights, buffers, gate_up.is_fp8())
        };
        if is_mxfp4 {
            return self.run_mxfp4(rows, &inputs, weights, (&gate_up, &down), buffers);
        }
        let fp8 = buffers.fp8.as_ref().filter(|_| gate_up.is_fp8());
        let shared = ffi::ExpertGemmArgs {
            offsets: buffers.offsets.address(),
            order: buffers.order.address(),
            factors: fp8.map_or(0, |fp8| fp8.factors.address()),
            factor_stride: fp8.map_or(0, |fp8| fp8.factor_stride as i32),
            parts: inputs.parts as i32,
            rows: rows as i32,
            experts: count as i32,
            count: chosen as i32,
            grid: self.skinny_parts().sms,
            pdl: self.skinny_parts().starts_early.into(),
            ..ffi::ExpertGemmArgs::default()
        };
        self.expert_gemm(gate_up.args(ffi::ExpertGemmArgs {
            x: inputs.x,
            x_stride: inputs.x_stride as i64,
            scales: inputs.scales,
            out: buffers.activated.part(0, rows * chosen * size * Dtype::Bf16.bytes()),
            out_stride: size as i64,
            is_gate_up: 1,
            ..shared
        }));
        self.expert_gemm(down.args(ffi::ExpertGemmArgs {
            x: buffers.activated.address(),
            x_stride: size as i64,
            out: buffers.outputs.part(0, rows * chosen * hidden * Dtype::Bf16.bytes()),
            out_stride: hidden as i64,
            ..shared
        }));
    }

    /// Computes the outputs of the shared expert.
    fn run_shared(
        &mut self,
        rows: usize,
        x: &CudaBuffer,
        shared: &SharedExpert<'_, CudaMatrix>,
        buffers: &mut SharedBuffers,
    ) {
        let SharedBuffers { gate_up, activated, output } = buffers;
        if shared.router.is_some() {
            // `combine` multiplies the normed rows by the shared expert's router.
            self.finish_rows(rows, x);
        }
        let product = (x, shared.gate_up);
        self.project_gated(GatedActivation::Silu, rows, product, None, gate_up, activated);
        if !self.skinny_matmul(rows, (activated, shared.down, None), output) {
            self.matmul(rows, activated, shared.down, output);
        }
    }

    /// Adds the experts' weighted outputs. With `onto`, adds the sum to the residual stream and
    /// writes the RMS norm of the stream to `out`. Otherwise writes the sum to `out`. `x`: address
    /// and stride of the experts' inputs.
    pub(super) fn combine(
        &self,
        rows: usize,
        (x, x_stride): (Address, i64),
        weights: &ExpertWeights<'_, CudaMatrix, CudaVector>,
        buffers: &CudaExperts,
        onto: Option<(&mut CudaBuffer, (&CudaVector, f32))>,
        out: &mut CudaBuffer,
    ) {
        let width = buffers.shape.hidden;
        assert!(out.width == width && out.stride == width, "experts: the width of the output");
        assert_eq!(out.dtype, Dtype::Bf16, "experts: the type of the output");
        out.forget();
        let router = weights.shared.as_ref().and_then(|shared| shared.router);
        assert!(
            router.is_none_or(|router| (router.rows, router.cols) == (1, width)
                && router.dtype == Dtype::Bf16
                && router.scales.is_none()),
            "experts: the router of the shared expert"
        );
        let mut args = ffi::CombineArgs {
            outputs: buffers.outputs.address(),
            weights: buffers.weights.address(),
            out: out.data.part(0, out.bytes(rows)),
            shared: match (&weights.shared, &buffers.shared) {
                (Some(_), Some(shared)) => shared.output.data.address(),
                _ => 0,
            },
            shared_router: router.map_or(0, |router| router.data.address()),
            x,
            x_stride,
            count: weights.choice.count as i32,
            rows: rows as i32,
            width: width as i32,
            ..ffi::CombineArgs::default()
        };
        if let Some((buffer, (weight, eps))) = onto {
            wide(buffer);
            assert!(buffer.width == width && weight.len == width, "experts: widths differ");
            args.residual = buffer.data.part(0, buffer.bytes(rows));
            (args.norm, args.eps) = (weight.data.address(), eps);
            if let Some(quantized) = self.quantized_output(rows, out) {
                (args.quantized, args.scales) = (quantized.data, quantized.scales);
                args.parts = quantized.parts as i32;
            }
        }
        self.run(|library, stream| {
            // SAFETY: the ranges have the rows and widths checked above. The kernel reads the weights
            // and the residual stream early. Both were written before the GEMMs of the experts.
            unsafe { launch!(library, stream, baton_combine_experts(&args)) }
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
            bias: weights.bias.map_or(0, |bias| {
                assert_eq!(bias.len, buffers.shape.count, "a bias for every expert");
                bias.data.address()
            }),
            is_normalized: weights.choice.is_normalized.into(),
            score: match weights.choice.score {
                ExpertScore::Softmax => 0,
                ExpertScore::Sigmoid => 1,
                ExpertScore::BiasedSoftmax => 2,
            },
            groups: weights.choice.groups as i32,
            groups_chosen: weights.choice.groups_chosen as i32,
            scale: weights.choice.scale,
            ..ffi::RouteArgs::default()
        }
    }

    /// Computes the router's logits and the choice of experts for few rows. Applies a deferred norm
    /// of the rows. Returns the experts' inputs, which keep the precision of the rows.
    fn route_few(
        &self,
        rows: usize,
        x: &CudaBuffer,
        weights: &ExpertWeights<'_, CudaMatrix, CudaVector>,
        buffers: &CudaExperts,
        is_fp8: bool,
    ) -> Inputs {
        let mut args = Self::route_args(rows, weights, buffers);
        assert_eq!(weights.router.dtype, Dtype::Bf16, "the router is in bf16");
        (args.x, args.x_stride) = x.rows_of(rows);
        args.router = weights.router.data.address();
        let pending = x.pending.take();
        if let Some(DeferredNorm { count, eps, .. }) = pending {
            args.squares = self.skinny_parts().squares.part(0, rows * count * size_of::<f32>());
            args.squares_count = count as i32;
            args.eps = eps;
        }
        let scales = buffers.scales.address();
        let inputs = match buffers.fp8.as_ref().filter(|_| is_fp8) {
            Some(fp8) => {
                args.split = fp8.split.part(0, rows * PARTS * x.width);
                Inputs { x: args.split, x_stride: x.width, scales, parts: PARTS }
            }
            None => {
                let scales = if pending.is_some() { scales } else { 0 };
                Inputs { x: args.x, x_stride: x.stride, scales, parts: 0 }
            }
        };
        self.route(args);
        inputs
    }

    /// Returns the experts' inputs of many rows; with weights in FP8 they are rounded to FP8.
    fn inputs_of_many(&self, rows: usize, x: &CudaBuffer, is_fp8: bool) -> Inputs {
        if !is_fp8 {
            return Inputs { x: x.rows_of(rows).0, x_stride: x.stride, scales: 0, parts: 0 };
        }
        let quantized = self.quantized(rows, x, 1);
        let (x_address, scales) = (quantized.data.address(), quantized.scales.address());
        Inputs { x: x_address, x_stride: x.width, scales, parts: 1 }
    }

    /// Computes the router's logits and the choice of experts for many rows.
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
            // SAFETY: the ranges have the sizes checked in `run_experts`, and the number of
            // arrivals is 0 between calls.
            unsafe { launch!(library, stream, baton_route(&args)) }
        });
    }

    fn expert_gemm(&self, args: ffi::ExpertGemmArgs) {
        self.run(|library, stream| {
            // SAFETY: weights, inputs and outputs have the sizes checked in `run_experts`. Routing,
            // which has written the lists, was launched before gate and up, and so at least two
            // kernels before down.
            unsafe { launch!(library, stream, baton_expert_gemm(&args)) }
        });
    }
}
