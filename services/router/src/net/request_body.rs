//! Request body that the router reads to its end even after an early response, such as 401 or 413.
//!
//! Without this, the router would close the connection while the client still sends. The client
//! would then see a broken connection instead of the response. A task discards the unread rest. The
//! task belongs to the connection, so the request counts as finished with its response.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Bytes;
use http::{Request, header};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::{runtime::Handle, task::JoinSet, time::timeout};

use crate::lock::lock;

/// Maximum number of bytes that the router discards of one body: a client that ignores the response
/// this long does not read it.
const DISCARD_BYTES_MAX: usize = 64 << 20;
/// Maximum time for which the router discards one body.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);

/// Tasks of one connection that discard unread rests of request bodies. Dropping the last clone
/// aborts the tasks.
#[derive(Clone, Default)]
pub(super) struct Discards {
    tasks: Arc<Mutex<JoinSet<()>>>,
    /// Number of bodies being discarded. Each [`DiscardInProgress`] counts one.
    count: Arc<AtomicUsize>,
}

impl Discards {
    /// Returns whether a task still discards a body.
    pub(super) fn is_discarding(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    /// Starts a task that reads and discards the rest of a body, up to [`DISCARD_BYTES_MAX`] and
    /// [`DISCARD_TIMEOUT`].
    fn start(&self, mut body: Incoming) {
        // Bodies that are dropped outside the runtime belong to a process that is shutting down.
        let Ok(runtime) = Handle::try_current() else { return };
        let in_progress = DiscardInProgress::new(self.count.clone());
        let discard = async move {
            let _in_progress = in_progress;
            let read_rest = async {
                let mut bytes = 0;
                while let Some(Ok(frame)) = body.frame().await {
                    bytes += frame.data_ref().map_or(0, Bytes::len);
                    if bytes > DISCARD_BYTES_MAX {
                        break;
                    }
                }
            };
            // After the time-out, dropping the body lets hyper close the connection.
            let _ = timeout(DISCARD_TIMEOUT, read_rest).await;
        };
        let mut tasks = lock(&self.tasks);
        // Finished tasks leave the set here, so the set does not grow with the requests of a
        // connection.
        while tasks.try_join_next().is_some() {}
        tasks.spawn_on(discard, &runtime);
    }
}

/// Guard that counts one body in [`Discards::count`] while the body is being discarded.
struct DiscardInProgress(Arc<AtomicUsize>);

impl DiscardInProgress {
    fn new(count: Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count)
    }
}

impl Drop for DiscardInProgress {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Body of a request. Dropping it before its end starts a task that discards the rest.
pub(super) struct RequestBody {
    /// hyper's body. `None` after the last frame and after an error.
    body: Option<Incoming>,
    discards: Discards,
    /// Whether the client waits for `100 Continue` and so has not sent any of the body. hyper sends
    /// `100 Continue` with the first read.
    awaits_continue: bool,
}

impl RequestBody {
    /// Wraps the body of `request`.
    pub(super) fn wrap(request: Request<Incoming>, discards: Discards) -> Request<Self> {
        let awaits_continue = request.headers().contains_key(header::EXPECT);
        request.map(|body| Self { body: Some(body), discards, awaits_continue })
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        if let Some(body) = self.body.take().filter(|body| !body.is_end_stream())
            && !self.awaits_continue
        {
            self.discards.start(body);
        }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        self.awaits_continue = false;
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let polled = Pin::new(body).poll_frame(context);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.body = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or(SizeHint::with_exact(0), Incoming::size_hint)
    }
}
