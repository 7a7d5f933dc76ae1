//! Sampling of a token from a row of raw logits, by the rules of [`crate::sampling`].
//!
//! The order is vLLM's:
//! 1. Log-probabilities are taken from the raw logits.
//! 2. Tokens that the sequence's grammar or `allowed_token_ids` does not allow are masked, the ends
//!    of `bad_words`, and stop tokens while the output has fewer than `min_tokens`.
//! 3. Repetition penalty (prompt and output), then frequency and presence penalty (output). The
//!    logit bias is added last.
//! 4. A temperature below 1e-5 is greedy: the greatest logit, the lowest id among equals.
//! 5. Otherwise `p = exp((logit − greatest) / temperature)`; p below e⁻⁸⁷ of the best is 0.
//! 6. min-p keeps tokens with at least `min_p` of the best token's probability.
//! 7. top-k keeps the k most likely of those, and tokens as likely as the k-th.
//! 8. top-p keeps the most likely of the remaining tokens until their share of the probability
//!    reaches `top_p`; among equals the lower id comes first.
//! 9. One of the kept tokens is drawn (see `sample/draw.rs`).
//!
//! The arithmetic is the same at every level and thread count.

mod draw;
mod gathered;
mod history;
mod keep;
mod logprobs;

use std::sync::{Mutex, PoisonError};

use super::{
    arithmetic::{LANES, exp, sum_lanes},
    isa::{Isa, Level, per_level},
    threads::ThreadPool,
};
use crate::{
    sampling::{InvalidSampling, SampledToken, Sampling, TokenMask},
    shard::VOCABULARY_RUN,
};

/// Temperatures below this are greedy, as in vLLM.
const GREEDY_BELOW: f32 = 1e-5;

/// Sampling input of one row.
#[derive(Clone, Copy, Debug)]
pub struct SampleRow<'a> {
    pub sampling: &'a Sampling,
    /// Prompt tokens, then output tokens so far. Ids beyond the vocabulary are ignored.
    pub tokens: &'a [u32],
    /// Number of prompt tokens in `tokens`. The chosen token has output index `tokens.len() -
    /// prompt_len`.
    pub prompt_len: usize,
    /// Token bitmask; `None` allows every token.
    pub allowed: Option<&'a TokenMask>,
    /// The token that follows in the prompt: it is not sampled, only its log-probabilities are
    /// computed.
    pub scored: Option<u32>,
}

/// Error of sampling a row.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// The model computed an invalid logit, or a penalty exceeded f32.
    #[error("invalid logit of token {token}: {value}")]
    BadLogit { token: u32, value: f32 },
    #[error(transparent)]
    BadSampling(#[from] InvalidSampling),
    /// The vocabulary is empty, or every token is masked.
    #[error("cannot sample a token: none of {vocabulary} tokens is allowed")]
    NoCandidate { vocabulary: usize },
    #[error("the prompt has {prompt_len} tokens of {tokens} in all")]
    BadPromptLen { prompt_len: usize, tokens: usize },
}

/// Sampling memory that one thread reuses.
#[derive(Default)]
pub(crate) struct SampleScratch {
    logits: Vec<f32>,
    probabilities: Vec<f32>,
    /// All zero between samples.
    counts: Vec<u32>,
}

/// Samples the next token from raw `logits`, one per token of the vocabulary.
pub fn sample(logits: &[f32], row: &SampleRow<'_>) -> Result<SampledToken, SampleError> {
    let level = Level::find(Isa::Auto).unwrap_or(Level::Baseline);
    sample_with(level, &mut SampleScratch::default(), logits, row)
}

