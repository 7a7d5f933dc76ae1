//! A directory with a virtual clock, and the nodes that it observes.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use cluster::{
    Adapter, Directory, DirectoryAction, DirectoryInput, Epoch, Health, Load, MemberChange,
    ModelIdentity, NoNode, NodeAddress, NodeChoice, NodeId, NodeKey, NodeRecord, NodeRequirements,
    Picked, RequiredCapacity, Role, Selection, StreamId,
};
use config::{Disaggregate, NodePolicy, Roles};
use proto::{ids::TransferId, v1};

pub(crate) struct World {
    pub directory: Directory,
    pub now: Instant,
    /// Streams that the directory has opened, by id.
    pub open: BTreeMap<StreamId, NodeAddress>,
    pub health: Vec<(NodeKey, Health, Health)>,
    pub forgotten: Vec<NodeAddress>,
    /// Nodes that other requests could use without a change of health.
    pub serving_changed: Vec<NodeKey>,
    /// Nodes whose report was impossible, with the reason.
    pub rejected: Vec<(NodeAddress, String)>,
    /// Number of picks, which is the transfer id of the last one.
    pub picked: u128,
    /// Number of load reports that every node has sent.
    pub reports: u64,
}

/// Maximum length of a sequence on each node.
pub(crate) const SEQUENCE_TOKENS_MAX: u64 = 2048;

pub(crate) const DEFAULT: Selection = Selection {
    disaggregate: Disaggregate::Auto,
    roles: Roles::Fixed,
    policy: NodePolicy::Predicted,
};

impl World {
    pub(crate) fn new() -> Self {
        Self::with(DEFAULT)
    }

    pub(crate) fn with(selection: Selection) -> Self {
        Self {
            directory: Directory::new(1, selection),
            now: Instant::now(),
            open: BTreeMap::new(),
            health: Vec::new(),
            forgotten: Vec::new(),
            serving_changed: Vec::new(),
            rejected: Vec::new(),
            picked: 0,
            reports: 0,
        }
    }

    pub(crate) fn input(&mut self, input: DirectoryInput) {
        let mut actions = Vec::new();
        self.directory.handle(self.now, input, &mut actions);
        self.act(actions);
    }

    pub(crate) fn advance(&mut self, by: Duration) {
        let until = self.now + by;
        while let Some(deadline) = self.directory.next_deadline().filter(|next| *next <= until) {
            self.now = self.now.max(deadline);
            let mut actions = Vec::new();
            self.directory.on_deadline(self.now, &mut actions);
            self.act(actions);
            let next = self.directory.next_deadline();
            assert!(next.is_none_or(|next| next > deadline), "a deadline was handled");
        }
        self.now = until;
    }

    fn act(&mut self, actions: Vec<DirectoryAction>) {
        for action in actions {
            match action {
                DirectoryAction::Observe { stream, address, .. } => {
                    assert!(!self.open.values().any(|open| *open == address), "one stream a node");
                    assert!(self.open.insert(stream, address).is_none(), "stream ids are new");
                }
                DirectoryAction::StopObserving { stream } => {
                    assert!(self.open.remove(&stream).is_some(), "only open streams are dropped");
                }
                DirectoryAction::HealthChanged { node, from, to, .. } => {
                    assert_ne!(from, to);
                    self.health.push((node, from, to));
                }
                DirectoryAction::Forgotten { address, .. } => self.forgotten.push(address),
                DirectoryAction::ServingChanged { node } => self.serving_changed.push(node),
                DirectoryAction::Rejected { address, reason } => {
                    self.rejected.push((address, reason));
                }
            }
        }
    }

    pub(crate) fn join(&mut self, address: &NodeAddress) {
        self.input(DirectoryInput::Member(MemberChange::Joined(address.clone())));
    }

    pub(crate) fn leave(&mut self, address: &NodeAddress) {
        self.input(DirectoryInput::Member(MemberChange::Left(address.clone())));
    }

    pub(crate) fn stream_of(&self, address: &NodeAddress) -> Option<StreamId> {
        self.open.iter().find(|(_, open)| *open == address).map(|(stream, _)| *stream)
    }

    pub(crate) fn send(&mut self, address: &NodeAddress, event: v1::ObserveEvent) {
        let stream = self.stream_of(address).expect("the node is being observed");
        self.input(DirectoryInput::Observed { stream, event });
    }

    /// Ends the node's stream, as a lost connection does.
    pub(crate) fn end_stream(&mut self, address: &NodeAddress) {
        let stream = self.stream_of(address).expect("the node is being observed");
        self.open.remove(&stream);
        self.input(DirectoryInput::StreamEnded { stream, reason: "connection refused".into() });
    }

    /// Lets the node join and send a snapshot.
    pub(crate) fn up(&mut self, address: &NodeAddress, record: &NodeRecord, load: Load) {
        self.join(address);
        self.send(address, snapshot(record, load, &[]));
    }

