//! Errors of requests, and the status and metric of each in the HTTP API, the gRPC API and the
//! metrics.

use std::time::Duration;

use http::StatusCode;
use proto::ids::NoRandomness;
use serde::{Deserialize, de::IgnoredAny};
use serde_path_to_error::{Path, Segment};
use telemetry::metrics::{RefusalReason, RequestEnd};
use tonic::Code;

pub(crate) use router_core::RETRY_AFTER_S;
use router_core::{FailureCause, GiveUp, LoadBound, Overload};

use crate::keys::LimitExceeded;

/// Maximum number of characters that an error shows of an invalid value.
const SHOWN_CHARS_MAX: usize = 64;
/// Maximum length in bytes of a string that counts as a name, such as `auto` or `json_object`.
const NAME_BYTES_MAX: usize = 24;
/// Length in bytes after which an error truncates the path to a value.
const PATH_BYTES_MAX: usize = 128;

/// Error with the field's name, its problem and the allowed values in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {problem}")]
pub(crate) struct FieldError {
    /// Name of the client's field.
    pub field: String,
    /// Problem and allowed values, as the rest of a sentence that begins with the name.
    pub problem: String,
}

impl FieldError {
    pub(crate) fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }
}

/// Returns the error of a field with the invalid value `text`; `allowed` ends the sentence
/// "allowed: ...".
pub(crate) fn invalid_value(field: &str, text: &str, allowed: &str) -> FieldError {
    FieldError::new(field, format!("is {}; allowed: {allowed}", redacted(text)))
}

/// Describes a value for an error message. Errors go into logs, and a client's text may be private.
/// So the description shows numbers, and strings and keys that look like a name such as `"auto"`,
/// and only type and size of any other value.
pub(crate) fn redacted(value: &str) -> String {
    match value.as_bytes().first() {
        Some(b'"' | b'[' | b'{') if is_json_of_names(value) => truncated(value),
        Some(b'"' | b'[' | b'{') => format!("{} ({} bytes)", type_or_scalar(value), value.len()),
        _ => type_or_scalar(value),
    }
}

/// Returns whether `value` is JSON whose strings and keys all look like names.
fn is_json_of_names(value: &str) -> bool {
    // Without escapes, every second part between quotes is the content of a string.
    !value.contains('\\')
        && value.split('"').skip(1).step_by(2).all(is_name)
        && serde_json::from_str::<IgnoredAny>(value).is_ok()
}

fn is_name(text: &str) -> bool {
    let is_name_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    text.len() <= NAME_BYTES_MAX && text.bytes().all(is_name_byte)
}

/// Names the type of a string, a list or an object. Returns a number, a boolean or null itself, and
/// short text without spaces that is not JSON, such as the value of a header; of longer text the
/// size.
pub(crate) fn type_or_scalar(value: &str) -> String {
    let is_number =
        |text: &str| text.bytes().all(|byte| b"+-.eE".contains(&byte) || byte.is_ascii_digit());
    let is_short_word =
        value.len() <= NAME_BYTES_MAX && value.bytes().all(|it| it.is_ascii_graphic());
    match value.as_bytes().first() {
        Some(b'"') => "a string".into(),
        Some(b'[') => "a list".into(),
        Some(b'{') => "an object".into(),
        None => "empty".into(),
        _ if is_short_word || is_number(value) => truncated(value),
        _ => format!("text of {} bytes", value.len()),
    }
}

/// Returns `text`, truncated for an error message.
pub(crate) fn truncated(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text.to_owned(),
    }
}

/// Error of parsing JSON into a type, with the path to the invalid part.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct JsonError {
    /// Path from the value to its invalid part, such as `[0].content`; empty for the value itself.
    pub path: String,
    /// The parser's reason, without the client's text.
    pub reason: String,
    /// Whether the text is valid JSON of another type than expected.
    pub is_type_error: bool,
}

impl std::fmt::Display for JsonError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.path.trim_start_matches('.') {
            "" => f.write_str(&self.reason),
            path => write!(f, "{path}: {}", self.reason),
        }
    }
}

