//! Tokenizer: encodes text to token ids and decodes ids to text.

use std::{mem::take, ops::Range, sync::Arc};

use tokenizers::{
    AddedToken, AddedVocabulary, NormalizerWrapper, OffsetReferential, OffsetType, PreTokenizer,
    PreTokenizerWrapper,
};

use crate::{
    byte_pair::{BytePairModel, BytePairOptions},
    decoding::{Decoding, TokenBytes},
    detokenizer::{Detokenizer, DetokenizerOptions},
    error::VocabularyError,
    literal::{MARK, SpellingFinder},
    packed::PackedStrings,
    pipeline::PipelineModel,
    sentence_piece::{PieceModel, PieceOptions, SPACE},
    vocabulary::Vocabulary,
};

/// Maximum bytes of text encoded in one call. Encoding takes about 125 times the text's size in
/// memory, so callers also bound the number of long texts encoded at once.
pub const TEXT_BYTES_MAX: usize = 4 << 20;

/// Handling of text that spells a special token, such as `<|im_end|>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// The text becomes the special token. Used for rendered chat templates, whose control tokens
    /// are text, and, as in vLLM, for prompts of `/v1/completions`.
    Parse,
    /// The text becomes ordinary tokens that decode to the same text; no returned id satisfies
    /// [`is_special`](Tokenizer::is_special).
    AsText,
}

/// Error of encoding a text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    #[error("the text has {bytes} bytes; at most {TEXT_BYTES_MAX} are encoded")]
    TooLong { bytes: usize },
    /// The model's own normalizer or pre-tokenizer rejects the text.
    #[error("the model's tokenizer cannot split the text: {reason}")]
    Pipeline { reason: String },
}

/// Tokenizer of one model. Immutable; share it by [`Arc`].
///
/// Encoding costs CPU time in proportion to the text, a second or more per megabyte. Callers on an
/// async runtime encode long texts on blocking threads.
pub struct Tokenizer {
    vocabulary: Arc<Vocabulary>,
    bytes: TokenBytes,
    model: WordModel,
    added: AddedVocabulary,
    /// The added vocabulary with special tokens switched off.
    added_as_text: AddedVocabulary,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    special: Vec<u32>,
    /// `None` without special tokens.
    spellings: Option<SpellingFinder>,
    prompt_prefix: Vec<u32>,
    prompt_suffix: Vec<u32>,
    bos_id: Option<u32>,
    eos_ids: Vec<u32>,
    strip_start: Option<(char, usize)>,
    /// Maximum bytes of text that one token can represent, if bounded.
    token_text_bytes_max: Option<usize>,
}

/// Model that encodes the text between added tokens.
enum WordModel {
    /// Encodes each word that normalizer and pre-tokenizer produce.
    BytePair(BytePairModel),
    /// Encodes the whole text at once.
    Pieces(PieceModel),
}

/// Inputs of a [`WordModel`].
pub(crate) enum WordModelParts {
    /// `merges` are pairs, as [`BytePairModel::new`] takes them.
    BytePair {
        merges: PackedStrings,
        options: BytePairOptions,
    },
    Pieces(PieceOptions),
}

impl Default for WordModelParts {
    fn default() -> Self {
        Self::BytePair { merges: PackedStrings::default(), options: BytePairOptions::default() }
    }
}

/// Inputs of a tokenizer, from either source.
#[derive(Default)]
pub(crate) struct TokenizerParts {
    /// Token strings in any order, with the id of each.
    pub strings: PackedStrings,
    pub ids: Vec<u32>,
    pub model: WordModelParts,
    /// Tokens recognized before the text is split, special or not, with the ids they get unless
    /// their string has an id already.
    pub added: Vec<(u32, AddedToken)>,
    /// Placeholders that represent no text.
    pub silent: Vec<u32>,
    pub normalizer: Option<NormalizerWrapper>,
    pub pre_tokenizer: Option<PreTokenizerWrapper>,
    pub decoding: Decoding,
    pub prompt_prefix: Vec<u32>,
    pub prompt_suffix: Vec<u32>,
    pub bos_id: Option<u32>,
    pub eos_ids: Vec<u32>,
}

