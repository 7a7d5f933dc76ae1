//! Accepts connections and owns them until each has ended.

use std::{convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, body::Body};
use http::{Request, Response};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use proto::TimedBody;
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::{
    connection::{ClientConnection, ConnectionEnd},
    requests::{Counted, CountedBody, idle_for},
};

/// The kernel's queue of connections not yet accepted. What does not fit waits a second for its next
/// try. The kernel takes no more than `net.core.somaxconn`, which is as much by default.
const BACKLOG: u32 = 4096;
/// What the kernel keeps for a client that does not read, twice. Left alone it grows to megabytes,
/// and a stopped client would be noticed only when they are full.
const SEND_BUFFER_BYTES: u32 = 128 << 10;
/// From connecting to the first byte, or the whole preface where it is one of HTTP/2.
const OPENING_MAX: Duration = Duration::from_secs(10);
/// From the end of one request (or the first byte) to the head of the next.
const HEADER_MAX: Duration = Duration::from_secs(75);
/// Without any request, on HTTP/2 as on HTTP/1.1. Pings do not count: a client that only answers them
/// would keep its connection for ever.
const IDLE_MAX: Duration = HEADER_MAX;
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

/// What clients may take.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// At once.
    pub connections_max: usize,
    /// For one request, from its head to its last byte.
    pub read_max: Duration,
    /// For a client that does not read.
    pub write_max: Duration,
    /// For what a connection begins with.
    opening_max: Duration,
    /// Without a request.
    idle_max: Duration,
}

