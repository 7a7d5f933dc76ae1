//! The mixers of a model's layers: packed weights, activations, and their part of the forward pass.

use std::num::NonZeroUsize;

use kernels::{
    Backend, Shard, StateShape,
    backend::{GatedDelta, HeadShape, HeadWeights, LayerAttention, NormSpan},
};

use crate::{
    config::ModelConfig,
    layer::{AttentionSpec, Mixer},
    transformer::{Limits, PackedSource},
    weight::{DeltaWeight, LayerWeight, Weight},
};

/// Packed weights of a layer's mixer. Attention has index `layer` among the layers with attention,
/// linear attention among those with linear attention.
pub(crate) enum MixerWeights<M, V> {
    Attention(AttentionWeights<M, V>),
    GatedDelta(DeltaWeights<M, V>),
}

pub(crate) struct AttentionWeights<M, V> {
    layer: usize,
    /// Queries, keys, values: `[qkv_width][hidden]`.
    qkv: M,
    /// Bias of `qkv`, `[qkv_width]`.
    bias: Option<V>,
    /// Norms of queries and keys, and the elements that each normalizes together.
    qk_norm: Option<(V, V, NormSpan)>,
    /// Size of the sliding window in tokens.
    window: Option<NonZeroUsize>,
    /// Attention sinks `[query_heads]`.
    sinks: Option<V>,
    /// Output gate `[query_width][hidden]`.
    gate: Option<M>,
    /// `[hidden][query_width]`.
    output: M,
    /// `[hidden]`.
    output_bias: Option<V>,
    /// Norm of the output.
    post_norm: Option<V>,
}

pub(crate) struct DeltaWeights<M, V> {
    layer: usize,
    /// Queries, keys, values, output gates: `[projected_width][hidden]`.
    projection: M,
    /// Update rates, decays: `[2 * value_heads][hidden]`.
    rates: M,
    /// `[channels][conv_size]`.
    conv: V,
    /// `[value_heads]`.
    decay_log: V,
    /// `[value_heads]`.
    time_bias: V,
    /// `[value_dim]`.
    norm: V,
    /// `[hidden][value_width]`.
    output: M,
}

impl<M, V> MixerWeights<M, V> {
    /// Makes every matrix and vector of the mixer of layer `index`, in memory order.
    pub(crate) fn in_order<S: PackedSource<Matrix = M, Vector = V>>(
        index: usize,
        config: &ModelConfig,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let layer = config.mixer_index(index);
        match config.layers[index].mixer {
            Mixer::Attention(attention) => {
                AttentionWeights::in_order((index, layer), attention, source).map(Self::Attention)
            }
            Mixer::GatedDelta(_) => {
                DeltaWeights::in_order((index, layer), source).map(Self::GatedDelta)
            }
        }
    }

    /// Returns the output projection, its bias, and the norm of its output.
    pub(crate) fn output(&self) -> (&M, Option<&V>, Option<&V>) {
        match self {
            Self::Attention(AttentionWeights { output, output_bias, post_norm, .. }) => {
                (output, output_bias.as_ref(), post_norm.as_ref())
            }
            Self::GatedDelta(DeltaWeights { output, .. }) => (output, None, None),
        }
    }
}

impl<M, V> AttentionWeights<M, V> {
    fn in_order<S: PackedSource<Matrix = M, Vector = V>>(
        (index, layer): (usize, usize),
        attention: AttentionSpec,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        use LayerWeight as W;
        let weight = |weight| Weight::Layer(index, weight);
        let AttentionSpec {
            has_bias,
            has_output_bias,
            has_sinks,
            qk_norm,
            has_post_norm,
            has_output_gate,
            window,
        } = attention;
        Ok(Self {
            layer,
            qkv: source.matrix(&[W::Query, W::Key, W::Value].map(weight))?,
            bias: match has_bias {
                false => None,
                true => Some(source.vector(&[W::QueryBias, W::KeyBias, W::ValueBias].map(weight))?),
            },
            qk_norm: match qk_norm {
                None => None,
                Some(span) => Some((
                    source.vector(&[weight(W::QueryNorm)])?,
                    source.vector(&[weight(W::KeyNorm)])?,
                    span,
                )),
            },
            window,
            sinks: match has_sinks {
                false => None,
                true => Some(source.vector(&[weight(W::Sinks)])?),
            },
            gate: match has_output_gate {
                false => None,
                true => Some(source.matrix(&[weight(W::QueryGate)])?),
            },
            output: source.matrix(&[weight(W::AttentionOutput)])?,
            output_bias: match has_output_bias {
                false => None,
                true => Some(source.vector(&[weight(W::OutputBias)])?),
            },
            post_norm: match has_post_norm {
                false => None,
                true => Some(source.vector(&[weight(W::AttentionPostNorm)])?),
            },
        })
    }

