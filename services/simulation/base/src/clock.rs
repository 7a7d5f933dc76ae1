//! The virtual clock and its pending events.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    time::{Duration, Instant},
};

/// More events than this at one instant are a livelock.
const EVENTS_AT_ONCE_MAX: u32 = 1_000_000;

/// A virtual clock. It jumps from one event or deadline to the next.
#[derive(Debug)]
pub struct Clock<E> {
    start: Instant,
    now: Instant,
    /// Events at `now` since the clock last moved.
    events_at_now: u32,
    scheduled: u64,
    /// Time, number and index in `events` of each pending event.
    pending: BinaryHeap<Reverse<(Instant, u64, usize)>>,
    events: Vec<Option<E>>,
    /// Unused indices of `events`.
    unused: Vec<usize>,
}

/// The reason why [`Clock::advance`] returned.
#[derive(Debug, PartialEq, Eq)]
pub enum Due<E> {
    Event(E),
    /// The caller's deadline.
    Deadline,
}

impl<E> Default for Clock<E> {
    fn default() -> Self {
        let start = Instant::now();
        Self {
            start,
            now: start,
            events_at_now: 0,
            scheduled: 0,
            pending: BinaryHeap::new(),
            events: Vec::new(),
            unused: Vec::new(),
        }
    }
}

impl<E> Clock<E> {
    pub fn now(&self) -> Instant {
        self.now
    }

    pub fn start(&self) -> Instant {
        self.start
    }

    pub fn elapsed(&self) -> Duration {
        self.now - self.start
    }

    /// Returns how many events were scheduled so far.
    pub fn scheduled(&self) -> u64 {
        self.scheduled
    }

    /// Schedules an event. Events of one instant keep the order in which they were scheduled.
    pub fn at(&mut self, at: Instant, event: E) {
        self.scheduled += 1;
        let index = self.unused.pop().unwrap_or(self.events.len());
        match self.events.get_mut(index) {
            Some(place) => *place = Some(event),
            None => self.events.push(Some(event)),
        }
        self.pending.push(Reverse((at.max(self.now), self.scheduled, index)));
    }

    pub fn after(&mut self, delay: Duration, event: E) {
        self.at(self.now + delay, event);
    }

    /// Moves to the next event or to `deadline`, whichever is first, but not beyond `end`. At one
    /// instant events come before the deadline. Returns `None` at `end`.
    pub fn advance(&mut self, deadline: Option<Instant>, end: Instant) -> Option<Due<E>> {
        let event_at = self.pending.peek().map(|Reverse((at, ..))| *at);
        let at = [event_at, deadline].into_iter().flatten().min().filter(|at| *at <= end);
        let Some(at) = at else {
            self.now = self.now.max(end);
            self.events_at_now = 0;
            return None;
        };
        self.events_at_now = if at > self.now { 0 } else { self.events_at_now + 1 };
        assert!(self.events_at_now < EVENTS_AT_ONCE_MAX, "livelock: time stands still");
        self.now = self.now.max(at);
        if event_at != Some(at) {
            return Some(Due::Deadline);
        }
        let Reverse((.., index)) = self.pending.pop()?;
        self.unused.push(index);
        self.events[index].take().map(Due::Event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_of_time_and_before_a_deadline_of_the_same_instant() {
        let mut clock = Clock::default();
        let at = |ms| clock_start_plus(&clock, ms);
        let (one, two, end) = (at(1), at(2), at(10));
        clock.at(two, 'c');
        clock.at(one, 'a');
        clock.at(one, 'b');
        assert_eq!(clock.advance(Some(two), end), Some(Due::Event('a')));
        assert_eq!(clock.advance(Some(two), end), Some(Due::Event('b')));
        assert_eq!(clock.now(), one);
        assert_eq!(clock.advance(Some(two), end), Some(Due::Event('c')));
        assert_eq!(clock.advance(Some(two), end), Some(Due::Deadline));
        assert_eq!(clock.advance(None, end), None);
        assert_eq!(clock.now(), end);
    }

    fn clock_start_plus(clock: &Clock<char>, ms: u64) -> Instant {
        clock.start() + Duration::from_millis(ms)
    }

    #[test]
    #[should_panic(expected = "livelock")]
    fn a_livelock_is_detected() {
        let mut clock = Clock::<()>::default();
        let (now, end) = (clock.now(), clock.now() + Duration::from_secs(1));
        while clock.advance(Some(now), end).is_some() {}
    }
}
