//! The list of tokens that were emitted to the client: the single source of truth about an answer.
//!
//! Nodes may repeat tokens, in the same attempt (a decode node repeats token 0) or in a later one.
//! Each index enters the list once, in order. A repeated token must be equal to the emitted one.

use std::cmp::Ordering;

use proto::v1::Token;

/// Tokens 0.. of one answer, over all attempts.
#[derive(Debug)]
pub(super) struct EmittedTokens {
    ids: Vec<u32>,
    tokens_max: u32,
    vocabulary_size: u32,
}

/// Reasons to reject an event. A rejected event leaves the list unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EmissionError {
    #[error("index {index} was emitted as token {emitted} and then received as token {offered}")]
    Contradiction { index: u32, emitted: u32, offered: u32 },
    #[error("received tokens from index {first_index} on; expected index {expected}")]
    Gap { expected: u32, first_index: u32 },
    #[error("received tokens up to index {last_index}; expected at most {tokens_max} tokens")]
    TooMany { last_index: u64, tokens_max: u32 },
    #[error("token {id} at index {index} is not in the vocabulary of {vocabulary_size}")]
    OutsideVocabulary { index: u32, id: u32, vocabulary_size: u32 },
    #[error("an event at index {first_index} carried no token")]
    Empty { first_index: u32 },
}

impl EmittedTokens {
    /// Creates an empty answer of at most `tokens_max` tokens with ids below `vocabulary_size`.
    pub(super) fn new(tokens_max: u32, vocabulary_size: u32) -> Self {
        Self { ids: Vec::new(), tokens_max, vocabulary_size }
    }

    /// Returns the token ids in order of their index.
    pub(super) fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Returns the index of the next token, which is also the number of emitted tokens.
    pub(super) fn next_index(&self) -> u32 {
        self.ids.len() as u32
    }

    /// Returns whether the answer has its maximum number of tokens.
    pub(super) fn is_full(&self) -> bool {
        self.next_index() >= self.tokens_max
    }

