//! The routes, and the small ones among them.

use std::sync::Arc;

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, Request, State},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{MethodRouter, get, post},
};
use http::{HeaderValue, Method, StatusCode, Uri, header};
use serde::Serialize;
use telemetry::Metrics;

use super::{
    error::ApiError,
    generate::{chat_completions, completions},
    request_context::{X_REQUEST_ID, echo, label_of},
    wire::{ModelCard, ModelList},
};
use crate::{front::Front, generation::RequestError, request::ids::RequestId};

/// Everything that is served over HTTP. `started` is the process's start, in seconds since 1970.
pub fn routes(front: Arc<Front>, metrics: Metrics, started: u64) -> Router {
    Router::new()
        .route("/v1/chat/completions", only("POST", post(chat_completions)))
        .route("/v1/completions", only("POST", post(completions)))
        .route("/v1/models", only("GET", get(move |state| models(state, started))))
        // Names of models may hold slashes.
        .route("/v1/models/{*id}", only("GET", get(move |state, id| model(state, id, started))))
        .route("/health", only("GET", get(health)))
        .route("/live", only("GET", get(async || "live\n")))
        .route("/metrics", only("GET", get(async move || render(&metrics))))
        .fallback(async |uri: Uri| ApiError::no_such_path(uri.path()))
        .layer(middleware::from_fn(with_request_id))
        .with_state(front)
}

/// Every answer has an `x-request-id`; those of the API have it from their request already.
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
        let mut response = ApiError::wrong_method(&method, allowed).into_response();
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
        response
    })
}

async fn models(State(front): State<Arc<Front>>, started: u64) -> Response {
    Json(ModelList { object: "list", data: vec![card(&front, started)] }).into_response()
}

async fn model(State(front): State<Arc<Front>>, Path(id): Path<String>, started: u64) -> Response {
    let served = &front.settings.model;
    if id != *served {
        let model = id.chars().take(200).collect();
        let error = RequestError::UnknownModel { model, served: served.clone() };
        return ApiError::from(error).into_response();
    }
    Json(card(&front, started)).into_response()
}

fn card(front: &Front, started: u64) -> ModelCard<'_> {
    ModelCard {
        id: &front.settings.model,
        object: "model",
        created: started,
        owned_by: "baton",
        max_model_len: front.nodes.serving().limits.map(|limits| limits.sequence_tokens_max),
    }
}

/// Whether requests can be served, and by what.
#[derive(Serialize)]
struct Health<'a> {
    status: &'static str,
    /// Served, but decode nodes read the prompts themselves.
    degraded: bool,
    model: &'a str,
    prefill_nodes: usize,
    decode_nodes: usize,
    requests_in_work: u32,
}

async fn health(State(front): State<Arc<Front>>) -> Response {
    let serving = front.nodes.serving();
    let (code, status) = match (front.is_stopping(), serving.decode_nodes) {
        (true, _) => (StatusCode::SERVICE_UNAVAILABLE, "stopping"),
        (false, 0) => (StatusCode::SERVICE_UNAVAILABLE, "no decode node"),
        (false, _) => (StatusCode::OK, "ready"),
    };
    let health = Health {
        status,
        degraded: serving.prefill_nodes == 0 || serving.decode_nodes == 0,
        model: &front.settings.model,
        prefill_nodes: serving.prefill_nodes,
        decode_nodes: serving.decode_nodes,
        requests_in_work: front.admission.in_work(),
    };
    (code, Json(health)).into_response()
}

fn render(metrics: &Metrics) -> Response<Body> {
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], metrics.render_prometheus()).into_response()
}
