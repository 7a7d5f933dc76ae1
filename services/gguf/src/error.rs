//! Errors of reading a file or getting a metadata value.

use std::path::PathBuf;

/// Error of reading a header or getting a value from it.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    #[error("cannot {action} {}: {cause}", path.display())]
    Io { path: PathBuf, action: &'static str, cause: std::io::Error },
    #[error("not a GGUF file: it begins with {found:02x?}, not \"GGUF\"")]
    NotGguf { found: Vec<u8> },
    #[error("this GGUF file is big endian; only little endian is supported")]
    BigEndian,
    #[error("unsupported GGUF version {found}; expected 2 or 3")]
    Version { found: u32 },
    /// The file ends inside its header, or a length in the header points past the end.
    #[error(
        "the file is truncated or corrupt: {what} at offset {offset} needs {wanted} bytes, \
         the file has {file_bytes} in all"
    )]
    HeaderTruncated { what: String, offset: u64, wanted: u64, file_bytes: u64 },
    #[error("the header is larger than {limit} bytes, at {what}")]
    HeaderTooLarge { what: String, limit: u64 },
    #[error("{what} at offset {offset} is not valid UTF-8")]
    NotUtf8 { what: String, offset: u64 },
    #[error("metadata key {key:?} has value type {found}; expected 0 to 12")]
    ValueType { key: String, found: u32 },
    #[error("metadata key {key:?} nests arrays deeper than {limit}")]
    NestedTooDeep { key: String, limit: usize },
    #[error("metadata key {key:?} appears twice")]
    DuplicateKey { key: String },
    #[error("general.alignment is {found}; expected a power of two")]
    Alignment { found: u64 },
    #[error("tensor {tensor:?} appears twice")]
    DuplicateTensor { tensor: String },
    #[error("tensor {tensor:?} has {found} dimensions; expected 1 to {max}")]
    DimensionCount { tensor: String, found: u32, max: usize },
    #[error("tensor {tensor:?} has dimensions {dims:?}: {reason}")]
    Dimensions { tensor: String, dims: Vec<u64>, reason: &'static str },
    #[error("tensor {tensor:?} begins at data offset {offset}, not a multiple of {alignment}")]
    TensorAlignment { tensor: String, offset: u64, alignment: u64 },
    /// The tensor's bytes are not all in the file.
    #[error(
        "the file is truncated: tensor {tensor:?} needs {bytes} bytes at offset {offset}, \
         the file has {file_bytes}"
    )]
    TensorTruncated { tensor: String, offset: u64, bytes: u64, file_bytes: u64 },
    #[error(
        "this is part {number} of {count}; open the first, {first:?}, with the others beside it"
    )]
    NotFirstPart { number: u32, count: u32, first: String },
    /// The name does not say which part the file is, so the other parts cannot be found.
    #[error("{found:?} is part of a split model; expected a name that ends in {wanted:?}")]
    PartName { found: String, wanted: String },
    #[error("part {number} of {count} is missing: there is no file {}", path.display())]
    MissingPart { number: u32, count: u32, path: PathBuf },
    #[error("the parts are of different models: {key} is {}; expected {}", shown(*found), shown(*wanted))]
    PartMismatch { key: &'static str, found: Option<u64>, wanted: Option<u64> },
    #[error("all parts together have {found} tensors; expected {wanted} as the first part states")]
    PartTensors { found: u64, wanted: u64 },
    #[error("metadata key {key:?} is missing; expected {wanted}")]
    MissingKey { key: String, wanted: &'static str },
    #[error("metadata key {key:?} is {found}; expected {wanted}")]
    WrongType { key: String, found: String, wanted: &'static str },
    #[error("metadata key {key:?} is {found}; expected a number that fits {wanted}")]
    OutOfRange { key: String, found: String, wanted: &'static str },
}

fn shown(number: Option<u64>) -> String {
    number.map_or_else(|| "absent".into(), |number| number.to_string())
}
