//! Tokenizer, chat template and sampling defaults of one model.

use std::{path::Path, sync::Arc};

use crate::{
    error::LoadError,
    sampling_defaults::SamplingDefaults,
    source::Source,
    template::{ChatTemplate, TemplateError},
    tokenizer::Tokenizer,
    tools::ToolFormat,
};

/// A model's tokenizer, chat template and sampling defaults.
#[derive(Debug)]
pub struct ModelText {
    tokenizer: Arc<Tokenizer>,
    chat_template: Result<ChatTemplate, TemplateError>,
    sampling_defaults: SamplingDefaults,
    tool_format: Option<ToolFormat>,
    parse_special_tokens: bool,
}

/// Replacements for parts of a model's own configuration.
#[derive(Clone, Debug, Default)]
pub struct ModelTextOptions {
    /// Chat template in Jinja.
    pub chat_template: Option<String>,
    /// Format of tool calls; `None` means the format that the chat template requests.
    pub tool_format: Option<ToolFormat>,
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
    /// A chat template that is missing or does not compile is not an error here, because the model can
    /// still complete plain prompts. [`chat_template`](Self::chat_template) returns the error.
    pub fn open_with(path: impl AsRef<Path>, options: ModelTextOptions) -> Result<Self, LoadError> {
        let source = Source::read(path.as_ref())?;
        let Source { parts, mut templates, sampling_defaults, origin } = source;
        if let Some(template) = options.chat_template {
            (templates.default, templates.tool_use) = (Some(template), None);
        }
        let tokenizer = Tokenizer::new(parts).map_err(|error| origin.locate(error))?;
        let source = templates.tool_use.as_ref().or(templates.default.as_ref());
        let tool_format = options
            .tool_format
            .or_else(|| source.and_then(|source| ToolFormat::of_template(source, &tokenizer)));
        let chat_template = ChatTemplate::from_sources(templates);
        let takes_tools = chat_template.as_ref().is_ok_and(ChatTemplate::takes_tools);
        Ok(Self {
            tokenizer: Arc::new(tokenizer),
            chat_template,
            sampling_defaults,
            tool_format: tool_format.filter(|_| takes_tools),
            parse_special_tokens: options.parse_special_tokens,
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
    pub fn tool_format(&self) -> Option<ToolFormat> {
        self.tool_format
    }

    /// Returns whether special tokens in a client's messages become special tokens.
    pub fn parses_special_tokens(&self) -> bool {
        self.parse_special_tokens
    }

    /// Returns the defaults for requests that do not set sampling parameters.
    pub fn sampling_defaults(&self) -> &SamplingDefaults {
        &self.sampling_defaults
    }
}
