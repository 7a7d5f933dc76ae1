//! Backend that runs on every CPU.
//!
//! Each operation is one file or folder with a plain f32 `reference` and the fast code, which is
//! chosen at run time ([`Isa`]). The backend guarantees:
//! * at every level and in every format a row's result does not depend on the other rows, on the
//!   thread count, or on prefill chunk boundaries;
//! * levels that have a fused multiply-add (all but `Portable` on machines without FMA) are
//!   bit-equal to the reference, except bf16 weights at `Amx` and `Avx512Bf16` and bf16 KV at
//!   `Avx512Bf16`, which round differently.
//!
//! Buffers, matrices and steps that do not match each other are bugs of the caller and panic.
//! Invalid input from outside (block ids, logits, sampling parameters) is returned as an error.

pub mod affinity;
mod aligned;
mod arithmetic;
mod attention;
mod bias;
mod buffer;
pub mod collective;
mod delta;
mod disjoint_slice;
mod embed;
mod experts;
mod gated;
mod isa;
mod low_rank;
mod matmul;
mod norm;
mod rope;
mod sample;
mod step;
#[cfg(test)]
pub(crate) mod testing;
pub mod threads;
#[cfg(target_arch = "x86_64")]
mod vectors;

use std::{
    io, mem,
    sync::{Mutex, PoisonError},
};

pub use buffer::{CpuBuffer, CpuVector};
pub use collective::{CpuGroup, CpuGroupError};
pub use experts::ExpertScratch;
pub use isa::Isa;
pub use matmul::CpuMatrix;
pub use sample::{SampleError, SampleRow, sample};
pub use step::{CpuStep, StepError, StepSequence};

use self::{aligned::Slab, isa::Level, threads::ThreadPool};
use crate::{
    backend::{
        Backend, ExpertLoad, ExpertShape, ExpertWeights, GatedActivation, GatedDelta, HeadShape,
        HeadWeights, LayerAttention, LowRankShape, LowRankUpdate, NormSpan, RowSource,
    },
    layout::{KvLayout, WeightFormat},
    sampling::SampledToken,
    shard::Shard,
};

/// Options of a CPU backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// Format of weights. Activations are f32, and are rounded to this format as inputs of GEMMs.
    pub weights: WeightFormat,
    /// Threads of one forward pass, the calling thread included; 1 to [`threads::THREADS_MAX`].
    pub threads: usize,
    pub isa: Isa,
}

/// Error of creating a CPU backend.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    #[error("cannot use isa {isa}: this machine lacks {}", missing.join(", "))]
    MissingFeatures { isa: Isa, missing: Vec<&'static str> },
    #[error("invalid threads: {threads}; expected 1 to {}", threads::THREADS_MAX)]
    BadThreads { threads: usize },
    #[error(
        "invalid threads: {threads}; expected at most {cpus}, the number of CPUs to pin threads to"
    )]
    TooFewCpus { threads: usize, cpus: usize },
    #[error("cannot start a thread: {0}")]
    Spawn(#[from] io::Error),
}

/// Updates of one weight matrix by the adapters in all slots: `[slot][update]`.
pub type CpuLowRank = Vec<Vec<LowRankUpdate>>;

/// CPU backend: runs forward passes on the calling thread and a pool of worker threads.
pub struct CpuBackend {
    weights: WeightFormat,
    level: Level,
    /// Locked while weights are packed; operations have exclusive access.
    pool: Mutex<ThreadPool>,
    /// Memory of small packed matrices.
    slab: Mutex<Slab>,
    gemms: matmul::MatmulScratch,
    tiles: attention::AttentionScratch,
    /// Recurrent states of a task, one per thread.
    states: Vec<Mutex<delta::DeltaScratch>>,
    /// Sampling memory, one per thread.
    draws: Vec<Mutex<sample::SampleScratch>>,
    /// The shard of a model that the backend packs and computes.
    shard: Shard,
    /// `None`: the backend computes whole models, or only packs weights.
    group: Option<CpuGroup>,
    /// Logits gathered from all ranks of the group.
    gathered: Vec<f32>,
    /// Load of the experts since it was last taken.
    expert_load: ExpertLoad,
}

impl CpuBackend {
    pub fn new(options: CpuOptions) -> Result<Self, CpuError> {
        Self::on(options, &[])
    }

