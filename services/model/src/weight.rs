//! Weights of a model: their shapes, and their names in each format.

use std::ops::Range;

use kernels::{Shard, backend::NormSpan};

use crate::{
    config::ModelConfig,
    layer::{FeedForward, LayerSpec},
};

/// One weight of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Weight {
    Embedding,
    OutputNorm,
    /// Output projection; absent when it is tied to the embedding.
    Output,
    Layer(usize, LayerWeight),
}

/// One weight of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerWeight {
    AttentionNorm,
    Query,
    /// Projection of the output gate of attention, with the rows of `Query`.
    QueryGate,
    Key,
    Value,
    QueryBias,
    KeyBias,
    ValueBias,
    /// Attention sink of each query head.
    Sinks,
    /// Weight of the norm of queries.
    QueryNorm,
    KeyNorm,
    AttentionOutput,
    /// Bias of the output projection of attention.
    OutputBias,
    /// Norm of the output of attention.
    AttentionPostNorm,
    /// Weight of linear attention.
    Delta(DeltaWeight),
    FfnNorm,
    Gate,
    Up,
    Down,
    /// Norm of the output of the feed-forward network.
    FfnPostNorm,
    /// Router of experts, with a row for each.
    Router,
    /// Bias of the router of experts.
    RouterBias,
    /// Weight of the shared expert.
    Shared(ExpertWeight),
    /// Router of the shared expert, with one row.
    SharedRouter,
    /// Weight of the expert with this index.
    Expert(u32, ExpertWeight),
    /// Bias of the expert with this index.
    ExpertBias(u32, ExpertWeight),
}

/// Weight of linear attention (Gated DeltaNet).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeltaWeight {
    Query,
    Key,
    Value,
    /// Projection of the output gate.
    Gate,
    /// Projection of the update rate of each value head.
    UpdateRate,
    /// Projection of the decay of each value head.
    Decay,
    /// Convolution of queries: `[channels][conv_size]`, as a vector.
    QueryConv,
    KeyConv,
    ValueConv,
    /// Logarithm of the decay rate of each value head.
    DecayLog,
    /// Bias of the decay's time step of each value head.
    TimeBias,
    /// Weight of the norm of each value head's output.
    Norm,
    Output,
}

/// Weight of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExpertWeight {
    Gate,
    Up,
    Down,
}

impl ExpertWeight {
    fn name(self) -> &'static str {
        match self {
            ExpertWeight::Gate => "gate",
            ExpertWeight::Up => "up",
            ExpertWeight::Down => "down",
        }
    }
}

/// Shape of a weight; matrices are `[rows][cols]` = `[out][in]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightShape {
    Vector { len: usize },
    Matrix { rows: usize, cols: usize },
}

impl WeightShape {
    /// Returns the dimensions as checkpoints state them, slowest first.
    pub fn dims(self) -> Vec<u64> {
        match self {
            WeightShape::Vector { len } => vec![len as u64],
            WeightShape::Matrix { rows, cols } => vec![rows as u64, cols as u64],
        }
    }

    pub fn elements(self) -> u64 {
        self.dims().iter().product()
    }
}

/// Part of a weight that one rank loads; a vector counts as one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightPart {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
}

impl WeightPart {
    pub fn elements(&self) -> u64 {
        self.rows.len() as u64 * self.cols.len() as u64
    }
}

/// Dimension of a weight, which determines its size and how ranks shard it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Axis {
    /// The only row of a vector.
    One,
    Hidden,
    QueryHeads,
    /// One element for each query head.
    Sinks,
    KvHeads,
    /// The one row of a matrix.
    OneRow,
    /// The elements of a query head with a norm, or of all query heads.
    QueryNorm,
    KeyNorm,
    /// Elements of queries or keys of linear attention.
    LinearKeys,
    LinearValues,
    /// One element for each value head of linear attention.
    LinearHeads,
    /// Elements of a value head of linear attention.
    LinearHead,
    /// Weights of the convolution of queries or keys.
    KeyConv,
    ValueConv,
    Ffn,
    Experts,
    ExpertFfn,
    SharedFfn,
    Vocabulary,
}

