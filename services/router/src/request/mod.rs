//! What a client asks for, independent of the API it came by.

pub mod field_error;
pub mod ids;
pub mod options;
pub mod text_workers;
