//! Interprets a tokenizer.json's `decoder`: the bytes of tokens.

use serde::Deserialize;
use serde_json::Value;

use crate::decoding::Decoding;

pub(super) const SUPPORTED: &str = "ByteLevel, or a Sequence of Replace (a string by one not longer), \
     ByteFallback, Fuse and then Strip at the start";

#[derive(Deserialize)]
#[serde(tag = "type")]
enum DecoderEntry {
    ByteLevel,
    Sequence { decoders: Vec<StepEntry> },
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum StepEntry {
    ByteLevel,
    Replace { pattern: PatternEntry, content: String },
    ByteFallback,
    Fuse,
    Strip { content: char, start: usize, stop: usize },
}

#[derive(Deserialize)]
enum PatternEntry {
    String(String),
}

/// Returns the decoding, or the decoder's kind when it is not supported.
pub(super) fn decoding_of(decoder: &Value) -> Result<Decoding, String> {
    let shown = || {
        let steps = decoder["decoders"].as_array();
        let kinds: Vec<&str> =
            steps.into_iter().flatten().filter_map(|step| step["type"].as_str()).collect();
        format!("{} {}", decoder["type"].as_str().unwrap_or("null"), kinds.join(" "))
            .trim_end()
            .to_owned()
    };
    let steps = match DecoderEntry::deserialize(decoder).map_err(|_| shown())? {
        DecoderEntry::ByteLevel => return Ok(Decoding::ByteLevel),
        DecoderEntry::Sequence { decoders } => decoders,
    };
    if matches!(steps[..], [StepEntry::ByteLevel]) {
        return Ok(Decoding::ByteLevel);
    }
    let mut replacements = Vec::new();
    let mut with_byte_fallback = false;
    let mut strip_start = None;
    let mut fused = false;
    for step in steps {
        match step {
            StepEntry::Replace { pattern: PatternEntry::String(from), content }
                if !from.is_empty() && content.len() <= from.len() && !fused =>
            {
                replacements.push((from, content));
            }
            StepEntry::ByteFallback if !fused => with_byte_fallback = true,
            StepEntry::Fuse => fused = true,
            StepEntry::Strip { content, start, stop: 0 } if fused && strip_start.is_none() => {
                strip_start = Some((content, start));
            }
            _ => return Err(shown()),
        }
    }
    Ok(Decoding::Pieces {
        replacements,
        byte_fallback: with_byte_fallback,
        strip_start,
        keeps_added: false,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn byte_level_and_sentence_piece_decoders_are_read() {
        assert_eq!(decoding_of(&json!({"type": "ByteLevel"})), Ok(Decoding::ByteLevel));
        let llama_2 = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]});
        let expected = Decoding::Pieces {
            replacements: vec![("▁".into(), " ".into())],
            byte_fallback: true,
            strip_start: Some((' ', 1)),
            keeps_added: false,
        };
        assert_eq!(decoding_of(&llama_2), Ok(expected));
    }

    #[test]
    fn unsupported_decoders_are_rejected_by_name() {
        assert_eq!(decoding_of(&Value::Null), Err("null".into()));
        assert_eq!(decoding_of(&json!({"type": "WordPiece"})), Err("WordPiece".into()));
        let strip_each = json!({"type": "Sequence", "decoders": [
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}, {"type": "Fuse"},
        ]});
        assert_eq!(decoding_of(&strip_each), Err("Sequence Strip Fuse".into()));
    }
}
