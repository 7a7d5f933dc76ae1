//! The router's view of the nodes: a directory, which one task keeps up to date, connections, and the Decode and
//! Prefill calls of attempts.

mod admin;
mod channel;
mod connection_setup;
mod watch;
mod weights;

use std::{
    collections::{BTreeSet, HashMap},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use cluster::{
    BreakerChange, BreakerReason, CacheIdentity, Considered, Directory, DirectoryInput, Failed,
    Health, Member, NoNode, NodeChoice, NodeRecord, Role, Selection, Wanted,
};
use membership::Membership;
use proto::{
    ids::{NoRandomness, TransferId, random_bits},
    v1::{DecodeEvent, DecodeRequest, PrefillEvent, PrefillRequest},
};
use telemetry::{
    RouterMetrics,
    metrics::{Exclusion, NodeRole},
    propagation,
};
use tokio::sync::{mpsc, watch as latest};
use tonic::{Request, Response, Status, Streaming};
use tracing::Span;

use crate::{lock::lock, request::options::ModelLimits};
pub use admin::{AdminCall, AdminError};
pub use channel::NodeCredentials;
use channel::{Client, NodeChannel};
pub use watch::{OwnedTask, Served};
pub use weights::{CopyFrom, UpdateRequest, WeightNode, WeightsAnswer};

/// Maximum number of nodes that `/health` names because they unexpectedly compute on the CPU.
const CPU_FALLBACKS_MAX: usize = 16;
/// Capacity of the queue of node events. Observe streams block while the queue is full.
const INPUTS_MAX: usize = 1024;
/// Maximum number of cache identities: old and new weights during a rolling update, and two more. The router
/// does not look up prefixes of further identities; it picks their nodes by load.
const CACHE_IDENTITIES_MAX: usize = 4;

/// Nodes of all models: picks nodes and connects to them. Cheap to clone.
#[derive(Clone)]
pub struct Nodes(Arc<Shared>);

struct Shared {
    directory: Mutex<Directory>,
    /// Connections to nodes that have proved their knowledge of the secret, by URL.
    channels: Mutex<HashMap<String, NodeChannel>>,
    credentials: NodeCredentials,
    inputs: mpsc::Sender<DirectoryInput>,
    /// Number of changes of health, plus one for the end of the first connection setup.
    changes: latest::Sender<u64>,
    connected: AtomicBool,
    /// Last known limits of each model, by model name.
    last_limits: Mutex<HashMap<String, ModelLimits>>,
    served: Arc<[Served]>,
    metrics: RouterMetrics,
}

/// Current nodes and limits of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Serving {
    pub prefill_nodes: usize,
    pub decode_nodes: usize,
    /// Limits that every decode node supports; `None` without a decode node.
    pub limits: Option<ModelLimits>,
    /// Fingerprint of the first listed decode node.
    pub model_fingerprint: u128,
}

impl Nodes {
    /// Starts watching the members. Only nodes that serve a model of `served` are used. Fails without random
    /// numbers from the operating system.
    pub fn watch(
        membership: &Membership,
        served: Arc<[Served]>,
        selection: Selection,
        metrics: RouterMetrics,
        credentials: NodeCredentials,
    ) -> Result<(Self, OwnedTask), NoRandomness> {
        let (inputs, received) = mpsc::channel(INPUTS_MAX);
        // A random seed spreads the probes of several routers.
        let seed = random_bits()? as u64;
        let nodes = Self(Arc::new(Shared {
            directory: Mutex::new(Directory::new(seed, selection)),
            channels: Mutex::new(HashMap::new()),
            credentials,
            inputs,
            changes: latest::Sender::new(0),
            connected: AtomicBool::new(false),
            last_limits: Mutex::default(),
            served: served.clone(),
            metrics,
        }));
        let watch = watch::start(nodes.clone(), membership.watch(), received, served);
        Ok((nodes, watch))
    }

    /// Picks the nodes of an attempt and counts the attempt on them until the result is dropped.
    pub fn pick(
        &self,
        transfer_id: TransferId,
        wanted: &Wanted<'_>,
    ) -> Result<PickedNodes, NoNode> {
        let picked = self.directory().pick(Instant::now(), transfer_id, wanted)?;
        let prefill = picked.prefill.map(|choice| self.connected(Role::Prefill, choice));
        let decode = self.connected(Role::Decode, picked.decode)?;
        let cluster::Picked { ttft, uncached_tokens, considered, .. } = picked;
        Ok(PickedNodes { decode, prefill: prefill.transpose()?, ttft, uncached_tokens, considered })
    }

