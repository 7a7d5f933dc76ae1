//! Chat template rendering and tokenization: short prompts in place, long prompts on a bounded
//! number of blocking threads.

use std::sync::{Arc, OnceLock};

use cluster::{CacheIdentity, PrefixKeys};
use grammar::{Compiler, Grammar, GrammarError};
use proto::{ids::random_bits, v1};
use serde_json::{Map, Value};
use text::{
    ChatTemplate, EncodeError, ModelText, NotPooled, PooledModel, ReasoningFormat, ReasoningStart,
    RenderRequest, SamplingDefaults, SpecialTokens, TEXT_BYTES_MAX, TemplateError, Tokenizer,
    ToolFormat,
};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

use super::{
    error::{FieldError, RequestError},
    options::RequestedGrammar,
};

/// Maximum size of a prompt that is tokenized in place, in bytes: this takes less than 1 ms.
const INLINE_BYTES_MAX: usize = 4096;

/// Maximum bytes of text on all threads. Tokenization takes a hundred times the memory of the text,
/// so this limit keeps tokenization below 512 MiB. The longest valid text fits.
const BYTES_IN_FLIGHT_MAX: usize = TEXT_BYTES_MAX;

/// Maximum number of concurrent grammar checks. A check takes at most a few tenths of a second and
/// 50 MB ([`grammar::limits`]).
const GRAMMAR_CHECKS_MAX: usize = 2;

/// Permits for long texts (threads, and bytes of text) and grammar checks of all models. Grammar
/// checks have permits of their own, so they do not delay prompts.
#[derive(Clone)]
pub(crate) struct TextPermits {
    threads: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    grammar_checks: Arc<Semaphore>,
}

impl TextPermits {
    pub(crate) fn new(threads: usize) -> Self {
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        Self {
            threads: semaphore(threads),
            bytes: semaphore(BYTES_IN_FLIGHT_MAX),
            grammar_checks: semaphore(GRAMMAR_CHECKS_MAX),
        }
    }

    /// Waits in FIFO order for permits for a text of this size. A text beyond the limit takes all
    /// permits.
    async fn enter(&self, bytes: usize) -> Result<[OwnedSemaphorePermit; 2], AcquireError> {
        let bytes = bytes.min(BYTES_IN_FLIGHT_MAX) as u32;
        let bytes = self.bytes.clone().acquire_many_owned(bytes).await?;
        Ok([bytes, self.threads.clone().acquire_owned().await?])
    }

    /// Runs a grammar check on a blocking thread when there is a permit. A check whose caller
    /// disconnects before that is not started.
    async fn check_grammar(
        &self,
        check: impl FnOnce() -> Result<(), RequestError> + Send + 'static,
    ) -> Result<(), RequestError> {
        let permit = self.grammar_checks.clone().acquire_owned().await;
        let permit = permit.map_err(|error| RequestError::internal(&error))?;
        let on_thread = move || {
            // The check itself holds the permit: the check continues when its caller disconnects.
            let _permit = permit;
            check()
        };
        tokio::task::spawn_blocking(on_thread)
            .await
            .map_err(|error| RequestError::internal(&error))?
    }
}

/// Checks whether a model can follow a grammar.
struct GrammarChecker {
    compiler: Compiler,
    /// Whether a token of the model has each byte.
    bytes: [bool; 256],
}

impl GrammarChecker {
    fn new(tokenizer: &Tokenizer) -> Self {
        let mut bytes = [false; 256];
        for id in 0..tokenizer.vocabulary_size() {
            let token = tokenizer.token_bytes(id).unwrap_or_default();
            token.iter().for_each(|byte| bytes[usize::from(*byte)] = true);
        }
        Self { compiler: Compiler::for_bytes(), bytes }
    }

