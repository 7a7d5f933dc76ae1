//! The options of a gRPC request.

use std::time::Duration;

use grammar::Grammar;
use proto::v1::{self, GenerateOptions};
use tonic::metadata::MetadataMap;

use crate::{
    front::Front,
    request::{
        error::FieldError,
        options::{
            LOGPROBS, MIN_P, Options, PENALTY, REPETITION_PENALTY, RequestedGrammar,
            STOP_TOKENS_MAX, TEMPERATURE, TOKENS, TOP_P, Truncation, check_salt, checked_allowed,
            checked_bad_words, checked_bias, checked_session,
        },
    },
};

pub(super) fn options(wire: GenerateOptions) -> Result<Options, FieldError> {
    let stop_tokens = wire.stop_token_ids.len();
    if stop_tokens > STOP_TOKENS_MAX {
        let problem = format!("has {stop_tokens} ids; allowed: at most {STOP_TOKENS_MAX}");
        return Err(FieldError::new("options.stop_token_ids", problem));
    }
    Ok(Options {
        max_tokens: within("options.max_tokens", wire.max_tokens, &TOKENS)?,
        min_tokens: wire.min_tokens.unwrap_or(0),
        temperature: float("options.temperature", wire.temperature, &TEMPERATURE)?,
        top_p: float("options.top_p", wire.top_p, &TOP_P)?,
        top_k: wire.top_k,
        min_p: float("options.min_p", wire.min_p, &MIN_P)?,
        seed: wire.seed,
        repetition_penalty: float(
            "options.repetition_penalty",
            wire.repetition_penalty,
            &REPETITION_PENALTY,
        )?,
        presence_penalty: float("options.presence_penalty", wire.presence_penalty, &PENALTY)?,
        frequency_penalty: float("options.frequency_penalty", wire.frequency_penalty, &PENALTY)?,
        stop: wire.stop,
        include_stop: false,
        skip_special_tokens: None,
        stop_token_ids: wire.stop_token_ids,
        ignore_eos: wire.ignore_eos.unwrap_or(false),
        logprobs: within("options.logprobs", wire.logprobs, &LOGPROBS)?,
        pooling: None,
        prompt_logprobs: within("options.prompt_logprobs", wire.prompt_logprobs, &LOGPROBS)?,
        logit_bias: checked_bias(
            "options.logit_bias",
            wire.logit_bias.into_iter().map(|one| (one.id, one.bias)).collect(),
        )?,
        allowed_token_ids: checked_allowed("options.allowed_token_ids", wire.allowed_token_ids)?,
        bad_words: checked_bad_words("options.bad_words", wire.bad_words)?,
        truncation: within("options.truncate_prompt_tokens", wire.truncate_prompt_tokens, &TOKENS)?
            .map_or(Truncation::Never, Truncation::Last),
        priority: wire.priority,
        cache_salt: check_salt("options.cache_salt", wire.cache_salt)?,
        session: checked_session(
            ("options.session", &wire.session),
            ("options.keep_ms", wire.keep_ms),
        )?,
        grammar: wire.grammar.map(requested_grammar).transpose()?,
    })
}

fn requested_grammar(wire: v1::Grammar) -> Result<RequestedGrammar, FieldError> {
    match wire.kind {
        Some(v1::grammar::Kind::JsonSchema(text)) => {
            Ok(RequestedGrammar::new("options.grammar.json_schema", Grammar::JsonSchema(text)))
        }
        Some(v1::grammar::Kind::Regex(text)) => {
            Ok(RequestedGrammar::new("options.grammar.regex", Grammar::Regex(text)))
        }
        Some(v1::grammar::Kind::ContextFree(text)) => {
            Ok(RequestedGrammar::new("options.grammar.context_free", Grammar::ContextFree(text)))
        }
        Some(v1::grammar::Kind::ToolCalls(_)) => {
            let problem = "is tool_calls; allowed: json_schema, regex, context_free; tools are offered to Chat";
            Err(FieldError::new("options.grammar.kind", problem))
        }
        None => {
            let problem = "has no kind; allowed: json_schema, regex, context_free";
            Err(FieldError::new("options.grammar", problem))
        }
    }
}

type Range<T> = std::ops::RangeInclusive<T>;

fn within(field: &str, value: Option<u32>, range: &Range<u32>) -> Result<Option<u32>, FieldError> {
    match value {
        Some(value) if !range.contains(&value) => {
            let allowed = format!("a whole number from {} to {}", range.start(), range.end());
            Err(FieldError::new(field, format!("is {value}; allowed: {allowed}")))
        }
        value => Ok(value),
    }
}

fn float(field: &str, value: Option<f32>, range: &Range<f64>) -> Result<Option<f32>, FieldError> {
    match value {
        // No range contains NaN or an infinity.
        Some(value) if !range.contains(&f64::from(value)) => {
            let allowed = format!("a number from {} to {}", range.start(), range.end());
            Err(FieldError::new(field, format!("is {value}; allowed: {allowed}")))
        }
        value => Ok(value),
    }
}

/// Returns the shorter of the client's `timeout_ms` and the deadline of the call.
pub(super) fn timeout(
    front: &Front,
    wire: &GenerateOptions,
    metadata: &MetadataMap,
) -> Result<Duration, FieldError> {
    let longest = front.settings.router.timeout_max;
    let asked = wire.timeout_ms.map(Duration::from_millis);
    if let Some(asked) = asked.filter(|asked| asked.is_zero() || *asked > longest) {
        let (asked, longest) = (asked.as_millis(), longest.as_millis());
        let problem = format!("is {asked}; allowed: a whole number from 1 to {longest}");
        return Err(FieldError::new("options.timeout_ms", problem));
    }
    let deadline =
        metadata.get("grpc-timeout").and_then(|value| grpc_timeout(value.to_str().ok()?));
    let named = [asked, deadline].into_iter().flatten().min();
    Ok(named.unwrap_or(front.settings.router.timeout).min(longest))
}

/// Parses gRPC's `TimeoutValue TimeoutUnit`: at most eight digits and a letter.
fn grpc_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_deadlines_are_read_in_every_unit() {
        for (text, timeout) in [
            ("1H", Some(Duration::from_secs(3600))),
            ("5M", Some(Duration::from_secs(300))),
            ("10S", Some(Duration::from_secs(10))),
            ("250m", Some(Duration::from_millis(250))),
            ("99999999u", Some(Duration::from_micros(99_999_999))),
            ("7n", Some(Duration::from_nanos(7))),
            ("999999999S", None),
            ("S", None),
            ("", None),
            ("-1S", None),
            ("1X", None),
            ("1é", None),
        ] {
            assert_eq!(grpc_timeout(text), timeout, "{text}");
        }
    }

    #[test]
    fn nan_and_out_of_range_options_are_rejected() {
        let wire = GenerateOptions { temperature: Some(f32::NAN), ..Default::default() };
        assert_eq!(
            options(wire).unwrap_err().to_string(),
            "options.temperature is NaN; allowed: a number from 0 to 2"
        );
        let wire = GenerateOptions { logprobs: Some(21), ..Default::default() };
        assert_eq!(options(wire).unwrap_err().field, "options.logprobs");
    }
}
