//! Node selection for an attempt: a decode node, and a prefill node unless the decode node prefills the prompt.
//!
//! Under the policy `predicted` the directory compares pairs and decode nodes by their predicted cost in
//! milliseconds ([`predict`]). In a large cluster it compares the pairs of the 16 nodes of each role whose own part of the
//! cost is lowest. Costs within the error of predictions are equal; among equal costs a prefill node comes
//! first. Predictions require that a node has measured its steps, and that no node is of an older release, which
//! reports no step times. Without predictions the directory follows the policy `cache-aware` and prefers a pair.
//!
//! The other policies choose a node of each role; predictions only decide between the pair and the decode node alone.
//! `cache-aware` estimates the work before the attempt, in units of one prompt token:
//!
//! ```text
//! cost = pending prompt tokens (reported + own unseen)
//!      + row     * (running + waiting + own unseen attempts)
//!      + uncached tokens of the attempt if this node prefills them, otherwise its uncached blocks (transfer)
//!      + 64      * missing blocks: needed - (free + cached - own unseen)
//! row  = 64 on decode nodes: a row costs each step about two prompt tokens, over about 32 shared steps
//!        16 on prefill nodes: the overhead of a sequence besides its tokens
//! ```
//!
//! *Own unseen* attempts are attempts of this router that the node's load report cannot include yet. Without them a
//! burst would go to one node. Ties go to the node with fewer attempts of this router, then to the node that was not
//! picked for the longest time, then to the node that joined first. The selection is deterministic.

use std::{
    cmp::Reverse,
    sync::Arc,
    time::{Duration, Instant},
};

use config::{Disaggregate, NodePolicy};
use proto::ids::TransferId;
use serde::{Deserialize, Serialize};

use super::{
    Assignment, AssignmentId, Directory, Forecast, NodeKey,
    breaker::BreakerReason,
    considered::{Considered, ConsideredOption, IneligibleNode, OPTIONS_MAX, Placement},
    member::{Member, Seen, Unseen},
    room::{self, Room},
};
use crate::{
    Epoch, ModelIdentity, NodeAddress, NodeRecord, PrefixKeys, Role,
    predict::{
        DecodeCosts, NodeState, Prediction, PrefillCosts, Prompt, attention_pairs, hand_over, local,
    },
};

const DECODE_ROW_COST: u64 = 64;
const PREFILL_ROW_COST: u64 = 16;
/// Cost of a missing block. The attempt waits for other sequences or preempts them, which costs more than computing
/// the block's 16 tokens four times.
const MISSING_BLOCK_COST: u64 = 64;
/// Output tokens that count as needed. A decode node reserves the prompt's blocks at once; the answer grows later.
const NEW_TOKENS_COUNTED: u32 = 64;
/// A decode node prefills a prompt only if that saves this fraction of its time to first token: more than the usual
/// error of a prediction. Otherwise the choice on idle nodes would change with every measurement.
const LOCAL_SAVING_MIN: f64 = 0.2;
/// Predicted times that differ by less than this fraction are equal, so that equal nodes share the load.
const EQUAL_WITHIN: f64 = 0.05;
/// Maximum number of nodes of each role whose pairs are compared. All pairs of 1,000 nodes would take milliseconds.
const PAIRED_MAX: usize = 16;
/// Largest relative change of the router's overhead by one measurement.
const OVERHEAD_SHARE: f64 = 1.0 / 16.0;
/// Scale of the overhead: it grows from zero by a part of this.
const OVERHEAD_MS: f64 = 1.0;
const DAY_MS: f64 = 86_400_000.0;

/// The choice of nodes that the operator set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    pub disaggregate: Disaggregate,
    pub policy: NodePolicy,
}

/// Requirements of an attempt on its nodes.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Name of the model.
    pub model: &'a str,
    /// Length of the client's prompt, in tokens.
    pub prompt_tokens: u32,
    /// Prompt and emitted tokens.
    pub tokens: u32,
    /// Maximum number of further output tokens.
    pub new_tokens_max: u32,
    /// Whether the decode node must prefill the prompt itself.
    pub local_prefill: bool,
    /// Cache keys of the prompt's blocks for each identity of the nodes. Without keys of its identity a node counts as
    /// having no cached block.
    pub prefix: &'a [PrefixKeys],
    /// Identity that the decode node must be compatible with.
    pub identity: Option<&'a ModelIdentity>,
    /// Whether the decode node may have another weight version than `identity`.
    pub any_weights: bool,
    /// Grammar version that the answer needs; 0 for none.
    pub grammar_version: u32,
    /// Decode node processes that already failed this request.
    pub exclude_decode: &'a [Epoch],
    /// Prefill node processes that already failed this request.
    pub exclude_prefill: &'a [Epoch],
    /// Capacity that the attempt needs of its nodes.
    pub room: Room,
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

