//! Operator calls that the router forwards to nodes.

use std::time::Duration;

use bytes::Bytes;
use cluster::{BreakerReason, Directory, Epoch, Health, Member, NodeRecord, Role};
use proto::v1::{
    LoadAdapterRequest, PauseState, ResetPrefixCacheRequest, SetDrainingRequest, TraceRequest,
    UnloadAdapterRequest,
};
use serde::Serialize;
use tonic::{Code, Request, Status};

use super::{Nodes, channel::Client};

/// Deadline of a call. The engine thread answers between two steps.
const CALL_MAX: Duration = Duration::from_secs(10);
/// Maximum number of links in a list: 1,000 nodes have 250,000 pairs.
const LINKS_MAX: usize = 200;
/// Deadline of loading or unloading an adapter. A node reads the files of an adapter of a large
/// model within seconds, and waits for the running step.
const ADAPTER_MAX: Duration = Duration::from_secs(60);
/// Poll interval until a node has announced a change of its adapters.
const ANNOUNCED_EVERY: Duration = Duration::from_millis(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdminCall {
    /// Reject new attempts; those in flight finish.
    Drain,
    /// Accept attempts again.
    Undrain,
    /// Drop the cached blocks that no sequence uses.
    ResetPrefixCache,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum AdminError {
    #[error("cannot find node {node:?}; expected one of: {known}")]
    UnknownNode { node: String, known: String },
    #[error("cannot call node {node}: several nodes have this id; expected the URL of one: {urls}")]
    AmbiguousNode { node: String, urls: String },
    #[error("cannot call node {node}: it is of an older release without this call")]
    OlderRelease { node: String },
    #[error("{reason}")]
    Invalid { reason: String },
    #[error("cannot call node {node}: {reason}")]
    Busy { node: String, reason: String },
    #[error("cannot call node {node}: {reason}")]
    Failed { node: String, reason: String },
}

/// The router's view of the cluster.
#[derive(Debug, Serialize)]
pub(crate) struct NodeList {
    /// In the order of joining.
    nodes: Vec<NodeSummary>,
    /// The excluded pairs first, then the slowest.
    links: Vec<LinkSummary>,
    links_left_out: usize,
}

/// The router's measurement of the transfers from a prefill node to a decode node.
#[derive(Debug, Serialize)]
struct LinkSummary {
    /// URL of the prefill node and of the decode node.
    prefill: String,
    decode: String,
    /// Transfer time of the KV of a token; `None` without a completed transfer.
    token_us: Option<f64>,
    /// Whether the circuit breaker of the pair is open or half-open.
    excluded: bool,
}

/// The router's view of a member.
#[derive(Debug, Serialize)]
struct NodeSummary {
    /// `None` until the node has reported its record.
    node: Option<String>,
    role: &'static str,
    grpc: String,
    health: &'static str,
    /// Reason for the health.
    reason: String,
    draining: bool,
    /// Reason why the circuit breaker of the node is open or half-open.
    excluded: Option<&'static str>,
    /// pausing or paused; `None` while the node serves.
    pause: Option<&'static str>,
    /// Whether this router lets the node prefill and decode.
    both_roles: bool,
    model: Option<String>,
    running: u32,
    /// Number of running sequences that still prefill.
    prefilling: u32,
    waiting: u32,
    pending_prompt_tokens: u64,
    /// Number of attempts of this router on the node.
    in_flight: usize,
    /// Numbers of all KV blocks of the node, of free blocks, and of cached blocks, which the node
    /// evicts when it needs blocks.
    blocks: u32,
    blocks_free: u32,
    blocks_cached: u32,
}

/// A change of the adapters of every node of a model.
#[derive(Clone, Debug)]
pub(crate) enum AdapterChange {
    /// Load the adapter in this folder of every node.
    Load {
        path: String,
    },
    Unload,
}

impl AdapterChange {
    pub(crate) fn verb(&self) -> &'static str {
        match self {
            Self::Load { .. } => "load",
            Self::Unload => "unload",
        }
    }
}

/// A node whose adapters are changed.
#[derive(Clone, Debug)]
pub(crate) struct AdapterTarget {
    node: String,
    url: String,
}

/// The outcome of a change of the adapters of one node.
#[derive(Debug, Serialize)]
pub(crate) struct AdapterOutcome {
    node: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_hash: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attempts_in_flight: Option<u32>,
}

/// The outcome of a call.
#[derive(Debug, Default, Serialize)]
pub(crate) struct AdminOutcome {
    node: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    attempts_in_flight: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dropped_blocks: Option<u32>,
}

/// Returns the pause of a node as operators see it; `None` while the node serves.
pub(crate) fn pause_name(pause: PauseState) -> Option<&'static str> {
    match pause {
        PauseState::None => None,
        PauseState::Pausing => Some("pausing"),
        PauseState::Paused => Some("paused"),
    }
}

