//! Keeps one node's record in etcd: pure, outcomes of calls and `now` in, calls out.
//!
//! Life of a registration:
//! 1. *Absent*: the record is not there as far as this process knows; it is written as soon as
//!    etcd answers, with back-off.
//! 2. *Present* under a lease, which is renewed every third of its time. Each renewal also checks the
//!    record, and writes it again under the same lease where somebody deleted or changed it. A renewal
//!    that fails is tried again with back-off for as long as the lease can still be alive.
//! 3. Absent again when etcd says that the lease is gone, or when nothing confirmed it for its whole
//!    time: past that the record is lost whatever etcd says later. It is written again under the same
//!    key, with the same epoch: the process is the same.
//! 4. *Gone* once leaving was asked for and the lease was revoked, or could not be.
//!
//! At most one call is out at any time, and its action says how long it may take.

use std::time::{Duration, Instant};

use super::retry::Retry;

/// Connecting, proving who one is, and two round trips.
const WRITE_WITHIN: Duration = Duration::from_secs(3);
/// Draining goes on meanwhile; afterwards the lease ends by itself.
const REMOVE_WITHIN: Duration = Duration::from_secs(2);
const RENEW_WITHIN_MIN: Duration = Duration::from_secs(1);
const RENEW_WITHIN_MAX: Duration = Duration::from_secs(3);
/// Bounds on the time that etcd says it gave.
const TTL_MIN: Duration = Duration::from_secs(1);
const TTL_MAX: Duration = Duration::from_secs(24 * 3600);

/// Names a lease in etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseId(pub i64);

/// The outcome of the call in flight, or the request to leave.
#[derive(Clone, Debug)]
pub enum Input {
    /// The record is written under this lease.
    Written { lease: LeaseId, ttl: Duration },
    /// The lease runs its full time again, and the record stands under it. `restored`: the record was
    /// missing or changed, and is written again.
    Renewed { restored: bool },
    /// etcd does not know the lease any more.
    Expired,
    /// The lease is revoked, and with it the record is gone.
    Removed,
    /// The call did not succeed, whatever it was.
    Failed { reason: String },
    /// The node leaves: take the record away, for good.
    Leave,
}

/// An operation for the shell to perform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Replaces whatever call is out. Its outcome comes back as an [`Input`].
    Call {
        call: Call,
        within: Duration,
    },
    /// Nothing follows.
    Finish,
    Report(Report),
}

/// A call to etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Take a lease and write the record under it.
    Write,
    /// Renew the lease, and write the record again where it is missing or changed.
    Renew(LeaseId),
    /// Revoke the lease, and with it the record.
    Remove(LeaseId),
}

/// To be logged, once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    Registered {
        lease: LeaseId,
        ttl: Duration,
    },
    /// etcd is there again and the record was kept.
    Recovered,
    /// Somebody deleted or changed the record while its lease lived. The record is written again.
    Restored,
    Lost {
        reason: String,
    },
    Away {
        reason: String,
    },
    Removed,
    NotRemoved {
        reason: String,
    },
}

enum State {
    Absent { write_at: Instant },
    Writing { since: Instant },
    Present { lease: LeaseId, ttl: Duration, lost_at: Instant, renewal: Renewal },
    Removing,
    Gone,
}

enum Renewal {
    Due(Instant),
    Out { since: Instant },
}

pub struct Registrant {
    state: State,
    retry: Retry,
    leaving: bool,
}

impl Registrant {
    /// Due at once.
    pub fn new(now: Instant, seed: u64) -> Self {
        Self { state: State::Absent { write_at: now }, retry: Retry::new(seed), leaving: false }
    }

    pub fn handle(&mut self, now: Instant, input: Input, actions: &mut Vec<Action>) {
        match input {
            Input::Written { lease, ttl } => self.written(lease, ttl, actions),
            Input::Renewed { restored } => self.renewed(restored, actions),
            Input::Expired => self.expired(now, actions),
            Input::Removed => {
                if let State::Removing = self.state {
                    actions.push(Action::Report(Report::Removed));
                    self.finish(actions);
                }
            }
            Input::Failed { reason } => self.failed(now, reason, actions),
            Input::Leave => self.leave(actions),
        }
    }