/// Reason why no node was picked: the reason of the node closest to eligible.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum NoNode {
    #[error("no {role} node is listed")]
    NoneListed { role: Role },
    #[error("no {role} node that is up serves the model")]
    OtherModel { role: Role },
    #[error("none of {listed} {role} nodes is up")]
    NoneUp { role: Role, listed: usize },
    #[error("every {role} node that is up is draining")]
    Draining { role: Role },
    #[error("no {role} node has the same model, weights and KV layout")]
    NoneFits { role: Role },
    #[error("no {role} node supports grammars of version {version}")]
    NoGrammar { role: Role, version: u32 },
    #[error("{tokens} tokens are more than the {tokens_max} that any {role} node takes")]
    TooLong { role: Role, tokens: u32, tokens_max: u32 },
    #[error("every {role} node has failed this request already")]
    Excluded { role: Role },
    #[error("the circuit breaker of every {role} node is open: {reason}")]
    Broken { role: Role, reason: BreakerReason, retry_after: Duration },
    #[error("every {role} node is busy, for another {retry_after:?}")]
    Busy { role: Role, retry_after: Duration },
}

impl NoNode {
    /// Returns the reason in words about a single node.
    pub fn of_one_node(&self) -> String {
        match self {
            Self::NoneListed { .. } => "not listed".into(),
            Self::OtherModel { .. } => "serves another model".into(),
            Self::NoneUp { .. } => "not up".into(),
            Self::Draining { .. } => "draining".into(),
            Self::NoneFits { .. } => "other model, weights or KV layout".into(),
            Self::NoGrammar { version, .. } => format!("no grammars of version {version}"),
            Self::TooLong { tokens, tokens_max, .. } => {
                format!("{tokens} tokens, at most {tokens_max} allowed")
            }
            Self::Excluded { .. } => "failed this request before".into(),
            Self::Broken { reason, retry_after: Duration::ZERO, .. } => {
                format!("circuit breaker half-open: {reason}; another request probes the node")
            }
            Self::Broken { reason, retry_after, .. } => {
                let left_ms = milliseconds(*retry_after);
                format!("circuit breaker open for another {left_ms:.0} ms: {reason}")
            }
            Self::Busy { retry_after, .. } => {
                format!("busy for another {:.0} ms", milliseconds(*retry_after))
            }
        }
    }

    /// Orders reasons by how close the node was to eligible. `fits`: the node's last record fits the request, so the
    /// request may wait for this node. Among equal reasons the earlier retry or the larger limit is closer.
    fn nearness(&self, fits: bool) -> (u8, Reverse<Duration>, u32) {
        let (mut retry_after, mut tokens_max) = (Duration::ZERO, 0);
        let rank = match self {
            Self::NoneListed { .. } => 0,
            Self::OtherModel { .. } => 1,
            Self::NoneUp { .. } => 2 + 5 * u8::from(fits),
            Self::Draining { .. } => 3 + 5 * u8::from(fits),
            Self::NoneFits { .. } => 4,
            Self::NoGrammar { .. } => 5,
            Self::TooLong { tokens_max: limit, .. } => {
                tokens_max = *limit;
                6
            }
            Self::Excluded { .. } => 9,
            Self::Broken { retry_after: pause, .. } => {
                retry_after = *pause;
                10
            }
            Self::Busy { retry_after: pause, .. } => {
                retry_after = *pause;
                11
            }
        };
        (rank, Reverse(retry_after), tokens_max)
    }
}

