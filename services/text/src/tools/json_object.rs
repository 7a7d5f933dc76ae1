//! Incremental parser of one JSON object, byte by byte: finds its end, or where it stops being
//! JSON.

use serde::de::IgnoredAny;

/// Maximum nesting of objects and lists; serde_json accepts 127.
const DEPTH_MAX: usize = 64;

/// Result of one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonStep {
    More,
    /// A key of the outermost object is complete, between these offsets including quotes.
    Key(usize, usize),
    /// A string value of the outermost object is complete, between these offsets including quotes.
    Text(usize, usize),
    /// The byte closes the object.
    Complete,
    /// The text is not the beginning of a JSON object.
    Broken,
}

/// Input that may follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum NextInput {
    /// The opening brace.
    #[default]
    Open,
    /// A key or the end, after `{`.
    KeyOrEnd,
    /// A key, after a comma.
    Key,
    Colon,
    Value,
    /// A value or the end, after `[`.
    ValueOrEnd,
    CommaOrEnd,
    Text(InText),
    /// A number, `true`, `false` or `null`, which is validated at its end.
    Scalar,
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InText {
    Plain,
    Escape,
    /// Number of hexadecimal digits still to come.
    Unicode(u8),
}

/// Parser of one object. After `Complete` or `Broken` every byte is `Broken`.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonObject {
    /// Open brackets, outermost first: true for an object, false for a list.
    open: Vec<bool>,
    next: NextInput,
    /// Number of bytes read.
    at: usize,
    text_start: usize,
    text_is_key: bool,
    scalar: Vec<u8>,
}

impl JsonObject {
    pub(super) fn feed(&mut self, byte: u8) -> JsonStep {
        let step = self.step(byte);
        self.at += 1;
        if matches!(step, JsonStep::Complete | JsonStep::Broken) {
            self.next = NextInput::Nothing;
        }
        step
    }

    /// Multi-byte characters occur only inside strings, where each of their bytes is accepted.
    pub(super) fn feed_char(&mut self, char: char) -> JsonStep {
        let mut bytes = [0; 4];
        let steps = char.encode_utf8(&mut bytes).bytes().map(|byte| self.feed(byte));
        steps.last().unwrap_or(JsonStep::Broken)
    }

    fn step(&mut self, byte: u8) -> JsonStep {
        match self.next {
            NextInput::Text(state) => return self.in_text(state, byte),
            NextInput::Scalar if byte.is_ascii_alphanumeric() || b"+-.".contains(&byte) => {
                self.scalar.push(byte);
                return JsonStep::More;
            }
            NextInput::Scalar => {
                if serde_json::from_slice::<IgnoredAny>(&self.scalar).is_err() {
                    return JsonStep::Broken;
                }
                // The byte after a scalar does not belong to it.
                self.next = NextInput::CommaOrEnd;
            }
            _ => {}
        }
        if byte.is_ascii_whitespace() && byte != b'\x0c' {
            return if self.open.is_empty() { JsonStep::Broken } else { JsonStep::More };
        }
        match (self.next, byte) {
            (NextInput::Open, b'{') => self.begin(true),
            (NextInput::Key | NextInput::KeyOrEnd, b'"') => self.begin_text(true),
            (NextInput::Colon, b':') => self.go_on(NextInput::Value),
            (NextInput::CommaOrEnd, b',') => match self.open.last() {
                Some(true) => self.go_on(NextInput::Key),
                _ => self.go_on(NextInput::Value),
            },
            (NextInput::KeyOrEnd | NextInput::CommaOrEnd, b'}') => self.end(true),
            (NextInput::ValueOrEnd | NextInput::CommaOrEnd, b']') => self.end(false),
            (NextInput::Value | NextInput::ValueOrEnd, _) => self.begin_value(byte),
            _ => JsonStep::Broken,
        }
    }

    fn go_on(&mut self, next: NextInput) -> JsonStep {
        self.next = next;
        JsonStep::More
    }

    fn begin(&mut self, is_object: bool) -> JsonStep {
        if self.open.len() == DEPTH_MAX {
            return JsonStep::Broken;
        }
        self.open.push(is_object);
        self.go_on(if is_object { NextInput::KeyOrEnd } else { NextInput::ValueOrEnd })
    }

    fn end(&mut self, is_object: bool) -> JsonStep {
        if self.open.pop() != Some(is_object) {
            return JsonStep::Broken;
        }
        if self.open.is_empty() {
            return JsonStep::Complete;
        }
        self.go_on(NextInput::CommaOrEnd)
    }

