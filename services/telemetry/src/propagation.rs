//! W3C trace context between processes.
//!
//! The sender injects the context of its span. The receiver sets it as the parent of its own span
//! before the span records anything. A context that does not parse is ignored, and the span becomes
//! the root of a new trace.

use std::collections::HashMap;

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::{
    Context,
    propagation::{Extractor, Injector, TextMapPropagator},
    trace::TraceContextExt,
};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tonic::metadata::MetadataMap;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

const TRACEPARENT: &str = "traceparent";

/// Returns the `traceparent` of a span, for messages that are plain structs; empty for a disabled
/// span.
pub fn traceparent(span: &Span) -> String {
    let mut fields = HashMap::new();
    TraceContextPropagator::new().inject_context(&span.context(), &mut fields);
    fields.remove(TRACEPARENT).unwrap_or_default()
}

/// Returns the trace id of a span; `None` for a disabled span.
pub fn trace_id(span: &Span) -> Option<u128> {
    let context = span.context();
    let context = context.span().span_context().clone();
    context.is_valid().then(|| u128::from_be_bytes(context.trace_id().to_bytes()))
}

/// Returns trace and span id of a `traceparent` as text; `None` for empty or malformed text.
pub fn ids(traceparent: &str) -> Option<(&str, &str)> {
    let mut parts = traceparent.split('-').skip(1);
    Some((parts.next()?, parts.next()?))
}

/// Sets the sender's span as the parent of `span`, which must not have been entered yet. Empty or
/// malformed text changes nothing.
pub fn set_parent(span: &Span, traceparent: &str) {
    let fields = HashMap::from([(TRACEPARENT.to_owned(), traceparent.to_owned())]);
    adopt(span, &fields);
}

/// Sets the client's span as the parent of `span`, which must not have been entered yet.
pub fn set_parent_from_http(span: &Span, headers: &HeaderMap) {
    adopt(span, &ReadHeaders(headers));
}

/// Writes `traceparent` (and `tracestate`) of a span into the metadata of a gRPC request.
pub fn inject_grpc(span: &Span, metadata: &mut MetadataMap) {
    TraceContextPropagator::new().inject_context(&span.context(), &mut Headers(metadata.as_mut()));
}

/// Sets the caller's span as the parent of `span`, which must not have been entered yet.
pub fn set_parent_from_grpc(span: &Span, metadata: &MetadataMap) {
    adopt(span, &ReadHeaders(metadata.as_ref()));
}

fn adopt(span: &Span, fields: &dyn Extractor) {
    let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), fields);
    if parent.span().span_context().is_valid() {
        // Fails for disabled spans, which belong to no trace.
        let _ = span.set_parent(parent);
    }
}

struct Headers<'a>(&'a mut HeaderMap);

impl Injector for Headers<'_> {
    fn set(&mut self, key: &str, value: String) {
        let name = HeaderName::from_bytes(key.as_bytes());
        if let (Ok(name), Ok(value)) = (name, HeaderValue::try_from(value)) {
            self.0.insert(name, value);
        }
    }
}

struct ReadHeaders<'a>(&'a HeaderMap);

impl Extractor for ReadHeaders<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).and_then(|value| value.to_str().ok())
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}
