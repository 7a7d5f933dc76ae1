//! A call that is a function name and parameters between tags. Strings are not quoted: the schema
//! of the function decides whether a value is a string or JSON.

use serde_json::{Value, json};

use super::{CallBody, CallStep, CallableFunction, ToolCall, function::JsonTypes};

/// Tags of a call with parameters.
#[derive(Debug)]
pub(super) struct ParameterTags {
    /// End of the function's name.
    pub name_end: &'static str,
    /// Beginning of a parameter's name.
    pub key: &'static str,
    pub key_end: &'static str,
    /// Tag before a value, after optional white space; empty if the value follows `key_end`.
    pub value: &'static str,
    pub value_end: &'static str,
    /// White space that the format puts at both ends of a value.
    pub padding: &'static str,
    /// Tags that end the call. The format defines the first one; models also write the others.
    pub ends: &'static [&'static str],
}

/// Parser of a call with parameters.
#[derive(Debug)]
pub(super) struct ParameterBody {
    tags: &'static ParameterTags,
    /// The name, once it is complete.
    function: Option<CallableFunction>,
    position: Position,
    /// Byte offset in the call's text at which the position begins.
    start: usize,
    key: String,
    /// Strings in the value, if the value must be JSON.
    strings: Option<JsonStrings>,
    /// The parameters so far, with values in JSON. If a parameter repeats, its last value counts.
    parameters: Vec<(String, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    Name,
    /// Before a parameter, or before the end of the call.
    Between,
    Key,
    BeforeValue,
    Value,
}

impl ParameterBody {
    pub(super) fn new(tags: &'static ParameterTags) -> Self {
        Self {
            tags,
            function: None,
            position: Position::Name,
            start: 0,
            key: String::new(),
            strings: None,
            parameters: Vec::new(),
        }
    }

    fn enter(&mut self, position: Position, text: &str) -> CallStep {
        (self.position, self.start) = (position, text.len());
        CallStep::More
    }

    fn enter_value(&mut self, text: &str) -> CallStep {
        let is_json = !self.types().has(JsonTypes::STRING);
        self.strings = is_json.then(JsonStrings::default);
        self.enter(Position::Value, text)
    }

    /// Returns the types of the current parameter.
    fn types(&self) -> JsonTypes {
        let function = self.function.as_ref();
        function.map_or(JsonTypes::ANY, |function| function.types(&self.key))
    }

    /// Reads the function's name where it ends: at its tag, the first parameter or the end of the
    /// call.
    fn name(&mut self, text: &str, functions: &[CallableFunction]) -> CallStep {
        let tags = self.tags;
        let name = text[self.start..].trim_start();
        if name.is_empty() {
            return self.enter(Position::Name, text);
        }
        let ends = [tags.name_end, tags.key].into_iter().chain(tags.ends.iter().copied());
        let Some(tag) = ends.into_iter().find(|tag| name.ends_with(tag)) else {
            let may_be_name = |function: &CallableFunction| {
                function.name.starts_with(name) || name.starts_with(&function.name)
            };
            return match functions.iter().any(may_be_name) {
                true => CallStep::More,
                false => CallStep::Broken,
            };
        };
        let name = name[..name.len() - tag.len()].trim_end();
        self.function = functions.iter().find(|function| function.name == name).cloned();
        if self.function.is_none() {
            return CallStep::Broken;
        }
        match tag {
            tag if tag == tags.name_end => self.enter(Position::Between, text),
            tag if tag == tags.key => self.enter(Position::Key, text),
            _ => self.call(),
        }
    }

    fn add_value(&mut self, value: &str) {
        let padding = self.tags.padding;
        let value = value.strip_prefix(padding).unwrap_or(value);
        let value = value.strip_suffix(padding).unwrap_or(value);
        let types = self.types();
        let (key, value) = (std::mem::take(&mut self.key), types.json(value));
        match self.parameters.iter_mut().find(|(name, _)| *name == key) {
            Some((_, earlier)) => *earlier = value,
            None => self.parameters.push((key, value)),
        }
    }

    /// Returns the parameters so far as the beginning of a JSON object; empty without parameters.
    fn arguments(&self) -> String {
        let member = |(key, value): &(String, String)| format!("{}: {value}", json!(key));
        let members: Vec<String> = self.parameters.iter().map(member).collect();
        if members.is_empty() { String::new() } else { format!("{{{}", members.join(", ")) }
    }

