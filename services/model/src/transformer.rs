//! Packs a model's weights and runs its forward pass: once for all families, over the description
//! of the layers.

use kernels::{
    Backend, Packer, RowSource, Shard,
    backend::{ExpertChoice, ExpertShape, ExpertWeights, GatedActivation, SharedExpert},
};

use crate::{
    adapter::AdapterTable,
    checkpoint::Checkpoint,
    config::ModelConfig,
    error::ModelError,
    fingerprint::RowHashes,
    layer::{ExpertSpec, FeedForward, GatedSpec, SharedExpertSpec},
    matrix::{MatrixSource, NotFinite, StackedRows},
    mixer::{MixerActivations, MixerContext, MixerWeights},
    weight::{ExpertWeight, LayerWeight, Weight, WeightPart},
};

/// Loaded model, or one rank's shard of it: packed weights and the activations of one step. The
/// backend performs the collectives of the ranks.
pub struct Transformer<B: Backend> {
    config: ModelConfig,
    shard: Shard,
    limits: Limits,
    mixers: MixerContext<B::Vector>,
    /// `None` while other weights are packed in their place.
    weights: Option<TransformerWeights<B::Matrix, B::Vector>>,
    adapters: AdapterTable<B::LowRank>,
    activations: Activations<B>,
}

/// Packed weights of a model, or of one rank's shard of it.
pub struct TransformerWeights<M, V> {
    /// `[tokens of the rank][hidden]`.
    embedding: M,
    layers: Vec<Layer<M, V>>,
    output_norm: V,
    /// Output projection, of the shape of `embedding`; `None` when it is the embedding.
    output: Option<M>,
}

struct Layer<M, V> {
    mixer_norm: V,
    mixer: MixerWeights<M, V>,
    feed_forward_norm: V,
    feed_forward: FeedForwardWeights<M, V>,
}

enum FeedForwardWeights<M, V> {
    Gated {
        /// Gate, then up: `[2 * ffn][hidden]`.
        gate_up: M,
        /// `[hidden][ffn]`.
        down: M,
        activation: GatedActivation,
        /// Norm of the output.
        post_norm: Option<V>,
    },
    Experts(LayerExperts<M, V>),
}

struct LayerExperts<M, V> {
    /// `[experts][hidden]`.
    router: M,
    /// `[experts]`.
    bias: Option<V>,
    shared: Option<SharedExpertWeights<M>>,
    /// Gate, then up `[2 * size][hidden]`, and down `[hidden][size]`, of each expert of the rank.
    experts: Vec<(M, M)>,
    /// Biases of gate and up `[2 * size]`, and of down `[hidden]` or nothing, of each expert of the
    /// rank, if experts have biases.
    biases: Vec<(V, V)>,
    activation: GatedActivation,
    /// Index of the first of `experts` among all experts.
    first: usize,
    choice: ExpertChoice,
}

impl<M, V> LayerExperts<M, V> {
    fn borrowed(&self) -> ExpertWeights<'_, M, V> {
        let Self { router, bias, shared, experts, biases, activation, first, choice } = self;
        ExpertWeights {
            router,
            bias: bias.as_ref(),
            experts,
            biases,
            activation: *activation,
            first: *first,
            shared: shared.as_ref().map(SharedExpertWeights::borrowed),
            choice: *choice,
        }
    }
}

struct SharedExpertWeights<M> {
    /// Gate, then up: `[2 * size][hidden]`.
    gate_up: M,
    /// `[hidden][size]`.
    down: M,
    /// `[1][hidden]`.
    router: Option<M>,
}

/// Activations, reused by every layer of every step.
struct Activations<B: Backend> {
    /// The residual stream `[rows][hidden]`.
    residual: B::Buffer,
    /// Normalized input of attention or feed-forward `[rows][hidden]`.
    normed: B::Buffer,
    mixer: MixerActivations<B>,
    /// Output of attention or feed-forward that is added to the residual stream `[rows][hidden]`.
    delta: B::Buffer,
    /// `[rows][2 * ffn]`.
    gate_up: B::Buffer,
    /// `[rows][ffn]`.
    activated: B::Buffer,
    /// `None` without experts.
    experts: Option<B::ExpertBuffers>,
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
    /// Number of adapters that the model holds at the same time.
    pub adapter_slots: usize,
}

/// Progress of loading, in weight elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    pub parameters_done: u64,
    pub parameters_total: u64,
}

