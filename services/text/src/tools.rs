//! Tool calls in the text of an answer.
//!
//! Models write calls as text, each family in its own format ([`ToolFormat`]). [`ToolParser`] processes
//! streamed text and separates calls from content. It does not enforce that a call is made, or that its
//! arguments match the tool's schema; only a grammar can enforce this.

mod json_object;
mod parser;

pub use parser::{ToolCall, ToolParser, ToolPiece};

use crate::tokenizer::Tokenizer;

const PYTHON_TAG: &str = "<|python_tag|>";
const CALL_START: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";

/// Format of a model's tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after another, with text before,
    /// between or after: Hermes, Qwen 2.5 and Qwen 3.
    Hermes,
    /// `{"name": ..., "parameters": {...}}` as the whole answer, several separated by `;`; or the same
    /// after `<|python_tag|>`, also after text: Llama 3.1 to 3.3.
    Llama3,
}

/// Syntax of a call: `before_name "NAME" before_arguments {ARGUMENTS} after_arguments`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToolSyntax {
    pub before_name: &'static str,
    pub before_arguments: &'static str,
    pub after_arguments: &'static str,
    /// Text between two calls.
    pub between: &'static str,
    /// Mark that precedes or begins a call in text.
    pub mark: &'static str,
    /// Regular expression for the beginning of an answer that is a call without the mark.
    pub never_begins: Option<&'static str>,
}

impl ToolFormat {
    /// Returns the format that a chat template asks the model to write, if known.
    pub(crate) fn of_template(source: &str, tokenizer: &Tokenizer) -> Option<Self> {
        // Qwen 3 Coder uses the same tags around calls that are not JSON.
        if source.contains(CALL_START) && !source.contains("<function=") {
            return Some(Self::Hermes);
        }
        let is_llama = source.contains("\"parameters\": ")
            && (source.contains(PYTHON_TAG) || tokenizer.token_id(PYTHON_TAG).is_some());
        is_llama.then_some(Self::Llama3)
    }

    /// Returns the opening mark of a call and its closing mark.
    pub(crate) fn marks(self) -> (&'static str, Option<&'static str>) {
        match self {
            Self::Hermes => (CALL_START, Some(CALL_END)),
            Self::Llama3 => (PYTHON_TAG, None),
        }
    }

    /// Returns whether `text` is a mark of any format.
    pub fn is_mark(text: &[u8]) -> bool {
        [PYTHON_TAG, CALL_START, CALL_END].iter().any(|mark| mark.as_bytes() == text)
    }

    /// Returns the syntax of a call that a grammar forces.
    pub fn syntax(self) -> ToolSyntax {
        match self {
            Self::Hermes => ToolSyntax {
                before_name: "<tool_call>\n{\"name\": ",
                before_arguments: ", \"arguments\": ",
                after_arguments: "}\n</tool_call>",
                between: "\n",
                mark: CALL_START,
                never_begins: None,
            },
            Self::Llama3 => ToolSyntax {
                before_name: "{\"name\": ",
                before_arguments: ", \"parameters\": ",
                after_arguments: "}",
                between: "; ",
                mark: PYTHON_TAG,
                // Starts of calls that [`ToolParser`] accepts and this syntax does not produce.
                never_begins: Some(r#"\s*\{\s*"(name|parameters|arguments|type|id)""#),
            },
        }
    }

    /// Returns whether an answer may be a call without a mark.
    fn takes_bare(self) -> bool {
        self == Self::Llama3
    }

    /// Returns the special tokens that must become text: marks that are special tokens of the
    /// vocabulary.
    pub fn shown_tokens(self, tokenizer: &Tokenizer) -> Vec<u32> {
        let (start, end) = self.marks();
        let ids =
            [Some(start), end].into_iter().flatten().filter_map(|mark| tokenizer.token_id(mark));
        ids.filter(|&id| tokenizer.is_special(id)).collect()
    }
}
