//! Ends a channel on which nothing goes on.

use std::{
    sync::{
        Arc, Weak,
        mpsc::{self, RecvTimeoutError},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use super::{operations::Shared, words};

/// From one look at what may be stuck to the next. How long it stays is counted in looks: what this process, or the
/// machine, was stopped for counts as one.
pub(super) const LOOK: Duration = Duration::from_millis(50);

/// For how many looks something may stay.
#[derive(Clone, Copy, Debug)]
pub(super) struct Looks {
    /// Whoever waits for it gives up sooner.
    pub stuck: u32,
    /// When it is in its streams, and somebody is held up who wants something of the driver. Of what is not, or not all
    /// of it, nobody can tell whether it holds others up or is held up itself.
    pub holds_up: u32,
}

/// The oldest operation of a channel, 2.5 s and 0.2 s: they take milliseconds.
const OPERATION: Looks = Looks { stuck: 50, holds_up: 4 };

/// A thread that ends a channel on which nothing goes on, and calls no driver before: that one may wait for the
/// end of this channel, beside the end of another one, and let no other thread know. Then other pairs, and forwards,
/// wait as well, so this channel ends much sooner.
pub(super) struct Watch {
    /// Dropped to end the thread.
    over: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub fn start(shared: &Arc<Shared>) -> Result<Self, String> {
        let (over, ended) = mpsc::channel();
        let shared = Arc::downgrade(shared);
        let named = thread::Builder::new().name("nccl-watch".to_owned());
        let thread = named.spawn(move || watch(&shared, &ended)).map_err(words)?;
        Ok(Self { over: Some(over), thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.over.take());
        if let Some(thread) = self.thread.take() {
            // It says nothing that anybody waits for.
            let _ = thread.join();
        }
    }
}

fn watch(shared: &Weak<Shared>, ended: &mpsc::Receiver<()>) {
    let mut stay = Stay::new(OPERATION);
    while ended.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
        let Some(shared) = shared.upgrade() else { return };
        if let Some(reason) = stay.is_too_long(shared.oldest(), || shared.is_anyone_held_up()) {
            // Whoever waits for it hears of it by that.
            let _ = shared.abort_because(reason);
            return;
        }
    }
}

/// The operation that has waited longest on a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Oldest {
    pub number: u64,
    /// All of it is in its streams.
    pub is_put: bool,
}

/// How many looks ago the oldest operation was first seen as that.
pub(super) struct Stay {
    allowed: Looks,
    oldest: Option<Oldest>,
    looks: u32,
    /// Since it was put.
    looks_put: u32,
}

impl Stay {
    pub fn new(allowed: Looks) -> Self {
        Self { allowed, oldest: None, looks: 0, looks_put: 0 }
    }

    /// After one look more; why, where it is.
    pub fn is_too_long(
        &mut self,
        oldest: Option<Oldest>,
        is_held_up: impl Fn() -> bool,
    ) -> Option<&'static str> {
        let number = |oldest: Option<Oldest>| oldest.map(|oldest| oldest.number);
        let is_same = number(oldest) == number(self.oldest);
        self.looks = if is_same { self.looks.saturating_add(1) } else { 0 };
        self.looks_put = if oldest == self.oldest { self.looks_put.saturating_add(1) } else { 0 };
        self.oldest = oldest;
        let oldest = oldest?;
        let Looks { stuck, holds_up } = self.allowed;
        if oldest.is_put && self.looks_put >= holds_up && is_held_up() {
            return Some(
                "the channel was aborted: an operation did not end, and others waited for the GPU",
            );
        }
        (self.looks >= stuck).then_some("the channel was aborted: an operation did not end")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many looks it takes until an operation is ended.
    fn looks_until_the_end(is_put: impl Fn(u32) -> bool, is_held_up: bool) -> u32 {
        let mut stay = Stay::new(OPERATION);
        let oldest = |look| Some(Oldest { number: 7, is_put: is_put(look) });
        (0..1000).find(|look| stay.is_too_long(oldest(*look), || is_held_up).is_some()).unwrap()
    }

    #[test]
    fn an_operation_that_stays_is_ended_sooner_when_others_are_held_up() {
        let Looks { stuck, holds_up } = OPERATION;
        assert_eq!(looks_until_the_end(|_| true, false), stuck);
        assert_eq!(looks_until_the_end(|_| false, false), stuck);
        assert_eq!(looks_until_the_end(|_| true, true), holds_up);
        assert_eq!(looks_until_the_end(|_| false, true), stuck);
        assert_eq!(looks_until_the_end(|look| look >= 10, true), 10 + holds_up);
        // That it was put at last makes it no younger.
        assert_eq!(looks_until_the_end(|look| look >= 30, false), stuck);
    }

    #[test]
    fn operations_that_end_are_not_ended() {
        let mut stay = Stay::new(OPERATION);
        for look in 0..1000 {
            // Another one at every third look, and none at times.
            let oldest = Oldest { number: look / 3, is_put: true };
            let oldest = (look % 7 > 0).then_some(oldest);
            assert_eq!(stay.is_too_long(oldest, || true), None, "{look}");
        }
    }
}
