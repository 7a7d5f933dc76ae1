//! Times in which no message of a process arrives.

use std::time::Instant;

/// A time during which no message of process `of` reached process `to` (any process if `to` is
/// `None`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outage {
    of: usize,
    to: Option<usize>,
    pub from: Instant,
    pub until: Option<Instant>,
}

/// The outages of all processes, in the order of their begin.
#[derive(Default)]
pub(crate) struct Outages(Vec<Outage>);

impl Outages {
    pub(crate) fn begin(&mut self, of: usize, to: Option<usize>, now: Instant) {
        self.0.push(Outage { of, to, from: now, until: None });
    }

    /// Ends the outages of a partition.
    pub(crate) fn heal(&mut self, a: usize, b: usize, now: Instant) {
        self.end(now, |outage| outage.to.is_some() && [a, b].contains(&outage.of));
    }

    /// Ends the outage of a process that was paused.
    pub(crate) fn resume(&mut self, process: usize, now: Instant) {
        self.end(now, |outage| outage.of == process && outage.to.is_none());
    }

    fn end(&mut self, now: Instant, ends: impl Fn(&Outage) -> bool) {
        for outage in self.0.iter_mut().filter(|outage| outage.until.is_none() && ends(outage)) {
            outage.until = Some(now);
        }
    }

    /// Returns the outages of `of` during which no message reached `to`.
    pub(crate) fn between(&self, of: usize, to: usize) -> impl Iterator<Item = &Outage> {
        self.0.iter().filter(move |it| it.of == of && it.to.is_none_or(|other| other == to))
    }
}
