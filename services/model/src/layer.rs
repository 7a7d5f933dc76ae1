//! Description of a model's layers, over which the forward pass is written.

use std::num::NonZeroUsize;

use kernels::{
    StateShape,
    backend::{ExpertChoice, GatedActivation, NormSpan},
};

/// A layer: a mixer, then a feed-forward network. Each reads the normalized residual stream and
/// adds its output to the stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerSpec {
    pub mixer: Mixer,
    pub feed_forward: FeedForward,
}

/// Part of a layer that mixes the tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mixer {
    Attention(AttentionSpec),
    GatedDelta(DeltaSpec),
}

/// Linear attention with a recurrent state: Gated DeltaNet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaSpec {
    /// Heads of queries and of keys.
    pub key_heads: usize,
    /// Heads of values; a multiple of `key_heads`.
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Inputs that the convolution reads, the current one included.
    pub conv_size: usize,
}

impl DeltaSpec {
    /// Returns the recurrent state of `layer_count` such layers.
    pub fn state(self, layer_count: usize) -> StateShape {
        let Self { key_heads, value_heads, key_dim, value_dim, conv_size } = self;
        let conv_taps = conv_size - 1;
        StateShape { layer_count, key_heads, value_heads, key_dim, value_dim, conv_taps }
    }
}

/// Grouped-query attention with rope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSpec {
    /// Whether queries, keys and values have biases.
    pub has_bias: bool,
    /// Whether the output projection has a bias.
    pub has_output_bias: bool,
    /// Whether each query head has an attention sink: a logit that counts in the denominator of the
    /// softmax and has no value.
    pub has_sinks: bool,
    /// Elements that are normalized together before the rotary embedding; `None`: without QK norm.
    pub qk_norm: Option<NormSpan>,
    /// Whether the output is normalized before it is added to the residual stream.
    pub has_post_norm: bool,
    /// Whether the output is multiplied with the sigmoid of a projection, element by element.
    pub has_output_gate: bool,
    /// Number of tokens that a token attends to, including itself; `None`: the whole sequence.
    pub window: Option<NonZeroUsize>,
}

/// Part of a layer that computes each token by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FeedForward {
    /// `down · activation(gate · x, up · x)`.
    Gated(GatedSpec),
    /// A router chooses experts for each token. Each expert is a gated network, and their outputs
    /// are added by weight.
    Experts(ExpertSpec),
}

/// Gated network without experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedSpec {
    pub activation: GatedActivation,
    /// Whether the output is normalized before it is added to the residual stream.
    pub has_post_norm: bool,
}

impl GatedSpec {
    /// Llama's network.
    pub(crate) const LLAMA: Self = Self { activation: GatedActivation::Silu, has_post_norm: false };
}

/// Experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertSpec {
    pub count: usize,
    /// Width of the intermediate layer of an expert.
    pub size: usize,
    pub choice: ExpertChoice,
    /// Whether the router has a bias. It corrects the scores for the choice; with
    /// [`ExpertScore::BiasedSoftmax`](kernels::backend::ExpertScore) it is added to the logits.
    pub has_bias: bool,
    /// Whether gate, up and down of each expert have biases.
    pub has_expert_biases: bool,
    /// Activation of the experts. A shared expert has `silu`.
    pub activation: GatedActivation,
    pub shared: Option<SharedExpertSpec>,
}

/// Expert that computes every token, beside the chosen experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpertSpec {
    /// Width of the intermediate layer.
    pub size: usize,
    /// Whether a router weights the output with a sigmoid; otherwise the weight is 1.
    pub has_router: bool,
}

impl ExpertSpec {
    /// Describes experts without biases and without a shared expert.
    pub(crate) fn new(count: usize, size: usize, choice: ExpertChoice) -> Self {
        Self {
            count,
            size,
            choice,
            has_bias: false,
            has_expert_biases: false,
            activation: GatedActivation::Silu,
            shared: None,
        }
    }
}

impl AttentionSpec {
    /// Llama's attention: without biases, sinks, QK norm, post-norm, output gate and window.
    pub(crate) const LLAMA: Self = Self {
        has_bias: false,
        has_output_bias: false,
        has_sinks: false,
        qk_norm: None,
        has_post_norm: false,
        has_output_gate: false,
        window: None,
    };
}

impl LayerSpec {
    /// Llama's layer: attention without bias, QK norm and window, and a gated feed-forward network.
    pub(crate) const LLAMA: Self = Self {
        mixer: Mixer::Attention(AttentionSpec::LLAMA),
        feed_forward: FeedForward::Gated(GatedSpec::LLAMA),
    };

    /// Returns the layer with or without biases of queries, keys and values.
    pub(crate) fn with_qkv_bias(self, has_bias: bool) -> Self {
        self.with_attention(|attention| AttentionSpec { has_bias, ..attention })
    }

    /// Returns the layer with experts.
    pub(crate) fn with_experts(self, experts: ExpertSpec) -> Self {
        Self { feed_forward: FeedForward::Experts(experts), ..self }
    }

    /// Returns the layer with a sliding window of `window` tokens.
    pub(crate) fn with_window(self, window: Option<NonZeroUsize>) -> Self {
        self.with_attention(|attention| AttentionSpec { window, ..attention })
    }

    /// Returns the size of the sliding window in tokens, if there is one.
    pub fn window(&self) -> Option<NonZeroUsize> {
        self.attention()?.window
    }

    /// Returns the attention of the layer; `None`: the layer has linear attention.
    pub fn attention(&self) -> Option<AttentionSpec> {
        match self.mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::GatedDelta(_) => None,
        }
    }

    /// Returns the linear attention of the layer, if it has it.
    pub fn linear_attention(&self) -> Option<DeltaSpec> {
        match self.mixer {
            Mixer::Attention(_) => None,
            Mixer::GatedDelta(delta) => Some(delta),
        }
    }

    /// Returns the layer with its attention changed, if it has attention.
    pub(crate) fn with_attention(self, change: impl Fn(AttentionSpec) -> AttentionSpec) -> Self {
        let mixer = self.attention().map_or(self.mixer, |it| Mixer::Attention(change(it)));
        Self { mixer, ..self }
    }
}
