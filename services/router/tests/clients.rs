//! Clients that leave, do not read, or send garbage: each is its own problem. And the end: draining.

mod common;

use std::time::{Duration, Instant};

use common::{
    Cluster,
    client::{Client, eventually, ids_of, text_of},
    encode, long_prompt,
    node::Behaviour,
    settings,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const ANSWER: &str = " one two three four five six seven eight nine ten";

fn body(stream: bool) -> Value {
    json!({"prompt": long_prompt(), "max_tokens": 1900, "stream": stream, "ignore_eos": true})
}

/// The nodes' streams of the first call are dropped within a second of now.
async fn dropped_within_a_second(cluster: &Cluster) {
    let left = Instant::now();
    for node in cluster.prefill.iter().chain(&cluster.decode) {
        eventually("the call is dropped", async || node.calls()[0].left.lock().unwrap().is_some())
            .await;
    }
    assert!(left.elapsed() < Duration::from_secs(1), "{:?}", left.elapsed());
    eventually("nothing is in work", async || {
        cluster.client.get("/health").await.json()["requests_in_work"] == 0
    })
    .await;
    assert_eq!(
        cluster.metric("baton_requests_finished_total", &["finished_reason=\"client_gone\""]).await,
        1.0
    );
    assert_eq!(cluster.metric("baton_attempts_total", &["outcome=\"cancelled\""]).await, 1.0);
}

#[tokio::test]
async fn a_client_that_leaves_its_stream_cancels_both_nodes() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    cluster.prefill[0].behave(Behaviour::HangAfter(1));
    cluster.decode[0].behave(Behaviour::HangAfter(0));
    let mut stream = cluster.client.stream("/v1/completions", &body(true)).await;
    stream.next().await.unwrap();
    drop(stream);
    dropped_within_a_second(&cluster).await;
}

#[tokio::test]
async fn a_client_that_leaves_before_the_answer_cancels_both_nodes() {
    for stream in [false, true] {
        let cluster = Cluster::start(1, 1, ANSWER).await;
        cluster.prefill[0].behave(Behaviour::HangAfter(0));
        cluster.decode[0].behave(Behaviour::HangAfter(0));
        // A client of its own, so that the connection is not kept for the next request.
        let client = Client::new(format!("http://{}", cluster.router.http));
        let request =
            tokio::spawn(async move { client.post("/v1/completions", &body(stream)).await });
        eventually("both nodes are asked", async || {
            cluster.prefill[0].calls().len() == 1 && cluster.decode[0].calls().len() == 1
        })
        .await;
        request.abort();
        dropped_within_a_second(&cluster).await;
    }
}

/// Sends a request and reads nothing of the answer.
async fn silent_client(cluster: &Cluster) -> TcpStream {
    // A window so small that the kernel does not hide that nobody reads.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(cluster.router.http).await.unwrap();
    let body = body(true).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn a_client_that_does_not_read_ends_alone() {
    let mut settings = settings();
    settings.front.slow_client_timeout = Duration::from_millis(300);
    settings.front.slow_client_events = 16;
    let cluster = Cluster::start_with(settings, 1, 1, &ANSWER.repeat(300)).await;
    for node in cluster.prefill.iter().chain(&cluster.decode) {
        node.pace(Duration::ZERO);
    }
    let silent = silent_client(&cluster).await;
    // The others do not notice.
    let quick = json!({"prompt": long_prompt(), "max_tokens": 50});
    for _ in 0..5 {
        let answer = cluster.client.post("/v1/completions", &quick).await;
        assert_eq!(answer.json()["usage"]["completion_tokens"], 50);
    }
    eventually("the slow request is over", async || {
        cluster.metric("baton_requests_finished_total", &["slow_client"]).await == 1.0
            || cluster.metric("baton_requests_finished_total", &["client_gone"]).await == 1.0
    })
    .await;
    eventually("its node is free", async || {
        cluster.decode[0].calls()[0].left.lock().unwrap().is_some()
    })
    .await;
    drop(silent);
}

#[tokio::test]
async fn a_slow_but_steady_client_gets_everything() {
    let mut settings = settings();
    settings.front.slow_client_events = 4;
    let cluster = Cluster::start_with(settings, 1, 1, &ANSWER.repeat(10)).await;
    for node in cluster.prefill.iter().chain(&cluster.decode) {
        node.pace(Duration::ZERO);
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
async fn a_silent_stream_says_that_it_lives() {
    let mut settings = settings();
    settings.front.keep_alive = Duration::from_millis(30);
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    // The head of the answer comes before any token, and comments until one does.
    cluster.prefill[0].behave(Behaviour::HangAfter(0));
    cluster.decode[0].behave(Behaviour::HangAfter(0));
    let mut stream = cluster.client.stream("/v1/completions", &body(true)).await;
    let _ = tokio::time::timeout(Duration::from_millis(200), stream.next()).await;
    let raw = String::from_utf8(stream.raw.clone()).unwrap();
    assert!(raw.starts_with(": keep-alive\n\n: keep-alive\n\n"), "{raw:?}");
}

/// Pseudo-random bytes.
fn noise(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..count).map(|_| next()).collect()
}

#[tokio::test]
async fn garbage_on_either_port_disturbs_nobody() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let ports = [cluster.router.http, cluster.router.grpc];
    let flood = tokio::spawn(async move {
        for round in 0..60u64 {
            for port in ports {
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
                let Ok(mut stream) = TcpStream::connect(port).await else { continue };
                let _ =
                    tokio::time::timeout(Duration::from_millis(100), stream.write_all(&message))
                        .await;
                let mut answer = [0; 64];
                let _ =
                    tokio::time::timeout(Duration::from_millis(5), stream.read(&mut answer)).await;
            }
        }
    });
    let body = json!({"prompt": long_prompt(), "max_tokens": 100});
    while !flood.is_finished() {
        let answer = cluster.client.post("/v1/completions", &body).await;
        assert_eq!(answer.json()["choices"][0]["text"], ANSWER);
    }
    flood.await.unwrap();
    assert_eq!(cluster.client.get("/health").await.status, 200);
}

#[tokio::test]
async fn draining_is_unready_at_once_and_lets_work_end() {
    let cluster = Cluster::start(1, 1, ANSWER).await;
    for node in cluster.prefill.iter().chain(&cluster.decode) {
        node.pace(Duration::from_millis(40));
    }
    let request = json!({"prompt": long_prompt(), "max_tokens": 100, "stream": true,
        "return_token_ids": true});
    let mut stream = cluster.client.stream("/v1/completions", &request).await;
    let first: Value = serde_json::from_str(&stream.next().await.unwrap()).unwrap();
    let Cluster { router, client, prefill, decode, .. } = cluster;
    let http = router.http;
    let shutdown = tokio::spawn(router.shutdown());
    eventually("unready", async || client.get("/health").await.status == 503).await;
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
    assert!(ended.elapsed() < Duration::from_secs(3), "{:?}", ended.elapsed());
    assert!(TcpStream::connect(http).await.is_err());
    drop((prefill, decode));
}

#[tokio::test]
async fn what_drains_too_long_ends_with_one_typed_error() {
    let mut settings = settings();
    settings.drain_timeout = Duration::from_millis(200);
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
async fn a_trace_goes_on_at_the_nodes() {
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
