//! `/v1/models`, `/health`, `/ready`, `/live` and `/metrics`.

use std::sync::Arc;

use axum::{
    Json,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use http::{Extensions, StatusCode, header};
use schemars::JsonSchema;
use serde::Serialize;
use telemetry::Metrics;

use super::{
    PathParameter, caller_of,
    error::ApiError,
    wire::{ModelCard, ModelList},
};
use crate::{
    front::{Front, NamedModel},
    nodes::Serving,
};

pub async fn models(
    State(front): State<Arc<Front>>,
    extensions: Extensions,
    started: u64,
) -> Response {
    let names = front.models.names(&caller_of(&extensions)).collect::<Vec<_>>();
    let data = names.into_iter().map(|named| card(&front, named, started)).collect();
    Json(ModelList { object: "list", data }).into_response()
}

pub async fn model(
    State(front): State<Arc<Front>>,
    PathParameter(id): PathParameter,
    extensions: Extensions,
    started: u64,
) -> Response {
    match front.models.find(Some(&id), &caller_of(&extensions)) {
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
        max_model_len: limits.map(|limits| limits.sequence_tokens_max),
    }
}

/// Readiness of the router and its nodes.
#[derive(Serialize, JsonSchema)]
pub struct Health<'a> {
    /// `nodes connecting`: the connection setup between the first nodes has not finished.
    #[schemars(extend("enum" = ["ready", "no decode node", "nodes paused", "nodes connecting", "stopping"]))]
    status: &'static str,
    /// At least one model has no prefill node or no decode node.
    degraded: bool,
    /// Name of the default model.
    model: &'a str,
    models: Vec<ModelHealth<'a>>,
    /// Number of healthy prefill nodes of all models.
    prefill_nodes: usize,
    /// Number of healthy decode nodes of all models.
    decode_nodes: usize,
    /// Number of in-flight choices, including choices that wait for a node. A request with `n` choices counts `n`
    /// times.
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

pub async fn health(State(front): State<Arc<Front>>) -> Response {
    let models: Vec<ModelHealth<'_>> = front
        .models
        .all()
        .iter()
        .map(|model| {
            let Serving { prefill_nodes, decode_nodes, .. } = front.nodes.serving(&model.name);
            ModelHealth { name: &model.name, prefill_nodes, decode_nodes }
        })
        .collect();
    let decode_nodes = models.iter().map(|model| model.decode_nodes).sum();
    let (code, status) = match (front.leaving.is_cancelled(), decode_nodes) {
        (true, _) => (StatusCode::SERVICE_UNAVAILABLE, "stopping"),
        (false, 0) => (StatusCode::SERVICE_UNAVAILABLE, "no decode node"),
        (false, _) if !front.nodes.are_connected() => {
            (StatusCode::SERVICE_UNAVAILABLE, "nodes connecting")
        }
        (false, _) if !front.serves() => (StatusCode::SERVICE_UNAVAILABLE, "nodes paused"),
        (false, _) => (StatusCode::OK, "ready"),
    };
    let health = Health {
        status,
        degraded: models.iter().any(|model| model.prefill_nodes == 0 || model.decode_nodes == 0),
        model: &front.models.default_model().name,
        prefill_nodes: models.iter().map(|model| model.prefill_nodes).sum(),
        decode_nodes,
        models,
        requests_running: front.router.in_flight(),
        cpu_fallbacks: front
            .nodes
            .cpu_fallbacks()
            .into_iter()
            .map(|(node, reason)| CpuFallback { node, reason })
            .collect(),
    };
    (code, Json(health)).into_response()
}

pub async fn ready(State(front): State<Arc<Front>>) -> (StatusCode, &'static str) {
    match front.is_ready() {
        true => (StatusCode::OK, "ready\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "not ready\n"),
    }
}

pub async fn live() -> &'static str {
    "live\n"
}

pub fn metrics(metrics: &Metrics) -> Response<Body> {
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], metrics.render_prometheus()).into_response()
}