impl From<serde_path_to_error::Error<serde_json::Error>> for JsonError {
    fn from(error: serde_path_to_error::Error<serde_json::Error>) -> Self {
        let path = redacted_path(error.path());
        let error = error.into_inner();
        Self { path, reason: reason_of(&error), is_type_error: error.is_data() }
    }
}

/// Parses JSON. The error has the path to the invalid part.
pub(crate) fn parse_json<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, JsonError> {
    let mut json = serde_json::Deserializer::from_str(text);
    let parsed = serde_path_to_error::deserialize(&mut json)?;
    json.end().map(|()| parsed).map_err(|error| JsonError {
        path: String::new(),
        reason: reason_of(&error),
        is_type_error: false,
    })
}

/// Parses the JSON text of a field. The error shows the value, or the path to its invalid part
/// where the value is not shown.
pub(crate) fn parse_field<'a, T: Deserialize<'a>>(
    field: &str,
    text: &'a str,
    allowed: &str,
) -> Result<T, FieldError> {
    parse_json(text).map_err(|JsonError { path, reason, is_type_error }| {
        let found = redacted(text);
        let is_shown = found == text || !text.starts_with(['[', '{']);
        let problem = match (is_type_error, is_shown) {
            (true, true) => format!("is {found}"),
            (true, false) => format!("is {found}, invalid at {field}{path}: {reason}"),
            (false, _) => format!("is not valid JSON at {field}{path}: {reason}"),
        };
        FieldError::new(field, format!("{problem}; allowed: {allowed}"))
    })
}

/// Formats a path. Shows a key only if it looks like a name, because errors go into logs.
fn redacted_path(path: &Path) -> String {
    let mut shown = String::new();
    for segment in path {
        if shown.len() > PATH_BYTES_MAX {
            shown.push('…');
            break;
        }
        match segment {
            Segment::Seq { index } => shown.push_str(&format!("[{index}]")),
            Segment::Map { key } | Segment::Enum { variant: key } if is_name(key) => {
                shown.push_str(&format!(".{key}"));
            }
            Segment::Map { .. } | Segment::Enum { .. } | Segment::Unknown => shown.push_str(".?"),
        }
    }
    shown
}

/// Returns the message of a serde error without its position and without the client's text that
/// serde quotes.
pub(crate) fn reason_of(error: &serde_json::Error) -> String {
    let message = error.to_string();
    // An error of a `Value`, which has no position, has line 0.
    let text = match error.line() {
        0 => message.as_str(),
        _ => message.rsplit_once(" at line ").map_or(message.as_str(), |(text, _)| text),
    };
    if text == "recursion limit exceeded" {
        return "more than 127 levels of lists and objects".to_owned();
    }
    if let (Some((before, _)), Some((_, expected))) =
        (text.split_once("string \""), text.rsplit_once("\", expected "))
    {
        return format!("{before}string, expected {expected}");
    }
    for problem in ["unknown field", "unknown variant"] {
        let quoted = text.strip_prefix(problem).and_then(|rest| rest.strip_prefix(" `"));
        let Some(quoted) = quoted else { continue };
        // The client's key may contain the same words, so the last occurrence ends the key.
        let has_no_names = ["`, there are no fields", "`, there are no variants"];
        let key_end = match has_no_names.iter().any(|words| quoted.ends_with(words)) {
            true => quoted.rfind("`, there are no "),
            false => quoted.rfind("`, expected "),
        };
        let (key, names) = quoted.split_at(key_end.unwrap_or(quoted.len()));
        if !is_name(key) {
            return format!("{problem}{}", names.trim_start_matches('`'));
        }
    }
    text.to_owned()
}

/// Returns " for N ms", which ends a clause of an error message, or nothing for a request that did
/// not wait.
fn for_wait(waited: Duration) -> String {
    match waited.as_millis() {
        0 => String::new(),
        ms => format!(" for {ms} ms"),
    }
}

