//! A request body whose bytes count against the bound on all bodies.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use axum::body::{Body, Bytes};
use hyper::body::{Frame, SizeHint};
use tokio::sync::OwnedSemaphorePermit;
use tonic::Status;

use super::{arrived::Arrived, status::status};
use crate::{admission::BodyRoom, request::error::RequestError};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Holds its room until dropped: tonic drops the body once the message is decoded.
pub struct BoundedBody {
    body: Body,
    room: BodyRoom,
    held: Option<OwnedSemaphorePermit>,
    /// Record of the request, notified when the body breaks off.
    arrived: Option<Arrived>,
}

impl BoundedBody {
    pub fn new(body: Body, room: BodyRoom, arrived: Option<Arrived>) -> Self {
        Self { body, room, held: None, arrived }
    }

    fn hold(&mut self, bytes: usize) -> Result<(), Status> {
        let more = self.room.take(bytes).map_err(|full| status(RequestError::from(full)))?;
        match &mut self.held {
            Some(held) => held.merge(more),
            None => self.held = Some(more),
        }
        Ok(())
    }
}

impl hyper::body::Body for BoundedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = match ready!(Pin::new(&mut self.body).poll_frame(context)) {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => {
                let error = error.into_inner();
                // A status error is the router's own: the message was late.
                if let Some(arrived) = &self.arrived
                    && !error.is::<Status>()
                {
                    arrived.set_broke_off();
                }
                return Poll::Ready(Some(Err(error)));
            }
            None => return Poll::Ready(None),
        };
        let held = self.hold(frame.data_ref().map_or(0, Bytes::len));
        Poll::Ready(Some(held.map(|()| frame).map_err(BoxError::from)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
