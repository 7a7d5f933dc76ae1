//! The bounded queue from the engine thread to one caller.
//!
//! The engine thread never waits for a reader: an attempt whose queue is full fails. The last reply
//! is always accepted. Dropping an [`AttemptStream`] before its last reply cancels its attempt.
//!
//! A step has a reply for every running attempt. [`ReplySender::send`] wakes no reader:
//! [`Readers::wake`] wakes the readers of a whole step at once, on a thread of the runtime.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker, ready},
};

use crossbeam_channel::TrySendError;
use futures_util::Stream;
use proto::v1::FailureKind;
use tokio::{runtime::Handle, sync::OwnedSemaphorePermit};
use tonic::Status;

use crate::{
    inbox::{CommandSender, EngineCommand},
    node_core::{AttemptEnd, CallId, Reply},
};

/// Maximum number of queued events of an attempt: about ten seconds of fast decoding, 100 KiB at
/// most.
const EVENTS_MAX: usize = 1024;

/// Permit that counts one attempt against the node's bound. The engine thread and the caller's
/// stream hold it; the attempt no longer counts when both have dropped it.
pub(crate) type AttemptPermit = Arc<OwnedSemaphorePermit>;

/// The queue of one attempt.
#[derive(Debug, Default)]
struct ReplyQueue {
    replies: VecDeque<Reply>,
    /// The reader that waits for a reply.
    reader: Option<Waker>,
    sender_dropped: bool,
    stream_dropped: bool,
}

#[derive(Clone, Debug, Default)]
struct SharedQueue(Arc<Mutex<ReplyQueue>>);

impl SharedQueue {
    fn lock(&self) -> MutexGuard<'_, ReplyQueue> {
        // Nothing panics while it holds the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The engine thread's end.
#[derive(Debug)]
pub(crate) struct ReplySender {
    queue: SharedQueue,
    /// Runs the reader.
    runtime: Handle,
}

/// The caller's queue is full.
#[derive(Debug)]
pub(crate) struct QueueFull;

/// Readers that have a reply and are not woken yet.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    wakers: Vec<Waker>,
    runtime: Option<Handle>,
}

impl ReplySender {
    /// Sends a reply to the stream. Never waits. A dropped stream is not an error: its cancel
    /// follows.
    pub(crate) fn send(&mut self, reply: Reply, readers: &mut Readers) -> Result<(), QueueFull> {
        let mut queue = self.queue.lock();
        if queue.stream_dropped {
            return Ok(());
        }
        if queue.replies.len() >= EVENTS_MAX && !reply.is_last() {
            return Err(QueueFull);
        }
        queue.replies.push_back(reply);
        if let Some(reader) = queue.reader.take() {
            readers.wakers.push(reader);
            readers.runtime.get_or_insert_with(|| self.runtime.clone());
        }
        Ok(())
    }
}

impl Drop for ReplySender {
    fn drop(&mut self) {
        let mut queue = self.queue.lock();
        queue.sender_dropped = true;
        let reader = queue.reader.take();
        drop(queue);
        reader.into_iter().for_each(Waker::wake);
    }
}

impl Readers {
    /// Wakes the readers of all replies that were sent since the last call. Waking one reader after
    /// the other from this thread would send their replies one by one.
    pub(crate) fn wake(&mut self) {
        if let (Some(runtime), false) = (&self.runtime, self.wakers.is_empty()) {
            let wakers = std::mem::take(&mut self.wakers);
            runtime.spawn(async move { wakers.into_iter().for_each(Waker::wake) });
        }
    }
}

/// The caller's end.
#[derive(Debug)]
pub(crate) struct AttemptStream {
    call: CallId,
    queue: SharedQueue,
    /// Whether the last reply was read, or none will come.
    is_over: bool,
    cancel: CommandSender,
    permit: AttemptPermit,
}

/// Returns both ends of one attempt's stream. `cancel` has room for one command of each permit.
/// Must be called inside the runtime that reads the stream.
pub(crate) fn attempt_stream(
    call: CallId,
    cancel: CommandSender,
    permit: AttemptPermit,
) -> (ReplySender, AttemptStream) {
    let queue = SharedQueue::default();
    let sender = ReplySender { queue: queue.clone(), runtime: Handle::current() };
    (sender, AttemptStream { call, queue, is_over: false, cancel, permit })
}

