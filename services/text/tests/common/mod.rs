//! Models for tests: the real one, and small generated ones.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use gguf::{Array, Value};
use text::ModelText;

/// Returns the workspace's root.
pub(crate) fn workspace() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the path of SmolLM2-135M-Instruct's GGUF file.
pub(crate) fn model_path() -> PathBuf {
    let path = match std::env::var_os("BATON_TEST_MODEL") {
        Some(path) => PathBuf::from(path),
        None => workspace().join("models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"),
    };
    assert!(path.is_file(), "{} is not there: run `make model`", path.display());
    path
}

pub(crate) type Metadata = BTreeMap<String, Value>;

/// Returns GPT-2's character for each byte.
pub(crate) fn byte_chars() -> Vec<char> {
    let visible = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100..;
    let code = |byte| if visible(byte) { byte } else { next.next().unwrap() };
    (0..256).map(code).map(|code| char::from_u32(code).unwrap()).collect()
}

/// Returns the metadata of a small byte-level model: ids 0 to 255 are the bytes, followed by a few
/// merges and the special tokens. Its merges are `h e`, `l l`, `he ll`, `Ġ w`, `hell o`.
pub(crate) fn tiny() -> Metadata {
    let mut tokens: Vec<String> = byte_chars().into_iter().map(String::from).collect();
    tokens.extend(["he", "ll", "hell", "Ġw", "hello"].map(str::to_owned));
    let mut types = vec![1; tokens.len()];
    tokens.extend(["<|end|>", "<|start|>", "<tool>", "[PAD264]"].map(str::to_owned));
    types.extend([3, 3, 4, 5]);
    let merges = ["h e", "l l", "he ll", "Ġ w", "hell o"].map(str::to_owned).to_vec();
    let string = |text: &str| Value::String(text.to_owned());
    Metadata::from([
        ("tokenizer.ggml.model".into(), string("gpt2")),
        ("tokenizer.ggml.pre".into(), string("gpt-2")),
        ("tokenizer.ggml.tokens".into(), Value::Array(Array::String(tokens))),
        ("tokenizer.ggml.token_type".into(), Value::Array(Array::I32(types))),
        ("tokenizer.ggml.merges".into(), Value::Array(Array::String(merges))),
        ("tokenizer.ggml.eos_token_id".into(), Value::U32(END)),
        ("tokenizer.ggml.bos_token_id".into(), Value::U32(START)),
        (
            "tokenizer.chat_template".into(),
            string("{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"),
        ),
    ])
}

/// Special tokens of [`tiny`].
pub(crate) const END: u32 = 261;
pub(crate) const START: u32 = 262;
/// Recognized before splitting, but not special.
pub(crate) const TOOL: u32 = 263;
/// Represents no text.
pub(crate) const UNUSED: u32 = 264;

/// Tokens of [`tiny_pieces`] after `<unk>`, `<s>`, `</s>` and the bytes; earlier ones merge first.
const PIECES: [&str; 29] = [
    "▁h",
    "el",
    "lo",
    "▁hel",
    "▁hello",
    "▁w",
    "or",
    "ld",
    "▁wor",
    "▁world",
    "▁▁",
    "▁▁▁▁",
    "é",
    "\":",
    "▁\"",
    "▁{",
    "{\"",
    "▁",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "{",
    "\"",
    ":",
    "}",
];
/// Id of the first entry of [`PIECES`] in [`tiny_pieces`].
const FIRST_PIECE: u32 = 3 + 256;

/// Returns the id of an ordinary token of [`tiny_pieces`].
pub(crate) fn piece(token: &str) -> u32 {
    FIRST_PIECE + PIECES.iter().position(|other| *other == token).expect(token) as u32
}

/// Returns the id of a byte token of [`tiny_pieces`].
pub(crate) fn byte_piece(byte: u8) -> u32 {
    3 + u32::from(byte)
}

/// Last tokens of [`tiny_pieces`]: control, user-defined, unused.
pub(crate) const PIECES_TURN: u32 = FIRST_PIECE + PIECES.len() as u32;
pub(crate) const PIECES_TOOL: u32 = PIECES_TURN + 1;
pub(crate) const PIECES_UNUSED: u32 = PIECES_TURN + 2;

