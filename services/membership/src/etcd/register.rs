//! A node's record in etcd: performs the actions of a [`Registrant`].

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    InFlight,
    entry::NodeEntry,
    registrant::{EtcdCall, Registrant, RegistrantAction, RegistrantInput, RegistrantReport},
    session::{EtcdCallError, EtcdSession},
    settings::{EtcdError, EtcdSettings},
};

/// Time-out of the check at start.
const CHECK_WITHIN: Duration = Duration::from_secs(3);

/// An etcd that accepted the node's credentials, or did not answer yet.
pub struct Registrar {
    settings: Arc<EtcdSettings>,
    seed: u64,
}

impl Registrar {
    /// Connects to etcd once, to report a wrong password at the start. An unreachable etcd is not
    /// an error: registration retries.
    pub async fn connect(settings: EtcdSettings) -> Result<Self, EtcdError> {
        let settings = Arc::new(settings);
        if let Err(error) = EtcdSession::new(settings.clone()).check(CHECK_WITHIN).await {
            error.refuse_start(&settings)?;
            tracing::warn!(
                etcd = settings.endpoints(),
                reason = %error,
                "etcd is unreachable: this node registers when etcd recovers"
            );
        }
        Ok(Self { settings, seed: super::seed()? })
    }

    /// Registers in the background and keeps the record until [`Registration::leave`].
    pub fn register(self, entry: NodeEntry) -> Registration {
        let (leave, stop) = (CancellationToken::new(), CancellationToken::new());
        let Self { settings, seed } = self;
        let register = Register {
            registrant: Registrant::new(Instant::now(), seed),
            key: entry.key(&settings.prefix),
            value: entry.value(),
            settings,
            call: None,
        };
        let task = tokio::spawn(register.run(leave.clone(), stop.clone()));
        Registration { leave, stop: stop.drop_guard(), task }
    }
}

/// A node's record, which a task renews. After a drop the record expires with its lease.
pub struct Registration {
    leave: CancellationToken,
    stop: DropGuard,
    task: JoinHandle<()>,
}

impl Registration {
    /// Deletes the record, so that routers see the change at once. Gives up after `within`; the
    /// record then expires with its lease.
    pub async fn leave(self, within: Duration) {
        self.leave.cancel();
        if tokio::time::timeout(within, self.task).await.is_err() {
            tracing::warn!(?within, "cannot confirm the deletion of this node's record in etcd");
        }
        drop(self.stop);
    }
}

/// A call owns the connection until it returns.
type CallOut = InFlight<(EtcdSession, RegistrantInput)>;

struct Register {
    registrant: Registrant,
    settings: Arc<EtcdSettings>,
    key: String,
    value: String,
    call: Option<CallOut>,
}

impl Register {
    async fn run(mut self, leave: CancellationToken, stop: CancellationToken) {
        let mut session = Some(EtcdSession::new(self.settings.clone()));
        let mut leaving = false;
        loop {
            let deadline = self.registrant.next_deadline();
            let mut actions = Vec::new();
            tokio::select! {
                () = stop.cancelled() => return,
                () = leave.cancelled(), if !leaving => {
                    leaving = true;
                    self.registrant.handle(Instant::now(), RegistrantInput::Leave, &mut actions);
                }
                (returned, input) = super::outcome(&mut self.call) => {
                    self.call = None;
                    session = Some(returned);
                    self.registrant.handle(Instant::now(), input, &mut actions);
                }
                () = super::sleep_until(deadline) => {
                    self.registrant.on_deadline(Instant::now(), &mut actions);
                }
            }
            for action in actions {
                match action {
                    RegistrantAction::Finish => return,
                    RegistrantAction::Report(report) => self.log(report),
                    RegistrantAction::Call { call, within } => {
                        let fresh = || EtcdSession::new(self.settings.clone());
                        let session = session.take().unwrap_or_else(fresh);
                        self.call = Some(self.start(call, within, session));
                    }
                }
            }
        }
    }

    fn start(&self, call: EtcdCall, within: Duration, mut session: EtcdSession) -> CallOut {
        let (key, value) = (self.key.clone(), self.value.clone());
        Box::pin(async move {
            let outcome = match call {
                EtcdCall::Write => session
                    .write(key, value, within)
                    .await
                    .map(|(lease, ttl)| RegistrantInput::Written { lease, ttl }),
                EtcdCall::Renew(lease) => session
                    .renew(lease, key, value, within)
                    .await
                    .map(|restored| RegistrantInput::Renewed { restored }),
                EtcdCall::Remove(lease) => {
                    session.revoke(lease, within).await.map(|()| RegistrantInput::Removed)
                }
            };
            let input = outcome.unwrap_or_else(|error| match error {
                EtcdCallError::LeaseExpired => RegistrantInput::Expired,
                error => RegistrantInput::Failed { reason: error.to_string() },
            });
            (session, input)
        })
    }

    fn log(&self, report: RegistrantReport) {
        let (etcd, key) = (self.settings.endpoints(), &self.key);
        match report {
            RegistrantReport::Registered { .. }
            | RegistrantReport::Recovered
            | RegistrantReport::Removed => {
                tracing::info!(etcd, key, "{report}");
            }
            RegistrantReport::Restored
            | RegistrantReport::Lost { .. }
            | RegistrantReport::Unreachable { .. }
            | RegistrantReport::NotRemoved { .. } => tracing::warn!(etcd, key, "{report}"),
        }
    }
}
