//! The requests of one connection, counted from their heads to the last bytes of their answers.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::{Body, Bytes};
use hyper::body::{Frame, SizeHint};
use tokio::sync::watch;

/// One request; counted until it is dropped.
pub struct Counted(watch::Sender<usize>);

impl Counted {
    pub fn new(requests: &watch::Sender<usize>) -> Self {
        requests.send_modify(|count| *count += 1);
        Self(requests.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// An answer whose request counts until it is written or given up.
pub struct CountedBody {
    pub body: Body,
    pub _counted: Counted,
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

/// Returns once there was no request for so long.
pub async fn idle_for(requests: &mut watch::Receiver<usize>, idle_max: Duration) {
    while requests.wait_for(|count| *count == 0).await.is_ok() {
        let busy = requests.wait_for(|count| *count > 0);
        let busy = tokio::time::timeout(idle_max, busy).await.map(|heard| heard.is_ok());
        match busy {
            Err(_) => return,
            Ok(true) => {}
            Ok(false) => break,
        }
    }
    // The connection is gone, and so is whoever waits here.
    std::future::pending().await
}
