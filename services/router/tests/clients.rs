//! Clients that disconnect, do not read, or send garbage do not disturb others. The router drains.

mod common;

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use common::{
    Cluster,
    client::{Client, DEADLINE, eventually, ids_of, text_of},
    encode, long_prompt, median_within_a_second, model_text,
    node::{Behaviour, MODEL, ScriptedNode},
    settings,
};
use proto::v1::Role;
use router::ModelSource;
use serde_json::{Value, json};
use test_harness::noise;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const ANSWER: &str = " one two three four five six seven eight nine ten";

fn body(stream: bool) -> Value {
    json!({"prompt": long_prompt(), "max_tokens": 1900, "stream": stream, "ignore_eos": true})
}

/// Starts requests, disconnects, and waits until the nodes' streams were dropped, several times.
/// Asserts that the median time is at most a second.
async fn dropped_within_a_second(cluster: &Cluster, mut leave: impl AsyncFnMut() -> Instant) {
    let mut tries = 0;
    median_within_a_second("nodes' streams dropped", async || {
        let call = tries;
        tries += 1;
        let left = leave().await;
        cluster.dropped_after(call, left).await
    })
    .await;
    eventually("no request is running", async || {
        cluster.client.get("/health").await.json()["requests_running"] == 0
    })
    .await;
    eventually("each request is counted as cancelled", async || {
        let label = "outcome=\"cancelled\"";
        let cancelled = cluster.metric("baton_attempts_total", &[label]).await;
        [cluster.finished("client_gone").await, cancelled] == [tries as f64; 2]
    })
    .await;
}

#[tokio::test]
async fn disconnected_stream_cancels_both_nodes() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    cluster.prefill[0].behave(Behaviour::HangAfter(1));
    cluster.decode[0].behave(Behaviour::HangAfter(0));
    dropped_within_a_second(&cluster, async || {
        let mut stream = cluster.client.stream("/v1/completions", &body(true)).await;
        stream.next().await.unwrap();
        let left = Instant::now();
        drop(stream);
        left
    })
    .await;
}

#[tokio::test]
async fn client_disconnected_before_the_answer_cancels_both_nodes() {
    for stream in [false, true] {
        let cluster = Cluster::start(1, 1, ANSWER).await;
        cluster.prefill[0].behave(Behaviour::HangAfter(0));
        cluster.decode[0].behave(Behaviour::HangAfter(0));
        let mut calls = 0;
        dropped_within_a_second(&cluster, async || {
            // A separate client, so that the connection is not pooled for the next request.
            let client = Client::new(format!("http://{}", cluster.router.http));
            let request =
                tokio::spawn(async move { client.post("/v1/completions", &body(stream)).await });
            calls += 1;
            eventually("both nodes are asked", async || {
                let nodes = [&cluster.prefill[0], &cluster.decode[0]];
                nodes.iter().all(|node| node.calls().len() == calls)
            })
            .await;
            let left = Instant::now();
            request.abort();
            left
        })
        .await;
    }
}

