//! Options of a request (sampling, lengths, stop conditions, grammar): fields, limits and defaults
//! for HTTP and gRPC, and their conversion into a node's request.
use router_core::RequestSession;

use std::ops::RangeInclusive;

use grammar::{Alternative, Grammar, GrammarError, ReasoningTags, ToolCalls};
use proto::v1::{self, Sampling};
use text::{ReasoningFormat, SamplingDefaults};

use super::error::{FieldError, redacted};

pub(crate) const TEMPERATURE: RangeInclusive<f64> = 0.0..=2.0;
/// Range of `top_p`; 0 would keep no token.
pub(crate) const TOP_P: RangeInclusive<f64> = 0.000_001..=1.0;
pub(crate) const MIN_P: RangeInclusive<f64> = 0.0..=1.0;
/// Range of presence and frequency penalty, as in OpenAI's API.
pub(crate) const PENALTY: RangeInclusive<f64> = -2.0..=2.0;
/// Range of the repetition penalty, which divides logits; 1 has no effect.
pub(crate) const REPETITION_PENALTY: RangeInclusive<f64> = 0.01..=100.0;
/// Range of `top_k`; -1 and 0 keep every token.
pub(crate) const TOP_K: RangeInclusive<i128> = -1..=i32::MAX as i128;
/// Range of the seed: 64 bits, signed (as in OpenAI's API) or unsigned.
pub(crate) const SEED: RangeInclusive<i128> = i64::MIN as i128..=u64::MAX as i128;
/// Range of the number of log-probabilities that nodes support.
pub(crate) const LOGPROBS: RangeInclusive<u32> = 0..=20;
/// Maximum log-probabilities of the prompts of a request: those of their tokens, and the top ones
/// at each position. Nodes have the same limit for one prompt.
pub(crate) const PROMPT_LOGPROBS_MAX: u32 = 1 << 18;
/// Range of the values in `logit_bias`, as in OpenAI's API.
pub(crate) const LOGIT_BIAS: RangeInclusive<f32> = -100.0..=100.0;
/// Maximum number of tokens in `logit_bias`. Nodes have the same limit.
pub(crate) const LOGIT_BIASES_MAX: usize = 1024;
/// Maximum number of tokens in `allowed_token_ids`. Nodes have the same limit.
pub(crate) const ALLOWED_TOKENS_MAX: usize = 1 << 14;
/// Maximum size of all `bad_words`, in bytes: they are tokenized in place, and have at most as many
/// tokens as nodes take.
pub(crate) const BAD_WORDS_BYTES_MAX: usize = 4096;
/// Range of the number of prompt tokens to keep; -1 keeps as many as the model takes.
pub(crate) const TRUNCATE: RangeInclusive<i128> = -1..=i32::MAX as i128;
/// Range of the priority of a request within its flow.
pub(crate) const PRIORITY: RangeInclusive<i128> = i32::MIN as i128..=i32::MAX as i128;
/// Range of answers to one prompt, as in OpenAI's API.
pub(crate) const CHOICES: RangeInclusive<u32> = 1..=128;
/// Maximum number of answers over all prompts of a request. Each answer is a request of its own to
/// the nodes.
pub(crate) const CHOICES_PER_REQUEST_MAX: usize = 128;
/// Maximum number of stop tokens.
pub(crate) const STOP_TOKENS_MAX: usize = 256;
/// Range of token counts. The model's limit is checked once the prompt's length is known.
pub(crate) const TOKENS: RangeInclusive<u32> = 1..=i32::MAX as u32;

/// Default `max_tokens` of a completion, as in OpenAI and vLLM.
pub(crate) const COMPLETION_TOKENS_DEFAULT: u32 = 16;

