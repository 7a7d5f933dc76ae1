//! The text of one answer: detokenizes emitted tokens, and finds stop tokens and stop strings.

use std::sync::Arc;

use proto::v1::{FinishReason, Sampling, Token};
use text::{StopStrings, TextStream, TextStreamOptions, Tokenizer};

use crate::{generation::StoppedBy, request_core::Stop};

/// Detokenization options, equal for all answers of a request.
pub struct AnswerTextOptions {
    pub tokenizer: Arc<Tokenizer>,
    pub stops: StopStrings,
    /// The strings of `stops`.
    pub stop_texts: Arc<[String]>,
    pub skip_special: bool,
    /// Whether tokens are detokenized. Without text no stop string is found.
    pub with_text: bool,
    /// Special tokens that are detokenized even where others are skipped.
    pub shown_tokens: Arc<[u32]>,
}

/// Detokenizer of one answer.
pub struct AnswerText {
    stream: Option<TextStream>,
    stop_texts: Arc<[String]>,
    /// Sorted; empty where stop tokens do not end the answer.
    stop_token_ids: Vec<u32>,
    tokenizer: Arc<Tokenizer>,
    min_tokens: u32,
    token_count: u32,
    ended: Option<Ended>,
}

/// Why no further token belongs to the answer.
#[derive(Debug)]
enum Ended {
    /// The last token is a stop token; the answer excludes its text.
    StopToken(Option<StoppedBy>),
    /// A stop string is complete.
    StopText(StoppedBy),
}

/// Tokens that belong to the answer, and their text.
#[derive(Debug, PartialEq)]
pub struct Shown {
    pub tokens: Vec<Token>,
    pub text: String,
}

/// The end of an answer.
#[derive(Debug, PartialEq)]
pub struct Conclusion {
    /// Text that was held back.
    pub text: String,
    pub reason: FinishReason,
    pub stopped_by: Option<StoppedBy>,
    pub completion_tokens: u32,
}

impl AnswerText {
    pub fn new(options: &AnswerTextOptions, sampling: &Sampling) -> Self {
        let stream = || {
            let min_tokens = sampling.min_tokens;
            let stream = TextStreamOptions { skip_special: options.skip_special, min_tokens };
            TextStream::new(options.tokenizer.clone(), options.stops.clone(), stream)
                .showing(options.shown_tokens.clone())
        };
        let mut stop_token_ids = match sampling.ignore_stop_tokens {
            true => Vec::new(),
            false => sampling.stop_token_ids.clone(),
        };
        stop_token_ids.sort_unstable();
        Self {
            stream: options.with_text.then(stream),
            stop_texts: options.stop_texts.clone(),
            stop_token_ids,
            tokenizer: options.tokenizer.clone(),
            min_tokens: sampling.min_tokens,
            token_count: 0,
            ended: None,
        }
    }

    /// Returns the stop condition that the pushed tokens contain.
    pub fn stop(&self) -> Option<Stop> {
        match self.ended.as_ref()? {
            Ended::StopToken(_) => Some(Stop::Token),
            Ended::StopText(_) => Some(Stop::Text),
        }
    }

    /// Adds the next tokens. Tokens behind a stop do not belong to the answer.
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
                // Only a stop token that the client named is reported to the client.
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

    /// Ends the answer. A stop found here takes precedence over the node's finish reason.
    pub fn finish(&mut self, reason: FinishReason) -> Conclusion {
        let text = self.stream.take().map(TextStream::finish).unwrap_or_default();
        let completion_tokens = self.token_count;
        let (reason, stopped_by) = match self.ended.take() {
            Some(Ended::StopToken(by)) => (FinishReason::Stop, by),
            Some(Ended::StopText(by)) => (FinishReason::Stop, Some(by)),
            None => (reason, None),
        };
        Conclusion { text, reason, stopped_by, completion_tokens }
    }
}
