//! A JSON request body as named fields, each parsed with its type and limits.
//!
//! One pass over the body finds every syntax error. Each field keeps its JSON text until a reader
//! asks for the field, so that an error can describe the value as the client sent it. Unknown
//! fields are ignored. Derived structs (serde with `serde_path_to_error`) would lose this: serde
//! reports a type but neither the value as sent nor the allowed range, and a flattened struct
//! cannot borrow the JSON text.

use std::{collections::HashMap, ops::RangeInclusive};

use serde::Deserialize;
use serde_json::{Value, value::RawValue};

use crate::request::error::{FieldError, invalid_value, parse_field, reason_of};

/// A body that is not one JSON object.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BodyError {
    #[error("the body is not UTF-8: invalid byte at offset {offset}")]
    NotUtf8 { offset: usize },
    #[error("the body is not valid JSON: {reason} (line {line}, column {column})")]
    NotJson { reason: String, line: usize, column: usize },
    #[error("the body is empty; allowed: a JSON object")]
    Empty,
}

/// The top-level fields of a request.
#[derive(Clone, Debug)]
pub(super) struct RequestFields<'a> {
    by_name: HashMap<String, &'a RawValue>,
    /// Fields that the client gave by a name of another server: the router's name, and the
    /// client's.
    renamed: Vec<(&'static str, &'static str)>,
    /// Names that were read; a test compares them with the OpenAPI document.
    #[cfg(test)]
    pub asked: std::sync::Arc<std::sync::Mutex<std::collections::BTreeSet<String>>>,
}

impl<'a> RequestFields<'a> {
    /// Parses a body, which may begin with a byte order mark. The last value of a repeated field
    /// counts, as in most JSON parsers.
    pub(super) fn parse(body: &'a [u8]) -> Result<Self, BodyError> {
        let text = std::str::from_utf8(body)
            .map_err(|error| BodyError::NotUtf8 { offset: error.valid_up_to() })?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        if text.trim_ascii().is_empty() {
            return Err(BodyError::Empty);
        }
        let by_name = serde_json::from_str(text).map_err(|error| {
            let reason = reason_of(&error).replace("expected a map", "expected a JSON object");
            BodyError::NotJson { reason, line: error.line(), column: error.column() }
        })?;
        Ok(Self {
            by_name,
            renamed: Vec::new(),
            #[cfg(test)]
            asked: Default::default(),
        })
    }