    /// Creates a backend whose workers are pinned to one CPU each. `cpus[0]` is left to the calling
    /// thread ([`affinity::confine`]), `cpus[1]` is the first worker's, and so on. An empty list
    /// pins nothing.
    pub fn on(options: CpuOptions, cpus: &[u32]) -> Result<Self, CpuError> {
        let CpuOptions { weights, threads, isa } = options;
        let weights = match weights {
            // There are no FP8 kernels.
            WeightFormat::Fp8 => WeightFormat::Bf16,
            weights => weights,
        };
        if threads == 0 || threads > threads::THREADS_MAX {
            return Err(CpuError::BadThreads { threads });
        }
        if !cpus.is_empty() && cpus.len() < threads {
            return Err(CpuError::TooFewCpus { threads, cpus: cpus.len() });
        }
        let level =
            Level::find(isa).map_err(|missing| CpuError::MissingFeatures { isa, missing })?;
        let pool = Mutex::new(ThreadPool::on(threads, "baton-cpu", cpus)?);
        Ok(Self {
            weights,
            level,
            pool,
            slab: Mutex::default(),
            gemms: matmul::MatmulScratch::default(),
            tiles: attention::AttentionScratch::new(threads),
            states: (0..threads).map(|_| Mutex::default()).collect(),
            draws: (0..threads).map(|_| Mutex::default()).collect(),
            shard: Shard::WHOLE,
            group: None,
            gathered: Vec::new(),
            expert_load: ExpertLoad::default(),
        })
    }

    /// Returns a backend that packs the same weights on the calling thread, while this backend
    /// computes.
    pub fn packer(&self) -> Result<Self, CpuError> {
        let pool = Mutex::new(ThreadPool::on(1, "baton-pack", &[])?);
        Ok(Self {
            weights: self.weights,
            level: self.level,
            pool,
            slab: Mutex::default(),
            gemms: matmul::MatmulScratch::default(),
            tiles: attention::AttentionScratch::new(1),
            states: Vec::new(),
            draws: Vec::new(),
            shard: self.shard,
            group: None,
            gathered: Vec::new(),
            expert_load: ExpertLoad::default(),
        })
    }

    /// Turns this backend into one rank of a group, which computes its shard of a model.
    pub fn in_group(self, group: CpuGroup) -> Self {
        Self { shard: group.shard(), group: Some(group), ..self }
    }

    pub fn weights(&self) -> WeightFormat {
        self.weights
    }

