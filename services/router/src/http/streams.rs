//! Streams that outlive their connection: a client that lost it asks for the events after the last
//! one that it has.
//!
//! The client of such a stream sends the header [`X_BATON_RESUME`], and each event has an id. A
//! task writes the events into a log, and the response reads the log. While no connection reads,
//! generation goes on until the log is full of unread events; then the request ends as that of a
//! slow client does. A stream without a connection for `router.resume_window` ends.

mod log;

use std::{
    collections::HashMap,
    future::{pending, poll_fn},
    ops::RangeInclusive,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Poll, Waker},
    time::Duration,
};

use axum::{
    extract::{Query, State},
    response::Response,
};
use bytes::Bytes;
use http::{Extensions, HeaderMap, HeaderName, HeaderValue, StatusCode};
use proto::ids::RequestId;
use tokio::{sync::Notify, time::Instant};

use super::{
    PathParameter,
    error::ApiError,
    generate::{EventSource, StreamWriter, StreamedReply, event_response},
    responses::owner,
};
use crate::{
    front::Front,
    lock::lock,
    request::error::{FieldError, invalid_value},
};
use log::EventLog;

/// With value `1` the events of the stream have ids, and the stream can be resumed.
pub(super) const X_BATON_RESUME: HeaderName = HeaderName::from_static("x-baton-resume");
/// Id of a stream that can be resumed.
const X_BATON_STREAM: HeaderName = HeaderName::from_static("x-baton-stream");
const LAST_EVENT_ID: &str = "last-event-id";
/// Maximum characters of an unknown id in an error message.
const ID_CHARS_MAX: usize = 100;

/// Bytes of a stream that its log keeps after they went to a connection, which may have lost them:
/// about 500 events of chats.
const READ_BYTES_MAX: usize = 128 << 10;
/// Bytes of a stream that its log keeps for a client that does not read.
const UNREAD_BYTES_MAX: usize = 128 << 10;
/// Bytes that a stream takes besides its events.
const STREAM_OVERHEAD: usize = 4 << 10;

/// The streams of a router that can be resumed.
pub(crate) struct ResumableStreams {
    bytes_max: usize,
    window: Duration,
    bytes: AtomicUsize,
    /// By the number of the request id.
    by_id: Mutex<HashMap<u128, Arc<ResumableStream>>>,
}

/// A stream that can be resumed.
struct ResumableStream {
    id: RequestId,
    owner: Arc<str>,
    /// Maximum time between events; then a keep-alive comment follows.
    keep_alive: Duration,
    streams: Weak<ResumableStreams>,
    state: Mutex<ResumableState>,
    /// Notified when the client has read events, came or left.
    was_read: Notify,
}

struct ResumableState {
    log: EventLog,
    /// Number of the next event for the client.
    read: u64,
    /// Number of the current connection. An older one ends.
    connection: u64,
    /// Time when the current connection ended; `None` while it reads.
    left_at: Option<Instant>,
    /// Woken when there are further events, or the stream or the connection ends.
    reader: Option<Waker>,
}

impl ResumableStreams {
    pub(crate) fn new(settings: &config::Router) -> Arc<Self> {
        Arc::new(Self {
            bytes_max: settings.resume_bytes_max.bytes() as usize,
            window: settings.resume_window,
            bytes: AtomicUsize::new(0),
            by_id: Mutex::default(),
        })
    }

    /// Returns whether a further stream may be resumed.
    pub(super) fn has_room(&self) -> bool {
        !self.window.is_zero() && self.bytes.load(Ordering::Relaxed) < self.bytes_max
    }

