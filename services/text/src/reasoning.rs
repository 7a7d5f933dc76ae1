//! Reasoning in the text of an answer.
//!
//! A reasoning model writes a thought between two marks before its answer. Each format of marks is one file of this
//! module and one entry of [`FORMATS`]. [`ReasoningParser`] separates the thought from the rest of streamed text.

mod parser;
mod think;

pub use parser::{ReasoningParser, SplitText};

use crate::tokenizer::Tokenizer;

/// Every known format. A template is matched in this order.
const FORMATS: [&ReasoningFormat; 1] = [&think::FORMAT];

/// Format of a model's reasoning.
#[derive(Debug, PartialEq, Eq)]
pub struct ReasoningFormat {
    pub name: &'static str,
    /// Mark that begins a thought.
    open: &'static str,
    /// Mark that ends a thought.
    close: &'static str,
}

impl ReasoningFormat {
    /// Returns the format that a chat template renders or removes, if known.
    pub(crate) fn of_template(source: &str) -> Option<&'static Self> {
        FORMATS.into_iter().find(|format| source.contains(format.close))
    }

    /// Returns whether an answer to this prompt begins within a thought: some templates write the opening mark
    /// themselves.
    pub fn is_opened_by(&self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.open)
    }

    /// Returns whether the beginning of an answer ends within a thought.
    pub fn is_open_in(&self, answer: &str) -> bool {
        answer.rfind(self.open).is_some_and(|open| !answer[open..].contains(self.close))
    }

    /// Returns the token that ends a thought, if one token does.
    pub fn closing_token(&self, tokenizer: &Tokenizer) -> Option<u32> {
        tokenizer.token_id(self.close)
    }

    /// Returns the special tokens that must become text: marks that are special tokens of the vocabulary.
    pub fn shown_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let ids = [self.open, self.close].into_iter().filter_map(|mark| tokenizer.token_id(mark));
        ids.filter(|&id| tokenizer.is_special(id)).collect()
    }
}
