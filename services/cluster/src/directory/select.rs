//! Which node takes an attempt.
//!
//! The choice is the eligible node of lowest cost. Cost is work ahead of the attempt, in units of one
//! prompt token:
//!
//! ```text
//! cost = pending prompt tokens, reported and own unseen
//!      + row     * (running + waiting + own unseen attempts)
//!      + own     uncached tokens, if this node computes them; else one per uncached block (transfer)
//!      + 64      * blocks that are missing: needed - (free + cached - own unseen)
//! row  = 64 on decode nodes: a row costs each step about two prompt tokens, over some 32 shared steps
//!        16 on prefill nodes: what a sequence costs beside its tokens
//! ```
//!
//! *Own unseen* attempts are those of this router that the node's load report cannot include yet;
//! without them a burst would go to one node. Ties go to the node with fewer of our attempts, then to
//! the one not picked for longest, then to the one that joined first: equal inputs, equal choice.

use std::{
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
/// A missing block makes the attempt wait for others to finish, or preempts them: dearer than
/// computing the block's 16 tokens four times over.
const MISSING_BLOCK_COST: u64 = 64;
/// Decode nodes reserve for the prompt at once; the answer grows later, so only its beginning counts.
const NEW_TOKENS_COUNTED: u32 = 64;

/// Requirements of an attempt on a node.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    pub role: Role,
    /// The model's name; `None` where every node serves the same.
    pub model: Option<&'a str>,
    /// The client's prompt, in tokens.
    pub prompt_tokens: u32,
    /// The prompt and what was already emitted.
    pub tokens: u32,
    /// How many tokens may still be written.
    pub new_tokens_max: u32,
    /// The node reads the prompt itself (always so on a prefill node).
    pub computes_prompt: bool,
    /// Keys of the prompt's blocks for each identity among the nodes; those of another identity find
    /// nothing cached, nor does a prompt whose keys are not known.
    pub prefix: &'a [PrefixKeys],
    /// The identity of the attempt's other node, which this node must match.
    pub identity: Option<&'a ModelIdentity>,
    /// The version of grammars that the answer is held to; 0 for none.
    pub grammar_version: u32,
    /// Processes that have failed this request already.
    pub exclude: &'a [Epoch],
}

/// The node that was chosen, and the receipt for having chosen it.
#[derive(Clone, Debug)]
pub struct NodeChoice {
    pub node: NodeKey,
    pub address: NodeAddress,
    pub record: Arc<NodeRecord>,
    /// Give it back by [`Directory::release`] or [`Directory::busy`] when the attempt ends.
    pub assignment: AssignmentId,
    /// Tokens that the node is believed to have cached.
    pub cached_tokens: u32,
    /// Work ahead of the attempt, in prompt tokens; for logs.
    pub cost: u64,
}

/// Why no node was chosen: the reason of the node that came nearest.
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
    /// When asking again may help: an estimate; `None` where only another request or configuration
    /// does.
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

    /// How near the node came to being chosen.
    fn rank(&self) -> u8 {
        match self {
            Self::NoneListed { .. } => 0,
            Self::OtherModel { .. } => 1,
            Self::NoneUp { .. } => 2,
            Self::Draining { .. } => 3,
            Self::NoneFits { .. } => 4,
            Self::NoGrammar { .. } => 5,
            Self::TooLong { .. } => 6,
            Self::Excluded { .. } => 7,
            Self::Busy { .. } => 8,
        }
    }

    /// The nearer of two; of two alike the one with the better news.
    fn nearer(self, other: Self) -> Self {
        match (&self, &other) {
            (Self::Busy { retry_after: a, .. }, Self::Busy { retry_after: b, .. }) => {
                if a <= b {
                    self
                } else {
                    other
                }
            }
            (Self::TooLong { tokens_max: a, .. }, Self::TooLong { tokens_max: b, .. }) => {
                if a >= b { self } else { other }
            }
            _ if self.rank() >= other.rank() => self,
            _ => other,
        }
    }
}