/// Reason why a request is rejected or fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestError {
    #[error(transparent)]
    Field(#[from] FieldError),
    #[error("the model {model:?} does not exist; served: {}", served.join(", "))]
    UnknownModel { model: String, served: Vec<String> },
    #[error(
        "the request has no API key; expected the header authorization: Bearer KEY, or x-api-key: KEY"
    )]
    MissingKey,
    #[error("the API key is unknown")]
    UnknownKey,
    #[error(transparent)]
    KeyLimit(#[from] LimitExceeded),
    #[error(transparent)]
    Overload(#[from] Overload),
    #[error("all nodes have been busy for {} ms; retry after {retry_after_s} s", waited.as_millis())]
    Busy { waited: Duration, retry_after_s: u32 },
    #[error("no decode node was available{}: {reason}", for_wait(*waited))]
    NoDecodeNode { waited: Duration, reason: String },
    #[error(
        "cannot serve {field} now: every decode node of the model runs an older version of Baton, which does not \
         support this grammar"
    )]
    NoGrammar { field: &'static str },
    #[error("{attempts} attempts in a row failed; the last failure: {last}")]
    AttemptsSpent { attempts: u32, last: String },
    /// No repetition of the request can succeed.
    #[error("a node refused the request: {reason}")]
    Refused { reason: String },
    #[error("the request did not complete within its deadline of {} ms", timeout.as_millis())]
    Deadline { timeout: Duration },
    /// After a retry, a node sent another token than the one that the client already has.
    #[error("a node sent another token than the one already streamed: {reason}")]
    Contradiction { reason: String },
    #[error("the client did not read its stream for {} ms", waited.as_millis())]
    SlowClient { waited: Duration },
    #[error("the client disconnected")]
    ClientGone,
    /// The prompt or the messages cannot be rendered or tokenized.
    #[error("{reason}")]
    Text {
        /// The invalid field, if one is known.
        field: Option<&'static str>,
        reason: String,
    },
    #[error("the router stopped before the request was complete")]
    Stopped,
    #[error("the router failed: {reason}")]
    Internal { reason: String },
}

/// Status of an error in the HTTP API, the gRPC API and the metrics.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ErrorStatus {
    /// Label of the metric of finished requests.
    pub end: RequestEnd,
    /// HTTP status.
    pub status: StatusCode,
    /// The `code` of OpenAI's error object.
    pub code: &'static str,
    /// gRPC status.
    pub grpc: Code,
    /// Seconds after which the client may retry.
    pub retry_after_s: Option<u32>,
}

impl RequestError {
    /// Names the field of an error: `field`, or an element of the list in this field.
    pub(crate) fn at(self, field: &str, index: Option<usize>) -> Self {
        match (self, index) {
            (Self::Field(error), None) => FieldError::new(field, error.problem).into(),
            (Self::Field(error), Some(index)) => {
                FieldError::new(format!("{field}[{index}]"), error.problem).into()
            }
            (error, _) => error,
        }
    }

    /// Converts the reason why the request core gave up a request. `timeout` is the request's
    /// time-out, and `retry_after_s` is the predicted time until the queue is served.
    pub(crate) fn gave_up(reason: GiveUp, timeout: Duration, retry_after_s: u32) -> Self {
        match reason {
            GiveUp::AttemptsSpent { attempts, last } => {
                Self::AttemptsSpent { attempts, last: last.to_string() }
            }
            GiveUp::Busy { waited } => Self::Busy { waited, retry_after_s },
            GiveUp::Late(late) => Overload { full: LoadBound::Late(late), retry_after_s }.into(),
            GiveUp::NoDecodeNode { waited, reason } => {
                Self::NoDecodeNode { waited, reason: reason.to_string() }
            }
            GiveUp::Deadline => Self::Deadline { timeout },
            GiveUp::Final(failure) => match failure.cause {
                FailureCause::Deadline => Self::Deadline { timeout },
                FailureCause::Contradiction => Self::Contradiction { reason: failure.message },
                FailureCause::MatcherFailed => Self::Internal { reason: failure.message },
                // The router retries after most of these causes, so only an unretriable failure
                // gets here.
                FailureCause::Busy
                | FailureCause::Draining
                | FailureCause::Migrated
                | FailureCause::Lost
                | FailureCause::TransferFailed
                | FailureCause::Mismatch
                | FailureCause::Stale
                | FailureCause::OtherWeights
                | FailureCause::WeightsChanged
                | FailureCause::SlowReader
                | FailureCause::Duplicate
                | FailureCause::AnswerComplete
                | FailureCause::NoGrammar
                | FailureCause::Internal
                | FailureCause::Invalid
                | FailureCause::Violation => Self::Refused { reason: failure.message },
            },
        }
    }

