//! One choice's tokens to the text its client sees.

use std::sync::Arc;

use crate::{
    detokenizer::{Detokenizer, DetokenizerOptions},
    stop::StopStrings,
    tokenizer::Tokenizer,
};

/// How one choice's tokens become text.
#[derive(Clone, Debug)]
pub struct TextStreamOptions {
    pub skip_special: bool,
    /// A stop string that completes within this many tokens is text.
    pub min_tokens: u32,
}

impl Default for TextStreamOptions {
    fn default() -> Self {
        Self { skip_special: true, min_tokens: 0 }
    }
}

/// What some tokens brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextDelta {
    /// Text that is certain: whole characters, none of which may belong to a stop string.
    pub text: String,
    /// A stop string is complete; the answer ends here.
    pub stopped: Option<StopHit>,
}

/// Where a stop string ended an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopHit {
    /// Index in the request's list of stop strings.
    pub stop_index: usize,
    /// Tokens of this stream up to and including the one that completed it. Later ones are not part
    /// of the answer: they count in no usage and give no logprobs.
    pub token_count: u32,
}

/// Detokeniser and stop strings of one choice.
///
/// Lifecycle: [`push`](Self::push) until it reports a stop, or [`finish`](Self::finish) when the
/// answer ended otherwise (EOS, length, abort). Tokens pushed after a stop are ignored. EOS itself is a
/// special token: with `skip_special` it gives no text.
///
/// Log-probabilities want text for single tokens; that is [`Tokenizer::token_text`] and
/// [`Tokenizer::token_bytes`].
#[derive(Clone, Debug)]
pub struct TextStream {
    detokenizer: Detokenizer,
    stops: StopStrings,
    min_tokens: u32,
    token_count: u32,
    stopped: Option<StopHit>,
}

impl TextStream {
    pub fn new(tokenizer: Arc<Tokenizer>, stops: StopStrings, options: TextStreamOptions) -> Self {
        let TextStreamOptions { skip_special, min_tokens } = options;
        let detokenizer =
            Detokenizer::new(tokenizer, DetokenizerOptions { skip_special, continues: true });
        Self { detokenizer, stops, min_tokens, token_count: 0, stopped: None }
    }

    /// These special tokens give their names as text whatever the options say.
    pub fn showing(mut self, tokens: Arc<[u32]>) -> Self {
        self.detokenizer = self.detokenizer.showing(tokens);
        self
    }

    /// Takes the next tokens of the answer.
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
            if self.token_count <= self.min_tokens {
                text.push_str(&self.stops.push_unstoppable(&piece));
                continue;
            }
            let progress = self.stops.push(&piece);
            text.push_str(&progress.emit);
            self.stopped = progress
                .stopped
                .map(|stop_index| StopHit { stop_index, token_count: self.token_count });
        }
        TextDelta { text, stopped: self.stopped }
    }

    /// Tokens taken, up to the stop.
    pub fn token_count(&self) -> u32 {
        self.token_count
    }

    /// The answer ended without a stop string: the rest of its text.
    pub fn finish(mut self) -> String {
        if self.stopped.is_some() {
            return String::new();
        }
        let rest = self.detokenizer.finish();
        self.stops.push_unstoppable(&rest) + &self.stops.finish()
    }
}