impl Directory {
    /// Picks the nodes of an attempt and counts the attempt on each of them until its release. Fails without a decode
    /// node; without a prefill node the decode node prefills the prompt.
    /// `transfer_id`: id under which the nodes report the attempt.
    pub fn pick(
        &mut self,
        now: Instant,
        transfer_id: TransferId,
        wanted: &Wanted<'_>,
    ) -> Result<Picked, NoNode> {
        let mut ineligible = Vec::new();
        let mut decode = self.candidates(now, Role::Decode, wanted, &mut ineligible)?;
        room::retain_free(wanted.room, &mut decode)?;
        let candidates = match self.selection.disaggregate {
            Disaggregate::Never => Err(Placement::Never),
            _ if wanted.local_prefill => Err(Placement::AfterFailure),
            _ => self
                .candidates(now, Role::Prefill, wanted, &mut ineligible)
                .map_err(Placement::NoPrefillNode),
        };
        let (mut prefill, no_prefill) = match candidates {
            Ok(prefill) => (prefill, None),
            Err(reason) => (Vec::new(), Some(reason)),
        };
        let costs = known_costs(&decode, &prefill);
        if let Some(costs) = costs {
            for node in decode.iter_mut().chain(&mut prefill) {
                node.state = Some(node.state(now, costs));
            }
        }
        let policy = match self.selection.policy {
            NodePolicy::Predicted if costs.is_none() => NodePolicy::CacheAware,
            policy => policy,
        };
        let mut options = self.options(now, policy, wanted, &decode, &prefill);
        let has_pair = options.iter().any(|option| option.prefill.is_some());
        // Without predictions the pair is preferred.
        let may_be_local = self.selection.disaggregate == Disaggregate::Auto
            && costs.is_some()
            && !wanted.room.leaves_headroom();
        if !may_be_local && has_pair {
            options.retain(|option| option.prefill.is_some());
        }
        for option in &mut options {
            let pair = option.prefill.map(|prefill| (prefill.key, option.decode.key));
            let transfer_ms = pair.map_or(0.0, |pair| self.transfers.of(pair));
            option.predict(transfer_ms, wanted.new_tokens_max);
        }
        let best = startable(wanted.room, &options)?;
        let placement = no_prefill.unwrap_or_else(|| match self.selection.disaggregate {
            _ if !has_pair => no_pair(best.decode, &prefill, wanted),
            Disaggregate::Always => Placement::Always,
            _ if costs.is_none() => Placement::Unmeasured,
            _ if wanted.room.leaves_headroom() => Placement::Headroom,
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

    /// Handles the first token of an attempt, by its decode node's assignment. Updates the overhead that
    /// predictions leave out, such as calls and the reservation. All options have the same overhead, so it
    /// changes no choice.
    pub fn first_token(&mut self, now: Instant, assignment: AssignmentId) {
        let Some(assigned) = self.assignments.get_mut(&assignment) else { return };
        let Some(Forecast { at, ttft_ms }) = assigned.forecast.take() else { return };
        let taken_ms = milliseconds(now.saturating_duration_since(at)).max(1e-3);
        // The relative error: in a long time to first token the overhead is a small part, and the rest of its error is
        // that of the queue.
        let error = ((taken_ms - ttft_ms) / taken_ms).max(-1.0);
        let learnt_ms = OVERHEAD_SHARE * error * (self.overhead_ms + OVERHEAD_MS);
        self.overhead_ms = (self.overhead_ms + learnt_ms).max(0.0);
    }

    /// Returns the time until the attempt's node aborts its sequences, if the node drains with a limit and another
    /// node can take the request.
    pub fn grace_left(
        &self,
        now: Instant,
        id: AssignmentId,
        wanted: &Wanted<'_>,
    ) -> Option<Duration> {
        let seen = self.members.get(&self.node_of(id)?)?.seen.as_ref()?;
        if !seen.load.draining || seen.load.drain_ms == 0 {
            return None;
        }
        let role = Role::Decode;
        let mut decode = self.members.values().filter(|member| member.address.role == role);
        let is_eligible = |member: &Member| {
            let misfit = member.seen.as_ref().and_then(|seen| misfit(role, &seen.record, wanted));
            eligible(now, role, member, misfit, wanted).is_ok()
        };
        decode.any(is_eligible).then_some(())?;
        let since = now.saturating_duration_since(seen.reported_at);
        Some(Duration::from_millis(seen.load.drain_ms).saturating_sub(since))
    }

    /// Handles the acceptance of an attempt by its node.
    pub fn accepted(&mut self, assignment: AssignmentId) {
        let Some(key) = self.node_of(assignment) else { return };
        let member = self.member(key);
        member.took();
        if let Some(attempt) = member.unseen.get_mut(&assignment) {
            attempt.accepted = true;
        }
    }

    /// Returns the time of the last load or cache change that the attempt's node reported.
    pub fn changed_at(&self, assignment: AssignmentId) -> Option<Instant> {
        self.members.get(&self.node_of(assignment)?)?.changed_at
    }

    /// Handles Busy, and releases the attempt.
    pub fn busy(&mut self, now: Instant, assignment: AssignmentId) {
        let Some(key) = self.node_of(assignment) else { return };
        let member = self.members.get_mut(&key).expect("every assignment has its member");
        member.busy(now, &mut self.jitter);
        self.release(assignment);
    }

    /// Releases an attempt. A second release, or one after the process was replaced, has no effect.
    pub fn release(&mut self, assignment: AssignmentId) {
        let Some(assigned) = self.assignments.remove(&assignment) else { return };
        self.breakers_released(assigned.node, assignment);
        let member = self.member(assigned.node);
        member.unseen.remove(&assignment);
        member.in_flight -= 1;
        self.check_member(assigned.node);
    }

    pub(super) fn node_of(&self, assignment: AssignmentId) -> Option<NodeKey> {
        self.assignments.get(&assignment).map(|assigned| assigned.node)
    }

    fn assign(
        &mut self,
        now: Instant,
        transfer_id: TransferId,
        (key, need): (NodeKey, Need),
        prefills: bool,
        forecast: Option<Forecast>,
    ) -> NodeChoice {
        let number = self.next();
        let assignment = AssignmentId(number);
        let member = self.members.get_mut(&key).expect("the node was just chosen");
        let seen = member.seen.as_ref().expect("an eligible node was seen");
        let choice = NodeChoice {
            address: member.address.clone(),
            record: seen.record.clone(),
            assignment,
            cached_tokens: need.cached_tokens,
        };
        let uncached_tokens = need.uncached_tokens;
        let unseen = Unseen {
            prompt_tokens: if prefills { uncached_tokens } else { 0 },
            computed_tokens: need.cached_tokens.into(),
            blocks: need.blocks,
            since: now,
            transfer_id,
            accepted: false,
        };
        member.unseen.insert(assignment, unseen);
        member.in_flight += 1;
        member.breaker.assigned(now, assignment);
        member.last_picked = number;
        self.assignments.insert(assignment, Assignment { node: key, uncached_tokens, forecast });
        self.check_member(key);
        choice
    }

    /// Returns the eligible nodes of a role, or the reason of the node closest to eligible. Adds the model's other
    /// nodes to `ineligible`. If only open breakers exclude decode nodes, those nodes are eligible: they may have
    /// recovered, and the request has no other node.
    pub(super) fn candidates<'a>(
        &'a self,
        now: Instant,
        role: Role,
        wanted: &Wanted<'_>,
        ineligible: &mut Vec<(&'a Member, NoNode)>,
    ) -> Result<Vec<Candidate<'a>>, NoNode> {
        let listed = self.members.values().filter(|member| member.address.role == role).count();
        let mut nearest = (NoNode::NoneListed { role }, false);
        let (mut candidates, mut broken) = (Vec::new(), Vec::new());
        for (key, member) in self.members.iter().filter(|(_, m)| m.address.role == role) {
            let misfit = member.seen.as_ref().map(|seen| misfit(role, &seen.record, wanted));
            let fits = misfit == Some(None);
            let candidate = |seen: &'a Seen| {
                let need = Need::of(role, seen, wanted);
                Candidate { key: *key, role, member, seen, need, state: None }
            };
            match eligible(now, role, member, misfit.flatten(), wanted) {
                Err(reason) => {
                    if let (Some(NoNode::Broken { .. }), Some(seen)) = (&reason, &member.seen) {
                        broken.push(candidate(seen));
                    }
                    let reason = reason.unwrap_or(NoNode::NoneUp { role, listed });
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

    /// Returns the options under a policy: with predictions the best pairs and all decode nodes, otherwise the best pair
    /// and its decode node alone.
    fn options<'a>(
        &self,
        now: Instant,
        policy: NodePolicy,
        wanted: &Wanted<'_>,
        decode: &'a [Candidate<'a>],
        prefill: &'a [Candidate<'a>],
    ) -> Vec<NodeOption<'a>> {
        let fits = |decode: &Candidate<'_>, prefill: &&Candidate<'_>| {
            // KV of less than one block is never transferred.
            wanted.tokens >= decode.seen.record.identity.block_size
                && prefill.fits(decode)
                && self.pair_admits(now, (prefill.key, decode.key))
        };
        let fitting = |decode| prefill.iter().filter(move |prefill| fits(decode, prefill));
        let option = |decode, prefill| NodeOption { decode, prefill, prediction: None };
        let mut options = Vec::new();
        if policy == NodePolicy::Predicted {
            let by_prefill =
                |node: &Candidate<'_>| node.part_ms(|state, prompt| state.prefill_part_ms(prompt));
            let by_decode = |node: &Candidate<'_>| {
                node.part_ms(|state, prompt| state.decode_part_ms(prompt, wanted.new_tokens_max))
            };
            let prefill_order = order_by_part(prefill, by_prefill);
            // Nodes of another model version have no partner, and must not take the places of those that have one.
            let paired = order_by_part(decode, by_decode).into_iter();
            let paired = paired.filter(|decode| fitting(decode).next().is_some());
            for decode in joined_first(paired.take(PAIRED_MAX)) {
                let fitting = prefill_order.iter().copied().filter(|prefill| fits(decode, prefill));
                let prefill = joined_first(fitting.take(PAIRED_MAX));
                options.extend(prefill.into_iter().map(|prefill| option(decode, Some(prefill))));
            }
            options.extend(decode.iter().map(|decode| option(decode, None)));
            return options;
        }
        let decode = decode.iter().min_by_key(|node| {
            let prefills = fitting(node).next().is_none();
            node.rank(policy, prefills)
        });
        let decode = decode.expect("there is a decode node");
        let prefill = fitting(decode).min_by_key(|node| node.rank(policy, true));
        options.extend(prefill.map(|prefill| option(decode, Some(prefill))));
        options.push(option(decode, None));
        options
    }
}

