//! Propagation of the trace context without a collector, and invalid contexts from peers.

use http::HeaderMap;
use telemetry::propagation;
use tonic::metadata::MetadataMap;
use tracing::{dispatcher::with_default, info_span};

use crate::start;

const CLIENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

#[test]
fn client_trace_context_is_propagated_without_export() {
    let (telemetry, _) = start("router", None);
    with_default(&telemetry.dispatch(), || {
        let span = info_span!("request");
        let mut headers = HeaderMap::new();
        headers.insert("traceparent", CLIENT.parse().unwrap());
        headers.insert("tracestate", "vendor=1".parse().unwrap());
        propagation::set_parent_from_http(&span, &headers);
        let mut onward = MetadataMap::new();
        propagation::inject_grpc(&span, &mut onward);
        let text = onward.get("traceparent").unwrap().to_str().unwrap();
        assert_eq!(text.len(), 55);
        assert_eq!(text[..36], CLIENT[..36], "the same trace");
        assert_ne!(text[36..52], CLIENT[36..52], "another span");
        assert_eq!(text[52..], CLIENT[52..], "still sampled");
        assert_eq!(onward.get("tracestate").unwrap(), "vendor=1");
    });
}

#[test]
fn request_without_context_starts_an_unsampled_trace() {
    let (telemetry, _) = start("router", None);
    with_default(&telemetry.dispatch(), || {
        let (one, two) = (info_span!("request"), info_span!("request"));
        let texts = [&one, &two].map(propagation::traceparent);
        assert!(texts.iter().all(|text| text.ends_with("-00")), "{texts:?}");
        assert_ne!(texts[0][3..35], texts[1][3..35]);
    });
}

#[test]
fn context_is_empty_outside_of_a_span() {
    assert_eq!(propagation::traceparent(&tracing::Span::none()), "");
    propagation::set_parent(&tracing::Span::none(), CLIENT);
}

#[test]
fn malformed_context_is_ignored() {
    let (telemetry, _) = start("node", None);
    with_default(&telemetry.dispatch(), || {
        for text in [
            "",
            "-",
            "00-0-0-0",
            "garbage \u{0} \u{1f980}",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-B7AD6B7169203331-01",
            &"0".repeat(100_000),
        ] {
            let span = info_span!("reserve");
            propagation::set_parent(&span, text);
            let trace = propagation::traceparent(&span);
            assert!(trace.len() == 55 && !trace[3..].starts_with("0af765"), "{text:.60}");
        }
    });
}
