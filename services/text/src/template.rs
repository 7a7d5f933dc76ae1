//! Chat templates: render messages to the text format that a model was trained on.
//!
//! Templates are Jinja programs written for Python. They run here in the environment of Hugging
//! Face's `transformers`: its white-space rules, `raise_exception`, `strftime_now`, Python's
//! methods on strings, mappings and lists, and `tojson` as Python writes JSON. A template comes
//! with the model and is not trusted: its steps and its output are bounded. The memory of a single
//! expression is not bounded: a template that doubles a string in a loop can exhaust memory.

mod clock;
mod integers;
mod json;
mod messages;
mod methods;
mod python;
mod source;

use std::{
    borrow::Cow,
    collections::BTreeMap,
    io,
    sync::OnceLock,
    time::{SystemTime, UNIX_EPOCH},
};

use minijinja::{
    Environment, Error, ErrorKind, Value,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde},
};

use self::messages::{ContentForms, ThinkingForm};
use crate::{source::TemplateSources, tokenizer::Tokenizer};

/// Maximum steps of one rendering. A thousand messages need about 50,000.
pub const TEMPLATE_FUEL: u64 = 10_000_000;
/// Maximum bytes of a rendered prompt: more than is ever encoded.
pub const RENDERED_BYTES_MAX: usize = crate::tokenizer::TEXT_BYTES_MAX;
/// Maximum nesting of macro calls and loops.
const RECURSION_MAX: usize = 64;

const DEFAULT: &str = "chat_template";
const TOOL_USE: &str = "chat_template.tool_use";

/// Error of rendering a prompt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    #[error("this model has no chat template; use plain completions")]
    Missing,
    #[error("the chat template {name} does not compile: {reason}")]
    Syntax { name: String, reason: String },
    /// The request's messages do not have the form that templates expect. The client's fault.
    #[error("messages[{index}]{field}: {problem}")]
    BadMessage { index: usize, field: String, problem: String },
    #[error("messages must be a list, not {found}")]
    NoList { found: &'static str },
    #[error("messages is empty; a conversation has at least one message")]
    NoMessages,
    /// The template itself rejects the conversation (`raise_exception`). The client's fault.
    #[error("the chat template refuses these messages: {reason}")]
    Refused { reason: String },
    #[error("the chat template takes more than {limit} steps; it may not end")]
    OutOfFuel { limit: u64 },
    #[error("the rendered prompt has more than {limit} bytes")]
    TooLong { limit: usize },
    /// The template changes a special token that a message spells, so that it cannot stay text. The
    /// client's fault.
    #[error(
        "the chat template does not keep special tokens in messages whole; expected messages without special tokens"
    )]
    TornSpecialToken,
    /// The template renders a plain conversation, but not these inputs. The client's fault.
    #[error("the chat template cannot render these messages, tools or variables: {reason}")]
    NotTaken { reason: String },
    /// Any other error inside the template.
    #[error("the chat template fails: {reason}")]
    Failed { reason: String },
}

impl TemplateError {
    /// Returns true when the messages cause the error, so that another request could succeed with
    /// this template.
    pub fn is_requests_fault(&self) -> bool {
        matches!(
            self,
            Self::BadMessage { .. }
                | Self::NoList { .. }
                | Self::NoMessages
                | Self::Refused { .. }
                | Self::TooLong { .. }
                | Self::TornSpecialToken
                | Self::NotTaken { .. }
        )
    }
}

/// Inputs of a rendering.
#[derive(Clone, Debug)]
pub struct RenderRequest<'a> {
    /// List of objects with `role` and, as in OpenAI's API, `content`: text, a list of text parts,
    /// or nothing. Further fields (`tool_calls`, `name`) are passed to the template unchanged.
    pub messages: &'a serde_json::Value,
    /// List of tool descriptions, or null.
    pub tools: &'a serde_json::Value,
    /// Whether the prompt ends with the beginning of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Further variables (`chat_template_kwargs`), which override the variables above.
    pub extra: &'a serde_json::Map<String, serde_json::Value>,
    /// Time that `strftime_now` uses; the time zone is UTC.
    pub now: SystemTime,
    /// Tokenizer whose special tokens stay text where messages, tools or `extra` spell them: then
    /// the prompt is for [`Tokenizer::encode_rendered`]. `None`: a client's text becomes special
    /// tokens.
    pub literal: Option<&'a Tokenizer>,
}

/// Compiled chat template of a model. Immutable; share it.
pub struct ChatTemplate {
    environment: Environment<'static>,
    has_tool_use: bool,
    takes_tools: bool,
    /// Roles that the template does not name, each with the role that its messages get.
    substitutes: Vec<(&'static str, &'static str)>,
    /// `None` where no template reads the reasoning of an earlier answer as `thinking`.
    thinking: Option<ThinkingForm>,
    special_tokens: BTreeMap<String, String>,
    /// Whether the template renders a plain conversation; set when a rendering fails.
    works: OnceLock<bool>,
    /// Contents that the templates [`DEFAULT`] and [`TOOL_USE`] render; set when they render first.
    content_forms: [OnceLock<ContentForms>; 2],
}

