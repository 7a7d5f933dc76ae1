//! A node that an attempt may use: its load, and the load that the attempt adds.

use std::time::Instant;

use config::NodePolicy;
use foldhash::HashSet;

use super::{
    NodeKey,
    member::{Member, NodeReports},
    milliseconds,
    requirements::NodeRequirements,
};
use crate::{
    NodeRecord, PrefixKeys, Role,
    predict::{DecodeCosts, NodeState, PrefillCosts, Prompt, attention_pairs},
};

const DECODE_ROW_COST: u64 = 64;
const PREFILL_ROW_COST: u64 = 16;
/// Cost of a missing block of every KV group, in prompt tokens: 4 times the prefill of its 16
/// tokens, because the attempt waits for other sequences or preempts them.
const MISSING_BLOCK_COST: u64 = 64;
/// Maximum number of output tokens for which an attempt needs blocks at its start.
const NEW_TOKENS_COUNTED: u32 = 64;

/// Returns the step costs of the first candidates that have measured them, for candidates that have
/// not. Returns `None` if no candidate has measured its steps, or if one is of an older release and
/// reports no costs.
pub(super) fn known_costs(
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
    pub(super) key: NodeKey,
    pub(super) role: Role,
    /// Whether the node takes the calls of both roles.
    pub(super) takes_both: bool,
    pub(super) member: &'a Member,
    pub(super) seen: &'a NodeReports,
    pub(super) need: AttemptLoad,
    /// Input of predictions: the node, and the prompt on this node.
    pub(super) state: Option<(NodeState, Prompt)>,
}

