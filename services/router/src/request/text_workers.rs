//! Rendering and tokenising: short prompts in place, long ones on blocking threads, a bounded number
//! at once.

use std::sync::Arc;

use text::{EncodeError, ModelText, RenderRequest, SpecialTokens, TemplateError, Tokenizer};
use tokio::sync::Semaphore;

use super::field_error::FieldError;
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
    pub messages: serde_json::Value,
    pub add_generation_prompt: bool,
    /// The last message is the beginning of the answer.
    pub continue_final_message: bool,
    /// Further variables for the template.
    pub template_kwargs: serde_json::Map<String, serde_json::Value>,
    /// Length of the request's messages as JSON.
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
            let prompt = render(text, &chat)?;
            check_length(&prompt)?;
            Ok(encoded(tokenizer.encode(&prompt, SpecialTokens::Parse))?)
        }
    }
}

fn render(text: &ModelText, chat: &ChatSource) -> Result<String, RequestError> {
    let failed = |error: &TemplateError| match error {
        TemplateError::Missing => RequestError::Text { reason: error.to_string() },
        error if error.is_requests_fault() => RequestError::Text { reason: error.to_string() },
        error => RequestError::Internal { reason: error.to_string() },
    };
    let template = text.chat_template().map_err(failed)?;
    let prompt = template
        .render(&RenderRequest {
            messages: &chat.messages,
            tools: &serde_json::Value::Null,
            add_generation_prompt: chat.add_generation_prompt,
            extra: &chat.template_kwargs,
            now: std::time::SystemTime::now(),
        })
        .map_err(|error| failed(&error))?;
    if !chat.continue_final_message {
        return Ok(prompt);
    }
    cut_behind_final_message(prompt, &chat.messages).map_err(RequestError::from)
}

/// Leaves the last message open, without what the template puts behind it.
fn cut_behind_final_message(
    mut prompt: String,
    messages: &serde_json::Value,
) -> Result<String, FieldError> {
    let last = messages.as_array().and_then(|messages| messages.last());
    let content = last.and_then(|message| message["content"].as_str()).map(str::trim);
    let refused = |problem: &str| FieldError::new("continue_final_message", problem);
    let content = content
        .filter(|content| !content.is_empty())
        .ok_or_else(|| refused("is true; allowed: only with text in the last message"))?;
    let start = prompt.rfind(content).ok_or_else(|| {
        refused("is true; the chat template changes the last message, so it cannot be continued")
    })?;
    prompt.truncate(start + content.len());
    Ok(prompt)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_final_message_is_left_open() {
        let prompt = "<|u|>sure<|e|><|a|>sure, it<|e|>\n".to_owned();
        let messages = json!([{"content": "sure"}, {"content": " sure, it "}]);
        assert_eq!(
            cut_behind_final_message(prompt.clone(), &messages).unwrap(),
            "<|u|>sure<|e|><|a|>sure, it"
        );
        for last in [json!([]), json!([{"content": ""}]), json!([{"content": "absent"}])] {
            assert!(cut_behind_final_message(prompt.clone(), &last).is_err());
        }
    }
}
