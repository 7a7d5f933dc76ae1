//! `GET /v1/explain/{id}`, `/v1/explain?recent=N`, `/v1/explain?slow=N` and `/v1/explain?failed`:
//! the history entries of requests.

use std::{sync::Arc, time::Instant};

use axum::{
    Json,
    extract::{RawQuery, State},
    response::{IntoResponse, Response},
};
use http::StatusCode;
use serde::Serialize;

use crate::{
    front::Front,
    history::{HistoryAnswer, HistorySize, Query, RequestReport},
    http::{ApiError, PathParameter},
};

#[derive(Serialize)]
struct ExplainedRequests {
    requests: Vec<RequestReport>,
    /// Number of requests in the history, and the age of the oldest ended request.
    running: usize,
    ended: usize,
    oldest_s: Option<f64>,
}

pub(super) async fn explain_id(
    State(front): State<Arc<Front>>,
    PathParameter(id): PathParameter,
) -> Response {
    let explained = find(front, Query::Id(id.clone())).await;
    match explained.requests.is_empty() {
        true => not_found(&id, &explained).into_response(),
        false => Json(explained).into_response(),
    }
}

pub(super) async fn explain(
    State(front): State<Arc<Front>>,
    RawQuery(query): RawQuery,
) -> Response {
    let query = query.unwrap_or_default();
    let positive = |count: &str| count.parse().ok().filter(|count| *count > 0);
    let parsed = match query.split_once('=').unwrap_or((&query, "")) {
        ("failed", "") => Some(Query::Failed),
        ("recent", count) => positive(count).map(Query::Recent),
        ("slow", count) => positive(count).map(Query::Slow),
        _ => None,
    };
    let Some(parsed) = parsed else {
        let shown: String = query.chars().take(100).collect();
        let message = format!(
            "invalid query {shown:?}; allowed: /v1/explain/ID, /v1/explain?recent=N or ?slow=N with N from 1, \
             /v1/explain?failed"
        );
        return ApiError::invalid(StatusCode::BAD_REQUEST, "invalid_value", message)
            .into_response();
    };
    Json(find(front, parsed).await).into_response()
}

/// Decodes the entries on a thread of its own, because thousands of entries take milliseconds.
async fn find(front: Arc<Front>, query: Query) -> ExplainedRequests {
    let found = tokio::task::spawn_blocking(move || {
        let now = front.history.time_of(Instant::now());
        let HistoryAnswer { requests, kept: HistorySize { running, ended, oldest } } =
            front.history.find(now, &query);
        ExplainedRequests {
            requests: requests.iter().map(|entry| RequestReport::new(entry, now)).collect(),
            running,
            ended,
            oldest_s: oldest.map(|oldest| oldest.as_millis() as f64 / 1e3),
        }
    });
    found.await.expect("a query does not panic")
}

fn not_found(id: &str, explained: &ExplainedRequests) -> ApiError {
    let id: String = id.chars().take(200).collect();
    let ExplainedRequests { running, ended, oldest_s, .. } = explained;
    let since = match oldest_s {
        Some(oldest_s) => format!(", the oldest from {} s ago", oldest_s.trunc()),
        None => String::new(),
    };
    let message = format!(
        "no request has the request id, label or trace id {id:?}; this router keeps its {running} running requests and \
         the last {ended} that ended{since}"
    );
    ApiError::invalid(StatusCode::NOT_FOUND, "not_found", message)
}
