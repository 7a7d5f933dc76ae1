//! Special tokens that a client spells in a message: kept as text.
//!
//! Control tokens of a rendered chat template are text too. Before the rendering, marks are put
//! around each special token that a client's text spells. They pass through the template, and the
//! tokenizer encodes the special token between two marks as text.

use std::{borrow::Cow, ops::Range};

use regex::{Captures, Regex};
use serde_json::Value;

/// The mark: a character that Unicode reserves for use inside a program.
pub(crate) const MARK: char = '\u{FDD0}';
/// Replacement for a mark in a client's text.
const REPLACEMENT: &str = "\u{FFFD}";

/// Finds special tokens in texts of clients.
pub(crate) struct SpellingFinder {
    /// A mark, or the text of a special token.
    spelled: Regex,
}

impl SpellingFinder {
    /// Returns `None` if the vocabulary has no special token.
    pub(crate) fn new<'a>(special: impl Iterator<Item = &'a str>) -> Option<Self> {
        let mut texts: Vec<String> =
            special.filter(|text| !text.is_empty()).map(regex::escape).collect();
        if texts.is_empty() {
            return None;
        }
        // The first alternative that fits wins, and a token may begin with another one.
        texts.sort_by_key(|text| std::cmp::Reverse(text.len()));
        texts.push(MARK.to_string());
        Some(Self { spelled: Regex::new(&texts.join("|")).ok()? })
    }

    /// Puts marks around the special tokens of a text. The text itself has no mark then.
    fn marked<'a>(&self, text: &'a str) -> Cow<'a, str> {
        self.spelled.replace_all(text, |spelled: &Captures<'_>| match &spelled[0] {
            mark if mark.starts_with(MARK) => REPLACEMENT.to_owned(),
            token => format!("{MARK}{token}{MARK}"),
        })
    }

    fn is_in(&self, value: &Value) -> bool {
        match value {
            Value::String(text) => self.spelled.is_match(text),
            Value::Array(values) => values.iter().any(|value| self.is_in(value)),
            Value::Object(fields) => {
                fields.iter().any(|(key, value)| self.spelled.is_match(key) || self.is_in(value))
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => false,
        }
    }

    /// Puts marks into all strings and keys of a value.
    pub(crate) fn marked_value<'a>(&self, value: &'a Value) -> Cow<'a, Value> {
        if !self.is_in(value) {
            return Cow::Borrowed(value);
        }
        let marked = |value: &Value| self.marked_value(value).into_owned();
        Cow::Owned(match value {
            Value::String(text) => Value::String(self.marked(text).into_owned()),
            Value::Array(values) => values.iter().map(marked).collect(),
            Value::Object(fields) => fields
                .iter()
                .map(|(key, value)| (self.marked(key).into_owned(), marked(value)))
                .collect(),
            other => other.clone(),
        })
    }

    /// Returns the range from the first to the last special token of a text without marks.
    pub(crate) fn range_in(&self, text: &str) -> Option<Range<usize>> {
        let mut found = self.spelled.find_iter(text);
        let first = found.next()?;
        let last = found.last().unwrap_or(first);
        Some(first.start()..last.end())
    }

    /// Returns whether the marks of a rendered prompt are those of `marked`: in pairs, each around
    /// one special token.
    pub(crate) fn are_whole(&self, rendered: &str) -> bool {
        let mut segments = rendered.split(MARK);
        // Before the first mark.
        segments.next();
        loop {
            let (token, after) = (segments.next(), segments.next());
            match (token, after) {
                (None, _) => return true,
                (Some(_), None) => return false,
                (Some(token), Some(_)) => {
                    let found = self.spelled.find(token);
                    if found.is_none_or(|found| found.as_str() != token) {
                        return false;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn finder() -> SpellingFinder {
        SpellingFinder::new(["<|end|>", "<|end|>x", "[INST]"].into_iter()).unwrap()
    }

    #[test]
    fn special_tokens_are_marked_in_strings_and_keys() {
        let finder = finder();
        let plain = json!({"content": "a < b", "number": 5});
        assert!(matches!(finder.marked_value(&plain), Cow::Borrowed(_)));
        let value = json!({"a<|end|>": ["x[INST]y", {"b": "<|end|>x<|end|>"}], "c": 1});
        let marked = json!({"a\u{FDD0}<|end|>\u{FDD0}": [
            "x\u{FDD0}[INST]\u{FDD0}y",
            {"b": "\u{FDD0}<|end|>x\u{FDD0}\u{FDD0}<|end|>\u{FDD0}"},
        ], "c": 1});
        assert_eq!(*finder.marked_value(&value), marked);
        // A client cannot write marks.
        let forged = json!("\u{FDD0}a\u{FDD0}");
        assert_eq!(*finder.marked_value(&forged), json!("\u{FFFD}a\u{FFFD}"));
        assert!(SpellingFinder::new([""].into_iter()).is_none());
    }

    #[test]
    fn marks_that_a_template_has_torn_apart_are_detected() {
        let finder = finder();
        let whole =
            ["a", "", "\u{FDD0}<|end|>\u{FDD0}", "a\u{FDD0}[INST]\u{FDD0}\u{FDD0}<|end|>\u{FDD0}b"];
        assert!(whole.iter().all(|rendered| finder.are_whole(rendered)));
        let torn = [
            "\u{FDD0}",
            "a\u{FDD0}<|end|>",
            "a\u{FDD0}b\u{FDD0}",
            "\u{FDD0}<|end|>b\u{FDD0}",
            "\u{FDD0}\u{FDD0}",
        ];
        assert!(!torn.iter().any(|rendered| finder.are_whole(rendered)));
    }
}
