//! The registration of a node against a simulated etcd that fails, hangs, loses its data and
//! restarts.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use membership::etcd::registrant::{
    EtcdCall, LeaseId, Registrant, RegistrantAction, RegistrantInput, RegistrantReport,
};
use proptest::prelude::*;

const TTL: Duration = Duration::from_secs(5);
/// The longest back-off, the longest call, and a margin.
const HEALS_WITHIN: Duration = Duration::from_secs(6);

/// Outcome of a call.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Answered {
        after_ms: u64,
    },
    /// Rejected at once, without an effect.
    Refused,
    /// The call has its effect, but the answer is lost: the caller times out.
    AnswerLost,
    /// The call has no effect and no answer.
    Hung,
    /// The lease has expired when etcd handles the call, even a lease that was just granted.
    LeaseExpired,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// Sets the outcome of the next calls.
    Next(Fate),
    Wait {
        ms: u64,
    },
    /// etcd loses all its data.
    Forget,
    /// Another client deletes the record. Its lease continues.
    Delete,
    /// etcd restarts: leases run their full time again.
    Restart,
    Leave,
}

/// A simulated etcd with leases and one record.
#[derive(Default)]
struct Etcd {
    leases: BTreeMap<i64, Instant>,
    /// Lease of the record; `None` without a record.
    record: Option<i64>,
    granted: i64,
}

impl Etcd {
    fn expire(&mut self, now: Instant) {
        self.leases.retain(|_, ends| *ends > now);
        self.record = self.record.filter(|lease| self.leases.contains_key(lease));
    }

    fn perform(&mut self, now: Instant, call: EtcdCall) -> RegistrantInput {
        self.expire(now);
        match call {
            EtcdCall::Write => {
                self.granted += 1;
                self.leases.insert(self.granted, now + TTL);
                self.record = Some(self.granted);
                RegistrantInput::Written { lease: LeaseId(self.granted), ttl: TTL }
            }
            EtcdCall::Renew(lease) => match self.leases.get_mut(&lease.0) {
                Some(ends) => {
                    *ends = now + TTL;
                    let restored = self.record.replace(lease.0) != Some(lease.0);
                    RegistrantInput::Renewed { restored }
                }
                None => RegistrantInput::Expired,
            },
            EtcdCall::Remove(lease) => {
                self.leases.remove(&lease.0);
                self.expire(now);
                RegistrantInput::Removed
            }
        }
    }
}

struct World {
    now: Instant,
    etcd: Etcd,
    registrant: Registrant,
    fate: Fate,
    /// Outcome of the call in progress, and the time when the call returns.
    out: Option<(Instant, RegistrantInput)>,
    finished: bool,
    reports: Vec<RegistrantReport>,
}

impl World {
    fn new() -> Self {
        let now = Instant::now();
        let registrant = Registrant::new(now, 7);
        let fate = Fate::Answered { after_ms: 1 };
        let (etcd, reports) = (Etcd::default(), Vec::new());
        let mut world = Self { now, etcd, registrant, fate, out: None, finished: false, reports };
        world.wait(Duration::ZERO);
        world
    }

    fn input(&mut self, input: RegistrantInput) {
        let mut actions = Vec::new();
        self.registrant.handle(self.now, input, &mut actions);
        self.perform(actions);
    }

    fn perform(&mut self, actions: Vec<RegistrantAction>) {
        for action in actions {
            assert!(!self.finished, "{action:?} after the end");
            match action {
                RegistrantAction::Call { call, within } => {
                    assert!(!within.is_zero() && within <= Duration::from_secs(3));
                    let replaces = matches!(call, EtcdCall::Remove(_));
                    assert!(replaces || self.out.is_none(), "{call:?} while another call is out");
                    self.out = Some(self.call(call, within));
                }
                RegistrantAction::Finish => {
                    assert!(self.out.is_none());
                    self.finished = true;
                }
                RegistrantAction::Report(report) => self.reports.push(report),
            }
        }
        let waits = self.registrant.next_deadline().is_some();
        let expected = !self.finished && self.out.is_none();
        assert_eq!(waits, expected, "a call is out, or a deadline is set, or it is over");
    }

