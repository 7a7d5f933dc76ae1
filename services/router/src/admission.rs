//! Bounds on the router's load: answers in flight, answers that wait for a node, and bytes of request
//! bodies that are being read.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use telemetry::{RouterMetrics, metrics::InFlightRequest};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};

use crate::request_core::TurnQueue;

/// A bound on the load is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    #[error("the router has {max} requests in flight; at most {max} are allowed")]
    InFlight { max: u32 },
    #[error("{max} requests wait for a node; at most {max} are allowed")]
    Waiting { max: u32 },
    #[error(
        "cannot read the request body: all bodies being read may hold at most {bytes_max} bytes"
    )]
    Bodies { bytes_max: u64 },
    #[error("the router is stopping")]
    Stopping,
}

/// Bound on the bytes of request bodies before admission. Only received bytes count: a client that announces a large
/// body and sends nothing takes no bytes.
#[derive(Clone)]
pub struct BodyBudget {
    free: Arc<Semaphore>,
    bytes_max: u64,
}

impl BodyBudget {
    pub fn new(bytes_max: u64) -> Self {
        let permits = usize::try_from(bytes_max).unwrap_or(usize::MAX);
        Self { free: Arc::new(Semaphore::new(permits.min(Semaphore::MAX_PERMITS))), bytes_max }
    }

    /// Reserves these bytes for one body, or fails at once. Dropping the permit releases them.
    pub fn take(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Full> {
        let full = Full::Bodies { bytes_max: self.bytes_max };
        let permits = u32::try_from(bytes).map_err(|_| full)?;
        self.free.clone().try_acquire_many_owned(permits).map_err(|_| full)
    }
}

/// Bound on the answers in flight. Each choice of a request is one answer.
pub struct Admission {
    in_flight: Arc<watch::Sender<u32>>,
    max: u32,
    closed: AtomicBool,
}

/// The answers of one request in flight, until dropped.
#[derive(Debug)]
pub struct Admitted {
    answers: u32,
    in_flight: Arc<watch::Sender<u32>>,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.in_flight.send_modify(|count| *count -= self.answers);
    }
}

impl Admission {
    pub fn new(max: u32) -> Self {
        let in_flight = Arc::new(watch::Sender::new(0));
        Self { in_flight, max, closed: AtomicBool::new(false) }
    }

    pub fn max(&self) -> u32 {
        self.max
    }

    /// Admits all of these answers, or none.
    pub fn admit(&self, answers: u32) -> Result<Admitted, Full> {
        let mut outcome = Err(Full::InFlight { max: self.max });
        self.in_flight.send_if_modified(|count| {
            // Checked under the counter's lock, so that no answer is admitted after the last answer has ended.
            if self.closed.load(Ordering::SeqCst) {
                outcome = Err(Full::Stopping);
            } else if answers <= self.max - *count {
                *count += answers;
                outcome = Ok(());
            }
            outcome.is_ok()
        });
        outcome.map(|()| Admitted { answers, in_flight: self.in_flight.clone() })
    }

    /// Rejects every further answer.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Answers in flight now.
    pub fn in_flight(&self) -> u32 {
        *self.in_flight.borrow()
    }

    /// Blocks until no answer has been in flight for `idle_min`. Callers bound the wait.
    pub async fn idle_for(&self, idle_min: Duration) {
        let mut in_flight = self.in_flight.subscribe();
        loop {
            // Fails only if the sender was dropped, but `self` holds the sender.
            let _ = in_flight.wait_for(|count| *count == 0).await;
            let admitted = in_flight.wait_for(|count| *count > 0);
            if tokio::time::timeout(idle_min, admitted).await.is_err() {
                return;
            }
        }
    }
}

/// Bound on the waiting answers of all models together.
pub struct WaitLimit {
    taken: AtomicU32,
    max: u32,
}

impl WaitLimit {
    pub fn new(max: u32) -> Self {
        Self { taken: AtomicU32::new(0), max }
    }
}

/// The answers of one model that wait for a node. Answers that found every node busy queue for their turn to pick
/// nodes. Answers for which no node is up wait outside the queue.
pub struct WaitQueue {
    turns: Arc<Mutex<Turns>>,
    places: Arc<WaitLimit>,
}

