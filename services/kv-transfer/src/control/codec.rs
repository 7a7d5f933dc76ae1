//! Converts between protobuf messages and [`Body`]. All fields from a peer are validated here.

use bytes::Bytes;
use kernels::{
    BlockId,
    sampling::{SampledToken, TokenLogprobs},
};
use proto::v1::{self, control_message as wire};

use super::{Body, Chunk, Done, Hello, HelloOk, InvalidMessage, Reserve};
use crate::api::{Identity, TransferId};

/// Longest node id, endpoint or method name, in bytes.
const NAME_BYTES_MAX: usize = 256;
/// Longest reason, in bytes. Longer reasons are truncated when sent.
const REASON_BYTES_MAX: usize = 1024;
/// Longest trace context, in bytes; version 00 has 55.
const TRACEPARENT_BYTES_MAX: usize = 128;
/// Maximum number of transports or integrity methods in one HELLO.
const METHODS_MAX: usize = 16;
/// Maximum number of log-probabilities of a token: more than the API allows a client to request.
const TOP_LOGPROBS_MAX: usize = 64;

type Checked<T> = Result<T, InvalidMessage>;

fn malformed<T>(field: &'static str) -> Checked<T> {
    Err(InvalidMessage::Malformed { field })
}

fn bounded(text: String, bytes_max: usize, field: &'static str) -> Checked<String> {
    if text.len() > bytes_max { malformed(field) } else { Ok(text) }
}

pub(super) fn name(text: String, field: &'static str) -> Checked<String> {
    if text.is_empty() { malformed(field) } else { bounded(text, NAME_BYTES_MAX, field) }
}

pub(super) fn traceparent(text: String) -> Checked<String> {
    bounded(text, TRACEPARENT_BYTES_MAX, "traceparent")
}

/// Returns the trace context, or an empty text if the peer would reject the message because of it.
pub(super) fn traceparent_to_wire(traceparent: &str) -> String {
    if traceparent.len() > TRACEPARENT_BYTES_MAX { String::new() } else { traceparent.to_owned() }
}

fn methods(names: Vec<String>, field: &'static str) -> Checked<Vec<String>> {
    if names.len() > METHODS_MAX {
        return malformed(field);
    }
    names.into_iter().map(|method| name(method, field)).collect()
}

/// Truncates at a character boundary.
fn truncate(text: &str, bytes_max: usize) -> String {
    text[..text.floor_char_boundary(bytes_max.min(text.len()))].to_owned()
}

fn bits(bytes: &Bytes, field: &'static str) -> Checked<u128> {
    proto::ids::bits(bytes).ok_or(InvalidMessage::Malformed { field })
}

fn bits_to_wire(bits: u128) -> Bytes {
    Bytes::copy_from_slice(&bits.to_be_bytes())
}

fn transfer(bytes: &Bytes) -> Checked<TransferId> {
    bits(bytes, "transfer_id").map(TransferId)
}

fn transfer_to_wire(transfer: &TransferId) -> Bytes {
    bits_to_wire(transfer.0)
}

/// Fails if the fingerprint does not have 16 bytes or a name is too long.
pub fn identity_from_wire(identity: v1::ModelIdentity) -> Result<Identity, InvalidMessage> {
    Ok(Identity {
        model_fingerprint: bits(&identity.model_fingerprint, "model_fingerprint")?,
        weight_version: identity.weight_version,
        kv_layout: bounded(identity.kv_layout, NAME_BYTES_MAX, "kv_layout")?,
        block_size: identity.block_size,
        dtype: bounded(identity.dtype, NAME_BYTES_MAX, "dtype")?,
        tp: identity.tp,
        protocol_min: identity.protocol_min,
        protocol_max: identity.protocol_max,
    })
}

fn identity(identity: Option<v1::ModelIdentity>) -> Checked<Identity> {
    identity_from_wire(identity.ok_or(InvalidMessage::Malformed { field: "identity" })?)
}

