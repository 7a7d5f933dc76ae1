//! The events of a request's answers, and the bounded queue that carries them from the request's
//! task to the writer of its response.
//!
//! Unlike the sender of a channel, this sender can empty the queue. The stream of a client that
//! does not read lives as long as the client's connection, and must not keep the queued events in
//! memory until then.

use std::{
    collections::VecDeque,
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard},
    task::{Poll, Waker},
    time::Duration,
};

use proto::v1::{FinishReason, PromptLogprobs, Token};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::Notify;

use router_core::HandOverStats;

use crate::{lock::lock, request::error::RequestError};

/// An event of one of the request's answers.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AnswerEvent {
    Tokens(AnswerTokens),
    Finished(AnswerEnd),
}

/// Emitted tokens, and the text that they complete.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AnswerTokens {
    /// Index of the answer among the answers of the request.
    pub choice: u32,
    /// Index of the first token in the whole answer.
    pub first_index: u32,
    pub tokens: Vec<Token>,
    /// With token 0, if the client asked for them: log-probabilities of the prompt.
    pub prompt: Option<PromptLogprobs>,
    /// Empty while a character, or a possible stop string, is incomplete.
    pub text: String,
    /// Whether a stop or the limit of tokens is reached: then only the end of the answer follows.
    pub is_last: bool,
}

/// The end of a complete answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AnswerEnd {
    pub choice: u32,
    pub reason: FinishReason,
    pub stop_reason: Option<StopReason>,
    /// The rest of the text, which was held back.
    pub text: String,
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    /// Prompt tokens found in a prefix cache.
    pub cached_tokens: u32,
    pub hand_over: HandOverStats,
}

impl AnswerEnd {
    /// Returns whether something else than the model ended the answer: a limit, a stop of the
    /// client, or an abort.
    pub(crate) fn is_cut(&self) -> bool {
        self.reason != FinishReason::Stop || self.stop_reason.is_some()
    }
}

/// The stop token or the stop string of the client that ended the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
pub(crate) enum StopReason {
    Token(u32),
    Text(String),
}

/// Returns sender and receiver of a queue of at most `events_max` events. A send fails if the
/// receiver takes no event for `wait_max`.
pub(super) fn event_queue(events_max: usize, wait_max: Duration) -> (EventSender, EventReceiver) {
    let queue = Arc::new(AnswerEventQueue {
        events_max: events_max.max(1),
        wait_max,
        state: Mutex::new(AnswerEventQueueState {
            events: VecDeque::new(),
            taken: 0,
            sender_dropped: false,
            receiver: ReceiverState::Connected,
            reader: None,
        }),
        took: Notify::new(),
    });
    (EventSender(queue.clone()), EventReceiver(queue))
}

#[derive(Debug)]
struct AnswerEventQueue {
    events_max: usize,
    wait_max: Duration,
    state: Mutex<AnswerEventQueueState>,
    /// Notified when an event was taken, or the receiver dropped.
    took: Notify,
}

#[derive(Debug)]
struct AnswerEventQueueState {
    events: VecDeque<AnswerEvent>,
    /// Number of events taken so far.
    taken: u64,
    sender_dropped: bool,
    receiver: ReceiverState,
    /// Woken when an event is queued, or the sender dropped.
    reader: Option<Waker>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReceiverState {
    Connected,
    /// `unread`: events were queued when the receiver was dropped.
    Dropped {
        unread: bool,
    },
}

impl AnswerEventQueue {
    fn lock(&self) -> MutexGuard<'_, AnswerEventQueueState> {
        lock(&self.state)
    }

    fn is_half_read(&self, state: &AnswerEventQueueState) -> bool {
        state.events.len() <= self.events_max.div_ceil(2)
    }

    /// Blocks until `check` returns a result, or the receiver took nothing for `wait_max`.
    async fn wait_until(
        &self,
        mut check: impl FnMut(&mut AnswerEventQueueState) -> Option<Result<(), RequestError>>,
    ) -> Result<(), RequestError> {
        let mut taken = {
            let mut state = self.lock();
            if let Some(result) = check(&mut state) {
                return result;
            }
            state.taken
        };
        loop {
            let took = self.took.notified();
            tokio::pin!(took);
            // No wake-up is missed from here on.
            took.as_mut().enable();
            if let Some(result) = check(&mut self.lock()) {
                return result;
            }
            let woken = tokio::time::timeout(self.wait_max, took).await;
            let now = self.lock().taken;
            if woken.is_err() && now == taken {
                return Err(RequestError::SlowClient { waited: self.wait_max });
            }
            taken = now;
        }
    }
}