/// Returns the metadata of a small SentencePiece model like Llama 2's: byte fallback, `▁` for
/// spaces.
pub(crate) fn tiny_pieces() -> Metadata {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    let mut types = vec![2, 3, 3];
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    types.resize(tokens.len(), 6);
    tokens.extend(PIECES.map(str::to_owned));
    types.resize(tokens.len(), 1);
    tokens.extend(["<|turn|>", "<tool>", "[PAD]"].map(str::to_owned));
    types.extend([3, 4, 5]);
    let mut scores = vec![0.0; FIRST_PIECE as usize];
    scores.extend((0..PIECES.len()).map(|place| -(place as f32)));
    scores.resize(tokens.len(), 0.0);
    let string = |text: &str| Value::String(text.to_owned());
    Metadata::from([
        ("general.architecture".into(), string("llama")),
        ("tokenizer.ggml.model".into(), string("llama")),
        ("tokenizer.ggml.pre".into(), string("default")),
        ("tokenizer.ggml.tokens".into(), Value::Array(Array::String(tokens))),
        ("tokenizer.ggml.scores".into(), Value::Array(Array::F32(scores))),
        ("tokenizer.ggml.token_type".into(), Value::Array(Array::I32(types))),
        ("tokenizer.ggml.bos_token_id".into(), Value::U32(1)),
        ("tokenizer.ggml.eos_token_id".into(), Value::U32(2)),
        ("tokenizer.ggml.unknown_token_id".into(), Value::U32(0)),
    ])
}

/// Writes a GGUF file of this metadata and no tensors.
pub(crate) fn write_gguf(path: &Path, metadata: &Metadata) {
    write_gguf_with(path, metadata, None);
}

/// Writes a GGUF file as [`write_gguf`] does, with an embedding of this many rows and one column.
pub(crate) fn write_gguf_with(path: &Path, metadata: &Metadata, embedding_rows: Option<u64>) {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend(u64::from(embedding_rows.is_some()).to_le_bytes());
    bytes.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        put_string(&mut bytes, key);
        put_value(&mut bytes, value);
    }
    if let Some(rows) = embedding_rows {
        put_string(&mut bytes, "token_embd.weight");
        bytes.extend(2u32.to_le_bytes());
        [1, rows].iter().for_each(|dim| bytes.extend(dim.to_le_bytes()));
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
        bytes.resize(bytes.len().next_multiple_of(32) + 4 * rows as usize, 0);
    }
    std::fs::write(path, bytes).unwrap();
}

fn put_string(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn put_value(bytes: &mut Vec<u8>, value: &Value) {
    let mut kind = |code: u32| bytes.extend(code.to_le_bytes());
    match value {
        Value::U32(v) => {
            kind(4);
            bytes.extend(v.to_le_bytes());
        }
        Value::I32(v) => {
            kind(5);
            bytes.extend(v.to_le_bytes());
        }
        Value::F32(v) => {
            kind(6);
            bytes.extend(v.to_le_bytes());
        }
        Value::Bool(v) => {
            kind(7);
            bytes.push(u8::from(*v));
        }
        Value::String(v) => {
            kind(8);
            put_string(bytes, v);
        }
        Value::U64(v) => {
            kind(10);
            bytes.extend(v.to_le_bytes());
        }
        Value::Array(array) => {
            kind(9);
            put_array(bytes, array);
        }
        other => panic!("no test writes {}", other.type_name()),
    }
}

fn put_array(bytes: &mut Vec<u8>, array: &Array) {
    let mut head = |code: u32, len: usize| {
        bytes.extend(code.to_le_bytes());
        bytes.extend((len as u64).to_le_bytes());
    };
    match array {
        Array::I32(items) => {
            head(5, items.len());
            items.iter().for_each(|item| bytes.extend(item.to_le_bytes()));
        }
        Array::U32(items) => {
            head(4, items.len());
            items.iter().for_each(|item| bytes.extend(item.to_le_bytes()));
        }
        Array::F32(items) => {
            head(6, items.len());
            items.iter().for_each(|item| bytes.extend(item.to_le_bytes()));
        }
        Array::String(items) => {
            head(8, items.len());
            items.iter().for_each(|item| put_string(bytes, item));
        }
        other => panic!("no test writes {other:?}"),
    }
}

/// Opens a GGUF file with this metadata.
pub(crate) fn open_gguf(metadata: &Metadata) -> Result<ModelText, text::LoadError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write_gguf(&path, metadata);
    ModelText::open(path)
}

/// Writes files into a fresh folder.
pub(crate) fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    folder
}

/// Returns a `tokenizer.json` like Llama 2's: `<unk>`, `<s>` and `</s>` first, spaces as `▁` with
/// one in front, bytes for unknown characters, BOS before prompts.
pub(crate) fn pieces_json(tokens: &[String], merges: serde_json::Value) -> serde_json::Value {
    let vocab: BTreeMap<&str, usize> = tokens.iter().map(String::as_str).zip(0..).collect();
    let special = |id: usize| {
        serde_json::json!({"id": id, "content": tokens[id], "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true})
    };
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0), special(1), special(2)],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>",
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
            "byte_fallback": true, "ignore_merges": false, "vocab": vocab, "merges": merges},
    })
}
