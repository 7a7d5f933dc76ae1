//! HTTP client that records every streamed event with its arrival time.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client as HyperClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::{Value, json};

/// Time-out of every wait in a test.
pub const DEADLINE: Duration = Duration::from_secs(120);

#[derive(Clone)]
pub struct Client {
    base: String,
    inner: HyperClient<HttpConnector, Full<Bytes>>,
}

/// A complete response.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|_| panic!("not JSON: {}", String::from_utf8_lossy(&self.body)))
    }
}

impl Client {
    pub fn new(base: String) -> Self {
        Self { base, inner: HyperClient::builder(TokioExecutor::new()).build(HttpConnector::new()) }
    }

    pub async fn get_json(&self, path: &str) -> Result<(StatusCode, Value)> {
        let answer = self.get(path).await?;
        let value = serde_json::from_slice(&answer.body)
            .with_context(|| format!("{path}: {}", String::from_utf8_lossy(&answer.body)))?;
        Ok((answer.status, value))
    }

    pub async fn get(&self, path: &str) -> Result<Answer> {
        let request = Request::get(format!("{}{path}", self.base)).body(Full::default())?;
        whole(self.inner.request(request).await?).await
    }

    /// Returns the sum of the metric over all series whose labels contain `label`.
    pub async fn metric(&self, name: &str, label: &str) -> Result<f64> {
        let text = String::from_utf8(self.get("/metrics").await?.body.to_vec())?;
        let values = text.lines().filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let (found, labels) = series.split_once('{').unwrap_or((series, ""));
            (found == name && labels.contains(label)).then(|| value.parse::<f64>().ok())?
        });
        Ok(values.sum())
    }

    pub async fn post(&self, path: &str, body: &Value) -> Result<Answer> {
        self.post_bytes(path, serde_json::to_vec(body)?.into(), &[]).await
    }

    pub async fn post_bytes(
        &self,
        path: &str,
        body: Bytes,
        headers: &[(&str, &str)],
    ) -> Result<Answer> {
        let response = tokio::time::timeout(DEADLINE, self.send(path, body, headers)).await??;
        whole(response).await
    }

    async fn send(
        &self,
        path: &str,
        body: Bytes,
        headers: &[(&str, &str)],
    ) -> Result<http::Response<Incoming>> {
        let mut request = Request::post(format!("{}{path}", self.base));
        if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type")) {
            request = request.header("content-type", "application/json");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        Ok(self.inner.request(request.body(Full::from(body))?).await?)
    }

    /// Starts a streamed request. Fails unless the status is 200.
    pub async fn stream(&self, path: &str, body: &Value) -> Result<EventStream> {
        self.stream_with(path, body, &[]).await
    }

    pub async fn stream_with(
        &self,
        path: &str,
        body: &Value,
        headers: &[(&str, &str)],
    ) -> Result<EventStream> {
        let refused = match self.try_stream(path, body, headers).await? {
            Ok(stream) => return Ok(stream),
            Err(refused) => refused,
        };
        Err(anyhow!("{}: {}", refused.status, String::from_utf8_lossy(&refused.body)))
    }

    /// Starts a streamed request. Returns the response as the inner error if its status is not 200.
    pub async fn try_stream(
        &self,
        path: &str,
        body: &Value,
        headers: &[(&str, &str)],
    ) -> Result<Result<EventStream, Answer>> {
        let sent = Instant::now();
        let response = tokio::time::timeout(
            DEADLINE,
            self.send(path, serde_json::to_vec(body)?.into(), headers),
        )
        .await??;
        if response.status() != StatusCode::OK {
            return Ok(Err(whole(response).await?));
        }
        Ok(Ok(EventStream { sent, body: response.into_body(), buffer: Vec::new() }))
    }

    /// Runs a streamed completion to its end and returns the tokens with the request's statistics.
    pub async fn complete(&self, body: &Value) -> Result<Completion> {
        let headers = [("x-baton-stats", "1")];
        self.stream_with("/v1/completions", body, &headers).await?.completion().await
    }

    /// Returns the output token ids of a greedy completion of a tokenized prompt.
    pub async fn greedy(&self, prompt_ids: &[u32], tokens: usize) -> Result<Vec<u32>> {
        let mut stream = self.stream("/v1/completions", &greedy_body(prompt_ids, tokens)).await?;
        stream.token_ids().await
    }
}

/// Returns the request of the golden outputs.
pub fn greedy_body(prompt_ids: &[u32], tokens: usize) -> Value {
    json!({
        "prompt": prompt_ids, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": true,
        "stream": true, "return_token_ids": true, "stream_options": {"include_usage": true},
    })
}

/// Returns the request with a cache salt, so that it has no prefix-cache hit from other requests.
pub fn salted_body(prompt_ids: &[u32], tokens: usize, salt: &str) -> Value {
    let mut body = greedy_body(prompt_ids, tokens);
    body["cache_salt"] = json!(salt);
    body
}