    fn call(&self) -> CallStep {
        let Some(function) = &self.function else { return CallStep::Broken };
        let arguments = match self.parameters.is_empty() {
            true => "{}".to_owned(),
            false => self.arguments() + "}",
        };
        CallStep::Call(ToolCall { name: function.name.clone(), arguments })
    }
}

impl CallBody for ParameterBody {
    fn push(&mut self, text: &str, last: char, functions: &[CallableFunction]) -> CallStep {
        let tags = self.tags;
        let new = &text[self.start..];
        match self.position {
            Position::Name => self.name(text, functions),
            Position::Between => match new.trim_start() {
                // The white space is not searched again.
                "" => self.enter(Position::Between, text),
                tag if tag == tags.key => self.enter(Position::Key, text),
                tag if tags.ends.contains(&tag) => self.call(),
                tag if [tags.key].iter().chain(tags.ends).any(|it| it.starts_with(tag)) => {
                    CallStep::More
                }
                _ => CallStep::Broken,
            },
            Position::Key => {
                let Some(key) = new.strip_suffix(tags.key_end) else { return CallStep::More };
                self.key = key.trim().to_owned();
                match tags.value {
                    "" => self.enter_value(text),
                    _ => self.enter(Position::BeforeValue, text),
                }
            }
            Position::BeforeValue => match new.trim_start() {
                "" => self.enter(Position::BeforeValue, text),
                tag if tag == tags.value => self.enter_value(text),
                tag if tags.value.starts_with(tag) => CallStep::More,
                _ => CallStep::Broken,
            },
            Position::Value => {
                // A JSON string may contain the tag.
                if self.strings.as_mut().is_some_and(|strings| strings.are_open_after(last)) {
                    return CallStep::More;
                }
                let Some(value) = new.strip_suffix(tags.value_end) else { return CallStep::More };
                self.add_value(value);
                self.enter(Position::Between, text)
            }
        }
    }

    fn cut(&self, _: &str) -> Option<ToolCall> {
        let name = self.function.as_ref()?.name.clone();
        Some(ToolCall { name, arguments: self.arguments() })
    }
}

/// Whether a place in JSON is within a string.
#[derive(Debug, Default)]
struct JsonStrings {
    is_open: bool,
    is_escape: bool,
}

impl JsonStrings {
    /// Returns whether a string is open after the next character. JSON has no control characters in
    /// strings: a line end closes a string that the model left open.
    fn are_open_after(&mut self, char: char) -> bool {
        let is_escaped = std::mem::take(&mut self.is_escape);
        match char {
            '"' if !is_escaped => self.is_open = !self.is_open,
            '\\' if !is_escaped => self.is_escape = self.is_open,
            _ if char.is_ascii_control() => self.is_open = false,
            _ => {}
        }
        self.is_open
    }
}

impl JsonTypes {
    /// Returns a value as JSON. JSON of an allowed type, or any JSON if the schema allows no string,
    /// is kept. Everything else becomes a string.
    fn json(self, text: &str) -> String {
        let string = || json!(text).to_string();
        if self == Self::STRING {
            return string();
        }
        let trimmed = text.trim();
        // Some models generate Python's words for true, false and null.
        let word = match trimmed {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            other => other,
        };
        match serde_json::from_str::<Value>(word) {
            Ok(Value::String(_)) if self != Self::ANY && self.has(Self::STRING) => string(),
            Ok(value) if self.has(Self::of(&value)) || !self.has(Self::STRING) => word.to_owned(),
            _ => string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_string_may_contain_the_tag_after_a_value() {
        const TAGS: ParameterTags = ParameterTags {
            name_end: ">",
            key: "<p=",
            key_end: ">",
            value: "",
            value_end: "</p>",
            padding: "\n",
            ends: &["</f>"],
        };
        let schema = json!({"properties": {"list": {"type": "array"}, "text": {"type": "string"}}});
        let functions = [CallableFunction::new("f", schema.as_object())];
        let call = |text: &str| {
            let mut body = ParameterBody::new(&TAGS);
            let mut ends = text.char_indices().map(|(at, char)| (at + char.len_utf8(), char));
            ends.find_map(|(end, char)| match body.push(&text[..end], char, &functions) {
                CallStep::Call(call) => Some(call.arguments),
                CallStep::Broken => panic!("{text} is broken at byte {end}"),
                CallStep::More => None,
            })
        };
        for (key, value, expected) in [
            ("list", r#"["</p>", "\"</p>", "\\"]"#, r#"["</p>", "\"</p>", "\\"]"#),
            ("list", "[\"open\n", r#""[\"open""#),
            ("text", r#"a " b"#, r#""a \" b""#),
        ] {
            let text = format!("f><p={key}>\n{value}\n</p></f>");
            let text = text.replace("\n\n", "\n");
            assert_eq!(call(&text), Some(format!("{{\"{key}\": {expected}}}")), "{text}");
        }
    }

    #[test]
    fn types_of_a_schema_decide_what_a_value_is() {
        let schema = json!({"properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "either": {"type": ["string", "integer"]},
            "list": {"$ref": "#/$defs/list"},
            "color": {"enum": ["red", "7"]},
        }, "$defs": {"list": {"type": "array"}}});
        let function = CallableFunction::new("f", schema.as_object());
        for (key, text, expected) in [
            ("text", "7", "\"7\""),
            ("text", "\"a\"", "\"\\\"a\\\"\""),
            ("count", "7", "7"),
            ("count", " 7.5 ", "7.5"),
            ("count", "seven", "\"seven\""),
            ("maybe", "7", "\"7\""),
            ("maybe", "null", "null"),
            ("maybe", "None", "null"),
            ("maybe", "\"a\"", "\"\\\"a\\\"\""),
            ("either", "7", "7"),
            ("either", "a", "\"a\""),
            ("list", "[1, \"a\"]", "[1, \"a\"]"),
            ("color", "7", "\"7\""),
            ("other", "True", "true"),
            ("other", "\"a\"", "\"a\""),
            ("other", "a b", "\"a b\""),
        ] {
            assert_eq!(function.types(key).json(text), expected, "{key} {text}");
        }
    }
}
