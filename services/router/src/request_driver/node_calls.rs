//! The Decode and Prefill calls of an attempt, and their streams.

use std::{future::Future, pin::Pin};

use bytes::Bytes;
use proto::v1::{Attempt, DecodeEvent, DecodeRequest, PrefillEvent, PrefillRequest};
use telemetry::propagation;
use tonic::{Request, Response, Status, Streaming};
use tracing::Span;

use super::prepare::{PreparedAnswer, PreparedRequest};
use crate::{
    nodes::{Assigned, peer},
    request::ids::TransferId,
};

type Opening<E> = Pin<Box<dyn Future<Output = Result<Response<Streaming<E>>, Status>> + Send>>;

/// A server stream of a node, from the call on: opening and reading the stream are one wait. Dropping the
/// stream cancels the call.
pub enum NodeStream<E> {
    Opening(Opening<E>),
    Open(Streaming<E>),
}

impl<E: Send + 'static> NodeStream<E> {
    fn open(
        call: impl Future<Output = Result<Response<Streaming<E>>, Status>> + Send + 'static,
    ) -> Self {
        Self::Opening(Box::pin(call))
    }

    /// Returns the next event; `None` when the node ended the stream. Cancel-safe.
    async fn next(&mut self) -> Result<Option<E>, Status> {
        if let Self::Opening(call) = self {
            let response = call.await?;
            *self = Self::Open(response.into_inner());
        }
        match self {
            Self::Open(events) => events.message().await,
            Self::Opening(_) => Err(Status::internal("the stream is open by now")),
        }
    }
}

/// Returns the stream's next event; blocks forever without a stream.
pub async fn next_of<E: Send + 'static>(
    stream: Option<&mut NodeStream<E>>,
) -> Result<Option<E>, Status> {
    match stream {
        Some(stream) => stream.next().await,
        None => std::future::pending().await,
    }
}

/// Calls `Decode` of this node. `prefill`: the node that sends the KV.
pub fn decode(
    decode: &Assigned,
    prefill: Option<&Assigned>,
    attempt: Attempt,
    span: &Span,
) -> NodeStream<DecodeEvent> {
    let prefill = prefill.map(|node| peer(node.record()));
    let request = traced(span, DecodeRequest { attempt: Some(attempt), prefill });
    let mut client = decode.client();
    NodeStream::open(async move { client.decode(request).await })
}

/// Calls `Prefill` of this node. `decode`: the node that receives the KV.
pub fn prefill(
    prefill: &Assigned,
    decode: &Assigned,
    attempt: Attempt,
    span: &Span,
) -> NodeStream<PrefillEvent> {
    let decode = Some(peer(decode.record()));
    let request = traced(span, PrefillRequest { attempt: Some(attempt), decode });
    let mut client = prefill.client();
    NodeStream::open(async move { client.prefill(request).await })
}

/// Returns the attempt as this node receives it: the prompt and all emitted tokens.
pub fn attempt_for(
    node: &Assigned,
    transfer_id: TransferId,
    request: &PreparedRequest,
    answer: &PreparedAnswer,
    emitted: &[u32],
) -> Attempt {
    Attempt {
        request_id: request.request_id.to_bytes(),
        transfer_id: Bytes::copy_from_slice(&transfer_id.to_bytes()),
        tokens: [&answer.prompt, emitted].concat(),
        prompt_len: answer.prompt.len() as u32,
        sampling: Some(answer.sampling.clone()),
        // 0 would mean that no time is left.
        remaining_ms: request.deadline.remaining_ms().max(1),
        cache_salt: request.cache_salt.clone(),
        node_epoch: Bytes::copy_from_slice(&node.record().epoch.to_bytes()),
        weight_version: node.record().identity.weight_version,
        grammar: request.grammar.clone(),
    }
}

fn traced<M>(span: &Span, message: M) -> Request<M> {
    let mut request = Request::new(message);
    propagation::inject_grpc(span, request.metadata_mut());
    request
}
