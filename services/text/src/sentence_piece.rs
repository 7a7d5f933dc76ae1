//! SentencePiece's byte-pair encoding: repeatedly merges the adjacent pair whose text is the token
//! with the highest score.
//!
//! Pairs are looked up by their text, as in SentencePiece and llama.cpp. A merge list made from the
//! scores would not work: it cannot contain tokens whose parts are not tokens, it would rank the
//! several ways to one token, which are equal here, and it would cost as much memory as the
//! vocabulary.

use std::{collections::HashMap, sync::Arc};

use crate::{
    error::VocabularyError,
    merging::Merging,
    vocabulary::{NO_ID, Vocabulary, byte_ids},
};

/// Character that represents a space within tokens.
pub(crate) const SPACE: char = '▁';
/// Maximum bytes of a token. The longest in use have about 100 bytes. Bounds the cost of looking up
/// one pair.
const TOKEN_BYTES_MAX: usize = 1024;

/// Properties of a vocabulary's tokens in addition to their text.
#[derive(Debug, Default)]
pub(crate) struct PieceOptions {
    /// Scores by id; none is NaN.
    pub scores: Vec<f32>,
    /// Ids that merges never produce: control tokens, byte tokens, the unknown token.
    pub never_merged: Vec<u32>,
    /// Ids of unused tokens, which are produced by merges and then split again.
    pub unused: Vec<u32>,
    /// Token for characters that neither tokens nor bytes can spell.
    pub unknown_id: Option<u32>,
    /// Whether a text, and text after an added token, gets a leading space.
    pub add_space_prefix: bool,
}

#[derive(Debug)]
pub(crate) struct PieceModel {
    vocabulary: Arc<Vocabulary>,
    /// Merge order by id; higher values merge first, 0 never.
    order: Box<[u32]>,
    /// Bytes of the longest token that merges produce.
    longest: usize,
    /// Ids of `<0x00>` to `<0xFF>`.
    byte_ids: Box<[u32; 256]>,
    unknown_id: Option<u32>,
    /// Sorted.
    unused: Vec<u32>,
    add_space_prefix: bool,
    /// Whether no token has a space after another character, so that words are merged separately.
    merges_within_words: bool,
}

impl PieceModel {
    pub(crate) fn new(
        vocabulary: Arc<Vocabulary>,
        mut options: PieceOptions,
    ) -> Result<Self, VocabularyError> {
        let size = vocabulary.size() as usize;
        let mut order = vec![0; size].into_boxed_slice();
        for (place, score) in order.iter_mut().zip(&options.scores) {
            *place = ascending(*score);
        }
        let byte_ids = byte_ids(|token| vocabulary.id(token));
        let bytes = byte_ids.iter().filter(|id| **id != NO_ID);
        for &id in bytes.chain(&options.never_merged) {
            order[id as usize] = 0;
        }
        if options.unknown_id.is_none()
            && let Some(byte) = byte_ids.iter().position(|id| *id == NO_ID)
        {
            return Err(VocabularyError::NoUnknownToken { byte: byte as u8 });
        }
        let (mut longest, mut merges_within_words) = (0, true);
        for (id, _) in (0..).zip(&order).filter(|(_, order)| **order != 0) {
            let Some(token) = vocabulary.string(id) else { continue };
            if token.len() > TOKEN_BYTES_MAX {
                let (bytes, max) = (token.len(), TOKEN_BYTES_MAX);
                return Err(VocabularyError::TokenTooLong { id, bytes, max });
            }
            longest = longest.max(token.len());
            merges_within_words &= !token.trim_start_matches(SPACE).contains(SPACE);
        }
        options.unused.sort_unstable();
        Ok(Self {
            vocabulary,
            order,
            longest,
            byte_ids,
            unknown_id: options.unknown_id,
            unused: options.unused,
            add_space_prefix: options.add_space_prefix,
            merges_within_words,
        })
    }