    fn connected(&self, role: Role, choice: NodeChoice) -> Result<Assigned, NoNode> {
        match self.channel(&choice.address.grpc) {
            Some(channel) => Ok(Assigned { nodes: self.clone(), choice, channel }),
            // The node left after the pick.
            None => {
                self.directory().release(choice.assignment);
                Err(NoNode::NoneUp { role, listed: 1 })
            }
        }
    }

    /// Returns the current nodes and limits of this model.
    pub fn serving(&self, model: &str) -> Serving {
        let directory = self.directory();
        let of_role = |role| directory.serving(role).filter(|record| record.model == model);
        let records: Vec<&NodeRecord> = of_role(Role::Decode).collect();
        let least = |of: fn(&NodeRecord) -> u32| records.iter().map(|record| of(record)).min();
        let limits = || {
            Some(ModelLimits {
                prompt_tokens_max: least(|record| record.prompt_tokens_max)?,
                sequence_tokens_max: least(|record| record.sequence_tokens_max)?,
                vocabulary_size: least(|record| record.vocabulary_size)?,
            })
        };
        Serving {
            prefill_nodes: of_role(Role::Prefill).count(),
            decode_nodes: records.len(),
            limits: limits(),
            model_fingerprint: records
                .first()
                .map_or(0, |record| record.identity.model_fingerprint),
        }
    }

    /// Returns the limits of this model, now or when a decode node last served it; `None` if none ever did.
    pub fn last_limits(&self, model: &str) -> Option<ModelLimits> {
        self.serving(model).limits.or_else(|| self.limits_memory().get(model).cloned())
    }

    fn remember_limits(&self) {
        let directory = self.directory();
        let models: BTreeSet<String> =
            directory.serving(Role::Decode).map(|record| record.model.clone()).collect();
        drop(directory);
        for model in models {
            if let Some(limits) = self.serving(&model).limits {
                self.limits_memory().insert(model, limits);
            }
        }
    }

    fn limits_memory(&self) -> MutexGuard<'_, HashMap<String, ModelLimits>> {
        lock(&self.0.last_limits)
    }

    /// Returns the nodes that compute on the CPU although their host has a GPU, with the reason: at most
    /// [`CPU_FALLBACKS_MAX`].
    pub fn cpu_fallbacks(&self) -> Vec<(String, String)> {
        let directory = self.directory();
        let records = Role::ALL.into_iter().flat_map(|role| directory.serving(role));
        let reasons = records
            .filter_map(|record| Some((record.node_id.to_string(), record.cpu_fallback.clone()?)));
        reasons.take(CPU_FALLBACKS_MAX).collect()
    }

    /// Returns the newest grammar version that a decode node of this model supports; `None` while no decode
    /// node serves.
    pub fn grammar_version(&self, model: &str) -> Option<u32> {
        let directory = self.directory();
        let records = directory.serving(Role::Decode).filter(|record| record.model == model);
        records.map(|record| record.grammar_version).max()
    }

    /// Returns the distinct cache identities of the nodes of this model that can be picked now, at most
    /// [`CACHE_IDENTITIES_MAX`]. Keys of cached blocks depend on the identity.
    pub fn cache_identities(&self, model: &str) -> Vec<CacheIdentity> {
        let directory = self.directory();
        let mut identities = Vec::new();
        let records = Role::ALL.into_iter().flat_map(|role| directory.serving(role));
        for record in records.filter(|record| record.model == model) {
            let identity = CacheIdentity::of(&record.identity);
            if !identities.contains(&identity) && identities.len() < CACHE_IDENTITIES_MAX {
                identities.push(identity);
            }
        }
        identities
    }

    /// Returns a counter that changes with the health of any node and with [`Self::are_connected`].
    pub fn changes(&self) -> latest::Receiver<u64> {
        self.0.changes.subscribe()
    }

    /// Returns whether the first connection setup between nodes has ended. Never becomes false again.
    pub fn are_connected(&self) -> bool {
        self.0.connected.load(Ordering::Acquire)
    }

    fn changed(&self) {
        self.remember_limits();
        self.0.changes.send_modify(|count| *count += 1);
    }

    /// Returns the connection of the last `Observe` stream of this node.
    fn channel(&self, url: &str) -> Option<NodeChannel> {
        self.channels().get(url).cloned()
    }

    fn channels(&self) -> MutexGuard<'_, HashMap<String, NodeChannel>> {
        lock(&self.0.channels)
    }

    /// Locks the directory, for a few microseconds and never across an await.
    fn directory(&self) -> MutexGuard<'_, Directory> {
        lock(&self.0.directory)
    }

    /// Passes a measurement of a node's service to the directory, and reports breakers that open or close.
    fn measured(&self, measure: impl FnOnce(&mut Directory)) {
        let mut directory = self.directory();
        measure(&mut directory);
        let changes = directory.take_breaker_changes();
        drop(directory);
        if changes.is_empty() {
            return;
        }
        for BreakerChange { address, partner, opened, detail } in changes {
            let partner = partner.as_ref().map(tracing::field::display);
            let Some(reason) = opened else {
                tracing::info!(node = %address, partner, detail, "circuit breaker closed");
                continue;
            };
            tracing::warn!(
                node = %address, partner, reason = reason.as_str(), detail,
                "circuit breaker opened: the router uses other nodes"
            );
            let exclusion = match (partner, reason) {
                (Some(_), _) => Exclusion::Transfers,
                (None, BreakerReason::Failures) => Exclusion::Failures,
                (None, BreakerReason::Slow) => Exclusion::Slow,
            };
            self.0.metrics.node_excluded(role_label(address.role), exclusion);
        }
        self.count_nodes();
        self.changed();
    }

    fn count_nodes(&self) {
        let models = || self.0.served.iter().map(|served| &*served.model);
        // A node that never answered can only have the model of a router with one model.
        let only = models().next().filter(|_| models().len() == 1);
        let model_of = |member: &Member| match member.record() {
            Some(record) => models().find(|model| *model == record.model),
            None => only,
        };
        let directory = self.directory();
        let nodes = directory.nodes();
        let nodes: Vec<_> =
            nodes.map(|node| (node.address.role, node.health, model_of(node))).collect();
        let excluded = Role::ALL.map(|role| (role, directory.excluded(role)));
        drop(directory);
        for (role, excluded) in excluded {
            self.0.metrics.set_excluded_nodes(role.as_str(), excluded);
        }
        for role in Role::ALL {
            for health in Health::ALL {
                for model in models().map(Some).chain([None]) {
                    let count = nodes.iter().filter(|node| **node == (role, health, model)).count();
                    self.0.metrics.set_nodes(role.as_str(), health.as_str(), model, count);
                }
            }
        }
        self.count_cached_blocks();
    }

    fn count_cached_blocks(&self) {
        let directory = self.directory();
        for role in Role::ALL {
            self.0.metrics.set_cached_blocks(role.as_str(), directory.cached_blocks(role));
        }
    }
}