fn rejected(node: &str, status: Status) -> AdminError {
    let (node, reason) = (node.to_owned(), status.message().to_owned());
    match status.code() {
        Code::Unimplemented => AdminError::OlderRelease { node },
        Code::InvalidArgument => AdminError::Invalid { reason },
        Code::ResourceExhausted => AdminError::Busy { node, reason },
        _ => AdminError::Failed { node, reason },
    }
}

impl NodeSummary {
    fn new(directory: &Directory, member: &Member) -> Self {
        let (record, load) = (member.record(), member.load());
        Self {
            node: record.map(|record| record.node_id.to_string()),
            role: member.address.role.as_str(),
            grpc: member.address.grpc.clone(),
            health: member.health.as_str(),
            reason: member.reason.clone(),
            draining: load.draining,
            excluded: member.excluded().map(BreakerReason::as_str),
            pause: pause_name(load.pause()),
            both_roles: Role::ALL.iter().all(|role| directory.takes(member, *role)),
            model: record.map(|record| record.model.clone()),
            running: load.running,
            prefilling: load.prefilling,
            waiting: load.waiting,
            pending_prompt_tokens: load.pending_prompt_tokens,
            in_flight: member.in_flight,
            blocks: record.map_or(0, |record| record.block_count),
            blocks_free: load.blocks_free,
            blocks_cached: load.blocks_cached,
        }
    }
}

impl Nodes {
    /// Returns the members and the links between them.
    pub(crate) fn list(&self) -> NodeList {
        self.directory(|directory| {
            let nodes = directory.nodes().map(|member| NodeSummary::new(directory, member));
            let (links, count) = directory.links(LINKS_MAX);
            let links_left_out = count - links.len();
            let links = links.into_iter().map(|link| LinkSummary {
                prefill: link.prefill.grpc.clone(),
                decode: link.decode.grpc.clone(),
                token_us: link.token_ms.map(|ms| (ms * 1e6).round() / 1e3),
                excluded: link.is_excluded,
            });
            NodeList { nodes: nodes.collect(), links: links.collect(), links_left_out }
        })
    }

    /// Sends a call to the node with this id or URL.
    pub(crate) async fn forward(
        &self,
        node: &str,
        call: AdminCall,
    ) -> Result<AdminOutcome, AdminError> {
        let outcome = AdminOutcome { node: node.to_owned(), ..Default::default() };
        self.call(node, CALL_MAX, async |mut client, node_epoch| match call {
            AdminCall::Drain | AdminCall::Undrain => {
                let draining = call == AdminCall::Drain;
                let request = SetDrainingRequest { node_epoch, draining };
                let reply = client.set_draining(Request::new(request)).await?.into_inner();
                Ok(AdminOutcome { attempts_in_flight: Some(reply.attempts), ..outcome })
            }
            AdminCall::ResetPrefixCache => {
                let request = ResetPrefixCacheRequest { node_epoch };
                let reply = client.reset_prefix_cache(Request::new(request)).await?;
                let dropped_blocks = Some(reply.into_inner().blocks);
                Ok(AdminOutcome { dropped_blocks, ..outcome })
            }
        })
        .await
    }

    /// Returns the targets of a change: for a load the nodes of the model that are up, for an unload
    /// all nodes of the model that have the adapter. The unload fails for one that is not up, which
    /// would offer the adapter again once it is.
    pub(crate) fn adapter_targets(
        &self,
        model: &str,
        adapter: &str,
        change: &AdapterChange,
    ) -> Vec<AdapterTarget> {
        self.directory(|directory| {
            let targets = directory.nodes().filter_map(|member| {
                let record = member.record().filter(|record| record.model == model)?;
                let is_target = match change {
                    AdapterChange::Load { .. } => member.health == Health::Up,
                    AdapterChange::Unload => has_adapter(record, adapter),
                };
                let (node, url) = (record.node_id.to_string(), member.address.grpc.clone());
                is_target.then_some(AdapterTarget { node, url })
            });
            targets.collect()
        })
    }

    /// Loads or unloads an adapter on these nodes in parallel. Returns the outcomes, and each node
    /// that failed with its error.
    pub(crate) async fn change_adapters(
        &self,
        targets: &[AdapterTarget],
        adapter: &str,
        change: &AdapterChange,
    ) -> (Vec<AdapterOutcome>, Vec<(String, AdminError)>) {
        let calls = targets.iter().map(async |target| {
            let changed = self.change_adapter(target, adapter, change).await;
            changed.map_err(|error| (target.node.clone(), error))
        });
        let (mut outcomes, mut errors) = (Vec::new(), Vec::new());
        for changed in futures_util::future::join_all(calls).await {
            match changed {
                Ok(outcome) => outcomes.push(outcome),
                Err(error) => errors.push(error),
            }
        }
        (outcomes, errors)
    }