impl TokenizerParts {
    /// Returns the vocabulary with the added tokens that it lacks, and the sorted ids of special
    /// tokens. Sorts `silent`, and frees the strings.
    pub(crate) fn take_vocabulary(&mut self) -> Result<(Vocabulary, Vec<u32>), VocabularyError> {
        let (mut strings, mut ids) = (take(&mut self.strings), take(&mut self.ids));
        let mut vocabulary = Vocabulary::new(&strings, &ids)?;
        let known = ids.len();
        for (id, token) in &self.added {
            if token.content.is_empty() || vocabulary.id(&token.content).is_some() {
                continue;
            }
            if let Some(other) = vocabulary.string(*id) {
                let (token, other) = (token.content.clone(), other.to_owned());
                return Err(VocabularyError::AddedTokenTakesId { id: *id, token, other });
            }
            ids.push(*id);
            if !strings.push(&token.content) {
                return Err(VocabularyError::TooLarge);
            }
        }
        if ids.len() > known {
            vocabulary = Vocabulary::new(&strings, &ids)?;
        }
        let special = self.added.iter().filter(|(_, token)| token.special);
        let special = special.filter_map(|(_, token)| vocabulary.id(&token.content));
        let mut special: Vec<u32> = special.collect();
        special.sort_unstable();
        self.silent.sort_unstable();
        Ok((vocabulary, special))
    }
}

impl Tokenizer {
    pub(crate) fn new(mut parts: TokenizerParts) -> Result<Self, VocabularyError> {
        let (vocabulary, special) = parts.take_vocabulary()?;
        let vocabulary = Arc::new(vocabulary);
        parts.eos_ids.sort_unstable();
        parts.eos_ids.dedup();
        let bos = parts.bos_id.map(|id| ("the bos token", id));
        let eos = parts.eos_ids.iter().map(|id| ("the eos token", *id));
        let frame = parts.prompt_prefix.iter().chain(&parts.prompt_suffix);
        let frame = frame.map(|id| ("a token around prompts", *id));
        for (name, id) in bos.into_iter().chain(eos).chain(frame) {
            if id >= vocabulary.size() {
                let size = vocabulary.size();
                return Err(VocabularyError::NoSuchId { name, id: id.into(), size });
            }
        }

        let model = match take(&mut parts.model) {
            WordModelParts::BytePair { merges, options } => WordModel::BytePair(
                BytePairModel::new(Arc::clone(&vocabulary), &merges, special.clone(), &options)?,
            ),
            WordModelParts::Pieces(options) => {
                WordModel::Pieces(PieceModel::new(Arc::clone(&vocabulary), options)?)
            }
        };
        let mut added = AddedVocabulary::new();
        let tokens = parts.added.into_iter().map(|(_, token)| token);
        added
            .add_tokens(tokens, &PipelineModel(&vocabulary), parts.normalizer.as_ref())
            .map_err(|reason| VocabularyError::AddedTokens { reason: reason.to_string() })?;
        let mut added_as_text = added.clone();
        added_as_text.set_encode_special_tokens(true);

        let decoding = parts.decoding;
        // The token may be stored in its normalized form.
        let added_form = |id| added.simple_id_to_token(id);
        let bytes = TokenBytes::new(&vocabulary, added_form, &decoding, &parts.silent)?;
        Ok(Self {
            token_text_bytes_max: token_text_bytes_max(
                bytes.longest(),
                &model,
                &added,
                parts.normalizer.as_ref(),
            ),
            bytes,
            model,
            added,
            added_as_text,
            normalizer: parts.normalizer,
            pre_tokenizer: parts.pre_tokenizer,
            spellings: SpellingFinder::new(special.iter().filter_map(|id| vocabulary.string(*id))),
            special,
            prompt_prefix: parts.prompt_prefix,
            prompt_suffix: parts.prompt_suffix,
            bos_id: parts.bos_id,
            eos_ids: parts.eos_ids,
            strip_start: match decoding {
                Decoding::ByteLevel => None,
                Decoding::Pieces { strip_start, .. } => strip_start,
            },
            vocabulary,
        })
    }