impl ChatTemplate {
    /// Compiles one template. `special_tokens` are the variables `bos_token`, `eos_token` and the
    /// like.
    ///
    /// # Errors
    /// `Syntax` when the template does not compile.
    pub fn new(
        source: &str,
        special_tokens: BTreeMap<String, String>,
    ) -> Result<Self, TemplateError> {
        Self::from_sources(TemplateSources {
            default: Some(source.to_owned()),
            tool_use: None,
            special_tokens,
        })
    }

    pub(crate) fn from_sources(sources: TemplateSources) -> Result<Self, TemplateError> {
        let default = sources.default.ok_or(TemplateError::Missing)?;
        let has_tool_use = sources.tool_use.is_some();
        let mut environment = environment();
        let templates = [(DEFAULT, Some(default)), (TOOL_USE, sources.tool_use)];
        let substitutes =
            messages::substitutes(templates.iter().filter_map(|(_, source)| source.as_deref()));
        let thinking =
            templates.iter().find_map(|(_, it)| ThinkingForm::of_template(it.as_deref()?));
        for (name, source) in templates {
            let Some(source) = source else { continue };
            environment.add_template_owned(name, source::for_minijinja(&source)).map_err(
                |error| TemplateError::Syntax { name: name.to_owned(), reason: reason_of(&error) },
            )?;
        }
        let takes_tools = has_tool_use
            || environment
                .get_template(DEFAULT)
                .is_ok_and(|template| template.undeclared_variables(false).contains("tools"));
        Ok(Self {
            environment,
            has_tool_use,
            takes_tools,
            substitutes,
            thinking,
            special_tokens: sources.special_tokens,
            works: OnceLock::new(),
            content_forms: Default::default(),
        })
    }

    /// Returns whether the template presents a request's tools to the model.
    pub fn takes_tools(&self) -> bool {
        self.takes_tools
    }

    /// Renders a conversation's prompt as text. Encode it with
    /// [`SpecialTokens::Parse`](crate::SpecialTokens::Parse) and without BOS.
    ///
    /// Costs CPU time in proportion to the conversation; render long ones on a blocking thread.
    pub fn render(&self, request: &RenderRequest<'_>) -> Result<String, TemplateError> {
        match self.render_once(request) {
            Err(TemplateError::Failed { reason }) if self.works() => {
                Err(TemplateError::NotTaken { reason })
            }
            rendered => rendered,
        }
    }

    /// Renders the prompt of a reranker from messages of the roles that its template names. Encode
    /// it as the prompt of [`render`](Self::render).
    pub fn render_pair(
        &self,
        messages: &serde_json::Value,
        literal: Option<&Tokenizer>,
    ) -> Result<String, TemplateError> {
        let spellings = literal.and_then(Tokenizer::spellings);
        let messages = spellings.map_or(Cow::Borrowed(messages), |it| it.marked_value(messages));
        let mut variables = self.variables(&messages, Value::from(()));
        variables.insert("add_generation_prompt", Value::from(true));
        let rendered = self.run(DEFAULT, variables)?;
        match spellings.is_none_or(|it| it.are_whole(&rendered)) {
            true => Ok(rendered),
            false => Err(TemplateError::TornSpecialToken),
        }
    }

    fn works(&self) -> bool {
        *self.works.get_or_init(|| self.check().is_ok())
    }

    /// Renders a plain conversation.
    ///
    /// # Errors
    /// The template's bug. A template may refuse the conversation.
    pub fn check(&self) -> Result<(), TemplateError> {
        let messages = serde_json::json!([{"role": "user", "content": "Hi"}]);
        let plain = RenderRequest {
            messages: &messages,
            tools: &serde_json::Value::Null,
            add_generation_prompt: true,
            extra: &serde_json::Map::new(),
            now: UNIX_EPOCH,
            literal: None,
        };
        match self.render_once(&plain) {
            Err(error) if !error.is_requests_fault() => Err(error),
            _ => Ok(()),
        }
    }

