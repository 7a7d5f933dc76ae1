//! Reasoning in the text of an answer.
//!
//! A reasoning model generates its reasoning between two tags before its answer, or in separate
//! messages. Each format is one file of this module and one entry of [`FORMATS`].
//! [`ReasoningParser`] separates the reasoning from the rest of streamed text.

mod harmony;
mod mistral_think;
mod seed_think;
mod tag_parser;
mod think;

use self::{harmony::MessageParser, tag_parser::TagParser};
use crate::{stream::HeaderTokens, tokenizer::Tokenizer};

/// Every known format. A template is matched in this order.
static FORMATS: [ReasoningFormat; 4] =
    [think::FORMAT, mistral_think::FORMAT, seed_think::FORMAT, harmony::FORMAT];

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
    /// Text between the reasoning and an answer that is not a tool call.
    pub before_answer: &'static str,
    /// Tags that a grammar forbids within the reasoning, because they end the reasoning.
    pub never_within: &'static [&'static str],
    /// Text by which a chat template of this format is recognised.
    in_template: &'static str,
    /// Tags that may be special tokens.
    tags: &'static [&'static str],
    syntax: ReasoningSyntax,
}

#[derive(Debug, PartialEq, Eq)]
enum ReasoningSyntax {
    /// Reasoning between tags at the beginning of an answer.
    Tags,
    /// Reasoning, content and calls in messages of harmony.
    Messages,
}

/// Parser of one answer.
///
/// Lifecycle: [`push`](Self::push) for each piece of text, then [`finish`](Self::finish).
#[derive(Clone, Debug)]
pub struct ReasoningParser(FormatParser);

#[derive(Clone, Debug)]
enum FormatParser {
    Tags(TagParser),
    Messages(MessageParser),
}

/// Text that is final after a piece: reasoning, then a part of the rest of the answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SplitText {
    pub reasoning: String,
    pub rest: String,
}

impl SplitText {
    pub fn of_reasoning(text: String) -> Self {
        Self { reasoning: text, rest: String::new() }
    }

    pub fn of_rest(text: String) -> Self {
        Self { reasoning: String::new(), rest: text }
    }
}

/// Choice of a model's format of reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningChoice {
    /// The format whose tags the chat template contains.
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
        Self::all().any(|format| format.tags.iter().any(|tag| tag.as_bytes() == text))
    }

    /// Returns the format that a chat template renders or removes, if known.
    pub(crate) fn of_template(source: &str) -> Option<&'static Self> {
        Self::all().find(|format| source.contains(format.in_template))
    }

    /// Returns the state after the rendered prompt: some templates end it with the opening tag, or
    /// with both tags if reasoning is turned off.
    pub fn start_after(&self, prompt: &str) -> ReasoningStart {
        let prompt = prompt.trim_end();
        match () {
            () if prompt.ends_with(self.open) => ReasoningStart::Reasoning,
            () if prompt.ends_with(&(self.close.to_owned() + self.before_answer)) => {
                ReasoningStart::Answer
            }
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

    /// Returns the tags that are special tokens. These tokens become text even if the request skips
    /// special tokens, because the parser needs the tags.
    pub fn shown_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let ids = self.tags.iter().filter_map(|tag| tokenizer.token_id(tag));
        ids.filter(|&id| tokenizer.is_special(id)).collect()
    }

    /// Returns the tokens that begin and end the headers of messages, for an answer that begins at
    /// `start`. Returns `None` if the format has no messages.
    pub fn header_tokens(
        &self,
        tokenizer: &Tokenizer,
        start: ReasoningStart,
    ) -> Option<HeaderTokens> {
        match self.syntax {
            ReasoningSyntax::Tags => None,
            ReasoningSyntax::Messages => harmony::header_tokens(tokenizer, start),
        }
    }
}

impl ReasoningParser {
    /// Creates the parser of an answer that begins at `start`.
    pub fn new(format: &'static ReasoningFormat, start: ReasoningStart) -> Self {
        Self(match format.syntax {
            ReasoningSyntax::Tags => FormatParser::Tags(TagParser::new(format, start)),
            ReasoningSyntax::Messages => FormatParser::Messages(MessageParser::new(start)),
        })
    }

    /// Returns whether the next text may begin reasoning.
    pub fn is_undecided(&self) -> bool {
        match &self.0 {
            FormatParser::Tags(parser) => parser.is_undecided(),
            FormatParser::Messages(parser) => parser.is_in_header(),
        }
    }

    /// Returns whether the text so far ends within the reasoning.
    pub fn is_thinking(&self) -> bool {
        match &self.0 {
            FormatParser::Tags(parser) => parser.is_thinking(),
            FormatParser::Messages(parser) => parser.is_thinking(),
        }
    }

    /// Returns whether all further text belongs to the rest of the answer.
    pub fn is_done(&self) -> bool {
        match &self.0 {
            FormatParser::Tags(parser) => parser.is_done(),
            FormatParser::Messages(_) => false,
        }
    }

    /// Processes the next piece of text and appends its final text.
    pub fn push(&mut self, text: String, out: &mut Vec<SplitText>) {
        match &mut self.0 {
            FormatParser::Tags(parser) => out.push(parser.push(text)),
            FormatParser::Messages(parser) => parser.push(text, out),
        }
    }

    /// Ends the answer and appends the text that was held back.
    pub fn finish(self, out: &mut Vec<SplitText>) {
        match self.0 {
            FormatParser::Tags(parser) => out.push(parser.finish()),
            FormatParser::Messages(parser) => parser.finish(out),
        }
    }
}

/// Returns the length in bytes of the longest suffix of `text` that is a prefix of `tag`, but not
/// the whole tag.
fn partial_tag(text: &str, tag: &str) -> usize {
    let lengths = tag.char_indices().map(|(length, _)| length);
    lengths.filter(|&length| text.ends_with(&tag[..length])).max().unwrap_or(0)
}
