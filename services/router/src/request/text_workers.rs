//! Rendering and tokenising: short prompts in place, long ones on blocking threads, a bounded number
//! at once.

use std::sync::Arc;

use serde_json::Value;
use text::{
    ChatTemplate, EncodeError, ModelText, RenderRequest, SpecialTokens, TemplateError, Tokenizer,
};
use tokio::sync::Semaphore;

use super::{field_error::FieldError, ids::mint_mark};
use crate::generation::RequestError;

/// Up to this many bytes a prompt takes less than a millisecond, less than a thread's detour costs.
const INLINE_BYTES_MAX: usize = 4096;

/// A prompt as a client gave it.
#[derive(Clone, Debug, PartialEq)]
pub enum PromptSource {
    Tokens(Vec<u32>),
    /// Encoded with what the model wants around a prompt, if asked for.
    Text {
        text: String,
        add_special_tokens: bool,
    },
    Chat(ChatSource),
}

#[derive(Clone, Debug, PartialEq)]
pub struct ChatSource {
    pub messages: Value,
    pub add_generation_prompt: bool,
    /// The last message is the beginning of the answer.
    pub continue_final_message: bool,
    /// Further variables for the template.
    pub template_kwargs: serde_json::Map<String, Value>,
    /// Length of the messages and variables as JSON.
    pub bytes: usize,
}

impl PromptSource {
    fn bytes(&self) -> usize {
        match self {
            Self::Tokens(_) => 0,
            Self::Text { text, .. } => text.len(),
            Self::Chat(chat) => chat.bytes,
        }
    }

    /// The field that a refusal names.
    pub fn field(&self) -> &'static str {
        match self {
            Self::Tokens(_) | Self::Text { .. } => "prompt",
            Self::Chat(_) => "messages",
        }
    }
}

/// The model's text side, and who works on it.
pub struct TextWorkers {
    text: Arc<ModelText>,
    /// Long prompts in work. Encoding needs a hundred times a text's size in memory.
    permits: Arc<Semaphore>,
}

impl TextWorkers {
    pub fn new(text: Arc<ModelText>) -> Self {
        let threads = std::thread::available_parallelism().map_or(2, usize::from);
        Self { text, permits: Arc::new(Semaphore::new(threads)) }
    }

    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        self.text.tokenizer()
    }

    /// The prompt's token ids. A text that has more than `tokens_max` by any count is refused
    /// without the work.
    pub async fn tokens(
        &self,
        source: PromptSource,
        tokens_max: u32,
    ) -> Result<Vec<u32>, RequestError> {
        if source.bytes() <= INLINE_BYTES_MAX {
            return tokens(&self.text, source, tokens_max);
        }
        let internal = |reason: String| RequestError::Internal { reason };
        let permit = self.permits.clone().acquire_owned().await;
        let permit = permit.map_err(|error| internal(error.to_string()))?;
        let text = self.text.clone();
        let work = move || {
            // Held by the work itself: it goes on when nobody waits for it any more.
            let _permit = permit;
            tokens(&text, source, tokens_max)
        };
        tokio::task::spawn_blocking(work).await.map_err(|error| internal(error.to_string()))?
    }
}

fn tokens(
    text: &ModelText,
    source: PromptSource,
    tokens_max: u32,
) -> Result<Vec<u32>, RequestError> {
    let field = source.field();
    let tokenizer = text.tokenizer();
    let encoded = |result: Result<Vec<u32>, EncodeError>| {
        result.map_err(|error| FieldError::new(field, format!("cannot be tokenised: {error}")))
    };
    let check_length = |prompt: &str| {
        let at_least = tokenizer.tokens_at_least(prompt);
        if at_least as u64 > u64::from(tokens_max) {
            let problem = format!("has at least {at_least} tokens; allowed: at most {tokens_max}");
            return Err(FieldError::new(field, problem));
        }
        Ok(())
    };
    match source {
        PromptSource::Tokens(tokens) => Ok(tokens),
        PromptSource::Text { text, add_special_tokens } => {
            check_length(&text)?;
            let special = SpecialTokens::Parse;
            Ok(encoded(match add_special_tokens {
                true => tokenizer.encode_prompt(&text, special),
                false => tokenizer.encode(&text, special),
            })?)
        }
        PromptSource::Chat(chat) => {
            let template = text.chat_template().map_err(template_failed)?;
            let prompt = render(template, &chat)?;
            check_length(&prompt)?;
            Ok(encoded(tokenizer.encode(&prompt, SpecialTokens::Parse))?)
        }
    }
}

