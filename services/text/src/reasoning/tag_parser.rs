//! Separates the reasoning at the beginning of an answer from the rest of its text.
//!
//! Text arrives in pieces of any size, which do not affect the result. Text is emitted at once,
//! except white space and the beginning of a tag. White space around a tag belongs to the tag.
//! Without a closing tag the reasoning extends to the end of the answer.

use super::{ReasoningFormat, ReasoningStart, SplitText, partial_tag};

/// Parser of one answer.
///
/// Lifecycle: [`push`](Self::push) for each piece of text, then [`finish`](Self::finish).
#[derive(Clone, Debug)]
pub(super) struct TagParser {
    format: &'static ReasoningFormat,
    state: ReasoningState,
    /// Text that is held back: white space and the beginning of a tag.
    held: String,
    /// Bytes of white space at the beginning of `held` that need not be searched again.
    blank: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReasoningState {
    /// At the beginning of the answer, where reasoning may begin.
    Undecided,
    /// After the opening tag: only white space since.
    Opened,
    Reasoning,
    /// After the closing tag: only white space since.
    Closed,
    /// The rest of the answer.
    Rest,
}

impl TagParser {
    /// Creates the parser of an answer that begins at `start`.
    pub(super) fn new(format: &'static ReasoningFormat, start: ReasoningStart) -> Self {
        let state = match start {
            ReasoningStart::Undecided => ReasoningState::Undecided,
            ReasoningStart::Reasoning => ReasoningState::Opened,
            ReasoningStart::Answer => ReasoningState::Rest,
        };
        Self { format, state, held: String::new(), blank: 0 }
    }

    /// Returns whether no reasoning has begun, but may begin.
    pub(super) fn is_undecided(&self) -> bool {
        self.state == ReasoningState::Undecided
    }

    /// Returns whether the text so far ends within the reasoning.
    pub(super) fn is_thinking(&self) -> bool {
        matches!(self.state, ReasoningState::Opened | ReasoningState::Reasoning)
    }

    /// Returns whether all further text belongs to the rest of the answer.
    pub(super) fn is_done(&self) -> bool {
        self.state == ReasoningState::Rest
    }

    /// Processes the next piece of text.
    pub(super) fn push(&mut self, text: String) -> SplitText {
        if self.held.is_empty() {
            match self.state {
                ReasoningState::Reasoning if self.is_reasoning(&text) => {
                    return SplitText::of_reasoning(text);
                }
                ReasoningState::Rest => return SplitText::of_rest(text),
                _ => {}
            }
        }
        self.held.push_str(&text);
        let mut split = SplitText::default();
        loop {
            match self.state {
                ReasoningState::Undecided => {
                    let text = self.held[self.blank..].trim_start();
                    if let Some(reasoning) = text.strip_prefix(self.format.open) {
                        (self.held, self.blank) = (reasoning.to_owned(), 0);
                        self.state = ReasoningState::Opened;
                    } else if self.format.open.starts_with(text) {
                        self.blank = self.held.len() - text.len();
                        return split;
                    } else {
                        self.blank = 0;
                        self.state = ReasoningState::Rest;
                    }
                }
                ReasoningState::Opened | ReasoningState::Closed => {
                    self.held.drain(..self.held.len() - self.held.trim_start().len());
                    if self.held.is_empty() {
                        return split;
                    }
                    self.state = match self.state {
                        ReasoningState::Opened => ReasoningState::Reasoning,
                        _ => ReasoningState::Rest,
                    };
                }
                ReasoningState::Reasoning => {
                    let blank = std::mem::take(&mut self.blank);
                    if let Some(at) = self.held[blank..].find(self.format.close) {
                        let end = blank + at;
                        split.reasoning.push_str(self.held[..end].trim_end());
                        self.held.drain(..end + self.format.close.len());
                        self.state = ReasoningState::Closed;
                        continue;
                    }
                    let end = self.held.len() - partial_tag(&self.held, self.format.close);
                    let kept = self.held[blank..end].trim_end().len();
                    if kept == 0 {
                        self.blank = end;
                        return split;
                    }
                    let rest = self.held.split_off(blank + kept);
                    split.reasoning.push_str(&std::mem::replace(&mut self.held, rest));
                    self.blank = end - blank - kept;
                    return split;
                }
                ReasoningState::Rest => {
                    split.rest = std::mem::take(&mut self.held);
                    return split;
                }
            }
        }
    }

