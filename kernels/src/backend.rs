//! The trait over which every forward pass is written, once for all devices.
//!
//! A backend owns the memory of its buffers; the forward pass names buffers and operations and never reads
//! an element. Shapes are `[rows][width]`, row-major; `rows` is the number of rows of the step, at most the
//! capacity of the buffer.

use std::num::NonZeroUsize;

use crate::{
    fp8::BlockScales,
    layout::{Dtype, KvLayout, to_bf16_bits},
    shard::Shard,
};

/// Source of a weight matrix's rows. [`Self::read_row`] is the reference of every stored format. The model loaders implement it. Concatenations (Q, K and V; gate and
/// up) are sources too, so that a backend packs them as one matrix.
pub trait RowSource: Sync {
    /// Returns the number of output features.
    fn rows(&self) -> usize;
    /// Returns the number of input features.
    fn cols(&self) -> usize;
    /// Writes row `row` (`cols` elements) to `out`.
    fn read_row(&self, row: usize, out: &mut [f32]);
    /// Writes rows from `first` on to `out`, as many as it takes.
    fn read_values(&self, first: usize, out: &mut [f32]) {
        for (row, out) in out.chunks_exact_mut(self.cols().max(1)).enumerate() {
            self.read_row(first + row, out);
        }
    }
    /// Fills `out` with rows from `first` on, in `dtype` and native byte order. Sources stored in
    /// `dtype` override this to skip the conversion through f32.
    fn read_rows(&self, first: usize, dtype: Dtype, out: &mut [u8]) {
        convert_rows(self, first, dtype, out);
    }
    /// Returns whether a backend may store the matrix with fewer bits than it is computed with. Embeddings and output heads
    /// lose too much accuracy.
    fn may_be_quantized(&self) -> bool {
        false
    }
    /// Returns the scales of consecutive ranges of rows if all rows are stored in FP8. A fused matrix has an entry for each
    /// part. A backend without kernels for FP8 reads the other methods, which dequantize.
    fn fp8_scales(&self) -> Option<Vec<BlockScales>> {
        None
    }
    /// Writes the FP8 numbers of rows from `first` on to `out`, as many rows as it takes.
    ///
    /// # Panics
    /// When [`Self::fp8_scales`] is `None`.
    fn read_fp8(&self, _first: usize, _out: &mut [u8]) {
        panic!("the matrix is not stored in FP8");
    }
}

/// Implements [`RowSource::read_rows`] for every source: row by row through f32.
pub fn convert_rows<S: RowSource + ?Sized>(source: &S, first: usize, dtype: Dtype, out: &mut [u8]) {
    let mut values = vec![0.0; source.cols()];
    let row_bytes = (values.len() * dtype.bytes()).max(1);
    for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
        source.read_row(first + row, &mut values);
        store_row(&values, dtype, out);
    }
}

/// Writes a row to `out` in `dtype` and native byte order.
pub fn store_row(values: &[f32], dtype: Dtype, out: &mut [u8]) {
    match dtype {
        Dtype::F32 => out.copy_from_slice(bytemuck::cast_slice(values)),
        Dtype::Bf16 => {
            for (out, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *out = to_bf16_bits(*value).to_ne_bytes();
            }
        }
    }
}

/// Packs the weights of a model, or of a shard, for a device. Every backend is a packer. A separate packer packs new
/// weights while the backend computes.
pub trait Packer {
    type Matrix;
    type Vector;

    fn pack_matrix(&self, source: &dyn RowSource) -> Self::Matrix;
    /// Packs the router of experts, whose logits decide by small differences.
    fn pack_router(&self, source: &dyn RowSource) -> Self::Matrix {
        self.pack_matrix(source)
    }
    fn pack_vector(&self, values: &[f32]) -> Self::Vector;
    /// Returns the shard of the model to pack.
    fn pack_shard(&self) -> Shard;
}

impl<B: Backend> Packer for B {
    type Matrix = B::Matrix;
    type Vector = B::Vector;

    fn pack_matrix(&self, source: &dyn RowSource) -> B::Matrix {
        self.matrix(source)
    }

    fn pack_router(&self, source: &dyn RowSource) -> B::Matrix {
        self.router(source)
    }

