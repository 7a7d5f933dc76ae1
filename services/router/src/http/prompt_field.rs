//! The prompt of `/v1/completions`: a text, token ids, or a list of either.

use serde::{
    Deserialize,
    de::{self, SeqAccess, Visitor},
};

use super::fields::Fields;
use crate::request::error::{FieldError, shown};

/// A prompt of `/v1/completions`.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// Reads one or several prompts, each a text or token ids.
pub fn prompts(fields: &Fields<'_>) -> Result<Vec<Prompt>, FieldError> {
    let name = "prompt";
    let Some(text) = fields.raw(name) else {
        return Err(FieldError::new(name, "is missing; allowed: a text, token ids, or a list"));
    };
    // serde's message names the JSON type that it found.
    let Prompts(prompts) = serde_json::from_str(text).map_err(|error| {
        let reason = error.to_string();
        let reason = reason.rsplit_once(" at line ").map_or(reason.as_str(), |(what, _)| what);
        FieldError::new(name, format!("{reason} (it is {})", shown(text)))
    })?;
    if prompts.is_empty() {
        return Err(FieldError::new(name, "is empty; allowed: at least one token"));
    }
    Ok(prompts)
}

/// Reads the four forms in one pass, without JSON values: these take ten times the memory of token ids.
struct Prompts(Vec<Prompt>);

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shapes;
        impl<'de> Visitor<'de> for Shapes {
            type Value = Prompts;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a text, a list of texts, a list of token ids or a list of such lists")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Prompts, E> {
                Ok(Prompts(vec![Prompt::Text(text.to_owned())]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompts, A::Error> {
                let mut prompts = Vec::new();
                match list.next_element()? {
                    None => {}
                    Some(Element::Token(first)) => {
                        let mut tokens = vec![first];
                        while let Some(TokenId(token)) = list.next_element()? {
                            tokens.push(token);
                        }
                        prompts.push(Prompt::Tokens(tokens));
                    }
                    Some(Element::Prompt(first)) => {
                        prompts.push(first);
                        while let Some(element) = list.next_element()? {
                            match element {
                                Element::Prompt(prompt) => prompts.push(prompt),
                                Element::Token(token) => {
                                    let message = format!("token id {token} among whole prompts");
                                    return Err(de::Error::custom(message));
                                }
                            }
                        }
                    }
                }
                Ok(Prompts(prompts))
            }
        }
        deserializer.deserialize_any(Shapes)
    }
}

/// An element of a list of prompts, or a token id of a single prompt.
enum Element {
    Token(u32),
    Prompt(Prompt),
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shapes;
        impl<'de> Visitor<'de> for Shapes {
            type Value = Element;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a text, a token id or a list of token ids")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Element, E> {
                Ok(Element::Prompt(Prompt::Text(text.to_owned())))
            }

            fn visit_u64<E: de::Error>(self, id: u64) -> Result<Element, E> {
                token_id(id).map(Element::Token)
            }

            fn visit_i64<E: de::Error>(self, id: i64) -> Result<Element, E> {
                Err(E::custom(format!("token id {id} is negative")))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Element, A::Error> {
                let mut tokens = Vec::new();
                while let Some(TokenId(token)) = list.next_element()? {
                    tokens.push(token);
                }
                Ok(Element::Prompt(Prompt::Tokens(tokens)))
            }
        }
        deserializer.deserialize_any(Shapes)
    }
}

struct TokenId(u32);

impl<'de> Deserialize<'de> for TokenId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Number;
        impl Visitor<'_> for Number {
            type Value = TokenId;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a token id")
            }

            fn visit_u64<E: de::Error>(self, id: u64) -> Result<TokenId, E> {
                token_id(id).map(TokenId)
            }

            fn visit_i64<E: de::Error>(self, id: i64) -> Result<TokenId, E> {
                Err(E::custom(format!("token id {id} is negative")))
            }
        }
        deserializer.deserialize_any(Number)
    }
}

fn token_id<E: de::Error>(id: u64) -> Result<u32, E> {
    u32::try_from(id).map_err(|_| E::custom(format!("token id {id} is larger than any vocabulary")))
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
            ("7", "integer `7`"),
            ("{\"a\": 1}", "map"),
            ("[1, \"a\"]", "string \"a\""),
            ("[\"a\", 1]", "token id 1 among whole prompts"),
            ("[-1]", "token id -1 is negative"),
            ("[[1, -2]]", "token id -2 is negative"),
            ("[4294967296]", "4294967296 is larger"),
            ("[1.5]", "1.5"),
            ("[true]", "boolean"),
        ] {
            let said = prompts_of(prompt).unwrap_err();
            assert!(said.starts_with("prompt ") && said.contains(words), "{prompt}: {said}");
        }
    }
}
