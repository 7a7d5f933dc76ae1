//! Futures that share a task with a stream of tokens and are not polled for each token.

use std::pin::Pin;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Instant, Sleep, sleep_until};

/// Runs `work`, and polls it only when `work` itself was woken, not whenever its task is woken.
pub async fn when_woken<T>(work: impl Future<Output = T>) -> T {
    let mut works = FuturesUnordered::from_iter([work]);
    works.next().await.expect("the set has one future")
}

/// A timer whose deadline moves with each token.
pub struct MovingTimer(Pin<Box<Sleep>>);

impl MovingTimer {
    pub fn new(deadline: Instant) -> Self {
        Self(Box::pin(sleep_until(deadline)))
    }

    /// Completes at `deadline`. The runtime's timer may be set to an earlier time and is reset when it fires:
    /// most deadlines move before they are reached. Cancel-safe.
    pub async fn reached(&mut self, deadline: Instant) {
        if self.0.deadline() > deadline {
            self.0.as_mut().reset(deadline);
        }
        loop {
            self.0.as_mut().await;
            if self.0.deadline() >= deadline {
                return;
            }
            self.0.as_mut().reset(deadline);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn timer_completes_at_the_last_deadline_that_it_was_given() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut timer = MovingTimer::new(at(5));
        // Deadlines that move later, earlier, lie in the past, and repeat.
        for (deadline, reached) in [(7, 7), (20, 20), (20, 20), (19, 20), (21, 21)] {
            timer.reached(at(deadline)).await;
            assert_eq!(Instant::now(), at(reached));
        }
        tokio::select! {
            biased;
            () = timer.reached(at(60)) => panic!("too early"),
            () = std::future::ready(()) => {}
        }
        timer.reached(at(30)).await;
        assert_eq!(Instant::now(), at(30));
    }

    #[tokio::test]
    async fn work_is_polled_when_it_is_woken() {
        let (notify, polls) = (tokio::sync::Notify::new(), std::cell::Cell::new(0));
        let mut notified = std::pin::pin!(notify.notified());
        let counted = std::future::poll_fn(|context| {
            polls.set(polls.get() + 1);
            notified.as_mut().poll(context)
        });
        let mut work = std::pin::pin!(when_woken(counted));
        for _ in 0..3 {
            assert!(futures_util::poll!(&mut work).is_pending());
        }
        assert_eq!(polls.get(), 1);
        notify.notify_waiters();
        work.await;
        assert_eq!(polls.get(), 2);
    }
}
