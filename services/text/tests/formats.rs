//! Outputs in every format of tool calls and of reasoning, whole and split everywhere.
//!
//! `formats/NAME.jsonl` has an output in each line, written after the definition of the format,
//! with the expected pieces: text, or a function's name and arguments (and "cut" if the output ends
//! within the call). In answers of gpt-oss, `openai_harmony` says whether the
//! package openai-harmony reads the answer alike; `fixtures/harmony.py` writes this field.

use std::{fs, sync::Arc};

use proptest::prelude::*;
use serde_json::{Value, json};
use text::{
    CallableFunction, ReasoningFormat, ReasoningParser, SplitText, ToolFormat, ToolParser,
    ToolPiece,
};

const OUTPUTS_PER_FORMAT_MIN: usize = 40;

fn outputs(name: &str) -> Vec<Value> {
    let path = format!("{}/tests/formats/{name}.jsonl", env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let outputs: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(outputs.len() >= OUTPUTS_PER_FORMAT_MIN, "{name} has {} outputs", outputs.len());
    outputs
}

fn functions() -> Arc<[CallableFunction]> {
    let function = |name: &str, properties: Value| {
        CallableFunction::new(name, json!({"properties": properties}).as_object())
    };
    Arc::new([
        function("weather", json!({"city": {"type": "string"}, "days": {"type": "integer"}})),
        function("clock", json!({})),
        function(
            "find",
            json!({
                "query": {"type": "string"},
                "limit": {"type": "number"},
                "tags": {"type": "array"},
                "exact": {"type": "boolean"},
                "place": {"type": "object"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            }),
        ),
    ])
}

fn calls(format: &'static ToolFormat, pieces: &[&str], is_cut: bool) -> Vec<ToolPiece> {
    let (mut parser, mut out) = (ToolParser::new(format, functions()), Vec::new());
    pieces.iter().for_each(|piece| parser.push(piece, &mut out));
    match is_cut {
        true => parser.finish_cut(&mut out),
        false => parser.finish(&mut out),
    }
    joined(out)
}

/// Joins adjacent content.
fn joined(pieces: Vec<ToolPiece>) -> Vec<ToolPiece> {
    let mut all: Vec<ToolPiece> = Vec::new();
    for piece in pieces {
        match (all.last_mut(), piece) {
            (Some(ToolPiece::Content(text)), ToolPiece::Content(more)) => text.push_str(&more),
            (_, piece) => all.push(piece),
        }
    }
    all
}

fn as_json(pieces: &[ToolPiece]) -> Value {
    let piece = |piece: &ToolPiece| match piece {
        ToolPiece::Content(text) => json!(text),
        ToolPiece::Call(call) => json!([call.name, call.arguments]),
        ToolPiece::CutCall(call) => json!([call.name, call.arguments, "cut"]),
    };
    pieces.iter().map(piece).collect()
}

/// Returns the text in two pieces, split at every character, and in pieces of one character.
fn splits(text: &str) -> impl Iterator<Item = Vec<&str>> {
    let halves = text.char_indices().map(|(at, _)| vec![&text[..at], &text[at..]]);
    let ends = text.char_indices().map(|(at, char)| &text[at..at + char.len_utf8()]);
    halves.chain([ends.collect()])
}

#[test]
fn outputs_of_every_tool_format_are_parsed_whole_and_split_everywhere() {
    for format in ToolFormat::all() {
        for output in outputs(format.name) {
            let text = output["text"].as_str().unwrap();
            let is_cut = output["cut"] == true;
            let whole = calls(format, &[text], is_cut);
            assert_eq!(as_json(&whole), output["pieces"], "{format:?} {text:?}");
            for pieces in splits(text) {
                assert_eq!(calls(format, &pieces, is_cut), whole, "{format:?} {pieces:?}");
            }
        }
    }
}

#[test]
fn outputs_of_every_reasoning_format_are_split_whole_and_in_pieces() {
    for format in ReasoningFormat::all() {
        for output in outputs(&format!("reasoning_{}", format.name)) {
            let start = format.start_after(output["prompt"].as_str().unwrap());
            let read = |pieces: &[&str]| {
                let mut parser = ReasoningParser::new(format, start);
                let mut all = SplitText::default();
                let mut splits = Vec::new();
                pieces.iter().for_each(|piece| parser.push((*piece).to_owned(), &mut splits));
                parser.finish(&mut splits);
                for split in splits {
                    all.reasoning += &split.reasoning;
                    all.rest += &split.rest;
                }
                json!([all.reasoning, all.rest])
            };
            let text = output["text"].as_str().unwrap();
            let expected = json!([output["reasoning"], output["rest"]]);
            assert_eq!(read(&[text]), expected, "{output}");
            for pieces in splits(text) {
                assert_eq!(read(&pieces), expected, "{output} {pieces:?}");
            }
        }
    }
}

#[test]
fn page_lists_every_format() {
    let page =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api.md")).unwrap();
    let tools = ToolFormat::all().map(|it| (it.name, it.models, it.form.to_owned()));
    let reasoning = ReasoningFormat::all().map(|it| {
        (it.name, it.models, format!("`{}...{}`", it.open, it.close).replace('|', r"\|"))
    });
    for (name, models, form) in tools.chain(reasoning) {
        let row = format!("| `{name}` | {models} | {form} |\n");
        assert!(page.contains(&row), "docs/api.md lacks {row}");
    }
}

/// Returns fragments of calls, tags and text in any order.
fn fragments() -> impl Strategy<Value = String> {
    let texts = ToolFormat::all().flat_map(|format| outputs(format.name));
    let texts: Vec<String> =
        texts.map(|output| output["text"].as_str().unwrap().to_owned()).collect();
    let part = (prop::sample::select(texts), any::<prop::sample::Index>(), any::<bool>());
    let part = part.prop_map(|(text, at, is_first)| {
        let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        let at = ends[at.index(ends.len())];
        if is_first { text[..at].to_owned() } else { text[at..].to_owned() }
    });
    prop::collection::vec(part, 0..4).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn tool_parsing_does_not_depend_on_how_text_is_split(text in fragments(), is_cut in any::<bool>()) {
        for format in ToolFormat::all() {
            let characters: Vec<String> = text.chars().map(String::from).collect();
            let characters: Vec<&str> = characters.iter().map(String::as_str).collect();
            let whole = calls(format, &[&text], is_cut);
            prop_assert_eq!(calls(format, &characters, is_cut), whole.clone(), "{:?}", format);
            // Content appears in the output, in this order.
            let mut rest = text.as_str();
            for piece in whole {
                let ToolPiece::Content(content) = piece else { continue };
                let at = rest.find(content.trim());
                prop_assert!(at.is_some(), "{:?} {:?}", format, content);
                rest = &rest[at.unwrap_or(0)..];
            }
        }
    }

    #[test]
    fn text_without_a_call_is_unchanged(text in any::<String>()) {
        for format in ToolFormat::all() {
            let expected = if text.is_empty() { json!([]) } else { json!([text]) };
            prop_assert_eq!(as_json(&calls(format, &[&text], false)), expected);
        }
    }
}