impl Axis {
    fn len(self, config: &ModelConfig) -> usize {
        match self {
            Axis::One | Axis::OneRow => 1,
            Axis::Hidden => config.hidden_size,
            Axis::QueryHeads => config.query_head_count * config.head_dim,
            Axis::Sinks => config.query_head_count,
            Axis::KvHeads => config.kv_head_count * config.head_dim,
            Axis::QueryNorm => norm_heads(config, config.query_head_count) * config.head_dim,
            Axis::KeyNorm => norm_heads(config, config.kv_head_count) * config.head_dim,
            Axis::LinearKeys
            | Axis::LinearValues
            | Axis::LinearHeads
            | Axis::LinearHead
            | Axis::KeyConv
            | Axis::ValueConv => {
                let (heads, size) = self.linear_heads(config);
                heads * size
            }
            Axis::Ffn => config.ffn_size,
            Axis::Experts => config.experts().map_or(0, |experts| experts.count),
            Axis::ExpertFfn => config.experts().map_or(0, |experts| experts.size),
            Axis::SharedFfn => config.shared_expert().map_or(0, |shared| shared.size),
            Axis::Vocabulary => config.vocab_size,
        }
    }

    /// Returns the range that a rank loads. Heads, intermediate rows of the feed-forward network
    /// and tokens are sharded.
    fn part(self, config: &ModelConfig, shard: Shard) -> Range<usize> {
        let part = |count: usize, size: usize| {
            let heads = shard.part(count);
            heads.start * size..heads.end * size
        };
        let heads = |count: usize| part(count, config.head_dim);
        match self {
            Axis::One | Axis::OneRow | Axis::Hidden | Axis::Experts | Axis::LinearHead => {
                0..self.len(config)
            }
            Axis::LinearKeys
            | Axis::LinearValues
            | Axis::LinearHeads
            | Axis::KeyConv
            | Axis::ValueConv => {
                let (heads, size) = self.linear_heads(config);
                part(heads, size)
            }
            // A norm of each head is the same on all ranks.
            Axis::QueryNorm | Axis::KeyNorm if self.len(config) == config.head_dim => {
                0..config.head_dim
            }
            Axis::QueryHeads | Axis::QueryNorm => heads(config.query_head_count),
            Axis::KvHeads | Axis::KeyNorm => heads(config.kv_head_count),
            Axis::Ffn | Axis::SharedFfn | Axis::Sinks => shard.part(self.len(config)),
            Axis::ExpertFfn => shard.expert_rows(self.len(config)),
            Axis::Vocabulary => shard.tokens(config.vocab_size),
        }
    }
}

impl Axis {
    /// Returns the number of heads of a dimension of linear attention, and the elements of each.
    fn linear_heads(self, config: &ModelConfig) -> (usize, usize) {
        let Some(delta) = config.linear_attention() else { return (0, 0) };
        match self {
            Axis::LinearKeys => (delta.key_heads, delta.key_dim),
            Axis::KeyConv => (delta.key_heads, delta.key_dim * delta.conv_size),
            Axis::LinearHeads => (delta.value_heads, 1),
            Axis::LinearHead => (1, delta.value_dim),
            Axis::ValueConv => (delta.value_heads, delta.value_dim * delta.conv_size),
            _ => (delta.value_heads, delta.value_dim),
        }
    }
}

/// Returns the number of heads of `count` whose norms have weights of their own.
fn norm_heads(config: &ModelConfig, count: usize) -> usize {
    match config.qk_norm() {
        Some(NormSpan::Projection) => count,
        Some(NormSpan::Head) | None => 1,
    }
}