    /// Returns the error of a bug or a failed resource in the router.
    pub(crate) fn internal(reason: &impl ToString) -> Self {
        Self::Internal { reason: reason.to_string() }
    }

    /// Returns the label of the metric of refused requests, if the router refused the request
    /// because of load.
    pub(crate) fn refusal(&self) -> Option<RefusalReason> {
        match self {
            Self::Busy { .. } => Some(RefusalReason::Busy),
            Self::Overload(overload) => match overload.full {
                LoadBound::InFlight { .. } => Some(RefusalReason::InFlight),
                LoadBound::Waiting { .. } => Some(RefusalReason::Waiting),
                LoadBound::Late(late) if late.is_over_share => Some(RefusalReason::ShareLate),
                LoadBound::Late(_) => Some(RefusalReason::Late),
                LoadBound::ShareInFlight { .. } | LoadBound::ShareWaiting { .. } => {
                    Some(RefusalReason::Share)
                }
                LoadBound::Bodies { .. } | LoadBound::ShareBodies { .. } | LoadBound::Stopping => {
                    None
                }
            },
            _ => None,
        }
    }

    pub(crate) fn status(&self) -> ErrorStatus {
        use {Code as Grpc, RequestEnd as End};
        let (end, status, code, grpc, retry) = match self {
            Self::Field(_) => (End::Invalid, 400, "invalid_value", Grpc::InvalidArgument, false),
            Self::Text { .. } => (End::Invalid, 400, "invalid_text", Grpc::InvalidArgument, false),
            Self::Refused { .. } => {
                (End::Invalid, 400, "refused_by_node", Grpc::InvalidArgument, false)
            }
            Self::MissingKey | Self::UnknownKey => {
                (End::Invalid, 401, "invalid_api_key", Grpc::Unauthenticated, false)
            }
            Self::UnknownModel { .. } => {
                (End::Invalid, 404, "model_not_found", Grpc::NotFound, false)
            }
            Self::SlowClient { .. } => (End::SlowClient, 408, "slow_client", Grpc::Aborted, false),
            Self::ClientGone => (End::ClientGone, 408, "client_gone", Grpc::Cancelled, false),
            Self::Overload(overload) if overload.full.is_of_caller() => {
                (End::Overloaded, 429, "rate_limit_exceeded", Grpc::ResourceExhausted, true)
            }
            Self::KeyLimit(_) => {
                (End::Overloaded, 429, "rate_limit_exceeded", Grpc::ResourceExhausted, true)
            }
            Self::Contradiction { .. } => {
                (End::Failed, 500, "contradiction", Grpc::Internal, false)
            }
            Self::Internal { .. } => (End::Failed, 500, "internal", Grpc::Internal, false),
            Self::NoGrammar { .. } => {
                (End::Failed, 501, "grammar_not_supported", Grpc::Unimplemented, false)
            }
            Self::AttemptsSpent { .. } => {
                (End::Failed, 502, "attempts_spent", Grpc::Unavailable, false)
            }
            Self::Overload(Overload { full: LoadBound::Stopping, .. }) | Self::Stopped => {
                (End::Failed, 503, "stopping", Grpc::Unavailable, true)
            }
            Self::Overload(_) | Self::Busy { .. } => {
                (End::Overloaded, 503, "overloaded", Grpc::ResourceExhausted, true)
            }
            Self::NoDecodeNode { .. } => {
                (End::Failed, 503, "no_decode_node", Grpc::Unavailable, true)
            }
            Self::Deadline { .. } => {
                (End::Deadline, 504, "deadline_exceeded", Grpc::DeadlineExceeded, false)
            }
        };
        let status = StatusCode::from_u16(status).expect("every status above is valid");
        let retry_after_s = match self {
            Self::KeyLimit(exceeded) => Some(exceeded.retry_after_s()),
            Self::Overload(Overload { retry_after_s, .. }) | Self::Busy { retry_after_s, .. } => {
                Some(*retry_after_s)
            }
            _ => retry.then_some(RETRY_AFTER_S),
        };
        ErrorStatus { end, status, code, grpc, retry_after_s }
    }
}

