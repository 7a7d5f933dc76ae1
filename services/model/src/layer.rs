//! Description of a model's layers, over which the forward pass is written.

use std::num::NonZeroUsize;

use kernels::backend::ExpertChoice;

/// A layer: a mixer, then a feed-forward network. Each reads the normalized residual stream and adds its output to the
/// stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    pub mixer: Mixer,
    pub feed_forward: FeedForward,
}

/// Part of a layer that mixes the tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mixer {
    Attention(AttentionSpec),
}

/// Grouped-query attention with rope over whole heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSpec {
    /// Whether queries, keys and values have biases.
    pub has_bias: bool,
    /// Whether every query and key head is normalized before the rotary embedding.
    pub has_head_norms: bool,
    /// Number of tokens that a token attends to, including itself; `None`: the whole sequence.
    pub window: Option<NonZeroUsize>,
}

/// Part of a layer that computes each token by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedForward {
    /// `down · (silu(gate · x) * (up · x))`.
    Gated,
    /// A router chooses experts for each token. Each expert is a gated network, and their outputs are added by weight.
    Experts(ExpertSpec),
}

/// Experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSpec {
    pub count: usize,
    /// Width of the intermediate layer of an expert.
    pub size: usize,
    pub choice: ExpertChoice,
}

impl LayerSpec {
    /// Llama's layer: attention without bias, head norms and window, and a gated feed-forward network.
    pub(crate) const LLAMA: Self = Self {
        mixer: Mixer::Attention(AttentionSpec {
            has_bias: false,
            has_head_norms: false,
            window: None,
        }),
        feed_forward: FeedForward::Gated,
    };

    /// Returns the layer with a sliding window of `window` tokens.
    pub(crate) fn with_window(self, window: Option<NonZeroUsize>) -> Self {
        let Mixer::Attention(attention) = self.mixer;
        Self { mixer: Mixer::Attention(AttentionSpec { window, ..attention }), ..self }
    }

    /// Returns the size of the sliding window in tokens, if there is one.
    pub fn window(&self) -> Option<NonZeroUsize> {
        let Mixer::Attention(attention) = self.mixer;
        attention.window
    }
}
