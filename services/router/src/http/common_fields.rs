//! Fields that chat and completion requests share.

use serde::Deserialize;

use super::{fields::Fields, grammar_field};
use crate::{
    front::Front,
    models::NamedModel,
    request::{
        cache_salt::check_salt,
        error::{FieldError, RequestError},
        options::{
            CHOICES, DefaultLength, MIN_P, Options, PENALTY, REPETITION_PENALTY, SEED,
            STOP_TOKENS_MAX, TEMPERATURE, TOKENS, TOP_K, TOP_P,
        },
        text_workers::PromptSource,
        tools::OfferedTools,
    },
};

/// Delivery of the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delivery {
    pub stream: bool,
    /// Sends the usage in a last chunk.
    pub include_usage: bool,
    /// Sends the usage so far in every chunk (as vLLM does).
    pub continuous_usage: bool,
    pub token_ids: bool,
}

/// Unsupported fields of other servers that would change the answer, with the values that disable them. The
/// router rejects other values instead of ignoring them.
const UNSUPPORTED: [(&str, &[&str]); 14] = [
    ("logit_bias", &["{}"]),
    ("bad_words", &["[]"]),
    ("allowed_token_ids", &["[]"]),
    ("use_beam_search", &["false"]),
    ("length_penalty", &["1", "1.0"]),
    ("prompt_logprobs", &[]),
    ("logprob_token_ids", &["[]"]),
    ("truncate_prompt_tokens", &[]),
    ("guided_choice", &["[]"]),
    ("guided_grammar", &[]),
    ("return_tokens_as_token_ids", &["false"]),
    ("prompt_embeds", &[]),
    ("echo", &["false"]),
    ("thinking_token_budget", &["-1"]),
];

/// Fields of a request's body, without the model.
#[derive(Debug)]
pub struct RequestFields {
    pub prompts: Vec<PromptSource>,
    /// Number of answers to each prompt.
    pub choices: u32,
    pub options: Options,
    pub default_length: DefaultLength,
    /// Name of the field that sets the length.
    pub max_tokens_name: &'static str,
    pub delivery: Delivery,
    /// Tools that the model may call.
    pub tools: Option<OfferedTools>,
}

/// Returns the model that a request names.
pub fn named_model(fields: &Fields<'_>, front: &Front) -> Result<NamedModel, RequestError> {
    front.models.find(fields.string("model")?.as_deref())
}

pub fn check_unsupported(fields: &Fields<'_>) -> Result<(), FieldError> {
    for (name, neutral) in UNSUPPORTED {
        fields.unsupported(name, neutral)?;
    }
    Ok(())
}

pub fn delivery(fields: &Fields<'_>) -> Result<Delivery, FieldError> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct StreamOptions {
        include_usage: Option<bool>,
        continuous_usage_stats: Option<bool>,
    }
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let options: Option<StreamOptions> =
        fields.value("stream_options", "an object with include_usage true or false")?;
    if options.is_some() && !stream {
        return Err(FieldError::new("stream_options", "is given; allowed: only with stream true"));
    }
    let options = options.unwrap_or_default();
    Ok(Delivery {
        stream,
        include_usage: options.include_usage.unwrap_or(false),
        continuous_usage: options.continuous_usage_stats.unwrap_or(false),
        token_ids: fields.boolean("return_token_ids")?.unwrap_or(false),
    })
}

/// Reads the number of answers to each prompt.
pub fn choices(fields: &Fields<'_>) -> Result<u32, FieldError> {
    let n = fields.count("n", CHOICES)?.unwrap_or(1);
    let best_of = fields.count("best_of", CHOICES)?.unwrap_or(n);
    if best_of != n {
        return Err(FieldError::new(
            "best_of",
            format!("is {best_of}; ranking answers is not supported; allowed: n, which is {n}"),
        ));
    }
    Ok(n)
}

