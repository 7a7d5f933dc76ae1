//! Stop strings: text that ends an answer where it appears.
//!
//! Text arrives in pieces of any size. Only a suffix that may begin a stop string is held back; all
//! other text is emitted at once. The split into pieces does not affect the reported stop string:
//! the first that is complete, and the longest of those that are complete at the same character.

/// Maximum number of stop strings per request. OpenAI allows 4; vLLM sets no limit.
pub const STOP_STRINGS_MAX: usize = 32;
/// Maximum bytes of a stop string. Also bounds the text that is held back.
pub const STOP_STRING_BYTES_MAX: usize = 1024;

/// Error in a list of stop strings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StopStringError {
    #[error("stop has {count} strings; at most {STOP_STRINGS_MAX} are allowed")]
    TooMany { count: usize },
    #[error("stop[{index}] is empty; a stop string has at least one character")]
    Empty { index: usize },
    #[error("stop[{index}] has {bytes} bytes; at most {STOP_STRING_BYTES_MAX} are allowed")]
    TooLong { index: usize, bytes: usize },
}

/// Result of one piece of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopProgress {
    /// Text that is certain to belong to the answer.
    pub emit: String,
    /// Index of the stop string that is now complete. Later text is not emitted.
    pub stopped: Option<usize>,
}

/// Search for one request's stop strings in the text of one choice.
///
/// Lifecycle: [`push`](Self::push) until it reports a stop, or [`finish`](Self::finish) when the
/// answer ended otherwise. After either, pushed text is ignored.
#[derive(Clone, Debug)]
pub struct StopStrings {
    patterns: Vec<Pattern>,
    include_stop: bool,
    /// End of the text so far that is not emitted yet: a proper prefix of some pattern.
    held: String,
    done: bool,
}

impl StopStrings {
    /// Creates the search. With `include_stop` the stop string itself is part of the answer, so
    /// nothing is held back.
    pub fn new<S: AsRef<str>>(stops: &[S], include_stop: bool) -> Result<Self, StopStringError> {
        if stops.len() > STOP_STRINGS_MAX {
            return Err(StopStringError::TooMany { count: stops.len() });
        }
        let pattern = |(index, stop): (usize, &S)| {
            let stop = stop.as_ref();
            match stop.len() {
                0 => Err(StopStringError::Empty { index }),
                bytes if bytes > STOP_STRING_BYTES_MAX => {
                    Err(StopStringError::TooLong { index, bytes })
                }
                _ => Ok(Pattern::new(stop)),
            }
        };
        let patterns = stops.iter().enumerate().map(pattern).collect::<Result<_, _>>()?;
        Ok(Self { patterns, include_stop, held: String::new(), done: false })
    }

    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// Processes the next piece of text.
    pub fn push(&mut self, text: &str) -> StopProgress {
        self.advance(text, true)
    }

    /// Processes text in which a stop string may begin. A stop string that ends in this text is
    /// ordinary text, for example within `min_tokens`.
    pub fn push_unstoppable(&mut self, text: &str) -> String {
        self.advance(text, false).emit
    }

    /// Restarts the search: stop strings begin only in later text. Returns the held-back text.
    pub fn restart(&mut self) -> String {
        for pattern in &mut self.patterns {
            pattern.matched = 0;
        }
        std::mem::take(&mut self.held)
    }

    /// Returns the held-back text when the answer ended without a stop string.
    pub fn finish(&mut self) -> String {
        self.done = true;
        std::mem::take(&mut self.held)
    }

    fn advance(&mut self, text: &str, may_stop: bool) -> StopProgress {
        if self.done {
            return StopProgress::default();
        }
        if self.patterns.is_empty() {
            return StopProgress { emit: text.to_owned(), stopped: None };
        }
        for (at, &byte) in text.as_bytes().iter().enumerate() {
            let complete = self.feed(byte);
            if let (Some(index), true) = (complete, may_stop) {
                return self.stop(&text[..=at], index);
            }
        }
        self.held.push_str(text);
        let keep = if self.include_stop { 0 } else { self.longest_partial() };
        let rest = self.held.split_off(self.held.len() - keep);
        StopProgress { emit: std::mem::replace(&mut self.held, rest), stopped: None }
    }