/// Sends a request and reads nothing of the response.
async fn silent_client(cluster: &Cluster) -> TcpStream {
    // A small receive window, so that the kernel does not buffer the response.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(cluster.router.http).await.unwrap();
    let body = body(true).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

/// Both the request's queue and the connection may detect the client. The metric counts one slow
/// client.
#[tokio::test]
async fn slow_client_fails_without_disturbing_others() {
    let mut settings = settings();
    settings.router.slow_client_timeout = Duration::from_secs(1);
    settings.router.slow_client_events = 16;
    // More than the kernel buffers for a client that does not read.
    let cluster = Cluster::start_with(settings, 0, 1, &ANSWER.repeat(300)).await;
    // A second stream spans the lifetime of the unread one.
    cluster.decode[0].set_token_time(Duration::from_millis(2));
    let max_tokens = encode(&ANSWER.repeat(40)).len();
    let long = json!({"prompt": long_prompt(), "max_tokens": max_tokens, "stream": true});
    let mut undisturbed = cluster.client.stream("/v1/completions", &long).await;
    let first = undisturbed.next().await.expect("the answer begins");
    cluster.decode[0].behave(Behaviour::Flood);
    let mut silent = silent_client(&cluster).await;
    let is_over = async || {
        assert_eq!(cluster.finished("client_gone").await, 0.0, "it is there and does not read");
        cluster.finished("slow_client").await == 1.0
    };
    let others = async {
        let chunks = undisturbed.chunks().await;
        let quick = json!({"prompt": long_prompt(), "max_tokens": 50});
        let answer = cluster.client.post("/v1/completions", &quick).await;
        assert_eq!(answer.json()["usage"]["completion_tokens"], 50);
        chunks
    };
    let (mut chunks, ()) =
        tokio::join!(others, eventually("the slow request is finished", is_over));
    chunks.insert(0, serde_json::from_str(&first).unwrap());
    assert_eq!(text_of(&chunks, 0), ANSWER.repeat(40));
    eventually("the node's stream is closed", async || {
        cluster.decode[0].calls()[1].left.lock().unwrap().is_some()
    })
    .await;
    // The connection is closed, and the received part does not look complete.
    let mut found = Vec::new();
    let end = async { while matches!(silent.read_buf(&mut found).await, Ok(1..)) {} };
    tokio::time::timeout(DEADLINE, end).await.expect("the connection ends");
    let found = String::from_utf8_lossy(&found);
    assert!(found.starts_with("HTTP/1.1 200"), "{found:.200}");
    assert!(!found.contains("[DONE]"), "a cut stream says that it is done");
}

/// Over HTTP/2 only the unread stream ends with the error. The connection and its other streams go
/// on.
#[tokio::test]
async fn unread_stream_disturbs_no_other_stream_of_its_connection() {
    let mut settings = settings();
    settings.router.slow_client_timeout = Duration::from_secs(1);
    settings.router.slow_client_events = 4;
    let cluster = Cluster::start_with(settings, 0, 2, &ANSWER.repeat(40)).await;
    for node in &cluster.decode {
        node.set_token_time(Duration::from_millis(5));
    }
    let client = Client::with_small_windows(format!("http://{}", cluster.router.http));
    let long = json!({"prompt": long_prompt(), "max_tokens": 1900, "stream": true});
    let mut unread = client.stream("/v1/completions", &long).await;
    let mut read = client.stream("/v1/completions", &long).await;
    let given_up = async {
        eventually("the slow client is counted", async || {
            cluster.finished("slow_client").await == 1.0
        })
        .await;
    };
    let (chunks, ()) = tokio::join!(read.chunks(), given_up);
    assert_eq!(text_of(&chunks, 0), ANSWER.repeat(40));
    let events = unread.all().await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "slow_client", "{last}");
    assert!(events.len() < chunks.len(), "{} events were kept for nobody", events.len());
    let ends = [cluster.finished("slow_client").await, cluster.finished("client_gone").await];
    assert_eq!(ends, [1.0, 0.0]);
}

/// Pings and TCP do not detect a client that opens no flow-control window.
#[tokio::test]
async fn http2_client_without_a_flow_control_window_loses_its_connection() {
    let mut settings = settings();
    settings.router.slow_client_timeout = Duration::from_secs(1);
    let cluster = Cluster::start_with(settings, 0, 1, ANSWER).await;
    let began = Instant::now();
    let mut client = TcpStream::connect(cluster.router.http).await.unwrap();
    // SETTINGS with INITIAL_WINDOW_SIZE 0, then HEADERS of `GET /live` on stream 1.
    let settings = [0_u8, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0];
    let headers = [0_u8, 0, 12, 1, 5, 0, 0, 0, 1, 0x82, 0x86, 4, 5];
    let authority = [1_u8, 1, b'x'];
    let sent =
        [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &settings, &headers, b"/live", &authority];
    client.write_all(&sent.concat()).await.unwrap();
    let mut received = Vec::new();
    let end = async { while matches!(client.read_buf(&mut received).await, Ok(1..)) {} };
    tokio::time::timeout(DEADLINE, end).await.expect("the router closes the connection");
    assert!(began.elapsed() >= Duration::from_secs(2), "{:?}", began.elapsed());
    assert_eq!(cluster.client.get("/live").await.status, 200);
}

