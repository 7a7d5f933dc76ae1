//! Log lines.

use std::time::Duration;

use telemetry::{LogFormat, LogSink, Resource, Telemetry, TelemetryConfig, TelemetryError};
use tracing::{dispatcher::with_default, info_span};

use crate::start;

fn resource() -> Resource {
    Resource { service: "node".into(), instance: "0".into() }
}

#[tokio::test]
async fn a_json_line_carries_fields_and_span_and_nothing_below_the_filter() {
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

#[test]
fn a_filter_that_is_none_names_the_key_and_the_text() {
    let config = TelemetryConfig {
        log: "info,router=loud".into(),
        log_format: LogFormat::Auto,
        otlp: None,
        log_sink: LogSink::Stderr,
    };
    let Err(error) = Telemetry::start(&config, resource()) else { panic!("it is no filter") };
    let message = error.to_string();
    assert!(message.contains("telemetry.log") && message.contains("router=loud"), "{message}");
}

/// The reader of the log stops; the service does not.
#[tokio::test]
async fn a_log_that_nobody_reads_stops_nobody_and_says_what_was_lost() {
    let (telemetry, lines) = start("node", None);
    {
        let _nobody_reads = lines.lock().unwrap();
        with_default(&telemetry.dispatch(), || {
            for number in 0..10_000 {
                tracing::info!(number, "line");
            }
        });
    }
    // Room again: the next line brings the count along.
    let written = async {
        while lines.lock().unwrap().len() < 200_000 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), written).await.unwrap();
    with_default(&telemetry.dispatch(), || tracing::info!("last"));
    telemetry.shutdown(Duration::from_secs(20)).await.unwrap();
    let text = String::from_utf8(lines.lock().unwrap().clone()).unwrap();
    assert!(text.contains("log lines were lost"), "{}", text.len());
    assert!(text.lines().count() < 5_000, "the queue is bounded");
}

#[tokio::test]
#[expect(clippy::await_holding_lock, reason = "the log thread waits for it, no task does")]
async fn a_log_that_nobody_reads_does_not_hold_up_the_shutdown() {
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
fn without_a_shutdown_the_queue_is_still_written() {
    let (telemetry, lines) = start("node", None);
    with_default(&telemetry.dispatch(), || tracing::info!("early end"));
    drop(telemetry);
    assert!(String::from_utf8_lossy(&lines.lock().unwrap()).contains("early end"));
}

#[test]
fn a_second_subscriber_for_the_process_is_refused() {
    let (one, _) = start("node", None);
    let (two, _) = start("node", None);
    let first = one.install();
    assert!(first.is_ok());
    assert!(matches!(two.install(), Err(TelemetryError::AlreadyInstalled)));
}
