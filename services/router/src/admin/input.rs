//! Bodies and fields of the operator's calls.

use std::sync::Arc;

use axum::{
    body::Bytes,
    extract::{FromRequest, Request, rejection::BytesRejection},
};
use http::StatusCode;

use crate::{front::Front, http::ApiError};

/// Maximum bytes of a body.
pub(super) const BODY_BYTES_MAX: usize = 2 << 20;

/// Reads a body within the time-out of requests. The port accepts few connections and sets no
/// deadline for bodies itself.
pub(super) async fn read_body(front: &Front, request: Request) -> Result<Bytes, ApiError> {
    let read_max = front.settings.request_read_max;
    match tokio::time::timeout(read_max, Bytes::from_request(request, &())).await {
        Ok(body) => body.map_err(|error| unread_body(&error)),
        Err(_) => {
            let late = format!("the body did not arrive within {} s", read_max.as_secs());
            Err(ApiError::body_timeout(&late))
        }
    }
}

fn unread_body(error: &BytesRejection) -> ApiError {
    match error.status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::body_too_large(BODY_BYTES_MAX as u64),
        status => {
            let message = format!("cannot read the body: {}", error.body_text());
            ApiError::invalid(status, "body_broken", message)
        }
    }
}

/// Returns the model with this name, or the default model.
pub(super) fn checked_model(front: &Front, name: Option<String>) -> Result<Arc<str>, ApiError> {
    let Some(name) = name else { return Ok(front.models.all()[0].name.clone()) };
    let names = front.models.model_names();
    names.get(name.as_str()).cloned().ok_or_else(|| {
        let known: Vec<&str> = names.keys().map(AsRef::as_ref).collect();
        let expected = format!("one of: {}", known.join(", "));
        invalid("model", format!("{:?}", shown(&name)), &expected)
    })
}

pub(super) fn shown(text: &str) -> String {
    text.chars().take(200).collect()
}

pub(super) fn invalid(field: &str, value: String, expected: &str) -> ApiError {
    let message = format!("invalid {field}: {value}; expected {expected}");
    ApiError::invalid(StatusCode::BAD_REQUEST, "invalid_value", message)
}