/// A client that reads an event now and then is not a slow client. Only the request's time-out
/// applies.
#[tokio::test]
async fn very_slow_client_is_bounded_by_its_request_timeout() {
    let mut settings = settings();
    // Enough time for the first event on a busy machine, but not for all events.
    settings.router.timeout = Duration::from_secs(5);
    settings.router.slow_client_timeout = DEADLINE;
    settings.router.slow_client_events = 4;
    let cluster = Cluster::start_with(settings, 0, 1, &ANSWER.repeat(300)).await;
    cluster.decode[0].behave(Behaviour::Flood);
    let client = Client::with_small_windows(format!("http://{}", cluster.router.http));
    let mut slow = client.stream("/v1/completions", &body(true)).await;
    let mut events = Vec::new();
    while let Some(event) = slow.next().await {
        events.push(event);
        if cluster.finished("deadline").await == 0.0 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "deadline_exceeded", "{last}");
    eventually("the request is counted", async || cluster.finished("deadline").await == 1.0).await;
    eventually("the node's stream is closed", async || {
        cluster.decode[0].calls()[0].left.lock().unwrap().is_some()
    })
    .await;
}

/// A client that reads more slowly than its node generates must not hold the node, whose queue it
/// would fill.
#[tokio::test]
async fn client_that_reads_slowly_is_paused_and_gets_everything() {
    let mut settings = settings();
    // More than one write takes.
    settings.router.slow_client_events = 32;
    let answer = ANSWER.repeat(150);
    let cluster = Cluster::start_with(settings, 0, 1, &answer).await;
    let client = Client::with_small_windows(format!("http://{}", cluster.router.http));
    // Events of many bytes soon fill the connection.
    let body = json!({"prompt": long_prompt(), "max_tokens": 1900, "stream": true, "logprobs": 5});
    let mut stream = client.stream("/v1/completions", &body).await;
    let paused = async || cluster.metric("baton_attempts_total", &["outcome=\"paused\""]).await;
    let mut chunks = Vec::new();
    while let Some(event) = stream.next().await.filter(|event| event != "[DONE]") {
        chunks.push(serde_json::from_str(&event).unwrap());
        if chunks.len() < 400 && paused().await == 0.0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    assert!(paused().await > 0.0, "the client held its node");
    assert_eq!(text_of(&chunks, 0), answer);
}

#[tokio::test]
async fn a_slow_but_steady_client_gets_everything() {
    let mut settings = settings();
    settings.router.slow_client_events = 4;
    let cluster = Cluster::start_with(settings, 1, 1, &ANSWER.repeat(10)).await;
    for node in cluster.prefill.iter().chain(&cluster.decode) {
        node.set_token_time(Duration::ZERO);
    }
    let body = json!({"prompt": long_prompt(), "max_tokens": 500, "stream": true});
    let mut stream = cluster.client.stream("/v1/completions", &body).await;
    let mut chunks = Vec::new();
    while let Some(event) = stream.next().await.filter(|event| event != "[DONE]") {
        chunks.push(serde_json::from_str(&event).unwrap());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(text_of(&chunks, 0), ANSWER.repeat(10));
}

#[tokio::test]
async fn silent_stream_sends_keep_alive_comments() {
    let mut settings = settings();
    settings.keep_alive = Duration::from_millis(30);
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    // The response head is sent before any token, and comments until the first token.
    cluster.prefill[0].behave(Behaviour::HangAfter(0));
    cluster.decode[0].behave(Behaviour::HangAfter(0));
    let mut stream = cluster.client.stream("/v1/completions", &body(true)).await;
    let said = b": keep-alive\n\n: keep-alive\n\n";
    let deadline = Instant::now() + DEADLINE;
    while stream.raw.len() < said.len() && Instant::now() < deadline {
        let _ = tokio::time::timeout(Duration::from_millis(50), stream.next()).await;
    }
    assert!(stream.raw.starts_with(said), "{:?}", String::from_utf8_lossy(&stream.raw));
}

/// Outcome of garbage on one port.
#[derive(Clone, Copy, Debug, Default)]
struct GarbageCounts {
    messages: usize,
    bytes: usize,
    /// Connections that were rejected or closed, out of those that must be.
    refused: usize,
}

#[tokio::test]
async fn garbage_on_either_port_disturbs_no_request() {
    const ROUNDS: u64 = 60;
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let ports = [cluster.router.http, cluster.router.grpc];
    let flood = tokio::spawn(async move {
        let mut counts = [GarbageCounts::default(); 2];
        for round in 0..ROUNDS {
            for (port, counts) in ports.into_iter().zip(&mut counts) {
                let message: Vec<u8> = match round % 6 {
                    0 => noise(round, 64),
                    1 => noise(round, 100_000),
                    2 => [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), noise(round, 500)].concat(),
                    3 => {
                        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999999\r\n\r\n{"
                            .to_vec()
                    }
                    4 => [b"GET / HTTP/1.1\r\nx: ".to_vec(), vec![b'y'; 1 << 20]].concat(),
                    _ => Vec::new(),
                };
                let mut stream = TcpStream::connect(port).await.expect("the port is open");
                counts.messages += 1;
                let mut rest = &message[..];
                // Writes until everything is sent or the router closes the connection.
                let write = async {
                    while !rest.is_empty() {
                        match stream.write(rest).await {
                            Ok(count) => rest = &rest[count..],
                            Err(_) => break,
                        }
                    }
                };
                let _ = tokio::time::timeout(Duration::from_millis(100), write).await;
                counts.bytes += message.len() - rest.len();
                let mut answer = [0; 64];
                let read = stream.read(&mut answer);
                if round % 6 == 0 {
                    // No further bytes can turn this into a request.
                    let heard = tokio::time::timeout(DEADLINE, read).await;
                    assert!(heard.is_ok(), "round {round}: {port} waits for more");
                    counts.refused += 1;
                } else {
                    let _ = tokio::time::timeout(Duration::from_millis(5), read).await;
                }
            }
        }
        counts
    });
    let body = json!({"prompt": long_prompt(), "max_tokens": 100});
    let mut served = 0;
    while served < 3 || !flood.is_finished() {
        let answer = cluster.client.post("/v1/completions", &body).await;
        assert_eq!(answer.json()["choices"][0]["text"], ANSWER);
        served += 1;
    }
    for counts in flood.await.unwrap() {
        assert_eq!((counts.messages, counts.refused), (60, 10), "{counts:?}");
        // Long payloads are cut off where the router detects the error.
        assert!(counts.bytes > 20_000, "{counts:?}");
    }
    // No node received a request from the garbage.
    assert_eq!(cluster.decode[0].calls().len(), served);
    assert_eq!(cluster.client.get("/health").await.status, 200);
}

#[tokio::test]
async fn draining_router_is_unready_and_finishes_requests() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    for node in cluster.prefill.iter().chain(&cluster.decode) {
        node.set_token_time(Duration::from_millis(40));
    }
    let request = json!({"prompt": long_prompt(), "max_tokens": 100, "stream": true,
        "return_token_ids": true});
    let mut stream = cluster.client.stream("/v1/completions", &request).await;
    let first: Value = serde_json::from_str(&stream.next().await.unwrap()).unwrap();
    let Cluster { router, client, prefill, decode, .. } = cluster;
    let http = router.http;
    let shutdown = tokio::spawn(router.shutdown());
    eventually("not ready", async || client.get("/health").await.status == 503).await;
    assert_eq!(client.get("/live").await.status, 200);
    let refused = client.post("/v1/completions", &request).await;
    assert_eq!(
        (refused.status.as_u16(), refused.error()["code"].clone()),
        (503, json!("stopping"))
    );
    assert!(refused.headers.contains_key("retry-after"));
    assert!(!shutdown.is_finished());
    let chunks = stream.chunks().await;
    let ids = [ids_of(&[first], 0), ids_of(&chunks, 0)].concat();
    assert_eq!(ids[..ids.len() - 1], encode(ANSWER));
    let ended = Instant::now();
    shutdown.await.unwrap().unwrap();
    assert!(ended.elapsed() < DEADLINE, "{:?}", ended.elapsed());
    assert!(TcpStream::connect(http).await.is_err());
    drop((prefill, decode));
}

/// Sends the request over this connection and reads the response's head.
async fn begin_response(connection: &mut TcpStream, request: &Value) -> String {
    let body = request.to_string();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json";
    let request = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    connection.write_all(request.as_bytes()).await.unwrap();
    read_to(connection, "\r\n\r\n").await
}

async fn read_to(connection: &mut TcpStream, end: &str) -> String {
    let mut read = Vec::new();
    while !read.ends_with(end.as_bytes()) {
        read.push(connection.read_u8().await.expect("the response is complete"));
    }
    String::from_utf8(read).unwrap()
}

#[tokio::test]
async fn draining_router_serves_one_more_request_on_a_connection_of_an_earlier_response() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    for node in cluster.prefill.iter().chain(&cluster.decode) {
        node.set_token_time(Duration::from_millis(40));
    }
    let request = json!({"prompt": long_prompt(), "max_tokens": 100, "stream": true});
    let mut kept = TcpStream::connect(cluster.router.http).await.unwrap();
    let head = begin_response(&mut kept, &request).await;
    assert!(!head.contains("connection: close"), "{head}");
    let Cluster { router, client, prefill, decode, .. } = cluster;
    let shutdown = tokio::spawn(router.shutdown());
    eventually("not ready", async || client.get("/health").await.status == 503).await;
    let late = client.post("/v1/completions", &request).await;
    assert_eq!(late.error()["code"], "stopping");
    read_to(&mut kept, "\r\n0\r\n\r\n").await;
    let head = begin_response(&mut kept, &request).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert!(head.contains("connection: close"), "{head}");
    let mut rest = String::new();
    kept.read_to_string(&mut rest).await.unwrap();
    assert!(rest.contains("data: [DONE]"), "{rest}");
    shutdown.await.unwrap().unwrap();
    drop((prefill, decode));
}

