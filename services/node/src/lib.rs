//! The library shared by both node binaries: gRPC service, engine thread, transfers and shutdown.
//!
//! * [`run`] runs a node process until it exits; each binary's `main` only calls it.
//! * [`Node`] is a running node inside another program, such as a test.
//! * [`node_core::NodeCore`] holds the rules of a node, without I/O.
//!
//! `NodeService::attempt` shows the stages of a call in order, and [`node_core::take_turn`] the
//! order within the engine thread. The files on the way: `service` (the call) → `attempt` (its
//! fields are checked) → `grammars` (its grammar is compiled) → `inbox` (bounded queue) →
//! `engine_thread` → `node_core` → `callers` and `stream` (the caller's channels) → `wire`
//! (messages to the caller). Other files: `observe` streams load and cached prefixes to routers,
//! `node` starts and stops the node, `model_load` opens the model, `tensor_parallel` starts ranks,
//! `grpc_server` and `probes` listen, `weights` takes part in live weight updates.
//!
//! Not in this crate: scheduling and the forward pass (crate `engine`), KV transfer (crate
//! `kv-transfer`), text processing (crate `text`), and recovery: a node reports a failure, and the
//! router retries.

#![forbid(unsafe_code)]

mod adapters;
pub mod attempt;
mod authentication;
mod callers;
mod connection;
pub mod constraint;
mod device;
mod engine_thread;
mod grammars;
mod grpc_server;
mod hang;
pub mod identity;
mod inbox;
mod memory_limit;
mod model_load;
mod node;
pub mod node_core;
mod observe;
mod populate;
mod probes;
mod run;
mod service;
mod settings;
mod start_error;
mod stream;
mod tensor_parallel;
#[cfg(test)]
mod testing;
mod tiers;
mod trace;
mod transfer_metrics;
mod weights;
pub mod wire;

pub use cluster::Role;
pub use engine_thread::EngineError;
pub use node::{Addresses, Node, NodeFailure};
pub use run::{run, run_on};
pub use settings::{SECTIONS, SettingsError};
pub use start_error::NodeStartError;