    pub(crate) fn health_of(&self, address: &NodeAddress) -> Option<Health> {
        self.directory.nodes().find(|view| view.address == *address).map(|view| view.health)
    }

    pub(crate) fn pick_nodes(
        &mut self,
        requirements: &NodeRequirements<'_>,
    ) -> Result<Picked, NoNode> {
        self.picked += 1;
        self.directory.pick(self.now, TransferId(self.picked), requirements)
    }

    /// Returns the decode node.
    pub(crate) fn pick(
        &mut self,
        requirements: &NodeRequirements<'_>,
    ) -> Result<NodeChoice, NoNode> {
        self.pick_nodes(requirements).map(|picked| picked.decode)
    }
}

pub(crate) fn address(role: Role, port: u16) -> NodeAddress {
    NodeAddress { role, grpc: format!("http://127.0.0.1:{port}") }
}

pub(crate) fn prefill(port: u16) -> NodeAddress {
    address(Role::Prefill, port)
}

pub(crate) fn decode(port: u16) -> NodeAddress {
    address(Role::Decode, port)
}

pub(crate) fn epoch(number: u128) -> Epoch {
    Epoch::from_bytes(&number.to_be_bytes()).unwrap()
}

pub(crate) fn record(role: Role, number: u128) -> NodeRecord {
    NodeRecord {
        node_id: NodeId::parse(&format!("{role}-{number}")).unwrap(),
        epoch: epoch(number),
        role,
        control_endpoint: "tcp://127.0.0.1:7000".into(),
        model: "smollm2".into(),
        identity: ModelIdentity {
            model_fingerprint: 5,
            weight_version: 1,
            kv_layout: "block".into(),
            block_size: 16,
            dtype: "f32".into(),
            tp: 1,
            protocol_min: 1,
            protocol_max: 1,
        },
        prompt_tokens_max: 2000,
        sequence_tokens_max: SEQUENCE_TOKENS_MAX as u32,
        block_count: 1000,
        vocabulary_size: 100,
        grammar_version: 1,
        cpu_fallback: None,
        peer_tag: vec![1; 32],
        pooling: false,
        sampling_version: 0,
        adapters: Vec::new(),
        both_roles: false,
        kv_windows: vec![0],
        state_blocks: 0,
    }
}

pub(crate) fn idle() -> Load {
    Load { blocks_free: 1000, ..Load::default() }
}

pub(crate) fn snapshot(record: &NodeRecord, load: Load, cached: &[u128]) -> v1::ObserveEvent {
    let cached_blocks = cached.iter().map(|hash| hash.to_be_bytes().to_vec().into()).collect();
    let snapshot = v1::NodeSnapshot {
        record: Some(record.into()),
        load: Some(load),
        cached_blocks,
        tiers: vec![],
    };
    v1::ObserveEvent { sequence: 0, event: Some(v1::observe_event::Event::Snapshot(snapshot)) }
}

pub(crate) fn delta(
    sequence: u64,
    load: Option<Load>,
    cached: &[u128],
    evicted: &[u128],
) -> v1::ObserveEvent {
    let bytes = |hashes: &[u128]| {
        hashes.iter().map(|hash| hash.to_be_bytes().to_vec().into()).collect::<Vec<_>>()
    };
    let (cached, evicted) = (bytes(cached), bytes(evicted));
    let delta = v1::NodeDelta { load, cached, evicted, ..Default::default() };
    v1::ObserveEvent { sequence, event: Some(v1::observe_event::Event::Delta(delta)) }
}

pub(crate) fn adapters_changed(sequence: u64, adapters: &[Adapter]) -> v1::ObserveEvent {
    let changed = v1::AdaptersChanged { adapters: adapters.iter().map(Into::into).collect() };
    let delta = v1::NodeDelta { adapters: Some(changed), ..Default::default() };
    v1::ObserveEvent { sequence, event: Some(v1::observe_event::Event::Delta(delta)) }
}

/// Returns a delta whose load includes these attempts.
pub(crate) fn arrived(sequence: u64, load: Load, transfers: &[u128]) -> v1::ObserveEvent {
    let arrived = transfers.iter().map(|id| id.to_be_bytes().to_vec().into()).collect();
    let delta = v1::NodeDelta { load: Some(load), arrived, ..Default::default() };
    v1::ObserveEvent { sequence, event: Some(v1::observe_event::Event::Delta(delta)) }
}

pub(crate) fn requirements(tokens: u32) -> NodeRequirements<'static> {
    NodeRequirements {
        model: "smollm2",
        prompt_tokens: tokens,
        tokens,
        new_tokens_max: 16,
        local_prefill: false,
        moves_from: None,
        prefix: &[],
        identity: None,
        any_weights: false,
        grammar_version: 0,
        sampling_version: 0,
        pooling: false,
        adapter: None,
        exclude_decode: &[],
        exclude_prefill: &[],
        capacity: RequiredCapacity::Any,
        waits_since: None,
    }
}