/// The client's fields, each within its limits.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Options {
    pub max_tokens: Option<u32>,
    pub min_tokens: u32,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub seed: Option<u64>,
    pub repetition_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub stop: Vec<String>,
    pub include_stop: bool,
    pub skip_special_tokens: Option<bool>,
    pub stop_token_ids: Vec<u32>,
    pub ignore_eos: bool,
    pub logprobs: Option<u32>,
    /// Values to return in place of text.
    pub pooling: Option<RequestedPooling>,
    /// Number of top log-probabilities at each place of the prompt.
    pub prompt_logprobs: Option<u32>,
    /// Tokens without duplicates, and what is added to the logit of each.
    pub logit_bias: Vec<(u32, f32)>,
    /// The only tokens that may be sampled; empty: every token.
    pub allowed_token_ids: Vec<u32>,
    /// Texts that the answer does not have.
    pub bad_words: Vec<String>,
    /// Which tokens of the prompt are kept.
    pub truncation: Truncation,
    /// Requests of a lower number start earlier among the waiting requests of the same flow.
    pub priority: i32,
    pub cache_salt: String,
    pub session: RequestSession,
    /// Grammar of the answer.
    pub grammar: Option<RequestedGrammar>,
}

/// The part of a prompt that is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Truncation {
    /// The whole prompt, or an error.
    #[default]
    Never,
    /// As many of the last tokens as the model takes with an answer.
    Longest,
    /// At most this number of the last tokens.
    Last(u32),
}

/// Values of the forward pass that a request asks for, and its field with the texts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RequestedPooling {
    /// Name of the field, for errors.
    pub field: &'static str,
    pub values: v1::Pooling,
}

/// Limits of the served model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ModelLimits {
    pub prompt_tokens_max: u32,
    /// Maximum tokens of prompt and answer together.
    pub sequence_tokens_max: u32,
    pub vocabulary_size: u32,
}

impl ModelLimits {
    /// Returns the maximum length of a prompt that leaves one token for the answer.
    pub(crate) fn longest_prompt(&self) -> u32 {
        self.prompt_tokens_max.min(self.sequence_tokens_max.saturating_sub(1))
    }
}

/// Default length of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DefaultLength {
    /// The rest of the model's maximum sequence length.
    Rest,
    Tokens(u32),
}

impl Options {
    /// Fills absent sampling options with the model's defaults.
    pub(crate) fn or(self, defaults: &SamplingDefaults) -> Self {
        Self {
            temperature: self.temperature.or(defaults.temperature),
            top_p: self.top_p.or(defaults.top_p),
            top_k: self.top_k.or(defaults.top_k),
            min_p: self.min_p.or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.or(defaults.repetition_penalty),
            ..self
        }
    }

    /// Returns the maximum number of output tokens of an answer, as far as the client or the API
    /// limits it.
    pub(crate) fn output_tokens_max(&self, default_length: DefaultLength) -> u32 {
        let default = match default_length {
            DefaultLength::Rest => u32::MAX,
            DefaultLength::Tokens(count) => count,
        };
        self.max_tokens.unwrap_or(default)
    }

