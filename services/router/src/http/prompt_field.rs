//! The prompt of `/v1/completions`: a text, token ids, or a list of either.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::fields::Fields;
use crate::request::error::{FieldError, shown};

/// A prompt of `/v1/completions`.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// Parses one or several prompts, each a text or token ids. Token ids are parsed directly, because JSON
/// values would take ten times the memory.
pub fn prompts(fields: &Fields<'_>) -> Result<Vec<Prompt>, FieldError> {
    let Some(text) = fields.raw("prompt") else {
        let problem = "is missing; allowed: a text, token ids, or a list of either";
        return Err(FieldError::new("prompt", problem));
    };
    let inner = text.strip_prefix('[').map(str::trim_ascii_start);
    match inner {
        Some(inner) if inner.starts_with(['"', '[']) => {
            json::<Vec<&RawValue>>(text)?.into_iter().map(|one| prompt(one.get())).collect()
        }
        Some("]") => Err(FieldError::new("prompt", "is empty; allowed: at least one token")),
        _ => prompt(text).map(|prompt| vec![prompt]),
    }
}

fn prompt(text: &str) -> Result<Prompt, FieldError> {
    match text.as_bytes().first() {
        Some(b'"') => json(text).map(Prompt::Text),
        Some(b'[') => json(text).map(Prompt::Tokens),
        _ => {
            let problem = "allowed: a text, token ids, or a list of either";
            Err(FieldError::new("prompt", format!("has {}; {problem}", shown(text))))
        }
    }
}

/// Parses a part of the prompt. The error names the value found and the expected type.
fn json<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, FieldError> {
    serde_json::from_str(text).map_err(|error| {
        let reason = error.to_string();
        let reason = reason.rsplit_once(" at line ").map_or(reason.as_str(), |(what, _)| what);
        let reason = reason.replace("expected u32", "expected a token id");
        FieldError::new("prompt", format!("is invalid: {reason} (it is {})", shown(text)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompts_of(prompt: &str) -> Result<Vec<Prompt>, String> {
        let body = format!(r#"{{"prompt": {prompt}}}"#);
        prompts(&Fields::parse(body.as_bytes()).unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn prompts_have_four_shapes() {
        let text = |text: &str| Prompt::Text(text.into());
        assert_eq!(prompts_of(r#""a\n""#), Ok(vec![text("a\n")]));
        assert_eq!(prompts_of(r#"["a", "b"]"#), Ok(vec![text("a"), text("b")]));
        assert_eq!(prompts_of("[1, 2]"), Ok(vec![Prompt::Tokens(vec![1, 2])]));
        assert_eq!(
            prompts_of("[[1], [2, 3]]"),
            Ok(vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])])
        );
        assert_eq!(prompts_of("[[]]"), Ok(vec![Prompt::Tokens(vec![])]));
    }

    #[test]
    fn other_prompts_are_refused_with_what_was_found() {
        for (prompt, words) in [
            ("[]", "prompt is empty"),
            ("null", "prompt is missing"),
            ("7", "has 7; allowed: a text, token ids"),
            ("{\"a\": 1}", "has {\"a\": 1}; allowed"),
            ("[1, \"a\"]", "string \"a\""),
            ("[\"a\", 1]", "has 1; allowed"),
            ("[-1]", "integer `-1`, expected a token id"),
            ("[[1, -2]]", "integer `-2`, expected a token id"),
            ("[4294967296]", "integer `4294967296`, expected a token id"),
            ("[1.5]", "1.5"),
            ("[true]", "boolean"),
        ] {
            let said = prompts_of(prompt).unwrap_err();
            assert!(said.starts_with("prompt ") && said.contains(words), "{prompt}: {said}");
        }
    }
}
