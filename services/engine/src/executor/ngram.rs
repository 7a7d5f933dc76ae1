//! Guesses without a draft model: what followed the last time the sequence said the same.
//!
//! The longest earlier occurrence of the sequence's last tokens is looked up, and the tokens after it
//! are the guess. Code edits, quotations, tables and loops repeat long stretches of what was said;
//! elsewhere nothing is found and nothing is guessed.

use super::Speculation;

/// At most `most` tokens that may follow `tokens`. Among earlier occurrences of the end of `tokens`
/// the longest counts, of those the latest. One that runs into the end goes on into its own guess, so
/// that a short period is guessed as far as a long one.
pub fn guess(tokens: &[u32], most: usize, rules: &Speculation) -> Vec<u32> {
    match earlier_occurrence(tokens, rules.ngram_min as usize, rules.ngram_max as usize) {
        None => Vec::new(),
        Some(next) => {
            let mut guess: Vec<u32> = tokens[next..].iter().copied().take(most).collect();
            let period = tokens.len() - next;
            for index in guess.len()..most {
                guess.push(guess[index - period]);
            }
            guess
        }
    }
}

/// The position behind the best earlier occurrence of the last `shortest..=longest` tokens.
fn earlier_occurrence(tokens: &[u32], shortest: usize, longest: usize) -> Option<usize> {
    let (&last, before) = tokens.split_last()?;
    let mut best = None;
    let mut best_len = shortest.max(1) - 1;
    // Backwards, so that the latest of equals is found first.
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
        Speculation { row_drafts: 8, step_tokens: 64, ngram_min, ngram_max }
    }

    #[test]
    fn what_followed_the_longest_earlier_occurrence_is_guessed() {
        let tokens = [1, 2, 3, 10, 11, 9, 2, 3, 20, 21, 1, 2, 3];
        assert_eq!(guess(&tokens, 2, &rules(2, 4)), [10, 11]);
        // Only two tokens are compared: the later occurrence is as good.
        assert_eq!(guess(&tokens, 2, &rules(2, 2)), [20, 21]);
    }

    #[test]
    fn without_a_long_enough_occurrence_nothing_is_guessed() {
        assert!(guess(&[], 4, &rules(1, 3)).is_empty());
        assert!(guess(&[7], 4, &rules(1, 3)).is_empty());
        assert!(guess(&[1, 2, 3, 4], 4, &rules(1, 3)).is_empty());
        assert!(guess(&[1, 2, 9, 2], 4, &rules(2, 3)).is_empty());
        assert!(guess(&[1, 2, 9, 2], 0, &rules(1, 3)).is_empty());
    }

    #[test]
    fn a_period_is_guessed_beyond_its_first_repetition() {
        assert_eq!(guess(&[5, 6, 7, 5, 6, 7], 7, &rules(2, 3)), [5, 6, 7, 5, 6, 7, 5]);
        assert_eq!(guess(&[4, 4, 4], 5, &rules(2, 3)), [4, 4, 4, 4, 4]);
    }

    proptest! {
        #[test]
        fn a_guess_is_what_the_rule_says_written_out_plainly(
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
            prop_assert_eq!(guess(&tokens, most, &rules), &known[tokens.len()..]);
        }
    }
}