fn role_label(role: Role) -> NodeRole {
    match role {
        Role::Prefill => NodeRole::Prefill,
        Role::Decode => NodeRole::Decode,
    }
}

/// The nodes of an attempt.
pub struct PickedNodes {
    pub decode: Assigned,
    /// `None`: the decode node prefills the prompt.
    pub prefill: Option<Assigned>,
    /// Predicted time from the pick to the first token.
    pub ttft: Option<Duration>,
    /// Tokens that the attempt must prefill.
    pub uncached_tokens: u32,
    pub considered: Considered,
}

/// A node that an attempt uses. Dropping it releases the assignment.
pub struct Assigned {
    nodes: Nodes,
    choice: NodeChoice,
    channel: NodeChannel,
}

impl Assigned {
    fn client(&self) -> Client {
        self.channel.client(self.record().epoch)
    }

    pub fn record(&self) -> &Arc<NodeRecord> {
        &self.choice.record
    }

    /// Returns the number of prompt tokens that the router expects in the cache of the node.
    pub fn cached_tokens(&self) -> u32 {
        self.choice.cached_tokens
    }

    /// Reports that the node accepted the attempt: the stream of the call is open.
    fn accepted(&self) {
        self.nodes.directory().accepted(self.choice.assignment);
    }

    /// Returns the time until this node aborts its sequences, if the node drains with a limit and another node can
    /// take the request.
    pub fn grace_left(&self, wanted: &Wanted<'_>) -> Option<Duration> {
        self.nodes.directory().grace_left(Instant::now(), self.choice.assignment, wanted)
    }

    /// Returns when the node last reported a change of its load or cache.
    pub fn changed_at(&self) -> Option<Instant> {
        self.nodes.directory().changed_at(self.choice.assignment)
    }

    /// Reports the first token of the attempt; this node is its decode node.
    pub fn first_token(&self) {
        self.nodes.directory().first_token(Instant::now(), self.choice.assignment);
    }

    /// Reports the transfer of the attempt's KV from this node.
    pub fn delivered(&self, decode: &Self, elapsed: Duration) {
        let (prefill, decode) = (self.choice.assignment, decode.choice.assignment);
        self.nodes.measured(|directory| {
            directory.delivered(Instant::now(), prefill, decode, elapsed);
        });
    }

    /// Reports that this decode node sent its first token of the attempt.
    pub fn served(&self) {
        self.nodes.measured(|directory| directory.served(self.choice.assignment));
    }

    /// Reports the tokens that this decode node sent, and the time that the router waited for them.
    pub fn decoded(&self, tokens: u32, waited: Duration) {
        self.nodes.measured(|directory| {
            directory.decoded(Instant::now(), self.choice.assignment, tokens, waited);
        });
    }

