//! Model families, one file each. A family maps the configuration of its checkpoints to a
//! description of layers; [`Transformer`](crate::Transformer) runs the forward pass of every
//! description.

mod ernie4_5_moe;
mod gemma3;
mod glm4_moe;
mod gpt_oss;
mod llama;
mod minimax_m2;
mod mistral;
mod mixtral;
mod olmoe;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;

use std::fmt;

use crate::{
    config::{ModelConfig, fields::Fields},
    encoding::Format,
    error::ModelError,
    layer::LayerSpec,
    rope::RowPart,
    weight::LayerWeight,
};

/// Every family.
const FAMILIES: [&Family; 16] = [
    &ernie4_5_moe::FAMILY,
    &gemma3::FAMILY,
    &glm4_moe::FAMILY,
    &gpt_oss::FAMILY,
    &llama::FAMILY,
    &minimax_m2::FAMILY,
    &mistral::FAMILY,
    &mixtral::FAMILY,
    &olmoe::FAMILY,
    &qwen2::FAMILY,
    &qwen2_moe::FAMILY,
    &qwen3::FAMILY,
    &qwen3_5::FAMILY,
    &qwen3_5_moe::FAMILY,
    &qwen3_moe::FAMILY,
    &qwen3_next::FAMILY,
];

/// Begins of the names of tensors of multimodal models that are not of the language model.
const MULTIMODAL_PARTS: [&str; 3] = ["vision_tower.", "multi_modal_projector.", "model.visual."];

/// A model family. All are pre-norm decoders with RMS norms.
pub struct Family {
    /// `model_type` in Hugging Face's configurations.
    name: &'static str,
    /// Class in transformers.
    class: &'static str,
    /// Class of multimodal models with this language model: the key `text_config` describes the
    /// language model, and the names of its tensors have a prefix.
    multimodal_class: Option<&'static str>,
    /// `None`: no GGUF file of the family is read.
    gguf: Option<Gguf>,
    absent: AbsentKeys,
    /// Part of a head that RoPE rotates if the configuration names none. `None`: the class rotates
    /// whole heads only.
    rotary_factor: Option<f64>,
    /// Order of the rows of query and key projections in Hugging Face's checkpoints.
    rows: RotaryRows,
    /// Whether checkpoints may have layers for multi-token prediction (MTP) after the last layer,
    /// which are ignored.
    has_mtp_layers: bool,
    /// Whether checkpoints store the experts of a layer in one tensor for gate and up and one for
    /// down, in MXFP4.
    has_stacked_experts: bool,
    /// Whether embeddings are multiplied by the square root of the hidden size.
    scales_embedding: bool,
    /// Whether checkpoints store the weights of norms minus 1.
    has_norm_offset: bool,
    /// Keys that change the arithmetic of the family's class if they are true.
    refused: &'static [&'static str],
    /// Layer without a sliding window.
    layer: LayerSpec,
    layers: DescribeLayers,
    /// Returns the name of a weight within a layer, if it is not
    /// [`LayerWeight::hugging_face_name`].
    weight_name: fn(LayerWeight) -> Option<String>,
    /// Returns the rows of the stored tensor that a weight has, if the tensor has other weights,
    /// too.
    weight_part: fn(LayerWeight, &ModelConfig) -> Option<RowPart>,
}

/// Returns the description of a number of layers, given the keys of `config.json` and the family's
/// layer.
type DescribeLayers = fn(&Fields<'_>, LayerSpec, usize) -> Result<Vec<LayerSpec>, ModelError>;

/// GGUF files of a family.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gguf {
    /// `general.architecture`.
    pub name: &'static str,
    rows: RotaryRows,
    /// `None`: the files have no experts.
    pub experts: Option<GgufExperts>,
}

impl Gguf {
    /// Describes files without experts.
    const fn new(name: &'static str, rows: RotaryRows) -> Self {
        Self { name, rows, experts: None }
    }
}

/// Properties of the experts in a family's GGUF files that metadata do not name. All have softmax
/// scores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GgufExperts {
    /// Whether the weights of the chosen experts are divided by their sum.
    pub is_normalized: bool,
    /// Whether there is a shared expert with a router.
    pub has_shared: bool,
}

/// Order of the rows of query and key projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RotaryRows {
    /// A rotary pair is a row of the first half of a head and one of the second half.
    Halves,
    /// Rotary pairs are adjacent.
    Pairs,
}

/// Values of absent keys, as the configuration classes of transformers define them. A null means
/// "none", not "absent".
pub(crate) struct AbsentKeys {
    /// `None`: the key is required.
    pub query_head_count: Option<usize>,
    /// `None`: as many as query heads.
    pub kv_head_count: Option<usize>,
    /// `None`: the hidden size divided by the number of query heads.
    pub head_dim: Option<usize>,
    /// `None`: the key is required.
    pub ffn_size: Option<usize>,
    /// `None`: the key is required.
    pub vocab_size: Option<usize>,
    pub context_tokens: usize,
    /// `None`: the head dimension, and the key is not read.
    pub query_pre_attn_scalar: Option<f32>,
    pub rope_theta: f32,
    /// Theta of layers with a sliding window. `None`: that of the other layers.
    pub window_rope_theta: Option<f32>,
    pub rms_eps: f32,
    /// Whether the output is tied to the embedding.
    pub tied_output: bool,
}

