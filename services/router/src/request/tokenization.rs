//! Tokenization and detokenization for `/tokenize` and `/detokenize`, within the limits of requests
//! to nodes.

use std::sync::Arc;

use text::Tokenizer;

use super::{
    error::{FieldError, RequestError},
    text_workers::PromptSource,
};
use crate::{front::Front, front::ServedModel, keys::Caller, request_driver::RequestDeadline};

/// Maximum size of a text or conversation in bytes, also of one that is detokenized; 128 Ki tokens
/// take less. Tokenization takes a hundred times the text's memory.
const BYTES_MAX: usize = 1 << 20;

/// Returns the token ids that a generation request would have for this prompt.
pub(crate) async fn tokenize(
    front: &Front,
    caller: &Caller,
    model: &ServedModel,
    source: PromptSource,
) -> Result<Vec<u32>, RequestError> {
    let bytes = source.bytes();
    if bytes > BYTES_MAX {
        let problem = format!("has {bytes} bytes; allowed: at most {BYTES_MAX} to be tokenized");
        return Err(FieldError::new(source.field(), problem).into());
    }
    let _admitted = front.router.admit_work(&caller.flow(None))?;
    let deadline = RequestDeadline::after(front.settings.router.timeout);
    deadline.limit(model.text.tokens(source, BYTES_MAX)).await?
}

/// Returns the text of these tokens of `field`; special tokens appear by name.
pub(crate) async fn detokenize(
    front: &Front,
    caller: &Caller,
    model: &ServedModel,
    field: &str,
    tokens: Vec<u32>,
) -> Result<String, RequestError> {
    let tokenizer = model.text.tokenizer();
    check_vocabulary(field, &tokens, tokenizer)?;
    let bytes = tokens.iter().filter_map(|id| tokenizer.token_bytes(*id)).map(<[u8]>::len);
    let bytes: usize = bytes.sum();
    if bytes > BYTES_MAX {
        let problem = format!("has {bytes} bytes of text; allowed: at most {BYTES_MAX}");
        return Err(FieldError::new(field, problem).into());
    }
    let _admitted = front.router.admit_work(&caller.flow(None))?;
    let deadline = RequestDeadline::after(front.settings.router.timeout);
    deadline.limit(model.text.text_of(tokens)).await?
}

/// Rejects ids outside the vocabulary.
fn check_vocabulary(
    field: &str,
    tokens: &[u32],
    tokenizer: &Arc<Tokenizer>,
) -> Result<(), FieldError> {
    let size = tokenizer.vocabulary_size();
    match tokens.iter().position(|&id| id >= size) {
        Some(index) => {
            let id = tokens[index];
            let problem = format!("has token id {id} at index {index}; allowed: ids below {size}");
            Err(FieldError::new(field, problem))
        }
        None => Ok(()),
    }
}