    fn pack_vector(&self, values: &[f32]) -> B::Vector {
        self.vector(values)
    }

    fn pack_shard(&self) -> Shard {
        self.shard()
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
    /// Returns the width of one fused row: queries, then keys, then values.
    pub fn qkv_width(&self) -> usize {
        (self.query_heads + 2 * self.kv_heads) * self.head_dim
    }

    pub fn query_width(&self) -> usize {
        self.query_heads * self.head_dim
    }
}

/// The attention of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerAttention {
    pub layer: usize,
    pub heads: HeadShape,
    /// Factor of the scores.
    pub scale: f32,
    /// Number of tokens that a row attends to, itself included. `None`: all tokens before it, too.
    pub window: Option<NonZeroUsize>,
}

/// Frequencies of the rotary embedding, and the bias and head norms that some architectures apply before it.
#[derive(Debug)]
pub struct HeadWeights<'a, V> {
    /// `[head_dim / 2]`, radians per position with scaling already applied.
    pub frequencies: &'a V,
    /// `[qkv_width]`, added to queries, keys and values.
    pub bias: Option<&'a V>,
    /// Weights `[head_dim]` of the RMS norms that are applied to each query head (first) and each key
    /// head (second). Values are not normed.
    pub norms: Option<(&'a V, &'a V)>,
    /// Epsilon of the norms.
    pub eps: f32,
}

impl<'a, V> HeadWeights<'a, V> {
    /// Returns the weights of Llama: no bias and no norms.
    pub fn rotary(frequencies: &'a V) -> Self {
        Self { frequencies, bias: None, norms: None, eps: 0.0 }
    }
}

/// Choice of experts for a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertChoice {
    /// Experts that compute each row.
    pub count: usize,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub is_normalized: bool,
}

/// Packed weights of a mixture of experts.
#[derive(Debug)]
pub struct ExpertWeights<'a, M> {
    /// `[experts][hidden]`.
    pub router: &'a M,
    /// Gate and up `[2 * size][hidden]`, and down `[hidden][size]`, of each expert.
    pub experts: &'a [(M, M)],
    pub choice: ExpertChoice,
}

