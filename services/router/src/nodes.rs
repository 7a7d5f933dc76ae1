//! The nodes: the task that keeps the core's directory up to date, connections, and the Decode and
//! Prefill calls of attempts.

mod admin;
mod channel;
mod connection_setup;
mod watch;
mod weights;

use std::{
    collections::{BTreeMap, HashMap},
    error::Error as _,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use cluster::{
    BreakerChange, BreakerReason, CacheIdentity, Directory, DirectoryInput, Health, Member,
    NodeRecord, Role,
};
use membership::Membership;
use proto::v1::{DecodeEvent, DecodeRequest, PrefillEvent, PrefillRequest};
use router_core::{CallError, GrpcCode, PickedNode};
use telemetry::{
    RouterMetrics,
    metrics::{Exclusion, NodeRole},
    propagation,
};
use tokio::sync::{mpsc, watch as latest};
use tonic::{Request, Response, Status, Streaming};
use tracing::Span;

use crate::{lock::lock, request::options::ModelLimits, shared_router::SharedRouter};
pub(crate) use admin::{AdapterChange, AdminCall, AdminError, pause_name};
pub use channel::NodeCredentials;
use channel::{Client, NodeChannel};
pub(crate) use watch::{OwnedTask, Served};
pub(crate) use weights::{CopyFrom, UpdateRequest, WeightNode, WeightsAnswer};

/// Maximum number of nodes that `/health` names because they unexpectedly compute on the CPU.
const CPU_FALLBACKS_MAX: usize = 16;
/// Capacity of the queue of node events. Observe streams block while the queue is full.
const INPUTS_MAX: usize = 1024;
/// Maximum number of cache identities: old and new weights during a rolling update, and two more.
/// The router does not look up prefixes of further identities; it picks their nodes by load.
const CACHE_IDENTITIES_MAX: usize = 4;

/// Nodes of all models, and the connections to them. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Nodes(Arc<NodesState>);

struct NodesState {
    router: SharedRouter,
    /// Connections to nodes that have proved their knowledge of the secret, by URL.
    channels: Mutex<HashMap<String, NodeChannel>>,
    credentials: NodeCredentials,
    inputs: mpsc::Sender<DirectoryInput>,
    /// Number of changes of health, plus one for the end of the first connection setup.
    changes: latest::Sender<u64>,
    connected: AtomicBool,
    /// Limits and fingerprint of each model when a decode node last served it, by model name.
    last_served: Mutex<HashMap<String, (ModelLimits, u128)>>,
    served: Arc<[Served]>,
    metrics: RouterMetrics,
}

/// Current nodes of a model, and its limits and fingerprint now or when a decode node last served
/// it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Serving {
    pub prefill_nodes: usize,
    pub decode_nodes: usize,
    /// Number of decode nodes that are not paused.
    pub running_decode_nodes: usize,
    /// Limits that every decode node supports; `None` if no decode node ever served the model.
    pub limits: Option<ModelLimits>,
    /// Fingerprint of the first listed decode node; `None` if no decode node ever served the model.
    pub model_fingerprint: Option<u128>,
}

/// Returns what is known about a model. `last`: its limits and fingerprint when a decode node last
/// served it.
fn serving(directory: &Directory, model: &str, last: Option<(ModelLimits, u128)>) -> Serving {
    let of_role = |role| directory.serving(role).filter(|record| record.model == model);
    let records: Vec<&NodeRecord> = of_role(Role::Decode).collect();
    let least = |of: fn(&NodeRecord) -> u32| records.iter().map(|record| of(record)).min();
    let current = || {
        let limits = ModelLimits {
            prompt_tokens_max: least(|record| record.prompt_tokens_max)?,
            sequence_tokens_max: least(|record| record.sequence_tokens_max)?,
            vocabulary_size: least(|record| record.vocabulary_size)?,
        };
        Some((limits, records.first()?.identity.model_fingerprint))
    };
    let (limits, model_fingerprint) = current().or(last).unzip();
    Serving {
        prefill_nodes: of_role(Role::Prefill).count(),
        decode_nodes: records.len(),
        running_decode_nodes: directory.running_decode_nodes(model),
        limits,
        model_fingerprint,
    }
}

