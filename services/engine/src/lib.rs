//! Scheduler, block pool, prefix cache, frames, executors and the step loop.
#![forbid(unsafe_code)]

pub mod executor;
pub mod plan;
pub mod event;