/// Weights of a layer in the order of the forward pass: names in GGUF and in Hugging Face's
/// checkpoints, rows and columns.
const LAYER_WEIGHTS: [(LayerWeight, &str, &str, Axis, Axis); 38] = {
    use Axis::{
        Experts, Ffn, Hidden, KeyConv, KeyNorm, KvHeads, LinearHead, LinearHeads, LinearKeys,
        LinearValues, One, OneRow, QueryHeads, QueryNorm, SharedFfn, Sinks, ValueConv,
    };
    use DeltaWeight as D;
    use LayerWeight as W;
    // No GGUF file of the families with these weights is read.
    const NO_GGUF: &str = "";
    const CONV: &str = "linear_attn.conv1d.weight";
    const S_GATE: W = W::Shared(ExpertWeight::Gate);
    const S_UP: W = W::Shared(ExpertWeight::Up);
    const S_DOWN: W = W::Shared(ExpertWeight::Down);
    [
        (W::AttentionNorm, "attn_norm.weight", "input_layernorm.weight", One, Hidden),
        (W::Query, "attn_q.weight", "self_attn.q_proj.weight", QueryHeads, Hidden),
        (W::QueryGate, NO_GGUF, "self_attn.q_proj.weight", QueryHeads, Hidden),
        (W::Key, "attn_k.weight", "self_attn.k_proj.weight", KvHeads, Hidden),
        (W::Value, "attn_v.weight", "self_attn.v_proj.weight", KvHeads, Hidden),
        (W::QueryBias, "attn_q.bias", "self_attn.q_proj.bias", One, QueryHeads),
        (W::KeyBias, "attn_k.bias", "self_attn.k_proj.bias", One, KvHeads),
        (W::ValueBias, "attn_v.bias", "self_attn.v_proj.bias", One, KvHeads),
        (W::Sinks, "attn_sinks.weight", "self_attn.sinks", One, Sinks),
        (W::QueryNorm, "attn_q_norm.weight", "self_attn.q_norm.weight", One, QueryNorm),
        (W::KeyNorm, "attn_k_norm.weight", "self_attn.k_norm.weight", One, KeyNorm),
        (W::AttentionOutput, "attn_output.weight", "self_attn.o_proj.weight", Hidden, QueryHeads),
        (W::OutputBias, "attn_output.bias", "self_attn.o_proj.bias", One, Hidden),
        (
            W::AttentionPostNorm,
            "post_attention_norm.weight",
            "post_attention_layernorm.weight",
            One,
            Hidden,
        ),
        (W::Delta(D::Query), NO_GGUF, "linear_attn.in_proj_qkv.weight", LinearKeys, Hidden),
        (W::Delta(D::Key), NO_GGUF, "linear_attn.in_proj_qkv.weight", LinearKeys, Hidden),
        (W::Delta(D::Value), NO_GGUF, "linear_attn.in_proj_qkv.weight", LinearValues, Hidden),
        (W::Delta(D::Gate), NO_GGUF, "linear_attn.in_proj_z.weight", LinearValues, Hidden),
        (W::Delta(D::UpdateRate), NO_GGUF, "linear_attn.in_proj_b.weight", LinearHeads, Hidden),
        (W::Delta(D::Decay), NO_GGUF, "linear_attn.in_proj_a.weight", LinearHeads, Hidden),
        (W::Delta(D::QueryConv), NO_GGUF, CONV, One, KeyConv),
        (W::Delta(D::KeyConv), NO_GGUF, CONV, One, KeyConv),
        (W::Delta(D::ValueConv), NO_GGUF, CONV, One, ValueConv),
        (W::Delta(D::DecayLog), NO_GGUF, "linear_attn.A_log", One, LinearHeads),
        (W::Delta(D::TimeBias), NO_GGUF, "linear_attn.dt_bias", One, LinearHeads),
        (W::Delta(D::Norm), NO_GGUF, "linear_attn.norm.weight", One, LinearHead),
        (W::Delta(D::Output), NO_GGUF, "linear_attn.out_proj.weight", Hidden, LinearValues),
        (W::FfnNorm, "ffn_norm.weight", "post_attention_layernorm.weight", One, Hidden),
        (W::Gate, "ffn_gate.weight", "mlp.gate_proj.weight", Ffn, Hidden),
        (W::Up, "ffn_up.weight", "mlp.up_proj.weight", Ffn, Hidden),
        (W::Down, "ffn_down.weight", "mlp.down_proj.weight", Hidden, Ffn),
        (W::FfnPostNorm, "post_ffw_norm.weight", "post_feedforward_layernorm.weight", One, Hidden),
        (W::Router, "ffn_gate_inp.weight", "mlp.gate.weight", Experts, Hidden),
        (W::RouterBias, "exp_probs_b.bias", "mlp.gate.e_score_correction_bias", One, Experts),
        (S_GATE, "ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight", SharedFfn, Hidden),
        (S_UP, "ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight", SharedFfn, Hidden),
        (S_DOWN, "ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight", Hidden, SharedFfn),
        (
            W::SharedRouter,
            "ffn_gate_inp_shexp.weight",
            "mlp.shared_expert_gate.weight",
            OneRow,
            Hidden,
        ),
    ]
};

