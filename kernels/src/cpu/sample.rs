//! From a row of logits to a token.

use crate::sampling::{SampledToken, Sampling};

/// Whose token is to be chosen.
#[derive(Clone, Copy, Debug)]
pub struct SampleRow<'a> {
    pub sampling: &'a Sampling,
    /// The prompt, then the output so far.
    pub tokens: &'a [u32],
    /// How many of `tokens` are the prompt. The chosen token has output index
    /// `tokens.len() - prompt_len`.
    pub prompt_len: usize,
}

/// Why no token can be chosen.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// The model computed nonsense.
    #[error("the logit of token {token} is {value}")]
    BadLogit { token: u32, value: f32 },
    /// A parameter is outside its range.
    #[error("{field} is {value}; allowed is {allowed}")]
    BadSampling { field: &'static str, value: f32, allowed: &'static str },
    /// Every token is masked.
    #[error("no token of {vocabulary} can be chosen")]
    NoCandidate { vocabulary: usize },
}

/// Chooses the next token from raw `logits`, one per token of the vocabulary.
pub fn sample(logits: &[f32], row: &SampleRow<'_>) -> Result<SampledToken, SampleError> {
    let _ = row;
    let mut best: Option<(u32, f32)> = None;
    for (token, &value) in (0_u32..).zip(logits) {
        if value.is_nan() || value == f32::INFINITY {
            return Err(SampleError::BadLogit { token, value });
        }
        if best.is_none_or(|(_, most)| value > most) {
            best = Some((token, value));
        }
    }
    let (id, _) = best.ok_or(SampleError::NoCandidate { vocabulary: logits.len() })?;
    Ok(SampledToken { id, logprobs: None })
}
