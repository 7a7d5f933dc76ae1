//! Predicts how long clients wait when a prompt is prefilled on a prefill node or on the decode
//! node. Pure.
//!
//! A node fits the time of its steps ([`StepFit`]) and reports the result with its load
//! ([`StepCosts`]):
//!
//! ```text
//! decode step  = step + row * rows + context * KV tokens
//! prefill step = step' + token * prompt tokens + pair * attention pairs + row * rows
//!                + context * KV tokens, at least the decode step: every step reads all weights
//! ```
//!
//! A router predicts each option from the reports of its nodes ([`hand_over`], [`local`]):
//!
//! ```text
//! time to first token = time of the queued prompts (on a node that decodes at least of the decode
//!        steps in flight) + the prompt's own steps + wait for free blocks
//! gap      = transfer time that prefill steps do not overlap (hand-over only)
//! slowdown = rows that decode on the node of the prefill * time by which the prompt lengthens
//!            their steps
//! decode   = the first 32 tokens of the answer
//!            + running and waiting rows * time by which the new row lengthens their steps
//! evict    = prefill time of one token per block that the decode node lacks, because it may evict
//!            a cached prefix
//! cost     = time to first token + gap + slowdown + decode + evict
//! ```
//!
//! A decode step counts as one token per row, although draft tokens may be accepted: they help
//! every option equally.
//!
//! All terms are milliseconds that one client waits. A stalled stream and a waiting request are
//! equally slow for their clients, so the cost is the sum over all clients.

mod fit;

use proto::v1;
use serde::{Deserialize, Serialize};

pub use fit::{StepFit, StepLimits, Work};

/// Number of output tokens that a cost includes. Later tokens cost about the same in all options.
const DECODE_STEPS: u32 = 32;
/// Decode steps that a prompt on a decode node waits for. With two steps in flight, these are half
/// of the running step and the next step.
const STEPS_IN_FLIGHT: f64 = 1.5;
/// Minimum prompt tokens of a step in which sequences decode: one block.
const BLOCK_TOKENS: f64 = 16.0;
/// Picoseconds per millisecond.
const PICOSECONDS: f64 = 1e9;

/// Returns the attention pairs of `tokens` tokens that follow `computed` tokens.
pub fn attention_pairs(computed: f64, tokens: f64) -> f64 {
    tokens * (computed + tokens / 2.0)
}

