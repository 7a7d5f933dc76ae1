//! Reasoning in the text of an answer.
//!
//! A reasoning model writes its reasoning between two tags before its answer. Each pair of tags is
//! one file of this module and one entry of [`FORMATS`]. [`ReasoningParser`] separates the
//! reasoning from the rest of streamed text.

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
    /// Models that reason in this format.
    pub models: &'static str,
    /// Tag that begins the reasoning.
    pub open: &'static str,
    /// Tag that ends the reasoning.
    pub close: &'static str,
}

/// Choice of a model's format of reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningChoice {
    /// The format whose tags the chat template has.
    #[default]
    Auto,
    /// Reasoning stays in the content.
    Off,
    Format(&'static ReasoningFormat),
}

/// State of the reasoning parser before the first generated token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningStart {
    /// At the beginning, where reasoning may begin.
    #[default]
    Undecided,
    /// Within the reasoning.
    Reasoning,
    /// After the reasoning.
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

    /// Returns whether `text` is a tag of any format.
    pub fn is_tag(text: &[u8]) -> bool {
        Self::all().any(|it| [it.open, it.close].iter().any(|tag| tag.as_bytes() == text))
    }

    /// Returns the format that a chat template renders or removes, if known.
    pub(crate) fn of_template(source: &str) -> Option<&'static Self> {
        Self::all().find(|format| source.contains(format.close))
    }

    /// Returns the state after the rendered prompt: some templates end it with the opening tag, or
    /// with both tags if reasoning is turned off.
    pub fn start_after(&self, prompt: &str) -> ReasoningStart {
        let prompt = prompt.trim_end();
        match () {
            () if prompt.ends_with(self.open) => ReasoningStart::Reasoning,
            () if prompt.ends_with(self.close) => ReasoningStart::Answer,
            () => ReasoningStart::Undecided,
        }
    }

    /// Returns the state after `answer`, the message that generation continues.
    pub fn start_within(&self, answer: &str) -> ReasoningStart {
        let is_open =
            answer.rfind(self.open).is_some_and(|open| !answer[open..].contains(self.close));
        if is_open { ReasoningStart::Reasoning } else { ReasoningStart::Answer }
    }

    /// Returns the token that ends the reasoning, if one token does.
    pub fn closing_token(&self, tokenizer: &Tokenizer) -> Option<u32> {
        tokenizer.token_id(self.close)
    }

    /// Returns the tags that are special tokens: they become text even if the request skips special
    /// tokens, because the parser needs them.
    pub fn shown_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let ids = [self.open, self.close].into_iter().filter_map(|tag| tokenizer.token_id(tag));
        ids.filter(|&id| tokenizer.is_special(id)).collect()
    }
}