/// Returns the step costs of the first candidates that have measured them, for candidates that have not. Returns `None`
/// if no candidate has measured its steps, or if one is of an older release and reports no costs.
fn known_costs(
    decode: &[Candidate<'_>],
    prefill: &[Candidate<'_>],
) -> Option<(PrefillCosts, DecodeCosts)> {
    let reported = || prefill.iter().chain(decode).map(|node| node.seen.step_costs);
    if reported().any(|costs| costs.is_none()) {
        return None;
    }
    let prefill_costs = reported().find_map(|costs| costs?.prefill)?;
    let decode_costs = reported().find_map(|costs| costs?.decode)?;
    Some((prefill_costs, decode_costs))
}

/// A node that an attempt may use.
pub(super) struct Candidate<'a> {
    key: NodeKey,
    pub(super) role: Role,
    pub(super) member: &'a Member,
    pub(super) seen: &'a Seen,
    need: Need,
    /// Input of predictions: the node, and the prompt on this node.
    pub(super) state: Option<(NodeState, Prompt)>,
}

impl Candidate<'_> {
    fn assigned(&self) -> (NodeKey, Need) {
        (self.key, self.need)
    }

    /// Returns whether the two nodes may exchange KV.
    fn fits(&self, other: &Self) -> bool {
        self.seen.record.identity.fits(&other.seen.record.identity)
    }

    /// Returns a part of the predicted cost; 0 without a prediction.
    fn part_ms(&self, of: impl Fn(&NodeState, &Prompt) -> f64) -> f64 {
        self.state.as_ref().map_or(0.0, |(state, prompt)| of(state, prompt))
    }

    /// Returns the rank under a policy without predictions; the lowest is picked.
    fn rank(&self, policy: NodePolicy, prefills: bool) -> (u64, usize, u64) {
        let Member { in_flight, last_picked, .. } = *self.member;
        match policy {
            NodePolicy::RoundRobin => (0, 0, last_picked),
            NodePolicy::LeastLoad => (self.rows(), in_flight, last_picked),
            NodePolicy::CacheAware | NodePolicy::Predicted => {
                (self.cost(prefills), in_flight, last_picked)
            }
        }
    }

    /// Returns the number of running and waiting sequences.
    fn rows(&self) -> u64 {
        let load = &self.seen.load;
        u64::from(load.running) + u64::from(load.waiting) + self.member.unseen.len() as u64
    }

    pub(super) fn missing_blocks(&self) -> u64 {
        let load = &self.seen.load;
        let unseen_blocks: u64 = self.member.unseen.values().map(|attempt| attempt.blocks).sum();
        let available = (u64::from(load.blocks_free) + u64::from(load.blocks_cached))
            .saturating_sub(unseen_blocks);
        self.need.blocks.saturating_sub(available)
    }

    /// Returns the cost in prompt tokens.
    fn cost(&self, prefills: bool) -> u64 {
        let unseen = self.member.unseen.values();
        let unseen_tokens: u64 = unseen.map(|attempt| attempt.prompt_tokens).sum();
        let row_cost = match self.role {
            Role::Prefill => PREFILL_ROW_COST,
            Role::Decode => DECODE_ROW_COST,
        };
        let own = match prefills {
            true => self.need.uncached_tokens,
            false => {
                self.need.uncached_tokens.div_ceil(self.seen.record.identity.block_size.into())
            }
        };
        let pending = self.seen.load.pending_prompt_tokens.saturating_add(unseen_tokens);
        pending
            .saturating_add(self.rows() * row_cost)
            .saturating_add(own)
            .saturating_add(self.missing_blocks() * MISSING_BLOCK_COST)
    }

    /// Returns the node's state and the prompt on this node. `others`: costs of another node, which replace missing
    /// measurements.
    fn state(&self, now: Instant, others: (PrefillCosts, DecodeCosts)) -> (NodeState, Prompt) {
        let costs = self.seen.step_costs.expect("costs are known only if every candidate reports");
        let load = &self.seen.load;
        // A prefill node decodes nothing: its running sequences are prompts.
        let (decoding, context_tokens, rows) = match self.role {
            Role::Prefill => (0.0, 0.0, 0.0),
            Role::Decode => {
                let decoding = load.running.saturating_sub(load.prefilling).into();
                (decoding, load.context_tokens as f64, self.rows() as f64)
            }
        };
        let pending = load.pending_prompt_tokens as f64;
        let mut state = NodeState {
            prefill: costs.prefill.unwrap_or(others.0),
            decode: costs.decode.unwrap_or(others.1),
            step_tokens: costs.step_tokens,
            chunk_tokens: costs.chunk_tokens,
            itl_max_ms: costs.itl_max_ms,
            decoding,
            context_tokens,
            rows,
            queue_ms: 0.0,
        };
        // Subtracts the work since the report, and for each unseen prompt at most the time since its pick.
        let since = |at: Instant| milliseconds(now.saturating_duration_since(at));
        let pending_ms = state.queued_ms(pending, load.pending_prompt_pairs as f64);
        let step_age_ms = load.step_age_us as f64 / 1e3;
        let mut queue_ms = pending_ms - step_age_ms - since(self.seen.reported_at);
        for unseen in self.member.unseen.values().filter(|unseen| unseen.prompt_tokens > 0) {
            let tokens = unseen.prompt_tokens as f64;
            let pairs = attention_pairs(unseen.computed_tokens as f64, tokens);
            queue_ms = queue_ms.max(-since(unseen.since)) + state.queued_ms(tokens, pairs);
        }
        state.queue_ms = queue_ms.max(0.0);
        let blocks_tokens = (self.missing_blocks() * MISSING_BLOCK_COST) as f64;
        let prompt = Prompt {
            cached_tokens: self.need.cached_tokens.into(),
            uncached_tokens: self.need.uncached_tokens as f64,
            blocks_ms: blocks_tokens * state.prefill.token_ms + self.need.load_ms,
            evict_ms: self.need.blocks as f64 * state.prefill.token_ms,
        };
        (state, prompt)
    }
}

