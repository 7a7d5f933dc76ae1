//! The bounded way from the engine thread to one caller.
//!
//! The engine never waits for a reader: an attempt whose queue is full is ended, and its last event
//! has a place of its own, so that the reader always learns why. The other way round, a caller that
//! goes away is told to the engine by the drop of its [`AttemptStream`].

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use crossbeam_channel::TrySendError;
use engine::event::{FinishReason, SequenceId};
use futures_util::Stream;
use kernels::sampling::SampledToken;
use kv_transfer::api::TransferStats;
use proto::v1::FailureKind;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::inbox::{Command, CommandSender};

/// About ten seconds of a fast answer, 100 KiB at most.
const EVENTS_MAX: usize = 1024;

/// What the caller of one attempt hears, in this order: what the engine knows of it, as it is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AttemptEvent {
    /// Decode: blocks are reserved.
    Reserved { cached_tokens: u32, alone: bool },
    /// Tokens `first_index..`. On a prefill node this is token 0, with `finish` when it ends all.
    Tokens {
        first_index: u32,
        tokens: Vec<SampledToken>,
        cached_tokens: u32,
        finish: Option<FinishReason>,
    },
}

/// How an attempt ends; exactly one, behind all events.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AttemptEnd {
    /// Prefill: token 0 ended the request; nothing is delivered.
    Complete,
    /// Prefill: the decode node has everything.
    Delivered(TransferStats),
    /// Decode: the answer is complete.
    Finished {
        reason: FinishReason,
        received: TransferStats,
    },
    Failed {
        kind: FailureKind,
        message: String,
    },
}

impl AttemptEnd {
    pub fn failed(kind: FailureKind, message: impl Into<String>) -> Self {
        Self::Failed { kind, message: message.into() }
    }
}

/// One of a bounded number of attempts in work. Held by the engine's record of the attempt and by the
/// caller's stream; the place is free again when both are gone.
pub(crate) type Place = Arc<OwnedSemaphorePermit>;

/// The engine's end.
#[derive(Debug)]
pub(crate) struct EventSender {
    events: mpsc::Sender<AttemptEvent>,
    end: oneshot::Sender<AttemptEnd>,
}

/// The reader does not keep up with its queue.
#[derive(Debug)]
pub(crate) struct Full;

impl EventSender {
    /// Never waits. A reader that is gone is no error: its cancel is on the way.
    pub fn send(&self, event: AttemptEvent) -> Result<(), Full> {
        match self.events.try_send(event) {
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Ok(()),
            Err(mpsc::error::TrySendError::Full(_)) => Err(Full),
        }
    }

    /// The reader finds `end` behind what is queued.
    pub fn end(self, end: AttemptEnd) {
        // The reader may be gone.
        let _ = self.end.send(end);
    }
}

/// The caller's end. Dropping it before its end cancels the attempt.
#[derive(Debug)]
pub(crate) struct AttemptStream {
    id: SequenceId,
    events: mpsc::Receiver<AttemptEvent>,
    /// `None` once the end was read.
    end: Option<oneshot::Receiver<AttemptEnd>>,
    cancel: CommandSender,
    place: Place,
}

/// An item of the stream.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Heard {
    Event(AttemptEvent),
    End(AttemptEnd),
}

/// Both ends of one attempt. `cancel` has room for one command of each place.
pub(crate) fn attempt_stream(
    id: SequenceId,
    cancel: CommandSender,
    place: Place,
) -> (EventSender, AttemptStream) {
    let (events, events_heard) = mpsc::channel(EVENTS_MAX);
    let (end, end_heard) = oneshot::channel();
    let stream = AttemptStream { id, events: events_heard, end: Some(end_heard), cancel, place };
    (EventSender { events, end }, stream)
}

impl AttemptStream {
    /// The attempt was refused: there is nothing to cancel.
    pub fn refused(mut self) {
        self.end = None;
    }
}

impl Stream for AttemptStream {
    type Item = Heard;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Heard>> {
        let this = &mut *self;
        let Some(end) = &mut this.end else { return Poll::Ready(None) };
        if let Some(event) = ready!(this.events.poll_recv(context)) {
            return Poll::Ready(Some(Heard::Event(event)));
        }
        // The engine dropped its end: after all events comes the last word, or the engine is gone.
        let end = ready!(Pin::new(end).poll(context))
            .unwrap_or_else(|_| AttemptEnd::failed(FailureKind::Internal, "the engine stopped"));
        this.end = None;
        Poll::Ready(Some(Heard::End(end)))
    }
}

impl Drop for AttemptStream {
    fn drop(&mut self) {
        if self.end.is_some() {
            let command = Command::Cancel { id: self.id, place: self.place.clone() };
            // Full is impossible by the count of places; disconnected means the engine is gone.
            let sent = self.cancel.send(command);
            debug_assert!(!matches!(sent, Err(TrySendError::Full(_))));
        }
    }
}

#[cfg(test)]
mod tests {
    use engine::executor::CollectWaker;
    use futures_util::StreamExt;
    use tokio::sync::Semaphore;

    use super::*;
    use crate::inbox::CommandReceiver;

    fn pair() -> (EventSender, AttemptStream, CommandReceiver) {
        let (inbox, commands) = CommandSender::new(4, CollectWaker::default());
        let place = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let (sender, stream) = attempt_stream(SequenceId(5), inbox, Arc::new(place));
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
    async fn the_end_comes_behind_all_events() {
        let (sender, mut stream, commands) = pair();
        sender.send(token(0)).unwrap();
        sender.send(token(1)).unwrap();
        sender.end(AttemptEnd::Complete);
        assert_eq!(stream.next().await, Some(Heard::Event(token(0))));
        assert_eq!(stream.next().await, Some(Heard::Event(token(1))));
        assert_eq!(stream.next().await, Some(Heard::End(AttemptEnd::Complete)));
        assert_eq!(stream.next().await, None);
        drop(stream);
        assert!(commands.is_empty(), "a stream that was read to its end cancels nothing");
    }

    #[tokio::test]
    async fn a_full_queue_still_delivers_its_end() {
        let (sender, mut stream, _commands) = pair();
        for index in 0..EVENTS_MAX as u32 {
            sender.send(token(index)).unwrap();
        }
        sender.send(token(0)).expect_err("the queue is full");
        sender.end(AttemptEnd::failed(FailureKind::SlowReader, "slow"));
        let heard: Vec<Heard> = stream.by_ref().collect().await;
        assert_eq!(heard.len(), EVENTS_MAX + 1);
        let end = AttemptEnd::failed(FailureKind::SlowReader, "slow");
        assert_eq!(heard.last(), Some(&Heard::End(end)));
    }

    #[tokio::test]
    async fn a_dropped_stream_cancels_its_attempt_once() {
        let (_sender, stream, commands) = pair();
        drop(stream);
        let command = commands.try_recv().unwrap();
        assert!(matches!(command, Command::Cancel { id: SequenceId(5), .. }));
        assert!(commands.is_empty());
    }

    #[tokio::test]
    async fn a_reader_learns_that_the_engine_is_gone() {
        let (sender, mut stream, _commands) = pair();
        drop(sender);
        let Some(Heard::End(AttemptEnd::Failed { kind, .. })) = stream.next().await else {
            panic!("no end");
        };
        assert_eq!(kind, FailureKind::Internal);
    }
}
