//! Tests of the metrics server.

use std::{
    io::{Read, Write},
    net::SocketAddr,
    sync::mpsc,
    thread,
    time::Duration,
};

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
async fn page_is_rendered_outside_the_threads_that_serve() {
    let (telemetry, _) = start("router", None);
    let (sender, threads) = mpsc::channel();
    telemetry.metrics().observe_membership("dns", move || {
        let _ = sender.send(thread::current().name().map(str::to_owned));
        true
    });
    let server =
        MetricsServer::start(any_port(), telemetry.metrics(), Router::new()).await.unwrap();
    let answer = ask(server.address(), &request("/metrics")).await;
    assert!(answer.contains("baton_membership_connected{backend=\"dns\"} 1\n"), "{answer}");
    let name = threads.try_recv().unwrap().unwrap_or_default();
    let of_test = thread::current().name().unwrap_or_default().to_owned();
    assert!(![of_test, "metrics-server".to_owned()].contains(&name), "{name}");
    server.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test]
async fn probe_is_answered_while_the_service_is_busy() {
    let (telemetry, _) = start("router", None);
    let probes = Router::new().route("/ready", get(|| async { "ready" }));
    let server = MetricsServer::start(any_port(), telemetry.metrics(), probes).await.unwrap();
    let address = server.address();
    let probe = thread::spawn(move || {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.write_all(&request("/ready")).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).map(|_| answer)
    });
    // The only thread of the test's runtime runs no other task meanwhile.
    let answer = probe.join().unwrap().unwrap();
    assert!(answer.ends_with("ready"), "{answer}");
    server.shutdown(DEADLINE).await.unwrap();
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
    // If the silent connections were awaited, 32 at a time for 5 s each, the answer would take 15
    // s.
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
