//! Packs a model's weights and runs its forward pass. The code follows Llama; comments name the differences
//! of other architectures.

use std::num::NonZeroUsize;

use kernels::{
    Backend, Packer, RowSource, Shard,
    backend::{HeadShape, HeadWeights},
};

use crate::{
    checkpoint::Checkpoint,
    config::ModelConfig,
    error::ModelError,
    fingerprint::RowHashes,
    matrix::{MatrixSource, NotFinite, StackedRows},
    weight::{LayerWeight, Weight, WeightPart},
};

/// Loaded model, or one rank's shard of it: packed weights and the activations of one step. The backend
/// performs the collectives of the ranks.
pub struct Llama<B: Backend> {
    config: ModelConfig,
    shard: Shard,
    limits: Limits,
    /// Heads of the rank.
    heads: HeadShape,
    rope_frequencies: B::Vector,
    /// `None` while other weights are packed in their place.
    weights: Option<LlamaWeights<B::Matrix, B::Vector>>,
    activations: Activations<B>,
}

/// Packed weights of a model, or of one rank's shard of it.
pub struct LlamaWeights<M, V> {
    /// `[tokens of the rank][hidden]`.
    embedding: M,
    layers: Vec<Layer<M, V>>,
    output_norm: V,
    /// Output projection, of the shape of `embedding`; `None` when it is the embedding.
    output: Option<M>,
}

struct Layer<M, V> {
    attention_norm: V,
    /// Queries, keys, values: `[qkv_width][hidden]`.
    qkv: M,
    /// Bias of `qkv`, `[qkv_width]`: Qwen2.
    qkv_bias: Option<V>,
    /// Norms of query heads and key heads: Qwen3.
    head_norms: Option<HeadNorms<V>>,
    /// Size of the sliding window in tokens: Mistral, and some layers of Qwen.
    window: Option<NonZeroUsize>,
    /// `[hidden][query_width]`.
    attention_output: M,
    ffn_norm: V,
    /// Gate, then up: `[2 * ffn][hidden]`.
    gate_up: M,
    /// `[hidden][ffn]`.
    down: M,
}

struct HeadNorms<V> {
    query: V,
    key: V,
}

/// Activations, reused by every layer of every step.
struct Activations<B: Backend> {
    /// The residual stream `[rows][hidden]`.
    residual: B::Buffer,
    /// Normalized input of attention or feed-forward `[rows][hidden]`.
    normed: B::Buffer,
    /// `[rows][qkv_width]`.
    qkv: B::Buffer,
    /// `[rows][query_width]`.
    attended: B::Buffer,
    /// Output of attention or feed-forward that is added to the residual stream `[rows][hidden]`.
    delta: B::Buffer,
    /// `[rows][2 * ffn]`.
    gate_up: B::Buffer,
    /// `[rows][ffn]`.
    activated: B::Buffer,
    /// Attention output of the sampled rows in the last layer `[sampled_rows][query_width]`.
    sampled_attended: B::Buffer,
    /// Residual stream of the sampled rows in the last layer `[sampled_rows][hidden]`.
    sampled_residual: B::Buffer,
    /// `[sampled_rows][vocab]`.
    logits: B::Buffer,
}

/// Limits of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum token rows of a forward pass.
    pub rows_max: usize,
    /// Maximum rows of a forward pass that sample.
    pub sampled_max: usize,
}

/// Progress of loading, in weight elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    pub parameters_done: u64,
    pub parameters_total: u64,
}

