//! The arrival of a request: its core, with the planned parameters as gRPC messages, and its
//! client.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cluster::{CacheIdentity, ModelIdentity, PrefixKeys, Role};
use grammar::Grammar;
use proto::{ids::RequestId, v1};
use router_core::{AnswerCore, AnswerSpec, ArrivedRequest, RouterCore, WaitLimits};

use super::{Answer, End, Router};
use crate::{
    answer::Client,
    scenario::{RequestPlan, VOCABULARY},
};

impl Router {
    /// Begins a request. `is_checked`: the client knows the expected tokens.
    pub(crate) fn request(
        &mut self,
        now: Instant,
        id: usize,
        model: Arc<str>,
        mut plan: RequestPlan,
        is_checked: bool,
    ) {
        let deadline = now + plan.timeout;
        if let Some(stats) = &mut self.stats {
            stats.first_arrival.get_or_insert(now);
        }
        let client = Client::new(&plan, is_checked);
        let flow = plan.flow();
        let admitted = self.core.handle_request(
            now,
            &ArrivedRequest {
                flow: &flow,
                model: &model,
                answers: 1,
                output_tokens_max: plan.max_tokens,
                limits: WaitLimits { wait_max: self.policy.busy_timeout, deadline },
            },
        );
        if let Err(overload) = admitted {
            self.count_end(now, &End::Refused(overload), 0);
            return;
        }
        let prefix = cache_identity(&self.core, &model).map(|identity| {
            let identity = CacheIdentity::of(identity);
            PrefixKeys::new(identity, None, &plan.cache_salt, &plan.prompt)
        });
        let session = plan.session();
        let spec = AnswerSpec {
            request_id: RequestId(id as u128 + 1),
            model: model.clone(),
            adapter: None,
            prompt: std::mem::take(&mut plan.prompt).into(),
            prefix: prefix.into_iter().collect(),
            sampling: wire_sampling(&plan),
            grammar: plan.grammar.as_ref().map(|grammar| Arc::new(wire_grammar(grammar))),
            grammar_version: u32::from(plan.grammar.is_some()),
            cache_salt: plan.cache_salt.as_str().into(),
            session,
            priority: 0,
            vocabulary_size: VOCABULARY,
            deadline,
            is_further: false,
        };
        let core = AnswerCore::start(now, &mut self.core, flow, spec, self.policy);
        self.requests.insert(core.id(), id);
        let answer = Answer {
            plan,
            deadline,
            core,
            client,
            transfer: None,
            moving: None,
            attempts: 0,
            stalled: None,
            arrived_at: now,
            due: None,
            picked_at: None,
            first_emitted_at: None,
            emitted_at: None,
            pause: Duration::ZERO,
            cached_tokens: None,
            has_ended: false,
        };
        self.answers.insert(id, answer);
        self.open.insert(id);
        self.perform(now, id);
        self.follow(now);
    }
}

/// Returns the identity of the nodes that serve the model.
fn cache_identity<'a>(core: &'a RouterCore, model: &str) -> Option<&'a ModelIdentity> {
    let mut records = core.directory().serving(Role::Decode);
    records.find(|record| record.model == model).map(|record| &record.identity)
}

fn wire_sampling(plan: &RequestPlan) -> v1::Sampling {
    let sampling = &plan.sampling;
    v1::Sampling {
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        seed: sampling.seed,
        repetition_penalty: sampling.repetition_penalty,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        stop_token_ids: sampling.stop_token_ids.clone(),
        min_tokens: sampling.min_tokens,
        logprobs: sampling.logprobs,
        pooling: None,
        prompt_logprobs: sampling.prompt_logprobs,
        logit_bias: Vec::new(),
        allowed_token_ids: Vec::new(),
        bad_words: Vec::new(),
        max_tokens: plan.max_tokens,
        ignore_stop_tokens: plan.ignore_stop_tokens,
    }
}

fn wire_grammar(grammar: &Grammar) -> v1::Grammar {
    let kind = match grammar {
        Grammar::Regex(text) => v1::grammar::Kind::Regex(text.clone()),
        Grammar::JsonSchema(text) => v1::grammar::Kind::JsonSchema(text.clone()),
        Grammar::ContextFree(_) | Grammar::ToolCalls(_) | Grammar::AfterReasoning { .. } => {
            unreachable!("no request has them")
        }
    };
    v1::Grammar { kind: Some(kind), thought: None }
}
