//! Errors of requests, and what both APIs and the metrics report for each.

use std::time::Duration;

use http::StatusCode;
use proto::ids::NoRandomness;
use serde::Deserialize;
use serde_path_to_error::{Path, Segment};
use telemetry::metrics::{RefusalReason, RequestEnd};
use tonic::Code;

pub use router_core::RETRY_AFTER_S;
use router_core::{FailureCause, GiveUp, LoadBound, Overload};

use crate::keys::LimitExceeded;

/// Maximum number of characters that an error shows of an invalid value.
const SHOWN_CHARS_MAX: usize = 64;
/// Maximum length of a string in bytes that may be a name.
const NAME_BYTES_MAX: usize = 24;
/// Length in bytes after which the path to a value is truncated.
const PATH_BYTES_MAX: usize = 128;

/// Error with the field's name, its problem and the allowed values in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {problem}")]
pub struct FieldError {
    /// Name of the client's field.
    pub field: String,
    /// Problem and allowed values, as the rest of a sentence that begins with the name.
    pub problem: String,
}

impl FieldError {
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }
}

/// Returns the error for a field with value `text`; `allowed` ends the sentence "allowed: ...".
pub fn refused(field: &str, text: &str, allowed: &str) -> FieldError {
    FieldError::new(field, format!("is {}; allowed: {allowed}", without_text(text)))
}

/// Returns a JSON value for an error message. Errors go into logs, so the error shows text only if it looks like a
/// name such as `"auto"`; other text is described by its type and size.
fn without_text(value: &str) -> String {
    // Without escapes, every second part is the content of a string.
    let is_quotable = !value.contains('\\') && value.split('"').skip(1).step_by(2).all(is_name);
    match value.as_bytes().first() {
        Some(b'"' | b'[' | b'{') if !is_quotable => {
            format!("{} ({} bytes)", kind(value), value.len())
        }
        _ => shown(value),
    }
}

fn is_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    text.len() <= NAME_BYTES_MAX && text.bytes().all(plain)
}

/// Describes a JSON value, and shows it only if it is a number, a boolean or null.
pub fn kind(value: &str) -> String {
    match value.as_bytes().first() {
        Some(b'"') => "a string".into(),
        Some(b'[') => "a list".into(),
        Some(b'{') => "an object".into(),
        _ => shown(value),
    }
}

/// Returns `text`, truncated for an error message.
pub fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text.to_owned(),
    }
}

/// Error of a value's JSON: where in the value, and why.
#[derive(Debug, PartialEq, Eq)]
pub struct JsonError {
    /// Path from the value to its invalid part, such as `[0].content`; empty for the value itself.
    pub path: String,
    pub reason: String,
    /// Whether the text is JSON, but not of the expected type.
    pub is_type: bool,
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
        let path = shown_path(error.path());
        let error = error.into_inner();
        Self { path, reason: reason_of(&error), is_type: error.is_data() }
    }
}

/// Parses JSON; the error tells the path to the invalid part.
pub fn parse_json<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, JsonError> {
    let mut json = serde_json::Deserializer::from_str(text);
    let parsed = serde_path_to_error::deserialize(&mut json)?;
    let at_end = json.end();
    at_end.map(|()| parsed).map_err(|error| JsonError {
        path: String::new(),
        reason: reason_of(&error),
        is_type: false,
    })
}

/// Parses the JSON text of a field. The error shows the value, or else tells the path to its invalid part.
pub fn parse_field<'a, T: Deserialize<'a>>(
    field: &str,
    text: &'a str,
    allowed: &str,
) -> Result<T, FieldError> {
    parse_json(text).map_err(|JsonError { path, reason, is_type }| {
        let found = without_text(text);
        let is_shown = found == text || !text.starts_with(['[', '{']);
        let problem = match (is_type, is_shown) {
            (true, true) => format!("is {found}"),
            (true, false) => format!("is {found}, invalid at {field}{path}: {reason}"),
            (false, _) => format!("is not valid JSON at {field}{path}: {reason}"),
        };
        FieldError::new(field, format!("{problem}; allowed: {allowed}"))
    })
}