pub fn token_to_wire(token: &SampledToken) -> v1::Token {
    v1::Token {
        id: token.id,
        logprobs: token.logprobs.as_ref().map(logprobs_to_wire),
        weight_version: None,
        pooled: token.pooled.as_deref().map(<[f32]>::to_vec).unwrap_or_default(),
        prompt: None,
    }
}

pub fn logprobs_to_wire(logprobs: &TokenLogprobs) -> v1::TokenLogprobs {
    v1::TokenLogprobs {
        chosen: logprobs.chosen,
        top: logprobs.top.iter().map(|&(id, logprob)| v1::TopLogprob { id, logprob }).collect(),
        rank: logprobs.rank,
    }
}

fn token(token: v1::Token) -> Checked<SampledToken> {
    let logprobs = match token.logprobs {
        Some(logprobs) if logprobs.top.len() > TOP_LOGPROBS_MAX => return malformed("logprobs"),
        Some(logprobs) => Some(TokenLogprobs {
            chosen: logprobs.chosen,
            top: logprobs.top.iter().map(|top| (top.id, top.logprob)).collect(),
            rank: logprobs.rank,
        }),
        None => None,
    };
    Ok(SampledToken { id: token.id, logprobs, pooled: None })
}

pub(super) fn body_to_wire(body: &Body) -> wire::Body {
    match body {
        Body::Hello(hello) => wire::Body::Hello(v1::Hello {
            identity: Some((&hello.identity).into()),
            control_endpoint: hello.control_endpoint.clone(),
            data_endpoint: hello.data_endpoint.clone(),
            transports: hello.transports.clone(),
            integrity: hello.integrity.clone(),
            session: hello.session,
            in_advance: hello.in_advance,
        }),
        Body::HelloOk(ok) => wire::Body::HelloOk(v1::HelloOk {
            identity: Some((&ok.identity).into()),
            data_endpoint: ok.data_endpoint.clone(),
            transport: ok.transport.clone(),
            integrity: ok.integrity.clone(),
            session: ok.session,
            transports: ok.transports.clone(),
        }),
        Body::Reject { reason, identity } => wire::Body::Reject(v1::Reject {
            reason: truncate(reason, REASON_BYTES_MAX),
            identity: Some(identity.into()),
        }),
        Body::Reserve(reserve) => wire::Body::Reserve(v1::Reserve {
            transfer_id: transfer_to_wire(&reserve.transfer),
            model_fingerprint: bits_to_wire(reserve.model_fingerprint),
            weight_version: reserve.weight_version,
            prompt_hash: bits_to_wire(reserve.prompt_hash),
            first_block: reserve.first_block,
            blocks: reserve.blocks.iter().map(|block| block.0).collect(),
        }),
        Body::Chunk(chunk) => wire::Body::Chunk(v1::Chunk {
            transfer_id: transfer_to_wire(&chunk.transfer),
            chunk: chunk.chunk,
            first_block: chunk.first_block,
            block_count: chunk.block_count,
            bytes: chunk.bytes,
        }),
        Body::ClearToSend { transfer, chunk } => wire::Body::ClearToSend(v1::ClearToSend {
            transfer_id: transfer_to_wire(transfer),
            chunk: *chunk,
        }),
        Body::Done(done) => wire::Body::Done(v1::Done {
            transfer_id: transfer_to_wire(&done.transfer),
            chunk_count: done.chunk_count,
            first_index: done.first_index,
            token: Some(token_to_wire(&done.token)),
            integrity: done.integrity.clone(),
            model_fingerprint: bits_to_wire(done.model_fingerprint),
            weight_version: done.weight_version,
        }),
        Body::Ack { transfer } => {
            wire::Body::Ack(v1::Ack { transfer_id: transfer_to_wire(transfer) })
        }
        Body::Abort { transfer, cause, reason } => wire::Body::Abort(v1::Abort {
            transfer_id: transfer_to_wire(transfer),
            reason: truncate(reason, REASON_BYTES_MAX),
            cause: (*cause).into(),
        }),
        Body::AbortAck { transfer } => {
            wire::Body::AbortAck(v1::AbortAck { transfer_id: transfer_to_wire(transfer) })
        }
        Body::Heartbeat { transfers, awaited } => wire::Body::Heartbeat(v1::Heartbeat {
            transfer_ids: transfers.iter().map(transfer_to_wire).collect(),
            awaited_ids: awaited.iter().map(transfer_to_wire).collect(),
        }),
    }
}

