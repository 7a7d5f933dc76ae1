//! The OpenAI and Anthropic HTTP APIs, health and metrics: routes, and the code that all endpoints
//! share (request id, label, body).

mod choices;
mod completion;
mod error;
mod fields;
mod foreign_fields;
mod generate;
mod grammar_fields;
mod info;
mod messages;
mod openapi;
mod pages;
mod pooling;
mod request_fields;
mod responses;
mod streams;
mod structural_tag;
mod tokenize;
mod wire;

use std::{
    future::{Ready, ready},
    io::{self, Write as _},
    ops::Deref,
    pin::pin,
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{FromRequestParts, Path, Request, State},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{self, MethodRouter},
};
use bytes::{Bytes, BytesMut};
use flate2::write::MultiGzDecoder;
use http::{
    Extensions, HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header, request::Parts,
};
use http_body_util::BodyExt;
use proto::{TimedBody, ids::RequestId};
use router_core::RequestSession;
use telemetry::{Metrics, MetricsPage, propagation};
use tonic::Status;
use tracing::Span;

use crate::{
    admission::ReservedBytes,
    front::Front,
    keys::{ApiKeys, Caller},
    record::label,
    request::{
        error::{FieldError, RequestError, invalid_value},
        options::{KEEP_HEADER, SESSION_HEADER, TENANT_HEADER, session_of_headers},
    },
};
use completion::{chat_completions, completions};
pub(crate) use error::ApiError;
use pages::AllowedOrigins;
pub(crate) use streams::ResumableStreams;
use streams::X_BATON_RESUME;
use tokenize::{detokenize, tokenize};

pub(crate) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Deadline of the whole answer, in milliseconds from the arrival of the request.
const X_BATON_DEADLINE_MS: HeaderName = HeaderName::from_static("x-baton-deadline-ms");
/// With value `1` the last chunk contains statistics of the hand-over between nodes.
const X_BATON_STATS: HeaderName = HeaderName::from_static("x-baton-stats");
/// Old name of [`X_BATON_STATS`], accepted until the next minor version.
const X_BATON_FIGURES: HeaderName = HeaderName::from_static("x-baton-figures");

/// Time after which a body that is still being read counts as a stream of its key.
pub(crate) const BODY_COUNTS_AFTER: Duration = Duration::from_secs(1);

/// Returns all HTTP routes. `started` is the start of the process in seconds since 1970.
pub(crate) fn routes(front: Arc<Front>, metrics: Metrics, started: u64) -> Router {
    let mut router = Router::new();
    for Route { path, methods, handler } in table(metrics, started) {
        let handler = only(methods, handler);
        // A parameter with slashes takes the slash at the end.
        if !path.contains("{*") {
            router = router.route(&format!("{path}/"), handler.clone());
        }
        router = router.route(path, handler);
    }
    let keys = front.keys.clone();
    let origins = AllowedOrigins::new(&front.settings.router.cors_origins, keys.is_some());
    let pages = middleware::from_fn_with_state(origins, pages::allow_pages);
    let router = router.fallback(async |uri: Uri| no_such_path(&uri)).with_state(front);
    with_keys(router, keys)
        .layer(pages)
        .layer(middleware::from_fn(with_request_id))
        .layer(middleware::from_fn(messages::with_format))
}

/// Adds the check of API keys, if the port has any.
pub(crate) fn with_keys(router: Router, keys: Option<Arc<ApiKeys>>) -> Router {
    match keys {
        Some(keys) => router.layer(middleware::from_fn_with_state(keys, authenticate)),
        None => router,
    }
}

/// Rejects requests without a valid key. Probes need none.
async fn authenticate(
    State(keys): State<Arc<ApiKeys>>,
    mut request: Request,
    next: Next,
) -> Response {
    let path = request.uri().path();
    if matches!(path.strip_suffix('/').unwrap_or(path), "/live" | "/ready" | "/health" | "/ping") {
        return next.run(request).await;
    }
    match keys.authenticate(&mut request) {
        Ok(()) => next.run(request).await,
        Err(error) => ApiError::from(error).into_response(),
    }
}

