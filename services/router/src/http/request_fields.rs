//! Fields of a request to `/v1/chat/completions` or `/v1/completions`.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::{Map, Value, json, value::RawValue};

use super::{fields::RequestFields, foreign_fields::read_with_foreign_fields, grammar_fields};
use router_core::RequestSession;

use crate::{
    front::Front,
    front::NamedModel,
    keys::Caller,
    request::{
        error::{
            FieldError, RequestError, invalid_value, parse_field, parse_json, redacted,
            type_or_scalar,
        },
        options::{
            CHOICES, COMPLETION_TOKENS_DEFAULT, DefaultLength, LOGPROBS, MIN_P, Options, PENALTY,
            PRIORITY, REPETITION_PENALTY, SEED, STOP_TOKENS_MAX, TEMPERATURE, TOKENS, TOP_K, TOP_P,
            TRUNCATE, Truncation, check_salt, checked_allowed, checked_bad_words, checked_bias,
        },
        text_workers::{ChatSource, PromptSource, check_variables},
        tools::OfferedTools,
    },
    request_driver::GenerationFields,
};

/// Options of the answer's delivery to the client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Delivery {
    pub stream: bool,
    /// Whether a last chunk has the usage.
    pub include_usage: bool,
    /// Whether every chunk has the usage so far, as in vLLM.
    pub continuous_usage: bool,
    pub token_ids: bool,
    /// Whether the text of a completion begins with its prompt.
    pub echo: bool,
    /// Number of top log-probabilities to return for each prompt token.
    pub prompt_logprobs: Option<u32>,
    /// Whether the answer has the version of the weights that generated each token.
    pub weight_versions: bool,
}

