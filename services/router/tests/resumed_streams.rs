//! Streams that continue on another connection.

mod common;

use std::time::Duration;

use bytes::Bytes;
use common::{
    Cluster,
    client::{Client, DEADLINE, eventually},
    encode,
    node::Behaviour,
    settings,
};
use http::{Method, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use proto::ids::random_bits;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const RESUME: (&str, &str) = ("x-baton-resume", "1");

fn chat(fields: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Count."}], "stream": true,
        "return_token_ids": true, "max_tokens": 1000});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn numbers(count: usize) -> String {
    (0..count).map(|number| format!(" {number}")).collect()
}

/// Events that a client has of a stream: whole ones only, as browsers and client libraries keep
/// them.
#[derive(Default)]
struct Received {
    stream: String,
    /// Ids and data.
    events: Vec<(String, String)>,
}

impl Received {
    /// Reads about `bytes_max` bytes, then cuts the connection. Returns whether the stream has
    /// ended.
    async fn read(&mut self, response: Response<Incoming>, bytes_max: usize) -> bool {
        assert_eq!(response.status(), StatusCode::OK);
        self.stream = response.headers()["x-baton-stream"].to_str().unwrap().to_owned();
        let mut body = response.into_body();
        let mut text = Vec::new();
        let mut is_over = false;
        while text.len() < bytes_max && !is_over {
            match tokio::time::timeout(DEADLINE, body.frame()).await.expect("no event in time") {
                Some(frame) => {
                    text.extend_from_slice(&frame.unwrap().into_data().unwrap_or_default());
                }
                None => is_over = true,
            }
        }
        if !is_over {
            // The cut may be within an event.
            text.truncate(bytes_max);
        }
        let text = String::from_utf8_lossy(&text).into_owned();
        let whole = text.rfind("\n\n").map_or("", |end| &text[..end]);
        for event in whole.split("\n\n").filter(|event| !event.is_empty()) {
            let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name));
            if let (Some(id), Some(data)) = (field("id: "), field("data: ")) {
                self.events.push((id.to_owned(), data.to_owned()));
            }
        }
        is_over
    }

    async fn resume(&mut self, client: &Client, bytes_max: usize) -> bool {
        let last = self.events.last().map(|(id, _)| id.clone());
        let headers: Vec<(&str, &str)> = last.iter().map(|id| ("last-event-id", &**id)).collect();
        let path = format!("/v1/streams/{}", self.stream);
        let response = client.send(Method::GET, &path, &headers, Bytes::new()).await;
        self.read(response, bytes_max).await
    }

    /// Asserts that no event is lost and none is repeated. Returns their data.
    fn data(&self) -> Vec<&str> {
        for (number, (id, _)) in self.events.iter().enumerate() {
            assert_eq!(*id, format!("{}-{number}", self.stream));
        }
        self.events.iter().map(|(_, data)| data.as_str()).collect()
    }

    fn tokens(&self) -> Vec<u32> {
        let mut data = self.data();
        assert_eq!(data.pop(), Some("[DONE]"));
        let chunks: Vec<Value> =
            data.iter().map(|data| serde_json::from_str(data).unwrap()).collect();
        common::client::ids_of(&chunks, 0)
    }
}

