//! The bounded queue from the engine thread to one caller.
//!
//! The engine thread never waits for a reader: an attempt whose queue is full fails. One place of the
//! queue is kept for the last reply, so the reader always gets it. Dropping an [`AttemptStream`] before
//! its last reply cancels its attempt.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use crossbeam_channel::TrySendError;
use futures_util::Stream;
use proto::v1::FailureKind;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use crate::{
    inbox::{Command, CommandSender},
    node_core::{AttemptEnd, CallId, Reply},
};

/// About ten seconds of fast decoding, 100 KiB at most.
const EVENTS_MAX: usize = 1024;

/// Counts one attempt against the node's bound. The engine thread and the caller's stream hold it; the
/// attempt no longer counts when both have dropped it.
pub(crate) type AttemptPermit = Arc<OwnedSemaphorePermit>;

/// The engine thread's end.
#[derive(Debug)]
pub(crate) struct ReplySender {
    replies: mpsc::Sender<Reply>,
    /// The place of the last reply; `None` once it was sent.
    last: Option<mpsc::OwnedPermit<Reply>>,
}

/// The caller's queue is full.
#[derive(Debug)]
pub(crate) struct QueueFull;

impl ReplySender {
    /// Never waits. A dropped stream is no error: its cancel is on the way.
    pub fn send(&mut self, reply: Reply) -> Result<(), QueueFull> {
        if reply.is_last() {
            if let Some(place) = self.last.take() {
                place.send(reply);
            }
            return Ok(());
        }
        match self.replies.try_send(reply) {
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Ok(()),
            Err(mpsc::error::TrySendError::Full(_)) => Err(QueueFull),
        }
    }
}

/// The caller's end.
#[derive(Debug)]
pub(crate) struct AttemptStream {
    call: CallId,
    /// A reply that was read ahead.
    first: Option<Reply>,
    replies: mpsc::Receiver<Reply>,
    /// The last reply was read, or none will come.
    is_over: bool,
    cancel: CommandSender,
    permit: AttemptPermit,
}

/// Returns both ends of one attempt's stream. `cancel` has room for one command of each permit.
pub(crate) fn attempt_stream(
    call: CallId,
    cancel: CommandSender,
    permit: AttemptPermit,
) -> (ReplySender, AttemptStream) {
    let (sender, replies) = mpsc::channel(EVENTS_MAX + 1);
    let last = sender.clone().try_reserve_owned().expect("the queue is empty");
    let stream = AttemptStream { call, first: None, replies, is_over: false, cancel, permit };
    (ReplySender { replies: sender, last: Some(last) }, stream)
}

impl AttemptStream {
    /// Puts back the first reply, so that it is read again.
    pub fn put_back(&mut self, first: Reply) {
        self.first = Some(first);
    }

    /// The engine thread does not know the call: there is nothing to cancel.
    pub fn discard(mut self) {
        self.is_over = true;
    }
}

impl Stream for AttemptStream {
    type Item = Reply;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Reply>> {
        if self.first.is_some() {
            return Poll::Ready(self.first.take());
        }
        if self.is_over {
            return Poll::Ready(None);
        }
        // Without a last reply the engine thread has ended.
        let reply = ready!(self.replies.poll_recv(context)).unwrap_or_else(|| {
            Reply::Ended(AttemptEnd::failed(FailureKind::Internal, "the engine stopped"))
        });
        self.is_over = reply.is_last();
        Poll::Ready(Some(reply))
    }
}

impl Drop for AttemptStream {
    fn drop(&mut self) {
        if !self.is_over {
            let command = Command::Cancel { call: self.call, _permit: self.permit.clone() };
            // The number of permits bounds the queue, so it is never full. Disconnected: the engine
            // thread has ended.
            let sent = self.cancel.send(command);
            debug_assert!(!matches!(sent, Err(TrySendError::Full(_))));
        }
    }
}

#[cfg(test)]
mod tests {
    use engine::{event::SequenceId, executor::CollectWaker};
    use futures_util::StreamExt;
    use kernels::sampling::SampledToken;
    use tokio::sync::Semaphore;

    use super::*;
    use crate::{inbox::CommandReceiver, node_core::AttemptEvent};

    const CALL: CallId = CallId { sequence: SequenceId(5), number: 1 };

    fn pair() -> (ReplySender, AttemptStream, CommandReceiver) {
        let (inbox, commands) = CommandSender::new(4, CollectWaker::default());
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let (sender, stream) = attempt_stream(CALL, inbox, Arc::new(permit));
        (sender, stream, commands)
    }

    fn token(index: u32) -> Reply {
        Reply::Event(AttemptEvent::Tokens {
            first_index: index,
            tokens: vec![SampledToken { id: 1, logprobs: None }],
            cached_tokens: 0,
            finish: None,
        })
    }

    #[tokio::test]
    async fn stream_yields_its_end_after_all_events() {
        let (mut sender, mut stream, commands) = pair();
        sender.send(token(0)).unwrap();
        sender.send(token(1)).unwrap();
        sender.send(Reply::Ended(AttemptEnd::Complete)).unwrap();
        assert_eq!(stream.next().await, Some(token(0)));
        assert_eq!(stream.next().await, Some(token(1)));
        assert_eq!(stream.next().await, Some(Reply::Ended(AttemptEnd::Complete)));
        assert_eq!(stream.next().await, None);
        drop(stream);
        assert!(commands.is_empty(), "a stream read to its end cancels nothing");
    }

    #[tokio::test]
    async fn full_stream_still_yields_its_end() {
        let (mut sender, mut stream, _commands) = pair();
        for index in 0..EVENTS_MAX as u32 {
            sender.send(token(index)).unwrap();
        }
        sender.send(token(0)).expect_err("the queue is full");
        let end = Reply::Ended(AttemptEnd::failed(FailureKind::SlowReader, "slow"));
        sender.send(end.clone()).unwrap();
        let items: Vec<Reply> = stream.by_ref().collect().await;
        assert_eq!(items.len(), EVENTS_MAX + 1);
        assert_eq!(items.last(), Some(&end));
    }

    #[tokio::test]
    async fn dropped_stream_cancels_its_attempt_once() {
        let (_sender, stream, commands) = pair();
        drop(stream);
        let command = commands.try_recv().unwrap();
        assert!(matches!(command, Command::Cancel { call: CALL, .. }));
        assert!(commands.is_empty());
    }

    #[tokio::test]
    async fn stream_fails_when_the_engine_thread_ends() {
        let (sender, mut stream, _commands) = pair();
        drop(sender);
        let Some(Reply::Ended(AttemptEnd::Failed { kind, .. })) = stream.next().await else {
            panic!("no end");
        };
        assert_eq!(kind, FailureKind::Internal);
    }
}
