//! Node selection for an attempt.
//!
//! The directory picks the eligible node with the lowest cost. Cost estimates the work before the attempt, in units of
//! one prompt token:
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

use super::{
    AssignmentId, Directory, NodeKey, PROBE_TIMEOUT,
    member::{Member, Seen, Unseen},
};
use crate::{Epoch, ModelIdentity, NodeAddress, NodeRecord, PrefixKeys, Role};

const DECODE_ROW_COST: u64 = 64;
const PREFILL_ROW_COST: u64 = 16;
/// Cost of a missing block. The attempt waits for other sequences or preempts them, which costs more than computing
/// the block's 16 tokens four times.
const MISSING_BLOCK_COST: u64 = 64;
/// Output tokens that count as needed. A decode node reserves the prompt's blocks at once; the answer grows later.
const NEW_TOKENS_COUNTED: u32 = 64;

/// Requirements of an attempt on a node.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    pub role: Role,
    /// Name of the model; `None` if all nodes serve the same model.
    pub model: Option<&'a str>,
    /// Length of the client's prompt, in tokens.
    pub prompt_tokens: u32,
    /// Prompt and emitted tokens.
    pub tokens: u32,
    /// Maximum number of further output tokens.
    pub new_tokens_max: u32,
    /// The node prefills the prompt itself (always true on a prefill node).
    pub computes_prompt: bool,
    /// Cache keys of the prompt's blocks for each identity of the nodes. Without keys of its identity a node counts as
    /// having no cached block.
    pub prefix: &'a [PrefixKeys],
    /// Identity of the attempt's other node; this node must have a compatible one.
    pub identity: Option<&'a ModelIdentity>,
    /// Grammar version that the answer needs; 0 for none.
    pub grammar_version: u32,
    /// Processes that already failed this request.
    pub exclude: &'a [Epoch],
}

/// The picked node and its assignment.
#[derive(Clone, Debug)]
pub struct NodeChoice {
    pub node: NodeKey,
    pub address: NodeAddress,
    pub record: Arc<NodeRecord>,
    /// Id to release with [`Directory::release`] or [`Directory::busy`] when the attempt ends.
    pub assignment: AssignmentId,
    /// Estimated number of cached tokens on the node.
    pub cached_tokens: u32,
    /// Cost in prompt tokens, for logs.
    pub cost: u64,
}

/// Reason why no node was picked: that of the node closest to eligible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
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
    #[error("no {role} node holds answers to grammars of version {version}")]
    NoGrammar { role: Role, version: u32 },
    #[error("{tokens} tokens are more than the {tokens_max} that any {role} node takes")]
    TooLong { role: Role, tokens: u32, tokens_max: u32 },
    #[error("every {role} node has failed this request already")]
    Excluded { role: Role },
    #[error("every {role} node is busy, for another {retry_after:?}")]
    Busy { role: Role, retry_after: Duration },
}

impl NoNode {
    /// Returns an estimate of when a retry may succeed; `None` if only another request or configuration helps.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Busy { retry_after, .. } => Some(*retry_after),
            Self::OtherModel { .. }
            | Self::NoneUp { .. }
            | Self::Draining { .. }
            | Self::NoGrammar { .. }
            | Self::Excluded { .. } => Some(PROBE_TIMEOUT),
            Self::NoneListed { .. } | Self::NoneFits { .. } | Self::TooLong { .. } => None,
        }
    }

    /// Orders reasons by how close the node was to eligible. `fits`: the node's last record fits the request, so the
    /// request may wait for this node. Of equal reasons the earlier retry or the larger limit is closer.
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
            Self::Busy { retry_after: pause, .. } => {
                retry_after = *pause;
                10
            }
        };
        (rank, Reverse(retry_after), tokens_max)
    }
}

impl Directory {
    /// Picks a node and counts the attempt on the node until its release.
    pub fn pick(&mut self, now: Instant, wanted: &Wanted<'_>) -> Result<NodeChoice, NoNode> {
        let role = wanted.role;
        let listed = self.members.values().filter(|member| member.address.role == role).count();
        let mut nearest = (NoNode::NoneListed { role }, false);
        let mut best: Option<((u64, usize, u64), NodeKey)> = None;
        for (key, member) in self.members.iter().filter(|(_, m)| m.address.role == role) {
            let misfit = member.seen.as_ref().map(|seen| misfit(&seen.record, wanted));
            let fits = misfit == Some(None);
            match eligible(now, member, misfit.flatten(), wanted) {
                Err(reason) => {
                    let reason = reason.unwrap_or(NoNode::NoneUp { role, listed });
                    if reason.nearness(fits) > nearest.0.nearness(nearest.1) {
                        nearest = (reason, fits);
                    }
                }
                Ok(seen) => {
                    let cost = cost(member, seen, wanted);
                    let rank = (cost, member.in_flight, member.last_picked);
                    // Strictly less, so that of equal nodes the first one stays.
                    if best.as_ref().is_none_or(|(lowest, _)| rank < *lowest) {
                        best = Some((rank, *key));
                    }
                }
            }
        }
        match best {
            Some((rank, key)) => Ok(self.assign(now, key, rank.0, wanted)),
            None => Err(nearest.0),
        }
    }

    /// Handles the first event of an attempt: the node accepted it.
    pub fn answered(&mut self, assignment: AssignmentId) {
        let Some(key) = self.assignments.get(&assignment).copied() else { return };
        let member = self.member(key);
        member.took();
        if let Some(attempt) = member.unseen.get_mut(&assignment) {
            attempt.answered = true;
        }
    }

