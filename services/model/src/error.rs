//! Errors of opening a model.

use std::path::PathBuf;

/// Error of opening or reading a checkpoint. Every message names the file.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("cannot {action} {}: {source}", path.display())]
    Io { path: PathBuf, action: &'static str, source: std::io::Error },
    /// The path does not hold a model of the requested kind.
    #[error("cannot open {} as a model: {reason}", path.display())]
    NotAModel { path: PathBuf, reason: String },
    #[error("{}: {source}", path.display())]
    Gguf { path: PathBuf, source: gguf::GgufError },
    #[error("{}: the safetensors header is invalid: {source}", path.display())]
    Safetensors { path: PathBuf, source: safetensors::SafeTensorError },
    #[error("{}: invalid JSON: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error(
        "cannot use {}: the file changed while it was read; expected a file that does not change",
        path.display()
    )]
    Changed { path: PathBuf },
    #[error("{} is larger than {limit} bytes", path.display())]
    FileTooLarge { path: PathBuf, limit: u64 },
    #[error("{}: unsupported architecture {found}; expected one of {supported}", path.display())]
    Architecture { path: PathBuf, found: String, supported: String },
    /// A key of the configuration is absent or of the wrong type.
    #[error("{}: key {key:?}: {reason}", path.display())]
    ConfigKey { path: PathBuf, key: String, reason: String },
    /// A value of the configuration is out of bounds or contradicts another.
    #[error("{}: {name} is {found}; expected {allowed}", path.display())]
    ConfigValue { path: PathBuf, name: &'static str, found: String, allowed: String },
    /// The configuration requires an unsupported feature.
    #[error("{}: unsupported {key}: {found}; expected {supported}", path.display())]
    Unsupported { path: PathBuf, key: String, found: String, supported: &'static str },
    #[error("{}: tensor {tensor:?} is missing; expected shape {wanted:?}", path.display())]
    MissingTensor { path: PathBuf, tensor: String, wanted: Vec<u64> },
    /// The checkpoint has an unknown weight. Ignoring it would silently give wrong output.
    #[error("{}: tensor {tensor:?} at offset {offset} is not part of the {architecture} architecture", path.display())]
    UnknownTensor { path: PathBuf, tensor: String, offset: u64, architecture: &'static str },
    #[error(
        "{}: tensor {tensor:?} at offset {offset} has shape {found:?}; expected {wanted:?}",
        path.display()
    )]
    TensorShape { path: PathBuf, tensor: String, offset: u64, found: Vec<u64>, wanted: Vec<u64> },
    #[error(
        "{}: tensor {tensor:?} at offset {offset} has unsupported kind {found}; expected {supported}",
        path.display()
    )]
    TensorKind { path: PathBuf, tensor: String, offset: u64, found: String, supported: String },
    #[error(
        "{} is truncated: tensor {tensor:?} needs {bytes} bytes at offset {offset}, \
         the file has {file_bytes}",
        path.display()
    )]
    TensorTruncated { path: PathBuf, tensor: String, offset: u64, bytes: u64, file_bytes: u64 },
    /// The index of a sharded checkpoint disagrees with its files.
    #[error("{}: {reason}", path.display())]
    ShardIndex { path: PathBuf, reason: String },
    #[error(
        "{}: tensor {tensor:?} at offset {offset} is corrupt: element {element} is {found}",
        path.display()
    )]
    NotFinite { path: PathBuf, tensor: String, offset: u64, element: usize, found: f32 },
    #[error(
        "{}: tensor {tensor:?} at offset {offset} has scale {found} at element {element}; \
         expected a finite number from 0 on",
        path.display()
    )]
    Scale { path: PathBuf, tensor: String, offset: u64, element: usize, found: f32 },
    #[error(
        "cannot shard the model's {kv_heads} KV heads and feed-forward size {ffn_size} over {ranks} ranks; \
         expected one of {}",
        allowed.iter().map(|count| count.to_string()).collect::<Vec<_>>().join(", ")
    )]
    Ranks { ranks: usize, kv_heads: usize, ffn_size: usize, allowed: Vec<usize> },
}
