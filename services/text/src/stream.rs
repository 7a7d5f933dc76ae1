//! Converts one choice's tokens to the text that its client sees.

use std::sync::Arc;

use crate::{
    detokenizer::{Detokenizer, DetokenizerOptions},
    stop::StopStrings,
    tokenizer::Tokenizer,
};

/// Options of a text stream.
#[derive(Clone, Debug)]
pub struct TextStreamOptions {
    pub skip_special: bool,
    /// Number of first tokens in which a stop string is ordinary text.
    pub min_tokens: u32,
}

impl Default for TextStreamOptions {
    fn default() -> Self {
        Self { skip_special: true, min_tokens: 0 }
    }
}

/// Result of [`TextStream::push`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextDelta {
    /// Final text: whole characters, none of which may belong to a stop string.
    pub text: String,
    /// Set when a stop string is complete; the answer ends here.
    pub stopped: Option<StopHit>,
}

/// Position of the stop string that ended an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopHit {
    /// Index in the request's list of stop strings.
    pub stop_index: usize,
    /// Number of tokens up to and including the one that completed the stop string. Later tokens
    /// are not part of the answer: they are not counted in the usage and have no logprobs.
    pub token_count: u32,
}

/// Headers of messages in an answer, in which a stop string is ordinary text. Text before the first
/// of the `begin` tokens belongs to no header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderTokens {
    /// Tokens after which a header begins.
    pub begin: Vec<u32>,
    /// Last token of a header.
    pub end: u32,
    /// Maximum length of a header in bytes. Text after this length is no header, even if the last
    /// token of the header is missing.
    pub bytes_max: usize,
}

/// Detokenizer and stop strings of one choice.
///
/// Lifecycle: [`push`](Self::push) until it reports a stop, or [`finish`](Self::finish) when the
/// answer ended otherwise (EOS, length, abort). Tokens pushed after a stop are ignored. EOS itself
/// is a special token: with `skip_special` it gives no text.
///
/// For the text of single tokens, which log-probabilities need, use [`Tokenizer::token_text`] and
/// [`Tokenizer::token_bytes`].
#[derive(Clone, Debug)]
pub struct TextStream {
    detokenizer: Detokenizer,
    stops: StopStrings,
    headers: Option<HeaderTokens>,
    /// Bytes of the current header so far; `None` outside a header.
    header_bytes: Option<usize>,
    min_tokens: u32,
    token_count: u32,
    stopped: Option<StopHit>,
}

impl TextStream {
    pub fn new(tokenizer: Arc<Tokenizer>, stops: StopStrings, options: TextStreamOptions) -> Self {
        let TextStreamOptions { skip_special, min_tokens } = options;
        let detokenizer =
            Detokenizer::new(tokenizer, DetokenizerOptions { skip_special, continues: true });
        Self {
            detokenizer,
            stops,
            headers: None,
            header_bytes: None,
            min_tokens,
            token_count: 0,
            stopped: None,
        }
    }

    /// Does not apply stop strings within these headers.
    pub fn with_headers(mut self, headers: Option<HeaderTokens>) -> Self {
        self.headers = headers;
        self
    }

    /// Includes the names of these special tokens in the text even with `skip_special`.
    pub fn showing(mut self, tokens: Arc<[u32]>) -> Self {
        self.detokenizer = self.detokenizer.showing(tokens);
        self
    }

    /// Processes the next tokens of the answer.
    pub fn push(&mut self, ids: &[u32]) -> TextDelta {
        let mut text = String::new();
        let mut piece = String::new();
        for &id in ids {
            if self.stopped.is_some() {
                break;
            }
            self.token_count += 1;
            piece.clear();
            self.detokenizer.push_to(id, &mut piece);
            let is_within_header = self.is_within_header(id, piece.len());
            if self.token_count <= self.min_tokens || is_within_header {
                text.push_str(&self.stops.push_unstoppable(&piece));
                if is_within_header {
                    text.push_str(&self.stops.restart());
                }
                continue;
            }
            let progress = self.stops.push(&piece);
            match text.is_empty() {
                true => text = progress.emit,
                false => text.push_str(&progress.emit),
            }
            self.stopped = progress
                .stopped
                .map(|stop_index| StopHit { stop_index, token_count: self.token_count });
        }
        TextDelta { text, stopped: self.stopped }
    }

    /// Returns whether the next token, which has `bytes` of text, belongs to a header.
    fn is_within_header(&mut self, id: u32, bytes: usize) -> bool {
        let Some(headers) = &self.headers else { return false };
        let length = self.header_bytes.map(|before| before + bytes);
        let length = length.filter(|&length| length <= headers.bytes_max);
        self.header_bytes = match headers.begin.contains(&id) {
            true => Some(0),
            false => length.filter(|_| id != headers.end),
        };
        length.is_some()
    }

    /// Ends an answer without a stop string and returns the rest of its text.
    pub fn finish(mut self) -> String {
        if self.stopped.is_some() {
            return String::new();
        }
        let rest = self.detokenizer.finish();
        self.stops.push_unstoppable(&rest) + &self.stops.finish()
    }
}
