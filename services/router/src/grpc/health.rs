//! gRPC health, from the directory of nodes.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tonic_health::{
    ServingStatus,
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};

use crate::{front::Front, nodes::OwnedTask};

/// Service names in the health protocol: the whole server and the API for clients.
const SERVICES: [&str; 2] = ["", "baton.v1.Inference"];

/// Starts the task that keeps the health service up to date. The service reports NOT_SERVING until
/// a decode node is up and the first nodes have set up their connections, and again once the router
/// leaves.
pub(crate) fn serve_health(front: Arc<Front>) -> (OwnedTask, HealthServer<HealthService>) {
    let reporter = HealthReporter::new();
    let service = HealthServer::new(HealthService::from_health_reporter(reporter.clone()));
    (OwnedTask::start(|stop| report(front, reporter, stop)), service)
}

async fn report(front: Arc<Front>, reporter: HealthReporter, stop: CancellationToken) {
    let mut changes = front.nodes.changes();
    let mut heard = false;
    loop {
        let serves = !front.unready.is_cancelled() && front.serves();
        let status = if serves { ServingStatus::Serving } else { ServingStatus::NotServing };
        for service in SERVICES {
            reporter.set_service_status(service, status).await;
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = front.unready.cancelled(), if !heard => heard = true,
            // Fails only if the directory was dropped, but `front` holds the directory.
            changed = changes.changed() => if changed.is_err() { return },
        }
    }
}