fn random_below(limit: usize) -> usize {
    random_bits().unwrap() as usize % limit
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_cut_at_random_places_lose_and_repeat_nothing() {
    const STREAMS: usize = 64;
    const CUTS: usize = 10;
    let answer = numbers(200);
    let expected: Vec<u32> = encode(&answer).into_iter().chain([common::node::END]).collect();
    let mut settings = settings();
    settings.router.resume_bytes_max = config::ByteSize::mib(64);
    let cluster = Cluster::start_with(settings, 0, 1, &answer).await;
    cluster.decode[0].set_token_time(Duration::from_millis(2));
    let streams = (0..STREAMS).map(|index| {
        let client = cluster.client.clone();
        let expected = expected.clone();
        async move {
            let mut received = Received::default();
            let body = chat(json!({"seed": index})).to_string();
            let response = client.send(Method::POST, CHAT, &[RESUME], body).await;
            let mut is_over = received.read(response, random_below(9000)).await;
            let mut cuts = 1;
            while cuts < CUTS && !is_over {
                is_over = received.resume(&client, random_below(9000)).await;
                cuts += 1;
            }
            if !is_over {
                received.resume(&client, usize::MAX).await;
            }
            assert_eq!(received.tokens(), expected, "stream {index}");
            cuts
        }
    });
    let cuts: Vec<usize> = futures_util::future::join_all(streams).await;
    assert!(cuts.iter().sum::<usize>() > STREAMS * CUTS / 2, "{cuts:?}");
}

/// Events in the buffers of an HTTP/2 connection are lost with it, so the log must keep them.
#[tokio::test]
async fn http2_stream_that_a_client_read_slowly_is_resumed() {
    let mut settings = settings();
    settings.router.slow_client_events = 16;
    let cluster = Cluster::start_with(settings, 0, 1, &numbers(450)).await;
    cluster.decode[0].set_token_time(Duration::ZERO);
    let client = Client::with_small_windows(format!("http://{}", cluster.router.http));
    let body = chat(json!({"max_tokens": 1900, "logprobs": true, "top_logprobs": 5}));
    let response = client.send(Method::POST, CHAT, &[RESUME], body.to_string()).await;
    eventually("the client's buffers are full", async || {
        cluster.metric("baton_attempts_total", &["outcome=\"paused\""]).await == 1.0
    })
    .await;
    let mut received = Received::default();
    assert!(!received.read(response, 1000).await);
    assert!(received.resume(&cluster.client, usize::MAX).await);
    let expected: Vec<u32> = encode(&numbers(450)).into_iter().chain([common::node::END]).collect();
    assert_eq!(received.tokens(), expected);
}

#[tokio::test]
async fn head_begins_no_stream() {
    let cluster = Cluster::start(0, 1, " one two").await;
    let response =
        cluster.client.send(Method::POST, CHAT, &[RESUME], chat(json!({})).to_string()).await;
    let mut received = Received::default();
    assert!(received.read(response, usize::MAX).await);
    for (path, allow) in [
        (format!("/v1/streams/{}", received.stream), "GET"),
        ("/v1/responses/resp_1?stream=true".to_owned(), "GET, DELETE"),
    ] {
        let response = cluster.client.send(Method::HEAD, &path, &[], "").await;
        assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED, "{path}");
        assert_eq!(response.headers()["allow"], allow);
    }
}

#[tokio::test]
async fn every_api_has_ids_only_for_streams_that_can_be_resumed() {
    let cluster = Cluster::start(0, 1, " one two").await;
    let messages = json!([{"role": "user", "content": "hi"}]);
    for (path, body) in [
        (CHAT, json!({"messages": messages, "stream": true})),
        ("/v1/completions", json!({"prompt": "hi", "stream": true})),
        ("/v1/responses", json!({"input": "hi", "stream": true})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 9, "stream": true})),
    ] {
        let mut received = Received::default();
        let response = cluster.client.send(Method::POST, path, &[RESUME], body.to_string()).await;
        assert!(received.read(response, usize::MAX).await);
        let whole: Vec<String> = received.data().into_iter().map(str::to_owned).collect();
        assert!(whole.len() > 2, "{path}");
        // A client may begin anew, or at any event.
        received.events.truncate(1);
        assert!(received.resume(&cluster.client, usize::MAX).await);
        assert_eq!(received.data(), whole, "{path}");
        let mut plain = cluster.client.stream(path, &body).await;
        plain.all().await;
        let raw = String::from_utf8(plain.raw).unwrap();
        assert!(!raw.contains("id: ") && !plain.headers.contains_key("x-baton-stream"), "{path}");
    }
}

#[tokio::test]
async fn a_streamed_response_continues_after_a_sequence_number() {
    let cluster = Cluster::start(0, 1, " one two").await;
    let body = json!({"input": "hi", "stream": true});
    let mut stream = cluster.client.stream_with("/v1/responses", &[RESUME], &body).await;
    let events = stream.all().await;
    let created: Value = serde_json::from_str(&events[0]).unwrap();
    let id = created["response"]["id"].as_str().unwrap();
    let path = format!("/v1/responses/{id}?stream=true&starting_after=3");
    let rest = cluster.client.get(&path).await;
    let rest = String::from_utf8(rest.body.to_vec()).unwrap();
    let data: Vec<&str> = rest.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(data, events[4..]);
}

