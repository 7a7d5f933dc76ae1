//! Operator calls that the router forwards to nodes.

use std::time::Duration;

use bytes::Bytes;
use cluster::{Directory, Epoch};
use proto::v1::{ResetPrefixCacheRequest, SetDrainingRequest, TraceRequest};
use serde::Serialize;
use tonic::{Code, Request, Status};

use super::{Nodes, channel::Client};

/// Deadline of a call. The engine thread answers between two steps.
const CALL_MAX: Duration = Duration::from_secs(10);

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

/// The router's view of a member.
#[derive(Debug, Serialize)]
pub(crate) struct NodeSummary {
    /// `None` until the node has reported its record.
    node: Option<String>,
    role: &'static str,
    grpc: String,
    health: &'static str,
    draining: bool,
    model: Option<String>,
    running: u32,
    waiting: u32,
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

fn rejected(node: &str, status: Status) -> AdminError {
    let (node, reason) = (node.to_owned(), status.message().to_owned());
    match status.code() {
        Code::Unimplemented => AdminError::OlderRelease { node },
        Code::InvalidArgument => AdminError::Invalid { reason },
        Code::ResourceExhausted => AdminError::Busy { node, reason },
        _ => AdminError::Failed { node, reason },
    }
}

impl Nodes {
    /// Returns all members in the order of joining.
    pub(crate) fn list(&self) -> Vec<NodeSummary> {
        let state = |member: &cluster::Member| {
            let (record, load) = (member.record(), member.load());
            NodeSummary {
                node: record.map(|record| record.node_id.to_string()),
                role: member.address.role.as_str(),
                grpc: member.address.grpc.clone(),
                health: member.health.as_str(),
                draining: load.draining,
                model: record.map(|record| record.model.clone()),
                running: load.running,
                waiting: load.waiting,
            }
        };
        self.directory(|directory| directory.nodes().map(state).collect())
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