#[tokio::test]
async fn leaving_router_is_ready_for_its_delay_then_unready_and_accepts_requests_in_both() {
    const DELAY: Duration = Duration::from_secs(600);
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let Cluster { router, client, prefill, decode, .. } = cluster;
    let request = json!({"prompt": "Hi", "max_tokens": 5});
    let before = client.post("/v1/completions", &request).await;
    assert_eq!((before.status.as_u16(), before.headers.get("connection")), (200, None));
    let request_is_accepted = async || {
        let answer = client.post("/v1/completions", &request).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.headers["connection"]),
            (200, &"close".parse().unwrap())
        );
    };
    let in_the_first_delay = async {
        request_is_accepted().await;
        assert_eq!(client.get("/ready").await.status, 200);
        assert_eq!(client.get("/health").await.status, 200);
    };
    tokio::select! {
        () = router.leave(DELAY) => panic!("the delay is long"),
        () = in_the_first_delay => {}
    }
    router.leave(Duration::from_millis(1)).await;
    assert_eq!(client.get("/ready").await.status, 503);
    assert_eq!(client.get("/live").await.status, 200);
    let health = client.get("/health").await;
    assert_eq!((health.status.as_u16(), &health.json()["status"]), (503, &json!("stopping")));
    request_is_accepted().await;
    // A second signal ends the delay.
    router.cut().cancel();
    router.leave(DELAY).await;
    router.shutdown().await.unwrap();
    drop((prefill, decode));
}