#[tokio::test]
async fn a_stream_is_known_to_its_owner_until_it_was_left_for_the_window() {
    let mut settings = settings();
    settings.router.resume_window = Duration::from_millis(300);
    let cluster = Cluster::start_with(settings, 0, 1, " one two three").await;
    cluster.decode[0].behave(Behaviour::HangAfter(3));
    let body = chat(json!({})).to_string();
    let headers = [RESUME, ("x-baton-tenant", "a")];
    let response = cluster.client.send(Method::POST, CHAT, &headers, body).await;
    let id = response.headers()["x-baton-stream"].to_str().unwrap().to_owned();
    let path = format!("/v1/streams/{id}");
    let unknown = format!(
        "unknown stream: {id}; allowed: a stream of this router, of the same API key and tenant, begun with \
         x-baton-resume: 1 and not left for more than 300 ms"
    );
    let other = cluster.client.get_with(&path, &[("x-baton-tenant", "b")]).await;
    assert_eq!((other.status, other.message()), (StatusCode::NOT_FOUND, unknown.clone()));
    let mine = ("x-baton-tenant", "a");
    for (query, headers, message) in [
        ("?from=99", vec![mine], "from is 99; allowed: 0 to "),
        ("?from=x", vec![mine], "from is x; allowed: the number of an event"),
        ("", vec![mine, ("last-event-id", "7")], "last-event-id is 7; allowed: the id of an event"),
    ] {
        let refused = cluster.client.get_with(&format!("{path}{query}"), &headers).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST);
        assert!(refused.message().starts_with(message), "{}", refused.message());
    }
    // A second connection ends the first one.
    let second = cluster.client.send(Method::GET, &path, &[mine], Bytes::new()).await;
    let first = tokio::time::timeout(DEADLINE, response.into_body().collect()).await;
    assert!(first.unwrap().is_ok());
    assert_eq!(cluster.decode[0].open_streams(), 2, "the request and the observer");
    drop(second);
    eventually("the request is cancelled", async || cluster.decode[0].open_streams() == 1).await;
    let gone = cluster.client.get_with(&path, &[mine]).await;
    assert_eq!((gone.status, gone.message()), (StatusCode::NOT_FOUND, unknown));
}

#[tokio::test]
async fn a_stream_that_nobody_reads_ends_as_that_of_a_slow_client() {
    let mut settings = settings();
    settings.router.slow_client_timeout = Duration::from_secs(1);
    settings.router.slow_client_events = 16;
    let cluster = Cluster::start_with(settings, 0, 1, &numbers(600)).await;
    cluster.decode[0].set_token_time(Duration::from_millis(1));
    let body = chat(json!({"max_tokens": 1900, "ignore_eos": true, "logprobs": true,
        "top_logprobs": 5}));
    let response = cluster.client.send(Method::POST, CHAT, &[RESUME], body.to_string()).await;
    let mut received = Received::default();
    assert!(!received.read(response, 1000).await);
    eventually("the request ends", async || cluster.finished("slow_client").await == 1.0).await;
    assert!(received.resume(&cluster.client, usize::MAX).await);
    let data = received.data();
    assert!(data.last().unwrap().contains("slow_client"), "{}", data.last().unwrap());
    let bytes: usize = data.iter().map(|data| data.len()).sum();
    assert!((100 << 10..300 << 10).contains(&bytes), "{bytes} bytes were kept");
}

#[tokio::test]
async fn a_router_without_room_for_another_log_streams_without_ids() {
    let mut off = settings();
    off.router.resume_window = Duration::ZERO;
    let cluster = Cluster::start_with(off, 0, 1, " one two").await;
    let mut stream = cluster.client.stream_with(CHAT, &[RESUME], &chat(json!({}))).await;
    assert_eq!(stream.all().await.pop().as_deref(), Some("[DONE]"));
    assert!(!stream.headers.contains_key("x-baton-stream"));
}
