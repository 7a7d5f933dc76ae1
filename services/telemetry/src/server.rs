//! HTTP server for `/metrics` and probes on a port and a thread of its own. A flood of requests
//! delays every task of the service, and a probe that takes long would take the service out of the
//! load balancer.

use std::{
    collections::VecDeque, convert::Infallible, io, net::SocketAddr, sync::Arc, thread,
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime,
    sync::{Semaphore, oneshot},
    task::{AbortHandle, JoinSet},
};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{Metrics, TelemetryError};

/// Maximum number of connections, enough for a scraper and a few probes. A further connection
/// closes the oldest, so that silent clients do not delay a probe, which takes milliseconds.
const CONNECTIONS_MAX: usize = 32;
/// Maximum lifetime of a connection, which has one request.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// Name of the server's thread.
const THREAD: &str = "metrics-server";

/// The page `/metrics` of one port.
#[derive(Clone)]
pub struct MetricsPage {
    metrics: Metrics,
    /// Permit to render. A page of 10,000 API keys takes 16 MB.
    permit: Arc<Semaphore>,
}

impl MetricsPage {
    pub fn new(metrics: Metrics) -> Self {
        Self { metrics, permit: Arc::new(Semaphore::new(1)) }
    }

    /// Responds with the series of which `shows` accepts every label, each by name and value.
    /// Renders one page at a time, on a thread for blocking work, because other requests would wait
    /// for a page of many API keys.
    pub async fn respond(&self, shows: impl Fn(&str, &str) -> bool + Send + 'static) -> Response {
        let permit = tokio::time::timeout(CONNECTION_TIMEOUT, self.permit.clone().acquire_owned());
        let Ok(Ok(permit)) = permit.await else {
            return StatusCode::SERVICE_UNAVAILABLE.into_response();
        };
        let metrics = self.metrics.clone();
        let rendered = tokio::task::spawn_blocking(move || {
            let text = metrics.render_prometheus_of(shows);
            drop(permit);
            text
        });
        let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
        match rendered.await {
            Ok(text) => (kind, text).into_response(),
            Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }
}

/// Running HTTP server of the metrics. Dropping it stops the server without waiting.
pub struct MetricsServer {
    address: SocketAddr,
    stop: DropGuard,
    thread: thread::JoinHandle<()>,
    /// Completes when the thread is about to end.
    ended: oneshot::Receiver<()>,
}

impl MetricsServer {
    /// Serves `/metrics` and the routes of `extra` (`/live`, `/ready`). Port 0 selects a free port.
    pub async fn start(
        address: SocketAddr,
        metrics: Metrics,
        extra: Router,
    ) -> Result<Self, TelemetryError> {
        let page = MetricsPage::new(metrics);
        let page = get(async move || page.respond(|_, _| true).await);
        Self::start_routes(address, extra.route("/metrics", page)).await
    }

    /// Serves `routes` alone, for a process without metrics.
    pub async fn start_routes(address: SocketAddr, routes: Router) -> Result<Self, TelemetryError> {
        let failed = |reason| TelemetryError::Listen { address, reason };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let listener = listener.into_std().map_err(failed)?;
        let stop = CancellationToken::new();
        let (thread, ended) = start_thread(listener, routes, stop.clone()).map_err(failed)?;
        Ok(Self { address, stop: stop.drop_guard(), thread, ended })
    }

    /// Returns the address of the listening socket.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops accepting connections and waits for in-flight requests until `deadline`.
    pub async fn shutdown(self, deadline: Duration) -> Result<(), TelemetryError> {
        drop(self.stop);
        if tokio::time::timeout(deadline, self.ended).await.is_err() {
            return Err(TelemetryError::ShutdownDeadline { what: "the metrics server", deadline });
        }
        let panicked =
            |_| TelemetryError::Shutdown { reason: "the metrics server panicked".into() };
        self.thread.join().map_err(panicked)
    }
}

/// Starts the thread that accepts connections until `stop`.
fn start_thread(
    listener: std::net::TcpListener,
    routes: Router,
    stop: CancellationToken,
) -> io::Result<(thread::JoinHandle<()>, oneshot::Receiver<()>)> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    let listener = {
        let _in_runtime = runtime.enter();
        TcpListener::from_std(listener)?
    };
    let (is_ending, ended) = oneshot::channel::<()>();
    let serve = move || {
        // Dropped at the end, also by a panic.
        let _is_ending = is_ending;
        runtime.block_on(accept(listener, routes, stop));
    };
    Ok((thread::Builder::new().name(THREAD.to_owned()).spawn(serve)?, ended))
}

async fn accept(listener: TcpListener, routes: Router, stop: CancellationToken) {
    let mut connections = JoinSet::new();
    let mut open: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                open.retain(|connection| !connection.is_finished());
                if open.len() == CONNECTIONS_MAX
                    && let Some(oldest) = open.pop_front()
                {
                    oldest.abort();
                }
                open.push_back(connections.spawn(serve(stream, routes.clone())));
            }
            // Most likely out of file descriptors: wait until some are closed.
            Err(error) => {
                tracing::warn!(%error, "the metrics server cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        while connections.try_join_next().is_some() {}
    }
    // Each connection has its own time-out.
    while connections.join_next().await.is_some() {}
}

async fn serve(stream: TcpStream, routes: Router) {
    let service = TowerToHyperService::new(routes);
    let service =
        hyper::service::service_fn(move |request: http::Request<hyper::body::Incoming>| {
            let answer = hyper::service::Service::call(&service, request.map(Body::new));
            async move { Ok::<_, Infallible>(answer.await.unwrap_or_else(|never| match never {})) }
        });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(Duration::from_secs(5))
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    // Errors of a client that disconnects or sends garbage affect no other client.
    let _ = tokio::time::timeout(CONNECTION_TIMEOUT, connection).await;
}