    /// Returns whether text within the reasoning is reasoning as a whole: it contains no first
    /// character of the closing tag and does not end with white space. Most pieces are such text,
    /// which is emitted without a copy.
    fn is_reasoning(&self, text: &str) -> bool {
        let tag_begin = self.format.close.as_bytes().first();
        !text.ends_with(char::is_whitespace) && !text.bytes().any(|byte| Some(&byte) == tag_begin)
    }

    /// Ends the answer and returns the text that was held back.
    pub(super) fn finish(self) -> SplitText {
        match self.is_thinking() {
            true => SplitText::of_reasoning(self.held),
            false => SplitText::of_rest(self.held),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::think, *};

    static FORMAT: ReasoningFormat = think::FORMAT;

    fn read(is_open: bool, pieces: &[&str]) -> SplitText {
        let start = if is_open { ReasoningStart::Reasoning } else { ReasoningStart::Undecided };
        let mut parser = TagParser::new(&FORMAT, start);
        let mut all = SplitText::default();
        let mut add = |split: SplitText| {
            assert!(all.rest.is_empty() || split.reasoning.is_empty(), "{all:?} {split:?}");
            all.reasoning.push_str(&split.reasoning);
            all.rest.push_str(&split.rest);
        };
        pieces.iter().for_each(|piece| add(parser.push((*piece).to_owned())));
        add(parser.finish());
        all
    }

    #[test]
    fn reasoning_is_emitted_once_it_cannot_belong_to_a_tag() {
        let mut parser = TagParser::new(&FORMAT, ReasoningStart::Undecided);
        for (piece, reasoning, rest) in [
            ("<think>\n", "", ""),
            ("So", "So", ""),
            (" </", "", ""),
            ("b>", " </b>", ""),
            (" ", "", ""),
            ("</think>", "", ""),
            ("\n", "", ""),
            ("ab ", "", "ab "),
            ("</think>", "", "</think>"),
        ] {
            let expected = SplitText { reasoning: reasoning.into(), rest: rest.into() };
            assert_eq!(parser.push(piece.to_owned()), expected, "{piece:?}");
        }
    }

    fn bits() -> impl Strategy<Value = String> {
        let bit = prop_oneof![
            Just("<think>"),
            Just("</think>"),
            Just("</th"),
            Just("<"),
            Just("\n"),
            Just("a"),
            Just("é👩‍👩‍👧"),
        ];
        prop::collection::vec(bit, 0..10).prop_map(|bits| bits.concat())
    }

    proptest! {
        #[test]
        fn reasoning_does_not_depend_on_how_text_is_split(text in bits(), is_open in any::<bool>()) {
            let characters: Vec<String> = text.chars().map(String::from).collect();
            let pieces: Vec<&str> = characters.iter().map(String::as_str).collect();
            let whole = read(is_open, &[&text]);
            prop_assert_eq!(read(is_open, &pieces), whole.clone());
            // Only the tags and the white space around them are dropped.
            let bare = |text: &str| text.replace(char::is_whitespace, "");
            let shown = bare(&(whole.reasoning + &whole.rest));
            let opened = bare(&text).replacen("<think>", "", 1);
            let closed = opened.replacen("</think>", "", 1);
            let kept = [bare(&text), bare(&text).replacen("</think>", "", 1), opened, closed];
            prop_assert!(kept.contains(&shown), "{} {}", shown, text);
        }
    }
}
