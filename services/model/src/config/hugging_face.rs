//! Model configuration from a Hugging Face `config.json` (and `generation_config.json`).

use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::{LAYERS_MAX, ModelConfig, RopeScaling, default_head_dim};
use crate::{error::ModelError, families::Family};

const SUPPORTED_ROPE: &str = "\"default\", \"linear\" or \"llama3\"";

/// Reads the configuration. `generation` adds end-of-sequence ids, because model authors put the chat's ids
/// there.
pub(crate) fn from_hugging_face(
    config: &JsonFile,
    generation: Option<&JsonFile>,
) -> Result<ModelConfig, ModelError> {
    let fields = config.fields()?;
    let family = family(&fields)?;
    check_supported(&fields, family)?;
    let absent = family.absent();

    let hidden_size = fields.require::<usize>("hidden_size")?;
    let query_head_count = fields.require::<usize>("num_attention_heads")?;
    let head_dim = match fields.get_or("head_dim", absent.head_dim)? {
        Some(head_dim) => head_dim,
        None => {
            default_head_dim(&config.path, "num_attention_heads", query_head_count, hidden_size)?
        }
    };
    let mut eos_token_ids = fields.token_ids("eos_token_id")?;
    if let Some(generation) = generation {
        for id in generation.fields()?.token_ids("eos_token_id")? {
            if !eos_token_ids.contains(&id) {
                eos_token_ids.push(id);
            }
        }
    }
    let (rope_theta, rope_scaling) = rope(&fields)?;

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
        ffn_size: fields.require("intermediate_size")?,
        vocab_size: fields.require("vocab_size")?,
        context_tokens: fields.get("max_position_embeddings")?.unwrap_or(absent.context_tokens),
        rms_eps: fields.get("rms_norm_eps")?.unwrap_or(1e-6),
        rope_theta,
        rope_scaling,
        // `ModelConfig::validate` rejects a count above the limit.
        layers: family.layers(&fields, layer_count.min(LAYERS_MAX))?,
        tied_output: fields.get("tie_word_embeddings")?.unwrap_or(false),
        bos_token_id: fields.token_ids("bos_token_id")?.first().copied(),
        eos_token_ids,
    }
    .validate(&config.path)
}

fn family(fields: &Fields<'_>) -> Result<&'static Family, ModelError> {
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
    known.ok_or_else(|| {
        let supported = Family::classes();
        ModelError::Architecture { path: fields.path.into(), found, supported }
    })
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
    fields.check_rotary_factor()?;
    Ok(())
}

/// Returns theta and scaling: from `rope_parameters` since transformers 5, from `rope_theta` and
/// `rope_scaling` before.
fn rope(fields: &Fields<'_>) -> Result<(f32, RopeScaling), ModelError> {
    const THETA_DEFAULT: f32 = 10_000.0;
    let outer_theta = fields.get::<f32>("rope_theta")?;
    let scaling_key = ["rope_parameters", "rope_scaling"]
        .into_iter()
        .find(|&key| fields.object.get(key).is_some_and(|value| !value.is_null()));
    let Some(scaling_key) = scaling_key else {
        return Ok((outer_theta.unwrap_or(THETA_DEFAULT), RopeScaling::None));
    };
    let object = fields.require::<Map<String, Value>>(scaling_key)?;
    let parameters = Fields { path: fields.path, object: &object, parent: Some(scaling_key) };
    parameters.check_rotary_factor()?;
    let theta = parameters.get("rope_theta")?.or(outer_theta).unwrap_or(THETA_DEFAULT);

    let kind = match parameters.get::<String>("rope_type")? {
        Some(kind) => kind,
        None => parameters.get::<String>("type")?.unwrap_or_else(|| "default".into()),
    };
    let scaling = match kind.as_str() {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: parameters.require("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: parameters.require("factor")?,
            low_frequency_factor: parameters.require("low_freq_factor")?,
            high_frequency_factor: parameters.require("high_freq_factor")?,
            original_context_tokens: parameters.require("original_max_position_embeddings")?,
        },
        other => {
            return Err(parameters.unsupported("rope_type", format!("{other:?}"), SUPPORTED_ROPE));
        }
    };
    Ok((theta, scaling))
}

/// Returns a whole number as an integer: some tools write integers as floats.
fn whole(value: &Value) -> Value {
    /// Up to here a float has every whole number.
    const MAX: f64 = (1_u64 << 53) as f64;
    match value.as_f64() {
        Some(number) if value.is_f64() && number.fract() == 0.0 && number.abs() <= MAX => {
            (number as i64).into()
        }
        _ => value.clone(),
    }
}

/// Parsed JSON file and its path.
pub(crate) struct JsonFile {
    pub path: PathBuf,
    pub value: Value,
}

impl JsonFile {
    pub(super) fn fields(&self) -> Result<Fields<'_>, ModelError> {
        let object = self.value.as_object().ok_or_else(|| ModelError::NotAModel {
            path: self.path.clone(),
            reason: "its JSON is not an object".into(),
        })?;
        Ok(Fields { path: &self.path, object, parent: None })
    }
}

