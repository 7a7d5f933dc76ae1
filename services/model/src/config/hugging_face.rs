//! Model configuration from a Hugging Face `config.json` (and `generation_config.json`).

use serde_json::{Map, Value};

use super::{
    LAYERS_MAX, ModelConfig, default_head_dim,
    fields::{Fields, JsonFile},
    rope_parameters::Rope,
};
use crate::{error::ModelError, families::Family};

/// Reads the configuration. `generation` adds end-of-sequence ids, because model authors put the
/// chat's ids there.
pub(crate) fn from_hugging_face(
    config: &JsonFile,
    generation: Option<&JsonFile>,
) -> Result<ModelConfig, ModelError> {
    let outer = config.fields()?;
    let Class { family, has_head, is_multimodal } = Class::read(&outer)?;
    let text_config: Option<Map<String, Value>> = match is_multimodal {
        false => None,
        true => Some(outer.require(TEXT_CONFIG)?),
    };
    let fields = match &text_config {
        None => &outer,
        Some(object) => &Fields { path: &config.path, object, parent: Some(TEXT_CONFIG) },
    };
    check_supported(fields, family)?;
    let absent = family.absent();

    let hidden_size = fields.require::<usize>("hidden_size")?;
    let query_head_count = fields.require_or("num_attention_heads", absent.query_head_count)?;
    let head_dim = match fields.get_or("head_dim", absent.head_dim)? {
        Some(head_dim) => head_dim,
        None => {
            default_head_dim(&config.path, "num_attention_heads", query_head_count, hidden_size)?
        }
    };
    let mut eos_token_ids = fields.token_ids("eos_token_id")?;
    let generation = generation.map(JsonFile::fields).transpose()?;
    for fields in [Some(&outer), generation.as_ref()].into_iter().flatten() {
        for id in fields.token_ids("eos_token_id")? {
            if !eos_token_ids.contains(&id) {
                eos_token_ids.push(id);
            }
        }
    }
    let context_tokens = fields.get("max_position_embeddings")?.unwrap_or(absent.context_tokens);
    let rope = Rope::read(fields, family, context_tokens)?;

    let is_tied = match fields.get("tie_word_embeddings")? {
        None => outer.get("tie_word_embeddings")?,
        is_tied => is_tied,
    };
    let layer_count = fields.require("num_hidden_layers")?;
    ModelConfig {
        family,
        hidden_size,
        layer_count,
        query_head_count,
        kv_head_count: fields
            .get_or("num_key_value_heads", absent.kv_head_count)?
            .unwrap_or(query_head_count),
        head_dim,
        rotary_dim: rope.dim(head_dim),
        ffn_size: fields.require_or("intermediate_size", absent.ffn_size)?,
        vocab_size: fields.require_or("vocab_size", absent.vocab_size)?,
        context_tokens: rope.context_tokens,
        rms_eps: fields.get("rms_norm_eps")?.unwrap_or(absent.rms_eps),
        query_pre_attn_scalar: match absent.query_pre_attn_scalar {
            None => head_dim as f32,
            Some(absent) => fields.get("query_pre_attn_scalar")?.unwrap_or(absent),
        },
        rope_theta: rope.theta,
        window_rope_theta: rope.window_theta,
        rope_scaling: rope.scaling,
        rope_attention_factor: rope.attention_factor,
        // `ModelConfig::validate` rejects a count above the limit.
        layers: family.layers(fields, layer_count.min(LAYERS_MAX))?,
        // Without an LM head the embedding takes its place: embedding models need no logits.
        tied_output: !has_head || is_tied.unwrap_or(absent.tied_output),
        bos_token_id: fields.token_ids("bos_token_id")?.first().copied(),
        eos_token_ids,
    }
    .validate(&config.path)
}

/// Key of the language model in the configuration of a multimodal model.
const TEXT_CONFIG: &str = "text_config";

/// Class of a model.
struct Class {
    family: &'static Family,
    has_head: bool,
    is_multimodal: bool,
}

impl Class {
    fn read(fields: &Fields<'_>) -> Result<Self, ModelError> {
        let classes = match fields.object.get("architectures") {
            Some(Value::String(class)) => vec![class.clone()],
            _ => fields.get::<Vec<String>>("architectures")?.unwrap_or_default(),
        };
        let (known, found) = match classes.as_slice() {
            [class] => (Family::of_class(class), format!("{class:?}")),
            // Older files name the model family only.
            [] => {
                let name = fields.get::<String>("model_type")?;
                let known = name.as_deref().and_then(Family::named);
                (known, format!("(none), model_type {name:?}"))
            }
            several => {
                let known = several.iter().find_map(|class| Family::of_class(class));
                (known, format!("{several:?}"))
            }
        };
        let family = known.ok_or_else(|| {
            let supported = Family::classes();
            ModelError::Architecture { path: fields.path.into(), found, supported }
        })?;
        let is_base =
            !classes.is_empty() && classes.iter().all(|class| family.is_base_class(class));
        let is_multimodal = classes.iter().any(|class| family.is_multimodal(class));
        Ok(Self { family, has_head: !is_base, is_multimodal })
    }
}

/// Rejects keys that would change the arithmetic.
fn check_supported(fields: &Fields<'_>, family: &Family) -> Result<(), ModelError> {
    fields.check_word("hidden_act", &["silu", "swish"], "\"silu\"")?;
    // Transformers uses these keys for some families only and ignores them for others.
    for &key in family.refused() {
        if fields.get(key)? == Some(true) {
            return Err(fields.unsupported(key, "true".into(), "false"));
        }
    }
    Ok(())
}