    /// Reports that the attempt failed on this node.
    pub fn failed(&self) {
        let failed = Failed::Node(self.choice.assignment);
        self.nodes.measured(|directory| directory.failed(Instant::now(), failed));
    }

    /// Reports that the attempt's KV was not transferred from this node.
    pub fn transfer_failed(&self, decode: &Self) {
        let (prefill, decode) = (self.choice.assignment, decode.choice.assignment);
        let failed = Failed::Transfer { prefill, decode };
        self.nodes.measured(|directory| directory.failed(Instant::now(), failed));
    }

    /// Reports to the directory that the node rejected the attempt as busy.
    pub fn busy(&self) {
        self.nodes.directory().busy(Instant::now(), self.choice.assignment);
    }

    /// Reports that the connection broke or another process answered. The directory then probes the node.
    pub fn lost(&self, reason: String) {
        // If the queue is full, the node's Observe stream reports the loss.
        let _ = self
            .nodes
            .0
            .inputs
            .try_send(DirectoryInput::CallLost { epoch: self.record().epoch, reason });
    }
}

impl Drop for Assigned {
    fn drop(&mut self) {
        self.nodes.directory().release(self.choice.assignment);
    }
}

/// A call of an attempt. Dropping it cancels the call and releases the node.
pub struct NodeCall<E> {
    pub node: Assigned,
    stream: CallStream<E>,
}

type Opening<E> = Pin<Box<dyn Future<Output = Result<Response<Streaming<E>>, Status>> + Send>>;

/// The server stream of a call. [`next_message`] waits for the opening of the stream and for its messages.
enum CallStream<E> {
    Opening(Opening<E>),
    Open(Streaming<E>),
}

impl NodeCall<DecodeEvent> {
    pub fn decode(node: Assigned, request: DecodeRequest, span: &Span) -> Self {
        let (mut client, request) = (node.client(), traced(span, request));
        let call = async move { client.decode(request).await };
        Self { node, stream: CallStream::Opening(Box::pin(call)) }
    }
}

impl NodeCall<PrefillEvent> {
    pub fn prefill(node: Assigned, request: PrefillRequest, span: &Span) -> Self {
        let (mut client, request) = (node.client(), traced(span, request));
        let call = async move { client.prefill(request).await };
        Self { node, stream: CallStream::Opening(Box::pin(call)) }
    }
}

fn traced<M>(span: &Span, message: M) -> Request<M> {
    let mut request = Request::new(message);
    propagation::inject_grpc(span, request.metadata_mut());
    request
}

/// Returns the call's next message; `None` when the node ended the stream. Blocks forever without a call.
/// Cancel-safe.
pub async fn next_message<E>(call: &mut Option<&mut NodeCall<E>>) -> Result<Option<E>, Status> {
    let Some(NodeCall { node, stream }) = call else { return std::future::pending().await };
    if let CallStream::Opening(opening) = stream {
        *stream = CallStream::Open(opening.await?.into_inner());
        node.accepted();
    }
    let CallStream::Open(events) = stream else { unreachable!("the stream was opened above") };
    events.message().await
}

#[cfg(test)]
pub(crate) use tests::metrics as test_metrics;

#[cfg(test)]
mod tests {
    use config::{Disaggregate, NodePolicy};
    use proto::auth::ClusterSecret;
    use telemetry::{Resource, Telemetry, TelemetryConfig};

    use super::*;

    pub(super) const SELECTION: Selection =
        Selection { disaggregate: Disaggregate::Auto, policy: NodePolicy::Predicted };

    pub(super) fn credentials() -> NodeCredentials {
        let secret = ClusterSecret::new("a secret of the cluster").unwrap();
        NodeCredentials { secret, tls: None }
    }

    pub(crate) fn metrics() -> RouterMetrics {
        let config = TelemetryConfig { log: "off".into(), ..TelemetryConfig::default() };
        let resource = Resource { service: "baton-router".into(), instance: "test".into() };
        let telemetry = Telemetry::start(&config, resource).unwrap();
        RouterMetrics::new(&telemetry.metrics(), "ours")
    }

    /// A lost node must not look like a node of an older release, which has version 0.
    #[tokio::test]
    async fn without_a_node_the_grammar_version_is_unknown() {
        let none: [&str; 0] = [];
        let members = Membership::listed(none, none).unwrap();
        let served = Arc::new([Served { model: "ours".into(), vocabulary_size: 10 }]);
        let (nodes, _watch) =
            Nodes::watch(&members, served, SELECTION, metrics(), credentials()).unwrap();
        assert_eq!(nodes.serving("ours").limits, None);
        assert_eq!(nodes.grammar_version("ours"), None);
    }
}
