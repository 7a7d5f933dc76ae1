//! Answers that must match a JSON schema or a regular expression, or call functions.
//!
//! * A [`Grammar`] is what a client asks for. [`Compiler::for_bytes`] finds out whether it is one, and
//!   small enough, without any model: the router does that.
//! * A [`Compiler`] over a model's tokens makes [`Matcher`]s of it: the nodes do that, away from the
//!   engine's thread.
//! * A [`Matcher`] follows one answer: it says which tokens may come next, takes the one that was
//!   chosen, and says when the answer is complete.
//!
//! What a compiled grammar may cost is bounded in [`limits`]. Beyond a bound there is an error,
//! never a token that the grammar does not allow. Left out: text (a token is its bytes), sampling,
//! and the tokens that end an answer, which are no part of a grammar.
#![forbid(unsafe_code)]

mod compiler;
mod error;
pub mod limits;
mod matcher;
mod source;
mod tool_calls;

pub use compiler::{Compiler, Token};
pub use error::{GrammarError, MatchError};
pub use matcher::Matcher;
pub use source::Grammar;
pub use tool_calls::{CallWriting, CallableTool, Otherwise, Prose, ToolCalls};
