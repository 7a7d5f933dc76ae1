//! Reasoning in the text of an answer.
//!
//! A reasoning model writes a thought between two marks before its answer. Each format of marks is
//! one file of this module and one entry of [`FORMATS`]. [`ReasoningParser`] separates the thought
//! from the rest of streamed text.

mod mistral_think;
mod parser;
mod seed_think;
mod think;

pub use parser::{ReasoningParser, SplitText};

use crate::tokenizer::Tokenizer;

/// Every known format. A template is matched in this order.
static FORMATS: [ReasoningFormat; 3] = [think::FORMAT, mistral_think::FORMAT, seed_think::FORMAT];

/// Format of a model's reasoning.
#[derive(Debug, PartialEq, Eq)]
pub struct ReasoningFormat {
    pub name: &'static str,
    /// Models that write thoughts in this format.
    pub models: &'static str,
    /// Mark that begins a thought.
    pub open: &'static str,
    /// Mark that ends a thought.
    pub close: &'static str,
}

/// Choice of a model's format of reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningChoice {
    /// The format whose marks the chat template has.
    #[default]
    Auto,
    /// Reasoning stays in the content.
    Off,
    Format(&'static ReasoningFormat),
}

/// State of the reasoning parser before the first generated token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningStart {
    /// At the beginning, where a thought may begin.
    #[default]
    Undecided,
    /// Within a thought.
    Thought,
    /// After the thought.
    Answer,
}

impl ReasoningFormat {
    /// Returns all formats.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        FORMATS.iter()
    }

    pub fn named(name: &str) -> Option<&'static Self> {
        Self::all().find(|format| format.name == name)
    }

    /// Returns whether `text` is a mark of any format.
    pub fn is_mark(text: &[u8]) -> bool {
        Self::all().any(|it| [it.open, it.close].iter().any(|mark| mark.as_bytes() == text))
    }

    /// Returns the format that a chat template renders or removes, if known.
    pub(crate) fn of_template(source: &str) -> Option<&'static Self> {
        Self::all().find(|format| source.contains(format.close))
    }

    /// Returns the state after the rendered prompt: some templates end it with the opening mark, or
    /// with both marks if reasoning is turned off.
    pub fn start_after(&self, prompt: &str) -> ReasoningStart {
        let prompt = prompt.trim_end();
        match () {
            () if prompt.ends_with(self.open) => ReasoningStart::Thought,
            () if prompt.ends_with(self.close) => ReasoningStart::Answer,
            () => ReasoningStart::Undecided,
        }
    }

    /// Returns the state after `answer`, the message that generation continues.
    pub fn start_within(&self, answer: &str) -> ReasoningStart {
        let is_open =
            answer.rfind(self.open).is_some_and(|open| !answer[open..].contains(self.close));
        if is_open { ReasoningStart::Thought } else { ReasoningStart::Answer }
    }

    /// Returns the token that ends a thought, if one token does.
    pub fn closing_token(&self, tokenizer: &Tokenizer) -> Option<u32> {
        tokenizer.token_id(self.close)
    }

    /// Returns the marks that are special tokens: they become text even if the request skips special
    /// tokens, because the parser needs them.
    pub fn shown_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let ids = [self.open, self.close].into_iter().filter_map(|mark| tokenizer.token_id(mark));
        ids.filter(|&id| tokenizer.is_special(id)).collect()
    }
}