/// Operations of one device.
///
/// A step (`Self::Step`) is the executor's description of the rows of one forward pass: token, position,
/// sequence and block table of each row, and the access to those blocks. Within a layer, keys and values of
/// the step's own rows are stored before attention reads them.
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
    /// Creates the router of experts, in f32 if the backend has another format for matrices.
    fn router(&self, source: &dyn RowSource) -> Self::Matrix {
        self.matrix(source)
    }
    fn vector(&self, values: &[f32]) -> Self::Vector;
    fn buffer(&self, rows_max: usize, width: usize) -> Self::Buffer;
    /// Creates an f32 buffer, for the residual stream and logits. On a backend with narrower
    /// activations, only operations that document a wide buffer accept one.
    fn wide_buffer(&self, rows_max: usize, width: usize) -> Self::Buffer {
        self.buffer(rows_max, width)
    }

    /// Returns the shard of the model that this backend computes.
    fn shard(&self) -> Shard {
        Shard::WHOLE
    }

    /// Returns the number of token rows of the step.
    fn rows(&self, step: &Self::Step) -> usize;
    /// Returns the number of rows that sample a token.
    fn sampled_rows(&self, step: &Self::Step) -> usize;
    fn kv_layout(&self, step: &Self::Step) -> KvLayout;

    /// Computes `out[row] = table[token of row]`; `out` is wide. The whole table has a row for each token of the
    /// `vocabulary`.
    ///
    /// A rank's table has the rows of the rank's [tokens](Shard::tokens), and other tokens get zeros.
    /// [`Self::all_reduce`] then sums to the row of the rank that has it, without rounding.
    ///
    /// Admission rejects tokens outside the vocabulary. Such a token here is a bug of the caller: the CPU panics, CUDA
    /// gives zeros.
    fn embed(
        &mut self,
        table: &Self::Matrix,
        vocabulary: usize,
        step: &Self::Step,
        out: &mut Self::Buffer,
    );
    /// Computes `out = x / rms(x) * weight`; `x` is wide.
    fn rms_norm(
        &mut self,
        rows: usize,
        x: &Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    );
    /// Computes `residual += x`, then `out = rms_norm(residual)`; `residual` is wide.
    fn add_rms_norm(
        &mut self,
        rows: usize,
        residual: &mut Self::Buffer,
        x: &Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    );
    /// Computes `out[rows][w.out] = x[rows][w.in] · wᵀ`; `out` may be wide.
    fn matmul(&mut self, rows: usize, x: &Self::Buffer, w: &Self::Matrix, out: &mut Self::Buffer);
    /// Performs the operations between the QKV GEMM and attention. Adds the bias and norms the heads by
    /// `weights`, rotates queries and keys in `qkv` (half-split pairs: dimension i with i + dim/2, as
    /// Hugging Face's Llama), then stores keys and values of every row into its block. Only the queries in
    /// `qkv` are valid afterwards.
    fn store_kv(
        &mut self,
        layer: usize,
        shape: HeadShape,
        weights: HeadWeights<'_, Self::Vector>,
        qkv: &mut Self::Buffer,
        step: &mut Self::Step,
    );
    /// Computes causal attention of every row over its sequence's blocks; `out` is
    /// `[rows][query_width]`.
    fn attention(
        &mut self,
        attention: LayerAttention,
        qkv: &Self::Buffer,
        step: &Self::Step,
        out: &mut Self::Buffer,
    );
    /// Computes `out[row][i] = silu(gate_up[row][i]) * gate_up[row][width + i]`.
    fn silu_mul(&mut self, rows: usize, gate_up: &Self::Buffer, out: &mut Self::Buffer);
    /// Computes a mixture of experts. A softmax in f32 over the router's logits `x · routerᵀ` gives the probability of each
    /// expert. A row goes to the experts of the greatest probabilities, the lowest expert among equal ones. `out` is the sum
    /// of their outputs `silu_mul(x · gate_upᵀ) · downᵀ` times their weights, in f32 and in the order of the experts: a
    /// row's result does not depend on the other rows.
    ///
    /// # Panics
    /// On a backend without experts; the executor refuses the model when it loads it.
    fn experts(
        &mut self,
        _rows: usize,
        _x: &Self::Buffer,
        _weights: &ExpertWeights<'_, Self::Matrix>,
        _out: &mut Self::Buffer,
    ) {
        panic!("the backend has no kernels for experts");
    }
    /// All-reduces `x`, which may be wide, over the ranks. Terms are added in rank order, so that all ranks have
    /// the same bits. Does nothing on a single rank.
    ///
    /// Operations return no errors. After a failure of the group, results are undefined; the executor
    /// checks the backend for a failure before it uses a result.
    fn all_reduce(&mut self, _rows: usize, _x: &mut Self::Buffer) {
        assert!(self.shard().is_whole(), "a backend with a group implements all_reduce");
    }
    /// Gathers the rows of `x` that sample into `out`.
    fn gather_sampled(&mut self, x: &Self::Buffer, step: &Self::Step, out: &mut Self::Buffer);

    // GEMMs with their epilogues. A device that fuses them skips the intermediate buffer, whose contents
    // are undefined afterwards.

    /// Computes `qkv = x · wᵀ` for all rows of the step, then calls [`Self::store_kv`].
    fn project_heads(
        &mut self,
        layer: usize,
        shape: HeadShape,
        (x, w): (&Self::Buffer, &Self::Matrix),
        weights: HeadWeights<'_, Self::Vector>,
        qkv: &mut Self::Buffer,
        step: &mut Self::Step,
    ) {
        self.matmul(self.rows(step), x, w, qkv);
        self.store_kv(layer, shape, weights, qkv, step);
    }

    /// Computes `residual += x · wᵀ`, then `out = rms_norm(residual)`; `delta` is the intermediate
    /// buffer. Only GEMMs may read `out`. `rows` is the number of rows of the step, or of those that
    /// sample.
    ///
    /// A rank's GEMM is a partial sum: [`Self::all_reduce`] sums it over the ranks before it is added
    /// to the residual stream, which is equal on all ranks.
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

    /// Computes `out = silu_mul(x · wᵀ)`; `gate_up` is the intermediate buffer, `rows` as above.
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
