//! The operator's API on `router.admin`: explains requests, lists the nodes and proxies calls to
//! them over gRPC, changes adapters, and coordinates weight updates. The console is a web page over
//! this API.

mod adapters;
mod console;
mod explain;
mod input;
mod weights;

use std::{net::IpAddr, sync::Arc};

use axum::{
    Json, Router,
    extract::{RawQuery, Request, State},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use http::{HeaderValue, StatusCode, header, uri::Authority};

use crate::{
    front::Front,
    http::{ApiError, PathParameter, with_keys},
    keys::ApiKeys,
    nodes::{AdminCall, AdminError},
    weights::WeightUpdates,
};

/// Returns the routes of `router.admin`. `keys`: the operators' API keys; `None` accepts every
/// request. The page of the console needs no key: it has no data of the cluster. `is_loopback`:
/// whether the port has a loopback address.
pub(crate) fn routes(
    front: Arc<Front>,
    weights: WeightUpdates,
    keys: Option<Arc<ApiKeys>>,
    is_loopback: bool,
) -> Router {
    let checks_host = is_loopback && keys.is_none();
    let call = |call: AdminCall| {
        post(async move |State(front): State<Arc<Front>>, PathParameter(node): PathParameter| {
            forward(&front, &node, call).await
        })
    };
    let routes = Router::new()
        .route("/v1/explain", get(explain::explain))
        .route("/v1/explain/{*id}", get(explain::explain_id))
        .route("/v1/nodes", get(list))
        .route("/v1/nodes/{node}/drain", call(AdminCall::Drain))
        .route("/v1/nodes/{node}/undrain", call(AdminCall::Undrain))
        .route("/v1/nodes/{node}/reset-prefix-cache", call(AdminCall::ResetPrefixCache))
        .route("/v1/nodes/{node}/trace", post(trace))
        .fallback(async || {
            let message =
                "unknown path; expected / (the console), /v1/explain, /v1/nodes, /v1/nodes/{node}/{call}, \
                 /v1/weights, /v1/load_lora_adapter or /v1/unload_lora_adapter"
                    .to_owned();
            ApiError::invalid(StatusCode::NOT_FOUND, "not_found", message)
        })
        .with_state(front.clone())
        .merge(self::adapters::routes(front.clone()))
        .merge(self::weights::routes(front, weights));
    with_keys(routes, keys)
        .merge(console::routes())
        .layer(middleware::from_fn_with_state(checks_host, reject_foreign_pages))
}

/// Rejects requests of web pages other than the console. Otherwise any page that an operator visits
/// could drain nodes through the loopback address. A page whose domain resolves to that address
/// (DNS rebinding) sends no `origin` with a GET, but the domain as `host`.
async fn reject_foreign_pages(
    State(checks_host): State<bool>,
    request: Request,
    next: Next,
) -> Response {
    let forbidden = |message: &str| {
        ApiError::invalid(StatusCode::FORBIDDEN, "forbidden", message.to_owned()).into_response()
    };
    let in_uri = request.uri().authority().map(Authority::as_str);
    let in_header = request.headers().get(header::HOST).map(|it| it.to_str().unwrap_or_default());
    if let Some(origin) = request.headers().get(header::ORIGIN)
        && in_uri.or(in_header).is_none_or(|host| !is_own_origin(origin, host))
    {
        return forbidden(
            "the admin API rejects requests of web pages of another origin; allowed: the console at /",
        );
    }
    if checks_host && [in_uri, in_header].into_iter().flatten().any(is_domain) {
        return forbidden(
            "the admin API without keys rejects requests to a domain name; expected an IP address or a name \
             without dots",
        );
    }
    next.run(request).await
}

/// Returns whether the page with this `origin` was loaded from this host and port.
fn is_own_origin(origin: &HeaderValue, host: &str) -> bool {
    let origin = origin.to_str().unwrap_or_default();
    let of_page = ["https://", "http://"].iter().find_map(|scheme| origin.strip_prefix(scheme));
    of_page.is_some_and(|of_page| of_page.eq_ignore_ascii_case(host))
}

/// Returns whether the host is neither an IP address nor a name without dots, which public DNS does
/// not resolve.
fn is_domain(authority: &str) -> bool {
    let Ok(authority) = authority.parse::<Authority>() else { return true };
    let host = authority.host().trim_matches(['[', ']']);
    host.contains('.') && host.parse::<IpAddr>().is_err()
}

async fn list(State(front): State<Arc<Front>>) -> Response {
    Json(front.nodes.list()).into_response()
}

async fn forward(front: &Front, node: &str, call: AdminCall) -> Response {
    match front.nodes.forward(node, call).await {
        Ok(outcome) => Json(outcome).into_response(),
        Err(error) => failed(&error).into_response(),
    }
}

async fn trace(
    State(front): State<Arc<Front>>,
    PathParameter(node): PathParameter,
    RawQuery(query): RawQuery,
) -> Response {
    let query = query.unwrap_or_default();
    let Some(seconds) = query.strip_prefix("seconds=").and_then(|text| text.parse().ok()) else {
        let shown: String = query.chars().take(100).collect();
        let message = format!("invalid query {shown:?}; expected seconds=N");
        return ApiError::invalid(StatusCode::BAD_REQUEST, "invalid_value", message)
            .into_response();
    };
    match front.nodes.trace(&node, seconds).await {
        Ok(json) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
        Err(error) => failed(&error).into_response(),
    }
}

fn failed(error: &AdminError) -> ApiError {
    let (status, code) = failure(error);
    ApiError::invalid(status, code, error.to_string())
}

/// Returns the status and the code of an error.
fn failure(error: &AdminError) -> (StatusCode, &'static str) {
    match error {
        AdminError::UnknownNode { .. } => (StatusCode::NOT_FOUND, "unknown_node"),
        AdminError::AmbiguousNode { .. } => (StatusCode::CONFLICT, "ambiguous_node"),
        AdminError::OlderRelease { .. } => (StatusCode::NOT_IMPLEMENTED, "older_release"),
        AdminError::Invalid { .. } => (StatusCode::BAD_REQUEST, "invalid_value"),
        AdminError::Busy { .. } => (StatusCode::CONFLICT, "node_busy"),
        AdminError::Failed { .. } => (StatusCode::BAD_GATEWAY, "node_failed"),
    }
}
