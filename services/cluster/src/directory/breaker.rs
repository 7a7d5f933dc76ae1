//! Circuit breaker of a node, or of a pair of nodes that transfer KV.
//!
//! *Closed*: attempts may use the node. Consecutive failures, or an inter-token latency or transfer
//! time far off the pool's median, open the breaker. *Open*: no attempt uses the node until a pause
//! has ended. *Half-open*: one attempt, the probe, uses the node. A probe that succeeds closes the
//! breaker; a probe that fails opens it for twice the pause. A probe may be served without
//! measuring what was slow: for example, it decodes without a transfer on a node whose transfers
//! were slow. Such a probe decides nothing. After three of them in a row the breaker closes;
//! otherwise the node would stay half-open.

use std::{
    fmt,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::AssignmentId;
use crate::backoff::{Jitter, doubled};

/// Consecutive failures that open a breaker: a single failure may be the fault of the other node or
/// of the network.
pub(super) const FAILURES_MAX: u32 = 3;
/// First pause after failures: a process restarts in about this time.
const FAILED_PAUSE_FIRST: Duration = Duration::from_secs(1);
/// First pause of a slow node, which still serves its running sequences meanwhile.
const SLOW_PAUSE_FIRST: Duration = Duration::from_secs(10);
/// Probes in a row that a slow node serves without being measured until its breaker closes.
const UNMEASURED_PROBES_MAX: u32 = 3;
/// Maximum pause, and thus the maximum time to detect that a node has recovered. Each pause costs
/// at most one attempt.
pub(super) const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Reason why a breaker is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum BreakerReason {
    /// Attempts failed on the node.
    Failures,
    /// Inter-token latency or transfer time off the pool's median.
    Slow,
}

impl BreakerReason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Failures => "failures",
            Self::Slow => "slow",
        }
    }
}

impl fmt::Display for BreakerReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Failures => "failed attempts",
            Self::Slow => "slower than the other nodes",
        })
    }
}

#[derive(Debug, Default)]
pub(super) struct Breaker {
    /// Consecutive failures while closed.
    failures: u32,
    /// Number of times that the breaker opened without two successes in between.
    opened: u32,
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    reason: BreakerReason,
    until: Instant,
    probe: Option<Probe>,
    /// Probes in a row that the node served without a verdict.
    unmeasured: u32,
}

#[derive(Debug)]
struct Probe {
    id: AssignmentId,
    is_served: bool,
}

impl Breaker {
    /// Returns the reason and the rest of the pause if no attempt may use the node now. The rest is
    /// zero while a probe is in flight.
    pub(super) fn refuses(&self, now: Instant) -> Option<(BreakerReason, Duration)> {
        let open = self.open.as_ref()?;
        let left = open.until.saturating_duration_since(now);
        (!left.is_zero() || open.probe.is_some()).then_some((open.reason, left))
    }

    /// Returns why the breaker is open or half-open.
    pub(super) fn reason(&self) -> Option<BreakerReason> {
        self.open.as_ref().map(|open| open.reason)
    }

    pub(super) fn is_probe(&self, id: AssignmentId) -> bool {
        let probe = self.open.as_ref().and_then(|open| open.probe.as_ref());
        probe.is_some_and(|probe| probe.id == id)
    }

    /// Handles an attempt that was assigned to the node. In the half-open state the attempt becomes
    /// the probe.
    pub(super) fn assigned(&mut self, now: Instant, id: AssignmentId) {
        if let Some(open) = &mut self.open
            && open.until <= now
            && open.probe.is_none()
        {
            open.probe = Some(Probe { id, is_served: false });
        }
    }

    /// Handles the end of an attempt. A probe without a verdict is followed by another probe.
    /// Returns whether the breaker closed.
    pub(super) fn released(&mut self, id: AssignmentId) -> bool {
        let Some(open) = &mut self.open else { return false };
        let Some(probe) = open.probe.take_if(|probe| probe.id == id) else { return false };
        open.unmeasured += u32::from(probe.is_served);
        let closes = open.unmeasured >= UNMEASURED_PROBES_MAX;
        if closes {
            self.close();
        }
        closes
    }

    /// Handles a failed attempt. Returns whether the breaker opened. While the breaker is open,
    /// only the probe counts: other attempts began before.
    pub(super) fn failed(&mut self, now: Instant, id: AssignmentId, jitter: &mut Jitter) -> bool {
        if self.open.is_none() {
            self.failures += 1;
        }
        let opens = self.is_probe(id) || self.open.is_none() && self.failures >= FAILURES_MAX;
        if opens {
            self.open(now, BreakerReason::Failures, jitter);
        }
        opens
    }

    /// Handles an attempt that the node served. Returns whether the breaker closed. A slow node
    /// serves attempts, too: [`Self::close`] ends its exclusion, or [`Self::released`] after
    /// several served probes.
    pub(super) fn served(&mut self, id: AssignmentId) -> bool {
        self.failures = 0;
        let probe = self.open.as_mut().and_then(|open| open.probe.as_mut());
        if let Some(probe) = probe.filter(|probe| probe.id == id) {
            probe.is_served = true;
        }
        match self.reason() {
            None => {
                self.opened = 0;
                false
            }
            Some(BreakerReason::Failures) => {
                self.close();
                true
            }
            Some(BreakerReason::Slow) => false,
        }
    }

