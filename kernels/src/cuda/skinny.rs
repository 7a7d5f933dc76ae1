//! Products of few rows with what surrounds them, in one pass over the weight.
//!
//! A decode step of few rows costs what reading its weights costs, and every kernel between two
//! products leaves the memory idle. So a product does what follows it: heads are turned and stored, gate
//! and up activated, the residual added. An RMS norm is two factors: the weight's goes into the
//! output of the product before, the row's own is applied to the sums of the product behind, from
//! sums of squares that the one before has left ([`Pending`]). Where the library leaves a product to
//! cuBLAS, what surrounds it is done by kernels of their own.

use super::{
    attention::dtype_code,
    backend::CudaBackend,
    buffer::{CudaBuffer, CudaMatrix, CudaVector},
    error::CudaError,
    ffi,
    library::KernelLibrary,
    memory::{DeviceMemory, Range},
    step::{CudaStep, Places},
};
use crate::{
    backend::{HeadShape, HeadWeights},
    layout::Dtype,
};

/// Rows of a weight whose outputs one block computes, at least.
const TILE_MIN: usize = 16;
/// Outputs of the widest product onto the residual stream.
const WIDTH_MAX: usize = 1 << 16;

/// What is still to be done to a buffer's rows: each is to be divided by the root of the mean of
/// its squares, plus `eps`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pending {
    /// Partial sums of every row.
    count: usize,
    eps: f32,
    /// Where the rows came from, and the weight that they were multiplied with.
    residual: ffi::Address,
    norm: ffi::Address,
}

/// What these products need beside their operands.
pub(super) struct Skinny {
    /// Partial sums of squares of the rows that the last product onto the residual stream left.
    squares: Range,
    /// A product's kernel may start while the one before it ends.
    starts_early: bool,
    /// Rows that a product takes at most; 0: it is switched off.
    rows_max: usize,
    /// Those that share a product's outputs.
    sms: i32,
}

/// What follows a product.
enum Epilogue<'a> {
    Plain,
    Residual {
        residual: &'a CudaBuffer,
        norm: &'a CudaVector,
    },
    Gated,
    Wide,
    Heads {
        shape: HeadShape,
        bias: Option<&'a CudaVector>,
        frequencies: &'a CudaVector,
        places: Places,
        arrays: &'a ffi::Step,
    },
}

/// Rows for which sums of squares have room.
const SQUARES_ROWS: usize = 256;

impl Skinny {
    pub fn new(
        memory: &DeviceMemory,
        library: &KernelLibrary,
        is_on: bool,
        starts_early: bool,
        sms: i32,
    ) -> Result<Self, CudaError> {
        // SAFETY: it gives a number.
        let rows_max = unsafe { (library.functions().baton_skinny_gemm_rows_max)() };
        let rows_max = usize::try_from(rows_max).unwrap_or(0).min(SQUARES_ROWS);
        let rows_max = if is_on { rows_max } else { 0 };
        Ok(Self { squares: memory.cut(Self::BYTES)?, starts_early, rows_max, sms })
    }

    /// Of the memory that it cuts its own from.
    pub const BYTES: usize = SQUARES_ROWS * WIDTH_MAX / TILE_MIN * size_of::<f32>();
}

impl CudaBackend {
    /// As [`crate::Backend::project_heads`], for heads without norms. False: nothing was done.
    pub(super) fn skinny_heads(
        &self,
        layer: usize,
        shape: HeadShape,
        (x, w): (&CudaBuffer, &CudaMatrix),
        weights: &HeadWeights<'_, CudaVector>,
        frequencies: &CudaVector,
        qkv: &mut CudaBuffer,
        step: &CudaStep,
    ) -> bool {
        assert!(layer < step.kv_layout().layer_count, "the blocks have layer {layer}");
        assert_eq!(frequencies.len * 2, shape.head_dim, "one frequency per pair");
        let (bias, places, arrays) = (weights.bias, step.places(layer), step.arrays());
        let epilogue = Epilogue::Heads { shape, bias, frequencies, places, arrays };
        // A tile is part of one head.
        let is_served = weights.norms.is_none() && shape.head_dim.is_multiple_of(TILE_MIN);
        is_served && self.skinny(step.rows(), (x, w), epilogue, qkv).is_some()
    }

    /// The product alone. False: nothing was done.
    pub(super) fn skinny_product(
        &self,
        rows: usize,
        product: (&CudaBuffer, &CudaMatrix),
        out: &mut CudaBuffer,
    ) -> bool {
        let epilogue = match out.dtype {
            Dtype::F32 => Epilogue::Wide,
            Dtype::Bf16 => Epilogue::Plain,
        };
        self.skinny(rows, product, epilogue, out).is_some()
    }

