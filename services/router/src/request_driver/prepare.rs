//! Prepares a parsed request: admits it, renders the template, tokenizes, fills in a missing seed.

use std::{sync::Arc, time::Duration};

use proto::ids::{RequestId, random_bits};
use text::StopStrings;
use tokio::time::Instant;

use crate::{
    admission::Admitted,
    front::Front,
    front::ServedModel,
    record::RequestRecord,
    request::{
        asked_grammar::AskedGrammar,
        error::{FieldError, RequestError},
        options::{
            CHOICES_PER_REQUEST_MAX, DefaultLength, Options, Tenant, check_prompt, salt_for_nodes,
        },
        text_workers::{CacheKeying, PromptSource, TokenisedPrompt},
        tools::{CallReading, OfferedTools},
    },
    request_core::AnswerSpec,
};

/// Parsed and checked fields of a request.
pub struct GenerationFields {
    pub prompts: Vec<PromptSource>,
    /// Number of answers to each prompt.
    pub choices: u32,
    pub options: Options,
    pub default_length: DefaultLength,
    /// Name of the field that sets the maximum length, for error messages.
    pub max_tokens_name: &'static str,
    /// Tools that the model may call.
    pub tools: Option<OfferedTools>,
}

/// A parsed request.
pub struct ParsedRequest {
    pub request_id: RequestId,
    pub tenant: Option<Tenant>,
    pub model: Arc<ServedModel>,
    pub fields: GenerationFields,
    pub timeout: Duration,
    /// Whether the answer is detokenized.
    pub with_text: bool,
}

/// An admitted request: the properties that all of its answers share.
pub struct PreparedRequest {
    pub model: Arc<ServedModel>,
    pub stops: StopStrings,
    /// The strings of `stops`.
    pub stop_texts: Arc<[String]>,
    pub skip_special: bool,
    /// Whether the answers are detokenized. Without text no stop string is found.
    pub with_text: bool,
    /// Settings for parsing tool calls; `None` without tools.
    pub calls: Option<CallReading>,
    pub deadline: Deadline,
    /// The request's share of the requests in flight.
    _admitted: Admitted,
}

/// The deadline of a request, and its time-out for error messages.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    pub at: Instant,
    pub timeout: Duration,
}

impl Deadline {
    pub fn after(timeout: Duration) -> Self {
        Self { at: Instant::now() + timeout, timeout }
    }

    /// Returns the output of `work`, or the error that the deadline has passed.
    pub async fn limit<T>(self, work: impl Future<Output = T>) -> Result<T, RequestError> {
        let late = RequestError::Deadline { timeout: self.timeout };
        tokio::time::timeout_at(self.at, work).await.map_err(|_| late)
    }
}

/// Admits and tokenizes a request. Returns its answers, ordered by choice.
pub async fn prepare(
    front: &Front,
    parsed: ParsedRequest,
    record: &RequestRecord,
) -> Result<(PreparedRequest, Vec<AnswerSpec>), RequestError> {
    let deadline = Deadline::after(parsed.timeout);
    let model = parsed.model;
    let fields = parsed.fields;
    let answers_max = CHOICES_PER_REQUEST_MAX.min(front.admission.max() as usize);
    let answer_count = fields.prompts.len().saturating_mul(fields.choices as usize);
    if answer_count > answers_max {
        let (field, what) = match fields.prompts.len() {
            1 => ("n", format!("is {}", fields.choices)),
            prompts => ("prompt", format!("has {prompts} prompts, with n {}", fields.choices)),
        };
        let problem = format!("{what}; allowed: at most {answers_max} answers to one request");
        return Err(FieldError::new(field, problem).into());
    }
    let mut options = fields.options.or(model.text.sampling_defaults());
    let mut calls = None;
    if let (Some(tools), Some(format)) = (&fields.tools, model.text.tool_format()) {
        options.grammar = tools.grammar(format, options.grammar.take())?;
        calls = Some(CallReading::new(tools, format, parsed.request_id));
    }
    let stops = StopStrings::new(&options.stop, options.include_stop)
        .map_err(|error| stop_refused(&error))?;
    let admitted = front.admission.admit(answer_count as u32)?;
    let none = RequestError::NoDecodeNode { waited: Duration::ZERO };
    // While no node is up, the limits of the last ones hold, and the request waits for a node in its core.
    let limits = front.nodes.last_limits(&model.name).ok_or(none)?;

    let grammar_version = options.grammar.as_ref().map_or(0, AskedGrammar::version);
    let grammar = match options.grammar.take() {
        Some(asked) => {
            deadline.limit(model.text.check_grammar(&asked)).await??;
            // Without any node nothing is known, and the request waits for one in its core.
            let newest = front.nodes.grammar_version(&model.name);
            if newest.is_some_and(|newest| newest < grammar_version) {
                return Err(RequestError::NoGrammar { field: asked.field });
            }
            Some(Arc::new(asked.for_nodes()))
        }
        None => None,
    };

    let seed = random_bits()? as u64;
    let tokenizer = model.text.tokenizer();
    let cache_salt =
        salt_for_nodes(parsed.tenant.as_ref(), std::mem::take(&mut options.cache_salt));
    let keying = Arc::new(CacheKeying {
        identities: front.nodes.cache_identities(&model.name),
        salt: cache_salt.clone(),
    });
    let cache_salt: Arc<str> = cache_salt.into();
    let (mut prompt_tokens, mut answers) = (0, Vec::new());
    for source in fields.prompts {
        let field = source.field();
        let work = model.text.prompt(source, limits.prompt_tokens_max, keying.clone());
        let TokenisedPrompt { tokens, prefix } = deadline.limit(work).await??;
        check_prompt(field, &tokens, &limits)?;
        let sampling = options.sampling(
            tokens.len() as u32,
            &limits,
            fields.default_length,
            tokenizer.eos_ids(),
            seed,
            fields.max_tokens_name,
        )?;
        prompt_tokens += tokens.len() as u32;
        let answer = AnswerSpec {
            request_id: parsed.request_id,
            model: model.name.clone(),
            prompt: tokens.into(),
            prefix: prefix.into(),
            sampling,
            grammar: grammar.clone(),
            grammar_version,
            cache_salt: cache_salt.clone(),
            vocabulary_size: limits.vocabulary_size,
            deadline: deadline.at.into_std(),
        };
        for copy in 0..fields.choices {
            let mut answer = answer.clone();
            // Each answer has a seed of its own, whether or not the client named one.
            answer.sampling.seed = answer.sampling.seed.wrapping_add(u64::from(copy));
            answers.push(answer);
        }
    }
    record.prepared(answer_count as u32, prompt_tokens);
    let request = PreparedRequest {
        model,
        stops,
        stop_texts: options.stop.into(),
        skip_special: options.skip_special_tokens.unwrap_or(true),
        with_text: parsed.with_text,
        calls,
        deadline,
        _admitted: admitted,
    };
    Ok((request, answers))
}

fn stop_refused(error: &text::StopError) -> FieldError {
    // The message begins with the name of the field or of one of its elements.
    let message = error.to_string();
    let problem = message.strip_prefix("stop").unwrap_or(&message).trim_start();
    FieldError::new("stop", problem)
}
