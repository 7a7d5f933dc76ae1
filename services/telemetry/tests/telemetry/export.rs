//! Export of spans and metrics, and its shutdown.

use std::time::{Duration, Instant};

use http::HeaderMap;
use telemetry::{RouterMetrics, TelemetryError, metrics::AttemptEnd, propagation};
use tokio::net::TcpListener;
use tonic::metadata::MetadataMap;
use tracing::{dispatcher::with_default, info_span};

use crate::{collector::Collector, start};

const DEADLINE: Duration = Duration::from_secs(20);

/// The path is client → router (HTTP) → prefill node (gRPC) → decode node (control message).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_trace_spans_all_processes_with_parents_and_children() {
    let collector = Collector::start().await;
    let (router, _) = start("router", Some(collector.url.clone()));
    let (prefill, _) = start("prefill", Some(collector.url.clone()));
    let (decode, _) = start("decode", Some(collector.url.clone()));

    let mut headers = HeaderMap::new();
    let client = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    headers.insert("traceparent", client.parse().unwrap());
    let mut metadata = MetadataMap::new();
    with_default(&router.dispatch(), || {
        let request = info_span!("request");
        propagation::set_parent_from_http(&request, &headers);
        let _entered = request.enter();
        let attempt = info_span!("attempt", number = 1);
        propagation::inject_grpc(&attempt, &mut metadata);
    });
    let control_message = with_default(&prefill.dispatch(), || {
        let span = info_span!("prefill");
        propagation::set_parent_from_grpc(&span, &metadata);
        propagation::traceparent(&span)
    });
    with_default(&decode.dispatch(), || {
        let span = info_span!("transfer");
        propagation::set_parent(&span, &control_message);
        drop(span);
    });
    for telemetry in [router, prefill, decode] {
        telemetry.shutdown(DEADLINE).await.unwrap();
    }

    let (spans, _) = collector.finish().await;
    let span = |name: &str| &spans.get(name).unwrap_or_else(|| panic!("{name}: {spans:?}")).span;
    let trace = span("request").trace_id.clone();
    assert_eq!(hex(&trace), "0af7651916cd43dd8448eb211c80319c");
    assert!(spans.values().all(|found| found.span.trace_id == trace));
    assert_eq!(hex(&span("request").parent_span_id), "b7ad6b7169203331");
    assert_eq!(span("attempt").parent_span_id, span("request").span_id);
    assert_eq!(span("prefill").parent_span_id, span("attempt").span_id);
    assert_eq!(span("transfer").parent_span_id, span("prefill").span_id);
    let services = ["request", "attempt", "prefill", "transfer"].map(|name| &spans[name].service);
    assert_eq!(services, ["router", "router", "prefill", "decode"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_are_pushed_at_shutdown_at_the_latest() {
    let collector = Collector::start().await;
    let (telemetry, _) = start("router", Some(collector.url.clone()));
    let metrics = RouterMetrics::new(&telemetry.metrics(), "smollm2");
    metrics.attempt_ended(AttemptEnd::Complete);
    assert!(telemetry.metrics().render_prometheus().contains("baton_attempts_total{"));
    telemetry.shutdown(DEADLINE).await.unwrap();
    let (_, names) = collector.finish().await;
    assert!(names.contains(&"baton.attempts".to_owned()), "{names:?}");
}

/// The collector accepts connections and never responds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_collector_delays_shutdown_by_the_deadline_only() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (telemetry, _) = start("node", Some(url));
    let began = Instant::now();
    with_default(&telemetry.dispatch(), || {
        for number in 0..20_000 {
            info_span!("step", number).in_scope(|| {});
        }
    });
    assert!(began.elapsed() < DEADLINE, "spans never wait for the collector");
    let began = Instant::now();
    let outcome = telemetry.shutdown(Duration::from_millis(300)).await;
    assert!(began.elapsed() < DEADLINE, "{:?}", began.elapsed());
    assert!(matches!(outcome, Err(TelemetryError::ShutdownDeadline { .. })), "{outcome:?}");
    drop(listener);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreachable_collector_delays_shutdown_by_the_deadline_only() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let (telemetry, _) = start("node", Some(url));
    with_default(&telemetry.dispatch(), || info_span!("lost").in_scope(|| {}));
    let began = Instant::now();
    assert!(telemetry.shutdown(Duration::from_secs(1)).await.is_err());
    assert!(began.elapsed() < DEADLINE, "{:?}", began.elapsed());
}

#[test]
fn export_without_a_runtime_is_rejected() {
    let config = telemetry::TelemetryConfig {
        log: "info".into(),
        otlp: telemetry::Otlp::to("http://127.0.0.1:1".into()),
        ..telemetry::TelemetryConfig::default()
    };
    let resource = telemetry::Resource { service: "node".into(), instance: "0".into() };
    let outcome = telemetry::Telemetry::start(&config, resource);
    assert!(matches!(outcome, Err(TelemetryError::NoRuntime)));
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