    fn is_full(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) >= self.bytes_max
    }

    /// Responds with a stream whose events have ids. A task writes its log until the stream ends.
    pub(super) fn respond<W: StreamWriter>(
        self: &Arc<Self>,
        front: &Arc<Front>,
        id: RequestId,
        owner: Arc<str>,
        reply: StreamedReply<W>,
    ) -> Response {
        let state = ResumableState {
            log: EventLog::default(),
            read: 0,
            connection: 0,
            left_at: None,
            reader: None,
        };
        let stream = Arc::new(ResumableStream {
            id,
            owner,
            keep_alive: front.settings.keep_alive,
            streams: Arc::downgrade(self),
            state: Mutex::new(state),
            was_read: Notify::new(),
        });
        self.bytes.fetch_add(STREAM_OVERHEAD, Ordering::Relaxed);
        lock(&self.by_id).insert(id.0, stream.clone());
        let connection = stream.clone().connect(0).expect("an empty log begins at event 0");
        // The task ends with the stream, and at the router's end with `front.cut`.
        tokio::spawn(write_log(self.clone(), stream, reply, front.clone()));
        connection
    }

    fn find(&self, owner: &str, id: &str) -> Option<Arc<ResumableStream>> {
        let id = u128::from_str_radix(id, 16).ok()?;
        lock(&self.by_id).get(&id).filter(|stream| *stream.owner == *owner).cloned()
    }
}

impl ResumableState {
    fn wake_reader(&mut self) {
        self.reader.take().into_iter().for_each(Waker::wake);
    }
}

impl ResumableStream {
    fn lock(&self) -> MutexGuard<'_, ResumableState> {
        lock(&self.state)
    }

    /// Responds with the events from number `from` on. Earlier connections of the stream end.
    /// Returns the range of allowed event numbers if `from` is outside it.
    fn connect(self: Arc<Self>, from: u64) -> Result<Response, RangeInclusive<u64>> {
        let connection = {
            let mut state = self.lock();
            let (first, end) = state.log.range();
            if !(first..=end).contains(&from) {
                return Err(first..=end);
            }
            state.connection += 1;
            state.left_at = None;
            state.read = from;
            state.wake_reader();
            state.connection
        };
        self.was_read.notify_waiters();
        let id = HeaderValue::try_from(self.id.to_string()).expect("an id is hexadecimal");
        let keep_alive = self.keep_alive;
        let reader = LogReader { stream: self, connection, next: from };
        let mut response = event_response(reader, keep_alive);
        response.headers_mut().insert(X_BATON_STREAM, id);
        Ok(response)
    }
}

impl Drop for ResumableStream {
    fn drop(&mut self) {
        if let Some(streams) = self.streams.upgrade() {
            let kept = STREAM_OVERHEAD + self.lock().log.bytes();
            streams.bytes.fetch_sub(kept, Ordering::Relaxed);
        }
    }
}

/// Writes the events of a reply into the log, as far as there is room. Ends when no connection has
/// read for the window.
async fn write_log<W: StreamWriter>(
    streams: Arc<ResumableStreams>,
    stream: Arc<ResumableStream>,
    reply: StreamedReply<W>,
    front: Arc<Front>,
) {
    let mut reply = Some(reply);
    loop {
        let mut was_read = pin!(stream.was_read.notified());
        // No change is missed from here on.
        was_read.as_mut().enable();
        let (has_room, left_at) = {
            let mut state = stream.lock();
            let read = state.read;
            let (read_max, unread_max) = match streams.is_full() {
                true => (0, 1),
                false => (READ_BYTES_MAX, UNREAD_BYTES_MAX),
            };
            let freed = state.log.drop_read(read, read_max);
            streams.bytes.fetch_sub(freed, Ordering::Relaxed);
            (state.log.unread_bytes(read) < unread_max, state.left_at)
        };
        let gone_at = left_at.map(|left_at| left_at + streams.window);
        let is_over = reply.is_none();
        let next = async {
            match reply.as_mut().filter(|_| has_room) {
                Some(reply) => reply.next().await,
                None => pending().await,
            }
        };
        let gone = async {
            match gone_at {
                Some(gone_at) => tokio::time::sleep_until(gone_at).await,
                None => pending().await,
            }
        };
        tokio::select! {
            bytes = next => {
                let mut state = stream.lock();
                match bytes {
                    Some(bytes) => {
                        streams.bytes.fetch_add(bytes.len(), Ordering::Relaxed);
                        state.log.push(bytes);
                    }
                    None => {
                        state.log.end();
                        reply = None;
                    }
                }
                state.wake_reader();
            }
            () = was_read => {}
            () = gone => break,
            () = front.cut.cancelled(), if is_over => break,
        }
    }
    lock(&streams.by_id).remove(&stream.id.0);
}

