//! Turns the grammar of an attempt into the constraint of its sequence, without I/O.
//!
//! A migrated request starts on another node with the tokens that were emitted already: the new
//! constraint accepts them first, so the answer continues where it was.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use engine::{
    constraint::{Constraint, ConstraintFailure, Matcher},
    event::NewSequence,
};
use grammar::{Compiler, Grammar, MatchError};
use kernels::sampling::TokenMask;

use crate::node_core::Refusal;

/// Version of [`proto::v1::Grammar`] that nodes support, as announced in their records. Version 2
/// has tool calls, version 3 context-free grammars, version 4 reasoning, and calls in sections or
/// with parameters, version 5 text between reasoning and answer, and tags that the reasoning does
/// not contain.
pub const GRAMMAR_VERSION: u32 = 5;

/// Callback that receives the times of the compilation and of each token bitmask.
pub type Timer = Arc<dyn Fn(TimedOperation, Duration) + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimedOperation {
    Compilation,
    Mask,
}

/// Tokens of one model, as grammars need them.
#[derive(Debug)]
pub struct GrammarVocabulary {
    compiler: Compiler,
    /// Special tokens that are tags of tool calls or reasoning. In other answers routers omit them from
    /// the text.
    tag_tokens: Vec<TagToken>,
    /// Rows of the model's logits; the tokenizer may know fewer tokens, or more.
    size: u32,
}

#[derive(Debug)]
pub struct TagToken {
    pub id: u32,
    pub text: Vec<u8>,
}

impl GrammarVocabulary {
    pub fn new(compiler: Compiler, tag_tokens: Vec<TagToken>, size: u32) -> Self {
        Self { compiler, tag_tokens, size }
    }

    /// Compiles the grammar and gives the sequence its constraint, which has accepted the
    /// sequence's output so far.
    pub fn constrain(
        &self,
        sequence: &mut NewSequence,
        grammar: &Grammar,
        timer: Timer,
    ) -> Result<(), Refusal> {
        let started = Instant::now();
        let compiled = self.compiler.compile(grammar);
        timer(TimedOperation::Compilation, started.elapsed());
        let mut matcher = compiled
            .map_err(|error| Refusal::Invalid { reason: format!("attempt.grammar {error}") })?;
        let silent = silent_tags(&self.tag_tokens, grammar);
        for &token in &sequence.tokens[sequence.prompt_len as usize..] {
            matcher.accept(token).map_err(|error| refusal(failure(error)))?;
        }
        if matcher.is_complete() {
            // The earlier attempt ended before it reported the end of the answer. This attempt
            // would sample a stop token, which the answer does not have.
            return Err(Refusal::AnswerComplete);
        }
        let stop_tokens = match sequence.ignore_stop_tokens {
            true => Vec::new(),
            false => sequence.sampling.stop_token_ids.clone(),
        };
        let matcher_with_timer =
            GrammarMatcher { matcher, stop_tokens, silent, vocabulary: self.size, timer };
        let constraint = Constraint::new(Box::new(matcher_with_timer)).map_err(refusal)?;
        sequence.constraint = Some(constraint);
        Ok(())
    }
}

/// Returns the tags that the grammar does not use: a vocabulary may have the tags of several
/// formats.
fn silent_tags(tag_tokens: &[TagToken], grammar: &Grammar) -> Arc<[u32]> {
    tag_tokens.iter().filter(|tag| !grammar.writes(&tag.text)).map(|tag| tag.id).collect()
}

/// A grammar matcher behind the engine's constraint seam.
#[derive(Clone)]
struct GrammarMatcher {
    matcher: grammar::OutputMatcher,
    /// Tokens that end the answer where the grammar lets it end.
    stop_tokens: Vec<u32>,
    /// Tokens that are never allowed.
    silent: Arc<[u32]>,
    vocabulary: u32,
    timer: Timer,
}

impl fmt::Debug for GrammarMatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarMatcher").field("matcher", &self.matcher).finish_non_exhaustive()
    }
}

impl Matcher for GrammarMatcher {
    fn accept(&mut self, token: u32) -> Result<(), ConstraintFailure> {
        self.matcher.accept(token).map_err(failure)
    }

    fn allowed(&mut self) -> Result<TokenMask, ConstraintFailure> {
        let started = Instant::now();
        let allowed = self.matcher.allowed();
        (self.timer)(TimedOperation::Mask, started.elapsed());
        let mut words = allowed.map_err(failure)?;
        words.resize(self.vocabulary.div_ceil(32) as usize, 0);
        for &token in &*self.silent {
            if let Some(word) = words.get_mut(token as usize / 32) {
                *word &= !(1 << (token % 32));
            }
        }
        if self.matcher.may_end().map_err(failure)? {
            for &token in &self.stop_tokens {
                if let Some(word) = words.get_mut(token as usize / 32) {
                    *word |= 1 << (token % 32);
                }
            }
        }
        Ok(TokenMask::new(words, self.vocabulary))
    }

    fn is_complete(&self) -> bool {
        self.matcher.is_complete()
    }

    fn forced(&self) -> Vec<u32> {
        self.matcher.forced()
    }

    fn boxed_clone(&self) -> Box<dyn Matcher> {
        Box::new(self.clone())
    }
}

fn failure(error: MatchError) -> ConstraintFailure {
    let reason = error.to_string();
    match error {
        MatchError::TooComplex { .. } => ConstraintFailure::TooComplex { reason },
        MatchError::Mismatch { .. } | MatchError::Bug { .. } => {
            ConstraintFailure::Broken { reason }
        }
    }
}

