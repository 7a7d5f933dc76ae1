//! Separates tool calls from content in the text of one answer.
//!
//! Text arrives in pieces of any size, which do not affect the result. Content is emitted at once, except
//! text that may still belong to a call: white space, the beginning of a mark, or a JSON object whose keys
//! and name match a call so far. A call is emitted when its object is complete. Text that turns out not to
//! be a call (broken JSON, a function that was not offered, an answer that the model ends within a call) is
//! emitted unchanged as content. If something else cuts the answer within a call, the incomplete call is emitted.
//! White space directly before and after a call belongs to the call.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{
    ToolFormat,
    json_object::{JsonObject, JsonStep},
};

/// Call of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    pub name: String,
    /// Arguments: a JSON object as the model wrote it.
    pub arguments: String,
}

/// Part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolPiece {
    Content(String),
    Call(ToolCall),
    /// A call within which the answer was cut: its arguments are the beginning of a JSON object, or empty.
    CutCall(ToolCall),
}

/// Parser of one answer.
///
/// Lifecycle: [`push`](Self::push) for each piece of text, then [`finish`](Self::finish).
#[derive(Clone, Debug)]
pub struct ToolParser {
    format: ToolFormat,
    /// Functions that may be called.
    names: Arc<[String]>,
    state: ParserState,
    /// Text that is held back because it may belong to a call.
    held: String,
    /// Whether a call without a mark may begin: at the start and after a call.
    bare: bool,
    /// Whether a call was read and only white space since.
    after_call: bool,
    /// Whether the last call's closing mark may follow.
    closes: bool,
}

#[derive(Clone, Debug)]
enum ParserState {
    /// Between calls. The held text is white space and, after a call without a mark, at most one `;`.
    Text,
    /// The held text from `start` on is the beginning of a mark.
    Mark { start: usize },
    /// After a mark: white space until the object begins.
    Marked,
    /// Inside an object that begins at `start`. `in_name` says that the last key was `name`.
    Object { start: usize, in_name: bool, json: JsonObject, found: FoundParts },
}

/// Parts of an incomplete object.
#[derive(Clone, Debug, Default)]
struct FoundParts {
    /// Name of the function.
    name: Option<String>,
    /// End of the key of the arguments in the object.
    arguments_key_end: Option<usize>,
}

/// Result of adding a character to the held text.
enum PushOutcome {
    Accepted,
    /// The held text is not a call; the character does not belong to it.
    Rejected,
    /// The held text, which includes the character, is not a call.
    RejectedWithIt,
}

impl ToolParser {
    pub fn new(format: ToolFormat, names: Arc<[String]>) -> Self {
        Self {
            format,
            names,
            state: ParserState::Text,
            held: String::new(),
            bare: format.takes_bare(),
            after_call: false,
            closes: false,
        }
    }

    /// Processes the next piece of text and appends final pieces.
    pub fn push(&mut self, text: &str, out: &mut Vec<ToolPiece>) {
        for char in text.chars() {
            match self.take(char, out) {
                PushOutcome::Accepted => {}
                PushOutcome::Rejected => {
                    self.emit_content(out);
                    // In plain text every character is accepted.
                    self.take(char, out);
                }
                PushOutcome::RejectedWithIt => self.emit_content(out),
            }
        }
    }

    /// Ends an answer that was cut, for example by its maximum length. Within a call the call is emitted as far as it
    /// goes. Without the name of its function nothing of it is emitted, unless the text may also be an answer in JSON.
    pub fn finish_cut(self, out: &mut Vec<ToolPiece>) {
        match &self.state {
            ParserState::Marked => {}
            ParserState::Object { start, found, .. } => match cut_call(&self.held[*start..], found)
            {
                Some(call) => out.push(ToolPiece::CutCall(call)),
                None if self.held[..*start].contains(self.format.marks().0) => {}
                None => self.finish(out),
            },
            ParserState::Text | ParserState::Mark { .. } => self.finish(out),
        }
    }