/// Keys of one object, with errors that name file and key.
pub(crate) struct Fields<'a> {
    pub(super) path: &'a Path,
    pub(super) object: &'a Map<String, Value>,
    /// Key of the object in its parent.
    pub(super) parent: Option<&'static str>,
}

impl Fields<'_> {
    /// Returns the value of `key`. A null counts as absent.
    pub(crate) fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, ModelError> {
        match self.object.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(whole(value))
                .map(Some)
                .map_err(|error| self.bad(key, error.to_string())),
        }
    }

    /// Returns the value of `key` or a default. Unlike in [`get`](Self::get), a null is not absent.
    fn get_or<T: DeserializeOwned>(
        &self,
        key: &str,
        absent: Option<T>,
    ) -> Result<Option<T>, ModelError> {
        if self.object.contains_key(key) { self.get(key) } else { Ok(absent) }
    }

    /// Returns the size of the sliding window in tokens; `None`: 0 or null.
    pub(crate) fn sliding_window(&self) -> Result<Option<NonZeroUsize>, ModelError> {
        const TOKENS_DEFAULT: usize = 4096;
        let tokens = self.get_or::<usize>("sliding_window", Some(TOKENS_DEFAULT))?;
        Ok(tokens.and_then(NonZeroUsize::new))
    }

    pub(crate) fn require<T: DeserializeOwned>(&self, key: &str) -> Result<T, ModelError> {
        self.get(key)?.ok_or_else(|| self.bad(key, "is missing".into()))
    }

    /// Rejects a word that is not one of `words`.
    pub(super) fn check_word(
        &self,
        key: &str,
        words: &[&str],
        supported: &'static str,
    ) -> Result<(), ModelError> {
        match self.get::<String>(key)? {
            Some(word) if !words.contains(&word.as_str()) => {
                Err(self.unsupported(key, format!("{word:?}"), supported))
            }
            _ => Ok(()),
        }
    }

    /// Returns the ids of a key that holds one id, a list, or nothing. A null or negative id means none.
    fn token_ids(&self, key: &str) -> Result<Vec<u32>, ModelError> {
        let ids = match self.object.get(key) {
            Some(Value::Array(ids)) => ids.as_slice(),
            Some(id) => std::slice::from_ref(id),
            None => &[],
        };
        let is_absent = |id: &Value| id.is_null() || id.as_f64().is_some_and(|id| id < 0.0);
        let id = |id| serde_json::from_value(whole(id));
        let ids = ids.iter().filter(|id| !is_absent(id)).map(id);
        ids.collect::<Result<_, _>>().map_err(|error| self.bad(key, error.to_string()))
    }

    /// Rejects partial rotary embeddings: heads are rotated as a whole.
    fn check_rotary_factor(&self) -> Result<(), ModelError> {
        const KEY: &str = "partial_rotary_factor";
        match self.get::<f64>(KEY)? {
            None | Some(1.0) => Ok(()),
            Some(factor) => Err(self.unsupported(KEY, factor.to_string(), "1")),
        }
    }

    fn full_key(&self, key: &str) -> String {
        match self.parent {
            Some(parent) => format!("{parent}.{key}"),
            None => key.into(),
        }
    }

    pub(super) fn bad(&self, key: &str, reason: String) -> ModelError {
        ModelError::ConfigKey { path: self.path.into(), key: self.full_key(key), reason }
    }

    pub(super) fn unsupported(
        &self,
        key: &str,
        found: String,
        supported: &'static str,
    ) -> ModelError {
        let key = self.full_key(key);
        ModelError::Unsupported { path: self.path.into(), key, found, supported }
    }
}
