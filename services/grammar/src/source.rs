//! What a client asks for, and whether it is small enough to look at.

use std::ops::AddAssign;

use llguidance::{JsonCompileOptions, api::TopLevelGrammar};
use regex_syntax::ParserBuilder;
use serde_json::Value;

use crate::{
    endless::check_ends,
    error::{GrammarError, one_line},
    limits::{
        JSON_WHITE_SPACE, MULTIPLE_OF_MAX, REGEX_BYTES_MAX, REGEX_DEPTH_MAX,
        SCHEMA_ALTERNATIVES_MAX, SCHEMA_BYTES_MAX, SCHEMA_DEPTH_MAX, SCHEMA_PROPERTIES_MAX,
        SCHEMA_VALUES_MAX,
    },
    tool_calls::ToolCalls,
};

/// What the whole answer must match.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Grammar {
    /// The text of a JSON schema.
    JsonSchema(String),
    /// From the first to the last character of the answer.
    Regex(String),
    ToolCalls(ToolCalls),
}

impl Grammar {
    /// Any JSON object.
    pub fn json_object() -> Self {
        Self::JsonSchema(r#"{"type":"object"}"#.to_owned())
    }

    /// As llguidance takes it; checked before anything that costs more than reading it.
    pub(crate) fn parsed(&self) -> Result<TopLevelGrammar, GrammarError> {
        match self {
            Self::JsonSchema(text) => {
                let (schema, _) = parsed_schema(text)?;
                Ok(TopLevelGrammar::from_json_schema(schema))
            }
            Self::Regex(text) => {
                check_regex(text)?;
                Ok(TopLevelGrammar::from_regex(text))
            }
            Self::ToolCalls(calls) => calls.parsed(),
        }
    }

    /// How much text there is to work on.
    pub fn bytes(&self) -> usize {
        match self {
            Self::JsonSchema(text) | Self::Regex(text) => text.len(),
            Self::ToolCalls(calls) => calls.bytes(),
        }
    }
}

/// The schema with the options that it is compiled with, and what makes it dear.
pub(crate) fn parsed_schema(text: &str) -> Result<(Value, SchemaParts), GrammarError> {
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
    let parts = SchemaParts::of(&schema)?;
    parts.check(1)?;
    check_ends(&schema)?;
    // In the place where a client could change them.
    let options = JsonCompileOptions {
        whitespace_pattern: Some(JSON_WHITE_SPACE.to_owned()),
        ..JsonCompileOptions::default()
    };
    options.apply_to(&mut schema);
    Ok((schema, parts))
}

pub(crate) fn check_regex(text: &str) -> Result<(), GrammarError> {
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
    Ok(())
}

/// What makes a schema dear beside its length. Keywords are counted wherever they stand, also as names.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SchemaParts {
    properties: usize,
    values: usize,
    alternatives: usize,
}

impl SchemaParts {
    fn of(schema: &Value) -> Result<Self, GrammarError> {
        let mut parts = Self::default();
        let mut rest = vec![schema];
        while let Some(value) = rest.pop() {
            let Value::Object(object) = value else {
                rest.extend(value.as_array().into_iter().flatten());
                continue;
            };
            for (keyword, value) in object {
                match (keyword.as_str(), value) {
                    ("properties" | "patternProperties", Value::Object(all)) => {
                        parts.properties += all.len();
                    }
                    // Values are no schemas.
                    ("enum", Value::Array(all)) => {
                        parts.values += all.len();
                        continue;
                    }
                    ("const" | "default" | "examples", _) => continue,
                    ("anyOf" | "oneOf" | "allOf", Value::Array(all)) => {
                        parts.alternatives += all.len();
                    }
                    ("multipleOf", Value::Number(number)) if !is_reckoned(number.as_f64()) => {
                        return Err(GrammarError::MultipleOf { value: number.to_string() });
                    }
                    _ => {}
                }
                rest.push(value);
            }
        }
        Ok(parts)
    }

    /// Refuses more than so many times what one schema may have.
    pub fn check(self, factor: usize) -> Result<(), GrammarError> {
        for (what, count, max) in [
            ("properties", self.properties, SCHEMA_PROPERTIES_MAX),
            ("values in enums", self.values, SCHEMA_VALUES_MAX),
            ("parts in anyOf, oneOf and allOf", self.alternatives, SCHEMA_ALTERNATIVES_MAX),
        ] {
            let max = max * factor;
            if count > max {
                return Err(GrammarError::TooMany { what, count, max });
            }
        }
        Ok(())
    }
}

impl AddAssign for SchemaParts {
    fn add_assign(&mut self, other: Self) {
        self.properties += other.properties;
        self.values += other.values;
        self.alternatives += other.alternatives;
    }
}

fn is_reckoned(multiple: Option<f64>) -> bool {
    let Some(multiple) = multiple else { return false };
    // As few decimal places as name it.
    let scaled = (0..=8).map(|places| multiple.abs() * 10_f64.powi(places));
    let mut whole = scaled.filter(|scaled| (scaled - scaled.round()).abs() <= scaled * 1e-12);
    whole.next().is_some_and(|scaled| scaled <= MULTIPLE_OF_MAX)
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
