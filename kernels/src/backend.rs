//! The [`Backend`] trait: the operations of a device. A forward pass is generic over the trait, so
//! one implementation serves all devices.
//!
//! A backend owns the memory of its buffers. The forward pass passes buffers to operations and
//! never reads an element. Shapes are `[rows][width]`, row-major. `rows` is the number of token
//! rows of the step, at most `rows_max` of the buffer.

use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};

use crate::{
    fp8::BlockScales,
    int4::ColumnGroups,
    layout::{Dtype, KvLayout, StateShape, to_bf16_bits},
    shard::Shard,
};

/// Source of a weight matrix's rows, from which a backend packs the matrix. The model loaders
/// implement it. [`Self::read_row`] defines the values, and every other method must agree with it.
/// A fused matrix (Q, K and V, or gate and up) is one source, so that a backend packs it as one
/// matrix.
pub trait RowSource: Sync {
    /// Returns the number of output features.
    fn rows(&self) -> usize;
    /// Returns the number of input features.
    fn cols(&self) -> usize;
    /// Writes row `row` (`cols` elements) to `out`.
    fn read_row(&self, row: usize, out: &mut [f32]);
    /// Fills `out` with rows from `first` on.
    fn read_values(&self, first: usize, out: &mut [f32]) {
        for (row, out) in out.chunks_exact_mut(self.cols().max(1)).enumerate() {
            self.read_row(first + row, out);
        }
    }
    /// Fills `out` with rows from `first` on, in `dtype` and native byte order. A source that is
    /// stored in `dtype` overrides this method to copy rows without conversion to f32.
    fn read_rows(&self, first: usize, dtype: Dtype, out: &mut [u8]) {
        convert_rows(self, first, dtype, out);
    }
    /// Returns whether a backend may store the matrix with fewer bits than it is computed with.
    /// Embeddings and output heads lose too much accuracy.
    fn may_be_quantized(&self) -> bool {
        false
    }
    /// Returns the FP8 scales if all rows are stored in FP8: one entry for each part of a fused
    /// matrix, in the order of the rows. A backend without FP8 kernels calls the other methods,
    /// which dequantize.
    fn fp8_scales(&self) -> Option<Vec<BlockScales>> {
        None
    }
    /// Fills `out` with the FP8 elements of rows from `first` on, without scales.
    ///
    /// # Panics
    /// When [`Self::fp8_scales`] is `None`.
    fn read_fp8(&self, _first: usize, _out: &mut [u8]) {
        panic!("the matrix is not stored in FP8");
    }
    /// Returns the number of stacked matrices with equally many rows (two for gate and up) if all
    /// of them are stored in MXFP4, else `None`. A backend without kernels for MXFP4 calls the
    /// other methods, which dequantize.
    fn mxfp4_parts(&self) -> Option<usize> {
        None
    }
    /// Reads rows from `first` on, as stored. A byte of `numbers` has two numbers of 4 bits, the
    /// first in its low half. `scales` has a byte for every [`GROUP`](crate::mxfp4::GROUP) numbers.
    ///
    /// # Panics
    /// When [`Self::mxfp4_parts`] is `None`.
    fn read_mxfp4(&self, _first: usize, _numbers: &mut [u8], _scales: &mut [u8]) {
        panic!("the matrix is not stored in MXFP4");
    }
    /// Returns the groups of columns if all rows are stored in INT4 with the same groups, else
    /// `None`. A backend without kernels for INT4 calls the other methods, which dequantize.
    fn int4_groups(&self) -> Option<ColumnGroups> {
        None
    }
    /// Reads rows from `first` on, as stored: `numbers` `[rows][cols]`, one in a byte, `scales` and
    /// `zeros` (zero points) `[rows][groups]`.
    ///
    /// # Panics
    /// When [`Self::int4_groups`] is `None`.
    fn read_int4(
        &self,
        _first: usize,
        _numbers: &mut [u8],
        _scales: &mut [f32],
        _zeros: &mut [u8],
    ) {
        panic!("the matrix is not stored in INT4");
    }
}