    /// Returns whether a token may represent text of any length.
    pub(crate) fn has_unbounded_tokens(&self) -> bool {
        self.byte_ids.contains(&NO_ID)
    }

    /// Appends the ids of `text`, which contains no added tokens. `begins` says that it begins the
    /// whole text or follows an added token.
    pub(crate) fn encode(&self, text: &str, begins: bool, ids: &mut Vec<u32>) {
        if text.is_empty() {
            return;
        }
        let mut escaped = String::with_capacity(text.len() + text.len() / 2 + SPACE.len_utf8());
        if begins && self.add_space_prefix {
            escaped.push(SPACE);
        }
        escaped.extend(text.chars().map(|char| if char == ' ' { SPACE } else { char }));
        let mut state = EncodingState::default();
        let mut rest = escaped.as_str();
        while !rest.is_empty() {
            let (word, after) = rest.split_at(self.first_word(rest));
            self.encode_word(word, &mut state, ids);
            rest = after;
        }
    }

    /// Returns the end of the first part of `text` that cannot merge with the following text.
    fn first_word(&self, text: &str) -> usize {
        if !self.merges_within_words {
            return text.len();
        }
        let spaces = text.len() - text.trim_start_matches(SPACE).len();
        text[spaces..].find(SPACE).map_or(text.len(), |end| spaces + end)
    }

    /// Returns the token that equals `text`, if merges may produce it.
    fn token(&self, text: &str) -> Option<u32> {
        if text.len() > self.longest {
            return None;
        }
        self.vocabulary.id(text).filter(|id| self.order[*id as usize] != 0)
    }

    fn encode_word(&self, word: &str, state: &mut EncodingState, ids: &mut Vec<u32>) {
        let EncodingState { merging, halves, after_unknown } = state;
        merging.clear();
        for (at, char) in word.char_indices() {
            let len = char.len_utf8();
            merging.push(self.token(&word[at..at + len]).unwrap_or(NO_ID), len as u32);
        }
        merging.run(|left, right| {
            let text = &word[left.start as usize..][..(left.len + right.len) as usize];
            let id = self.token(text)?;
            if self.is_unused(id) {
                halves.insert(id, left.len);
            }
            Some((self.order[id as usize], id))
        });
        for symbol in merging.merged() {
            if symbol.id != NO_ID && !self.is_unused(symbol.id) {
                ids.push(symbol.id);
                *after_unknown = false;
            } else {
                let text = &word[symbol.start as usize..][..symbol.len as usize];
                self.split_unknown(text, symbol.id, halves, after_unknown, ids);
            }
        }
    }

    fn is_unused(&self, id: u32) -> bool {
        self.unused.binary_search(&id).is_ok()
    }

    /// Appends the ids of text that is not a token, or is an unused token: the ids of its halves,
    /// of its bytes, or the unknown token, which represents all adjacent unknown characters.
    fn split_unknown(
        &self,
        text: &str,
        id: u32,
        halves: &HashMap<u32, u32>,
        after_unknown: &mut bool,
        ids: &mut Vec<u32>,
    ) {
        let mut parts = vec![(text, id)];
        while let Some((text, id)) = parts.pop() {
            if id != NO_ID && !self.is_unused(id) {
                ids.push(id);
                *after_unknown = false;
            } else if let Some(&bytes) = halves.get(&id) {
                let (first, second) = text.split_at(bytes as usize);
                parts.extend([second, first].map(|half| (half, self.token(half).unwrap_or(NO_ID))));
            } else {
                self.spell(text, after_unknown, ids);
            }
        }
    }

    fn spell(&self, text: &str, after_unknown: &mut bool, ids: &mut Vec<u32>) {
        let id_of = |byte: u8| self.byte_ids[usize::from(byte)];
        if text.bytes().all(|byte| id_of(byte) != NO_ID) {
            ids.extend(text.bytes().map(id_of));
            *after_unknown = false;
        } else if !*after_unknown {
            ids.extend(self.unknown_id);
            *after_unknown = true;
        }
    }
}