    /// Returns a node's options with all defaults filled in. `seed` applies if the client set none;
    /// `end_tokens` are the model's end-of-sequence tokens; `max_tokens_name` is the client's field
    /// for errors.
    pub(crate) fn sampling(
        &self,
        prompt_tokens: u32,
        limits: &ModelLimits,
        default_length: DefaultLength,
        end_tokens: &[u32],
        seed: u64,
        max_tokens_name: &str,
    ) -> Result<Sampling, FieldError> {
        // The checked prompt leaves space for at least one token.
        let rest = limits.sequence_tokens_max.saturating_sub(prompt_tokens);
        let max_tokens = match (self.max_tokens, default_length) {
            (Some(asked), _) if asked > rest => {
                return Err(FieldError::new(
                    max_tokens_name,
                    format!(
                        "is {asked}; the prompt has {prompt_tokens} tokens and the model's longest \
                         sequence {}; allowed: at most {rest}",
                        limits.sequence_tokens_max
                    ),
                ));
            }
            (Some(asked), _) => asked,
            (None, DefaultLength::Rest) => rest,
            (None, DefaultLength::Tokens(count)) => count.min(rest),
        };
        if self.min_tokens > max_tokens {
            return Err(FieldError::new(
                "min_tokens",
                format!("is {}; allowed: at most max_tokens, {max_tokens}", self.min_tokens),
            ));
        }
        for (field, ids) in [
            ("stop_token_ids", &self.stop_token_ids),
            ("allowed_token_ids", &self.allowed_token_ids),
        ] {
            if let Some(id) = ids.iter().find(|&&id| id >= limits.vocabulary_size) {
                let problem = format!("has {id}; allowed: ids below {}", limits.vocabulary_size);
                return Err(FieldError::new(field, problem));
            }
        }
        if let Some((id, _)) = self.logit_bias.iter().find(|(id, _)| *id >= limits.vocabulary_size)
        {
            return Err(FieldError::new(
                "logit_bias",
                format!("has token id {id}; allowed: ids below {}", limits.vocabulary_size),
            ));
        }
        let mut stop_token_ids = self.stop_token_ids.clone();
        if !self.ignore_eos {
            stop_token_ids.extend(end_tokens);
        }
        stop_token_ids.sort_unstable();
        stop_token_ids.dedup();
        Ok(Sampling {
            temperature: self.temperature.unwrap_or(1.0),
            top_k: self.top_k.unwrap_or(0),
            top_p: self.top_p.unwrap_or(1.0),
            min_p: self.min_p.unwrap_or(0.0),
            seed: self.seed.unwrap_or(seed),
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            max_tokens,
            min_tokens: self.min_tokens,
            // No stop token remains.
            ignore_stop_tokens: stop_token_ids.is_empty(),
            stop_token_ids,
            logprobs: self.logprobs,
            pooling: self.pooling.as_ref().map(|pooling| pooling.values.clone()),
            prompt_logprobs: self.prompt_logprobs,
            logit_bias: (self.logit_bias.iter())
                .map(|&(id, bias)| v1::TokenBias { id, bias })
                .collect(),
            allowed_token_ids: self.allowed_token_ids.clone(),
            // The caller tokenizes them.
            bad_words: Vec::new(),
        })
    }

    /// Returns the first field that needs nodes of sampling version 1.
    pub(crate) fn field_of_sampling(&self) -> Option<&'static str> {
        let fields = [
            ("prompt_logprobs", self.prompt_logprobs.is_some()),
            ("logit_bias", !self.logit_bias.is_empty()),
            ("allowed_token_ids", !self.allowed_token_ids.is_empty()),
            ("bad_words", !self.bad_words.is_empty()),
        ];
        fields.into_iter().find_map(|(field, is_given)| is_given.then_some(field))
    }
}

/// Checks the number of allowed tokens.
pub(crate) fn checked_allowed(field: &str, ids: Vec<u32>) -> Result<Vec<u32>, FieldError> {
    match ids.len() {
        ..=ALLOWED_TOKENS_MAX => Ok(ids),
        count => {
            let problem = format!("has {count} ids; allowed: at most {ALLOWED_TOKENS_MAX}");
            Err(FieldError::new(field, problem))
        }
    }
}

/// Checks texts that the answer must not have.
pub(crate) fn checked_bad_words(
    field: &str,
    words: Vec<String>,
) -> Result<Vec<String>, FieldError> {
    if words.iter().any(|word| word.trim_start().is_empty()) {
        let problem = "has an empty text; allowed: texts with more than white space";
        return Err(FieldError::new(field, problem));
    }
    let bytes: usize = words.iter().map(String::len).sum();
    match bytes {
        ..=BAD_WORDS_BYTES_MAX => Ok(words),
        _ => {
            let problem = format!("has {bytes} bytes; allowed: at most {BAD_WORDS_BYTES_MAX}");
            Err(FieldError::new(field, problem))
        }
    }
}

/// Checks the number and the values of biases, and sorts them by token.
pub(crate) fn checked_bias(
    field: &str,
    mut biases: Vec<(u32, f32)>,
) -> Result<Vec<(u32, f32)>, FieldError> {
    if biases.len() > LOGIT_BIASES_MAX {
        let problem = format!("has {} tokens; allowed: at most {LOGIT_BIASES_MAX}", biases.len());
        return Err(FieldError::new(field, problem));
    }
    if let Some((_, bias)) = biases.iter().find(|(_, bias)| !LOGIT_BIAS.contains(bias)) {
        let (least, most) = (LOGIT_BIAS.start(), LOGIT_BIAS.end());
        let problem = format!("has {bias}; allowed: numbers from {least} to {most}");
        return Err(FieldError::new(field, problem));
    }
    biases.sort_unstable_by_key(|(id, _)| *id);
    if let Some(pair) = biases.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let problem = format!("names the token {} twice; allowed: each token once", pair[0].0);
        return Err(FieldError::new(field, problem));
    }
    Ok(biases)
}