/// A node's reported step costs, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCosts {
    /// Maximum number of sequences in a step; `None` from a node of an older release.
    pub slots: Option<u32>,
    pub step_tokens: f64,
    pub chunk_tokens: f64,
    /// Infinite without a bound.
    pub itl_max_ms: f64,
    pub prefill: Option<PrefillCosts>,
    pub decode: Option<DecodeCosts>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PrefillCosts {
    pub step_ms: f64,
    pub token_ms: f64,
    pub pair_ms: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DecodeCosts {
    pub step_ms: f64,
    pub row_ms: f64,
    pub context_token_ms: f64,
}

impl From<v1::StepCosts> for StepCosts {
    fn from(wire: v1::StepCosts) -> Self {
        let ms = |ps: u64| ps as f64 / PICOSECONDS;
        let step_tokens = f64::from(wire.step_tokens.max(1));
        Self {
            slots: (wire.slots > 0).then_some(wire.slots),
            step_tokens,
            chunk_tokens: f64::from(wire.chunk_tokens.max(1)).min(step_tokens),
            itl_max_ms: if wire.itl_max_ms == 0 { f64::INFINITY } else { wire.itl_max_ms.into() },
            prefill: wire.prefill.map(|wire| PrefillCosts {
                step_ms: ms(wire.step_ps),
                token_ms: ms(wire.token_ps),
                pair_ms: ms(wire.pair_ps),
            }),
            decode: wire.decode.map(|wire| DecodeCosts {
                step_ms: ms(wire.step_ps),
                row_ms: ms(wire.row_ps),
                context_token_ms: ms(wire.context_token_ps),
            }),
        }
    }
}

/// A node's step costs, and the sequences on the node.
#[derive(Clone, Copy, Debug)]
pub struct NodeState {
    pub prefill: PrefillCosts,
    pub decode: DecodeCosts,
    pub step_tokens: f64,
    pub chunk_tokens: f64,
    pub itl_max_ms: f64,
    /// Number of sequences that decode now.
    pub decoding: f64,
    /// KV tokens that the decoding sequences attend to.
    pub context_tokens: f64,
    /// Sequences that will decode together with the prompt: running and waiting.
    pub rows: f64,
    /// Time until all queued prompts are prefilled.
    pub queue_ms: f64,
}

impl NodeState {
    fn decode_step_ms(&self, rows: f64, context_tokens: f64) -> f64 {
        let DecodeCosts { step_ms, row_ms, context_token_ms } = self.decode;
        step_ms + row_ms * rows + context_token_ms * context_tokens
    }

    /// Returns the time of a decode step, in milliseconds.
    fn step_ms(&self) -> f64 {
        self.decode_step_ms(self.decoding, self.context_tokens)
    }

    /// Returns the time of a step that also prefills, in milliseconds.
    fn mixed_step_ms(&self, tokens: f64, pairs: f64) -> f64 {
        let PrefillCosts { step_ms, token_ms, pair_ms } = self.prefill;
        let rows_ms = self.step_ms() - self.decode.step_ms;
        let prefill_ms = step_ms + token_ms * tokens + pair_ms * pairs;
        (prefill_ms + rows_ms).max(self.step_ms())
    }

    /// Returns the time of `steps` steps that share the tokens and pairs equally.
    fn prefill_ms(&self, steps: f64, tokens: f64, pairs: f64) -> f64 {
        steps * self.mixed_step_ms(tokens / steps, pairs / steps)
    }

    /// Returns the prompt tokens of a step, at most `tokens_max`. With running sequences, the
    /// node's inter-token latency bound limits them. `context`: mean number of tokens to which a
    /// prompt token attends.
    fn bounded_tokens(&self, tokens_max: f64, context: f64) -> f64 {
        let PrefillCosts { step_ms, token_ms, pair_ms } = self.prefill;
        let left_ms = self.itl_max_ms - step_ms - (self.step_ms() - self.decode.step_ms);
        if self.decoding == 0.0 || left_ms == f64::INFINITY {
            return tokens_max;
        }
        // Without a measured cost per token any number of tokens fits.
        let tokens = if left_ms > 0.0 { left_ms / (token_ms + pair_ms * context) } else { 0.0 };
        tokens.max(BLOCK_TOKENS).min(tokens_max)
    }

    /// Returns the time to prefill these tokens of queued prompts.
    pub fn queued_ms(&self, tokens: f64, pairs: f64) -> f64 {
        if tokens == 0.0 {
            return 0.0;
        }
        let steps = tokens / self.bounded_tokens(self.step_tokens, pairs / tokens);
        self.prefill_ms(steps, tokens, pairs)
    }

    fn prompt_steps(&self, prompt: &Prompt) -> f64 {
        let context = prompt.pairs() / prompt.uncached_tokens;
        (prompt.uncached_tokens / self.bounded_tokens(self.chunk_tokens, context)).ceil()
    }

    fn prompt_ms(&self, prompt: &Prompt) -> f64 {
        self.prefill_ms(self.prompt_steps(prompt), prompt.uncached_tokens, prompt.pairs())
    }

    /// Returns whether even a step with one block of the prompt is longer than the inter-token
    /// latency bound.
    fn exceeds_itl_max(&self, prompt: &Prompt) -> bool {
        let tokens = prompt.uncached_tokens.min(BLOCK_TOKENS);
        let block_ms = self.mixed_step_ms(tokens, attention_pairs(prompt.cached_tokens, tokens));
        self.decoding > 0.0 && block_ms > self.itl_max_ms
    }

    /// Returns the part of the cost of a hand-over that depends on this prefill node alone.
    pub fn prefill_part_ms(&self, prompt: &Prompt) -> f64 {
        let own = local(self, prompt, 0);
        own.ttft_ms() + own.slowdown_ms
    }

    /// Returns the part of the cost of a hand-over that depends on this decode node alone.
    pub fn decode_part_ms(&self, prompt: &Prompt, new_tokens_max: u32) -> f64 {
        prompt.blocks_ms + self.decode_ms(prompt.tokens(), new_tokens_max) + prompt.evict_ms
    }

    fn decode_ms(&self, tokens: f64, new_tokens_max: u32) -> f64 {
        let steps = f64::from(new_tokens_max.min(DECODE_STEPS));
        let with_row_ms = self.decode_step_ms(self.rows + 1.0, self.context_tokens + tokens);
        let without_ms = self.decode_step_ms(self.rows, self.context_tokens);
        steps * (with_row_ms + self.rows * (with_row_ms - without_ms))
    }
}

/// A prompt on one node.
#[derive(Clone, Copy, Debug)]
pub struct Prompt {
    pub cached_tokens: f64,
    /// At least 1.
    pub uncached_tokens: f64,
    /// Time until the node has free blocks, and has loaded the cached tokens that are in its KV
    /// tiers.
    pub blocks_ms: f64,
    /// Prefill time that the evicted blocks may cost later prompts.
    pub evict_ms: f64,
}

impl Prompt {
    fn tokens(&self) -> f64 {
        self.cached_tokens + self.uncached_tokens
    }

    fn pairs(&self) -> f64 {
        attention_pairs(self.cached_tokens, self.uncached_tokens)
    }
}

/// Predicted waiting time of clients, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// Time until the steps of the prompt begin.
    pub queue_ms: f64,
    /// Time of the prompt's own steps.
    pub prompt_ms: f64,
    /// Wait for free blocks and for loads from KV tiers.
    pub blocks_ms: f64,
    pub transfer_gap_ms: f64,
    pub slowdown_ms: f64,
    pub decode_ms: f64,
    pub evict_ms: f64,
    /// Whether every step of the prompt exceeds the inter-token latency bound of other sequences.
    pub exceeds_itl_max: bool,
}

