//! Interprets a tokenizer.json's `post_processor`: the tokens before and after a prompt.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::error::LoadError;

/// Token ids before and after a prompt of one text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PromptFrame {
    pub prefix: Vec<u32>,
    pub suffix: Vec<u32>,
}

const KEY: &str = "post_processor";
const SUPPORTED_TYPES: &str =
    "TemplateProcessing, ByteLevel, RobertaProcessing, BertProcessing, Sequence of these, null";
/// Maximum nesting of sequences. Real files do not nest them, and corrupt files must not cause
/// unbounded recursion.
const DEPTH_MAX: usize = 4;

impl PromptFrame {
    /// Interprets `value` in the file `path`.
    pub(super) fn of_post_processor(value: &Value, path: &Path) -> Result<Self, LoadError> {
        let mut frame = PromptFrame::default();
        frame.wrap(value, path, DEPTH_MAX)?;
        Ok(frame)
    }

    /// Adds the tokens of `value` around the present ones.
    fn wrap(&mut self, value: &Value, path: &Path, depth: usize) -> Result<(), LoadError> {
        let malformed = |problem: String| LoadError::invalid(path, KEY, problem);
        let kind = value["type"].as_str().unwrap_or_default();
        let (prefix, suffix) = match kind {
            _ if value.is_null() => return Ok(()),
            "ByteLevel" => return Ok(()),
            "Sequence" if depth > 0 => {
                let inner = value["processors"].as_array().ok_or_else(|| {
                    malformed("a Sequence without a list of processors".to_owned())
                })?;
                return inner.iter().try_for_each(|value| self.wrap(value, path, depth - 1));
            }
            "TemplateProcessing" => {
                let template = TemplateProcessing::deserialize(value);
                template
                    .map_err(|error| error.to_string())
                    .and_then(|it| it.around())
                    .map_err(malformed)?
            }
            "RobertaProcessing" | "BertProcessing" => {
                let parsed = ClassifierProcessing::deserialize(value);
                let parsed = parsed.map_err(|error| malformed(error.to_string()))?;
                (vec![parsed.cls.1], vec![parsed.sep.1])
            }
            other => {
                let key = "post_processor.type";
                return Err(LoadError::unsupported(path, key, other.to_owned(), SUPPORTED_TYPES));
            }
        };
        self.prefix.splice(0..0, prefix);
        self.suffix.extend(suffix);
        Ok(())
    }
}

#[derive(Deserialize)]
struct ClassifierProcessing {
    sep: (String, u32),
    cls: (String, u32),
}

#[derive(Deserialize)]
struct TemplateProcessing {
    single: Vec<TemplatePiece>,
    #[serde(default)]
    special_tokens: std::collections::BTreeMap<String, SpecialToken>,
}

#[derive(Deserialize)]
enum TemplatePiece {
    SpecialToken { id: String },
    Sequence { id: String },
}

#[derive(Deserialize)]
struct SpecialToken {
    ids: Vec<u32>,
}

impl TemplateProcessing {
    /// Returns the ids before and after the text, which the template must contain once.
    fn around(&self) -> Result<(Vec<u32>, Vec<u32>), String> {
        let (mut prefix, mut suffix) = (Vec::new(), Vec::new());
        let mut texts = 0;
        for piece in &self.single {
            match piece {
                TemplatePiece::Sequence { id } if id == "A" => texts += 1,
                TemplatePiece::Sequence { id } => {
                    return Err(format!("single names text {id:?}, not A"));
                }
                TemplatePiece::SpecialToken { id } => {
                    let token = self
                        .special_tokens
                        .get(id)
                        .ok_or_else(|| format!("special_tokens lacks {id:?}"))?;
                    let side = if texts == 0 { &mut prefix } else { &mut suffix };
                    side.extend_from_slice(&token.ids);
                }
            }
        }
        if texts != 1 {
            return Err(format!("single has the text {texts} times"));
        }
        Ok((prefix, suffix))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn frame(value: &Value) -> Result<PromptFrame, String> {
        let frame = PromptFrame::of_post_processor(value, Path::new("t.json"));
        frame.map_err(|error| error.to_string())
    }

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
    fn template_processing_sets_the_tokens_around_a_prompt() {
        let frame = frame(&template()).unwrap();
        assert_eq!(frame, PromptFrame { prefix: vec![1], suffix: vec![2] });
    }

    #[test]
    fn nested_post_processors_apply_from_the_inside() {
        let outer = json!({"type": "RobertaProcessing", "cls": ["<c>", 8], "sep": ["<p>", 9]});
        let sequence =
            json!({"type": "Sequence", "processors": [{"type": "ByteLevel"}, template(), outer]});
        let frame = frame(&sequence).unwrap();
        assert_eq!(frame, PromptFrame { prefix: vec![8, 1], suffix: vec![2, 9] });
    }

    #[test]
    fn malformed_post_processors_are_rejected() {
        let mut lacks_token = template();
        lacks_token["special_tokens"] = json!({});
        let lacks = "t.json: post_processor: special_tokens lacks \"<s>\"";
        assert_eq!(frame(&lacks_token).unwrap_err(), lacks);
        let mut no_text = template();
        no_text["single"] = json!([]);
        let absent = "t.json: post_processor: single has the text 0 times";
        assert_eq!(frame(&no_text).unwrap_err(), absent);
        let unsupported = frame(&json!({"type": "Magic"})).unwrap_err();
        assert!(unsupported.contains("post_processor.type is \"Magic\""), "{unsupported}");
        let mut deep = json!({"type": "ByteLevel"});
        for _ in 0..100 {
            deep = json!({"type": "Sequence", "processors": [deep]});
        }
        assert!(frame(&deep).is_err());
    }
}
