//! The `tojson` filter as `transformers` defines it: Python's `json.dumps` without ASCII escapes.
//! The spaces matter, because models are trained on this format.

use std::fmt::Write;

use minijinja::{Error, ErrorKind, Value, value::ValueKind};

use super::{
    RENDERED_BYTES_MAX, integers,
    python::{Arguments, named},
};
use crate::literal::MARK;

/// Maximum depth of values. Requests cannot contain deeper values, so exceeding it is a bug in the
/// template.
const DEPTH_MAX: usize = 200;
/// Maximum spaces per level.
const INDENT_MAX: usize = 16;

/// Implements `value|tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, args: Arguments) -> Result<Value, Error> {
    let named = named(&["ensure_ascii", "indent", "separators", "sort_keys"], args)?;
    let is_set =
        |name| Ok::<_, Error>(named.get::<Option<Value>>(name)?.is_some_and(|it| it.is_true()));
    let indent = match named.get::<Option<Value>>("indent")? {
        None => None,
        Some(indent) => Some(usize::try_from(indent)?.min(INDENT_MAX)),
    };
    let separators = named.get::<Option<Vec<String>>>("separators")?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(invalid("separators must be two strings")),
        None => ((if indent.is_some() { "," } else { ", " }).to_owned(), ": ".to_owned()),
    };
    let mut writer = Writer {
        out: String::new(),
        indent,
        item_separator: item,
        key_separator: key,
        ascii_only: is_set("ensure_ascii")?,
        sort_keys: is_set("sort_keys")?,
    };
    named.assert_all_used()?;
    writer.value(value, 0)?;
    Ok(Value::from(writer.out))
}

fn invalid(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {}", reason.into()))
}

/// Marks the error of a value whose JSON is longer than a prompt may be.
#[derive(Debug, thiserror::Error)]
#[error("the JSON is longer than a prompt may be")]
pub(super) struct TooLong;

struct Writer {
    out: String,
    indent: Option<usize>,
    item_separator: String,
    key_separator: String,
    ascii_only: bool,
    sort_keys: bool,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(invalid(format!("the value is deeper than {DEPTH_MAX}")));
        }
        // The indentation of deep values takes far more memory than the values.
        if self.out.len() > RENDERED_BYTES_MAX {
            return Err(invalid(TooLong.to_string()).with_source(TooLong));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value)?,
            ValueKind::String => {
                let text = value.as_str().unwrap_or_default();
                match integers::digits(text) {
                    Some(digits) => self.out.push_str(digits),
                    None => self.string(text),
                }
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.container('[', ']', &items, depth, |writer, item| {
                    writer.value(item, depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.container('{', '}', &keys, depth, |writer, key| {
                    writer.key(key)?;
                    writer.value(&value.get_item(key)?, depth + 1)
                })?;
            }
            other => return Err(invalid(format!("{other} is not JSON"))),
        }
        Ok(())
    }

    fn container(
        &mut self,
        open: char,
        close: char,
        items: &[Value],
        depth: usize,
        write: impl Fn(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                self.out.push_str(&self.item_separator);
            }
            self.line(depth + 1);
            write(self, item)?;
        }
        if !items.is_empty() {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    /// Writes a key. Python writes numbers, booleans and None as keys in quotes.
    fn key(&mut self, key: &Value) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.string(key.as_str().unwrap_or_default()),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                self.out.push('"');
                self.value(key, 0)?;
                self.out.push('"');
            }
            other => return Err(invalid(format!("{other} cannot be a key"))),
        }
        self.out.push_str(&self.key_separator);
        Ok(())
    }

    fn number(&mut self, value: &Value) -> Result<(), Error> {
        if value.is_integer() {
            let _ = write!(self.out, "{value}");
        } else {
            self.out.push_str(&float_repr(f64::try_from(value.clone())?));
        }
        Ok(())
    }

    /// Writes a string with the escapes of serde_json, which are Python's.
    fn string(&mut self, text: &str) {
        let quoted = serde_json::Value::from(text).to_string();
        if !self.ascii_only {
            return self.out.push_str(&quoted);
        }
        for char in quoted.chars() {
            // The tokenizer needs the marks around special tokens.
            if char <= '\u{7e}' || char == MARK {
                self.out.push(char);
                continue;
            }
            for unit in char.encode_utf16(&mut [0; 2]) {
                let _ = write!(self.out, "\\u{unit:04x}");
            }
        }
    }
}