#[tokio::test]
async fn router_leaves_for_twice_its_delay_and_keeps_its_drain() {
    let mut settings = settings();
    settings.router.drain_timeout = Some(Duration::from_secs(2));
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    let Cluster { router, client, prefill, decode, .. } = cluster;
    let began = Instant::now();
    router.leave(Duration::from_millis(200)).await;
    assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
    decode[0].behave(Behaviour::HangAfter(1));
    let mut hung = client.stream("/v1/completions", &body(true)).await;
    hung.next().await.unwrap();
    let drained = Instant::now();
    router.shutdown().await.unwrap();
    assert!(drained.elapsed() >= Duration::from_secs(2), "{:?}", drained.elapsed());
    drop((prefill, decode));
}

#[tokio::test]
async fn drain_lasts_until_the_longest_deadline_by_default() {
    let mut settings = settings();
    settings.router.drain_timeout = None;
    settings.router.timeout_max = Duration::from_secs(2);
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    let Cluster { router, client, prefill, decode, .. } = cluster;
    decode[0].behave(Behaviour::HangAfter(1));
    let mut hung = client.stream("/v1/completions", &body(true)).await;
    hung.next().await.unwrap();
    let drained = Instant::now();
    router.shutdown().await.unwrap();
    assert!(drained.elapsed() >= Duration::from_secs(2), "{:?}", drained.elapsed());
    drop((prefill, decode));
}