/// Name of an unsupported field, and the values (as JSON) that are accepted because they have no
/// effect.
pub(super) type Unsupported = (&'static str, &'static [&'static str]);

/// Returns the model that a request names.
pub(super) fn named_model(
    fields: &RequestFields<'_>,
    front: &Front,
    caller: &Caller,
) -> Result<NamedModel, RequestError> {
    front.find_model(fields.string("model")?.as_deref(), caller)
}

pub(super) fn check_unsupported(
    fields: &RequestFields<'_>,
    all: &[Unsupported],
) -> Result<(), FieldError> {
    all.iter().try_for_each(|(name, neutral)| fields.unsupported(name, neutral, ""))
}

pub(super) fn delivery(fields: &RequestFields<'_>) -> Result<Delivery, FieldError> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    #[serde(expecting = "an object")]
    struct StreamOptionsField {
        include_usage: Option<bool>,
        continuous_usage_stats: Option<bool>,
    }
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let options: Option<StreamOptionsField> =
        fields.value("stream_options", "an object with include_usage true or false")?;
    if options.is_some() && !stream {
        return Err(FieldError::new("stream_options", "is given; allowed: only with stream true"));
    }
    let options = options.unwrap_or_default();
    let prompt_logprobs = fields.count("prompt_logprobs", LOGPROBS)?;
    if stream && prompt_logprobs.is_some() {
        let problem = "is given; allowed: only with stream false";
        return Err(FieldError::new("prompt_logprobs", problem));
    }
    Ok(Delivery {
        echo: false,
        prompt_logprobs,
        stream,
        include_usage: options.include_usage.unwrap_or(false),
        continuous_usage: options.continuous_usage_stats.unwrap_or(false),
        token_ids: fields.boolean("return_token_ids")?.unwrap_or(false),
        weight_versions: fields.boolean("return_weight_version")?.unwrap_or(false),
    })
}

/// Reads the number of answers to each prompt.
pub(super) fn choices(fields: &RequestFields<'_>) -> Result<u32, FieldError> {
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
pub(super) fn options(fields: &RequestFields<'_>) -> Result<Options, FieldError> {
    Ok(Options {
        max_tokens: None,
        min_tokens: fields.count("min_tokens", 0..=*TOKENS.end())?.unwrap_or(0),
        temperature: fields.number("temperature", TEMPERATURE)?,
        top_p: fields.number("top_p", TOP_P)?,
        top_k: fields.integer("top_k", TOP_K)?.map(|k| u32::try_from(k).unwrap_or(0)),
        min_p: fields.number("min_p", MIN_P)?,
        // A negative seed is the unsigned number with the same bits. But -1 asks for a random seed,
        // as in vLLM, llama.cpp and Ollama.
        seed: fields.integer("seed", SEED)?.filter(|seed| *seed != -1).map(|seed| seed as u64),
        repetition_penalty: fields.number("repetition_penalty", REPETITION_PENALTY)?,
        presence_penalty: fields.number("presence_penalty", PENALTY)?,
        frequency_penalty: fields.number("frequency_penalty", PENALTY)?,
        stop: stop(fields)?,
        include_stop: fields.boolean("include_stop_str_in_output")?.unwrap_or(false),
        skip_special_tokens: fields.boolean("skip_special_tokens")?,
        stop_token_ids: stop_token_ids(fields)?,
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        logprobs: None,
        pooling: None,
        prompt_logprobs: None,
        logit_bias: logit_bias(fields)?,
        allowed_token_ids: checked_allowed(
            "allowed_token_ids",
            fields.value("allowed_token_ids", "a list of token ids")?.unwrap_or_default(),
        )?,
        bad_words: checked_bad_words(
            "bad_words",
            fields.value("bad_words", "a list of texts")?.unwrap_or_default(),
        )?,
        truncation: truncation(fields)?,
        priority: fields.integer("priority", PRIORITY)?.map_or(0, |priority| priority as i32),
        grammar: grammar_fields::grammar(fields)?,
        cache_salt: check_salt("cache_salt", fields.string("cache_salt")?.unwrap_or_default())?,
        // The session is in the headers of the request.
        session: RequestSession::default(),
    })
}

/// Reads `stop`: a string or a list of strings. An empty string is the same as no field.
/// `StopStrings` checks the number and the lengths of the strings.
fn stop(fields: &RequestFields<'_>) -> Result<Vec<String>, FieldError> {
    let allowed = "a string or a list of strings";
    match fields.raw("stop") {
        None | Some("\"\"") => Ok(Vec::new()),
        Some(text) if text.starts_with('"') => Ok(vec![parse_field("stop", text, allowed)?]),
        Some(text) => parse_field("stop", text, allowed),
    }
}

fn stop_token_ids(fields: &RequestFields<'_>) -> Result<Vec<u32>, FieldError> {
    let ids: Vec<u32> = fields.value("stop_token_ids", "a list of token ids")?.unwrap_or_default();
    if ids.len() > STOP_TOKENS_MAX {
        return Err(FieldError::new(
            "stop_token_ids",
            format!("has {} ids; allowed: at most {STOP_TOKENS_MAX}", ids.len()),
        ));
    }
    Ok(ids)
}

/// Reads `logit_bias`: an object from token ids to numbers.
fn logit_bias(fields: &RequestFields<'_>) -> Result<Vec<(u32, f32)>, FieldError> {
    const NAME: &str = "logit_bias";
    let allowed = "an object from token ids to numbers from -100 to 100";
    let biases: Option<HashMap<String, f32>> = fields.value(NAME, allowed)?;
    let read = |(id, bias): (String, f32)| match id.parse() {
        Ok(id) => Ok((id, bias)),
        Err(_) => {
            let problem = format!("has the key {}; allowed: {allowed}", redacted(&id));
            Err(FieldError::new(NAME, problem))
        }
    };
    checked_bias(NAME, biases.into_iter().flatten().map(read).collect::<Result<_, _>>()?)
}

/// Reads how many of the last tokens of the prompt are kept, as in vLLM.
fn truncation(fields: &RequestFields<'_>) -> Result<Truncation, FieldError> {
    const NAME: &str = "truncate_prompt_tokens";
    match fields.integer(NAME, TRUNCATE)? {
        None => Ok(Truncation::Never),
        Some(-1) => Ok(Truncation::Longest),
        Some(0) => {
            let problem = "is 0; allowed: -1, or a whole number from 1";
            Err(FieldError::new(NAME, problem))
        }
        Some(count) => Ok(Truncation::Last(count as u32)),
    }
}

/// Maximum number of output tokens that a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LengthLimit {
    /// -1, as in llama.cpp.
    Unlimited,
    /// 0: the client wants no output tokens, only the prompt or its log-probabilities.
    PromptOnly,
    Tokens(u32),
}

impl LengthLimit {
    /// Returns the limit for nodes, which generate at least one token. The router drops the token
    /// of [`Self::PromptOnly`].
    fn tokens(self) -> Option<u32> {
        match self {
            Self::Unlimited => None,
            Self::PromptOnly => Some(1),
            Self::Tokens(count) => Some(count),
        }
    }
}

/// Reads the maximum number of output tokens. 0 is allowed only with `returns_prompt`: when the
/// answer contains the prompt or its log-probabilities.
fn length_limit(
    fields: &RequestFields<'_>,
    name: &str,
    returns_prompt: bool,
) -> Result<Option<LengthLimit>, FieldError> {
    match fields.integer(name, -1..=0) {
        Ok(Some(-1)) => Ok(Some(LengthLimit::Unlimited)),
        Ok(Some(_)) if returns_prompt => Ok(Some(LengthLimit::PromptOnly)),
        _ => Ok(fields.count(name, TOKENS)?.map(LengthLimit::Tokens)),
    }
}

/// Unsupported fields of chat requests.
pub(super) const CHAT_UNSUPPORTED: [Unsupported; 10] = [
    ("echo", &["false"]),
    ("functions", &["[]"]),
    ("function_call", &["\"auto\"", "\"none\""]),
    ("audio", &[]),
    ("chat_template", &[]),
    ("documents", &["[]"]),
    ("modalities", &["[\"text\"]"]),
    ("moderation", &[]),
    ("verbosity", &["\"medium\""]),
    ("web_search_options", &[]),
];

/// Unsupported fields of completion requests.
pub(super) const COMPLETION_UNSUPPORTED: [Unsupported; 1] = [("suffix", &["\"\""])];

/// Reads the fields of `/v1/chat/completions`.
pub(super) fn read_chat(
    fields: &RequestFields<'_>,
) -> Result<(GenerationFields, Delivery), FieldError> {
    read_with_foreign_fields(fields, &[], read_own_chat)
}

/// Reads the fields after those of other servers were renamed to the router's fields.
fn read_own_chat(fields: &RequestFields<'_>) -> Result<(GenerationFields, Delivery), FieldError> {
    check_unsupported(fields, &CHAT_UNSUPPORTED)?;
    let mut options = options(fields)?;
    let delivery = delivery(fields)?;
    options.prompt_logprobs = delivery.prompt_logprobs;
    let returns_prompt = delivery.prompt_logprobs.is_some();
    let max_tokens = length_limit(fields, "max_tokens", returns_prompt)?;
    let max_completion_tokens = length_limit(fields, "max_completion_tokens", returns_prompt)?;
    let length = max_completion_tokens.or(max_tokens);
    options.max_tokens = length.and_then(LengthLimit::tokens);
    let max_tokens_name = match max_completion_tokens {
        Some(_) => "max_completion_tokens",
        None => fields.clients_name("max_tokens"),
    };
    let wants_logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    let top_logprobs = fields.count("top_logprobs", LOGPROBS)?;
    if let Some(count @ 1..) = top_logprobs.filter(|_| !wants_logprobs) {
        let problem = format!("is {count}; allowed: only with logprobs true");
        return Err(FieldError::new("top_logprobs", problem));
    }
    options.logprobs = wants_logprobs.then(|| top_logprobs.unwrap_or(0));

    let tools = grammar_fields::tools(fields)?;
    let parsed = GenerationFields {
        prompts: vec![PromptSource::Chat(chat_source(fields, tools.as_ref())?)],
        choices: choices(fields)?,
        options,
        default_length: DefaultLength::Rest,
        prompt_only: length == Some(LengthLimit::PromptOnly),
        max_tokens_name,
        tools,
    };
    Ok((parsed, delivery))
}

/// Reads the messages of a chat, and the options of the chat template.
pub(super) fn chat_source(
    fields: &RequestFields<'_>,
    tools: Option<&OfferedTools>,
) -> Result<ChatSource, FieldError> {
    let allowed = "a list of messages, each with role and content";
    let Some(text) = fields.raw("messages") else {
        return Err(FieldError::new("messages", format!("is missing; allowed: {allowed}")));
    };
    let not_a_list = || {
        let problem = format!("is {}; allowed: {allowed}", type_or_scalar(text));
        FieldError::new("messages", problem)
    };
    let messages: Value = parse_field("messages", text, allowed)?;
    match messages.as_array() {
        Some(messages) if !messages.is_empty() => {}
        Some(_) => return Err(FieldError::new("messages", "is empty; allowed: at least one")),
        None => return Err(not_a_list()),
    }
    let continue_final_message = fields.boolean("continue_final_message")?.unwrap_or(false);
    let add_generation_prompt = fields.boolean("add_generation_prompt")?;
    if continue_final_message && add_generation_prompt == Some(true) {
        return Err(FieldError::new(
            "continue_final_message",
            "is true; allowed: only with add_generation_prompt false or left out",
        ));
    }
    fields.unsupported("add_special_tokens", &["false"], "")?;
    Ok(ChatSource {
        field: "messages",
        messages,
        tools: tools.map_or(Value::Null, |tools| tools.definitions.clone()),
        add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
        template_kwargs: template_kwargs(fields)?,
        bytes: [Some(text), fields.raw("chat_template_kwargs"), fields.raw("tools")]
            .into_iter()
            .flatten()
            .map(str::len)
            .sum(),
    })
}

/// Field with the reasoning effort, which sets the chat-template variable of the same name. The
/// effort `none` also sets the variable `enable_thinking` to false.
const REASONING_EFFORT: &str = "reasoning_effort";
const REASONING_EFFORTS: [&str; 5] = ["none", "minimal", "low", "medium", "high"];

/// Reads the chat-template variables in `chat_template_kwargs`.
pub(super) fn template_variables(
    fields: &RequestFields<'_>,
) -> Result<Map<String, Value>, FieldError> {
    const NAME: &str = "chat_template_kwargs";
    let variables: Map<String, Value> =
        fields.value(NAME, "an object of template variables")?.unwrap_or_default();
    check_variables(NAME, &variables)?;
    Ok(variables)
}

/// Reads the chat-template variables: those in `chat_template_kwargs`, and those that
/// `reasoning_effort` sets.
pub(super) fn template_kwargs(
    fields: &RequestFields<'_>,
) -> Result<Map<String, Value>, FieldError> {
    let mut variables = template_variables(fields)?;
    if let Some(effort) = fields.value::<String>(REASONING_EFFORT, "a string")? {
        if !REASONING_EFFORTS.contains(&effort.as_str()) {
            let allowed = REASONING_EFFORTS.join(", ");
            return Err(invalid_value(REASONING_EFFORT, &json!(effort).to_string(), &allowed));
        }
        // Variables in `chat_template_kwargs` take precedence: they are more specific.
        if effort == "none" {
            variables.entry("enable_thinking").or_insert(false.into());
        }
        variables.entry(REASONING_EFFORT).or_insert(effort.into());
    }
    Ok(variables)
}

/// Reads the fields of `/v1/completions`.
pub(super) fn read_completion(
    fields: &RequestFields<'_>,
) -> Result<(GenerationFields, Delivery), FieldError> {
    read_with_foreign_fields(fields, &[], read_own_completion)
}

/// Reads the fields after those of other servers were renamed to the router's fields.
fn read_own_completion(
    fields: &RequestFields<'_>,
) -> Result<(GenerationFields, Delivery), FieldError> {
    check_unsupported(fields, &COMPLETION_UNSUPPORTED)?;
    let add_special_tokens = fields.boolean("add_special_tokens")?.unwrap_or(true);
    let source = |prompt| match prompt {
        CompletionPrompt::Tokens(tokens) => PromptSource::Tokens(tokens),
        CompletionPrompt::Text(text) => PromptSource::Text { text, add_special_tokens },
    };
    let mut options = options(fields)?;
    let delivery = Delivery { echo: fields.boolean("echo")?.unwrap_or(false), ..delivery(fields)? };
    let returns_prompt = delivery.echo || delivery.prompt_logprobs.is_some();
    let max_tokens = length_limit(fields, "max_tokens", returns_prompt)?;
    options.max_tokens = max_tokens.and_then(LengthLimit::tokens);
    options.logprobs = fields.count("logprobs", LOGPROBS)?;
    // With `echo`, `logprobs` asks for the log-probabilities of the prompt, too.
    let echo_logprobs = options.logprobs.filter(|_| delivery.echo);
    options.prompt_logprobs = delivery.prompt_logprobs.max(echo_logprobs);
    let parsed = GenerationFields {
        prompts: prompts(fields, "prompt")?.into_iter().map(source).collect(),
        choices: choices(fields)?,
        options,
        default_length: match max_tokens {
            Some(LengthLimit::Unlimited) => DefaultLength::Rest,
            _ => DefaultLength::Tokens(COMPLETION_TOKENS_DEFAULT),
        },
        prompt_only: max_tokens == Some(LengthLimit::PromptOnly),
        max_tokens_name: fields.clients_name("max_tokens"),
        tools: None,
    };
    Ok((parsed, delivery))
}

/// A prompt of `/v1/completions`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum CompletionPrompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// Parses the field `name`: one prompt or a list of prompts, each a text or token ids. Token ids
/// are parsed as integers, because a [`Value`] for each id would take ten times the memory.
pub(super) fn prompts(
    fields: &RequestFields<'_>,
    name: &str,
) -> Result<Vec<CompletionPrompt>, FieldError> {
    let Some(text) = fields.raw(name) else {
        let problem = "is missing; allowed: a text, token ids, or a list of either";
        return Err(FieldError::new(name, problem));
    };
    let inner = text.strip_prefix('[').map(str::trim_ascii_start);
    match inner {
        Some(inner) if inner.starts_with(['"', '[']) => {
            let list = prompt_json::<Vec<&RawValue>>(name, text, None)?.into_iter().enumerate();
            list.map(|(index, one)| prompt(name, one.get(), Some(index))).collect()
        }
        Some("]") => Err(FieldError::new(name, "is empty; allowed: at least one token")),
        _ => prompt(name, text, None).map(|prompt| vec![prompt]),
    }
}

/// Parses one prompt; `index` is its position in a list of prompts.
fn prompt(name: &str, text: &str, index: Option<usize>) -> Result<CompletionPrompt, FieldError> {
    match text.as_bytes().first() {
        Some(b'"') => prompt_json(name, text, index).map(CompletionPrompt::Text),
        Some(b'[') => prompt_json(name, text, index).map(CompletionPrompt::Tokens),
        _ => {
            let problem = "allowed: a text, token ids, or a list of either";
            let at = index.map_or(String::new(), |index| format!(" at index {index}"));
            Err(FieldError::new(name, format!("has {}{at}; {problem}", type_or_scalar(text))))
        }
    }
}

/// Parses the JSON of a list of prompts, or of the prompt at `index`. An error names the type or
/// the number that was found, and the expected type.
fn prompt_json<'a, T: Deserialize<'a>>(
    name: &str,
    text: &'a str,
    index: Option<usize>,
) -> Result<T, FieldError> {
    parse_json(text).map_err(|error| {
        let index = index.map_or(String::new(), |index| format!("[{index}]"));
        let path = format!("{name}{index}{}", error.path);
        let reason = match error.reason.split_once("string, expected") {
            Some((before, _)) => format!("{before}string, expected a token id"),
            None => error.reason.replace("expected u32", "expected a token id"),
        };
        FieldError::new(name, format!("is invalid at {path}: {reason}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with<T>(body: &str, read: impl FnOnce(&RequestFields<'_>) -> T) -> T {
        read(&RequestFields::parse(body.as_bytes()).unwrap())
    }

    #[test]
    fn stop_is_a_string_or_a_list() {
        with(r#"{"stop": "a"}"#, |fields| assert_eq!(stop(fields), Ok(vec!["a".into()])));
        with(r#"{"stop": ""}"#, |fields| assert_eq!(stop(fields), Ok(vec![])));
        with(r#"{"stop": ["a", "b"]}"#, |fields| assert_eq!(stop(fields).unwrap().len(), 2));
        with(r#"{"stop": [1, 2]}"#, |fields| {
            let said = stop(fields).unwrap_err().to_string();
            assert_eq!(said, "stop is [1, 2]; allowed: a string or a list of strings");
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
        for (seed, bits) in [
            ("-2", Some(u64::MAX - 1)),
            ("18446744073709551615", Some(u64::MAX)),
            ("7", Some(7)),
            ("-1", None),
            ("null", None),
        ] {
            with(&format!(r#"{{"seed": {seed}}}"#), |fields| {
                assert_eq!(options(fields).unwrap().seed, bits);
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

    #[test]
    fn bytes_of_a_chat_include_its_template_variables() {
        let long = "x".repeat(5000);
        let messages = r#"[{"role":"user","content":"hi"}]"#;
        let body =
            format!(r#"{{"messages":{messages},"chat_template_kwargs":{{"system":"{long}"}}}}"#);
        let chat = chat_source(&RequestFields::parse(body.as_bytes()).unwrap(), None).unwrap();
        assert_eq!(chat.bytes, messages.len() + r#"{"system":""}"#.len() + 5000);
    }

    fn prompts_of(prompt: &str) -> Result<Vec<CompletionPrompt>, String> {
        let body = format!(r#"{{"prompt": {prompt}}}"#);
        prompts(&RequestFields::parse(body.as_bytes()).unwrap(), "prompt")
            .map_err(|error| error.to_string())
    }

    #[test]
    fn prompts_may_be_strings_or_token_ids_alone_or_in_lists() {
        let text = |text: &str| CompletionPrompt::Text(text.into());
        assert_eq!(prompts_of(r#""a\n""#), Ok(vec![text("a\n")]));
        assert_eq!(prompts_of(r#"["a", "b"]"#), Ok(vec![text("a"), text("b")]));
        assert_eq!(prompts_of("[1, 2]"), Ok(vec![CompletionPrompt::Tokens(vec![1, 2])]));
        assert_eq!(
            prompts_of("[[1], [2, 3]]"),
            Ok(vec![CompletionPrompt::Tokens(vec![1]), CompletionPrompt::Tokens(vec![2, 3])])
        );
        assert_eq!(prompts_of("[[]]"), Ok(vec![CompletionPrompt::Tokens(vec![])]));
    }

    #[test]
    fn invalid_prompts_are_rejected_with_type_or_number() {
        for (prompt, words) in [
            ("[]", "prompt is empty"),
            ("null", "prompt is missing"),
            ("7", "has 7; allowed: a text, token ids"),
            ("{\"a\": 1}", "has an object; allowed"),
            ("[1, \"a\"]", "invalid type: string, expected a token id"),
            ("[\"a\", 1]", "has 1 at index 1; allowed"),
            ("[-1]", "integer `-1`, expected a token id"),
            ("[[1, -2]]", "integer `-2`, expected a token id"),
            ("[4294967296]", "integer `4294967296`, expected a token id"),
            ("[1.5]", "1.5"),
            ("[true]", "boolean"),
        ] {
            let said = prompts_of(prompt).unwrap_err();
            assert!(said.starts_with("prompt ") && said.contains(words), "{prompt}: {said}");
        }
    }
}
