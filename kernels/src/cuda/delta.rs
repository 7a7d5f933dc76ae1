//! Linear attention with a recurrent state (Gated DeltaNet), and the output gate of attention.

use super::{
    backend::CudaBackend,
    buffer::{CudaBuffer, CudaVector},
    ffi::{self, dtype_code},
    library::KernelLibrary,
    step::CudaStep,
};
use crate::{
    backend::{Backend as _, GatedDelta},
    layout::{Dtype, StatePlaces, StateShape},
};

/// Largest dimension of a head of linear attention.
pub const DELTA_DIM_MAX: usize = 256;
/// Dimensions of heads of linear attention are multiples of this number.
pub const DELTA_DIM_UNIT: usize = 4;

impl CudaBackend {
    /// Creates a buffer for the queries, keys and values after the convolution, and the decay and
    /// update rate of each value head.
    pub(super) fn place_delta(&self, rows_max: usize, shape: StateShape) -> CudaBuffer {
        self.wide_buffer(rows_max, shape.mixed_width())
    }

    /// Computes [`gated_delta`](crate::Backend::gated_delta).
    pub(super) fn run_delta(
        &self,
        delta: GatedDelta<'_, CudaVector>,
        [projected, rates, mixed, out]: [&CudaBuffer; 4],
        step: &CudaStep,
    ) {
        let GatedDelta { layer, shape, conv, decay_log, time_bias, norm, eps } = delta;
        assert_eq!(
            [projected, rates, mixed, out].map(CudaBuffer::width),
            [
                shape.projected_width(),
                2 * shape.value_heads,
                shape.mixed_width(),
                shape.value_width()
            ],
            "gated_delta: buffers have the widths of the heads"
        );
        assert_eq!(
            [conv, decay_log, time_bias, norm].map(|vector| vector.len),
            [
                shape.channels() * (shape.conv_taps + 1),
                shape.value_heads,
                shape.value_heads,
                shape.value_dim
            ],
            "gated_delta: weights have the sizes of the heads"
        );
        assert_eq!(mixed.dtype, Dtype::F32, "gated_delta: intermediate values are f32");
        assert!(
            projected.dtype == out.dtype && rates.dtype == out.dtype,
            "gated_delta: types of input and output differ"
        );
        assert!(layer < shape.layer_count, "gated_delta: the state has no layer {layer}");
        let (block, rows) = (step.block_layout(), step.rows());
        let places = StatePlaces::new(shape, block);
        let blocks = shape.block_count(block);
        assert!(blocks <= step.state_entries(), "gated_delta: a state has {blocks} blocks");
        out.forget();
        let args = ffi::DeltaArgs {
            projected: projected.rows_of(rows).0,
            rates: rates.rows_of(rows).0,
            conv: conv.data.address(),
            decay_log: decay_log.data.address(),
            time_bias: time_bias.data.address(),
            norm: norm.data.address(),
            mixed: mixed.rows_of(rows).0,
            out: out.rows_of(rows).0,
            blocks: step.kv().base,
            tables: step.state_tables(),
            projected_stride: projected.stride as i64,
            rates_stride: rates.stride as i64,
            mixed_stride: mixed.stride as i64,
            out_stride: out.stride as i64,
            block_bytes: block.block_bytes() as i64,
            head_bytes: block.head_bytes() as i64,
            table_width: step.pool().table_width,
            dtype: dtype_code(out.dtype),
            rows: rows as i32,
            sequences: step.sequences() as i32,
            key_heads: shape.key_heads as i32,
            value_heads: shape.value_heads as i32,
            key_dim: shape.key_dim as i32,
            value_dim: shape.value_dim as i32,
            taps: shape.conv_taps as i32,
            lanes: block.kv_head_count as i32,
            pieces: places.pieces as i32,
            piece_rows: places.piece_rows as i32,
            layer_row: places.state_rows(layer, 0).start as i32,
            eps,
        };
        self.run(|library, stream| {
            // SAFETY: buffers and weights have the sizes checked above and the step's rows. The
            // step may write the state's blocks, which the tables of its slots name. The layer's
            // rows are inside these blocks.
            unsafe { launch!(library, stream, baton_gated_delta(&args, step.arrays())) }
        });
    }

    /// Computes [`apply_gate`](crate::Backend::apply_gate).
    pub(super) fn run_gate(&self, rows: usize, gate: &CudaBuffer, x: &CudaBuffer) {
        assert_eq!(gate.width, x.width, "apply_gate: widths are equal");
        assert_eq!(gate.dtype, x.dtype, "apply_gate: types differ");
        assert!(
            gate.width == gate.stride && x.width == x.stride,
            "apply_gate: the rows are contiguous"
        );
        x.forget();
        let (from, to) = (gate.rows_of(rows).0, x.rows_of(rows).0);
        let (dtype, rows, width) = (dtype_code(x.dtype), rows as i32, x.width as i32);
        self.run(|library, stream| {
            // SAFETY: both buffers have these rows and this width.
            unsafe { launch!(library, stream, baton_apply_gate(dtype, from, to, rows, width)) }
        });
    }
}
