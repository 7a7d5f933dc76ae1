//! What both node binaries share: a gRPC face, the engine thread, transfers, and an orderly end.
//!
//! * [`run`] is the whole life of a node process; the binaries' `main` is that call.
//! * [`Node`] is a running node, for whoever wants one inside another program (tests do).
//!
//! A request's way through a node, in the order of the files: `service` (the call) → `attempt`
//! (checked) → `grammars` (its grammar compiled, if it has one) → `inbox` → `engine_thread` → `journey` (who is told what, step by step) → `stream` →
//! `wire` (back to the caller). Beside it: `observe` tells routers load and cached prefixes,
//! `grpc_server` and `node` start and stop everything, `tensor_parallel` the ranks of a node that has them.
//!
//! Left out: scheduling and computing (crate `engine`), moving KV (crate `kv-transfer`), text,
//! recovery: a node reports what failed, the router acts.

#![forbid(unsafe_code)]

mod attempt;
mod connection;
mod device;
mod engine_thread;
mod grammars;
mod grpc_server;
mod identity;
mod inbox;
mod journey;
mod known_ids;
mod load_log;
mod node;
mod observe;
mod populate;
mod refusal;
mod run;
mod service;
mod settings;
mod stages;
mod stream;
mod tensor_parallel;
#[cfg(test)]
mod testing;
mod transfer_events;
mod transfer_figures;
mod wire;

pub use cluster::Role;
pub use engine_thread::EngineError;
pub use node::{Addresses, Node, NodeFailure, StartError};
pub use run::{run, run_on};
pub use settings::{SECTIONS, SettingsError};