impl<M, V> LlamaWeights<M, V> {
    /// Packs every weight, or the part in [`Packer::pack_shard`]. Calls `progress` after every matrix and vector.
    pub fn pack<P: Packer<Matrix = M, Vector = V>>(
        checkpoint: &Checkpoint,
        packer: &P,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, ModelError> {
        let config = checkpoint.config();
        let shard = packer.pack_shard();
        config.check_shard(shard)?;
        let mut packer = CheckpointPacker {
            checkpoint,
            packer,
            shard,
            parameters_done: 0,
            parameters_total: config.parameter_count_of(shard),
            progress,
        };
        Self::in_order(config, &mut packer)
    }

    /// Makes every matrix and vector, in memory order.
    pub(crate) fn in_order<S: PackedSource<Matrix = M, Vector = V>>(
        config: &ModelConfig,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let embedding = source.matrix(&[Weight::Embedding])?;
        let layers = (0..config.layer_count)
            .map(|layer| {
                let weight = |weight| Weight::Layer(layer, weight);
                Ok(Layer {
                    attention_norm: source.vector(&[weight(LayerWeight::AttentionNorm)])?,
                    qkv: source.matrix(&[
                        weight(LayerWeight::Query),
                        weight(LayerWeight::Key),
                        weight(LayerWeight::Value),
                    ])?,
                    qkv_bias: match config.architecture.has_qkv_bias() {
                        false => None,
                        true => Some(source.vector(&[
                            weight(LayerWeight::QueryBias),
                            weight(LayerWeight::KeyBias),
                            weight(LayerWeight::ValueBias),
                        ])?),
                    },
                    head_norms: match config.architecture.has_head_norms() {
                        false => None,
                        true => Some(HeadNorms {
                            query: source.vector(&[weight(LayerWeight::QueryNorm)])?,
                            key: source.vector(&[weight(LayerWeight::KeyNorm)])?,
                        }),
                    },
                    window: config.window(layer),
                    attention_output: source.matrix(&[weight(LayerWeight::AttentionOutput)])?,
                    ffn_norm: source.vector(&[weight(LayerWeight::FfnNorm)])?,
                    gate_up: source
                        .matrix(&[weight(LayerWeight::Gate), weight(LayerWeight::Up)])?,
                    down: source.matrix(&[weight(LayerWeight::Down)])?,
                })
            })
            .collect::<Result<Vec<_>, S::Error>>()?;
        let output_norm = source.vector(&[Weight::OutputNorm])?;
        let output = match config.tied_output {
            true => None,
            false => Some(source.matrix(&[Weight::Output])?),
        };
        Ok(Self { embedding, layers, output_norm, output })
    }
}

/// Makes the packed matrices and vectors of a model.
pub(crate) trait PackedSource {
    type Matrix;
    type Vector;
    type Error;

    /// Stacks the rank's parts of `weights` by rows.
    fn matrix(&mut self, weights: &[Weight]) -> Result<Self::Matrix, Self::Error>;

