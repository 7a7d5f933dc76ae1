//! Separates tool calls from content in the text of one answer.
//!
//! Text arrives in pieces of any size, which do not affect the result. Content is emitted at once,
//! except text that may still belong to a call: white space, the beginning of a tag, or an
//! incomplete call. A call is emitted when its arguments are complete. Text that turns out not to
//! be a call (broken JSON, a function that was not offered, an answer that the model ends within a
//! call) is emitted unchanged as content. If something else cuts the answer within a call, the
//! incomplete call is emitted. White space directly before and after a call belongs to the call.
//! Held text is at most the rest of the answer, whose length is bounded.

use std::sync::Arc;

use super::{CallBody, CallStep, CallableFunction, ToolCall, ToolFormat};

/// Part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolPiece {
    Content(String),
    Call(ToolCall),
    /// A call within which the answer was cut: its arguments are the beginning of a JSON object, or
    /// empty.
    CutCall(ToolCall),
}

/// Parser of one answer.
///
/// Lifecycle: [`push`](Self::push) for each piece of text, then [`finish`](Self::finish).
#[derive(Debug)]
pub struct ToolParser {
    format: &'static ToolFormat,
    /// Functions that may be called.
    functions: Arc<[CallableFunction]>,
    state: ParserState,
    /// Text that is held back because it may belong to a call.
    held: String,
    /// Whether a call without a tag may begin: at the start and after a call.
    is_bare: bool,
    /// Number of closing tags that no longer may follow; `None` if the last text is not a call.
    closed: Option<usize>,
    /// Whether the first call begins with the first opening tag.
    needs_first_tag: bool,
}

#[derive(Debug)]
enum ParserState {
    /// Between calls. The held text is white space.
    Text,
    /// After a call and a separator: only white space since.
    Separated,
    /// The held text from `start` on is the beginning of a tag.
    Tag { start: usize },
    /// After this number of opening tags and white space; `start` as in [`Self::Tag`], if a tag
    /// has begun.
    Opened { count: usize, start: Option<usize> },
    /// Inside a call whose text begins at `start`.
    Call { start: usize, body: Box<dyn CallBody> },
}

impl ToolParser {
    pub fn new(format: &'static ToolFormat, functions: Arc<[CallableFunction]>) -> Self {
        let (state, is_bare) = (ParserState::Text, format.bare.is_some());
        let (held, closed, needs_first_tag) = (String::new(), None, false);
        Self { format, functions, state, held, is_bare, closed, needs_first_tag }
    }

    /// Lets the first call begin only with the first opening tag, as in an answer with a grammar:
    /// text that begins with a later tag is free text there.
    pub fn with_first_tag(self) -> Self {
        Self { needs_first_tag: true, ..self }
    }

    /// Processes the next piece of text and appends final pieces.
    pub fn push(&mut self, text: &str, out: &mut Vec<ToolPiece>) {
        let mut rest = text;
        while let Some(char) = rest.chars().next() {
            let content = self.content_bytes(rest);
            if content > 0 {
                self.held.push_str(&rest[..content]);
                self.emit_content(out);
                rest = &rest[content..];
                continue;
            }
            rest = &rest[char.len_utf8()..];
            self.held.push(char);
            if !self.take(char, out) {
                let rest = self.held.split_off(self.held.len() - self.reusable_bytes());
                self.emit_content(out);
                // White space, or the beginning of a tag: both are accepted after content.
                for char in rest.chars() {
                    self.held.push(char);
                    self.take(char, out);
                }
            }
        }
    }

    /// Ends an answer that was cut, for example by its maximum length. An incomplete call is
    /// emitted as far as it goes. If the function of the call is still unknown, the text of the
    /// call is emitted as content only if the call has no opening tag.
    pub fn finish_cut(&mut self, out: &mut Vec<ToolPiece>) {
        match &self.state {
            ParserState::Opened { .. } => {}
            ParserState::Call { start, body } => match body.cut(&self.held[*start..]) {
                Some(call) => out.push(ToolPiece::CutCall(call)),
                None if self.format.opening.iter().any(|it| self.held[..*start].contains(it)) => {}
                None => self.finish(out),
            },
            ParserState::Text | ParserState::Separated | ParserState::Tag { .. } => {
                self.finish(out);
            }
        }
    }

    /// Ends the answer: held text is content, except white space, a separator and the beginning of
    /// a closing tag after a call.
    pub fn finish(&mut self, out: &mut Vec<ToolPiece>) {
        let ends_a_call = self.closed.is_some_and(|closed| match self.state {
            ParserState::Text | ParserState::Separated => true,
            ParserState::Tag { start } => {
                let tag = &self.held[start..];
                self.format.closing[closed..].iter().any(|closing| closing.starts_with(tag))
            }
            ParserState::Opened { .. } | ParserState::Call { .. } => false,
        });
        if !ends_a_call {
            self.emit_content(out);
        }
    }

    /// Returns the number of bytes at the beginning of `text` that are content: all bytes up to a
    /// character that may begin a tag, without the white space before this character. Returns 0 in
    /// a state in which other text may belong to a call.
    fn content_bytes(&self, text: &str) -> usize {
        let is_between = matches!(self.state, ParserState::Text);
        if !is_between || self.is_bare || self.closed.is_some() {
            return 0;
        }
        let begins_tag = |char: char| self.format.opening.iter().any(|tag| tag.starts_with(char));
        let end = text.find(begins_tag).unwrap_or(text.len());
        text[..end].trim_end().len()
    }