impl LayerWeight {
    /// Returns the weights of a layer, in the order of the forward pass.
    pub fn of(layer: LayerSpec) -> impl Iterator<Item = LayerWeight> {
        let attention = layer.attention();
        let (gated, experts) = match layer.feed_forward {
            FeedForward::Gated(gated) => (Some(gated), None),
            FeedForward::Experts(experts) => (None, Some(experts)),
        };
        let shared = experts.and_then(|experts| experts.shared);
        let expert_count = experts.map_or(0, |experts| experts.count as u32);
        let of_experts = (0..expert_count).flat_map(|expert| {
            let weights = [ExpertWeight::Gate, ExpertWeight::Up, ExpertWeight::Down];
            weights.map(|weight| LayerWeight::Expert(expert, weight))
        });
        let bias_count =
            if experts.is_some_and(|it| it.has_expert_biases) { expert_count } else { 0 };
        let biases = (0..bias_count).flat_map(|expert| {
            let weights = [ExpertWeight::Gate, ExpertWeight::Up, ExpertWeight::Down];
            weights.map(|weight| LayerWeight::ExpertBias(expert, weight))
        });
        let is_of_layer = move |weight: &LayerWeight| match weight {
            LayerWeight::Query
            | LayerWeight::Key
            | LayerWeight::Value
            | LayerWeight::AttentionOutput => attention.is_some(),
            LayerWeight::QueryGate => attention.is_some_and(|it| it.has_output_gate),
            LayerWeight::QueryBias | LayerWeight::KeyBias | LayerWeight::ValueBias => {
                attention.is_some_and(|it| it.has_bias)
            }
            LayerWeight::OutputBias => attention.is_some_and(|it| it.has_output_bias),
            LayerWeight::Sinks => attention.is_some_and(|it| it.has_sinks),
            LayerWeight::QueryNorm | LayerWeight::KeyNorm => {
                attention.is_some_and(|it| it.qk_norm.is_some())
            }
            LayerWeight::AttentionPostNorm => attention.is_some_and(|it| it.has_post_norm),
            LayerWeight::Delta(_) => attention.is_none(),
            LayerWeight::FfnPostNorm => gated.is_some_and(|gated| gated.has_post_norm),
            LayerWeight::Gate | LayerWeight::Up | LayerWeight::Down => gated.is_some(),
            LayerWeight::Router => experts.is_some(),
            LayerWeight::RouterBias => experts.is_some_and(|experts| experts.has_bias),
            LayerWeight::Shared(_) => shared.is_some(),
            LayerWeight::SharedRouter => shared.is_some_and(|shared| shared.has_router),
            _ => true,
        };
        let weights = LAYER_WEIGHTS.into_iter().map(|row| row.0).filter(is_of_layer);
        weights.chain(of_experts).chain(biases)
    }

    /// Returns the name in GGUF files, within a layer. One tensor has the matrices of all experts.
    fn gguf_name(self) -> String {
        match self {
            LayerWeight::Expert(_, weight) => format!("ffn_{}_exps.weight", weight.name()),
            LayerWeight::ExpertBias(_, weight) => format!("ffn_{}_exps.bias", weight.name()),
            _ => self.row().1.to_owned(),
        }
    }

    /// Returns the name in Hugging Face's checkpoints, within a layer. Some families have other
    /// names.
    pub(crate) fn hugging_face_name(self) -> String {
        match self {
            LayerWeight::Expert(expert, weight) => {
                format!("mlp.experts.{expert}.{}_proj.weight", weight.name())
            }
            LayerWeight::ExpertBias(expert, weight) => {
                format!("mlp.experts.{expert}.{}_proj.bias", weight.name())
            }
            _ => self.row().2.to_owned(),
        }
    }

    /// Returns rows and columns.
    fn axes(self) -> (Axis, Axis) {
        match self {
            LayerWeight::Expert(_, ExpertWeight::Gate | ExpertWeight::Up) => {
                (Axis::ExpertFfn, Axis::Hidden)
            }
            LayerWeight::Expert(_, ExpertWeight::Down) => (Axis::Hidden, Axis::ExpertFfn),
            LayerWeight::ExpertBias(_, ExpertWeight::Gate | ExpertWeight::Up) => {
                (Axis::One, Axis::ExpertFfn)
            }
            LayerWeight::ExpertBias(_, ExpertWeight::Down) => (Axis::One, Axis::Hidden),
            _ => (self.row().3, self.row().4),
        }
    }

    fn row(self) -> (LayerWeight, &'static str, &'static str, Axis, Axis) {
        let row = LAYER_WEIGHTS.into_iter().find(|row| row.0 == self);
        row.expect("the table has every weight but those of experts")
    }
}

impl Weight {
    /// Returns whether the weight is a matrix of an expert. A shared expert does not count.
    pub(crate) fn is_expert(&self) -> bool {
        matches!(self, Weight::Layer(_, LayerWeight::Expert(..)))
    }

