//! Accepts client connections and serves each until it closes.

use std::{convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, body::Body};
use http::{HeaderValue, Request, Response, StatusCode, Version, header};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use listener::{
    AdmissionVerdict, ClientStream, ConnectionClose, ConnectionSlot, HANDSHAKE_MAX, PortListener,
    SlotLimits, handshake,
};
use proto::TimedBody;
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::{either::Either, sync::CancellationToken};
use tower::ServiceExt;

use super::{
    connection::{ClientConnection, ConnectionState, CountedBody, RequestCount, TimeLimits},
    request_body::RequestBody,
    tls::{PLAIN_HTTP, Tls},
};
use crate::{request::error::RETRY_AFTER_S, wake::when_woken};

/// Length of the kernel's accept queue, which `net.core.somaxconn` also limits (4,096 by default).
/// When the queue is full, a client retries after a second.
const BACKLOG: u32 = 4096;
/// `SO_SNDBUF` of a connection, which Linux doubles. A client that does not read is detected only
/// when this buffer is full, and the default buffer grows to megabytes. 64 KiB in flight are 640
/// KB/s over a distance of 100 ms, several hundred tokens of a stream per second.
const SEND_BUFFER_BYTES: u32 = 32 << 10;
/// Bytes of an HTTP/2 stream that wait for the client's flow-control window. The router counts them
/// as read, so a resumed stream may ask for them again: they and the socket's buffer must be fewer
/// than the bytes that the log of a resumable stream keeps.
const STREAM_BUFFER_BYTES: usize = 32 << 10;
/// Time-out of a request head, from connecting or from the first byte of a later head.
const HEAD_MAX: Duration = Duration::from_secs(10);
/// Maximum size of an HTTP/1.1 request head, and of the buffer for it.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Time-out of a request head on a reserved connection, and of the response to a client that has
/// not authenticated.
const RESERVED_MAX: Duration = Duration::from_secs(2);
/// Time-out of an idle HTTP/1.1 or HTTP/2 connection. Pings do not count as activity.
const IDLE_MAX: Duration = Duration::from_secs(75);
/// Maximum number of concurrent HTTP/2 requests per connection.
const STREAMS_MAX: u32 = 256;
/// Number of write time-outs without progress on any HTTP/2 stream after which the router closes
/// the connection. After the first time-out a stream ends with an error. During the second one the
/// client can still read the error.
const STALLED_WRITES: u32 = 2;
const PING_INTERVAL: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum idle time of a connection that closes gracefully. Afterwards the router drops the
/// connection.
const LEAVE_MAX: Duration = Duration::from_secs(2);
/// Maximum idle time of a closing connection whose slot another connection took.
const CLOSE_MAX: Duration = Duration::from_millis(100);
/// Maximum deviation of a connection's age limit from the configured one, as a fraction of the
/// configured one.
const AGE_JITTER: f64 = 0.1;
const CLOSE: HeaderValue = HeaderValue::from_static("close");

/// Protocol of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// HTTP/1.1, or HTTP/2 if the client sends its preface.
    Http,
    /// HTTP/2 only.
    Grpc,
}

/// A port that the router serves.
pub(crate) struct Port {
    pub protocol: Protocol,
    pub tls: Option<Arc<Tls>>,
    pub routes: Router,
    pub limits: PortLimits,
    /// Whether the reserve is for operators with a key, not for probes.
    pub reserve_is_for_operators: bool,
}

/// Limits on the clients of a port.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortLimits {
    slots: SlotLimits,
    /// Maximum time of a request, from its head to its last byte.
    read_max: Duration,
    /// Maximum time of a write to a client that does not read.
    write_max: Duration,
    head_max: Duration,
    /// Maximum idle time.
    idle_max: Duration,
    /// Maximum age of a connection, give or take [`AGE_JITTER`].
    age_max: Duration,
}

impl PortLimits {
    pub(crate) fn new(
        slots: SlotLimits,
        read_max: Duration,
        write_max: Duration,
        age_max: Duration,
    ) -> Self {
        let (head_max, idle_max) = (HEAD_MAX, IDLE_MAX);
        Self { slots, read_max, write_max, head_max, idle_max, age_max }
    }
}

