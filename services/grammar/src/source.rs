//! What a client asks for, and whether it is small enough to look at.

use llguidance::{JsonCompileOptions, api::TopLevelGrammar};
use regex_syntax::ParserBuilder;
use serde_json::Value;

use crate::{
    error::{GrammarError, one_line},
    limits::{
        JSON_WHITE_SPACE, REGEX_BYTES_MAX, REGEX_DEPTH_MAX, SCHEMA_BYTES_MAX, SCHEMA_DEPTH_MAX,
    },
};

/// What the whole answer must match.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Grammar {
    /// The text of a JSON schema.
    JsonSchema(String),
    /// From the first to the last character of the answer.
    Regex(String),
}

impl Grammar {
    /// Any JSON object.
    pub fn json_object() -> Self {
        Self::JsonSchema(r#"{"type":"object"}"#.to_owned())
    }

    /// As llguidance takes it; checked before anything that costs more than reading it.
    pub(crate) fn parsed(&self) -> Result<TopLevelGrammar, GrammarError> {
        match self {
            Self::JsonSchema(text) => parsed_schema(text),
            Self::Regex(text) => parsed_regex(text),
        }
    }
}

fn parsed_schema(text: &str) -> Result<TopLevelGrammar, GrammarError> {
    check_length(text, SCHEMA_BYTES_MAX)?;
    let depth = depth(text);
    if depth > SCHEMA_DEPTH_MAX {
        return Err(GrammarError::TooDeep { depth, max: SCHEMA_DEPTH_MAX });
    }
    let not_a_schema = |reason: String| GrammarError::NotASchema { reason };
    let schema: Value =
        serde_json::from_str(text).map_err(|error| not_a_schema(error.to_string()))?;
    let mut schema = match schema {
        Value::Object(schema) => Value::Object(schema),
        // Everything is allowed.
        Value::Bool(true) => Value::Object(serde_json::Map::new()),
        other => return Err(not_a_schema(format!("{other} is not an object"))),
    };
    // In the place where a client could change them.
    let options = JsonCompileOptions {
        whitespace_pattern: Some(JSON_WHITE_SPACE.to_owned()),
        ..JsonCompileOptions::default()
    };
    options.apply_to(&mut schema);
    Ok(TopLevelGrammar::from_json_schema(schema))
}

fn parsed_regex(text: &str) -> Result<TopLevelGrammar, GrammarError> {
    check_length(text, REGEX_BYTES_MAX)?;
    let parsed = ParserBuilder::new().nest_limit(REGEX_DEPTH_MAX).build().parse(text);
    if let Err(error) = parsed {
        let reason = match &error {
            regex_syntax::Error::Parse(error) => {
                format!("{} at byte {}", error.kind(), error.span().start.offset)
            }
            regex_syntax::Error::Translate(error) => {
                format!("{} at byte {}", error.kind(), error.span().start.offset)
            }
            other => one_line(&other.to_string()),
        };
        return Err(GrammarError::NotARegex { reason });
    }
    Ok(TopLevelGrammar::from_regex(text))
}

fn check_length(text: &str, max: usize) -> Result<(), GrammarError> {
    let bytes = text.len();
    if bytes > max { Err(GrammarError::TooLong { bytes, max }) } else { Ok(()) }
}

/// How deep objects and lists of a JSON text nest, without recursion. Of a text that is not JSON any
/// number.
fn depth(text: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let (mut in_string, mut is_escaped) = (false, false);
    for byte in text.bytes() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if in_string => is_escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'{' | b'[' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_counts_brackets_outside_of_strings() {
        assert_eq!(depth(r#"{"a": [{"b": "[[[[\"{{"}], "c": []}"#), 3);
        assert_eq!(depth("]]]["), 1);
        assert_eq!(depth(r#""\\"[["#), 2);
    }

    #[test]
    fn what_is_too_large_is_refused_with_the_limit() {
        let schema = |text: String| Grammar::JsonSchema(text).parsed().unwrap_err().to_string();
        let long = format!(r#"{{"const": "{}"}}"#, "x".repeat(SCHEMA_BYTES_MAX));
        assert_eq!(schema(long), "has 65549 bytes; allowed: at most 65536");
        let deep = format!("{}1{}", "[".repeat(40_000), "]".repeat(20_000));
        assert_eq!(schema(deep), "nests 40000 deep; allowed: at most 32");
        let regex = |text: String| Grammar::Regex(text).parsed().unwrap_err().to_string();
        assert_eq!(regex("a".repeat(20_000)), "has 20000 bytes; allowed: at most 16384");
        let nested = format!("{}a{}", "(".repeat(500), ")".repeat(500));
        assert!(regex(nested).contains("nest"));
    }

    #[test]
    fn mistakes_are_named_with_their_place() {
        let said = |grammar: Grammar| grammar.parsed().unwrap_err().to_string();
        let schema = said(Grammar::JsonSchema(r#"{"type": }"#.into()));
        assert!(schema.contains("line 1 column 10"), "{schema}");
        assert!(said(Grammar::JsonSchema("7".into())).contains("7 is not an object"));
        assert!(said(Grammar::JsonSchema("false".into())).contains("false is not an object"));
        let regex = said(Grammar::Regex("ab(c".into()));
        assert_eq!(regex, "is not a regular expression: unclosed group at byte 2");
        assert!(said(Grammar::Regex(r"a\".into())).contains("incomplete escape"));
    }
}