impl Nodes {
    /// Starts watching the members. Only nodes that serve a model of `served` are used.
    pub(crate) fn watch(
        membership: &Membership,
        served: Arc<[Served]>,
        router: SharedRouter,
        metrics: RouterMetrics,
        credentials: NodeCredentials,
    ) -> (Self, OwnedTask) {
        let (inputs, received) = mpsc::channel(INPUTS_MAX);
        let nodes = Self(Arc::new(NodesState {
            router,
            channels: Mutex::new(HashMap::new()),
            credentials,
            inputs,
            changes: latest::Sender::new(0),
            connected: AtomicBool::new(false),
            last_served: Mutex::default(),
            served: served.clone(),
            metrics,
        }));
        let watch = watch::start(nodes.clone(), membership.watch(), received, served);
        (nodes, watch)
    }

    /// Returns what is known about this model and its nodes.
    pub(crate) fn serving(&self, model: &str) -> Serving {
        let last = lock(&self.0.last_served).get(model).copied();
        self.directory(|directory| serving(directory, model, last))
    }

    fn remember_served(&self) {
        for served in self.0.served.iter() {
            let Serving { limits, model_fingerprint, .. } = self.serving(&served.model);
            if let Some(known) = limits.zip(model_fingerprint) {
                lock(&self.0.last_served).insert(served.model.to_string(), known);
            }
        }
    }

    /// Returns the nodes of these models that compute on the CPU although their host has a GPU,
    /// with the reason: at most [`CPU_FALLBACKS_MAX`].
    pub(crate) fn cpu_fallbacks(&self, of_model: impl Fn(&str) -> bool) -> Vec<(String, String)> {
        self.directory(|directory| {
            let records = Role::ALL.into_iter().flat_map(|role| directory.serving(role));
            let reasons = records.filter(|record| of_model(&record.model)).filter_map(|record| {
                Some((record.node_id.to_string(), record.cpu_fallback.clone()?))
            });
            reasons.take(CPU_FALLBACKS_MAX).collect()
        })
    }

    /// Returns the newest grammar version that a decode node of this model supports; `None` while
    /// no decode node serves.
    pub(crate) fn grammar_version(&self, model: &str) -> Option<u32> {
        self.directory(|directory| {
            let records = directory.serving(Role::Decode).filter(|record| record.model == model);
            records.map(|record| record.grammar_version).max()
        })
    }

    /// Returns the newest version of [`proto::v1::Sampling`] that a decode node of this model
    /// supports; `None` while no decode node serves.
    pub(crate) fn sampling_version(&self, model: &str) -> Option<u32> {
        self.directory(|directory| {
            let records = directory.serving(Role::Decode).filter(|record| record.model == model);
            records.map(|record| record.sampling_version).max()
        })
    }

    /// Returns whether a node of this model returns pooled values; `None` while no node serves.
    pub(crate) fn returns_pooled(&self, model: &str) -> Option<bool> {
        self.directory(|directory| {
            let records = Role::ALL.into_iter().flat_map(|role| directory.serving(role));
            let records = records.filter(|record| record.model == model);
            records.map(|record| record.pooling).max()
        })
    }

    /// Returns the adapters of this model by name, each with the content hash that most decode nodes
    /// have. Nodes may differ while an adapter is replaced on one after the other.
    pub(crate) fn adapters(&self, model: &str) -> BTreeMap<String, u128> {
        let mut counts: BTreeMap<(String, u128), usize> = BTreeMap::new();
        self.directory(|directory| {
            let records = directory.serving(Role::Decode).filter(|record| record.model == model);
            for adapter in records.flat_map(|record| &record.adapters) {
                *counts.entry((adapter.name.clone(), adapter.content_hash)).or_default() += 1;
            }
        });
        let mut counts: Vec<_> = counts.into_iter().collect();
        // The last of several entries of a name stays.
        counts.sort_by_key(|(_, count)| *count);
        counts.into_iter().map(|(adapter, _)| adapter).collect()
    }