/// The steps of a graceful shutdown, each cancelled when it begins.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shutdown {
    /// The router still serves requests, and asks clients to reconnect elsewhere.
    pub leaving: CancellationToken,
    /// Requests on new connections are rejected.
    pub draining: CancellationToken,
    /// No request is in flight, or the last ones are dropped.
    pub stop: CancellationToken,
}

/// Binds a listener with a small send buffer, so that slow clients are detected.
pub(crate) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    // Accepted connections inherit the buffer size.
    socket.set_send_buffer_size(SEND_BUFFER_BYTES)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves until [`Shutdown::stop`], then closes every connection gracefully and drops the rest
/// after [`LEAVE_MAX`].
pub(crate) async fn serve(socket: TcpListener, port: Port, shutdown: Shutdown) {
    let listener = PortListener::new(socket, port.limits.slots);
    let port = Arc::new(port);
    let mut connections = JoinSet::new();
    loop {
        let (stream, slot) = tokio::select! {
            () = shutdown.stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        connections.spawn(serve_client(stream, slot, port.clone(), shutdown.clone()));
        while connections.try_join_next().is_some() {}
    }
    drop(listener);
    let left = async { while connections.join_next().await.is_some() {} };
    if timeout(LEAVE_MAX, left).await.is_err() {
        connections.shutdown().await;
    }
}

/// Serves a connection from its TLS handshake until it closes.
async fn serve_client(
    stream: TcpStream,
    slot: ConnectionSlot,
    port: Arc<Port>,
    shutdown: Shutdown,
) {
    let opening_max = if slot.is_reserved() { RESERVED_MAX } else { port.limits.head_max };
    let ages_at = Instant::now() + jittered(port.limits.age_max, slot.id());
    let requests = RequestCount::new(slot);
    let stream = tokio::select! {
        () = shutdown.stop.cancelled() => return,
        _ = requests.slot().closing() => return,
        stream = port.open(stream, opening_max) => stream,
    };
    let Some(stream) = stream else { return };
    let client = ConnectedClient::new(port, shutdown, requests, ages_at);
    let io = client.connection(stream, opening_max);
    let (builder, serving) = (client.port.http(), client.clone());
    let service = service_fn(move |request| serving.clone().respond(request));
    let connection = builder.serve_connection(TokioIo::new(io), service);
    tokio::pin!(connection);
    let stalled = when_woken(client.stalled());
    tokio::pin!(stalled);
    let end = tokio::select! {
        biased;
        // An error concerns only this client.
        _ = connection.as_mut() => return,
        () = stalled.as_mut() => return,
        end = when_woken(client.end()) => end,
    };
    let Some(idle_max) = end.idle_max() else { return };
    connection.as_mut().graceful_shutdown();
    tokio::select! {
        _ = connection => {}
        () = stalled => {}
        () = client.idle_for(idle_max) => {}
        () = client.used_reserve(), if end == ConnectionEnd::Displaced => {}
    }
}

impl Port {
    /// Performs the TLS handshake, if the port speaks TLS.
    async fn open(&self, stream: TcpStream, opening_max: Duration) -> Option<ClientStream> {
        let Some(tls) = &self.tls else { return Some(Either::Left(stream)) };
        handshake(tls.current(), stream, opening_max.min(HANDSHAKE_MAX), PLAIN_HTTP).await
    }

    fn http(&self) -> auto::Builder<TokioExecutor> {
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.idle_max)
            .max_buf_size(HEAD_BYTES_MAX);
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(STREAMS_MAX)
            .max_send_buf_size(STREAM_BUFFER_BYTES)
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT);
        match self.protocol {
            Protocol::Http => builder,
            Protocol::Grpc => builder.http2_only(),
        }
    }
}

/// Reason why a connection closes while its client is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionEnd {
    /// The router leaves, or the connection is old or idle.
    Leaving,
    /// Another connection took its slot, or the connection has used the reserve.
    Displaced,
    /// Another connection took the slot of a client that has not authenticated.
    Cut,
}

impl ConnectionEnd {
    /// Returns the maximum idle time until the connection is dropped; `None` if it is dropped at
    /// once.
    fn idle_max(self) -> Option<Duration> {
        match self {
            Self::Leaving => Some(LEAVE_MAX),
            Self::Displaced => Some(CLOSE_MAX),
            Self::Cut => None,
        }
    }
}

