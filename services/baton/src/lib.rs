//! The modules of the operator's command `baton`, one for each subcommand.
//!
//! `up` runs a whole cluster on this machine, `check` sends requests to a cluster, `bench` measures
//! an engine or a server, `model` fetches models, `node` manages the nodes of a cluster, `doctor`
//! reports GPUs and libraries, `explain` reports requests, `top` shows nodes, requests and weight
//! updates, `keys` makes API keys, `replay` and `sim` simulate a cluster. `baton-bench` uses the
//! engine benchmark, its statistics and the model store from here.

// Only `up::process` needs unsafe code, for system calls that the standard library does not offer.
#![deny(unsafe_code)]

// First, because the other modules use its macros.
#[macro_use]
mod print;

mod admin_client;
pub mod bench;
pub mod check;
mod client_args;
mod connector;
pub mod doctor;
pub mod explain;
mod http_client;
mod hub;
pub mod keys;
pub mod model_store;
pub mod node;
pub mod replay;
mod request_trace;
pub mod sim;
mod sse;
mod staging;
mod table;
pub mod top;
pub mod up;
pub mod weights;
