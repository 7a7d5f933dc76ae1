//! Tensor parallelism: a node whose device is a group of rank processes.
//!
//! The node process schedules and moves KV. Each rank holds its shard of the model and computes. Node and
//! ranks communicate through shared memory, by plans and results only: [`ring`] carries messages in
//! order from one writer to all readers, [`codec`] encodes plans and results, and [`region`] lays out
//! the memory. In the node a [`RankGroup`] is the executor; in a rank [`run_rank`] drives the rank's
//! executor.
//!
//! Every rank applies the same plans and samples the same tokens. Each answers with hashes of the plans
//! and of the tokens, and the group compares the hashes, so a difference is found in the step that
//! causes it. A group fails as a whole: when one rank dies, hangs or differs, the node kills all ranks
//! and loses its device.
//!
//! Left out: the forward pass and its collectives (crates `engine` and `kernels`).

#![deny(unsafe_code)]

pub mod codec;
mod group;
#[allow(unsafe_code)]
mod process;
mod rank;
mod rank_spec;
pub mod region;
pub mod ring;

pub use group::{GroupError, GroupSettings, RankFailure, RankGroup};
pub use process::clock_nanos;
pub use rank::{RankError, run_rank};
pub use rank_spec::RankSpec;
pub use region::build;
