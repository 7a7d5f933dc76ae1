//! Model configuration, independent of the checkpoint format.

pub(crate) mod fields;
pub(crate) mod gguf_metadata;
pub(crate) mod hugging_face;
pub(crate) mod quantization;
mod rope_parameters;

use std::{num::NonZeroUsize, ops::RangeInclusive, path::Path};

use half::bf16;
use kernels::{
    KvFormat, KvGroups, KvLayout, Shard, StateShape,
    backend::{GatedActivation, HeadShape, NormSpan},
    shard::RANKS_MAX,
};

use crate::{
    error::ModelError,
    families::Family,
    layer::{DeltaSpec, ExpertSpec, FeedForward, LayerSpec, SharedExpertSpec},
    rope::{self, RopeScaling},
    weight::Weight,
};

/// Validated hyperparameters of a model: all sizes are bounded, and head counts divide without
/// remainder.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub family: &'static Family,
    /// Width of the residual stream.
    pub hidden_size: usize,
    pub layer_count: usize,
    pub query_head_count: usize,
    /// Number of KV heads; divides `query_head_count`.
    pub kv_head_count: usize,
    /// Head size in elements; even.
    pub head_dim: usize,
    /// Elements of a head that RoPE rotates: the first ones; even, at most `head_dim`.
    pub rotary_dim: usize,
    /// Width of the intermediate layer of the feed-forward network.
    pub ffn_size: usize,
    pub vocab_size: usize,
    /// Maximum sequence length of the model in tokens.
    pub context_tokens: usize,
    pub rms_eps: f32,
    /// Attention scores are divided by the root of this number; usually the head dimension.
    pub query_pre_attn_scalar: f32,
    pub rope_theta: f32,
    /// Theta of layers with a sliding window, whose RoPE is not scaled. `None`: these layers have
    /// the RoPE of the others.
    pub window_rope_theta: Option<f32>,
    pub rope_scaling: RopeScaling,
    /// Factor of rotated queries and keys (YaRN, LongRoPE); 1 with partial RoPE.
    pub rope_attention_factor: f32,
    /// `layer_count` descriptions.
    pub layers: Vec<LayerSpec>,
    /// Whether the output projection shares the weights of the embedding. A folder with a different
    /// output is not tied, whatever its configuration says.
    pub tied_output: bool,
    pub bos_token_id: Option<u32>,
    /// End-of-sequence tokens.
    pub eos_token_ids: Vec<u32>,
}

impl ModelConfig {
    /// Returns the first difference to the configuration of other weights of this model: the field,
    /// its value here and its value there. Weights of two configurations cannot replace each other.
    pub fn difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        macro_rules! compare {
            ($($field:ident)*) => {
                // Destructured, so that a new field cannot be forgotten here.
                let Self { $($field),* } = self;
                $(if *$field != other.$field {
                    let (here, there) = (format!("{:?}", $field), format!("{:?}", other.$field));
                    return Some((stringify!($field), here, there));
                })*
            };
        }
        compare!(family hidden_size layer_count query_head_count kv_head_count head_dim rotary_dim ffn_size
            vocab_size context_tokens rms_eps query_pre_attn_scalar rope_theta window_rope_theta
            rope_scaling rope_attention_factor layers tied_output bos_token_id eos_token_ids);
        None
    }
}

// Far above every published model, and low enough that sizes of weights and KV do not overflow.
const HIDDEN_MAX: usize = 1 << 17;
const LAYERS_MAX: usize = 4096;
const HEADS_MAX: usize = 4096;
const HEAD_DIM_MAX: usize = 1024;
const FFN_MAX: usize = 1 << 20;
const EXPERTS_MAX: usize = 4096;
/// Maximum number of experts over all layers. Each has names and descriptions of its matrices
/// before any weight is read. Published models have fewer than half as many.
const LAYER_EXPERTS_MAX: usize = 1 << 16;
const CONV_MAX: usize = 64;
const SCALE_MAX: f32 = 1e3;
const VOCAB_MAX: usize = 1 << 22;
const CONTEXT_MAX: usize = 1 << 26;