/// Nodes that may serve the attempt.
pub(super) struct NodeOption<'a> {
    pub(super) decode: &'a Candidate<'a>,
    pub(super) prefill: Option<&'a Candidate<'a>>,
    prediction: Option<Prediction>,
}

impl NodeOption<'_> {
    fn predict(&mut self, transfer_token_ms: f64, new_tokens_max: u32) {
        let Some((node, prompt)) = &self.decode.state else { return };
        self.prediction = Some(match self.prefill.and_then(|prefill| prefill.state.as_ref()) {
            None => local(node, prompt, new_tokens_max),
            Some(prefill) => {
                let decode = (node, prompt);
                hand_over((&prefill.0, &prefill.1), decode, transfer_token_ms, new_tokens_max)
            }
        });
    }

    /// Returns the predicted cost; 0 without a prediction.
    fn cost_ms(&self) -> f64 {
        self.prediction.map_or(0.0, |prediction| prediction.cost_ms())
    }

    fn considered(&self) -> ConsideredOption {
        let name = |node: &Candidate<'_>| node.seen.record.node_id.clone();
        ConsideredOption {
            decode: name(self.decode),
            prefill: self.prefill.map(name),
            prediction: self.prediction,
        }
    }

    /// Orders options of equal cost.
    fn tie_rank(&self) -> (bool, usize, u64, u64) {
        let of = |field: fn(&Member) -> u64| self.prefill.map_or(0, |node| field(node.member));
        let in_flight =
            self.decode.member.in_flight + of(|member| member.in_flight as u64) as usize;
        let last_picked = self.decode.member.last_picked;
        (self.prefill.is_none(), in_flight, last_picked, of(|member| member.last_picked))
    }
}