/// Sender of the events of a request. A client that does not read blocks its own request only.
#[derive(Debug)]
pub(super) struct EventSender(Arc<AnswerEventQueue>);

impl EventSender {
    /// Queues an event. Returns the event if the queue is full.
    pub(super) fn try_send(&self, event: AnswerEvent) -> Result<Option<AnswerEvent>, RequestError> {
        let mut state = self.0.lock();
        match state.receiver {
            ReceiverState::Dropped { .. } => return Err(RequestError::ClientGone),
            ReceiverState::Connected if state.events.len() < self.0.events_max => {
                state.events.push_back(event);
            }
            ReceiverState::Connected => return Ok(Some(event)),
        }
        let reader = state.reader.take();
        drop(state);
        reader.into_iter().for_each(Waker::wake);
        Ok(None)
    }

    /// Queues an event. Blocks while the queue is full.
    pub(super) async fn send(&self, event: AnswerEvent) -> Result<(), RequestError> {
        let events_max = self.0.events_max;
        let has_room = |state: &mut AnswerEventQueueState| match state.receiver {
            ReceiverState::Dropped { .. } => Some(Err(RequestError::ClientGone)),
            ReceiverState::Connected => (state.events.len() < events_max).then_some(Ok(())),
        };
        let mut unsent = self.try_send(event)?;
        while let Some(event) = unsent {
            self.0.wait_until(has_room).await?;
            unsent = self.try_send(event)?;
        }
        Ok(())
    }

    /// Blocks until every event was taken.
    pub(super) async fn read_out(&self) -> Result<(), RequestError> {
        let is_read = |state: &mut AnswerEventQueueState| match state.receiver {
            ReceiverState::Dropped { unread: true } => Some(Err(RequestError::ClientGone)),
            ReceiverState::Dropped { unread: false } => Some(Ok(())),
            ReceiverState::Connected => state.events.is_empty().then_some(Ok(())),
        };
        self.0.wait_until(is_read).await
    }

    /// Returns whether the queue holds at most half of its maximum.
    pub(super) fn is_half_read(&self) -> bool {
        self.0.is_half_read(&self.0.lock())
    }

    /// Blocks until the queue holds at most half of its maximum.
    pub(super) async fn half_read(&self) -> Result<(), RequestError> {
        let is_read = |state: &mut AnswerEventQueueState| match state.receiver {
            ReceiverState::Dropped { .. } => Some(Err(RequestError::ClientGone)),
            ReceiverState::Connected => self.0.is_half_read(state).then_some(Ok(())),
        };
        self.0.wait_until(is_read).await
    }

    /// Drops all queued events.
    pub(super) fn discard(&self) {
        self.0.lock().events = VecDeque::new();
    }
}

impl Drop for EventSender {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.sender_dropped = true;
        let reader = state.reader.take();
        drop(state);
        reader.into_iter().for_each(Waker::wake);
    }
}

/// Receiver of the events of a request.
#[derive(Debug)]
pub(super) struct EventReceiver(Arc<AnswerEventQueue>);

impl EventReceiver {
    /// Returns the next event; `None` when the queue is empty and the sender was dropped.
    /// Cancel-safe.
    pub(super) async fn recv(&mut self) -> Option<AnswerEvent> {
        poll_fn(|context| {
            let mut state = self.0.lock();
            if state.events.is_empty() && !state.sender_dropped {
                match &mut state.reader {
                    Some(reader) => reader.clone_from(context.waker()),
                    none => *none = Some(context.waker().clone()),
                }
                return Poll::Pending;
            }
            Poll::Ready(self.take(state))
        })
        .await
    }

    /// Returns the next event if one is queued.
    pub(super) fn recv_queued(&mut self) -> Option<AnswerEvent> {
        self.take(self.0.lock())
    }

    fn take(&self, mut state: MutexGuard<'_, AnswerEventQueueState>) -> Option<AnswerEvent> {
        let event = state.events.pop_front()?;
        state.taken += 1;
        drop(state);
        self.0.took.notify_waiters();
        Some(event)
    }
}

