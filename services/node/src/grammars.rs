//! Compiles the grammar of an attempt to the constraint of its sequence, outside the engine thread.
//!
//! The first grammar makes the node read its model's vocabulary and build a token trie. This takes a few
//! hundred milliseconds and some tens of megabytes. The compiler bounds the time and memory of one
//! compilation. This module bounds the number: a few run, some more wait, and the others get `Busy`.

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use engine::constraint::{Constraint, ConstraintFailure, Matcher};
use grammar::{Compiler, Grammar, MatchError, Token};
use kernels::sampling::TokenMask;
use telemetry::NodeMetrics;
use text::{TokenTable, ToolFormat};
use tokio::sync::Semaphore;
use tracing::{info, warn};

use crate::{attempt::NewAttempt, refusal::Refusal};

/// Compilations that run at the same time. They compete with the engine for CPU cores.
const COMPILING_MAX: usize = 2;
/// Compilations that wait for those. Typical grammars compile in milliseconds.
const WAITING_MAX: usize = 256;
/// Longest wait for a constraint.
const CONSTRAIN_WITHIN: Duration = Duration::from_secs(10);

/// Version of [`proto::v1::Grammar`] that this node supports, as announced in its record. Version 2 has tool
/// calls.
pub(crate) const VERSION: u32 = 2;

/// Compiles constraints for the vocabulary of one model.
#[derive(Debug)]
pub(crate) struct Grammars {
    shared: Arc<Shared>,
    places: Arc<Semaphore>,
    compiling: Arc<Semaphore>,
}

#[derive(Debug)]
struct Shared {
    model_path: PathBuf,
    /// Rows of the model's logits; its tokenizer may know fewer tokens, or more.
    vocabulary: u32,
    /// Read with the first grammar; `Err` says why it cannot be read.
    vocabulary_read: OnceLock<Result<Vocabulary, String>>,
    metrics: NodeMetrics,
}

#[derive(Debug)]
struct Vocabulary {
    compiler: Compiler,
    /// Special tokens that delimit tool calls. Routers do not show them.
    call_marks: Vec<CallMark>,
}

#[derive(Debug)]
struct CallMark {
    id: u32,
    text: Vec<u8>,
}

/// Returns the call marks that the grammar does not use, such as marks of another tool-call format.
fn silent_marks(call_marks: &[CallMark], grammar: &Grammar) -> Arc<[u32]> {
    let is_used = |mark: &CallMark| match grammar {
        Grammar::JsonSchema(_) | Grammar::Regex(_) => false,
        Grammar::ToolCalls(calls) => calls.writes(&mark.text),
    };
    call_marks.iter().filter(|mark| !is_used(mark)).map(|mark| mark.id).collect()
}

impl Grammars {
    pub fn new(model_path: PathBuf, vocabulary: u32, metrics: NodeMetrics) -> Self {
        let vocabulary_read = OnceLock::new();
        let shared = Arc::new(Shared { model_path, vocabulary, vocabulary_read, metrics });
        Self {
            shared,
            places: Arc::new(Semaphore::new(COMPILING_MAX + WAITING_MAX)),
            compiling: Arc::new(Semaphore::new(COMPILING_MAX)),
        }
    }

    /// Returns the attempt with its constraint, if it has a grammar. The constraint has accepted the output
    /// of earlier attempts.
    pub async fn constrained(&self, mut attempt: NewAttempt) -> Result<NewAttempt, Refusal> {
        let Some(grammar) = attempt.grammar.take() else { return Ok(attempt) };
        let deadline = attempt.sequence.deadline.min(Instant::now() + CONSTRAIN_WITHIN);
        let work = self.constrain(attempt, grammar);
        match tokio::time::timeout_at(deadline.into(), work).await {
            Ok(done) => done,
            Err(_) => Err(Refusal::Busy { reason: "its grammar could not be compiled yet".into() }),
        }
    }

    async fn constrain(
        &self,
        mut attempt: NewAttempt,
        grammar: Grammar,
    ) -> Result<NewAttempt, Refusal> {
        let place = self.places.clone().try_acquire_owned().map_err(|_| Refusal::Busy {
            reason: format!("{WAITING_MAX} grammars wait to be compiled"),
        })?;
        let turn = self.compiling.clone().acquire_owned().await.map_err(|_| Refusal::Stopped)?;
        let shared = self.shared.clone();
        let work = tokio::task::spawn_blocking(move || {
            // The compilation holds its permits until it ends, also after its caller has left.
            let _held = (place, turn);
            shared.constrain(&mut attempt, &grammar)?;
            Ok(attempt)
        });
        work.await.unwrap_or_else(|error| {
            warn!(%error, "compiling a grammar failed");
            Err(Refusal::Internal { reason: "compiling the grammar failed".into() })
        })
    }
}

