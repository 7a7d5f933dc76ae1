//! A client's TCP connection with the deadlines that hyper leaves to its caller: a request head
//! must arrive soon after its first byte, and a client that does not read loses its connection. The
//! connection counts its requests, from the request head to the last byte of the response.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::body::{Body, Bytes};
use hyper::body::{Frame, SizeHint};
use listener::{AdmissionVerdict, ClientStream, ConnectionSlot, SlotHandle};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::watch,
    time::{Instant, Sleep, sleep, sleep_until},
};

use super::request_body::Discards;

/// The bytes that open an HTTP/2 connection.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// State of a connection, shared with its requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConnectionState {
    /// The router was draining already when it accepted the connection.
    pub is_late: bool,
    unread: Arc<AtomicBool>,
    slot: Option<SlotHandle>,
}

impl ConnectionState {
    pub(crate) fn new(is_late: bool, slot: SlotHandle) -> Self {
        Self { is_late, unread: Arc::default(), slot: Some(slot) }
    }

    /// Records that the client has presented a valid key, so that its connection does not give way
    /// to strangers.
    pub(crate) fn authenticate(&self) {
        if let Some(slot) = &self.slot {
            slot.authenticate();
        }
    }

    /// Returns whether the connection ended because the client did not read, which a dropped
    /// request cannot distinguish from a client that disconnected. Set before the connection ends.
    pub(crate) fn is_unread(&self) -> bool {
        self.unread.load(Ordering::Acquire)
    }

    pub(crate) fn set_unread(&self) {
        self.unread.store(true, Ordering::Release);
    }
}

/// Time limits of one connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimeLimits {
    /// Maximum time from connecting to the first complete request head or HTTP/2 preface.
    pub opening_max: Duration,
    /// Maximum time from the first to the last byte of a later HTTP/1.1 request head.
    pub head_max: Duration,
    /// Maximum time of a write that waits for the client to read.
    pub write_max: Duration,
}

pub(super) struct ClientConnection {
    stream: ClientStream,
    state: ConnectionState,
    requests: Arc<RequestCount>,
    limits: TimeLimits,
    phase: ProtocolPhase,
    /// Timer of a write that waits for the client.
    write: Option<Pin<Box<Sleep>>>,
}

/// The part of the protocol that the client's next bytes belong to.
enum ProtocolPhase {
    /// No bytes have arrived, or a proper prefix of the HTTP/2 preface.
    Opening { preface_bytes: usize, timer: Pin<Box<Sleep>> },
    /// HTTP/1.1, with a timer from the first byte of a request head on.
    Http1 { head: Option<HeadTimer> },
    /// HTTP/2: hyper's keep-alive pings and the idle limit bound the connection.
    Http2,
}

struct HeadTimer {
    timer: Pin<Box<Sleep>>,
    /// Number of request heads when the timer started. The timer is void once this number has
    /// grown.
    begun: u64,
}

impl ClientConnection {
    pub(super) fn new(
        stream: ClientStream,
        limits: TimeLimits,
        state: ConnectionState,
        requests: Arc<RequestCount>,
    ) -> Self {
        let timer = Box::pin(sleep(limits.opening_max));
        let phase = ProtocolPhase::Opening { preface_bytes: 0, timer };
        Self { stream, state, requests, limits, phase, write: None }
    }

    /// Handles received bytes.
    fn received(&mut self, bytes: &[u8]) {
        let head_max = self.limits.head_max;
        let begun = self.requests.begun();
        match &mut self.phase {
            ProtocolPhase::Opening { preface_bytes, timer } => {
                let rest = &PREFACE[*preface_bytes..];
                if bytes.starts_with(rest) {
                    self.requests.http2.store(true, Ordering::Relaxed);
                    self.phase = ProtocolPhase::Http2;
                } else if rest.starts_with(bytes) {
                    *preface_bytes += bytes.len();
                } else {
                    let timer = std::mem::replace(timer, Box::pin(sleep(head_max)));
                    self.phase = ProtocolPhase::Http1 { head: Some(HeadTimer { timer, begun }) };
                }
            }
            ProtocolPhase::Http1 { head } => {
                if head.as_ref().is_some_and(|head| head.begun != begun) {
                    *head = None;
                }
                // The rest of a body may follow its request.
                let is_between_requests =
                    self.requests.is_idle() && !self.requests.discards.is_discarding();
                if is_between_requests && head.is_none() {
                    *head = Some(HeadTimer { timer: Box::pin(sleep(head_max)), begun });
                }
            }
            ProtocolPhase::Http2 => {}
        }
    }

