//! The bounded queue between a request's task and the writer of its answers.
//!
//! Unlike a channel, the sender can empty the queue: a client that does not read keeps its stream as long as
//! its connection lives, but not the queued events.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::Notify;

/// Returns sender and receiver of a queue of at most `events_max` events.
pub fn event_queue<T>(events_max: usize) -> (Sender<T>, Receiver<T>) {
    let queue = Arc::new(Queue {
        events_max: events_max.max(1),
        state: Mutex::new(State {
            events: VecDeque::new(),
            taken: 0,
            sender_dropped: false,
            receiver: ReceiverState::Connected,
        }),
        queued: Notify::new(),
        took: Notify::new(),
    });
    (Sender(queue.clone()), Receiver(queue))
}

#[derive(Debug)]
struct Queue<T> {
    events_max: usize,
    state: Mutex<State<T>>,
    /// Notified when an event was queued, or the sender dropped.
    queued: Notify,
    /// Notified when an event was taken, or the receiver dropped.
    took: Notify,
}

#[derive(Debug)]
struct State<T> {
    events: VecDeque<T>,
    /// Number of events taken so far.
    taken: u64,
    sender_dropped: bool,
    receiver: ReceiverState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReceiverState {
    Connected,
    /// `unread`: events were queued when the receiver was dropped.
    Dropped {
        unread: bool,
    },
}

/// Why queued events were not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// The receiver took nothing within the time-out.
    Slow,
    /// The receiver was dropped.
    Gone,
}

impl<T> Queue<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Nothing panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks until `check` returns a result, or the receiver took nothing for `wait_max`.
    async fn wait_until(
        &self,
        wait_max: Duration,
        mut check: impl FnMut(&mut State<T>) -> Option<Result<(), NotTaken>>,
    ) -> Result<(), NotTaken> {
        let mut taken = self.lock().taken;
        loop {
            let took = self.took.notified();
            tokio::pin!(took);
            // No wake-up is missed from here on.
            took.as_mut().enable();
            if let Some(result) = check(&mut self.lock()) {
                return result;
            }
            let woken = tokio::time::timeout(wait_max, took).await;
            let now = self.lock().taken;
            if woken.is_err() && now == taken {
                return Err(NotTaken::Slow);
            }
            taken = now;
        }
    }
}

/// Sender of the queue, for one task or several of its futures.
#[derive(Debug)]
pub struct Sender<T>(Arc<Queue<T>>);

impl<T> Sender<T> {
    /// Queues an event. Blocks while the queue is full, at most `wait_max` after the last event was taken.
    pub async fn send(&self, event: T, wait_max: Duration) -> Result<(), NotTaken> {
        let mut event = Some(event);
        let put = |state: &mut State<T>| match state.receiver {
            ReceiverState::Dropped { .. } => Some(Err(NotTaken::Gone)),
            ReceiverState::Connected if state.events.len() < self.0.events_max => {
                state.events.extend(event.take());
                Some(Ok(()))
            }
            ReceiverState::Connected => None,
        };
        self.0.wait_until(wait_max, put).await?;
        self.0.queued.notify_one();
        Ok(())
    }

    /// Blocks until every event was taken, at most `wait_max` after the last event was taken.
    pub async fn read_out(&self, wait_max: Duration) -> Result<(), NotTaken> {
        let is_read = |state: &mut State<T>| match state.receiver {
            ReceiverState::Dropped { unread: true } => Some(Err(NotTaken::Gone)),
            ReceiverState::Dropped { unread: false } => Some(Ok(())),
            ReceiverState::Connected => state.events.is_empty().then_some(Ok(())),
        };
        self.0.wait_until(wait_max, is_read).await
    }

    /// Drops all queued events.
    pub fn discard(&self) {
        self.0.lock().events = VecDeque::new();
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.lock().sender_dropped = true;
        self.0.queued.notify_one();
    }
}

/// Receiver of the queue.
#[derive(Debug)]
pub struct Receiver<T>(Arc<Queue<T>>);

impl<T> Receiver<T> {
    /// Returns the next event; `None` when the queue is empty and the sender was dropped. Cancel-safe.
    pub async fn recv(&mut self) -> Option<T> {
        loop {
            {
                let mut state = self.0.lock();
                if let Some(event) = state.events.pop_front() {
                    state.taken += 1;
                    drop(state);
                    self.0.took.notify_waiters();
                    return Some(event);
                }
                if state.sender_dropped {
                    return None;
                }
            }
            // The only receiver: `Notify` keeps an earlier wake-up for it.
            self.0.queued.notified().await;
        }
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        let unread = std::mem::take(&mut state.events);
        state.receiver = ReceiverState::Dropped { unread: !unread.is_empty() };
        drop(state);
        self.0.took.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn events_keep_their_order_through_a_queue_of_one() {
        let (sender, mut receiver) = event_queue(1);
        let send = async {
            for number in 0..100 {
                sender.send(number, LONG).await.unwrap();
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
        assert_eq!(tokio::join!(send, receive).1, (0..100).collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn a_receiver_that_takes_nothing_is_slow_and_a_dropped_one_is_gone() {
        let (sender, mut receiver) = event_queue(2);
        sender.send(1, SHORT).await.unwrap();
        sender.send(2, SHORT).await.unwrap();
        assert_eq!(sender.send(3, SHORT).await, Err(NotTaken::Slow));
        assert_eq!(receiver.recv().await, Some(1));
        sender.send(3, SHORT).await.unwrap();
        drop(receiver);
        assert_eq!(sender.send(4, LONG).await, Err(NotTaken::Gone));
        assert_eq!(sender.read_out(LONG).await, Err(NotTaken::Gone));
    }

    #[tokio::test(start_paused = true)]
    async fn a_receiver_that_leaves_after_the_last_event_has_read_everything() {
        let (sender, mut receiver) = event_queue(2);
        sender.send(1, SHORT).await.unwrap();
        assert_eq!(receiver.recv().await, Some(1));
        drop(receiver);
        assert_eq!(sender.read_out(SHORT).await, Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_receiver_reads_everything_and_a_stalled_one_can_be_discarded() {
        let (sender, mut receiver) = event_queue(10);
        for number in 0..10 {
            sender.send(number, SHORT).await.unwrap();
        }
        let take = async {
            for _ in 0..10 {
                tokio::time::sleep(SHORT / 2).await;
                receiver.recv().await.unwrap();
            }
            receiver
        };
        let (read_out, mut receiver) = tokio::join!(sender.read_out(SHORT), take);
        assert_eq!(read_out, Ok(()));

        sender.send(11, SHORT).await.unwrap();
        assert_eq!(sender.read_out(SHORT).await, Err(NotTaken::Slow));
        sender.discard();
        drop(sender);
        assert_eq!(receiver.recv().await, None, "discarded");
    }
}
