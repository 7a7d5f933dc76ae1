//! From the grammar of an attempt to the constraint of its sequence, away from the engine's thread.
//!
//! The first grammar makes the node read its model's vocabulary and build what masks are computed
//! from, which takes a few hundred milliseconds and some tens of megabytes; a node that serves none
//! never does. Compiling is bounded in time by the compiler's own limits, in number here: a few at
//! a time, some more waiting, the others are `Busy`.

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

use crate::{attempt::Attempt, refusal::Refusal};

/// Compiling takes the time of others on the same cores.
const COMPILING_MAX: usize = 2;
/// Beside those: as many as can be done within seconds.
const WAITING_MAX: usize = 256;
/// Longest wait for a constraint; a compiler that works takes milliseconds.
const CONSTRAIN_WITHIN: Duration = Duration::from_secs(10);

/// What of [`proto::v1::Grammar`] this node holds answers to, as its record announces it: calls of
/// functions, too.
pub(crate) const VERSION: u32 = 2;

/// Makes constraints with the vocabulary of one model.
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
    /// Made with the first grammar; or why it cannot be.
    vocabulary_read: OnceLock<Result<Vocabulary, String>>,
    metrics: NodeMetrics,
}

#[derive(Debug)]
struct Vocabulary {
    compiler: Compiler,
    /// Special tokens that are text around calls, and nowhere else: routers do not show them.
    call_marks: Arc<[u32]>,
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

    /// The attempt with its constraint, if it has a grammar. The output of earlier attempts has been
    /// taken.
    pub async fn constrained(&self, mut attempt: Attempt) -> Result<Attempt, Refusal> {
        let Some(grammar) = attempt.grammar.take() else { return Ok(attempt) };
        let deadline = attempt.sequence.deadline.min(Instant::now() + CONSTRAIN_WITHIN);
        let work = self.constrain(attempt, grammar);
        match tokio::time::timeout_at(deadline.into(), work).await {
            Ok(done) => done,
            Err(_) => Err(Refusal::Busy { reason: "its grammar could not be compiled yet".into() }),
        }
    }

    async fn constrain(&self, mut attempt: Attempt, grammar: Grammar) -> Result<Attempt, Refusal> {
        let place = self.places.clone().try_acquire_owned().map_err(|_| Refusal::Busy {
            reason: format!("{WAITING_MAX} grammars wait to be compiled"),
        })?;
        let turn = self.compiling.clone().acquire_owned().await.map_err(|_| Refusal::Stopped)?;
        let shared = self.shared.clone();
        let work = tokio::task::spawn_blocking(move || {
            // Held until the work ends, whether or not anyone still waits for it.
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
    fn constrain(&self, attempt: &mut Attempt, grammar: &Grammar) -> Result<(), Refusal> {
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
            // Only the end that an earlier attempt did not live to tell is missing.
            sequence.sampling.min_tokens = 0;
        }
        let stop_tokens = match sequence.ignore_stop_tokens {
            true => Vec::new(),
            false => sequence.sampling.stop_token_ids.clone(),
        };
        let silent = match grammar {
            Grammar::ToolCalls(_) => Arc::default(),
            Grammar::JsonSchema(_) | Grammar::Regex(_) => read.call_marks.clone(),
        };
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
                call_marks.push(id);
                Token::Text(bytes)
            }
            _ => Token::Silent,
        }));
        let seconds = started.elapsed().as_secs_f64();
        info!(tokens = count, seconds = format_args!("{seconds:.3}"), "read the vocabulary");
        Ok(Vocabulary { compiler, call_marks: call_marks.into() })
    }
}

/// A matcher in the engine's terms.
#[derive(Clone, Debug)]
struct Follower {
    matcher: grammar::Matcher,
    /// What ends the answer where it may end.
    stop_tokens: Vec<u32>,
    /// Never chosen.
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
