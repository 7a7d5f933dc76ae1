//! Compiles the grammar of an attempt to the constraint of its sequence, outside the engine thread.
//!
//! The first grammar makes the node read its model's vocabulary and build a token trie. This takes
//! a few hundred milliseconds and some tens of megabytes. The compiler bounds the time and memory
//! of one compilation. This module bounds the number: a few run, some more wait, and the others get
//! `Busy`.

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Instant,
};

use engine::constraint::COMPILE_TIMEOUT;
use grammar::{Compiler, Grammar, Token};
use telemetry::NodeMetrics;
use text::{ReasoningFormat, TokenTable, ToolFormat};
use tokio::sync::Semaphore;
use tracing::{info, warn};

use crate::{
    attempt::NewAttempt,
    constraint::{GrammarVocabulary, TagToken, TimedOperation},
    node_core::Refusal,
};

/// Maximum number of concurrent compilations. They compete with the engine for CPU cores.
const COMPILING_MAX: usize = 2;
/// Maximum number of compilations that wait to start. Typical grammars compile in milliseconds.
const WAITING_MAX: usize = 256;

/// Compiler of constraints for the vocabulary of one model.
#[derive(Debug)]
pub(crate) struct Grammars {
    shared: Arc<GrammarCompiler>,
    permits: Arc<Semaphore>,
    compiling: Arc<Semaphore>,
}

#[derive(Debug)]
struct GrammarCompiler {
    model_path: PathBuf,
    /// Rows of the model's logits; its tokenizer may know fewer tokens, or more.
    vocabulary: u32,
    /// Read with the first grammar. A failed read is repeated with the next grammar.
    vocabulary_read: OnceLock<GrammarVocabulary>,
    metrics: NodeMetrics,
}

impl Grammars {
    pub(crate) fn new(model_path: PathBuf, vocabulary: u32, metrics: NodeMetrics) -> Self {
        let vocabulary_read = OnceLock::new();
        let shared = Arc::new(GrammarCompiler { model_path, vocabulary, vocabulary_read, metrics });
        Self {
            shared,
            permits: Arc::new(Semaphore::new(COMPILING_MAX + WAITING_MAX)),
            compiling: Arc::new(Semaphore::new(COMPILING_MAX)),
        }
    }

    /// Returns the attempt with its constraint, if it has a grammar. The constraint has accepted
    /// the output of earlier attempts.
    pub(crate) async fn constrained(&self, mut attempt: NewAttempt) -> Result<NewAttempt, Refusal> {
        let Some(grammar) = attempt.grammar.take() else { return Ok(attempt) };
        let deadline = attempt.sequence.deadline.min(Instant::now() + COMPILE_TIMEOUT);
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
        let permit = self.permits.clone().try_acquire_owned().map_err(|_| Refusal::Busy {
            reason: format!("{WAITING_MAX} grammars wait to be compiled"),
        })?;
        let turn = self.compiling.clone().acquire_owned().await.map_err(|_| Refusal::Stopped)?;
        let shared = self.shared.clone();
        let work = tokio::task::spawn_blocking(move || {
            // The compilation holds its permits until it ends, even if its caller has disconnected.
            let _held = (permit, turn);
            shared.constrain(&mut attempt, &grammar)?;
            Ok(attempt)
        });
        work.await.unwrap_or_else(|error| {
            warn!(%error, "compiling a grammar failed");
            Err(Refusal::Internal { reason: "compiling the grammar failed".into() })
        })
    }
}

impl GrammarCompiler {
    fn constrain(&self, attempt: &mut NewAttempt, grammar: &Grammar) -> Result<(), Refusal> {
        // The fault is the node's, so the router tries another node.
        let vocabulary = self.vocabulary().map_err(|reason| Refusal::NoGrammar { reason })?;
        let metrics = self.metrics.clone();
        let timer = Arc::new(move |timed, elapsed| match timed {
            TimedOperation::Compilation => metrics.grammar_compiled(elapsed),
            TimedOperation::Mask => metrics.mask_computed(elapsed),
        });
        vocabulary.constrain(&mut attempt.sequence, grammar, timer)
    }

    fn vocabulary(&self) -> Result<&GrammarVocabulary, String> {
        if let Some(vocabulary) = self.vocabulary_read.get() {
            return Ok(vocabulary);
        }
        let vocabulary = self.read()?;
        Ok(self.vocabulary_read.get_or_init(|| vocabulary))
    }

    fn read(&self) -> Result<GrammarVocabulary, String> {
        let started = Instant::now();
        let table = TokenTable::open(&self.model_path).map_err(|error| error.to_string())?;
        let count = table.size().min(self.vocabulary);
        let mut tag_tokens = Vec::new();
        let compiler = Compiler::new((0..count).map(|id| match table.bytes(id) {
            Some(bytes) if !table.is_special(id) => Token::Text(bytes),
            Some(bytes) if ToolFormat::is_tag(bytes) || ReasoningFormat::is_tag(bytes) => {
                tag_tokens.push(TagToken { id, text: bytes.to_vec() });
                Token::Text(bytes)
            }
            _ => Token::Silent,
        }));
        let seconds = started.elapsed().as_secs_f64();
        info!(tokens = count, seconds = format_args!("{seconds:.3}"), "read the vocabulary");
        Ok(GrammarVocabulary::new(compiler, tag_tokens, self.vocabulary))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use engine::event::{NewSequence, SequenceId, SequenceKind};
    use kernels::sampling::Sampling;

    use super::*;
    use crate::testing;

    /// A tokenizer with the tokens `a`, `b` and a special token.
    const TOKENIZER: &str = r#"{
        "added_tokens": [{"id": 2, "content": "<e>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
        "decoder": {"type": "ByteLevel"}
    }"#;

    fn attempt() -> NewAttempt {
        let sequence = NewSequence {
            id: SequenceId(1),
            kind: SequenceKind::Compute,
            tokens: vec![1],
            prompt_len: 1,
            sampling: Sampling { stop_token_ids: vec![2], ..Sampling::greedy() },
            max_tokens: 5,
            ignore_stop_tokens: false,
            cache_salt: String::new(),
            adapter: None,
            session: Default::default(),
            constraint: None,
            deadline: Instant::now() + Duration::from_secs(60),
        };
        NewAttempt {
            request_id: 1,
            weight_version: 1,
            sequence,
            adapter: None,
            grammar: Some(Grammar::Regex("a".into())),
            peer: None,
            traceparent: String::new(),
        }
    }

    #[tokio::test]
    async fn a_failed_read_of_the_tokenizer_is_repeated() {
        let folder = tempfile::tempdir().unwrap();
        let grammars = Grammars::new(folder.path().into(), 3, testing::metrics());
        let refusal = grammars.constrained(attempt()).await.unwrap_err();
        assert!(matches!(refusal, Refusal::NoGrammar { .. }), "{refusal:?}");
        std::fs::write(folder.path().join("tokenizer.json"), TOKENIZER).unwrap();
        let constrained = grammars.constrained(attempt()).await.unwrap();
        assert!(constrained.sequence.constraint.is_some());
    }
}