impl From<LoadBound> for RequestError {
    fn from(full: LoadBound) -> Self {
        Self::Overload(full.into())
    }
}

impl From<NoRandomness> for RequestError {
    fn from(error: NoRandomness) -> Self {
        Self::internal(&error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_quote_numbers_and_names_but_no_text() {
        let message = |value: &str| invalid_value("stop", value, "x").to_string();
        let long_list = format!("[{}1]", "1, ".repeat(100));
        for (value, expected) in [
            ("-1.5", "-1.5"),
            (r#""hot""#, r#""hot""#),
            (r#""""#, r#""""#),
            (r#"{"type": "json_object"}"#, r#"{"type": "json_object"}"#),
            ("[1, 2]", "[1, 2]"),
            (r#""Jane Doe""#, "a string (10 bytes)"),
            (r#""Jane\u0020Doe""#, "a string (15 bytes)"),
            (r#""Grüße""#, "a string (9 bytes)"),
            (r#"["Jane Doe", 1]"#, "a list (15 bytes)"),
            (r#"{"Jane Doe": 1}"#, "an object (15 bytes)"),
            (r#""0123456789012345678901234""#, "a string (27 bytes)"),
            ("1e+400", "1e+400"),
            ("null", "null"),
            // Values of headers are not JSON.
            ("", "empty"),
            ("soon", "soon"),
            ("a/b", "a/b"),
            ("Jane Doe", "text of 8 bytes"),
            ("[Jane Doe]", "a list (10 bytes)"),
            ("{Jane: Doe}", "an object (11 bytes)"),
        ] {
            assert_eq!(message(value), format!("stop is {expected}; allowed: x"));
        }
        let long_message = message(&long_list);
        assert!(
            long_message.len() < 120 && long_message.contains("… (303 bytes)"),
            "{long_message}"
        );
    }

    #[test]
    fn reason_of_unknown_key_quotes_only_names() {
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Empty {}
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Point {
            #[serde(default)]
            _x: u32,
            #[serde(default)]
            _y: u32,
        }
        #[derive(Debug, serde::Deserialize)]
        enum Color {
            Red,
            Blue,
        }
        #[derive(Debug, serde::Deserialize)]
        enum Never {}
        fn reason<T: serde::de::DeserializeOwned + std::fmt::Debug>(key: &str) -> [String; 2] {
            let object = serde_json::json!({key: 1});
            let from_text = serde_json::from_str::<T>(&object.to_string()).unwrap_err();
            [from_text, serde_json::from_value::<T>(object).unwrap_err()].map(|it| reason_of(&it))
        }
        let assert_reasons = |reasons: [String; 2], expected: &str| {
            assert_eq!(reasons, [expected; 2]);
        };
        assert_reasons(reason::<Point>("z"), "unknown field `z`, expected `_x` or `_y`");
        assert_reasons(reason::<Empty>("z"), "unknown field `z`, there are no fields");
        assert_reasons(reason::<Color>("z"), "unknown variant `z`, expected `Red` or `Blue`");
        for private in [
            "Jane Doe",
            "a`b c",
            "a`, expected `b c",
            "a`, there are no fields",
            "a`, there are no variants",
            "Jane at line 3 column 4",
        ] {
            assert_reasons(reason::<Point>(private), "unknown field, expected `_x` or `_y`");
            assert_reasons(reason::<Empty>(private), "unknown field, there are no fields");
            assert_reasons(reason::<Color>(private), "unknown variant, expected `Red` or `Blue`");
            assert_reasons(reason::<Never>(private), "unknown variant, there are no variants");
            let error = serde_json::from_value::<u32>(private.into()).unwrap_err();
            assert_eq!(reason_of(&error), "invalid type: string, expected u32");
        }
    }

    #[test]
    fn missing_decode_node_tells_the_wait_if_there_was_one() {
        let after = |waited| RequestError::NoDecodeNode { waited, reason: "none is up".into() };
        let at_once = "no decode node was available: none is up";
        assert_eq!(after(Duration::ZERO).to_string(), at_once);
        let waited = "no decode node was available for 1500 ms: none is up";
        assert_eq!(after(Duration::from_millis(1500)).to_string(), waited);
    }
}
