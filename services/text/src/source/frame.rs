//! Interprets a tokenizer.json's `post_processor`: the tokens before and after a prompt.

use serde::Deserialize;
use serde_json::Value;

/// Token ids before and after a prompt of one text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PromptFrame {
    pub prefix: Vec<u32>,
    pub suffix: Vec<u32>,
}

/// Error of interpreting a post-processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FrameError {
    UnsupportedType(String),
    Malformed(String),
}

pub(super) const SUPPORTED_TYPES: &str =
    "TemplateProcessing, ByteLevel, RobertaProcessing, BertProcessing, Sequence of these, null";
/// Maximum nesting of sequences. Real files do not nest them, and corrupt files must not cause unbounded
/// recursion.
const DEPTH_MAX: usize = 4;

impl PromptFrame {
    pub fn of_post_processor(value: &Value) -> Result<Self, FrameError> {
        let mut frame = PromptFrame::default();
        frame.wrap(value, DEPTH_MAX)?;
        Ok(frame)
    }

    /// Adds the tokens of `value` around the present ones.
    fn wrap(&mut self, value: &Value, depth: usize) -> Result<(), FrameError> {
        let kind = value["type"].as_str().unwrap_or_default();
        let (prefix, suffix) = match kind {
            _ if value.is_null() => return Ok(()),
            "ByteLevel" => return Ok(()),
            "Sequence" if depth > 0 => {
                let inner = value["processors"].as_array().ok_or_else(|| {
                    FrameError::Malformed("a Sequence without a list of processors".to_owned())
                })?;
                return inner.iter().try_for_each(|value| self.wrap(value, depth - 1));
            }
            "TemplateProcessing" => parse::<TemplateProcessing>(value)?.around()?,
            "RobertaProcessing" | "BertProcessing" => {
                let parsed = parse::<ClassifierProcessing>(value)?;
                (vec![parsed.cls.1], vec![parsed.sep.1])
            }
            other => return Err(FrameError::UnsupportedType(other.to_owned())),
        };
        self.prefix.splice(0..0, prefix);
        self.suffix.extend(suffix);
        Ok(())
    }
}

fn parse<'a, T: Deserialize<'a>>(value: &'a Value) -> Result<T, FrameError> {
    T::deserialize(value).map_err(|error| FrameError::Malformed(error.to_string()))
}

#[derive(Deserialize)]
struct ClassifierProcessing {
    sep: (String, u32),
    cls: (String, u32),
}

#[derive(Deserialize)]
struct TemplateProcessing {
    single: Vec<Piece>,
    #[serde(default)]
    special_tokens: std::collections::BTreeMap<String, SpecialToken>,
}

#[derive(Deserialize)]
enum Piece {
    SpecialToken { id: String },
    Sequence { id: String },
}

#[derive(Deserialize)]
struct SpecialToken {
    ids: Vec<u32>,
}

impl TemplateProcessing {
    /// Returns the ids before and after the text, which the template must contain once.
    fn around(&self) -> Result<(Vec<u32>, Vec<u32>), FrameError> {
        let (mut prefix, mut suffix) = (Vec::new(), Vec::new());
        let mut texts = 0;
        for piece in &self.single {
            match piece {
                Piece::Sequence { id } if id == "A" => texts += 1,
                Piece::Sequence { id } => {
                    return Err(FrameError::Malformed(format!("single names text {id:?}, not A")));
                }
                Piece::SpecialToken { id } => {
                    let token = self.special_tokens.get(id).ok_or_else(|| {
                        FrameError::Malformed(format!("special_tokens lacks {id:?}"))
                    })?;
                    let side = if texts == 0 { &mut prefix } else { &mut suffix };
                    side.extend_from_slice(&token.ids);
                }
            }
        }
        if texts != 1 {
            return Err(FrameError::Malformed(format!("single has the text {texts} times")));
        }
        Ok((prefix, suffix))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn template() -> Value {
        json!({
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "</s>", "type_id": 0}},
            ],
            "pair": [],
            "special_tokens": {
                "<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
                "</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]},
            },
        })
    }

    #[test]
    fn templates_say_what_stands_around_a_prompt() {
        let frame = PromptFrame::of_post_processor(&template()).unwrap();
        assert_eq!(frame, PromptFrame { prefix: vec![1], suffix: vec![2] });
    }

    #[test]
    fn sequences_wrap_from_the_inside() {
        let outer = json!({"type": "RobertaProcessing", "cls": ["<c>", 8], "sep": ["<p>", 9]});
        let sequence =
            json!({"type": "Sequence", "processors": [{"type": "ByteLevel"}, template(), outer]});
        let frame = PromptFrame::of_post_processor(&sequence).unwrap();
        assert_eq!(frame, PromptFrame { prefix: vec![8, 1], suffix: vec![2, 9] });
    }

    #[test]
    fn broken_templates_are_refused() {
        let mut lacks_token = template();
        lacks_token["special_tokens"] = json!({});
        assert_eq!(
            PromptFrame::of_post_processor(&lacks_token),
            Err(FrameError::Malformed("special_tokens lacks \"<s>\"".into()))
        );
        let mut no_text = template();
        no_text["single"] = json!([]);
        assert!(matches!(PromptFrame::of_post_processor(&no_text), Err(FrameError::Malformed(_))));
        assert_eq!(
            PromptFrame::of_post_processor(&json!({"type": "Magic"})),
            Err(FrameError::UnsupportedType("Magic".into()))
        );
        let mut deep = json!({"type": "ByteLevel"});
        for _ in 0..100 {
            deep = json!({"type": "Sequence", "processors": [deep]});
        }
        assert!(PromptFrame::of_post_processor(&deep).is_err());
    }
}
