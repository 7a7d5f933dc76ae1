//! Compiles grammars to matchers for one vocabulary.

use std::{sync::Arc, thread::Builder};

use llguidance::{
    ParserFactory,
    api::{GrammarInit, ParserLimits},
    earley::{lexerspec::LexerSpec, regexvec::LexemeSet},
    toktrie::{ApproximateTokEnv, INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie},
};

use crate::{
    error::{GrammarError, MatchError, unsupported},
    limits::{COMPILER_STACK_BYTES, LEXER_FUEL, TOOLS_LEXER_FUEL, parser_limits},
    matcher::OutputMatcher,
    productive::without_dead_ends,
    source::Grammar,
    tool_calls::ToolCalls,
};

/// One token of a vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token<'a> {
    /// A token with these bytes.
    Text(&'a [u8]),
    /// A token without text: a control token, a placeholder or an unused id. No grammar allows it.
    Silent,
}

/// Compiler of grammars. Immutable: share it by [`Arc`].
pub struct Compiler {
    factory: ParserFactory,
}

impl Compiler {
    /// Creates a compiler for a vocabulary, ordered by token id. 50,000 tokens take some tens of
    /// milliseconds.
    pub fn new<'a>(tokens: impl IntoIterator<Item = Token<'a>>) -> Self {
        let word = |token| match token {
            Token::Text(bytes) if bytes.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) => {
                bytes.to_vec()
            }
            // llguidance reads bytes with this marker as a special token.
            Token::Text(_) | Token::Silent => Vec::new(),
        };
        let words: Vec<Vec<u8>> = tokens.into_iter().map(word).collect();
        // Stop tokens are not part of a grammar.
        let info = TokRxInfo::new(words.len() as u32, INVALID_TOKEN);
        let trie = TokTrie::from(&info, &words);
        let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory =
            ParserFactory::new_simple(&tokens).expect("its own expressions are regular");
        factory.quiet();
        *factory.limits_mut() = parser_limits();
        Self { factory }
    }

    /// Creates a compiler whose tokens are the 256 bytes. It rejects the same grammars as a
    /// compiler for a model.
    pub fn for_bytes() -> Self {
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        Self::new(bytes.chunks(1).map(Token::Text))
    }

    /// Returns a matcher at the start of the output. Takes up to 200 ms of CPU time: do not call it
    /// on a thread that serves other requests.
    pub fn compile(&self, grammar: &Grammar) -> Result<OutputMatcher, GrammarError> {
        let compiled = self.compile_whole(grammar, LEXER_FUEL).map(|(matcher, _)| matcher);
        match (grammar, &compiled) {
            // Finding the tool at fault costs time only when there is an error.
            (Grammar::ToolCalls(calls), Err(GrammarError::Unsupported { .. })) => {
                self.compile_each_tool(calls, |_| Ok(()))?;
                compiled
            }
            _ => compiled,
        }
    }

    /// Compiles the grammar and the arguments of each of its tools, and computes the first bitmask
    /// of each. Takes up to twice the time of [`Self::compile`].
    pub fn check(&self, grammar: &Grammar) -> Result<(), GrammarError> {
        Self::check_first_mask(self.compile(grammar)?)?;
        match grammar {
            // The first bitmask of the whole grammar does not reach the arguments, so check each
            // tool alone.
            Grammar::ToolCalls(calls) => self.compile_each_tool(calls, Self::check_first_mask),
            // The tools of the grammar after reasoning are checked before the reasoning is added.
            Grammar::JsonSchema(_)
            | Grammar::Regex(_)
            | Grammar::ContextFree(_)
            | Grammar::AfterReasoning { .. } => Ok(()),
        }
    }

    /// Compiles the arguments of each tool, as far as the fuel for all tools together lasts.
    fn compile_each_tool(
        &self,
        calls: &ToolCalls,
        check: impl Fn(OutputMatcher) -> Result<(), GrammarError>,
    ) -> Result<(), GrammarError> {
        let mut fuel_left = TOOLS_LEXER_FUEL;
        for (index, arguments) in calls.arguments_alone() {
            let checked = self.compile_whole(&arguments, fuel_left.min(LEXER_FUEL)).and_then(
                |(matcher, fuel_spent)| {
                    fuel_left = fuel_left.saturating_sub(fuel_spent);
                    check(matcher)
                },
            );
            checked.map_err(|error| error.in_tool(index))?;
        }
        Ok(())
    }

    fn check_first_mask(mut matcher: OutputMatcher) -> Result<(), GrammarError> {
        let reason = match matcher.allowed() {
            Ok(_) => return Ok(()),
            Err(error @ MatchError::TooComplex { .. }) => error.to_string(),
            Err(MatchError::Mismatch { .. } | MatchError::Bug { .. }) => {
                "no output matches it".to_owned()
            }
        };
        Err(GrammarError::Unsupported { reason })
    }

    /// Returns the matcher and the fuel that its lexer took.
    fn compile_whole(
        &self,
        grammar: &Grammar,
        fuel: u64,
    ) -> Result<(OutputMatcher, u64), GrammarError> {
        let (matcher, fuel_spent) = on_compiler_thread(|| {
            let parsed = grammar.parsed()?;
            let source = grammar;
            let limits = ParserLimits { initial_lexer_fuel: fuel, ..parser_limits() };
            let tokens = Some(self.factory.tok_env().clone());
            let (grammar, lexer) = GrammarInit::Serialized(parsed)
                .to_internal(tokens, limits)
                .map_err(|error| unsupported(without_source(source, &error.to_string())))?;
            let start = check_first_bytes(&lexer, fuel).map_err(|error| unsupported(&error))?;
            let grammar =
                without_dead_ends(grammar.optimize(), &lexer, &start.matchable, &parser_limits())?;
            let parser = self
                .factory
                .create_parser_from_init_default(GrammarInit::Internal(grammar, lexer))
                .map_err(|error| unsupported(&error.to_string()))?;
            Ok((llguidance::Matcher::new(Ok(parser)), start.fuel_spent))
        })?;
        match matcher.get_error() {
            Some(error) => Err(unsupported(&error)),
            None => Ok((OutputMatcher::new(matcher), fuel_spent)),
        }
    }
}