    /// Advances every pattern by one byte. Returns the longest complete pattern, the first among
    /// equals.
    fn feed(&mut self, byte: u8) -> Option<usize> {
        let mut complete: Option<usize> = None;
        for index in 0..self.patterns.len() {
            if self.patterns[index].feed(byte) {
                let longer = |best: usize| {
                    self.patterns[index].bytes.len() > self.patterns[best].bytes.len()
                };
                if complete.is_none_or(longer) {
                    complete = Some(index);
                }
            }
        }
        complete
    }

    /// Ends the answer after `text`, whose last byte completes pattern `index`. Both are UTF-8, so
    /// the cuts are between characters.
    fn stop(&mut self, text: &str, index: usize) -> StopProgress {
        self.done = true;
        let mut emit = std::mem::take(&mut self.held);
        emit.push_str(text);
        if !self.include_stop {
            emit.truncate(emit.len() - self.patterns[index].bytes.len());
        }
        StopProgress { emit, stopped: Some(index) }
    }

    /// Returns the length of the text's longest suffix that is a proper prefix of a pattern.
    /// Patterns begin with a character's first byte, so the suffix does too.
    fn longest_partial(&self) -> usize {
        self.patterns.iter().map(|pattern| pattern.matched).max().unwrap_or(0)
    }
}

/// Stop string as a Knuth–Morris–Pratt automaton.
#[derive(Clone, Debug)]
struct Pattern {
    bytes: Box<[u8]>,
    /// `borders[n]`: length of the longest proper border of the first `n + 1` bytes.
    borders: Box<[u16]>,
    /// Bytes of the pattern that the text now ends with; less than the whole.
    matched: usize,
}

impl Pattern {
    fn new(stop: &str) -> Self {
        const { assert!(STOP_STRING_BYTES_MAX <= u16::MAX as usize) };
        let bytes: Box<[u8]> = stop.as_bytes().into();
        let mut borders = vec![0u16; bytes.len()];
        let mut border = 0;
        for at in 1..bytes.len() {
            while border > 0 && bytes[at] != bytes[border] {
                border = usize::from(borders[border - 1]);
            }
            border += usize::from(bytes[at] == bytes[border]);
            borders[at] = border as u16;
        }
        Self { bytes, borders: borders.into(), matched: 0 }
    }