pub(super) fn body_from_wire(body: wire::Body) -> Checked<Body> {
    Ok(match body {
        wire::Body::Hello(hello) => Body::Hello(Hello {
            identity: identity(hello.identity)?,
            control_endpoint: name(hello.control_endpoint, "control_endpoint")?,
            data_endpoint: name(hello.data_endpoint, "data_endpoint")?,
            transports: methods(hello.transports, "transports")?,
            integrity: methods(hello.integrity, "integrity")?,
            session: hello.session,
            in_advance: hello.in_advance,
        }),
        wire::Body::HelloOk(ok) => Body::HelloOk(HelloOk {
            identity: identity(ok.identity)?,
            data_endpoint: name(ok.data_endpoint, "data_endpoint")?,
            transport: name(ok.transport, "transport")?,
            integrity: name(ok.integrity, "integrity")?,
            session: ok.session,
            transports: methods(ok.transports, "transports")?,
        }),
        wire::Body::Reject(reject) => Body::Reject {
            reason: bounded(reject.reason, REASON_BYTES_MAX, "reason")?,
            identity: identity(reject.identity)?,
        },
        wire::Body::Reserve(reserve) => Body::Reserve(Reserve {
            transfer: transfer(&reserve.transfer_id)?,
            model_fingerprint: bits(&reserve.model_fingerprint, "model_fingerprint")?,
            weight_version: reserve.weight_version,
            prompt_hash: bits(&reserve.prompt_hash, "prompt_hash")?,
            first_block: reserve.first_block,
            blocks: reserve.blocks.into_iter().map(BlockId).collect(),
        }),
        wire::Body::Chunk(chunk) => Body::Chunk(Chunk {
            transfer: transfer(&chunk.transfer_id)?,
            chunk: chunk.chunk,
            first_block: chunk.first_block,
            block_count: chunk.block_count,
            bytes: chunk.bytes,
        }),
        wire::Body::ClearToSend(clear) => {
            Body::ClearToSend { transfer: transfer(&clear.transfer_id)?, chunk: clear.chunk }
        }
        wire::Body::Done(done) => Body::Done(Done {
            transfer: transfer(&done.transfer_id)?,
            chunk_count: done.chunk_count,
            first_index: done.first_index,
            token: token(done.token.ok_or(InvalidMessage::Malformed { field: "token" })?)?,
            integrity: done.integrity,
            model_fingerprint: bits(&done.model_fingerprint, "model_fingerprint")?,
            weight_version: done.weight_version,
        }),
        wire::Body::Ack(ack) => Body::Ack { transfer: transfer(&ack.transfer_id)? },
        wire::Body::Abort(abort) => Body::Abort {
            transfer: transfer(&abort.transfer_id)?,
            cause: abort.cause(),
            reason: bounded(abort.reason, REASON_BYTES_MAX, "reason")?,
        },
        wire::Body::AbortAck(ack) => Body::AbortAck { transfer: transfer(&ack.transfer_id)? },
        wire::Body::Heartbeat(heartbeat) => Body::Heartbeat {
            transfers: heartbeat.transfer_ids.iter().map(transfer).collect::<Checked<_>>()?,
            awaited: heartbeat.awaited_ids.iter().map(transfer).collect::<Checked<_>>()?,
        },
    })
}