/// Orders nodes by their own part of the cost. Parts within the error of predictions are equal.
fn order_by_part<'a>(
    nodes: &'a [Candidate<'a>],
    part_ms: impl Fn(&Candidate<'_>) -> f64,
) -> Vec<&'a Candidate<'a>> {
    let mut ranked: Vec<_> = nodes.iter().map(|node| (part_ms(node), node)).collect();
    let lowest_ms = ranked.iter().map(|(ms, _)| *ms).fold(f64::INFINITY, f64::min);
    let equal_ms = lowest_ms * (1.0 + EQUAL_WITHIN);
    ranked.sort_by(|(a_ms, a), (b_ms, b)| {
        let tie = |node: &Candidate<'_>| (node.member.in_flight, node.member.last_picked);
        a_ms.max(equal_ms).total_cmp(&b_ms.max(equal_ms)).then_with(|| tie(a).cmp(&tie(b)))
    });
    ranked.into_iter().map(|(_, node)| node).collect()
}

/// Orders nodes by the time of joining.
fn joined_first<'a>(nodes: impl Iterator<Item = &'a Candidate<'a>>) -> Vec<&'a Candidate<'a>> {
    let mut nodes: Vec<_> = nodes.collect();
    nodes.sort_by_key(|node| node.key);
    nodes
}

