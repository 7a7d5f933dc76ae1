//! Settings that name a format of a model's output. Crate `text` lists the formats.

use std::fmt;

use text::{ReasoningChoice, ReasoningFormat, ToolFormat};

use super::choice::alternatives;
use crate::value::values;

/// Format of tool calls: a word of [`Self::words`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToolFormatName(&'static str);

/// Format of reasoning: a word of [`Self::words`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReasoningFormatName(&'static str);

impl ToolFormatName {
    /// The format that the chat template asks for.
    pub const AUTO: Self = Self("auto");

    fn words() -> Vec<&'static str> {
        let mut names: Vec<_> = ToolFormat::all().map(|format| format.name).collect();
        names.sort_unstable();
        [Self::AUTO.0].into_iter().chain(names).collect()
    }

    pub fn parse(text: &str) -> Option<Self> {
        Self::words().into_iter().find(|word| *word == text.trim()).map(Self)
    }

    /// Returns the format; `None` for the one that the chat template asks for.
    pub fn format(self) -> Option<&'static ToolFormat> {
        ToolFormat::named(self.0)
    }
}

impl ReasoningFormatName {
    /// The format whose tags the chat template has.
    pub const AUTO: Self = Self("auto");
    const OFF: Self = Self("none");

    fn words() -> Vec<&'static str> {
        let names = ReasoningFormat::all().map(|format| format.name);
        [Self::AUTO.0, Self::OFF.0].into_iter().chain(names).collect()
    }

    pub fn parse(text: &str) -> Option<Self> {
        Self::words().into_iter().find(|word| *word == text.trim()).map(Self)
    }

    pub fn choice(self) -> ReasoningChoice {
        match ReasoningFormat::named(self.0) {
            Some(format) => ReasoningChoice::Format(format),
            None if self == Self::OFF => ReasoningChoice::Off,
            None => ReasoningChoice::Auto,
        }
    }
}

impl fmt::Display for ToolFormatName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl fmt::Display for ReasoningFormatName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

values! {
    ToolFormatName: "WORD", alternatives(&Self::words()), Self::parse,
        serde_json::json!({"enum": Self::words()});
    ReasoningFormatName: "WORD", alternatives(&Self::words()), Self::parse,
        serde_json::json!({"enum": Self::words()});
}