/// Returns the refusal of an attempt whose grammar compiles, but whose matcher fails. Only a bound
/// is the client's fault: the emitted tokens matched the grammar on another node.
fn refusal(failure: ConstraintFailure) -> Refusal {
    match failure {
        ConstraintFailure::TooComplex { reason } => {
            Refusal::Invalid { reason: format!("attempt.grammar: {reason}") }
        }
        ConstraintFailure::Broken { reason } => Refusal::MatcherFailed { reason },
    }
}

#[cfg(test)]
mod tests {
    use engine::event::{SequenceId, SequenceKind};
    use grammar::{
        Alternative, CallSyntax, CallableTool, FreeText, ReasoningTags, Token, ToolCalls,
    };
    use kernels::sampling::Sampling;
    use text::ToolFormat;

    use super::*;

    /// Constrains a sequence whose earlier attempt emitted a complete answer.
    fn constrain_complete(stop_token_ids: Vec<u32>, ignore_stop_tokens: bool) -> Refusal {
        constrain(Grammar::Regex("a".into()), stop_token_ids, ignore_stop_tokens)
    }

    /// Constrains a sequence whose earlier attempt emitted `a`, on a node that has the tokens `a`,
    /// `b` and a stop token.
    fn constrain(grammar: Grammar, stop_token_ids: Vec<u32>, ignore_stop_tokens: bool) -> Refusal {
        let tokens: [&[u8]; 2] = [b"a", b"b"];
        let stop = Token::Silent;
        let compiler = Compiler::new(tokens.into_iter().map(Token::Text).chain([stop]));
        let vocabulary = GrammarVocabulary::new(compiler, Vec::new(), 3);
        // The prompt is `b`; an earlier attempt emitted `a`.
        let mut sequence = NewSequence {
            id: SequenceId(1),
            kind: SequenceKind::Compute,
            tokens: vec![1, 0],
            prompt_len: 1,
            sampling: Sampling { stop_token_ids, ..Sampling::greedy() },
            max_tokens: 5,
            ignore_stop_tokens,
            cache_salt: String::new(),
            adapter: None,
            session: Default::default(),
            constraint: None,
            deadline: Instant::now(),
        };
        vocabulary.constrain(&mut sequence, &grammar, Arc::new(|_, _| {})).unwrap_err()
    }

    #[test]
    fn failed_matcher_is_the_nodes_fault() {
        // The tokens of another node do not match, and no token can follow.
        for expression in ["b+", "ac"] {
            let refusal = constrain(Grammar::Regex(expression.into()), vec![2], false);
            assert!(matches!(refusal, Refusal::MatcherFailed { .. }), "{expression}: {refusal:?}");
        }
        let refusal = constrain(Grammar::Regex("a(".into()), vec![2], false);
        assert!(matches!(refusal, Refusal::Invalid { .. }), "{refusal:?}");
    }

    #[test]
    fn complete_answer_is_reported_as_complete_with_and_without_stop_tokens() {
        for (stop_token_ids, ignore_stop_tokens) in
            [(vec![], true), (vec![2], true), (vec![2], false)]
        {
            let refusal = constrain_complete(stop_token_ids, ignore_stop_tokens);
            assert_eq!(refusal, Refusal::AnswerComplete);
        }
    }

    #[test]
    fn tags_of_another_tool_call_format_are_silent() {
        let tags = ["<|python_tag|>", "<tool_call>", "</tool_call>"];
        let tag_tokens: Vec<TagToken> = (0..)
            .zip(tags)
            .map(|(id, tag)| TagToken { id, text: tag.as_bytes().to_vec() })
            .collect();
        let silent = |grammar: &Grammar| silent_tags(&tag_tokens, grammar).to_vec();
        let calls = |format: &str, with_text: bool| {
            let syntax = ToolFormat::named(format).unwrap().syntax;
            let free_text = FreeText { tag: syntax.tag.into(), never_begins: None };
            let syntax = CallSyntax {
                before_name: syntax.before_name.into(),
                after_arguments: syntax.after_arguments.into(),
                ..Default::default()
            };
            let alternative =
                if with_text { Alternative::Text(free_text) } else { Alternative::Nothing };
            Grammar::ToolCalls(ToolCalls { syntax, tools: vec![], several: true, alternative })
        };
        for with_text in [true, false] {
            assert_eq!(silent(&calls("hermes", with_text)), [0]);
        }
        assert_eq!(silent(&calls("llama3", true)), [1, 2]);
        assert_eq!(silent(&calls("llama3", false)), [0, 1, 2]);
        assert_eq!(silent(&Grammar::json_object()), [0, 1, 2]);
        let tags = ReasoningTags {
            open: None,
            close: "</tool_call>".into(),
            before_answer: String::new(),
            never_within: Vec::new(),
        };
        let grammar = Box::new(Grammar::json_object());
        assert_eq!(silent(&Grammar::AfterReasoning { tags, grammar }), [0, 1]);
        assert_eq!(silent(&Grammar::Regex(".*".into())), [0, 1, 2]);
        // The trigger of a structural tag, and the rest of a structure's begin.
        let syntax = CallSyntax { before_name: "<".into(), bare_name: true, ..Default::default() };
        let tools = vec![CallableTool { name: "tool_call>".into(), arguments: None }];
        let alternative = Alternative::Nothing;
        let tag = ToolCalls { syntax, tools, several: true, alternative };
        assert_eq!(silent(&Grammar::ToolCalls(tag)), [0, 2]);
    }
}
