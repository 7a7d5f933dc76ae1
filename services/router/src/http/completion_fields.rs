//! Fields of a request to `/v1/completions`.

use super::{
    common_fields::{self, RequestFields},
    fields::Fields,
    prompt_field::{Prompt, prompts},
};
use crate::request::{
    error::FieldError,
    options::{COMPLETION_TOKENS_DEFAULT, DefaultLength, LOGPROBS, TOKENS},
    text_workers::PromptSource,
};

pub fn read(fields: &Fields<'_>) -> Result<RequestFields, FieldError> {
    common_fields::check_unsupported(fields)?;
    fields.unsupported("suffix", &["\"\""])?;
    let add_special_tokens = fields.boolean("add_special_tokens")?.unwrap_or(true);
    let source = |prompt| match prompt {
        Prompt::Tokens(tokens) => PromptSource::Tokens(tokens),
        Prompt::Text(text) => PromptSource::Text { text, add_special_tokens },
    };
    let mut options = common_fields::options(fields)?;
    options.max_tokens = fields.count("max_tokens", TOKENS)?;
    options.logprobs = fields.count("logprobs", LOGPROBS)?;
    Ok(RequestFields {
        prompts: prompts(fields)?.into_iter().map(source).collect(),
        choices: common_fields::choices(fields)?,
        options,
        default_length: DefaultLength::Tokens(COMPLETION_TOKENS_DEFAULT),
        max_tokens_name: "max_tokens",
        delivery: common_fields::delivery(fields)?,
        tools: None,
    })
}