/// Returns an integer that orders like the score; never 0.
fn ascending(score: f32) -> u32 {
    // Positive and negative zero are equal scores.
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
}

/// State of encoding one text.
#[derive(Debug, Default)]
struct EncodingState {
    merging: Merging,
    /// Bytes of the first half, by unused token.
    halves: HashMap<u32, u32>,
    after_unknown: bool,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::packed::PackedStrings;

    const BYTES: [&str; 3] = ["<0xC3>", "<0xA9>", "<0x41>"];

    fn model(tokens: &[(&str, f32)], options: PieceOptions) -> PieceModel {
        let mut strings = PackedStrings::default();
        assert!(tokens.iter().all(|(token, _)| strings.push(token)));
        let ids: Vec<u32> = (0..tokens.len() as u32).collect();
        let vocabulary = Arc::new(Vocabulary::new(&strings, &ids).unwrap());
        let scores = tokens.iter().map(|(_, score)| *score).collect();
        PieceModel::new(vocabulary, PieceOptions { scores, unknown_id: Some(0), ..options })
            .unwrap()
    }

    fn ids(model: &PieceModel, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        model.encode(text, true, &mut ids);
        ids
    }

    #[test]
    fn the_highest_score_merges_first_and_ties_from_the_left() {
        let tokens = [("?", 0.), ("a", -9.), ("b", -9.), ("aa", -2.), ("ab", -1.), ("aab", -3.)];
        let of = model(&tokens, PieceOptions::default());
        assert_eq!(ids(&of, "aab"), [5]);
        assert_eq!(ids(&of, "aaa"), [3, 1]);
        assert_eq!(ids(&of, "aaab"), [3, 4]);
        assert_eq!(ids(&of, ""), [0u32; 0]);
    }

    #[test]
    fn scores_are_ordered_and_signed_zeros_are_equal() {
        let tokens = [("?", 0.), ("a", -9.), ("b", -9.), ("ab", -0.), ("ba", 0.)];
        assert_eq!(ids(&model(&tokens, PieceOptions::default()), "aba"), [3, 1]);
        assert!(ascending(f32::NEG_INFINITY) > 0);
        assert!(ascending(-1.) < ascending(-0.5) && ascending(-0.5) < ascending(0.));
        assert!(ascending(0.) < ascending(0.5) && ascending(0.5) < ascending(f32::INFINITY));
    }

    #[test]
    fn substrings_of_a_token_need_not_be_tokens() {
        let tokens = [("?", 0.), ("bc", -1.), ("abc", -2.)];
        let of = model(&tokens, PieceOptions::default());
        assert_eq!(ids(&of, "abc"), [2]);
        assert_eq!(ids(&of, "ab"), [0], "unknown characters in a row are one");
        assert_eq!(ids(&of, "abcb"), [2, 0]);
    }

    #[test]
    fn byte_tokens_spell_unknown_text_and_are_never_merge_results() {
        let mut tokens = vec![("?", 0.), ("a", -1.), ("<0x4", 0.), ("1>", 0.), ("<", 0.)];
        tokens.extend(["0", "x", "4", "1", ">", "<0", "<0x"].map(|token| (token, 0.)));
        tokens.extend(BYTES.map(|token| (token, 5.)));
        let of = model(&tokens, PieceOptions::default());
        assert_eq!(ids(&of, "aéAa"), [1, 12, 13, 14, 1]);
        assert_eq!(ids(&of, "ê"), [0], "one of its bytes is no token");
        assert_eq!(ids(&of, "<0x41>"), [2, 3]);
    }

    #[test]
    fn unused_tokens_are_split_again() {
        let tokens = [("?", 0.), ("a", -9.), ("b", -9.), ("ab", -1.), ("abab", -2.), ("c", -1.)];
        let of = model(&tokens, PieceOptions { unused: vec![4, 5], ..Default::default() });
        assert_eq!(ids(&of, "abab"), [3, 3]);
        let of = model(&tokens, PieceOptions { unused: vec![3, 4, 5], ..Default::default() });
        assert_eq!(ids(&of, "ababc"), [1, 2, 1, 2, 0]);
    }

