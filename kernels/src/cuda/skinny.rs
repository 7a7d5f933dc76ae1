//! Products of few rows with what surrounds them, in one pass over the weight.
//!
//! A decode step of few rows costs what reading its weights costs, and every kernel between two
//! products leaves the memory idle. So a product does what follows it: heads are turned and stored, gate
//! and up activated, the residual added. An RMS norm is two factors: the weight's goes into the
//! output of the product before, the row's own is applied to the sums of the product behind, from
//! sums of squares that the one before has left ([`Pending`]).

use super::{
    backend::CudaBackend,
    buffer::{CudaBuffer, CudaMatrix, CudaVector},
    error::CudaError,
    ffi,
    memory::{DeviceMemory, Range},
    step::{CudaStep, Places},
};
use crate::{
    backend::{HeadShape, HeadWeights},
    layout::Dtype,
};

/// Rows that these products take.
pub(super) const ROWS_MAX: usize = 16;
/// Rows of a weight whose outputs one block computes, at least.
pub(super) const TILE_MIN: usize = 16;
/// Outputs of the widest product onto the residual stream.
const WIDTH_MAX: usize = 1 << 16;

/// What is still to be done to a buffer's rows: each is to be divided by the root of the mean of
/// its squares, plus `eps`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pending {
    /// Partial sums of every row.
    count: usize,
    eps: f32,
}

/// What these products need beside their operands.
pub(super) struct Skinny {
    /// Partial sums of squares of the rows that the last product onto the residual stream left.
    squares: Range,
    /// A product's kernel may start while the one before it ends.
    starts_early: bool,
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

impl Skinny {
    pub fn new(memory: &DeviceMemory, starts_early: bool) -> Result<Self, CudaError> {
        Ok(Self { squares: memory.cut(Self::BYTES)?, starts_early })
    }

    /// Of the memory that it cuts its own from.
    pub const BYTES: usize = ROWS_MAX * WIDTH_MAX / TILE_MIN * size_of::<f32>();

    /// True when a product has these sizes.
    pub fn serves(w: &CudaMatrix) -> bool {
        w.dtype == Dtype::Bf16 && w.cols.is_multiple_of(8) && w.rows <= i32::MAX as usize
    }
}

impl CudaBackend {
    /// As [`crate::Backend::project_heads`], for heads without norms.
    pub(super) fn skinny_heads(
        &self,
        layer: usize,
        shape: HeadShape,
        (x, w): (&CudaBuffer, &CudaMatrix),
        weights: &HeadWeights<'_, CudaVector>,
        frequencies: &CudaVector,
        qkv: &mut CudaBuffer,
        step: &CudaStep,
    ) {
        assert!(layer < step.kv_layout().layer_count, "the blocks have layer {layer}");
        assert_eq!(frequencies.len * 2, shape.head_dim, "one frequency per pair");
        let (bias, places, arrays) = (weights.bias, step.places(layer), step.arrays());
        let epilogue = Epilogue::Heads { shape, bias, frequencies, places, arrays };
        self.skinny(step.rows(), (x, w), epilogue, qkv);
    }

    /// The product alone.
    pub(super) fn skinny_product(
        &self,
        rows: usize,
        product: (&CudaBuffer, &CudaMatrix),
        out: &mut CudaBuffer,
    ) {
        let epilogue = match out.dtype {
            Dtype::F32 => Epilogue::Wide,
            Dtype::Bf16 => Epilogue::Plain,
        };
        self.skinny(rows, product, epilogue, out);
    }

    /// As [`crate::Backend::project_onto_residual`].
    pub(super) fn skinny_onto_residual(
        &self,
        rows: usize,
        product: (&CudaBuffer, &CudaMatrix),
        residual: &mut CudaBuffer,
        (norm, eps): (&CudaVector, f32),
        out: &mut CudaBuffer,
    ) {
        let width = product.1.rows;
        assert!(
            residual.width == width && norm.len == width && out.width == width,
            "project_onto_residual: widths are equal"
        );
        assert!(width <= WIDTH_MAX, "the residual stream is at most {WIDTH_MAX} wide");
        assert!(residual.dtype == Dtype::F32 && residual.stride == width && out.stride == width);
        residual.bytes(rows);
        let epilogue = Epilogue::Residual { residual, norm };
        let tile = self.skinny(rows, product, epilogue, out);
        out.pending = Some(Pending { count: width.div_ceil(tile.max(TILE_MIN)), eps });
    }

    /// As [`crate::Backend::project_gated`].
    pub(super) fn skinny_gated(
        &self,
        rows: usize,
        product: (&CudaBuffer, &CudaMatrix),
        out: &mut CudaBuffer,
    ) {
        self.skinny(rows, product, Epilogue::Gated, out);
    }

    /// One product. Returns the rows of a tile.
    fn skinny(
        &self,
        rows: usize,
        (x, w): (&CudaBuffer, &CudaMatrix),
        epilogue: Epilogue<'_>,
        out: &mut CudaBuffer,
    ) -> usize {
        assert!(rows <= ROWS_MAX && Skinny::serves(w), "{rows} rows of {w:?} are few and fit");
        assert!(x.width == w.cols && x.dtype == w.dtype, "the input is the matrix's");
        let outputs = if matches!(epilogue, Epilogue::Gated) { w.rows / 2 } else { w.rows };
        assert_eq!(out.width, outputs, "the output is the product's");
        let skinny = self.skinny_parts();
        let mut args = ffi::SkinnyGemmArgs {
            weight: w.data.address(),
            x: x.data.part(0, x.bytes(rows)),
            x_stride: x.stride as i64,
            out: out.data.part(0, out.bytes(rows)),
            out_stride: out.stride as i64,
            rows: rows as i32,
            n: w.rows as i32,
            depth: w.cols as i32,
            pdl: skinny.starts_early.into(),
            ..ffi::SkinnyGemmArgs::default()
        };
        if let Some(Pending { count, eps }) = x.pending {
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
        self.call("baton_skinny_gemm", |functions, stream| {
            // SAFETY: operands and output have the step's rows and the matrix's sizes, as was just
            // checked; sums of squares have room for the smallest tile; the step's destinations are
            // places of blocks that it may write.
            unsafe { (functions.baton_skinny_gemm)(&args, stream) }
        });
        tile.max(1) as usize
    }
}