/// A client after its TLS handshake.
#[derive(Clone)]
struct ConnectedClient {
    port: Arc<Port>,
    shutdown: Shutdown,
    requests: Arc<RequestCount>,
    state: ConnectionState,
    ages_at: Instant,
    /// The client connected while the router left.
    opened_late: bool,
}

impl ConnectedClient {
    fn new(
        port: Arc<Port>,
        shutdown: Shutdown,
        requests: Arc<RequestCount>,
        ages_at: Instant,
    ) -> Self {
        let is_late = shutdown.draining.is_cancelled();
        let state = ConnectionState::new(is_late, requests.slot().handle());
        let opened_late = shutdown.leaving.is_cancelled();
        Self { port, shutdown, requests, state, ages_at, opened_late }
    }

    /// Returns the client's connection with its deadlines.
    fn connection(&self, stream: ClientStream, opening_max: Duration) -> ClientConnection {
        let PortLimits { head_max, write_max, .. } = self.port.limits;
        let limits = TimeLimits { opening_max, head_max, write_max };
        ClientConnection::new(stream, limits, self.state.clone(), self.requests.clone())
    }

    /// Returns the response to a request.
    async fn respond(
        self,
        mut request: Request<Incoming>,
    ) -> Result<Response<CountedBody>, Infallible> {
        let may_use_reserve = self.port.reserve_is_for_operators || is_probe(request.uri().path());
        let (in_progress, verdict) = self.requests.begin(may_use_reserve);
        let is_http1 = request.version() < Version::HTTP_2;
        request.extensions_mut().insert(self.state.clone());
        let mut response = match verdict {
            AdmissionVerdict::Refuse => too_many_connections(),
            AdmissionVerdict::Serve => {
                let request = match self.port.protocol {
                    // HTTP handlers have deadlines of their own.
                    Protocol::Http => {
                        RequestBody::wrap(request, self.requests.discards()).map(Body::new)
                    }
                    Protocol::Grpc => request
                        .map(|body| Body::new(TimedBody::new(body, self.port.limits.read_max))),
                };
                let response = self.port.routes.clone().oneshot(request).await;
                response.unwrap_or_else(|never| match never {})
            }
        };
        let closes = self.shutdown.leaving.is_cancelled() || Instant::now() >= self.ages_at;
        if is_http1 && closes {
            response.headers_mut().insert(header::CONNECTION, CLOSE);
        }
        Ok(response.map(|body| CountedBody::new(body, in_progress)))
    }

    /// Waits until the connection must close.
    async fn end(&self) -> ConnectionEnd {
        tokio::select! {
            () = self.shutdown.stop.cancelled() => ConnectionEnd::Leaving,
            () = self.goes_away() => ConnectionEnd::Leaving,
            () = self.requests.idle_for(self.port.limits.idle_max) => ConnectionEnd::Leaving,
            closing = self.requests.slot().closing() => match closing {
                ConnectionClose::Gracefully => ConnectionEnd::Displaced,
                ConnectionClose::AtOnce => ConnectionEnd::Cut,
            },
        }
    }