impl Drop for EventReceiver {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        let unread = std::mem::take(&mut state.events);
        state.receiver = ReceiverState::Dropped { unread: !unread.is_empty() };
        drop(state);
        self.0.took.notify_waiters();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::request_driver) fn event(choice: u32) -> AnswerEvent {
        AnswerEvent::Tokens(AnswerTokens {
            choice,
            first_index: 0,
            tokens: vec![],
            prompt: None,
            text: "t".into(),
            is_last: false,
        })
    }

    const SLOW: Result<(), RequestError> = Err(RequestError::SlowClient { waited: SHORT });
    const GONE: Result<(), RequestError> = Err(RequestError::ClientGone);
    const SHORT: Duration = Duration::from_millis(20);

    #[tokio::test(start_paused = true)]
    async fn events_keep_their_order_through_a_queue_of_one() {
        let (sender, mut receiver) = event_queue(1, SHORT);
        let send = async {
            for number in 0..100 {
                sender.send(event(number)).await.unwrap();
            }
            drop(sender);
        };
        let receive = async {
            let mut found = Vec::new();
            while let Some(number) = receiver.recv().await {
                found.push(number);
            }
            found
        };
        assert_eq!(tokio::join!(send, receive).1, (0..100).map(event).collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn queued_events_are_received_without_waiting_and_make_room() {
        let (sender, mut receiver) = event_queue(2, SHORT);
        assert_eq!(receiver.recv_queued(), None);
        assert_eq!(sender.try_send(event(1)), Ok(None));
        sender.send(event(2)).await.unwrap();
        assert_eq!(sender.try_send(event(3)), Ok(Some(event(3))), "the queue is full");
        let (sent, received) = tokio::join!(sender.send(event(3)), async {
            [receiver.recv_queued(), receiver.recv_queued()]
        });
        assert_eq!((sent, received), (Ok(()), [Some(event(1)), Some(event(2))]));
        assert_eq!((receiver.recv_queued(), receiver.recv_queued()), (Some(event(3)), None));
        drop(sender);
        assert_eq!(receiver.recv().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_receiver_that_takes_nothing_is_slow_and_a_dropped_one_is_gone() {
        let (sender, mut receiver) = event_queue(2, SHORT);
        sender.send(event(1)).await.unwrap();
        sender.send(event(2)).await.unwrap();
        assert_eq!(sender.send(event(3)).await, SLOW);
        assert_eq!(receiver.recv().await, Some(event(1)));
        sender.send(event(3)).await.unwrap();
        drop(receiver);
        assert_eq!(sender.send(event(4)).await, GONE);
        assert_eq!(sender.try_send(event(4)), Err(RequestError::ClientGone));
        assert_eq!(sender.read_out().await, GONE);
    }

    #[tokio::test(start_paused = true)]
    async fn half_of_a_full_queue_is_read_before_the_answer_goes_on() {
        let (sender, mut receiver) = event_queue(4, SHORT);
        for number in 0..4 {
            sender.send(event(number)).await.unwrap();
        }
        let mut half = std::pin::pin!(sender.half_read());
        receiver.recv().await.unwrap();
        assert!(futures_util::poll!(&mut half).is_pending());
        receiver.recv().await.unwrap();
        assert_eq!(half.await, Ok(()));
        for number in 0..2 {
            sender.send(event(number)).await.unwrap();
        }
        assert_eq!(sender.half_read().await, SLOW);
    }

    #[tokio::test(start_paused = true)]
    async fn a_receiver_that_leaves_after_the_last_event_has_read_everything() {
        let (sender, mut receiver) = event_queue(2, SHORT);
        sender.send(event(1)).await.unwrap();
        assert_eq!(receiver.recv().await, Some(event(1)));
        drop(receiver);
        assert_eq!(sender.read_out().await, Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_receiver_reads_everything_and_a_stalled_one_can_be_discarded() {
        let (sender, mut receiver) = event_queue(10, SHORT);
        for number in 0..10 {
            sender.send(event(number)).await.unwrap();
        }
        let take = async {
            for _ in 0..10 {
                tokio::time::sleep(SHORT / 2).await;
                receiver.recv().await.unwrap();
            }
            receiver
        };
        let (read_out, mut receiver) = tokio::join!(sender.read_out(), take);
        assert_eq!(read_out, Ok(()));

        sender.send(event(11)).await.unwrap();
        assert_eq!(sender.read_out().await, SLOW);
        sender.discard();
        drop(sender);
        assert_eq!(receiver.recv().await, None, "discarded");
    }
}