    /// Ends the answer: held text is content, except white space and the beginning of a closing mark
    /// after a call.
    pub fn finish(mut self, out: &mut Vec<ToolPiece>) {
        let ends_a_call = self.after_call
            && match self.state {
                ParserState::Text => true,
                ParserState::Mark { start } => self.closes && self.may_close(start),
                ParserState::Marked | ParserState::Object { .. } => false,
            };
        if !ends_a_call {
            self.emit_content(out);
        }
    }

    fn take(&mut self, char: char, out: &mut Vec<ToolPiece>) -> PushOutcome {
        match self.state {
            ParserState::Text if char.is_whitespace() => self.held.push(char),
            ParserState::Text if char == '<' => {
                self.state = ParserState::Mark { start: self.held.len() };
                self.held.push(char);
            }
            ParserState::Text if char == '{' && self.bare => return self.begin_object(),
            ParserState::Text if char == ';' && self.separates() => self.held.push(char),
            ParserState::Text => {
                self.held.push(char);
                self.emit_content(out);
            }
            ParserState::Mark { start } => {
                self.held.push(char);
                return self.take_mark(start);
            }
            ParserState::Marked if char.is_whitespace() => self.held.push(char),
            ParserState::Marked if char == '{' => return self.begin_object(),
            ParserState::Marked => return PushOutcome::Rejected,
            ParserState::Object { .. } => return self.take_json(char, out),
        }
        PushOutcome::Accepted
    }

    /// Returns whether a `;` separates two calls without marks.
    fn separates(&self) -> bool {
        self.bare && self.after_call && !self.held.contains(';')
    }

    fn may_close(&self, start: usize) -> bool {
        let (_, end) = self.format.marks();
        end.is_some_and(|end| end.starts_with(&self.held[start..]))
    }

    /// Checks the held text, whose last character may be part of a mark.
    fn take_mark(&mut self, start: usize) -> PushOutcome {
        let (begin, end) = self.format.marks();
        let mark = &self.held[start..];
        if mark == begin {
            self.state = ParserState::Marked;
        } else if self.closes && Some(mark) == end {
            (self.state, self.closes) = (ParserState::Text, false);
            self.held.clear();
        } else if begin.starts_with(mark) || self.closes && self.may_close(start) {
            return PushOutcome::Accepted;
        } else {
            self.held.pop();
            return PushOutcome::Rejected;
        }
        PushOutcome::Accepted
    }

    fn begin_object(&mut self) -> PushOutcome {
        let mut json = JsonObject::default();
        json.feed(b'{');
        let found = FoundParts::default();
        self.state = ParserState::Object { start: self.held.len(), in_name: false, json, found };
        self.held.push('{');
        PushOutcome::Accepted
    }

    fn take_json(&mut self, char: char, out: &mut Vec<ToolPiece>) -> PushOutcome {
        let ParserState::Object { start, in_name, json, found } = &mut self.state else {
            return PushOutcome::Rejected;
        };
        let mut bytes = [0; 4];
        // Multi-byte characters occur only inside strings, where each of their bytes is accepted.
        let steps = char.encode_utf8(&mut bytes).bytes().map(|byte| json.feed(byte));
        let step = steps.last().unwrap_or(JsonStep::Broken);
        if step == JsonStep::Broken {
            return PushOutcome::Rejected;
        }
        self.held.push(char);
        let object = &self.held[*start..];
        let is_call_so_far = match step {
            JsonStep::Key(from, to) => {
                let key = &object[from + 1..to - 1];
                *in_name = key == "name";
                if ["arguments", "parameters"].contains(&key) {
                    found.arguments_key_end = Some(to);
                }
                ["name", "arguments", "parameters", "type", "id"].contains(&key)
            }
            JsonStep::Text(from, to) if *in_name => {
                found.name = serde_json::from_str::<String>(&object[from..to]).ok();
                found.name.as_ref().is_some_and(|name| self.names.contains(name))
            }
            JsonStep::Complete => {
                let call = call(object).filter(|call| self.names.contains(&call.name));
                let Some(call) = call else { return PushOutcome::RejectedWithIt };
                out.push(ToolPiece::Call(call));
                self.held.clear();
                self.state = ParserState::Text;
                (self.bare, self.after_call) = (self.format.takes_bare(), true);
                self.closes = self.format.marks().1.is_some();
                true
            }
            _ => true,
        };
        if is_call_so_far { PushOutcome::Accepted } else { PushOutcome::RejectedWithIt }
    }

