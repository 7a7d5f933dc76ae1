//! Device code and the memory it works on, behind a safe face.
//!
//! * [`layout`] says how KV lies in a block; [`arena`] owns the blocks and lends them as guards.
//! * [`digest`] says whether blocks came as they went.
//! * [`backend`] is the face over which every forward pass is written, once for all devices.
//! * [`shard`] says what a rank has of a model that several compute together.
//! * [`sampling`] holds the rules by which a next token is chosen, the same on every device.
//! * [`cpu`] is the backend that runs everywhere, with its plain f32 reference.
//! * [`cuda`] is the backend for GPUs; nothing of it is loaded before it is asked for.
//! * [`shared`] is memory that the processes of one node have in common.
//!
//! Left out: models (crate `model`), scheduling (crate `engine`), moving KV between machines (crate
//! `kv-transfer`).

pub mod arena;
pub mod backend;
pub mod cpu;
pub mod cuda;
pub mod digest;
pub mod layout;
pub mod mmap;
pub mod peer;
pub mod sampling;
pub mod shard;
pub mod shared;

pub use arena::{ArenaError, BlockRead, BlockWrite, KvArena};
pub use backend::{Backend, RowSource};
pub use layout::{BLOCK_TOKENS, BlockId, Dtype, KvLayout, WeightFormat};
pub use shard::Shard;
