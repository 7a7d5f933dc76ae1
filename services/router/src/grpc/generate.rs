//! `Inference/Generate`: the same journey as over HTTP, with tokens and text as messages.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures_util::Stream;
use proto::v1::{
    Finished, GenerateOptions, GenerateRequest, GenerateResponse, GeneratedTokens,
    generate_request::Prompt, generate_response, inference_server::Inference,
};
use telemetry::{metrics::Operation, propagation};
use tonic::{Code, Request, Response, Status, metadata::MetadataMap};
use tracing::Instrument;

use crate::{
    admission::Full,
    front::Front,
    generation::{Event, RequestError},
    journey::{self, Asked, Started},
    record::RequestRecord,
    request::{
        field_error::FieldError,
        ids::{RequestId, label},
        options::{
            COMPLETION_TOKENS_DEFAULT, DefaultLength, LOGPROBS, MIN_P, Options, PENALTY,
            REPETITION_PENALTY, STOP_TOKENS_MAX, TEMPERATURE, TOKENS, TOP_P,
        },
        text_workers::PromptSource,
    },
};

/// Seconds after which a refused client may find room, as in HTTP's `Retry-After`.
const RETRY_AFTER: &str = "1";

pub struct Generate {
    front: Arc<Front>,
}

impl Generate {
    pub fn new(front: Arc<Front>) -> Self {
        Self { front }
    }
}

type Responses = Pin<Box<dyn Stream<Item = Result<GenerateResponse, Status>> + Send>>;

#[tonic::async_trait]
impl Inference for Generate {
    type GenerateStream = Responses;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Responses>, Status> {
        let front = &self.front;
        let request_id = RequestId::mint().map_err(|error| Status::internal(error.to_string()))?;
        let (metadata, _, message) = request.into_parts();
        let label = label(&message.client_request_id);
        let api = Operation::Generate.as_str();
        let span = tracing::info_span!("request", %request_id, label = label.as_deref(), api);
        propagation::set_parent_from_grpc(&span, &metadata);
        let record = RequestRecord::new(&front.metrics, Operation::Generate, request_id, label);

        let tokens_only = message.options.as_ref().is_some_and(|options| options.tokens_only);
        let asked = match read(front, request_id, message, &metadata) {
            Ok(asked) => asked,
            Err(error) => {
                record.failed(&error);
                return Err(status(error));
            }
        };
        let started = journey::start(front, asked, record, span.clone())
            .instrument(span)
            .await
            .map_err(status)?;
        Ok(Response::new(Box::pin(responses(started, tokens_only))))
    }
}

/// Dropping the stream drops the request with it.
fn responses(
    started: Started,
    tokens_only: bool,
) -> impl Stream<Item = Result<GenerateResponse, Status>> {
    futures_util::stream::unfold(Some(started), move |started| async move {
        let mut started = started?;
        let event = match started.running.next().await? {
            Ok(event) => event,
            Err(error) => return Some((Err(status(error)), None)),
        };
        let text_of = |text: String| if tokens_only { String::new() } else { text };
        let event = match event {
            Event::Tokens(shown) => generate_response::Event::Tokens(GeneratedTokens {
                first_index: shown.first_index,
                tokens: shown.tokens,
                text: text_of(shown.text),
            }),
            Event::Finished(end) => generate_response::Event::Finished(Finished {
                reason: end.reason.into(),
                prompt_tokens: end.prompt_tokens,
                completion_tokens: end.completion_tokens,
                cached_tokens: end.cached_tokens,
                text: text_of(end.text),
            }),
        };
        Some((Ok(GenerateResponse { event: Some(event) }), Some(started)))
    })
}