/// Returns the head dimension of a model that states none. Errors name the file `path` and its key
/// `name` for the number of heads.
fn default_head_dim(
    path: &Path,
    name: &'static str,
    heads: usize,
    hidden_size: usize,
) -> Result<usize, ModelError> {
    let head_dim = hidden_size.checked_div(heads).filter(|dim| dim * heads == hidden_size);
    head_dim.ok_or_else(|| ModelError::ConfigValue {
        path: path.into(),
        name,
        found: heads.to_string(),
        allowed: format!("a divisor of the hidden size {hidden_size}"),
    })
}

impl ExpertSpec {
    /// Validates sizes and the choice. `bad` returns the error for a value: its name, what was
    /// found, what is allowed.
    fn validate(
        self,
        bad: &impl Fn(&'static str, String, String) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        let Self { count, size, choice, activation, shared, .. } = self;
        if let GatedActivation::ClampedSwiGlu { alpha, limit } = activation {
            let values = [
                ("alpha of the experts' activation", alpha),
                ("limit of the experts' activation", limit),
            ];
            for (name, value) in values {
                if !(value > 0.0 && value <= SCALE_MAX) {
                    bad(name, value.to_string(), format!("above 0, up to {SCALE_MAX}"))?;
                }
            }
        }
        let sizes = [
            ("number of experts", count, EXPERTS_MAX),
            ("number of experts per token", choice.count, count),
            ("feed-forward size of experts", size, FFN_MAX),
            ("feed-forward size of the shared expert", shared.map_or(1, |it| it.size), FFN_MAX),
            ("number of groups of experts", choice.groups, count),
            ("number of groups of experts per token", choice.groups_chosen, choice.groups),
        ];
        for (name, found, max) in sizes {
            if !(1..=max).contains(&found) {
                bad(name, found.to_string(), format!("1 to {max}"))?;
            }
        }
        // A group is judged by its two best experts.
        let size = count / choice.groups;
        if choice.groups > 1 && (!count.is_multiple_of(choice.groups) || size < 2) {
            let allowed = format!("a divisor of the {count} experts, with at least 2 in a group");
            bad("number of groups of experts", choice.groups.to_string(), allowed)?;
        }
        if choice.count > size * choice.groups_chosen {
            let allowed = format!("1 to the {} experts of its groups", size * choice.groups_chosen);
            bad("number of experts per token", choice.count.to_string(), allowed)?;
        }
        if !(choice.scale > 0.0 && choice.scale <= SCALE_MAX) {
            let allowed = format!("above 0, up to {SCALE_MAX}");
            bad("scaling factor of experts", choice.scale.to_string(), allowed)?;
        }
        Ok(())
    }
}

impl DeltaSpec {
    /// Validates sizes, and that the recurrent state fits blocks of KV of `kv_heads` heads of
    /// `head_dim` elements. `bad` is as in [`ExpertSpec::validate`].
    fn validate(
        self,
        (kv_heads, head_dim): (usize, usize),
        bad: &impl Fn(&'static str, String, String) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        let Self { key_heads, value_heads, key_dim, value_dim, conv_size } = self;
        // In every format of KV, 16 tokens of a head have the bytes of 4 · head_dim f32.
        let dim_max = HEAD_DIM_MAX.min(4 * head_dim);
        let sizes = [
            ("linear_num_key_heads", key_heads, HEADS_MAX),
            ("linear_num_value_heads", value_heads, HEADS_MAX),
            ("linear_key_head_dim", key_dim, dim_max),
            ("linear_value_head_dim", value_dim, dim_max),
            ("linear_conv_kernel_dim", conv_size, CONV_MAX),
        ];
        for (name, found, max) in sizes {
            if !(1..=max).contains(&found) {
                bad(name, found.to_string(), format!("1 to {max}"))?;
            }
        }
        if !key_heads.is_multiple_of(kv_heads) {
            let allowed = format!("a multiple of the {kv_heads} KV heads");
            bad("linear_num_key_heads", key_heads.to_string(), allowed)?;
        }
        if !value_heads.is_multiple_of(key_heads) {
            let allowed = format!("a multiple of the {key_heads} key heads");
            bad("linear_num_value_heads", value_heads.to_string(), allowed)?;
        }
        Ok(())
    }
}

impl ModelConfig {
    /// Validates the configuration. `path` names its file in errors.
    pub(crate) fn validate(self, path: &Path) -> Result<Self, ModelError> {
        let bad = |name: &'static str, found: String, allowed: String| {
            Err(ModelError::ConfigValue { path: path.into(), name, found, allowed })
        };
        let sizes = [
            ("hidden size", self.hidden_size, HIDDEN_MAX),
            ("layer count", self.layer_count, LAYERS_MAX),
            ("attention head count", self.query_head_count, HEADS_MAX),
            ("KV head count", self.kv_head_count, HEADS_MAX),
            ("head dimension", self.head_dim, HEAD_DIM_MAX),
            ("feed-forward size", self.ffn_size, FFN_MAX),
            ("vocabulary size", self.vocab_size, VOCAB_MAX),
            ("context length", self.context_tokens, CONTEXT_MAX),
        ];
        for (name, found, max) in sizes {
            if !(1..=max).contains(&found) {
                bad(name, found.to_string(), format!("1 to {max}"))?;
            }
        }
        if !self.query_head_count.is_multiple_of(self.kv_head_count) {
            let allowed = format!("a divisor of the {} attention heads", self.query_head_count);
            bad("KV head count", self.kv_head_count.to_string(), allowed)?;
        }
        if !self.head_dim.is_multiple_of(2) {
            bad("head dimension", self.head_dim.to_string(), "an even number".into())?;
        }
        if !(2..=self.head_dim).contains(&self.rotary_dim) || !self.rotary_dim.is_multiple_of(2) {
            let allowed = format!("an even number from 2 to the head dimension {}", self.head_dim);
            bad("rotary dimension", self.rotary_dim.to_string(), allowed)?;
        }
        let within = |name, value: f32, range: RangeInclusive<f32>, allowed: &str| {
            // NaN is outside every range.
            let is_within = range.contains(&value);
            if is_within { Ok(()) } else { bad(name, value.to_string(), allowed.into()) }
        };
        within("RMS norm epsilon", self.rms_eps, 0.0..=0.1, "0 to 0.1")?;
        within("rope theta", self.rope_theta, 1.0..=1e12, "1 to 1e12")?;
        let window_theta = self.window_rope_theta.unwrap_or(1.0);
        within("rope theta of windows", window_theta, 1.0..=1e12, "1 to 1e12")?;
        let allowed = format!("1 to {HEAD_DIM_MAX}");
        let scalars = 1.0..=HEAD_DIM_MAX as f32;
        within("query_pre_attn_scalar", self.query_pre_attn_scalar, scalars, &allowed)?;
        self.validate_rope(&bad, &within)?;
        if let Some(experts) = self.experts() {
            experts.validate(&bad)?;
            let is_sparse =
                |layer: &&LayerSpec| matches!(layer.feed_forward, FeedForward::Experts(_));
            let layers = self.layers.iter().filter(is_sparse).count();
            if experts.count * layers > LAYER_EXPERTS_MAX {
                let found = format!("{} in each of {layers} layers", experts.count);
                bad("number of experts", found, format!("1 to {LAYER_EXPERTS_MAX} in all layers"))?;
            }
        }
        if self.layers.len() != self.layer_count {
            let allowed = format!("{} (one for each layer)", self.layer_count);
            bad("number of layer types", self.layers.len().to_string(), allowed)?;
        }
        if let Some(delta) = self.linear_attention() {
            delta.validate((self.kv_head_count, self.head_dim), &bad)?;
        }
        if self.kv_layer_count() == 0 {
            bad("layer_types", "linear_attention only".into(), "a layer with attention".into())?;
        }
        let ids = self.bos_token_id.iter().chain(&self.eos_token_ids);
        if let Some(id) = ids.into_iter().find(|&&id| id as usize >= self.vocab_size) {
            let allowed = format!("less than the vocabulary size {}", self.vocab_size);
            bad("bos or eos token id", id.to_string(), allowed)?;
        }
        Ok(self)
    }