    /// Emits the held text as content.
    fn emit_content(&mut self, out: &mut Vec<ToolPiece>) {
        self.state = ParserState::Text;
        if self.held.is_empty() {
            return;
        }
        (self.bare, self.after_call, self.closes) = (false, false, false);
        match out.last_mut() {
            Some(ToolPiece::Content(content)) => content.push_str(&self.held),
            _ => out.push(ToolPiece::Content(self.held.clone())),
        }
        self.held.clear();
    }
}

/// Parses the object as a call.
fn call(object: &str) -> Option<ToolCall> {
    #[derive(Deserialize)]
    struct CallObject<'a> {
        name: String,
        #[serde(borrow, alias = "parameters")]
        arguments: Option<&'a RawValue>,
        r#type: Option<String>,
    }
    let call: CallObject<'_> = serde_json::from_str(object).ok()?;
    if call.r#type.is_some_and(|kind| kind != "function") {
        return None;
    }
    let arguments = match call.arguments.map(RawValue::get) {
        None => "{}".to_owned(),
        Some(arguments) if arguments.starts_with('{') => arguments.to_owned(),
        // Some models encode the arguments as a JSON string.
        Some(text) => {
            let inner: String = serde_json::from_str(text).ok()?;
            let is_object = serde_json::from_str::<&RawValue>(&inner)
                .is_ok_and(|inner| inner.get().starts_with('{'));
            is_object.then_some(inner)?
        }
    };
    Some(ToolCall { name: call.name, arguments })
}

/// Returns the call that an object begins; `None` without a name, or if the arguments are no object.
fn cut_call(object: &str, found: &FoundParts) -> Option<ToolCall> {
    let name = found.name.clone()?;
    let text = found.arguments_key_end.map_or("", |end| &object[end..]);
    let text = text.trim_start().strip_prefix(':').unwrap_or_default().trim_start();
    // Other keys may follow the arguments.
    let whole = serde_json::Deserializer::from_str(text).into_iter::<&RawValue>().next();
    let text = whole.and_then(Result::ok).map_or(text, RawValue::get);
    let arguments = match text.as_bytes().first() {
        Some(b'"') => string_so_far(text),
        _ => text.to_owned(),
    };
    (arguments.is_empty() || arguments.starts_with('{')).then_some(ToolCall { name, arguments })
}