#[tokio::test]
async fn router_stays_ready_when_its_decode_nodes_are_lost() {
    let model = ModelSource { name: MODEL.to_owned(), text: model_text() };
    let cluster = Cluster::begin(settings(), vec![model], vec![], vec![]);
    assert_eq!(cluster.client.get("/ready").await.status, 503);
    drop(cluster);
    let mut cluster = Cluster::start(0, 1, ANSWER).await;
    assert_eq!(cluster.client.get("/ready").await.status, 200);
    cluster.decode.clear();
    eventually("the node is lost", async || cluster.client.get("/health").await.status == 503)
        .await;
    assert_eq!(cluster.client.get("/ready").await.status, 200);
}

#[tokio::test]
async fn drain_timeout_ends_requests_with_one_typed_error() {
    let mut settings = settings();
    settings.router.drain_timeout = Some(Duration::from_millis(200));
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    cluster.decode[0].behave(Behaviour::HangAfter(1));
    let mut stream = cluster.client.stream("/v1/completions", &body(true)).await;
    stream.next().await.unwrap();
    let Cluster { router, prefill, decode, .. } = cluster;
    let shutdown = tokio::spawn(router.shutdown());
    let events = stream.all().await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "stopping", "{events:?}");
    shutdown.await.unwrap().unwrap();
    drop((prefill, decode));
}

#[tokio::test]
async fn trace_context_is_passed_to_the_nodes() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let traceparent = format!("00-{trace}-b7ad6b7169203331-01");
    let headers = [("traceparent", traceparent.as_str())];
    let body = json!({"prompt": long_prompt(), "max_tokens": 5});
    let _scope = tracing::dispatcher::set_default(&cluster.dispatch());
    let answer = cluster.client.post_with("/v1/completions", &headers, &body).await;
    assert_eq!(answer.status, 200);
    let (prefill, decode) = (cluster.prefill[0].calls(), cluster.decode[0].calls());
    let seen = [&prefill[0].traceparent, &decode[0].traceparent];
    for traceparent in seen {
        let traceparent = traceparent.as_deref().expect("the call has a traceparent");
        assert!(traceparent.contains(trace), "{traceparent}");
        assert!(!traceparent.contains("b7ad6b7169203331"), "the attempt has a span of its own");
    }
    assert_eq!(seen[0], seen[1]);
}