impl Bounds {
    pub fn new(connections_max: usize, read_max: Duration, write_max: Duration) -> Self {
        let (opening_max, idle_max) = (OPENING_MAX, IDLE_MAX);
        Self { connections_max, read_max, write_max, opening_max, idle_max }
    }
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
    bounds: Bounds,
    stop: CancellationToken,
) {
    let permits = Arc::new(Semaphore::new(bounds.connections_max));
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
                connections.spawn(connection(stream, protocol, routes, bounds, stop, permit));
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
    bounds: Bounds,
    stop: CancellationToken,
    _permit: OwnedSemaphorePermit,
) {
    // A token is one small packet that must not wait for the next.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a client left at once");
        return;
    }
    let requests = watch::Sender::new(0);
    let mut in_work = requests.subscribe();
    let end = ConnectionEnd::default();
    let io = ClientConnection::new(stream, bounds.opening_max, bounds.write_max, end.clone());
    let service = service_fn(move |mut request: Request<Incoming>| {
        let (routes, counted) = (routes.clone(), Counted::new(&requests));
        request.extensions_mut().insert(end.clone());
        async move {
            let request = request.map(|body| match protocol {
                // Its handlers bound the time themselves and answer in their own words.
                Protocol::Http => Body::new(body),
                Protocol::Grpc => Body::new(TimedBody::new(body, bounds.read_max)),
            });
            let answer = routes.oneshot(request).await;
            let answer: Response<Body> = answer.unwrap_or_else(|never| match never {});
            Ok::<_, Infallible>(answer.map(|body| CountedBody { body, _counted: counted }))
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
    let connection = builder.serve_connection(TokioIo::new(io), service);
    let idle = idle_for(&mut in_work, bounds.idle_max);
    tokio::pin!(connection, idle);
    let mut leaving = false;
    loop {
        tokio::select! {
            // A client that breaks off or sends garbage is its own problem.
            _ = connection.as_mut() => return,
            () = stop.cancelled(), if !leaving => {
                leaving = true;
                connection.as_mut().graceful_shutdown();
            }
            () = &mut idle, if !leaving => {
                leaving = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::{body::Bytes, routing::get};
    use http_body_util::Empty;
    use hyper_util::{
        client::legacy::{Client, connect::HttpConnector},
        rt::TokioExecutor,
    };
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Time enough to begin a connection on a busy machine.
    const SHORT: Duration = Duration::from_secs(1);
    const LONG: Duration = Duration::from_secs(60);
    const DEADLINE: Duration = Duration::from_secs(20);

    /// A port with room for one connection, and what ends it.
    fn port(protocol: Protocol, opening_max: Duration, idle_max: Duration) -> Port {
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let routes = Router::new().route("/", get(async || "here")).route(
            "/slow",
            get(async || {
                tokio::time::sleep(SHORT * 2).await;
                "late"
            }),
        );
        let bounds = Bounds { opening_max, idle_max, ..Bounds::new(1, LONG, LONG) };
        let stop = CancellationToken::new();
        let task = tokio::spawn(serve(listener, protocol, routes, bounds, stop.clone()));
        Port { address, stop, task }
    }

    struct Port {
        address: SocketAddr,
        stop: CancellationToken,
        task: tokio::task::JoinHandle<()>,
    }

    impl Port {
        async fn connect(&self) -> TcpStream {
            TcpStream::connect(self.address).await.unwrap()
        }

        /// The status of a GET over a connection of its own, once it is accepted.
        async fn get(&self, client: &Client<HttpConnector, Empty<Bytes>>, path: &str) -> u16 {
            let url = format!("http://{}{path}", self.address).parse().unwrap();
            let answer = tokio::time::timeout(DEADLINE, client.get(url)).await.unwrap().unwrap();
            answer.status().as_u16()
        }

        async fn end(self) {
            self.stop.cancel();
            self.task.await.unwrap();
        }
    }

    /// Tokio's own is 1,024: the next one would wait for a second, and longer each time.
    #[tokio::test]
    async fn a_burst_of_connections_waits_in_the_kernel_until_there_is_time_for_it() {
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let kernel_max = std::fs::read_to_string("/proc/sys/net/core/somaxconn");
        let kernel_max = kernel_max.ok().and_then(|text| text.trim().parse().ok());
        let burst = 1500.min(kernel_max.unwrap_or(1500));
        for number in 0..burst {
            // It is queued although it has left, and takes no descriptor here.
            let connected = tokio::time::timeout(DEADLINE, TcpStream::connect(address)).await;
            let connected = connected.unwrap_or_else(|_| panic!("connection {number} waits"));
            drop(connected.unwrap_or_else(|error| panic!("connection {number}: {error}")));
        }
        listener.accept().await.unwrap();
    }

    fn client() -> Client<HttpConnector, Empty<Bytes>> {
        Client::builder(TokioExecutor::new()).http2_only(true).build(HttpConnector::new())
    }

    /// Reads until the server closes.
    async fn closed(stream: &mut TcpStream) {
        let mut buffer = [0; 1024];
        let read_all =
            async { while stream.read(&mut buffer).await.is_ok_and(|count| count > 0) {} };
        tokio::time::timeout(DEADLINE, read_all).await.expect("the server closes");
    }

    #[tokio::test]
    async fn half_a_preface_holds_no_connection_on_either_port() {
        for protocol in [Protocol::Http, Protocol::Grpc] {
            for half in ["", "P", "PRI", "PRI * HTTP/2.0\r\n"] {
                let port = port(protocol, SHORT, LONG);
                let mut stuck = port.connect().await;
                stuck.write_all(half.as_bytes()).await.unwrap();
                closed(&mut stuck).await;
                // The only place is free again.
                assert_eq!(port.get(&client(), "/").await, 200, "{protocol:?} {half:?}");
                port.end().await;
            }
        }
    }

    #[tokio::test]
    async fn an_http_2_connection_without_requests_is_closed() {
        for protocol in [Protocol::Http, Protocol::Grpc] {
            let port = port(protocol, LONG, SHORT);
            let idle = client();
            assert_eq!(port.get(&idle, "/").await, 200);
            // One that is being answered is not idle.
            assert_eq!(port.get(&idle, "/slow").await, 200);
            // It keeps its connection as long as the server does.
            assert_eq!(port.get(&client(), "/").await, 200);
            drop(idle);
            port.end().await;
        }
    }
}
