//! HTTP client that returns events as they arrive.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client as HyperClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::Value;

/// Time-out of every wait in a test.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

#[derive(Clone)]
pub(crate) struct Client {
    base: String,
    inner: HyperClient<HttpConnector, Full<Bytes>>,
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|_| panic!("not JSON: {}", String::from_utf8_lossy(&self.body)))
    }

    pub(crate) fn error(&self) -> Value {
        self.json()["error"].clone()
    }

    pub(crate) fn message(&self) -> String {
        self.error()["message"].as_str().expect("an error has a message").to_owned()
    }
}

impl Client {
    pub(crate) fn new(base: String) -> Self {
        Self { base, inner: HyperClient::builder(TokioExecutor::new()).build(HttpConnector::new()) }
    }

    /// Creates a client that uses HTTP/2 over one connection with small flow-control windows.
    pub(crate) fn with_small_windows(base: String) -> Self {
        let inner = HyperClient::builder(TokioExecutor::new())
            .http2_only(true)
            .http2_initial_stream_window_size(1024)
            .build(HttpConnector::new());
        Self { base, inner }
    }

    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> http::Response<Incoming> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if !headers.iter().any(|(name, _)| *name == "content-type") {
            request = request.header("content-type", "application/json");
        }
        let request = request.body(Full::from(body.into())).unwrap();
        tokio::time::timeout(DEADLINE, self.inner.request(request)).await.unwrap().unwrap()
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.get_with(path, &[]).await
    }

    pub(crate) async fn get_with(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        whole(self.send(Method::GET, path, headers, "").await).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_with(path, &[], body).await
    }

    pub(crate) async fn post_with(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> Answer {
        whole(self.send(Method::POST, path, headers, body.to_string()).await).await
    }

    pub(crate) async fn post_bytes(&self, path: &str, body: impl AsRef<[u8]>) -> Answer {
        let body = Bytes::copy_from_slice(body.as_ref());
        whole(self.send(Method::POST, path, &[], body).await).await
    }

    pub(crate) async fn stream(&self, path: &str, body: &Value) -> EventStream {
        self.stream_with(path, &[], body).await
    }

    pub(crate) async fn stream_with(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> EventStream {
        let response = self.send(Method::POST, path, headers, body.to_string()).await;
        if response.status() != StatusCode::OK {
            let answer = whole(response).await;
            panic!("{}: {}", answer.status, String::from_utf8_lossy(&answer.body));
        }
        let headers = response.headers().clone();
        EventStream { headers, body: response.into_body(), buffer: Vec::new(), raw: Vec::new() }
    }
}

async fn whole(response: http::Response<Incoming>) -> Answer {
    let (status, headers) = (response.status(), response.headers().clone());
    let body = tokio::time::timeout(DEADLINE, response.into_body().collect());
    Answer { status, headers, body: body.await.unwrap().unwrap().to_bytes() }
}

/// A server-sent event stream. Dropping it closes its connection.
pub(crate) struct EventStream {
    pub headers: HeaderMap,
    body: Incoming,
    buffer: Vec<u8>,
    /// All received bytes.
    pub raw: Vec<u8>,
}

impl EventStream {
    /// Returns the data of the next event, or `None` at the end of the stream.
    pub(crate) async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let block: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let block = String::from_utf8(block).unwrap();
                if let Some(data) = block.lines().find_map(|line| line.strip_prefix("data: ")) {
                    return Some(data.to_owned());
                }
                continue;
            }
            match tokio::time::timeout(DEADLINE, self.body.frame()).await.expect("no event in time")
            {
                None => {
                    assert!(self.buffer.is_empty(), "the stream ended inside an event");
                    return None;
                }
                Some(frame) => {
                    let frame = frame.expect("the stream failed");
                    let bytes = frame.into_data().unwrap_or_default();
                    self.raw.extend_from_slice(&bytes);
                    self.buffer.extend_from_slice(&bytes);
                }
            }
        }
    }

    /// Returns all remaining events, including `[DONE]`.
    pub(crate) async fn all(&mut self) -> Vec<String> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
        }
        events
    }

    /// Returns the chunks of a completed stream.
    pub(crate) async fn chunks(&mut self) -> Vec<Value> {
        let mut events = self.all().await;
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{events:?}");
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

/// Returns the text of one choice from the chunks of either API.
pub(crate) fn text_of(chunks: &[Value], choice: u64) -> String {
    chunks
        .iter()
        .flat_map(|chunk| chunk["choices"].as_array().unwrap())
        .filter(|part| part["index"] == choice)
        .filter_map(|part| part["text"].as_str().or(part["delta"]["content"].as_str()))
        .collect()
}

/// Returns the token ids of one choice from the chunks of either API.
pub(crate) fn ids_of(chunks: &[Value], choice: u64) -> Vec<u32> {
    chunks
        .iter()
        .flat_map(|chunk| chunk["choices"].as_array().unwrap())
        .filter(|part| part["index"] == choice)
        .flat_map(|part| part["token_ids"].as_array().cloned().unwrap_or_default())
        .map(|id| id.as_u64().unwrap() as u32)
        .collect()
}

/// Waits until `holds` returns true, with a deadline.
pub(crate) async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !holds().await {
        assert!(Instant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
