//! A field of a request with a value that is not allowed.

/// Characters of a refused value that its error shows.
const SHOWN_CHARS_MAX: usize = 64;

/// Names the field, and says in one line what is wrong with it and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {problem}")]
pub struct FieldError {
    /// Name of the field, as the client wrote it.
    pub field: String,
    /// What is wrong and what is allowed: the rest of a sentence that begins with the name.
    pub problem: String,
}

impl FieldError {
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }
}

/// The error for a field whose value is `text`; `allowed` ends the sentence "allowed: ...".
pub fn refused(field: &str, text: &str, allowed: &str) -> FieldError {
    FieldError::new(field, format!("is {}; allowed: {allowed}", shown(text)))
}

/// `text`, shortened for an error message.
pub fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text.to_owned(),
    }
}
