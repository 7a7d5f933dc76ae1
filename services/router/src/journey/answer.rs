//! The text of one answer: tokens in, certain text out, until a stop token or stop string.

use std::sync::Arc;

use proto::v1::{FinishReason, Sampling, Token};
use text::{StopStrings, TextStream, TextStreamOptions, Tokenizer};

use crate::generation::StoppedBy;

/// How tokens become an answer: the same for all answers of a request.
#[derive(Clone)]
pub struct AnswerPlan {
    pub tokenizer: Arc<Tokenizer>,
    pub stops: StopStrings,
    /// The same strings.
    pub stop_texts: Arc<[String]>,
    pub skip_special: bool,
    /// Without it there is no text, and no stop string is looked for.
    pub with_text: bool,
    /// Special tokens that give text even where others are skipped.
    pub shown_tokens: Arc<[u32]>,
}

pub struct Answer {
    stream: Option<TextStream>,
    stop_texts: Arc<[String]>,
    /// Sorted; empty when stop tokens are ordinary ones.
    stop_token_ids: Vec<u32>,
    tokenizer: Arc<Tokenizer>,
    min_tokens: u32,
    token_count: u32,
    ended: Option<Ended>,
}

/// Why no further token belongs to the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The last token is a stop token; its text is no part of the answer.
    StopToken(Option<StoppedBy>),
    /// A stop string is complete: the nodes do not know and must be told.
    StopText(StoppedBy),
}

/// What of some tokens belongs to the answer.
#[derive(Debug, PartialEq)]
pub struct Shown {
    pub tokens: Vec<Token>,
    pub text: String,
}

/// The last of an answer.
#[derive(Debug, PartialEq)]
pub struct Conclusion {
    /// Text that had been held back.
    pub text: String,
    pub reason: FinishReason,
    pub stopped_by: Option<StoppedBy>,
    pub completion_tokens: u32,
}

impl Answer {
    pub fn new(plan: &AnswerPlan, sampling: &Sampling) -> Self {
        let options =
            TextStreamOptions { skip_special: plan.skip_special, min_tokens: sampling.min_tokens };
        let stream = || {
            TextStream::new(plan.tokenizer.clone(), plan.stops.clone(), options)
                .showing(plan.shown_tokens.clone())
        };
        let mut stop_token_ids = match sampling.ignore_stop_tokens {
            true => Vec::new(),
            false => sampling.stop_token_ids.clone(),
        };
        stop_token_ids.sort_unstable();
        Self {
            stream: plan.with_text.then(stream),
            stop_texts: plan.stop_texts.clone(),
            stop_token_ids,
            tokenizer: plan.tokenizer.clone(),
            min_tokens: sampling.min_tokens,
            token_count: 0,
            ended: None,
        }
    }

    pub fn ended(&self) -> Option<&Ended> {
        self.ended.as_ref()
    }

    /// Takes the next tokens, each once and in order. Those behind a stop do not belong to the
    /// answer.
    pub fn push(&mut self, mut tokens: Vec<Token>) -> Shown {
        if self.ended.is_some() {
            return Shown { tokens: vec![], text: String::new() };
        }
        let stops = |(index, token): (u32, &Token)| {
            index >= self.min_tokens && self.stop_token_ids.binary_search(&token.id).is_ok()
        };
        let stop_at = (self.token_count..).zip(&tokens).position(stops);
        let ids: Vec<u32> =
            tokens[..stop_at.unwrap_or(tokens.len())].iter().map(|token| token.id).collect();
        let delta = self.stream.as_mut().map(|stream| stream.push(&ids)).unwrap_or_default();
        let count = match (delta.stopped, stop_at) {
            (Some(hit), _) => {
                let by = StoppedBy::Text(self.stop_texts[hit.stop_index].clone());
                self.ended = Some(Ended::StopText(by));
                (hit.token_count - self.token_count) as usize
            }
            (None, Some(at)) => {
                let id = tokens[at].id;
                // Ending by one of the model's own is not the client's doing.
                let own = !self.tokenizer.eos_ids().contains(&id);
                self.ended = Some(Ended::StopToken(own.then_some(StoppedBy::Token(id))));
                at + 1
            }
            (None, None) => tokens.len(),
        };
        tokens.truncate(count);
        self.token_count += count as u32;
        Shown { tokens, text: delta.text }
    }

    /// The end. `reason` is the node's word for it; a stop that was seen here comes first.
    pub fn finish(self, reason: FinishReason) -> Conclusion {
        let text = self.stream.map(TextStream::finish).unwrap_or_default();
        let completion_tokens = self.token_count;
        let (reason, stopped_by) = match self.ended {
            Some(Ended::StopToken(by)) => (FinishReason::Stop, by),
            Some(Ended::StopText(by)) => (FinishReason::Stop, Some(by)),
            None => (reason, None),
        };
        Conclusion { text, reason, stopped_by, completion_tokens }
    }
}
