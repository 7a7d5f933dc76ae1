//! Live weight updates: either all nodes of an update switch to the same weights, or none does.
//!
//! * [`Plan`] cuts the tensors of an update into chunks. Every side computes the same plan.
//! * [`WeightVersion`] names weights by their content: the hash of the plan and of the chunks'
//!   digests.
//! * [`Participant`] is the state machine of a node: `Serving → Receiving → Prepared → Installing →
//!   Serving`. An abort leads back to `Serving` before `Installing`.
//! * [`Coordinator`] is the state machine of the process that runs an update over several nodes.
//!
//! The crate is pure. It has no socket, clock or task, and knows no model. Its callers move the
//! bytes.
//!
//! # Why two nodes never serve different bytes under one version
//! A version is the content's hash, so a node that installs weights computes the version from the
//! bytes that it has. A coordinator decides to commit only after every participant is prepared with
//! one version, and a participant installs only weights whose version the commit names. A prepared
//! participant that loses its coordinator asks its peers and commits if one of them has committed,
//! also if that peer has begun a later update since. Otherwise it aborts at its deadline and keeps
//! its old weights under their old version. Peers of different versions are never paired, so such a
//! node serves correct answers alone until it catches up.

#![forbid(unsafe_code)]

mod address;
mod coordinator;
mod participant;
mod plan;
mod version;

pub use address::trainer_address;
pub use coordinator::{
    Coordinator, CoordinatorCall, CoordinatorError, CoordinatorPhase, NodeReply,
};
pub use participant::{
    BeginError, CommitError, Participant, ParticipantAction, ParticipantInput, ParticipantPhase,
    Proposal, ReceivingUpdate, UpdateEnd, UpdateId, UpdateReport, UpdateState,
};
pub use plan::{CHUNK_BYTES, Plan, PlanError, Tensor, TensorRange, WeightChunk};
pub use version::{ChunkDigest, WeightVersion};
