//! The weights of the Llama family: which there are, their shapes, and their names in each format.

use crate::config::ModelConfig;

/// One weight of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Weight {
    Embedding,
    OutputNorm,
    /// The output projection; there is none when it is tied to the embedding.
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
    AttentionOutput,
    FfnNorm,
    Gate,
    Up,
    Down,
}

/// A weight's shape; matrices are `[rows][cols]` = `[out][in]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightShape {
    Vector { len: usize },
    Matrix { rows: usize, cols: usize },
}

impl WeightShape {
    /// As checkpoints state it, slowest dimension first.
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

impl LayerWeight {
    pub const ALL: [LayerWeight; 9] = [
        LayerWeight::AttentionNorm,
        LayerWeight::Query,
        LayerWeight::Key,
        LayerWeight::Value,
        LayerWeight::AttentionOutput,
        LayerWeight::FfnNorm,
        LayerWeight::Gate,
        LayerWeight::Up,
        LayerWeight::Down,
    ];
}

impl Weight {
    /// Every weight of a model, in the order of the forward pass.
    pub fn all(config: &ModelConfig) -> impl Iterator<Item = Weight> + use<> {
        let layers = (0..config.layer_count)
            .flat_map(|layer| LayerWeight::ALL.map(|weight| Weight::Layer(layer, weight)));
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
        match self {
            Weight::Embedding | Weight::Output => matrix(config.vocab_size, hidden),
            Weight::OutputNorm => WeightShape::Vector { len: hidden },
            Weight::Layer(_, weight) => match weight {
                LayerWeight::AttentionNorm | LayerWeight::FfnNorm => {
                    WeightShape::Vector { len: hidden }
                }
                LayerWeight::Query => matrix(query_width, hidden),
                LayerWeight::Key | LayerWeight::Value => matrix(kv_width, hidden),
                LayerWeight::AttentionOutput => matrix(hidden, query_width),
                LayerWeight::Gate | LayerWeight::Up => matrix(config.ffn_size, hidden),
                LayerWeight::Down => matrix(hidden, config.ffn_size),
            },
        }
    }

    /// The tensor's name in a GGUF file.
    pub fn gguf_name(self) -> String {
        match self {
            Weight::Embedding => "token_embd.weight".into(),
            Weight::OutputNorm => "output_norm.weight".into(),
            Weight::Output => "output.weight".into(),
            Weight::Layer(layer, weight) => {
                let name = match weight {
                    LayerWeight::AttentionNorm => "attn_norm",
                    LayerWeight::Query => "attn_q",
                    LayerWeight::Key => "attn_k",
                    LayerWeight::Value => "attn_v",
                    LayerWeight::AttentionOutput => "attn_output",
                    LayerWeight::FfnNorm => "ffn_norm",
                    LayerWeight::Gate => "ffn_gate",
                    LayerWeight::Up => "ffn_up",
                    LayerWeight::Down => "ffn_down",
                };
                format!("blk.{layer}.{name}.weight")
            }
        }
    }

    /// The tensor's name in a Hugging Face checkpoint.
    pub fn hugging_face_name(self) -> String {
        match self {
            Weight::Embedding => "model.embed_tokens.weight".into(),
            Weight::OutputNorm => "model.norm.weight".into(),
            Weight::Output => "lm_head.weight".into(),
            Weight::Layer(layer, weight) => {
                let name = match weight {
                    LayerWeight::AttentionNorm => "input_layernorm",
                    LayerWeight::Query => "self_attn.q_proj",
                    LayerWeight::Key => "self_attn.k_proj",
                    LayerWeight::Value => "self_attn.v_proj",
                    LayerWeight::AttentionOutput => "self_attn.o_proj",
                    LayerWeight::FfnNorm => "post_attention_layernorm",
                    LayerWeight::Gate => "mlp.gate_proj",
                    LayerWeight::Up => "mlp.up_proj",
                    LayerWeight::Down => "mlp.down_proj",
                };
                format!("model.layers.{layer}.{name}.weight")
            }
        }
    }
}
