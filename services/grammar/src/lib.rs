//! Structured output: grammar-constrained decoding by a JSON schema, a regular expression, a
//! context-free grammar or tool calls.
//!
//! * A [`Grammar`] comes from the client. The router validates a grammar without a model, with
//!   [`Compiler::for_bytes`].
//! * A [`Compiler`] over a model's vocabulary compiles a grammar to an [`OutputMatcher`]. Nodes do
//!   this outside the engine thread.
//! * An [`OutputMatcher`] tracks one output. It computes the token bitmask of the next step,
//!   accepts the sampled token and reports when the output is complete.
//!
//! [`limits`] bounds the work of a grammar. A grammar beyond a bound gives an error, never a token
//! that the grammar does not allow. This crate does not handle text (a token is its bytes),
//! sampling, or stop tokens.
#![forbid(unsafe_code)]

mod adapt;
mod arguments;
mod compiler;
mod context_free;
mod copies;
mod error;
mod gbnf;
mod keywords;
pub mod limits;
mod matcher;
mod productive;
mod references;
mod source;
mod tool_calls;

pub use arguments::ParameterSyntax;
pub use compiler::{Compiler, Token};
pub use error::{GrammarError, MatchError};
pub use matcher::OutputMatcher;
pub use source::{Grammar, ReasoningTags};
pub use tool_calls::{Alternative, CallSyntax, CallableTool, FreeText, ToolCalls};
