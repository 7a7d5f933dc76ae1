//! Attributes and status of spans, by OpenTelemetry's GenAI conventions. A span never holds text of
//! a request or an answer.

use opentelemetry::{Array, StringValue, Value, trace::Status};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use crate::metrics::{FinishedRequest, RequestEnd};

/// Value of `gen_ai.provider.name`.
const PROVIDER: &str = "baton";

/// Records the outcome of a request in its span. `finish_reasons`: one for each finished answer.
pub fn request_ended(
    span: &Span,
    model: &str,
    request: &FinishedRequest,
    finish_reasons: &[&'static str],
) {
    span.set_attribute("gen_ai.operation.name", request.operation.as_str());
    span.set_attribute("gen_ai.provider.name", PROVIDER);
    span.set_attribute("gen_ai.request.model", model.to_owned());
    span.set_attribute("gen_ai.usage.input_tokens", i64::from(request.prompt_tokens));
    span.set_attribute("gen_ai.usage.output_tokens", i64::from(request.completion_tokens));
    if !finish_reasons.is_empty() {
        let reasons = finish_reasons.iter().copied().map(StringValue::from).collect();
        span.set_attribute("gen_ai.response.finish_reasons", Value::Array(Array::String(reasons)));
    }
    match request.end {
        RequestEnd::Stop | RequestEnd::Length => {}
        end => {
            span.set_attribute("error.type", end.as_str());
            // By the conventions a server's span is not failed by what its client did.
            if matches!(end, RequestEnd::Overloaded | RequestEnd::Deadline | RequestEnd::Failed) {
                failed(span, end.as_str());
            }
        }
    }
}

/// Converts an integer to the type that is exported as a number. Unsigned fields of spans and log
/// lines would be exported as text.
pub fn integer(value: impl TryInto<i64>) -> i64 {
    value.try_into().unwrap_or(i64::MAX)
}

/// Sets the outcome of an attempt in its exported span.
pub fn attempt_ended(span: &Span, outcome: &'static str) {
    span.set_attribute("outcome", outcome);
}

/// Sets the status of a span to failed.
pub fn failed(span: &Span, error: impl Into<std::borrow::Cow<'static, str>>) {
    span.set_status(Status::error(error));
}
