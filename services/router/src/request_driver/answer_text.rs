//! Text of one answer: detokenizes emitted tokens, and finds stop tokens and stop strings.

use std::sync::Arc;

use proto::v1::{FinishReason, Sampling, Token};
use text::{TextStream, TextStreamOptions, Tokenizer};

use super::{
    events::{AnswerEnd, StoppedBy},
    prepare::PreparedRequest,
};
use crate::request_core::{FinishedAnswer, Stop};

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

/// Stop condition that ended the answer.
#[derive(Debug)]
enum Ended {
    /// The last token is a stop token; the answer excludes its text.
    StopToken(Option<StoppedBy>),
    /// A stop string is complete.
    StopText(StoppedBy),
}

impl AnswerText {
    pub fn new(request: &PreparedRequest, sampling: &Sampling) -> Self {
        let tokenizer = request.model.text.tokenizer();
        // The tool-call parser needs the special tokens that mark tool calls as text.
        let shown_tokens = request.calls.as_ref();
        let shown_tokens = shown_tokens.map(|calls| calls.format.shown_tokens(tokenizer));
        let shown_tokens = shown_tokens.unwrap_or_default();
        let stream = || {
            let (skip_special, min_tokens) = (request.skip_special, sampling.min_tokens);
            let options = TextStreamOptions { skip_special, min_tokens };
            TextStream::new(tokenizer.clone(), request.stops.clone(), options)
                .showing(shown_tokens.into())
        };
        let mut stop_token_ids = match sampling.ignore_stop_tokens {
            true => Vec::new(),
            false => sampling.stop_token_ids.clone(),
        };
        stop_token_ids.sort_unstable();
        Self {
            stream: request.with_text.then(stream),
            stop_texts: request.stop_texts.clone(),
            stop_token_ids,
            tokenizer: tokenizer.clone(),
            min_tokens: sampling.min_tokens,
            token_count: 0,
            ended: None,
        }
    }

    /// Returns the stop condition that ended the answer, if any.
    pub fn stop(&self) -> Option<Stop> {
        match self.ended.as_ref()? {
            Ended::StopToken(_) => Some(Stop::Token),
            Ended::StopText(_) => Some(Stop::Text),
        }
    }

    /// Adds the next tokens. Returns the tokens that belong to the answer, and their text. Tokens after a
    /// stop are dropped.
    pub fn push(&mut self, mut tokens: Vec<Token>) -> (Vec<Token>, String) {
        if self.ended.is_some() {
            return (vec![], String::new());
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
        (tokens, delta.text)
    }

    /// Ends the answer. A stop found here takes precedence over the node's finish reason.
    pub fn finish(&mut self, choice: u32, finished: FinishedAnswer) -> AnswerEnd {
        let (reason, stopped_by) = match self.ended.take() {
            Some(Ended::StopToken(by)) => (FinishReason::Stop, by),
            Some(Ended::StopText(by)) => (FinishReason::Stop, Some(by)),
            None => (finished.reason, None),
        };
        AnswerEnd {
            choice,
            reason,
            stopped_by,
            text: self.stream.take().map(TextStream::finish).unwrap_or_default(),
            prompt_tokens: finished.prompt_tokens,
            completion_tokens: self.token_count,
            cached_tokens: finished.cached_tokens,
            hand_over: finished.hand_over,
        }
    }
}