    fn check(&self, grammar: &Grammar) -> Result<(), GrammarError> {
        if let Some(char) = grammar.unwritable(&self.bytes) {
            let reason = format!("the model's vocabulary cannot write {char:?}");
            return Err(GrammarError::Unsupported { reason });
        }
        self.compiler.check(grammar)
    }
}

/// A client's prompt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PromptSource {
    Tokens(Vec<u32>),
    /// A text, with the model's special tokens around it if requested.
    Text {
        text: String,
        add_special_tokens: bool,
    },
    Chat(ChatSource),
    /// Messages of the roles of a reranker's chat template.
    Pair {
        messages: Value,
        bytes: usize,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ChatSource {
    /// Name of the client's field with the conversation, for errors.
    pub field: &'static str,
    pub messages: Value,
    /// List of tool descriptions, or null.
    pub tools: Value,
    pub add_generation_prompt: bool,
    /// Whether the answer continues the last message.
    pub continue_final_message: bool,
    /// Further template variables.
    pub template_kwargs: Map<String, Value>,
    /// Length of the messages, tools and variables as JSON.
    pub bytes: usize,
}

impl PromptSource {
    /// Returns the number of bytes to process.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Tokens(_) => 0,
            Self::Text { text, .. } => text.len(),
            Self::Chat(chat) => chat.bytes,
            Self::Pair { bytes, .. } => *bytes,
        }
    }

    /// Returns the field that an error names.
    pub(crate) fn field(&self) -> &'static str {
        match self {
            Self::Tokens(_) | Self::Text { .. } | Self::Pair { .. } => "prompt",
            Self::Chat(chat) => chat.field,
        }
    }
}

/// Limits on the length of a prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PromptLengths {
    /// Maximum number of tokens. More are an error.
    pub tokens_max: u32,
    /// Number of tokens that are kept of a longer prompt, the last ones. `None`: all.
    pub kept_max: Option<u32>,
}

/// Inputs of the cache keys of a prompt's blocks, besides the tokens.
#[derive(Debug)]
pub(crate) struct CacheKeying {
    /// Cache identities of the nodes.
    pub identities: Vec<CacheIdentity>,
    /// Content hash of the request's adapter.
    pub adapter: Option<u128>,
    /// Salt of tenant and client.
    pub salt: String,
}

/// A prompt's token ids, and the cache keys of its blocks.
#[derive(Debug)]
pub(crate) struct TokenizedPrompt {
    pub tokens: Vec<u32>,
    pub prefix: Vec<PrefixKeys>,
    /// Position where the answer begins.
    pub reasoning_start: ReasoningStart,
}

impl TokenizedPrompt {
    fn new(
        mut tokens: Vec<u32>,
        reasoning_start: ReasoningStart,
        PromptLengths { tokens_max, kept_max }: PromptLengths,
        keying: &CacheKeying,
    ) -> Self {
        if let Some(kept_max) = kept_max {
            tokens.drain(..tokens.len().saturating_sub(kept_max as usize));
        }
        // A longer prompt is rejected, so it needs no keys.
        let is_taken = tokens.len() as u64 <= u64::from(tokens_max);
        let identities = if is_taken { &keying.identities[..] } else { &[] };
        let keys = |identity: &CacheIdentity| {
            PrefixKeys::new(*identity, keying.adapter, &keying.salt, &tokens)
        };
        Self { prefix: identities.iter().map(keys).collect(), tokens, reasoning_start }
    }
}

/// Tokenizer, template and grammar checker of a model, with the shared permits.
pub(crate) struct TextWorkers {
    text: Arc<ModelText>,
    permits: TextPermits,
    /// Grammar checker, created at first use.
    grammars: Arc<OnceLock<GrammarChecker>>,
}

impl TextWorkers {
    /// Creates the workers of a model. All models share the permits of `permits`.
    pub(crate) fn new(text: Arc<ModelText>, permits: TextPermits) -> Self {
        Self { text, permits, grammars: Arc::default() }
    }

