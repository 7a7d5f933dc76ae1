//! gRPC health, from the directory of nodes.

use std::sync::Arc;

use tokio::task::{JoinError, JoinHandle};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic_health::{
    ServingStatus,
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};

use crate::front::Front;

/// The names of the whole server and of its service for clients.
const SERVICES: [&str; 2] = ["", "baton.v1.Inference"];

/// Keeps the health service up to date. Dropping it stops the task without waiting.
pub struct HealthTask {
    stop: DropGuard,
    task: JoinHandle<()>,
}

impl HealthTask {
    /// Starts the task. The service reports NOT_SERVING until a decode node is up and the first nodes have set
    /// up their connections. `draining` is cancelled when new requests are rejected.
    pub fn start(
        front: Arc<Front>,
        draining: CancellationToken,
    ) -> (Self, HealthServer<HealthService>) {
        let reporter = HealthReporter::new();
        let service = HealthServer::new(HealthService::from_health_reporter(reporter.clone()));
        let stop = CancellationToken::new();
        let task = tokio::spawn(report(front, reporter, draining, stop.clone()));
        (Self { stop: stop.drop_guard(), task }, service)
    }

    /// Stops the task and waits until it has ended.
    pub async fn shutdown(self) -> Result<(), JoinError> {
        drop(self.stop);
        self.task.await
    }
}

async fn report(
    front: Arc<Front>,
    reporter: HealthReporter,
    draining: CancellationToken,
    stop: CancellationToken,
) {
    let mut changes = front.nodes.changes();
    let mut heard = false;
    loop {
        let serves = !front.is_stopping() && front.serves();
        let status = if serves { ServingStatus::Serving } else { ServingStatus::NotServing };
        for service in SERVICES {
            reporter.set_service_status(service, status).await;
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = draining.cancelled(), if !heard => heard = true,
            // Fails only without the directory, which `front` holds.
            changed = changes.changed() => if changed.is_err() { return },
        }
    }
}
