//! Skinny (small-M) GEMMs with fused prologue and epilogue, in one pass over the weight.
//!
//! A decode step of few rows is bound by reading its weights, and every kernel between two GEMMs
//! leaves memory bandwidth unused. So the GEMM's epilogue does the next operation: RoPE and the KV
//! store, SiLU and multiply, or the residual add. An RMS norm is split into two factors. The
//! producing GEMM multiplies its output by the norm's weight and stores partial sums of squares
//! ([`DeferredNorm`]); the consuming GEMM scales its accumulators by the row's factor. With weights
//! in FP8 a kernel before the GEMM computes the norm and quantizes the rows instead. When cuBLASLt
//! runs a GEMM, separate kernels do these operations. Weights in INT4 stay packed up to
//! [`INT4_ROWS_MAX`] rows. For more rows a kernel widens the weight to bf16 for cuBLASLt.

use super::{
    backend::CudaBackend,
    buffer::{CudaBuffer, CudaMatrix, CudaVector, DeferredNorm},
    error::CudaError,
    ffi::{self, dtype_code},
    library::KernelLibrary,
    memory::{DeviceMemory, Range},
    step::{CudaStep, LayerAddresses},
};
use crate::{
    backend::{HeadShape, HeadWeights},
    layout::Dtype,
    layout::KvFormat,
};

/// Minimum weight rows (outputs) per CTA.
const TILE_MIN: usize = 16;
/// Outputs of the widest GEMM that adds to the residual stream.
const WIDTH_MAX: usize = 1 << 16;
/// Maximum rows of a GEMM with a packed weight in INT4, which runs once for every 32 rows. Widening
/// the weight to bf16 takes about as long as three runs.
const INT4_ROWS_MAX: usize = 96;

/// State that all skinny GEMMs of a backend share.
pub(super) struct Skinny {
    /// Partial sums of squares, written by the last GEMM that added to the residual stream.
    pub(super) squares: Range,
    /// Whether a kernel may start while its predecessor ends (programmatic dependent launch).
    pub(super) starts_early: bool,
    /// Maximum rows of a skinny GEMM; 0 disables skinny GEMMs.
    rows_max: usize,
    /// Maximum CTAs of a GEMM: one per SM.
    pub(super) sms: i32,
}

/// Input, weight and low-rank update of a GEMM.
pub(super) type Operands<'a> = (&'a CudaBuffer, &'a CudaMatrix, Option<ffi::LowRank>);

/// The operation that a GEMM applies to its output.
enum Epilogue<'a> {
    Plain,
    Residual {
        residual: &'a CudaBuffer,
        norm: &'a CudaVector,
        bias: Option<&'a CudaVector>,
    },
    Gated,
    Wide,
    Heads {
        shape: HeadShape,
        bias: Option<&'a CudaVector>,
        frequencies: &'a CudaVector,
        addresses: LayerAddresses,
        arrays: &'a ffi::StepArrays,
    },
}

/// Maximum rows with partial sums of squares.
const SQUARES_ROWS: usize = 256;

impl Skinny {
    pub(super) fn new(
        memory: &DeviceMemory,
        library: &KernelLibrary,
        is_on: bool,
        starts_early: bool,
        sms: i32,
    ) -> Result<Self, CudaError> {
        // SAFETY: the function only returns a number.
        let rows_max = unsafe { (library.functions().baton_skinny_gemm_rows_max)() };
        let rows_max = usize::try_from(rows_max).unwrap_or(0).min(SQUARES_ROWS);
        let rows_max = if is_on { rows_max } else { 0 };
        Ok(Self { squares: memory.cut(Self::BYTES)?, starts_early, rows_max, sms })
    }

    /// Bytes that [`new`](Self::new) cuts from the workspace.
    pub(super) const BYTES: usize = SQUARES_ROWS * WIDTH_MAX / TILE_MIN * size_of::<f32>();
}

impl CudaBackend {
    /// Runs [`crate::Backend::project_heads`] for heads without norms. Returns false when nothing
    /// was launched.
    pub(super) fn skinny_heads(
        &self,
        layer: usize,
        shape: HeadShape,
        operands: Operands<'_>,
        weights: &HeadWeights<'_, CudaVector>,
        qkv: &mut CudaBuffer,
        step: &CudaStep,
    ) -> bool {
        assert!(layer < step.kv_layout().layer_count, "the KV cache has no layer {layer}");
        let &HeadWeights { frequencies, bias, .. } = weights;
        let (addresses, arrays) = (step.layer_addresses(layer), &step.layer_arrays(layer));
        let epilogue = Epilogue::Heads { shape, bias, frequencies, addresses, arrays };
        // A tile must not span two heads. It lacks some elements of a head, so it cannot compute the
        // scales of KV in FP8.
        let is_served = weights.norms.is_none()
            && step.kv_layout().format != KvFormat::Fp8
            && frequencies.len * 2 == shape.head_dim
            && shape.head_dim.is_multiple_of(TILE_MIN);
        is_served && self.skinny(step.rows(), operands, epilogue, qkv).is_some()
    }

