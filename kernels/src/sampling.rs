//! Sampling rules.
//!
//! The rules are the same on every device, tie-breaks included: the lowest token id wins among
//! equals. Random numbers come from a counter: each candidate's draw depends on (seed, output
//! index, token id) only, so batches, chunks, retries and ranks see equal draws wherever logits are
//! equal.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// Maximum number of a sequence's [`Sampling::stop_token_ids`].
pub const STOP_TOKENS_MAX: usize = 1024;
/// Maximum number of tokens in a sequence's [`Sampling::logit_bias`].
pub const LOGIT_BIASES_MAX: usize = 1024;
/// Maximum number of [`Sampling::allowed_token_ids`] of a sequence, and of the tokens in all of its
/// [`Sampling::bad_words`].
pub const LISTED_TOKENS_MAX: usize = 1 << 14;
/// Maximum number of tokens of [`Pooling::Logits`].
pub const POOLED_LOGITS_MAX: usize = 16;
/// Maximum absolute value in [`Sampling::logit_bias`], as in OpenAI's API.
pub const LOGIT_BIAS_MAX: f32 = 100.0;

/// Sampling parameters of one sequence. The router fills in every field.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    /// 1 changes nothing; applies to prompt and output tokens.
    pub repetition_penalty: f32,
    /// 0 changes nothing; applies to output tokens only.
    pub presence_penalty: f32,
    /// 0 changes nothing; applies to output tokens only.
    pub frequency_penalty: f32,
    /// Tokens that cannot be sampled while the output has fewer than `min_tokens`.
    pub stop_token_ids: Vec<u32>,
    pub min_tokens: u32,
    /// `Some(n)`: report the chosen token's log-probability and the n best.
    pub logprobs: Option<u32>,
    /// Values of the forward pass to return with each sampled token.
    pub pooling: Option<Pooling>,
    /// `Some(n)`: report the log-probability of each prompt token but the first, and the n best in
    /// its place.
    pub prompt_logprobs: Option<u32>,
    /// Tokens without duplicates, and what is added to the logit of each.
    pub logit_bias: Vec<(u32, f32)>,
    /// The only tokens that may be sampled; empty: every token.
    pub allowed_token_ids: Vec<u32>,
    /// Token sequences. The last token of each cannot be sampled where the output ends with the
    /// others.
    pub bad_words: Vec<Vec<u32>>,
}

/// Values of the forward pass at the last position of a row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pooling {
    /// The hidden state after the final norm.
    Hidden,
    /// The logits of these tokens, in their order.
    Logits(Vec<u32>),
}

impl Sampling {
    /// Returns parameters for greedy sampling without log-probabilities.
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
            pooling: None,
            prompt_logprobs: None,
            logit_bias: Vec::new(),
            allowed_token_ids: Vec::new(),
            bad_words: Vec::new(),
        }
    }
}

/// Token bitmask of a grammar: the tokens that may be sampled next, 32 tokens per word.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenMask {
    words: Box<[u32]>,
}

impl TokenMask {
    /// Creates the bitmask of a vocabulary. Token `i` is bit `i % 32` of word `i / 32`. Missing
    /// words allow no token, and tokens beyond the vocabulary are dropped.
    pub fn new(mut words: Vec<u32>, vocabulary: u32) -> Self {
        words.resize(vocabulary.div_ceil(32) as usize, 0);
        if let (Some(last), rest @ 1..) = (words.last_mut(), vocabulary % 32) {
            *last &= (1 << rest) - 1;
        }
        Self { words: words.into() }
    }

    pub fn words(&self) -> &[u32] {
        &self.words
    }

    pub fn allows(&self, token: u32) -> bool {
        let word = self.words.get(token as usize / 32);
        word.is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Returns how many tokens are allowed.
    pub fn count(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }
}

/// Serializes the words as bytes, so that a mask is copied and not encoded word by word.
impl Serialize for TokenMask {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytemuck::cast_slice(&self.words))
    }
}

impl<'de> Deserialize<'de> for TokenMask {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = <&[u8]>::deserialize(deserializer)?;
        let (words, rest) = bytes.as_chunks();
        if !rest.is_empty() {
            return Err(D::Error::custom("a token mask is a list of 32-bit words"));
        }
        Ok(Self { words: words.iter().map(|word| u32::from_ne_bytes(*word)).collect() })
    }
}