/// Formats a float like Python's `repr`: the shortest digits, with an exponent from 1e16 up and
/// below 1e-4.
fn float_repr(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let magnitude = value.abs();
    if magnitude == 0.0 || (1e-4..1e16).contains(&magnitude) {
        let text = value.to_string();
        return if text.contains('.') { text } else { text + ".0" };
    }
    let text = format!("{value:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    format!("{digits}e{sign}{exponent:0>2}")
}

#[cfg(test)]
mod tests {
    use minijinja::{Environment, value::Serde};
    use serde_json::json;

    use super::*;

    fn dump(value: serde_json::Value, arguments: &str) -> String {
        let mut environment = Environment::new();
        environment.add_filter("tojson", tojson);
        let template = format!("{{{{ v|tojson({arguments}) }}}}");
        let context = Value::from_pairs([("v", Value::from(Serde(&value)))]);
        environment.render_str(&template, context).unwrap()
    }

    // Expected texts are the output of Python 3.11's json.dumps(..., ensure_ascii=False).

    #[test]
    fn json_separators_and_key_order_match_python() {
        let value = json!({"name": "f", "b": [1, 2.0, true, null], "a": {}, "c": []});
        assert_eq!(
            dump(value, ""),
            r#"{"name": "f", "b": [1, 2.0, true, null], "a": {}, "c": []}"#
        );
    }

    #[test]
    fn indented_json_matches_python() {
        let value = json!({"b": [1, {"x": "y"}], "a": {}, "c": []});
        let expected = "{\n  \"b\": [\n    1,\n    {\n      \"x\": \"y\"\n    }\n  ],\n  \"a\": {},\n  \"c\": []\n}";
        assert_eq!(dump(value, "indent=2"), expected);
    }

    #[test]
    fn output_is_bounded() {
        let mut value = json!(vec![1; 500_000]);
        for _ in 0..100 {
            value = json!([value]);
        }
        let mut writer = Writer {
            out: String::new(),
            indent: Some(4),
            item_separator: ",".to_owned(),
            key_separator: ": ".to_owned(),
            ascii_only: false,
            sort_keys: false,
        };
        let error = writer.value(&Value::from(Serde(&value)), 0).unwrap_err();
        let source = std::error::Error::source(&error).unwrap();
        assert!(source.is::<TooLong>(), "{error}");
        assert!(writer.out.len() <= RENDERED_BYTES_MAX + 1024, "{} bytes", writer.out.len());
    }

    #[test]
    fn options_of_json_dumps_are_supported() {
        let value = json!({"b": 1, "a": "é😀"});
        assert_eq!(dump(value.clone(), "sort_keys=true"), r#"{"a": "é😀", "b": 1}"#);
        assert_eq!(dump(value.clone(), "separators=(',', ':')"), r#"{"b":1,"a":"é😀"}"#);
        assert_eq!(dump(value, "ensure_ascii=true"), r#"{"b": 1, "a": "\u00e9\ud83d\ude00"}"#);
        let marked = json!("\u{FDD0}<|end|>\u{FDD0}é");
        let expected = "\"\u{FDD0}<|end|>\u{FDD0}\\u00e9\"";
        assert_eq!(dump(marked, "ensure_ascii=true"), expected);
    }

    #[test]
    fn strings_are_escaped_as_json_and_not_as_html() {
        let text = "<a href='x'>&\"\\\n\t\u{1}\u{7f}é";
        assert_eq!(dump(json!(text), ""), "\"<a href='x'>&\\\"\\\\\\n\\t\\u0001\u{7f}é\"");
    }

    #[test]
    fn floats_are_formatted_as_in_python() {
        for (value, expected) in [
            (0.0, "0.0"),
            (1.0, "1.0"),
            (-2.5, "-2.5"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (f64::INFINITY, "Infinity"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(float_repr(value), expected);
        }
    }
}