    /// Returns the distinct cache identities of the nodes of this model that can be picked now, at
    /// most [`CACHE_IDENTITIES_MAX`]. Keys of cached blocks depend on the identity.
    pub(crate) fn cache_identities(&self, model: &str) -> Vec<CacheIdentity> {
        self.directory(|directory| {
            let mut identities = Vec::new();
            let records = Role::ALL.into_iter().flat_map(|role| directory.serving(role));
            for record in records.filter(|record| record.model == model) {
                let identity = CacheIdentity::of(&record.identity);
                if !identities.contains(&identity) && identities.len() < CACHE_IDENTITIES_MAX {
                    identities.push(identity);
                }
            }
            identities
        })
    }

    /// Returns a counter that changes with the health of any node and with [`Self::are_connected`].
    pub(crate) fn changes(&self) -> latest::Receiver<u64> {
        self.0.changes.subscribe()
    }

    /// Returns whether the first connection setup between nodes has ended. Never becomes false
    /// again.
    pub(crate) fn are_connected(&self) -> bool {
        self.0.connected.load(Ordering::Acquire)
    }

    fn changed(&self) {
        self.remember_served();
        self.0.changes.send_modify(|count| *count += 1);
    }

    /// Returns the connection of the last `Observe` stream of this node.
    fn channel(&self, url: &str) -> Option<NodeChannel> {
        self.channels().get(url).cloned()
    }