/// Reader of a stream's log, for one connection.
struct LogReader {
    stream: Arc<ResumableStream>,
    connection: u64,
    /// Number of the next event.
    next: u64,
}

impl EventSource for LogReader {
    /// Returns further events; `None` at the end of the stream, or when another connection has
    /// replaced this one.
    async fn next(&mut self) -> Option<Bytes> {
        poll_fn(|context| {
            let mut state = self.stream.lock();
            if state.connection != self.connection {
                return Poll::Ready(None);
            }
            if let Some((bytes, next)) = state.log.read(self.next) {
                self.next = next;
                state.read = next;
                drop(state);
                self.stream.was_read.notify_waiters();
                return Poll::Ready(Some(bytes));
            }
            if state.log.is_over() {
                return Poll::Ready(None);
            }
            state.reader = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }
}

impl Drop for LogReader {
    fn drop(&mut self) {
        let mut state = self.stream.lock();
        if state.connection == self.connection {
            state.left_at = Some(Instant::now());
        }
        drop(state);
        self.stream.was_read.notify_waiters();
    }
}

/// Continues a stream after the event that the header `last-event-id` names, or from the event
/// `from`.
pub(super) async fn resume(
    State(front): State<Arc<Front>>,
    PathParameter(id): PathParameter,
    Query(query): Query<HashMap<String, String>>,
    (extensions, headers): (Extensions, HeaderMap),
) -> Result<Response, ApiError> {
    let last = headers.get(LAST_EVENT_ID).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let from = match (last, query.get("from")) {
        (Some(last), None) => {
            let number = last.strip_prefix(&id).and_then(|rest| rest.strip_prefix('-'));
            let number = number.and_then(|number| number.parse::<u64>().ok()?.checked_add(1));
            let allowed = "the id of an event of this stream";
            number.ok_or_else(|| invalid_value(LAST_EVENT_ID, &last, allowed))?
        }
        (None, Some(from)) => {
            let allowed = "the number of an event";
            from.parse().map_err(|_| invalid_value("from", from, allowed))?
        }
        (None, None) => 0,
        (Some(_), Some(_)) => {
            let problem = "is given together with last-event-id; allowed: one of them";
            return Err(FieldError::new("from", problem).into());
        }
    };
    let owner = owner(&headers, &extensions)?;
    continue_stream(&front, &owner, &id, from)
}

/// Responds with the events of the owner's stream from number `from` on.
pub(super) fn continue_stream(
    front: &Front,
    owner: &str,
    id: &str,
    from: u64,
) -> Result<Response, ApiError> {
    let not_found = |message| ApiError::invalid(StatusCode::NOT_FOUND, "not_found", message);
    let Some(stream) = front.streams.find(owner, id) else {
        let id: String = id.chars().take(ID_CHARS_MAX).collect();
        let window_ms = front.settings.router.resume_window.as_millis();
        return Err(not_found(format!(
            "unknown stream: {id}; allowed: a stream of this router, of the same API key and tenant, begun with \
             {X_BATON_RESUME}: 1 and not left for more than {window_ms} ms"
        )));
    };
    stream.connect(from).map_err(|kept| match kept.end() < &from {
        true => {
            let problem = format!("is {from}; allowed: {} to {}", kept.start(), kept.end());
            FieldError::new("from", problem).into()
        }
        false => not_found(format!(
            "event {from} of the stream is no longer kept; allowed: {} to {}",
            kept.start(),
            kept.end()
        )),
    })
}
