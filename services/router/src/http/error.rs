//! Conversion of errors into an HTTP status and OpenAI's error object.

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, header};

use telemetry::metrics::RequestEnd;

use super::{
    fields::BodyError,
    wire::{ErrorBody, ErrorContent},
};
use crate::request::error::{ErrorStatus, FieldError, RequestError};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub status: StatusCode,
    pub content: ErrorContent,
    /// Seconds after which the client may retry.
    pub retry_after_s: Option<u32>,
}

impl ApiError {
    pub(crate) fn invalid(status: StatusCode, code: &'static str, message: String) -> Self {
        let kind = "invalid_request_error";
        let content = ErrorContent { message, kind, param: None, code: Some(code) };
        Self { status, content, retry_after_s: None }
    }

    pub(crate) fn body_too_large(limit: u64) -> Self {
        Self::invalid(
            StatusCode::PAYLOAD_TOO_LARGE,
            "body_too_large",
            format!("the body is larger than the limit of {limit} bytes"),
        )
    }

    pub(crate) fn body_timeout(reason: &str) -> Self {
        Self::invalid(StatusCode::REQUEST_TIMEOUT, "body_timeout", reason.to_owned())
    }

    /// Returns the error for an unsupported body. `header` describes the body; `value` is `None`
    /// without the header.
    pub(crate) fn unsupported_body(header: &str, value: Option<&str>, allowed: &str) -> Self {
        let found = match value {
            Some(value) => format!("is {:?}", value.chars().take(100).collect::<String>()),
            None => "is missing".to_owned(),
        };
        Self::invalid(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "unsupported_media_type",
            format!("the header {header} {found}; allowed: {allowed}"),
        )
    }
}

impl From<BodyError> for ApiError {
    fn from(error: BodyError) -> Self {
        Self::invalid(StatusCode::BAD_REQUEST, "invalid_json", error.to_string())
    }
}

impl From<FieldError> for ApiError {
    fn from(error: FieldError) -> Self {
        RequestError::Field(error).into()
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let ErrorStatus { end, status, code, retry_after_s, .. } = error.status();
        let kind = match (end, status) {
            (RequestEnd::Invalid, _) => "invalid_request_error",
            (_, StatusCode::TOO_MANY_REQUESTS) => "rate_limit_error",
            _ => "server_error",
        };
        let message = error.to_string();
        let param = match error {
            RequestError::Field(error) => Some(error.field),
            RequestError::UnknownModel { .. } => Some("model".to_owned()),
            RequestError::NoGrammar { field } => Some(field.to_owned()),
            RequestError::Text { field, .. } => field.map(str::to_owned),
            _ => None,
        };
        let content = ErrorContent { message, kind, param, code: Some(code) };
        Self { status, content, retry_after_s }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = Json(ErrorBody { error: self.content.clone() });
        let mut response = (self.status, body).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // The layer of an API with another format of errors reads it.
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, time::Duration};

    use router_core::{LoadBound, Overload, StartLimit, TooLate};
    use telemetry::metrics::KeyLimit;
    use tonic::Code;

    use super::*;
    use crate::{grpc, keys::LimitExceeded};

    /// All pairs of status and code.
    const CODES: [(u16, &str); 23] = [
        (400, "invalid_json"),
        (400, "invalid_value"),
        (400, "invalid_text"),
        (400, "body_broken"),
        (400, "refused_by_node"),
        (401, "invalid_api_key"),
        (404, "model_not_found"),
        (404, "not_found"),
        (405, "method_not_allowed"),
        (408, "body_timeout"),
        (408, "slow_client"),
        (408, "client_gone"),
        (413, "body_too_large"),
        (415, "unsupported_media_type"),
        (429, "rate_limit_exceeded"),
        (501, "grammar_not_supported"),
        (502, "attempts_spent"),
        (503, "overloaded"),
        (503, "no_decode_node"),
        (503, "stopping"),
        (504, "deadline_exceeded"),
        (500, "contradiction"),
        (500, "internal"),
    ];

    const PAGE: &str = include_str!("../../../../docs/api.md");