    pub(crate) fn tokenizer(&self) -> &Arc<Tokenizer> {
        self.text.tokenizer()
    }

    /// Returns how the model makes vectors or scores, or why it makes none.
    pub(crate) fn pooled(&self) -> Result<&PooledModel, &NotPooled> {
        self.text.pooled()
    }

    /// Returns whether the model generates text.
    pub(crate) fn generates(&self) -> bool {
        self.text.generates()
    }

    pub(crate) fn sampling_defaults(&self) -> &SamplingDefaults {
        self.text.sampling_defaults()
    }

    /// Returns the model's tool call format, if known.
    pub(crate) fn tool_format(&self) -> Option<&'static ToolFormat> {
        self.text.tool_format()
    }

    /// Returns the model's format of reasoning, if any.
    pub(crate) fn reasoning_format(&self) -> Option<&'static ReasoningFormat> {
        self.text.reasoning_format()
    }

    /// Returns whether a message of the assistant may have several tool calls.
    pub(crate) fn takes_parallel_calls(&self) -> bool {
        self.text.takes_parallel_calls()
    }

    /// Returns only the prompt's token ids. Rejects a conversation of far more bytes than its JSON
    /// that renders to more than `rendered_max` bytes.
    pub(crate) async fn tokens(
        &self,
        source: PromptSource,
        rendered_max: usize,
    ) -> Result<Vec<u32>, RequestError> {
        let keying =
            Arc::new(CacheKeying { identities: Vec::new(), adapter: None, salt: String::new() });
        let lengths = PromptLengths { tokens_max: u32::MAX, kept_max: None };
        Ok(self.prompt_within(source, lengths, rendered_max, keying).await?.tokens)
    }

    /// Rejects a grammar that no node could compile, and names its field.
    pub(crate) async fn check_grammar(&self, asked: &RequestedGrammar) -> Result<(), RequestError> {
        let (asked, grammars, text) = (asked.clone(), self.grammars.clone(), self.text.clone());
        let check = move || {
            let checker = grammars.get_or_init(|| GrammarChecker::new(text.tokenizer()));
            // An error in the inner grammar names the field of the inner grammar.
            for asked in [asked.alone.as_deref(), Some(&asked)].into_iter().flatten() {
                checker.check(&asked.grammar).map_err(|error| asked.refused(&error))?;
            }
            Ok(())
        };
        self.permits.check_grammar(check).await
    }

    /// Returns the text of these ids; special tokens appear by name.
    pub(crate) async fn text_of(&self, tokens: Vec<u32>) -> Result<String, RequestError> {
        self.work(tokens.len() * size_of::<u32>(), move |text| {
            Ok(text.tokenizer().decode(&tokens, false))
        })
        .await
    }

    /// Returns the prompt's token ids and cache keys. Rejects a text without tokenizing it if its
    /// length implies too many tokens.
    pub(crate) async fn prompt(
        &self,
        source: PromptSource,
        lengths: PromptLengths,
        keying: Arc<CacheKeying>,
    ) -> Result<TokenizedPrompt, RequestError> {
        self.prompt_within(source, lengths, usize::MAX, keying).await
    }

    /// Returns the token sequences of texts that answers must not have: each text as it begins an
    /// answer, and as it follows a space. The texts are short enough to be tokenized in place.
    pub(crate) fn bad_words(&self, words: &[String]) -> Result<Vec<v1::TokenIds>, FieldError> {
        let tokenizer = self.text.tokenizer();
        let encode = |text: &str| {
            tokenizer.encode(text, SpecialTokens::Parse).map_err(|error| {
                FieldError::new("bad_words", format!("cannot be tokenized: {error}"))
            })
        };
        let mut sequences = Vec::new();
        for word in words {
            let word = word.trim_start();
            let (first, inner) = (encode(word)?, encode(&format!(" {word}"))?);
            // A sequence that ends with another one is found by its end.
            let is_new = !inner.ends_with(&first);
            sequences.push(v1::TokenIds { ids: first });
            sequences.extend(is_new.then_some(v1::TokenIds { ids: inner }));
        }
        sequences.retain(|sequence| !sequence.ids.is_empty());
        Ok(sequences)
    }

    async fn prompt_within(
        &self,
        mut source: PromptSource,
        lengths: PromptLengths,
        rendered_max: usize,
        keying: Arc<CacheKeying>,
    ) -> Result<TokenizedPrompt, RequestError> {
        let mut bytes = source.bytes();
        // A conversation that renders to more bytes than there are permits for is rendered again
        // with enough permits. The rendered text is dropped meanwhile, because the permits bound
        // memory.
        loop {
            // Templates add tags and a system message, so a usual conversation renders to more
            // bytes than its JSON has.
            let (keying, bytes_max) = (keying.clone(), bytes + bytes / 2 + 1024);
            let work = move |text: &ModelText| {
                Ok::<_, RequestError>(match encode(text, source, lengths, bytes_max)? {
                    Encoded::Tokens { tokens, reasoning_start } => {
                        Ok(TokenizedPrompt::new(tokens, reasoning_start, lengths, &keying))
                    }
                    Encoded::Longer { chat, bytes } => Err((chat, bytes)),
                })
            };
            match self.work(bytes, work).await? {
                Ok(prompt) => return Ok(prompt),
                Err((_, longer)) if longer > rendered_max => {
                    let problem =
                        format!("renders to {longer} bytes; allowed: at most {rendered_max}");
                    return Err(FieldError::new("messages", problem).into());
                }
                Err((chat, longer)) => (source, bytes) = (PromptSource::Chat(*chat), longer),
            }
        }
    }

    /// Runs `work` in place for a short text, otherwise on a blocking thread once a permit is free.
    async fn work<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce(&ModelText) -> Result<T, RequestError> + Send + 'static,
    ) -> Result<T, RequestError> {
        if bytes <= INLINE_BYTES_MAX {
            return work(&self.text);
        }
        let permits =
            self.permits.enter(bytes).await.map_err(|error| RequestError::internal(&error))?;
        let text = self.text.clone();
        let on_thread = move || {
            // The closure holds the permit: it runs to its end even if the caller disconnects.
            let _permits = permits;
            work(&text)
        };
        tokio::task::spawn_blocking(on_thread)
            .await
            .map_err(|error| RequestError::internal(&error))?
    }
}

