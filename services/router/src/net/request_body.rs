//! A request body whose unread rest is read after the response. A client that still sends would otherwise see a broken
//! connection instead of the response. The rest is read outside the request: it keeps neither the request nor its
//! connection in progress.

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

/// Maximum number of bytes of a body that are read and discarded, and the time-out.
const DISCARD_BYTES_MAX: usize = 64 << 20;
const DISCARD_MAX: Duration = Duration::from_secs(5);

/// The tasks that discard rests of bodies of one connection. Dropping the last clone ends them.
#[derive(Clone, Default)]
pub struct Discards {
    tasks: Arc<Mutex<JoinSet<()>>>,
    count: Arc<AtomicUsize>,
}

impl Discards {
    /// Returns whether a rest is being read.
    pub fn is_reading(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    /// Reads and discards the rest of a body, within limits.
    fn start(&self, mut body: Incoming) {
        // Without a runtime the process ends.
        let Ok(runtime) = Handle::try_current() else { return };
        let reading = DiscardInProgress::new(self.count.clone());
        let discard = async move {
            let _reading = reading;
            let all = async {
                let mut bytes = 0;
                while let Some(Ok(frame)) = body.frame().await {
                    bytes += frame.data_ref().map_or(0, Bytes::len);
                    if bytes > DISCARD_BYTES_MAX {
                        break;
                    }
                }
            };
            let _ = timeout(DISCARD_MAX, all).await;
        };
        let mut tasks = lock(&self.tasks);
        while tasks.try_join_next().is_some() {}
        tasks.spawn_on(discard, &runtime);
    }
}

/// Guard of a rest that is being read.
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

/// The body of a request.
pub struct RequestBody {
    /// `None` after the last frame, after an error, and once the rest is not worth reading.
    body: Option<Incoming>,
    discards: Discards,
    /// The client sends the body only after the router has begun to read it.
    is_held_back: bool,
}

impl RequestBody {
    /// Returns the request with its body.
    pub fn of(request: Request<Incoming>, discards: Discards) -> Request<Self> {
        let is_held_back = request.headers().contains_key(header::EXPECT);
        request.map(|body| Self { body: Some(body), discards, is_held_back })
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        if let Some(body) = self.body.take().filter(|body| !body.is_end_stream())
            && !self.is_held_back
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
        self.is_held_back = false;
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
