//! Turns requests at one node into steps of one device.
//!
//! The core is pure, inputs and `now` in, actions and plans out: [`scheduler`] decides,
//! [`block_pool`] and [`prefix_cache`] keep the books of the KV blocks, [`frames`] those of the steps
//! in flight. Around it: [`executor`] is the seam to the device with its implementations, and
//! [`step_loop`] drives both and keeps figures of the last steps in a [`step_ring`]; [`constraint`] is
//! the seam to grammars. What crosses the seams is in [`event`] (node and scheduler) and [`plan`]
//! (scheduler and executor).
//!
//! Left out: models and arithmetic (crates `model` and `kernels`), moving KV between nodes (crate
//! `kv-transfer`), text of any kind: a node knows token ids only.
#![forbid(unsafe_code)]

pub mod block_pool;
pub mod constraint;
pub mod event;
pub mod executor;
mod fold_hash;
pub mod frames;
mod kv_blocks;
pub mod plan;
pub mod prefix_cache;
pub mod scheduler;
pub mod step_loop;
pub mod step_ring;

pub use block_pool::BlockCounts;
pub use prefix_cache::{CacheSeeds, HashChain};
pub use scheduler::{Scheduler, SchedulerConfig, SchedulerConfigError};
pub use step_loop::{Speculated, StepLoop, Turn};
pub use step_ring::{StepKind, StepReader, StepRecord};
