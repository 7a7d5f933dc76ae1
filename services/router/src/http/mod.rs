//! The OpenAI HTTP API, health and metrics.

mod choices;
mod error;
mod fields;
mod generate;
mod grammar_field;
mod info;
mod openapi;
mod prompt_field;
mod reply;
mod request_context;
mod request_fields;
mod tokenize;
mod tools;
mod wire;

use std::sync::Arc;

use axum::{
    Router,
    extract::Request,
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{self, MethodRouter},
};
use bytes::Bytes;
use http::{HeaderValue, Method, StatusCode, Uri, header};
use proto::ids::RequestId;
use telemetry::Metrics;

use crate::front::Front;
use error::ApiError;
use generate::{chat_completions, completions};
use request_context::{X_REQUEST_ID, echo, label_of};
use tokenize::{detokenize, tokenize};

/// Returns all HTTP routes. `started` is the start of the process in seconds since 1970.
pub fn routes(front: Arc<Front>, metrics: Metrics, started: u64) -> Router {
    let mut router = Router::new();
    for Route { path, method, handler } in table(metrics, started) {
        router = router.route(path, only(method, handler));
    }
    router
        .fallback(async |uri: Uri| no_such_path(&uri))
        .layer(middleware::from_fn(with_request_id))
        .with_state(front)
}

/// A route: path, method and handler.
struct Route {
    path: &'static str,
    method: &'static str,
    handler: MethodRouter<Arc<Front>>,
}

fn table(metrics: Metrics, started: u64) -> Vec<Route> {
    let description: Bytes = openapi::document().to_string().into();
    let openapi = async move || ([(header::CONTENT_TYPE, "application/json")], description.clone());
    let get = |path, handler| Route { path, method: "GET", handler };
    let post = |path, handler| Route { path, method: "POST", handler };
    vec![
        post("/v1/chat/completions", routing::post(chat_completions)),
        post("/v1/completions", routing::post(completions)),
        post("/tokenize", routing::post(tokenize)),
        post("/detokenize", routing::post(detokenize)),
        get("/v1/models", routing::get(move |state| info::models(state, started))),
        // A model name may contain slashes.
        get("/v1/models/{*id}", routing::get(move |state, id| info::model(state, id, started))),
        get("/health", routing::get(info::health)),
        get("/live", routing::get(async || "live\n")),
        get("/metrics", routing::get(async move || info::metrics(&metrics))),
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

fn only(allowed: &'static str, route: MethodRouter<Arc<Front>>) -> MethodRouter<Arc<Front>> {
    route.fallback(async move |method: Method| {
        let message = format!("{method} is not allowed here; allowed: {allowed}");
        let (status, code) = (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed");
        let mut response = ApiError::invalid(status, code, message).into_response();
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
        response
    })
}

fn no_such_path(uri: &Uri) -> ApiError {
    let path: String = uri.path().chars().take(200).collect();
    let message = format!("unknown path: {path}");
    ApiError::invalid(StatusCode::NOT_FOUND, "not_found", message)
}

/// Parses a body as each endpoint does and discards the result. Fuzz targets call this without a server.
pub fn read_bodies(body: &[u8]) {
    let Ok(fields) = fields::Fields::parse(body) else { return };
    let _ = fields.string("model");
    let _ = request_fields::read_chat(&fields);
    let _ = request_fields::read_completion(&fields);
    let _ = request_fields::options(&fields);
    let _ = request_fields::choices(&fields);
    let _ = request_fields::delivery(&fields);
    let tools = tools::read(&fields).ok().flatten();
    let _ = request_fields::chat_source(&fields, tools.as_ref());
    let _ = prompt_field::prompts(&fields);
    let _ = fields.value::<Vec<u32>>("tokens", "a list of token ids");
}
