//! Fuzz targets: every decoder of untrusted bytes, as a function of bytes.
//!
//! A target may reject its input in any way but a panic. The replay also limits memory and time.
//! The replay in `main.rs` runs on stable Rust; `integration-tests/fuzz` runs the same targets with
//! libFuzzer.

use std::{
    cell::LazyCell,
    fs,
    path::{Path, PathBuf},
    time::SystemTime,
};

use cluster::NodeRecord;
use config::{Config, LoadInput};
use gguf::{Header, TensorKind};
use kernels::RowSource;
use kv_transfer::{
    ClusterSecret,
    api::Epoch,
    control::{Keys, Opener},
    testing::frame,
};
use membership::etcd::NodeEntry;
use model::{Checkpoint, LoadFormat, Weight, WeightShape};
use prost::Message;
use proto::v1;
use serde_json::{Map, Value, json};
use text::{ModelText, RenderRequest, SpecialTokens, TokenTable};

use super::gguf_file;

/// Function that accepts any bytes.
pub(crate) type Target = fn(&[u8]);

/// Name and function of each target. The name is that of its folder in `corpus` and of the
/// libFuzzer program.
pub(crate) const TARGETS: [(&str, Target); 14] = [
    ("gguf", fuzz_gguf),
    ("gguf_blocks", fuzz_gguf_blocks),
    ("safetensors", fuzz_safetensors),
    ("shard_index", fuzz_shard_index),
    ("config_json", fuzz_config_json),
    ("tokenizer_json", fuzz_tokenizer_json),
    ("tokenizer_config", fuzz_tokenizer_config),
    ("chat_template", fuzz_chat_template),
    ("control_message", fuzz_control_message),
    ("data_frame", fuzz_data_frame),
    ("http_body", fuzz_http_body),
    ("config_toml", fuzz_config_toml),
    ("node_record", fuzz_node_record),
    ("etcd_entry", fuzz_etcd_entry),
];

/// Number of weights read from a valid file. The file's own size is the only other limit.
const ELEMENTS_MAX: usize = 1 << 20;
/// Configuration for the safetensors under test.
const CONFIG: &str = r#"{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "vocab_size": 8, "max_position_embeddings": 64, "tie_word_embeddings": true}"#;
/// A tokenizer of four tokens.
pub(crate) const TOKENIZER: &str = r#"{"version": "1.0", "added_tokens": [{"id": 3, "content": "</s>",
    "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
    "use_regex": true}, "decoder": {"type": "ByteLevel"}, "model": {"type": "BPE",
    "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}}"#;

/// A folder for decoders that read files, one per thread.
struct Folder(tempfile::TempDir);

impl Folder {
    fn with(files: &[(&str, &[u8])]) -> Self {
        let folder = Self(tempfile::tempdir().expect("a temporary folder can be made"));
        for (name, bytes) in files {
            folder.write(name, bytes);
        }
        folder
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, bytes).expect("a temporary file can be written");
        path
    }
}

/// Returns a folder with these files, created once per thread.
macro_rules! folder {
    ($(($name:expr, $bytes:expr)),*) => {{
        thread_local! {
            static FOLDER: LazyCell<Folder> = LazyCell::new(|| Folder::with(&[$(($name, $bytes)),*]));
        }
        |name: &str, bytes: &[u8]| FOLDER.with(|folder| {
            folder.write(name, bytes);
            folder.0.path().to_owned()
        })
    }};
}

/// Decodes header, directory, tokens and weights of a GGUF file.
pub(crate) fn fuzz_gguf(data: &[u8]) {
    let _ = Header::parse(data);
    let path = folder!()("model.gguf", data).join("model.gguf");
    read_weights(&path, LoadFormat::Auto);
    read_text(&path);
}

/// Decodes blocks of every quantization type. The first byte selects the type; the rest are the
/// blocks.
pub(crate) fn fuzz_gguf_blocks(data: &[u8]) {
    let Some((&kind, content)) = data.split_first() else { return };
    let kinds: Vec<TensorKind> = TensorKind::supported().collect();
    let kind = kinds[usize::from(kind) % kinds.len()];
    let block = kind.block().expect("the kind is supported");
    let file = gguf_file::with_blocks(kind.number(), (block.elements, block.bytes), content);
    let path = folder!()("model.gguf", &file).join("model.gguf");
    assert!(
        Checkpoint::open(&path, LoadFormat::Auto).is_ok(),
        "the file around the blocks is whole"
    );
    read_weights(&path, LoadFormat::Auto);
}

pub(crate) fn fuzz_safetensors(data: &[u8]) {
    let folder = folder!(("config.json", CONFIG.as_bytes()))("model.safetensors", data);
    read_weights(&folder, LoadFormat::Auto);
}

/// Decodes a shard index next to a shard that is not a safetensors file.
pub(crate) fn fuzz_shard_index(data: &[u8]) {
    let files =
        folder!(("config.json", CONFIG.as_bytes()), ("shard.safetensors", b"\x02\0\0\0\0\0\0\0{}"));
    read_weights(&files("model.safetensors.index.json", data), LoadFormat::Auto);
}