    /// Concatenates the rank's parts of `weights`.
    fn vector(&mut self, weights: &[Weight]) -> Result<Self::Vector, Self::Error>;
}

impl<B: Backend> Llama<B> {
    /// Packs the weights as [`LlamaWeights::pack`] does, and allocates the activations of the largest step.
    pub fn load(
        checkpoint: &Checkpoint,
        backend: &B,
        limits: Limits,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, ModelError> {
        let config = checkpoint.config().clone();
        let shard = backend.shard();
        let weights = LlamaWeights::pack(checkpoint, backend, progress)?;
        let heads = config.head_shape_of(shard);
        let ffn_size = shard.part(config.ffn_size).len();

        let rows = |width| backend.buffer(limits.rows_max, width);
        let activations = Activations {
            residual: backend.wide_buffer(limits.rows_max, config.hidden_size),
            normed: rows(config.hidden_size),
            qkv: rows(heads.qkv_width()),
            attended: rows(heads.query_width()),
            delta: rows(config.hidden_size),
            gate_up: rows(2 * ffn_size),
            activated: rows(ffn_size),
            sampled_attended: backend.buffer(limits.sampled_max, heads.query_width()),
            sampled_residual: backend.wide_buffer(limits.sampled_max, config.hidden_size),
            logits: backend.wide_buffer(limits.sampled_max, shard.tokens(config.vocab_size).len()),
        };
        Ok(Self {
            rope_frequencies: backend.vector(&config.rope_frequencies()),
            config,
            shard,
            limits,
            heads,
            weights: Some(weights),
            activations,
        })
    }

    /// Replaces the weights with weights packed from a checkpoint of the same configuration. Returns the old weights.
    pub fn replace_weights(
        &mut self,
        weights: LlamaWeights<B::Matrix, B::Vector>,
    ) -> Option<LlamaWeights<B::Matrix, B::Vector>> {
        assert_eq!(weights.layers.len(), self.config.layer_count, "one configuration");
        self.weights.replace(weights)
    }

    /// Takes the weights out of the model. No forward pass may run before [`Self::replace_weights`].
    pub fn take_weights(&mut self) -> Option<LlamaWeights<B::Matrix, B::Vector>> {
        self.weights.take()
    }

    pub fn has_weights(&self) -> bool {
        self.weights.is_some()
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the shard of the model that this value holds.
    pub fn shard(&self) -> Shard {
        self.shard
    }

    /// Returns the logits of the last forward pass or its replay: `[sampled_rows][vocab]`, on a rank
    /// only the columns of its [vocabulary shard](Shard::tokens).
    pub fn logits(&self) -> &B::Buffer {
        &self.activations.logits
    }

    /// Computes one step: stores the KV of its rows in their blocks and returns the logits
    /// `[sampled_rows][vocab]`, in the order of the step's sampled rows; on a rank only the
    /// columns of its [vocabulary shard](Shard::tokens).
    ///
    /// # Panics
    /// When the model has no weights, the step exceeds the limits, or its blocks have another layout than this model's KV. All
    /// are bugs of the executor.
    pub fn forward(&mut self, backend: &mut B, step: &mut B::Step) -> &B::Buffer {
        let Self { config, shard, limits, heads, weights, activations, rope_frequencies } = self;
        let weights = weights.as_ref().expect("no forward pass runs without weights");
        let (heads, eps, scale) = (*heads, config.rms_eps, config.attention_scale());
        let Activations {
            residual,
            normed,
            qkv,
            attended,
            delta,
            gate_up,
            activated,
            sampled_attended,
            sampled_residual,
            logits,
        } = activations;
        let rows = backend.rows(step);
        let sampled_rows = backend.sampled_rows(step);
        let layout = backend.kv_layout(step);
        assert!(rows <= limits.rows_max, "{rows} rows, at most {}", limits.rows_max);
        assert!(
            sampled_rows <= limits.sampled_max,
            "{sampled_rows} sampled rows, at most {}",
            limits.sampled_max
        );
        assert_eq!(layout, config.kv_layout_of(layout.dtype, *shard));

        backend.embed(&weights.embedding, config.vocab_size, step, residual);
        // In f32, although rows in bf16 would be exact too: this needs no second buffer, and a token's row is small.
        backend.all_reduce(rows, residual);
        let first_norm = &weights.layers.first().expect("a model has layers").attention_norm;
        backend.rms_norm(rows, residual, first_norm, eps, normed);
        for (index, layer) in weights.layers.iter().enumerate() {
            let head_weights = HeadWeights {
                bias: layer.qkv_bias.as_ref(),
                norms: layer.head_norms.as_ref().map(|norms| (&norms.query, &norms.key)),
                eps,
            };
            let frequencies = &*rope_frequencies;
            let normed_qkv = (&*normed, &layer.qkv);
            backend.project_heads(index, heads, normed_qkv, head_weights, frequencies, qkv, step);
            let next = weights.layers.get(index + 1);
            // A prefill chunk that does not end its prompt only stores its KV.
            if next.is_none() && sampled_rows == 0 {
                return logits;
            }
            backend.attention(index, heads, scale, layer.window, qkv, step, attended);
            let (mut rows, mut attended, mut residual) = (rows, &*attended, &mut *residual);
            if next.is_none() && sampled_rows < rows {
                // After the last attention, only the sampled rows are needed.
                backend.gather_sampled(attended, step, sampled_attended);
                backend.gather_sampled(residual, step, sampled_residual);
                (rows, attended) = (sampled_rows, &*sampled_attended);
                residual = &mut *sampled_residual;
            }
            let product = (attended, &layer.attention_output);
            let norm = (&layer.ffn_norm, eps);
            backend.project_onto_residual(rows, product, delta, residual, norm, normed);

            backend.project_gated(rows, (normed, &layer.gate_up), gate_up, activated);
            let norm = (next.map_or(&weights.output_norm, |next| &next.attention_norm), eps);
            let product = (&*activated, &layer.down);
            backend.project_onto_residual(rows, product, delta, residual, norm, normed);
        }
        let output = weights.output.as_ref().unwrap_or(&weights.embedding);
        backend.matmul(sampled_rows, normed, output, logits);
        logits
    }
}

/// Packs the weights of a checkpoint and counts their parameters.
struct CheckpointPacker<'a, P> {
    checkpoint: &'a Checkpoint,
    packer: &'a P,
    shard: Shard,
    parameters_done: u64,
    parameters_total: u64,
    progress: &'a mut dyn FnMut(LoadProgress),
}

impl<P: Packer> PackedSource for CheckpointPacker<'_, P> {
    type Matrix = P::Matrix;
    type Vector = P::Vector;
    type Error = ModelError;

