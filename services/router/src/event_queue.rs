//! The bounded queue between a request's task and whoever writes its answers to the client.
//!
//! Unlike a channel it can be emptied by its sender: a client that does not read keeps its stream
//! for as long as its connection lives, but not the events in it.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::Notify;

/// Sender and receiver of a queue that holds at most `events_max`.
pub fn event_queue<T>(events_max: usize) -> (Sender<T>, Receiver<T>) {
    let queue = Arc::new(Queue {
        events_max: events_max.max(1),
        state: Mutex::new(State {
            events: VecDeque::new(),
            taken: 0,
            sender_gone: false,
            receiver: There::Yes,
        }),
        put: Notify::new(),
        took: Notify::new(),
    });
    (Sender(queue.clone()), Receiver(queue))
}

#[derive(Debug)]
struct Queue<T> {
    events_max: usize,
    state: Mutex<State<T>>,
    /// An event was put in, or none will be any more.
    put: Notify,
    /// An event was taken out, or none will be any more.
    took: Notify,
}

#[derive(Debug)]
struct State<T> {
    events: VecDeque<T>,
    /// How many were taken out so far.
    taken: u64,
    sender_gone: bool,
    receiver: There,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum There {
    Yes,
    /// It left with events in the queue, or with none.
    Left {
        unread: bool,
    },
}

/// Why an event, or the last of them, was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// The receiver took nothing for as long as the caller allows.
    Slow,
    /// There is no receiver any more.
    Gone,
}

impl<T> Queue<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Nothing panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until `look` has a result, or the receiver took nothing for `wait_max`.
    async fn wait_until(
        &self,
        wait_max: Duration,
        mut look: impl FnMut(&mut State<T>) -> Option<Result<(), NotTaken>>,
    ) -> Result<(), NotTaken> {
        let mut taken = self.lock().taken;
        loop {
            let took = self.took.notified();
            tokio::pin!(took);
            // From here on no wake-up is missed.
            took.as_mut().enable();
            if let Some(result) = look(&mut self.lock()) {
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

/// For one task, or several futures of it.
#[derive(Debug)]
pub struct Sender<T>(Arc<Queue<T>>);

impl<T> Sender<T> {
    /// Waits for room, at most `wait_max` from the last event that was taken.
    pub async fn send(&self, event: T, wait_max: Duration) -> Result<(), NotTaken> {
        let mut event = Some(event);
        let put = |state: &mut State<T>| match state.receiver {
            There::Left { .. } => Some(Err(NotTaken::Gone)),
            There::Yes if state.events.len() < self.0.events_max => {
                state.events.extend(event.take());
                Some(Ok(()))
            }
            There::Yes => None,
        };
        self.0.wait_until(wait_max, put).await?;
        self.0.put.notify_one();
        Ok(())
    }

    /// Waits until every event was taken, at most `wait_max` from the last one that was.
    pub async fn read_out(&self, wait_max: Duration) -> Result<(), NotTaken> {
        let is_read = |state: &mut State<T>| match state.receiver {
            There::Left { unread: true } => Some(Err(NotTaken::Gone)),
            There::Left { unread: false } => Some(Ok(())),
            There::Yes => state.events.is_empty().then_some(Ok(())),
        };
        self.0.wait_until(wait_max, is_read).await
    }

    /// Drops what was not taken.
    pub fn discard(&self) {
        self.0.lock().events = VecDeque::new();
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.lock().sender_gone = true;
        self.0.put.notify_one();
    }
}

#[derive(Debug)]
pub struct Receiver<T>(Arc<Queue<T>>);

impl<T> Receiver<T> {
    /// The next event; `None` when there is none and the sender is gone. Dropping the future loses
    /// nothing.
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
                if state.sender_gone {
                    return None;
                }
            }
            // There is one receiver, so a wake-up before this is kept for it.
            self.0.put.notified().await;
        }
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        let unread = std::mem::take(&mut state.events);
        state.receiver = There::Left { unread: !unread.is_empty() };
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
    async fn a_receiver_that_takes_nothing_is_slow_and_one_that_is_gone_is_gone() {
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
    async fn slow_but_steady_is_read_out_and_stopped_is_emptied() {
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
        assert_eq!(receiver.recv().await, None, "what nobody took is gone");
    }
}