    async fn change_adapter(
        &self,
        target: &AdapterTarget,
        adapter: &str,
        change: &AdapterChange,
    ) -> Result<AdapterOutcome, AdminError> {
        let (node, name) = (target.node.clone(), adapter.to_owned());
        let outcome = AdapterOutcome { node, content_hash: None, attempts_in_flight: None };
        self.call(&target.url, ADAPTER_MAX, async |mut client, node_epoch| {
            let outcome = match change {
                AdapterChange::Load { path } => {
                    let request = LoadAdapterRequest { node_epoch, name, path: path.clone() };
                    let reply = client.load_adapter(Request::new(request)).await?.into_inner();
                    let hash = reply.content_hash.iter().map(|byte| format!("{byte:02x}"));
                    AdapterOutcome { content_hash: Some(hash.collect()), ..outcome }
                }
                AdapterChange::Unload => {
                    let request = UnloadAdapterRequest { node_epoch, name };
                    let reply = client.unload_adapter(Request::new(request)).await?.into_inner();
                    AdapterOutcome { attempts_in_flight: Some(reply.attempts), ..outcome }
                }
            };
            // Waits until this router knows the change, so that the next request sees its effect.
            while self.announces(target, adapter) == matches!(change, AdapterChange::Unload) {
                tokio::time::sleep(ANNOUNCED_EVERY).await;
            }
            Ok(outcome)
        })
        .await
    }

    /// Returns whether the last record of the node has the adapter.
    fn announces(&self, target: &AdapterTarget, adapter: &str) -> bool {
        self.directory(|directory| {
            let mut at_url = directory.nodes().filter(|member| member.address.grpc == target.url);
            at_url.any(|member| member.record().is_some_and(|it| has_adapter(it, adapter)))
        })
    }

    /// Returns a trace of the node with this id or URL over the next seconds, as JSON.
    pub(crate) async fn trace(&self, node: &str, seconds: u32) -> Result<Bytes, AdminError> {
        let within = CALL_MAX + Duration::from_secs(seconds.into());
        self.call(node, within, async |mut client, node_epoch| {
            let request = Request::new(TraceRequest { node_epoch, seconds });
            Ok(client.trace(request).await?.into_inner().json)
        })
        .await
    }

    /// Calls the node with this id or URL.
    async fn call<T>(
        &self,
        node: &str,
        within: Duration,
        call: impl AsyncFnOnce(Client, Bytes) -> Result<T, Status>,
    ) -> Result<T, AdminError> {
        let (url, epoch) = self.find(node)?;
        let failed = |reason| AdminError::Failed { node: node.to_owned(), reason };
        let channel = self.channel(&url);
        let channel = channel.ok_or_else(|| failed("the router has no connection to it".into()))?;
        let answer = call(channel.client(epoch), epoch.to_bytes().to_vec().into());
        let answer = tokio::time::timeout(within, answer).await;
        let answer = answer.map_err(|_| failed(format!("no answer within {within:?}")))?;
        answer.map_err(|status| rejected(node, status))
    }

    fn find(&self, node: &str) -> Result<(String, Epoch), AdminError> {
        self.directory(|directory| find(directory, node))
    }
}

fn has_adapter(record: &NodeRecord, name: &str) -> bool {
    record.adapters.iter().any(|adapter| adapter.name == name)
}

/// Returns URL and epoch of the only node with this id or URL. Nodes of different hosts may have
/// the same id.
fn find(directory: &Directory, node: &str) -> Result<(String, Epoch), AdminError> {
    let known = || directory.nodes().filter_map(|member| Some((member, member.record()?)));
    let named: Vec<_> = known()
        .filter(|(member, record)| record.node_id.as_str() == node || member.address.grpc == node)
        .collect();
    match named.as_slice() {
        [(member, record)] => Ok((member.address.grpc.clone(), record.epoch)),
        [] => {
            let node = node.chars().take(100).collect();
            let ids: Vec<_> = known().map(|(_, record)| record.node_id.to_string()).collect();
            let known = if ids.is_empty() { "none".to_owned() } else { ids.join(", ") };
            Err(AdminError::UnknownNode { node, known })
        }
        several => {
            let urls: Vec<_> =
                several.iter().map(|(member, _)| member.address.grpc.as_str()).collect();
            Err(AdminError::AmbiguousNode { node: node.to_owned(), urls: urls.join(", ") })
        }
    }
}
