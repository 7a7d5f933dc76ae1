//! Accepts connections and owns them until each has ended.

use std::{convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, body::Body};
use http::Request;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::connection::ClientConnection;

/// Each takes some 20 KiB; more wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 4096;
/// The kernel's queue of connections not yet accepted.
const BACKLOG: u32 = 1024;
/// What the kernel keeps for a client that does not read, twice. Left alone it grows to megabytes,
/// and a stopped client would be noticed only when they are full.
const SEND_BUFFER_BYTES: u32 = 128 << 10;
/// From connecting to the first byte.
const FIRST_BYTE_MAX: Duration = Duration::from_secs(10);
/// From the end of one request (or the first byte) to the head of the next.
const HEADER_MAX: Duration = Duration::from_secs(75);
/// HTTP/2 requests at once on one connection.
const STREAMS_MAX: u32 = 256;
const PING_INTERVAL: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// After this long with the order to leave, connections are cut.
const LEAVE_MAX: Duration = Duration::from_secs(2);

/// What is spoken on a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1, or HTTP/2 where the client begins with it.
    Http,
    /// HTTP/2 alone.
    Grpc,
}

/// Binds so that streams notice slow clients.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    // Accepted connections inherit it.
    socket.set_send_buffer_size(SEND_BUFFER_BYTES)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves until `stop`, then lets every connection end. Returns when all are gone.
pub async fn serve(
    listener: TcpListener,
    protocol: Protocol,
    routes: Router,
    write_max: Duration,
    stop: CancellationToken,
) {
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        let permit = tokio::select! {
            () = stop.cancelled() => break,
            permit = permits.clone().acquire_owned() => permit.expect("it is never closed"),
        };
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let (routes, stop) = (routes.clone(), stop.clone());
                connections.spawn(connection(stream, protocol, routes, write_max, stop, permit));
            }
            // Out of descriptors, most likely: give others time to close theirs.
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        while connections.try_join_next().is_some() {}
    }
    drop(listener);
    let left = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(LEAVE_MAX, left).await.is_err() {
        connections.shutdown().await;
    }
}

async fn connection(
    stream: TcpStream,
    protocol: Protocol,
    routes: Router,
    write_max: Duration,
    stop: CancellationToken,
    _permit: OwnedSemaphorePermit,
) {
    // A token is one small packet that must not wait for the next.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a client left at once");
        return;
    }
    let service = service_fn(move |request: Request<Incoming>| {
        let routes = routes.clone();
        async move {
            let answer = routes.oneshot(request.map(Body::new)).await;
            Ok::<_, Infallible>(answer.unwrap_or_else(|never| match never {}))
        }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_MAX);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    if protocol == Protocol::Grpc {
        builder = builder.http2_only();
    }
    let io = TokioIo::new(ClientConnection::new(stream, FIRST_BYTE_MAX, write_max));
    let connection = builder.serve_connection(io, service);
    tokio::pin!(connection);
    let mut leaving = false;
    loop {
        tokio::select! {
            // A client that breaks off or sends garbage is its own problem.
            _ = connection.as_mut() => return,
            () = stop.cancelled(), if !leaving => {
                leaving = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}