impl<M, V> TransformerWeights<M, V> {
    /// Packs every weight, or the part in [`Packer::pack_shard`]. Calls `progress` after every
    /// matrix and vector.
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
        Self::in_order(config, shard, &mut packer)
    }

    /// Makes every matrix and vector of a rank, in memory order.
    pub(crate) fn in_order<S: PackedSource<Matrix = M, Vector = V>>(
        config: &ModelConfig,
        shard: Shard,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let embedding = source.matrix(&[Weight::Embedding])?;
        let layers = 0..config.layers.len();
        let layers = layers.map(|index| Layer::in_order(index, config, shard, source));
        let layers = layers.collect::<Result<Vec<_>, S::Error>>()?;
        let output_norm = source.vector(&[Weight::OutputNorm])?;
        let output = match config.tied_output {
            true => None,
            false => Some(source.matrix(&[Weight::Output])?),
        };
        Ok(Self { embedding, layers, output_norm, output })
    }
}

impl<M, V> Layer<M, V> {
    /// Makes every matrix and vector of layer `index`, in memory order.
    fn in_order<S: PackedSource<Matrix = M, Vector = V>>(
        index: usize,
        config: &ModelConfig,
        shard: Shard,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        use LayerWeight as W;
        let weight = |weight| Weight::Layer(index, weight);
        let mixer_norm = source.vector(&[weight(W::AttentionNorm)])?;
        let mixer = MixerWeights::in_order(index, config, source)?;
        let feed_forward_norm = source.vector(&[weight(W::FfnNorm)])?;
        let feed_forward = match config.layers[index].feed_forward {
            FeedForward::Gated(GatedSpec { activation, has_post_norm }) => {
                FeedForwardWeights::Gated {
                    gate_up: source.matrix(&[W::Gate, W::Up].map(weight))?,
                    down: source.matrix(&[weight(W::Down)])?,
                    activation,
                    post_norm: match has_post_norm {
                        false => None,
                        true => Some(source.vector(&[weight(W::FfnPostNorm)])?),
                    },
                }
            }
            FeedForward::Experts(spec) => {
                let ExpertSpec { count, choice, has_bias, activation, shared, .. } = spec;
                let router = source.router(weight(W::Router))?;
                let bias = match has_bias {
                    false => None,
                    true => Some(source.vector(&[weight(W::RouterBias)])?),
                };
                let shared = match shared {
                    None => None,
                    Some(shared) => Some(SharedExpertWeights::in_order(index, shared, source)?),
                };
                let expert = |expert| {
                    let part = |part| weight(W::Expert(expert, part));
                    let gate_up = [ExpertWeight::Gate, ExpertWeight::Up].map(part);
                    Ok((source.matrix(&gate_up)?, source.matrix(&[part(ExpertWeight::Down)])?))
                };
                let first = shard.experts(count).start;
                let own = shard.experts(count).map(|index| index as u32);
                let experts = own.clone().map(expert).collect::<Result<_, S::Error>>()?;
                let biases = |expert| {
                    let part = |part| weight(W::ExpertBias(expert, part));
                    let gate_up = [ExpertWeight::Gate, ExpertWeight::Up].map(part);
                    Ok((source.vector(&gate_up)?, source.vector(&[part(ExpertWeight::Down)])?))
                };
                let biases = match spec.has_expert_biases {
                    false => Vec::new(),
                    true => own.map(biases).collect::<Result<_, S::Error>>()?,
                };
                FeedForwardWeights::Experts(LayerExperts {
                    router,
                    bias,
                    shared,
                    experts,
                    biases,
                    activation,
                    first,
                    choice,
                })
            }
        };
        Ok(Self { mixer_norm, mixer, feed_forward_norm, feed_forward })
    }
}

impl<M> SharedExpertWeights<M> {
    /// Makes every matrix of the shared expert of layer `index`, in memory order.
    fn in_order<S: PackedSource<Matrix = M>>(
        index: usize,
        SharedExpertSpec { has_router, .. }: SharedExpertSpec,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let part = |part| Weight::Layer(index, LayerWeight::Shared(part));
        Ok(Self {
            gate_up: source.matrix(&[ExpertWeight::Gate, ExpertWeight::Up].map(part))?,
            down: source.matrix(&[part(ExpertWeight::Down)])?,
            router: match has_router {
                false => None,
                true => Some(source.router(Weight::Layer(index, LayerWeight::SharedRouter))?),
            },
        })
    }

    fn borrowed(&self) -> SharedExpert<'_, M> {
        let Self { gate_up, down, router } = self;
        SharedExpert { gate_up, down, router: router.as_ref() }
    }
}

/// Makes the packed matrices and vectors of a model.
pub(crate) trait PackedSource {
    type Matrix;
    type Vector;
    type Error;

    /// Stacks the rank's parts of `weights` by rows.
    fn matrix(&mut self, weights: &[Weight]) -> Result<Self::Matrix, Self::Error>;

    /// Makes a router of experts, which every rank has as a whole.
    fn router(&mut self, weight: Weight) -> Result<Self::Matrix, Self::Error>;

    /// Concatenates the rank's parts of `weights`.
    fn vector(&mut self, weights: &[Weight]) -> Result<Self::Vector, Self::Error>;
}

