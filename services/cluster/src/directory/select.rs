//! Node selection for an attempt: a decode node, and a prefill node unless the decode node prefills
//! the prompt.
//!
//! Under the policy `predicted` the directory compares pairs and decode nodes by their predicted
//! cost in milliseconds ([`predict`](crate::predict)). In a large cluster it compares the pairs of
//! the 16 nodes of each role whose own part of the cost is lowest. Costs within the error of
//! predictions are equal; among equal costs a prefill node comes first. With fluid roles every node
//! is compared as prefill node and as decode node, and among equal costs the node that does both
//! comes first, because it needs no transfer. Predictions require that a
//! node has measured its steps, and that no node is of an older release, which reports no step
//! times. Without predictions the directory follows the policy `cache-aware` and prefers a pair.
//!
//! The other policies choose a node of each role; predictions only decide between the pair and the
//! decode node alone. `cache-aware` estimates the work before the attempt, in units of one prompt
//! token:
//!
//! ```text
//! cost = pending prompt tokens (reported + own unseen)
//!      + row     * (running + waiting + own unseen attempts)
//!      + uncached tokens of the attempt if this node prefills them, otherwise its uncached blocks
//!        (transfer)
//!      + 64      * missing blocks: needed - (free + cached - own unseen)
//! row  = 64 on decode nodes: a row costs each step about two prompt tokens, over about 32 shared
//!        steps
//!        16 on prefill nodes: the overhead of a sequence besides its tokens
//! ```
//!
//! *Own unseen* attempts are attempts of this router that the node's load report cannot include
//! yet. Without them a burst would go to one node. Ties go to the node with fewer attempts of this
//! router, then to the node that was not picked for the longest time, then to the node that joined
//! first. The selection is deterministic.

use std::{
    cell::LazyCell,
    sync::Arc,
    time::{Duration, Instant},
};

use config::{Disaggregate, NodePolicy, Roles};
use proto::ids::TransferId;

use super::{
    AssignmentId, Directory, Forecast, NoNode,
    candidate::{AttemptLoad, Candidate, known_costs},
    capacity,
    considered::{Considered, Placement, considered},
    eligible::{eligible, misfit},
    member::{Member, NodeReports},
    options::{no_pair, predicted, startable},
    requirements::NodeRequirements,
};
use crate::{NodeAddress, NodeRecord, Role};

const DAY_MS: f64 = 86_400_000.0;

/// The choice of nodes that the operator set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    pub disaggregate: Disaggregate,
    pub roles: Roles,
    pub policy: NodePolicy,
}

/// The nodes of an attempt.
#[derive(Clone, Debug)]
pub struct Picked {
    pub decode: NodeChoice,
    /// `None`: the decode node prefills the prompt.
    pub prefill: Option<NodeChoice>,
    /// Predicted time from now to the first token; `None` without measurements.
    pub ttft: Option<Duration>,
    /// Tokens that the attempt must prefill: the node that prefills has not cached them.
    pub uncached_tokens: u32,
    pub considered: Considered,
}

/// The picked node and its assignment.
#[derive(Clone, Debug)]
pub struct NodeChoice {
    pub address: NodeAddress,
    pub record: Arc<NodeRecord>,
    /// Id to release with [`Directory::release`] or [`Directory::busy`] when the attempt ends.
    pub assignment: AssignmentId,
    /// Estimated number of cached tokens on the node.
    pub cached_tokens: u32,
}

impl Directory {
    /// Picks the nodes of an attempt and counts the attempt on each of them until its release.
    /// Fails without a decode node; without a prefill node the decode node prefills the prompt.
    /// `transfer_id`: id under which the nodes report the attempt.
    pub fn pick(
        &mut self,
        now: Instant,
        transfer_id: TransferId,
        requirements: &NodeRequirements<'_>,
    ) -> Result<Picked, NoNode> {
        if !requirements.pooling {
            return self.pick_from(Role::Decode, now, transfer_id, requirements);
        }
        // A pooled attempt needs one node. Prefill nodes come first: they are busy with prompts
        // anyway. While all of them are too busy, a decode node that can start takes the attempt.
        let of_prefill = match self.pick_from(Role::Prefill, now, transfer_id, requirements) {
            Ok(picked) => return Ok(picked),
            Err(reason) => reason,
        };
        let picked = self.pick_from(Role::Decode, now, transfer_id, requirements);
        picked.map_err(|of_decode| match of_prefill {
            NoNode::Busy { .. } => of_prefill,
            _ => of_decode,
        })
    }