/// Implements [`RowSource::read_rows`] with [`RowSource::read_row`] and a conversion from f32.
pub fn convert_rows<S: RowSource + ?Sized>(source: &S, first: usize, dtype: Dtype, out: &mut [u8]) {
    let mut values = vec![0.0; source.cols()];
    let row_bytes = (values.len() * dtype.bytes()).max(1);
    for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
        source.read_row(first + row, &mut values);
        store_row(&values, dtype, out);
    }
}

/// Converts a row to `dtype` and writes it to `out` in native byte order.
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

/// Packs the weights of a model, or of its shard, in the layout of a device. Every backend is a
/// packer. During a weight update, a separate packer packs the new weights while the backend
/// computes.
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
    /// Heads of keys and of values. With GQA, several query heads share a KV head.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl HeadShape {
    /// Returns the width of one fused QKV row: queries, then keys, then values.
    pub fn qkv_width(&self) -> usize {
        (self.query_heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Returns the width of one row of queries.
    pub fn query_width(&self) -> usize {
        self.query_heads * self.head_dim
    }
}

/// Parameters of one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerAttention {
    /// Index of the layer among those with attention.
    pub layer: usize,
    pub heads: HeadShape,
    /// Factor of the scores before the softmax, usually 1 / √head_dim.
    pub scale: f32,
    /// Size of the sliding window: a row attends to this many tokens, itself included. With `None`,
    /// a row attends to itself and all earlier tokens.
    pub window: Option<NonZeroUsize>,
}

/// Parameters and weights of one layer's linear attention (Gated DeltaNet), without its GEMMs.
#[derive(Debug)]
pub struct GatedDelta<'a, V> {
    /// Index of the layer among those with linear attention.
    pub layer: usize,
    /// Heads of the rank.
    pub shape: StateShape,
    /// Depthwise convolution of queries, keys and values: `[channels][conv_taps + 1]`, the oldest
    /// input first. Channels are queries, then keys, then values.
    pub conv: &'a V,
    /// Logarithm of the decay rate of each value head.
    pub decay_log: &'a V,
    /// Bias of the decay's time step of each value head.
    pub time_bias: &'a V,
    /// Weight `[value_dim]` of the RMS norm of each value head's output.
    pub norm: &'a V,
    /// Epsilon of the norm.
    pub eps: f32,
}

/// Weights of the operations between the QKV GEMM and attention: QKV bias, QK norm and rotary
/// embedding (RoPE).
#[derive(Debug)]
pub struct HeadWeights<'a, V> {
    /// RoPE frequencies in radians per position, with RoPE scaling applied: one for each rotary
    /// pair. With partial RoPE, fewer than `head_dim / 2`: the elements of a head after the pairs
    /// are not rotated.
    pub frequencies: &'a V,
    /// QKV bias `[qkv_width]`.
    pub bias: Option<&'a V>,
    /// QK norm: the RMS norm weights of queries (first) and keys (second).
    pub norms: Option<(&'a V, &'a V)>,
    pub norm_span: NormSpan,
    /// Epsilon of the QK norm.
    pub eps: f32,
}

impl<'a, V> HeadWeights<'a, V> {
    /// Returns weights with RoPE only, as in Llama.
    pub fn rotary(frequencies: &'a V) -> Self {
        Self { frequencies, bias: None, norms: None, norm_span: NormSpan::Head, eps: 0.0 }
    }
}

/// Elements over which the QK norm takes the mean square.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormSpan {
    /// A head. The weights are `[head_dim]`, the same for all heads.
    Head,
    /// All query heads or all key heads of the model. A rank has the weights of its heads:
    /// `[query_width]` for queries.
    Projection,
}

/// Choice of experts for a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertChoice {
    /// Experts that compute each row.
    pub count: usize,
    pub score: ExpertScore,
    /// Number of groups of consecutive, equally many experts; 1: all experts are one group.
    pub groups: usize,
    /// Number of groups that the experts of a row come from: those whose two best experts have the
    /// greatest sums.
    pub groups_chosen: usize,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub is_normalized: bool,
    /// Factor of the weights of the chosen experts.
    pub scale: f32,
}

impl ExpertChoice {
    /// Returns the choice of the `count` most probable experts, with their probabilities as
    /// weights.
    pub fn softmax(count: usize, is_normalized: bool) -> Self {
        let score = ExpertScore::Softmax;
        Self { count, score, groups: 1, groups_chosen: 1, is_normalized, scale: 1.0 }
    }
}

