//! Log lines.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use telemetry::{LogSink, Resource, Telemetry, TelemetryConfig, TelemetryError, propagation};
use tracing::{dispatcher::with_default, info_span};

use crate::start;

fn resource() -> Resource {
    Resource { service: "node".into(), instance: "0".into() }
}

#[tokio::test]
async fn json_line_has_fields_and_span_and_passes_the_filter() {
    let (telemetry, lines) = start("node", None);
    with_default(&telemetry.dispatch(), || {
        let _span = info_span!("attempt", request_id = "abc").entered();
        tracing::info!(blocks = 3, "reserved");
        tracing::debug!("too quiet");
    });
    telemetry.shutdown(Duration::from_secs(20)).await.unwrap();
    let text = String::from_utf8(lines.lock().unwrap().clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.starts_with('{') && text.ends_with("}\n"), "{text}");
    for part in [
        r#""level":"INFO""#,
        r#""message":"reserved""#,
        r#""blocks":3"#,
        r#""request_id":"abc""#,
        r#""name":"attempt""#,
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

/// The ids do not depend on a collector, nor on a level that shows spans.
#[tokio::test]
async fn lines_within_a_span_begin_with_the_ids_of_trace_and_span() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let config = TelemetryConfig {
        log: "warn".into(),
        log_sink: LogSink::Memory(lines.clone()),
        ..TelemetryConfig::default()
    };
    let telemetry = Telemetry::start(&config, resource()).unwrap();
    let context = with_default(&telemetry.dispatch(), || {
        let request = info_span!("request");
        propagation::set_parent(
            &request,
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
        );
        let attempt = info_span!(parent: &request, "attempt");
        request.in_scope(|| tracing::warn!("one"));
        tracing::warn!(parent: &attempt, "two");
        tracing::warn!("three");
        [propagation::traceparent(&request), propagation::traceparent(&attempt)]
    });
    telemetry.shutdown(Duration::from_secs(20)).await.unwrap();
    let text = String::from_utf8(lines.lock().unwrap().clone()).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    for (line, traceparent) in lines.iter().zip(&context) {
        let ids: Vec<&str> = traceparent.split('-').collect();
        assert_eq!(ids[1], "0af7651916cd43dd8448eb211c80319c");
        let begin = format!(r#"{{"trace_id":"{}","span_id":"{}","timestamp":"#, ids[1], ids[2]);
        assert!(line.starts_with(&begin), "{line} of {traceparent}");
    }
    assert_ne!(context[0], context[1]);
    assert!(!lines[2].contains("trace_id"), "{text}");
}

#[test]
fn invalid_filter_is_rejected_with_its_setting() {
    let config = TelemetryConfig { log: "info,router=loud".into(), ..TelemetryConfig::default() };
    let Err(error) = Telemetry::start(&config, resource()) else { panic!("the filter is invalid") };
    let message = error.to_string();
    assert!(message.contains("telemetry.log") && message.contains("router=loud"), "{message}");
}

#[tokio::test]
async fn stalled_log_reader_blocks_no_request_and_dropped_lines_are_counted() {
    let (telemetry, lines) = start("node", None);
    {
        let _nobody_reads = lines.lock().unwrap();
        with_default(&telemetry.dispatch(), || {
            for number in 0..10_000 {
                tracing::info!(number, "line");
            }
        });
    }
    let metrics = telemetry.metrics().render_prometheus();
    telemetry.shutdown(Duration::from_secs(20)).await.unwrap();
    let text = String::from_utf8(lines.lock().unwrap().clone()).unwrap();
    let (written, last) = (text.lines().count() - 1, text.lines().last().unwrap_or_default());
    assert!((4_096..=4_100).contains(&written), "{written} lines");
    let dropped = 10_000 - written;
    assert_eq!(last, format!("{dropped} log lines were dropped: the log was not read in time"));
    let counter = format!("baton_telemetry_log_lines_dropped_total {dropped}\n");
    assert!(metrics.contains(&counter), "{counter} in {metrics}");
}

#[tokio::test]
#[expect(clippy::await_holding_lock, reason = "the log thread waits for it, no task does")]
async fn stalled_log_reader_delays_shutdown_by_the_deadline_only() {
    let (telemetry, lines) = start("node", None);
    let nobody_reads = lines.lock().unwrap();
    with_default(&telemetry.dispatch(), || {
        for number in 0..10_000 {
            tracing::info!(number, "line");
        }
    });
    let outcome = telemetry.shutdown(Duration::from_millis(100)).await;
    assert!(matches!(outcome, Err(TelemetryError::ShutdownDeadline { .. })), "{outcome:?}");
    drop(nobody_reads);
}

#[test]
fn queued_lines_are_written_without_a_shutdown() {
    let (telemetry, lines) = start("node", None);
    with_default(&telemetry.dispatch(), || tracing::info!("early end"));
    drop(telemetry);
    assert!(String::from_utf8_lossy(&lines.lock().unwrap()).contains("early end"));
}

#[test]
fn second_global_subscriber_is_rejected() {
    let (one, _) = start("node", None);
    let (two, _) = start("node", None);
    let first = one.install();
    assert!(first.is_ok());
    assert!(matches!(two.install(), Err(TelemetryError::AlreadyInstalled)));
}
