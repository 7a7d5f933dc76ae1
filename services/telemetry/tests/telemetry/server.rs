//! Tests of the metrics server.

use std::{net::SocketAddr, time::Duration};

use axum::{Router, routing::get};
use telemetry::{MetricsServer, NodeMetrics, TelemetryError};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::start;

const DEADLINE: Duration = Duration::from_secs(20);

async fn ask(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    // A connection reset after the response is valid.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

fn request(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").into_bytes()
}

fn any_port() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

#[tokio::test]
async fn metrics_and_probes_are_served_until_shutdown() {
    let (telemetry, _) = start("node", None);
    let metrics = NodeMetrics::new(&telemetry.metrics(), "smollm2", 0);
    metrics.preempted(4);
    let probes = Router::new().route("/live", get(|| async { "alive" }));
    let server = MetricsServer::start(any_port(), telemetry.metrics(), probes).await.unwrap();
    let address = server.address();
    let answer = ask(address, &request("/metrics")).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("content-type: text/plain; version=0.0.4"), "{answer}");
    assert!(answer.contains("vllm:num_preemptions_total{"), "{answer}");
    assert!(ask(address, &request("/live")).await.ends_with("alive"));
    assert!(ask(address, &request("/nothing")).await.starts_with("HTTP/1.1 404"));
    server.shutdown(DEADLINE).await.unwrap();
    assert!(TcpStream::connect(address).await.is_err(), "the port is free again");
}

#[tokio::test]
async fn garbage_and_idle_connections_do_not_block_other_clients() {
    let (telemetry, _) = start("node", None);
    let server =
        MetricsServer::start(any_port(), telemetry.metrics(), Router::new()).await.unwrap();
    let address = server.address();
    let silent = TcpStream::connect(address).await.unwrap();
    for garbage in [&b"\0\xff\xfe\r\n\r\n"[..], b"GET", b"\x16\x03\x01\x02\x00", &[b'A'; 1 << 20]] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let _ = stream.write_all(garbage).await;
    }
    assert!(ask(address, &request("/metrics")).await.starts_with("HTTP/1.1 200"));
    drop(silent);
    server.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test]
async fn silent_connections_are_closed_for_new_ones() {
    let (telemetry, _) = start("node", None);
    let server =
        MetricsServer::start(any_port(), telemetry.metrics(), Router::new()).await.unwrap();
    let address = server.address();
    let mut first = TcpStream::connect(address).await.unwrap();
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    // If the silent connections were awaited, 32 at a time for 5 s each, the answer would take 15 s.
    let metrics = request("/metrics");
    let answer = tokio::time::timeout(Duration::from_secs(10), ask(address, &metrics)).await;
    assert!(answer.expect("silent clients delay no request").starts_with("HTTP/1.1 200"));
    let closed = tokio::time::timeout(DEADLINE, first.read(&mut [0])).await;
    assert!(matches!(closed, Ok(Ok(0) | Err(_))), "{closed:?}");
    drop(silent);
    server.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test]
async fn idle_client_delays_shutdown_by_the_deadline_only() {
    let (telemetry, _) = start("node", None);
    let server =
        MetricsServer::start(any_port(), telemetry.metrics(), Router::new()).await.unwrap();
    let _silent = TcpStream::connect(server.address()).await.unwrap();
    // The server accepts connections in order, so it has accepted the idle connection before.
    ask(server.address(), &request("/metrics")).await;
    let outcome = server.shutdown(Duration::from_millis(200)).await;
    assert!(matches!(outcome, Err(TelemetryError::ShutdownDeadline { .. })), "{outcome:?}");
}

#[tokio::test]
async fn port_in_use_is_reported() {
    let (telemetry, _) = start("node", None);
    let one = MetricsServer::start(any_port(), telemetry.metrics(), Router::new()).await.unwrap();
    let two = MetricsServer::start(one.address(), telemetry.metrics(), Router::new()).await;
    let Err(error) = two else { panic!("the port is taken") };
    assert!(error.to_string().contains(&one.address().to_string()), "{error}");
    one.shutdown(DEADLINE).await.unwrap();
}
