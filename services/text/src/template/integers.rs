//! Integers beyond 64 bits in the arguments of tool calls. Python keeps them, but the numbers of
//! [`Value`] would round them. Templates get them as strings with a mark: `tojson` writes the
//! digits without quotes, and the rendered prompt has no mark.

use std::{borrow::Cow, sync::LazyLock};

use regex::{Captures, Regex};
use serde_json::Value;

/// Start of an integer's string: a character that Unicode reserves for use inside a program.
const MARK: char = '\u{FDD1}';

/// More digits than every integer of 64 bits has, or as many.
static LONG: LazyLock<Regex> = LazyLock::new(|| regex("[0-9]{19}"));
/// A string or a number in JSON.
static TOKEN: LazyLock<Regex> = LazyLock::new(|| regex(r#""(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*"#));
/// A mark, or a marked string as Python writes it in a list or mapping.
static MARKED: LazyLock<Regex> =
    LazyLock::new(|| regex(r"(?<before>: |, |\[)'\x{FDD1}(?<digits>-?[0-9]+)'|\x{FDD1}"));

fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("the pattern is a constant")
}

/// Parses JSON and marks the integers that [`Value`] would round.
pub(super) fn parse(text: &str) -> serde_json::Result<Value> {
    if !LONG.is_match(text) {
        return serde_json::from_str(text);
    }
    let marked = TOKEN.replace_all(text, |token: &Captures<'_>| {
        let token = &token[0];
        let is_rounded = token.parse::<i64>().is_err() && token.parse::<u64>().is_err();
        match is_integer(token) && !token.trim_start_matches('-').starts_with('0') && is_rounded {
            true => format!("\"{MARK}{token}\""),
            false => token.to_owned(),
        }
    });
    serde_json::from_str(&marked)
}

/// Returns the digits of a marked integer; `None` for any other string.
pub(super) fn digits(text: &str) -> Option<&str> {
    text.strip_prefix(MARK).filter(|digits| is_integer(digits))
}

/// Removes the marks of a rendered prompt.
pub(super) fn without_marks(rendered: String) -> String {
    match MARKED.replace_all(&rendered, "$before$digits") {
        Cow::Borrowed(_) => rendered,
        Cow::Owned(text) => text,
    }
}

fn is_integer(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_integers_beyond_64_bits_are_marked() {
        let large = "1".repeat(400);
        let text = format!(
            r#"{{"a": [18446744073709551615, -9223372036854775808, 18446744073709551616, -9223372036854775809],
                "12345678901234567890123": "12345678901234567890123 \" 99999999999999999999",
                "b": 12345678901234567890123.5, "c": 1e30, "d": {large}}}"#
        );
        let expected = json!({
            "a": [u64::MAX, i64::MIN, "\u{FDD1}18446744073709551616", "\u{FDD1}-9223372036854775809"],
            "12345678901234567890123": "12345678901234567890123 \" 99999999999999999999",
            "b": 12345678901234567890123.5, "c": 1e30, "d": format!("\u{FDD1}{large}"),
        });
        assert_eq!(parse(&text).unwrap(), expected);
        for invalid in ["[012345678901234567890123]", "[12345678901234567890123", "[-]"] {
            assert!(parse(invalid).is_err(), "{invalid}");
        }
        assert_eq!(digits("\u{FDD1}-12"), Some("-12"));
        for other in ["12", "\u{FDD1}", "\u{FDD1}1\"", "\u{FDD1}-"] {
            assert_eq!(digits(other), None, "{other:?}");
        }
    }
}
