//! HTTP server for `/metrics` and probes on a port of its own.

use std::{collections::VecDeque, convert::Infallible, net::SocketAddr, time::Duration};

use axum::{Router, body::Body, http::header, routing::get};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinHandle, JoinSet},
};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{Metrics, TelemetryError};

/// Maximum number of connections, enough for a scraper and a few probes. A further connection closes the oldest, so that
/// silent clients do not delay a probe, which takes milliseconds.
const CONNECTIONS_MAX: usize = 32;
/// Maximum lifetime of a connection, which has one request.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// Running HTTP server of the metrics. Dropping it stops the server without waiting.
pub struct MetricsServer {
    address: SocketAddr,
    stop: DropGuard,
    task: JoinHandle<()>,
}

impl MetricsServer {
    /// Serves `/metrics` and the routes of `extra` (`/live`, `/ready`). Port 0 selects a free port.
    pub async fn start(
        address: SocketAddr,
        metrics: Metrics,
        extra: Router,
    ) -> Result<Self, TelemetryError> {
        let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
        let metrics = get(async move || (kind, metrics.render_prometheus()));
        Self::start_routes(address, extra.route("/metrics", metrics)).await
    }

    /// Serves `routes` alone, for a process without metrics.
    pub async fn start_routes(address: SocketAddr, routes: Router) -> Result<Self, TelemetryError> {
        let failed = |reason| TelemetryError::Listen { address, reason };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let stop = CancellationToken::new();
        let task = tokio::spawn(accept(listener, routes, stop.clone()));
        Ok(Self { address, stop: stop.drop_guard(), task })
    }

    /// Returns the address of the listening socket.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops accepting connections and waits for in-flight requests until `deadline`.
    pub async fn shutdown(mut self, deadline: Duration) -> Result<(), TelemetryError> {
        drop(self.stop);
        match tokio::time::timeout(deadline, &mut self.task).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(TelemetryError::Shutdown { reason: error.to_string() }),
            Err(_) => {
                self.task.abort();
                Err(TelemetryError::ShutdownDeadline { what: "the metrics server", deadline })
            }
        }
    }
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
