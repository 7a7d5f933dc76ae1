//! Tool calls in the text of an answer.
//!
//! Models generate calls as text, each model family in its own format. A format is one file of this
//! module and one entry of [`FORMATS`]. [`ToolParser`] processes streamed text and separates calls
//! from content. The parser enforces neither that the model makes a call nor that the arguments
//! match the tool's schema. Only a grammar can enforce this ([`ToolSyntax`]).

mod function;
mod json_object;
mod named;
mod object;
mod parameters;
mod parser;
mod python;

mod deepseek_v3;
mod deepseek_v3_1;
mod glm4_5;
mod harmony;
mod hermes;
mod kimi_k2;
mod llama3;
mod minimax_m2;
mod mistral;
mod mistral_list;
mod pythonic;
mod qwen3_coder;

use std::fmt;

pub use function::CallableFunction;
pub use parser::{ToolParser, ToolPiece};

use crate::tokenizer::Tokenizer;

/// Every known format. A template is matched in this order.
static FORMATS: [ToolFormat; 12] = [
    harmony::FORMAT,
    minimax_m2::FORMAT,
    qwen3_coder::FORMAT,
    glm4_5::FORMAT,
    kimi_k2::FORMAT,
    deepseek_v3::FORMAT,
    deepseek_v3_1::FORMAT,
    mistral::FORMAT,
    mistral_list::FORMAT,
    pythonic::FORMAT,
    hermes::FORMAT,
    llama3::FORMAT,
];

/// Format of a model's tool calls.
pub struct ToolFormat {
    pub name: &'static str,
    /// Models that write calls in this format.
    pub models: &'static str,
    /// Form of a call, for documentation.
    pub form: &'static str,
    /// Returns whether a chat template asks the model to write this format.
    is_asked_by: fn(&str, &Tokenizer) -> bool,
    /// Tags before a call, outermost first. All but the last may be absent.
    opening: &'static [&'static str],
    /// Character that begins a call without a tag, at the start of an answer and after a call.
    bare: Option<char>,
    /// Character between two calls, after which the second call has no tag.
    separator: Option<char>,
    /// Tags after a call, in this order. Each may be absent.
    closing: &'static [&'static str],
    /// Tags within a call.
    inner: &'static [&'static str],
    /// Returns the parser of a call after its tags.
    body: fn() -> Box<dyn CallBody>,
    /// Syntax of calls that a grammar forces.
    pub syntax: ToolSyntax,
}

/// Syntax of calls: `begin CALL between CALL end`, where a call is `before_name NAME
/// before_arguments ARGUMENTS after_arguments`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToolSyntax {
    pub begin: &'static str,
    pub before_name: &'static str,
    /// Whether the name is a JSON string.
    pub quotes_name: bool,
    pub before_arguments: &'static str,
    /// Syntax of the arguments; `None` for a JSON object.
    pub parameters: Option<ParameterSyntax>,
    pub after_arguments: &'static str,
    /// Text between two calls.
    pub between: &'static str,
    pub end: &'static str,
    /// Tag that precedes or begins calls in text.
    pub tag: &'static str,
    /// Regular expression for the beginning of an answer that is a call without the tag.
    pub never_begins: Option<&'static str>,
}

/// Syntax of a parameter: `before_name NAME before_value VALUE after_value`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterSyntax {
    pub before_name: &'static str,
    pub before_value: &'static str,
    pub after_value: &'static str,
    /// Text between two parameters.
    pub between: &'static str,
    /// End of a value that is text; `None` if strings are written as in JSON. A suffix of
    /// `after_value`.
    pub text_end: Option<&'static str>,
}

/// Syntax of calls without any text around their parts.
const PLAIN: ToolSyntax = ToolSyntax {
    begin: "",
    before_name: "",
    quotes_name: false,
    before_arguments: "",
    parameters: None,
    after_arguments: "",
    between: "",
    end: "",
    tag: "",
    never_begins: None,
};

/// Call of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    pub name: String,
    /// Arguments: a JSON object.
    pub arguments: String,
}

/// Parser of one call, from the end of its tags to the end of its arguments.
trait CallBody: fmt::Debug + Send {
    /// Processes the next character: `text` is the call so far and ends with `last`.
    fn push(&mut self, text: &str, last: char, functions: &[CallableFunction]) -> CallStep;

    /// Returns the call as far as `text` goes: its arguments are the beginning of a JSON object, or
    /// empty. `None` while its function is unknown.
    fn cut(&self, text: &str) -> Option<ToolCall>;
}

/// Result of a character.
#[derive(Debug)]
enum CallStep {
    More,
    /// The call is complete.
    Call(ToolCall),
    /// The text is not a call.
    Broken,
}

impl fmt::Debug for ToolFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl ToolFormat {
    /// Returns all formats.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        FORMATS.iter()
    }

    pub fn named(name: &str) -> Option<&'static Self> {
        Self::all().find(|format| format.name == name)
    }

    /// Returns the format that a chat template asks the model to write, if known.
    pub(crate) fn of_template(source: &str, tokenizer: &Tokenizer) -> Option<&'static Self> {
        Self::all().find(|format| (format.is_asked_by)(source, tokenizer))
    }

    fn tags(&self) -> impl Iterator<Item = &'static str> {
        self.opening.iter().chain(self.inner).chain(self.closing).copied()
    }

    /// Returns whether `text` is a tag of any format.
    pub fn is_tag(text: &[u8]) -> bool {
        Self::all().any(|format| format.tags().any(|tag| tag.as_bytes() == text))
    }

    /// Returns the special tokens that must become text: tags that are special tokens of the
    /// vocabulary.
    pub fn shown_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let ids = self.tags().filter_map(|tag| tokenizer.token_id(tag));
        ids.filter(|&id| tokenizer.is_special(id)).collect()
    }
}
