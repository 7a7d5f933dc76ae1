//! A server stream of a node from the call on: opening it and reading it are one wait.

use std::{future::Future, pin::Pin};

use tonic::{Response, Status, Streaming};

type Opening<E> = Pin<Box<dyn Future<Output = Result<Response<Streaming<E>>, Status>> + Send>>;

/// Dropping it cancels the call.
pub enum NodeStream<E> {
    Opening(Opening<E>),
    Open(Streaming<E>),
}

impl<E: Send + 'static> NodeStream<E> {
    pub fn open(
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
