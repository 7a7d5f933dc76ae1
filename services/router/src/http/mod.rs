//! The OpenAI HTTP API, health and metrics.

mod choices;
mod common_fields;
mod error;
mod fields;
mod generate;
mod prompt_field;
mod reply;
mod request_context;
mod service;
mod sse;
mod wire;

pub use service::routes;
