//! Models that tests read: the real one, and small ones written here.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use gguf::{Array, Value};
use text::ModelText;

/// The workspace's root.
pub fn workspace() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The GGUF file of SmolLM2-135M-Instruct.
pub fn model_path() -> PathBuf {
    let path = match std::env::var_os("BATON_TEST_MODEL") {
        Some(path) => PathBuf::from(path),
        None => workspace().join("models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"),
    };
    assert!(path.is_file(), "{} is not there: run `make model`", path.display());
    path
}

pub type Metadata = BTreeMap<String, Value>;

/// GPT-2's character for each byte.
pub fn byte_chars() -> Vec<char> {
    let visible = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100..;
    let code = |byte| if visible(byte) { byte } else { next.next().unwrap() };
    (0..256).map(code).map(|code| char::from_u32(code).unwrap()).collect()
}

/// The metadata of a small byte-level model: ids 0 to 255 are the bytes, then a few merges, then
/// special tokens. Its merges are `h e`, `l l`, `he ll`, `Ġ w`, `hell o`.
pub fn tiny() -> Metadata {
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
pub const END: u32 = 261;
pub const START: u32 = 262;
/// Recognised before splitting, but not special.
pub const TOOL: u32 = 263;
/// Stands for nothing.
pub const UNUSED: u32 = 264;

/// Writes a GGUF file of this metadata and no tensors.
pub fn write_gguf(path: &Path, metadata: &Metadata) {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend(0u64.to_le_bytes());
    bytes.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        put_string(&mut bytes, key);
        put_value(&mut bytes, value);
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
    let mut head = |code: u32| {
        bytes.extend(code.to_le_bytes());
        bytes.extend((array.len() as u64).to_le_bytes());
    };
    match array {
        Array::I32(items) => {
            head(5);
            items.iter().for_each(|item| bytes.extend(item.to_le_bytes()));
        }
        Array::U32(items) => {
            head(4);
            items.iter().for_each(|item| bytes.extend(item.to_le_bytes()));
        }
        Array::String(items) => {
            head(8);
            items.iter().for_each(|item| put_string(bytes, item));
        }
        other => panic!("no test writes arrays of {}", other.element_type_name()),
    }
}

/// Opens a GGUF file of this metadata.
pub fn open_gguf(metadata: &Metadata) -> Result<ModelText, text::LoadError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write_gguf(&path, metadata);
    ModelText::open(path)
}

/// Writes files into a fresh folder.
pub fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    folder
}