pub(crate) fn sample_with(
    level: Level,
    scratch: &mut SampleScratch,
    logits: &[f32],
    row: &SampleRow<'_>,
) -> Result<SampledToken, SampleError> {
    let sampling = row.sampling;
    sampling.validate()?;
    let Some((prompt, output)) = row.tokens.split_at_checked(row.prompt_len) else {
        let (prompt_len, tokens) = (row.prompt_len, row.tokens.len());
        return Err(SampleError::BadPromptLen { prompt_len, tokens });
    };
    let raw_best = best(level, logits)?;
    if let Some(id) = row.scored {
        let count = sampling.prompt_logprobs.unwrap_or(0);
        let logprobs = logprobs::of_given(level, logits, raw_best.1, id, count);
        return Ok(SampledToken { id, logprobs: Some(logprobs), pooled: None });
    }
    let is_adjusted = history::adjust(
        sampling,
        prompt,
        output,
        row.allowed,
        logits,
        &mut scratch.logits,
        &mut scratch.counts,
    )?;
    let (adjusted, (best_id, best_logit)) = match is_adjusted {
        true => (&scratch.logits[..], best(level, &scratch.logits)?),
        false => (logits, raw_best),
    };
    let id = if sampling.temperature < GREEDY_BELOW {
        best_id
    } else {
        let probabilities = &mut scratch.probabilities;
        probabilities.resize(adjusted.len(), 0.0);
        weigh(level, adjusted, best_logit, sampling.temperature, probabilities);
        let key = draw::DrawKey::new(sampling.seed, output.len() as u64);
        match keep::candidates(level, probabilities, sampling) {
            None => draw::among_all(level, key, best_id, probabilities),
            Some(kept) => draw::among(key, &kept),
        }
    };
    let logprobs =
        sampling.logprobs.map(|count| logprobs::of(level, logits, raw_best.1, id, count));
    Ok(SampledToken { id, logprobs, pooled: None })
}

/// Samples a token for each of `rows` from `logits(row)`, rows in parallel.
pub(crate) fn sample_rows<'a>(
    level: Level,
    pool: &mut ThreadPool,
    scratches: &[Mutex<SampleScratch>],
    logits: impl Fn(usize) -> &'a [f32] + Sync,
    rows: &[SampleRow<'_>],
) -> Vec<Result<SampledToken, SampleError>> {
    let mut tokens: Vec<Option<_>> = rows.iter().map(|_| None).collect();
    pool.for_each_piece(&mut tokens, 1, |thread, row, token| {
        let mut scratch = scratches[thread].lock().unwrap_or_else(PoisonError::into_inner);
        token[0] = Some(sample_with(level, &mut scratch, logits(row), &rows[row]));
    });
    tokens.into_iter().map(|token| token.expect("every row was visited")).collect()
}

/// Returns the greatest logit and the lowest id that has it. A logit of -∞ is a masked token; NaN
/// and +∞ are errors.
fn best(level: Level, logits: &[f32]) -> Result<(u32, f32), SampleError> {
    let (greatest, is_bad) = max_and_validity(level, logits);
    if is_bad {
        let is_bad = |value: &f32| value.is_nan() || *value == f32::INFINITY;
        let token = logits.iter().position(is_bad).expect("a bad logit was seen");
        return Err(SampleError::BadLogit { token: token as u32, value: logits[token] });
    }
    if greatest == f32::NEG_INFINITY {
        return Err(SampleError::NoCandidate { vocabulary: logits.len() });
    }
    let token = first_with(level, logits, greatest).expect("the greatest logit was seen") as u32;
    Ok((token, greatest))
}

per_level! {
    /// Returns the lowest id with this logit.
    fn first_with(logits: &[f32], logit: f32) -> Option<usize> {
        // Whole groups first, because a loop that exits at any element is not vectorized.
        let (groups, _) = logits.as_chunks::<LANES>();
        let has_it = |group: &[f32; LANES]| group.iter().fold(false, |has, &value| has | (value == logit));
        let start = LANES * groups.iter().position(has_it).unwrap_or(groups.len());
        Some(start + logits[start..].iter().position(|&value| value == logit)?)
    }
}

per_level! {
    /// Returns the greatest logit that is not NaN, and whether a logit is NaN or +∞.
    fn max_and_validity(logits: &[f32]) -> (f32, bool) {
        let mut greatest = [f32::NEG_INFINITY; LANES];
        let mut is_bad = [false; LANES];
        let (groups, rest) = logits.as_chunks::<LANES>();
        for group in groups {
            for ((greatest, is_bad), &value) in greatest.iter_mut().zip(&mut is_bad).zip(group) {
                *greatest = if value > *greatest { value } else { *greatest };
                *is_bad |= value.is_nan() | (value == f32::INFINITY);
            }
        }
        for ((greatest, is_bad), &value) in greatest.iter_mut().zip(&mut is_bad).zip(rest) {
            *greatest = if value > *greatest { value } else { *greatest };
            *is_bad |= value.is_nan() | (value == f32::INFINITY);
        }
        (greatest.into_iter().fold(f32::NEG_INFINITY, f32::max), is_bad.contains(&true))
    }
}