    fn begin_text(&mut self, is_key: bool) -> JsonStep {
        (self.text_start, self.text_is_key) = (self.at, is_key);
        self.go_on(NextInput::Text(InText::Plain))
    }

    fn begin_value(&mut self, byte: u8) -> JsonStep {
        match byte {
            b'"' => self.begin_text(false),
            b'{' => self.begin(true),
            b'[' => self.begin(false),
            b't' | b'f' | b'n' | b'-' | b'0'..=b'9' => {
                self.scalar = vec![byte];
                self.go_on(NextInput::Scalar)
            }
            _ => JsonStep::Broken,
        }
    }

    fn in_text(&mut self, state: InText, byte: u8) -> JsonStep {
        let next = match (state, byte) {
            (InText::Plain, b'"') => return self.end_text(),
            (InText::Plain, b'\\') => InText::Escape,
            (InText::Plain, 0x20..) => InText::Plain,
            (InText::Escape, b'u') => InText::Unicode(4),
            (InText::Escape, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => {
                InText::Plain
            }
            (InText::Unicode(1), _) if byte.is_ascii_hexdigit() => InText::Plain,
            (InText::Unicode(left), _) if byte.is_ascii_hexdigit() => InText::Unicode(left - 1),
            _ => return JsonStep::Broken,
        };
        self.go_on(NextInput::Text(next))
    }

    fn end_text(&mut self) -> JsonStep {
        let is_outermost = self.open.len() == 1;
        let (start, end) = (self.text_start, self.at + 1);
        self.next = if self.text_is_key { NextInput::Colon } else { NextInput::CommaOrEnd };
        match (is_outermost, self.text_is_key) {
            (true, true) => JsonStep::Key(start, end),
            (true, false) => JsonStep::Text(start, end),
            (false, _) => JsonStep::More,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Map, Value};

    use super::*;

    /// Returns the last step and the number of bytes read.
    fn read(text: &str) -> (JsonStep, usize) {
        let mut object = JsonObject::default();
        for (at, &byte) in text.as_bytes().iter().enumerate() {
            let step = object.feed(byte);
            if matches!(step, JsonStep::Complete | JsonStep::Broken) {
                return (step, at + 1);
            }
        }
        (JsonStep::More, text.len())
    }

    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            prop::num::f64::NORMAL.prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 24, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec((any::<String>(), inner), 0..4)
                    .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn a_json_object_ends_with_its_closing_brace(
            members in prop::collection::vec((any::<String>(), json()), 0..4),
            pretty in any::<bool>(),
            behind in any::<String>(),
        ) {
            let object = Value::Object(members.into_iter().collect::<Map<_, _>>());
            let text = match pretty {
                true => serde_json::to_string_pretty(&object).unwrap(),
                false => object.to_string(),
            };
            prop_assert_eq!(read(&format!("{text}{behind}")), (JsonStep::Complete, text.len()));
        }

        /// The parser completes exactly the texts that serde_json accepts, and breaks only where no
        /// continuation is valid.
        #[test]
        fn json_scanner_agrees_with_serde_json(text in r#"\{[ \n]?("[a\\"u0-9\n]{0,6}"|[-+0-9.eE]{1,6}|[\[\]{},:"tfn ]|true|null){0,10}\}"#) {
            let (step, used) = read(&text);
            let taken = serde_json::from_str::<&serde_json::value::RawValue>(&text[..used]);
            prop_assert_eq!(step == JsonStep::Complete, taken.is_ok(), "{}", text);
        }
    }

    #[test]
    fn top_level_keys_and_strings_are_reported() {
        let text = r#"{"a\"": {"b": "c"}, "d": "e"}"#;
        let mut object = JsonObject::default();
        let mut told = Vec::new();
        for byte in text.bytes() {
            match object.feed(byte) {
                JsonStep::Key(start, end) => told.push(("key", &text[start..end])),
                JsonStep::Text(start, end) => told.push(("text", &text[start..end])),
                _ => {}
            }
        }
        assert_eq!(told, [("key", r#""a\"""#), ("key", r#""d""#), ("text", r#""e""#)]);
    }

    #[test]
    fn json_depth_is_bounded() {
        let deep = |depth: usize| format!("{{\"a\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(read(&deep(DEPTH_MAX - 1)).0, JsonStep::Complete);
        assert_eq!(read(&deep(DEPTH_MAX)).0, JsonStep::Broken);
    }
}