    /// As [`crate::Backend::project_onto_residual`]. False: nothing was done.
    pub(super) fn skinny_onto_residual(
        &self,
        rows: usize,
        product: (&CudaBuffer, &CudaMatrix),
        residual: &mut CudaBuffer,
        (norm, eps): (&CudaVector, f32),
        out: &mut CudaBuffer,
    ) -> bool {
        let width = product.1.rows;
        assert!(
            residual.width == width && norm.len == width && out.width == width,
            "project_onto_residual: widths are equal"
        );
        let is_packed = residual.stride == width && out.stride == width;
        if residual.dtype != Dtype::F32 || !is_packed || width > WIDTH_MAX {
            return false;
        }
        residual.bytes(rows);
        let (from, weight) = (residual.data.address(), norm.data.address());
        let epilogue = Epilogue::Residual { residual, norm };
        let Some(tile) = self.skinny(rows, product, epilogue, out) else { return false };
        let count = width.div_ceil(tile.max(TILE_MIN));
        out.pending.set(Some(Pending { count, eps, residual: from, norm: weight }));
        true
    }

    /// As [`crate::Backend::project_gated`]. False: nothing was done.
    pub(super) fn skinny_gated(
        &self,
        rows: usize,
        product: (&CudaBuffer, &CudaMatrix),
        out: &mut CudaBuffer,
    ) -> bool {
        self.skinny(rows, product, Epilogue::Gated, out).is_some()
    }

    /// Does what is still to be done to a buffer's rows, for a reader that does not do it by itself.
    pub(super) fn finish_rows(&self, rows: usize, x: &CudaBuffer) {
        let Some(Pending { eps, residual, norm, .. }) = x.pending.take() else { return };
        let (to, width) = (x.data.part(0, x.bytes(rows)), x.width);
        self.call("baton_rms_norm", |functions, stream| {
            // SAFETY: the rows came from there, which is as wide and has as many rows, and nobody has
            // written to it since.
            unsafe {
                (functions.baton_rms_norm)(
                    dtype_code(x.dtype),
                    residual,
                    norm,
                    eps,
                    to,
                    rows as i32,
                    width as i32,
                    stream,
                )
            }
        });
    }

    /// One product. Returns the rows of a tile, or `None` when it is left to cuBLAS.
    fn skinny(
        &self,
        rows: usize,
        (x, w): (&CudaBuffer, &CudaMatrix),
        epilogue: Epilogue<'_>,
        out: &mut CudaBuffer,
    ) -> Option<usize> {
        let skinny = self.skinny_parts();
        let is_served = w.dtype == Dtype::Bf16 && w.cols.is_multiple_of(8);
        if rows == 0 || rows > skinny.rows_max || !is_served {
            return None;
        }
        assert!(x.width == w.cols && x.dtype == w.dtype, "the input is the matrix's");
        let outputs = if matches!(epilogue, Epilogue::Gated) { w.rows / 2 } else { w.rows };
        assert_eq!(out.width, outputs, "the output is the product's");
        let mut args = ffi::SkinnyGemmArgs {
            weight: w.data.address(),
            x: x.data.part(0, x.bytes(rows)),
            x_stride: x.stride as i64,
            out: out.data.part(0, out.bytes(rows)),
            out_stride: out.stride as i64,
            rows: rows as i32,
            n: w.rows as i32,
            depth: w.cols as i32,
            grid: skinny.sms,
            pdl: skinny.starts_early.into(),
            ..ffi::SkinnyGemmArgs::default()
        };
        if let Some(Pending { count, eps, .. }) = x.pending.get() {
            args.squares = skinny.squares.part(0, rows * count * size_of::<f32>());
            args.squares_count = count as i32;
            args.eps = eps;
        }
        match epilogue {
            Epilogue::Plain => args.epilogue = ffi::SKINNY_PLAIN,
            Epilogue::Gated => args.epilogue = ffi::SKINNY_SILU,
            Epilogue::Wide => args.epilogue = ffi::SKINNY_F32,
            Epilogue::Residual { residual, norm } => {
                args.epilogue = ffi::SKINNY_RESIDUAL;
                args.residual = residual.data.address();
                args.mirror = args.out;
                args.next_norm = norm.data.address();
                args.squares_out = skinny.squares.address();
            }
            Epilogue::Heads { shape, bias, frequencies, places, arrays } => {
                args.epilogue = ffi::SKINNY_QKV;
                (args.k, args.v) = (places.keys, places.values);
                args.stride_block = places.block_stride;
                args.stride_head = places.head_stride;
                args.stride_token = places.token_stride;
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
        let functions = self.library().functions();
        // SAFETY: it reads the arguments alone.
        let tile = unsafe { (functions.baton_skinny_gemm_tile)(&args) };
        let tile = usize::try_from(tile).ok().filter(|tile| *tile > 0)?;
        self.call("baton_skinny_gemm", |functions, stream| {
            // SAFETY: operands and output have the step's rows and the matrix's sizes, as was just
            // checked; sums of squares have room for the smallest tile; the step's destinations are
            // places of blocks that it may write.
            unsafe { (functions.baton_skinny_gemm)(&args, stream) }
        });
        Some(tile)
    }
}
