//! Vocabulary of a SentencePiece model, with scores instead of merges.

use std::collections::HashMap;

use super::{GgufVocabulary, SCORES, TOKENS, token_type};
use crate::{
    decoding::{Decoding, byte_token},
    error::{LoadError, VocabularyError},
    sentence_piece::{PieceOptions, SPACE},
    tokenizer::{TokenizerParts, WordModelParts},
};

/// SentencePiece's default ids, for files that name none.
const UNKNOWN_ID: u32 = 0;
pub(super) const BOS_ID: u32 = 1;
pub(super) const EOS_ID: u32 = 2;

impl GgufVocabulary<'_> {
    pub(super) fn pieces(
        &self,
        tokens: &[String],
        types: Option<&[i32]>,
        parts: &mut TokenizerParts,
    ) -> Result<(), LoadError> {
        self.reject_duplicates(tokens)?;
        let add_space_prefix = self.get("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        parts.decoding = Decoding::Pieces {
            replacements: vec![(SPACE.to_string(), " ".to_owned())],
            byte_fallback: true,
            strip_start: add_space_prefix.then_some((' ', 1)),
            keeps_added: true,
        };
        let of_type = |wanted: &[i32]| -> Vec<u32> {
            let types = (0..).zip(types.into_iter().flatten());
            types.filter(|(_, kind)| wanted.contains(kind)).map(|(id, _)| id).collect()
        };
        for id in of_type(&[token_type::BYTE]) {
            let token = &tokens[id as usize];
            if byte_token(token).is_none() {
                let problem = format!(
                    "entry {id} is {} (a byte), but the token is {token:?}, not <0x00> to <0xFF>",
                    token_type::BYTE
                );
                return Err(self.invalid(super::TOKEN_TYPES, problem));
            }
        }
        let mut never_merged = of_type(&[token_type::UNKNOWN, token_type::CONTROL]);
        // A file without types names a few tokens.
        never_merged
            .extend(parts.added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id));
        let unknown_id = match self.token_id(super::UNKNOWN_KEY, tokens)? {
            Some(id) => Some(id),
            None => of_type(&[token_type::UNKNOWN]).into_iter().find(|id| *id == UNKNOWN_ID),
        };
        never_merged.extend(unknown_id);
        parts.model = WordModelParts::Pieces(PieceOptions {
            scores: self.scores(tokens)?,
            never_merged,
            unused: of_type(&[token_type::UNUSED]),
            unknown_id,
            add_space_prefix,
        });
        Ok(())
    }

    fn scores(&self, tokens: &[String]) -> Result<Vec<f32>, LoadError> {
        let scores: &[f32] = self.require(SCORES)?;
        if scores.len() != tokens.len() {
            let problem = format!("has {} entries, {TOKENS} has {}", scores.len(), tokens.len());
            return Err(self.invalid(SCORES, problem));
        }
        match scores.iter().position(|score| score.is_nan()) {
            Some(id) => Err(self.invalid(SCORES, format!("entry {id} is not a number"))),
            None => Ok(scores.to_vec()),
        }
    }

    /// Rejects equal tokens: merges look up tokens by their text, so each text must be unique.
    fn reject_duplicates(&self, tokens: &[String]) -> Result<(), LoadError> {
        let mut seen = HashMap::with_capacity(tokens.len());
        for (id, token) in (0..).zip(tokens).filter(|(_, token)| !token.is_empty()) {
            if let Some(first) = seen.insert(token.as_str(), id) {
                let token = token.clone();
                return Err(self
                    .vocabulary(TOKENS, VocabularyError::TokenTwice { first, second: id, token }));
            }
        }
        Ok(())
    }
}
