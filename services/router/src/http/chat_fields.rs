//! Fields of a request to `/v1/chat/completions`.

use serde_json::{Map, Value};

use super::{
    common_fields::{self, RequestFields},
    fields::Fields,
    tools,
};
use crate::request::{
    chat_variables::check_variables,
    error::{FieldError, refused},
    options::{DefaultLength, LOGPROBS, TOKENS},
    text_workers::{ChatSource, PromptSource},
    tools::OfferedTools,
};

/// Unsupported fields of OpenAI and vLLM, with the values that disable them.
const UNSUPPORTED: [(&str, &[&str]); 5] = [
    ("functions", &["[]"]),
    ("audio", &[]),
    ("chat_template", &[]),
    ("documents", &["[]"]),
    ("modalities", &["[\"text\"]"]),
];

pub fn read(fields: &Fields<'_>) -> Result<RequestFields, FieldError> {
    common_fields::check_unsupported(fields)?;
    for (name, neutral) in UNSUPPORTED {
        fields.unsupported(name, neutral)?;
    }
    let mut options = common_fields::options(fields)?;
    let max_tokens = fields.count("max_tokens", TOKENS)?;
    let max_completion_tokens = fields.count("max_completion_tokens", TOKENS)?;
    options.max_tokens = max_completion_tokens.or(max_tokens);
    let max_tokens_name = match max_completion_tokens {
        Some(_) => "max_completion_tokens",
        None => "max_tokens",
    };
    let wants_logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    let top_logprobs = fields.count("top_logprobs", LOGPROBS)?;
    if let Some(count @ 1..) = top_logprobs.filter(|_| !wants_logprobs) {
        let problem = format!("is {count}; allowed: only with logprobs true");
        return Err(FieldError::new("top_logprobs", problem));
    }
    options.logprobs = wants_logprobs.then(|| top_logprobs.unwrap_or(0));

    let tools = tools::read(fields)?;
    Ok(RequestFields {
        prompts: vec![PromptSource::Chat(chat_source(fields, tools.as_ref())?)],
        choices: common_fields::choices(fields)?,
        options,
        default_length: DefaultLength::Rest,
        max_tokens_name,
        delivery: common_fields::delivery(fields)?,
        tools,
    })
}

/// Reads the conversation and its rendering options.
pub fn chat_source(
    fields: &Fields<'_>,
    tools: Option<&OfferedTools>,
) -> Result<ChatSource, FieldError> {
    let allowed = "a list of messages, each with role and content";
    let Some(text) = fields.raw("messages") else {
        return Err(FieldError::new("messages", format!("is missing; allowed: {allowed}")));
    };
    let messages: Value =
        serde_json::from_str(text).map_err(|_| refused("messages", text, allowed))?;
    match messages.as_array() {
        Some(messages) if !messages.is_empty() => {}
        Some(_) => return Err(FieldError::new("messages", "is empty; allowed: at least one")),
        None => return Err(refused("messages", text, allowed)),
    }
    let continue_final_message = fields.boolean("continue_final_message")?.unwrap_or(false);
    let add_generation_prompt = fields.boolean("add_generation_prompt")?;
    if continue_final_message && add_generation_prompt == Some(true) {
        return Err(FieldError::new(
            "continue_final_message",
            "is true; allowed: only with add_generation_prompt false or left out",
        ));
    }
    fields.unsupported("add_special_tokens", &["false"])?;
    Ok(ChatSource {
        messages,
        tools: tools.map_or(Value::Null, |tools| tools.definitions.clone()),
        add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
        template_kwargs: template_kwargs(fields)?,
        bytes: [Some(text), fields.raw("chat_template_kwargs"), fields.raw("tools")]
            .into_iter()
            .flatten()
            .map(str::len)
            .sum(),
    })
}

fn template_kwargs(fields: &Fields<'_>) -> Result<Map<String, Value>, FieldError> {
    const NAME: &str = "chat_template_kwargs";
    let variables = fields.value(NAME, "an object of template variables")?.unwrap_or_default();
    check_variables(NAME, &variables)?;
    Ok(variables)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chats_template_variables_count_as_its_bytes() {
        let long = "x".repeat(5000);
        let messages = r#"[{"role":"user","content":"hi"}]"#;
        let body =
            format!(r#"{{"messages":{messages},"chat_template_kwargs":{{"system":"{long}"}}}}"#);
        let chat = chat_source(&Fields::parse(body.as_bytes()).unwrap(), None).unwrap();
        assert_eq!(chat.bytes, messages.len() + r#"{"system":""}"#.len() + 5000);
    }
}