    /// Waits until the client should connect elsewhere.
    async fn goes_away(&self) {
        tokio::select! {
            () = sleep_until(self.ages_at) => {}
            () = self.shutdown.leaving.cancelled(), if !self.opened_late => {}
            // A client that connects during the drain has a first request on its way, such as a
            // probe.
            () = self.shutdown.draining.cancelled(), if !self.state.is_late => {}
        }
        // Closing an idle HTTP/1.1 connection could lose a request that is on its way, which GOAWAY
        // cannot.
        if !self.requests.is_http2() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits until the client has read nothing for too long, and records this.
    async fn stalled(&self) {
        let stall_max = self.port.limits.write_max.saturating_mul(STALLED_WRITES);
        self.requests.stalled_for(stall_max).await;
        self.state.set_unread();
    }

    /// Waits until a closing connection has been idle for this time.
    async fn idle_for(&self, idle_max: Duration) {
        self.requests.idle().await;
        // A client that has sent no complete request head expects no response. With HTTP/2, the
        // head may be on its way.
        if self.requests.begun() > 0 || self.requests.is_http2() {
            sleep(idle_max).await;
        }
    }

    /// Waits for the time in which a client that has not authenticated may use the reserve.
    async fn used_reserve(&self) {
        sleep(RESERVED_MAX).await;
        if self.requests.slot().is_authenticated() {
            std::future::pending::<()>().await;
        }
    }
}

/// Returns an age within [`AGE_JITTER`] of `age_max`, so that connections opened together do not
/// end together. The golden ratio spreads consecutive ids evenly.
fn jittered(age_max: Duration, id: u64) -> Duration {
    let fraction = (id as f64 * 0.618_033_988_749_895).fract();
    age_max.mul_f64(1.0 - AGE_JITTER + 2.0 * AGE_JITTER * fraction)
}

/// Returns whether a request asks for the state of the router, over HTTP or gRPC.
fn is_probe(path: &str) -> bool {
    matches!(
        path,
        "/live" | "/ready" | "/health" | "/ping" | "/metrics" | "/grpc.health.v1.Health/Check"
    )
}

/// Rejects a request before routing. A gRPC client reads the status as UNAVAILABLE.
fn too_many_connections() -> Response<Body> {
    let error = serde_json::json!({"error": {
        "message": "the router has too many connections",
        "type": "server_error",
        "param": null,
        "code": "overloaded",
    }});
    Response::builder()
        .status(StatusCode::SERVICE_UNAVAILABLE)
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::RETRY_AFTER, RETRY_AFTER_S)
        .body(Body::from(error.to_string()))
        .expect("the response is constant and valid")
}