    /// Returns the field's JSON text; `None` if the field is absent or `null`.
    pub(super) fn raw(&self, name: &str) -> Option<&'a str> {
        #[cfg(test)]
        self.asked.lock().unwrap().insert(name.to_owned());
        self.by_name.get(name).map(|raw| raw.get()).filter(|&text| text != "null")
    }

    /// Gives the field `theirs` the router's name. With the value `unset` the field counts as absent.
    pub(super) fn rename(
        &mut self,
        theirs: &'static str,
        ours: &'static str,
        unset: Option<&str>,
    ) -> Result<(), FieldError> {
        let Some(text) = self.raw(theirs).filter(|text| Some(*text) != unset) else {
            return Ok(());
        };
        if self.by_name.get(ours).is_some_and(|raw| raw.get() != "null" && raw.get() != text) {
            let problem = format!("is given together with {ours}; allowed: one of them");
            return Err(FieldError::new(theirs, problem));
        }
        if let Some(value) = self.by_name.remove(theirs) {
            self.by_name.insert(ours.to_owned(), value);
            self.renamed.push((ours, theirs));
        }
        Ok(())
    }

    /// Returns the name by which the client gave a field of the router.
    pub(super) fn clients_name<'n>(&self, ours: &'n str) -> &'n str {
        self.renamed.iter().find(|(name, _)| *name == ours).map_or(ours, |(_, theirs)| theirs)
    }

    /// Parses the field as any type; `allowed` ends the sentence "allowed: ...".
    pub(super) fn value<T: Deserialize<'a>>(
        &self,
        name: &str,
        allowed: &str,
    ) -> Result<Option<T>, FieldError> {
        self.raw(name).map(|text| parse_field(name, text, allowed)).transpose()
    }

    pub(super) fn boolean(&self, name: &str) -> Result<Option<bool>, FieldError> {
        self.value(name, "true or false")
    }

    pub(super) fn string(&self, name: &str) -> Result<Option<String>, FieldError> {
        self.value(name, "a string")
    }

    /// Parses a number within `range`.
    pub(super) fn number(
        &self,
        name: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f32>, FieldError> {
        let Some(text) = self.raw(name) else { return Ok(None) };
        match serde_json::from_str::<f64>(text) {
            Ok(number) if range.contains(&number) => Ok(Some(number as f32)),
            _ => {
                let allowed = format!("a number from {} to {}", range.start(), range.end());
                Err(invalid_value(name, text, &allowed))
            }
        }
    }

    /// Parses a whole number within `range`; `16.0` is valid, because Python clients write it.
    pub(super) fn integer(
        &self,
        name: &str,
        range: RangeInclusive<i128>,
    ) -> Result<Option<i128>, FieldError> {
        let Some(text) = self.raw(name) else { return Ok(None) };
        whole_number(text).filter(|number| range.contains(number)).map(Some).ok_or_else(|| {
            let allowed = format!("a whole number from {} to {}", range.start(), range.end());
            invalid_value(name, text, &allowed)
        })
    }

    /// Parses a whole number within a range of `u32`.
    pub(super) fn count(
        &self,
        name: &str,
        range: RangeInclusive<u32>,
    ) -> Result<Option<u32>, FieldError> {
        let wide = i128::from(*range.start())..=i128::from(*range.end());
        Ok(self.integer(name, wide)?.map(|number| number as u32))
    }

    /// Rejects an unsupported field unless the field is absent, `null`, or one of `neutral` (as
    /// JSON text). `instead` names the field to use, if there is one.
    pub(super) fn unsupported(
        &self,
        name: &str,
        neutral: &[&str],
        instead: &str,
    ) -> Result<(), FieldError> {
        let value = |text| serde_json::from_str::<Value>(text).ok();
        let is_neutral = |text| neutral.iter().any(|neutral| value(text) == value(neutral));
        match self.raw(name) {
            // The value may be a part of the prompt.
            Some(text) if !is_neutral(text) => {
                let advice = if instead.is_empty() {
                    "leave it out".into()
                } else {
                    format!("use {instead}")
                };
                Err(FieldError::new(name, format!("is not supported; {advice}")))
            }
            _ => Ok(()),
        }
    }
}

