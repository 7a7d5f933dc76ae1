//! Keeps one node's record in etcd. Pure: takes outcomes of calls and `now`, returns calls.
//!
//! Life of a registration:
//! 1. *Absent*: this process knows of no record in etcd. The registrant writes the record, with
//!    back-off.
//! 2. *Present* under a lease, which is renewed every third of its time. Each renewal also checks
//!    the record, and writes it again under the same lease if it was deleted or changed. A renewal
//!    that fails is retried with back-off until the lease must have expired.
//! 3. Absent again when etcd reports that the lease does not exist, or when no renewal succeeded
//!    for the lease's whole time. The record is written again under the same key and epoch, because
//!    the process is the same.
//! 4. *Left* after a request to leave, when the lease was revoked or the revocation failed.
//!
//! At most one call is in flight; its action has the call's time-out.

use std::time::{Duration, Instant};

use crate::retry::RetryBackoff;

/// Time-out of a call: connect, authenticate, two round trips.
const WRITE_WITHIN: Duration = Duration::from_secs(3);
/// Time-out of leaving. The node drains meanwhile; after the time-out the lease expires by itself.
const REMOVE_WITHIN: Duration = Duration::from_secs(2);
const RENEW_WITHIN_MIN: Duration = Duration::from_secs(1);
const RENEW_WITHIN_MAX: Duration = Duration::from_secs(3);
/// Bounds on the lease time that etcd reports.
const TTL_MIN: Duration = Duration::from_secs(1);
const TTL_MAX: Duration = Duration::from_secs(24 * 3600);

/// Id of a lease in etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseId(pub i64);

/// The outcome of the call in flight, or the request to leave.
#[derive(Clone, Debug)]
pub enum RegistrantInput {
    /// The record is written under this lease.
    Written { lease: LeaseId, ttl: Duration },
    /// The lease was renewed and the record exists. `restored`: the record was missing or changed
    /// and was written again.
    Renewed { restored: bool },
    /// The lease expired.
    Expired,
    /// The lease is revoked, which deletes the record.
    Removed,
    /// The call failed.
    Failed { reason: String },
    /// The node leaves: delete the record.
    Leave,
}

/// An operation for the shell to perform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistrantAction {
    /// Start this call instead of the one in flight. Its outcome returns as a [`RegistrantInput`].
    Call { call: EtcdCall, within: Duration },
    /// The registrant has ended.
    Finish,
    /// Log this event.
    Report(RegistrantReport),
}

/// A call to etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EtcdCall {
    /// Create a lease and write the record under it.
    Write,
    /// Renew the lease, and write the record again if it is missing or changed.
    Renew(LeaseId),
    /// Revoke the lease, which deletes the record.
    Remove(LeaseId),
}

/// An event to log once, with its log message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistrantReport {
    #[error("registered in etcd; the lease lasts {ttl:?}")]
    Registered { lease: LeaseId, ttl: Duration },
    #[error("etcd is reachable again and kept the record")]
    Recovered,
    #[error("the record in etcd was deleted or changed before its lease expired; restored")]
    Restored,
    #[error("the record in etcd is lost: {reason}; registering again")]
    Lost { reason: String },
    #[error("etcd is unreachable: {reason}; this node continues to serve")]
    Unreachable { reason: String },
    #[error("deregistered from etcd")]
    Removed,
    #[error("cannot delete the record in etcd: {reason}; it expires with its lease")]
    NotRemoved { reason: String },
}

enum RegistrantState {
    Absent { write_at: Instant },
    Writing { since: Instant },
    Present { lease: LeaseId, ttl: Duration, lost_at: Instant, renewal: Renewal },
    Removing,
    Left,
}

enum Renewal {
    Due(Instant),
    InFlight { since: Instant },
}

pub struct Registrant {
    state: RegistrantState,
    retry: RetryBackoff,
    leaving: bool,
}

impl Registrant {
    /// Creates a registrant whose first call is due at once.
    pub fn new(now: Instant, seed: u64) -> Self {
        Self {
            state: RegistrantState::Absent { write_at: now },
            retry: RetryBackoff::new(seed),
            leaving: false,
        }
    }

    pub fn handle(
        &mut self,
        now: Instant,
        input: RegistrantInput,
        actions: &mut Vec<RegistrantAction>,
    ) {
        match input {
            RegistrantInput::Written { lease, ttl } => self.written(lease, ttl, actions),
            RegistrantInput::Renewed { restored } => self.renewed(restored, actions),
            RegistrantInput::Expired => self.expired(now, actions),
            RegistrantInput::Removed => {
                if let RegistrantState::Removing = self.state {
                    actions.push(RegistrantAction::Report(RegistrantReport::Removed));
                    self.finish(actions);
                }
            }
            RegistrantInput::Failed { reason } => self.failed(now, reason, actions),
            RegistrantInput::Leave => self.leave(actions),
        }
    }

    /// Returns the time of the next call of [`Self::on_deadline`]; `None` while a call is in
    /// flight, and at the end.
    pub fn next_deadline(&self) -> Option<Instant> {
        match &self.state {
            RegistrantState::Absent { write_at } => Some(*write_at),
            RegistrantState::Present { renewal: Renewal::Due(at), .. } => Some(*at),
            RegistrantState::Present { .. }
            | RegistrantState::Writing { .. }
            | RegistrantState::Removing
            | RegistrantState::Left => None,
        }
    }