    /// Adds tokens `first_index..` and returns the new ones, with the index of the first.
    pub(super) fn accept(
        &mut self,
        first_index: u32,
        mut tokens: Vec<Token>,
    ) -> Result<(u32, Vec<Token>), EmissionError> {
        if tokens.is_empty() {
            return Err(EmissionError::Empty { first_index });
        }
        let expected = self.next_index();
        if first_index > expected {
            return Err(EmissionError::Gap { expected, first_index });
        }
        let last_index = u64::from(first_index) + tokens.len() as u64 - 1;
        if last_index >= u64::from(self.tokens_max) {
            return Err(EmissionError::TooMany { last_index, tokens_max: self.tokens_max });
        }
        for (index, token) in (first_index..).zip(&tokens) {
            match (index.cmp(&expected), self.ids.get(index as usize)) {
                (Ordering::Less, Some(&emitted)) if emitted != token.id => {
                    return Err(EmissionError::Contradiction { index, emitted, offered: token.id });
                }
                (Ordering::Less, _) => {}
                (Ordering::Equal | Ordering::Greater, _) if token.id >= self.vocabulary_size => {
                    return Err(EmissionError::OutsideVocabulary {
                        index,
                        id: token.id,
                        vocabulary_size: self.vocabulary_size,
                    });
                }
                (Ordering::Equal | Ordering::Greater, _) => {}
            }
        }
        let repeated = ((expected - first_index) as usize).min(tokens.len());
        tokens.drain(..repeated);
        self.ids.extend(tokens.iter().map(|token| token.id));
        debug_assert!(self.next_index() <= self.tokens_max);
        Ok((expected, tokens))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tokens(ids: &[u32]) -> Vec<Token> {
        ids.iter().map(|&id| Token { id, ..Default::default() }).collect()
    }

    fn ids(tokens: &[Token]) -> Vec<u32> {
        tokens.iter().map(|token| token.id).collect()
    }

    #[test]
    fn a_repeated_token_is_emitted_once() {
        let mut emitted = EmittedTokens::new(8, 100);
        assert_eq!(ids(&emitted.accept(0, tokens(&[7])).unwrap().1), [7]);
        let (first, new) = emitted.accept(0, tokens(&[7, 8, 9])).unwrap();
        assert_eq!((first, ids(&new)), (1, vec![8, 9]));
        assert_eq!(emitted.ids(), [7, 8, 9]);
    }

    #[test]
    fn another_value_for_an_emitted_index_is_rejected() {
        let mut emitted = EmittedTokens::new(8, 100);
        emitted.accept(0, tokens(&[1, 2])).unwrap();
        assert_eq!(
            emitted.accept(1, tokens(&[3, 4])),
            Err(EmissionError::Contradiction { index: 1, emitted: 2, offered: 3 })
        );
        assert_eq!(emitted.ids(), [1, 2]);
    }

    #[test]
    fn a_gap_is_rejected() {
        let mut emitted = EmittedTokens::new(8, 100);
        assert_eq!(
            emitted.accept(1, tokens(&[3])),
            Err(EmissionError::Gap { expected: 0, first_index: 1 })
        );
    }

    #[test]
    fn more_tokens_than_max_tokens_are_rejected() {
        let mut emitted = EmittedTokens::new(2, 100);
        assert_eq!(
            emitted.accept(0, tokens(&[1, 2, 3])),
            Err(EmissionError::TooMany { last_index: 2, tokens_max: 2 })
        );
        assert_eq!(
            emitted.accept(u32::MAX, tokens(&[1])),
            Err(EmissionError::Gap { expected: 0, first_index: u32::MAX })
        );
        assert!(emitted.ids().is_empty());
    }

    #[test]
    fn an_id_outside_the_vocabulary_and_an_empty_event_are_rejected() {
        let mut emitted = EmittedTokens::new(2, 100);
        assert_eq!(
            emitted.accept(0, tokens(&[100])),
            Err(EmissionError::OutsideVocabulary { index: 0, id: 100, vocabulary_size: 100 })
        );
        assert_eq!(emitted.accept(0, vec![]), Err(EmissionError::Empty { first_index: 0 }));
    }

    /// A window of the true answer, or one with a false token.
    #[derive(Clone, Debug)]
    struct Event {
        first: u32,
        count: u32,
        lie_at: Option<u32>,
    }

    fn event() -> impl Strategy<Value = Event> {
        (0u32..40, 0u32..8, proptest::option::weighted(0.1, 0u32..8))
            .prop_map(|(first, count, lie_at)| Event { first, count, lie_at })
    }

    proptest! {
        /// Tests events in any order, with overlaps, repetitions and false tokens: the emitted
        /// tokens are a prefix of the true answer, each index once, unless a false token was the
        /// first for its index.
        #[test]
        fn each_index_is_emitted_once(events in proptest::collection::vec(event(), 0..60)) {
            let truth = |index: u32| index * 31 % 97;
            let mut emitted = EmittedTokens::new(32, 200);
            let mut shown: Vec<u32> = Vec::new();
            for Event { first, count, lie_at } in events {
                let offered: Vec<u32> = (0..count)
                    .map(|offset| match lie_at {
                        Some(lie) if lie == offset && first + offset < shown.len() as u32 => {
                            shown[(first + offset) as usize] + 100
                        }
                        _ => truth(first + offset),
                    })
                    .collect();
                let lies = lie_at
                    .is_some_and(|lie| lie < count && ((first + lie) as usize) < shown.len());
                let before = emitted.ids().to_vec();
                match emitted.accept(first, tokens(&offered)) {
                    Ok((index, new)) => {
                        prop_assert!(!lies && count > 0);
                        prop_assert_eq!(index as usize, shown.len());
                        shown.extend(ids(&new));
                    }
                    Err(_) => {
                        let gap = first as usize > shown.len();
                        prop_assert!(lies || gap || count == 0 || first + count > 32);
                        prop_assert_eq!(emitted.ids(), before.as_slice());
                    }
                }
                prop_assert_eq!(emitted.ids(), shown.as_slice());
                prop_assert!(shown.iter().zip(0..).all(|(&id, index)| id == truth(index)));
            }
        }
    }
}
