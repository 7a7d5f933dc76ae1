//! `/v1/weights`: live weight updates.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, Query, Request, State, rejection::QueryRejection},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use http::StatusCode;
use proto::v1::InFlight;
use serde::Deserialize;
use weight_transfer::{UpdateId, trainer_address};

use super::input::{BODY_BYTES_MAX, checked_model, invalid, read_body, shown};
use crate::{
    front::Front,
    http::{ApiError, PathParameter},
    weights::{NewUpdate, UpdateError, UpdateTransport, WeightUpdates, WeightsReport},
};

const LABEL_BYTES_MAX: usize = 128;
const TIMEOUT_MAX_S: f64 = 3600.0;
const TIMEOUT_DEFAULT_S: f64 = 300.0;
/// Shorter than `router.idle_timeout`, after which requests move to other nodes.
const PAUSE_DEFAULT_S: f64 = 30.0;

/// Body of `POST /v1/weights/begin`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BeginBody {
    /// Absolute path of the model on every node; with ipc, the trainer's Unix socket; with nccl,
    /// its host:port/token.
    path: String,
    /// The operator's name of the weights.
    #[serde(default)]
    label: String,
    /// Model of the nodes; the default model if absent.
    model: Option<String>,
    /// Seconds until the update is aborted unless it is committed.
    timeout_s: Option<f64>,
    /// Whether the router commits as soon as every node is prepared.
    #[serde(default)]
    commit: bool,
    /// disk: every node reads the path. tcp: one node reads it, and the others copy from that node.
    /// ipc: every node reads the memory of a GPU of a trainer on its host. nccl: a trainer
    /// broadcasts to the GPUs of all nodes.
    #[serde(default)]
    transport: TransportName,
    /// With tcp, the node that reads the path; the first node if absent.
    node: Option<String>,
    /// Treatment of requests in flight at the commit.
    #[serde(default)]
    in_flight: InFlightName,
}

/// Query of `GET /v1/weights`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StatusQuery {
    /// The reported update; the running or last one if absent.
    id: Option<String>,
}

/// Query of `POST /v1/weights/pause`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PauseQuery {
    /// Treatment of requests in flight.
    #[serde(default)]
    mode: InFlightName,
    /// Seconds until the nodes serve again by themselves.
    timeout_s: Option<f64>,
    /// Model of the nodes; the default model if absent.
    model: Option<String>,
}

