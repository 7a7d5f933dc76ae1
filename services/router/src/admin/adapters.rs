//! `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: load and unload an adapter on all nodes
//! of a model. The paths, `lora_name` and `lora_path` are those of vLLM.

use std::{
    path::{Component, Path},
    sync::Arc,
};

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, Request, State},
    response::{IntoResponse, Response},
    routing::post,
};
use cluster::{ADAPTER_NAME_ALLOWED, is_adapter_name};
use http::StatusCode;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::json;

use super::{
    failure,
    input::{BODY_BYTES_MAX, checked_model, invalid, read_body, shown},
};
use crate::{
    front::Front,
    http::ApiError,
    nodes::{AdapterChange, AdminError},
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LoadBody {
    lora_name: String,
    /// Absolute path of the adapter's folder on every node.
    lora_path: String,
    /// Model of the nodes; the default model if absent.
    model: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UnloadBody {
    lora_name: String,
    /// Model of the nodes; the default model if absent.
    model: Option<String>,
}

pub(super) fn routes(front: Arc<Front>) -> Router {
    Router::new()
        .route("/v1/load_lora_adapter", post(load))
        .route("/v1/unload_lora_adapter", post(unload))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(front)
}

async fn load(State(front): State<Arc<Front>>, request: Request) -> Result<Response, ApiError> {
    let LoadBody { lora_name, lora_path, model } = read(&front, request).await?;
    let is_plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
    let path = Path::new(&lora_path);
    if !path.is_absolute() || !path.components().all(is_plain) {
        let found = format!("{:?}", shown(&lora_path));
        return Err(invalid("lora_path", found, "an absolute path on the nodes without .."));
    }
    change(&front, &lora_name, model, AdapterChange::Load { path: lora_path }).await
}

async fn unload(State(front): State<Arc<Front>>, request: Request) -> Result<Response, ApiError> {
    let UnloadBody { lora_name, model } = read(&front, request).await?;
    change(&front, &lora_name, model, AdapterChange::Unload).await
}

async fn read<T: DeserializeOwned>(front: &Front, request: Request) -> Result<T, ApiError> {
    let body = read_body(front, request).await?;
    serde_json::from_slice(&body).map_err(|error| {
        let message = format!("cannot change the adapters: {error}");
        ApiError::invalid(StatusCode::BAD_REQUEST, "invalid_json", message)
    })
}

/// Changes the adapters of all nodes. If nodes fail, the error names the first one.
async fn change(
    front: &Front,
    name: &str,
    model: Option<String>,
    change: AdapterChange,
) -> Result<Response, ApiError> {
    if !is_adapter_name(name) {
        return Err(invalid("lora_name", format!("{:?}", shown(name)), ADAPTER_NAME_ALLOWED));
    }
    let model = checked_model(front, model)?;
    let targets = front.nodes.adapter_targets(&model, name, &change);
    let count = targets.len();
    if count == 0 {
        return Err(no_target(front, &model, name, &change));
    }
    let (nodes, errors) = front.nodes.change_adapters(&targets, name, &change).await;
    let Some((node, error)) = errors.first() else {
        let answer = json!({"adapter": format!("{model}:{name}"), "nodes": nodes});
        return Ok(Json(answer).into_response());
    };
    let reason = match error {
        AdminError::Invalid { reason } => format!("node {node}: {reason}"),
        other => other.to_string(),
    };
    let verb = change.verb();
    let message =
        format!("cannot {verb} adapter {name} on {} of {count} nodes: {reason}", errors.len());
    let (status, code) = failure(error);
    Err(ApiError::invalid(status, code, message))
}

/// Returns the error of a change that concerns no node.
fn no_target(front: &Front, model: &str, name: &str, change: &AdapterChange) -> ApiError {
    match change {
        AdapterChange::Load { .. } => {
            let message = format!("cannot load adapter {name}: no node of {model} is up");
            ApiError::invalid(StatusCode::SERVICE_UNAVAILABLE, "no_node", message)
        }
        AdapterChange::Unload => {
            let known: Vec<String> = front.nodes.adapters(model).into_keys().collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            let message = format!(
                "cannot unload adapter {name}: no node of {model} has it; expected one of: {known}"
            );
            ApiError::invalid(StatusCode::NOT_FOUND, "unknown_adapter", message)
        }
    }
}
