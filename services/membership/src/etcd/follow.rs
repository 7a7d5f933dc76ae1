//! A router's membership from etcd: performs the actions of a [`Follower`].

use std::{sync::Arc, time::Instant};

use cluster::Members;
use etcd_client::WatchResponse;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::{
    InFlight,
    follower::{
        EtcdRecord, Follower, FollowerAction, FollowerInput, FollowerReport, RecordChange, Records,
    },
    session::{EtcdCallError, EtcdSession, OpenWatch},
    settings::{EtcdError, EtcdSettings},
};
use crate::{MemberList, Membership, MembershipBackend};

impl Membership {
    /// Follows the nodes that are registered in etcd: reads all records once and watches them from
    /// then on. If etcd does not answer, the list is empty and the task retries in the background.
    ///
    /// # Errors
    /// If etcd rejects the user or its certificate is not trusted, or if the settings are invalid.
    pub async fn registered(settings: EtcdSettings) -> Result<Self, EtcdError> {
        let list = MemberList::new(Members::new());
        let stop = CancellationToken::new();
        let (first, first_read) = oneshot::channel();
        let backend = MembershipBackend::new("etcd");
        let follow = FollowTask {
            follower: Follower::new(Instant::now(), &settings.prefix, super::seed()?),
            settings: Arc::new(settings),
            list: list.clone(),
            backend: backend.clone(),
            reading: None,
            watch: None,
            first: Some(first),
        };
        let task = tokio::spawn(follow.run(stop.clone()));
        let membership =
            Self { list, task: Some((stop.drop_guard(), task)), backend: Some(backend) };
        // The task reports within the time-out of one read.
        match first_read.await {
            Ok(Err(error)) => Err(error),
            Ok(Ok(())) | Err(_) => Ok(membership),
        }
    }
}

type ReadOutcome = Result<(Records, OpenWatch), EtcdCallError>;

struct FollowTask {
    follower: Follower,
    settings: Arc<EtcdSettings>,
    list: MemberList,
    backend: MembershipBackend,
    reading: Option<InFlight<ReadOutcome>>,
    watch: Option<OpenWatch>,
    /// Channel for the outcome of the first read; `None` after it was sent.
    first: Option<oneshot::Sender<Result<(), EtcdError>>>,
}

impl FollowTask {
    async fn run(mut self, stop: CancellationToken) {
        loop {
            let deadline = self.follower.next_deadline();
            let mut actions = Vec::new();
            tokio::select! {
                () = stop.cancelled() => return,
                read = super::outcome(&mut self.reading) => {
                    self.reading = None;
                    let input = self.read(read);
                    self.follower.handle(Instant::now(), input, &mut actions);
                }
                input = next_message(&mut self.watch) => {
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

    fn read(&mut self, read: ReadOutcome) -> FollowerInput {
        if let Some(first) = self.first.take() {
            let refused = read.as_ref().err().map(|error| error.refuse_start(&self.settings));
            // Sending fails if the caller of `registered` has been cancelled.
            let _ = first.send(refused.unwrap_or(Ok(())));
        }
        match read {
            Ok((records, watch)) => {
                self.watch = Some(watch);
                FollowerInput::Read(records)
            }
            Err(error) => FollowerInput::Failed { reason: error.to_string() },
        }
    }

    async fn act(&mut self, action: FollowerAction) {
        match action {
            FollowerAction::Read { within } => {
                self.watch = None;
                self.reading = Some(Box::pin(EtcdSession::new(self.settings.clone()).read(within)));
            }
            FollowerAction::AskProgress => {
                if let Some(watch) = &mut self.watch {
                    // The channel has space, because one request is in flight at a time. If the
                    // watch has ended, `next_message` returns the failure.
                    let _ = watch.stream.request_progress().await;
                }
            }
            FollowerAction::Disconnect => self.watch = None,
            FollowerAction::Publish(members) => self.list.replace(members),
            FollowerAction::Report(report) => {
                match report {
                    FollowerReport::Following { .. } => self.backend.set_connected(true),
                    FollowerReport::Unreachable { .. } => self.backend.set_connected(false),
                    FollowerReport::Ignored { .. } | FollowerReport::TooMany { .. } => {}
                }
                self.log(report);
            }
        }
    }

    fn log(&self, report: FollowerReport) {
        let (etcd, prefix) = (self.settings.endpoints(), &self.settings.prefix);
        match report {
            FollowerReport::Following { .. } => tracing::info!(etcd, prefix, "{report}"),
            FollowerReport::Unreachable { .. }
            | FollowerReport::Ignored { .. }
            | FollowerReport::TooMany { .. } => {
                tracing::warn!(etcd, prefix, "{report}");
            }
        }
    }
}

/// Waits for the next message of the watch. Never completes while no watch is open.
async fn next_message(watch: &mut Option<OpenWatch>) -> FollowerInput {
    let Some(watch) = watch else { return std::future::pending().await };
    match watch.stream.message().await {
        Ok(Some(response)) => changes(&response),
        Ok(None) => FollowerInput::Failed { reason: "etcd ended the watch".to_owned() },
        Err(error) => FollowerInput::Failed { reason: EtcdCallError::from(error).to_string() },
    }
}

fn changes(response: &WatchResponse) -> FollowerInput {
    if response.compact_revision() > 0 {
        let reason = format!("compacted up to revision {}", response.compact_revision());
        return FollowerInput::Failed { reason };
    }
    if response.canceled() {
        let reason = format!("etcd cancelled the watch: {}", response.cancel_reason());
        return FollowerInput::Failed { reason };
    }
    let changes = response.events().iter().filter_map(|event| {
        let kv = event.kv()?;
        let (key, modified) = (kv.key().to_vec(), kv.mod_revision());
        // Version 0 marks a deleted key. The event's type does too, but the library panics on
        // unknown types.
        Some(match kv.version() {
            0 => RecordChange::Removed { key, modified },
            _ => RecordChange::Written(EtcdRecord { key, value: kv.value().to_vec(), modified }),
        })
    });
    FollowerInput::Changed { changes: changes.collect() }
}