fn read(
    front: &Front,
    request_id: RequestId,
    message: GenerateRequest,
    metadata: &MetadataMap,
) -> Result<Asked, RequestError> {
    let wire = message.options.unwrap_or_default();
    let prompt = match message.prompt {
        Some(Prompt::Text(text)) => PromptSource::Text { text, add_special_tokens: true },
        Some(Prompt::TokenIds(tokens)) => PromptSource::Tokens(tokens.ids),
        None => {
            return Err(FieldError::new("prompt", "is missing; allowed: text or token_ids").into());
        }
    };
    let timeout = timeout(front, &wire, metadata)?;
    let with_text = !wire.tokens_only || !wire.stop.is_empty();
    Ok(Asked {
        request_id,
        model: Some(message.model),
        prompts: vec![prompt],
        choices: 1,
        options: options(wire)?,
        default_length: DefaultLength::Tokens(COMPLETION_TOKENS_DEFAULT),
        max_tokens_name: "options.max_tokens",
        timeout,
        with_text,
    })
}

fn options(wire: GenerateOptions) -> Result<Options, FieldError> {
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
        cache_salt: String::new(),
    })
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
        // Neither NaN nor an infinity is within any range.
        Some(value) if !range.contains(&f64::from(value)) => {
            let allowed = format!("a number from {} to {}", range.start(), range.end());
            Err(FieldError::new(field, format!("is {value}; allowed: {allowed}")))
        }
        value => Ok(value),
    }
}

/// The client's `timeout_ms` or gRPC's own deadline, whichever is shorter.
fn timeout(
    front: &Front,
    wire: &GenerateOptions,
    metadata: &MetadataMap,
) -> Result<Duration, FieldError> {
    let longest = front.settings.timeout_max;
    let asked = wire.timeout_ms.map(Duration::from_millis);
    if let Some(asked) = asked.filter(|asked| asked.is_zero() || *asked > longest) {
        let (asked, longest) = (asked.as_millis(), longest.as_millis());
        let problem = format!("is {asked}; allowed: a whole number from 1 to {longest}");
        return Err(FieldError::new("options.timeout_ms", problem));
    }
    let deadline =
        metadata.get("grpc-timeout").and_then(|value| grpc_timeout(value.to_str().ok()?));
    let named = [asked, deadline].into_iter().flatten().min();
    Ok(named.unwrap_or(front.settings.timeout).min(longest))
}

/// gRPC's `TimeoutValue TimeoutUnit`: at most eight digits and a letter.
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

/// The one place where causes become a gRPC status.
fn status(error: RequestError) -> Status {
    let (code, retry) = match &error {
        RequestError::Field(_) | RequestError::Text { .. } | RequestError::Refused { .. } => {
            (Code::InvalidArgument, false)
        }
        RequestError::UnknownModel { .. } => (Code::NotFound, false),
        RequestError::Full(Full::InWork { .. } | Full::Waiting { .. })
        | RequestError::Busy { .. } => (Code::ResourceExhausted, true),
        RequestError::Full(Full::Stopping)
        | RequestError::NoDecodeNode { .. }
        | RequestError::Stopped => (Code::Unavailable, true),
        RequestError::AttemptsSpent { .. } => (Code::Unavailable, false),
        RequestError::Deadline { .. } => (Code::DeadlineExceeded, false),
        RequestError::SlowClient { .. } => (Code::Aborted, false),
        RequestError::ClientGone => (Code::Cancelled, false),
        RequestError::Contradiction { .. } | RequestError::Internal { .. } => {
            (Code::Internal, false)
        }
    };
    let mut status = Status::new(code, error.to_string());
    if retry {
        let value = tonic::metadata::MetadataValue::from_static(RETRY_AFTER);
        status.metadata_mut().insert("retry-after", value);
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_of_grpc_are_read_in_every_unit() {
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
    fn numbers_that_are_none_are_refused() {
        let wire = GenerateOptions { temperature: Some(f32::NAN), ..Default::default() };
        assert_eq!(
            options(wire).unwrap_err().to_string(),
            "options.temperature is NaN; allowed: a number from 0 to 2"
        );
        let wire = GenerateOptions { logprobs: Some(21), ..Default::default() };
        assert_eq!(options(wire).unwrap_err().field, "options.logprobs");
    }
}
