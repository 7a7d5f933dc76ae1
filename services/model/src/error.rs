//! Errors of opening a model and reading its weights.

use std::path::PathBuf;

/// Error of opening or reading a checkpoint. The message of an error in a file names the file and,
/// where one tensor is wrong, the tensor and its offset in the file. A message includes its cause,
/// so [`std::error::Error::source`] is `None` and a printed chain of errors has no repetition.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The operating system rejected `action`, a verb such as "open".
    #[error("cannot {action} {}: {cause}", path.display())]
    Io { path: PathBuf, action: &'static str, cause: std::io::Error },
    /// The path does not hold a model of the requested kind.
    #[error("cannot open {} as a model: {reason}", path.display())]
    NotAModel { path: PathBuf, reason: String },
    #[error("{}: {cause}", path.display())]
    Gguf { path: PathBuf, cause: gguf::GgufError },
    #[error("{}: the safetensors header is invalid: {cause}", path.display())]
    Safetensors { path: PathBuf, cause: safetensors::SafeTensorError },
    #[error("{}: invalid JSON: {cause}", path.display())]
    Json { path: PathBuf, cause: serde_json::Error },
    #[error(
        "cannot use {}: the file changed while it was read; expected a file that does not change",
        path.display()
    )]
    Changed { path: PathBuf },
    #[error("packing the weights was cancelled")]
    Cancelled,
    #[error("cannot read {}: the file is larger than {limit} bytes", path.display())]
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
    #[error("{}: tensor {tensor:?} is missing; expected shape {expected:?}", path.display())]
    MissingTensor { path: PathBuf, tensor: String, expected: Vec<u64> },
    /// The checkpoint has an unknown weight. Ignoring it would silently give wrong output.
    #[error("{}: tensor {tensor:?} at file offset {offset} is not part of the {architecture} architecture", path.display())]
    UnknownTensor { path: PathBuf, tensor: String, offset: u64, architecture: &'static str },
    #[error(
        "{}: tensor {tensor:?} at file offset {offset} has shape {found:?}; expected {expected:?}",
        path.display()
    )]
    TensorShape { path: PathBuf, tensor: String, offset: u64, found: Vec<u64>, expected: Vec<u64> },
    #[error(
        "{}: tensor {tensor:?} at file offset {offset} has unsupported type {found}; expected {supported}",
        path.display()
    )]
    TensorType { path: PathBuf, tensor: String, offset: u64, found: String, supported: String },
    #[error(
        "{} is truncated: tensor {tensor:?} needs {bytes} bytes at file offset {offset}; \
         the file has {file_bytes} bytes",
        path.display()
    )]
    TensorTruncated { path: PathBuf, tensor: String, offset: u64, bytes: u64, file_bytes: u64 },
    /// The index of a sharded checkpoint disagrees with its files.
    #[error("{}: {reason}", path.display())]
    ShardIndex { path: PathBuf, reason: String },
    #[error(
        "{}: tensor {tensor:?} at file offset {offset} is corrupt: element {element} is {found}; expected a finite \
         number",
        path.display()
    )]
    NotFinite { path: PathBuf, tensor: String, offset: u64, element: usize, found: f32 },
    #[error(
        "{}: tensor {tensor:?} at file offset {offset} has scale {found} at element {element}; \
         expected a finite number that is not negative",
        path.display()
    )]
    InvalidScale { path: PathBuf, tensor: String, offset: u64, element: usize, found: f32 },
    /// A tensor that describes others has a wrong value.
    #[error(
        "{}: tensor {tensor:?} at file offset {offset} has {found}; expected {expected}",
        path.display()
    )]
    TensorValue { path: PathBuf, tensor: String, offset: u64, found: String, expected: String },
    /// Not every rank would get equally many KV heads, and equally many rows of the feed-forward
    /// network or experts; `what` says which of the two.
    #[error(
        "cannot shard the model's {kv_heads} KV heads and {what} {size} over {ranks} ranks; expected one of {}",
        allowed.iter().map(|count| count.to_string()).collect::<Vec<_>>().join(", ")
    )]
    RankCount {
        ranks: usize,
        kv_heads: usize,
        what: &'static str,
        size: usize,
        allowed: Vec<usize>,
    },
}