impl Prediction {
    /// Returns the time to first token.
    pub fn ttft_ms(&self) -> f64 {
        self.queue_ms + self.prompt_ms + self.blocks_ms
    }

    pub fn cost_ms(&self) -> f64 {
        self.ttft_ms() + self.transfer_gap_ms + self.slowdown_ms + self.decode_ms + self.evict_ms
    }
}

/// Predicts prefill on `prefill` and transfer to `decode`. `transfer_token_ms`: transfer time of a
/// token's KV; 0 until a transfer was measured.
pub fn hand_over(
    prefill: (&NodeState, &Prompt),
    decode: (&NodeState, &Prompt),
    transfer_token_ms: f64,
    new_tokens_max: u32,
) -> Prediction {
    let (node, prompt) = prefill;
    let own = local(node, prompt, 0);
    let steps = node.prompt_steps(prompt);
    let prompt_ms = own.prompt_ms;
    // The KV of a step is sent while the next step is computed, so one step's KV is never
    // overlapped.
    let transfer_ms = transfer_token_ms * decode.1.uncached_tokens;
    let transfer_gap_ms =
        (transfer_ms / steps).max(transfer_ms - prompt_ms * (steps - 1.0) / steps);
    Prediction {
        // The first token waits for the reservation of both nodes' blocks.
        blocks_ms: prompt.blocks_ms.max(decode.1.blocks_ms),
        transfer_gap_ms,
        decode_ms: decode.0.decode_ms(prompt.tokens(), new_tokens_max),
        evict_ms: decode.1.evict_ms,
        ..own
    }
}

