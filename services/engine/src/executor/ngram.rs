//! Draft tokens by prompt lookup decoding (n-gram matching), without a draft model.
//!
//! The tokens after the longest earlier occurrence of the sequence's last n-gram are the draft
//! tokens. Code edits, quotations, tables and loops repeat long passages. Other text has no match
//! and gets no draft tokens.

use super::Speculation;

/// Returns up to `most` draft tokens to follow `tokens`. Uses the longest earlier occurrence of the
/// end of `tokens`, and the latest of equally long ones. A match that reaches the end continues
/// into its own draft tokens, so that a short period is repeated as often as needed.
pub fn draft(tokens: &[u32], most: usize, rules: &Speculation) -> Vec<u32> {
    match earlier_occurrence(tokens, rules.ngram_min as usize, rules.ngram_max as usize) {
        None => Vec::new(),
        Some(next) => {
            let mut draft: Vec<u32> = tokens[next..].iter().copied().take(most).collect();
            let period = tokens.len() - next;
            for index in draft.len()..most {
                draft.push(draft[index - period]);
            }
            draft
        }
    }
}

/// Returns the position after the best earlier occurrence of the last `shortest..=longest` tokens.
fn earlier_occurrence(tokens: &[u32], shortest: usize, longest: usize) -> Option<usize> {
    let (&last, before) = tokens.split_last()?;
    let mut best = None;
    let mut best_len = shortest.max(1) - 1;
    // Search backwards, so that the latest of equally long matches is found first.
    for (end, _) in before.iter().enumerate().rev().filter(|&(_, &token)| token == last) {
        let pairs = before[..end].iter().rev().zip(before.iter().rev());
        let len = 1 + pairs.take(longest.saturating_sub(1)).take_while(|(a, b)| a == b).count();
        if len > best_len {
            best = Some(end + 1);
            best_len = len;
            if len >= longest {
                break;
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rules(ngram_min: u32, ngram_max: u32) -> Speculation {
        Speculation { row_drafts: 8, step_tokens: 64, ngram_min, ngram_max, uniform: false }
    }

    #[test]
    fn draft_follows_the_longest_earlier_occurrence() {
        let tokens = [1, 2, 3, 10, 11, 9, 2, 3, 20, 21, 1, 2, 3];
        assert_eq!(draft(&tokens, 2, &rules(2, 4)), [10, 11]);
        // At most two tokens are compared, so the later occurrence is equally good.
        assert_eq!(draft(&tokens, 2, &rules(2, 2)), [20, 21]);
    }

    #[test]
    fn no_draft_without_a_long_enough_occurrence() {
        assert!(draft(&[], 4, &rules(1, 3)).is_empty());
        assert!(draft(&[7], 4, &rules(1, 3)).is_empty());
        assert!(draft(&[1, 2, 3, 4], 4, &rules(1, 3)).is_empty());
        assert!(draft(&[1, 2, 9, 2], 4, &rules(2, 3)).is_empty());
        assert!(draft(&[1, 2, 9, 2], 0, &rules(1, 3)).is_empty());
    }

    #[test]
    fn draft_of_a_period_continues_beyond_its_first_repetition() {
        assert_eq!(draft(&[5, 6, 7, 5, 6, 7], 7, &rules(2, 3)), [5, 6, 7, 5, 6, 7, 5]);
        assert_eq!(draft(&[4, 4, 4], 5, &rules(2, 3)), [4, 4, 4, 4, 4]);
    }

    proptest! {
        #[test]
        fn draft_equals_the_plain_reference(
            tokens in prop::collection::vec(0..3u32, 0..40),
            most in 0..12usize,
            shortest in 1..4usize,
            more in 0..4usize,
        ) {
            let longest = shortest + more;
            let ends_alike = |end: usize, len: usize| {
                end >= len && tokens[end - len..end] == tokens[tokens.len() - len..]
            };
            let best = (shortest..=longest.min(tokens.len()))
                .flat_map(|len| (1..tokens.len()).map(move |end| (len, end)))
                .filter(|&(len, end)| ends_alike(end, len))
                .max();
            let mut known = tokens.clone();
            if let Some((_, end)) = best {
                (0..most).for_each(|index| known.push(known[end + index]));
            }
            let rules = rules(shortest as u32, longest as u32);
            prop_assert_eq!(draft(&tokens, most, &rules), &known[tokens.len()..]);
        }
    }
}