    /// When to call [`Self::on_deadline`]; `None` while a call is out, and at the end.
    pub fn next_deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Absent { write_at } => Some(*write_at),
            State::Present { renewal: Renewal::Due(at), .. } => Some(*at),
            State::Present { renewal: Renewal::Out { .. }, .. } => None,
            State::Writing { .. } | State::Removing | State::Gone => None,
        }
    }

    pub fn on_deadline(&mut self, now: Instant, actions: &mut Vec<Action>) {
        match &mut self.state {
            State::Absent { write_at } if *write_at <= now => self.write(now, actions),
            State::Present { lease, ttl, lost_at, renewal } => {
                let Renewal::Due(at) = renewal else { return };
                if *at > now {
                    return;
                }
                if *lost_at <= now {
                    let reason = format!("nothing confirmed the lease for {ttl:?}");
                    actions.push(Action::Report(Report::Lost { reason }));
                    self.write(now, actions);
                    return;
                }
                // Answered or not by two thirds of the lease's time, when it is asked at one third.
                let within = (*ttl / 3).clamp(RENEW_WITHIN_MIN, RENEW_WITHIN_MAX);
                *renewal = Renewal::Out { since: now };
                actions.push(Action::Call { call: Call::Renew(*lease), within });
            }
            State::Absent { .. } | State::Writing { .. } | State::Removing | State::Gone => {}
        }
    }

    fn write(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.state = State::Writing { since: now };
        actions.push(Action::Call { call: Call::Write, within: WRITE_WITHIN });
    }

    fn written(&mut self, lease: LeaseId, ttl: Duration, actions: &mut Vec<Action>) {
        let State::Writing { since } = self.state else { return };
        if self.leaving {
            return self.remove(lease, actions);
        }
        let ttl = ttl.clamp(TTL_MIN, TTL_MAX);
        self.retry.succeeded();
        self.confirmed(lease, ttl, since);
        actions.push(Action::Report(Report::Registered { lease, ttl }));
    }

    fn renewed(&mut self, restored: bool, actions: &mut Vec<Action>) {
        let State::Present { lease, ttl, renewal: Renewal::Out { since }, .. } = self.state else {
            return;
        };
        self.confirmed(lease, ttl, since);
        self.retry.stable();
        if self.retry.succeeded() {
            actions.push(Action::Report(Report::Recovered));
        }
        if restored {
            actions.push(Action::Report(Report::Restored));
        }
    }

    fn expired(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let reason = "etcd does not know the lease any more".to_owned();
        match self.state {
            State::Present { renewal: Renewal::Out { .. }, .. } => {
                actions.push(Action::Report(Report::Lost { reason }));
                self.state = State::Absent { write_at: now + self.retry.delay() };
            }
            // It ended between being granted and the record's writing: a process or a machine that
            // was stopped for so long.
            State::Writing { .. } => self.failed(now, reason, actions),
            State::Removing => {
                actions.push(Action::Report(Report::Removed));
                self.finish(actions);
            }
            State::Absent { .. } | State::Present { .. } | State::Gone => {}
        }
    }

    /// The lease's time counts from before the call: etcd began to count later.
    fn confirmed(&mut self, lease: LeaseId, ttl: Duration, called: Instant) {
        let renewal = Renewal::Due(called + ttl / 3);
        self.state = State::Present { lease, ttl, lost_at: called + ttl, renewal };
    }

    fn failed(&mut self, now: Instant, reason: String, actions: &mut Vec<Action>) {
        match &mut self.state {
            State::Writing { .. } if self.leaving => return self.finish(actions),
            State::Writing { .. } => {
                self.state = State::Absent { write_at: now + self.retry.delay() };
            }
            State::Present { renewal: renewal @ Renewal::Out { .. }, .. } => {
                *renewal = Renewal::Due(now + self.retry.delay());
            }
            State::Removing => {
                actions.push(Action::Report(Report::NotRemoved { reason }));
                return self.finish(actions);
            }
            State::Absent { .. } | State::Present { .. } | State::Gone => return,
        }
        if self.retry.is_news(&reason) {
            actions.push(Action::Report(Report::Away { reason }));
        }
    }

    fn leave(&mut self, actions: &mut Vec<Action>) {
        self.leaving = true;
        match self.state {
            State::Absent { .. } => self.finish(actions),
            State::Present { lease, .. } => self.remove(lease, actions),
            // What is being written must be known before it can be removed.
            State::Writing { .. } | State::Removing | State::Gone => {}
        }
    }

    fn remove(&mut self, lease: LeaseId, actions: &mut Vec<Action>) {
        self.state = State::Removing;
        actions.push(Action::Call { call: Call::Remove(lease), within: REMOVE_WITHIN });
    }

    fn finish(&mut self, actions: &mut Vec<Action>) {
        self.state = State::Gone;
        actions.push(Action::Finish);
    }
}