/// Decodes the beginning of a JSON string, without an escape that is incomplete.
fn string_so_far(text: &str) -> String {
    /// Bytes of the longest incomplete escape: half a surrogate pair and most of the second half.
    const ESCAPE_BYTES_MAX: usize = 11;
    let closed = |end| serde_json::from_str(&format!("{}\"", &text[..end])).ok();
    let ends = (text.len().saturating_sub(ESCAPE_BYTES_MAX)..=text.len()).rev();
    let cut = || ends.filter(|end| text.is_char_boundary(*end)).find_map(closed);
    serde_json::from_str(text).ok().or_else(cut).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parser(format: ToolFormat) -> ToolParser {
        ToolParser::new(format, Arc::new(["weather".to_owned(), "f".to_owned()]))
    }

    fn read(format: ToolFormat, pieces: &[&str]) -> Vec<ToolPiece> {
        let (mut parser, mut out) = (parser(format), Vec::new());
        for piece in pieces {
            parser.push(piece, &mut out);
        }
        parser.finish(&mut out);
        out
    }

    fn content(text: &str) -> ToolPiece {
        ToolPiece::Content(text.into())
    }

    fn call(name: &str, arguments: &str) -> ToolPiece {
        ToolPiece::Call(ToolCall { name: name.into(), arguments: arguments.into() })
    }

    #[test]
    fn hermes_calls_are_parsed_with_the_text_around_them() {
        let read = |text: &str| read(ToolFormat::Hermes, &[text]);
        assert_eq!(
            read(
                "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Köln\"}}\n\
                 </tool_call>\n<tool_call>\n{\"name\":\"f\",\"arguments\":{}}\n</tool_call>\n"
            ),
            [content("I look."), call("weather", "{\"city\": \"Köln\"}"), call("f", "{}")]
        );
        assert_eq!(
            read(
                "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": [1.50, null]}}</tool_call> so"
            ),
            [call("f", "{\"a\": [1.50, null]}"), content(" so")]
        );
        // The answer ended by its stop token or length before the mark, or within it.
        for end in ["", "\n", "\n</tool", "</tool_call>"] {
            let text = format!("<tool_call>{{\"name\": \"f\"}}{end}");
            assert_eq!(read(&text), [call("f", "{}")]);
        }
    }

    #[test]
    fn llama_calls_are_parsed_with_and_without_their_tag() {
        let read = |text: &str| read(ToolFormat::Llama3, &[text]);
        let bare = "{\"name\": \"f\", \"parameters\": {\"a\": \"}{\"}}";
        let expected = call("f", "{\"a\": \"}{\"}");
        assert_eq!(read(bare), std::slice::from_ref(&expected));
        assert_eq!(read(&format!("\n\n{bare}\n")), std::slice::from_ref(&expected));
        assert_eq!(read(&format!("<|python_tag|>{bare}")), std::slice::from_ref(&expected));
        assert_eq!(
            read(&format!("Sure. <|python_tag|> {bare}; {bare}")),
            [content("Sure."), expected.clone(), expected.clone()]
        );
        assert_eq!(
            read(&format!("{bare}; {bare}\n{bare}")),
            [expected.clone(), expected.clone(), expected.clone()]
        );
        assert_eq!(
            read("{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}"),
            [call("f", "{}")]
        );
    }

    #[test]
    fn malformed_calls_are_content() {
        for (format, text) in [
            // Broken, incomplete, of the wrong shape, or of a function that was not offered.
            (
                ToolFormat::Hermes,
                "a <tool_call>{\"name\": \"f\", \"arguments\": {1}}</tool_call> b",
            ),
            (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b"),
            (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": 7}</tool_call>"),
            (ToolFormat::Hermes, "<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>"),
            (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"name\": \"f\"}</tool_call>"),
            (ToolFormat::Hermes, "<tool_call>{\"arguments\": {}}</tool_call>"),
            (ToolFormat::Hermes, "<tool_call>{}</tool_call>"),
            (ToolFormat::Hermes, "the tags <tool_call> and </tool_call> \n"),
            (ToolFormat::Hermes, "<tool_call>{\"name\": \"\\ud800\"}"),
            (ToolFormat::Hermes, "{\"name\": \"f\", \"arguments\": {}}"),
            (ToolFormat::Hermes, " a<b <<tool_cal"),
            (ToolFormat::Llama3, "{\"name\": \"Bob\", \"age\": 3}"),
            (ToolFormat::Llama3, "{\"answer\": 42}"),
            (ToolFormat::Llama3, "so {\"name\": \"f\", \"parameters\": {}}"),
            (ToolFormat::Llama3, "<|python_tag|>search.call(query=\"x\")"),
            (ToolFormat::Llama3, "; {\"name\": \"f\"}"),
            (ToolFormat::Llama3, " \u{301}\u{feff}\0 "),
        ] {
            assert_eq!(read(format, &[text]), [content(text)], "{format:?}");
        }
        // After a broken call the next call is still recognized.
        assert_eq!(
            read(ToolFormat::Hermes, &["<tool_call>{\"name\": <tool_call>{\"name\": \"f\"}"]),
            [content("<tool_call>{\"name\": "), call("f", "{}")]
        );
        assert_eq!(
            read(ToolFormat::Llama3, &["{\"name\": \"f\"}; and {\"name\": \"f\"}"]),
            [call("f", "{}"), content("; and {\"name\": \"f\"}")]
        );
    }

    #[test]
    fn cut_call_is_emitted_as_far_as_it_goes() {
        let read = |format, text: &str| {
            let (mut parser, mut out) = (parser(format), Vec::new());
            parser.push(text, &mut out);
            parser.finish_cut(&mut out);
            out
        };
        let cut = |name: &str, arguments: &str| {
            ToolPiece::CutCall(ToolCall { name: name.into(), arguments: arguments.into() })
        };
        use ToolFormat::{Hermes, Llama3};
        for (format, text, expected) in [
            (Hermes, "<tool_call>{\"name\": \"f\"", vec![cut("f", "")]),
            (Hermes, "<tool_call>{\"name\": \"f\", \"arguments\"", vec![cut("f", "")]),
            (Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": ", vec![cut("f", "")]),
            (
                Hermes,
                "a <tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"b",
                vec![content("a"), cut("f", "{\"a\": \"b")],
            ),
            (
                Hermes,
                "<tool_call>{\"arguments\": {\"a\": {}}, \"name\": \"f\", \"id\": ",
                vec![cut("f", "{\"a\": {}}")],
            ),
            (
                Hermes,
                r#"<tool_call>{"name": "f", "arguments": "{\"a\": \"\ud83d\udc4"#,
                vec![cut("f", r#"{"a": ""#)],
            ),
            (
                Hermes,
                "<tool_call>{\"name\": \"f\"}</tool_call>\n<tool_call>{\"name\": \"weather\", ",
                vec![call("f", "{}"), cut("weather", "")],
            ),
            // The name is incomplete.
            (Hermes, "a <tool_call>", vec![content("a")]),
            (Hermes, "a\n<tool_call>\n{\"name\": \"we", vec![content("a")]),
            (Llama3, "a <|python_tag|>{\"nam", vec![content("a")]),
            (Llama3, "{\"name\": \"f\", \"parameters\": {\"a\": [1", vec![cut("f", "{\"a\": [1")]),
            (
                Llama3,
                "{\"name\": \"f\"}; {\"name\": \"weather\", \"parameters\": {",
                vec![call("f", "{}"), cut("weather", "{")],
            ),
            // These may be content.
            (Llama3, "{\"name\": \"Bo", vec![content("{\"name\": \"Bo")]),
            (Hermes, "a <tool", vec![content("a <tool")]),
            (
                Hermes,
                "<tool_call>{\"name\": \"g\", \"arguments\": {",
                vec![content("<tool_call>{\"name\": \"g\", \"arguments\": {")],
            ),
            // A complete call, with or without a part of its closing mark.
            (Hermes, "<tool_call>{\"name\": \"f\"}\n</tool", vec![call("f", "{}")]),
        ] {
            assert_eq!(joined(read(format, text)), expected, "{text}");
        }
    }

    #[test]
    fn arguments_encoded_as_a_json_string_are_decoded() {
        assert_eq!(
            read(ToolFormat::Hermes, &[r#"<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}"#]),
            [call("f", r#"{"a": 1}"#)]
        );
        let text = r#"<tool_call>{"name": "f", "arguments": "a"}"#;
        assert_eq!(read(ToolFormat::Hermes, &[text]), [content(text)]);
    }

    #[test]
    fn text_is_released_once_it_cannot_begin_a_call() {
        let shown_after = |format, text: &str| {
            let (mut parser, mut out) = (parser(format), Vec::new());
            parser.push(text, &mut out);
            assert_eq!(parser.held.is_empty(), out == [content(text)], "{text}: {out:?}");
            parser.held.is_empty()
        };
        for (format, held, shown) in [
            (ToolFormat::Hermes, "<", "<b"),
            (ToolFormat::Hermes, "<tool_call> ", "<tool_call> a"),
            (ToolFormat::Hermes, "<tool_call>{\"name\"", "<tool_call>{\"nome\""),
            (ToolFormat::Hermes, "<tool_call>{\"name\": \"g", "<tool_call>{\"name\": \"g\""),
            (ToolFormat::Llama3, " {", " {a"),
            (ToolFormat::Llama3, "{\"name\": \"f\", ", "{\"name\": \"f\", 1"),
            (ToolFormat::Llama3, "{\"nam", "{\"a\""),
        ] {
            assert!(!shown_after(format, held) && shown_after(format, shown), "{held} {shown}");
        }
    }

    /// Generates fragments of calls and text in any order.
    fn bits() -> impl Strategy<Value = String> {
        let bit = prop_oneof![
            Just("<tool_call>"),
            Just("</tool_call>"),
            Just("<|python_tag|>"),
            Just("{\"name\": \"f\", \"arguments\": {\"a\": \"é\\\"<tool_call>\"}}"),
            Just("{\"name\": \"weather\", \"parameters\": {}}"),
            Just("{\"name\": \"f\", \"arguments\": "),
            Just("{\"name\": \"g\"}"),
            Just("{\"b\": 1}"),
            Just("<tool"),
            Just("<"),
            Just("{"),
            Just("\""),
            Just("}"),
            Just(";"),
            Just("\n"),
            Just(" "),
            Just("a"),
            Just("👩‍👩‍👧"),
        ];
        prop::collection::vec(bit, 0..12).prop_map(|bits| bits.concat())
    }

    /// Joins adjacent content.
    fn joined(pieces: Vec<ToolPiece>) -> Vec<ToolPiece> {
        let mut all: Vec<ToolPiece> = Vec::new();
        for piece in pieces {
            match (all.last_mut(), piece) {
                (Some(ToolPiece::Content(text)), ToolPiece::Content(more)) => text.push_str(&more),
                (_, piece) => all.push(piece),
            }
        }
        all
    }

    proptest! {
        #[test]
        fn tool_parsing_does_not_depend_on_how_text_is_split(
            text in bits(),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
            llama in any::<bool>(),
        ) {
            let format = if llama { ToolFormat::Llama3 } else { ToolFormat::Hermes };
            let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| ends[cut.index(ends.len())]).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]).collect();
            prop_assert_eq!(joined(read(format, &pieces)), joined(read(format, &[&text])));
        }

        /// Emitted text and calls reproduce the answer in order: only white space and marks are
        /// dropped, and nothing is added.
        #[test]
        fn tool_parsing_loses_no_text(text in bits(), llama in any::<bool>()) {
            let format = if llama { ToolFormat::Llama3 } else { ToolFormat::Hermes };
            let written = |piece: ToolPiece| match piece {
                ToolPiece::Content(text) => text,
                ToolPiece::CutCall(call) => panic!("the answer is not cut: {call:?}"),
                ToolPiece::Call(ToolCall { name, arguments }) => match name.as_str() {
                    "weather" => format!("{{\"name\":\"weather\",\"parameters\":{arguments}}}"),
                    _ => format!("{{\"name\":\"f\",\"arguments\":{arguments}}}"),
                },
            };
            let shown: String = read(format, &[&text]).into_iter().map(written).collect();
            let (shown, text) = (without_marks(&shown), without_marks(&text));
            // The beginning of an incomplete closing mark.
            let cut = text.strip_suffix('<').unwrap_or(&text);
            prop_assert!(shown == text || shown == cut, "{shown:?} {text:?}");
        }

        #[test]
        fn text_without_a_call_is_unchanged(text in any::<String>(), llama in any::<bool>()) {
            let format = if llama { ToolFormat::Llama3 } else { ToolFormat::Hermes };
            let pieces: Vec<String> = text.chars().map(String::from).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let shown = joined(read(format, &pieces));
            match text.is_empty() {
                true => prop_assert_eq!(shown, []),
                false => prop_assert_eq!(shown, [content(&text)]),
            }
        }
    }

    fn without_marks(text: &str) -> String {
        let text = text.replace("</tool_call>", "").replace("<tool_call>", "");
        let text = text.replace("<|python_tag|>", "");
        text.chars().filter(|char| !char.is_whitespace() && *char != ';').collect()
    }
}