/// Returns the probes of the metrics port.
pub(crate) fn probes(front: Arc<Front>) -> Router {
    let probes = Router::new().route("/live", routing::get(info::live));
    probes.route("/ready", routing::get(info::ready)).with_state(front)
}

/// A route: path, methods as in the header `allow`, and handler.
struct Route {
    path: &'static str,
    methods: &'static str,
    handler: MethodRouter<Arc<Front>>,
}

fn table(metrics: Metrics, started: u64) -> Vec<Route> {
    let description: Bytes = openapi::document().to_string().into();
    let openapi = async move || ([(header::CONTENT_TYPE, "application/json")], description.clone());
    let page = MetricsPage::new(metrics);
    let get = |path, handler| Route { path, methods: "GET", handler };
    let post = |path, handler| Route { path, methods: "POST", handler };
    vec![
        post("/v1/chat/completions", routing::post(chat_completions)),
        post("/v1/completions", routing::post(completions)),
        post("/v1/messages", routing::post(messages::messages)),
        post("/v1/messages/count_tokens", routing::post(messages::count_tokens)),
        // Without this axum answers HEAD as GET: a stream would begin, and end an older one.
        get("/v1/streams/{id}", routing::get(streams::resume).head(refuse("GET"))),
        post("/v1/responses", routing::post(responses::create)),
        Route {
            path: "/v1/responses/{id}",
            methods: "GET, DELETE",
            handler: routing::get(responses::retrieve)
                .head(refuse("GET, DELETE"))
                .delete(responses::delete),
        },
        get("/v1/responses/{id}/input_items", routing::get(responses::input_items_page)),
        post("/v1/responses/{id}/cancel", routing::post(responses::cancel)),
        post("/v1/embeddings", routing::post(pooling::embeddings)),
        post("/v1/rerank", routing::post(pooling::rerank)),
        post("/rerank", routing::post(pooling::rerank)),
        post("/v1/score", routing::post(pooling::score)),
        post("/score", routing::post(pooling::score)),
        post("/tokenize", routing::post(tokenize)),
        post("/detokenize", routing::post(detokenize)),
        get("/v1/models", routing::get(move |state, caller| info::models(state, caller, started))),
        // A model name may contain slashes.
        get(
            "/v1/models/{*id}",
            routing::get(move |state, id, caller| info::model(state, id, caller, started)),
        ),
        get("/health", routing::get(info::health)),
        Route {
            path: "/ping",
            methods: "GET, POST",
            handler: routing::get(info::health).post(info::health),
        },
        get("/version", routing::get(info::version)),
        get("/ready", routing::get(info::ready)),
        get("/live", routing::get(info::live)),
        get(
            "/metrics",
            routing::get(async move |caller| info::metrics(page.clone(), caller).await),
        ),
        get("/openapi.json", routing::get(openapi)),
    ]
}

/// Adds `x-request-id` to responses that lack it. API handlers set the header themselves.
async fn with_request_id(request: Request, next: Next) -> Response {
    let label = label_of(request.headers());
    let mut response = next.run(request).await;
    if !response.headers().contains_key(X_REQUEST_ID)
        && let Ok(request_id) = RequestId::mint()
    {
        response.headers_mut().insert(X_REQUEST_ID, echo(label.as_deref(), request_id));
    }
    response
}

/// Returns the caller that [`authenticate`] found.
fn caller_of(extensions: &Extensions) -> Caller {
    extensions.get().cloned().unwrap_or_default()
}

fn only(allowed: &'static str, route: MethodRouter<Arc<Front>>) -> MethodRouter<Arc<Front>> {
    route.fallback(refuse(allowed))
}

