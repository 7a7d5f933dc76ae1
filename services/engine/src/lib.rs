//! Schedules the requests of one node and runs their steps on one device.
//!
//! The core is pure: inputs and `now` go in, actions and plans come out. [`Scheduler`] decides,
//! `block_pool` and `prefix_cache` track the KV blocks, and `frames` tracks the steps in flight.
//! [`tiers`] decides which blocks are saved to and loaded from host memory and a disk. [`executor`]
//! is the interface to the device, and [`constraint`] is the interface to grammars. [`StepLoop`]
//! drives scheduler and executor and queues a [`StepRecord`] for each step. [`event`] holds the
//! types between node and scheduler, [`plan`] the types between scheduler and executor. [`trace`]
//! writes step records for Perfetto.
//!
//! Other crates have models (`model`), arithmetic (`kernels`), KV transfer (`kv-transfer`) and text
//! (`text`): a node sees token ids only.
#![forbid(unsafe_code)]

pub mod adapter;
pub mod adapter_slots;
mod block_pool;
pub mod constraint;
pub mod defaults;
pub mod event;
pub mod executor;
mod frames;
mod kv_blocks;
mod mask_workers;
pub mod plan;
mod prefix_cache;
mod scheduler;
mod step_loop;
mod step_record;
pub mod tiers;
pub mod trace;

pub use block_pool::BlockCounts;
pub use prefix_cache::{CacheSeeds, HashChain};
pub use scheduler::{ItlLimit, Scheduler, SchedulerConfig, SchedulerConfigError};
pub use step_loop::{LoopOutcome, SpeculationStats, StepLoop};
pub use step_record::{StepKind, StepRecord, StepWork};
