//! Fields that chat and completion requests share.

use serde::{
    Deserialize,
    de::{self, SeqAccess, Visitor},
};

use super::fields::Fields;
use crate::request::{
    field_error::{FieldError, refused, shown},
    options::{
        CACHE_SALT_BYTES_MAX, CHOICES, MIN_P, Options, PENALTY, REPETITION_PENALTY, SEED,
        STOP_TOKENS_MAX, TEMPERATURE, TOKENS, TOP_K, TOP_P,
    },
};

/// How the answer is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delivery {
    pub stream: bool,
    /// A last chunk with the usage.
    pub include_usage: bool,
    /// The usage so far in every chunk (vLLM).
    pub continuous_usage: bool,
    pub token_ids: bool,
}

/// Fields that would change the answer, are known from other servers, and are not supported; with
/// the values that mean "off". Silence about them would be a wrong answer.
const UNSUPPORTED: [(&str, &[&str]); 17] = [
    ("logit_bias", &["{}"]),
    ("bad_words", &["[]"]),
    ("allowed_token_ids", &["[]"]),
    ("use_beam_search", &["false"]),
    ("length_penalty", &["1", "1.0"]),
    ("prompt_logprobs", &[]),
    ("logprob_token_ids", &["[]"]),
    ("truncate_prompt_tokens", &[]),
    ("structured_outputs", &["{}"]),
    ("guided_json", &[]),
    ("guided_regex", &[]),
    ("guided_choice", &["[]"]),
    ("guided_grammar", &[]),
    ("return_tokens_as_token_ids", &["false"]),
    ("prompt_embeds", &[]),
    ("echo", &["false"]),
    ("thinking_token_budget", &["-1"]),
];

/// The model's name, `None` for the one that is served.
pub fn model(fields: &Fields<'_>) -> Result<Option<String>, FieldError> {
    fields.string("model")
}

pub fn check_unsupported(fields: &Fields<'_>) -> Result<(), FieldError> {
    for (name, neutral) in UNSUPPORTED {
        fields.unsupported(name, neutral)?;
    }
    #[derive(Deserialize)]
    struct Format {
        r#type: String,
    }
    let allowed = "{\"type\": \"text\"}";
    match fields.value::<Format>("response_format", allowed)? {
        Some(format) if format.r#type != "text" => {
            let text = fields.raw("response_format").unwrap_or_default();
            Err(refused("response_format", text, allowed))
        }
        _ => Ok(()),
    }
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

/// How many answers to one prompt.
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

/// Everything but the length and the log-probabilities, whose fields differ.
pub fn options(fields: &Fields<'_>) -> Result<Options, FieldError> {
    Ok(Options {
        max_tokens: None,
        min_tokens: fields.count("min_tokens", 0..=*TOKENS.end())?.unwrap_or(0),
        temperature: fields.number("temperature", TEMPERATURE)?,
        top_p: fields.number("top_p", TOP_P)?,
        top_k: fields.integer("top_k", TOP_K)?.map(|k| u32::try_from(k).unwrap_or(0)),
        min_p: fields.number("min_p", MIN_P)?,
        // The same bits, whichever sign they were written with.
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
        cache_salt: cache_salt(fields)?,
    })
}

/// A string or a list of strings. How many and how long is checked where they are looked for.
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

fn cache_salt(fields: &Fields<'_>) -> Result<String, FieldError> {
    let salt = fields.string("cache_salt")?.unwrap_or_default();
    if salt.len() > CACHE_SALT_BYTES_MAX {
        return Err(FieldError::new(
            "cache_salt",
            format!("has {} bytes; allowed: at most {CACHE_SALT_BYTES_MAX}", salt.len()),
        ));
    }
    Ok(salt)
}

/// A prompt of `/v1/completions`.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// One prompt or several, each a text or token ids.
pub fn prompts(fields: &Fields<'_>) -> Result<Vec<Prompt>, FieldError> {
    let name = "prompt";
    let Some(text) = fields.raw(name) else {
        return Err(FieldError::new(name, "is missing; allowed: a text, token ids, or a list"));
    };
    // serde's own message tells what stood where a prompt was expected.
    let Prompts(prompts) = serde_json::from_str(text).map_err(|error| {
        let reason = error.to_string();
        let reason = reason.rsplit_once(" at line ").map_or(reason.as_str(), |(what, _)| what);
        FieldError::new(name, format!("{reason} (it is {})", shown(text)))
    })?;
    if prompts.is_empty() {
        return Err(FieldError::new(name, "is empty; allowed: at least one token"));
    }
    Ok(prompts)
}