    fn call(&mut self, call: EtcdCall, within: Duration) -> (Instant, RegistrantInput) {
        let failed = |reason: &str| RegistrantInput::Failed { reason: reason.into() };
        match self.fate {
            Fate::Answered { after_ms } if Duration::from_millis(after_ms) < within => {
                let input = self.etcd.perform(self.now, call);
                (self.now + Duration::from_millis(after_ms), input)
            }
            Fate::Refused => (self.now, failed("refused")),
            Fate::Answered { .. } | Fate::AnswerLost => {
                self.etcd.perform(self.now, call);
                (self.now + within, failed("no answer"))
            }
            Fate::Hung => (self.now + within, failed("no answer")),
            Fate::LeaseExpired => {
                if let EtcdCall::Renew(lease) | EtcdCall::Remove(lease) = call {
                    self.etcd.leases.remove(&lease.0);
                    self.etcd.expire(self.now);
                }
                (self.now, RegistrantInput::Expired)
            }
        }
    }

    /// Advances the time and handles deadlines and returning calls in order.
    fn wait(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            let deadline = self.registrant.next_deadline();
            let returns = self.out.as_ref().map(|(at, _)| *at);
            let Some(next) = deadline.into_iter().chain(returns).min().filter(|at| *at <= end)
            else {
                break;
            };
            self.now = self.now.max(next);
            self.etcd.expire(self.now);
            match self.out.take_if(|(at, _)| *at <= next) {
                Some((_, input)) => self.input(input),
                None => {
                    let mut actions = Vec::new();
                    self.registrant.on_deadline(self.now, &mut actions);
                    self.perform(actions);
                }
            }
        }
        self.now = end;
        self.etcd.expire(end);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Next(fate) => self.fate = fate,
            Event::Wait { ms } => self.wait(Duration::from_millis(ms)),
            Event::Forget => {
                self.etcd.leases.clear();
                self.etcd.record = None;
            }
            Event::Delete => self.etcd.record = None,
            Event::Restart => {
                self.etcd.leases.values_mut().for_each(|ends| *ends = self.now + TTL);
            }
            Event::Leave => self.input(RegistrantInput::Leave),
        }
    }

    fn count(&self, is: impl Fn(&RegistrantReport) -> bool) -> usize {
        self.reports.iter().filter(|report| is(report)).count()
    }
}

fn events() -> impl Strategy<Value = Event> {
    let fates = prop_oneof![
        4 => (0..4000u64).prop_map(|after_ms| Fate::Answered { after_ms }),
        1 => Just(Fate::Refused),
        1 => Just(Fate::AnswerLost),
        1 => Just(Fate::Hung),
        1 => Just(Fate::LeaseExpired),
    ];
    prop_oneof![
        4 => fates.prop_map(Event::Next),
        6 => (0..8000u64).prop_map(|ms| Event::Wait { ms }),
        1 => Just(Event::Forget),
        1 => Just(Event::Delete),
        1 => Just(Event::Restart),
    ]
}

proptest! {
    #[test]
    fn registration_converges_after_any_faults_of_etcd(
        history in prop::collection::vec(events(), 0..40),
        after_ms in 0..500u64,
    ) {
        let mut world = World::new();
        history.into_iter().for_each(|event| world.happen(event));
        world.fate = Fate::Answered { after_ms };
        // At the latest the next renewal finds out that the lease has expired.
        world.wait(TTL / 3 + HEALS_WITHIN);
        for _ in 0..100 {
            prop_assert!(world.etcd.record.is_some());
            world.wait(Duration::from_millis(300));
        }
    }

    #[test]
    fn deregistration_is_bounded_and_deletes_the_record_if_etcd_is_healthy(
        history in prop::collection::vec(events(), 0..20),
        healthy: bool,
        afterwards in prop::collection::vec(events(), 0..10),
    ) {
        let mut world = World::new();
        history.into_iter().for_each(|event| world.happen(event));
        if healthy {
            world.fate = Fate::Answered { after_ms: 1 };
            world.wait(TTL / 3 + HEALS_WITHIN);
        }
        world.happen(Event::Leave);
        // Time for the write in progress and for the delete.
        world.wait(Duration::from_secs(5));
        prop_assert!(world.finished);
        if healthy {
            prop_assert_eq!(world.etcd.record, None);
            prop_assert!(world.reports.ends_with(&[RegistrantReport::Removed]));
        }
        afterwards.into_iter().for_each(|event| world.happen(event));
        world.happen(Event::Leave);
    }
}

