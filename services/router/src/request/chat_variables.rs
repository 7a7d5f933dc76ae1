//! Which variables of a chat template a client may set.

use serde_json::{Map, Value};

use super::field_error::FieldError;

/// Variables that the template has from the router or the model. Another value would make a prompt
/// of something else than was checked.
const RESERVED: [&str; 15] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "strftime_now",
    "raise_exception",
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
];

/// Refuses variables that are not the client's to set; `field` holds them.
pub fn check_variables(field: &str, variables: &Map<String, Value>) -> Result<(), FieldError> {
    match RESERVED.iter().find(|&&name| variables.contains_key(name)) {
        Some(name) => Err(FieldError::new(
            format!("{field}.{name}"),
            "is set by the router; allowed: only the template's own variables",
        )),
        None => Ok(()),
    }
}
