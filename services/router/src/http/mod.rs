//! The OpenAI HTTP API, health and metrics.

mod chat_fields;
mod choices;
mod common_fields;
mod completion_fields;
mod error;
mod fields;
mod generate;
mod grammar_field;
mod openapi;
mod prompt_field;
mod reply;
mod request_context;
mod service;
mod sse;
mod tokenize;
mod tools;
mod wire;

pub use service::routes;

/// Parses a body as each endpoint does and discards the result. Fuzz targets call this without a server.
pub fn read_bodies(body: &[u8]) {
    let Ok(fields) = fields::Fields::parse(body) else { return };
    let _ = fields.string("model");
    let _ = common_fields::check_unsupported(&fields);
    let _ = common_fields::options(&fields);
    let _ = common_fields::choices(&fields);
    let _ = common_fields::delivery(&fields);
    let tools = tools::read(&fields).ok().flatten();
    let _ = chat_fields::chat_source(&fields, tools.as_ref());
    let _ = prompt_field::prompts(&fields);
    let _ = fields.value::<Vec<u32>>("tokens", "a list of token ids");
}
