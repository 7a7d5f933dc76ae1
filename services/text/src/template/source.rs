//! Rewrites the source of a template from Jinja2's language to minijinja's.

use std::sync::LazyLock;

use regex::{Captures, Regex};

/// A tag with an expression.
static TAG: LazyLock<Regex> = LazyLock::new(|| regex(r"(?s)\{\{.*?\}\}|\{%.*?%\}"));
static GENERATION_TAG: LazyLock<Regex> =
    LazyLock::new(|| regex(r"\{%([-+]?)[ \t\r\n]*(end)?generation[ \t\r\n]*([-+]?)%\}"));
/// The pattern of a string.
const STRING_PATTERN: &str = r#"'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*""#;
static STRING: LazyLock<Regex> = LazyLock::new(|| regex(&format!("(?s){STRING_PATTERN}")));
/// An escape of a string, with the code of a character.
static ESCAPE: LazyLock<Regex> = LazyLock::new(|| regex(r"(?s)\\(?:U([0-9A-Fa-f]{8})|.)"));
/// A string, and what follows its `%`: a tuple, or a value with filters. A string without `%`
/// matches too, so that no match begins within a string.
static FORMATTED: LazyLock<Regex> = LazyLock::new(|| {
    const NAME: &str = "[A-Za-z_][A-Za-z_0-9]*";
    const SPACE: &str = r"[ \t\r\n]*";
    const GROUP: &str = r"\((?:[^()]|\([^()]*\))*\)";
    // A name with its attributes, items and calls, or a literal; and filters.
    let value = format!(
        r"(?:{NAME}(?:\.{NAME}|\[[^\]]*\]|{GROUP})*|[0-9][0-9.]*|{STRING_PATTERN}|\[[^\]]*\]|\{{[^}}]*\}})(?:{SPACE}\|{SPACE}{NAME}(?:{GROUP})?)*"
    );
    regex(&format!(r"(?s)({STRING_PATTERN})(?:{SPACE}%{SPACE}(?:({GROUP})|({value})))?"))
});

fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("the expression is constant")
}

/// Returns the source for minijinja.
pub(super) fn for_minijinja(source: &str) -> String {
    // Jinja2 reads each kind of line end as one character.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    with_percent_as_filter(&with_plain_escapes(&without_generation_tags(&source)))
}

/// Replaces the escapes of Python's strings that minijinja reads otherwise.
fn with_plain_escapes(source: &str) -> String {
    let plain = |escape: &Captures<'_>| {
        let code = escape.get(1).and_then(|code| u32::from_str_radix(code.as_str(), 16).ok());
        match (code.and_then(char::from_u32), &escape[0]) {
            (Some(character), _) => character.to_string(),
            (None, "\\\n") => String::new(),
            (None, "\\a") => "\u{7}".to_owned(),
            (None, "\\v") => "\u{b}".to_owned(),
            (None, r"\/") => r"\\/".to_owned(),
            (None, other) => other.to_owned(),
        }
    };
    let replaced = TAG.replace_all(source, |tag: &Captures<'_>| {
        let replaced = STRING.replace_all(&tag[0], |string: &Captures<'_>| {
            ESCAPE.replace_all(&string[0], plain).into_owned()
        });
        replaced.into_owned()
    });
    replaced.into_owned()
}

/// Replaces `{% generation %}`, which marks the assistant's text for training and is not Jinja, by
/// an `if` that holds, with the same white-space control.
fn without_generation_tags(source: &str) -> String {
    let replaced = GENERATION_TAG.replace_all(source, |tag: &Captures<'_>| {
        let word = if tag.get(2).is_some() { "endif" } else { "if true" };
        format!("{{%{} {word} {}%}}", &tag[1], &tag[3])
    });
    replaced.into_owned()
}

/// Replaces `'...' % value`, which minijinja does not know, by the filter `format`, within tags.
fn with_percent_as_filter(source: &str) -> String {
    let replaced = TAG.replace_all(source, |tag: &Captures<'_>| {
        let replaced = FORMATTED.replace_all(&tag[0], |found: &Captures<'_>| {
            match (found.get(2), found.get(3)) {
                (Some(tuple), _) => format!("({}|format{})", &found[1], tuple.as_str()),
                (None, Some(value)) => format!("({}|format({}))", &found[1], value.as_str()),
                (None, None) => found[1].to_owned(),
            }
        });
        replaced.into_owned()
    });
    replaced.into_owned()
}