    /// Returns whether a backend may store the weight, a matrix, with fewer bits than it is
    /// computed with: neither embeddings and output heads, nor routers, whose logits decide by small
    /// differences, nor the rates of a recurrent state, whose errors add up.
    pub(crate) fn may_be_quantized(&self) -> bool {
        use DeltaWeight::{Decay, UpdateRate};
        use LayerWeight::{Delta, Router, SharedRouter};
        let is_exact = |weight: &LayerWeight| {
            matches!(weight, Router | SharedRouter | Delta(UpdateRate | Decay))
        };
        matches!(self, Weight::Layer(_, of_layer) if !is_exact(of_layer))
    }

    pub(crate) fn is_norm(&self) -> bool {
        use LayerWeight as W;
        match self {
            Weight::OutputNorm => true,
            Weight::Embedding | Weight::Output => false,
            Weight::Layer(_, weight) => matches!(
                weight,
                W::AttentionNorm
                    | W::QueryNorm
                    | W::KeyNorm
                    | W::AttentionPostNorm
                    | W::FfnNorm
                    | W::FfnPostNorm
            ),
        }
    }

    /// Returns every weight of a model, in the order of the forward pass.
    pub fn all(config: &ModelConfig) -> impl Iterator<Item = Weight> + use<> {
        let layers = config.layers.clone().into_iter().enumerate();
        let layers = layers.flat_map(|(index, layer)| {
            LayerWeight::of(layer).map(move |weight| Weight::Layer(index, weight))
        });
        let output = (!config.tied_output).then_some(Weight::Output);
        std::iter::once(Weight::Embedding)
            .chain(layers)
            .chain(std::iter::once(Weight::OutputNorm))
            .chain(output)
    }

    /// Returns rows and columns.
    fn axes(self) -> (Axis, Axis) {
        match self {
            Weight::Embedding | Weight::Output => (Axis::Vocabulary, Axis::Hidden),
            Weight::OutputNorm => (Axis::One, Axis::Hidden),
            Weight::Layer(_, weight) => weight.axes(),
        }
    }

    pub fn shape(self, config: &ModelConfig) -> WeightShape {
        let (rows, cols) = self.axes();
        let cols = cols.len(config);
        match rows {
            Axis::One => WeightShape::Vector { len: cols },
            rows => WeightShape::Matrix { rows: rows.len(config), cols },
        }
    }

    /// Returns rows and columns of a matrix.
    pub(crate) fn matrix_shape(self, config: &ModelConfig) -> (usize, usize) {
        let (rows, cols) = self.axes();
        (rows.len(config), cols.len(config))
    }

    /// Returns the part of the weight that a rank loads. The part of an expert that the rank lacks
    /// is empty. If ranks split an expert, their outputs are added, so only the first rank has the
    /// bias of down. The parts of the embedding and of the output have the same rows.
    ///
    /// # Panics
    /// When the model cannot be sharded over these ranks; [`ModelConfig::check_shard`] rejects this
    /// earlier.
    pub fn part(self, config: &ModelConfig, shard: Shard) -> WeightPart {
        let (rows, cols) = self.axes();
        let part = WeightPart { rows: rows.part(config, shard), cols: cols.part(config, shard) };
        let has = |expert| shard.experts(Axis::Experts.len(config)).contains(&(expert as usize));
        let adds_bias = shard.has_whole_experts() || shard.rank() == 0;
        match self {
            Weight::Layer(_, LayerWeight::Expert(expert, _)) if !has(expert) => {
                WeightPart { rows: 0..0, ..part }
            }
            Weight::Layer(_, LayerWeight::ExpertBias(expert, of))
                if !has(expert) || of == ExpertWeight::Down && !adds_bias =>
            {
                WeightPart { cols: 0..0, ..part }
            }
            _ => part,
        }
    }

    /// Returns the tensor's name in a GGUF file.
    pub fn gguf_name(self) -> String {
        match self {
            Weight::Embedding => "token_embd.weight".into(),
            Weight::OutputNorm => "output_norm.weight".into(),
            Weight::Output => "output.weight".into(),
            Weight::Layer(layer, weight) => format!("blk.{layer}.{}", weight.gguf_name()),
        }
    }

    /// Returns the tensor's name in a Hugging Face checkpoint.
    pub fn hugging_face_name(self, config: &ModelConfig) -> String {
        match self {
            Weight::Embedding => "model.embed_tokens.weight".into(),
            Weight::OutputNorm => "model.norm.weight".into(),
            Weight::Output => "lm_head.weight".into(),
            Weight::Layer(layer, weight) => {
                format!("model.layers.{layer}.{}", config.family.weight_name(weight))
            }
        }
    }
}
