//! A node whose device is several processes, all alike: its ranks.
//!
//! The node process schedules and moves KV; each rank holds its part of the model and computes. They
//! talk through memory that they share, and only by plans and results: [`ring`] carries messages in
//! order from one writer to all readers, [`codec`] says how a plan and a result look as bytes, and
//! [`region`] where everything lies. In the node a [`RankGroup`] is the executor; in a rank
//! [`run_rank`] drives the executor that it was given.
//!
//! Every rank applies the same plans and chooses the same tokens. So that a difference is found in the
//! step that brings it, each answers with hashes of what it was told and of what it chose, and the
//! group compares them. A group fails as a whole: when one rank dies, hangs or differs, all are ended
//! and the node loses its device, which it knows how to end.
//!
//! Left out: what a rank computes, and how ranks add up their parts (crates `engine` and `kernels`).

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
pub use rank_spec::{InvalidRankSpec, RankSpec};
pub use region::build;
