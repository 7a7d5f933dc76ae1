//! Device code and the memory it works on, behind a safe interface.
//!
//! * [`layout`] defines the KV layout of a block; [`arena`] owns the blocks and lends them as
//!   guards.
//! * [`digest`] checks that transferred blocks are intact.
//! * [`backend`] is the trait over which every forward pass is written, once for all devices.
//! * [`fp8`] defines FP8 numbers and the scales of their blocks.
//! * [`int4`] defines numbers in INT4 and the groups of their scales.
//! * [`kv_fp8`] defines KV in FP8.
//! * [`mxfp4`] defines the order in which GPUs read weights in MXFP4.
//! * [`shard`] defines the part of a model that a tensor-parallel rank computes.
//! * [`sampling`] defines the sampling rules, which are the same on every device.
//! * [`cpu`] is the backend that runs everywhere, with its plain f32 reference.
//! * [`cuda`] is the backend for GPUs; its libraries are loaded on first use.
//! * [`offload`] copies blocks between GPUs and pinned host memory.
//! * [`shared`] is memory shared by the processes of one node.
//!
//! Models (`model`), scheduling (`engine`) and KV transfer (`kv-transfer`) are separate crates.

pub mod arena;
pub mod backend;
pub mod cpu;
pub mod cuda;
pub mod digest;
pub mod fp8;
pub mod int4;
pub mod kv_fp8;
pub mod layout;
pub mod mxfp4;
pub mod offload;
pub mod peer;
pub mod sampling;
pub mod shard;
pub mod shared;

pub use arena::{ArenaError, BlockRead, BlockWrite, KvArena};
pub use backend::{Backend, Packer, RowSource};
pub use layout::{
    BLOCK_TOKENS, BlockId, Dtype, KvFormat, KvGroups, KvLayout, NO_BLOCK, StateShape, WeightFormat,
    hit_blocks,
};
pub use shard::Shard;