    /// Encodes `text` without BOS. Rendered chat templates contain their own BOS.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, EncodeError> {
        let mut ids = Vec::new();
        self.encode_to(text, special, &mut ids)?;
        Ok(ids)
    }

    /// Encodes a rendered chat template. Text that
    /// [`ChatTemplate::render`](crate::ChatTemplate::render) has marked stays text.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        let marks = text.matches(MARK).count();
        let Some(spellings) = self.spellings.as_ref().filter(|_| marks > 0) else {
            return self.encode(text, SpecialTokens::Parse);
        };
        if text.len() > TEXT_BYTES_MAX {
            return Err(EncodeError::TooLong { bytes: text.len() });
        }
        let (mut ids, mut begins) = (Vec::new(), true);
        let mut encode = |part: &str, special: SpecialTokens| {
            if !part.is_empty() {
                begins = self.encode_segment(part, special, begins, &mut ids)?;
            }
            Ok::<_, EncodeError>(())
        };
        // Text between two control tokens stays in one piece, because tokenizers add a space to
        // each piece.
        let mut between = String::new();
        for (index, segment) in text.split(MARK).enumerate() {
            let is_marked = index % 2 == 1;
            let Some(control) = spellings.range_in(segment).filter(|_| !is_marked) else {
                between.push_str(segment);
                continue;
            };
            let control = self.with_absorbed_space(segment, control);
            let start = if index == 0 { 0 } else { control.start };
            let end = if index == marks { segment.len() } else { control.end };
            between.push_str(&segment[..start]);
            encode(&between, SpecialTokens::AsText)?;
            encode(&segment[start..end], SpecialTokens::Parse)?;
            between.clear();
            between.push_str(&segment[end..]);
        }
        encode(&between, SpecialTokens::AsText)?;
        Ok(ids)
    }

    /// Extends the range of control tokens by the white space that the first and the last of them
    /// absorb.
    fn with_absorbed_space(&self, segment: &str, control: Range<usize>) -> Range<usize> {
        let Range { start, end } = control;
        let tokens = || self.added.get_added_tokens_decoder().values();
        let text = &segment[start..end];
        let absorbs_before = tokens().any(|token| token.lstrip && text.starts_with(&token.content));
        let absorbs_after = tokens().any(|token| token.rstrip && text.ends_with(&token.content));
        let start = if absorbs_before { segment[..start].trim_end().len() } else { start };
        let after = &segment[end..];
        let end = if absorbs_after { segment.len() - after.trim_start().len() } else { end };
        start..end
    }

    pub(crate) fn spellings(&self) -> Option<&SpellingFinder> {
        self.spellings.as_ref()
    }

    /// Encodes `text` with the tokens that the model requires around a prompt, usually BOS or none.
    /// Used for prompts of `/v1/completions`.
    pub fn encode_prompt(
        &self,
        text: &str,
        special: SpecialTokens,
    ) -> Result<Vec<u32>, EncodeError> {
        let mut ids = self.prompt_prefix.clone();
        self.encode_to(text, special, &mut ids)?;
        ids.extend_from_slice(&self.prompt_suffix);
        Ok(ids)
    }

    fn encode_to(
        &self,
        text: &str,
        special: SpecialTokens,
        ids: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(EncodeError::TooLong { bytes: text.len() });
        }
        self.encode_segment(text, special, true, ids).map(drop)
    }

    /// Encodes a part of a text; `begins` means at its beginning or after an added token. Returns
    /// this for the next part.
    fn encode_segment(
        &self,
        text: &str,
        special: SpecialTokens,
        mut begins: bool,
        ids: &mut Vec<u32>,
    ) -> Result<bool, EncodeError> {
        let added = match special {
            SpecialTokens::Parse => &self.added,
            SpecialTokens::AsText => &self.added_as_text,
        };
        let mut splits = added.extract_and_normalize(self.normalizer.as_ref(), text);
        if let Some(pre_tokenizer) = &self.pre_tokenizer {
            pre_tokenizer
                .pre_tokenize(&mut splits)
                .map_err(|reason| EncodeError::Pipeline { reason: reason.to_string() })?;
        }
        for (word, _, tokens) in splits.get_splits(OffsetReferential::Original, OffsetType::None) {
            match (tokens, &self.model) {
                (Some(tokens), _) => ids.extend(tokens.iter().map(|token| token.id)),
                (None, WordModel::BytePair(model)) => model.encode_word(word, ids),
                (None, WordModel::Pieces(model)) => model.encode(word, begins, ids),
            }
            begins = tokens.is_some();
        }
        Ok(begins)
    }

    /// Decodes `ids` as a separate text. Ids outside the vocabulary give no text; bytes that are
    /// not UTF-8 give U+FFFD.
    pub fn decode(self: &Arc<Self>, ids: &[u32], skip_special: bool) -> String {
        let options = DetokenizerOptions { skip_special, continues: false };
        let mut detokenizer = Detokenizer::new(Arc::clone(self), options);
        let mut text = String::new();
        for &id in ids {
            detokenizer.push_to(id, &mut text);
        }
        text + &detokenizer.finish()
    }

    /// Returns one token as separate text, with U+FFFD for incomplete characters; `None` outside
    /// the vocabulary.
    pub fn token_text(&self, id: u32) -> Option<String> {
        Some(String::from_utf8_lossy(self.token_bytes(id)?).into_owned())
    }

    /// Returns the bytes that a token represents; for a special token, its name. `None` outside the
    /// vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.bytes.get(id)
    }

    /// Returns a token as the vocabulary writes it, such as `Ġthe`. `None` for holes and outside
    /// the vocabulary.
    pub fn token_string(&self, id: u32) -> Option<&str> {
        self.vocabulary.string(id)
    }

    /// Returns the id of a token by its string in the vocabulary, such as `<|im_end|>`.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.vocabulary.id(token)
    }

    /// Returns the highest token id + 1. A model may have more rows.
    pub fn vocabulary_size(&self) -> u32 {
        self.vocabulary.size()
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.special.binary_search(&id).is_ok()
    }

    /// Returns the tokens that end an answer, in ascending order; may be empty.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    pub fn bos_id(&self) -> Option<u32> {
        self.bos_id
    }

    /// Returns a lower bound of the number of ids of `text`, at no cost. A text that is too long by
    /// this bound can be rejected without encoding.
    pub fn tokens_at_least(&self, text: &str) -> usize {
        match self.token_text_bytes_max {
            Some(bytes) => text.len().div_ceil(bytes),
            None => 0,
        }
    }

    pub(crate) fn strip_start(&self) -> Option<(char, usize)> {
        self.strip_start
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocabulary_size", &self.vocabulary_size())
            .field("eos_ids", &self.eos_ids)
            .finish_non_exhaustive()
    }
}

/// Returns the maximum bytes of text that one token can represent; `None` when unbounded.
fn token_text_bytes_max(
    longest_token: usize,
    model: &WordModel,
    added: &AddedVocabulary,
    normalizer: Option<&NormalizerWrapper>,
) -> Option<usize> {
    let shrinks_to_a = match normalizer {
        _ if matches!(model, WordModel::Pieces(model) if model.has_unbounded_tokens()) => {
            return None;
        }
        // The space mark has three bytes; in a text it is another spelling of a space.
        None if matches!(model, WordModel::Pieces(_)) => SPACE.len_utf8(),
        None => 1,
        // Three Hangul letters of three bytes compose to one syllable of three bytes; no other
        // composition shrinks more.
        Some(NormalizerWrapper::NFC(_)) => 3,
        Some(_) => return None,
    };
    // Such a token absorbs any amount of adjacent white space.
    let mut added = added.get_added_tokens_decoder().values();
    let bounded = longest_token > 0 && !added.any(|token| token.lstrip || token.rstrip);
    bounded.then_some(longest_token * shrinks_to_a)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_shareable<T: Send + Sync>() {}

    #[test]
    fn a_tokenizer_is_shared_between_threads() {
        assert_shareable::<Tokenizer>();
    }
}
