//! Errors as HTTP: the one place where causes become a status and OpenAI's error object.

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, header};

use super::{
    fields::BodyError,
    wire::{ErrorBody, ErrorContent},
};
use crate::{
    admission::Full,
    generation::RequestError,
    request::{field_error::FieldError, ids::NoRandomness},
};

/// Seconds after which a refused client may find room: a few answers have ended by then.
const RETRY_AFTER_S: u32 = 1;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    pub status: StatusCode,
    pub content: ErrorContent,
    pub retry_after_s: Option<u32>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: &'static str, message: String) -> Self {
        let content = ErrorContent { message, kind, param: None, code: Some(code) };
        Self { status, content, retry_after_s: None }
    }

    pub fn invalid(status: StatusCode, code: &'static str, message: String) -> Self {
        Self::new(status, "invalid_request_error", code, message)
    }

    fn server(status: StatusCode, code: &'static str, message: String) -> Self {
        Self::new(status, "server_error", code, message)
    }

    fn param(mut self, param: impl Into<String>) -> Self {
        self.content.param = Some(param.into());
        self
    }

    fn retry(mut self) -> Self {
        self.retry_after_s = Some(RETRY_AFTER_S);
        self
    }

    pub fn no_such_path(path: &str) -> Self {
        let path: String = path.chars().take(200).collect();
        Self::invalid(StatusCode::NOT_FOUND, "not_found", format!("there is nothing at {path}"))
    }

    pub fn wrong_method(method: &http::Method, allowed: &str) -> Self {
        Self::invalid(
            StatusCode::METHOD_NOT_ALLOWED,
            "method_not_allowed",
            format!("{method} is not allowed here; allowed: {allowed}"),
        )
    }

    pub fn body_too_large(limit: u64) -> Self {
        Self::invalid(
            StatusCode::PAYLOAD_TOO_LARGE,
            "body_too_large",
            format!("the body is larger than the limit of {limit} bytes"),
        )
    }

    pub fn body_timeout(seconds: u64) -> Self {
        Self::invalid(
            StatusCode::REQUEST_TIMEOUT,
            "body_timeout",
            format!("the body did not arrive within {seconds} s"),
        )
    }

    pub fn body_broken(reason: &str) -> Self {
        Self::invalid(
            StatusCode::BAD_REQUEST,
            "body_broken",
            format!("the body could not be read: {reason}"),
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
        Self::invalid(StatusCode::BAD_REQUEST, "invalid_value", error.to_string())
            .param(error.field)
    }
}

impl From<NoRandomness> for ApiError {
    fn from(error: NoRandomness) -> Self {
        Self::server(StatusCode::INTERNAL_SERVER_ERROR, "internal", error.to_string())
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let message = error.to_string();
        let unavailable =
            |code| Self::server(StatusCode::SERVICE_UNAVAILABLE, code, message.clone());
        match error {
            RequestError::Field(error) => error.into(),
            RequestError::UnknownModel { .. } => {
                Self::invalid(StatusCode::NOT_FOUND, "model_not_found", message).param("model")
            }
            RequestError::Full(Full::InWork { .. } | Full::Waiting { .. }) => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "overloaded", message)
                    .retry()
            }
            RequestError::Full(Full::Stopping) | RequestError::Stopped => {
                unavailable("stopping").retry()
            }
            RequestError::Busy { .. } => unavailable("overloaded").retry(),
            RequestError::NoDecodeNode { .. } => unavailable("no_decode_node").retry(),
            RequestError::AttemptsSpent { .. } => {
                Self::server(StatusCode::BAD_GATEWAY, "attempts_spent", message)
            }
            RequestError::Refused { .. } => {
                Self::invalid(StatusCode::BAD_REQUEST, "refused_by_node", message)
            }
            RequestError::Deadline { .. } => {
                Self::server(StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded", message)
            }
            RequestError::Contradiction { .. } => {
                Self::server(StatusCode::INTERNAL_SERVER_ERROR, "contradiction", message)
            }
            RequestError::SlowClient { .. } => {
                Self::server(StatusCode::REQUEST_TIMEOUT, "slow_client", message)
            }
            RequestError::ClientGone => {
                Self::server(StatusCode::REQUEST_TIMEOUT, "client_gone", message)
            }
            RequestError::Text { field, .. } => {
                let error = Self::invalid(StatusCode::BAD_REQUEST, "invalid_text", message);
                match field {
                    Some(field) => error.param(field),
                    None => error,
                }
            }
            RequestError::Internal { .. } => {
                Self::server(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
            }
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(ErrorBody { error: self.content })).into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
