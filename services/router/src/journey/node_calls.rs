//! The two calls of an attempt, and their streams.

use std::{future::Future, pin::Pin};

use bytes::Bytes;
use proto::v1::{Attempt, DecodeEvent, DecodeRequest, PrefillEvent, PrefillRequest};
use telemetry::propagation;
use tonic::{Request, Response, Status, Streaming};
use tracing::Span;

use super::prepare::{AnswerSpec, RequestPlan};
use crate::{
    nodes::{Assigned, peer},
    request::ids::TransferId,
};

type Opening<E> = Pin<Box<dyn Future<Output = Result<Response<Streaming<E>>, Status>> + Send>>;

/// A server stream of a node from the call on: opening it and reading it are one wait. Dropping it
/// cancels the call.
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

    /// The next event; `None` when the node ended the stream. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Result<Option<E>, Status> {
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

/// The stream's next event; never, when there is no stream.
pub async fn next_of<E: Send + 'static>(
    events: &mut Option<NodeStream<E>>,
) -> Result<Option<E>, Status> {
    match events {
        Some(events) => events.next().await,
        None => std::future::pending().await,
    }
}

/// What both nodes of an attempt are told alike.
pub struct AttemptCalls<'a> {
    pub plan: &'a RequestPlan,
    pub spec: &'a AnswerSpec,
    pub emitted: &'a [u32],
    pub transfer_id: TransferId,
    pub span: &'a Span,
}

impl AttemptCalls<'_> {
    pub fn decode(&self, decode: &Assigned, prefill: Option<&Assigned>) -> NodeStream<DecodeEvent> {
        let attempt = Some(self.attempt_at(decode));
        let request = self
            .traced(DecodeRequest { attempt, prefill: prefill.map(|node| peer(node.record())) });
        let mut client = decode.client();
        NodeStream::open(async move { client.decode(request).await })
    }

    pub fn prefill(&self, prefill: &Assigned, decode: &Assigned) -> NodeStream<PrefillEvent> {
        let attempt = Some(self.attempt_at(prefill));
        let request = self.traced(PrefillRequest { attempt, decode: Some(peer(decode.record())) });
        let mut client = prefill.client();
        NodeStream::open(async move { client.prefill(request).await })
    }

    /// The attempt as this node is told it: the prompt and everything shown.
    fn attempt_at(&self, node: &Assigned) -> Attempt {
        Attempt {
            request_id: self.plan.request_id.to_bytes(),
            transfer_id: Bytes::copy_from_slice(&self.transfer_id.to_bytes()),
            tokens: [&self.spec.prompt, self.emitted].concat(),
            prompt_len: self.spec.prompt.len() as u32,
            sampling: Some(self.spec.sampling.clone()),
            // 0 would mean that there is no time at all.
            remaining_ms: self.plan.deadline.remaining_ms().max(1),
            cache_salt: self.plan.cache_salt.clone(),
            node_epoch: node.epoch().to_bytes().to_vec().into(),
            weight_version: node.record().identity.weight_version,
            grammar: self.plan.grammar.clone(),
        }
    }

    fn traced<M>(&self, message: M) -> Request<M> {
        let mut request = Request::new(message);
        propagation::inject_grpc(self.span, request.metadata_mut());
        request
    }
}