/// Returns the option of the lowest cost. Without predictions that is the first one.
fn best<'a, 'b>(options: &'b [NodeOption<'a>]) -> &'b NodeOption<'a> {
    let has_pair = options.iter().any(|option| option.prefill.is_some());
    let costs = options.iter().filter_map(|option| {
        let prediction = option.prediction.as_ref()?;
        let (ttft_ms, decode_ms) = (prediction.ttft_ms(), prediction.decode_ms);
        let is_local = option.prefill.is_none() && has_pair;
        let margin_ms = if is_local { ttft_ms * LOCAL_SAVING_MIN } else { 0.0 };
        // Only an option with a prefill node keeps `itl_max`. If there is no such option, a local one is allowed.
        let is_allowed = !(is_local && prediction.exceeds_itl_max);
        let error_ms = EQUAL_WITHIN * (ttft_ms + decode_ms / 2.0);
        is_allowed.then_some((option, prediction.cost_ms() + margin_ms, error_ms))
    });
    let costs: Vec<_> = costs.collect();
    let lowest = costs.iter().min_by(|a, b| a.1.total_cmp(&b.1));
    let Some((first, lowest_ms, error_ms)) = lowest else { return &options[0] };
    let equal = costs.iter().filter(|(_, cost_ms, _)| *cost_ms <= lowest_ms + error_ms);
    equal.map(|(option, ..)| *option).min_by_key(|option| option.tie_rank()).unwrap_or(first)
}

/// Returns the option of the lowest cost. If its queue of prompts is too long, returns the cheapest other option that
/// can start and keeps `itl_max`: no node stays idle while requests wait.
fn startable<'a, 'b>(
    room: Room,
    options: &'b [NodeOption<'a>],
) -> Result<&'b NodeOption<'a>, NoNode> {
    let best = best(options);
    let Err(busy) = room::check_prompt_queue(room, best) else { return Ok(best) };
    let others = options.iter().filter_map(|option| {
        let prediction = option.prediction.as_ref()?;
        let can_start =
            !prediction.exceeds_itl_max && room::check_prompt_queue(room, option).is_ok();
        can_start.then_some((option, prediction.cost_ms()))
    });
    others.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(option, _)| option).ok_or(busy)
}

/// Returns why the options of this decode node have no prefill node, although prefill nodes are eligible.
fn no_pair(decode: &Candidate<'_>, prefill: &[Candidate<'_>], wanted: &Wanted<'_>) -> Placement {
    let block_tokens = decode.seen.record.identity.block_size;
    if wanted.tokens < block_tokens {
        return Placement::ShortPrompt { tokens: wanted.tokens, block_tokens };
    }
    match prefill.iter().any(|prefill| prefill.fits(decode)) {
        true => Placement::TransfersFail,
        false => Placement::NoPartner,
    }
}

/// Returns the lowest predicted costs with and without a prefill node.
fn predicted(options: &[NodeOption<'_>]) -> Placement {
    let lowest = |disaggregated: bool| {
        let of_kind = options.iter().filter(|option| option.prefill.is_some() == disaggregated);
        of_kind.map(NodeOption::cost_ms).fold(f64::INFINITY, f64::min)
    };
    Placement::Predicted { disaggregated_ms: lowest(true), local_ms: lowest(false) }
}

/// Returns the account of a pick. Bounds the copied options, because a large cluster has thousands of pairs.
fn considered(
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

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Returns the report of an eligible node, or the reason why the node is not eligible; `Err(None)` if it is not up.
fn eligible<'a>(
    now: Instant,
    role: Role,
    member: &'a Member,
    misfit: Option<NoNode>,
    wanted: &Wanted<'_>,
) -> Result<&'a Seen, Option<NoNode>> {
    if matches!(misfit, Some(NoNode::OtherModel { .. })) {
        return Err(misfit);
    }
    let Some(seen) = member.serving() else {
        let draining = member.health == super::Health::Up;
        return Err(draining.then_some(NoNode::Draining { role }));
    };
    if misfit.is_some() {
        return Err(misfit);
    }
    let exclude = match role {
        Role::Prefill => wanted.exclude_prefill,
        Role::Decode => wanted.exclude_decode,
    };
    if exclude.contains(&seen.record.epoch) {
        return Err(Some(NoNode::Excluded { role }));
    }
    if let Some(until) = member.busy_until.filter(|until| *until > now) {
        return Err(Some(NoNode::Busy { role, retry_after: until - now }));
    }
    match member.breaker.refuses(now) {
        Some((reason, retry_after)) => Err(Some(NoNode::Broken { role, reason, retry_after })),
        None => Ok(seen),
    }
}