/// Rejects a prompt that no node can serve.
pub(crate) fn check_prompt(
    field: &str,
    tokens: &[u32],
    limits: &ModelLimits,
) -> Result<(), FieldError> {
    let count = tokens.len() as u64;
    let longest = limits.longest_prompt();
    if count == 0 {
        return Err(FieldError::new(field, "is empty; allowed: at least one token"));
    }
    if count > u64::from(longest) {
        return Err(FieldError::new(
            field,
            format!("has {count} tokens; allowed: at most {longest}"),
        ));
    }
    let outside = |(_, id): &(usize, &u32)| **id >= limits.vocabulary_size;
    match tokens.iter().enumerate().find(outside) {
        Some((index, id)) => Err(FieldError::new(
            field,
            format!(
                "has token id {id} at index {index}; allowed: ids below {}",
                limits.vocabulary_size
            ),
        )),
        None => Ok(()),
    }
}

/// Header and gRPC metadata key of a request's tenant, which a gateway sets. Requests share cached
/// KV only with the same cache group, tenant and salt: usage and latency show whether a prompt was
/// cached, and so reveal prompts of other clients.
pub(crate) const TENANT_HEADER: &str = "x-baton-tenant";
const TENANT_CHARS_MAX: usize = 64;
/// Maximum length of a salt in bytes. Cache scope, tenant and salt together stay below the limit of
/// the nodes.
pub(crate) const CACHE_SALT_BYTES_MAX: usize = 128;

/// A validated tenant name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tenant(String);