    #[test]
    fn spaces_become_the_space_mark_with_one_in_front() {
        let tokens = [("?", 0.), ("▁", -3.), ("a", -3.), ("▁a", -1.), ("▁▁", -2.)];
        let with = model(&tokens, PieceOptions { add_space_prefix: true, ..Default::default() });
        assert_eq!(ids(&with, "a"), [3]);
        assert_eq!(ids(&with, " a"), [1, 3]);
        assert_eq!(ids(&with, " "), [4]);
        let mut inside = Vec::new();
        with.encode("a", false, &mut inside);
        assert_eq!(inside, [2]);
        assert_eq!(ids(&model(&tokens, PieceOptions::default()), "a a"), [2, 3]);
    }

    #[test]
    fn oversized_tokens_and_unencodable_texts_are_rejected() {
        let new = |token: &str, unknown_id| {
            let mut strings = PackedStrings::default();
            assert!(strings.push(token));
            let vocabulary = Arc::new(Vocabulary::new(&strings, &[0]).unwrap());
            let options = PieceOptions { scores: vec![0.], unknown_id, ..Default::default() };
            PieceModel::new(vocabulary, options).map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(new(&"a".repeat(1024), Some(0)), Ok(()));
        let error = "token 0 has 1025 bytes; non-control tokens have at most 1024";
        assert_eq!(new(&"a".repeat(1025), Some(0)), Err(error.to_owned()));
        let error = "there is neither a token <0x00> nor an unknown token: some texts have no ids";
        assert_eq!(new("a", None), Err(error.to_owned()));
    }

    /// Encodes like the encoder under test, but examines all pairs repeatedly.
    fn plainly(tokens: &[(String, f32)], text: &str) -> Vec<u32> {
        let find = |text: &str| tokens.iter().position(|(token, _)| token == text);
        let mut parts: Vec<String> = text.chars().map(String::from).collect();
        loop {
            let score = |at: usize| Some(tokens[find(&parts[at..at + 2].concat())?].1);
            let best = (1..parts.len()).filter_map(|at| Some((at - 1, score(at - 1)?))).fold(
                None,
                |best: Option<(usize, f32)>, next| match best {
                    Some(best) if best.1 >= next.1 => Some(best),
                    _ => Some(next),
                },
            );
            let Some((at, _)) = best else { break };
            let right = parts.remove(at + 1);
            parts[at].push_str(&right);
        }
        let mut ids: Vec<u32> = Vec::new();
        let mut after_unknown = false;
        for part in parts {
            let id = find(&part);
            if id.is_some() || !after_unknown {
                ids.push(id.unwrap_or(0) as u32);
            }
            after_unknown = id.is_none();
        }
        ids
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn fast_merging_equals_the_reference_over_all_pairs(
            words in prop::collection::btree_map("▁{0,2}[abcé]{0,3}", 0u8..6, 0..24),
            across in prop::option::of("[ab]▁[ab]?"),
            text in "[▁abcéx]{0,24}",
        ) {
            let mut tokens = vec![("<unk>".to_owned(), 0.)];
            let words = words.into_iter().chain(across.map(|token| (token, 3)));
            for (token, score) in words.filter(|(token, _)| !token.is_empty()) {
                if tokens.iter().all(|(other, _)| *other != token) {
                    tokens.push((token, -f32::from(score)));
                }
            }
            let listed: Vec<(&str, f32)> =
                tokens.iter().map(|(token, score)| (token.as_str(), *score)).collect();
            let never_merged = vec![0];
            let of = model(&listed, PieceOptions { never_merged, ..Default::default() });
            prop_assert_eq!(ids(&of, &text), plainly(&tokens, &text));
        }
    }
}