/// Returns a handler that rejects the method of a request.
fn refuse(
    allowed: &'static str,
) -> impl Fn(Method) -> Ready<Response> + Clone + Send + Sync + 'static {
    move |method| {
        let message = format!("{method} is not allowed here; allowed: {allowed}");
        let (status, code) = (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed");
        let mut response = ApiError::invalid(status, code, message).into_response();
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
        ready(response)
    }
}

fn no_such_path(uri: &Uri) -> ApiError {
    let path: String = uri.path().chars().take(200).collect();
    let message = format!("unknown path: {path}");
    ApiError::invalid(StatusCode::NOT_FOUND, "not_found", message)
}

/// The parameter of a path. Its error has OpenAI's format, unlike that of [`Path`].
pub(crate) struct PathParameter(pub String);

impl<S: Send + Sync> FromRequestParts<S> for PathParameter {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        match Path::<String>::from_request_parts(parts, state).await {
            Ok(Path(value)) => Ok(Self(value)),
            Err(error) => {
                Err(ApiError::invalid(error.status(), "invalid_value", error.body_text()))
            }
        }
    }
}

/// Context of an API request.
pub(crate) struct RequestContext {
    pub request_id: RequestId,
    /// Client's label of the request.
    pub label: Option<String>,
    pub span: Span,
    pub wants_stats: bool,
    /// Whether the client may resume the stream.
    pub wants_resume: bool,
    /// The header of the tenant.
    pub tenant: Option<HeaderValue>,
    /// The conversation. Invalid headers are reported with the other errors of the request.
    pub session: Result<RequestSession, FieldError>,
    /// The header [`X_BATON_DEADLINE_MS`].
    deadline_ms: Option<HeaderValue>,
}

impl RequestContext {
    pub(crate) fn new(headers: &HeaderMap, api: &'static str) -> Result<Self, RequestError> {
        let request_id = RequestId::mint()?;
        let text = |name: &HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
        let label = label_of(headers);
        let span = tracing::info_span!(
            "request",
            otel.kind = "server",
            %request_id,
            label = label.as_deref(),
            api
        );
        propagation::set_parent_from_http(&span, headers);
        let wants_stats =
            [X_BATON_STATS, X_BATON_FIGURES].iter().any(|name| text(name) == Some("1"));
        let wants_resume = text(&X_BATON_RESUME) == Some("1");
        let tenant = headers.get(TENANT_HEADER).cloned();
        let bytes = |name| headers.get(name).map(HeaderValue::as_bytes);
        let session = session_of_headers(bytes(SESSION_HEADER), bytes(KEEP_HEADER));
        let deadline_ms = headers.get(X_BATON_DEADLINE_MS).cloned();
        Ok(Self {
            request_id,
            label,
            span,
            wants_stats,
            wants_resume,
            tenant,
            session,
            deadline_ms,
        })
    }

    /// Returns the time-out of the request: the client's, otherwise `router.timeout`.
    pub(crate) fn timeout(&self, front: &Front) -> Result<Duration, FieldError> {
        let settings = &front.settings.router;
        let Some(value) = &self.deadline_ms else { return Ok(settings.timeout) };
        let longest = settings.timeout_max.as_millis();
        let asked = value.to_str().ok().and_then(|value| value.parse::<u64>().ok());
        match asked.filter(|asked| (1..=longest).contains(&u128::from(*asked))) {
            Some(asked) => Ok(Duration::from_millis(asked)),
            None => {
                let value = String::from_utf8_lossy(value.as_bytes());
                let allowed = format!("a whole number from 1 to {longest}");
                Err(invalid_value(X_BATON_DEADLINE_MS.as_str(), &value, &allowed))
            }
        }
    }

    /// Returns the response's `x-request-id`: the client's label, otherwise the router's id.
    pub(crate) fn echo(&self) -> HeaderValue {
        echo(self.label.as_deref(), self.request_id)
    }
}

