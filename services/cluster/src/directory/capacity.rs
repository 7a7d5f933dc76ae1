//! Whether an attempt could start on a node now, or would wait in the node's own queues.
//!
//! Nodes queue in order of arrival: a request that waits in a node cannot be overtaken, so fairness
//! between callers ends there. Routers therefore hold requests back until a node has a free slot,
//! free KV blocks and a short queue of prompts.

use std::time::Duration;

use super::{
    Member, NoNode, candidate::Candidate, options::NodeOption, requirements::RequiredCapacity,
};
use crate::Role;

/// Maximum predicted time of a node's queue of prompts before the prompt of a new attempt: a few
/// times the error of predictions, so that a node does not run out of prompts while requests wait.
const PROMPT_QUEUE_MAX_MS: f64 = 50.0;
/// [`PROMPT_QUEUE_MAX_MS`] for a caller that leaves headroom: the time of a call and its
/// reservation.
const PROMPT_QUEUE_HEADROOM_MS: f64 = 10.0;
/// Pause before a waiting request picks again: the interval of load reports.
const RETRY_AFTER: Duration = Duration::from_millis(50);
/// 1/8 of the slots is headroom.
const HEADROOM: u64 = 8;

/// Slots of nodes that decode. Nodes of older releases do not report them and are never full.
#[derive(Default)]
struct Slots {
    total: u64,
    free: u64,
}

/// If the attempt must leave headroom, checks that decode nodes have free slots beyond it.
pub(super) fn check_headroom(
    capacity: RequiredCapacity,
    decode: &[Candidate<'_>],
) -> Result<(), NoNode> {
    if capacity.leaves_headroom() && has_only_headroom(decode) {
        return Err(busy(decode));
    }
    Ok(())
}

/// Keeps the nodes on which the attempt could start. Nodes that decode need a free slot and blocks.
pub(super) fn retain_free(
    capacity: RequiredCapacity,
    nodes: &mut Vec<Candidate<'_>>,
    decodes: impl Fn(&Member) -> bool,
) -> Result<(), NoNode> {
    if capacity == RequiredCapacity::Any {
        return Ok(());
    }
    let busy = busy(nodes);
    nodes.retain(|node| !decodes(node.member) || has_room(node));
    if nodes.is_empty() { Err(busy) } else { Ok(()) }
}

/// Keeps the nodes on which a sequence could decode now, if there are any.
pub(super) fn prefer_room(nodes: &mut Vec<Candidate<'_>>) {
    if nodes.iter().any(has_room) {
        nodes.retain(has_room);
    }
}

/// Returns whether the node has a free slot and blocks for the attempt.
fn has_room(node: &Candidate<'_>) -> bool {
    let Some(slots) = slots(node) else { return true };
    // Blocks become free when a sequence ends. Without sequences the node evicts cached blocks.
    let has_blocks = rows(node) == 0 || node.missing_blocks() == 0;
    slots.free > 0 && has_blocks
}

fn busy(nodes: &[Candidate<'_>]) -> NoNode {
    let role = nodes.first().map_or(Role::Decode, |node| node.role);
    NoNode::Busy { role, retry_after: RETRY_AFTER, by_choice: false }
}

/// Returns whether no slot is free besides the headroom.
fn has_only_headroom(decode: &[Candidate<'_>]) -> bool {
    let mut all = Slots::default();
    for node in decode {
        let Some(slots) = slots(node) else { return false };
        all.total += slots.total;
        all.free += slots.free;
    }
    all.free <= all.total / HEADROOM
}

/// Checks that the prompt of the attempt would not wait long for its prefill.
pub(super) fn check_prompt_queue(
    capacity: RequiredCapacity,
    best: &NodeOption<'_>,
) -> Result<(), NoNode> {
    let node = best.prefill.unwrap_or(best.decode);
    let queue_ms = node.state.as_ref().map_or(0.0, |(state, _)| state.queue_ms);
    let queue_max_ms = match capacity {
        RequiredCapacity::Any => return Ok(()),
        RequiredCapacity::Start { headroom: false } => PROMPT_QUEUE_MAX_MS,
        RequiredCapacity::Start { headroom: true } => PROMPT_QUEUE_HEADROOM_MS,
    };
    let excess_ms = queue_ms - queue_max_ms;
    if excess_ms <= 0.0 {
        return Ok(());
    }
    // A node may report costs that no duration can hold.
    let retry_after = Duration::from_secs_f64((excess_ms / 1e3).min(RETRY_AFTER.as_secs_f64()));
    Err(NoNode::Busy { role: node.role, retry_after, by_choice: false })
}

/// Returns the sequences on the node: those of other routers in the last report, and this router's
/// attempts now.
fn rows(node: &Candidate<'_>) -> u64 {
    (node.member.other_rows + node.member.in_flight) as u64
}

fn slots(node: &Candidate<'_>) -> Option<Slots> {
    let total = u64::from(node.seen.step_costs?.slots?);
    Some(Slots { total, free: total.saturating_sub(rows(node)) })
}
