//! The bounded queue from the engine thread to one caller.
//!
//! The engine thread never waits for a reader: an attempt whose queue is full fails. The end travels
//! in a channel of its own, so the reader always gets it. Dropping an [`AttemptStream`] cancels its
//! attempt.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use crossbeam_channel::TrySendError;
use futures_util::Stream;
use proto::v1::FailureKind;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::{
    inbox::{Command, CommandSender},
    node_core::{AttemptEnd, AttemptEvent, CallId},
};

/// About ten seconds of fast decoding, 100 KiB at most.
const EVENTS_MAX: usize = 1024;

/// Counts one attempt against the node's bound. The engine thread and the caller's stream hold it; the
/// attempt no longer counts when both have dropped it.
pub(crate) type AttemptPermit = Arc<OwnedSemaphorePermit>;

/// The engine thread's end.
#[derive(Debug)]
pub(crate) struct EventSender {
    events: mpsc::Sender<AttemptEvent>,
    end: oneshot::Sender<AttemptEnd>,
}

/// The caller's queue is full.
#[derive(Debug)]
pub(crate) struct QueueFull;

impl EventSender {
    /// Never waits. A dropped stream is no error: its cancel is on the way.
    pub fn send(&self, event: AttemptEvent) -> Result<(), QueueFull> {
        match self.events.try_send(event) {
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Ok(()),
            Err(mpsc::error::TrySendError::Full(_)) => Err(QueueFull),
        }
    }

    /// The reader gets `end` after all queued events.
    pub fn end(self, end: AttemptEnd) {
        // Fails when the caller left.
        let _ = self.end.send(end);
    }
}

/// The caller's end. Dropping it before its end cancels the attempt.
#[derive(Debug)]
pub(crate) struct AttemptStream {
    call: CallId,
    events: mpsc::Receiver<AttemptEvent>,
    /// `None` once the end was read.
    end: Option<oneshot::Receiver<AttemptEnd>>,
    cancel: CommandSender,
    permit: AttemptPermit,
}

/// An item of the stream.
#[derive(Clone, Debug, PartialEq)]
pub enum StreamItem {
    Event(AttemptEvent),
    End(AttemptEnd),
}

/// Returns both ends of one attempt's stream. `cancel` has room for one command of each permit.
pub(crate) fn attempt_stream(
    call: CallId,
    cancel: CommandSender,
    permit: AttemptPermit,
) -> (EventSender, AttemptStream) {
    let (events, events_received) = mpsc::channel(EVENTS_MAX);
    let (end, end_received) = oneshot::channel();
    let end_received = Some(end_received);
    let stream = AttemptStream { call, events: events_received, end: end_received, cancel, permit };
    (EventSender { events, end }, stream)
}

impl AttemptStream {
    /// The call was rejected: there is nothing to cancel.
    pub fn rejected(mut self) {
        self.end = None;
    }
}

impl Stream for AttemptStream {
    type Item = StreamItem;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<StreamItem>> {
        let this = &mut *self;
        let Some(end) = &mut this.end else { return Poll::Ready(None) };
        if let Some(event) = ready!(this.events.poll_recv(context)) {
            return Poll::Ready(Some(StreamItem::Event(event)));
        }
        // The engine thread dropped its end: the attempt's end follows, or the thread has ended.
        let end = ready!(Pin::new(end).poll(context))
            .unwrap_or_else(|_| AttemptEnd::failed(FailureKind::Internal, "the engine stopped"));
        this.end = None;
        Poll::Ready(Some(StreamItem::End(end)))
    }
}

impl Drop for AttemptStream {
    fn drop(&mut self) {
        if self.end.is_some() {
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
    use crate::inbox::CommandReceiver;

    const CALL: CallId = CallId { sequence: SequenceId(5), number: 1 };

    fn pair() -> (EventSender, AttemptStream, CommandReceiver) {
        let (inbox, commands) = CommandSender::new(4, CollectWaker::default());
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let (sender, stream) = attempt_stream(CALL, inbox, Arc::new(permit));
        (sender, stream, commands)
    }

    fn token(index: u32) -> AttemptEvent {
        AttemptEvent::Tokens {
            first_index: index,
            tokens: vec![SampledToken { id: 1, logprobs: None }],
            cached_tokens: 0,
            finish: None,
        }
    }

    #[tokio::test]
    async fn stream_yields_its_end_after_all_events() {
        let (sender, mut stream, commands) = pair();
        sender.send(token(0)).unwrap();
        sender.send(token(1)).unwrap();
        sender.end(AttemptEnd::Complete);
        assert_eq!(stream.next().await, Some(StreamItem::Event(token(0))));
        assert_eq!(stream.next().await, Some(StreamItem::Event(token(1))));
        assert_eq!(stream.next().await, Some(StreamItem::End(AttemptEnd::Complete)));
        assert_eq!(stream.next().await, None);
        drop(stream);
        assert!(commands.is_empty(), "a stream read to its end cancels nothing");
    }

    #[tokio::test]
    async fn full_stream_still_yields_its_end() {
        let (sender, mut stream, _commands) = pair();
        for index in 0..EVENTS_MAX as u32 {
            sender.send(token(index)).unwrap();
        }
        sender.send(token(0)).expect_err("the queue is full");
        sender.end(AttemptEnd::failed(FailureKind::SlowReader, "slow"));
        let items: Vec<StreamItem> = stream.by_ref().collect().await;
        assert_eq!(items.len(), EVENTS_MAX + 1);
        let end = AttemptEnd::failed(FailureKind::SlowReader, "slow");
        assert_eq!(items.last(), Some(&StreamItem::End(end)));
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
        let Some(StreamItem::End(AttemptEnd::Failed { kind, .. })) = stream.next().await else {
            panic!("no end");
        };
        assert_eq!(kind, FailureKind::Internal);
    }
}
