//! The prompt of a gRPC request: a text, token ids, or a conversation.

use proto::v1::{ChatMessage, Conversation, ToolCall, generate_request, tokenize_request};
use serde_json::{Map, Value, json};

use crate::request::{
    error::{FieldError, parse_json},
    text_workers::{ChatSource, PromptSource, check_variables},
    tools::OfferedTools,
};

/// Estimated bytes of a message in addition to its texts: JSON keys, and the text that templates
/// add.
const MESSAGE_BYTES: usize = 64;

pub(super) fn of_generate(
    prompt: Option<generate_request::Prompt>,
) -> Result<PromptSource, FieldError> {
    use generate_request::Prompt;
    match prompt {
        Some(Prompt::Text(text)) => Ok(PromptSource::Text { text, add_special_tokens: true }),
        Some(Prompt::TokenIds(tokens)) => Ok(PromptSource::Tokens(tokens.ids)),
        None => Err(FieldError::new("prompt", "is missing; allowed: text or token_ids")),
    }
}

pub(super) fn of_tokenize(
    input: Option<tokenize_request::Input>,
    add_special_tokens: Option<bool>,
) -> Result<PromptSource, FieldError> {
    use tokenize_request::Input;
    match input {
        Some(Input::Text(text)) => {
            let add_special_tokens = add_special_tokens.unwrap_or(true);
            Ok(PromptSource::Text { text, add_special_tokens })
        }
        Some(Input::Conversation(conversation)) => of_chat(Some(conversation), None),
        None => Err(FieldError::new("input", "is missing; allowed: text or conversation")),
    }
}

pub(super) fn of_chat(
    conversation: Option<Conversation>,
    tools: Option<&OfferedTools>,
) -> Result<PromptSource, FieldError> {
    let conversation = conversation.unwrap_or_default();
    let Conversation { messages, continue_final_message, .. } = conversation;
    if messages.is_empty() {
        let problem = "is empty; allowed: at least one message";
        return Err(FieldError::new("conversation.messages", problem));
    }
    if continue_final_message && conversation.add_generation_prompt == Some(true) {
        let problem = "is true; allowed: only with add_generation_prompt false or left out";
        return Err(FieldError::new("conversation.continue_final_message", problem));
    }
    let text = conversation.template_kwargs_json;
    let name = "conversation.template_kwargs_json";
    let template_kwargs: Map<String, Value> = match text.is_empty() {
        true => Map::new(),
        false => parse_json(&text).map_err(|error| {
            let allowed = "a JSON object of template variables";
            FieldError::new(name, format!("is invalid: {error}; allowed: {allowed}"))
        })?,
    };
    check_variables(name, &template_kwargs)?;
    let call_bytes = |call: &ToolCall| {
        MESSAGE_BYTES + call.id.len() + call.name.len() + call.arguments_json.len()
    };
    let message_bytes = messages.iter().map(|message| {
        let calls = message.tool_calls.iter().map(call_bytes).sum::<usize>();
        let texts = message.role.len() + message.content.len() + message.name.len();
        MESSAGE_BYTES + texts + message.tool_call_id.len() + calls
    });
    let tools = tools.map_or(Value::Null, |tools| tools.definitions.clone());
    let tool_bytes = if tools.is_null() { 0 } else { tools.to_string().len() };
    let bytes = message_bytes.sum::<usize>() + text.len() + tool_bytes;
    let messages: Value =
        messages.into_iter().enumerate().map(message).collect::<Result<Vec<_>, _>>()?.into();
    Ok(PromptSource::Chat(ChatSource {
        field: "messages",
        messages,
        tools,
        add_generation_prompt: conversation
            .add_generation_prompt
            .unwrap_or(!continue_final_message),
        continue_final_message,
        template_kwargs,
        bytes,
    }))
}

/// Returns the message in the form of OpenAI's API, which templates expect.
fn message((index, message): (usize, ChatMessage)) -> Result<Value, FieldError> {
    let mut object = json!({"role": message.role, "content": message.content});
    if !message.name.is_empty() {
        object["name"] = message.name.into();
    }
    if !message.tool_call_id.is_empty() {
        object["tool_call_id"] = message.tool_call_id.into();
    }
    if message.tool_calls.is_empty() {
        return Ok(object);
    }
    let mut calls = Vec::new();
    for (call_index, call) in message.tool_calls.into_iter().enumerate() {
        parse_json::<Map<String, Value>>(&call.arguments_json).map_err(|error| {
            let field =
                format!("conversation.messages[{index}].tool_calls[{call_index}].arguments_json");
            FieldError::new(field, format!("is invalid: {error}; allowed: a JSON object"))
        })?;
        let function = json!({"name": call.name, "arguments": call.arguments_json});
        calls.push(json!({"id": call.id, "type": "function", "function": function}));
    }
    object["tool_calls"] = calls.into();
    Ok(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversation_bytes_include_every_part() {
        let message = |role: &str, content: &str, name: &str| ChatMessage {
            role: role.into(),
            content: content.into(),
            name: name.into(),
            ..Default::default()
        };
        let long = "x".repeat(5000);
        for messages in [
            vec![message("", "", ""); 1000],
            vec![message("user", "", &long)],
            vec![message("user", &long, "me"), message(&long, "", "")],
        ] {
            let conversation = Conversation { messages, ..Default::default() };
            let source = of_chat(Some(conversation), None).unwrap();
            let PromptSource::Chat(chat) = source else { panic!("{source:?}") };
            assert!(chat.bytes >= chat.messages.to_string().len(), "{}", chat.bytes);
        }
    }
}
