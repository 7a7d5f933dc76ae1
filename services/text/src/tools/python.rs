//! A call in the syntax of Python: `f(a=1, b='x')`.

use serde_json::{Map, Number, Value};

use super::{CallBody, CallStep, CallableFunction, ToolCall};

/// Maximum nesting of lists and dictionaries.
const DEPTH_MAX: usize = 64;

/// Parser of a call in the syntax of Python. A list may begin before the call.
#[derive(Debug, Default)]
pub(super) struct PythonBody {
    has_list: bool,
    name: Option<String>,
    /// Start of the name or of the arguments.
    start: usize,
    /// The quote of the string that the text ends in.
    quote: Option<char>,
    is_escaped: bool,
    /// Number of open brackets in the arguments.
    depth: usize,
}

impl PythonBody {
    fn in_name(&mut self, text: &str, last: char, functions: &[CallableFunction]) -> CallStep {
        let so_far = &text[self.start..];
        if last == '(' {
            let name = so_far[..so_far.len() - 1].trim();
            if !functions.iter().any(|function| function.name == name) {
                return CallStep::Broken;
            }
            self.name = Some(name.to_owned());
            self.start = text.len();
            return CallStep::More;
        }
        if last.is_whitespace() {
            // White space before the name is not searched again.
            if so_far.trim_start().is_empty() {
                self.start = text.len();
            }
            return CallStep::More;
        }
        match so_far.trim_start() {
            "[" if !self.has_list => (self.has_list, self.start) = (true, text.len()),
            name if functions.iter().any(|function| function.name.starts_with(name)) => {}
            _ => return CallStep::Broken,
        }
        CallStep::More
    }
}

impl CallBody for PythonBody {
    fn push(&mut self, text: &str, last: char, functions: &[CallableFunction]) -> CallStep {
        let Some(name) = &self.name else { return self.in_name(text, last, functions) };
        match (self.quote, last) {
            _ if self.is_escaped => self.is_escaped = false,
            (Some(_), '\\') => self.is_escaped = true,
            (Some(quote), _) if quote == last => self.quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => self.quote = Some(last),
            (None, '(' | '[' | '{') if self.depth == DEPTH_MAX => return CallStep::Broken,
            (None, '(' | '[' | '{') => self.depth += 1,
            (None, ')') if self.depth == 0 => {
                let arguments = &text[self.start..text.len() - 1];
                let Some(arguments) = PythonText(arguments).arguments() else {
                    return CallStep::Broken;
                };
                let arguments = Value::Object(arguments).to_string();
                return CallStep::Call(ToolCall { name: name.clone(), arguments });
            }
            (None, ')' | ']' | '}') if self.depth == 0 => return CallStep::Broken,
            (None, ')' | ']' | '}') => self.depth -= 1,
            _ => {}
        }
        CallStep::More
    }

    fn cut(&self, _: &str) -> Option<ToolCall> {
        Some(ToolCall { name: self.name.clone()?, arguments: String::new() })
    }
}

/// Rest of a text in the syntax of Python. Its depth is bounded by [`DEPTH_MAX`].
struct PythonText<'a>(&'a str);

impl PythonText<'_> {
    /// Reads `a=1, b='x'` up to the end.
    fn arguments(mut self) -> Option<Map<String, Value>> {
        let mut arguments = Map::new();
        while !self.rest().is_empty() {
            let (name, rest) = self.0.split_once('=')?;
            let name = name.trim().to_owned();
            if name.is_empty() || name.contains(['"', '\'', '(', '[', '{', ',']) {
                return None;
            }
            self.0 = rest;
            arguments.insert(name, self.value()?);
            if !self.skips(',') && !self.rest().is_empty() {
                return None;
            }
        }
        Some(arguments)
    }

    /// Returns the rest after white space.
    fn rest(&mut self) -> &str {
        self.0 = self.0.trim_start();
        self.0
    }

    fn skips(&mut self, char: char) -> bool {
        let rest = self.0.trim_start().strip_prefix(char);
        if let Some(rest) = rest {
            self.0 = rest;
        }
        rest.is_some()
    }

    /// Reads letters, digits and the signs of numbers.
    fn word(&mut self) -> String {
        let is_part = |char: char| char.is_alphanumeric() || "_.+-".contains(char);
        self.0 = self.0.trim_start();
        let length = self.0.find(|char| !is_part(char)).unwrap_or(self.0.len());
        let (word, rest) = self.0.split_at(length);
        self.0 = rest;
        word.to_owned()
    }

    fn value(&mut self) -> Option<Value> {
        match self.rest().chars().next()? {
            '"' | '\'' => self.string().map(Value::String),
            '[' => self.list('[', ']'),
            '(' => self.list('(', ')'),
            '{' => self.dictionary(),
            _ => Some(match self.word().as_str() {
                "True" | "true" => Value::Bool(true),
                "False" | "false" => Value::Bool(false),
                "None" | "null" => Value::Null,
                number => Value::Number(serde_json::from_str::<Number>(number).ok()?),
            }),
        }
    }

    fn list(&mut self, open: char, close: char) -> Option<Value> {
        let mut values = Vec::new();
        self.skips(open);
        while !self.skips(close) {
            values.push(self.value()?);
            if !self.skips(',') {
                return self.skips(close).then_some(Value::Array(values));
            }
        }
        Some(Value::Array(values))
    }

    fn dictionary(&mut self) -> Option<Value> {
        let mut members = Map::new();
        self.skips('{');
        while !self.skips('}') {
            self.rest();
            let key = self.string()?;
            if !self.skips(':') {
                return None;
            }
            members.insert(key, self.value()?);
            if !self.skips(',') {
                return self.skips('}').then_some(Value::Object(members));
            }
        }
        Some(Value::Object(members))
    }

    fn string(&mut self) -> Option<String> {
        let mut chars = self.0.chars();
        let quote = chars.next().filter(|quote| ['"', '\''].contains(quote))?;
        let mut string = String::new();
        loop {
            match chars.next()? {
                end if end == quote => break,
                '\\' => match chars.next()? {
                    'n' => string.push('\n'),
                    't' => string.push('\t'),
                    'r' => string.push('\r'),
                    'b' => string.push('\u{8}'),
                    'f' => string.push('\u{c}'),
                    'u' => string.push(escaped_char(&mut chars)?),
                    other @ ('\\' | '\'' | '"' | '/') => string.push(other),
                    // Python keeps the backslash of an unknown escape.
                    other => string.extend(['\\', other]),
                },
                other => string.push(other),
            }
        }
        self.0 = chars.as_str();
        Some(string)
    }
}

/// Reads the four digits of an escape, and those of a second escape if they are half a surrogate
/// pair.
fn escaped_char(chars: &mut std::str::Chars<'_>) -> Option<char> {
    let unit = |chars: &mut std::str::Chars<'_>| {
        let digits: String = chars.take(4).collect();
        u16::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 4)
    };
    let first = unit(chars)?;
    if !(0xD800..0xDC00).contains(&first) {
        return char::from_u32(first.into());
    }
    *chars = chars.as_str().strip_prefix("\\u")?.chars();
    char::decode_utf16([first, unit(chars)?]).next()?.ok()
}