    /// Returns the rows of the page's table: status, codes and gRPC code.
    fn rows() -> Vec<(u16, Vec<&'static str>, Option<Code>)> {
        let (_, table) = PAGE.split_once("## Errors\n").unwrap();
        let table = table.split("\n## ").next().unwrap();
        let words = |cell: &'static str| cell.split('`').skip(1).step_by(2).collect::<Vec<_>>();
        let row = |line: &'static str| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let status = cells.get(1)?.parse().ok()?;
            let code = words(cells[3]).first().map(|name| {
                let named = |code: &i32| name_of(Code::from(*code)) == *name;
                Code::from((0..=16).find(named).unwrap_or_else(|| panic!("{name} is no code")))
            });
            Some((status, words(cells[2]), code))
        };
        table.lines().filter_map(row).collect()
    }

    /// Converts `NotFound` to `NOT_FOUND`.
    fn name_of(code: Code) -> String {
        let mut name = String::new();
        for letter in format!("{code:?}").chars() {
            if letter.is_uppercase() && !name.is_empty() {
                name.push('_');
            }
            name.push(letter.to_ascii_uppercase());
        }
        name
    }

    /// Returns one error of each kind. The match makes a new kind a compile error here.
    fn errors() -> Vec<RequestError> {
        let waited = Duration::from_secs(1);
        let reason = || "why".to_owned();
        let limit = StartLimit::Wait(waited);
        let late = TooLate { wait: waited, waited: Duration::ZERO, limit, is_over_share: false };
        let exceeded = LimitExceeded { limit: KeyLimit::Streams, max: 1, retry_after: waited };
        let all = vec![
            RequestError::Field(FieldError::new("n", "is 0")),
            RequestError::UnknownModel { model: reason(), served: vec![] },
            RequestError::MissingKey,
            RequestError::UnknownKey,
            RequestError::KeyLimit(exceeded),
            LoadBound::InFlight { max: 1 }.into(),
            LoadBound::Waiting { max: 1 }.into(),
            LoadBound::ShareInFlight { max: 1 }.into(),
            LoadBound::ShareWaiting { max: 1 }.into(),
            LoadBound::Late(late).into(),
            LoadBound::Late(TooLate { is_over_share: true, ..late }).into(),
            LoadBound::Bodies { bytes_max: 1 }.into(),
            LoadBound::ShareBodies { bytes_max: 1 }.into(),
            LoadBound::Stopping.into(),
            RequestError::Busy { waited, retry_after_s: 1 },
            RequestError::NoDecodeNode { waited, reason: reason() },
            RequestError::NoGrammar { field: "regex" },
            RequestError::AttemptsSpent { attempts: 1, last: reason() },
            RequestError::Refused { reason: reason() },
            RequestError::Deadline { timeout: waited },
            RequestError::Contradiction { reason: reason() },
            RequestError::SlowClient { waited },
            RequestError::ClientGone,
            RequestError::Text { field: None, reason: reason() },
            RequestError::Stopped,
            RequestError::Internal { reason: reason() },
        ];
        for error in &all {
            match error {
                RequestError::Field(_)
                | RequestError::UnknownModel { .. }
                | RequestError::MissingKey
                | RequestError::UnknownKey
                | RequestError::KeyLimit(_)
                | RequestError::Overload(Overload {
                    full:
                        LoadBound::InFlight { .. }
                        | LoadBound::Waiting { .. }
                        | LoadBound::ShareInFlight { .. }
                        | LoadBound::ShareWaiting { .. }
                        | LoadBound::Late(_)
                        | LoadBound::Bodies { .. }
                        | LoadBound::ShareBodies { .. }
                        | LoadBound::Stopping,
                    ..
                })
                | RequestError::Busy { .. }
                | RequestError::NoDecodeNode { .. }
                | RequestError::NoGrammar { .. }
                | RequestError::AttemptsSpent { .. }
                | RequestError::Refused { .. }
                | RequestError::Deadline { .. }
                | RequestError::Contradiction { .. }
                | RequestError::SlowClient { .. }
                | RequestError::ClientGone
                | RequestError::Text { .. }
                | RequestError::Stopped
                | RequestError::Internal { .. } => {}
            }
        }
        all
    }

    #[test]
    fn the_page_lists_every_status_and_code_and_no_other() {
        let listed = rows().into_iter().flat_map(|(status, codes, _)| {
            codes.into_iter().map(move |code| (status, code)).collect::<Vec<_>>()
        });
        let listed: Vec<_> = listed.collect();
        assert_eq!(listed.iter().collect::<BTreeSet<_>>(), CODES.iter().collect());
        assert_eq!(listed.len(), CODES.len(), "each once");
    }

    #[test]
    fn every_error_has_the_codes_that_the_page_lists() {
        let rows = rows();
        for error in errors() {
            let text = error.to_string();
            let grpc = grpc::status(error.clone()).code();
            let http = ApiError::from(error);
            let code = http.content.code.unwrap();
            let row = rows
                .iter()
                .find(|(status, codes, _)| *status == http.status && codes.contains(&code))
                .unwrap_or_else(|| panic!("{} {code} is not on the page", http.status));
            assert_eq!(row.2, Some(grpc), "{text}: {code}");
        }
    }
}
