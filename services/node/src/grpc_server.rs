//! Starts and stops the gRPC server of a node.

use std::{io, net::SocketAddr, time::Duration};

use membership::Tls;
use proto::{
    TimedBody,
    v1::{node_server::NodeServer, weights_server::WeightsServer},
};
use tokio::{net::TcpSocket, task::JoinHandle};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{body::Body, transport::Server};
use tonic_health::{ServingStatus, server::HealthReporter};
use tower::util::MapRequestLayer;

use crate::{
    authentication::AuthenticateLayer, connection, service::NodeService, weights::WeightsService,
};

/// Interval of keep-alive pings. A lost router is detected within interval plus time-out; then its
/// requests are cancelled.
const KEEPALIVE_INTERVAL: Duration = Duration::from_millis(500);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(2);
const BACKLOG: u32 = 1024;
/// Time-out for reading a call's message, which has at most a few hundred KiB.
const REQUEST_READ_MAX: Duration = Duration::from_secs(5);
/// Bytes of a call in addition to its tokens and its grammar: sampling, ids, salt.
const MESSAGE_OVERHEAD_BYTES: usize = 64 << 10;
/// Maximum bytes of a token id as a varint.
const TOKEN_BYTES_MAX: usize = 5;
/// Streams of one connection in addition to attempts: observers and health checks.
const OTHER_STREAMS_MAX: u32 = 64;
/// The health check's name for the whole server.
const WHOLE_NODE: &str = "";
/// The health check's name for the service.
const NODE_SERVICE: &str = "baton.v1.Node";

/// Binds an address without listening: connections are refused until the node is ready, and a port
/// in use is reported before the model is loaded.
pub(crate) fn reserve(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A restart must not wait for connections of its predecessor to time out.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

/// The running server.
#[derive(Debug)]
pub(crate) struct GrpcServer {
    health: HealthReporter,
    /// Dropping it stops accepting.
    stop: DropGuard,
    /// `None` once its end was reported.
    task: Option<JoinHandle<Result<(), tonic::transport::Error>>>,
}

impl GrpcServer {
    /// Accepts connections. A connection has at most `attempts_max` attempts of
    /// `sequence_tokens_max` tokens. Health checks return SERVING after [`Self::set_status`].
    pub(crate) async fn start(
        socket: TcpSocket,
        tls: Option<Tls>,
        service: NodeService,
        weights: WeightsService,
        authenticate: AuthenticateLayer,
        attempts_max: u32,
        sequence_tokens_max: u32,
    ) -> io::Result<Self> {
        let incoming = connection::incoming(socket.listen(BACKLOG)?, tls);
        let (health, health_server) = tonic_health::server::health_reporter();
        let message_bytes_max = sequence_tokens_max as usize * TOKEN_BYTES_MAX
            + grammar::limits::WIRE_BYTES_MAX
            + MESSAGE_OVERHEAD_BYTES;
        let node = NodeServer::new(service).max_decoding_message_size(message_bytes_max);
        let stop = CancellationToken::new();
        let stopped = stop.clone().cancelled_owned();
        let timed = MapRequestLayer::new(|request: http::Request<Body>| {
            request.map(|body| Body::new(TimedBody::new(body, REQUEST_READ_MAX)))
        });
        let serve = Server::builder()
            .layer(authenticate)
            .layer(timed)
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .max_concurrent_streams(attempts_max.saturating_add(OTHER_STREAMS_MAX))
            .add_service(health_server)
            .add_service(node)
            .add_service(WeightsServer::new(weights))
            .serve_with_incoming_shutdown(incoming, stopped);
        let task = Some(tokio::spawn(serve));
        let server = Self { health, stop: stop.drop_guard(), task };
        server.set_status(ServingStatus::NotServing).await;
        Ok(server)
    }

    pub(crate) async fn set_status(&self, status: ServingStatus) {
        self.health.set_service_status(WHOLE_NODE, status).await;
        self.health.set_service_status(NODE_SERVICE, status).await;
    }

    /// Waits until the server has ended by itself and returns the reason.
    pub(crate) async fn ended(&mut self) -> String {
        let Some(task) = &mut self.task else { return "it ended before".to_owned() };
        let ended = task.await;
        self.task = None;
        match ended {
            Ok(Ok(())) => "it ended".to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        }
    }

    /// Stops accepting and waits at most `deadline` until every stream has ended, then closes the
    /// open connections. Returns false when connections had to be closed.
    pub(crate) async fn shutdown(self, deadline: Duration) -> bool {
        let Self { health: _, stop, task } = self;
        drop(stop);
        let Some(mut task) = task else { return true };
        if tokio::time::timeout(deadline, &mut task).await.is_ok() {
            return true;
        }
        task.abort();
        // Waits for the abort alone.
        let _ = task.await;
        false
    }
}