/// Result of [`encode`].
enum Encoded {
    Tokens {
        tokens: Vec<u32>,
        reasoning_start: ReasoningStart,
    },
    /// The conversation renders to more bytes than allowed and is not encoded.
    Longer {
        chat: Box<ChatSource>,
        bytes: usize,
    },
}

/// Encodes a prompt. A conversation is only encoded if it renders to at most `bytes_max` bytes.
fn encode(
    text: &ModelText,
    source: PromptSource,
    PromptLengths { tokens_max, kept_max }: PromptLengths,
    bytes_max: usize,
) -> Result<Encoded, RequestError> {
    let field = source.field();
    let tokenizer = text.tokenizer();
    let encoded = |result: Result<Vec<u32>, EncodeError>| {
        result.map_err(|error| FieldError::new(field, format!("cannot be tokenized: {error}")))
    };
    let check_length = |prompt: &str| {
        let at_least = tokenizer.tokens_at_least(prompt);
        if kept_max.is_none() && at_least as u64 > u64::from(tokens_max) {
            let problem = format!("has at least {at_least} tokens; allowed: at most {tokens_max}");
            return Err(FieldError::new(field, problem));
        }
        Ok(())
    };
    let mut reasoning_start = ReasoningStart::Undecided;
    let tokens = match source {
        PromptSource::Tokens(tokens) => tokens,
        PromptSource::Text { text, add_special_tokens } => {
            check_length(&text)?;
            let special = SpecialTokens::Parse;
            encoded(match add_special_tokens {
                true => tokenizer.encode_prompt(&text, special),
                false => tokenizer.encode(&text, special),
            })?
        }
        PromptSource::Chat(mut chat) => {
            let template = text.chat_template().map_err(template_failed)?;
            if !chat.tools.is_null() && text.tool_format().is_none() {
                let problem = "are given; this model's chat template does not show them to it, or \
                               asks for calls in an unknown format; allowed: only with tool_choice none";
                return Err(FieldError::new("tools", problem).into());
            }
            let literal = (!text.parses_special_tokens()).then_some(&**tokenizer);
            let prompt = render(template, &chat, literal)?;
            check_length(&prompt)?;
            if let Some(format) = text.reasoning_format() {
                reasoning_start = match chat.continue_final_message {
                    true => last_text(&mut chat.messages)
                        .and_then(|text| text.as_str())
                        .map_or(ReasoningStart::Answer, |text| format.start_within(text)),
                    false => format.start_after(&prompt),
                };
            }
            if prompt.len() > bytes_max {
                return Ok(Encoded::Longer { chat: Box::new(chat), bytes: prompt.len() });
            }
            encoded(match literal {
                Some(tokenizer) => tokenizer.encode_rendered(&prompt),
                None => tokenizer.encode(&prompt, SpecialTokens::Parse),
            })?
        }
        PromptSource::Pair { messages, .. } => {
            let template = text.chat_template().map_err(template_failed)?;
            let literal = (!text.parses_special_tokens()).then_some(&**tokenizer);
            let rendered = template.render_pair(&messages, literal);
            let prompt = rendered.map_err(|error| template_failed(&error))?;
            check_length(&prompt)?;
            encoded(match literal {
                Some(tokenizer) => tokenizer.encode_rendered(&prompt),
                None => tokenizer.encode(&prompt, SpecialTokens::Parse),
            })?
        }
    };
    Ok(Encoded::Tokens { tokens, reasoning_start })
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

fn render(
    template: &ChatTemplate,
    chat: &ChatSource,
    literal: Option<&Tokenizer>,
) -> Result<String, RequestError> {
    let render = |messages: &Value| {
        let rendered = template.render(&RenderRequest {
            messages,
            tools: &chat.tools,
            add_generation_prompt: chat.add_generation_prompt,
            extra: &chat.template_kwargs,
            now: std::time::SystemTime::now(),
            literal,
        });
        rendered.map_err(|error| template_failed(&error))
    };
    if !chat.continue_final_message {
        return render(&chat.messages);
    }
    // A marker shows the message's end, because the template may repeat the content elsewhere.
    let mark = format!("{:032x}", random_bits()?);
    let mut prompt = render(&with_mark_at_the_end(&chat.messages, &mark)?)?;
    let end = prompt.rfind(&mark).ok_or_else(|| {
        let problem = "is true; the chat template changes the end of the last message, so it \
                       cannot be continued";
        FieldError::new("continue_final_message", problem)
    })?;
    prompt.truncate(end);
    Ok(prompt)
}

/// Returns the messages with `mark` appended to the last message's text.
fn with_mark_at_the_end(messages: &Value, mark: &str) -> Result<Value, FieldError> {
    let mut messages = messages.clone();
    match last_text(&mut messages) {
        Some(Value::String(text)) if !text.trim().is_empty() => text.push_str(mark),
        _ => {
            let problem = "is true; allowed: only with text in the last message";
            return Err(FieldError::new("continue_final_message", problem));
        }
    }
    Ok(messages)
}

/// Returns the text of the last message, or the last part of the text.
fn last_text(messages: &mut Value) -> Option<&mut Value> {
    let last = messages.as_array_mut().and_then(|messages| messages.last_mut());
    let content = match last.and_then(|message| message.get_mut("content")) {
        Some(Value::Array(parts)) => parts.last_mut(),
        other => other,
    };
    match content {
        Some(Value::Object(part)) => part.get_mut("text"),
        other => other,
    }
}

/// Variables that the router or the model sets. A client's value could bypass the checks of the
/// request.
const RESERVED: [&str; 15] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "strftime_now",
    "raise_exception",
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
];