async fn whole(response: http::Response<Incoming>) -> Result<Answer> {
    let (status, headers) = (response.status(), response.headers().clone());
    let body = tokio::time::timeout(DEADLINE, response.into_body().collect()).await??.to_bytes();
    Ok(Answer { status, headers, body })
}

/// A completed streamed answer with the request's statistics (`x-baton-stats`).
#[derive(Clone, Debug)]
pub struct Completion {
    pub token_ids: Vec<u32>,
    pub cached_tokens: u64,
    pub kv_bytes: u64,
    pub attempts: u64,
    /// Node that prefilled the prompt. Empty if the decode node did.
    pub prefill_node: String,
    pub decode_node: String,
    /// Longest time without an event since the rest of the stream was requested.
    pub longest_pause: Duration,
}

/// A server-sent event stream. Dropping it closes the connection.
pub struct EventStream {
    pub sent: Instant,
    body: Incoming,
    buffer: Vec<u8>,
}

/// One event and its arrival time since the request was sent.
#[derive(Clone, Debug)]
pub struct Event {
    pub after: Duration,
    pub data: String,
}

impl Event {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.data).unwrap_or_else(|_| panic!("not JSON: {}", self.data))
    }

    pub fn is_done(&self) -> bool {
        self.data == "[DONE]"
    }

    /// Returns the token ids of the first choice in this event.
    pub fn token_ids(&self) -> Vec<u32> {
        if self.is_done() {
            return Vec::new();
        }
        let ids = self.json()["choices"][0]["token_ids"].clone();
        ids.as_array()
            .map(|ids| {
                ids.iter().map(|id| id.as_u64().expect("an id is a number") as u32).collect()
            })
            .unwrap_or_default()
    }
}

impl EventStream {
    /// Returns the next event, or `None` at the end of the stream.
    pub async fn next(&mut self) -> Result<Option<Event>> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let block: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let block = String::from_utf8(block).context("an event is not UTF-8")?;
                let data: Vec<&str> =
                    block.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
                if data.is_empty() {
                    continue;
                }
                return Ok(Some(Event { after: self.sent.elapsed(), data: data.join("\n") }));
            }
            let frame = tokio::time::timeout(DEADLINE, self.body.frame())
                .await
                .context("no event within the deadline")?;
            match frame {
                None => {
                    ensure!(self.buffer.is_empty(), "the stream ended inside an event");
                    return Ok(None);
                }
                Some(frame) => {
                    let frame = frame.context("the stream broke")?;
                    self.buffer.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new()));
                }
            }
        }
    }

    /// Returns all events to the end. Fails unless the last is `[DONE]`.
    pub async fn all(&mut self) -> Result<Vec<Event>> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await? {
            events.push(event);
        }
        ensure!(events.last().is_some_and(Event::is_done), "no [DONE]: {:?}", events.last());
        Ok(events)
    }

    /// Returns the token ids of the first choice, to the end of a completed stream.
    pub async fn token_ids(&mut self) -> Result<Vec<u32>> {
        Ok(self.all_well().await?.iter().flat_map(Event::token_ids).collect())
    }

    /// Reads a completed stream to its end and returns its tokens and statistics. The request must
    /// have set `x-baton-stats`.
    pub async fn completion(&mut self) -> Result<Completion> {
        let mut last_after = self.sent.elapsed();
        let events = self.all_well().await?;
        let mut longest_pause = Duration::ZERO;
        for event in &events {
            longest_pause = longest_pause.max(event.after.saturating_sub(last_after));
            last_after = event.after;
        }
        let mut values = events.iter().filter(|event| !event.is_done()).map(Event::json);
        let last = values
            .rfind(|value| !value["baton"].is_null())
            .context("no statistics in the stream")?;
        let number =
            |value: &Value| value.as_u64().with_context(|| format!("invalid statistics: {last}"));
        let name = |field: &str| last["baton"][field].as_str().unwrap_or_default().to_owned();
        Ok(Completion {
            token_ids: events.iter().flat_map(Event::token_ids).collect(),
            cached_tokens: number(&last["usage"]["prompt_tokens_details"]["cached_tokens"])?,
            kv_bytes: number(&last["baton"]["kv_bytes"])?,
            attempts: number(&last["baton"]["attempts"])?,
            prefill_node: name("prefill_node"),
            decode_node: name("decode_node"),
            longest_pause,
        })
    }

    async fn all_well(&mut self) -> Result<Vec<Event>> {
        let events = self.all().await?;
        for event in events.iter().filter(|event| !event.is_done()) {
            let error = &event.json()["error"];
            ensure!(error.is_null(), "the stream ended with {error}");
        }
        Ok(events)
    }
}
