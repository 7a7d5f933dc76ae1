//! Export of spans and metrics, and its shutdown.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use http::HeaderMap;
use opentelemetry_proto::tonic::{
    metrics::v1::{Metric, metric::Data},
    trace::v1::{span::SpanKind, status::StatusCode},
};
use telemetry::{
    NodeMetrics, RouterMetrics, TelemetryError,
    metrics::{AttemptEndLabel, FinishedRequest, LoadStats, Operation, RequestEnd},
    propagation, spans,
};
use tokio::net::TcpListener;
use tonic::metadata::MetadataMap;
use tracing::{dispatcher::with_default, field, info_span};

use crate::{collector::Collector, start};

const DEADLINE: Duration = Duration::from_secs(20);
const REQUEST: FinishedRequest = FinishedRequest {
    operation: Operation::Chat,
    end: RequestEnd::Length,
    duration: Duration::from_millis(130),
    time_to_first_token: None,
    prompt_tokens: 100,
    completion_tokens: 11,
    cached_tokens: 64,
};

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
        let attempt = info_span!("attempt");
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
async fn span_of_a_request_has_its_kind_the_genai_names_and_its_status() {
    let collector = Collector::start().await;
    let (telemetry, _) = start("router", Some(collector.url.clone()));
    let request = REQUEST;
    with_default(&telemetry.dispatch(), || {
        let complete =
            info_span!("complete", otel.kind = "server", tokens = field::Empty, seconds = 1.5);
        complete.record("tokens", spans::integer(7_u64));
        spans::request_ended(&complete, "smollm2", &request, &["stop", "length"]);
        let late = info_span!("late", otel.kind = "server");
        let end = RequestEnd::Deadline;
        spans::request_ended(&late, "smollm2", &FinishedRequest { end, ..request }, &[]);
        let left = info_span!("left", otel.kind = "client");
        let end = RequestEnd::ClientGone;
        spans::request_ended(&left, "smollm2", &FinishedRequest { end, ..request }, &[]);
    });
    telemetry.shutdown(DEADLINE).await.unwrap();
    let (spans, _) = collector.finish().await;
    let attributes = |name: &str| -> BTreeMap<String, String> {
        let attributes = spans[name].span.attributes.iter();
        attributes
            .map(|it| (it.key.clone(), format!("{:?}", it.value.as_ref().unwrap().value)))
            .collect()
    };
    let complete = attributes("complete");
    for (key, value) in [
        ("gen_ai.operation.name", r#""chat""#),
        ("gen_ai.provider.name", r#""baton""#),
        ("gen_ai.request.model", r#""smollm2""#),
        ("gen_ai.usage.input_tokens", "IntValue(100)"),
        ("gen_ai.usage.output_tokens", "IntValue(11)"),
        ("tokens", "IntValue(7)"),
        ("seconds", "DoubleValue(1.5)"),
        ("gen_ai.response.finish_reasons", r#""length""#),
    ] {
        assert!(complete[key].contains(value), "{key}: {}", complete[key]);
    }
    assert!(!complete.contains_key("error.type"));
    assert!(attributes("late")["error.type"].contains("deadline"));
    assert!(attributes("left")["error.type"].contains("client_gone"));
    let kind_and_code = ["complete", "late", "left"].map(|name| {
        let span = &spans[name].span;
        (span.kind(), span.status.as_ref().map_or(StatusCode::Unset, |status| status.code()))
    });
    let expected = [
        (SpanKind::Server, StatusCode::Unset),
        (SpanKind::Server, StatusCode::Error),
        (SpanKind::Client, StatusCode::Unset),
    ];
    assert_eq!(kind_and_code, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_are_pushed_at_shutdown_at_the_latest() {
    let collector = Collector::start().await;
    let (telemetry, _) = start("router", Some(collector.url.clone()));
    let metrics = RouterMetrics::new(&telemetry.metrics(), "smollm2");
    metrics.attempt_ended(AttemptEndLabel::Complete);
    assert!(telemetry.metrics().render_prometheus().contains("baton_attempts_total{"));
    telemetry.shutdown(DEADLINE).await.unwrap();
    let (_, metrics) = collector.finish().await;
    assert!(metrics.iter().any(|metric| metric.name == "baton.attempts"), "{metrics:?}");
}

/// Returns the name of a metric in Prometheus by the rules of its OTLP receiver.
fn translated(metric: &Metric) -> String {
    let is_counter = matches!(&metric.data, Some(Data::Sum(sum)) if sum.is_monotonic);
    let mut name = metric.name.replace('.', "_");
    let unit = match metric.unit.as_str() {
        "s" => "_seconds",
        "By" => "_bytes",
        "By/s" => "_bytes_per_second",
        // A unit in braces is an annotation.
        unit => unit.split('{').next().unwrap_or_default(),
    };
    for suffix in [unit, if is_counter { "_total" } else { "" }] {
        if !name.ends_with(suffix) {
            name.push_str(suffix);
        }
    }
    name
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_have_the_same_names_over_otlp_and_in_a_scrape() {
    for service in ["router", "decode"] {
        let collector = Collector::start().await;
        let (telemetry, _) = start(service, Some(collector.url.clone()));
        let metrics = telemetry.metrics();
        metrics.set_draining(false);
        metrics.observe_membership("etcd", || true);
        let second = Duration::from_secs(1);
        if service == "router" {
            let metrics = RouterMetrics::new(&metrics, "smollm2");
            metrics.first_token(Operation::Chat, second);
            metrics.ttft_predicted(second, second);
            metrics.transfer_delivered(1, second);
            metrics.set_nodes("decode", "up", Some("smollm2"), 1);
            let request = FinishedRequest { end: RequestEnd::Failed, ..REQUEST };
            metrics.request_ended(&request);
        } else {
            let metrics = NodeMetrics::new(&metrics, "smollm2", 1);
            metrics.set_load(&LoadStats::default());
            metrics.prefilled(second);
        }
        let text = metrics.render_prometheus();
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        // Aliases exist in scrapes only.
        let scraped: BTreeSet<String> = types
            .filter(|name| !name.starts_with("vllm:") && *name != "target_info")
            .map(str::to_owned)
            .collect();
        telemetry.shutdown(DEADLINE).await.unwrap();
        let (_, metrics) = collector.finish().await;
        let pushed: BTreeSet<String> = metrics.iter().map(translated).collect();
        assert_eq!(pushed, scraped, "{service}");
    }
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
    let text = telemetry.metrics().render_prometheus();
    let dropped =
        text.lines().find_map(|line| line.strip_prefix("baton_telemetry_spans_dropped_total "));
    // The queue holds 4,096 spans.
    assert_eq!(dropped, Some("15904"), "{text}");
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