impl Shared {
    fn constrain(&self, attempt: &mut NewAttempt, grammar: &Grammar) -> Result<(), Refusal> {
        let read = self.vocabulary_read.get_or_init(|| self.read()).as_ref();
        let read = read.map_err(|reason| Refusal::Invalid {
            reason: format!("this node cannot follow a grammar: {reason}"),
        })?;
        let started = Instant::now();
        let compiled = read.compiler.compile(grammar);
        self.metrics.grammar_compiled(started.elapsed());
        let mut matcher = compiled
            .map_err(|error| Refusal::Invalid { reason: format!("attempt.grammar {error}") })?;
        let sequence = &mut attempt.sequence;
        for &token in &sequence.tokens[sequence.prompt_len as usize..] {
            matcher.accept(token).map_err(|error| Refusal::Invalid {
                reason: format!("attempt.tokens: {error} of this attempt"),
            })?;
        }
        if matcher.is_complete() {
            // An earlier attempt emitted the last token, but not the end of the output.
            sequence.sampling.min_tokens = 0;
        }
        let stop_tokens = match sequence.ignore_stop_tokens {
            true => Vec::new(),
            false => sequence.sampling.stop_token_ids.clone(),
        };
        let silent = silent_marks(&read.call_marks, grammar);
        let (vocabulary, metrics) = (self.vocabulary, self.metrics.clone());
        let follower = Follower { matcher, stop_tokens, silent, vocabulary, metrics };
        let constraint = Constraint::new(Box::new(follower)).map_err(|failure| {
            Refusal::Invalid { reason: format!("attempt.grammar: {failure}") }
        })?;
        sequence.constraint = Some(constraint);
        Ok(())
    }

    fn read(&self) -> Result<Vocabulary, String> {
        let started = Instant::now();
        let table = TokenTable::open(&self.model_path).map_err(|error| error.to_string())?;
        let count = table.size().min(self.vocabulary);
        let mut call_marks = Vec::new();
        let compiler = Compiler::new((0..count).map(|id| match table.bytes(id) {
            Some(bytes) if !table.is_special(id) => Token::Text(bytes),
            Some(bytes) if ToolFormat::is_mark(bytes) => {
                call_marks.push(CallMark { id, text: bytes.to_vec() });
                Token::Text(bytes)
            }
            _ => Token::Silent,
        }));
        let seconds = started.elapsed().as_secs_f64();
        info!(tokens = count, seconds = format_args!("{seconds:.3}"), "read the vocabulary");
        Ok(Vocabulary { compiler, call_marks })
    }
}

/// Implements the engine's matcher.
#[derive(Clone, Debug)]
struct Follower {
    matcher: grammar::Matcher,
    /// Tokens that end the output where the grammar allows an end.
    stop_tokens: Vec<u32>,
    /// Tokens that are never allowed.
    silent: Arc<[u32]>,
    vocabulary: u32,
    metrics: NodeMetrics,
}

impl Matcher for Follower {
    fn accept(&mut self, token: u32) -> Result<(), ConstraintFailure> {
        self.matcher.accept(token).map_err(failure)
    }

    fn allowed(&mut self) -> Result<TokenMask, ConstraintFailure> {
        let started = Instant::now();
        let allowed = self.matcher.allowed();
        self.metrics.mask_computed(started.elapsed());
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

    fn boxed_clone(&self) -> Box<dyn Matcher> {
        Box::new(self.clone())
    }
}

fn failure(error: MatchError) -> ConstraintFailure {
    let reason = error.to_string();
    match error {
        MatchError::TooComplex { .. } => ConstraintFailure::TooComplex { reason },
        MatchError::Mismatch { .. } | MatchError::Defect { .. } => {
            ConstraintFailure::Broken { reason }
        }
    }
}

#[cfg(test)]
mod tests {
    use grammar::{CallWriting, Otherwise, Prose, ToolCalls};

    use super::*;

    /// A vocabulary may have the marks of several ways.
    #[test]
    fn marks_of_calls_are_for_the_calls_that_are_written_with_them() {
        let marks = ["<|python_tag|>", "<tool_call>", "</tool_call>"];
        let call_marks: Vec<CallMark> = (0..)
            .zip(marks)
            .map(|(id, mark)| CallMark { id, text: mark.as_bytes().to_vec() })
            .collect();
        let silent = |grammar: &Grammar| silent_marks(&call_marks, grammar).to_vec();
        let calls = |format: ToolFormat, with_text: bool| {
            let writing = format.writing();
            let prose = Prose { mark: writing.mark.into(), never_begins: None };
            let writing = CallWriting {
                before_name: writing.before_name.into(),
                before_arguments: writing.before_arguments.into(),
                behind_arguments: writing.behind_arguments.into(),
                between: writing.between.into(),
            };
            let otherwise = if with_text { Otherwise::Text(prose) } else { Otherwise::Nothing };
            Grammar::ToolCalls(ToolCalls { writing, tools: vec![], several: true, otherwise })
        };
        for with_text in [true, false] {
            assert_eq!(silent(&calls(ToolFormat::Hermes, with_text)), [0]);
        }
        assert_eq!(silent(&calls(ToolFormat::Llama3, true)), [1, 2]);
        assert_eq!(silent(&calls(ToolFormat::Llama3, false)), [0, 1, 2]);
        assert_eq!(silent(&Grammar::json_object()), [0, 1, 2]);
        assert_eq!(silent(&Grammar::Regex(".*".into())), [0, 1, 2]);
    }
}
