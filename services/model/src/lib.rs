//! Models: configuration, weights on disk, and the forward pass of each architecture.
//!
//! * [`Checkpoint`] opens a GGUF file, a Hugging Face folder, or (with [`LoadFormat::Dummy`]) a
//!   `config.json` alone. It checks that every weight exists with the right shape, and provides weights row
//!   by row in f32, in Hugging Face's order.
//! * [`ModelConfig`] is the validated configuration, from either format.
//! * [`Llama`] packs the weights for a backend of crate `kernels` and runs the forward pass of every
//!   [`Architecture`].
//!
//! Other crates have tokenizers and templates (`text`), batching and sampling (`engine`), and arithmetic
//! (`kernels`).

#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod config;
mod encoding;
mod error;
mod fingerprint;
pub mod llama;
mod matrix;
mod packing;
mod rope;
mod weight;

pub use checkpoint::{Checkpoint, FileIdentity, LoadFormat, StoredWeight};
pub use config::{Architecture, ModelConfig, RopeScaling, SlidingWindow};
pub use error::ModelError;
pub use llama::{Limits, Llama, LlamaWeights, LoadProgress};
pub use matrix::MatrixSource;
pub use packing::{PackedPart, PackedWeight, packing_order};
pub use weight::{LayerWeight, Weight, WeightPart, WeightShape};
