//! Counts the requests of one connection, from the request head to the last byte of the response.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::body::{Body, Bytes};
use hyper::body::{Frame, SizeHint};
use tokio::sync::watch;

use super::slots::{Slot, Verdict};

/// Counts the requests of one connection.
pub struct RequestCount {
    in_progress: watch::Sender<usize>,
    /// Request heads that have arrived since the connection was opened.
    begun: AtomicU64,
    slot: Slot,
}

/// Guard of a request in progress.
pub struct RequestInProgress(Arc<RequestCount>);

impl RequestCount {
    pub fn new(slot: Slot) -> Arc<Self> {
        Arc::new(Self { in_progress: watch::Sender::new(0), begun: AtomicU64::new(0), slot })
    }

    /// Counts a request after its head has arrived, and returns whether the router may serve it.
    pub fn begin(self: &Arc<Self>, is_probe: bool) -> (RequestInProgress, Verdict) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.in_progress.send_modify(|count| *count += 1);
        (RequestInProgress(self.clone()), self.slot.begin_request(is_probe))
    }

    pub fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    pub fn is_idle(&self) -> bool {
        *self.in_progress.borrow() == 0
    }

    pub fn slot(&self) -> &Slot {
        &self.slot
    }

    /// Returns once no request is in progress.
    pub async fn idle(&self) {
        self.idle_for(Duration::ZERO).await;
    }

    /// Returns once no request has been in progress for `idle_max`.
    pub async fn idle_for(&self, idle_max: Duration) {
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
}

impl Drop for RequestInProgress {
    fn drop(&mut self) {
        self.0.slot.end_request();
        self.0.in_progress.send_modify(|count| *count -= 1);
    }
}

/// A response body; its request is in progress until the body is written or dropped.
pub struct CountedBody {
    pub body: Body,
    pub _request: RequestInProgress,
}

impl hyper::body::Body for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
