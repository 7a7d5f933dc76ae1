//! Messages of gpt-oss (harmony). An answer is a sequence of messages such as
//! `<|channel|>analysis<|message|>REASONING<|end|>`,
//! `<|start|>assistant<|channel|>final<|message|>CONTENT<|return|>` and
//! `<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>`.
//!
//! Models also generate malformed headers, which are not errors. Text that cannot belong to a
//! header is content. If a header with a known channel has no `<|message|>`, the text after the
//! channel is a message of this channel. A message of an unknown channel is content.

use super::{ReasoningFormat, ReasoningStart, ReasoningSyntax, SplitText, partial_tag};
use crate::{stream::HeaderTokens, tokenizer::Tokenizer};

const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const CONSTRAIN: &str = "<|constrain|>";
const START: &str = "<|start|>";
const END: &str = "<|end|>";
/// Ends a call and the answer.
const CALL: &str = "<|call|>";
/// Ends the answer.
const RETURN: &str = "<|return|>";

/// First character of every tag.
const TAG_BEGIN: char = '<';

const TAGS: [&str; 7] = [CHANNEL, MESSAGE, CONSTRAIN, START, END, CALL, RETURN];

const CHANNELS: [(&str, MessageKind); 3] = [
    ("analysis", MessageKind::Reasoning),
    ("commentary", MessageKind::Content),
    ("final", MessageKind::Content),
];

/// Role of the messages in an answer.
const ROLE: &str = "assistant";

/// Text before the recipient of a message: a function or a tool.
const RECIPIENT: &str = "to=";

/// Types of a message's content.
const CONTENT_TYPES: [&str; 3] = ["json", "code", "text"];

/// Maximum length of a header in bytes.
const HEADER_BYTES_MAX: usize = 256;

pub(super) const FORMAT: ReasoningFormat = ReasoningFormat {
    name: "harmony",
    models: "gpt-oss",
    open: "<|channel|>analysis<|message|>",
    close: "<|end|><|start|>assistant",
    before_answer: "<|channel|>final<|message|>",
    never_within: &[CHANNEL, START, END],
    in_template: "<|channel|>analysis<|message|>",
    // The other tags end an answer, so they are not part of its text.
    tags: &[CHANNEL, MESSAGE, CONSTRAIN, START, END],
    syntax: ReasoningSyntax::Messages,
};

/// Returns the tokens that begin and end the headers of an answer that begins at `start`. Returns
/// `None` if `<|message|>` is not a token of the vocabulary.
pub(super) fn header_tokens(tokenizer: &Tokenizer, start: ReasoningStart) -> Option<HeaderTokens> {
    let begin = [END, START, CHANNEL].map(|tag| tokenizer.token_id(tag));
    let end = tokenizer.token_id(MESSAGE)?;
    let may_open: fn(&str) -> bool =
        |text| Header { before: text.to_owned(), ..Header::default() }.may_be_header();
    let may_open = (start == ReasoningStart::Undecided).then_some(may_open);
    Some(HeaderTokens { begin, end, bytes_max: HEADER_BYTES_MAX, may_open })
}

/// Parser of the messages in an answer. Tool calls stay in the text. The parser rewrites all of
/// them to `<|channel|>commentary to=RECIPIENT <|constrain|>json<|message|>ARGUMENTS<|call|>`.
#[derive(Clone, Debug)]
pub(super) struct MessageParser {
    place: Place,
    /// Text that is held back because it may begin a tag.
    held: String,
    /// Whether an earlier message has reasoning.
    has_reasoning: bool,
    /// Whether an earlier message has content.
    has_content: bool,
    /// Whether the current message has text.
    has_text: bool,
}

#[derive(Clone, Debug)]
enum Place {
    Header(Header),
    Message(MessageKind),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MessageKind {
    Reasoning,
    Content,
    Call,
}

/// Header of a message so far.
#[derive(Clone, Debug, Default)]
struct Header {
    /// Whether the header may begin with any role, because `<|start|>` came before it.
    takes_role: bool,
    /// Text before the channel: a role and a recipient.
    before: String,
    /// Text after the tag of the channel: its name, a recipient and the type of the content.
    channel: Option<String>,
}

impl MessageParser {
    pub(super) fn new(start: ReasoningStart) -> Self {
        let place = match start {
            ReasoningStart::Undecided => Place::Header(Header::default()),
            ReasoningStart::Reasoning => Place::Message(MessageKind::Reasoning),
            ReasoningStart::Answer => Place::Message(MessageKind::Content),
        };
        let (has_reasoning, has_content, has_text) = (false, false, false);
        Self { place, held: String::new(), has_reasoning, has_content, has_text }
    }

