//! Converts the core's replies to messages of `node.proto`.

use engine::event::FinishReason;
use kernels::sampling::{SampledToken, TokenLogprobs};
use kv_transfer::{
    api::TransferStats,
    control::{logprobs_to_wire, token_to_wire},
};
use proto::v1::{self, decode_event, prefill_event};
use weight_transfer::WeightVersion;

use crate::node_core::{AttemptEnd, AttemptEvent, Reply};

/// Converts a reply to a `Prefill` call; `None`: the reply has no message.
pub fn prefill_event(reply: Reply) -> Option<v1::PrefillEvent> {
    let mut stages = None;
    let event = match reply {
        Reply::Event(AttemptEvent::Tokens {
            first_index,
            mut tokens,
            cached_tokens,
            prompt_logprobs,
            weight_version,
            finish,
            stages: times,
        }) => {
            stages = times;
            prefill_event::Event::Token(v1::PrefillToken {
                first_index,
                token: tokens.pop().map(|token| v1::Token {
                    prompt: prompt_logprobs.as_deref().map(prompt),
                    ..labelled(&token, weight_version)
                }),
                finish: finish.map(|reason| finish_reason(reason).into()),
                cached_tokens,
            })
        }
        // Only decode nodes reserve.
        Reply::Event(AttemptEvent::Reserved { .. }) | Reply::Accepted | Reply::Rejected(_) => {
            return None;
        }
        Reply::Ended(AttemptEnd::Delivered(stats)) => {
            prefill_event::Event::Delivered(v1::Delivered {
                bytes: stats.bytes,
                chunks: stats.chunks,
                transfer_us: micros(&stats),
            })
        }
        Reply::Ended(AttemptEnd::Failed { kind, message }) => {
            prefill_event::Event::Failure(v1::Failure { kind: kind.into(), message })
        }
        // The message of token 0 had the finish reason.
        Reply::Ended(AttemptEnd::Complete | AttemptEnd::Finished { .. }) => return None,
    };
    Some(v1::PrefillEvent { event: Some(event), stages })
}

/// Converts a reply to a `Decode` call; `None`: the reply has no message.
pub fn decode_event(reply: Reply) -> Option<v1::DecodeEvent> {
    let mut stages = None;
    let event = match reply {
        Reply::Event(AttemptEvent::Reserved { cached_tokens, local_prefill }) => {
            decode_event::Event::Reserved(v1::Reserved { cached_tokens, local_prefill })
        }
        Reply::Event(AttemptEvent::Tokens {
            first_index,
            tokens,
            prompt_logprobs,
            weight_version,
            stages: times,
            ..
        }) => {
            stages = times;
            let mut tokens: Vec<_> =
                tokens.iter().map(|token| labelled(token, weight_version)).collect();
            if let (Some(first), Some(logprobs)) = (tokens.first_mut(), prompt_logprobs) {
                first.prompt = Some(prompt(&logprobs));
            }
            decode_event::Event::Tokens(v1::DecodeTokens { first_index, tokens })
        }
        Reply::Ended(AttemptEnd::Finished { reason, received }) => {
            decode_event::Event::Finished(v1::DecodeFinished {
                reason: finish_reason(reason).into(),
                received_bytes: received.bytes,
                transfer_us: micros(&received),
            })
        }
        Reply::Ended(AttemptEnd::Failed { kind, message }) => {
            decode_event::Event::Failure(v1::Failure { kind: kind.into(), message })
        }
        // Only prefill nodes have these ends.
        Reply::Ended(AttemptEnd::Complete | AttemptEnd::Delivered(_))
        | Reply::Accepted
        | Reply::Rejected(_) => return None,
    };
    Some(v1::DecodeEvent { event: Some(event), stages })
}

/// Names the weights that made the token, unless they are those from the start of the node.
fn labelled(token: &SampledToken, weight_version: u64) -> v1::Token {
    let is_loaded = weight_version == WeightVersion::LOADED.0;
    v1::Token { weight_version: (!is_loaded).then_some(weight_version), ..token_to_wire(token) }
}

fn prompt(logprobs: &[TokenLogprobs]) -> v1::PromptLogprobs {
    v1::PromptLogprobs { tokens: logprobs.iter().map(logprobs_to_wire).collect() }
}

fn finish_reason(reason: FinishReason) -> v1::FinishReason {
    match reason {
        FinishReason::Stop => v1::FinishReason::Stop,
        FinishReason::Length => v1::FinishReason::Length,
        FinishReason::Abort => v1::FinishReason::Abort,
    }
}

fn micros(stats: &TransferStats) -> u64 {
    u64::try_from(stats.elapsed.as_micros()).unwrap_or(u64::MAX)
}