    fn validate_rope(
        &self,
        bad: &impl Fn(&'static str, String, String) -> Result<(), ModelError>,
        within: &impl Fn(&'static str, f32, RangeInclusive<f32>, &str) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        let factor_within = |factor| within("rope scaling factor", factor, 1.0..=1e6, "1 to 1e6");
        let original_within = |tokens| {
            let allowed = format!("1 to {CONTEXT_MAX}");
            within("rope scaling's original context", tokens, 1.0..=CONTEXT_MAX as f32, &allowed)
        };
        match &self.rope_scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => factor_within(*factor)?,
            RopeScaling::Llama3 {
                factor,
                low_frequency_factor: low,
                high_frequency_factor: high,
                original_context_tokens: original,
            } => {
                factor_within(*factor)?;
                if !(*low > 0.0 && low < high && *high <= 1e6) {
                    let allowed = "low frequency factor > 0, high above it, up to 1e6".into();
                    bad("rope scaling", format!("low {low}, high {high}"), allowed)?;
                }
                original_within(*original)?;
            }
            RopeScaling::Yarn {
                factor,
                fast_rotations: fast,
                slow_rotations: slow,
                original_context_tokens: original,
                has_whole_bounds: _,
            } => {
                factor_within(*factor)?;
                if self.rope_theta == 1.0 {
                    bad("rope theta", "1".into(), "above 1 with YaRN, up to 1e12".into())?;
                }
                if !(*slow > 0.0 && slow < fast && *fast <= 1e6) {
                    let allowed = "beta_slow > 0, beta_fast above it, up to 1e6".into();
                    bad("rope scaling", format!("beta_slow {slow}, beta_fast {fast}"), allowed)?;
                }
                original_within(*original)?;
            }
            RopeScaling::Divisors(divisors) => {
                if divisors.len() != self.rotary_dim / 2 {
                    let allowed = format!("{} (half the rotary dimension)", self.rotary_dim / 2);
                    bad("number of rope divisors", divisors.len().to_string(), allowed)?;
                }
                for divisor in divisors {
                    within("rope divisor", *divisor, 1e-6..=1e6, "1e-6 to 1e6")?;
                }
            }
        }
        // The factor is applied by the scale of scores, which includes elements without RoPE, and
        // layers with other RoPE.
        let (range, allowed) = match (self.rotary_dim == self.head_dim, self.window_rope_theta) {
            (true, None) => (0.1..=10.0, "0.1 to 10"),
            (true, Some(_)) => (1.0..=1.0, "1 if layers with a window have another RoPE"),
            (false, _) => (1.0..=1.0, "1 with partial RoPE"),
        };
        within("rope attention factor", self.rope_attention_factor, range, allowed)?;
        Ok(())
    }

    /// Returns the supported numbers of ranks, 1 first: all ranks have equally many KV heads, rows
    /// of the feed-forward network, and with expert parallelism (`has_whole_experts`) experts.
    pub fn rank_counts(&self, has_whole_experts: bool) -> impl Iterator<Item = usize> {
        let sizes = self.layers.iter().map(|layer| match layer.feed_forward {
            FeedForward::Gated(_) => self.ffn_size,
            FeedForward::Experts(experts) if has_whole_experts => experts.count,
            FeedForward::Experts(experts) => experts.size,
        });
        let shared = self.shared_expert().map(|shared| shared.size);
        let mut counts: Vec<usize> = sizes.chain(shared).chain([self.kv_head_count]).collect();
        counts.sort_unstable();
        counts.dedup();
        let most = self.vocab_size.min(RANKS_MAX);
        (1..=most).filter(move |&of| counts.iter().all(|count| count.is_multiple_of(of)))
    }

    /// Returns whether `ranks` ranks shard the model by expert parallelism if nothing is set: only
    /// if they cannot have equal parts of every expert.
    pub fn prefers_whole_experts(&self, ranks: usize) -> bool {
        let allows = |has_whole_experts| self.rank_counts(has_whole_experts).any(|it| it == ranks);
        self.experts().is_some() && !allows(false) && allows(true)
    }

    /// Rejects a group over which the model cannot be sharded.
    pub fn check_shard(&self, shard: Shard) -> Result<(), ModelError> {
        let allowed: Vec<usize> = self.rank_counts(shard.has_whole_experts()).collect();
        if allowed.contains(&shard.rank_count()) {
            return Ok(());
        }
        let of_experts =
            |ExpertSpec { count, size, .. }: ExpertSpec| match shard.has_whole_experts() {
                true => ("number of experts", count),
                false => ("feed-forward size", size),
            };
        let (what, size) = self.experts().map_or(("feed-forward size", self.ffn_size), of_experts);
        let (ranks, kv_heads) = (shard.rank_count(), self.kv_head_count);
        Err(ModelError::RankCount { ranks, kv_heads, what, size, allowed })
    }

    /// Returns the experts of the layers that have them; they are the same in all of these layers.
    pub fn experts(&self) -> Option<ExpertSpec> {
        self.layers.iter().find_map(|layer| match layer.feed_forward {
            FeedForward::Gated(_) => None,
            FeedForward::Experts(experts) => Some(experts),
        })
    }

    /// Returns whether the checkpoints of the family have experts in MXFP4, which GPUs keep.
    pub fn has_mxfp4_experts(&self) -> bool {
        self.family.has_stacked_experts()
    }

    /// Returns the shared expert of the layers that have one; it is the same in all of these
    /// layers.
    pub fn shared_expert(&self) -> Option<SharedExpertSpec> {
        self.experts().and_then(|experts| experts.shared)
    }

    /// Returns the QK norm, which is the same in all layers with attention.
    pub fn qk_norm(&self) -> Option<NormSpan> {
        self.layers.iter().find_map(LayerSpec::attention)?.qk_norm
    }

    /// Returns the linear attention of the layers that have it; it is the same in all of these
    /// layers.
    pub fn linear_attention(&self) -> Option<DeltaSpec> {
        self.layers.iter().find_map(LayerSpec::linear_attention)
    }

    /// Returns the recurrent state of a sequence; `None`: no layer has linear attention.
    pub fn state_shape(&self) -> Option<StateShape> {
        let delta = self.linear_attention()?;
        Some(delta.state(self.layer_count - self.kv_layer_count()))
    }

    /// Returns the number of layers with attention, which have KV.
    pub fn kv_layer_count(&self) -> usize {
        self.layers.iter().filter(|layer| layer.attention().is_some()).count()
    }

    /// Returns the index of a layer among those with attention, or among those with linear
    /// attention.
    pub(crate) fn mixer_index(&self, layer: usize) -> usize {
        let has_kv = |layer: &LayerSpec| layer.attention().is_some();
        let is_alike = |other: &&LayerSpec| has_kv(other) == has_kv(&self.layers[layer]);
        self.layers[..layer].iter().filter(is_alike).count()
    }

    /// Returns whether adapters (LoRA) of the model can be loaded: if it has neither experts nor
    /// linear attention.
    pub fn takes_adapters(&self) -> bool {
        self.experts().is_none() && self.linear_attention().is_none()
    }

    /// Returns the width of the widest intermediate layer of a rank's gated networks, experts
    /// included.
    pub fn ffn_size_of(&self, shard: Shard) -> usize {
        let size = |layer: &LayerSpec| match layer.feed_forward {
            FeedForward::Gated(_) => shard.part(self.ffn_size).len(),
            FeedForward::Experts(experts) => shard.expert_rows(experts.size).len(),
        };
        self.layers.iter().map(size).max().unwrap_or(0)
    }

    /// Returns the heads that a rank computes.
    pub fn head_shape_of(&self, shard: Shard) -> HeadShape {
        HeadShape {
            query_heads: shard.part(self.query_head_count).len(),
            kv_heads: shard.part(self.kv_head_count).len(),
            head_dim: self.head_dim,
        }
    }

    /// Returns the windows of the layers with attention.
    fn windows(&self) -> impl Iterator<Item = Option<NonZeroUsize>> {
        self.layers.iter().filter_map(LayerSpec::attention).map(|attention| attention.window)
    }

    /// Returns the KV groups: the layers with attention by their windows, and the recurrent state
    /// of the other layers.
    pub fn kv_groups(&self, format: KvFormat) -> KvGroups {
        let groups = KvGroups::of_windows(&self.windows().collect::<Vec<_>>());
        groups.with_state(self.state_shape(), self.kv_layout(format))
    }

    /// Returns the KV layout of a block with all layers with attention, and all heads.
    pub fn kv_layout(&self, format: KvFormat) -> KvLayout {
        KvLayout {
            layer_count: self.kv_layer_count(),
            kv_head_count: self.kv_head_count,
            head_dim: self.head_dim,
            format,
        }
    }

    /// Returns the layout of a block with all heads: the layers of one KV group.
    pub fn block_layout(&self, format: KvFormat) -> KvLayout {
        self.kv_groups(format).block_layout(self.kv_layout(format))
    }

    /// Returns the KV layout of a block with all layers and a rank's heads only.
    pub fn kv_layout_of(&self, format: KvFormat, shard: Shard) -> KvLayout {
        let kv_head_count = shard.part(self.kv_head_count).len();
        KvLayout { kv_head_count, ..self.kv_layout(format) }
    }

    /// Returns the scale of attention scores, with the factors of queries and keys.
    pub fn attention_scale(&self) -> f32 {
        self.rope_attention_factor.powi(2) / self.query_pre_attn_scalar.sqrt()
    }

    /// Returns the number of tokens that a layer attends to, if bounded.
    pub fn window(&self, layer: usize) -> Option<NonZeroUsize> {
        self.layers[layer].window()
    }

    /// Returns the radians per position of each of the `rotary_dim / 2` rotary pairs, with scaling
    /// applied.
    pub fn rope_frequencies(&self) -> Vec<f32> {
        rope::frequencies(self.rope_theta, self.rotary_dim, &self.rope_scaling)
    }

    /// Returns the frequencies of layers with a window, if they have their own.
    pub fn window_rope_frequencies(&self) -> Option<Vec<f32>> {
        let theta = self.window_rope_theta?;
        Some(rope::frequencies(theta, self.rotary_dim, &RopeScaling::None))
    }

    /// Returns the factor of embeddings. It has the precision of bf16, in which the models were
    /// trained.
    pub fn embedding_scale(&self) -> f32 {
        match self.family.scales_embedding() {
            true => bf16::from_f32((self.hidden_size as f32).sqrt()).to_f32(),
            false => 1.0,
        }
    }

    /// Returns the number that is added to the stored elements of a vector.
    pub fn vector_offset(&self, weight: Weight) -> f32 {
        let is_offset = self.family.has_norm_offset() && weight.is_norm();
        if is_offset { 1.0 } else { 0.0 }
    }

    /// Returns the number of elements of all weights. A tied output counts once.
    pub fn parameter_count(&self) -> u64 {
        Weight::all(self).map(|weight| weight.shape(self).elements()).sum()
    }

    /// Returns the number of elements of the weights that a rank holds. A tied output counts once.
    pub fn parameter_count_of(&self, shard: Shard) -> u64 {
        Weight::all(self).map(|weight| weight.part(self, shard).elements()).sum()
    }

    /// Returns the number of elements of a rank's part of the experts' matrices.
    pub fn expert_parameter_count_of(&self, shard: Shard) -> u64 {
        let experts = Weight::all(self).filter(Weight::is_expert);
        experts.map(|weight| weight.part(self, shard).elements()).sum()
    }

    /// Returns the number of elements of the weights that every forward pass reads in full. An
    /// embedding that is not also the output does not count: a forward pass reads only the rows of
    /// its tokens. Experts do not count either.
    pub fn forward_parameter_count(&self) -> u64 {
        let looked_up = |weight: &Weight| *weight == Weight::Embedding && !self.tied_output;
        let read = Weight::all(self).filter(|weight| !looked_up(weight) && !weight.is_expert());
        read.map(|weight| weight.shape(self).elements()).sum()
    }

    /// Returns the bytes of KV that attention reads to decode the last token of a sequence of
    /// `tokens` tokens, including the KV of this token.
    pub fn kv_read_bytes(&self, tokens: usize, format: KvFormat) -> u64 {
        let token_bytes = 2 * self.kv_head_count * format.token_bytes(self.head_dim);
        let seen = |window: Option<NonZeroUsize>| window.map_or(tokens, |it| tokens.min(it.get()));
        self.windows().map(|window| (seen(window) * token_bytes) as u64).sum()
    }
}