    /// Completes when the time limit of a request head has passed.
    fn poll_timeout(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &mut self.phase {
            ProtocolPhase::Opening { timer, .. } => timer.as_mut().poll(cx),
            ProtocolPhase::Http1 { head: Some(head) } if head.begun == self.requests.begun() => {
                head.timer.as_mut().poll(cx)
            }
            ProtocolPhase::Http1 { .. } | ProtocolPhase::Http2 => Poll::Pending,
        }
    }

    /// Returns the result of a write, or an error when the write waits too long.
    fn watch<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.write = None;
            return written;
        }
        let deadline = Instant::now() + self.limits.write_max;
        let timer = self.write.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        ready!(timer.as_mut().poll(cx));
        self.state.set_unread();
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
    }
}

impl AsyncRead for ClientConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if read.is_ready() {
            self.received(&buffer.filled()[before..]);
            return read;
        }
        ready!(self.poll_timeout(cx));
        let late = "the client has not sent a whole request head";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, late)))
    }
}

impl AsyncWrite for ClientConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.watch(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Counter of the requests of one connection.
pub(super) struct RequestCount {
    in_progress: watch::Sender<usize>,
    /// Request heads that have arrived since the connection was opened.
    begun: AtomicU64,
    /// Requests in progress that wait for the router. The others wait for the client to read.
    unanswered: AtomicUsize,
    /// Steps of all responses: a response's head and each poll of its body.
    steps: AtomicU64,
    http2: AtomicBool,
    slot: ConnectionSlot,
    /// Rests of rejected bodies, which are read between requests.
    discards: Discards,
}

/// Guard of a request in progress.
pub(super) struct RequestInProgress {
    count: Arc<RequestCount>,
    /// The request is counted in [`RequestCount::unanswered`].
    is_unanswered: bool,
}

impl RequestCount {
    pub(super) fn new(slot: ConnectionSlot) -> Arc<Self> {
        Arc::new(Self {
            in_progress: watch::Sender::new(0),
            begun: AtomicU64::new(0),
            unanswered: AtomicUsize::new(0),
            steps: AtomicU64::new(0),
            http2: AtomicBool::new(false),
            slot,
            discards: Discards::default(),
        })
    }

    /// Counts a request after its head has arrived, and returns whether the router may serve it.
    /// `may_use_reserve`: whether the router serves the request on a reserved connection.
    pub(super) fn begin(
        self: &Arc<Self>,
        may_use_reserve: bool,
    ) -> (RequestInProgress, AdmissionVerdict) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.unanswered.fetch_add(1, Ordering::Relaxed);
        self.in_progress.send_modify(|count| *count += 1);
        let request = RequestInProgress { count: self.clone(), is_unanswered: true };
        (request, self.slot.begin_request(may_use_reserve))
    }

    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    /// Returns whether the client has sent the HTTP/2 preface.
    pub(super) fn is_http2(&self) -> bool {
        self.http2.load(Ordering::Relaxed)
    }

    pub(super) fn is_idle(&self) -> bool {
        *self.in_progress.borrow() == 0
    }

    pub(super) fn slot(&self) -> &ConnectionSlot {
        &self.slot
    }

    pub(super) fn discards(&self) -> Discards {
        self.discards.clone()
    }

    /// Returns once no request is in progress.
    pub(super) async fn idle(&self) {
        self.idle_for(Duration::ZERO).await;
    }

    /// Returns once no request has been in progress for `idle_max`.
    pub(super) async fn idle_for(&self, idle_max: Duration) {
        let mut in_progress = self.in_progress.subscribe();
        let open = "the sender is a field of self";
        loop {
            in_progress.wait_for(|count| *count == 0).await.expect(open);
            let busy = in_progress.wait_for(|count| *count > 0);
            match tokio::time::timeout(idle_max, busy).await {
                Err(_) => return,
                Ok(busy) => drop(busy.expect(open)),
            }
        }
    }

    /// Returns once all requests in progress have waited for the client for `stall_max`, and before
    /// twice this time. Only with HTTP/2: a client that opens no flow-control window stalls no TCP
    /// write.
    pub(super) async fn stalled_for(&self, stall_max: Duration) {
        let mut in_progress = self.in_progress.subscribe();
        loop {
            in_progress.wait_for(|count| *count > 0).await.expect("the sender is a field of self");
            let steps = self.steps.load(Ordering::Relaxed);
            sleep(stall_max).await;
            let is_stalled = !self.is_idle()
                && self.unanswered.load(Ordering::Relaxed) == 0
                && self.steps.load(Ordering::Relaxed) == steps;
            if is_stalled && self.is_http2() {
                return;
            }
        }
    }
}