    pub(super) fn open(&mut self, now: Instant, reason: BreakerReason, jitter: &mut Jitter) {
        let first = match reason {
            BreakerReason::Failures => FAILED_PAUSE_FIRST,
            BreakerReason::Slow => SLOW_PAUSE_FIRST,
        };
        let pause = jitter.spread(doubled(first, self.opened, PAUSE_MAX));
        self.opened = self.opened.saturating_add(1);
        self.failures = 0;
        self.open = Some(Open { reason, until: now + pause, probe: None, unmeasured: 0 });
    }

    pub(super) fn close(&mut self) {
        self.open = None;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Event {
        Pick,
        Fail(usize),
        Serve(usize),
        Release(usize),
        Wait(u64),
    }

    fn events() -> impl Strategy<Value = Event> {
        prop_oneof![
            3 => Just(Event::Pick),
            2 => any::<usize>().prop_map(Event::Fail),
            1 => any::<usize>().prop_map(Event::Serve),
            1 => any::<usize>().prop_map(Event::Release),
            2 => (0..20_000u64).prop_map(Event::Wait),
        ]
    }

    proptest! {
        /// An open breaker refuses every attempt for a bounded time, and a half-open one all but
        /// one.
        #[test]
        fn open_breaker_admits_one_probe_at_a_time(history in prop::collection::vec(events(), 1..200)) {
            let mut breaker = Breaker::default();
            let mut jitter = Jitter::new(1);
            let mut now = Instant::now();
            let (mut attempts, mut number) = (Vec::new(), 0);
            let mut failures = 0;
            for event in history {
                let pick = |attempts: &Vec<AssignmentId>, which: usize| {
                    (!attempts.is_empty()).then(|| attempts[which % attempts.len()])
                };
                match event {
                    Event::Pick if breaker.refuses(now).is_some() => {}
                    Event::Pick => {
                        number += 1;
                        let id = AssignmentId(number);
                        attempts.push(id);
                        breaker.assigned(now, id);
                        if breaker.reason().is_some() {
                            prop_assert!(breaker.is_probe(id) && breaker.refuses(now).is_some());
                        }
                    }
                    Event::Fail(which) => if let Some(id) = pick(&attempts, which) {
                        let was_closed = breaker.reason().is_none();
                        failures += 1;
                        let opened = breaker.failed(now, id, &mut jitter);
                        prop_assert_eq!(was_closed && opened, was_closed && failures >= FAILURES_MAX);
                        breaker.released(id);
                        attempts.retain(|other| *other != id);
                        failures *= u32::from(breaker.reason().is_none());
                    },
                    Event::Serve(which) => if let Some(id) = pick(&attempts, which) {
                        breaker.served(id);
                        breaker.released(id);
                        attempts.retain(|other| *other != id);
                        failures = 0;
                        prop_assert!(breaker.refuses(now).is_none());
                    },
                    Event::Release(which) => if let Some(id) = pick(&attempts, which) {
                        breaker.released(id);
                        attempts.retain(|other| *other != id);
                    },
                    Event::Wait(millis) => now += Duration::from_millis(millis),
                }
                if let Some((_, left)) = breaker.refuses(now) {
                    prop_assert!(left <= PAUSE_MAX);
                    let has_probe = attempts.iter().any(|id| breaker.is_probe(*id));
                    prop_assert!(has_probe || !left.is_zero(), "nothing would close the breaker");
                }
            }
        }
    }

    #[test]
    fn failing_probes_double_the_pause_and_a_served_one_ends_it() {
        let (mut breaker, mut jitter, start) = (Breaker::default(), Jitter::new(7), Instant::now());
        for number in 0..FAILURES_MAX {
            let opened = breaker.failed(start, AssignmentId(number.into()), &mut jitter);
            assert_eq!(opened, number + 1 == FAILURES_MAX);
        }
        let mut now = start;
        for number in 10..20 {
            let (_, left) = breaker.refuses(now).expect("the breaker is open");
            let pause = doubled(FAILED_PAUSE_FIRST, number - 10, PAUSE_MAX);
            assert!((pause / 2..=pause).contains(&left), "{left:?}");
            now += left;
            assert_eq!(breaker.refuses(now), None);
            let probe = AssignmentId(number.into());
            breaker.assigned(now, probe);
            assert_eq!(breaker.refuses(now), Some((BreakerReason::Failures, Duration::ZERO)));
            // A failure of an older attempt changes nothing.
            assert!(!breaker.failed(now, AssignmentId(1), &mut jitter));
            assert!(breaker.failed(now, probe, &mut jitter));
        }
        assert!(breaker.served(AssignmentId(1)) && breaker.refuses(now).is_none());
    }

    #[test]
    fn slow_node_stays_excluded_until_its_latency_is_measured_again() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        breaker.open(now, BreakerReason::Slow, &mut Jitter::new(1));
        assert!(!breaker.served(AssignmentId(1)));
        assert!(matches!(breaker.refuses(now), Some((BreakerReason::Slow, _))));
        breaker.close();
        assert_eq!(breaker.refuses(now), None);
    }
}
