//! A call that is a name and parameters between marks. Its values are not JSON: the schema of the
//! function decides what they are.

use serde_json::{Value, json};

use super::{CallBody, CallStep, CallableFunction, ToolCall, function::ValueTypes};

/// Marks of a call with parameters.
#[derive(Debug)]
pub(super) struct ParameterMarks {
    /// End of the function's name.
    pub name_end: &'static str,
    /// Beginning of a parameter's name.
    pub key: &'static str,
    pub key_end: &'static str,
    /// Beginning of a value, after white space; empty if the value follows the name.
    pub value: &'static str,
    pub value_end: &'static str,
    /// End of the call; the first one is what the format defines.
    pub ends: &'static [&'static str],
}

/// Parser of a call with parameters. One line end at each end of a value belongs to the marks.
#[derive(Debug)]
pub(super) struct ParameterBody {
    marks: &'static ParameterMarks,
    /// The name, once it is complete.
    function: Option<CallableFunction>,
    position: Position,
    /// Start of the position's text.
    start: usize,
    key: String,
    /// The parameters so far, as the beginning of a JSON object.
    arguments: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    Name,
    /// Before a parameter, or the end.
    Between,
    Key,
    BeforeValue,
    Value,
}

impl ParameterBody {
    pub(super) fn new(marks: &'static ParameterMarks) -> Self {
        Self {
            marks,
            function: None,
            position: Position::Name,
            start: 0,
            key: String::new(),
            arguments: String::new(),
        }
    }

    fn enter(&mut self, position: Position, text: &str) -> CallStep {
        (self.position, self.start) = (position, text.len());
        CallStep::More
    }

    /// Reads the function's name where it ends: at its mark, the first parameter or the end of the
    /// call.
    fn name(&mut self, text: &str, functions: &[CallableFunction]) -> CallStep {
        let marks = self.marks;
        let ends = [marks.name_end, marks.key].into_iter().chain(marks.ends.iter().copied());
        let Some(mark) = ends.into_iter().find(|mark| text.ends_with(mark)) else {
            let may_be_name = |function: &CallableFunction| {
                let name = text.trim_start();
                function.name.starts_with(name) || name.starts_with(&function.name)
            };
            return match functions.iter().any(may_be_name) {
                true => CallStep::More,
                false => CallStep::Broken,
            };
        };
        let name = text[..text.len() - mark.len()].trim();
        // A line may end before the name.
        if name.is_empty() && mark == marks.name_end && mark.trim().is_empty() {
            return CallStep::More;
        }
        self.function = functions.iter().find(|function| function.name == name).cloned();
        if self.function.is_none() {
            return CallStep::Broken;
        }
        match mark {
            mark if mark == marks.name_end => self.enter(Position::Between, text),
            mark if mark == marks.key => self.enter(Position::Key, text),
            _ => self.call(),
        }
    }

    fn add_value(&mut self, value: &str) {
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let function = self.function.as_ref();
        let types = function.map_or(ValueTypes::ANY, |function| function.types(&self.key));
        let opening = if self.arguments.is_empty() { "{" } else { ", " };
        let key = Value::from(std::mem::take(&mut self.key));
        self.arguments += &format!("{opening}{key}: {}", types.json(value));
    }

    fn call(&self) -> CallStep {
        let Some(function) = &self.function else { return CallStep::Broken };
        let arguments = match self.arguments.is_empty() {
            true => "{}".to_owned(),
            false => self.arguments.clone() + "}",
        };
        CallStep::Call(ToolCall { name: function.name.clone(), arguments })
    }
}

impl CallBody for ParameterBody {
    fn push(&mut self, text: &str, _: char, functions: &[CallableFunction]) -> CallStep {
        let marks = self.marks;
        let new = &text[self.start..];
        match self.position {
            Position::Name => self.name(text, functions),
            Position::Between => match new.trim_start() {
                "" => CallStep::More,
                mark if mark == marks.key => self.enter(Position::Key, text),
                mark if marks.ends.contains(&mark) => self.call(),
                mark if [marks.key].iter().chain(marks.ends).any(|it| it.starts_with(mark)) => {
                    CallStep::More
                }
                _ => CallStep::Broken,
            },
            Position::Key => {
                let Some(key) = new.strip_suffix(marks.key_end) else { return CallStep::More };
                self.key = key.trim().to_owned();
                let has_mark = !marks.value.is_empty();
                self.enter(if has_mark { Position::BeforeValue } else { Position::Value }, text)
            }
            Position::BeforeValue => match new.trim_start() {
                mark if mark == marks.value => self.enter(Position::Value, text),
                mark if marks.value.starts_with(mark) => CallStep::More,
                _ => CallStep::Broken,
            },
            Position::Value => {
                let Some(value) = new.strip_suffix(marks.value_end) else { return CallStep::More };
                self.add_value(value);
                self.enter(Position::Between, text)
            }
        }
    }

    fn cut(&self, _: &str) -> Option<ToolCall> {
        let name = self.function.as_ref()?.name.clone();
        Some(ToolCall { name, arguments: self.arguments.clone() })
    }
}

impl ValueTypes {
    /// Returns a value as JSON. Text is a string where the schema allows a string, unless it is
    /// JSON of another type that the schema allows.
    fn json(self, text: &str) -> String {
        let string = || json!(text).to_string();
        if self == Self::STRING {
            return string();
        }
        let trimmed = text.trim();
        // Some models write the words of Python.
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
