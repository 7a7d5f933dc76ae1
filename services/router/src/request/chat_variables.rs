//! Check of the chat template variables that a client sets.

use serde_json::{Map, Value};

use super::error::FieldError;

/// Variables that the router or the model sets. A client's value could bypass the checks of the request.
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

/// Rejects variables of the router or the model in `field`.
pub fn check_variables(field: &str, variables: &Map<String, Value>) -> Result<(), FieldError> {
    match RESERVED.iter().find(|&&name| variables.contains_key(name)) {
        Some(name) => Err(FieldError::new(
            format!("{field}.{name}"),
            "is set by the router; allowed: only the template's own variables",
        )),
        None => Ok(()),
    }
}