/// Function that turns the router's logits of a row into the scores of the experts, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertScore {
    Softmax,
    /// Softmax of logits plus bias: the bias changes the choice and the weights.
    BiasedSoftmax,
    /// `1 / (1 + exp(-logit))` of each logit by itself.
    Sigmoid,
}

/// Function that turns the gate and up values of a gated network into its intermediate values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GatedActivation {
    /// `silu(gate) * up`.
    Silu,
    /// `gelu(gate) * up`, with the tanh approximation of GELU: `gelu(x)` is
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`.
    GeluTanh,
    /// `g * sigmoid(alpha * g) * (u + 1)`, where `g` is the gate value, at most `limit`, and `u` is
    /// the up value, clamped to `-limit..=limit`.
    ClampedSwiGlu { alpha: f32, limit: f32 },
}

/// Packed weights of a mixture of experts.
#[derive(Debug)]
pub struct ExpertWeights<'a, M, V> {
    /// `[experts][hidden]`.
    pub router: &'a M,
    /// Bias of the router `[experts]`. With [`ExpertScore::BiasedSoftmax`] it is added to the
    /// logits; otherwise it is added to the scores for the choice, but not to the weights.
    pub bias: Option<&'a V>,
    /// Gate and up `[2 * size][hidden]`, and down `[hidden][size]`, of each expert of the rank.
    pub experts: &'a [(M, M)],
    /// Biases of gate and up `[2 * size]`, and of down `[hidden]`, of each expert of the rank; an
    /// empty list if the experts have no biases. If ranks split an expert, their outputs are added,
    /// so only one of them has the bias of down, and the others have an empty one. Only a backend
    /// that admits such models accepts biases, or an activation other than
    /// [`GatedActivation::Silu`].
    pub biases: &'a [(V, V)],
    pub activation: GatedActivation,
    /// Index of the first of `experts` among all experts.
    pub first: usize,
    /// Expert that computes every row.
    pub shared: Option<SharedExpert<'a, M>>,
    pub choice: ExpertChoice,
}

/// Packed weights of a shared expert.
#[derive(Debug)]
pub struct SharedExpert<'a, M> {
    pub gate_up: &'a M,
    pub down: &'a M,
    /// `[1][hidden]`: the weight of the expert is the sigmoid of the logit; `None`: the weight
    /// is 1.
    pub router: Option<&'a M>,
}

/// Rows that the experts of a step's layers computed, summed over these layers. All ranks know the
/// rows of all experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertLoad {
    /// Layers with experts.
    pub layers: u64,
    /// Experts with rows.
    pub distinct: u64,
    /// Rows of the experts of every rank; a row counts once for each of its experts.
    pub rows: u64,
    /// Number of ranks times the rows of the rank with the most rows.
    pub rows_max: u64,
}

/// Sizes of a rank's mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// Experts of a layer.
    pub count: usize,
    /// Experts that compute each row.
    pub chosen: usize,
    pub hidden: usize,
    /// Width of the intermediate layer of the rank's part of an expert.
    pub size: usize,
    /// Width of the intermediate layer of the rank's part of the shared expert; 0 without one.
    pub shared: usize,
}

/// Low-rank update of a weight matrix: a range of the matrix's output features gets `b · a` added.
#[derive(Clone, Debug, PartialEq)]
pub struct LowRankUpdate {
    /// Rows of `a` and of `b`; at least 1.
    pub rank: usize,
    /// `[rank][in]`.
    pub a: Vec<f32>,
    /// `[rank][output features]`, scale included.
    pub b: Vec<f32>,
    /// First output feature.
    pub first: usize,
}

/// Shape of a weight matrix whose low-rank updates a backend holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LowRankShape {
    /// Input features.
    pub inputs: usize,
    /// Output features of each range with updates of its own, in order: those of Q, K and V, or of
    /// gate and up.
    pub ranges: Vec<usize>,
}

/// Operations of one device. They return no errors: after a device failure or a failure of the
/// tensor-parallel group, results are undefined, and the executor checks the backend for a failure
/// before it uses a result.
///
/// A step (`Self::Step`) is the executor's description of one forward pass: token, position,
/// sequence and block table of each row, and the borrow of the blocks. In each layer,
/// [`Self::store_kv`] stores the keys and values of the step's rows before [`Self::attention`]
/// reads them.
pub trait Backend: Send + 'static {
    /// A packed weight matrix `[out][in]`.
    type Matrix: Send + Sync;
    /// A small f32 vector: the weight of a norm, a bias, or RoPE frequencies.
    type Vector: Send + Sync;
    /// Activations `[rows][width]`.
    type Buffer: Send;
    /// The rows of one forward pass and the KV blocks that the rows may access.
    type Step;
    /// Intermediate values of a mixture of experts, which all layers share.
    type ExpertBuffers: Send;
    /// Low-rank updates of one weight matrix by the adapters in all slots.
    type LowRank: Send + Sync;

    /// Packs a weight matrix.
    fn matrix(&self, source: &dyn RowSource) -> Self::Matrix;
    /// Creates the router of experts, in f32 if the backend has another format for matrices.
    fn router(&self, source: &dyn RowSource) -> Self::Matrix {
        self.matrix(source)
    }
    /// Copies a vector to the device.
    fn vector(&self, values: &[f32]) -> Self::Vector;
    /// Creates a buffer in the backend's type of activations, f32 or bf16.
    fn buffer(&self, rows_max: usize, width: usize) -> Self::Buffer;
    /// Creates a wide buffer: f32, for the residual stream and logits. On a backend with bf16
    /// activations, only operations whose documentation names a wide buffer accept one.
    fn wide_buffer(&self, rows_max: usize, width: usize) -> Self::Buffer {
        self.buffer(rows_max, width)
    }

    /// Creates the intermediate values of [`Self::experts`].
    fn expert_buffers(&self, rows_max: usize, shape: ExpertShape) -> Self::ExpertBuffers;

    /// Creates the intermediate values of [`Self::gated_delta`] with these heads; by default none.
    fn delta_buffer(&self, _rows_max: usize, _shape: StateShape) -> Self::Buffer {
        self.buffer(0, 1)
    }

    /// Creates the low-rank updates of a matrix. All slots are empty.
    fn low_rank(&self, slots: usize, shape: &LowRankShape) -> Self::LowRank;

    /// Returns the shard of the model that this backend computes: the whole model without tensor
    /// parallelism.
    fn shard(&self) -> Shard {
        Shard::WHOLE
    }

    /// Returns the number of token rows of the step.
    fn rows(&self, step: &Self::Step) -> usize;
    /// Returns the number of rows of the step whose logits are sampled.
    fn sampled_rows(&self, step: &Self::Step) -> usize;
    fn kv_layout(&self, step: &Self::Step) -> KvLayout;

    /// Computes `out[row] = table[token of row] * scale`. `out` is wide. `vocabulary` is the number
    /// of tokens of the model.
    ///
    /// With tensor parallelism, a rank's table has only the rows of the rank's
    /// [tokens](Shard::tokens), and `out` gets zeros for other tokens. A following
    /// [`Self::all_reduce`] adds one row and zeros, which needs no rounding.
    ///
    /// Every token must be below `vocabulary`, which admission checks. For other tokens the CPU
    /// backend panics, and the CUDA backend writes zeros.
    fn embed(
        &mut self,
        table: &Self::Matrix,
        vocabulary: usize,
        scale: f32,
        step: &Self::Step,
        out: &mut Self::Buffer,
    );
    /// Computes `out = x / sqrt(mean(x²) + eps) * weight` for each row. `x` is wide.
    fn rms_norm(
        &mut self,
        rows: usize,
        x: &Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    );
    /// Replaces each row of `x`, which is not wide, with `rms_norm(x)`.
    fn rms_norm_in_place(
        &mut self,
        rows: usize,
        x: &mut Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
    );
    /// Computes `residual += x`, then `out = rms_norm(residual)`. `residual` is wide.
    fn add_rms_norm(
        &mut self,
        rows: usize,
        residual: &mut Self::Buffer,
        x: &Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    );
    /// Computes `out[rows][w.out] = x[rows][w.in] · wᵀ`. `out` may be wide.
    fn matmul(&mut self, rows: usize, x: &Self::Buffer, w: &Self::Matrix, out: &mut Self::Buffer);
    /// Computes `x[row] += bias`.
    fn add_bias(&mut self, rows: usize, bias: &Self::Vector, x: &mut Self::Buffer);
    /// Returns whether a row of the step has an adapter. Called at the start of a forward pass.
    fn has_adapters(&self, step: &Self::Step) -> bool;
    /// Computes `out[row] += (x[row] · aᵀ) · bᵀ` for each row and each update of the row's adapter.
    /// `rows` is the number of all rows or of the sampled rows of the step.
    fn add_low_rank(
        &mut self,
        rows: usize,
        x: &Self::Buffer,
        updates: &Self::LowRank,
        step: &Self::Step,
        out: &mut Self::Buffer,
    );
    /// Performs the operations between the QKV GEMM and attention: adds the bias, applies the QK
    /// norm, and applies RoPE in NeoX style (element i is rotated with element i + the number of
    /// frequencies) to queries and keys. Then stores the keys and values of every row in the row's
    /// KV block. Afterwards only the queries in `qkv` are valid.
    fn store_kv(
        &mut self,
        layer: usize,
        shape: HeadShape,
        weights: HeadWeights<'_, Self::Vector>,
        qkv: &mut Self::Buffer,
        step: &mut Self::Step,
    );
    /// Computes causal attention of every row over the KV blocks of its sequence. `out` is
    /// `[rows][query_width]`. `sinks` are the attention sinks: a logit for each query head, which
    /// counts in the denominator of the softmax and has no value.
    fn attention(
        &mut self,
        attention: LayerAttention,
        sinks: Option<&Self::Vector>,
        qkv: &Self::Buffer,
        step: &Self::Step,
        out: &mut Self::Buffer,
    );
    /// Computes `x[row][i] *= sigmoid(gate[row][i])`.
    fn apply_gate(&mut self, rows: usize, gate: &Self::Buffer, x: &mut Self::Buffer);
    /// Computes linear attention (Gated DeltaNet) of every row, and updates the recurrent states of
    /// the step's sequences. A sequence at position 0 starts from zeros.
    ///
    /// `projected` is `[rows][projected_width]`: queries, keys, values and output gates of all
    /// heads. `rates` is `[rows][2 · value_heads]`: `b` of all value heads, then `a`. `out` is
    /// `[rows][value_width]`.
    ///
    /// Queries, keys and values go through the convolution and `silu`. A query or key is divided by
    /// its L2 norm, a query also by `√key_dim`. A value head has the query and key of head
    /// `value head · key_heads / value_heads`, and a state S `[key_dim][value_dim]`. For each row,
    /// in order: `S *= exp(-exp(decay_log) · softplus(a + time_bias))`, then
    /// `S += k ⊗ (sigmoid(b) · (v - k · S))`. The output is `rms_norm(q · S) · norm · silu(gate)`.
    ///
    /// `mixed` are the intermediate values of [`Self::delta_buffer`].
    fn gated_delta(
        &mut self,
        delta: GatedDelta<'_, Self::Vector>,
        projected: &Self::Buffer,
        rates: &Self::Buffer,
        mixed: &mut Self::Buffer,
        step: &mut Self::Step,
        out: &mut Self::Buffer,
    );
    /// Computes `out[row][i]` from the gate value `gate_up[row][i]` and the up value
    /// `gate_up[row][width + i]`. Only experts have [`GatedActivation::ClampedSwiGlu`].
    fn activate(
        &mut self,
        activation: GatedActivation,
        rows: usize,
        gate_up: &Self::Buffer,
        out: &mut Self::Buffer,
    );
    /// Computes a mixture of experts. The router's logits `x · routerᵀ` give the score of each
    /// expert in f32. A row goes to the experts of the greatest scores, the lowest expert or group
    /// among equal ones. The output of an expert is `activation(x · gate_upᵀ) · downᵀ`, with its
    /// biases. `out` is the weighted sum of these outputs in f32, added in a fixed order of the
    /// row's experts, the shared expert last. On CPUs, and on GPUs up to a number of rows, a row's
    /// result does not depend on the other rows.
    fn experts(
        &mut self,
        rows: usize,
        x: &Self::Buffer,
        weights: &ExpertWeights<'_, Self::Matrix, Self::Vector>,
        buffers: &mut Self::ExpertBuffers,
        out: &mut Self::Buffer,
    );
    /// All-reduces (sums) `x` over the ranks of tensor parallelism. `x` may be wide. The ranks'
    /// terms are added in rank order, so the result is bit-equal on all ranks. Does nothing without
    /// tensor parallelism.
    fn all_reduce(&mut self, _rows: usize, _x: &mut Self::Buffer) {
        assert!(self.shard().is_whole(), "a backend with tensor parallelism implements all_reduce");
    }
    /// Copies the rows of `x` whose logits are sampled to `out`, contiguously.
    fn gather_sampled(&mut self, x: &Self::Buffer, step: &Self::Step, out: &mut Self::Buffer);

    // GEMMs with epilogues, which add the updates of the rows' adapters to the GEMM, if any. A
    // device with fused kernels does not write the intermediate buffer, so its contents are
    // undefined afterwards.

    /// Computes `qkv = x · wᵀ` for all rows of the step, then performs [`Self::store_kv`].
    fn project_heads(
        &mut self,
        layer: usize,
        shape: HeadShape,
        (x, w, updates): (&Self::Buffer, &Self::Matrix, Option<&Self::LowRank>),
        weights: HeadWeights<'_, Self::Vector>,
        qkv: &mut Self::Buffer,
        step: &mut Self::Step,
    ) {
        self.matmul(self.rows(step), x, w, qkv);
        if let Some(updates) = updates {
            self.add_low_rank(self.rows(step), x, updates, step, qkv);
        }
        self.store_kv(layer, shape, weights, qkv, step);
    }

    /// Computes `residual += x · wᵀ + bias`, then `out = rms_norm(residual)`. `delta` is the
    /// intermediate buffer. Only GEMMs may read `out`. `rows` is the number of all rows or of the
    /// sampled rows of the step.
    ///
    /// With tensor parallelism, a rank's GEMM gives a partial sum. [`Self::all_reduce`] sums it
    /// over the ranks before it is added to the residual stream, so the residual stream is equal on
    /// all ranks. Each rank has the whole bias.
    fn project_onto_residual(
        &mut self,
        rows: usize,
        (x, w, bias): (&Self::Buffer, &Self::Matrix, Option<&Self::Vector>),
        adapters: Option<(&Self::LowRank, &Self::Step)>,
        (delta, residual): (&mut Self::Buffer, &mut Self::Buffer),
        (norm, eps): (&Self::Vector, f32),
        out: &mut Self::Buffer,
    ) {
        self.matmul(rows, x, w, delta);
        if let Some((updates, step)) = adapters {
            self.add_low_rank(rows, x, updates, step, delta);
        }
        self.all_reduce(rows, delta);
        if let Some(bias) = bias {
            self.add_bias(rows, bias, delta);
        }
        self.add_rms_norm(rows, residual, delta, norm, eps, out);
    }

    /// Computes `gate_up = x · wᵀ`, then `out` with [`Self::activate`]. `gate_up` is the
    /// intermediate buffer. `rows` is the number of all rows or of the sampled rows of the step.
    fn project_gated(
        &mut self,
        activation: GatedActivation,
        rows: usize,
        (x, w): (&Self::Buffer, &Self::Matrix),
        adapters: Option<(&Self::LowRank, &Self::Step)>,
        gate_up: &mut Self::Buffer,
        out: &mut Self::Buffer,
    ) {
        self.matmul(rows, x, w, gate_up);
        if let Some((updates, step)) = adapters {
            self.add_low_rank(rows, x, updates, step, gate_up);
        }
        self.activate(activation, rows, gate_up, out);
    }
    /// Computes [`Self::experts`] of `normed`, adds the result to the residual stream, and replaces
    /// `normed` with `rms_norm(residual)`. `delta` is an intermediate buffer. `rows` is the number
    /// of all rows or of the sampled rows of the step.
    fn experts_onto_residual(
        &mut self,
        rows: usize,
        normed: &mut Self::Buffer,
        weights: &ExpertWeights<'_, Self::Matrix, Self::Vector>,
        (buffers, delta): (&mut Self::ExpertBuffers, &mut Self::Buffer),
        residual: &mut Self::Buffer,
        (norm, eps): (&Self::Vector, f32),
    ) {
        self.experts(rows, normed, weights, buffers, delta);
        self.all_reduce(rows, delta);
        self.add_rms_norm(rows, residual, delta, norm, eps, normed);
    }
}
