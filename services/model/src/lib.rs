//! Models: configuration, weights on disk, and the forward pass of each architecture.
//!
//! * [`Checkpoint`] opens a GGUF file, a Hugging Face folder, or (with [`LoadFormat::Dummy`]) a
//!   `config.json` alone. It checks that every weight exists with the right shape, and provides
//!   weights row by row in f32, in Hugging Face's order.
//! * [`ModelConfig`] is the validated configuration, from either format.
//! * [`Family`] describes the layers of its checkpoints: each is a mixer and a feed-forward
//!   network.
//! * [`Adapter`] is a LoRA adapter of a dense model.
//! * [`Transformer`] packs the weights for a backend of crate `kernels` and runs the forward pass
//!   of every description.
//!
//! Other crates have tokenizers and templates (`text`), batching and sampling (`engine`), and
//! arithmetic (`kernels`).

#![forbid(unsafe_code)]

mod adapter;
pub mod checkpoint;
pub mod config;
mod encoding;
mod error;
mod families;
mod fingerprint;
mod layer;
mod matrix;
mod mixer;
mod packing;
mod rope;
pub mod transformer;
mod weight;

pub use adapter::{Adapter, AdapterTable};
pub use checkpoint::{Checkpoint, FileIdentity, Int4Sizes, LoadFormat, MatrixFormat, StoredWeight};
pub use config::ModelConfig;
pub use error::ModelError;
pub use families::Family;
pub use layer::{
    AttentionSpec, DeltaSpec, ExpertSpec, FeedForward, GatedSpec, LayerSpec, Mixer,
    SharedExpertSpec,
};
pub use matrix::MatrixSource;
pub use packing::{PackedPart, PackedWeight, packing_order};
pub use rope::RopeScaling;
pub use transformer::{Limits, LoadProgress, Transformer, TransformerWeights};
pub use weight::{DeltaWeight, ExpertWeight, LayerWeight, Weight, WeightPart, WeightShape};
