//! `GET /v1/explain/{id}`, `/v1/explain?slow=N` and `/v1/explain?failed`: the accounts of requests.

use std::{sync::Arc, time::Instant};

use axum::{
    Json,
    extract::{Path, RawQuery, State},
    response::{IntoResponse, Response},
};
use http::StatusCode;
use serde::Serialize;

use crate::{
    front::Front,
    history::{Kept, Query, Report, lock},
    http::ApiError,
};

#[derive(Serialize)]
struct Explained {
    requests: Vec<Report>,
    /// Numbers of requests that the router keeps, and the age of the oldest ended one.
    running: usize,
    ended: usize,
    oldest_s: Option<f64>,
}

pub async fn explain_id(State(front): State<Arc<Front>>, Path(id): Path<String>) -> Response {
    let (requests, kept) = find(&front, Query::Id(&id));
    match requests.is_empty() {
        true => not_found(&id, kept).into_response(),
        false => reply(requests, kept),
    }
}

pub async fn explain(State(front): State<Arc<Front>>, RawQuery(query): RawQuery) -> Response {
    let query = query.unwrap_or_default();
    let parsed = match query.split_once('=').unwrap_or((&query, "")) {
        ("failed", "") => Some(Query::Failed),
        ("slow", count) => count.parse().ok().filter(|count| *count > 0).map(Query::Slow),
        _ => None,
    };
    let Some(parsed) = parsed else {
        let shown: String = query.chars().take(100).collect();
        let message = format!(
            "invalid query {shown:?}; allowed: /v1/explain/ID, /v1/explain?slow=N with N from 1, /v1/explain?failed"
        );
        return ApiError::invalid(StatusCode::BAD_REQUEST, "invalid_value", message)
            .into_response();
    };
    let (requests, kept) = find(&front, parsed);
    reply(requests, kept)
}

fn find(front: &Front, query: Query<'_>) -> (Vec<Report>, Kept) {
    let now = Instant::now();
    let (found, kept) = {
        let history = front.history.lock();
        (history.find(now, query), history.kept(now))
    };
    (found.iter().map(|account| Report::new(&lock(account), now)).collect(), kept)
}

fn reply(requests: Vec<Report>, kept: Kept) -> Response {
    let Kept { running, ended, oldest } = kept;
    let oldest_s = oldest.map(|oldest| oldest.as_millis() as f64 / 1e3);
    Json(Explained { requests, running, ended, oldest_s }).into_response()
}

fn not_found(id: &str, kept: Kept) -> ApiError {
    let id: String = id.chars().take(200).collect();
    let Kept { running, ended, oldest } = kept;
    let since = match oldest {
        Some(oldest) => format!(", the oldest from {} s ago", oldest.as_secs()),
        None => String::new(),
    };
    let message = format!(
        "no request has the request id, label or trace id {id:?}; this router keeps its {running} running requests and \
         the last {ended} that ended{since}"
    );
    ApiError::invalid(StatusCode::NOT_FOUND, "not_found", message)
}
