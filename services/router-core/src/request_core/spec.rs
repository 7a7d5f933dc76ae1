//! The specification of an answer: content, deadline, and limits on attempts and waits.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cluster::PrefixKeys;
use proto::{
    ids::RequestId,
    v1::{Grammar, Sampling},
};

use crate::fair_queue::SessionIdentity;

/// Client hints about the conversation of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestSession {
    /// Empty if the client names none.
    pub name: Arc<str>,
    /// Time in milliseconds for which nodes keep the KV of the request for the next turn.
    pub keep_ms: Option<u64>,
}

/// Returns the version of [`Sampling`] that nodes must support for these parameters.
pub fn sampling_version(sampling: &Sampling) -> u32 {
    let Sampling { prompt_logprobs, logit_bias, allowed_token_ids, bad_words, .. } = sampling;
    let is_plain = prompt_logprobs.is_none()
        && logit_bias.is_empty()
        && allowed_token_ids.is_empty()
        && bad_words.is_empty();
    u32::from(!is_plain)
}

/// One answer of a request, as nodes receive it.
#[derive(Clone, Debug)]
pub struct AnswerSpec {
    pub request_id: RequestId,
    pub model: Arc<str>,
    /// Content hash of the model's LoRA adapter; `None`: the base model.
    pub adapter: Option<u128>,
    pub prompt: Arc<[u32]>,
    /// Keys under which nodes may have cached the prompt's blocks.
    pub prefix: Arc<[PrefixKeys]>,
    pub sampling: Sampling,
    /// Grammar that the answer must match.
    pub grammar: Option<Arc<Grammar>>,
    /// Grammar version that the decode node must support; 0 for none.
    pub grammar_version: u32,
    pub cache_salt: Arc<str>,
    pub session: RequestSession,
    /// Requests of a lower number start earlier among the waiting requests of the same flow.
    pub priority: i32,
    pub vocabulary_size: u32,
    /// The request fails if it has not finished by this time.
    pub deadline: Instant,
    /// Whether the answer is not the first of its request. The first answer alone decides whether
    /// the request starts within `router.waiting_timeout`. A further answer waits for busy nodes
    /// until the deadline, because its failure would end the first answer too.
    pub is_further: bool,
}

impl AnswerSpec {
    /// Returns the part of the request that identifies its session.
    pub fn session_identity(&self) -> SessionIdentity<'_> {
        SessionIdentity {
            name: &self.session.name,
            cache_salt: &self.cache_salt,
            blocks: self.prefix.first().map_or(&[][..], PrefixKeys::keys),
        }
    }

    pub(super) fn prompt_tokens(&self) -> u32 {
        self.prompt.len() as u32
    }
}

/// Limits on the attempts and waits of a request.
#[derive(Clone, Copy, Debug)]
pub struct RecoveryPolicy {
    /// Maximum number of attempts in a row without a token, the first included. Busy refusals do
    /// not count.
    pub attempts_max: u32,
    /// Maximum time that a request waits while decode nodes are up and none of them takes the
    /// request. An answer that has emitted tokens waits until its deadline.
    pub busy_timeout: Duration,
    /// Maximum time that the nodes of an attempt may be silent.
    pub idle_timeout: Duration,
}

impl From<&config::Router> for RecoveryPolicy {
    fn from(settings: &config::Router) -> Self {
        Self {
            attempts_max: settings.attempts_max,
            busy_timeout: settings.waiting_timeout,
            idle_timeout: settings.idle_timeout,
        }
    }
}

/// A stop condition that the owner found in delivered tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// The last token is a stop token. The decode node ends by itself, and its last event is
    /// awaited.
    Token,
    /// A stop string is complete. Nodes do not detect stop strings, so their calls are dropped.
    Text,
}
