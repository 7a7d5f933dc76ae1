//! A request body that must arrive within a time-out.

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

/// Request body with a time-out, so that a client that sends half a message cannot keep its stream.
/// The time-out also ends bidirectional streams, which only reflection uses.
#[derive(Debug)]
pub struct TimedBody<B> {
    body: B,
    deadline: Pin<Box<Sleep>>,
    read_max: Duration,
}

impl<B> TimedBody<B> {
    /// Fails with a [`Status`] unless the last byte is read within `read_max`.
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
