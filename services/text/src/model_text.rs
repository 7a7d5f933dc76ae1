//! Tokenizer, chat template and sampling defaults of one model.

use std::{path::Path, sync::Arc, time::UNIX_EPOCH};

use serde_json::{Map, Value, json};

use crate::{
    error::LoadError,
    pooled_model::{NotPooled, PooledModel},
    reasoning::{ReasoningChoice, ReasoningFormat},
    sampling_defaults::SamplingDefaults,
    source::TokenizerSource,
    template::{ChatTemplate, RenderRequest, TemplateError},
    tokenizer::Tokenizer,
    tools::ToolFormat,
};

/// A model's tokenizer, chat template and sampling defaults.
#[derive(Debug)]
pub struct ModelText {
    tokenizer: Arc<Tokenizer>,
    chat_template: Result<ChatTemplate, TemplateError>,
    sampling_defaults: SamplingDefaults,
    tool_format: Option<&'static ToolFormat>,
    reasoning_format: Option<&'static ReasoningFormat>,
    takes_parallel_calls: bool,
    parse_special_tokens: bool,
    pooled: Result<PooledModel, NotPooled>,
    generates: bool,
}

/// Replacements for parts of a model's own configuration.
#[derive(Clone, Debug, Default)]
pub struct ModelTextOptions {
    /// Chat template in Jinja.
    pub chat_template: Option<String>,
    /// Format of tool calls; `None` means the format that the chat template requests.
    pub tool_format: Option<&'static ToolFormat>,
    pub reasoning_format: ReasoningChoice,
    /// Whether special tokens in a client's messages become special tokens.
    pub parse_special_tokens: bool,
}

impl ModelText {
    /// Opens a model as [`open_with`](Self::open_with) does, without replacements.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        Self::open_with(path, ModelTextOptions::default())
    }

    /// Reads a `.gguf` file, a folder with one such file, or a Hugging Face folder, without the
    /// weights.
    ///
    /// A chat template that is missing or does not compile is not an error here, because the model
    /// can still complete plain prompts. [`chat_template`](Self::chat_template) returns the error.
    pub fn open_with(path: impl AsRef<Path>, options: ModelTextOptions) -> Result<Self, LoadError> {
        let source = TokenizerSource::read(path.as_ref())?;
        let TokenizerSource { parts, mut templates, sampling_defaults, pooled, generates, origin } =
            source;
        if let Some(template) = options.chat_template {
            (templates.default, templates.tool_use) = (Some(template), None);
        }
        let tokenizer = Tokenizer::new(parts).map_err(|error| origin.locate(error))?;
        let source = templates.tool_use.as_ref().or(templates.default.as_ref());
        let tool_format = options
            .tool_format
            .or_else(|| source.and_then(|source| ToolFormat::of_template(source, &tokenizer)));
        let reasoning_format = match options.reasoning_format {
            ReasoningChoice::Auto => source.and_then(|source| ReasoningFormat::of_template(source)),
            ReasoningChoice::Off => None,
            ReasoningChoice::Format(format) => Some(format),
        };
        let chat_template = ChatTemplate::from_sources(templates);
        let takes_tools = chat_template.as_ref().is_ok_and(ChatTemplate::takes_tools);
        let refuses_parallel_calls =
            takes_tools && chat_template.as_ref().is_ok_and(refuses_parallel_calls);
        Ok(Self {
            tokenizer: Arc::new(tokenizer),
            chat_template,
            sampling_defaults,
            tool_format: tool_format.filter(|_| takes_tools),
            reasoning_format,
            takes_parallel_calls: !refuses_parallel_calls,
            parse_special_tokens: options.parse_special_tokens,
            pooled,
            generates,
        })
    }

    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Returns the chat template.
    ///
    /// # Errors
    /// `Missing` when the model has no template, `Syntax` when it does not compile.
    pub fn chat_template(&self) -> Result<&ChatTemplate, &TemplateError> {
        self.chat_template.as_ref()
    }

    /// Returns the model's format of tool calls; `None` when its template does not present tools or
    /// requests calls in an unknown format.
    pub fn tool_format(&self) -> Option<&'static ToolFormat> {
        self.tool_format
    }

    /// Returns the model's format of reasoning; `None` where its template has no tags of
    /// reasoning.
    pub fn reasoning_format(&self) -> Option<&'static ReasoningFormat> {
        self.reasoning_format
    }

    /// Returns whether a message of the assistant may have several tool calls.
    pub fn takes_parallel_calls(&self) -> bool {
        self.takes_parallel_calls
    }

    /// Returns whether special tokens in a client's messages become special tokens.
    pub fn parses_special_tokens(&self) -> bool {
        self.parse_special_tokens
    }

    /// Returns how the model makes vectors or scores.
    ///
    /// # Errors
    /// The checkpoint's files describe neither, or a form that is not supported.
    pub fn pooled(&self) -> Result<&PooledModel, &NotPooled> {
        self.pooled.as_ref()
    }

    /// Returns whether the model generates text. A base model has no LM head.
    pub fn generates(&self) -> bool {
        self.generates
    }

    /// Returns the defaults for requests that do not set sampling parameters.
    pub fn sampling_defaults(&self) -> &SamplingDefaults {
        &self.sampling_defaults
    }
}

/// Returns whether the template renders a message with one tool call, but refuses two calls or
/// drops the second. A conversation could not continue after an answer with two.
fn refuses_parallel_calls(template: &ChatTemplate) -> bool {
    let name = |index: usize| format!("function{index}");
    let rendered = |count: usize| {
        let id = |index: usize| format!("call{index:05}");
        let calls: Vec<Value> = (0..count)
            .map(|index| {
                let function = json!({"name": name(index), "arguments": {}});
                json!({"id": id(index), "type": "function", "function": function})
            })
            .collect();
        let mut messages = vec![
            json!({"role": "user", "content": "Hi"}),
            json!({"role": "assistant", "content": null, "tool_calls": calls}),
        ];
        messages.extend(
            (0..count)
                .map(|index| json!({"role": "tool", "tool_call_id": id(index), "content": "1"})),
        );
        let request = RenderRequest {
            messages: &Value::Array(messages),
            tools: &json!([{"type": "function", "function": {"name": "f", "description": "F",
                "parameters": {"type": "object", "properties": {}}}}]),
            add_generation_prompt: true,
            extra: &Map::new(),
            now: UNIX_EPOCH,
            literal: None,
        };
        template.render(&request).ok()
    };
    match (rendered(1), rendered(2)) {
        (Some(one), Some(two)) => one.contains(&name(0)) && !two.contains(&name(1)),
        (one, two) => one.is_some() && two.is_none(),
    }
}