    /// Processes the last character of the held text. Returns whether the held text may belong to a
    /// call, or was emitted.
    fn take(&mut self, char: char, out: &mut Vec<ToolPiece>) -> bool {
        let start = self.held.len() - char.len_utf8();
        match self.state {
            ParserState::Text if char.is_whitespace() => true,
            ParserState::Text if self.is_bare && self.format.bare == Some(char) => {
                self.begin_call(start, out)
            }
            ParserState::Text if self.closed.is_some() && self.format.separator == Some(char) => {
                self.state = ParserState::Separated;
                true
            }
            ParserState::Text => {
                if !self.takes_tag(start) {
                    self.emit_content(out);
                }
                true
            }
            ParserState::Separated => char.is_whitespace() || self.begin_call(start, out),
            ParserState::Tag { start } => self.takes_tag(start),
            ParserState::Opened { start: None, .. } if char.is_whitespace() => true,
            ParserState::Opened { count, start: tag } => {
                self.takes_opening(count, tag.unwrap_or(start))
            }
            ParserState::Call { start, ref mut body } => {
                let step = body.push(&self.held[start..], char, &self.functions);
                self.take_step(step, out)
            }
        }
    }

    /// Begins a call whose text starts with the last character.
    fn begin_call(&mut self, start: usize, out: &mut Vec<ToolPiece>) -> bool {
        let mut body = (self.format.body)();
        let text = &self.held[start..];
        let Some(first) = text.chars().next() else { return false };
        let step = body.push(text, first, &self.functions);
        self.state = ParserState::Call { start, body };
        self.take_step(step, out)
    }

    fn take_step(&mut self, step: CallStep, out: &mut Vec<ToolPiece>) -> bool {
        match step {
            CallStep::More => true,
            CallStep::Broken => false,
            CallStep::Call(call) => {
                out.push(ToolPiece::Call(call));
                self.held.clear();
                self.state = ParserState::Text;
                (self.is_bare, self.closed) = (self.format.bare.is_some(), Some(0));
                true
            }
        }
    }

    /// Checks whether the held text from `start` on is a tag, or the beginning of one.
    fn takes_tag(&mut self, start: usize) -> bool {
        let closed = self.closed.unwrap_or(self.format.closing.len());
        let tag = &self.held[start..];
        let closing = &self.format.closing[closed..];
        if let Some(index) = closing.iter().position(|closing| *closing == tag) {
            (self.state, self.closed) = (ParserState::Text, Some(closed + index + 1));
            self.held.clear();
            return true;
        }
        let may_close = closing.iter().any(|closing| closing.starts_with(tag));
        if self.takes_opening(0, start) {
            // A tag that may open or close is not complete.
            if let ParserState::Opened { count: 0, .. } = self.state {
                self.state = ParserState::Tag { start };
            }
            return true;
        }
        if may_close {
            self.state = ParserState::Tag { start };
        }
        may_close
    }

    /// Checks whether the held text from `start` on is an opening tag after the first `count`
    /// ones, or the beginning of one.
    fn takes_opening(&mut self, count: usize, start: usize) -> bool {
        let tag = &self.held[start..];
        let opening = match self.needs_first_tag && count == 0 && self.closed.is_none() {
            true => &self.format.opening[..1],
            false => &self.format.opening[count..],
        };
        if let Some(index) = opening.iter().position(|opening| *opening == tag) {
            let count = count + index + 1;
            self.state = match count == self.format.opening.len() {
                true => ParserState::Call { start: self.held.len(), body: (self.format.body)() },
                false => ParserState::Opened { count, start: None },
            };
            return true;
        }
        let is_beginning = opening.iter().any(|opening| opening.starts_with(tag));
        if is_beginning {
            self.state = ParserState::Opened { count, start: Some(start) };
        }
        is_beginning
    }

    /// Returns the length of the end of the held text that may begin a call after content: white
    /// space, or the beginning of a tag.
    fn reusable_bytes(&self) -> usize {
        let last = self.held.chars().next_back().map_or(0, char::len_utf8);
        if self.held.ends_with(char::is_whitespace) {
            return last;
        }
        let beginnings = self.format.opening.iter().flat_map(|tag| {
            tag.char_indices().map(|(length, _)| &tag[..length]).filter(|it| !it.is_empty())
        });
        let ends = beginnings.filter(|it| it.len() < self.held.len() && self.held.ends_with(it));
        ends.map(str::len).max().unwrap_or(0)
    }

    /// Emits the held text as content.
    fn emit_content(&mut self, out: &mut Vec<ToolPiece>) {
        self.state = ParserState::Text;
        if self.held.is_empty() {
            return;
        }
        (self.is_bare, self.closed) = (false, None);
        let text = std::mem::take(&mut self.held);
        match out.last_mut() {
            Some(ToolPiece::Content(content)) => content.push_str(&text),
            _ => out.push(ToolPiece::Content(text)),
        }
    }
}
