//! The task that keeps the directory up to date: it follows the membership, holds one `Observe`
//! stream to each member, and handles the directory's deadlines. It also starts the rounds of
//! connection setup.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use cluster::{DirectoryAction, DirectoryInput, Health, NodeAddress, Role, StreamId};
use membership::MemberWatch;
use proto::{
    ids::Epoch,
    v1::{ObserveEvent, observe_event::Event},
};
use router_core::RouterOutput;
use telemetry::metrics::Exclusion;
use tokio::{
    sync::mpsc,
    task::{AbortHandle, JoinError, JoinHandle, JoinSet},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Code;

use super::{
    Nodes,
    channel::{NodeChannel, ObserveError, ObservedNode},
    connection_setup::{self, FirstRound, MeetingNode, SETTLES_IN, SetupRounds, WAIT_MAX},
    role_label,
};

const QUEUES_MEASURED_EVERY: Duration = Duration::from_secs(1);

/// A model that this router serves. Nodes of other models are not used.
#[derive(Clone, Debug)]
pub(crate) struct Served {
    /// The name of the model.
    pub model: Arc<str>,
    /// Number of token ids of the router's tokenizer.
    pub vocabulary_size: u32,
}

/// A background task. Dropping it stops the task without waiting.
pub(crate) struct OwnedTask {
    stop: DropGuard,
    task: JoinHandle<()>,
}

impl OwnedTask {
    pub(crate) fn start<F>(work: impl FnOnce(CancellationToken) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let stop = CancellationToken::new();
        let task = tokio::spawn(work(stop.clone()));
        Self { stop: stop.drop_guard(), task }
    }

    /// Stops the task and waits until it has ended.
    pub(crate) async fn shutdown(self) -> Result<(), JoinError> {
        drop(self.stop);
        self.task.await
    }
}

/// Starts the task that keeps the directory up to date.
pub(super) fn start(
    nodes: Nodes,
    members: MemberWatch,
    inputs: mpsc::Receiver<DirectoryInput>,
    served: Arc<[Served]>,
) -> OwnedTask {
    let watch = DirectoryWatch::new(nodes, inputs, served);
    OwnedTask::start(|stop| watch.run(members, stop))
}

struct DirectoryWatch {
    nodes: Nodes,
    inputs: mpsc::Receiver<DirectoryInput>,
    served: Arc<[Served]>,
    streams: JoinSet<()>,
    open: HashMap<StreamId, AbortHandle>,
    rounds: SetupRounds,
    /// `Some` until the first round with a decode node.
    first: Option<Arc<FirstRound>>,
    /// Meet calls of this round and of earlier ones.
    connect_calls: JoinSet<()>,
}

impl DirectoryWatch {
    fn new(nodes: Nodes, inputs: mpsc::Receiver<DirectoryInput>, served: Arc<[Served]>) -> Self {
        Self {
            first: Some(FirstRound::new(nodes.clone())),
            nodes,
            inputs,
            served,
            streams: JoinSet::new(),
            open: HashMap::new(),
            rounds: SetupRounds::new(Instant::now()),
            connect_calls: JoinSet::new(),
        }
    }

    async fn run(mut self, mut members: MemberWatch, stop: CancellationToken) {
        self.nodes.count_nodes();
        let mut members_end = false;
        let mut queues_due = tokio::time::interval(QUEUES_MEASURED_EVERY);
        loop {
            let deadline = self.nodes.0.router.with(|core| core.next_deadline());
            let due = async {
                match deadline {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            let next_round = tokio::time::sleep_until(self.rounds.next().into());
            tokio::select! {
                () = stop.cancelled() => break,
                change = members.next(), if !members_end => match change {
                    Some(change) => self.handle(DirectoryInput::Member(change)),
                    None => members_end = true,
                },
                // `self.nodes` holds a sender, so the channel never ends.
                Some(input) = self.inputs.recv() => {
                    self.handle(input);
                    self.nodes.count_cached_blocks();
                }
                () = next_round => self.set_up_connections(),
                _ = queues_due.tick() => self.nodes.measure_queues(),
                () = due => self.nodes.0.router.with(|core| core.handle_deadline(Instant::now())),
                () = self.nodes.0.router.node_outputs() => {}
            }
            self.perform();
            while self.streams.try_join_next().is_some() {}
            while self.connect_calls.try_join_next().is_some() {}
        }
        self.connect_calls.shutdown().await;
        self.streams.shutdown().await;
    }

    fn handle(&self, input: DirectoryInput) {
        self.nodes.0.router.with(|core| core.handle_node_event(Instant::now(), input));
    }

    /// Performs the outputs of the router core about nodes.
    fn perform(&mut self) {
        for output in self.nodes.0.router.take_node_outputs() {
            match output {
                RouterOutput::Nodes(action) => self.act(action),
                RouterOutput::Breaker(change) => self.nodes.breaker_changed(change),
                RouterOutput::NodesChanged => {
                    self.nodes.count_nodes();
                    self.nodes.changed();
                }
                RouterOutput::Wake(_) => unreachable!("the shared router wakes answers"),
            }
        }
    }

    fn act(&mut self, action: DirectoryAction) {
        match action {
            DirectoryAction::Observe { stream, address, .. } => {
                self.open.retain(|_, task| !task.is_finished());
                let observe = observe(self.nodes.clone(), stream, address, self.served.clone());
                let task = self.streams.spawn(observe);
                self.open.insert(stream, task);
            }
            DirectoryAction::StopObserving { stream } => {
                if let Some(task) = self.open.remove(&stream) {
                    task.abort();
                }
            }
            DirectoryAction::HealthChanged { address, from, to, reason, .. } => {
                tracing::info!(
                    node = %address, from = from.as_str(), to = to.as_str(), reason,
                    "node health changed"
                );
                let settles_in = match self.first {
                    Some(_) if self.is_one_to_come() => Some(WAIT_MAX),
                    Some(_) => Some(Duration::ZERO),
                    None => (to == Health::Up).then_some(SETTLES_IN),
                };
                if let Some(settles_in) = settles_in {
                    self.rounds.on_change(Instant::now(), settles_in);
                }
            }
            DirectoryAction::ServingChanged { .. } => {}
            DirectoryAction::Rejected { address, reason } => {
                tracing::warn!(node = %address, reason, "node excluded: its report is invalid");
                let role = role_label(address.role);
                self.nodes.0.metrics.node_excluded(role, Exclusion::InvalidReport);
            }
            DirectoryAction::Forgotten { address, .. } => {
                tracing::info!(node = %address, "node left");
                // A member of the other role may have the same URL.
                let is_used = self.nodes.directory(|directory| {
                    directory.nodes().any(|it| it.address.grpc == address.grpc)
                });
                if !is_used {
                    self.nodes.channels().remove(&address.grpc);
                }
            }
        }
    }

    /// Starts a round of Meet calls to the nodes that are up.
    fn set_up_connections(&mut self) {
        let deadline = self.rounds.on_start(Instant::now());
        let serving: Vec<_> = self.nodes.directory(|directory| {
            let up = directory.nodes().filter(|node| node.health == Health::Up);
            let meeting = up.filter_map(|node| {
                let takes = Role::ALL.into_iter().filter(|role| directory.takes(node, *role));
                Some(MeetingNode {
                    url: node.address.grpc.clone(),
                    takes: takes.collect(),
                    record: node.record()?.clone(),
                })
            });
            meeting.collect()
        });
        let is_served = serving.iter().any(|node| node.takes.contains(&Role::Decode));
        let first = self.first.take_if(|_| is_served);
        for call in connection_setup::connect_calls(&serving) {
            let (nodes, first) = (self.nodes.clone(), first.clone());
            self.connect_calls.spawn(connection_setup::meet(nodes, call, deadline, first));
        }
    }

    /// Returns whether a listed node that is not up yet may come up soon and complete a pair.
    fn is_one_to_come(&self) -> bool {
        self.nodes.directory(|directory| {
            let is_listed = |role| directory.nodes().any(|node| node.address.role == role);
            Role::ALL.into_iter().all(is_listed)
                && directory.nodes().any(|node| node.health == Health::Unknown)
        })
    }
}

/// Feeds one `Observe` stream into the task until the stream ends.
async fn observe(nodes: Nodes, stream: StreamId, address: NodeAddress, served: Arc<[Served]>) {
    let reason = match follow(&nodes, stream, &address, &served).await {
        Ok(()) => "the stream ended".to_owned(),
        Err(reason) => reason,
    };
    // Fails only when the task has ended.
    let _ = nodes.0.inputs.send(DirectoryInput::StreamEnded { stream, reason }).await;
}

async fn follow(
    nodes: &Nodes,
    stream: StreamId,
    address: &NodeAddress,
    served: &[Served],
) -> Result<(), String> {
    let failed = |status: tonic::Status| match status.code() {
        Code::Unavailable => format!("unavailable: {}", status.message()),
        code => format!("{code:?}: {}", status.message()),
    };
    let observed = NodeChannel::observe(&address.grpc, &nodes.0.credentials).await;
    let ObservedNode { channel, node, mut events } = observed.map_err(|error| match error {
        ObserveError::Call(status) => failed(status),
        error => error.to_string(),
    })?;
    nodes.channels().insert(address.grpc.clone(), channel);
    while let Some(event) = events.message().await.map_err(failed)? {
        Served::check(served, &event)?;
        check_epoch(node, &event)?;
        if nodes.0.inputs.send(DirectoryInput::Observed { stream, event }).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}

/// Rejects a record of another process than the one that has proved its knowledge of the secret.
fn check_epoch(node: Epoch, event: &ObserveEvent) -> Result<(), String> {
    let Some(Event::Snapshot(snapshot)) = &event.event else { return Ok(()) };
    match &snapshot.record {
        Some(record) if record.epoch != node.to_bytes()[..] => {
            Err(format!("its record has another epoch than its proof, which names {node}"))
        }
        _ => Ok(()),
    }
}

impl Served {
    /// Rejects a node of another model, or with fewer token ids than the tokenizer. More token ids
    /// are padding.
    fn check(all: &[Self], event: &ObserveEvent) -> Result<(), String> {
        let Some(Event::Snapshot(snapshot)) = &event.event else { return Ok(()) };
        let Some(record) = &snapshot.record else { return Ok(()) };
        let Some(served) = all.iter().find(|served| *served.model == record.model) else {
            let names: Vec<_> = all.iter().map(|served| &*served.model).collect();
            return Err(format!(
                "it serves model {:?}, but this router serves {names:?}: set the same model.name for both, or \
                 add that model to router.models",
                record.model.chars().take(100).collect::<String>()
            ));
        };
        if record.vocabulary_size < served.vocabulary_size {
            return Err(format!(
                "its model has {} token ids, but this router's tokenizer has {}: use the same \
                 model.path",
                record.vocabulary_size, served.vocabulary_size
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use cluster::{Directory, MemberChange};
    use proto::{
        auth::CallSigner,
        v1::{NodeDelta, NodeLoad, NodeRecord, NodeSnapshot},
    };
    use tonic::transport::Endpoint;

    use super::*;
    use crate::nodes::{
        connection_setup::tests::record,
        tests::{credentials, metrics},
    };
    use crate::shared_router::tests::router;

    /// Returns a watch that the test drives, and the nodes' own watch, which is idle.
    fn watch() -> (DirectoryWatch, OwnedTask) {
        let members = membership::Membership::listed(["http://p"; 0], ["http://d"; 0]).unwrap();
        let served = Arc::new([]);
        let (nodes, task) =
            Nodes::watch(&members, served.clone(), router(1), metrics(), credentials());
        (DirectoryWatch::new(nodes, mpsc::channel(1).1, served), task)
    }

    /// Adds a member and returns its Observe stream.
    fn joins(watch: &mut DirectoryWatch, role: Role, grpc: &str) -> StreamId {
        let address = NodeAddress { role, grpc: grpc.to_owned() };
        watch.handle(DirectoryInput::Member(MemberChange::Joined(address)));
        let outputs = watch.nodes.0.router.take_node_outputs();
        let [RouterOutput::Nodes(DirectoryAction::Observe { stream, .. })] = outputs[..] else {
            panic!("{outputs:?}")
        };
        stream
    }

    fn comes_up(watch: &mut DirectoryWatch, role: Role, epoch: u128, stream: StreamId) {
        let record = Some(record(&format!("node-{epoch}"), role, epoch, 7));
        let snapshot =
            NodeSnapshot { record, load: Some(NodeLoad::default()), ..Default::default() };
        let event = ObserveEvent { sequence: 0, event: Some(Event::Snapshot(snapshot)) };
        watch.handle(DirectoryInput::Observed { stream, event });
        watch.perform();
        let is_up = |directory: &Directory| {
            let mut nodes = directory.nodes();
            nodes.any(|node| node.record().is_some_and(|record| record.epoch.0 == epoch))
        };
        assert!(watch.nodes.directory(is_up), "node {epoch} is not up");
    }

    fn is_lost(watch: &mut DirectoryWatch, stream: StreamId) {
        watch.handle(DirectoryInput::StreamEnded { stream, reason: "a test".into() });
        // The test opens no stream for the probe that follows.
        for output in watch.nodes.0.router.take_node_outputs() {
            if let RouterOutput::Nodes(action @ DirectoryAction::HealthChanged { .. }) = output {
                watch.act(action);
            }
        }
    }

    /// Removes a member that is not up.
    fn leaves(watch: &mut DirectoryWatch, role: Role, grpc: &str, stream: StreamId) {
        let address = NodeAddress { role, grpc: grpc.to_owned() };
        watch.handle(DirectoryInput::Member(MemberChange::Left(address.clone())));
        watch.handle(DirectoryInput::StreamEnded { stream, reason: "a test".into() });
        watch.perform();
        let is_known = |directory: &Directory| directory.nodes().any(|it| it.address == address);
        assert!(!watch.nodes.directory(is_known), "{address} is not forgotten");
    }

    /// Begins the round that is due.
    fn begin_round(watch: &mut DirectoryWatch) {
        assert!(watch.rounds.next() <= Instant::now(), "the round is due");
        watch.set_up_connections();
    }

    #[test]
    fn record_with_another_epoch_than_the_proof_is_rejected() {
        let check = |snapshot: NodeSnapshot| {
            let event = ObserveEvent { sequence: 0, event: Some(Event::Snapshot(snapshot)) };
            check_epoch(Epoch(1), &event)
        };
        let with_record = |epoch: u128| NodeSnapshot {
            record: Some(record("decode-0", Role::Decode, epoch, 7)),
            ..Default::default()
        };
        assert_eq!(check(with_record(1)), Ok(()));
        let error = check(with_record(2)).unwrap_err();
        assert!(error.contains(&Epoch(1).to_string()), "{error}");
        let mut short = with_record(1);
        short.record.as_mut().unwrap().epoch = vec![1].into();
        assert!(check(short).is_err());
    }

    #[tokio::test]
    async fn nodes_that_come_up_together_receive_one_meet_call_each() {
        let (mut watch, _task) = watch();
        let by_itself = watch.rounds.next();
        let mut meets = 0;
        for epoch in 1..=12 {
            let role = Role::ALL[epoch as usize % 2];
            // No node listens there: the test counts calls that were started.
            let stream = joins(&mut watch, role, &format!("http://127.0.0.1:{epoch}"));
            comes_up(&mut watch, role, epoch, stream);
            meets += watch.connect_calls.len();
        }
        assert!(watch.rounds.next() + Duration::from_secs(10) < by_itself, "the round is due soon");
        watch.set_up_connections();
        assert_eq!(meets + watch.connect_calls.len(), 12);
    }

    #[tokio::test]
    async fn the_first_round_begins_when_all_are_up_and_is_over_when_all_have_answered() {
        let (mut watch, _task) = watch();
        let is_ready = |watch: &DirectoryWatch| watch.nodes.are_connected();
        // No call makes progress before the test awaits.
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let prefill = joins(&mut watch, Role::Prefill, &url(1));
        let decode = joins(&mut watch, Role::Decode, &url(2));
        let absent = joins(&mut watch, Role::Decode, &url(3));

        comes_up(&mut watch, Role::Prefill, 1, prefill);
        comes_up(&mut watch, Role::Decode, 2, decode);
        assert!(watch.is_one_to_come());
        // The unreachable node is not awaited.
        is_lost(&mut watch, absent);
        begin_round(&mut watch);
        assert_eq!((watch.connect_calls.len(), is_ready(&watch)), (2, false));

        // A node that comes up during the round gets a round of its own.
        let late = joins(&mut watch, Role::Decode, &url(4));
        comes_up(&mut watch, Role::Decode, 4, late);
        assert!(!is_ready(&watch));
        let mut first_round = std::mem::take(&mut watch.connect_calls);
        watch.set_up_connections();
        assert_eq!((watch.connect_calls.len(), is_ready(&watch)), (3, false));
        first_round.shutdown().await;
        assert!(is_ready(&watch));

        // The router stays ready after the loss of all nodes and after the restart of a node.
        is_lost(&mut watch, prefill);
        is_lost(&mut watch, decode);
        is_lost(&mut watch, late);
        let again = joins(&mut watch, Role::Prefill, &url(5));
        comes_up(&mut watch, Role::Prefill, 5, again);
        watch.set_up_connections();
        assert!(is_ready(&watch));
    }

    #[tokio::test]
    async fn connection_is_kept_while_another_member_has_its_url() {
        let (mut watch, _task) = watch();
        let connect = |watch: &DirectoryWatch, url: &'static str| {
            let signer = CallSigner::new(&credentials().secret).unwrap();
            let channel =
                NodeChannel { channel: Endpoint::from_static(url).connect_lazy(), signer };
            watch.nodes.channels().insert(url.to_owned(), channel);
        };
        let (shared, other) = ("http://127.0.0.1:1", "http://127.0.0.1:2");
        let decode = joins(&mut watch, Role::Decode, shared);
        comes_up(&mut watch, Role::Decode, 1, decode);
        connect(&watch, shared);
        let twin = joins(&mut watch, Role::Prefill, shared);
        leaves(&mut watch, Role::Prefill, shared, twin);
        assert!(watch.nodes.channel(shared).is_some());

        let only = joins(&mut watch, Role::Prefill, other);
        connect(&watch, other);
        leaves(&mut watch, Role::Prefill, other, only);
        assert!(watch.nodes.channel(other).is_none());
    }

    #[tokio::test]
    async fn a_cluster_without_pairs_is_ready_at_once() {
        let (mut watch, _task) = watch();
        let decode = joins(&mut watch, Role::Decode, "http://127.0.0.1:1");
        let _other = joins(&mut watch, Role::Decode, "http://127.0.0.1:2");
        comes_up(&mut watch, Role::Decode, 1, decode);
        begin_round(&mut watch);
        assert!(watch.nodes.are_connected());
    }

    #[tokio::test]
    async fn a_round_without_decode_nodes_is_not_the_first() {
        let (mut watch, _task) = watch();
        let prefill = joins(&mut watch, Role::Prefill, "http://127.0.0.1:1");
        comes_up(&mut watch, Role::Prefill, 1, prefill);
        begin_round(&mut watch);
        let decode = joins(&mut watch, Role::Decode, "http://127.0.0.1:2");
        comes_up(&mut watch, Role::Decode, 2, decode);
        begin_round(&mut watch);
        assert_eq!((watch.connect_calls.len(), watch.nodes.are_connected()), (2, false));
    }

    #[tokio::test]
    async fn requests_are_told_of_a_drain_when_the_directory_knows_it() {
        let (mut watch, _task) = watch();
        let stream = joins(&mut watch, Role::Decode, "http://127.0.0.1:1");
        comes_up(&mut watch, Role::Decode, 1, stream);
        let mut changes = watch.nodes.changes();
        let serving = |watch: &DirectoryWatch| {
            watch.nodes.directory(|directory| directory.serving(Role::Decode).count())
        };
        for (sequence, draining, told) in [(1, true, true), (2, true, false), (3, false, true)] {
            let load = Some(NodeLoad { draining, ..Default::default() });
            let delta = NodeDelta { load, ..Default::default() };
            let event = ObserveEvent { sequence, event: Some(Event::Delta(delta)) };
            changes.mark_unchanged();
            watch.handle(DirectoryInput::Observed { stream, event });
            watch.perform();
            assert_eq!(changes.has_changed().unwrap(), told, "event {sequence}");
            assert_eq!(serving(&watch), usize::from(!draining));
        }
    }

    #[test]
    fn a_node_with_another_model_or_too_few_token_ids_is_rejected() {
        let of = |model: &str, vocabulary_size| Served { model: model.into(), vocabulary_size };
        let served = [of("ours", 1000), of("small", 10)];
        let check = |model: &str, vocabulary_size| {
            let record = NodeRecord { model: model.into(), vocabulary_size, ..Default::default() };
            let snapshot = NodeSnapshot { record: Some(record), ..Default::default() };
            Served::check(
                &served,
                &ObserveEvent { sequence: 0, event: Some(Event::Snapshot(snapshot)) },
            )
        };
        // Without and with padding.
        assert_eq!((check("ours", 1000), check("ours", 1024)), (Ok(()), Ok(())));
        assert_eq!(check("small", 10), Ok(()));
        assert!(check("theirs", 1000).unwrap_err().contains("\"theirs\""));
        assert_eq!(
            check("ours", 999).unwrap_err(),
            "its model has 999 token ids, but this router's tokenizer has 1000: use the same \
             model.path"
        );
    }
}