fn whole_number(text: &str) -> Option<i128> {
    if let Ok(number) = text.parse::<i128>() {
        return Some(number);
    }
    let number = serde_json::from_str::<f64>(text).ok()?;
    // An f64 represents every whole number up to 2^53 exactly.
    (number.fract() == 0.0 && number.abs() <= 9_007_199_254_740_992.0).then_some(number as i128)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with<T>(body: &str, read: impl FnOnce(RequestFields<'_>) -> T) -> T {
        read(RequestFields::parse(body.as_bytes()).unwrap())
    }

    #[test]
    fn fields_are_read_with_their_types() {
        let body = r#" {"a": 1.5, "b": true, "c": "x", "d": null, "e": 16.0, "a\u0062": 7} "#;
        with(body, |fields| {
            assert_eq!(fields.number("a", 0.0..=2.0), Ok(Some(1.5)));
            assert_eq!(fields.boolean("b"), Ok(Some(true)));
            assert_eq!(fields.string("c"), Ok(Some("x".into())));
            assert_eq!(fields.string("d"), Ok(None));
            assert_eq!(fields.count("e", 1..=20), Ok(Some(16)));
            assert_eq!(fields.count("ab", 1..=20), Ok(Some(7)));
            assert_eq!(fields.count("nobody", 1..=20), Ok(None));
        });
    }

    #[test]
    fn invalid_values_are_rejected_with_the_allowed_ones() {
        let said = |error: FieldError| error.to_string();
        with(r#"{"t": "hot", "n": -3, "huge": 1e400, "b": 1, "s": 5}"#, |fields| {
            assert_eq!(
                said(fields.number("t", 0.0..=2.0).unwrap_err()),
                r#"t is "hot"; allowed: a number from 0 to 2"#
            );
            assert_eq!(
                said(fields.count("n", 1..=8).unwrap_err()),
                "n is -3; allowed: a whole number from 1 to 8"
            );
            assert_eq!(
                said(fields.count("huge", 1..=8).unwrap_err()),
                "huge is 1e400; allowed: a whole number from 1 to 8"
            );
            assert_eq!(said(fields.boolean("b").unwrap_err()), "b is 1; allowed: true or false");
            assert_eq!(said(fields.string("s").unwrap_err()), "s is 5; allowed: a string");
        });
        let long = format!(r#"{{"n": "{}"}}"#, "é".repeat(500));
        with(&long, |fields| {
            let message = said(fields.count("n", 1..=8).unwrap_err());
            assert!(message.contains("a string (1002 bytes)") && message.len() < 250, "{message}");
        });
    }

    #[test]
    fn errors_of_long_values_tell_the_path_and_the_cause() {
        let said = |error: FieldError| error.to_string();
        let list = format!(r#"{{"l": [{}-3], "k": "\ud83d"}}"#, "1,".repeat(100));
        with(&list, |fields| {
            let shown = said(fields.value::<Vec<u32>>("l", "token ids").unwrap_err());
            let words = "… (204 bytes), invalid at l[100]: invalid value: integer `-3`, expected u32; \
                         allowed: token ids";
            assert!(shown.starts_with("l is [1,1,") && shown.ends_with(words), "{shown}");
            assert_eq!(
                said(fields.string("k").unwrap_err()),
                "k is not valid JSON at k: unexpected end of hex escape; allowed: a string"
            );
        });
        // Only names are shown of keys.
        let private =
            format!(r#"{{"o": {{"Jane Doe": {{"a": {{"b": 1}}}}, "{}": 0}}}}"#, "x".repeat(99));
        with(&private, |fields| {
            type Nested = HashMap<String, HashMap<String, HashMap<String, bool>>>;
            let said = said(fields.value::<Nested>("o", "x").unwrap_err());
            assert!(said.contains("invalid at o.?.a.b: invalid type: integer `1`"), "{said}");
        });
    }

    #[test]
    fn a_body_must_be_an_object() {
        let said = RequestFields::parse(b"[1]").unwrap_err().to_string();
        assert_eq!(
            said,
            "the body is not valid JSON: invalid type: sequence, expected a JSON object (line 1, column 0)"
        );
        for text in ["x".repeat(1 << 20), "\\\", expected a map".into()] {
            let said =
                RequestFields::parse(format!("\"{text}\"").as_bytes()).unwrap_err().to_string();
            let words =
                "the body is not valid JSON: invalid type: string, expected a JSON object (";
            assert!(said.starts_with(words) && said.len() < 120, "{said}");
        }
    }

    #[test]
    fn a_broken_body_is_refused_with_the_position() {
        assert_eq!(RequestFields::parse(b"  ").unwrap_err(), BodyError::Empty);
        assert_eq!(
            RequestFields::parse(b"{\"a\": \"\xff\"}").unwrap_err(),
            BodyError::NotUtf8 { offset: 7 }
        );
        for (body, line, column) in
            [("{\"a\": 1", 1, 7), ("{\n\"a\": tru}", 2, 9), ("[1]", 1, 0), ("{} x", 1, 4)]
        {
            match RequestFields::parse(body.as_bytes()).unwrap_err() {
                BodyError::NotJson { line: l, column: c, .. } => {
                    assert_eq!((l, c), (line, column), "{body}");
                }
                other => panic!("{other}"),
            }
        }
        let deep = format!("{{\"a\": {}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
        // Parsing keeps the field as text without recursion, so deep nesting does not overflow the
        // stack.
        with(&deep, |fields| {
            let error = fields.value::<Value>("a", "less depth").unwrap_err().to_string();
            let words = "a is not valid JSON at a[0][0]";
            assert!(error.starts_with(words) && error.len() < 260, "{error}");
            assert!(error.contains("more than 127 levels of lists and objects"), "{error}");
        });
    }

    #[test]
    fn unsupported_fields_are_rejected_unless_neutral() {
        with(r#"{"echo": true, "n": 1, "suffix": null, "beam": false}"#, |fields| {
            assert!(fields.unsupported("echo", &["false"], "").is_err());
            assert!(fields.unsupported("suffix", &[], "").is_ok());
            assert!(fields.unsupported("beam", &["false"], "").is_ok());
            assert!(fields.unsupported("n", &["1.0", "1"], "").is_ok());
            assert!(fields.unsupported("absent", &[], "").is_ok());
        });
    }
}