    /// Runs the plain GEMM. Returns false when nothing was launched.
    pub(super) fn skinny_matmul(
        &self,
        rows: usize,
        operands: Operands<'_>,
        out: &mut CudaBuffer,
    ) -> bool {
        let epilogue = match out.dtype {
            Dtype::F32 => Epilogue::Wide,
            Dtype::Bf16 => Epilogue::Plain,
        };
        self.skinny(rows, operands, epilogue, out).is_some()
    }

    /// Runs [`crate::Backend::project_onto_residual`]. Returns false when nothing was launched.
    pub(super) fn skinny_onto_residual(
        &self,
        rows: usize,
        operands: Operands<'_>,
        bias: Option<&CudaVector>,
        residual: &mut CudaBuffer,
        (norm, eps): (&CudaVector, f32),
        out: &mut CudaBuffer,
    ) -> bool {
        let width = operands.1.rows;
        let widths = [residual.width, norm.len, out.width, bias.map_or(width, |bias| bias.len)];
        assert!(widths.iter().all(|found| *found == width), "project_onto_residual: widths differ");
        let is_packed = residual.stride == width && out.stride == width;
        if residual.dtype != Dtype::F32 || !is_packed || width > WIDTH_MAX {
            return false;
        }
        residual.bytes(rows);
        let (from, weight) = (residual.data.address(), norm.data.address());
        let epilogue = Epilogue::Residual { residual, norm, bias };
        let Some(tile) = self.skinny(rows, operands, epilogue, out) else { return false };
        let count = width.div_ceil(tile.max(TILE_MIN));
        out.pending.set(Some(DeferredNorm { count, eps, residual: from, norm: weight }));
        true
    }

    /// Runs [`crate::Backend::project_gated`]. Returns false when nothing was launched.
    pub(super) fn skinny_gated(
        &self,
        rows: usize,
        operands: Operands<'_>,
        out: &mut CudaBuffer,
    ) -> bool {
        self.skinny(rows, operands, Epilogue::Gated, out).is_some()
    }

    /// Applies the deferred norm to a buffer's rows, for a consumer that does not apply it itself.
    pub(super) fn finish_rows(&self, rows: usize, x: &CudaBuffer) {
        let Some(DeferredNorm { eps, residual, norm, .. }) = x.pending.take() else { return };
        let to = x.data.part(0, x.bytes(rows));
        let (dtype, rows, width) = (dtype_code(x.dtype), rows as i32, x.width as i32);
        self.run(|library, stream| {
            // SAFETY: the rows were computed from `residual`, which has the same shape and was not
            // written since.
            unsafe {
                launch!(
                    library,
                    stream,
                    baton_rms_norm(dtype, residual, norm, eps, to, rows, width)
                )
            }
        });
    }