    pub(super) fn is_in_header(&self) -> bool {
        matches!(self.place, Place::Header(_))
    }

    pub(super) fn is_thinking(&self) -> bool {
        matches!(self.place, Place::Message(MessageKind::Reasoning))
    }

    pub(super) fn push(&mut self, text: String, out: &mut Vec<SplitText>) {
        if let Place::Message(kind) = self.place
            && self.has_text
            && self.held.is_empty()
            && !text.contains(TAG_BEGIN)
        {
            // Most pieces are such text. They are emitted without a copy.
            out.push(match kind {
                MessageKind::Reasoning => SplitText::of_reasoning(text),
                MessageKind::Content | MessageKind::Call => SplitText::of_rest(text),
            });
            return;
        }
        let text = std::mem::take(&mut self.held) + &text;
        let mut rest = text.as_str();
        while let Some((at, tag)) = first_tag(rest) {
            self.take_text(&rest[..at], out);
            self.take_tag(tag, out);
            rest = &rest[at + tag.len()..];
        }
        let held = TAGS.iter().map(|tag| partial_tag(rest, tag)).max().unwrap_or(0);
        let (text, held) = rest.split_at(rest.len() - held);
        self.held = held.to_owned();
        self.take_text(text, out);
    }

    pub(super) fn finish(mut self, out: &mut Vec<SplitText>) {
        let held = std::mem::take(&mut self.held);
        self.take_text(&held, out);
        self.end_header(out);
    }

    fn take_text(&mut self, text: &str, out: &mut Vec<SplitText>) {
        match &mut self.place {
            Place::Header(header) => {
                header.channel.as_mut().unwrap_or(&mut header.before).push_str(text);
                if !header.may_be_header() {
                    self.end_header(out);
                }
            }
            &mut Place::Message(kind) => self.emit(kind, text, out),
        }
    }

    fn take_tag(&mut self, tag: &str, out: &mut Vec<SplitText>) {
        match (&mut self.place, tag) {
            (Place::Header(header), MESSAGE) => {
                let (kind, text) = header.message();
                self.place = Place::Message(kind);
                self.emit(kind, &text, out);
                return;
            }
            (Place::Header(header), CONSTRAIN) => {
                header.channel.as_mut().unwrap_or(&mut header.before).push(' ');
                return;
            }
            (Place::Header(header), CHANNEL) if header.channel.is_none() => {
                header.channel = Some(String::new());
                return;
            }
            (Place::Message(_), MESSAGE | CONSTRAIN) => return,
            _ => {}
        }
        self.end_header(out);
        self.end_message(out);
        self.place = Place::Header(Header {
            takes_role: tag == START,
            before: String::new(),
            channel: (tag == CHANNEL).then(String::new),
        });
    }

    /// Ends a header that has no `<|message|>`. Text outside the header begins the message.
    fn end_header(&mut self, out: &mut Vec<SplitText>) {
        if let Place::Header(header) = &self.place {
            let (kind, text) = header.message_within();
            self.place = Place::Message(kind);
            self.emit(kind, &text, out);
        }
    }

    fn end_message(&mut self, out: &mut Vec<SplitText>) {
        let Place::Message(kind) = self.place else { return };
        match kind {
            MessageKind::Call => self.emit(kind, CALL, out),
            MessageKind::Reasoning => self.has_reasoning |= self.has_text,
            MessageKind::Content => self.has_content |= self.has_text,
        }
        self.has_text = false;
    }