    pub fn on_deadline(&mut self, now: Instant, actions: &mut Vec<RegistrantAction>) {
        if self.next_deadline().is_none_or(|deadline| deadline > now) {
            return;
        }
        match &mut self.state {
            RegistrantState::Absent { .. } => self.write(now, actions),
            RegistrantState::Present { lease, ttl, lost_at, renewal } if *lost_at > now => {
                // A renewal starts at one third of the lease time and ends by two thirds.
                let within = (*ttl / 3).clamp(RENEW_WITHIN_MIN, RENEW_WITHIN_MAX);
                *renewal = Renewal::InFlight { since: now };
                actions.push(RegistrantAction::Call { call: EtcdCall::Renew(*lease), within });
            }
            RegistrantState::Present { ttl, .. } => {
                let reason = format!("no renewal of the lease succeeded for {ttl:?}");
                actions.push(RegistrantAction::Report(RegistrantReport::Lost { reason }));
                self.write(now, actions);
            }
            RegistrantState::Writing { .. } | RegistrantState::Removing | RegistrantState::Left => {
            }
        }
    }

    fn write(&mut self, now: Instant, actions: &mut Vec<RegistrantAction>) {
        self.state = RegistrantState::Writing { since: now };
        actions.push(RegistrantAction::Call { call: EtcdCall::Write, within: WRITE_WITHIN });
    }

    fn written(&mut self, lease: LeaseId, ttl: Duration, actions: &mut Vec<RegistrantAction>) {
        let RegistrantState::Writing { since } = self.state else { return };
        if self.leaving {
            return self.remove(lease, actions);
        }
        let ttl = ttl.clamp(TTL_MIN, TTL_MAX);
        self.retry.succeeded();
        self.confirmed(lease, ttl, since);
        actions.push(RegistrantAction::Report(RegistrantReport::Registered { lease, ttl }));
    }

    fn renewed(&mut self, restored: bool, actions: &mut Vec<RegistrantAction>) {
        let RegistrantState::Present { lease, ttl, renewal: Renewal::InFlight { since }, .. } =
            self.state
        else {
            return;
        };
        self.confirmed(lease, ttl, since);
        self.retry.stable();
        if self.retry.succeeded() {
            actions.push(RegistrantAction::Report(RegistrantReport::Recovered));
        }
        if restored {
            actions.push(RegistrantAction::Report(RegistrantReport::Restored));
        }
    }

    fn expired(&mut self, now: Instant, actions: &mut Vec<RegistrantAction>) {
        let reason = "the lease expired".to_owned();
        match self.state {
            RegistrantState::Present { renewal: Renewal::InFlight { .. }, .. } => {
                actions.push(RegistrantAction::Report(RegistrantReport::Lost { reason }));
                self.state = RegistrantState::Absent { write_at: now + self.retry.delay() };
            }
            // The lease expired before the record was written, because the process or machine was
            // suspended.
            RegistrantState::Writing { .. } => self.failed(now, reason, actions),
            RegistrantState::Removing => {
                actions.push(RegistrantAction::Report(RegistrantReport::Removed));
                self.finish(actions);
            }
            RegistrantState::Absent { .. }
            | RegistrantState::Present { .. }
            | RegistrantState::Left => {}
        }
    }

    /// Computes the expiry from the start of the call: the lease cannot expire earlier.
    fn confirmed(&mut self, lease: LeaseId, ttl: Duration, called: Instant) {
        let renewal = Renewal::Due(called + ttl / 3);
        self.state = RegistrantState::Present { lease, ttl, lost_at: called + ttl, renewal };
    }

    fn failed(&mut self, now: Instant, reason: String, actions: &mut Vec<RegistrantAction>) {
        match &mut self.state {
            RegistrantState::Writing { .. } if self.leaving => return self.finish(actions),
            RegistrantState::Writing { .. } => {
                self.state = RegistrantState::Absent { write_at: now + self.retry.delay() };
            }
            RegistrantState::Present { renewal: renewal @ Renewal::InFlight { .. }, .. } => {
                *renewal = Renewal::Due(now + self.retry.delay());
            }
            RegistrantState::Removing => {
                actions.push(RegistrantAction::Report(RegistrantReport::NotRemoved { reason }));
                return self.finish(actions);
            }
            RegistrantState::Absent { .. }
            | RegistrantState::Present { .. }
            | RegistrantState::Left => return,
        }
        if self.retry.is_news(&reason) {
            actions.push(RegistrantAction::Report(RegistrantReport::Unreachable { reason }));
        }
    }

    fn leave(&mut self, actions: &mut Vec<RegistrantAction>) {
        self.leaving = true;
        match self.state {
            RegistrantState::Absent { .. } => self.finish(actions),
            RegistrantState::Present { lease, .. } => self.remove(lease, actions),
            // Wait for the write in flight before revoking its lease.
            RegistrantState::Writing { .. } | RegistrantState::Removing | RegistrantState::Left => {
            }
        }
    }

    fn remove(&mut self, lease: LeaseId, actions: &mut Vec<RegistrantAction>) {
        self.state = RegistrantState::Removing;
        actions
            .push(RegistrantAction::Call { call: EtcdCall::Remove(lease), within: REMOVE_WITHIN });
    }

    fn finish(&mut self, actions: &mut Vec<RegistrantAction>) {
        self.state = RegistrantState::Left;
        actions.push(RegistrantAction::Finish);
    }
}