#[cfg(test)]
mod tests {
    use axum::{body::Bytes, routing::get};
    use http_body_util::Empty;
    use hyper_util::{
        client::legacy::{Client, connect::HttpConnector},
        rt::TokioExecutor,
    };
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        sync::Notify,
    };

    use super::*;

    /// Time-out of a connection's start, generous for a busy machine.
    const SHORT: Duration = Duration::from_secs(1);
    const LONG: Duration = Duration::from_secs(60);
    const DEADLINE: Duration = Duration::from_secs(20);

    /// Starts a port with one ordinary connection.
    fn port(protocol: Protocol, head_max: Duration, idle_max: Duration) -> TestPort {
        port_of(protocol, head_max, idle_max, 100 * LONG, 1)
    }

    fn port_of(
        protocol: Protocol,
        head_max: Duration,
        idle_max: Duration,
        age_max: Duration,
        ordinary_max: usize,
    ) -> TestPort {
        port_with(None, protocol, head_max, idle_max, age_max, ordinary_max)
    }

    fn port_with(
        tls: Option<Arc<Tls>>,
        protocol: Protocol,
        head_max: Duration,
        idle_max: Duration,
        age_max: Duration,
        ordinary_max: usize,
    ) -> TestPort {
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let (arrived, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (tell, wait) = (arrived.clone(), go_on.clone());
        let slow = async move || {
            tell.notify_one();
            wait.notified().await;
            "late"
        };
        let routes = Router::new().route("/", get(async || "here")).route("/slow", get(slow));
        let routes = routes.route("/live", get(async || "live"));
        let (reserved_max, closing_max, authenticates) = (1, 1, false);
        let slots = SlotLimits { ordinary_max, reserved_max, closing_max, authenticates };
        let limits =
            PortLimits { head_max, idle_max, ..PortLimits::new(slots, LONG, LONG, age_max) };
        let shutdown = Shutdown::default();
        let port = Port { protocol, tls, routes, limits, reserve_is_for_operators: false };
        let task = tokio::spawn(serve(listener, port, shutdown.clone()));
        TestPort { address, shutdown, task, arrived, go_on }
    }

    struct TestPort {
        address: SocketAddr,
        shutdown: Shutdown,
        task: tokio::task::JoinHandle<()>,
        /// The slow request has arrived.
        arrived: Arc<Notify>,
        /// Lets the slow request finish.
        go_on: Arc<Notify>,
    }

    impl TestPort {
        async fn connect(&self) -> TcpStream {
            TcpStream::connect(self.address).await.unwrap()
        }

        /// Returns the status of a GET over a new connection.
        async fn get(&self, client: &Client<HttpConnector, Empty<Bytes>>, path: &str) -> u16 {
            let url = format!("http://{}{path}", self.address).parse().unwrap();
            let answer = tokio::time::timeout(DEADLINE, client.get(url)).await.unwrap().unwrap();
            answer.status().as_u16()
        }

        async fn end(self) {
            self.shutdown.stop.cancel();
            self.task.await.unwrap();
        }
    }

    /// With tokio's default backlog of 1,024, further clients would retry after a second.
    #[tokio::test]
    async fn burst_of_connections_waits_in_the_accept_queue() {
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let kernel_max = std::fs::read_to_string("/proc/sys/net/core/somaxconn");
        let kernel_max = kernel_max.ok().and_then(|text| text.trim().parse().ok());
        let burst = 1500.min(kernel_max.unwrap_or(1500));
        for number in 0..burst {
            // The kernel keeps the closed connection in its queue.
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
    async fn an_incomplete_request_head_is_closed_after_its_time_limit() {
        for protocol in [Protocol::Http, Protocol::Grpc] {
            for half in ["", "P", "PRI", "PRI * HTTP/2.0\r\n", "GET / HT"] {
                let port = port(protocol, SHORT, LONG);
                let mut stuck = port.connect().await;
                stuck.write_all(half.as_bytes()).await.unwrap();
                closed(&mut stuck).await;
                assert_eq!(port.get(&client(), "/").await, 200, "{protocol:?} {half:?}");
                port.end().await;
            }
        }
    }

    #[tokio::test]
    async fn an_incomplete_handshake_is_closed_after_its_time_limit_and_gives_its_slot_away() {
        let folder = tempfile::tempdir().unwrap();
        let [cert, key] = ["tls.crt", "tls.key"].map(|name| folder.path().join(name));
        let pair = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        std::fs::write(&cert, pair.cert.pem()).unwrap();
        std::fs::write(&key, pair.signing_key.serialize_pem()).unwrap();
        let tls = Arc::new(super::super::read_tls(&cert, &key).unwrap());
        for half in [&[][..], &[22], &[22, 3, 1, 0, 200, 1]] {
            let port = port_with(Some(tls.clone()), Protocol::Http, SHORT, LONG, 100 * LONG, 1);
            let mut stuck = port.connect().await;
            stuck.write_all(half).await.unwrap();
            closed(&mut stuck).await;
            port.end().await;
            // One ordinary connection: the next client takes its slot.
            let port = port_with(Some(tls.clone()), Protocol::Http, LONG, LONG, 100 * LONG, 1);
            let mut stuck = port.connect().await;
            stuck.write_all(half).await.unwrap();
            let _next = port.connect().await;
            closed(&mut stuck).await;
            port.end().await;
        }
    }

    #[tokio::test]
    async fn a_new_connection_closes_an_idle_one_at_the_cap() {
        for protocol in [Protocol::Http, Protocol::Grpc] {
            let port = port(protocol, LONG, LONG);
            let idle = client();
            assert_eq!(port.get(&idle, "/").await, 200);
            for half in ["", "PRI", "GET / HT"] {
                let mut stuck = port.connect().await;
                stuck.write_all(half.as_bytes()).await.unwrap();
                assert_eq!(port.get(&client(), "/").await, 200, "{protocol:?} {half:?}");
                closed(&mut stuck).await;
            }
            // The client of the closed connection opens another one.
            assert_eq!(port.get(&idle, "/").await, 200);
            port.end().await;
        }
    }

    #[tokio::test]
    async fn only_probes_are_served_while_every_connection_is_busy() {
        for protocol in [Protocol::Http, Protocol::Grpc] {
            let port = port(protocol, LONG, LONG);
            let (busy, other) = (client(), client());
            let probes = async {
                // The slow request is in progress before this connection opens.
                port.arrived.notified().await;
                for _ in 0..3 {
                    assert_eq!(port.get(&client(), "/live").await, 200);
                    let mut silent = port.connect().await;
                    silent.write_all(b"P").await.unwrap();
                    assert_eq!(port.get(&client(), "/live").await, 200);
                    assert_eq!(port.get(&other, "/").await, 503);
                    closed(&mut silent).await;
                }
                port.go_on.notify_one();
            };
            let (slow, ()) = tokio::join!(port.get(&busy, "/slow"), probes);
            assert_eq!(slow, 200, "a busy connection is never closed for another one");
            assert_eq!(port.get(&other, "/").await, 200);
            port.end().await;
        }
    }

    #[tokio::test]
    async fn an_http_2_connection_without_requests_is_closed() {
        for protocol in [Protocol::Http, Protocol::Grpc] {
            let port = port(protocol, LONG, SHORT);
            let mut raw = port.connect().await;
            raw.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
            raw.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
            closed(&mut raw).await;
            port.end().await;
        }
    }

    /// Returns the response to a GET on this connection. The server may close the connection
    /// afterwards.
    async fn ask(stream: &mut TcpStream) -> String {
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut response = Vec::new();
        let read = async {
            while !response.ends_with(b"here") {
                response.push(stream.read_u8().await.expect("the response is complete"));
            }
        };
        tokio::time::timeout(DEADLINE, read).await.expect("the server responds");
        String::from_utf8(response).unwrap()
    }

    /// Returns an open HTTP/2 connection without requests.
    async fn http2(port: &TestPort) -> TcpStream {
        let mut raw = port.connect().await;
        raw.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        raw.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
        raw
    }

    /// Reads frames until the server closes, and returns their types.
    async fn frames(stream: &mut TcpStream) -> Vec<u8> {
        let mut types = Vec::new();
        let mut head = [0; 9];
        while stream.read_exact(&mut head).await.is_ok() {
            types.push(head[3]);
            let bytes = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut payload = vec![0; bytes as usize];
            stream.read_exact(&mut payload).await.unwrap();
        }
        types
    }

    const GOAWAY: u8 = 7;

    #[tokio::test]
    async fn leaving_port_closes_connections_and_keeps_those_opened_later_until_the_drain() {
        let port = port_of(Protocol::Http, LONG, LONG, 100 * LONG, 3);
        let (mut kept, mut raw) = (port.connect().await, http2(&port).await);
        assert!(!ask(&mut kept).await.contains("connection: close"));
        port.shutdown.leaving.cancel();
        assert!(ask(&mut kept).await.contains("connection: close"));
        closed(&mut kept).await;
        let types = tokio::time::timeout(DEADLINE, frames(&mut raw)).await.unwrap();
        assert!(types.contains(&GOAWAY), "{types:?}");
        // A load balancer that is late sends more clients. GOAWAY at once would let them reconnect
        // in a loop.
        let mut opened = http2(&port).await;
        let types = tokio::time::timeout(Duration::from_millis(300), frames(&mut opened)).await;
        assert!(types.is_err(), "{types:?}");
        port.shutdown.draining.cancel();
        let types = tokio::time::timeout(DEADLINE, frames(&mut opened)).await.unwrap();
        assert!(types.contains(&GOAWAY), "{types:?}");
        // Probes come on new connections, which stay open.
        assert_eq!(port.get(&client(), "/live").await, 200);
        let mut late = http2(&port).await;
        let types = tokio::time::timeout(Duration::from_millis(300), frames(&mut late)).await;
        assert!(types.is_err(), "{types:?}");
        port.end().await;
    }

    #[tokio::test]
    async fn connection_beyond_its_maximum_age_is_closed() {
        let port = port_of(Protocol::Http, LONG, LONG, Duration::ZERO, 3);
        let mut old = port.connect().await;
        assert!(ask(&mut old).await.contains("connection: close"));
        closed(&mut old).await;
        port.end().await;
        let port = port_of(Protocol::Grpc, LONG, LONG, SHORT, 3);
        let mut old = http2(&port).await;
        let types = tokio::time::timeout(DEADLINE, frames(&mut old)).await.unwrap();
        assert!(types.contains(&GOAWAY), "{types:?}");
        port.end().await;
    }

    #[test]
    fn ages_of_connections_spread_around_the_maximum() {
        let ages: Vec<f64> = (0..100).map(|id| jittered(LONG, id).as_secs_f64()).collect();
        let around = 0.9 * LONG.as_secs_f64()..=1.1 * LONG.as_secs_f64();
        assert!(ages.iter().all(|age| around.contains(age)), "{ages:?}");
        let mean = ages.iter().sum::<f64>() / 100.0;
        assert!((mean / LONG.as_secs_f64() - 1.0).abs() < 0.01, "{mean}");
        assert!((ages[0] - ages[1]).abs() > 1.0);
    }
}