/// Query of `POST /v1/weights/resume`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResumeQuery {
    /// Model of the nodes; the default model if absent.
    model: Option<String>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum InFlightName {
    #[default]
    Recompute,
    KeepKv,
    Wait,
    Abort,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum TransportName {
    #[default]
    Disk,
    Tcp,
    Ipc,
    Nccl,
}

#[derive(Clone)]
struct UpdatesApi {
    weights: WeightUpdates,
    front: Arc<Front>,
}

pub(super) fn routes(front: Arc<Front>, weights: WeightUpdates) -> Router {
    Router::new()
        .route("/v1/weights", get(status))
        .route("/v1/weights/begin", post(begin))
        .route("/v1/weights/pause", post(pause))
        .route("/v1/weights/resume", post(resume))
        .route("/v1/weights/{id}/commit", post(commit))
        .route("/v1/weights/{id}/abort", post(abort))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(UpdatesApi { weights, front })
}

async fn status(
    State(updates): State<UpdatesApi>,
    query: Result<Query<StatusQuery>, QueryRejection>,
) -> Response {
    let id = query.map_err(|error| invalid_query(&error));
    match id.and_then(|Query(query)| query.id.as_deref().map(update_id).transpose()) {
        Ok(id) => reply(updates.weights.status(id).await),
        Err(error) => error.into_response(),
    }
}

async fn begin(State(updates): State<UpdatesApi>, request: Request) -> Response {
    let checked = read_body(&updates.front, request).await;
    match checked.and_then(|body| checked_update(&updates.front, &body)) {
        Ok(update) => reply(updates.weights.begin(update).await),
        Err(error) => error.into_response(),
    }
}

async fn pause(
    State(updates): State<UpdatesApi>,
    query: Result<Query<PauseQuery>, QueryRejection>,
) -> Response {
    let checked = query.map_err(|error| invalid_query(&error)).and_then(|Query(query)| {
        let timeout = checked_timeout(query.timeout_s.unwrap_or(PAUSE_DEFAULT_S))?;
        Ok((checked_model(&updates.front, query.model)?, query.mode.into(), timeout))
    });
    match checked {
        Ok((model, mode, timeout)) => reply(updates.weights.pause(&model, mode, timeout).await),
        Err(error) => error.into_response(),
    }
}

async fn resume(
    State(updates): State<UpdatesApi>,
    query: Result<Query<ResumeQuery>, QueryRejection>,
) -> Response {
    let model = query.map_err(|error| invalid_query(&error));
    match model.and_then(|Query(query)| checked_model(&updates.front, query.model)) {
        Ok(model) => reply(updates.weights.resume(&model).await),
        Err(error) => error.into_response(),
    }
}

async fn commit(State(updates): State<UpdatesApi>, PathParameter(id): PathParameter) -> Response {
    match update_id(&id) {
        Ok(id) => reply(updates.weights.commit(id).await),
        Err(error) => error.into_response(),
    }
}

async fn abort(State(updates): State<UpdatesApi>, PathParameter(id): PathParameter) -> Response {
    match update_id(&id) {
        Ok(id) => reply(updates.weights.abort(id).await),
        Err(error) => error.into_response(),
    }
}

fn checked_update(front: &Front, body: &[u8]) -> Result<NewUpdate, ApiError> {
    let BeginBody { path, label, model, timeout_s, commit, transport, node, in_flight } =
        serde_json::from_slice(body).map_err(|error| {
            let message = format!("cannot begin an update: {error}");
            ApiError::invalid(StatusCode::BAD_REQUEST, "invalid_json", message)
        })?;
    let (is_valid, expected) = match transport {
        TransportName::Nccl => {
            (trainer_address(&path).is_some(), "host:port/token of a trainer, at most 300 bytes")
        }
        _ => (path.starts_with('/'), "an absolute path on the nodes"),
    };
    if !is_valid {
        return Err(invalid("path", format!("{:?}", shown(&path)), expected));
    }
    if label.len() > LABEL_BYTES_MAX || label.chars().any(char::is_control) {
        let expected = "at most 128 bytes without control characters";
        return Err(invalid("label", format!("{:?}", shown(&label)), expected));
    }
    let timeout = checked_timeout(timeout_s.unwrap_or(TIMEOUT_DEFAULT_S))?;
    let model = checked_model(front, model)?;
    let transport = match (transport, node) {
        (TransportName::Tcp, seed) => UpdateTransport::Tcp { seed },
        (TransportName::Disk, None) => UpdateTransport::Disk,
        (TransportName::Ipc, None) => UpdateTransport::Ipc,
        (TransportName::Nccl, None) => UpdateTransport::Nccl,
        (_, Some(node)) => {
            return Err(invalid("node", format!("{:?}", shown(&node)), "transport tcp with it"));
        }
    };
    let in_flight = in_flight.into();
    Ok(NewUpdate { model, label, path, timeout, commits: commit, transport, in_flight })
}

impl From<InFlightName> for InFlight {
    fn from(name: InFlightName) -> Self {
        match name {
            InFlightName::Recompute => Self::Recompute,
            InFlightName::KeepKv => Self::KeepKv,
            InFlightName::Wait => Self::Wait,
            InFlightName::Abort => Self::Abort,
        }
    }
}

fn checked_timeout(timeout_s: f64) -> Result<Duration, ApiError> {
    match (1.0..=TIMEOUT_MAX_S).contains(&timeout_s) {
        true => Ok(Duration::from_secs_f64(timeout_s)),
        false => Err(invalid("timeout_s", timeout_s.to_string(), "1 to 3600")),
    }
}

fn invalid_query(error: &QueryRejection) -> ApiError {
    let message = format!("invalid query: {}", error.body_text());
    ApiError::invalid(StatusCode::BAD_REQUEST, "invalid_value", message)
}

fn update_id(text: &str) -> Result<UpdateId, ApiError> {
    let digits = Some(text).filter(|text| text.len() == 32 && !text.starts_with('+'));
    let id = digits.and_then(|text| u128::from_str_radix(text, 16).ok());
    let shown: String = text.chars().take(100).collect();
    let expected = "the 32 hexadecimal digits that begin returned";
    id.map(UpdateId).ok_or_else(|| invalid("id", format!("{shown:?}"), expected))
}

fn reply(outcome: Result<WeightsReport, UpdateError>) -> Response {
    let error = match outcome {
        Ok(report) => return Json(report).into_response(),
        Err(error) => error,
    };
    let (status, code) = match &error {
        UpdateError::Running { .. } => (StatusCode::CONFLICT, "update_running"),
        UpdateError::NoNode { .. } => (StatusCode::SERVICE_UNAVAILABLE, "no_node"),
        UpdateError::Unknown { .. } => (StatusCode::NOT_FOUND, "unknown_update"),
        UpdateError::UnknownNode { .. } => (StatusCode::NOT_FOUND, "unknown_node"),
        UpdateError::AmbiguousNode { .. } => (StatusCode::CONFLICT, "ambiguous_node"),
        UpdateError::Pause { .. } => (StatusCode::BAD_GATEWAY, "node_failed"),
        UpdateError::Coordinator(_) => (StatusCode::CONFLICT, "wrong_phase"),
        UpdateError::Busy => (StatusCode::TOO_MANY_REQUESTS, "busy"),
        UpdateError::NoRandomness(_) | UpdateError::Stopped => {
            (StatusCode::SERVICE_UNAVAILABLE, "unavailable")
        }
    };
    ApiError::invalid(status, code, error.to_string()).into_response()
}