/// Returns an error of llguidance without the client's text, which may be private. An error about a
/// context-free grammar quotes a token, and shows lines of the grammar.
fn without_source<'a>(grammar: &Grammar, error: &'a str) -> &'a str {
    if !matches!(grammar, Grammar::ContextFree(_) | Grammar::AfterReasoning { .. }) {
        return error;
    }
    let line = error.lines().next().unwrap_or_default();
    line.split_once(" (at \"").map_or(line, |(reason, _)| reason)
}

/// Runs `compile` on a thread with a stack for the deepest schema.
fn on_compiler_thread<T: Send>(
    compile: impl FnOnce() -> Result<T, GrammarError> + Send,
) -> Result<T, GrammarError> {
    let thread = Builder::new().name("grammar".to_owned()).stack_size(COMPILER_STACK_BYTES);
    std::thread::scope(|scope| {
        let running = thread
            .spawn_scoped(scope, compile)
            .map_err(|error| unsupported(&format!("cannot start a compiler thread: {error}")))?;
        // llguidance asserts some of its bounds.
        running.join().unwrap_or_else(|_| Err(unsupported("it is beyond the compiler's bounds")))
    })
}

/// Start state of a lexer.
struct LexerStart {
    /// Lexemes that a string matches.
    matchable: LexemeSet,
    /// Fuel that the lexer takes up to the transitions of the start state.
    fuel_spent: u64,
}

/// Computes the start state of the lexer and its transitions.
///
/// llguidance's parser computes these transitions when it is constructed, before it sets a fuel
/// limit: `{"type":"integer","multipleOf":9999991}` takes minutes and gigabytes there. This
/// function computes the same transitions first, with a limit.
fn check_first_bytes(lexer: &LexerSpec, fuel: u64) -> Result<LexerStart, String> {
    let mut limits = ParserLimits { initial_lexer_fuel: fuel, ..parser_limits() };
    let mut dfa = lexer.to_regex_vec(&mut limits).map_err(|error| error.to_string())?;
    dfa.set_fuel(limits.initial_lexer_fuel);
    let start = dfa.initial_state(&lexer.all_lexemes());
    for byte in 0..=u8::MAX {
        dfa.transition(start, byte);
        if let Some(error) = dfa.get_error() {
            return Err(error);
        }
    }
    let matchable = dfa.state_desc(start).possible.clone();
    Ok(LexerStart { matchable, fuel_spent: dfa.total_fuel_spent() })
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tokens = self.factory.tok_env().tok_trie().vocab_size();
        f.debug_struct("Compiler").field("tokens", &tokens).finish_non_exhaustive()
    }
}
