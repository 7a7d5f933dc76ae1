//! A request body that must be complete in time.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Sleep, sleep};
use tonic::Status;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Without it a caller that sends half a message would keep its stream for as long as it likes.
/// Conversations, which only reflection has, end with it too.
#[derive(Debug)]
pub struct TimedBody<B> {
    body: B,
    deadline: Pin<Box<Sleep>>,
    read_max: Duration,
}

impl<B> TimedBody<B> {
    /// The last byte must be read within `read_max` from now; the error is a [`Status`].
    pub fn new(body: B, read_max: Duration) -> Self {
        Self { body, deadline: Box::pin(sleep(read_max)), read_max }
    }
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin> Body for TimedBody<B> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        self.deadline.as_mut().poll(context).map(|()| {
            let message = format!("the request did not arrive within {:?}", self.read_max);
            Some(Err(Status::deadline_exceeded(message).into()))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