/// Predicts prefill on the decode node.
pub fn local(node: &NodeState, prompt: &Prompt, new_tokens_max: u32) -> Prediction {
    let prompt_ms = node.prompt_ms(prompt);
    let decode_only_ms = node.prompt_steps(prompt) * node.step_ms();
    let in_flight_ms = if node.decoding > 0.0 { STEPS_IN_FLIGHT * node.step_ms() } else { 0.0 };
    Prediction {
        queue_ms: node.queue_ms.max(in_flight_ms),
        prompt_ms,
        blocks_ms: prompt.blocks_ms,
        transfer_gap_ms: 0.0,
        slowdown_ms: node.decoding * (prompt_ms - decode_only_ms),
        decode_ms: node.decode_ms(prompt.tokens(), new_tokens_max),
        evict_ms: prompt.evict_ms,
        exceeds_itl_max: node.exceeds_itl_max(prompt),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn is_near(value: f64, expected: f64) -> bool {
        (value / expected - 1.0).abs() < 0.05
    }

    fn node() -> NodeState {
        NodeState {
            prefill: PrefillCosts { step_ms: 1.0, token_ms: 0.02, pair_ms: 1e-6 },
            decode: DecodeCosts { step_ms: 4.0, row_ms: 0.02, context_token_ms: 3e-5 },
            step_tokens: 512.0,
            chunk_tokens: 512.0,
            itl_max_ms: f64::INFINITY,
            decoding: 0.0,
            context_tokens: 0.0,
            rows: 0.0,
            queue_ms: 0.0,
        }
    }

    fn prompt(uncached_tokens: f64) -> Prompt {
        Prompt { cached_tokens: 0.0, uncached_tokens, blocks_ms: 0.0, evict_ms: 0.0 }
    }

    #[test]
    fn prompt_is_predicted_step_by_step() {
        let predicted = local(&node(), &prompt(1024.0), 1);
        assert!(is_near(predicted.ttft_ms(), 2.0 + 0.02 * 1024.0 + 0.5e-6 * 1024.0 * 1024.0));
        // A short prompt takes as long as a decode step.
        assert!(is_near(local(&node(), &prompt(16.0), 1).ttft_ms(), 4.0));
        // Cached tokens are attended to, not computed.
        let cached = Prompt { cached_tokens: 7000.0, ..prompt(1024.0) };
        let with_cache = local(&node(), &cached, 1).ttft_ms();
        assert!(is_near(with_cache - predicted.ttft_ms(), 7000.0 * 1024.0 * 1e-6));
    }

    #[test]
    fn local_prefill_costs_each_running_row_the_added_time() {
        let loaded = NodeState { decoding: 30.0, ..node() };
        let (idle, busy) = (local(&node(), &prompt(512.0), 1), local(&loaded, &prompt(512.0), 1));
        assert_eq!(idle.slowdown_ms, 0.0);
        let added = loaded.mixed_step_ms(512.0, 512.0 * 256.0) - loaded.step_ms();
        assert!(added > 5.0 && is_near(busy.slowdown_ms, 30.0 * added), "{busy:?}");
        assert_eq!(
            hand_over((&node(), &prompt(512.0)), (&loaded, &prompt(512.0)), 0.0, 1).slowdown_ms,
            0.0
        );
    }

    #[test]
    fn transfer_costs_what_prefill_does_not_overlap() {
        let (node, prompt) = (node(), prompt(2048.0));
        let gap =
            |token_ms| hand_over((&node, &prompt), (&node, &prompt), token_ms, 1).transfer_gap_ms;
        assert_eq!(gap(0.0), 0.0);
        // A fast link sends the KV of the last of four steps after the prompt.
        assert!(is_near(gap(0.001), 0.001 * 512.0));
        // On a slow link the transfer determines the gap.
        let prompt_ms = node.prompt_ms(&prompt);
        assert!(is_near(gap(1.0), 2048.0 - prompt_ms * 0.75));
        // Tokens that the decode node has cached are not sent.
        let cached = Prompt { cached_tokens: 1536.0, uncached_tokens: 512.0, ..prompt };
        assert!(
            hand_over((&node, &prompt), (&node, &cached), 1.0, 1).transfer_gap_ms < gap(1.0) / 3.0
        );
    }

    #[test]
    fn steps_beside_running_sequences_stay_within_the_inter_token_latency_bound() {
        let bounded = NodeState { itl_max_ms: 8.0, decoding: 10.0, ..node() };
        let prompt = prompt(2048.0);
        let steps = bounded.prompt_steps(&prompt);
        let longest = bounded.mixed_step_ms(2048.0 / steps, prompt.pairs() / steps);
        assert!(steps > 4.0 && (7.0..8.0).contains(&longest), "{steps} steps of {longest} ms");
        assert!(!local(&bounded, &prompt, 1).exceeds_itl_max);
        // The prompt takes longer, and an idle node needs no bound.
        let idle = NodeState { decoding: 0.0, ..bounded };
        assert_eq!(idle.prompt_steps(&prompt), 4.0);
        assert!(local(&bounded, &prompt, 1).ttft_ms() > local(&idle, &prompt, 1).ttft_ms() + 3.0);
        assert!(bounded.queued_ms(5000.0, 1e6) > idle.queued_ms(5000.0, 1e6));
        // Decode alone takes longer than the bound.
        let full = NodeState { decoding: 400.0, ..bounded };
        assert!(local(&full, &prompt, 1).exceeds_itl_max);
        assert_eq!(full.bounded_tokens(512.0, 100.0), BLOCK_TOKENS);
    }
}
