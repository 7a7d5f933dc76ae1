//! Futures that share a task with a stream of tokens and are not polled for each token.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    task::{Context, Poll, Waker, ready},
};

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::{
    task::unconstrained,
    time::{Instant, Sleep, sleep_until},
};

/// Runs `work`, and polls it only when `work` itself was woken, not whenever its task is woken.
pub(crate) async fn when_woken<T>(work: impl Future<Output = T>) -> T {
    let mut works = FuturesUnordered::from_iter([work]);
    works.next().await.expect("the set has one future")
}

/// A timer whose deadline moves with each token.
pub(crate) struct MovingTimer {
    sleep: Pin<Box<Sleep>>,
    /// Waker that the runtime's timer holds until it fires.
    waker: Option<Waker>,
}

impl MovingTimer {
    pub(crate) fn new(deadline: Instant) -> Self {
        Self { sleep: Box::pin(sleep_until(deadline)), waker: None }
    }

    /// Completes at `deadline`. The runtime's timer may be set to an earlier time and is reset when
    /// it fires: most deadlines move before they are reached. Cancel-safe.
    pub(crate) async fn reached(&mut self, deadline: Instant) {
        poll_fn(|cx| self.poll_reached(cx, deadline)).await;
    }

    /// Polls [`Self::reached`].
    pub(crate) fn poll_reached(&mut self, cx: &mut Context<'_>, deadline: Instant) -> Poll<()> {
        let Self { sleep, waker } = self;
        if sleep.deadline() > deadline {
            sleep.as_mut().reset(deadline);
        }
        // Most polls follow a token, and the runtime's timer has not fired.
        if !sleep.is_elapsed() && waker.as_ref().is_some_and(|held| held.will_wake(cx.waker())) {
            return Poll::Pending;
        }
        *waker = Some(cx.waker().clone());
        loop {
            // A task without budget would not reach the runtime's timer.
            ready!(pin!(unconstrained(sleep.as_mut())).poll(cx));
            if sleep.deadline() >= deadline {
                *waker = None;
                return Poll::Ready(());
            }
            sleep.as_mut().reset(deadline);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::task::coop;

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

    #[tokio::test(start_paused = true)]
    async fn timer_fires_though_its_task_had_no_budget_at_the_first_poll() {
        let deadline = Instant::now() + Duration::from_secs(1);
        let mut timer = MovingTimer::new(deadline);
        while coop::has_budget_remaining() {
            let _ = futures_util::poll!(pin!(coop::consume_budget()));
        }
        let reached = tokio::time::timeout(Duration::from_secs(2), timer.reached(deadline));
        reached.await.expect("the timer fires");
        assert_eq!(Instant::now(), deadline);
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