/// Returns a path as text. A key is shown only if it looks like a name, because errors go into logs.
fn shown_path(path: &Path) -> String {
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

/// Returns an error of serde without its position, and without the client's text that it quotes.
pub fn reason_of(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let text = text.rsplit_once(" at line ").map_or(text.as_str(), |(what, _)| what);
    if text == "recursion limit exceeded" {
        return "more than 127 levels of lists and objects".to_owned();
    }
    if let (Some((before, _)), Some((_, after))) =
        (text.split_once("string \""), text.rsplit_once("\", expected "))
    {
        return format!("{before}string, expected {after}");
    }
    match (text.strip_prefix("unknown field `"), text.rsplit_once("`, expected ")) {
        (Some(rest), Some((_, after))) => match rest.split_once('`') {
            Some((key, _)) if is_name(key) => text.to_owned(),
            _ => format!("unknown field, expected {after}"),
        },
        _ => text.to_owned(),
    }
}

/// Returns a wait for an error message: nothing if the request did not wait.
fn for_time(waited: Duration) -> String {
    match waited.as_millis() {
        0 => String::new(),
        ms => format!(" for {ms} ms"),
    }
}

/// Reason why a request is rejected or fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    #[error(transparent)]
    Field(#[from] FieldError),
    #[error("the model {model:?} does not exist; served: {}", served.join(", "))]
    UnknownModel { model: String, served: Vec<String> },
    #[error("the request has no API key; expected the header authorization: Bearer KEY")]
    MissingKey,
    #[error("the API key is unknown")]
    UnknownKey,
    #[error(transparent)]
    KeyLimit(#[from] LimitExceeded),
    #[error(transparent)]
    Overload(#[from] Overload),
    #[error("all nodes are busy, for {} ms now; retry after {retry_after_s} s", waited.as_millis())]
    Busy { waited: Duration, retry_after_s: u32 },
    #[error("no decode node was available{}: {reason}", for_time(*waited))]
    NoDecodeNode { waited: Duration, reason: String },
    #[error(
        "{field} cannot be served now: no decode node of the model supports this grammar, because all are of an \
         older release"
    )]
    NoGrammar { field: &'static str },
    #[error("{attempts} attempts in a row failed; the last: {last}")]
    AttemptsSpent { attempts: u32, last: String },
    /// A node can never serve the request.
    #[error("a node refused the request: {reason}")]
    Refused { reason: String },
    #[error("the request did not complete within its deadline of {} ms", timeout.as_millis())]
    Deadline { timeout: Duration },
    #[error("a node contradicted an emitted token: {reason}")]
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

/// The outcome that the APIs and the metrics report for an error.
#[derive(Clone, Copy, Debug)]
pub struct ErrorReport {
    pub end: RequestEnd,
    pub status: StatusCode,
    /// The `code` of OpenAI's error object.
    pub code: &'static str,
    pub grpc: Code,
    /// Seconds after which the client may retry.
    pub retry_after_s: Option<u32>,
}

impl RequestError {
    /// Returns the error of a request that its core gave up. `timeout` is the request's time-out, `retry_after_s` the
    /// predicted time until the queue is served.
    pub fn gave_up(
        reason: GiveUp,
        timeout: Duration,
        slow_client_timeout: Duration,
        retry_after_s: u32,
    ) -> Self {
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
                // The client did not read, so the router's queue became full, and then the node's queue.
                FailureCause::SlowReader => Self::SlowClient { waited: slow_client_timeout },
                FailureCause::Contradiction => Self::Contradiction { reason: failure.message },
                FailureCause::MatcherFailed => Self::Internal { reason: failure.message },
                _ => Self::Refused { reason: failure.message },
            },
        }
    }

    pub fn internal(reason: &impl ToString) -> Self {
        Self::Internal { reason: reason.to_string() }
    }

    /// Returns the reason for the metric of refused requests, if the request was refused because of load.
    pub fn refusal(&self) -> Option<RefusalReason> {
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

    pub fn report(&self) -> ErrorReport {
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
        ErrorReport { end, status, code, grpc, retry_after_s }
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
        ] {
            let said = refused("stop", value, "x").to_string();
            assert_eq!(said, format!("stop is {expected}; allowed: x"));
        }
        let said = refused("stop", &long_list, "x").to_string();
        assert!(said.len() < 120 && said.contains("… (303 bytes)"), "{said}");
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
