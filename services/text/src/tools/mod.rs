//! Calls of tools in the text of an answer.
//!
//! Models write calls as text, each family in its own way ([`ToolFormat`]). [`ToolParser`] takes the
//! text as it comes and tells calls from content. It leaves out what models cannot be held to without
//! a grammar: that a call is made at all, and that its arguments fit the tool's schema.

mod json_object;
mod parser;

pub use parser::{ToolCall, ToolParser, ToolPiece};

use crate::tokenizer::Tokenizer;

const PYTHON_TAG: &str = "<|python_tag|>";
const CALL_START: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";

/// How a model writes its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after another, with text
    /// before, between or behind: Hermes, Qwen 2.5 and Qwen 3.
    Hermes,
    /// `{"name": ..., "parameters": {...}}` as the whole answer, several with `;` between them; or
    /// the same behind `<|python_tag|>`, also after text: Llama 3.1 to 3.3.
    Llama3,
}

/// A call is `before_name "NAME" before_arguments {ARGUMENTS} behind_arguments`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallWriting {
    pub before_name: &'static str,
    pub before_arguments: &'static str,
    pub behind_arguments: &'static str,
    /// Between two calls.
    pub between: &'static str,
    /// In text, what a call stands behind, or begins with.
    pub mark: &'static str,
    /// A regular expression for how an answer begins that is a call without the mark.
    pub never_begins: Option<&'static str>,
}

impl ToolFormat {
    /// What a chat template asks the model to write, as far as that is known here.
    pub(crate) fn of_template(source: &str, tokenizer: &Tokenizer) -> Option<Self> {
        // Qwen 3 Coder has the same tags around calls that are no JSON.
        if source.contains(CALL_START) && !source.contains("<function=") {
            return Some(Self::Hermes);
        }
        let is_llama = source.contains("\"parameters\": ")
            && (source.contains(PYTHON_TAG) || tokenizer.token_id(PYTHON_TAG).is_some());
        is_llama.then_some(Self::Llama3)
    }

    /// What a call begins with, and what ends it.
    pub(crate) fn marks(self) -> (&'static str, Option<&'static str>) {
        match self {
            Self::Hermes => (CALL_START, Some(CALL_END)),
            Self::Llama3 => (PYTHON_TAG, None),
        }
    }

    /// Whether this is a mark of any format.
    pub fn is_mark(text: &[u8]) -> bool {
        [PYTHON_TAG, CALL_START, CALL_END].iter().any(|mark| mark.as_bytes() == text)
    }

    /// How a call is written by a model that must write it just so.
    pub fn writing(self) -> CallWriting {
        match self {
            Self::Hermes => CallWriting {
                before_name: "<tool_call>\n{\"name\": ",
                before_arguments: ", \"arguments\": ",
                behind_arguments: "}\n</tool_call>",
                between: "\n",
                mark: CALL_START,
                never_begins: None,
            },
            Self::Llama3 => CallWriting {
                before_name: "{\"name\": ",
                before_arguments: ", \"parameters\": ",
                behind_arguments: "}",
                between: "; ",
                mark: PYTHON_TAG,
                // What [`ToolParser`] may take for a call, and is not written as above.
                never_begins: Some(r#"\s*\{\s*"(name|parameters|arguments|type|id)""#),
            },
        }
    }

    /// Whether an answer may be a call without any mark.
    fn takes_bare(self) -> bool {
        self == Self::Llama3
    }

    /// Special tokens that must become text all the same: the marks, where the vocabulary has them
    /// so.
    pub fn shown_tokens(self, tokenizer: &Tokenizer) -> Vec<u32> {
        let (start, end) = self.marks();
        let ids =
            [Some(start), end].into_iter().flatten().filter_map(|mark| tokenizer.token_id(mark));
        ids.filter(|&id| tokenizer.is_special(id)).collect()
    }
}