impl std::fmt::Debug for TokenMask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TokenMask({} tokens)", self.count())
    }
}

/// A sampled token with its log-probabilities and pooled values, if requested.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledToken {
    pub id: u32,
    pub logprobs: Option<TokenLogprobs>,
    /// Values that [`Sampling::pooling`] asks for.
    pub pooled: Option<Box<[f32]>>,
}

/// Natural logarithms, from the logits before temperature and penalties.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    pub chosen: f32,
    /// Best first, ties by the lower id.
    pub top: Vec<(u32, f32)>,
    /// Number of tokens with a greater logit than a prompt token, plus 1. `None` for sampled
    /// tokens.
    pub rank: Option<u32>,
}

/// A sampling parameter that is out of its range.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("{field} is {value}; expected {allowed}")]
pub struct InvalidSampling {
    pub field: &'static str,
    pub value: f32,
    pub allowed: &'static str,
}

impl Sampling {
    /// Checks parameters that a peer sent. NaN is outside every range.
    pub fn validate(&self) -> Result<(), InvalidSampling> {
        let check = |field, value: f32, is_allowed: bool, allowed| match is_allowed {
            true => Ok(()),
            false => Err(InvalidSampling { field, value, allowed }),
        };
        let Self { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        let Self { presence_penalty, frequency_penalty, .. } = *self;
        let is_temperature = temperature >= 0.0 && temperature.is_finite();
        check("temperature", temperature, is_temperature, "0 or more")?;
        check("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "more than 0, at most 1")?;
        check("min_p", min_p, (0.0..=1.0).contains(&min_p), "0 to 1")?;
        let is_repetition = repetition_penalty > 0.0 && repetition_penalty.is_finite();
        check("repetition_penalty", repetition_penalty, is_repetition, "more than 0")?;
        for (field, value) in
            [("presence_penalty", presence_penalty), ("frequency_penalty", frequency_penalty)]
        {
            check(field, value, (-2.0..=2.0).contains(&value), "-2 to 2")?;
        }
        for &(_, bias) in &self.logit_bias {
            let range = -LOGIT_BIAS_MAX..=LOGIT_BIAS_MAX;
            check("logit_bias", bias, range.contains(&bias), "-100 to 100")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bitmask_ends_with_the_vocabulary() {
        let mask = TokenMask::new(vec![0b101, u32::MAX, u32::MAX], 35);
        assert_eq!(mask.words(), [0b101, 0b111]);
        assert_eq!(mask.count(), 5);
        let allowed: Vec<u32> = (0..200).filter(|&token| mask.allows(token)).collect();
        assert_eq!(allowed, [0, 2, 32, 33, 34]);
        assert_eq!(TokenMask::new(vec![1], 64).words(), [1, 0]);
        assert!(!TokenMask::new(vec![1], 0).allows(0));
    }

    #[test]
    fn sampling_fields_outside_their_ranges_are_rejected() {
        let good = Sampling::greedy();
        assert_eq!(good.validate(), Ok(()));
        for (bad, field) in [
            (Sampling { temperature: -0.1, ..good.clone() }, "temperature"),
            (Sampling { temperature: f32::INFINITY, ..good.clone() }, "temperature"),
            (Sampling { temperature: f32::NAN, ..good.clone() }, "temperature"),
            (Sampling { top_p: 0.0, ..good.clone() }, "top_p"),
            (Sampling { top_p: 1.1, ..good.clone() }, "top_p"),
            (Sampling { min_p: -0.1, ..good.clone() }, "min_p"),
            (Sampling { min_p: f32::NAN, ..good.clone() }, "min_p"),
            (Sampling { repetition_penalty: 0.0, ..good.clone() }, "repetition_penalty"),
            (Sampling { presence_penalty: 2.5, ..good.clone() }, "presence_penalty"),
            (Sampling { frequency_penalty: f32::NAN, ..good.clone() }, "frequency_penalty"),
            (Sampling { logit_bias: vec![(1, 0.0), (2, f32::NAN)], ..good.clone() }, "logit_bias"),
        ] {
            assert_eq!(bad.validate().unwrap_err().field, field);
        }
        let error = Sampling { top_p: 1.5, ..good }.validate().unwrap_err();
        assert_eq!(error.to_string(), "top_p is 1.5; expected more than 0, at most 1");
    }
}