#[test]
fn a_lease_is_renewed_every_third_of_its_time_and_never_taken_twice() {
    let mut world = World::new();
    world.wait(TTL * 20);
    assert_eq!(world.etcd.granted, 1);
    assert_eq!(world.reports, [RegistrantReport::Registered { lease: LeaseId(1), ttl: TTL }]);
}

#[test]
fn a_lease_that_etcd_forgot_is_replaced_at_the_next_renewal() {
    let mut world = World::new();
    world.happen(Event::Forget);
    world.wait(TTL / 3 + Duration::from_millis(200));
    assert_eq!((world.etcd.granted, world.etcd.record), (2, Some(2)));
    assert_eq!(world.count(|report| matches!(report, RegistrantReport::Lost { .. })), 1);
}

#[test]
fn a_deleted_record_is_written_again_under_its_lease() {
    let mut world = World::new();
    world.happen(Event::Delete);
    world.wait(TTL / 3 + Duration::from_millis(1));
    assert_eq!((world.etcd.granted, world.etcd.record), (1, Some(1)));
    world.wait(TTL * 5);
    assert_eq!(world.count(|report| *report == RegistrantReport::Restored), 1);
}

#[test]
fn a_lease_that_ends_before_the_record_is_written_is_replaced() {
    let mut world = World::new();
    world.happen(Event::Next(Fate::LeaseExpired));
    world.wait(TTL);
    assert_eq!(world.etcd.record, None);
    world.happen(Event::Next(Fate::Answered { after_ms: 1 }));
    world.wait(HEALS_WITHIN);
    assert!(world.etcd.record.is_some());
}

#[test]
fn an_outage_shorter_than_the_lease_loses_nothing() {
    let mut world = World::new();
    world.happen(Event::Next(Fate::Refused));
    world.wait(TTL / 2);
    world.happen(Event::Next(Fate::Answered { after_ms: 1 }));
    world.wait(TTL);
    assert_eq!((world.etcd.granted, world.etcd.record), (1, Some(1)));
    assert_eq!(world.count(|report| matches!(report, RegistrantReport::Unreachable { .. })), 1);
    assert_eq!(world.count(|report| *report == RegistrantReport::Recovered), 1);
}

#[test]
fn an_unconfirmed_lease_is_lost_after_its_ttl() {
    let mut world = World::new();
    world.happen(Event::Next(Fate::Hung));
    world.wait(TTL * 2);
    assert_eq!(world.count(|report| matches!(report, RegistrantReport::Lost { .. })), 1);
    // etcd recovers and the lease is alive again, as after a restart. The node still writes a new
    // record.
    world.etcd.leases.insert(1, world.now + TTL);
    world.happen(Event::Next(Fate::Answered { after_ms: 1 }));
    world.wait(HEALS_WITHIN);
    assert_eq!((world.etcd.granted, world.etcd.record), (2, Some(2)));
}

#[test]
fn a_repeated_failure_is_logged_once() {
    let mut world = World::new();
    world.happen(Event::Next(Fate::Refused));
    world.wait(Duration::from_secs(600));
    assert_eq!(world.count(|report| matches!(report, RegistrantReport::Unreachable { .. })), 1);
    world.happen(Event::Next(Fate::Hung));
    world.wait(Duration::from_secs(600));
    assert_eq!(world.count(|report| matches!(report, RegistrantReport::Unreachable { .. })), 2);
}
