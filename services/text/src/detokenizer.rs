//! Detokenizer: converts tokens to text one at a time.
//!
//! A token may end in the middle of a character, so text lags behind tokens. [`Detokenizer::push`]
//! returns only final text: never half a character, and never a U+FFFD for bytes that a later token
//! may complete. Pushed text and [`finish`](Detokenizer::finish) together equal the decoding of all
//! tokens at once.

use std::sync::Arc;

use crate::tokenizer::Tokenizer;

/// Options of a detokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DetokenizerOptions {
    /// Whether the text omits special tokens.
    pub skip_special: bool,
    /// Whether the text continues a prompt. When false, the text is separate, and the space that
    /// some vocabularies put before the first word is dropped.
    pub continues: bool,
}

/// Detokenizer of one token sequence. Each push takes time proportional to the token's bytes.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    options: DetokenizerOptions,
    /// Special tokens that are part of the text even with `skip_special`.
    shown: Arc<[u32]>,
    utf8: Utf8Stream,
    /// Character to drop from the start of the text, and its maximum count.
    strip: Option<(char, usize)>,
}

impl Detokenizer {
    pub fn new(tokenizer: Arc<Tokenizer>, options: DetokenizerOptions) -> Self {
        let strip = if options.continues { None } else { tokenizer.strip_start() };
        Self { tokenizer, options, shown: Arc::default(), utf8: Utf8Stream::default(), strip }
    }

    /// Includes the names of these special tokens in the text even with `skip_special`.
    pub fn showing(mut self, tokens: Arc<[u32]>) -> Self {
        self.shown = tokens;
        self
    }

    /// Adds a token and returns the final text. Ids outside the vocabulary give no text.
    pub fn push(&mut self, id: u32) -> String {
        let mut text = String::new();
        self.push_to(id, &mut text);
        text
    }

    /// Adds a token as [`push`](Self::push) does, appending to `text`.
    pub fn push_to(&mut self, id: u32, text: &mut String) {
        let skips = self.options.skip_special && self.tokenizer.is_special(id);
        if skips && !self.shown.contains(&id) {
            return;
        }
        let Some(bytes) = self.tokenizer.token_bytes(id) else { return };
        let start = text.len();
        self.utf8.push(bytes, text);
        strip_start(&mut self.strip, text, start);
    }

    /// Returns the last text: U+FFFD when the tokens ended within a character.
    pub fn finish(mut self) -> String {
        let mut text = String::new();
        self.utf8.finish(&mut text);
        text
    }
}

/// Drops leading characters of `text[start..]` as `strip` requests.
fn strip_start(strip: &mut Option<(char, usize)>, text: &mut String, start: usize) {
    while let Some((char, left)) = strip
        && let Some(first) = text[start..].chars().next()
    {
        if *left == 0 || first != *char {
            *strip = None;
        } else {
            text.remove(start);
            *left -= 1;
        }
    }
}

/// Decoder of UTF-8 from byte pieces of any size. Invalid bytes become U+FFFD as in
/// [`String::from_utf8_lossy`], which is also Python's rule.
#[derive(Clone, Debug, Default)]
struct Utf8Stream {
    /// First bytes of an incomplete character, at most three.
    pending: Vec<u8>,
}

impl Utf8Stream {
    fn push(&mut self, bytes: &[u8], text: &mut String) {
        if self.pending.is_empty() {
            self.take(bytes, text);
        } else {
            let mut joined = std::mem::take(&mut self.pending);
            joined.extend_from_slice(bytes);
            self.take(&joined, text);
        }
    }

    fn take(&mut self, mut bytes: &[u8], text: &mut String) {
        loop {
            let error = match std::str::from_utf8(bytes) {
                Ok(valid) => return text.push_str(valid),
                Err(error) => error,
            };
            let (valid, rest) = bytes.split_at(error.valid_up_to());
            text.push_str(std::str::from_utf8(valid).expect("valid up to here"));
            match error.error_len() {
                Some(invalid) => {
                    text.push(char::REPLACEMENT_CHARACTER);
                    bytes = &rest[invalid..];
                }
                None => {
                    debug_assert!(rest.len() <= 3);
                    return self.pending.extend_from_slice(rest);
                }
            }
        }
    }

    fn finish(&mut self, text: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn incomplete_characters_wait_for_their_last_byte() {
        let mut stream = Utf8Stream::default();
        let mut text = String::new();
        for byte in &"👍".as_bytes()[..3] {
            stream.push(&[*byte], &mut text);
            assert_eq!(text, "");
        }
        stream.push(&"👍".as_bytes()[3..], &mut text);
        assert_eq!(text, "👍");
    }

    #[test]
    fn invalid_utf8_is_replaced_once_it_cannot_be_completed() {
        let mut stream = Utf8Stream::default();
        let mut text = String::new();
        stream.push(b"\xe2\x82", &mut text);
        assert_eq!(text, "");
        stream.push(b"a\xf0", &mut text);
        assert_eq!(text, "\u{fffd}a");
        stream.finish(&mut text);
        assert_eq!(text, "\u{fffd}a\u{fffd}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn split_bytes_decode_to_the_lossy_text(
            pieces in prop::collection::vec(
                prop_oneof![
                    prop::collection::vec(any::<u8>(), 0..4),
                    prop::collection::vec(prop_oneof![
                        Just(0xf0), Just(0x9f), Just(0x91), Just(0x8d), Just(0xe2), Just(0x82),
                        Just(0xed), Just(0xa0), Just(0x41),
                    ], 0..4),
                ],
                0..24,
            ),
        ) {
            let mut stream = Utf8Stream::default();
            let mut text = String::new();
            for piece in &pieces {
                stream.push(piece, &mut text);
            }
            stream.finish(&mut text);
            prop_assert_eq!(text, String::from_utf8_lossy(&pieces.concat()).into_owned());
        }

        #[test]
        fn leading_characters_are_dropped_however_the_text_is_split(
            pieces in prop::collection::vec("[ a]{0,3}", 0..6), count in 0usize..3,
        ) {
            let mut strip = Some((' ', count));
            let mut text = String::new();
            for piece in &pieces {
                let start = text.len();
                text.push_str(piece);
                strip_start(&mut strip, &mut text, start);
            }
            let whole = pieces.concat();
            let spaces = whole.chars().take_while(|c| *c == ' ').count().min(count);
            prop_assert_eq!(text, &whole[spaces..]);
        }
    }
}
