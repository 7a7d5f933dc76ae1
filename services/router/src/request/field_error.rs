//! Error for an invalid field of a request.

/// Maximum number of characters that an error shows of an invalid value.
const SHOWN_CHARS_MAX: usize = 64;

/// Error with the field's name, its problem and the allowed values in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {problem}")]
pub struct FieldError {
    /// Name of the client's field.
    pub field: String,
    /// Problem and allowed values, as the rest of a sentence that begins with the name.
    pub problem: String,
}

impl FieldError {
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }
}

/// Returns the error for a field with value `text`; `allowed` ends the sentence "allowed: ...".
pub fn refused(field: &str, text: &str, allowed: &str) -> FieldError {
    FieldError::new(field, format!("is {}; allowed: {allowed}", shown(text)))
}

/// Returns `text`, truncated for an error message.
pub fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text.to_owned(),
    }
}
