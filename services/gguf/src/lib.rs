//! GGUF container (versions 2 and 3, little endian): header, metadata and tensor directory.
//!
//! [`Header`] is read from a file or from its bytes. Every count, length and offset is checked
//! against the file's real size before use, so a hostile file causes a typed error, never a panic
//! or a disproportionate allocation. [`Split`] finds the other files of a split model. Other crates
//! read and decode tensors (`model`), and interpret the metadata (`model` and `text`).
//!
//! ```no_run
//! let header = gguf::Header::read_from("model.gguf")?;
//! let layers: u32 = header.metadata.require("llama.block_count")?;
//! let tokens: &[String] = header.metadata.require("tokenizer.ggml.tokens")?;
//! # Ok::<(), gguf::GgufError>(())
//! ```

#![forbid(unsafe_code)]

mod error;
mod folder;
mod header;
mod metadata;
mod reader;
mod split;
mod tensor;
mod value;

pub use error::GgufError;
pub use folder::model_file_in;
pub use header::{HEADER_BYTES_MAX, Header};
pub use metadata::{FromValue, Metadata};
pub use split::Split;
pub use tensor::{TensorInfo, TensorKind};
pub use value::{Array, Value};