/// Rejects variables of the router or the model in `field`.
pub(crate) fn check_variables(
    field: &str,
    variables: &Map<String, Value>,
) -> Result<(), FieldError> {
    match RESERVED.iter().find(|&&name| variables.contains_key(name)) {
        Some(name) => Err(FieldError::new(
            format!("{field}.{name}"),
            "is set by the router; allowed: only the template's own variables",
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        sync::atomic::{AtomicBool, Ordering},
    };

    use futures_util::poll;
    use serde_json::json;
    use text::ModelTextOptions;

    use super::*;

    const TEMPLATE: &str = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n\
                            {% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";

    #[tokio::test]
    async fn concurrent_tokenization_is_bounded_in_threads_and_bytes() {
        let mebibytes = |count: usize| count << 20;
        let permits = TextPermits::new(2);
        let first = permits.enter(mebibytes(3)).await.unwrap();
        let mut second = pin!(permits.enter(mebibytes(2)));
        assert!(poll!(&mut second).is_pending(), "no permits are free for its bytes");
        drop(first);
        let second = second.await.unwrap();
        let third = permits.enter(mebibytes(1)).await.unwrap();
        let mut fourth = pin!(permits.enter(1));
        assert!(poll!(&mut fourth).is_pending(), "both threads are busy");
        drop((second, third));
        drop(fourth.await.unwrap());
        // A text beyond the limit takes all permits and does not wait forever.
        let whole = permits.enter(usize::MAX).await.unwrap();
        assert!(poll!(pin!(permits.enter(1))).is_pending());
        drop(whole);
    }

    #[tokio::test]
    async fn grammar_checks_do_not_delay_prompts_and_do_not_start_without_their_caller() {
        let permits = TextPermits::new(1);
        let checks = permits.grammar_checks.clone();
        let all = checks.acquire_many_owned(GRAMMAR_CHECKS_MAX as u32).await.unwrap();
        drop(permits.enter(1 << 20).await.unwrap());
        let is_started = Arc::new(AtomicBool::new(false));
        let started = is_started.clone();
        let mut check = Box::pin(permits.check_grammar(move || {
            started.store(true, Ordering::Relaxed);
            Ok(())
        }));
        assert!(poll!(&mut check).is_pending());
        drop(check);
        drop(all);
        // Every permit is free, so the check would have run.
        let _prompts = permits.enter(1 << 20).await.unwrap();
        for _ in 0..GRAMMAR_CHECKS_MAX {
            permits.check_grammar(|| Ok(())).await.unwrap();
        }
        assert!(!is_started.load(Ordering::Relaxed));
    }

    fn smollm2(options: ModelTextOptions) -> Arc<ModelText> {
        let path = std::env::var("BATON_TEST_MODEL").unwrap_or_else(|_| {
            let folder = env!("CARGO_MANIFEST_DIR");
            format!("{folder}/../../models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf")
        });
        Arc::new(ModelText::open_with(path, options).unwrap())
    }

    /// With `special_tokens_in_content = "parse"` nothing is marked, so U+FDD0 is ordinary text.
    #[tokio::test]
    async fn mark_in_a_message_is_text_when_special_tokens_are_parsed() {
        let text = smollm2(ModelTextOptions {
            chat_template: Some("{{ messages[0].content }}<|im_end|>".to_owned()),
            parse_special_tokens: true,
            ..Default::default()
        });
        let content = "a\u{FDD0}b";
        let source = PromptSource::Chat(ChatSource {
            field: "messages",
            messages: json!([{"role": "user", "content": content}]),
            tools: Value::Null,
            add_generation_prompt: false,
            continue_final_message: false,
            template_kwargs: Map::new(),
            bytes: content.len(),
        });
        let rendered = format!("{content}<|im_end|>");
        let expected = text.tokenizer().encode(&rendered, SpecialTokens::Parse).unwrap();
        let workers = TextWorkers::new(text, TextPermits::new(1));
        assert_eq!(workers.tokens(source, usize::MAX).await.unwrap(), expected);
    }

    /// A few kilobytes of deeply nested JSON can render to megabytes.
    #[tokio::test]
    async fn short_conversation_with_a_long_prompt_waits_for_permits() {
        let options = ModelTextOptions {
            chat_template: Some("{{ nested|tojson(indent=4) }}".to_owned()),
            ..Default::default()
        };
        let text = smollm2(options);
        let mut nested = json!(vec![1; 200]);
        for _ in 0..100 {
            nested = json!([nested]);
        }
        let bytes = nested.to_string().len();
        assert!(bytes < INLINE_BYTES_MAX);
        let source = PromptSource::Chat(ChatSource {
            field: "messages",
            messages: json!([{"role": "user", "content": ""}]),
            tools: Value::Null,
            add_generation_prompt: false,
            continue_final_message: false,
            template_kwargs: Map::from_iter([("nested".to_owned(), nested)]),
            bytes,
        });
        let permits = TextPermits::new(1);
        let all = permits.enter(usize::MAX).await.unwrap();
        let workers = TextWorkers::new(text, permits);
        let rejected = workers.tokens(source.clone(), 8192);
        let mut tokens = pin!(workers.tokens(source, usize::MAX));
        assert!(poll!(&mut tokens).is_pending(), "no permits are free for its bytes");
        drop(all);
        assert!(tokens.await.unwrap().len() > 200);
        assert!(rejected.await.unwrap_err().to_string().contains("at most 8192"));
    }

    fn continued(template: &str, content: Value) -> Result<String, RequestError> {
        let template = ChatTemplate::new(template, Default::default()).unwrap();
        let chat = ChatSource {
            field: "messages",
            messages: json!([
                {"role": "user", "content": "sure"},
                {"role": "assistant", "content": content},
            ]),
            tools: Value::Null,
            add_generation_prompt: false,
            continue_final_message: true,
            template_kwargs: Default::default(),
            bytes: 0,
        };
        render(&template, &chat, None)
    }

    #[test]
    fn the_final_message_is_left_open() {
        // The template repeats a part of the content after the message.
        for content in ["sure, it", "<", "|", "end", "<|end|>", "a ", "ü"] {
            assert_eq!(
                continued(TEMPLATE, json!(content)).unwrap(),
                format!("<|user|>sure<|end|>\n<|assistant|>{content}")
            );
        }
        // Text in parts is the same text.
        for content in [
            json!([{"type": "text", "text": "sure"}, {"type": "text", "text": "it"}]),
            json!(["sure", "it"]),
        ] {
            let prompt = "<|user|>sure<|end|>\n<|assistant|>sure\nit";
            assert_eq!(continued(TEMPLATE, content).unwrap(), prompt);
        }
    }

    #[test]
    fn a_final_message_without_an_end_of_its_own_is_refused() {
        let refused = |template, content| match continued(template, content) {
            Err(RequestError::Field(error)) => error.field == "continue_final_message",
            other => panic!("{other:?}"),
        };
        assert!(refused(TEMPLATE, json!("")) && refused(TEMPLATE, json!(null)));
        assert!(refused(TEMPLATE, json!([])));
        assert!(refused(TEMPLATE, json!(["sure", {"type": "text", "text": " "}])));
        assert!(refused("{{ messages[0].content }}", json!("sure")));
        assert!(refused("{{ messages[1].content[:4] }}", json!("sure")));
    }
}