    fn channels(&self) -> MutexGuard<'_, HashMap<String, NodeChannel>> {
        lock(&self.0.channels)
    }

    /// Reads the directory, for a few microseconds.
    fn directory<T>(&self, read: impl FnOnce(&Directory) -> T) -> T {
        self.0.router.with(|core| read(core.directory()))
    }

    /// Logs and counts a circuit breaker that opened or closed.
    fn breaker_changed(&self, change: BreakerChange) {
        let BreakerChange { address, partner, opened, detail } = change;
        let partner = partner.as_ref().map(tracing::field::display);
        let Some(reason) = opened else {
            tracing::info!(node = %address, partner, detail, "circuit breaker closed");
            return;
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

    fn count_nodes(&self) {
        let models = || self.0.served.iter().map(|served| &*served.model);
        // A node that never answered can only have the model of a router with one model.
        let only = models().next().filter(|_| models().len() == 1);
        let model_of = |member: &Member| match member.record() {
            Some(record) => models().find(|model| *model == record.model),
            None => only,
        };
        let (nodes, excluded) = self.directory(|directory| {
            let nodes = directory.nodes();
            let nodes = nodes.map(|node| (node.address.role, node.health, model_of(node)));
            (nodes.collect::<Vec<_>>(), Role::ALL.map(|role| (role, directory.excluded(role))))
        });
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

    fn measure_queues(&self) {
        let now = Instant::now();
        for Served { model, .. } in self.0.served.iter() {
            let busy = self.0.router.with(|core| core.queue_time(model, now));
            for role in Role::ALL {
                let time = busy.filter(|(busy, _)| *busy == role).map_or(Duration::ZERO, |it| it.1);
                self.0.metrics.set_queue_time(model, role.as_str(), time);
            }
        }
    }

    fn count_cached_blocks(&self) {
        let counts =
            self.directory(|directory| Role::ALL.map(|role| (role, directory.cached_blocks(role))));
        for (role, count) in counts {
            self.0.metrics.set_cached_blocks(role.as_str(), count);
        }
    }
}

fn role_label(role: Role) -> NodeRole {
    match role {
        Role::Prefill => NodeRole::Prefill,
        Role::Decode => NodeRole::Decode,
    }
}

/// A call of an attempt. Dropping it cancels the call.
pub(crate) struct NodeCall<E>(CallStream<E>);

type Opening<E> = Pin<Box<dyn Future<Output = Result<Streaming<E>, CallError>> + Send>>;

/// The server stream of a call. [`next_message`] waits for the opening of the stream and for its
/// messages.
enum CallStream<E> {
    Opening(Opening<E>),
    Open(Streaming<E>),
}

/// A message of a call.
pub(crate) enum CallMessage<E> {
    /// The node accepted the call: the stream is open.
    Accepted,
    /// An event, or the end of the stream.
    Event(Result<Option<E>, CallError>),
}

impl NodeCall<DecodeEvent> {
    pub(crate) fn decode(
        nodes: &Nodes,
        node: PickedNode,
        request: DecodeRequest,
        span: &Span,
    ) -> Self {
        let request = traced(span, request);
        Self::open(nodes, node, async move |mut client| client.decode(request).await)
    }
}

impl NodeCall<PrefillEvent> {
    pub(crate) fn prefill(
        nodes: &Nodes,
        node: PickedNode,
        request: PrefillRequest,
        span: &Span,
    ) -> Self {
        let request = traced(span, request);
        Self::open(nodes, node, async move |mut client| client.prefill(request).await)
    }
}

impl<E> NodeCall<E> {
    fn open<F>(
        nodes: &Nodes,
        node: PickedNode,
        call: impl FnOnce(Client) -> F + Send + 'static,
    ) -> Self
    where
        F: Future<Output = Result<Response<Streaming<E>>, Status>> + Send,
    {
        let PickedNode { address, record, .. } = node;
        let client = nodes.channel(&address.grpc).map(|channel| channel.client(record.epoch));
        let opening = async move {
            // The node left after the pick.
            let client = client.ok_or_else(|| CallError {
                code: GrpcCode::UNAVAILABLE,
                is_broken: true,
                message: "the node left".to_owned(),
            })?;
            call(client).await.map(Response::into_inner).map_err(call_error)
        };
        Self(CallStream::Opening(Box::pin(opening)))
    }
}

/// Converts the status of a call for the request core.
fn call_error(status: Status) -> CallError {
    // tonic sets a source if the connection failed; a status from the node has none.
    let is_broken = status.source().is_some();
    let message = match status.message() {
        "" => status.code().description(),
        message => message,
    };
    CallError { code: GrpcCode(status.code().into()), is_broken, message: message.to_owned() }
}

fn traced<M>(span: &Span, message: M) -> Request<M> {
    let mut request = Request::new(message);
    propagation::inject_grpc(span, request.metadata_mut());
    request
}

/// Returns the call's next message. Blocks forever without a call. Cancel-safe.
pub(crate) async fn next_message<E>(call: &mut Option<&mut NodeCall<E>>) -> CallMessage<E> {
    let Some(NodeCall(stream)) = call else { return std::future::pending().await };
    match stream {
        CallStream::Opening(opening) => match opening.await {
            Ok(events) => {
                *stream = CallStream::Open(events);
                CallMessage::Accepted
            }
            Err(error) => CallMessage::Event(Err(error)),
        },
        CallStream::Open(events) => CallMessage::Event(events.message().await.map_err(call_error)),
    }
}

#[cfg(test)]
mod tests {
    use proto::auth::ClusterSecret;
    use telemetry::{Resource, Telemetry, TelemetryConfig};

    use super::*;
    use crate::shared_router::tests::router;

    pub(super) fn credentials() -> NodeCredentials {
        let secret = ClusterSecret::new("a secret of the cluster").unwrap();
        NodeCredentials { secret, tls: None }
    }

    pub(super) fn metrics() -> RouterMetrics {
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
        let (nodes, _watch) = Nodes::watch(&members, served, router(1), metrics(), credentials());
        assert_eq!(nodes.serving("ours").limits, None);
        assert_eq!(nodes.grammar_version("ours"), None);
    }
}
