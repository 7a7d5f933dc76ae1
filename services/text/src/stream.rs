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

/// Headers of messages in an answer, in which a stop string is ordinary text.
#[derive(Clone, Copy, Debug)]
pub struct HeaderTokens {
    /// Tokens that begin a header.
    pub begin: [Option<u32>; 3],
    /// Last token of a header.
    pub end: u32,
    /// Maximum length of a header in bytes. Longer text is not part of the header, even if the
    /// `end` token is missing.
    pub bytes_max: usize,
    /// Returns whether text at the beginning of the answer, before the first `begin` token, may
    /// belong to a header. `None` if the answer does not begin with a header.
    pub may_open: Option<fn(&str) -> bool>,
}

/// Search for the headers of messages in the tokens of an answer.
#[derive(Clone, Debug)]
pub struct HeaderSearch {
    tokens: HeaderTokens,
    /// Bytes of the current header so far; `None` outside a header.
    bytes: Option<usize>,
}

impl HeaderSearch {
    pub fn new(tokens: HeaderTokens) -> Self {
        Self { tokens, bytes: None }
    }

    /// Returns whether the next token, which has `bytes` bytes of text, belongs to a header. Tokens
    /// before the first `begin` token do not belong to a header.
    pub fn takes(&mut self, id: u32, bytes: usize) -> bool {
        let HeaderTokens { end, bytes_max, .. } = self.tokens;
        let length = self.bytes.map(|before| before + bytes).filter(|&length| length <= bytes_max);
        let begins = self.begins_with(id);
        self.bytes = if begins { Some(0) } else { length.filter(|_| id != end) };
        begins || length.is_some()
    }

    fn begins_with(&self, id: u32) -> bool {
        self.tokens.begin.contains(&Some(id))
    }
}

/// Text at the beginning of an answer that may belong to a header.
#[derive(Clone, Debug)]
struct Opening {
    may_be_header: fn(&str) -> bool,
    text: String,
    /// Bytes of the text up to the end of each token.
    ends: Vec<usize>,
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
    headers: Option<HeaderSearch>,
    /// `Some` until it is known whether the text so far belongs to a header.
    opening: Option<Opening>,
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
            opening: None,
            min_tokens,
            token_count: 0,
            stopped: None,
        }
    }

    /// Does not apply stop strings within these headers.
    pub fn with_headers(mut self, headers: Option<HeaderTokens>) -> Self {
        let may_open = headers.and_then(|headers| headers.may_open);
        self.opening = may_open.map(|may_be_header| Opening {
            may_be_header,
            text: String::new(),
            ends: Vec::new(),
        });
        self.headers = headers.map(HeaderSearch::new);
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
            match self.opening.take() {
                Some(opening) => self.take_opening(opening, id, &piece, &mut text),
                None => self.take_token(id, &piece, &mut text),
            }
        }
        TextDelta { text, stopped: self.stopped }
    }

    /// Processes a token while the text so far may belong to a header. If the text turns out not to
    /// belong to a header, searches the text for stop strings. A stop string that is found ends the
    /// answer with this token.
    fn take_opening(&mut self, mut opening: Opening, id: u32, piece: &str, text: &mut String) {
        if self.headers.as_ref().is_some_and(|headers| headers.begins_with(id)) {
            text.push_str(&opening.text);
            return self.take_token(id, piece, text);
        }
        opening.text.push_str(piece);
        opening.ends.push(opening.text.len());
        if (opening.may_be_header)(&opening.text) {
            self.opening = Some(opening);
            return;
        }
        let mut start = 0;
        for (index, end) in (1..).zip(opening.ends) {
            if self.stopped.is_none() {
                self.take_text(&opening.text[start..end], index <= self.min_tokens, text);
                start = end;
            }
        }
    }

    fn take_token(&mut self, id: u32, piece: &str, text: &mut String) {
        let headers = self.headers.as_mut();
        let is_within_header = headers.is_some_and(|headers| headers.takes(id, piece.len()));
        self.take_text(piece, is_within_header || self.token_count <= self.min_tokens, text);
        if is_within_header {
            text.push_str(&self.stops.restart());
        }
    }

    /// Processes the text of a token. `is_plain`: a stop string that ends in it is ordinary text.
    fn take_text(&mut self, piece: &str, is_plain: bool, text: &mut String) {
        if is_plain {
            return text.push_str(&self.stops.push_unstoppable(piece));
        }
        let progress = self.stops.push(piece);
        match text.is_empty() {
            true => *text = progress.emit,
            false => text.push_str(&progress.emit),
        }
        self.stopped = progress
            .stopped
            .map(|stop_index| StopHit { stop_index, token_count: self.token_count });
    }

    /// Ends an answer without a stop string and returns the rest of its text.
    pub fn finish(mut self) -> String {
        if self.stopped.is_some() {
            return String::new();
        }
        let opening = self.opening.map_or(String::new(), |opening| opening.text);
        let rest = opening + &self.detokenizer.finish();
        self.stops.push_unstoppable(&rest) + &self.stops.finish()
    }
}
