//! The router: serves the OpenAI HTTP API and gRPC in front of prefill and decode nodes.
//!
//! Path of a request, module by module:
//! 1. `http` or `grpc` parses and checks the request's fields; `request` has the code that both share.
//! 2. `request_driver` tokenizes the prompt and runs one driver for each answer. The driver does the I/O
//!    for [`request_core`], which is pure: it owns the list of emitted tokens, decides which nodes to pick,
//!    and what follows each event and failure.
//!    `wait_queue` holds back answers that no node can start; [`fair_queue`] is its order.
//! 3. `nodes` holds the directory of nodes, kept up to date by `Observe` streams, and the connections.
//! 4. The driver returns the answers as bounded events, which `http` and `grpc` write.
//!
//! [`start`] serves both APIs; the binary reads the configuration and waits for signals. Tokenization is in
//! `text`, node selection in `cluster`.

#![forbid(unsafe_code)]

mod admin;
mod admission;
pub mod fair_queue;
mod front;
mod grpc;
mod history;
mod http;
mod keys;
mod lock;
mod net;
mod nodes;
mod record;
/// A client's request, independent of the API.
mod request {
    pub mod error;
    pub mod options;
    pub mod text_workers;
    pub mod tokenization;
    pub mod tools;
}
pub mod request_core;
mod request_driver;
mod serve;
mod wait_queue;
mod wake;
mod weights;

pub use front::{ModelSource, RouterSettings};
#[doc(hidden)]
pub use http::read_bodies;
pub use nodes::NodeCredentials;
pub use serve::{RunningRouter, StartError, StopError, start};