impl RequestInProgress {
    /// Records a step of the response. The request waits for the router while `is_unanswered`, else
    /// for the client.
    fn step(&mut self, is_unanswered: bool) {
        self.count.steps.fetch_add(1, Ordering::Relaxed);
        if is_unanswered == self.is_unanswered {
            return;
        }
        self.is_unanswered = is_unanswered;
        if is_unanswered {
            self.count.unanswered.fetch_add(1, Ordering::Relaxed);
        } else {
            self.count.unanswered.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for RequestInProgress {
    fn drop(&mut self) {
        self.step(false);
        self.count.slot.end_request();
        self.count.in_progress.send_modify(|count| *count -= 1);
    }
}

/// A response body; its request is in progress until the body is written or dropped.
pub(super) struct CountedBody {
    body: Body,
    request: RequestInProgress,
}

impl CountedBody {
    pub(super) fn new(body: Body, mut request: RequestInProgress) -> Self {
        request.step(false);
        Self { body, request }
    }
}

impl hyper::body::Body for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        self.request.step(polled.is_pending());
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use listener::PortListener;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, TcpStream},
    };
    use tokio_util::either::Either;

    use super::{super::limits::operator_slots, *};

    async fn pair(limits: TimeLimits) -> (ClientConnection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (server, slot) = PortListener::new(listener, operator_slots(false)).accept().await;
        let requests = RequestCount::new(slot);
        let server = Either::Left(server);
        (ClientConnection::new(server, limits, ConnectionState::default(), requests), client)
    }

    /// Long enough for the few bytes of a test on a busy machine.
    const SHORT: Duration = Duration::from_secs(1);
    const LONG: Duration = Duration::from_secs(60);
    const LONG_TIMEOUT: TimeLimits =
        TimeLimits { opening_max: LONG, head_max: LONG, write_max: LONG };

    async fn read_times_out(server: &mut ClientConnection) {
        let error = server.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    /// Sends the bytes one by one.
    async fn send(server: &mut ClientConnection, client: &mut TcpStream, bytes: &[u8]) {
        for byte in bytes {
            client.write_u8(*byte).await.unwrap();
            assert_eq!(server.read_u8().await.unwrap(), *byte);
        }
    }

    #[tokio::test]
    async fn a_first_request_head_that_stays_incomplete_times_out() {
        for sent in [&b""[..], &PREFACE[..1], &PREFACE[..PREFACE.len() - 1], b"G", b"PO"] {
            let (mut server, mut client) =
                pair(TimeLimits { opening_max: SHORT, ..LONG_TIMEOUT }).await;
            send(&mut server, &mut client, sent).await;
            read_times_out(&mut server).await;
        }
    }

    #[tokio::test]
    async fn a_later_request_head_that_stays_incomplete_times_out() {
        let (mut server, mut client) = pair(TimeLimits { head_max: SHORT, ..LONG_TIMEOUT }).await;
        send(&mut server, &mut client, b"POST").await;
        let (request, _) = server.requests.begin(false);
        // The body of a request has its own time limit.
        send(&mut server, &mut client, b"body").await;
        drop(request);
        let idle = tokio::time::timeout(SHORT * 2, server.read_u8()).await;
        assert!(idle.is_err(), "a kept-alive connection is idle, not late: {idle:?}");
        send(&mut server, &mut client, b"GE").await;
        read_times_out(&mut server).await;
    }

    #[tokio::test]
    async fn an_http_2_connection_has_no_time_limit_for_a_head() {
        let limits = TimeLimits { opening_max: SHORT, head_max: SHORT, ..LONG_TIMEOUT };
        let (mut server, mut client) = pair(limits).await;
        send(&mut server, &mut client, PREFACE).await;
        let waiting = tokio::time::timeout(SHORT * 2, server.read_u8()).await;
        assert!(waiting.is_err(), "{waiting:?}");
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_loses_its_connection() {
        let (mut server, _client) = pair(TimeLimits { write_max: SHORT, ..LONG_TIMEOUT }).await;
        let endless = vec![0; 1 << 20];
        let error = loop {
            assert!(!server.state.is_unread());
            if let Err(error) = server.write_all(&endless).await {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(server.state.is_unread());
    }
}