    /// Launches one skinny GEMM. Returns the weight rows per tile, or `None` when nothing was
    /// launched: cuBLASLt must run the GEMM.
    fn skinny(
        &self,
        rows: usize,
        (x, w, update): Operands<'_>,
        epilogue: Epilogue<'_>,
        out: &mut CudaBuffer,
    ) -> Option<usize> {
        let skinny = self.skinny_parts();
        // Updates of a weight in INT4 are added by separate kernels.
        let has_update_kernel = update.is_none() || w.int4_block.is_none();
        let is_served = w.dtype == Dtype::Bf16 && w.cols.is_multiple_of(8) && has_update_kernel;
        let rows_max = match w.int4_block {
            Some(_) => skinny.rows_max.min(INT4_ROWS_MAX),
            None => skinny.rows_max,
        };
        if rows == 0 || rows > rows_max || !is_served {
            return None;
        }
        let weight_scales = w.scales.as_ref().map_or(0, |scales| scales.address());
        assert!(x.width == w.cols && x.dtype == w.dtype, "the input does not match the matrix");
        let outputs = if matches!(epilogue, Epilogue::Gated) { w.rows / 2 } else { w.rows };
        assert_eq!(out.width, outputs, "the output does not match the matrix");
        let mut args = ffi::SkinnyGemmArgs {
            weight: w.data.address(),
            weight_scales,
            x: x.data.part(0, x.bytes(rows)),
            x_stride: x.stride as i64,
            out: out.data.part(0, out.bytes(rows)),
            out_stride: out.stride as i64,
            rows: rows as i32,
            n: w.rows as i32,
            depth: w.cols as i32,
            grid: skinny.sms,
            pdl: skinny.starts_early.into(),
            weight_block: w.int4_block.map_or(0, |block| block as i32),
            low_rank: update.unwrap_or_default(),
            ..ffi::SkinnyGemmArgs::default()
        };
        if let Some(DeferredNorm { count, eps, .. }) = x.pending.get() {
            args.squares = skinny.squares.part(0, rows * count * size_of::<f32>());
            args.squares_count = count as i32;
            args.eps = eps;
        }
        match epilogue {
            Epilogue::Plain => args.epilogue = ffi::SKINNY_PLAIN,
            Epilogue::Gated => args.epilogue = ffi::SKINNY_SILU,
            Epilogue::Wide => args.epilogue = ffi::SKINNY_F32,
            Epilogue::Residual { residual, norm, bias } => {
                args.epilogue = ffi::SKINNY_RESIDUAL;
                args.bias = bias.map_or(0, |bias| bias.data.address());
                args.residual = residual.data.address();
                args.mirror = args.out;
                args.next_norm = norm.data.address();
                args.squares_out = skinny.squares.address();
            }
            Epilogue::Heads { shape, bias, frequencies, addresses, arrays } => {
                args.epilogue = ffi::SKINNY_QKV;
                (args.k, args.v) = (addresses.keys, addresses.values);
                args.stride_block = addresses.block_stride;
                args.stride_head = addresses.head_stride;
                args.stride_token = addresses.token_stride;
                args.bias = bias.map_or(0, |bias| {
                    assert_eq!(bias.len, shape.qkv_width(), "a bias for every output");
                    bias.data.address()
                });
                args.frequencies = frequencies.data.address();
                args.positions = arrays.row_positions;
                args.destinations = arrays.row_destinations;
                args.query_heads = shape.query_heads as i32;
                args.kv_heads = shape.kv_heads as i32;
                args.head_dim = shape.head_dim as i32;
            }
        }
        let in_fp8 = w.scales.as_ref().and_then(|_| self.quantized_args(rows, x, &args));
        let args = in_fp8.unwrap_or(args);
        let tile = self.tile_of(&args)?;
        out.forget();
        self.run(|library, stream| {
            // SAFETY: operands and output have the step's rows and the matrix's sizes, as checked
            // above and in `quantize`; the partial sums have room for the smallest tile; the step's
            // KV destinations are blocks that the step may write.
            unsafe {
                match w.int4_block {
                    None => launch!(library, stream, baton_skinny_gemm(&args)),
                    Some(_) => launch!(library, stream, baton_int4_gemm(&args)),
                }
            }
        });
        Some(tile)
    }

    /// Widens a weight in INT4 to bf16, into the memory that all widened weights share.
    pub(super) fn widen(&self, w: &CudaMatrix, block: usize) {
        let to = self.widened.as_ref().expect("placed with the weights");
        let (from, to) = (w.data.address(), to.part(0, w.rows * w.cols * Dtype::Bf16.bytes()));
        let (block, rows, cols) = (block as i32, w.rows as i32, w.cols as i32);
        self.run(|library, stream| {
            // SAFETY: the weight was packed with these sizes, and `to` has memory for its elements.
            unsafe { launch!(library, stream, baton_int4_widen(from, block, rows, cols, to)) }
        });
    }

    /// Returns the weight rows per tile of a skinny GEMM, or `None` without a kernel for it.
    fn tile_of(&self, args: &ffi::SkinnyGemmArgs) -> Option<usize> {
        let functions = self.library().functions();
        // `weight_block` is 0 except in INT4: weights in FP8 have a scale for each row.
        let tile_of = match args.weight_block {
            0 => functions.baton_skinny_gemm_tile,
            _ => functions.baton_int4_gemm_tile,
        };
        // SAFETY: the function only reads its arguments.
        let tile = unsafe { tile_of(args) };
        usize::try_from(tile).ok().filter(|tile| *tile > 0)
    }

    /// Returns the arguments of a GEMM that takes the rows of `x` in FP8, where there is such a
    /// kernel, and quantizes the rows.
    fn quantized_args(
        &self,
        rows: usize,
        x: &CudaBuffer,
        args: &ffi::SkinnyGemmArgs,
    ) -> Option<ffi::SkinnyGemmArgs> {
        let parts = self.parts_of(rows)?;
        let (parts, x_stride) = (parts as i32, x.width as i64);
        let args = ffi::SkinnyGemmArgs { parts, x_stride, squares: 0, ..*args };
        self.tile_of(&args)?;
        let quantized = self.quantized(rows, x, parts as usize);
        let (x, x_scales) = (quantized.data.address(), quantized.scales.address());
        Some(ffi::SkinnyGemmArgs { x, x_scales, ..args })
    }
}