    fn matrix(&mut self, weights: &[Weight]) -> Result<P::Matrix, ModelError> {
        let parts =
            weights.iter().map(|&weight| self.part(weight)).collect::<Result<Vec<_>, _>>()?;
        self.pack(weights, parts)
    }

    fn vector(&mut self, weights: &[Weight]) -> Result<P::Vector, ModelError> {
        let mut values = Vec::new();
        for &weight in weights {
            let part = weight.part(self.checkpoint.config(), self.shard).cols;
            values.extend_from_slice(&self.checkpoint.vector(weight)?[part]);
        }
        self.count(values.len() as u64);
        Ok(self.packer.pack_vector(&values))
    }
}

impl<'a, P: Packer> CheckpointPacker<'a, P> {
    /// Returns the rank's part of `weight`.
    fn part(&self, weight: Weight) -> Result<MatrixSource<'a>, ModelError> {
        let WeightPart { rows, cols } = weight.part(self.checkpoint.config(), self.shard);
        Ok(self.checkpoint.matrix(weight)?.part(rows, cols))
    }

    fn pack(
        &mut self,
        weights: &[Weight],
        parts: Vec<MatrixSource<'_>>,
    ) -> Result<P::Matrix, ModelError> {
        let is_hashed = self.shard.is_whole() && self.checkpoint.hashes_packed();
        let hashes_of = |part: &MatrixSource<'_>| is_hashed.then(|| RowHashes::new(part.rows()));
        let hashes: Vec<Option<RowHashes>> = parts.iter().map(hashes_of).collect();
        let parts = parts.into_iter().zip(&hashes);
        let parts = parts.map(|(part, hashes)| part.hashing(hashes.as_ref())).collect();
        let source = StackedRows::new(parts);
        let matrix = self.packer.pack_matrix(&source);
        self.checkpoint.check_reads()?;
        if let Some(NotFinite { part, element, found }) = source.not_finite() {
            return Err(self.checkpoint.not_finite(weights[part], element, found));
        }
        self.count((source.rows() * source.cols()) as u64);
        for (weight, hashes) in weights.iter().zip(hashes) {
            if let Some(hash) = hashes.and_then(RowHashes::finish_read) {
                self.checkpoint.keep_hash(*weight, hash);
            }
        }
        Ok(matrix)
    }

    fn count(&mut self, parameters: u64) {
        self.parameters_done += parameters;
        let (parameters_done, parameters_total) = (self.parameters_done, self.parameters_total);
        (self.progress)(LoadProgress { parameters_done, parameters_total });
    }
}