impl AttemptStream {
    /// Puts back the first reply, so that it is read again.
    pub(crate) fn put_back(&mut self, first: Reply) {
        self.queue.lock().replies.push_front(first);
    }

    /// Drops a call that the engine thread does not know: there is nothing to cancel.
    pub(crate) fn discard(mut self) {
        self.is_over = true;
    }
}

impl Stream for AttemptStream {
    type Item = Reply;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Reply>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let mut queue = self.queue.lock();
        let reply = match queue.replies.pop_front() {
            Some(reply) => reply,
            // Without a last reply the engine thread has ended.
            None if queue.sender_dropped => {
                Reply::Ended(AttemptEnd::failed(FailureKind::Internal, "the engine stopped"))
            }
            None => {
                queue.reader = Some(context.waker().clone());
                return Poll::Pending;
            }
        };
        drop(queue);
        self.is_over = reply.is_last();
        Poll::Ready(Some(reply))
    }
}

/// The messages of one call.
#[derive(Debug)]
pub(crate) struct MessageStream<T> {
    pub replies: AttemptStream,
    /// Converts a reply; `None`: the reply has no message.
    pub message: fn(Reply) -> Option<T>,
}

impl<T> Stream for MessageStream<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Some(reply) = ready!(Pin::new(&mut self.replies).poll_next(context)) else {
                return Poll::Ready(None);
            };
            if let Some(message) = (self.message)(reply) {
                return Poll::Ready(Some(Ok(message)));
            }
        }
    }
}

impl Drop for AttemptStream {
    fn drop(&mut self) {
        let mut queue = self.queue.lock();
        queue.stream_dropped = true;
        let unread = std::mem::take(&mut queue.replies);
        drop((queue, unread));
        if !self.is_over {
            let command = EngineCommand::Cancel { call: self.call, _permit: self.permit.clone() };
            // The number of permits bounds the queue, so it is never full. Disconnected: the engine
            // thread has ended.
            let sent = self.cancel.send(command);
            debug_assert!(!matches!(sent, Err(TrySendError::Full(_))));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use engine::{event::SequenceId, executor::CollectWaker};
    use futures_util::{FutureExt, StreamExt, poll};
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
            tokens: vec![SampledToken { id: 1, logprobs: None, pooled: None }],
            prompt_logprobs: None,
            cached_tokens: 0,
            weight_version: 1,
            finish: None,
            stages: None,
        })
    }

    fn send(sender: &mut ReplySender, reply: Reply) -> Result<(), QueueFull> {
        let mut readers = Readers::default();
        let sent = sender.send(reply, &mut readers);
        readers.wake();
        sent
    }

    #[tokio::test]
    async fn readers_of_one_step_are_woken_together() {
        let (mut readers, mut pairs) = (Readers::default(), [pair(), pair()]);
        for (_, stream, _) in &mut pairs {
            assert!(stream.next().now_or_never().is_none());
        }
        let [(first, one, _), (second, other, _)] = &mut pairs;
        let mut reading = pin!(async { tokio::join!(one.next(), other.next()) });
        assert!(poll!(&mut reading).is_pending());
        first.send(token(0), &mut readers).unwrap();
        second.send(token(1), &mut readers).unwrap();
        assert_eq!(readers.wakers.len(), 2);
        readers.wake();
        assert!(readers.wakers.is_empty());
        assert_eq!(reading.await, (Some(token(0)), Some(token(1))));
    }

    #[tokio::test]
    async fn stream_yields_its_end_after_all_events() {
        let (mut sender, mut stream, commands) = pair();
        send(&mut sender, token(0)).unwrap();
        send(&mut sender, token(1)).unwrap();
        send(&mut sender, Reply::Ended(AttemptEnd::Complete)).unwrap();
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
            send(&mut sender, token(index)).unwrap();
        }
        send(&mut sender, token(0)).expect_err("the queue is full");
        let end = Reply::Ended(AttemptEnd::failed(FailureKind::SlowReader, "slow"));
        send(&mut sender, end.clone()).unwrap();
        let items: Vec<Reply> = stream.by_ref().collect().await;
        assert_eq!(items.len(), EVENTS_MAX + 1);
        assert_eq!(items.last(), Some(&end));
    }

    #[tokio::test]
    async fn dropped_stream_cancels_its_attempt_once() {
        let (_sender, stream, commands) = pair();
        drop(stream);
        let command = commands.try_recv().unwrap();
        assert!(matches!(command, EngineCommand::Cancel { call: CALL, .. }));
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
