//! A request body that must arrive within a time-out, and at a minimum rate.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep};
use tonic::Status;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Time over which the minimum rate is measured, and the number of bytes that must arrive in it: 1
/// KiB/s.
const RATE_WINDOW: Duration = Duration::from_secs(10);
const WINDOW_BYTES_MIN: usize = 10 << 10;

/// Request body with a time-out and a minimum rate, so that a client that sends half a message
/// cannot keep its stream. The time-out also ends bidirectional streams, which only reflection
/// uses.
#[derive(Debug)]
pub struct TimedBody<B> {
    body: B,
    deadline: Pin<Box<Sleep>>,
    read_max: Duration,
    window: Pin<Box<Sleep>>,
    window_bytes: usize,
}

impl<B> TimedBody<B> {
    /// Fails with a [`Status`] unless the last byte is read within `read_max`.
    pub fn new(body: B, read_max: Duration) -> Self {
        let [deadline, window] = [read_max, RATE_WINDOW].map(|after| Box::pin(sleep(after)));
        Self { body, deadline, read_max, window, window_bytes: 0 }
    }

    /// Completes with the reason why the body is too late.
    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<String> {
        if self.deadline.as_mut().poll(context).is_ready() {
            return Poll::Ready(format!("the body did not arrive within {:?}", self.read_max));
        }
        while self.window.as_mut().poll(context).is_ready() {
            if self.window_bytes < WINDOW_BYTES_MIN {
                let rate = WINDOW_BYTES_MIN as u64 / RATE_WINDOW.as_secs();
                return Poll::Ready(format!(
                    "the body arrives too slowly; expected at least {rate} bytes per second"
                ));
            }
            self.window_bytes = 0;
            self.window.as_mut().reset(Instant::now() + RATE_WINDOW);
        }
        Poll::Pending
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
            if let Some(Ok(frame)) = &frame {
                self.window_bytes += frame.data_ref().map_or(0, Bytes::len);
            }
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        self.poll_late(context).map(|reason| Some(Err(Status::deadline_exceeded(reason).into())))
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
    use std::future::poll_fn;

    use http_body::Body;
    use tokio::sync::mpsc;

    use super::*;

    /// A body of the received chunks.
    struct Chunks(mpsc::Receiver<Bytes>);

    impl Body for Chunks {
        type Data = Bytes;
        type Error = BoxError;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
            self.0.poll_recv(context).map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn slow_body_ends_after_a_window_below_the_minimum_rate() {
        let (sender, chunks) = mpsc::channel(1);
        let began = Instant::now();
        let mut body = TimedBody::new(Chunks(chunks), 10 * RATE_WINDOW);
        let client = tokio::spawn(async move {
            let mut bytes = WINDOW_BYTES_MIN;
            while sender.send(vec![0; bytes].into()).await.is_ok() {
                tokio::time::sleep(RATE_WINDOW / 2).await;
                // After two windows, too few bytes arrive.
                bytes = if began.elapsed() < 2 * RATE_WINDOW { WINDOW_BYTES_MIN } else { 1 };
            }
        });
        let error = loop {
            let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
            if let Err(error) = frame.expect("the client goes on") {
                break error;
            }
        };
        let status = error.downcast::<Status>().unwrap();
        assert!(status.message().contains("at least 1024 bytes per second"), "{status}");
        assert!((3..=4).contains(&(began.elapsed().as_secs() / RATE_WINDOW.as_secs())));
        drop(body);
        client.await.unwrap();
    }
}