    /// Returns the time of the last load or cache change that the attempt's node reported.
    pub fn changed_at(&self, assignment: AssignmentId) -> Option<Instant> {
        self.members.get(self.assignments.get(&assignment)?)?.changed_at
    }

    /// Handles Busy with an optional pause, and releases the attempt.
    pub fn busy(&mut self, now: Instant, assignment: AssignmentId, retry_after: Option<Duration>) {
        let Some(key) = self.assignments.get(&assignment).copied() else { return };
        let member = self.members.get_mut(&key).expect("every assignment has its member");
        member.busy(now, retry_after, &mut self.jitter);
        self.release(assignment);
    }

    /// Releases an attempt. A second release, or one after the process was replaced, has no effect.
    pub fn release(&mut self, assignment: AssignmentId) {
        let Some(key) = self.assignments.remove(&assignment) else { return };
        let member = self.member(key);
        member.unseen.remove(&assignment);
        member.in_flight -= 1;
        self.check();
    }

    fn assign(&mut self, now: Instant, key: NodeKey, cost: u64, wanted: &Wanted<'_>) -> NodeChoice {
        let number = self.next();
        let assignment = AssignmentId(number);
        let member = self.members.get_mut(&key).expect("the node was just chosen");
        let seen = member.seen.as_ref().expect("an eligible node was seen");
        let need = Need::of(seen, wanted);
        let choice = NodeChoice {
            node: key,
            address: member.address.clone(),
            record: seen.record.clone(),
            assignment,
            cached_tokens: need.cached_tokens,
            cost,
        };
        let prompt_tokens = if wanted.computes_prompt { need.uncached_tokens } else { 0 };
        let unseen = Unseen { prompt_tokens, blocks: need.blocks, since: now, answered: false };
        member.unseen.insert(assignment, unseen);
        member.in_flight += 1;
        member.last_picked = number;
        self.assignments.insert(assignment, key);
        self.check();
        choice
    }
}

/// Returns the report of an eligible node, or the reason why the node is not eligible; `Err(None)` if it is not up.
fn eligible<'a>(
    now: Instant,
    member: &'a Member,
    misfit: Option<NoNode>,
    wanted: &Wanted<'_>,
) -> Result<&'a Seen, Option<NoNode>> {
    let role = wanted.role;
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
    if wanted.exclude.contains(&seen.record.epoch) {
        return Err(Some(NoNode::Excluded { role }));
    }
    match member.busy_until {
        Some(until) if until > now => Err(Some(NoNode::Busy { role, retry_after: until - now })),
        _ => Ok(seen),
    }
}

/// Returns why a node with this record cannot serve the request, if it cannot.
fn misfit(record: &NodeRecord, wanted: &Wanted<'_>) -> Option<NoNode> {
    let role = wanted.role;
    if wanted.model.is_some_and(|model| model != record.model) {
        return Some(NoNode::OtherModel { role });
    }
    if wanted.identity.is_some_and(|identity| !record.identity.fits(identity)) {
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
struct Need {
    cached_tokens: u32,
    uncached_tokens: u64,
    /// Number of needed blocks that are not cached.
    blocks: u64,
}

impl Need {
    fn of(seen: &Seen, wanted: &Wanted<'_>) -> Self {
        let identity = &seen.record.identity;
        let block_size = identity.block_size;
        let keys = wanted.prefix.iter().find(|keys| keys.are_of(identity));
        let keys = keys.map_or(&[][..], PrefixKeys::keys);
        let hits = keys.iter().take_while(|key| seen.cached.contains(key)).count();
        // The last token is always computed, because sampling needs its logits.
        let cached_tokens = u32::try_from(hits)
            .unwrap_or(u32::MAX)
            .saturating_mul(block_size)
            .min(wanted.tokens.saturating_sub(1));
        let new_tokens = match wanted.role {
            Role::Prefill => 0,
            Role::Decode => wanted.new_tokens_max.min(NEW_TOKENS_COUNTED),
        };
        let blocks = wanted.tokens.saturating_add(new_tokens).div_ceil(block_size);
        Self {
            cached_tokens,
            uncached_tokens: u64::from(wanted.tokens - cached_tokens),
            blocks: u64::from(blocks - cached_tokens / block_size),
        }
    }
}

fn cost(member: &Member, seen: &Seen, wanted: &Wanted<'_>) -> u64 {
    let need = Need::of(seen, wanted);
    let load = &seen.load;
    let unseen = member.unseen.values();
    let unseen_tokens: u64 = unseen.clone().map(|attempt| attempt.prompt_tokens).sum();
    let unseen_blocks: u64 = unseen.map(|attempt| attempt.blocks).sum();
    let row_cost = match wanted.role {
        Role::Prefill => PREFILL_ROW_COST,
        Role::Decode => DECODE_ROW_COST,
    };
    let rows = u64::from(load.running) + u64::from(load.waiting) + member.unseen.len() as u64;
    let own = match wanted.computes_prompt {
        true => need.uncached_tokens,
        false => need.uncached_tokens.div_ceil(seen.record.identity.block_size.into()),
    };
    let available =
        (u64::from(load.blocks_free) + u64::from(load.blocks_cached)).saturating_sub(unseen_blocks);
    let missing = need.blocks.saturating_sub(available);
    load.pending_prompt_tokens
        .saturating_add(unseen_tokens)
        .saturating_add(rows * row_cost)
        .saturating_add(own)
        .saturating_add(missing * MISSING_BLOCK_COST)
}