impl Tenant {
    pub(crate) fn parse(header: &[u8]) -> Result<Self, FieldError> {
        let text = String::from_utf8_lossy(header);
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if text.is_empty() || text.len() > TENANT_CHARS_MAX || !text.chars().all(allowed) {
            let problem = format!(
                "is {}; allowed: 1 to {TENANT_CHARS_MAX} letters, digits, '.', '_' and '-'",
                redacted(&text)
            );
            return Err(FieldError::new(TENANT_HEADER, problem));
        }
        Ok(Self(text.into_owned()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// Header of the session that a request is a turn of.
pub(crate) const SESSION_HEADER: &str = "x-baton-session";
/// Header of the time in milliseconds for which nodes keep the KV of the request for the next turn.
pub(crate) const KEEP_HEADER: &str = "x-baton-keep-ms";
/// Maximum length of a session in bytes, and maximum time to keep KV: ten minutes. Nodes have the
/// same limits.
const SESSION_BYTES_MAX: usize = 256;
const KEEP_MS_MAX: u64 = 600_000;

/// Reads the HTTP headers of a session.
pub(crate) fn session_of_headers(
    name: Option<&[u8]>,
    keep: Option<&[u8]>,
) -> Result<RequestSession, FieldError> {
    let name = name.unwrap_or_default();
    let Ok(text) = std::str::from_utf8(name) else {
        return Err(FieldError::new(SESSION_HEADER, "is not UTF-8; allowed: UTF-8"));
    };
    let keep_ms = keep.map(|value| {
        let text = String::from_utf8_lossy(value);
        let number = text.parse();
        number.map_err(|_| FieldError::new(KEEP_HEADER, keep_problem(&redacted(&text))))
    });
    checked_session((SESSION_HEADER, text), (KEEP_HEADER, keep_ms.transpose()?))
}

/// Checks the fields of a session, each given with its name in the request.
pub(crate) fn checked_session(
    (name_field, name): (&str, &str),
    (keep_field, keep_ms): (&str, Option<u64>),
) -> Result<RequestSession, FieldError> {
    if name.len() > SESSION_BYTES_MAX {
        let bytes = name.len();
        let problem = format!("has {bytes} bytes; allowed: at most {SESSION_BYTES_MAX}");
        return Err(FieldError::new(name_field, problem));
    }
    match keep_ms.filter(|ms| *ms > KEEP_MS_MAX) {
        Some(ms) => Err(FieldError::new(keep_field, keep_problem(&ms))),
        None => Ok(RequestSession { name: name.into(), keep_ms }),
    }
}

fn keep_problem(value: &dyn std::fmt::Display) -> String {
    format!("is {value}; allowed: a whole number from 0 to {KEEP_MS_MAX}")
}

/// Checks the length of a client's salt.
pub(crate) fn check_salt(field: &str, salt: String) -> Result<String, FieldError> {
    if salt.len() > CACHE_SALT_BYTES_MAX {
        let bytes = salt.len();
        let problem = format!("has {bytes} bytes; allowed: at most {CACHE_SALT_BYTES_MAX}");
        return Err(FieldError::new(field, problem));
    }
    Ok(salt)
}

/// Returns the salt for nodes: the cache scope of the caller's key after an `@`, the tenant, and
/// the client's salt, with slashes between them. Without a key, a tenant and a salt it is empty.
/// Scopes and tenants have no slash and no `@`, so different callers yield different salts.
pub(crate) fn salt_for_nodes(scope: Option<&str>, tenant: Option<&Tenant>, salt: &str) -> String {
    let named = tenant.map_or("", Tenant::as_str);
    match (scope, tenant) {
        (Some(scope), _) => format!("@{scope}/{named}/{salt}"),
        (None, None) if salt.is_empty() => String::new(),
        (None, _) => format!("{named}/{salt}"),
    }
}

/// A grammar and its field in the request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RequestedGrammar {
    /// Name of the client's field, for errors.
    pub field: &'static str,
    pub grammar: Grammar,
    /// Fields of the functions' schemas, for tool calls and structural tags.
    pub schemas: Vec<SchemaField>,
    /// A grammar that the client requested besides tools. It must be valid by itself, even if no
    /// answer uses it.
    pub alone: Option<Box<RequestedGrammar>>,
}

/// Field of one of several schemas of a grammar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SchemaField {
    pub field: String,
    /// The function that has the schema, for errors; `None` if the field is the schema.
    pub owner: Option<String>,
}

impl RequestedGrammar {
    pub(crate) fn new(field: &'static str, grammar: Grammar) -> Self {
        Self { field, grammar, schemas: Vec::new(), alone: None }
    }

    /// Returns the grammar version that a node must support for this grammar, perhaps after
    /// reasoning in this format.
    pub(crate) fn version(&self, reasoning: Option<&ReasoningFormat>) -> u32 {
        match &self.grammar {
            _ if reasoning.is_some_and(|format| !format.before_answer.is_empty()) => 5,
            _ if reasoning.is_some() => 4,
            Grammar::JsonSchema(_) | Grammar::Regex(_) => 1,
            Grammar::ToolCalls(ToolCalls { syntax, .. })
                if syntax.bare_name || !syntax.begin.is_empty() =>
            {
                4
            }
            Grammar::ToolCalls(_) => 2,
            Grammar::ContextFree(_) => 3,
            Grammar::AfterReasoning { .. } => 4,
        }
    }

    /// Converts an error of the grammar into an error of its field.
    pub(crate) fn refused(&self, error: &GrammarError) -> FieldError {
        match error {
            GrammarError::InTool { index, error } => match self.schemas.get(*index) {
                Some(SchemaField { field, owner: Some(owner) }) => {
                    FieldError::new(field, format!("of {owner} {error}"))
                }
                Some(SchemaField { field, owner: None }) => {
                    FieldError::new(field, error.to_string())
                }
                None => FieldError::new(self.field, error.to_string()),
            },
            error => FieldError::new(self.field, error.to_string()),
        }
    }

    /// Returns the grammar's form for nodes: of an answer that may begin with reasoning in these tags.
    pub(crate) fn for_nodes(&self, tags: Option<ReasoningTags>) -> v1::Grammar {
        let grammar = self.grammar.clone();
        wire_grammar(match tags {
            Some(tags) => Grammar::AfterReasoning { tags, grammar: Box::new(grammar) },
            None => grammar,
        })
    }
}

fn wire_grammar(grammar: Grammar) -> v1::Grammar {
    let kind = match grammar {
        Grammar::JsonSchema(text) => v1::grammar::Kind::JsonSchema(text),
        Grammar::Regex(text) => v1::grammar::Kind::Regex(text),
        Grammar::ContextFree(text) => v1::grammar::Kind::ContextFree(text),
        Grammar::ToolCalls(calls) => v1::grammar::Kind::ToolCalls(tool_calls(calls)),
        Grammar::AfterReasoning {
            tags: ReasoningTags { open, close, before_answer, never_within },
            grammar,
        } => {
            let thought = Some(v1::Thought { open, close, before_answer, never_within });
            return v1::Grammar { thought, ..wire_grammar(*grammar) };
        }
    };
    v1::Grammar { kind: Some(kind), thought: None }
}

fn tool_calls(calls: ToolCalls) -> v1::ToolCalls {
    use v1::tool_calls::Alternative as Wire;
    let function = |tool: grammar::CallableTool| v1::CallableFunction {
        name: tool.name,
        arguments_schema: tool.arguments,
    };
    let mark = match &calls.alternative {
        Alternative::Answer { tag, .. } => tag.clone(),
        Alternative::Nothing | Alternative::Text(_) => String::new(),
    };
    v1::ToolCalls {
        before_name: calls.syntax.before_name,
        before_arguments: calls.syntax.before_arguments,
        after_arguments: calls.syntax.after_arguments,
        between: calls.syntax.between,
        begin: calls.syntax.begin,
        end: calls.syntax.end,
        bare_name: calls.syntax.bare_name,
        parameters: calls.syntax.parameters.map(|syntax| v1::ParameterSyntax {
            before_name: syntax.before_name,
            before_value: syntax.before_value,
            after_value: syntax.after_value,
            between: syntax.between,
            text_end: syntax.text_end,
        }),
        functions: calls.tools.into_iter().map(function).collect(),
        several: calls.several,
        alternative: match calls.alternative {
            Alternative::Nothing => None,
            Alternative::Text(free_text) => {
                let grammar::FreeText { tag: mark, never_begins } = free_text;
                Some(Wire::Text(v1::FreeText { mark, never_begins }))
            }
            Alternative::Answer { grammar, .. } => match *grammar {
                Grammar::JsonSchema(text) => Some(Wire::JsonSchema(text)),
                Grammar::Regex(text) => Some(Wire::Regex(text)),
                // The check of the grammar has rejected these cases.
                Grammar::ContextFree(_)
                | Grammar::ToolCalls(_)
                | Grammar::AfterReasoning { .. } => None,
            },
        },
        mark,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ModelLimits =
        ModelLimits { prompt_tokens_max: 90, sequence_tokens_max: 100, vocabulary_size: 1000 };

    fn sampling(options: &Options, prompt_tokens: u32) -> Result<Sampling, FieldError> {
        options.sampling(prompt_tokens, &LIMITS, DefaultLength::Rest, &[2, 0], 77, "max_tokens")
    }

    #[test]
    fn output_tokens_are_known_before_the_prompt_is_tokenized() {
        let asked = Options { max_tokens: Some(1), ..Options::default() };
        let default = DefaultLength::Tokens(16);
        assert_eq!(asked.output_tokens_max(DefaultLength::Rest), 1);
        assert_eq!(asked.output_tokens_max(default), 1);
        assert_eq!(Options::default().output_tokens_max(default), 16);
        assert_eq!(Options::default().output_tokens_max(DefaultLength::Rest), u32::MAX);
    }

    #[test]
    fn model_defaults_fill_absent_sampling_options() {
        let defaults = SamplingDefaults {
            temperature: Some(0.7),
            top_k: Some(20),
            top_p: Some(0.8),
            min_p: None,
            repetition_penalty: Some(1.1),
        };
        let asked = Options { temperature: Some(0.0), top_k: Some(0), ..Options::default() };
        let told = sampling(&asked.or(&defaults), 40).unwrap();
        assert_eq!((told.temperature, told.top_k), (0.0, 0), "the client's own");
        assert_eq!((told.top_p, told.min_p, told.repetition_penalty), (0.8, 0.0, 1.1));
    }

    #[test]
    fn defaults_are_those_of_the_openai_api() {
        let default = sampling(&Options::default(), 40).unwrap();
        assert_eq!(
            default,
            Sampling {
                temperature: 1.0,
                top_k: 0,
                top_p: 1.0,
                min_p: 0.0,
                seed: 77,
                repetition_penalty: 1.0,
                presence_penalty: 0.0,
                frequency_penalty: 0.0,
                max_tokens: 60,
                min_tokens: 0,
                stop_token_ids: vec![0, 2],
                ignore_stop_tokens: false,
                logprobs: None,
                pooling: None,
                prompt_logprobs: None,
                logit_bias: vec![],
                allowed_token_ids: vec![],
                bad_words: vec![],
            }
        );
        let short = Options::default()
            .sampling(90, &LIMITS, DefaultLength::Tokens(16), &[], 0, "max_tokens")
            .unwrap();
        assert_eq!(short.max_tokens, 10);
    }

    #[test]
    fn ignored_ends_of_sequence_leave_the_clients_own_stop_tokens() {
        let options = Options { ignore_eos: true, ..Options::default() };
        let all_ignored = sampling(&options, 1).unwrap();
        assert!(all_ignored.ignore_stop_tokens && all_ignored.stop_token_ids.is_empty());
        let own = Options { stop_token_ids: vec![7, 7], ..options };
        let own = sampling(&own, 1).unwrap();
        assert_eq!((own.ignore_stop_tokens, own.stop_token_ids), (false, vec![7]));
    }

    #[test]
    fn counts_must_fit_the_model() {
        let said = |options: Options| sampling(&options, 40).unwrap_err().to_string();
        let long = said(Options { max_tokens: Some(61), ..Options::default() });
        for words in ["max_tokens is 61", "40 tokens", "100", "at most 60"] {
            assert!(long.contains(words), "{long}");
        }
        let least = said(Options { max_tokens: Some(5), min_tokens: 6, ..Options::default() });
        assert_eq!(least, "min_tokens is 6; allowed: at most max_tokens, 5");
        let outside = said(Options { stop_token_ids: vec![1000], ..Options::default() });
        assert_eq!(outside, "stop_token_ids has 1000; allowed: ids below 1000");
    }

    #[test]
    fn a_prompt_must_fit_the_model() {
        let said =
            |tokens: &[u32]| check_prompt("prompt", tokens, &LIMITS).unwrap_err().to_string();
        assert_eq!(said(&[]), "prompt is empty; allowed: at least one token");
        assert_eq!(said(&[1; 91]), "prompt has 91 tokens; allowed: at most 90");
        assert_eq!(
            said(&[1, 1000]),
            "prompt has token id 1000 at index 1; allowed: ids below 1000"
        );
        assert_eq!(check_prompt("prompt", &[1; 90], &LIMITS), Ok(()));
    }

    #[test]
    fn invalid_tenant_names_are_rejected() {
        let long = "x".repeat(65);
        assert!(Tenant::parse(b"team-7.eu_west").is_ok());
        for wrong in [&b""[..], b"a/b", b"a b", b"\xff", "é".as_bytes(), long.as_bytes()] {
            let error = Tenant::parse(wrong).unwrap_err();
            assert_eq!(error.field, TENANT_HEADER);
            assert!(error.problem.contains("1 to 64"), "{error}");
        }
    }

    #[test]
    fn salts_of_scopes_tenants_and_clients_are_distinct() {
        let tenant = |name: &str| Some(Tenant::parse(name.as_bytes()).unwrap());
        let salts = [
            (None, tenant("a"), "b"),
            (None, tenant("ab"), ""),
            (None, tenant("a"), ""),
            (None, tenant("a"), "b/c"),
            (None, tenant("b"), "b"),
            (None, None, "b"),
            (None, None, "a/b"),
            (None, None, "/b"),
            (None, None, "/"),
            (None, None, "@a//b"),
            (None, None, ""),
            (Some("a"), None, ""),
            (Some("a"), None, "b"),
            (Some("a"), None, "a/b"),
            (Some("a"), tenant("a"), "b"),
            (Some("b"), tenant("a"), "b"),
        ]
        .map(|(scope, tenant, salt)| salt_for_nodes(scope, tenant.as_ref(), salt));
        for (index, salt) in salts.iter().enumerate() {
            assert!(!salts[..index].contains(salt), "{salt}");
        }
    }
}
