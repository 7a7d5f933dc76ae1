//! Masks, penalties and bias: first the grammar's token mask and the allowed tokens, then the
//! changes that depend on the sequence's own tokens (bad words, the mask of `min_tokens` and
//! penalties), then the logit bias.

use super::SampleError;
use crate::sampling::{Sampling, TokenMask};

/// Flag in a count: the token is in the prompt. The other bits count its occurrences in the output.
const IN_PROMPT: u32 = 1 << 31;

/// Writes the changed logits to `adjusted` and returns true, or returns false when nothing changes.
/// `counts` is all zero before and after.
pub(super) fn adjust(
    sampling: &Sampling,
    prompt: &[u32],
    output: &[u32],
    allowed: Option<&TokenMask>,
    logits: &[f32],
    adjusted: &mut Vec<f32>,
    counts: &mut Vec<u32>,
) -> Result<bool, SampleError> {
    let is_masked = (output.len() as u64) < u64::from(sampling.min_tokens)
        && !sampling.stop_token_ids.is_empty();
    let repeats = sampling.repetition_penalty != 1.0;
    let is_penalised =
        repeats || sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0;
    let is_biased = !sampling.logit_bias.is_empty();
    let is_listed = !sampling.allowed_token_ids.is_empty() || !sampling.bad_words.is_empty();
    if allowed.is_none() && !is_masked && !is_penalised && !is_biased && !is_listed {
        return Ok(false);
    }
    adjusted.clear();
    match &sampling.allowed_token_ids[..] {
        [] => adjusted.extend_from_slice(logits),
        listed => {
            adjusted.resize(logits.len(), f32::NEG_INFINITY);
            for &token in listed {
                if let Some(logit) = adjusted.get_mut(token as usize) {
                    *logit = logits[token as usize];
                }
            }
        }
    }
    if let Some(allowed) = allowed {
        keep_allowed(allowed, adjusted);
    }
    for word in &sampling.bad_words {
        if let Some((&last, begin)) = word.split_last()
            && output.ends_with(begin)
            && let Some(logit) = adjusted.get_mut(last as usize)
        {
            *logit = f32::NEG_INFINITY;
        }
    }
    if is_masked {
        for &token in &sampling.stop_token_ids {
            if let Some(logit) = adjusted.get_mut(token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
    if is_penalised {
        // Only the repetition penalty considers the prompt.
        let prompt = if repeats { prompt } else { &[] };
        counts.resize(logits.len(), 0);
        for &token in prompt {
            if let Some(count) = counts.get_mut(token as usize) {
                *count |= IN_PROMPT;
            }
        }
        for &token in output {
            if let Some(count) = counts.get_mut(token as usize) {
                *count += 1;
            }
        }
        for &token in prompt.iter().chain(output) {
            // Resets the count, so that a token is penalized once and all counts end as zeros.
            let count = counts.get_mut(token as usize).map_or(0, std::mem::take);
            if count != 0 {
                penalise(sampling, count, &mut adjusted[token as usize]);
            }
        }
    }
    for &(token, bias) in &sampling.logit_bias {
        if let Some(logit) = adjusted.get_mut(token as usize) {
            *logit += bias;
        }
    }
    Ok(true)
}

fn keep_allowed(allowed: &TokenMask, logits: &mut [f32]) {
    let words = allowed.words().iter().copied().chain(std::iter::repeat(0));
    for (logits, word) in logits.chunks_mut(32).zip(words) {
        match word {
            0 => logits.fill(f32::NEG_INFINITY),
            u32::MAX => {}
            _ => {
                for (bit, logit) in logits.iter_mut().enumerate() {
                    if word >> bit & 1 == 0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

fn penalise(sampling: &Sampling, count: u32, logit: &mut f32) {
    let penalty = sampling.repetition_penalty;
    let repeated = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
    let places = count & !IN_PROMPT;
    *logit = repeated - sampling.frequency_penalty * places as f32;
    if places > 0 {
        *logit -= sampling.presence_penalty;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adjusted(sampling: &Sampling, prompt: &[u32], output: &[u32], logits: &[f32]) -> Vec<f32> {
        masked(sampling, prompt, output, None, logits)
    }

    fn masked(
        sampling: &Sampling,
        prompt: &[u32],
        output: &[u32],
        allowed: Option<&TokenMask>,
        logits: &[f32],
    ) -> Vec<f32> {
        let (mut adjusted, mut counts) = (Vec::new(), Vec::new());
        let is_adjusted =
            adjust(sampling, prompt, output, allowed, logits, &mut adjusted, &mut counts).unwrap();
        assert!(counts.iter().all(|&count| count == 0));
        if is_adjusted { adjusted } else { logits.to_vec() }
    }

    #[test]
    fn repetition_penalty_applies_once_to_prompt_and_output_tokens() {
        let sampling = Sampling { repetition_penalty: 2.0, ..Sampling::greedy() };
        let logits = [4.0, -4.0, 6.0, -6.0, 8.0];
        assert_eq!(
            adjusted(&sampling, &[0, 1, 0], &[2, 2, 0], &logits),
            [2.0, -8.0, 3.0, -6.0, 8.0]
        );
    }

    #[test]
    fn presence_and_frequency_penalties_apply_to_output_tokens_only() {
        let logits = [1.0, 1.0, 1.0];
        let sampling = Sampling { presence_penalty: 0.5, ..Sampling::greedy() };
        assert_eq!(adjusted(&sampling, &[0], &[1, 1], &logits), [1.0, 0.5, 1.0]);
        let sampling = Sampling { frequency_penalty: 0.5, ..Sampling::greedy() };
        assert_eq!(adjusted(&sampling, &[0], &[1, 1], &logits), [1.0, 0.0, 1.0]);
        let sampling = Sampling { frequency_penalty: -0.5, ..Sampling::greedy() };
        assert_eq!(adjusted(&sampling, &[0], &[1, 1], &logits), [1.0, 2.0, 1.0]);
    }

    #[test]
    fn repetition_penalty_precedes_the_other_penalties() {
        let sampling = Sampling {
            repetition_penalty: 2.0,
            presence_penalty: 1.0,
            frequency_penalty: 0.25,
            ..Sampling::greedy()
        };
        assert_eq!(adjusted(&sampling, &[], &[0, 0], &[4.0]), [4.0 / 2.0 - 0.5 - 1.0]);
    }

    #[test]
    fn stop_tokens_are_masked_until_min_tokens() {
        let sampling =
            Sampling { stop_token_ids: vec![1, 77], min_tokens: 2, ..Sampling::greedy() };
        let logits = [0.0, 9.0, 1.0];
        let masked = [0.0, f32::NEG_INFINITY, 1.0];
        assert_eq!(adjusted(&sampling, &[5, 5, 5], &[], &logits), masked);
        assert_eq!(adjusted(&sampling, &[], &[0], &logits), masked);
        assert_eq!(adjusted(&sampling, &[], &[0, 0], &logits), logits);
    }

    #[test]
    fn only_allowed_tokens_are_kept() {
        const NONE: f32 = f32::NEG_INFINITY;
        let sampling = Sampling { allowed_token_ids: vec![1, 3, 3, 77], ..Sampling::greedy() };
        let logits = [4.0, 3.0, 2.0, 1.0];
        assert_eq!(adjusted(&sampling, &[0], &[2], &logits), [NONE, 3.0, NONE, 1.0]);
        let mask = TokenMask::new(vec![0b0110], 4);
        let both = masked(&sampling, &[], &[], Some(&mask), &logits);
        assert_eq!(both, [NONE, 3.0, NONE, NONE]);
    }

    #[test]
    fn bad_word_ends_only_after_its_beginning_in_the_output() {
        const NONE: f32 = f32::NEG_INFINITY;
        let sampling =
            Sampling { bad_words: vec![vec![2], vec![1, 0, 1], vec![88]], ..Sampling::greedy() };
        let logits = [4.0, 3.0, 2.0];
        assert_eq!(adjusted(&sampling, &[1, 0], &[], &logits), [4.0, 3.0, NONE]);
        assert_eq!(adjusted(&sampling, &[1], &[0], &logits), [4.0, 3.0, NONE]);
        assert_eq!(adjusted(&sampling, &[], &[0, 1, 0], &logits), [4.0, NONE, NONE]);
        assert_eq!(adjusted(&sampling, &[], &[1, 0, 0], &logits), [4.0, 3.0, NONE]);
    }

    #[test]
    fn masked_tokens_stay_masked_under_penalties() {
        const NONE: f32 = f32::NEG_INFINITY;
        let logits: Vec<f32> = (0..70).map(|token| token as f32 - 35.0).collect();
        let mask = TokenMask::new(vec![1 << 3, 0, u32::MAX], 70);
        let kept = |token: usize| if token == 3 || token >= 64 { logits[token] } else { NONE };
        let greedy = Sampling::greedy();
        let all: Vec<f32> = (0..70).map(kept).collect();
        assert_eq!(masked(&greedy, &[], &[], Some(&mask), &logits), all);
        let sampling = Sampling {
            repetition_penalty: 2.0,
            presence_penalty: -2.0,
            frequency_penalty: -2.0,
            ..greedy
        };
        let tokens: Vec<u32> = (0..70).collect();
        let left = masked(&sampling, &tokens, &tokens, Some(&mask), &logits);
        assert_eq!((left[3], left[69]), (-64.0 + 4.0, 17.0 + 4.0));
        assert!(left.iter().enumerate().all(|(token, &x)| (x == NONE) == (kept(token) == NONE)));
        // A mask of a smaller vocabulary allows no token beyond it.
        let small = TokenMask::new(vec![u32::MAX], 32);
        assert_eq!(masked(&Sampling::greedy(), &[], &[], Some(&small), &logits)[32..], [NONE; 38]);
    }

    #[test]
    fn tokens_beyond_the_vocabulary_are_ignored() {
        let sampling = Sampling {
            repetition_penalty: 2.0,
            stop_token_ids: vec![u32::MAX],
            min_tokens: 9,
            ..Sampling::greedy()
        };
        assert_eq!(adjusted(&sampling, &[u32::MAX], &[3], &[1.0]), [1.0]);
    }
}