impl<B: Backend> Transformer<B> {
    /// Packs the weights as [`TransformerWeights::pack`] does, and allocates the activations of the
    /// largest step.
    pub fn load(
        checkpoint: &Checkpoint,
        backend: &B,
        limits: Limits,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, ModelError> {
        let config = checkpoint.config().clone();
        let shard = backend.shard();
        let weights = TransformerWeights::pack(checkpoint, backend, progress)?;
        let mixers = MixerContext::new(&config, shard, backend);
        let ffn_size = config.ffn_size_of(shard);

        let rows = |width| backend.buffer(limits.rows_max, width);
        let expert_buffers = |ExpertSpec { count, size, choice, shared, .. }| {
            let (hidden, size) = (config.hidden_size, shard.expert_rows(size).len());
            let shared = shared.map_or(0, |shared| shard.part(shared.size).len());
            let shape = ExpertShape { count, chosen: choice.count, hidden, size, shared };
            backend.expert_buffers(limits.rows_max, shape)
        };
        let activations = Activations {
            residual: backend.wide_buffer(limits.rows_max, config.hidden_size),
            normed: rows(config.hidden_size),
            mixer: MixerActivations::new(backend, limits, &config, &mixers),
            delta: rows(config.hidden_size),
            gate_up: rows(2 * ffn_size),
            activated: rows(ffn_size),
            experts: config.experts().map(expert_buffers),
            sampled_residual: backend.wide_buffer(limits.sampled_max, config.hidden_size),
            logits: backend.wide_buffer(limits.sampled_max, shard.tokens(config.vocab_size).len()),
        };
        Ok(Self {
            mixers,
            adapters: AdapterTable::new(backend, &config, limits.adapter_slots),
            config,
            shard,
            limits,
            weights: Some(weights),
            activations,
        })
    }

    /// Replaces the weights with weights packed from a checkpoint of the same configuration.
    /// Returns the old weights.
    pub fn replace_weights(
        &mut self,
        weights: TransformerWeights<B::Matrix, B::Vector>,
    ) -> Option<TransformerWeights<B::Matrix, B::Vector>> {
        assert_eq!(weights.layers.len(), self.config.layer_count, "one configuration");
        self.weights.replace(weights)
    }

    /// Takes the weights out of the model. No forward pass may run before
    /// [`Self::replace_weights`].
    pub fn take_weights(&mut self) -> Option<TransformerWeights<B::Matrix, B::Vector>> {
        self.weights.take()
    }

    pub fn has_weights(&self) -> bool {
        self.weights.is_some()
    }

    /// Returns the adapters of the model.
    pub fn adapters(&self) -> &AdapterTable<B::LowRank> {
        &self.adapters
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the shard of the model that this value holds.
    pub fn shard(&self) -> Shard {
        self.shard
    }

    /// Returns the logits of the last forward pass or its replay: `[sampled_rows][vocab]`, on a
    /// rank only the columns of its [vocabulary shard](Shard::tokens).
    pub fn logits(&self) -> &B::Buffer {
        &self.activations.logits
    }

    /// Returns the hidden states after the final norm of the last forward pass:
    /// `[sampled_rows][hidden]`.
    pub fn hidden(&self) -> &B::Buffer {
        &self.activations.normed
    }

    /// Computes one step: stores the KV of its rows in their blocks and returns the logits
    /// `[sampled_rows][vocab]`, in the order of the step's sampled rows; on a rank only the
    /// columns of its [vocabulary shard](Shard::tokens).
    ///
    /// # Panics
    /// When the model has no weights, the step exceeds the limits, or its blocks have another
    /// layout than this model's KV. All are bugs of the executor.
    pub fn forward(&mut self, backend: &mut B, step: &mut B::Step) -> &B::Buffer {
        let Self { config, shard, limits, mixers, weights, adapters, activations } = self;
        let weights = weights.as_ref().expect("no forward pass runs without weights");
        let eps = config.rms_eps;
        let Activations {
            residual,
            normed,
            mixer,
            delta,
            gate_up,
            activated,
            experts: expert_buffers,
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
        assert_eq!(layout, config.kv_layout_of(layout.format, *shard));

        let scale_of_embedding = config.embedding_scale();
        backend.embed(&weights.embedding, config.vocab_size, scale_of_embedding, step, residual);
        // In f32, although rows in bf16 would be exact too: this needs no second buffer, and a
        // token's row is small.
        backend.all_reduce(rows, residual);
        let first_norm = &weights.layers.first().expect("a model has layers").mixer_norm;
        backend.rms_norm(rows, residual, first_norm, eps, normed);
        let adapters = backend.has_adapters(step).then(|| adapters.read());
        for (index, layer) in weights.layers.iter().enumerate() {
            let adapters = adapters.as_ref().map(|layers| &layers[index]);
            let next = weights.layers.get(index + 1);
            let operands = (&*normed, adapters.map(|adapters| &adapters.qkv));
            // A prefill chunk that does not end its prompt only stores its KV and states.
            let only_state = next.is_none() && sampled_rows == 0;
            mixer.run((&mut *backend, &mut *step), mixers, &layer.mixer, operands, only_state);
            if only_state {
                return logits;
            }
            // After the last mixer, only the sampled rows are needed.
            let only_sampled = next.is_none() && sampled_rows < rows;
            let attended = mixer.output(backend, step, &layer.mixer, only_sampled);
            let (mut rows, mut residual) = (rows, &mut *residual);
            if only_sampled {
                backend.gather_sampled(residual, step, sampled_residual);
                (rows, residual) = (sampled_rows, &mut *sampled_residual);
            }
            let (output, output_bias, post_norm) = layer.mixer.output();
            let norm = (&layer.feed_forward_norm, eps, post_norm);
            let product = (attended, output, output_bias);
            let updates = adapters.map(|adapters| (&adapters.output, &*step));
            let stream = (&mut *delta, &mut *residual);
            project_onto_residual(backend, rows, product, updates, stream, norm, normed);

            let norm = (next.map_or(&weights.output_norm, |next| &next.mixer_norm), eps);
            match &layer.feed_forward {
                FeedForwardWeights::Gated { gate_up: w, down, activation, post_norm } => {
                    let product = (&*normed, w);
                    let updates = adapters.map(|adapters| (&adapters.gate_up, &*step));
                    backend.project_gated(*activation, rows, product, updates, gate_up, activated);
                    let product = (&*activated, down, None);
                    let norm = (norm.0, eps, post_norm.as_ref());
                    let updates = adapters.map(|adapters| (&adapters.down, &*step));
                    let stream = (&mut *delta, residual);
                    project_onto_residual(backend, rows, product, updates, stream, norm, normed);
                }
                FeedForwardWeights::Experts(experts) => {
                    let weights = experts.borrowed();
                    let buffers = expert_buffers.as_mut().expect("the model has experts");
                    let buffers = (buffers, &mut *delta);
                    backend.experts_onto_residual(rows, normed, &weights, buffers, residual, norm);
                }
            }
        }
        let output = weights.output.as_ref().unwrap_or(&weights.embedding);
        backend.matmul(sampled_rows, normed, output, logits);
        logits
    }
}

/// Computes [`Backend::project_onto_residual`]. With `post`, the projection is normalized before it
/// is added to the residual stream.
fn project_onto_residual<B: Backend>(
    backend: &mut B,
    rows: usize,
    (x, w, bias): (&B::Buffer, &B::Matrix, Option<&B::Vector>),
    updates: Option<(&B::LowRank, &B::Step)>,
    (delta, residual): (&mut B::Buffer, &mut B::Buffer),
    (norm, eps, post): (&B::Vector, f32, Option<&B::Vector>),
    out: &mut B::Buffer,
) {
    let Some(post) = post else {
        let (product, stream) = ((x, w, bias), (delta, residual));
        return backend.project_onto_residual(rows, product, updates, stream, (norm, eps), out);
    };
    backend.matmul(rows, x, w, delta);
    if let Some((updates, step)) = updates {
        backend.add_low_rank(rows, x, updates, step, delta);
    }
    backend.all_reduce(rows, delta);
    if let Some(bias) = bias {
        backend.add_bias(rows, bias, delta);
    }
    backend.rms_norm_in_place(rows, delta, post, eps);
    backend.add_rms_norm(rows, residual, delta, norm, eps, out);
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
        self.pack(weights, parts, P::pack_matrix)
    }

    fn router(&mut self, weight: Weight) -> Result<P::Matrix, ModelError> {
        let part = self.part(weight)?;
        self.pack(&[weight], vec![part], P::pack_router)
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
        pack: impl FnOnce(&P, &dyn RowSource) -> P::Matrix,
    ) -> Result<P::Matrix, ModelError> {
        self.checkpoint.check_cancelled()?;
        let is_hashed = self.shard.is_whole() && self.checkpoint.hashes_packed();
        let hashes_of = |part: &MatrixSource<'_>| {
            (is_hashed && part.has_stored_rows()).then(|| RowHashes::new(part.rows()))
        };
        let hashes: Vec<Option<RowHashes>> = parts.iter().map(hashes_of).collect();
        let parts = parts.into_iter().zip(&hashes);
        let parts = parts.map(|(part, hashes)| part.hashing(hashes.as_ref())).collect();
        let is_quantizable = weights.iter().all(|weight| weight.may_be_quantized());
        let source = StackedRows::new(parts).quantizable(is_quantizable);
        let matrix = pack(self.packer, &source);
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
