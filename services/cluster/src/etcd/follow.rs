//! A router's membership from etcd: performs the actions of a [`Follower`].

use std::{future::Future, pin::Pin, sync::Arc, time::Instant};

use etcd_client::WatchResponse;
use tokio::{sync::oneshot, task::JoinHandle, time::Duration};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    follower::{Action, Change, Follower, Input, Record, Report},
    session::{CallError, OpenWatch, Session},
    settings::{EtcdError, EtcdSettings},
};
use crate::{
    MemberList, MemberWatch, Members, Membership, MembershipError, NodeAddress,
    membership::Shutdown,
};

/// Nodes that are registered in etcd. Dropping it stops the task without waiting.
pub struct EtcdMembership {
    list: Arc<MemberList>,
    stop: DropGuard,
    task: JoinHandle<()>,
}

impl EtcdMembership {
    /// Reads all records once and watches them from then on. If etcd does not answer, the list is empty and the task
    /// retries in the background.
    ///
    /// # Errors
    /// If etcd rejects the user or its certificate is not trusted, or if the settings are invalid.
    pub async fn start(settings: EtcdSettings) -> Result<Self, EtcdError> {
        let settings = Arc::new(settings);
        let list = Arc::new(MemberList::new(Members::new()));
        let stop = CancellationToken::new();
        let (tell_first, first) = oneshot::channel();
        let follow = Follow {
            follower: Follower::new(Instant::now(), &settings.prefix, super::seed()?),
            settings: settings.clone(),
            list: list.clone(),
            reading: None,
            watch: None,
            first: Some(tell_first),
        };
        let task = tokio::spawn(follow.run(stop.clone()));
        let membership = Self { list, stop: stop.drop_guard(), task };
        // The task reports within the time-out of one read.
        match first.await {
            Ok(Err(error)) => Err(error),
            Ok(Ok(())) | Err(_) => Ok(membership),
        }
    }
}

impl Membership for EtcdMembership {
    fn watch(&self) -> MemberWatch {
        self.list.watch()
    }

    fn last_known(&self) -> Vec<NodeAddress> {
        self.list.members().keys().cloned().collect()
    }

    fn shutdown(self: Box<Self>, deadline: Duration) -> Shutdown {
        let Self { list, stop, task } = *self;
        drop((list, stop));
        Box::pin(async move {
            match tokio::time::timeout(deadline, task).await {
                Ok(Ok(())) => Ok(()),
                Ok(Err(error)) => Err(MembershipError::Stopped { reason: error.to_string() }),
                Err(_) => Err(MembershipError::ShutdownDeadline { deadline }),
            }
        })
    }
}

type Reading = Pin<Box<dyn Future<Output = Result<(Vec<Record>, OpenWatch), CallError>> + Send>>;

struct Follow {
    follower: Follower,
    settings: Arc<EtcdSettings>,
    list: Arc<MemberList>,
    reading: Option<Reading>,
    watch: Option<OpenWatch>,
    /// Receives the outcome of the first read.
    first: Option<oneshot::Sender<Result<(), EtcdError>>>,
}

impl Follow {
    async fn run(mut self, stop: CancellationToken) {
        loop {
            let deadline = self.follower.next_deadline();
            let mut actions = Vec::new();
            tokio::select! {
                () = stop.cancelled() => return,
                read = done(&mut self.reading) => {
                    self.reading = None;
                    let input = self.read(read);
                    self.follower.handle(Instant::now(), input, &mut actions);
                }
                input = heard(&mut self.watch) => {
                    self.follower.handle(Instant::now(), input, &mut actions);
                }
                () = super::sleep_until(deadline) => {
                    self.follower.on_deadline(Instant::now(), &mut actions);
                }
            }
            for action in actions {
                self.act(action).await;
            }
        }
    }

    fn read(&mut self, read: Result<(Vec<Record>, OpenWatch), CallError>) -> Input {
        if let Some(first) = self.first.take() {
            let refused = read.as_ref().err().map(|error| error.refuse_start(&self.settings));
            // The receiver may be gone.
            let _ = first.send(refused.unwrap_or(Ok(())));
        }
        match read {
            Ok((records, watch)) => {
                self.watch = Some(watch);
                Input::Read { records }
            }
            Err(error) => Input::Failed { reason: error.reason().to_owned() },
        }
    }

    async fn act(&mut self, action: Action) {
        match action {
            Action::Read { within } => {
                self.watch = None;
                self.reading = Some(Box::pin(Session::new(self.settings.clone()).read(within)));
            }
            Action::AskProgress => {
                if let Some(watch) = &mut self.watch {
                    // One request is in flight at a time, so the channel has space. The watch reports its own end.
                    let _ = watch.stream.request_progress().await;
                }
            }
            Action::Disconnect => self.watch = None,
            Action::Publish(members) => self.list.replace(members),
            Action::Report(report) => self.log(report),
        }
    }

    fn log(&self, report: Report) {
        let etcd = self.settings.endpoints();
        match report {
            Report::Following { nodes } => {
                tracing::info!(etcd, prefix = self.settings.prefix, nodes, "following etcd");
            }
            Report::Away { reason } => {
                tracing::warn!(etcd, reason, "etcd is unreachable: keeping the last known members")
            }
            Report::Ignored { count, first } => {
                let first: Vec<String> =
                    first.iter().map(|it| format!("{}: {}", it.key, it.reason)).collect();
                let prefix = &self.settings.prefix;
                tracing::warn!(
                    count,
                    ?first,
                    prefix,
                    "ignoring records in etcd that are not nodes"
                );
            }
            Report::TooMany => tracing::warn!(
                prefix = self.settings.prefix,
                records_max = super::follower::RECORDS_MAX,
                "too many records in etcd; ignoring the rest"
            ),
        }
    }
}

/// Waits for the outcome of the read. Never returns while no read is in flight.
async fn done(reading: &mut Option<Reading>) -> Result<(Vec<Record>, OpenWatch), CallError> {
    match reading {
        Some(reading) => reading.await,
        None => std::future::pending().await,
    }
}

/// Waits for the next message of the watch. Never returns while no watch is open.
async fn heard(watch: &mut Option<OpenWatch>) -> Input {
    let Some(watch) = watch else { return std::future::pending().await };
    match watch.stream.message().await {
        Ok(Some(response)) => changes(&response),
        Ok(None) => Input::Failed { reason: "etcd ended the watch".to_owned() },
        Err(error) => Input::Failed { reason: CallError::from(error).reason().to_owned() },
    }
}

fn changes(response: &WatchResponse) -> Input {
    if response.compact_revision() > 0 {
        let reason = format!("compacted up to revision {}", response.compact_revision());
        return Input::Failed { reason };
    }
    if response.canceled() {
        let reason = format!("etcd cancelled the watch: {}", response.cancel_reason());
        return Input::Failed { reason };
    }
    let changes = response.events().iter().filter_map(|event| {
        let kv = event.kv()?;
        let (key, modified) = (kv.key().to_vec(), kv.mod_revision());
        // Version 0 means deleted. The event's type shows this too, but the library panics on unknown types.
        Some(match kv.version() {
            0 => Change::Removed { key, modified },
            _ => Change::Written(Record { key, value: kv.value().to_vec(), modified }),
        })
    });
    Input::Changed { changes: changes.collect() }
}