impl AbsentKeys {
    const LLAMA: Self = Self {
        query_head_count: None,
        kv_head_count: None,
        head_dim: None,
        ffn_size: None,
        vocab_size: None,
        context_tokens: 2048,
        query_pre_attn_scalar: None,
        rope_theta: 10_000.0,
        window_rope_theta: None,
        rms_eps: 1e-6,
        tied_output: false,
    };
}

impl Family {
    /// Properties of most families. Name and class are a family's own.
    const PLAIN: Self = Self {
        name: "",
        class: "",
        multimodal_class: None,
        gguf: None,
        absent: AbsentKeys::LLAMA,
        rotary_factor: None,
        rows: RotaryRows::Halves,
        has_mtp_layers: false,
        has_stacked_experts: false,
        scales_embedding: false,
        has_norm_offset: false,
        refused: &[],
        layer: LayerSpec::LLAMA,
        layers: |_, layer, layer_count| Ok(vec![layer; layer_count]),
        weight_name: |_| None,
        weight_part: |_, _| None,
    };

    /// Returns the family with this `model_type`.
    pub fn named(name: &str) -> Option<&'static Self> {
        FAMILIES.into_iter().find(|family| family.name == name)
    }

    pub(crate) fn of_class(class: &str) -> Option<&'static Self> {
        let has = |family: &&Family| {
            family.class == class || family.is_base_class(class) || family.is_multimodal(class)
        };
        FAMILIES.into_iter().find(has)
    }

    /// Returns whether `class` is the family's model without an LM head, such as `MistralModel`.
    pub(crate) fn is_base_class(&self, class: &str) -> bool {
        let name = self.class.strip_suffix("ForCausalLM");
        name.is_some_and(|name| class.strip_suffix("Model") == Some(name))
    }

    /// Returns whether `class` is a multimodal model with the family's language model.
    pub(crate) fn is_multimodal(&self, class: &str) -> bool {
        self.multimodal_class == Some(class)
    }

    /// Returns whether a tensor belongs to the other parts of a multimodal model, which are
    /// ignored.
    pub(crate) fn ignores(&self, tensor: &str) -> bool {
        self.multimodal_class.is_some() && MULTIMODAL_PARTS.iter().any(|it| tensor.starts_with(it))
    }

    /// Returns the family whose GGUF files have this `general.architecture`, and what it says about
    /// the files.
    pub(crate) fn of_gguf(name: &str) -> Option<(&'static Self, Gguf)> {
        let mut families = FAMILIES.into_iter().filter_map(|family| Some((family, family.gguf?)));
        families.find(|(_, gguf)| gguf.name == name)
    }

    /// Returns all class names, for error messages.
    pub(crate) fn classes() -> String {
        let classes = |family: &Family| [Some(family.class), family.multimodal_class];
        let classes = FAMILIES.into_iter().flat_map(classes).flatten();
        classes.map(|class| format!("{class:?}")).collect::<Vec<_>>().join(", ")
    }

    /// Returns all GGUF names, for error messages.
    pub(crate) fn gguf_names() -> String {
        let names = FAMILIES.into_iter().filter_map(|family| family.gguf);
        names.map(|gguf| format!("{:?}", gguf.name)).collect::<Vec<_>>().join(", ")
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn absent(&self) -> &AbsentKeys {
        &self.absent
    }

    pub(crate) fn rotary_factor(&self) -> Option<f64> {
        self.rotary_factor
    }

    pub(crate) fn has_mtp_layers(&self) -> bool {
        self.has_mtp_layers
    }

    pub(crate) fn has_stacked_experts(&self) -> bool {
        self.has_stacked_experts
    }

    pub(crate) fn scales_embedding(&self) -> bool {
        self.scales_embedding
    }

    pub(crate) fn has_norm_offset(&self) -> bool {
        self.has_norm_offset
    }

    pub(crate) fn refused(&self) -> &'static [&'static str] {
        self.refused
    }

    /// Returns the family's layer without a sliding window.
    pub(crate) fn layer(&self) -> LayerSpec {
        self.layer
    }

    /// Describes `layer_count` layers of a `config.json`, or as many as a list in this file has.
    pub(crate) fn layers(
        &self,
        fields: &Fields<'_>,
        layer_count: usize,
    ) -> Result<Vec<LayerSpec>, ModelError> {
        (self.layers)(fields, self.layer, layer_count)
    }

    /// Returns the name of a weight in Hugging Face's checkpoints, within a layer.
    pub(crate) fn weight_name(&self, weight: LayerWeight) -> String {
        (self.weight_name)(weight).unwrap_or_else(|| weight.hugging_face_name())
    }

    /// Returns the rows of the tensor of a Hugging Face checkpoint that a weight has, if the tensor
    /// has other weights, too.
    pub(crate) fn weight_part(&self, weight: LayerWeight, config: &ModelConfig) -> Option<RowPart> {
        (self.weight_part)(weight, config)
    }

    /// Returns whether files of a format store the rows of query and key projections with rotary
    /// pairs adjacent.
    pub(crate) fn pairs_rows(&self, format: Format) -> bool {
        let rows = match format {
            Format::Safetensors => Some(self.rows),
            Format::Gguf => self.gguf.map(|gguf| gguf.rows),
        };
        rows == Some(RotaryRows::Pairs)
    }
}

/// Families are equal if they have the same name.
impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