/// Reads the client's label of the request.
pub(crate) fn label_of(headers: &HeaderMap) -> Option<String> {
    headers.get(X_REQUEST_ID).and_then(|value| label(value.to_str().ok()?))
}

/// Returns the label, otherwise the id.
pub(crate) fn echo(client_label: Option<&str>, request_id: RequestId) -> HeaderValue {
    let text = client_label.map_or_else(|| request_id.to_string(), str::to_owned);
    // Labels are visible ASCII and ids are hexadecimal.
    HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static("invalid"))
}

/// A body, and its bytes of the limit on all bodies.
pub(crate) struct ReadBody {
    content: BytesMut,
    reserved: ReservedBytes,
    /// Maximum size of the content in bytes.
    limit: u64,
}

impl Deref for ReadBody {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.content
    }
}

impl ReadBody {
    fn extend(&mut self, data: &[u8]) -> Result<(), ApiError> {
        if (self.content.len() + data.len()) as u64 > self.limit {
            return Err(ApiError::body_too_large(self.limit));
        }
        self.reserved.add(data.len()).map_err(RequestError::from)?;
        self.content.extend_from_slice(data);
        Ok(())
    }
}

/// Writer of a decompressed body. The limits hold for what it writes, so that a small body cannot
/// take more memory than a large one.
struct DecompressedBody {
    body: ReadBody,
    /// The error that ended the decompression.
    refused: Option<ApiError>,
}

impl io::Write for DecompressedBody {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        match self.body.extend(data) {
            Ok(()) => Ok(data.len()),
            Err(error) => {
                self.refused = Some(error);
                Err(io::Error::other("the body is refused"))
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Receiver of a body in its encoding.
enum BodyReader {
    Plain(ReadBody),
    Gzip(Box<MultiGzDecoder<DecompressedBody>>),
}

impl BodyReader {
    fn new(body: ReadBody, is_gzip: bool) -> Self {
        match is_gzip {
            true => {
                Self::Gzip(Box::new(MultiGzDecoder::new(DecompressedBody { body, refused: None })))
            }
            false => Self::Plain(body),
        }
    }

    fn extend(&mut self, data: &[u8]) -> Result<(), ApiError> {
        match self {
            Self::Plain(body) => body.extend(data),
            Self::Gzip(decoder) => decoder
                .write_all(data)
                .map_err(|error| refused_by(decoder.get_mut().refused.take(), &error)),
        }
    }

    fn finish(self) -> Result<ReadBody, ApiError> {
        match self {
            Self::Plain(body) => Ok(body),
            Self::Gzip(mut decoder) => {
                let finished = decoder.try_finish();
                let refused = decoder.get_mut().refused.take();
                finished.map_err(|error| refused_by(refused, &error))?;
                decoder.finish().map(|whole| whole.body).map_err(|error| refused_by(None, &error))
            }
        }
    }
}

/// Returns the error of a body that cannot be decompressed.
fn refused_by(refused: Option<ApiError>, error: &io::Error) -> ApiError {
    refused.unwrap_or_else(|| {
        let message = format!("cannot decompress the body: {error}; expected gzip");
        ApiError::invalid(StatusCode::BAD_REQUEST, "body_broken", message)
    })
}

/// Rejects a body in another encoding than gzip, or whose content type is not JSON. Returns whether
/// the body is compressed. A web page can make a browser post forms and plain text to a router on
/// the loopback interface, but not JSON unless its domain resolves to that interface or [`pages`]
/// allows its origin.
fn check_body_headers(headers: &HeaderMap) -> Result<bool, ApiError> {
    let shown = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let mut is_gzip = false;
    for encoding in headers.get_all(header::CONTENT_ENCODING) {
        match encoding.as_bytes().to_ascii_lowercase().as_slice() {
            b"identity" => {}
            b"gzip" | b"x-gzip" if !is_gzip => is_gzip = true,
            _ => {
                let allowed = "gzip, identity, or no content-encoding";
                return Err(ApiError::unsupported_body(
                    "content-encoding",
                    Some(&shown(encoding)),
                    allowed,
                ));
            }
        }
    }
    let content_type = headers.get(header::CONTENT_TYPE).map(shown);
    if !content_type.as_deref().is_some_and(is_json) {
        let allowed = "application/json";
        return Err(ApiError::unsupported_body("content-type", content_type.as_deref(), allowed));
    }
    Ok(is_gzip)
}

/// Returns whether the type is `application/json` or `application/*+json`, with or without
/// parameters.
fn is_json(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let subtype = kind.strip_prefix("application/");
    subtype.is_some_and(|subtype| subtype == "json" || subtype.ends_with("+json"))
}

/// Reads the body of a generation request. A body that takes long counts as a stream of the
/// caller's key.
async fn read_generation_body(
    front: &Front,
    headers: &HeaderMap,
    body: Body,
    caller: &Caller,
) -> Result<ReadBody, ApiError> {
    let mut read = pin!(read_body(front, headers, body, caller));
    if let Ok(read) = tokio::time::timeout(BODY_COUNTS_AFTER, read.as_mut()).await {
        return read;
    }
    let _stream = caller.open_streams(1).map_err(RequestError::from)?;
    read.await
}

/// Reads the whole body, within the limits on one body and on all bodies.
async fn read_body(
    front: &Front,
    headers: &HeaderMap,
    body: Body,
    caller: &Caller,
) -> Result<ReadBody, ApiError> {
    let is_gzip = check_body_headers(headers)?;
    let limit = front.settings.router.body_bytes_max.bytes();
    let announced = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|bytes| bytes > limit) {
        return Err(ApiError::body_too_large(limit));
    }
    let mut body = TimedBody::new(body, front.settings.request_read_max);
    let reserved = front.bodies.reserve(caller.flow(None));
    let mut whole =
        BodyReader::new(ReadBody { content: BytesMut::new(), reserved, limit }, is_gzip);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| match error.downcast_ref::<Status>() {
            Some(late) => ApiError::body_timeout(late.message()),
            None => {
                let message = format!("cannot read the body: {error}");
                ApiError::invalid(StatusCode::BAD_REQUEST, "body_broken", message)
            }
        })?;
        let Ok(data) = frame.into_data() else { continue };
        whole.extend(&data)?;
    }
    whole.finish()
}

