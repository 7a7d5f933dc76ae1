//! The bounded queue of events from the transfers to the engine thread.

use crossbeam_channel::{Receiver, Sender, bounded};
use engine::executor::CollectWaker;
use kv_transfer::{EventSink, api::Event};

/// Each transfer has at most two events: `Ready` and its final event.
const EVENTS_PER_TRANSFER: usize = 2;

/// Queues events and wakes the engine thread.
pub(crate) struct TransferEvents {
    queue: Sender<Event>,
    waker: CollectWaker,
}

impl TransferEvents {
    pub fn new(transfers_max: usize, waker: CollectWaker) -> (Self, Receiver<Event>) {
        let (queue, events) = bounded(EVENTS_PER_TRANSFER * transfers_max);
        (Self { queue, waker }, events)
    }
}

impl EventSink for TransferEvents {
    fn offer(&mut self, event: Event) -> Result<(), Event> {
        self.queue.offer(event)?;
        self.waker.wake();
        Ok(())
    }
}
