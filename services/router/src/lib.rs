//! The router: serves the OpenAI HTTP API and gRPC in front of prefill and decode nodes.
//!
//! Path of a request, module by module:
//! 1. `http` or `grpc` parses and checks the request's fields; `request` has the code that both
//!    share.
//! 2. `request_driver` tokenizes the prompt and runs one driver for each answer. The driver does
//!    the I/O for an [`AnswerCore`](router_core::AnswerCore).
//! 3. `shared_router` is the lock of the [`RouterCore`](router_core::RouterCore) that all answers
//!    share. Both cores are pure and make every decision.
//! 4. `nodes` holds the connections to nodes and their `Observe` streams, which keep the core's
//!    directory up to date.
//! 5. The driver returns the answers as bounded events, which `http` and `grpc` write.
//!
//! [`start`] serves both APIs; the binary reads the configuration and waits for signals.
//! Tokenization is in `text`, node selection in `cluster`.

#![forbid(unsafe_code)]

mod admin;
mod admission;
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
    pub(crate) mod answer_reader;
    pub(crate) mod error;
    pub(crate) mod options;
    pub(crate) mod text_workers;
    pub(crate) mod tokenization;
    pub(crate) mod tools;
}
mod request_driver;
mod response_store;
mod serve;
mod shared_router;
mod wake;
mod weights;

pub use front::{ModelSource, RouterSettings};
#[doc(hidden)]
pub use http::read_bodies;
pub use nodes::NodeCredentials;
pub use serve::{RouterStartError, RunningRouter, StopError, start};