    /// Picks the nodes of an attempt. `role`: role of the node that takes the whole attempt, or its
    /// decode part.
    fn pick_from(
        &mut self,
        role: Role,
        now: Instant,
        transfer_id: TransferId,
        requirements: &NodeRequirements<'_>,
    ) -> Result<Picked, NoNode> {
        let mut ineligible = Vec::new();
        let mut decode = self.candidates(now, role, requirements, &[], &mut ineligible)?;
        capacity::check_headroom(requirements.capacity, &decode)?;
        capacity::retain_free(requirements.capacity, &mut decode, |_| true)?;
        let sender = requirements.moves_from.and_then(|from| self.sender(from, requirements));
        let moves = sender.is_some();
        if moves {
            // On a full node the sequence would wait for a slot.
            capacity::prefer_room(&mut decode);
        }
        let candidates = match self.selection.disaggregate {
            _ if moves => Ok(sender.into_iter().collect()),
            Disaggregate::Never => Err(Placement::Never),
            _ if requirements.pooling => Err(Placement::Pooled),
            _ if requirements.local_prefill => Err(Placement::AfterFailure),
            _ => self
                .candidates(now, Role::Prefill, requirements, &decode, &mut ineligible)
                .and_then(|mut prefill| {
                    let decodes = |member: &Member| self.takes(member, Role::Decode);
                    capacity::retain_free(requirements.capacity, &mut prefill, decodes)?;
                    Ok(prefill)
                })
                .map_err(Placement::NoPrefillNode),
        };
        let (mut prefill, no_prefill) = match candidates {
            Ok(prefill) => (prefill, None),
            Err(reason) => (Vec::new(), Some(reason)),
        };
        let costs = known_costs(&decode, &prefill);
        if let Some(costs) = costs {
            for node in decode.iter_mut().chain(&mut prefill) {
                let decodes = self.takes(node.member, Role::Decode);
                node.state = Some(node.state(now, decodes, costs));
            }
        }
        let policy = match self.selection.policy {
            NodePolicy::Predicted if costs.is_none() => NodePolicy::CacheAware,
            policy => policy,
        };
        if policy != NodePolicy::Predicted {
            // Only predictions tell when a node does better than the nodes of the other role.
            keep_own_role(&mut decode);
            keep_own_role(&mut prefill);
        }
        let mut options = self.options(now, policy, requirements, &decode, &prefill);
        let has_pair = options.iter().any(|option| option.prefill.is_some());
        // Without predictions the pair is preferred.
        let may_be_local = self.selection.disaggregate == Disaggregate::Auto
            && !moves
            && costs.is_some()
            && !requirements.capacity.leaves_headroom();
        if !may_be_local && has_pair {
            options.retain(|option| option.prefill.is_some());
        }
        for option in &mut options {
            let pair = option.prefill.map(|prefill| (prefill.key, option.decode.key));
            let transfer_ms = pair.map_or(0.0, |pair| self.transfers.of(pair));
            option.predict(transfer_ms, requirements.new_tokens_max);
        }
        let waits_since = requirements.waits_since.unwrap_or(now);
        let waited = now.saturating_duration_since(waits_since);
        let best = startable(self.selection.roles, requirements.capacity, waited, &options)?;
        let placement = no_prefill.unwrap_or_else(|| match self.selection.disaggregate {
            _ if !has_pair => no_pair(best.decode, &prefill, requirements),
            _ if moves => Placement::Moved,
            Disaggregate::Always => Placement::Always,
            _ if costs.is_none() => Placement::Unmeasured,
            _ if requirements.capacity.leaves_headroom() => Placement::Headroom,
            _ => predicted(&options),
        });
        let considered = considered(placement, &options, best, &ineligible, self.overhead_ms);
        let (decode, prefill) = (best.decode.assigned(), best.prefill.map(Candidate::assigned));
        let predicted_ms = best.prediction.map(|prediction| prediction.ttft_ms());
        let is_local = prefill.is_none();
        let uncached_tokens = prefill.as_ref().unwrap_or(&decode).1.uncached_tokens as u32;
        let ttft_ms = predicted_ms.map(|ms| ms + self.overhead_ms);
        let forecast = ttft_ms.map(|ttft_ms| Forecast { at: now, ttft_ms });
        let pair = prefill.map(|prefill| (prefill.0, decode.0));
        let decode = self.assign(now, transfer_id, decode, is_local, forecast);
        let prefill = prefill.map(|prefill| self.assign(now, transfer_id, prefill, true, None));
        if let (Some(pair), Some(prefill)) = (pair, &prefill) {
            self.pair_assigned(now, pair, prefill.assignment);
        }
        Ok(Picked {
            decode,
            prefill,
            ttft: ttft_ms.map(|ms| Duration::from_secs_f64(ms.min(DAY_MS) / 1e3)),
            uncached_tokens,
            considered,
        })
    }

