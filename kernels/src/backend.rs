//! The trait over which every forward pass is written, once for all devices.
//!
//! A backend owns the memory of its buffers; the forward pass names buffers and operations and never reads
//! an element. Shapes are `[rows][width]`, row-major; `rows` is the number of rows of the step, at most the
//! capacity of the buffer.

use std::num::NonZeroUsize;

use crate::{
    layout::{Dtype, KvLayout, to_bf16_bits},
    shard::Shard,
};

/// A weight matrix being read, row by row. Implemented by the loaders; concatenations (Q, K and V;
/// gate and up) are sources too, so that a backend packs them as one matrix.
pub trait RowSource: Sync {
    /// Output features.
    fn rows(&self) -> usize;
    /// Input features.
    fn cols(&self) -> usize;
    /// Writes row `row` (`cols` elements) to `out`.
    fn read_row(&self, row: usize, out: &mut [f32]);
    /// Fills `out` with rows from `first` on, in `dtype` and the machine's byte order. Sources stored in
    /// `dtype` override this to skip the conversion through f32.
    fn read_rows(&self, first: usize, dtype: Dtype, out: &mut [u8]) {
        convert_rows(self, first, dtype, out);
    }
}

/// Implements [`RowSource::read_rows`] for every source: through f32, row by row.
pub fn convert_rows<S: RowSource + ?Sized>(source: &S, first: usize, dtype: Dtype, out: &mut [u8]) {
    let mut values = vec![0.0; source.cols()];
    let row_bytes = (values.len() * dtype.bytes()).max(1);
    for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
        source.read_row(first + row, &mut values);
        match dtype {
            Dtype::F32 => out.copy_from_slice(bytemuck::cast_slice(&values)),
            Dtype::Bf16 => {
                for (out, value) in out.as_chunks_mut().0.iter_mut().zip(&values) {
                    *out = to_bf16_bits(*value).to_ne_bytes();
                }
            }
        }
    }
}

/// The heads of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadShape {
    pub query_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl HeadShape {
    /// Width of one fused row: queries, then keys, then values.
    pub fn qkv_width(&self) -> usize {
        (self.query_heads + 2 * self.kv_heads) * self.head_dim
    }

    pub fn query_width(&self) -> usize {
        self.query_heads * self.head_dim
    }
}

/// Bias and head norms that some architectures apply before the rotary embedding.
#[derive(Debug)]
pub struct HeadWeights<'a, V> {
    /// `[qkv_width]`, added to queries, keys and values.
    pub bias: Option<&'a V>,
    /// RMS norm of every query head by itself with the first weight `[head_dim]`, and of every key
    /// head with the second; values stay.
    pub norms: Option<(&'a V, &'a V)>,
    /// Epsilon of the norms.
    pub eps: f32,
}

impl<V> HeadWeights<'_, V> {
    /// Returns the weights of Llama: no bias and no norms.
    pub fn none() -> Self {
        Self { bias: None, norms: None, eps: 0.0 }
    }
}

