//! The probes of a node, and what they read.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{Router, http::StatusCode, routing::get};
use telemetry::{Metrics, MetricsServer, TelemetryError};

use crate::hang::StepInFlight;

/// State that the probes report. The node and its engine thread write it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Liveness {
    /// Whether the node accepts requests.
    pub is_ready: Arc<AtomicBool>,
    pub is_paused: Arc<AtomicBool>,
    pub step_in_flight: Arc<StepInFlight>,
}

impl Liveness {
    /// Serves probes and metrics, which report a step that hangs for `node.hang_restart`.
    pub(crate) async fn serve(
        &self,
        node: &config::Node,
        metrics: &Metrics,
    ) -> Result<MetricsServer, TelemetryError> {
        metrics.set_draining(false);
        observe_hang(metrics, self.step_in_flight.clone(), node.hang_restart);
        let probes = probes(self.clone(), node.hang_restart);
        MetricsServer::start(node.metrics, metrics.clone(), probes).await
    }

    pub(crate) fn set_ready(&self, is_ready: bool) {
        self.is_ready.store(is_ready, Ordering::Release);
    }
}

/// Exports whether a step hangs, as the liveness probe reports it.
fn observe_hang(metrics: &Metrics, step_in_flight: Arc<StepInFlight>, hang_restart: Duration) {
    metrics.observe("baton.step.hung", move |hung| {
        let age = step_in_flight.hung_for(Instant::now(), hang_restart);
        hung.observe(u64::from(age.is_some()), &[]);
    });
}

/// Serves `/live` until a step hangs and `/ready` while the node accepts requests.
fn probes(liveness: Liveness, hang_restart: Duration) -> Router {
    let Liveness { is_ready, is_paused, step_in_flight } = liveness;
    let answer_live = move || async move {
        match step_in_flight.hung_for(Instant::now(), hang_restart) {
            None => (StatusCode::OK, "live\n".to_owned()),
            Some(age) => {
                let (age, limit) = (age.as_secs(), config::format_duration(hang_restart));
                let text = format!(
                    "hung: a step has been in flight for {age} s; node.hang_restart = {limit}\n"
                );
                (StatusCode::SERVICE_UNAVAILABLE, text)
            }
        }
    };
    let answer_ready = move || async move {
        match (is_ready.load(Ordering::Acquire), is_paused.load(Ordering::Acquire)) {
            (true, false) => (StatusCode::OK, "ready\n"),
            (true, true) => (StatusCode::SERVICE_UNAVAILABLE, "paused\n"),
            (false, _) => (StatusCode::SERVICE_UNAVAILABLE, "not ready\n"),
        }
    };
    Router::new().route("/live", get(answer_live)).route("/ready", get(answer_ready))
}
