//! Step 1 of the journey: from what was asked to what nodes are told.

use std::{sync::Arc, time::Duration};

use cluster::PrefixKeys;
use proto::v1::{Grammar, Sampling};
use text::StopStrings;

use super::answer::AnswerPlan;
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

/// A request, read and checked field by field.
pub struct Asked {
    pub request_id: RequestId,
    pub tenant: Option<Tenant>,
    pub model: Arc<ServedModel>,
    pub prompts: Vec<PromptSource>,
    /// Answers to each prompt.
    pub choices: u32,
    pub options: Options,
    pub default_length: DefaultLength,
    /// The field that sets the length.
    pub max_tokens_name: &'static str,
    pub timeout: Duration,
    /// Text is made of the tokens.
    pub with_text: bool,
    /// Special tokens that give text whatever the options say.
    pub shown_tokens: Arc<[u32]>,
}

/// What all answers of a request share.
pub struct RequestPlan {
    pub request_id: RequestId,
    pub model: Arc<ServedModel>,
    pub answer: AnswerPlan,
    /// What every answer must match.
    pub grammar: Option<Grammar>,
    /// What nodes must know to hold an answer to it; 0 for none.
    pub grammar_version: u32,
    pub cache_salt: String,
    pub limits: ModelLimits,
    pub deadline: Deadline,
}

/// What one answer has of its own.
pub struct AnswerSpec {
    pub choice: u32,
    pub prompt: Arc<[u32]>,
    /// Under what nodes may have the prompt cached.
    pub prefix: Arc<[PrefixKeys]>,
    pub sampling: Sampling,
}

/// A request that may begin.
pub struct Prepared {
    pub plan: RequestPlan,
    pub answers: Vec<AnswerSpec>,
    /// Of answer `i` it is prompt `i / choices`.
    pub prompts: Vec<Arc<[u32]>>,
    pub admitted: Admitted,
}

/// Checks the request, renders the template, tokenises, fills in a missing seed.
pub async fn prepare(
    front: &Front,
    asked: Asked,
    record: &RequestRecord,
) -> Result<Prepared, RequestError> {
    let deadline = Deadline::after(asked.timeout);
    let model = asked.model;
    let answers_max = CHOICES_PER_REQUEST_MAX.min(front.admission.max() as usize);
    let answer_count = asked.prompts.len().saturating_mul(asked.choices as usize);
    if answer_count > answers_max {
        let (field, what) = match asked.prompts.len() {
            1 => ("n", format!("is {}", asked.choices)),
            prompts => ("prompt", format!("has {prompts} prompts, with n {}", asked.choices)),
        };
        let problem = format!("{what}; allowed: at most {answers_max} answers to one request");
        return Err(FieldError::new(field, problem).into());
    }
    let mut options = asked.options.or(model.text.sampling_defaults());
    let stops = StopStrings::new(&options.stop, options.include_stop)
        .map_err(|error| stop_refused(&error))?;
    let admitted = front.admission.admit(answer_count as u32)?;
    let none = RequestError::NoDecodeNode { waited: Duration::ZERO };
    let limits = front.nodes.serving(&model.name).limits.ok_or(none)?;

    let grammar_version = options.grammar.as_ref().map_or(0, AskedGrammar::version);
    let grammar = match options.grammar.take() {
        Some(asked) => {
            let check = model.text.check_grammar(&asked);
            tokio::time::timeout_at(deadline.at, check)
                .await
                .map_err(|_| RequestError::Deadline { timeout: deadline.timeout })??;
            // Where the last node went while this waited, the attempt waits for another.
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
    let cache_salt = salt_for_nodes(asked.tenant.as_ref(), std::mem::take(&mut options.cache_salt));
    let keying = Arc::new(CacheKeying {
        identities: front.nodes.cache_identities(&model.name),
        salt: cache_salt.clone(),
    });
    let (mut prompts, mut answers) = (Vec::new(), Vec::new());
    for source in asked.prompts {
        let field = source.field();
        let work = model.text.prompt(source, limits.prompt_tokens_max, keying.clone());
        let TokenisedPrompt { tokens, prefix } = tokio::time::timeout_at(deadline.at, work)
            .await
            .map_err(|_| RequestError::Deadline { timeout: deadline.timeout })??;
        check_prompt(field, &tokens, &limits)?;
        let sampling = options.sampling(
            tokens.len() as u32,
            &limits,
            asked.default_length,
            tokenizer.eos_ids(),
            seed,
            asked.max_tokens_name,
        )?;
        let (prompt, prefix): (Arc<[u32]>, Arc<[PrefixKeys]>) = (tokens.into(), prefix.into());
        for copy in 0..asked.choices {
            // Each answer draws its own numbers, whether or not the seed is the client's.
            let seed = sampling.seed.wrapping_add(u64::from(copy));
            answers.push(AnswerSpec {
                choice: answers.len() as u32,
                prompt: prompt.clone(),
                prefix: prefix.clone(),
                sampling: Sampling { seed, ..sampling.clone() },
            });
        }
        prompts.push(prompt);
    }
    let prompt_tokens = prompts.iter().map(|prompt| prompt.len() as u32).sum();
    record.asked(answer_count as u32, prompt_tokens);
    let answer = AnswerPlan {
        tokenizer: tokenizer.clone(),
        stops,
        stop_texts: options.stop.into(),
        skip_special: options.skip_special_tokens.unwrap_or(true),
        with_text: asked.with_text,
        shown_tokens: asked.shown_tokens,
    };
    let request_id = asked.request_id;
    let plan = RequestPlan {
        request_id,
        model,
        answer,
        grammar,
        grammar_version,
        cache_salt,
        limits,
        deadline,
    };
    Ok(Prepared { plan, answers, prompts, admitted })
}

fn stop_refused(error: &text::StopError) -> FieldError {
    // The message begins with the field's name or an element of it.
    let message = error.to_string();
    let problem = message.strip_prefix("stop").unwrap_or(&message).trim_start();
    FieldError::new("stop", problem)
}