/// Reads the four shapes in one pass: token ids never become JSON values, which are ten times as
/// large.
struct Prompts(Vec<Prompt>);

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shapes;
        impl<'de> Visitor<'de> for Shapes {
            type Value = Prompts;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a text, a list of texts, a list of token ids or a list of such lists")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Prompts, E> {
                Ok(Prompts(vec![Prompt::Text(text.to_owned())]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompts, A::Error> {
                let mut prompts = Vec::new();
                match list.next_element()? {
                    None => {}
                    Some(Element::Token(first)) => {
                        let mut tokens = vec![first];
                        while let Some(TokenId(token)) = list.next_element()? {
                            tokens.push(token);
                        }
                        prompts.push(Prompt::Tokens(tokens));
                    }
                    Some(Element::Prompt(first)) => {
                        prompts.push(first);
                        while let Some(element) = list.next_element()? {
                            match element {
                                Element::Prompt(prompt) => prompts.push(prompt),
                                Element::Token(token) => {
                                    let message = format!("token id {token} among whole prompts");
                                    return Err(de::Error::custom(message));
                                }
                            }
                        }
                    }
                }
                Ok(Prompts(prompts))
            }
        }
        deserializer.deserialize_any(Shapes)
    }
}

/// An element of a list of prompts, or the first token id of a single one.
enum Element {
    Token(u32),
    Prompt(Prompt),
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shapes;
        impl<'de> Visitor<'de> for Shapes {
            type Value = Element;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a text, a token id or a list of token ids")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Element, E> {
                Ok(Element::Prompt(Prompt::Text(text.to_owned())))
            }

            fn visit_u64<E: de::Error>(self, id: u64) -> Result<Element, E> {
                token_id(id).map(Element::Token)
            }

            fn visit_i64<E: de::Error>(self, id: i64) -> Result<Element, E> {
                Err(E::custom(format!("token id {id} is negative")))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Element, A::Error> {
                let mut tokens = Vec::new();
                while let Some(TokenId(token)) = list.next_element()? {
                    tokens.push(token);
                }
                Ok(Element::Prompt(Prompt::Tokens(tokens)))
            }
        }
        deserializer.deserialize_any(Shapes)
    }
}

struct TokenId(u32);

impl<'de> Deserialize<'de> for TokenId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Number;
        impl Visitor<'_> for Number {
            type Value = TokenId;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a token id")
            }

            fn visit_u64<E: de::Error>(self, id: u64) -> Result<TokenId, E> {
                token_id(id).map(TokenId)
            }

            fn visit_i64<E: de::Error>(self, id: i64) -> Result<TokenId, E> {
                Err(E::custom(format!("token id {id} is negative")))
            }
        }
        deserializer.deserialize_any(Number)
    }
}

fn token_id<E: de::Error>(id: u64) -> Result<u32, E> {
    u32::try_from(id).map_err(|_| E::custom(format!("token id {id} is larger than any vocabulary")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with<T>(body: &str, read: impl FnOnce(&Fields<'_>) -> T) -> T {
        read(&Fields::parse(body.as_bytes()).unwrap())
    }

    fn prompts_of(prompt: &str) -> Result<Vec<Prompt>, String> {
        with(&format!(r#"{{"prompt": {prompt}}}"#), prompts).map_err(|error| error.to_string())
    }

    #[test]
    fn prompts_have_four_shapes() {
        let text = |text: &str| Prompt::Text(text.into());
        assert_eq!(prompts_of(r#""a\n""#), Ok(vec![text("a\n")]));
        assert_eq!(prompts_of(r#"["a", "b"]"#), Ok(vec![text("a"), text("b")]));
        assert_eq!(prompts_of("[1, 2]"), Ok(vec![Prompt::Tokens(vec![1, 2])]));
        assert_eq!(
            prompts_of("[[1], [2, 3]]"),
            Ok(vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])])
        );
        assert_eq!(prompts_of("[[]]"), Ok(vec![Prompt::Tokens(vec![])]));
    }

    #[test]
    fn other_prompts_are_refused_with_what_was_found() {
        for (prompt, words) in [
            ("[]", "prompt is empty"),
            ("null", "prompt is missing"),
            ("7", "integer `7`"),
            ("{\"a\": 1}", "map"),
            ("[1, \"a\"]", "string \"a\""),
            ("[\"a\", 1]", "token id 1 among whole prompts"),
            ("[-1]", "token id -1 is negative"),
            ("[[1, -2]]", "token id -2 is negative"),
            ("[4294967296]", "4294967296 is larger"),
            ("[1.5]", "1.5"),
            ("[true]", "boolean"),
        ] {
            let said = prompts_of(prompt).unwrap_err();
            assert!(said.starts_with("prompt ") && said.contains(words), "{prompt}: {said}");
        }
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
        with(r#"{"response_format": {"type": "json_object"}}"#, |fields| {
            assert_eq!(check_unsupported(fields).unwrap_err().field, "response_format");
        });
        with(r#"{"response_format": {"type": "text"}}"#, |fields| {
            assert_eq!(check_unsupported(fields), Ok(()));
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
