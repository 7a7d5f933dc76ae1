//! Tensor parallelism: a node whose device is a group of rank processes.
//!
//! The node process runs the scheduler and the KV transfers. Each rank process holds its shard of
//! the model and runs the forward pass. Node and ranks exchange only plans and results, through
//! shared memory: [`ring`] carries messages in order from one writer to all readers, [`codec`]
//! encodes plans and results, and [`region`] lays out the memory. In the node process [`RankGroup`]
//! is the executor. In a rank process [`run_rank`] drives the executor of that rank.
//!
//! New weights are prepared while steps run: their orders and answers have separate rings.
//!
//! Every rank applies the same plans and samples the same tokens. Each result contains hashes of
//! the plans and of the tokens. The group compares the hashes, so a difference is found in the step
//! that causes it. A group fails as a whole: when one rank dies, hangs or differs, the node kills
//! all ranks and loses its device.
//!
//! Not in this crate: the forward pass and its collectives (crates `engine` and `kernels`).

#![deny(unsafe_code)]

pub mod codec;
mod group;
#[allow(unsafe_code)]
mod process;
mod rank;
mod rank_spec;
pub mod region;
pub mod ring;
mod weight_messages;
mod weight_work;

pub use group::{GroupError, GroupSettings, RankFailure, RankGroup};
pub use process::clock_nanos;
pub use rank::{RankError, run_rank};
pub use rank_spec::RankSpec;
pub use region::build;
