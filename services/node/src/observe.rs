//! The `Observe` streams: bounded queues from the engine thread to routers.
//!
//! [`NodeCore`](crate::node_core::NodeCore) makes the events. The engine thread never waits for an
//! observer: an observer whose queue is full is ended, and its router observes again from a fresh
//! snapshot.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures_util::Stream;
use proto::v1;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tonic::Status;

use crate::node_core::ObserverId;

/// Maximum number of concurrent `Observe` calls.
pub(crate) const OBSERVERS_MAX: usize = 32;
/// Maximum number of queued events: more than ten seconds of deltas.
const EVENTS_MAX: usize = 256;

type Item = Result<v1::ObserveEvent, Status>;

/// The engine thread's end of one observer.
#[derive(Debug)]
pub(crate) struct ObserverSender {
    events: mpsc::Sender<Item>,
    /// Reserved slot of the queue for the error that ends the stream.
    end: mpsc::OwnedPermit<Item>,
}

/// The router's end. Always ends with an error.
#[derive(Debug)]
pub(crate) struct ObserveStream {
    events: mpsc::Receiver<Item>,
    has_ended: bool,
    _permit: OwnedSemaphorePermit,
}

/// Returns both ends of one observer.
pub(crate) fn observer(permit: OwnedSemaphorePermit) -> (ObserverSender, ObserveStream) {
    let (events, received) = mpsc::channel(EVENTS_MAX + 1);
    let end = events.clone().try_reserve_owned().expect("the queue is empty");
    let stream = ObserveStream { events: received, has_ended: false, _permit: permit };
    (ObserverSender { events, end }, stream)
}

/// Returns the permits for observers.
pub(crate) fn permits() -> Arc<tokio::sync::Semaphore> {
    Arc::new(tokio::sync::Semaphore::new(OBSERVERS_MAX))
}

impl Stream for ObserveStream {
    type Item = Item;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Item>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        // Without an error the engine thread has ended.
        let item = ready!(self.events.poll_recv(context))
            .unwrap_or_else(|| Err(Status::unavailable("the node stopped")));
        self.has_ended = item.is_err();
        Poll::Ready(Some(item))
    }
}

/// The engine thread's ends of all observers.
#[derive(Debug, Default)]
pub(crate) struct ObserverSenders {
    senders: HashMap<ObserverId, ObserverSender>,
    next: u64,
}

impl ObserverSenders {
    pub(crate) fn add(&mut self, sender: ObserverSender) -> ObserverId {
        let id = ObserverId(self.next);
        self.next += 1;
        self.senders.insert(id, sender);
        id
    }

    /// Removes the observers whose stream was dropped.
    pub(crate) fn take_closed(&mut self) -> Vec<ObserverId> {
        self.senders.extract_if(|_, sender| sender.events.is_closed()).map(|(id, _)| id).collect()
    }

    /// Sends an event to an observer. Returns false and ends the observer if its queue is full or
    /// its stream was dropped.
    pub(crate) fn send(&mut self, id: ObserverId, event: v1::ObserveEvent) -> bool {
        let Some(sender) = self.senders.get(&id) else { return false };
        let is_sent = sender.events.try_send(Ok(event)).is_ok();
        if !is_sent {
            let lags = "this observer fell behind; observe again from a fresh snapshot";
            self.end(id, Status::aborted(lags));
        }
        is_sent
    }

    /// Ends the observer's stream because the node is stalled.
    pub(crate) fn stalled(&mut self, id: ObserverId) {
        let stalled = "the node is stalled: no step finishes; observe again later";
        self.end(id, Status::unavailable(stalled));
    }

    fn end(&mut self, id: ObserverId, error: Status) {
        if let Some(sender) = self.senders.remove(&id) {
            sender.end.send(Err(error));
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt, StreamExt};
    use tonic::Code;

    use super::*;

    fn add(observers: &mut ObserverSenders) -> (ObserverId, ObserveStream) {
        let (sender, stream) = observer(permits().try_acquire_owned().unwrap());
        (observers.add(sender), stream)
    }

    fn event(sequence: u64) -> v1::ObserveEvent {
        v1::ObserveEvent { sequence, event: None }
    }

    fn next(stream: &mut ObserveStream) -> Option<Result<v1::ObserveEvent, Status>> {
        stream.next().now_or_never().flatten()
    }

    #[test]
    fn lagging_observer_is_ended_and_other_observers_continue() {
        let mut observers = ObserverSenders::default();
        let (lagging, mut lagging_stream) = add(&mut observers);
        let (reading, mut reading_stream) = add(&mut observers);
        for sequence in 0..=EVENTS_MAX as u64 {
            let is_sent = observers.send(lagging, event(sequence));
            assert_eq!(is_sent, sequence < EVENTS_MAX as u64);
            assert!(observers.send(reading, event(sequence)));
            assert_eq!(next(&mut reading_stream).unwrap().unwrap().sequence, sequence);
        }
        let events: Vec<_> = std::iter::from_fn(|| next(&mut lagging_stream)).collect();
        assert_eq!(events.len(), EVENTS_MAX + 1);
        for (index, event) in events[..EVENTS_MAX].iter().enumerate() {
            assert_eq!(event.as_ref().unwrap().sequence, index as u64);
        }
        assert_eq!(events[EVENTS_MAX].as_ref().unwrap_err().code(), Code::Aborted);
    }

    #[test]
    fn dropped_observer_is_removed_and_a_stop_ends_the_others() {
        let mut observers = ObserverSenders::default();
        let (dropped, stream) = add(&mut observers);
        drop(stream);
        let (_, mut stream) = add(&mut observers);
        assert_eq!(observers.take_closed(), [dropped]);
        drop(observers);
        assert_eq!(next(&mut stream).unwrap().unwrap_err().code(), Code::Unavailable);
    }
}