    /// Returns the weights between the QKV GEMM and attention.
    fn head_weights<'a>(&'a self, frequencies: &'a V, eps: f32) -> HeadWeights<'a, V> {
        let norms = self.qk_norm.as_ref().map(|(query, key, _)| (query, key));
        let norm_span = self.qk_norm.as_ref().map_or(NormSpan::Head, |(_, _, span)| *span);
        HeadWeights { frequencies, bias: self.bias.as_ref(), norms, norm_span, eps }
    }
}

impl<M, V> DeltaWeights<M, V> {
    fn in_order<S: PackedSource<Matrix = M, Vector = V>>(
        (index, layer): (usize, usize),
        source: &mut S,
    ) -> Result<Self, S::Error> {
        use DeltaWeight as D;
        let weight = |weight| Weight::Layer(index, LayerWeight::Delta(weight));
        Ok(Self {
            layer,
            projection: source.matrix(&[D::Query, D::Key, D::Value, D::Gate].map(weight))?,
            rates: source.matrix(&[D::UpdateRate, D::Decay].map(weight))?,
            conv: source.vector(&[D::QueryConv, D::KeyConv, D::ValueConv].map(weight))?,
            decay_log: source.vector(&[weight(D::DecayLog)])?,
            time_bias: source.vector(&[weight(D::TimeBias)])?,
            norm: source.vector(&[weight(D::Norm)])?,
            output: source.matrix(&[weight(D::Output)])?,
        })
    }
}

/// Values that the mixers of all layers of a model share.
pub(crate) struct MixerContext<V> {
    /// Heads of the rank.
    heads: HeadShape,
    eps: f32,
    /// Factor of attention scores.
    scale: f32,
    /// RoPE frequencies.
    frequencies: V,
    /// Frequencies of layers with a window, if they have their own.
    window_frequencies: Option<V>,
    /// Linear heads of the rank.
    state: Option<StateShape>,
}

impl<V> MixerContext<V> {
    pub(crate) fn new<B: Backend<Vector = V>>(
        config: &ModelConfig,
        shard: Shard,
        backend: &B,
    ) -> Self {
        let window_frequencies = config.window_rope_frequencies();
        Self {
            heads: config.head_shape_of(shard),
            eps: config.rms_eps,
            scale: config.attention_scale(),
            frequencies: backend.vector(&config.rope_frequencies()),
            window_frequencies: window_frequencies.map(|it| backend.vector(&it)),
            state: config.state_shape().map(|state| state.part(shard.rank_count())),
        }
    }
}

/// Activations of mixers, reused by every layer of every step.
pub(crate) struct MixerActivations<B: Backend> {
    /// `[rows][qkv_width]`.
    qkv: B::Buffer,
    /// Output gates `[rows][query_width]`, if attention has them.
    gate: Option<B::Buffer>,
    attended: Mixed<B>,
    /// `None` without linear attention.
    delta: Option<DeltaActivations<B>>,
}

struct DeltaActivations<B: Backend> {
    /// `[rows][projected_width]`.
    projected: B::Buffer,
    /// `[rows][2 * value_heads]`.
    rates: B::Buffer,
    /// Intermediate values of the backend.
    mixed: B::Buffer,
    attended: Mixed<B>,
}

/// Output of a mixer before its projection.
struct Mixed<B: Backend> {
    /// `[rows][width]`.
    all: B::Buffer,
    /// The sampled rows, in the last layer: `[sampled_rows][width]`.
    sampled: B::Buffer,
}

