//! Contents of a client's request, independent of the API.

pub mod asked_grammar;
pub mod error;
pub mod options;
pub mod text_workers;
pub mod tokenising;
pub mod tools;
