//! The arrival of a request: its core, with the planned parameters as gRPC messages, and its client.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cluster::{CacheIdentity, PrefixKeys};
use grammar::Grammar;
use proto::{ids::RequestId, v1};
use router::{
    fair_queue::Pass,
    request_core::{AnswerSpec, RequestCore},
};

use super::{Answer, Router};
use crate::{
    answer::Client,
    scenario::{RequestPlan, VOCABULARY},
};

impl Router {
    /// Begins a request. `is_checked`: the client knows the expected tokens.
    pub fn request(
        &mut self,
        now: Instant,
        id: usize,
        model: Arc<str>,
        mut plan: RequestPlan,
        is_checked: bool,
    ) {
        let deadline = now + plan.timeout;
        let client = Client::new(&plan, is_checked);
        let prefix = self.nodes.cache_identity(&model).map(|identity| {
            let identity = CacheIdentity::of(identity);
            PrefixKeys::new(identity, &plan.cache_salt, &plan.prompt)
        });
        let session = plan.session();
        let spec = AnswerSpec {
            request_id: RequestId(id as u128 + 1),
            model: model.clone(),
            prompt: std::mem::take(&mut plan.prompt).into(),
            prefix: prefix.into_iter().collect(),
            sampling: wire_sampling(&plan),
            grammar: plan.grammar.as_ref().map(|grammar| Arc::new(wire_grammar(grammar))),
            grammar_version: u32::from(plan.grammar.is_some()),
            cache_salt: plan.cache_salt.as_str().into(),
            session,
            vocabulary_size: VOCABULARY,
            deadline,
        };
        let flow = plan.flow();
        let sessions = self.sessions.entry(model.clone()).or_default();
        let turn = sessions.arrived(now, &flow.name, spec.session_marks());
        let mut core = RequestCore::new(spec, self.policy);
        let is_queued = self.waiting.get(&model).is_some_and(|queue| !queue.is_empty());
        core.start(now, is_queued);
        let answer = Answer {
            plan,
            model,
            deadline,
            core,
            client,
            nodes: None,
            transfer: None,
            attempts: 0,
            flow,
            turn,
            queued: None,
            pass: Pass::default(),
            charge: None,
            stalled: None,
            arrived_at: now,
            due: None,
            picked_at: None,
            first_emitted_at: None,
            emitted_at: None,
            pause: Duration::ZERO,
            cached_tokens: None,
            end: None,
        };
        if let Some(stats) = &mut self.stats {
            stats.first_arrival.get_or_insert(now);
        }
        self.answers.insert(id, answer);
        self.open.insert(id);
        self.perform(now, id);
    }
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
        max_tokens: plan.max_tokens,
        ignore_stop_tokens: plan.ignore_stop_tokens,
    }
}

fn wire_grammar(grammar: &Grammar) -> v1::Grammar {
    let kind = match grammar {
        Grammar::Regex(text) => v1::grammar::Kind::Regex(text.clone()),
        Grammar::JsonSchema(text) => v1::grammar::Kind::JsonSchema(text.clone()),
        Grammar::ToolCalls(_) => unreachable!("no request calls tools"),
    };
    v1::Grammar { kind: Some(kind) }
}
