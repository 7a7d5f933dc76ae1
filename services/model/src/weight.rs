//! Weights of a model: their shapes, and their names in each format.

use std::ops::Range;

use kernels::Shard;

use crate::config::{Architecture, ModelConfig};

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
    Key,
    Value,
    QueryBias,
    KeyBias,
    ValueBias,
    /// Weight of the norm that is applied to each query head.
    QueryNorm,
    KeyNorm,
    AttentionOutput,
    FfnNorm,
    Gate,
    Up,
    Down,
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

impl LayerWeight {
    const ALL: [LayerWeight; 14] = [
        LayerWeight::AttentionNorm,
        LayerWeight::Query,
        LayerWeight::Key,
        LayerWeight::Value,
        LayerWeight::QueryBias,
        LayerWeight::KeyBias,
        LayerWeight::ValueBias,
        LayerWeight::QueryNorm,
        LayerWeight::KeyNorm,
        LayerWeight::AttentionOutput,
        LayerWeight::FfnNorm,
        LayerWeight::Gate,
        LayerWeight::Up,
        LayerWeight::Down,
    ];

    /// Returns the weights of a layer of `architecture`, in the order of the forward pass.
    pub fn of(architecture: Architecture) -> impl Iterator<Item = LayerWeight> {
        Self::ALL.into_iter().filter(move |weight| match weight {
            LayerWeight::QueryBias | LayerWeight::KeyBias | LayerWeight::ValueBias => {
                architecture.has_qkv_bias()
            }
            LayerWeight::QueryNorm | LayerWeight::KeyNorm => architecture.has_head_norms(),
            _ => true,
        })
    }

    /// Returns the names in GGUF and in Hugging Face's checkpoints, within a layer.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            LayerWeight::AttentionNorm => ("attn_norm.weight", "input_layernorm.weight"),
            LayerWeight::Query => ("attn_q.weight", "self_attn.q_proj.weight"),
            LayerWeight::Key => ("attn_k.weight", "self_attn.k_proj.weight"),
            LayerWeight::Value => ("attn_v.weight", "self_attn.v_proj.weight"),
            LayerWeight::QueryBias => ("attn_q.bias", "self_attn.q_proj.bias"),
            LayerWeight::KeyBias => ("attn_k.bias", "self_attn.k_proj.bias"),
            LayerWeight::ValueBias => ("attn_v.bias", "self_attn.v_proj.bias"),
            LayerWeight::QueryNorm => ("attn_q_norm.weight", "self_attn.q_norm.weight"),
            LayerWeight::KeyNorm => ("attn_k_norm.weight", "self_attn.k_norm.weight"),
            LayerWeight::AttentionOutput => ("attn_output.weight", "self_attn.o_proj.weight"),
            LayerWeight::FfnNorm => ("ffn_norm.weight", "post_attention_layernorm.weight"),
            LayerWeight::Gate => ("ffn_gate.weight", "mlp.gate_proj.weight"),
            LayerWeight::Up => ("ffn_up.weight", "mlp.up_proj.weight"),
            LayerWeight::Down => ("ffn_down.weight", "mlp.down_proj.weight"),
        }
    }
}

impl Weight {
    /// Returns every weight of a model, in the order of the forward pass.
    pub fn all(config: &ModelConfig) -> impl Iterator<Item = Weight> + use<> {
        let architecture = config.architecture;
        let layers = (0..config.layer_count).flat_map(move |layer| {
            LayerWeight::of(architecture).map(move |weight| Weight::Layer(layer, weight))
        });
        let output = (!config.tied_output).then_some(Weight::Output);
        std::iter::once(Weight::Embedding)
            .chain(layers)
            .chain(std::iter::once(Weight::OutputNorm))
            .chain(output)
    }