#[tokio::test]
async fn body_that_never_arrives_does_not_keep_a_connection_of_the_admin_port() {
    let mut settings = settings();
    settings.request_read_max = Duration::from_millis(200);
    let cluster = Cluster::start_with(settings, 0, 1, ANSWER).await;
    let mut stream = TcpStream::connect(cluster.router.admin).await.unwrap();
    let head = "POST /v1/weights/begin HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    let read = tokio::time::timeout(DEADLINE, stream.read_to_string(&mut answer)).await;
    read.expect("the router closes the connection").unwrap();
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("body_timeout"), "{answer}");
}

#[tokio::test]
async fn slow_body_uses_the_time_of_its_request() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let mut stream = TcpStream::connect(cluster.router.http).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n\
        x-baton-deadline-ms: 200\r\nconnection: close\r\ncontent-length: 9\r\n\r\n{";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    let read = tokio::time::timeout(DEADLINE, stream.read_exact(&mut answer)).await;
    read.expect("the request ends at its deadline").unwrap();
    assert_eq!(answer, *b"HTTP/1.1 504");
    assert_eq!(cluster.finished("deadline").await, 1.0);
}

#[tokio::test]
async fn body_of_the_admin_port_that_is_too_large_gets_an_error_in_json() {
    let cluster = Cluster::start(0, 1, ANSWER).await;
    let mut stream = TcpStream::connect(cluster.router.admin).await.unwrap();
    // The last byte is the first above the limit, so the router reads the whole body.
    let body = vec![b' '; (2 << 20) + 1];
    let length = body.len();
    let head = format!(
        "POST /v1/weights/begin HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&body).await.unwrap();
    let mut answer = String::new();
    let read = tokio::time::timeout(DEADLINE, stream.read_to_string(&mut answer)).await;
    read.expect("the router closes the connection").unwrap();
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert!(answer.contains(r#""code":"body_too_large""#), "{answer}");
}

#[tokio::test]
async fn operator_lists_drains_and_undrains_nodes_through_the_admin_port() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let admin = Client::new(format!("http://{}", cluster.router.admin));
    let nodes = admin.get("/v1/nodes").await.json();
    let of = |index: usize, field: &str| nodes["nodes"][index][field].clone();
    assert_eq!([of(0, "node"), of(0, "role"), of(0, "health")], ["prefill-0", "prefill", "up"]);
    assert_eq!([of(1, "node"), of(1, "model")], ["decode-0", MODEL]);

    let drained = admin.post("/v1/nodes/prefill-0/drain", &json!({})).await;
    assert_eq!(drained.json(), json!({"node": "prefill-0", "attempts_in_flight": 3}));
    cluster.wait_nodes(0, 1).await;
    assert_eq!(admin.get("/v1/nodes").await.json()["nodes"][0]["draining"], true);
    assert_eq!(admin.post("/v1/nodes/prefill-0/undrain", &json!({})).await.status, 200);
    cluster.wait_nodes(1, 1).await;

    let unknown = admin.post("/v1/nodes/prefill-7/drain", &json!({})).await;
    assert_eq!(unknown.status, 404);
    assert!(unknown.message().contains("prefill-0, decode-0"), "{}", unknown.message());
    let older = admin.post("/v1/nodes/decode-0/reset-prefix-cache", &json!({})).await;
    assert_eq!(older.status, 501);
    assert!(older.message().contains("older release"), "{}", older.message());
    let trace = async |query: &str| {
        admin.post(&format!("/v1/nodes/decode-0/trace{query}"), &json!({})).await
    };
    let recorded = trace("?seconds=1").await;
    assert_eq!(recorded.status, 200);
    assert_eq!(recorded.json(), json!({"traceEvents": []}));
    for (query, status, reason) in [
        ("?seconds=2", 409, "decode-0: scripted: the node records a trace already"),
        ("?seconds=0", 400, "invalid seconds: 0"),
        ("?seconds=a", 400, r#"invalid query "seconds=a"; expected seconds=N"#),
        ("", 400, r#"invalid query ""; expected seconds=N"#),
    ] {
        let rejected = trace(query).await;
        assert_eq!(rejected.status, status, "{query}");
        assert!(rejected.message().contains(reason), "{query}: {}", rejected.message());
    }
    // A web page cannot call it, and clients do not reach it on their port.
    let origin = [("origin", "http://page.example")];
    let page = admin.post_with("/v1/nodes/prefill-0/drain", &origin, &json!({})).await;
    assert_eq!(page.status, 403);
    let own = [("origin", "http://127.0.0.1:8002"), ("host", "127.0.0.1:8002")];
    assert_eq!(admin.post_with("/v1/nodes/prefill-0/undrain", &own, &json!({})).await.status, 200);
    for (origin, host) in [
        ("http://127.0.0.1:3000", "127.0.0.1:8002"),
        ("null", "127.0.0.1:8002"),
        ("http://page.example:8002", "page.example:8002"),
    ] {
        let other = [("origin", origin), ("host", host)];
        let page = admin.post_with("/v1/nodes/prefill-0/drain", &other, &json!({})).await;
        assert_eq!(page.status, 403, "{origin} {host}");
    }
    let console = admin.get("/").await;
    assert!(
        console.headers["content-security-policy"].to_str().unwrap().contains("default-src 'none'")
    );
    let rebound = [("host", "page.example:8002")];
    let page = admin.get_with("/v1/nodes", &rebound).await;
    assert_eq!(page.status, 403);
    assert!(page.message().contains("expected an IP address"), "{}", page.message());
    for host in ["localhost:8002", "[::1]:8002", "127.0.0.1", "routers"] {
        assert_eq!(admin.get_with("/v1/nodes", &[("host", host)]).await.status, 200, "{host}");
    }
    assert_eq!(cluster.client.get("/v1/nodes").await.status, 404);
}

#[tokio::test]
async fn operator_call_by_an_id_of_several_nodes_is_rejected_and_their_urls_are_accepted() {
    let decode = (0..2).map(|_| ScriptedNode::start(Role::Decode, "decode-0")).collect();
    let cluster = Cluster::start_over(settings(), vec![], decode).await;
    let admin = Client::new(format!("http://{}", cluster.router.admin));
    let draining = async || {
        let nodes = admin.get("/v1/nodes").await.json();
        let draining = |node: &Value| (node["grpc"].clone(), node["draining"] == true);
        nodes["nodes"].as_array().unwrap().iter().map(draining).collect::<HashMap<_, _>>()
    };
    let [first, second] = [0, 1].map(|index| cluster.decode[index].url());
    let ambiguous = admin.post("/v1/nodes/decode-0/drain", &json!({})).await;
    assert_eq!(
        (ambiguous.status.as_u16(), &ambiguous.error()["code"]),
        (409, &json!("ambiguous_node"))
    );
    for url in [&first, &second] {
        assert!(ambiguous.message().contains(url.as_str()), "{}", ambiguous.message());
    }
    let segment = second.replace('/', "%2F");
    let drained = admin.post(&format!("/v1/nodes/{segment}/drain"), &json!({})).await;
    assert_eq!(drained.json(), json!({"node": second, "attempts_in_flight": 3}));
    cluster.wait_nodes(0, 1).await;
    assert_eq!(draining().await, HashMap::from([(json!(first), false), (json!(second), true)]));
}