pub(crate) fn fuzz_config_json(data: &[u8]) {
    let folder = folder!(("tokenizer.json", TOKENIZER.as_bytes()))("config.json", data);
    // Weights are allocated only on use, for any sizes that the file claims.
    let _ = Checkpoint::open(&folder, LoadFormat::Dummy { seed: 1 });
    read_text(&folder);
}

pub(crate) fn fuzz_tokenizer_json(data: &[u8]) {
    read_text(&folder!()("tokenizer.json", data));
}

pub(crate) fn fuzz_tokenizer_config(data: &[u8]) {
    let files = folder!(("tokenizer.json", TOKENIZER.as_bytes()));
    files("generation_config.json", data);
    files("special_tokens_map.json", data);
    read_text(&files("tokenizer_config.json", data));
}

pub(crate) fn fuzz_chat_template(data: &[u8]) {
    let files = folder!(("tokenizer.json", TOKENIZER.as_bytes()));
    read_text(&files("chat_template.jinja", data));
}

/// Decodes control messages of a peer with the secret, and of one without it.
pub(crate) fn fuzz_control_message(data: &[u8]) {
    let keys = Keys::derive(&ClusterSecret::new([7; 32]).expect("the secret is long enough"));
    let mut opener = Opener::new(keys, Epoch(2));
    let _ = opener.open(&[data]);
    let _ = opener.open(&[data, &[0; 32]]);
    let _ = opener.open(&[&[&[1; 16][..], &Epoch(2).to_bytes(), &[0; 8]].concat(), data]);
    let _ = opener.read(Epoch(1), 1, data);
}

/// Decodes the header of a chunk, unchanged and with a corrected checksum.
pub(crate) fn fuzz_data_frame(data: &[u8]) {
    let Some(bytes) = data.first_chunk::<{ frame::HEADER_BYTES }>() else { return };
    let _ = frame::Header::from_bytes(bytes);
    let mut bytes = *bytes;
    let (checked, check) = bytes.split_at_mut(frame::HEADER_BYTES - 8);
    check.copy_from_slice(&xxhash_rust::xxh3::xxh3_64(checked).to_le_bytes());
    if let Some(header) = frame::Header::from_bytes(&bytes) {
        assert_eq!(header.to_bytes(), bytes, "what is taken is what was sent");
    }
}

/// Decodes every field of every HTTP request.
pub(crate) fn fuzz_http_body(data: &[u8]) {
    router::read_bodies(data);
}

pub(crate) fn fuzz_config_toml(data: &[u8]) {
    let file = folder!()("baton.toml", data).join("baton.toml");
    match Config::load(LoadInput { file: Some(file), ..LoadInput::default() }) {
        Ok(config) => drop(config.model.served_name()),
        Err(error) => drop(error.to_string()),
    }
}

/// Decodes a node record, which nodes send to routers.
pub(crate) fn fuzz_node_record(data: &[u8]) {
    if let Ok(record) = v1::NodeRecord::decode(data) {
        let _ = NodeRecord::try_from(record);
    }
    let _ = v1::ObserveEvent::decode(data);
}

/// Decodes key and value of a node in etcd, separated by a line end.
pub(crate) fn fuzz_etcd_entry(data: &[u8]) {
    let at = data.iter().position(|&byte| byte == b'\n').unwrap_or(data.len());
    let (key, value) = data.split_at(at);
    let _ = NodeEntry::parse("/baton", key, value.get(1..).unwrap_or_default());
}

fn read_weights(path: &Path, format: LoadFormat) {
    let checkpoint = match Checkpoint::open(path, format) {
        Ok(checkpoint) => checkpoint,
        Err(error) => return drop(error.to_string()),
    };
    let mut elements = 0;
    for weight in Weight::all(checkpoint.config()) {
        match weight.shape(checkpoint.config()) {
            WeightShape::Vector { len } => {
                elements += len;
                let _ = checkpoint.vector(weight);
            }
            WeightShape::Matrix { rows, cols } => {
                let Ok(matrix) = checkpoint.matrix(weight) else { continue };
                let mut row = vec![0.0; cols];
                for at in 0..rows {
                    if elements > ELEMENTS_MAX {
                        return;
                    }
                    matrix.read_row(at, &mut row);
                    elements += cols;
                }
            }
        }
    }
}

/// Opens a model's tokenizer and uses it once. Nodes also read its token table.
fn read_text(path: &Path) {
    if let Ok(table) = TokenTable::open(path) {
        assert!((0..table.size()).all(|id| table.bytes(id).is_some()));
    }
    let model = match ModelText::open(path) {
        Ok(model) => model,
        Err(error) => return drop(error.to_string()),
    };
    let tokenizer = model.tokenizer();
    if let Ok(ids) = tokenizer.encode("hello ab </s>\u{e9}", SpecialTokens::Parse) {
        tokenizer.decode(&ids, true);
    }
    let last = tokenizer.vocabulary_size().saturating_sub(1);
    tokenizer.decode(&[0, last, u32::MAX], false);
    let Ok(template) = model.chat_template() else { return };
    let messages =
        json!([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]);
    let request = RenderRequest {
        messages: &messages,
        tools: &Value::Null,
        add_generation_prompt: true,
        extra: &Map::new(),
        now: SystemTime::UNIX_EPOCH,
        literal: None,
    };
    let _ = template.render(&request);
}