impl Directory {
    /// Chooses a node and counts the attempt as its own until it is released.
    pub fn pick(&mut self, now: Instant, wanted: &Wanted<'_>) -> Result<NodeChoice, NoNode> {
        let role = wanted.role;
        let listed = self.members.values().filter(|member| member.address.role == role).count();
        let mut refusal = NoNode::NoneListed { role };
        let mut best: Option<(Rank, NodeKey)> = None;
        for (key, member) in self.members.iter().filter(|(_, m)| m.address.role == role) {
            match eligible(now, member, wanted) {
                Err(reason) => {
                    refusal = reason.unwrap_or(NoNode::NoneUp { role, listed }).nearer(refusal)
                }
                Ok(seen) => {
                    let cost = cost(member, seen, wanted);
                    let rank =
                        Rank { cost, in_flight: member.in_flight, last_picked: member.last_picked };
                    // Strictly less: of equals the first that joined stays.
                    if best.as_ref().is_none_or(|(lowest, _)| rank < *lowest) {
                        best = Some((rank, *key));
                    }
                }
            }
        }
        match best {
            Some((rank, key)) => Ok(self.assign(now, key, rank.cost, wanted)),
            None => Err(refusal),
        }
    }

    /// The node said something about the attempt: it took it.
    pub fn answered(&mut self, assignment: AssignmentId) {
        let Some(key) = self.assignments.get(&assignment).copied() else { return };
        let member = self.member(key);
        member.took();
        if let Some(attempt) = member.unseen.get_mut(&assignment) {
            attempt.answered = true;
        }
    }

    /// When the attempt's node last told a change of its load or cache.
    pub fn changed_at(&self, assignment: AssignmentId) -> Option<Instant> {
        self.members.get(self.assignments.get(&assignment)?)?.changed_at
    }

    /// The node refused the attempt as Busy, with or without saying for how long. Releases it.
    pub fn busy(&mut self, now: Instant, assignment: AssignmentId, retry_after: Option<Duration>) {
        let Some(key) = self.assignments.get(&assignment).copied() else { return };
        let member = self.members.get_mut(&key).expect("every assignment has its member");
        member.busy(now, retry_after, &mut self.jitter);
        self.release(assignment);
    }

    /// The attempt ended. Releasing twice, or after the node was replaced, does nothing.
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

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    cost: u64,
    in_flight: usize,
    last_picked: u64,
}

/// `Err(None)`: it is not up.
fn eligible<'a>(
    now: Instant,
    member: &'a Member,
    wanted: &Wanted<'_>,
) -> Result<&'a Seen, Option<NoNode>> {
    let role = wanted.role;
    let named = |name: &str| wanted.model.is_none_or(|model| model == name);
    if member.seen.as_ref().is_some_and(|seen| !named(&seen.record.model)) {
        return Err(Some(NoNode::OtherModel { role }));
    }
    let Some(seen) = member.serving() else {
        let draining = member.health == super::Health::Up;
        return Err(draining.then_some(NoNode::Draining { role }));
    };
    let record = &seen.record;
    if wanted.identity.is_some_and(|identity| !record.identity.fits(identity)) {
        return Err(Some(NoNode::NoneFits { role }));
    }
    if wanted.grammar_version > record.grammar_version {
        let version = wanted.grammar_version;
        return Err(Some(NoNode::NoGrammar { role, version }));
    }
    if wanted.prompt_tokens > record.prompt_tokens_max {
        let (tokens, tokens_max) = (wanted.prompt_tokens, record.prompt_tokens_max);
        return Err(Some(NoNode::TooLong { role, tokens, tokens_max }));
    }
    let tokens_max = record.sequence_tokens_max.saturating_sub(1);
    if wanted.tokens > tokens_max {
        return Err(Some(NoNode::TooLong { role, tokens: wanted.tokens, tokens_max }));
    }
    if wanted.exclude.contains(&record.epoch) {
        return Err(Some(NoNode::Excluded { role }));
    }
    match member.busy_until {
        Some(until) if until > now => Err(Some(NoNode::Busy { role, retry_after: until - now })),
        _ => Ok(seen),
    }
}

/// Load that an attempt adds to a node.
struct Need {
    cached_tokens: u32,
    uncached_tokens: u64,
    /// Blocks beyond the cached ones.
    blocks: u64,
}

impl Need {
    fn of(seen: &Seen, wanted: &Wanted<'_>) -> Self {
        let identity = &seen.record.identity;
        let block_size = identity.block_size;
        let keys = wanted.prefix.iter().find(|keys| keys.are_of(identity));
        let keys = keys.map_or(&[][..], PrefixKeys::keys);
        let hits = keys.iter().take_while(|key| seen.cached.contains(key)).count();
        // The last token is always computed: its logits are wanted.
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