    pub fn shape(self, config: &ModelConfig) -> WeightShape {
        let hidden = config.hidden_size;
        let query_width = config.query_head_count * config.head_dim;
        let kv_width = config.kv_head_count * config.head_dim;
        let matrix = |rows, cols| WeightShape::Matrix { rows, cols };
        let vector = |len| WeightShape::Vector { len };
        match self {
            Weight::Embedding | Weight::Output => matrix(config.vocab_size, hidden),
            Weight::OutputNorm => vector(hidden),
            Weight::Layer(_, weight) => match weight {
                LayerWeight::AttentionNorm | LayerWeight::FfnNorm => vector(hidden),
                LayerWeight::QueryBias => vector(query_width),
                LayerWeight::KeyBias | LayerWeight::ValueBias => vector(kv_width),
                LayerWeight::QueryNorm | LayerWeight::KeyNorm => vector(config.head_dim),
                LayerWeight::Query => matrix(query_width, hidden),
                LayerWeight::Key | LayerWeight::Value => matrix(kv_width, hidden),
                LayerWeight::AttentionOutput => matrix(hidden, query_width),
                LayerWeight::Gate | LayerWeight::Up => matrix(config.ffn_size, hidden),
                LayerWeight::Down => matrix(hidden, config.ffn_size),
            },
        }
    }

    /// Returns the part of the weight that a rank loads. Heads, intermediate rows of the feed-forward
    /// network and tokens of the output are sharded: by rows in the weights that produce them, by
    /// columns in the weights that consume them.
    ///
    /// The embedding is replicated: a lookup reads only the rows of its tokens, so sharding would only
    /// save memory, and would cost one more all-reduce per step.
    ///
    /// # Panics
    /// When the model cannot be sharded over these ranks; [`ModelConfig::check_shard`] rejects this
    /// earlier.
    pub fn part(self, config: &ModelConfig, shard: Shard) -> WeightPart {
        let (rows, cols) = match self.shape(config) {
            WeightShape::Vector { len } => (1, len),
            WeightShape::Matrix { rows, cols } => (rows, cols),
        };
        let heads = |count: usize| {
            let heads = shard.part(count);
            heads.start * config.head_dim..heads.end * config.head_dim
        };
        let (query_heads, kv_heads) = (config.query_head_count, config.kv_head_count);
        let all = WeightPart { rows: 0..rows, cols: 0..cols };
        match self {
            Weight::Embedding | Weight::OutputNorm => all,
            Weight::Output => WeightPart { rows: shard.tokens(rows), ..all },
            Weight::Layer(_, weight) => match weight {
                LayerWeight::AttentionNorm
                | LayerWeight::FfnNorm
                | LayerWeight::QueryNorm
                | LayerWeight::KeyNorm => all,
                LayerWeight::Query => WeightPart { rows: heads(query_heads), ..all },
                LayerWeight::Key | LayerWeight::Value => {
                    WeightPart { rows: heads(kv_heads), ..all }
                }
                LayerWeight::QueryBias => WeightPart { cols: heads(query_heads), ..all },
                LayerWeight::KeyBias | LayerWeight::ValueBias => {
                    WeightPart { cols: heads(kv_heads), ..all }
                }
                LayerWeight::AttentionOutput => WeightPart { cols: heads(query_heads), ..all },
                LayerWeight::Gate | LayerWeight::Up => WeightPart { rows: shard.part(rows), ..all },
                LayerWeight::Down => WeightPart { cols: shard.part(cols), ..all },
            },
        }
    }

    /// Returns the tensor's name in a GGUF file.
    pub fn gguf_name(self) -> String {
        match self {
            Weight::Embedding => "token_embd.weight".into(),
            Weight::OutputNorm => "output_norm.weight".into(),
            Weight::Output => "output.weight".into(),
            Weight::Layer(layer, weight) => format!("blk.{layer}.{}", weight.names().0),
        }
    }

    /// Returns the tensor's name in a Hugging Face checkpoint.
    pub fn hugging_face_name(self) -> String {
        match self {
            Weight::Embedding => "model.embed_tokens.weight".into(),
            Weight::OutputNorm => "model.norm.weight".into(),
            Weight::Output => "lm_head.weight".into(),
            Weight::Layer(layer, weight) => format!("model.layers.{layer}.{}", weight.names().1),
        }
    }
}