#[derive(Default)]
struct Turns {
    queue: TurnQueue<u64>,
    /// Notified when the answer has its turn.
    notified: HashMap<u64, oneshot::Sender<()>>,
    next_id: u64,
}

fn lock(turns: &Mutex<Turns>) -> MutexGuard<'_, Turns> {
    turns.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Turns {
    fn notify_next(&mut self) {
        while let Some(id) = self.queue.next_turn() {
            if let Some(answer) = self.notified.remove(&id) {
                // Fails only when the answer is about to leave the queue.
                let _ = answer.send(());
            }
        }
    }
}

impl WaitQueue {
    /// `places` are shared by the queues of all models.
    pub fn new(places: Arc<WaitLimit>) -> Self {
        Self { turns: Arc::default(), places }
    }

    /// Returns whether an answer queues for its turn: a new answer must queue behind it.
    pub fn has_queue(&self) -> bool {
        !lock(&self.turns).queue.is_empty()
    }

    /// Takes a place. `has_begun`: the answer emitted tokens, and is admitted over the bound.
    pub fn enter(&self, metrics: &RouterMetrics, has_begun: bool) -> Result<Waiting, Full> {
        let max = self.places.max;
        let room = |count: u32| (has_begun || count < max).then_some(count + 1);
        self.places
            .taken
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, room)
            .map_err(|_| Full::Waiting { max })?;
        Ok(Waiting {
            turns: self.turns.clone(),
            queued: None,
            _place: Place(self.places.clone()),
            _counted: metrics.request_waiting(),
        })
    }
}

/// A place in the queue of waiting requests, until dropped.
pub struct Waiting {
    turns: Arc<Mutex<Turns>>,
    queued: Option<Queued>,
    _place: Place,
    _counted: InFlightRequest,
}

impl Waiting {
    /// Joins the queue, behind every other answer.
    pub fn queue(&mut self) {
        if self.queued.is_none() {
            let mut turns = lock(&self.turns);
            let (id, (notified, turn)) = (turns.next_id, oneshot::channel());
            turns.next_id += 1;
            turns.notified.insert(id, notified);
            turns.queue.join(id);
            turns.notify_next();
            self.queued = Some(Queued { turns: self.turns.clone(), id, turn: Some(turn) });
        }
    }

    /// Leaves the queue, and gives the turn to the next answer.
    pub fn leave_queue(&mut self) {
        self.queued = None;
    }

    /// Blocks until it is the turn of this answer, which keeps the turn until it leaves the queue. Blocks
    /// forever outside of the queue.
    pub async fn turn(waiting: &mut Option<Self>) {
        let queued = waiting.as_mut().and_then(|waiting| waiting.queued.as_mut());
        let Some(Queued { turn, .. }) = queued else { return std::future::pending().await };
        if let Some(notified) = turn {
            // The sender is kept until it notifies.
            let _ = notified.await;
        }
        *turn = None;
    }
}

/// An answer in the queue, until dropped.
struct Queued {
    turns: Arc<Mutex<Turns>>,
    id: u64,
    /// `None` once the answer has its turn.
    turn: Option<oneshot::Receiver<()>>,
}

impl Drop for Queued {
    fn drop(&mut self) {
        let mut turns = lock(&self.turns);
        turns.notified.remove(&self.id);
        turns.queue.leave(self.id);
        turns.notify_next();
    }
}

struct Place(Arc<WaitLimit>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn answers_in_flight_are_bounded_and_drained() {
        let admission = Admission::new(3);
        let two = admission.admit(2).unwrap();
        assert_eq!(admission.admit(2).unwrap_err(), Full::InFlight { max: 3 });
        let one = admission.admit(1).unwrap();
        assert_eq!(admission.in_flight(), 3);
        drop((one, two));
        assert_eq!(admission.in_flight(), 0);
        admission.close();
        assert_eq!(admission.admit(1).unwrap_err(), Full::Stopping);
        admission.idle_for(Duration::ZERO).await;
    }
}
