//! Converts the core's stream items to messages of `node.proto`.

use engine::event::FinishReason;
use kernels::sampling::SampledToken;
use kv_transfer::api::TransferStats;
use proto::v1::{self, decode_event, prefill_event};

use crate::node_core::{AttemptEnd, AttemptEvent};
pub use crate::stream::StreamItem;

/// Converts an item of a `Prefill` stream; `None`: the stream ends without a message.
pub fn prefill_event(item: StreamItem) -> Option<v1::PrefillEvent> {
    let event = match item {
        StreamItem::Event(AttemptEvent::Tokens {
            first_index,
            mut tokens,
            cached_tokens,
            finish,
        }) => prefill_event::Event::Token(v1::PrefillToken {
            first_index,
            token: tokens.pop().map(token),
            finish: finish.map(|reason| finish_reason(reason).into()),
            cached_tokens,
        }),
        // Only decode nodes reserve.
        StreamItem::Event(AttemptEvent::Reserved { .. }) => return None,
        StreamItem::End(AttemptEnd::Delivered(stats)) => {
            prefill_event::Event::Delivered(v1::Delivered {
                bytes: stats.bytes,
                chunks: stats.chunks,
                transfer_us: micros(&stats),
            })
        }
        StreamItem::End(AttemptEnd::Failed { kind, message }) => {
            prefill_event::Event::Failure(v1::Failure { kind: kind.into(), message })
        }
        // The message of token 0 had the finish reason.
        StreamItem::End(AttemptEnd::Complete | AttemptEnd::Finished { .. }) => return None,
    };
    Some(v1::PrefillEvent { event: Some(event) })
}

/// Converts an item of a `Decode` stream; `None`: the stream ends without a message.
pub fn decode_event(item: StreamItem) -> Option<v1::DecodeEvent> {
    let event = match item {
        StreamItem::Event(AttemptEvent::Reserved { cached_tokens, alone }) => {
            decode_event::Event::Reserved(v1::Reserved { cached_tokens, alone })
        }
        StreamItem::Event(AttemptEvent::Tokens { first_index, tokens, .. }) => {
            let tokens = tokens.into_iter().map(token).collect();
            decode_event::Event::Tokens(v1::DecodeTokens { first_index, tokens })
        }
        StreamItem::End(AttemptEnd::Finished { reason, received }) => {
            decode_event::Event::Finished(v1::DecodeFinished {
                reason: finish_reason(reason).into(),
                received_bytes: received.bytes,
                transfer_us: micros(&received),
            })
        }
        StreamItem::End(AttemptEnd::Failed { kind, message }) => {
            decode_event::Event::Failure(v1::Failure { kind: kind.into(), message })
        }
        // Only prefill nodes have these ends.
        StreamItem::End(AttemptEnd::Complete | AttemptEnd::Delivered(_)) => return None,
    };
    Some(v1::DecodeEvent { event: Some(event) })
}

fn token(token: SampledToken) -> v1::Token {
    let logprobs = token.logprobs.map(|logprobs| v1::TokenLogprobs {
        chosen: logprobs.chosen,
        top: logprobs.top.into_iter().map(|(id, logprob)| v1::TopLogprob { id, logprob }).collect(),
    });
    v1::Token { id: token.id, logprobs }
}

fn finish_reason(reason: FinishReason) -> v1::FinishReason {
    match reason {
        FinishReason::Stop => v1::FinishReason::Stop,
        FinishReason::Length => v1::FinishReason::Length,
    }
}

fn micros(stats: &TransferStats) -> u64 {
    u64::try_from(stats.elapsed.as_micros()).unwrap_or(u64::MAX)
}
