//! `/v1/models`, `/health`, `/ready`, `/live`, `/version` and `/metrics`.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use http::{Extensions, HeaderMap, StatusCode};
use schemars::JsonSchema;
use serde::Serialize;
use telemetry::MetricsPage;

use super::{
    PathParameter, caller_of,
    error::ApiError,
    wire::{ModelCard, ModelList},
};
use crate::{
    front::{Front, NamedModel},
    keys::Caller,
    nodes::Serving,
};

pub(super) async fn models(
    State(front): State<Arc<Front>>,
    extensions: Extensions,
    started: u64,
) -> Response {
    let names = front.model_names(&caller_of(&extensions));
    let data = names.into_iter().map(|named| card(&front, named, started)).collect();
    Json(ModelList { object: "list", data }).into_response()
}

pub(super) async fn model(
    State(front): State<Arc<Front>>,
    PathParameter(id): PathParameter,
    extensions: Extensions,
    started: u64,
) -> Response {
    match front.find_model(Some(id.strip_suffix('/').unwrap_or(&id)), &caller_of(&extensions)) {
        Ok(named) => Json(card(&front, named, started)).into_response(),
        Err(error) => ApiError::from(error).into_response(),
    }
}

fn card(front: &Front, named: NamedModel, started: u64) -> ModelCard {
    let limits = front.nodes.serving(&named.model.name).limits;
    ModelCard {
        id: named.name.to_string(),
        object: "model",
        created: started,
        owned_by: "baton",
        root: named.model.name.to_string(),
        parent: named.adapter.map(|_| named.model.name.to_string()),
        max_model_len: limits.map(|limits| limits.sequence_tokens_max),
    }
}

/// Version of the router, as in vLLM.
#[derive(Serialize, JsonSchema)]
pub(super) struct RouterVersion {
    version: &'static str,
}

pub(super) async fn version() -> Json<RouterVersion> {
    Json(RouterVersion { version: env!("CARGO_PKG_VERSION") })
}

/// Readiness of the router and its nodes.
#[derive(Serialize, JsonSchema)]
pub(super) struct Health<'a> {
    /// `nodes connecting`: the connection setup between the first nodes has not finished.
    #[schemars(extend("enum" = ["ready", "no decode node", "nodes paused", "nodes connecting", "stopping"]))]
    status: &'static str,
    /// At least one model has no prefill node or no decode node.
    degraded: bool,
    /// Name of the caller's default model; absent without a valid key where the router needs keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<&'a str>,
    /// The models that the caller may use.
    models: Vec<ModelHealth<'a>>,
    /// Number of healthy prefill nodes of all models.
    prefill_nodes: usize,
    /// Number of healthy decode nodes of all models.
    decode_nodes: usize,
    /// Number of in-flight choices, including choices that wait for a node. A request with `n`
    /// choices counts `n` times.
    requests_running: u32,
    /// Nodes that compute on the CPU although their host has a GPU; absent when there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cpu_fallbacks: Vec<CpuFallback>,
}

#[derive(Serialize, JsonSchema)]
struct CpuFallback {
    node: String,
    reason: String,
}

#[derive(Serialize, JsonSchema)]
struct ModelHealth<'a> {
    name: &'a str,
    prefill_nodes: usize,
    decode_nodes: usize,
}

pub(super) async fn health(State(front): State<Arc<Front>>, headers: HeaderMap) -> Response {
    let caller = match &front.keys {
        Some(keys) => keys.caller(&headers),
        None => Some(Caller::default()),
    };
    let shows = |model: &str| caller.as_ref().is_some_and(|caller| caller.may_use(model));
    let all =
        front.models.all().iter().map(|model| (&*model.name, front.nodes.serving(&model.name)));
    let all: Vec<(&str, Serving)> = all.collect();
    let count = |of: fn(&Serving) -> usize| all.iter().map(|(_, serving)| of(serving)).sum();
    let (prefill_nodes, decode_nodes) = (count(|it| it.prefill_nodes), count(|it| it.decode_nodes));
    let status = match () {
        () if front.unready.is_cancelled() => "stopping",
        () if decode_nodes == 0 => "no decode node",
        () if !front.nodes.are_connected() => "nodes connecting",
        () if !front.serves() => "nodes paused",
        () => "ready",
    };
    let code = if status == "ready" { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let models = all.iter().filter(|(name, _)| shows(name)).map(|(name, serving)| {
        let &Serving { prefill_nodes, decode_nodes, .. } = serving;
        ModelHealth { name, prefill_nodes, decode_nodes }
    });
    let models: Vec<ModelHealth<'_>> = models.collect();
    let health = Health {
        status,
        degraded: all.iter().any(|(_, it)| it.prefill_nodes == 0 || it.decode_nodes == 0),
        model: models.first().map(|model| model.name),
        prefill_nodes,
        decode_nodes,
        models,
        requests_running: front.router.in_flight(),
        cpu_fallbacks: front
            .nodes
            .cpu_fallbacks(shows)
            .into_iter()
            .map(|(node, reason)| CpuFallback { node, reason })
            .collect(),
    };
    (code, Json(health)).into_response()
}

pub(super) async fn ready(State(front): State<Arc<Front>>) -> (StatusCode, &'static str) {
    match front.is_ready() {
        true => (StatusCode::OK, "ready\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "not ready\n"),
    }
}

pub(super) async fn live() -> &'static str {
    "live\n"
}

pub(super) async fn metrics(page: MetricsPage, extensions: Extensions) -> Response {
    let caller = caller_of(&extensions);
    page.respond(move |label, value| caller.may_read(label, value)).await
}