/// Parses a body as each endpoint does and discards the result. Fuzz targets call this without a
/// server.
pub fn read_bodies(body: &[u8]) {
    let Ok(fields) = fields::RequestFields::parse(body) else { return };
    let _ = fields.string("model");
    let _ = request_fields::read_chat(&fields);
    let _ = request_fields::read_completion(&fields);
    let _ = responses::read_fields(&fields);
    let _ = request_fields::options(&fields);
    let _ = request_fields::choices(&fields);
    let _ = request_fields::delivery(&fields);
    let _ = messages::read_messages(&fields);
    let _ = messages::read_counted(&fields);
    let tools = grammar_fields::tools(&fields).ok().flatten();
    let _ = request_fields::chat_source(&fields, tools.as_ref());
    let _ = request_fields::prompts(&fields, "prompt");
    let _ = pooling::EmbeddingOptions::read(&fields);
    let _ = pooling::RerankRequest::read(&fields);
    let _ = pooling::text_pairs(&fields);
    let _ = fields.value::<Vec<u32>>("tokens", "a list of token ids");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_json_content_types_are_accepted() {
        for accepted in [
            "application/json",
            "Application/JSON; charset=utf-8",
            "application/json;v=1",
            "application/problem+json",
        ] {
            assert!(is_json(accepted), "{accepted}");
        }
        for rejected in [
            "",
            "text/html",
            "text/plain;charset=utf-8",
            "text/json",
            "application/x-www-form-urlencoded",
            "application/jsonp",
            "text/plain; application/json",
        ] {
            assert!(!is_json(rejected), "{rejected}");
        }
    }
}
