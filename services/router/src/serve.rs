//! The running router: its ports and tasks, from the first to the last.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use cluster::{Membership, MembershipError};
use telemetry::{Metrics, RouterMetrics};
use tokio::task::{JoinError, JoinHandle};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    front::{Front, FrontSettings},
    grpc::{self, HealthTask},
    http,
    models::{ModelSource, Models},
    net::{self, Protocol},
    nodes::{NodeWatch, Nodes, Served},
    request::ids::NoRandomness,
};

/// After requests were told to end, so long until they have.
const CUT_MAX: Duration = Duration::from_secs(2);
const MEMBERSHIP_MAX: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
pub struct RouterSettings {
    pub http: SocketAddr,
    pub grpc: SocketAddr,
    /// How long requests in work may take after [`RunningRouter::shutdown`] was called.
    pub drain_timeout: Duration,
    /// The process's limit on open files.
    pub open_files_max: u64,
    pub front: FrontSettings,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("{setting} = {address} cannot be listened on: {reason}")]
    Listen { setting: &'static str, address: SocketAddr, reason: io::Error },
    #[error("there is no model to serve")]
    NoModel,
    #[error("the gRPC descriptors cannot be served: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    #[error("{0}")]
    NoRandomness(#[from] NoRandomness),
}

#[derive(Debug, thiserror::Error)]
pub enum StopError {
    #[error("a task of the router panicked: {0}")]
    Task(#[from] JoinError),
    #[error("{0}")]
    Membership(#[from] MembershipError),
}

/// A router that serves. Dropping it without [`RunningRouter::shutdown`] stops it without draining.
pub struct RunningRouter {
    /// Where it listens.
    pub http: SocketAddr,
    pub grpc: SocketAddr,
    front: Arc<Front>,
    drain_timeout: Duration,
    draining: CancellationToken,
    stop: DropGuard,
    http_task: JoinHandle<()>,
    grpc_task: JoinHandle<()>,
    health: HealthTask,
    watch: NodeWatch,
    membership: Box<dyn Membership>,
}

/// Binds both ports and serves these models, of which the first is the default one. Must run inside a tokio runtime.
pub fn start(
    settings: RouterSettings,
    models: Vec<ModelSource>,
    membership: Box<dyn Membership>,
    metrics: Metrics,
) -> Result<RunningRouter, StartError> {
    let listen = |setting, address| {
        net::bind(address)
            .and_then(|listener| Ok((listener.local_addr()?, listener)))
            .map_err(|reason| StartError::Listen { setting, address, reason })
    };
    let (http_address, http_listener) = listen("router.http", settings.http)?;
    let (grpc_address, grpc_listener) = listen("router.grpc", settings.grpc)?;

    let mut models = models.into_iter();
    let first = models.next().ok_or(StartError::NoModel)?;
    let router_metrics = RouterMetrics::new(&metrics, &first.name);
    let (aliases, waiting_max) = (&settings.front.aliases, settings.front.waiting_max);
    let models = Models::new(first, models.collect(), aliases, waiting_max, &router_metrics);
    let served = models.all().iter().map(|model| Served {
        model: model.name.clone(),
        vocabulary_size: model.text.tokenizer().vocabulary_size(),
    });
    let (nodes, watch) = Nodes::watch(&*membership, served.collect(), router_metrics)?;
    let front = Arc::new(Front::new(settings.front, models, nodes));

    let (draining, stop) = (CancellationToken::new(), CancellationToken::new());
    let (health, health_service) = HealthTask::start(front.clone(), draining.clone());
    let started = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
    let http_routes = http::routes(front.clone(), metrics, started);
    let grpc_routes = grpc::routes(front.clone(), health_service)?;
    let bounds = net::Bounds::new(
        net::ConnectionLimits::new(settings.open_files_max),
        front.settings.request_read_max,
        front.settings.slow_client_timeout,
    );
    let serve = |listener, protocol, routes| {
        let serve = net::serve(listener, protocol, routes, bounds, stop.clone());
        tokio::spawn(serve)
    };
    Ok(RunningRouter {
        http: http_address,
        grpc: grpc_address,
        http_task: serve(http_listener, Protocol::Http, http_routes),
        grpc_task: serve(grpc_listener, Protocol::Grpc, grpc_routes),
        front,
        drain_timeout: settings.drain_timeout,
        draining,
        stop: stop.drop_guard(),
        health,
        watch,
        membership,
    })
}

impl RunningRouter {
    /// Drains and stops: unready and refusing at once, but answering until everything in work has
    /// ended, at most the drain timeout; what is left then ends with a typed error. Returns when
    /// every task is gone.
    pub async fn shutdown(self) -> Result<(), StopError> {
        let admission = &self.front.admission;
        admission.close();
        self.draining.cancel();
        tracing::info!(in_work = admission.in_work(), "draining");
        if tokio::time::timeout(self.drain_timeout, admission.emptied()).await.is_err() {
            tracing::warn!(
                in_work = admission.in_work(),
                after = ?self.drain_timeout,
                "requests are still in work and are ended"
            );
            self.front.cut.cancel();
            // They end by themselves; those that do not are dropped with their connections.
            let _ = tokio::time::timeout(CUT_MAX, admission.emptied()).await;
        }
        drop(self.stop);
        self.http_task.await?;
        self.grpc_task.await?;
        self.health.shutdown().await?;
        self.watch.shutdown().await?;
        self.membership.shutdown(MEMBERSHIP_MAX).await?;
        Ok(())
    }

    /// Ends what is in work without waiting for the drain timeout; for a second signal.
    pub fn cut(&self) -> CancellationToken {
        self.front.cut.clone()
    }
}
