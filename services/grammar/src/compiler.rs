//! From a grammar to its matchers, over one vocabulary.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use llguidance::{
    ParserFactory,
    toktrie::{ApproximateTokEnv, INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie},
};

use crate::{
    error::{GrammarError, MatchError, one_line},
    limits::parser_limits,
    matcher::Matcher,
    source::Grammar,
};

/// One token of a vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token<'a> {
    /// Stands for these bytes of text.
    Text(&'a [u8]),
    /// Stands for no text: control tokens, placeholders, holes. No grammar allows it.
    Silent,
}

/// Makes matchers. Immutable: share it by [`Arc`].
pub struct Compiler {
    factory: ParserFactory,
}

impl Compiler {
    /// Over the tokens of a model, by id. Takes time and memory in proportion to them: some tens of
    /// milliseconds for 50,000.
    pub fn new<'a>(tokens: impl IntoIterator<Item = Token<'a>>) -> Self {
        let words = tokens.into_iter().map(|token| match token {
            Token::Text(bytes) if bytes.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) => {
                bytes.to_vec()
            }
            // Bytes that begin like this are no text, and mean a special token to llguidance.
            Token::Text(_) | Token::Silent => Vec::new(),
        });
        let words: Vec<Vec<u8>> = words.collect();
        // What ends an answer is not for the grammar to know.
        let info = TokRxInfo::new(words.len() as u32, INVALID_TOKEN);
        let trie = TokTrie::from(&info, &words);
        Self::over(Arc::new(ApproximateTokEnv::new(trie)))
    }

    /// Over the 256 bytes: enough to find out whether a grammar can be compiled.
    pub fn for_bytes() -> Self {
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        Self::new(bytes.chunks(1).map(Token::Text))
    }

    fn over(tokens: TokEnv) -> Self {
        let mut factory =
            ParserFactory::new_simple(&tokens).expect("its own expressions are regular");
        factory.quiet();
        *factory.limits_mut() = parser_limits();
        Self { factory }
    }

    /// A matcher at the beginning of an answer.
    ///
    /// CPU work that may take tens of milliseconds: not for a thread that others wait for.
    ///
    /// # Errors
    /// See [`GrammarError`].
    pub fn compile(&self, grammar: &Grammar) -> Result<Matcher, GrammarError> {
        let compiled = self.compile_whole(grammar);
        match (grammar, &compiled) {
            // Of which function it is, if it is of one, costs time only where something is wrong.
            (Grammar::ToolCalls(calls), Err(GrammarError::Unsupported { .. })) => {
                for (index, arguments) in calls.arguments_alone() {
                    if let Err(error) = self.compile_whole(&arguments) {
                        return Err(error.in_tool(index));
                    }
                }
                compiled
            }
            _ => compiled,
        }
    }

    /// Whether the grammar can be compiled, and allows anything at all; of calls, whether that holds
    /// for the arguments of each function.
    ///
    /// # Errors
    /// See [`GrammarError`].
    pub fn check(&self, grammar: &Grammar) -> Result<(), GrammarError> {
        Self::check_beginning(self.compile(grammar)?)?;
        if let Grammar::ToolCalls(calls) = grammar {
            // The beginning of a call is the same whatever its arguments are.
            for (index, arguments) in calls.arguments_alone() {
                let checked = self.compile_whole(&arguments).and_then(Self::check_beginning);
                checked.map_err(|error| error.in_tool(index))?;
            }
        }
        Ok(())
    }

    fn check_beginning(mut matcher: Matcher) -> Result<(), GrammarError> {
        let reason = match matcher.allowed() {
            Ok(_) => return Ok(()),
            Err(error @ MatchError::TooComplex { .. }) => error.to_string(),
            Err(MatchError::Mismatch { .. } | MatchError::Defect { .. }) => {
                "it allows no answer".to_owned()
            }
        };
        Err(GrammarError::Unsupported { reason })
    }

    fn compile_whole(&self, grammar: &Grammar) -> Result<Matcher, GrammarError> {
        let parsed = grammar.parsed()?;
        let unsupported = |reason: &str| GrammarError::Unsupported { reason: one_line(reason) };
        // It asserts some of its bounds.
        let parser = catch_unwind(AssertUnwindSafe(|| self.factory.create_parser(parsed)))
            .map_err(|_| unsupported("it is beyond the compiler's bounds"))?
            .map_err(|error| unsupported(&error.to_string()))?;
        let matcher = llguidance::Matcher::new(Ok(parser));
        match matcher.get_error() {
            Some(error) => Err(unsupported(&error)),
            None => Ok(Matcher::new(matcher)),
        }
    }
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tokens = self.factory.tok_env().tok_trie().vocab_size();
        f.debug_struct("Compiler").field("tokens", &tokens).finish_non_exhaustive()
    }
}
