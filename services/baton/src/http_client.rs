//! A small HTTP/1.1 client with JSON request bodies and streamed responses.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use http::{HeaderValue, Request, Response, Uri, header::AUTHORIZATION};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde_json::Value;

use crate::{connector::Connector, sse::SseReader, table::printable};

/// Deadline of a request whose body is read whole, unless [`HttpClient::within`] sets another one.
pub(crate) const GET_WITHIN: Duration = Duration::from_secs(10);
/// Maximum size of a response body that is read whole.
const WHOLE_BODY_MAX: usize = 16 << 20;
/// Maximum length of an error's text that is not JSON.
const TEXT_CHARS_MAX: usize = 200;

#[derive(Clone)]
pub(crate) struct HttpClient {
    inner: Client<Connector, Full<Bytes>>,
    get_within: Duration,
    /// Header `authorization` of every request.
    authorization: Option<HeaderValue>,
}

impl HttpClient {
    pub(crate) fn new(connector: Connector) -> Self {
        let inner = Client::builder(TokioExecutor::new()).build(connector);
        Self { inner, get_within: GET_WITHIN, authorization: None }
    }

    /// Sets the deadline of a request whose body is read whole.
    pub(crate) fn within(self, get_within: Duration) -> Self {
        Self { get_within, ..self }
    }

    pub(crate) fn with_key(self, authorization: Option<HeaderValue>) -> Self {
        Self { authorization, ..self }
    }

    fn with_authorization<B>(&self, mut request: Request<B>) -> Request<B> {
        if let Some(value) = &self.authorization {
            request.headers_mut().insert(AUTHORIZATION, value.clone());
        }
        request
    }

    /// Sends a JSON body and passes the data of each server-sent event of the response to
    /// `on_event`.
    pub(crate) async fn post_for_events(
        &self,
        url: &str,
        headers: &[(&str, &str)],
        body: &Value,
        mut on_event: impl FnMut(&str) -> Result<()>,
    ) -> Result<()> {
        let uri: Uri = url.parse().with_context(|| format!("invalid URL {url:?}"))?;
        let mut request = Request::post(uri).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::from(serde_json::to_vec(body)?))?;
        let response = self.inner.request(self.with_authorization(request)).await;
        let response = response.map_err(|error| anyhow!("{url}: {}", chain(&error)))?;
        let status = response.status();
        if !status.is_success() {
            bail!("{status}: {}", error_message(&whole_body(response).await.unwrap_or_default()));
        }
        let mut stream = response.into_body();
        let (mut reader, mut events) = (SseReader::default(), Vec::new());
        while let Some(frame) = stream.frame().await {
            let frame = frame.map_err(|error| anyhow!("cannot read the stream: {error}"))?;
            let Some(bytes) = frame.data_ref() else { continue };
            reader.push(bytes, &mut events)?;
            events.drain(..).try_for_each(|event| on_event(&event))?;
        }
        Ok(())
    }

    /// Returns status and whole body of a GET, within the deadline.
    pub(crate) async fn get(&self, url: &str) -> Result<(http::StatusCode, Bytes)> {
        self.request("GET", url).await
    }

    /// Returns status and whole body of a request without a body, within the deadline.
    pub(crate) async fn request(
        &self,
        method: &str,
        url: &str,
    ) -> Result<(http::StatusCode, Bytes)> {
        self.request_with(method, url, None).await
    }

    /// Returns status and whole body of a request, within the deadline.
    pub(crate) async fn request_with(
        &self,
        method: &str,
        url: &str,
        body: Option<&Value>,
    ) -> Result<(http::StatusCode, Bytes)> {
        let uri: Uri = url.parse().with_context(|| format!("invalid URL {url:?}"))?;
        let request = Request::builder().method(method).uri(uri);
        let request = match body {
            Some(body) => request
                .header("content-type", "application/json")
                .body(Full::from(serde_json::to_vec(body)?))?,
            None => request.body(Full::default())?,
        };
        let request = self.with_authorization(request);
        let answer = async {
            let response = self.inner.request(request).await;
            let response = response.map_err(|error| anyhow!("{url}: {}", chain(&error)))?;
            let status = response.status();
            Ok((status, whole_body(response).await?))
        };
        tokio::time::timeout(self.get_within, answer)
            .await
            .map_err(|_| anyhow!("{url}: no answer within {:?}", self.get_within))?
    }
}

/// Returns the JSON of a successful response.
pub(crate) fn json_answer(url: &str, body: &[u8]) -> Result<Value> {
    serde_json::from_slice(body)
        .with_context(|| format!("cannot read the answer of {url}; expected JSON"))
}

/// Returns the message of an error response as printable text: of the API, or the text of a proxy.
pub(crate) fn error_message(body: &[u8]) -> String {
    let error: Value = serde_json::from_slice(body).unwrap_or_default();
    let text = String::from_utf8_lossy(body);
    let message = match error["error"]["message"].as_str() {
        Some(message) => message.to_owned(),
        None if body.is_empty() => "(no message)".to_owned(),
        None => text.trim().chars().take(TEXT_CHARS_MAX).collect(),
    };
    // A proxy's page has several lines.
    printable(&message.replace(['\r', '\n', '\t'], " "))
}

async fn whole_body(response: Response<Incoming>) -> Result<Bytes> {
    Limited::new(response.into_body(), WHOLE_BODY_MAX)
        .collect()
        .await
        .map(|body| body.to_bytes())
        .map_err(|error| anyhow!("cannot read the response: {error}"))
}

/// Joins an error with its causes: the text of a hyper error lacks the cause.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        source = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpListener,
    };

    use super::*;

    #[tokio::test]
    async fn silent_or_stalled_server_times_out() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/health", listener.local_addr().unwrap());
        let mut client = HttpClient::new(Connector::new(Duration::from_secs(10)));
        client.get_within = Duration::from_secs(1);
        let error = client.get(&url).await.unwrap_err().to_string();
        assert_eq!(error, format!("{url}: no answer within 1s"));
        let server = std::thread::spawn(move || {
            // The request that timed out made the first connection.
            let (_given_up, _) = listener.accept().unwrap();
            let (mut stream, _) = listener.accept().unwrap();
            // Read the request first: hyper rejects a response that arrives before its request.
            let mut request = [0; 1024];
            assert_ne!(stream.read(&mut request).unwrap(), 0);
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf").unwrap();
            stream
        });
        let error = client.get(&url).await.unwrap_err().to_string();
        assert_eq!(error, format!("{url}: no answer within 1s"));
        drop(server.join().unwrap());
    }

    #[test]
    fn answer_that_is_not_json_is_reported_with_its_url() {
        assert_eq!(json_answer("http://a", b"{\"a\": 1}").unwrap()["a"], 1);
        for body in [&b"<html>"[..], b"", b"{\"a\": "] {
            let error = json_answer("http://a", body).unwrap_err().to_string();
            assert_eq!(error, "cannot read the answer of http://a; expected JSON");
        }
    }
}
