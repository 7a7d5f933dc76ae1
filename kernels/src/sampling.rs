//! The rules by which a next token is chosen.
//!
//! The same on every device, to the tie-break: the lowest token id wins among equals. Random
//! numbers come from a counter: each candidate's draw depends on (seed, output index, token id)
//! alone, so batches, chunks, retries and ranks see equal draws wherever logits are equal.

/// How one sequence chooses its tokens. The router has filled in every field.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 keeps every token.
    pub top_k: u32,
    /// 1 keeps every token.
    pub top_p: f32,
    /// 0 keeps every token.
    pub min_p: f32,
    pub seed: u64,
    /// 1 changes nothing; looks at prompt and output.
    pub repetition_penalty: f32,
    /// 0 changes nothing; these two look at the output only.
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// Tokens that cannot be chosen while the output has fewer than `min_tokens`.
    pub stop_token_ids: Vec<u32>,
    pub min_tokens: u32,
    /// `Some(n)`: report the chosen token's log-probability and the n best.
    pub logprobs: Option<u32>,
}

impl Sampling {
    /// Greedy, nothing reported.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            stop_token_ids: Vec::new(),
            min_tokens: 0,
            logprobs: None,
        }
    }
}

/// A chosen token and, where asked for, how likely it was.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    pub id: u32,
    pub logprobs: Option<TokenLogprobs>,
}

/// Natural logarithms, from the logits before temperature and penalties.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    pub chosen: f32,
    /// Best first, ties by the lower id.
    pub top: Vec<(u32, f32)>,
}