impl Candidate<'_> {
    /// Returns the same node as a prefill candidate.
    pub(super) fn as_prefill(&self) -> Self {
        let need = self.need.of_prefill();
        Self { role: Role::Prefill, need, state: None, ..*self }
    }

    pub(super) fn assigned(&self) -> (NodeKey, AttemptLoad) {
        (self.key, self.need)
    }

    /// Returns whether the two nodes may exchange KV.
    pub(super) fn fits(&self, other: &Self) -> bool {
        self.seen.record.identity.fits(&other.seen.record.identity)
    }

    /// Returns a part of the predicted cost; 0 without a prediction.
    pub(super) fn part_ms(&self, of: impl Fn(&NodeState, &Prompt) -> f64) -> f64 {
        self.state.as_ref().map_or(0.0, |(state, prompt)| of(state, prompt))
    }

    /// Returns the rank under a policy without predictions; the lowest is picked.
    pub(super) fn rank(&self, policy: NodePolicy, prefills: bool) -> (u64, usize, u64) {
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

    /// Returns the number of KV groups: a group's block holds this part of the KV of its tokens.
    fn kv_groups(&self) -> u64 {
        self.seen.record.kv_windows.len() as u64
    }

    fn missing_blocks_cost(&self) -> u64 {
        self.missing_blocks() * MISSING_BLOCK_COST / self.kv_groups()
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
            .saturating_add(self.missing_blocks_cost())
    }

    /// Returns the node's state and the prompt on this node. `decodes`: whether the node may decode
    /// sequences. `others`: costs of another node, which replace missing measurements.
    pub(super) fn state(
        &self,
        now: Instant,
        decodes: bool,
        others: (PrefillCosts, DecodeCosts),
    ) -> (NodeState, Prompt) {
        let costs = self.seen.step_costs.expect("costs are known only if every candidate reports");
        let load = &self.seen.load;
        // A node that only prefills decodes nothing: its running sequences are prompts.
        let (decoding, context_tokens, rows) = match decodes {
            false => (0.0, 0.0, 0.0),
            true => {
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
        // Subtracts the work since the report, and for each unseen prompt at most the time since
        // its pick.
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
        let blocks_tokens = self.missing_blocks_cost() as f64;
        let prompt = Prompt {
            cached_tokens: self.need.cached_tokens.into(),
            uncached_tokens: self.need.uncached_tokens as f64,
            blocks_ms: blocks_tokens * state.prefill.token_ms + self.need.load_ms,
            evict_ms: self.need.blocks as f64 / self.kv_groups() as f64 * state.prefill.token_ms,
        };
        (state, prompt)
    }
}

/// Load that an attempt adds to a node.
#[derive(Clone, Copy)]
pub(super) struct AttemptLoad {
    /// Tokens in the prefix cache, and tokens that the node loads from its tiers.
    pub(super) cached_tokens: u32,
    /// Time to load the tokens that are in the tiers, in milliseconds.
    pub(super) load_ms: f64,
    pub(super) uncached_tokens: u64,
    /// Number of needed blocks that are not cached.
    pub(super) blocks: u64,
    /// The number of these blocks if the node only prefills.
    prefill_blocks: u64,
}

impl AttemptLoad {
    /// `resident_guess`: expected number of blocks in the prefix cache. Set to the number found.
    pub(super) fn of(
        role: Role,
        seen: &NodeReports,
        requirements: &NodeRequirements<'_>,
        resident_guess: &mut usize,
    ) -> Self {
        let identity = &seen.record.identity;
        let block_size = identity.block_size;
        let keys = requirements.prefix.iter().find(|keys| keys.are_of(identity));
        let keys = keys.map_or(&[][..], PrefixKeys::keys);
        let resident = match seen.record.state_blocks {
            0 => resident_prefix(keys, &seen.cached, *resident_guess),
            _ => last_state(keys, &seen.cached),
        };
        *resident_guess = resident;
        let (loaded, load_ms) = tier_hits(seen, &keys[resident..]);
        let hits = resident + loaded;
        // The last token is always computed, because sampling needs its logits.
        let cached_tokens = u32::try_from(hits)
            .unwrap_or(u32::MAX)
            .saturating_mul(block_size)
            .min(requirements.tokens.saturating_sub(1));
        let resident_blocks =
            u32::try_from(resident).unwrap_or(u32::MAX).min(cached_tokens / block_size);
        // Loaded blocks take memory, too.
        let blocks = |role| blocks(role, &seen.record, requirements, resident_blocks);
        Self {
            cached_tokens,
            uncached_tokens: u64::from(requirements.tokens - cached_tokens),
            blocks: blocks(role),
            prefill_blocks: blocks(Role::Prefill),
            load_ms,
        }
    }

    /// Returns the load on a node that decodes the sequence and sends its KV: the node has cached
    /// all full blocks.
    pub(super) fn of_sender(seen: &NodeReports, requirements: &NodeRequirements<'_>) -> Self {
        let block_size = seen.record.identity.block_size;
        let uncached_tokens = (requirements.tokens - 1) % block_size + 1;
        let cached_tokens = requirements.tokens - uncached_tokens;
        let record = &seen.record;
        let blocks = record.kv_windows.len() as u64 + u64::from(record.state_blocks);
        Self {
            cached_tokens,
            load_ms: 0.0,
            uncached_tokens: uncached_tokens.into(),
            blocks,
            prefill_blocks: blocks,
        }
    }

    /// Returns the attempt's load if the node only prefills.
    fn of_prefill(self) -> Self {
        Self { blocks: self.prefill_blocks, ..self }
    }
}

/// Returns the number of leading `keys` that are in `cached`. Two lookups find it if it equals
/// `guess`.
///
/// A node evicts the tail of a prefix before its head. So the cached keys come first, and a binary
/// search finds their number. If every layer has a sliding window, a node evicts the head of a
/// prompt longer than the window first, and the number is only an estimate.
fn resident_prefix(keys: &[u128], cached: &HashSet<u128>, guess: usize) -> usize {
    let is_cached = |key: &u128| cached.contains(key);
    let (head, tail) = keys.split_at(guess.min(keys.len()));
    match (head, tail) {
        ([head @ .., last], _) if !is_cached(last) => head.partition_point(is_cached),
        (_, [first, tail @ ..]) if is_cached(first) => {
            head.len() + 1 + tail.partition_point(is_cached)
        }
        _ => head.len(),
    }
}

/// Returns the number of leading `keys` up to the last one that is in `cached`: a node whose
/// sequences have recurrent states reports the keys after which a state is cached.
fn last_state(keys: &[u128], cached: &HashSet<u128>) -> usize {
    if cached.is_empty() {
        return 0;
    }
    keys.iter().rposition(|key| cached.contains(key)).map_or(0, |index| index + 1)
}

/// Returns the number of blocks of prompt, answer and recurrent state for which the attempt needs
/// memory at its start, if each KV group has `resident` blocks cached. A decode node is assumed to
/// receive the prompt's KV, which has no blocks behind a window, unless it must prefill.
fn blocks(
    role: Role,
    record: &NodeRecord,
    requirements: &NodeRequirements<'_>,
    resident: u32,
) -> u64 {
    let block_size = record.identity.block_size;
    let new_tokens = match role {
        Role::Prefill => 0,
        Role::Decode => requirements.new_tokens_max.min(NEW_TOKENS_COUNTED),
    };
    let blocks = requirements.tokens.saturating_add(new_tokens).div_ceil(block_size) - resident;
    let receives = role == Role::Decode && !requirements.local_prefill;
    let of_group = |window: &u32| match (receives, *window) {
        (false, _) | (_, 0) => u64::from(blocks),
        // A window that begins within a block spans one more block.
        (true, window) => u64::from(blocks.min(window.div_ceil(block_size).saturating_add(1))),
    };
    // A sequence that computes after a cached state holds this state, too, until its first step.
    let states = if resident > 0 && !receives { 2 } else { 1 };
    let state_blocks = states * u64::from(record.state_blocks);
    record.kv_windows.iter().map(of_group).sum::<u64>() + state_blocks
}

/// Returns how many blocks the node loads from its tiers, and the time of the load in milliseconds;
/// none if computing the blocks is faster.
fn tier_hits(seen: &NodeReports, keys: &[u128]) -> (usize, f64) {
    let (hits, load_ms) = seen.tiers.hits(keys, &seen.load);
    let costs = seen.step_costs.and_then(|costs| costs.prefill);
    let block_tokens = f64::from(seen.record.identity.block_size);
    let compute_ms = costs.map(|costs| hits as f64 * block_tokens * costs.token_ms);
    match compute_ms.is_none_or(|compute_ms| load_ms < compute_ms) {
        true => (hits, load_ms),
        false => (0, 0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hit_of_a_model_with_states_ends_at_the_last_known_key() {
        let keys: Vec<u128> = (0..10).collect();
        for (cached, hit) in [(vec![], 0), (vec![4], 5), (vec![0, 6, 20], 7), (vec![9], 10)] {
            assert_eq!(last_state(&keys, &cached.into_iter().collect()), hit);
        }
    }

    #[test]
    fn resident_prefix_is_found_from_every_guess() {
        let keys: Vec<u128> = (0..9).map(|key| key * 7).collect();
        for resident in 0..=keys.len() {
            let cached = keys[..resident].iter().copied().collect();
            for guess in 0..=keys.len() + 1 {
                assert_eq!(resident_prefix(&keys, &cached, guess), resident, "guess {guess}");
            }
        }
    }
}