    /// Returns the eligible nodes of a role, or the reason of the node closest to eligible. Adds
    /// the model's other nodes to `ineligible`. If only open breakers exclude decode nodes, those
    /// nodes are eligible: they may have recovered, and the request has no other node. `decode`: the
    /// decode candidates, for the prefill candidates among them.
    pub(super) fn candidates<'a>(
        &'a self,
        now: Instant,
        role: Role,
        requirements: &NodeRequirements<'_>,
        decode: &[Candidate<'a>],
        ineligible: &mut Vec<(&'a Member, NoNode)>,
    ) -> Result<Vec<Candidate<'a>>, NoNode> {
        let mut nearest = (NoNode::NoneListed { role }, false);
        let (mut candidates, mut broken) = (Vec::with_capacity(self.members.len()), Vec::new());
        // Nodes often have as much of a prompt as the node before: a common prefix, or nothing.
        let mut resident_before = 0;
        let listed = LazyCell::new(|| {
            self.members.values().filter(|member| self.takes(member, role)).count()
        });
        // A decode candidate meets every requirement of a prefill node, unless the request excludes
        // prefill nodes or the candidates are nodes with open breakers.
        let is_open = |node: &Candidate<'_>| node.member.breaker.refuses(now).is_some();
        let is_checked =
            requirements.exclude_prefill.is_empty() && !decode.first().is_some_and(is_open);
        let mut checked = if is_checked { decode } else { &[] }.iter().peekable();
        for (&key, member) in &self.members {
            // Both lists are in the order of keys.
            if let Some(node) = checked.next_if(|node| node.key == key) {
                candidates.extend(node.takes_both.then(|| node.as_prefill()));
                continue;
            }
            if !self.takes(member, role) {
                continue;
            }
            let misfit = member.seen.as_ref().map(|seen| misfit(role, &seen.record, requirements));
            let fits = misfit == Some(None);
            let mut candidate = |seen: &'a NodeReports| Candidate {
                key,
                role,
                takes_both: self.takes(member, Role::Prefill) && self.takes(member, Role::Decode),
                member,
                seen,
                need: AttemptLoad::of(role, seen, requirements, &mut resident_before),
                state: None,
            };
            match eligible(now, role, member, misfit.flatten(), requirements) {
                Err(reason) => {
                    if let (Some(NoNode::Broken { .. }), Some(seen)) = (&reason, &member.seen) {
                        broken.push(candidate(seen));
                    }
                    let reason = reason.unwrap_or_else(|| NoNode::NoneUp { role, listed: *listed });
                    if !matches!(reason, NoNode::OtherModel { .. }) {
                        ineligible.push((member, reason.clone()));
                    }
                    if reason.nearness(fits) > nearest.0.nearness(nearest.1) {
                        nearest = (reason, fits);
                    }
                }
                Ok(seen) => candidates.push(candidate(seen)),
            }
        }
        match nearest.0 {
            _ if !candidates.is_empty() => Ok(candidates),
            NoNode::Broken { .. } if role == Role::Decode => Ok(broken),
            reason => Err(reason),
        }
    }
}

/// Keeps the nodes that prefer the role, if there are any.
fn keep_own_role(nodes: &mut Vec<Candidate<'_>>) {
    let is_own = |node: &Candidate<'_>| node.member.address.role == node.role;
    if nodes.iter().any(is_own) {
        nodes.retain(is_own);
    }
}
