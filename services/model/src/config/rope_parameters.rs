//! Rotary embedding of a Hugging Face `config.json`: theta, scaling, and the part of a head that is
//! rotated.

use serde_json::{Map, Value};

use super::fields::Fields;
use crate::{error::ModelError, families::Family, rope::RopeScaling};

const SUPPORTED: &str =
    "\"default\", \"linear\", \"dynamic\", \"yarn\", \"longrope\" or \"llama3\"";

/// Parameters of the rotary embedding.
pub(super) struct Rope {
    pub theta: f32,
    /// Theta of layers with a sliding window, if they have their own.
    pub window_theta: Option<f32>,
    pub scaling: RopeScaling,
    /// Factor of rotated queries and keys.
    pub attention_factor: f32,
    /// Maximum sequence length of the model in tokens.
    pub context_tokens: usize,
    part: RotaryPart,
}

/// Part of a head that is rotated.
enum RotaryPart {
    Factor(f64),
    Elements(usize),
}

impl Rope {
    /// Reads theta and scaling: from `rope_parameters` since transformers 5, from `rope_theta` and
    /// `rope_scaling` before. If layers with a window have their own theta, `rope_parameters` has
    /// an object for each kind of layer. `context_tokens` is the length that the configuration
    /// states.
    pub(super) fn read(
        fields: &Fields<'_>,
        family: &Family,
        context_tokens: usize,
    ) -> Result<Self, ModelError> {
        let absent_theta = family.absent().rope_theta;
        let outer_theta = fields.get::<f32>("rope_theta")?;
        let outer_factor = fields.rotary_factor(family.rotary_factor().is_some())?;
        let outer_part = match (outer_factor, family.rotary_factor()) {
            (Some(factor), _) => RotaryPart::Factor(factor),
            (None, None) => RotaryPart::Factor(1.0),
            // The key of MiniMax-M2.
            (None, Some(absent)) => match fields.get("rotary_dim")? {
                Some(elements) => RotaryPart::Elements(elements),
                None => RotaryPart::Factor(absent),
            },
        };
        let scaling_key = ["rope_parameters", "rope_scaling"]
            .into_iter()
            .find(|&key| fields.object.get(key).is_some_and(|value| !value.is_null()));
        let window_theta = window_theta(fields, family)?;
        let plain = |theta, part| Self {
            theta,
            window_theta,
            scaling: RopeScaling::None,
            attention_factor: 1.0,
            context_tokens,
            part,
        };
        let Some(scaling_key) = scaling_key else {
            return Ok(plain(outer_theta.unwrap_or(absent_theta), outer_part));
        };
        let object = fields.require::<Map<String, Value>>(scaling_key)?;
        let parameters = Fields { path: fields.path, object: &object, parent: Some(scaling_key) };
        let of_full = match window_theta {
            None => None,
            Some(_) => parameters.get::<Map<String, Value>>("full_attention")?,
        };
        let parameters = match &of_full {
            None => parameters,
            Some(object) => Fields { object, ..parameters },
        };
        let part = parameters
            .rotary_factor(family.rotary_factor().is_some())?
            .map_or(outer_part, RotaryPart::Factor);
        let theta = parameters.get("rope_theta")?.or(outer_theta).unwrap_or(absent_theta);
        let rope = plain(theta, part);

        let kind = match parameters.get::<String>("rope_type")? {
            Some(kind) => kind,
            None => parameters.get::<String>("type")?.unwrap_or_else(|| "default".into()),
        };
        // Phi-3 has this key outside the object.
        let original_tokens = || {
            let of = |fields: &Fields<'_>| fields.get("original_max_position_embeddings");
            let tokens: Option<usize> = of(fields)?.or(of(&parameters)?);
            Ok::<_, ModelError>(tokens.unwrap_or(context_tokens) as f32)
        };
        let scaling = match kind.as_str() {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: parameters.require("factor")? },
            // Changes frequencies only beyond `max_position_embeddings`, the maximum length.
            "dynamic" => parameters.require::<f32>("factor").map(|_| RopeScaling::None)?,
            "yarn" => return rope.with_yarn(&parameters, original_tokens()?),
            "longrope" => return rope.with_longrope(&parameters, original_tokens()?),
            "llama3" => RopeScaling::Llama3 {
                factor: parameters.require("factor")?,
                low_frequency_factor: parameters.require("low_freq_factor")?,
                high_frequency_factor: parameters.require("high_freq_factor")?,
                original_context_tokens: parameters.require("original_max_position_embeddings")?,
            },
            other => {
                return Err(parameters.unsupported("rope_type", format!("{other:?}"), SUPPORTED));
            }
        };
        Ok(Self { scaling, ..rope })
    }

    /// Returns the number of elements of a head that are rotated.
    pub(super) fn dim(&self, head_dim: usize) -> usize {
        match self.part {
            RotaryPart::Factor(factor) => (head_dim as f64 * factor) as usize,
            RotaryPart::Elements(elements) => elements,
        }
    }

    /// Adds YaRN scaling. `original`: context of the training without scaling, in tokens.
    fn with_yarn(self, parameters: &Fields<'_>, original: f32) -> Result<Self, ModelError> {
        /// Default of [`RopeScaling::Yarn::fast_rotations`].
        const FAST_DEFAULT: f32 = 32.0;
        /// Default of [`RopeScaling::Yarn::slow_rotations`].
        const SLOW_DEFAULT: f32 = 1.0;
        let stated = self.context_tokens as f32 / original;
        let factor = parameters.get("factor")?.unwrap_or(stated);
        // As in transformers, a 0 is an absent value.
        let get = |key| {
            let value = parameters.get::<f32>(key)?;
            Ok::<_, ModelError>(value.filter(|value| *value != 0.0))
        };
        let growth = |scale: f32| match factor > 1.0 {
            true => 0.1 * f64::from(scale) * f64::from(factor).ln() + 1.0,
            false => 1.0,
        };
        let attention_factor = match parameters.get("attention_factor")? {
            Some(factor) => factor,
            None => match (get("mscale")?, get("mscale_all_dim")?) {
                (Some(scale), Some(of_all)) => (growth(scale) / growth(of_all)) as f32,
                _ => growth(1.0) as f32,
            },
        };
        Ok(Self {
            scaling: RopeScaling::Yarn {
                factor,
                fast_rotations: get("beta_fast")?.unwrap_or(FAST_DEFAULT),
                slow_rotations: get("beta_slow")?.unwrap_or(SLOW_DEFAULT),
                original_context_tokens: original,
                has_whole_bounds: parameters.get("truncate")?.unwrap_or(true),
            },
            attention_factor,
            // Model cards name the scaling and leave `max_position_embeddings` as it was.
            context_tokens: self.context_tokens.max((original * factor) as usize),
            ..self
        })
    }

    /// Adds LongRoPE scaling. `original`: context of the training without scaling, in tokens. All
    /// sequences have the frequencies of the longest sequence, because KV must not depend on later
    /// tokens.
    fn with_longrope(self, parameters: &Fields<'_>, original: f32) -> Result<Self, ModelError> {
        let stated = self.context_tokens as f32 / original;
        let factor = parameters.get("factor")?.unwrap_or(stated);
        let attention_factor = match parameters.get("attention_factor")? {
            Some(factor) => factor,
            None if factor <= 1.0 => 1.0,
            None => (1.0 + f64::from(factor).ln() / f64::from(original).ln()).sqrt() as f32,
        };
        let key = if stated > 1.0 { "long_factor" } else { "short_factor" };
        let scaling = RopeScaling::Divisors(parameters.require(key)?);
        Ok(Self { scaling, attention_factor, ..self })
    }
}

/// Returns theta of layers with a window, if they have their own. Rejects scaling, which no model
/// has there.
fn window_theta(fields: &Fields<'_>, family: &Family) -> Result<Option<f32>, ModelError> {
    let Some(absent) = family.absent().window_rope_theta else { return Ok(None) };
    let object = fields.get::<Map<String, Value>>("rope_parameters")?.unwrap_or_default();
    let parameters = Fields { object: &object, parent: Some("rope_parameters"), ..*fields };
    let object = parameters.get::<Map<String, Value>>("sliding_attention")?.unwrap_or_default();
    let windowed = Fields { object: &object, parent: Some("sliding_attention"), ..*fields };
    windowed.check_word("rope_type", &["default"], "\"default\"")?;
    let theta = windowed.get("rope_theta")?.or(fields.get("rope_local_base_freq")?);
    Ok(Some(theta.unwrap_or(absent)))
}