/// Returns why a node with this record cannot serve the request, if it cannot.
fn misfit(role: Role, record: &NodeRecord, wanted: &Wanted<'_>) -> Option<NoNode> {
    if wanted.model != record.model {
        return Some(NoNode::OtherModel { role });
    }
    // A prefill node must fit its decode node.
    let identity = wanted.identity.filter(|_| role == Role::Decode);
    let fits = |identity: &ModelIdentity| match wanted.any_weights {
        true => record.identity.fits_but_weights(identity),
        false => record.identity.fits(identity),
    };
    if identity.is_some_and(|identity| !fits(identity)) {
        return Some(NoNode::NoneFits { role });
    }
    if wanted.grammar_version > record.grammar_version {
        return Some(NoNode::NoGrammar { role, version: wanted.grammar_version });
    }
    let sequence_max = record.sequence_tokens_max.saturating_sub(1);
    let lengths = [(wanted.prompt_tokens, record.prompt_tokens_max), (wanted.tokens, sequence_max)];
    let (tokens, tokens_max) = lengths.into_iter().find(|(tokens, most)| tokens > most)?;
    Some(NoNode::TooLong { role, tokens, tokens_max })
}

/// Load that an attempt adds to a node.
#[derive(Clone, Copy)]
pub(super) struct Need {
    /// Tokens in the prefix cache, and tokens that the node loads from its tiers.
    cached_tokens: u32,
    /// Time to load the tokens that are in the tiers.
    load_ms: f64,
    uncached_tokens: u64,
    /// Number of needed blocks that are not cached.
    blocks: u64,
}

impl Need {
    fn of(role: Role, seen: &Seen, wanted: &Wanted<'_>) -> Self {
        let identity = &seen.record.identity;
        let block_size = identity.block_size;
        let keys = wanted.prefix.iter().find(|keys| keys.are_of(identity));
        let keys = keys.map_or(&[][..], PrefixKeys::keys);
        let resident = keys.iter().take_while(|key| seen.cached.contains(key)).count();
        let (loaded, load_ms) = tier_hits(seen, &keys[resident..]);
        let hits = resident + loaded;
        // The last token is always computed, because sampling needs its logits.
        let cached_tokens = u32::try_from(hits)
            .unwrap_or(u32::MAX)
            .saturating_mul(block_size)
            .min(wanted.tokens.saturating_sub(1));
        let resident_blocks =
            u32::try_from(resident).unwrap_or(u32::MAX).min(cached_tokens / block_size);
        let new_tokens = match role {
            Role::Prefill => 0,
            Role::Decode => wanted.new_tokens_max.min(NEW_TOKENS_COUNTED),
        };
        let blocks = wanted.tokens.saturating_add(new_tokens).div_ceil(block_size);
        Self {
            cached_tokens,
            uncached_tokens: u64::from(wanted.tokens - cached_tokens),
            // Loaded blocks take memory, too.
            blocks: u64::from(blocks - resident_blocks),
            load_ms,
        }
    }
}

/// Returns how many blocks the node loads from its tiers, and the time of the load. A node computes what it would load
/// more slowly.
fn tier_hits(seen: &Seen, keys: &[u128]) -> (usize, f64) {
    let (hits, load_ms) = seen.tiers.hits(keys, &seen.load);
    let costs = seen.step_costs.and_then(|costs| costs.prefill);
    let block_tokens = f64::from(seen.record.identity.block_size);
    let compute_ms = costs.map(|costs| hits as f64 * block_tokens * costs.token_ms);
    match compute_ms.is_none_or(|compute_ms| load_ms < compute_ms) {
        true => (hits, load_ms),
        false => (0, 0.0),
    }
}
