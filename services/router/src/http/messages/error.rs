//! Errors in the format of Anthropic's API.

use std::borrow::Cow;

use axum::{
    Json,
    extract::Request,
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::{HeaderName, StatusCode};
use schemars::JsonSchema;
use serde::Serialize;

use crate::http::{X_REQUEST_ID, error::ApiError};

const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

#[derive(Serialize, JsonSchema)]
pub(in crate::http) struct MessagesError<'a> {
    #[schemars(extend("const" = "error"))]
    r#type: &'static str,
    error: MessagesErrorContent<'a>,
    /// Absent in the event of a stream, whose header has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<Cow<'a, str>>,
}

#[derive(Serialize, JsonSchema)]
struct MessagesErrorContent<'a> {
    #[schemars(extend("enum" = ["invalid_request_error", "authentication_error", "not_found_error",
        "request_too_large", "rate_limit_error", "api_error", "overloaded_error", "timeout_error"]))]
    r#type: &'static str,
    message: &'a str,
}

impl<'a> MessagesError<'a> {
    pub(super) fn new(error: &'a ApiError, request_id: Option<Cow<'a, str>>) -> Self {
        let kind = match error.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            StatusCode::GATEWAY_TIMEOUT => "timeout_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        let error = MessagesErrorContent { r#type: kind, message: &error.content.message };
        Self { r#type: "error", error, request_id }
    }
}

/// Gives the errors of Anthropic's routes its format, and all responses of these routes its header
/// of the request id.
pub(in crate::http) async fn with_format(request: Request, next: Next) -> Response {
    let is_messages = request.uri().path().starts_with("/v1/messages");
    let mut response = next.run(request).await;
    if !is_messages {
        return response;
    }
    let id = response.headers().get(X_REQUEST_ID).cloned();
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let request_id = id.as_ref().map(|id| String::from_utf8_lossy(id.as_bytes()));
        let body = Json(MessagesError::new(&error, request_id)).into_response().into_body();
        *response.body_mut() = body;
        response.headers_mut().remove(http::header::CONTENT_LENGTH);
    }
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}
