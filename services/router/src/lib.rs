//! The front of Baton: the OpenAI HTTP API and gRPC in, attempts on nodes out.
//!
//! A request's path, in the order of the files:
//! 1. `http` or `grpc` reads and checks the request's fields; `request` has what both share.
//! 2. `journey` tokenises, picks nodes, makes attempts and owns the list of emitted tokens. What
//!    events mean and what follows a failure is decided there by pure state machines.
//! 3. `nodes` knows the nodes: a directory kept up to date by `Observe` streams, and connections.
//! 4. `generation` carries the answers back as bounded events, which `http` and `grpc` write.
//!
//! `start` serves all of it; the binary only reads the configuration and waits for signals.
//! Left out: tokenising itself (`text`), the choice among nodes (`cluster`), what nodes do.

#![forbid(unsafe_code)]

mod admission;
mod event_queue;
mod front;
mod generation;
mod grpc;
mod http;
mod journey;
mod models;
mod net;
mod nodes;
mod record;
mod request;
mod serve;

/// What is decided about a request without any I/O. The simulation of whole clusters runs it too.
pub mod decisions {
    pub use crate::journey::{
        attempt::{Attempt, LAST_EVENT_MAX, Next, TOKEN_0_MAX},
        emitted::{EmissionError, EmittedTokens},
        failure::{AttemptFailure, Cause, Side},
        recovery::{GiveUp, Recovery, RecoveryLimits, Then},
    };
}

pub use front::FrontSettings;
#[doc(hidden)]
pub use http::read_bodies;
pub use models::ModelSource;
pub use serve::{RouterSettings, RunningRouter, StartError, StopError, start};
