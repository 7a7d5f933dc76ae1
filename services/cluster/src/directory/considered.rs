//! Explanation of a pick: the options that the directory compared, and the nodes that were not
//! eligible.

use serde::{Deserialize, Serialize};

use super::{Member, NoNode, options::NodeOption};
use crate::{NodeId, Role, predict::Prediction};

/// Maximum number of options, and of ineligible nodes, in the explanation of one pick.
pub(super) const OPTIONS_MAX: usize = 16;

/// Explanation of a pick, for `baton explain`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Considered {
    pub placement: Placement,
    /// The chosen option, then the other options, lowest predicted cost first.
    pub options: Vec<ConsideredOption>,
    /// Number of options beyond [`OPTIONS_MAX`].
    pub options_left_out: usize,
    /// Nodes of the model that were not eligible.
    pub ineligible: Vec<IneligibleNode>,
    /// Number of ineligible nodes beyond [`OPTIONS_MAX`].
    pub ineligible_left_out: usize,
    /// Overhead that the router adds to every predicted time to first token, in milliseconds.
    pub overhead_ms: f64,
}

/// Nodes that the attempt might have used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConsideredOption {
    pub decode: NodeId,
    /// `None`: the decode node prefills the prompt.
    pub prefill: Option<NodeId>,
    /// `None` without measurements.
    pub prediction: Option<Prediction>,
}

/// A node that the attempt could not use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IneligibleNode {
    /// Name of the node; its address if the node never reported.
    pub node: String,
    pub role: Role,
    pub reason: String,
}

impl IneligibleNode {
    pub(super) fn new(member: &Member, reason: &NoNode) -> Self {
        let node = match member.record() {
            Some(record) => record.node_id.to_string(),
            None => member.address.grpc.clone(),
        };
        Self { node, role: member.address.role, reason: reason.of_one_node() }
    }
}

/// Reason why a prefill node or the decode node prefills the prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
pub enum Placement {
    #[error("router.disaggregate is always")]
    Always,
    #[error("router.disaggregate is never")]
    Never,
    #[error("predicted cost: {disaggregated_ms:.1} ms disaggregated, {local_ms:.1} ms local")]
    Predicted { disaggregated_ms: f64, local_ms: f64 },
    #[error("the caller leaves headroom, so that no decode node prefills if a prefill node can")]
    Headroom,
    /// No node has measured its steps, or one is of an older release.
    #[error("no prediction, because the nodes have not measured their steps")]
    Unmeasured,
    #[error("after failed attempts, so that no transfer is needed")]
    AfterFailure,
    #[error("the sequence moves with its KV from its draining node")]
    Moved,
    #[error("pooled values need no decode node")]
    Pooled,
    #[error("short prompt: {tokens} tokens fill no KV block of {block_tokens}")]
    ShortPrompt { tokens: u32, block_tokens: u32 },
    #[error("{0}")]
    NoPrefillNode(NoNode),
    #[error("no prefill node has the model, weights and KV layout of the decode node")]
    NoPartner,
    #[error("the last transfers from every prefill node to the decode node failed")]
    TransfersFail,
}

/// Returns the explanation of a pick. Bounds the copied options, because a large cluster has
/// thousands of pairs.
pub(super) fn considered(
    placement: Placement,
    options: &[NodeOption<'_>],
    best: &NodeOption<'_>,
    ineligible: &[(&Member, NoNode)],
    overhead_ms: f64,
) -> Considered {
    let is_best = |option: &NodeOption<'_>| std::ptr::eq(option, best);
    let mut others: Vec<_> = options.iter().filter(|option| !is_best(option)).collect();
    let by_cost = |a: &&NodeOption<'_>, b: &&NodeOption<'_>| a.cost_ms().total_cmp(&b.cost_ms());
    if others.len() > OPTIONS_MAX {
        others.select_nth_unstable_by(OPTIONS_MAX, by_cost);
        others.truncate(OPTIONS_MAX);
    }
    others.sort_by(by_cost);
    let kept = [best].into_iter().chain(others).take(OPTIONS_MAX);
    let kept: Vec<_> = kept.map(NodeOption::considered).collect();
    Considered {
        placement,
        options_left_out: options.len() - kept.len(),
        options: kept,
        ineligible_left_out: ineligible.len().saturating_sub(OPTIONS_MAX),
        ineligible: ineligible
            .iter()
            .take(OPTIONS_MAX)
            .map(|(member, reason)| IneligibleNode::new(member, reason))
            .collect(),
        overhead_ms,
    }
}
