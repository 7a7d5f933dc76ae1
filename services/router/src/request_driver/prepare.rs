//! Prepares a parsed request: admits it, renders the template, tokenizes, fills in a missing seed.

use std::{sync::Arc, time::Duration};

use cluster::PrefixKeys;
use proto::v1::{Grammar, Sampling};
use text::StopStrings;

use super::answer_text::AnswerTextOptions;
use crate::{
    admission::Admitted,
    front::Front,
    generation::{Deadline, RequestError},
    models::ServedModel,
    record::RequestRecord,
    request::{
        asked_grammar::AskedGrammar,
        cache_salt::{Tenant, salt_for_nodes},
        field_error::FieldError,
        ids::{NoRandomness, RequestId, mint_seed},
        options::{CHOICES_PER_REQUEST_MAX, DefaultLength, ModelLimits, Options, check_prompt},
        text_workers::{CacheKeying, PromptSource, TokenisedPrompt},
    },
};

/// A request whose fields were parsed and checked one by one.
pub struct ParsedRequest {
    pub request_id: RequestId,
    pub tenant: Option<Tenant>,
    pub model: Arc<ServedModel>,
    pub prompts: Vec<PromptSource>,
    /// Answers to each prompt.
    pub choices: u32,
    pub options: Options,
    pub default_length: DefaultLength,
    /// Name of the field that sets the maximum length, for error messages.
    pub max_tokens_name: &'static str,
    pub timeout: Duration,
    /// Whether the answer is detokenized.
    pub with_text: bool,
    /// Special tokens that are detokenized whatever the options say.
    pub shown_tokens: Arc<[u32]>,
}

/// An admitted and tokenized request: the properties that all of its answers share.
pub struct PreparedRequest {
    pub request_id: RequestId,
    pub model: Arc<ServedModel>,
    pub text: AnswerTextOptions,
    /// Grammar that every answer must match.
    pub grammar: Option<Grammar>,
    /// Grammar version that decode nodes must support; 0 for none.
    pub grammar_version: u32,
    pub cache_salt: String,
    pub limits: ModelLimits,
    pub deadline: Deadline,
    /// The request's share of the requests in flight.
    _admitted: Admitted,
}

/// One answer of a prepared request.
pub struct PreparedAnswer {
    pub choice: u32,
    pub prompt: Arc<[u32]>,
    /// Keys under which nodes may have cached the prompt's blocks.
    pub prefix: Arc<[PrefixKeys]>,
    pub sampling: Sampling,
}

/// Admits and tokenizes a request. Returns its answers, ordered by choice.
pub async fn prepare(
    front: &Front,
    parsed: ParsedRequest,
    record: &RequestRecord,
) -> Result<(PreparedRequest, Vec<PreparedAnswer>), RequestError> {
    let deadline = Deadline::after(parsed.timeout);
    let model = parsed.model;
    let answers_max = CHOICES_PER_REQUEST_MAX.min(front.admission.max() as usize);
    let answer_count = parsed.prompts.len().saturating_mul(parsed.choices as usize);
    if answer_count > answers_max {
        let (field, what) = match parsed.prompts.len() {
            1 => ("n", format!("is {}", parsed.choices)),
            prompts => ("prompt", format!("has {prompts} prompts, with n {}", parsed.choices)),
        };
        let problem = format!("{what}; allowed: at most {answers_max} answers to one request");
        return Err(FieldError::new(field, problem).into());
    }
    let mut options = parsed.options.or(model.text.sampling_defaults());
    let stops = StopStrings::new(&options.stop, options.include_stop)
        .map_err(|error| stop_refused(&error))?;
    let admitted = front.admission.admit(answer_count as u32)?;
    let none = RequestError::NoDecodeNode { waited: Duration::ZERO };
    // While no node is up, the limits of the last ones hold, and the request waits for a node in its core.
    let limits = front.nodes.last_limits(&model.name).ok_or(none)?;

    let grammar_version = options.grammar.as_ref().map_or(0, AskedGrammar::version);
    let grammar = match options.grammar.take() {
        Some(asked) => {
            let check = model.text.check_grammar(&asked);
            tokio::time::timeout_at(deadline.at, check)
                .await
                .map_err(|_| RequestError::Deadline { timeout: deadline.timeout })??;
            // Without any node nothing is known, and the request waits for one in its core.
            let newest = front.nodes.grammar_version(&model.name);
            if newest.is_some_and(|newest| newest < grammar_version) {
                return Err(RequestError::NoGrammar { field: asked.field });
            }
            Some(asked.for_nodes())
        }
        None => None,
    };

    let internal = |error: NoRandomness| RequestError::Internal { reason: error.to_string() };
    let seed = mint_seed().map_err(internal)?;
    let tokenizer = model.text.tokenizer();
    let cache_salt =
        salt_for_nodes(parsed.tenant.as_ref(), std::mem::take(&mut options.cache_salt));
    let keying = Arc::new(CacheKeying {
        identities: front.nodes.cache_identities(&model.name),
        salt: cache_salt.clone(),
    });
    let (mut prompt_tokens, mut answers) = (0, Vec::new());
    for source in parsed.prompts {
        let field = source.field();
        let work = model.text.prompt(source, limits.prompt_tokens_max, keying.clone());
        let TokenisedPrompt { tokens, prefix } = tokio::time::timeout_at(deadline.at, work)
            .await
            .map_err(|_| RequestError::Deadline { timeout: deadline.timeout })??;
        check_prompt(field, &tokens, &limits)?;
        let sampling = options.sampling(
            tokens.len() as u32,
            &limits,
            parsed.default_length,
            tokenizer.eos_ids(),
            seed,
            parsed.max_tokens_name,
        )?;
        let (prompt, prefix): (Arc<[u32]>, Arc<[PrefixKeys]>) = (tokens.into(), prefix.into());
        for copy in 0..parsed.choices {
            // Each answer has a seed of its own, whether or not the client named one.
            let seed = sampling.seed.wrapping_add(u64::from(copy));
            answers.push(PreparedAnswer {
                choice: answers.len() as u32,
                prompt: prompt.clone(),
                prefix: prefix.clone(),
                sampling: Sampling { seed, ..sampling.clone() },
            });
        }
        prompt_tokens += prompt.len() as u32;
    }
    record.prepared(answer_count as u32, prompt_tokens);
    let text = AnswerTextOptions {
        tokenizer: tokenizer.clone(),
        stops,
        stop_texts: options.stop.into(),
        skip_special: options.skip_special_tokens.unwrap_or(true),
        with_text: parsed.with_text,
        shown_tokens: parsed.shown_tokens,
    };
    let request_id = parsed.request_id;
    let request = PreparedRequest {
        request_id,
        model,
        text,
        grammar,
        grammar_version,
        cache_salt,
        limits,
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