    /// Emits text of the current message. A line end separates messages of one kind.
    fn emit(&mut self, kind: MessageKind, text: &str, out: &mut Vec<SplitText>) {
        if text.is_empty() {
            return;
        }
        let follows = match kind {
            MessageKind::Reasoning => self.has_reasoning,
            MessageKind::Content => self.has_content,
            MessageKind::Call => false,
        };
        let line_end = if follows && !self.has_text { "\n" } else { "" };
        self.has_text = true;
        if kind == MessageKind::Reasoning && out.last().is_none_or(|it| !it.rest.is_empty()) {
            out.push(SplitText::default());
        }
        let split = match out.last_mut() {
            Some(split) => split,
            None => out.push_mut(SplitText::default()),
        };
        let to = match kind {
            MessageKind::Reasoning => &mut split.reasoning,
            MessageKind::Content | MessageKind::Call => &mut split.rest,
        };
        to.push_str(line_end);
        to.push_str(text);
    }
}

impl Header {
    /// Returns whether the text so far may belong to a header.
    fn may_be_header(&self) -> bool {
        let may_begin = |word: &str| {
            let name = word.strip_prefix(ROLE).unwrap_or(word);
            ROLE.starts_with(word)
                || name.starts_with(RECIPIENT)
                || RECIPIENT.starts_with(name)
                || CONTENT_TYPES.iter().any(|known| known.starts_with(word))
        };
        self.length() <= HEADER_BYTES_MAX && self.words().all(may_begin)
    }

    /// Returns the bytes so far, without tags.
    fn length(&self) -> usize {
        self.before.len() + self.channel.as_ref().map_or(0, String::len)
    }

    /// Returns the words before the channel, without the role after `<|start|>`.
    fn words(&self) -> impl Iterator<Item = &str> {
        self.before.split_whitespace().skip(usize::from(self.takes_role))
    }

    /// Ends the header at `<|message|>`. Returns the kind of the message, and the text to emit
    /// before the message: the rewritten header of a tool call, otherwise nothing.
    fn message(&self) -> (MessageKind, String) {
        if let Some(recipient) = self.recipient() {
            let call = format!("{CHANNEL}commentary to={recipient} {CONSTRAIN}json{MESSAGE}");
            return (MessageKind::Call, call);
        }
        let name = self.channel.as_deref().unwrap_or_default().trim_start();
        let known = CHANNELS.iter().find(|(channel, _)| name.starts_with(channel));
        (known.map_or(MessageKind::Content, |(_, kind)| *kind), String::new())
    }

    /// Ends a header that has no `<|message|>`. Returns the kind of the message, and the text that
    /// begins the message. If the header is too long, its details are part of this text too: long
    /// text is no header.
    fn message_within(&self) -> (MessageKind, String) {
        let fits = self.length() <= HEADER_BYTES_MAX;
        let Some(channel) = &self.channel else {
            let after_role = self.before.trim_start().strip_prefix(ROLE);
            let (text, is_header) = match after_role.filter(|_| self.takes_role) {
                Some(text) => (text.trim_start(), text.split_whitespace().all(is_detail)),
                None => (self.before.as_str(), self.words().all(is_detail)),
            };
            let text = if fits && is_header { "" } else { text };
            return (MessageKind::Content, text.to_owned());
        };
        let name = channel.trim_start();
        let known =
            CHANNELS.iter().find_map(|(known, kind)| Some((*kind, name.strip_prefix(known)?)));
        let is_cut = || CHANNELS.iter().any(|(channel, _)| channel.starts_with(name));
        match known {
            Some((kind, rest)) if fits && rest.split_whitespace().all(is_detail) => {
                (kind, String::new())
            }
            Some((kind, rest)) => (kind, rest.trim_start().to_owned()),
            None if is_cut() => (MessageKind::Content, String::new()),
            None => (MessageKind::Content, channel.clone()),
        }
    }

    /// Returns the recipient of the message: a function or a tool.
    fn recipient(&self) -> Option<&str> {
        let parts = [self.channel.as_deref().unwrap_or_default(), &self.before];
        let after = parts.iter().find_map(|part| Some(part.split_once(RECIPIENT)?.1));
        after?.split_whitespace().next().filter(|name| !["assistant", "user"].contains(name))
    }
}

/// Returns whether a word is the role, a recipient or the type of the content.
fn is_detail(word: &str) -> bool {
    let name = word.strip_prefix(ROLE).unwrap_or(word);
    name.is_empty() || name.starts_with(RECIPIENT) || CONTENT_TYPES.contains(&word)
}

/// Returns the position of the first tag, and the tag.
fn first_tag(text: &str) -> Option<(usize, &'static str)> {
    let begins = |at: usize| TAGS.iter().find(|tag| text[at..].starts_with(*tag));
    text.match_indices("<|").find_map(|(at, _)| Some((at, *begins(at)?)))
}
