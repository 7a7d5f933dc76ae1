//! The running router: starts and stops its ports and tasks.

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use cluster::Selection;
use credentials::{Reload, ReloadTask};
use membership::{Membership, MembershipError};
use proto::ids::{NoRandomness, random_bits};
use router_core::{RouterCore, RouterLimits};
use telemetry::{
    Metrics, RouterMetrics,
    metrics::{ApiKeyMetrics, WeightMetrics},
};
use tokio::task::{JoinError, JoinHandle};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    admin,
    front::{Front, ModelSource, Models, RouterSettings},
    grpc, http,
    keys::{ApiKeys, Purpose},
    net::{self, Protocol},
    nodes::{Nodes, OwnedTask, Served},
    shared_router::SharedRouter,
    weights::WeightUpdates,
};

/// Maximum time until requests have ended after the router has cancelled them.
const CUT_MAX: Duration = Duration::from_secs(2);
/// Maximum time until a client sends its next request on a connection that it keeps open.
const NEXT_REQUEST_MAX: Duration = Duration::from_secs(1);
/// Maximum time until the task of the membership has stopped.
const MEMBERSHIP_MAX: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum RouterStartError {
    #[error("cannot listen on {setting} = {address}: {reason}")]
    Listen { setting: &'static str, address: SocketAddr, reason: io::Error },
    /// A file that a setting names is missing or invalid.
    #[error("{0}")]
    File(String),
    #[error("no model to serve")]
    NoModel,
    #[error("cannot serve the gRPC descriptors: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    #[error(transparent)]
    NoRandomness(#[from] NoRandomness),
}

#[derive(Debug, thiserror::Error)]
pub enum StopError {
    #[error("a task of the router panicked: {0}")]
    Task(#[from] JoinError),
    #[error(transparent)]
    Membership(#[from] MembershipError),
}

/// A running router. Dropping it without [`RunningRouter::shutdown`] stops it without draining.
pub struct RunningRouter {
    /// Address of the HTTP listener.
    pub http: SocketAddr,
    /// Address of the gRPC listener.
    pub grpc: SocketAddr,
    /// Address of the operator's API.
    pub admin: SocketAddr,
    front: Arc<Front>,
    draining: CancellationToken,
    stop: DropGuard,
    http_task: JoinHandle<()>,
    grpc_task: JoinHandle<()>,
    admin_task: JoinHandle<()>,
    health: OwnedTask,
    watch: OwnedTask,
    weights: OwnedTask,
    reload: ReloadTask,
    membership: Membership,
    metrics: Metrics,
}

/// Binds all ports and starts to serve these models. The first model is the default. Must run
/// inside a tokio runtime.
pub fn start(
    settings: RouterSettings,
    models: Vec<ModelSource>,
    membership: Membership,
    metrics: Metrics,
) -> Result<RunningRouter, RouterStartError> {
    let listen = |setting, address| {
        net::bind(address)
            .and_then(|listener| Ok((listener.local_addr()?, listener)))
            .map_err(|reason| RouterStartError::Listen { setting, address, reason })
    };
    let (http_address, http_listener) = listen("router.http", settings.router.http)?;
    let (grpc_address, grpc_listener) = listen("router.grpc", settings.router.grpc)?;
    let (admin_address, admin_listener) = listen("router.admin", settings.router.admin)?;

    let StartedFront { front, watch, admin_keys, tls, reloaded } =
        start_front(settings, models, &membership, &metrics)?;
    let (draining, stop) = (CancellationToken::new(), CancellationToken::new());
    let (health, health_service) = grpc::serve_health(front.clone());
    let started = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
    let http_routes = http::routes(front.clone(), metrics.clone(), started);
    let grpc_routes = grpc::routes(front.clone(), health_service)?;
    // Weight updates may take as long to stop as the in-flight requests may take to end.
    let weights_stop_max = front.settings.router.drain_max() + CUT_MAX;
    let models = front.models.all().iter();
    let weight_metrics =
        models.map(|model| (model.name.clone(), WeightMetrics::new(&metrics, &model.name)));
    let (weights, weights_task) =
        WeightUpdates::start(front.nodes.clone(), weights_stop_max, weight_metrics.collect());
    let is_loopback = admin_address.ip().is_loopback();
    let needs_operator = admin_keys.is_some();
    let admin_routes = admin::routes(front.clone(), weights, admin_keys, is_loopback);
    let limits = |slots| {
        net::PortLimits::new(
            slots,
            front.settings.request_read_max,
            front.settings.router.slow_client_timeout,
            front.settings.router.connection_age_max,
        )
    };
    let client_limits =
        limits(net::client_slots(front.settings.open_files_max, front.keys.is_some()));
    let shutdown = net::Shutdown {
        leaving: front.leaving.clone(),
        draining: draining.clone(),
        stop: stop.clone(),
    };
    let serve = |listener, port| tokio::spawn(net::serve(listener, port, shutdown.clone()));
    let http_port = net::Port {
        protocol: Protocol::Http,
        tls: tls.clone(),
        routes: http_routes,
        limits: client_limits,
        reserve_is_for_operators: false,
    };
    let grpc_port =
        net::Port { protocol: Protocol::Grpc, tls: tls.clone(), routes: grpc_routes, ..http_port };
    let admin_port = net::Port {
        protocol: Protocol::Http,
        // The keys of operators must not cross a network unencrypted.
        tls: tls.filter(|_| !is_loopback),
        routes: admin_routes,
        limits: limits(net::operator_slots(needs_operator)),
        reserve_is_for_operators: needs_operator,
    };
    Ok(RunningRouter {
        http: http_address,
        grpc: grpc_address,
        admin: admin_address,
        http_task: serve(http_listener, http_port),
        grpc_task: serve(grpc_listener, grpc_port),
        admin_task: serve(admin_listener, admin_port),
        front,
        draining,
        stop: stop.drop_guard(),
        health,
        watch,
        weights: weights_task,
        reload: ReloadTask::start(reloaded),
        membership,
        metrics,
    })
}

/// The state that all requests share, and values that only the ports and background tasks need.
struct StartedFront {
    front: Arc<Front>,
    watch: OwnedTask,
    admin_keys: Option<Arc<ApiKeys>>,
    tls: Option<Arc<net::Tls>>,
    /// Values that are read again when their files change.
    reloaded: Vec<Arc<dyn Reload>>,
}

/// Reads keys and certificates, and starts watching the nodes.
fn start_front(
    settings: RouterSettings,
    models: Vec<ModelSource>,
    membership: &Membership,
    metrics: &Metrics,
) -> Result<StartedFront, RouterStartError> {
    let mut models = models.into_iter();
    let first = models.next().ok_or(RouterStartError::NoModel)?;
    metrics.set_draining(false);
    if let Some(backend) = membership.backend() {
        let backend = backend.clone();
        metrics.observe_membership(backend.name, move || backend.is_connected());
    }
    let router_metrics = RouterMetrics::new(metrics, &first.name);
    let models = Models::new(first, models.collect(), &settings.router, &router_metrics);
    let [keys, admin_keys] = read_keys(&settings.router, &models, metrics)?;
    let tls = read_tls(&settings.router)?;
    let mut reloaded: Vec<Arc<dyn Reload>> =
        [&keys, &admin_keys].into_iter().flatten().map(|it| it.reload()).collect();
    if let Some(tls) = &tls {
        reloaded.push(tls.clone());
    }
    if let Some(tls) = &settings.nodes.tls {
        reloaded.push(tls.clone());
    }
    let served = models.all().iter().map(|model| Served {
        model: model.name.clone(),
        vocabulary_size: model.text.tokenizer().vocabulary_size(),
    });
    let config::Router { disaggregate, roles, policy, .. } = settings.router;
    let credentials = settings.nodes.clone();
    let selection = Selection { disaggregate, roles, policy };
    // With random seeds, several routers probe a lost node at different times.
    let seed = random_bits()? as u64;
    let limits = RouterLimits::from(&settings.router);
    let router = SharedRouter::new(RouterCore::new(seed, selection, limits));
    let (nodes, watch) =
        Nodes::watch(membership, served.collect(), router.clone(), router_metrics, credentials);
    let front = Arc::new(Front::new(settings, models, router, nodes, keys));
    Ok(StartedFront { front, watch, admin_keys, tls, reloaded })
}

/// Reads the certificate and the key with which the ports speak TLS.
fn read_tls(settings: &config::Router) -> Result<Option<Arc<net::Tls>>, RouterStartError> {
    let (Some(cert), Some(key)) = (&settings.tls_cert, &settings.tls_key) else { return Ok(None) };
    net::read_tls(cert, key).map(|tls| Some(Arc::new(tls))).map_err(RouterStartError::File)
}

/// Reads the API keys of clients and of operators; `None` where no file is set, so that no key is
/// needed.
fn read_keys(
    settings: &config::Router,
    models: &Models,
    metrics: &Metrics,
) -> Result<[Option<Arc<ApiKeys>>; 2], RouterStartError> {
    let files = [
        (&settings.keys, Purpose::Clients(models.model_names())),
        (&settings.admin_keys, Purpose::Operators),
    ];
    if files.iter().all(|(path, _)| path.is_none()) {
        return Ok([None, None]);
    }
    let metrics = ApiKeyMetrics::new(metrics);
    let read = |(path, purpose): (&Option<PathBuf>, Purpose)| match path {
        Some(path) => {
            ApiKeys::read(path, purpose, metrics.clone()).map(|keys| Some(Arc::new(keys)))
        }
        None => Ok(None),
    };
    let [clients, operators] = files.map(read);
    Ok([clients.map_err(RouterStartError::File)?, operators.map_err(RouterStartError::File)?])
}

impl RunningRouter {
    /// Serves `/live` and `/ready`.
    pub fn probes(&self) -> axum::Router {
        http::probes(self.front.clone())
    }

    /// First step of a graceful shutdown: the router leaves, but still accepts requests. For
    /// `delay` it stays ready, because its successor may not serve yet. For another `delay` it is
    /// unready, so that load balancers probe it and stop sending requests. Returns early when the
    /// token of [`Self::cut`] is cancelled.
    pub async fn leave(&self, delay: Duration) {
        self.front.leaving.cancel();
        self.metrics.set_draining(true);
        tracing::info!(
            ?delay,
            "shutting down: ready for `delay`, then unready and accepting requests for `delay`"
        );
        let is_cut = async || tokio::time::timeout(delay, self.front.cut.cancelled()).await.is_ok();
        if is_cut().await {
            return;
        }
        self.front.unready.cancel();
        is_cut().await;
    }

    /// Drains and stops. The router rejects requests on new connections at once. In-flight requests
    /// may finish within the drain time-out; then the router cancels them with a typed error. On an
    /// HTTP/1.1 connection whose last response began before the router left, the router still
    /// accepts one request, and closes the connection after its response. Returns when every task
    /// has ended.
    pub async fn shutdown(self) -> Result<(), StopError> {
        self.front.leaving.cancel();
        self.front.unready.cancel();
        let router = &self.front.router;
        let drain_timeout = self.front.settings.router.drain_max();
        let in_flight = router.in_flight();
        self.draining.cancel();
        tracing::info!(in_flight, "draining");
        let idle_min = if in_flight > 0 { NEXT_REQUEST_MAX } else { Duration::ZERO };
        let drain = drain(router, &self.front.cut, drain_timeout, idle_min);
        // Both at once: a node that changes its weights in place serves in-flight requests only
        // after the update has ended.
        let ((), weights) = tokio::join!(drain, self.weights.shutdown());
        drop(self.stop);
        self.http_task.await?;
        self.grpc_task.await?;
        self.admin_task.await?;
        self.health.shutdown().await?;
        weights?;
        self.watch.shutdown().await?;
        self.reload.shutdown().await?;
        self.membership.shutdown(MEMBERSHIP_MAX).await?;
        Ok(())
    }

    /// Returns a token. Cancelling the token ends all in-flight requests at once, without waiting
    /// for the drain time-out.
    pub fn cut(&self) -> CancellationToken {
        self.front.cut.clone()
    }
}

/// Waits until no request has been in flight for `idle_min`. Cancels the requests that are still in
/// flight after the drain time-out.
async fn drain(
    router: &SharedRouter,
    cut: &CancellationToken,
    drain_timeout: Duration,
    idle_min: Duration,
) {
    let drained = tokio::time::timeout(drain_timeout, router.idle_for(idle_min)).await;
    if drained.is_err() && router.in_flight() > 0 {
        tracing::warn!(
            in_flight = router.in_flight(),
            after = ?drain_timeout,
            "cancelling requests that are still in flight after the drain time-out"
        );
        cut.cancel();
    }
    router.with(RouterCore::close);
    // Requests that do not end in time are dropped with their connections.
    let _ = tokio::time::timeout(CUT_MAX, router.idle_for(Duration::ZERO)).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use router_core::{Flow, FlowName};

    use crate::shared_router::tests::router;

    #[tokio::test]
    async fn requests_end_at_the_drain_timeout_while_an_update_waits_for_its_nodes() {
        let (router, cut) = (router(1), CancellationToken::new());
        let request = router.admit_work(&Flow::new(FlowName::Shared)).unwrap();
        let drain = drain(&router, &cut, Duration::from_millis(1), Duration::ZERO);
        // This update ends only after the request was cancelled.
        let update = async {
            cut.cancelled().await;
            drop(request);
        };
        let stopped = async { tokio::join!(drain, update) };
        let stopped = tokio::time::timeout(Duration::from_secs(60), stopped).await;
        assert!(stopped.is_ok(), "the router waits for the update before it ends requests");
        assert_eq!(router.in_flight(), 0);
    }
}