fn template_failed(error: &TemplateError) -> RequestError {
    let reason = error.to_string();
    match error {
        TemplateError::Missing => RequestError::Text { field: None, reason },
        error if error.is_requests_fault() => {
            RequestError::Text { field: Some("messages"), reason }
        }
        _ => RequestError::Internal { reason },
    }
}

fn render(template: &ChatTemplate, chat: &ChatSource) -> Result<String, RequestError> {
    let render = |messages: &Value| {
        let rendered = template.render(&RenderRequest {
            messages,
            tools: &Value::Null,
            add_generation_prompt: chat.add_generation_prompt,
            extra: &chat.template_kwargs,
            now: std::time::SystemTime::now(),
        });
        rendered.map_err(|error| template_failed(&error))
    };
    if !chat.continue_final_message {
        return render(&chat.messages);
    }
    // The template may write the content elsewhere too, so a mark shows where the message ends.
    let mark = mint_mark().map_err(|error| RequestError::Internal { reason: error.to_string() })?;
    let mut prompt = render(&with_mark_at_the_end(&chat.messages, &mark)?)?;
    let end = prompt.rfind(&mark).ok_or_else(|| {
        let problem = "is true; the chat template changes the end of the last message, so it \
                       cannot be continued";
        FieldError::new("continue_final_message", problem)
    })?;
    prompt.truncate(end);
    Ok(prompt)
}

/// The messages with `mark` behind the last one's text.
fn with_mark_at_the_end(messages: &Value, mark: &str) -> Result<Value, FieldError> {
    let mut messages = messages.clone();
    let last = messages.as_array_mut().and_then(|messages| messages.last_mut());
    match last.and_then(|message| message.get_mut("content")) {
        Some(Value::String(content)) if !content.trim().is_empty() => content.push_str(mark),
        _ => {
            let problem = "is true; allowed: only with text in the last message";
            return Err(FieldError::new("continue_final_message", problem));
        }
    }
    Ok(messages)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const TEMPLATE: &str = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n\
                            {% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";

    fn continued(template: &str, content: Value) -> Result<String, RequestError> {
        let template = ChatTemplate::new(template, Default::default()).unwrap();
        let chat = ChatSource {
            messages: json!([
                {"role": "user", "content": "sure"},
                {"role": "assistant", "content": content},
            ]),
            add_generation_prompt: false,
            continue_final_message: true,
            template_kwargs: Default::default(),
            bytes: 0,
        };
        render(&template, &chat)
    }

    #[test]
    fn the_final_message_is_left_open() {
        // Some of it comes again in what the template writes behind the message.
        for content in ["sure, it", "<", "|", "end", "<|end|>", "a ", "ü"] {
            assert_eq!(
                continued(TEMPLATE, json!(content)).unwrap(),
                format!("<|user|>sure<|end|>\n<|assistant|>{content}")
            );
        }
    }

    #[test]
    fn a_final_message_without_an_end_of_its_own_is_refused() {
        let refused = |template, content| match continued(template, content) {
            Err(RequestError::Field(error)) => error.field == "continue_final_message",
            other => panic!("{other:?}"),
        };
        assert!(refused(TEMPLATE, json!("")) && refused(TEMPLATE, json!(null)));
        assert!(refused("{{ messages[0].content }}", json!("sure")));
        assert!(refused("{{ messages[1].content[:4] }}", json!("sure")));
    }
}