/// One device's operations.
///
/// A step (`Self::Step`) is the executor's description of the rows of one forward pass: token, position,
/// sequence and block table of each row, and the access to those blocks. Within a
/// layer, keys and values of the step's own rows are stored before attention reads them.
pub trait Backend: Send + 'static {
    /// A packed weight matrix `[out][in]`.
    type Matrix: Send + Sync;
    /// A small f32 vector: a norm's weight, a bias, rope frequencies.
    type Vector: Send + Sync;
    /// Activations `[rows][width]`.
    type Buffer: Send;
    /// The rows of one forward pass and the KV blocks they may access.
    type Step;

    fn matrix(&self, source: &dyn RowSource) -> Self::Matrix;
    fn vector(&self, values: &[f32]) -> Self::Vector;
    fn buffer(&self, rows_max: usize, width: usize) -> Self::Buffer;
    /// Creates an f32 buffer, for the residual stream and logits. Where activations have fewer bits, only
    /// operations that say so accept a wide buffer.
    fn wide_buffer(&self, rows_max: usize, width: usize) -> Self::Buffer {
        self.buffer(rows_max, width)
    }

    /// Returns the shard of the model that this backend computes.
    fn shard(&self) -> Shard {
        Shard::WHOLE
    }

    /// Token rows of the step.
    fn rows(&self, step: &Self::Step) -> usize;
    /// Rows that sample a token.
    fn sampled_rows(&self, step: &Self::Step) -> usize;
    fn kv_layout(&self, step: &Self::Step) -> KvLayout;

    /// `out[row] = table[token of row]`; `out` is wide.
    fn embed(&mut self, table: &Self::Matrix, step: &Self::Step, out: &mut Self::Buffer);
    /// `out = x / rms(x) * weight`; `x` is wide.
    fn rms_norm(
        &mut self,
        rows: usize,
        x: &Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    );
    /// `residual += x`, then `out = rms_norm(residual)`; `residual` is wide.
    fn add_rms_norm(
        &mut self,
        rows: usize,
        residual: &mut Self::Buffer,
        x: &Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    );
    /// `out[rows][w.out] = x[rows][w.in] · wᵀ`; `out` may be wide.
    fn matmul(&mut self, rows: usize, x: &Self::Buffer, w: &Self::Matrix, out: &mut Self::Buffer);
    /// Performs the operations between the QKV GEMM and attention: adds the bias and norms the heads by
    /// `weights`, rotates queries and keys in `qkv` (half-split pairs: dimension i with
    /// i + dim/2, as Hugging Face's Llama), then stores keys and values of every row into its block.
    /// `frequencies[dim/2]` are radians per position, scaling already applied. Of `qkv` only the
    /// queries are of use after it.
    fn store_kv(
        &mut self,
        layer: usize,
        shape: HeadShape,
        weights: HeadWeights<'_, Self::Vector>,
        frequencies: &Self::Vector,
        qkv: &mut Self::Buffer,
        step: &mut Self::Step,
    );
    /// Causal attention of every row over its sequence's blocks; `out` is `[rows][query_width]`.
    /// With a `window` of n, a row attends to itself and the n - 1 tokens before it.
    fn attention(
        &mut self,
        layer: usize,
        shape: HeadShape,
        scale: f32,
        window: Option<NonZeroUsize>,
        qkv: &Self::Buffer,
        step: &Self::Step,
        out: &mut Self::Buffer,
    );
    /// `out[row][i] = silu(gate_up[row][i]) * gate_up[row][width + i]`.
    fn silu_mul(&mut self, rows: usize, gate_up: &Self::Buffer, out: &mut Self::Buffer);
    /// All-reduces `x` over the ranks, added in order of rank, so that all ranks have the same bits. No effect
    /// without a group.
    ///
    /// Operations return no errors. After a failure of the group, results are undefined; the executor checks
    /// the backend for a failure before it uses a result.
    fn all_reduce(&mut self, _rows: usize, _x: &mut Self::Buffer) {
        assert!(self.shard().is_whole(), "a backend with a group implements all_reduce");
    }
    /// Gathers the rows of `x` that sample into `out`.
    fn gather_sampled(&mut self, x: &Self::Buffer, step: &Self::Step, out: &mut Self::Buffer);

    // GEMMs with their epilogues. A device that fuses them skips the intermediate buffer, whose contents
    // are undefined afterwards.

    /// `qkv = x · wᵀ` of all rows of the step, then [`Self::store_kv`].
    fn project_heads(
        &mut self,
        layer: usize,
        shape: HeadShape,
        (x, w): (&Self::Buffer, &Self::Matrix),
        weights: HeadWeights<'_, Self::Vector>,
        frequencies: &Self::Vector,
        qkv: &mut Self::Buffer,
        step: &mut Self::Step,
    ) {
        self.matmul(self.rows(step), x, w, qkv);
        self.store_kv(layer, shape, weights, frequencies, qkv, step);
    }

    /// `residual += x · wᵀ`, then `out = rms_norm(residual)`; `delta` is the intermediate buffer. Only GEMMs
    /// may read `out`. `rows` are the rows of the step, or those that sample.
    ///
    /// The GEMM of a rank is a partial sum: [`Self::all_reduce`] adds it up before it is added to the residual
    /// stream, which is the same in all ranks.
    fn project_onto_residual(
        &mut self,
        rows: usize,
        (x, w): (&Self::Buffer, &Self::Matrix),
        delta: &mut Self::Buffer,
        residual: &mut Self::Buffer,
        (norm, eps): (&Self::Vector, f32),
        out: &mut Self::Buffer,
    ) {
        self.matmul(rows, x, w, delta);
        self.all_reduce(rows, delta);
        self.add_rms_norm(rows, residual, delta, norm, eps, out);
    }

    /// `out = silu_mul(x · wᵀ)`; `gate_up` is the intermediate buffer, `rows` as above.
    fn project_gated(
        &mut self,
        rows: usize,
        (x, w): (&Self::Buffer, &Self::Matrix),
        gate_up: &mut Self::Buffer,
        out: &mut Self::Buffer,
    ) {
        self.matmul(rows, x, w, gate_up);
        self.silu_mul(rows, gate_up, out);
    }
}