    /// Returns the name of the instruction set in use, for logs: `amx`, `avx512`, `avx2`, …
    pub fn isa_name(&self) -> &'static str {
        self.level.name()
    }

    /// Samples a token for each of the first `rows.len()` rows of `logits`, rows in parallel.
    pub fn sample(
        &mut self,
        logits: &CpuBuffer,
        rows: &[SampleRow<'_>],
    ) -> Vec<Result<SampledToken, SampleError>> {
        let pool = self.pool.get_mut().unwrap_or_else(PoisonError::into_inner);
        sample::sample_rows(self.level, pool, &self.draws, |row| logits.row(row), rows)
    }

    /// Returns the load of the experts since the last call.
    pub fn take_expert_load(&mut self) -> ExpertLoad {
        mem::take(&mut self.expert_load)
    }

    fn pack(&self, format: WeightFormat, source: &dyn RowSource) -> CpuMatrix {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        let mut slab = self.slab.lock().unwrap_or_else(PoisonError::into_inner);
        matmul::pack(&mut pool, &mut slab, format, source)
    }

    /// Applies the QK norm to `qkv`.
    fn norm_heads(
        &mut self,
        shape: HeadShape,
        (query, key): (&[f32], &[f32]),
        &HeadWeights { norm_span, eps, .. }: &HeadWeights<'_, CpuVector>,
        qkv: &mut [f32],
    ) {
        let level = self.level;
        let (query_width, key_width) = match norm_span {
            NormSpan::Head => (shape.head_dim, shape.head_dim),
            NormSpan::Projection => (shape.query_width(), shape.kv_heads * shape.head_dim),
        };
        assert!(
            query.len() == query_width && key.len() == key_width,
            "weights of QK norms are as wide as their span"
        );
        if norm_span == NormSpan::Head {
            return norm::norm_heads(level, self.pool(), shape, query, key, eps, qkv);
        }
        let mut squares = norm::projection_squares(shape, qkv);
        if let Some(group) = &mut self.group {
            // The group keeps its failure, and the executor checks for it.
            let _ = group.all_reduce(&mut squares);
        }
        let ranks = self.shard.rank_count();
        norm::norm_projections(shape, (query, key), &squares, ranks, eps, qkv);
    }

    fn pool(&mut self) -> &mut ThreadPool {
        // A panic during weight packing leaves no unfinished parallel region, so the pool is
        // usable.
        self.pool.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backend for CpuBackend {
    type Matrix = CpuMatrix;
    type Vector = CpuVector;
    type Buffer = CpuBuffer;
    type Step = CpuStep;
    type ExpertBuffers = ExpertScratch;
    type LowRank = CpuLowRank;

    fn matrix(&self, source: &dyn RowSource) -> CpuMatrix {
        self.pack(self.weights, source)
    }

    fn router(&self, source: &dyn RowSource) -> CpuMatrix {
        self.pack(WeightFormat::F32, source)
    }

    fn vector(&self, values: &[f32]) -> CpuVector {
        CpuVector::new(values)
    }

    fn buffer(&self, rows_max: usize, width: usize) -> CpuBuffer {
        CpuBuffer::zeroed(rows_max, width)
    }

    fn expert_buffers(&self, _rows_max: usize, _shape: ExpertShape) -> ExpertScratch {
        ExpertScratch::default()
    }

    fn shard(&self) -> Shard {
        self.shard
    }

    fn rows(&self, step: &CpuStep) -> usize {
        step.rows()
    }

    fn sampled_rows(&self, step: &CpuStep) -> usize {
        step.sampled().len()
    }

    fn kv_layout(&self, step: &CpuStep) -> KvLayout {
        step.layout()
    }

    fn embed(
        &mut self,
        table: &CpuMatrix,
        vocabulary: usize,
        scale: f32,
        step: &CpuStep,
        out: &mut CpuBuffer,
    ) {
        assert_eq!(out.width(), table.cols(), "embed: a row of the table is a row of the buffer");
        let (shard, out) = (self.shard, out.rows_mut(step.rows()));
        embed::embed(self.pool(), (table, scale), shard, vocabulary, &step.tokens, out);
    }

    fn rms_norm(
        &mut self,
        rows: usize,
        x: &CpuBuffer,
        weight: &CpuVector,
        eps: f32,
        out: &mut CpuBuffer,
    ) {
        let width = weight.values().len();
        assert!(x.width() == width && out.width() == width, "rms_norm: widths are equal");
        let (level, out) = (self.level, out.rows_mut(rows));
        norm::rms_norm(level, self.pool(), x.rows(rows), weight.values(), eps, out);
    }

    fn rms_norm_in_place(&mut self, rows: usize, x: &mut CpuBuffer, weight: &CpuVector, eps: f32) {
        assert_eq!(x.width(), weight.values().len(), "rms_norm_in_place: widths are equal");
        let (level, x) = (self.level, x.rows_mut(rows));
        norm::rms_norm_in_place(level, self.pool(), weight.values(), eps, x);
    }

    fn add_rms_norm(
        &mut self,
        rows: usize,
        residual: &mut CpuBuffer,
        x: &CpuBuffer,
        weight: &CpuVector,
        eps: f32,
        out: &mut CpuBuffer,
    ) {
        let width = weight.values().len();
        assert!(
            residual.width() == width && x.width() == width && out.width() == width,
            "add_rms_norm: widths are equal"
        );
        let (level, residual, out) = (self.level, residual.rows_mut(rows), out.rows_mut(rows));
        norm::add_rms_norm(level, self.pool(), residual, x.rows(rows), weight.values(), eps, out);
    }

    fn matmul(&mut self, rows: usize, x: &CpuBuffer, w: &CpuMatrix, out: &mut CpuBuffer) {
        assert_eq!(x.width(), w.cols(), "matmul: the input is as wide as the matrix");
        assert_eq!(out.width(), w.rows(), "matmul: the output is as wide as the matrix is high");
        let (x, out) = (x.rows(rows), out.rows_mut(rows));
        let pool = self.pool.get_mut().unwrap_or_else(PoisonError::into_inner);
        matmul::matmul(self.level, pool, &mut self.gemms, x, w, out);
    }

    fn add_bias(&mut self, rows: usize, bias: &CpuVector, x: &mut CpuBuffer) {
        assert_eq!(bias.values().len(), x.width(), "add_bias: the bias is as wide as a row");
        let (level, x) = (self.level, x.rows_mut(rows));
        bias::add_bias(level, self.pool(), bias.values(), x);
    }

    fn low_rank(&self, slots: usize, _shape: &LowRankShape) -> CpuLowRank {
        vec![Vec::new(); slots]
    }

    fn has_adapters(&self, step: &CpuStep) -> bool {
        step.adapters.iter().any(Option::is_some)
    }

    fn add_low_rank(
        &mut self,
        rows: usize,
        x: &CpuBuffer,
        slots: &CpuLowRank,
        step: &CpuStep,
        out: &mut CpuBuffer,
    ) {
        let is_whole = rows == step.rows();
        let updates_of = |row: usize| {
            let row = if is_whole { row } else { step.sampled()[row] };
            step.adapters[row].map_or(&[][..], |slot| &slots[slot as usize])
        };
        let (x_width, out_width) = (x.width(), out.width());
        let (level, out) = (self.level, (out.rows_mut(rows), out_width));
        low_rank::add_low_rank(level, self.pool(), updates_of, (x.rows(rows), x_width), out);
    }

    fn store_kv(
        &mut self,
        layer: usize,
        shape: HeadShape,
        weights: HeadWeights<'_, CpuVector>,
        qkv: &mut CpuBuffer,
        step: &mut CpuStep,
    ) {
        check_heads(shape, qkv, step);
        let frequencies = weights.frequencies.values();
        assert!(frequencies.len() * 2 <= shape.head_dim, "at most one frequency per pair");
        let level = self.level;
        let qkv = qkv.rows_mut(step.rows());
        if let Some(bias) = weights.bias {
            assert_eq!(bias.values().len(), shape.qkv_width(), "the bias is as wide as a row");
            bias::add_bias(level, self.pool(), bias.values(), qkv);
        }
        if let Some((query, key)) = weights.norms {
            self.norm_heads(shape, (query.values(), key.values()), &weights, qkv);
        }
        rope::rope_store_kv(level, self.pool(), layer, shape, frequencies, qkv, step);
    }

    fn attention(
        &mut self,
        attention: LayerAttention,
        sinks: Option<&CpuVector>,
        qkv: &CpuBuffer,
        step: &CpuStep,
        out: &mut CpuBuffer,
    ) {
        check_heads(attention.heads, qkv, step);
        assert_eq!(
            out.width(),
            attention.heads.query_width(),
            "attention: the output holds all queries"
        );
        let sinks = sinks.map(CpuVector::values);
        assert!(
            sinks.is_none_or(|sinks| sinks.len() == attention.heads.query_heads),
            "attention: each query head has a sink"
        );
        let (qkv, out) = (qkv.rows(step.rows()), out.rows_mut(step.rows()));
        let pool = self.pool.get_mut().unwrap_or_else(PoisonError::into_inner);
        let scratch = &mut self.tiles;
        let input = (attention, sinks, qkv);
        attention::attention(self.level, pool, scratch, input, step, out);
    }

    fn apply_gate(&mut self, rows: usize, gate: &CpuBuffer, x: &mut CpuBuffer) {
        assert_eq!(gate.width(), x.width(), "apply_gate: widths are equal");
        let (level, width, x) = (self.level, x.width(), x.rows_mut(rows));
        gated::apply_gate(level, self.pool(), width, gate.rows(rows), x);
    }

    fn gated_delta(
        &mut self,
        delta: GatedDelta<'_, CpuVector>,
        projected: &CpuBuffer,
        rates: &CpuBuffer,
        _mixed: &mut CpuBuffer,
        step: &mut CpuStep,
        out: &mut CpuBuffer,
    ) {
        check_delta(&delta, [projected, rates, out], step);
        let (projected, rates) = (projected.rows(step.rows()), rates.rows(step.rows()));
        let input = delta::DeltaInput { delta, projected, rates };
        let pool = self.pool.get_mut().unwrap_or_else(PoisonError::into_inner);
        let out = out.rows_mut(step.rows());
        delta::gated_delta(self.level, pool, &self.states, &input, step, out);
    }

    fn activate(
        &mut self,
        activation: GatedActivation,
        rows: usize,
        gate_up: &CpuBuffer,
        out: &mut CpuBuffer,
    ) {
        let width = out.width();
        assert_eq!(gate_up.width(), 2 * width, "activate: gate and up are as wide as the output");
        let (level, out) = (self.level, out.rows_mut(rows));
        gated::activate(level, self.pool(), width, (activation, gate_up.rows(rows)), out);
    }

    fn experts(
        &mut self,
        rows: usize,
        x: &CpuBuffer,
        weights: &ExpertWeights<'_, CpuMatrix, CpuVector>,
        buffers: &mut ExpertScratch,
        out: &mut CpuBuffer,
    ) {
        let width = weights.router.cols();
        assert!(x.width() == width && out.width() == width, "experts: widths are equal");
        let pool = self.pool.get_mut().unwrap_or_else(PoisonError::into_inner);
        let scratch = (&mut *buffers, &mut self.gemms);
        experts::experts(self.level, pool, scratch, x.rows(rows), weights, out.rows_mut(rows));
        let ExpertLoad { layers, distinct, rows, rows_max } = buffers.load(self.shard);
        self.expert_load.layers += layers;
        self.expert_load.distinct += distinct;
        self.expert_load.rows += rows;
        self.expert_load.rows_max += rows_max;
    }

    fn all_reduce(&mut self, rows: usize, x: &mut CpuBuffer) {
        if let Some(group) = &mut self.group {
            // The group keeps its failure, and the executor checks for it.
            let _ = group.all_reduce(x.rows_mut(rows));
        }
    }

    fn gather_sampled(&mut self, x: &CpuBuffer, step: &CpuStep, out: &mut CpuBuffer) {
        assert_eq!(x.width(), out.width(), "gather_sampled: widths are equal");
        let rows = out.rows_mut(step.sampled().len()).chunks_exact_mut(x.width());
        for (out, &row) in rows.zip(step.sampled()) {
            out.copy_from_slice(x.row(row));
        }
    }
}

/// Panics when the model's heads do not match its KV layout, which is a bug and never a request's
/// fault.
fn check_heads(shape: HeadShape, qkv: &CpuBuffer, step: &CpuStep) {
    let layout = step.layout();
    assert!(
        shape.kv_heads > 0
            && shape.query_heads.is_multiple_of(shape.kv_heads)
            && shape.head_dim > 0
            && shape.head_dim.is_multiple_of(2),
        "heads {shape:?} are no attention layer"
    );
    assert_eq!(qkv.width(), shape.qkv_width(), "a fused row holds queries, keys and values");
    assert!(
        layout.kv_head_count == shape.kv_heads && layout.head_dim == shape.head_dim,
        "the arena's blocks ({layout}) hold the layer's heads {shape:?}"
    );
}

/// Panics when the model's linear attention does not match its buffers, its weights and the states
/// of its sequences, which is a bug and never a request's fault.
fn check_delta(
    delta: &GatedDelta<'_, CpuVector>,
    [projected, rates, out]: [&CpuBuffer; 3],
    step: &CpuStep,
) {
    let shape = delta.shape;
    let (lane, lanes) = (step.state_places().lane, step.layout().kv_head_count);
    assert!(
        delta.layer < shape.layer_count && lane == shape.part(lanes) && lane.key_heads > 0,
        "the sequences' states ({lane} in each of {lanes} lanes) are those of {shape}"
    );
    assert!(shape.value_heads.is_multiple_of(shape.key_heads), "key heads divide the value heads");
    assert_eq!(
        [projected, rates, out].map(CpuBuffer::width),
        [shape.projected_width(), 2 * shape.value_heads, shape.value_width()],
        "gated_delta: buffers have the widths of the heads"
    );
    assert_eq!(
        [delta.conv, delta.decay_log, delta.time_bias, delta.norm].map(|it| it.values().len()),
        [
            shape.channels() * (shape.conv_taps + 1),
            shape.value_heads,
            shape.value_heads,
            shape.value_dim
        ],
        "gated_delta: weights have the sizes of the heads"
    );
}