    /// Advances by one byte; returns true when the text now ends with the whole pattern.
    fn feed(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = usize::from(self.borders[self.matched - 1]);
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        let complete = self.matched == self.bytes.len();
        if complete {
            self.matched = usize::from(self.borders[self.matched - 1]);
        }
        complete
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], include_stop: bool, pieces: &[&str]) -> (String, Option<usize>) {
        let mut matcher = StopStrings::new(stops, include_stop).unwrap();
        let mut text = String::new();
        for piece in pieces {
            let progress = matcher.push(piece);
            text.push_str(&progress.emit);
            if progress.stopped.is_some() {
                return (text, progress.stopped);
            }
        }
        text.push_str(&matcher.finish());
        (text, None)
    }

    /// Searches in the simplest way: earliest end, then longest, then lowest index.
    fn naive(stops: &[String], include_stop: bool, text: &str) -> (String, Option<usize>) {
        for end in 0..=text.len() {
            let mut best: Option<usize> = None;
            for (index, stop) in stops.iter().enumerate() {
                let longer = best.is_none_or(|best| stop.len() > stops[best].len());
                if text.as_bytes()[..end].ends_with(stop.as_bytes()) && longer {
                    best = Some(index);
                }
            }
            if let Some(index) = best {
                let cut = if include_stop { end } else { end - stops[index].len() };
                return (text[..cut].to_owned(), Some(index));
            }
        }
        (text.to_owned(), None)
    }

    #[test]
    fn a_stop_string_cut_anywhere_is_found_and_not_emitted() {
        assert_eq!(run(&["END"], false, &["one E", "N", "D two"]), ("one ".into(), Some(0)));
        assert_eq!(run(&["END"], true, &["one E", "N", "D two"]), ("one END".into(), Some(0)));
    }

    #[test]
    fn only_a_prefix_of_a_stop_string_is_held_back() {
        let mut matcher = StopStrings::new(&["aab"], false).unwrap();
        assert_eq!(matcher.push("xaa").emit, "x");
        assert_eq!(matcher.push("a").emit, "a");
        assert_eq!(matcher.held.len(), 2);
        assert_eq!(matcher.push("c").emit, "aac");
        assert_eq!(matcher.push("a").emit, "");
        assert_eq!(matcher.finish(), "a");
    }

    #[test]
    fn the_first_complete_stop_string_wins_in_any_list_order() {
        assert_eq!(run(&["abcd", "bc"], false, &["xabcd"]), ("xa".into(), Some(1)));
        assert_eq!(run(&["b", "ab"], false, &["xab"]), ("x".into(), Some(1)));
        assert_eq!(run(&["ab", "ab"], false, &["xab"]), ("x".into(), Some(0)));
    }

    #[test]
    fn characters_of_several_bytes_are_never_cut() {
        // è and é differ in their last byte only: the partial match ends inside a character.
        assert_eq!(run(&["é"], false, &["aè", "é"]), ("aè".into(), Some(0)));
        assert_eq!(run(&["👍🏽"], false, &["👍", "👍", "🏽!"]), ("👍".into(), Some(0)));
        assert_eq!(run(&["\u{0301}x"], false, &["e\u{0301}", "y"]), ("e\u{0301}y".into(), None));
    }

    #[test]
    fn a_stop_string_within_min_tokens_is_text() {
        let mut matcher = StopStrings::new(&["ab"], false).unwrap();
        assert_eq!(matcher.push_unstoppable("abab"), "abab");
        assert_eq!(matcher.push_unstoppable("xa"), "x");
        assert_eq!(matcher.push("b"), StopProgress { emit: String::new(), stopped: Some(0) });
    }

    #[test]
    fn text_after_a_stop_is_ignored() {
        let mut matcher = StopStrings::new(&["."], false).unwrap();
        assert_eq!(matcher.push("a.b").emit, "a");
        assert_eq!(matcher.push("c"), StopProgress::default());
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn oversized_stop_lists_are_rejected_with_the_limit() {
        let many = vec!["a"; STOP_STRINGS_MAX + 1];
        assert_eq!(
            StopStrings::new(&many, false).unwrap_err().to_string(),
            "stop has 33 strings; at most 32 are allowed"
        );
        assert_eq!(
            StopStrings::new(&["a", ""], false).unwrap_err(),
            StopStringError::Empty { index: 1 }
        );
        let long = "a".repeat(STOP_STRING_BYTES_MAX + 1);
        assert_eq!(
            StopStrings::new(&[long], false).unwrap_err(),
            StopStringError::TooLong { index: 0, bytes: STOP_STRING_BYTES_MAX + 1 }
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn stop_strings_are_found_however_the_text_is_split(
            stops in prop::collection::vec("[abé👍\u{301}\u{200d}א\0\u{feff}]{1,4}", 0..4),
            pieces in prop::collection::vec("[abé👍\u{301}\u{200d}א\0\u{feff}]{0,6}", 0..8),
            include_stop: bool,
        ) {
            let stops_ref: Vec<&str> = stops.iter().map(String::as_str).collect();
            let pieces_ref: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let expected = naive(&stops, include_stop, &pieces.concat());
            prop_assert_eq!(run(&stops_ref, include_stop, &pieces_ref), expected);
        }

        #[test]
        fn held_back_text_is_as_short_as_possible(
            stops in prop::collection::vec("[abé]{1,4}", 1..4),
            pieces in prop::collection::vec("[abé]{0,6}", 0..8),
        ) {
            let mut matcher = StopStrings::new(&stops, false).unwrap();
            let mut whole = String::new();
            for piece in &pieces {
                whole.push_str(piece);
                if matcher.push(piece).stopped.is_some() {
                    break;
                }
                let needed = (0..=whole.len())
                    .rev()
                    .find(|&n| {
                        let tail = &whole.as_bytes()[whole.len() - n..];
                        stops.iter().any(|stop| {
                            stop.len() > n && stop.as_bytes().starts_with(tail)
                        })
                    })
                    .unwrap_or(0);
                prop_assert_eq!(matcher.held.len(), needed);
            }
        }
    }
}