/// Reads the options that both APIs share: all except length and log-probabilities.
pub fn options(fields: &Fields<'_>) -> Result<Options, FieldError> {
    Ok(Options {
        max_tokens: None,
        min_tokens: fields.count("min_tokens", 0..=*TOKENS.end())?.unwrap_or(0),
        temperature: fields.number("temperature", TEMPERATURE)?,
        top_p: fields.number("top_p", TOP_P)?,
        top_k: fields.integer("top_k", TOP_K)?.map(|k| u32::try_from(k).unwrap_or(0)),
        min_p: fields.number("min_p", MIN_P)?,
        // A negative seed has the same bits as its unsigned value.
        seed: fields.integer("seed", SEED)?.map(|seed| seed as u64),
        repetition_penalty: fields.number("repetition_penalty", REPETITION_PENALTY)?,
        presence_penalty: fields.number("presence_penalty", PENALTY)?,
        frequency_penalty: fields.number("frequency_penalty", PENALTY)?,
        stop: stop(fields)?,
        include_stop: fields.boolean("include_stop_str_in_output")?.unwrap_or(false),
        skip_special_tokens: fields.boolean("skip_special_tokens")?,
        stop_token_ids: stop_token_ids(fields)?,
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        logprobs: None,
        grammar: grammar_field::grammar(fields)?,
        cache_salt: check_salt("cache_salt", fields.string("cache_salt")?.unwrap_or_default())?,
    })
}

/// Reads `stop`: a string or a list of strings. The text stream checks their number and lengths.
fn stop(fields: &Fields<'_>) -> Result<Vec<String>, FieldError> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Stop {
        One(String),
        Many(Vec<String>),
    }
    Ok(match fields.value("stop", "a string or a list of strings")? {
        None => Vec::new(),
        Some(Stop::One(text)) => vec![text],
        Some(Stop::Many(texts)) => texts,
    })
}

fn stop_token_ids(fields: &Fields<'_>) -> Result<Vec<u32>, FieldError> {
    let ids: Vec<u32> = fields.value("stop_token_ids", "a list of token ids")?.unwrap_or_default();
    if ids.len() > STOP_TOKENS_MAX {
        return Err(FieldError::new(
            "stop_token_ids",
            format!("has {} ids; allowed: at most {STOP_TOKENS_MAX}", ids.len()),
        ));
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with<T>(body: &str, read: impl FnOnce(&Fields<'_>) -> T) -> T {
        read(&Fields::parse(body.as_bytes()).unwrap())
    }

    #[test]
    fn stop_is_a_text_or_a_list() {
        with(r#"{"stop": "a"}"#, |fields| assert_eq!(stop(fields), Ok(vec!["a".into()])));
        with(r#"{"stop": ["a", "b"]}"#, |fields| assert_eq!(stop(fields).unwrap().len(), 2));
        with(r#"{"stop": [1, 2]}"#, |fields| {
            let said = stop(fields).unwrap_err().to_string();
            assert_eq!(said, "stop is [1, 2]; allowed: a string or a list of strings");
        });
    }

    #[test]
    fn unsupported_fields_are_refused_unless_they_are_off() {
        with(r#"{"logit_bias": {}, "echo": false, "unheard_of": 7}"#, |fields| {
            assert_eq!(check_unsupported(fields), Ok(()));
        });
        with(r#"{"echo": true}"#, |fields| {
            let said = check_unsupported(fields).unwrap_err().to_string();
            assert_eq!(said, "echo is not supported; leave it out (it is true)");
        });
    }

    #[test]
    fn best_of_is_n_or_refused() {
        with(r#"{"n": 2, "best_of": 2}"#, |fields| assert_eq!(choices(fields), Ok(2)));
        with(r#"{"best_of": 5}"#, |fields| {
            assert_eq!(choices(fields).unwrap_err().field, "best_of");
        });
        with(r#"{"n": 129}"#, |fields| {
            assert_eq!(
                choices(fields).unwrap_err().to_string(),
                "n is 129; allowed: a whole number from 1 to 128"
            );
        });
    }

    #[test]
    fn seeds_have_64_bits_with_or_without_a_sign() {
        for (seed, bits) in
            [("-1", u64::MAX), ("18446744073709551615", u64::MAX), ("7", 7), ("null", 0)]
        {
            with(&format!(r#"{{"seed": {seed}}}"#), |fields| {
                assert_eq!(options(fields).unwrap().seed.unwrap_or(0), bits);
            });
        }
        with(r#"{"seed": 18446744073709551616}"#, |fields| {
            assert_eq!(options(fields).unwrap_err().field, "seed");
        });
    }

    #[test]
    fn stream_options_need_a_stream() {
        with(r#"{"stream_options": {"include_usage": true}}"#, |fields| {
            assert_eq!(delivery(fields).unwrap_err().field, "stream_options");
        });
        with(r#"{"stream": true, "stream_options": {"include_usage": true}}"#, |fields| {
            let delivery = delivery(fields).unwrap();
            assert!(delivery.stream && delivery.include_usage && !delivery.continuous_usage);
        });
    }
}