    fn render_once(&self, request: &RenderRequest<'_>) -> Result<String, TemplateError> {
        let spellings = request.literal.and_then(Tokenizer::spellings);
        let marked = |value| spellings.map_or(Cow::Borrowed(value), |it| it.marked_value(value));
        let with_tools = request.tools.as_array().is_some_and(|tools| !tools.is_empty());
        let name = if with_tools && self.has_tool_use { TOOL_USE } else { DEFAULT };
        let forms = &self.content_forms[usize::from(name == TOOL_USE)];
        let forms = forms.get_or_init(|| ContentForms::of(|messages| self.probe(name, messages)));
        let mut normalised = messages::normalise(request.messages, &self.substitutes, forms)?;
        if let Some(form) = self.thinking {
            form.apply(&mut normalised);
        }
        let (messages, tools) = (marked(&normalised), marked(request.tools));
        let tools = if with_tools { Value::from(Serde(&*tools)) } else { Value::from(()) };

        let mut variables = self.variables(&messages, tools);
        variables.insert("add_generation_prompt", Value::from(request.add_generation_prompt));
        let now = request.now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        variables.insert("strftime_now", strftime(now));
        let extra: Vec<_> =
            request.extra.iter().map(|(name, value)| (name, marked(value))).collect();
        for (name, value) in &extra {
            variables.insert(name, Value::from(Serde(&**value)));
        }
        let rendered = self.run(name, variables)?;
        match spellings.is_none_or(|it| it.are_whole(&rendered)) {
            true => Ok(integers::without_marks(rendered)),
            false => Err(TemplateError::TornSpecialToken),
        }
    }

    /// Returns the variables of a rendering that do not depend on the options of a request.
    fn variables<'a>(
        &'a self,
        messages: &'a serde_json::Value,
        tools: Value,
    ) -> BTreeMap<&'a str, Value> {
        let tokens = self.special_tokens.iter();
        let mut variables: BTreeMap<&str, Value> =
            tokens.map(|(token, text)| (token.as_str(), Value::from(text.as_str()))).collect();
        variables.insert("messages", Value::from(Serde(messages)));
        variables.insert("tools", tools);
        variables.insert("documents", Value::from(()));
        variables
    }

    /// Renders messages as they are; returns `None` where the template fails.
    fn probe(&self, name: &str, messages: &serde_json::Value) -> Option<String> {
        let mut variables = self.variables(messages, Value::from(()));
        variables.insert("add_generation_prompt", Value::from(true));
        variables.insert("strftime_now", strftime(0));
        self.run(name, variables).ok()
    }

    fn run(&self, name: &str, variables: BTreeMap<&str, Value>) -> Result<String, TemplateError> {
        let template = self.environment.get_template(name).map_err(|error| failure(&error))?;
        let mut output = BoundedOutput::default();
        let context = Value::from_pairs(variables);
        let rendered = template.render_captured_to(context, &mut output).map(drop);
        match rendered {
            _ if output.overflowed => Err(TemplateError::TooLong { limit: RENDERED_BYTES_MAX }),
            Err(error) => Err(failure(&error)),
            // The template engine writes whole strings only.
            Ok(()) => String::from_utf8(output.bytes)
                .map_err(|error| TemplateError::Failed { reason: error.to_string() }),
        }
    }
}

/// Returns the function `strftime_now` of templates. `now` is in seconds since 1970.
fn strftime(now: u64) -> Value {
    Value::from_function(move |format: &str| {
        clock::format_utc(now, format)
            .map_err(|reason| Error::new(ErrorKind::InvalidOperation, reason))
    })
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("has_tool_use", &self.has_tool_use)
            .field("special_tokens", &self.special_tokens)
            .finish_non_exhaustive()
    }
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("only flags differ from the default"));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_fuel(Some(TEMPLATE_FUEL));
    environment.set_recursion_limit(RECURSION_MAX);
    python::add_to(&mut environment);
    environment.add_filter("tojson", json::tojson);
    environment.add_function("raise_exception", raise_exception);
    environment
}

/// Marks errors that the template raised itself.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct RaisedException(String);

fn raise_exception(message: String, _: Kwargs) -> Result<Value, Error> {
    let error = Error::new(ErrorKind::InvalidOperation, message.clone());
    Err(error.with_source(RaisedException(message)))
}

fn failure(error: &Error) -> TemplateError {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(RaisedException(reason)) = cause.downcast_ref() {
            return TemplateError::Refused { reason: reason.clone() };
        }
        if cause.is::<json::TooLong>() {
            return TemplateError::TooLong { limit: RENDERED_BYTES_MAX };
        }
        source = cause.source();
    }
    match error.kind() {
        ErrorKind::OutOfFuel => TemplateError::OutOfFuel { limit: TEMPLATE_FUEL },
        _ => TemplateError::Failed { reason: reason_of(error) },
    }
}

/// Returns kind, detail and line on one line.
fn reason_of(error: &Error) -> String {
    let detail = error.detail().map(|detail| format!(": {detail}")).unwrap_or_default();
    let line = error.line().map(|line| format!(" (line {line})")).unwrap_or_default();
    format!("{}{detail}{line}", error.kind())
}

/// Writer that accepts [`RENDERED_BYTES_MAX`] bytes and then fails.
#[derive(Default)]
struct BoundedOutput {
    bytes: Vec<u8>,
    overflowed: bool,
}

impl io::Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > RENDERED_BYTES_MAX {
            self.overflowed = true;
            return Err(io::Error::other("the output is full"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