per_level! {
    /// Computes `weights[i] = exp((logits[i] - best) / temperature)`: probabilities relative to the
    /// best token's.
    fn weigh(logits: &[f32], best: f32, temperature: f32, weights: &mut [f32]) {
        for (weight, &logit) in weights.iter_mut().zip(logits) {
            *weight = exp((logit - best) / temperature);
        }
    }
}

/// Weights per run; a run is summed lane by lane.
const RUN: usize = VOCABULARY_RUN;

per_level! {
    /// Returns the sum of the weights that are at least `floor`, in one fixed order: lanes within a
    /// run, runs in f64.
    fn total(weights: &[f32], floor: f32) -> f64 {
        let mut total = 0.0;
        for run in weights.chunks(RUN) {
            total += f64::from(run_total(run, floor));
        }
        total
    }
}

#[inline(always)]
fn run_total(run: &[f32], floor: f32) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let (groups, rest) = run.as_chunks::<LANES>();
    for group in groups {
        for (lane, &weight) in lanes.iter_mut().zip(group) {
            *lane += if weight >= floor { weight } else { 0.0 };
        }
    }
    for (lane, &weight) in lanes.iter_mut().zip(rest) {
        *lane += if weight >= floor { weight } else { 0.0 };
    }
    sum_lanes(lanes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cpu::testing::{levels, numbers},
        sampling::TokenLogprobs,
    };

    fn row<'a>(sampling: &'a Sampling, tokens: &'a [u32]) -> SampleRow<'a> {
        SampleRow { sampling, tokens, prompt_len: 0, allowed: None, scored: None }
    }

    fn warm() -> Sampling {
        Sampling { temperature: 1.0, ..Sampling::greedy() }
    }

    #[test]
    fn greedy_takes_the_lowest_id_among_equals() {
        let greedy = Sampling::greedy();
        for count in [1, 3, 16, 17, 100] {
            let mut logits = vec![-1.0; count];
            logits[count / 2] = 2.5;
            logits[count - 1] = 2.5;
            let token = sample(&logits, &row(&greedy, &[])).unwrap();
            assert_eq!(token, SampledToken { id: count as u32 / 2, logprobs: None, pooled: None });
        }
        let equal = [0.0; 50];
        assert_eq!(sample(&equal, &row(&greedy, &[])).unwrap().id, 0);
        let tiny = Sampling { temperature: 9e-6, ..greedy };
        assert_eq!(sample(&[1.0, 1.1, 1.1], &row(&tiny, &[])).unwrap().id, 1);
    }

    #[test]
    fn invalid_logits_are_an_error_that_names_the_token() {
        for sampling in [Sampling::greedy(), warm()] {
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
                for at in [0, 15, 16, 40] {
                    let mut logits = numbers(1, 41);
                    logits[at] = bad;
                    let error = sample(&logits, &row(&sampling, &[])).unwrap_err();
                    let SampleError::BadLogit { token, value } = error else { panic!("{error}") };
                    assert_eq!((token as usize, value.to_bits()), (at, bad.to_bits()));
                }
            }
        }
    }

    #[test]
    fn without_a_candidate_there_is_an_error() {
        let none = |vocabulary| Err(SampleError::NoCandidate { vocabulary });
        assert_eq!(sample(&[], &row(&warm(), &[])), none(0));
        assert_eq!(sample(&[f32::NEG_INFINITY; 20], &row(&warm(), &[])), none(20));
        let masked = Sampling { stop_token_ids: vec![0, 1], min_tokens: 1, ..warm() };
        assert_eq!(sample(&[1.0, 2.0], &row(&masked, &[])), none(2));
    }

    #[test]
    fn bad_parameters_and_prompt_lengths_are_errors() {
        let bad = Sampling { top_p: f32::NAN, ..warm() };
        assert!(matches!(sample(&[1.0], &row(&bad, &[])), Err(SampleError::BadSampling(_))));
        let warm = warm();
        let row = SampleRow { prompt_len: 2, ..row(&warm, &[1]) };
        assert!(matches!(sample(&[1.0], &row), Err(SampleError::BadPromptLen { .. })));
    }

    #[test]
    fn a_penalty_beyond_f32_is_an_error() {
        let sampling = Sampling { repetition_penalty: f32::MIN_POSITIVE, ..Sampling::greedy() };
        assert_eq!(
            sample(&[1.0, 50.0], &row(&sampling, &[1])),
            Err(SampleError::BadLogit { token: 1, value: f32::INFINITY })
        );
    }

    #[test]
    fn masked_tokens_are_never_drawn() {
        let sampling = Sampling { stop_token_ids: vec![1], min_tokens: 5, ..warm() };
        let logits = [0.0, 30.0, f32::NEG_INFINITY, 0.0];
        for index in 0..5_u32 {
            let tokens = vec![0; index as usize];
            let id = sample(&logits, &row(&sampling, &tokens)).unwrap().id;
            assert!(id == 0 || id == 3);
        }
        assert_eq!(sample(&logits, &row(&sampling, &[0; 5])).unwrap().id, 1);
    }

    #[test]
    fn only_allowed_tokens_are_drawn_and_logprobs_are_raw() {
        let logits = [9.0, 1.0, 8.0, 1.0, 7.0];
        let allowed = TokenMask::new(vec![0b01010], 5);
        for sampling in [
            Sampling::greedy(),
            warm(),
            Sampling { temperature: 2.0, top_k: 3, top_p: 0.9, min_p: 0.1, ..warm() },
        ] {
            let mut drawn = [0; 5];
            for seed in 0..200 {
                let sampling = Sampling { seed, logprobs: Some(1), ..sampling.clone() };
                let row = SampleRow { allowed: Some(&allowed), ..row(&sampling, &[]) };
                let token = sample(&logits, &row).unwrap();
                drawn[token.id as usize] += 1;
                let TokenLogprobs { chosen, top, .. } = token.logprobs.unwrap();
                assert_eq!(top[0].0, 0, "the best of the raw logits");
                assert!((chosen - top[0].1 + 8.0).abs() < 1e-5);
            }
            assert_eq!((drawn[0], drawn[2], drawn[4]), (0, 0, 0));
            assert!(drawn[1] > 60);
        }
        let nothing = TokenMask::new(vec![], 5);
        let warm = warm();
        let row = SampleRow { allowed: Some(&nothing), ..row(&warm, &[]) };
        assert_eq!(sample(&logits, &row), Err(SampleError::NoCandidate { vocabulary: 5 }));
    }

    #[test]
    fn temperature_sharpens_and_flattens() {
        let logits = [1.0, 0.0];
        let share = |temperature| {
            let wins = (0..2_000_u64)
                .filter(|&seed| {
                    let sampling = Sampling { temperature, seed, ..Sampling::greedy() };
                    sample(&logits, &row(&sampling, &[])).unwrap().id == 0
                })
                .count();
            wins as f64 / 2_000.0
        };
        for temperature in [0.2, 1.0, 3.0] {
            let exact = 1.0 / (1.0 + (-1.0 / f64::from(temperature)).exp());
            // Five standard deviations of 2,000 draws.
            assert!((share(temperature) - exact).abs() < 0.056, "{temperature}");
        }
    }

    #[test]
    fn logprobs_come_from_the_raw_logits() {
        let logits = [2.0_f32, 1.0, 3.0, 3.0, f32::NEG_INFINITY];
        let whole = logits.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
        let sampling = Sampling {
            repetition_penalty: 1.9,
            stop_token_ids: vec![2],
            min_tokens: 9,
            logprobs: Some(3),
            ..Sampling::greedy()
        };
        let token = sample(&logits, &row(&sampling, &[3])).unwrap();
        assert_eq!(token.id, 0);
        let TokenLogprobs { chosen, top, .. } = token.logprobs.unwrap();
        let near = |a: f32, b: f64| (f64::from(a) - b).abs() < 1e-5;
        assert!(near(chosen, 2.0 - whole));
        assert_eq!(top.iter().map(|&(id, _)| id).collect::<Vec<_>>(), [2, 3, 0]);
        assert!(near(top[0].1, 3.0 - whole) && near(top[2].1, 2.0 - whole));
        let all = Sampling { logprobs: Some(u32::MAX), ..Sampling::greedy() };
        let top = sample(&logits, &row(&all, &[])).unwrap().logprobs.unwrap().top;
        assert_eq!(top.len(), 5);
        assert_eq!(top[4], (4, f32::NEG_INFINITY));
        let none = Sampling { logprobs: Some(0), ..Sampling::greedy() };
        assert!(sample(&logits, &row(&none, &[])).unwrap().logprobs.unwrap().top.is_empty());
    }

    #[test]
    fn given_token_has_its_logprob_and_rank() {
        let logits = [2.0_f32, 1.0, 3.0, 3.0, f32::NEG_INFINITY];
        let whole = logits.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
        let sampling = Sampling { prompt_logprobs: Some(2), min_tokens: 9, ..warm() };
        for (scored, rank) in [(2, 1), (3, 1), (0, 3), (1, 4), (4, 5)] {
            let row = SampleRow { scored: Some(scored), ..row(&sampling, &[]) };
            let token = sample(&logits, &row).unwrap();
            let TokenLogprobs { chosen, top, rank: found } = token.logprobs.unwrap();
            assert_eq!((token.id, found), (scored, Some(rank)));
            let expected = f64::from(logits[scored as usize]) - whole;
            assert!(
                chosen == f32::NEG_INFINITY && scored == 4
                    || (f64::from(chosen) - expected).abs() < 1e-5
            );
            assert_eq!([top[0].0, top[1].0], [2, 3]);
        }
    }

    #[test]
    fn logit_bias_forces_and_bans_tokens_and_leaves_logprobs_raw() {
        let logits = [5.0, 4.0, 1.0];
        let biased = |logit_bias: Vec<(u32, f32)>| {
            let sampling = Sampling { logit_bias, logprobs: Some(1), ..Sampling::greedy() };
            let token = sample(&logits, &row(&sampling, &[])).unwrap();
            (token.id, token.logprobs.unwrap().top[0].0)
        };
        assert_eq!(biased(vec![]), (0, 0));
        assert_eq!(biased(vec![(2, 100.0)]), (2, 0));
        assert_eq!(biased(vec![(0, -1.5), (999, 3.0)]), (1, 0));
        assert_eq!(biased(vec![(0, -0.5)]), (0, 0));
    }

    #[test]
    fn every_level_chooses_the_same_token_with_the_same_logprobs() {
        let (mut scratch, logits) = (SampleScratch::default(), numbers(7, 3_001));
        for seed in 0..200 {
            let sampling = Sampling {
                temperature: 0.3 + (seed % 5) as f32,
                top_k: [0, 5, 300][seed as usize % 3],
                top_p: [1.0, 0.95, 0.3, 0.999][seed as usize % 4],
                min_p: [0.0, 0.0, 0.0, 0.05, 0.0][seed as usize % 5],
                seed,
                repetition_penalty: 1.1,
                presence_penalty: 0.1,
                frequency_penalty: 0.1,
                stop_token_ids: vec![3],
                min_tokens: 4,
                logprobs: Some(5),
                pooling: None,
                prompt_logprobs: None,
                logit_bias: vec![(7, 1.5), (9, -2.0)],
                allowed_token_ids: (0..3_000).collect(),
                bad_words: vec![vec![5, 8]],
            };
            let tokens = [1, 2, 3, 2, 5];
            let row = SampleRow { prompt_len: 2, ..row(&sampling, &tokens) };
            let want = sample_with(Level::Reference, &mut scratch, &logits, &row).unwrap();
            for level in levels() {
                let got = sample_with(level, &mut scratch, &logits, &row).unwrap();
                assert_eq!(got, want, "seed {seed} {}", level.name());
            }
        }
    }
}
