//! The prompt of a gRPC request: a text, token ids, or a conversation.

use proto::v1::{Conversation, generate_request, tokenize_request};
use serde_json::{Map, Value, json};

use crate::request::{
    chat_variables::check_variables,
    field_error::{FieldError, refused},
    text_workers::{ChatSource, PromptSource},
};

/// What a message takes beside its texts: it is an object with their names, and templates put a frame
/// around it.
const MESSAGE_BYTES: usize = 64;

pub fn of_generate(prompt: Option<generate_request::Prompt>) -> Result<PromptSource, FieldError> {
    use generate_request::Prompt;
    match prompt {
        Some(Prompt::Text(text)) => Ok(PromptSource::Text { text, add_special_tokens: true }),
        Some(Prompt::TokenIds(tokens)) => Ok(PromptSource::Tokens(tokens.ids)),
        None => Err(FieldError::new("prompt", "is missing; allowed: text or token_ids")),
    }
}

pub fn of_tokenize(
    input: Option<tokenize_request::Input>,
    add_special_tokens: Option<bool>,
) -> Result<PromptSource, FieldError> {
    use tokenize_request::Input;
    match input {
        Some(Input::Text(text)) => {
            let add_special_tokens = add_special_tokens.unwrap_or(true);
            Ok(PromptSource::Text { text, add_special_tokens })
        }
        Some(Input::Conversation(conversation)) => of_chat(Some(conversation)),
        None => Err(FieldError::new("input", "is missing; allowed: text or conversation")),
    }
}

pub fn of_chat(conversation: Option<Conversation>) -> Result<PromptSource, FieldError> {
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
        false => serde_json::from_str(&text)
            .map_err(|_| refused(name, &text, "a JSON object of template variables"))?,
    };
    check_variables(name, &template_kwargs)?;
    let message_bytes = messages.iter().map(|message| {
        MESSAGE_BYTES + message.role.len() + message.content.len() + message.name.len()
    });
    let bytes = message_bytes.sum::<usize>() + text.len();
    let messages = messages.into_iter().map(|message| {
        let mut object = json!({"role": message.role, "content": message.content});
        if !message.name.is_empty() {
            object["name"] = message.name.into();
        }
        object
    });
    Ok(PromptSource::Chat(ChatSource {
        messages: messages.collect(),
        tools: Value::Null,
        add_generation_prompt: conversation
            .add_generation_prompt
            .unwrap_or(!continue_final_message),
        continue_final_message,
        template_kwargs,
        bytes,
    }))
}

#[cfg(test)]
mod tests {
    use proto::v1::ChatMessage;

    use super::*;

    #[test]
    fn every_part_of_a_conversation_counts_as_work() {
        let message = |role: &str, content: &str, name: &str| ChatMessage {
            role: role.into(),
            content: content.into(),
            name: name.into(),
        };
        let long = "x".repeat(5000);
        for messages in [
            vec![message("", "", ""); 1000],
            vec![message("user", "", &long)],
            vec![message("user", &long, "me"), message(&long, "", "")],
        ] {
            let conversation = Conversation { messages, ..Default::default() };
            let source = of_chat(Some(conversation)).unwrap();
            let PromptSource::Chat(chat) = source else { panic!("{source:?}") };
            assert!(chat.bytes >= chat.messages.to_string().len(), "{}", chat.bytes);
        }
    }
}