impl<B: Backend> Mixed<B> {
    fn new(backend: &B, limits: Limits, width: usize) -> Self {
        let all = backend.buffer(limits.rows_max, width);
        Self { all, sampled: backend.buffer(limits.sampled_max, width) }
    }
}

impl<B: Backend> MixerActivations<B> {
    pub(crate) fn new(
        backend: &B,
        limits: Limits,
        config: &ModelConfig,
        context: &MixerContext<B::Vector>,
    ) -> Self {
        let rows = |width| backend.buffer(limits.rows_max, width);
        let (qkv_width, query_width) = (context.heads.qkv_width(), context.heads.query_width());
        let has_gate =
            config.layers.iter().any(|it| it.attention().is_some_and(|it| it.has_output_gate));
        Self {
            qkv: rows(qkv_width),
            gate: has_gate.then(|| rows(query_width)),
            attended: Mixed::new(backend, limits, query_width),
            delta: context.state.map(|state| DeltaActivations {
                projected: rows(state.projected_width()),
                rates: rows(2 * state.value_heads),
                mixed: backend.delta_buffer(limits.rows_max, state),
                attended: Mixed::new(backend, limits, state.value_width()),
            }),
        }
    }

    /// Runs the mixer of a layer, without its output projection, over all rows of the step. With
    /// `only_state`, the rows of the step only leave their KV or their recurrent state.
    pub(crate) fn run(
        &mut self,
        (backend, step): (&mut B, &mut B::Step),
        context: &MixerContext<B::Vector>,
        weights: &MixerWeights<B::Matrix, B::Vector>,
        (normed, updates): (&B::Buffer, Option<&B::LowRank>),
        only_state: bool,
    ) {
        let rows = backend.rows(step);
        match weights {
            MixerWeights::Attention(weights) => {
                let AttentionWeights { layer, qkv: w, window, sinks, gate, .. } = weights;
                let of_window = window.and(context.window_frequencies.as_ref());
                let frequencies = of_window.unwrap_or(&context.frequencies);
                let head_weights = weights.head_weights(frequencies, context.eps);
                let (heads, operands) = (context.heads, (normed, w, updates));
                backend.project_heads(*layer, heads, operands, head_weights, &mut self.qkv, step);
                if only_state {
                    return;
                }
                let attention =
                    LayerAttention { layer: *layer, heads, scale: context.scale, window: *window };
                let attended = &mut self.attended.all;
                backend.attention(attention, sinks.as_ref(), &self.qkv, step, attended);
                if let (Some(w), Some(gate)) = (gate, &mut self.gate) {
                    backend.matmul(rows, normed, w, gate);
                    backend.apply_gate(rows, gate, attended);
                }
            }
            MixerWeights::GatedDelta(weights) => {
                let DeltaWeights { conv, decay_log, time_bias, norm, .. } = weights;
                let activations = self.delta.as_mut().expect("the model has linear attention");
                let DeltaActivations { projected, rates, mixed, attended } = activations;
                backend.matmul(rows, normed, &weights.projection, projected);
                backend.matmul(rows, normed, &weights.rates, rates);
                let delta = GatedDelta {
                    layer: weights.layer,
                    shape: context.state.expect("the model has linear attention"),
                    conv,
                    decay_log,
                    time_bias,
                    norm,
                    eps: context.eps,
                };
                backend.gated_delta(delta, projected, rates, mixed, step, &mut attended.all);
            }
        }
    }

    /// Returns the output of [`Self::run`] of a layer: of all rows, or of the sampled rows.
    pub(crate) fn output(
        &mut self,
        backend: &mut B,
        step: &B::Step,
        weights: &MixerWeights<B::Matrix, B::Vector>,
        only_sampled: bool,
    ) -> &B::Buffer {
        let Mixed { all, sampled } = match (weights, &mut self.delta) {
            (MixerWeights::GatedDelta(_), Some(delta)) => &mut delta.attended,
            _ => &mut self.attended,
        };
        if !only_sampled {
            return all;
        }
        backend.gather_sampled(all, step, sampled);
        sampled
    }
}
