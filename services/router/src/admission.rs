//! How much the router takes on: a bound on answers in work, and for each model a waiting room for
//! those that found every node busy. Before either, a bound on the bytes of bodies that are being read.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use telemetry::RouterMetrics;
use telemetry::metrics::WaitingRequest;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Waiting answers that ask nodes for room at the same time. Few, so that busy nodes are not busy
/// refusing; more than one, so that one slow node does not hold up all.
const ASKING_MAX: usize = 4;
/// Between two tries of one waiting answer: a step or two of a busy node.
const ASK_AGAIN: Duration = Duration::from_millis(25);

/// A bound that was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    #[error("the router has {max} requests in work, as many as it takes")]
    InWork { max: u32 },
    #[error("{max} requests wait for a node already, as many as may")]
    Waiting { max: u32 },
    #[error("bodies of requests hold {bytes_max} bytes already, as many as they may")]
    Bodies { bytes_max: u64 },
    #[error("the router is stopping")]
    Stopping,
}

/// Room for the bodies of requests that are not admitted yet, in bytes. What was announced takes no
/// room, only what came: a client that announces much and sends nothing keeps nobody out.
#[derive(Clone)]
pub struct BodyRoom {
    free: Arc<Semaphore>,
    bytes_max: u64,
}

impl BodyRoom {
    pub fn new(bytes_max: u64) -> Self {
        let permits = usize::try_from(bytes_max).unwrap_or(usize::MAX);
        Self { free: Arc::new(Semaphore::new(permits.min(Semaphore::MAX_PERMITS))), bytes_max }
    }

    /// Room for these further bytes of one body, now or not at all; free again when dropped.
    pub fn take(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Full> {
        let full = Full::Bodies { bytes_max: self.bytes_max };
        let permits = u32::try_from(bytes).map_err(|_| full)?;
        self.free.clone().try_acquire_many_owned(permits).map_err(|_| full)
    }
}

/// Answers in work. Each choice of a request is one.
pub struct Admission {
    in_work: Arc<watch::Sender<u32>>,
    max: u32,
    closed: AtomicBool,
}

/// Room for the answers of one request; free again when dropped.
#[derive(Debug)]
pub struct Admitted {
    answers: u32,
    in_work: Arc<watch::Sender<u32>>,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.in_work.send_modify(|count| *count -= self.answers);
    }
}

impl Admission {
    pub fn new(max: u32) -> Self {
        let in_work = Arc::new(watch::Sender::new(0));
        Self { in_work, max, closed: AtomicBool::new(false) }
    }

    pub fn max(&self) -> u32 {
        self.max
    }

    /// Room for `answers`, or nothing at all.
    pub fn admit(&self, answers: u32) -> Result<Admitted, Full> {
        let mut outcome = Err(Full::InWork { max: self.max });
        self.in_work.send_if_modified(|count| {
            // Looked at under the same lock that `emptied` waits on: nobody slips in behind it.
            if self.is_closed() {
                outcome = Err(Full::Stopping);
            } else if answers <= self.max - *count {
                *count += answers;
                outcome = Ok(());
            }
            outcome.is_ok()
        });
        outcome.map(|()| Admitted { answers, in_work: self.in_work.clone() })
    }

    /// Nothing more is admitted.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Answers in work now.
    pub fn in_work(&self) -> u32 {
        *self.in_work.borrow()
    }

    /// Waits until nothing is in work. Callers bound the wait.
    pub async fn emptied(&self) {
        // Fails only without a sender, and we hold it.
        let _ = self.in_work.subscribe().wait_for(|count| *count == 0).await;
    }
}

/// The bound on waiting answers, of all models together.
pub struct WaitingPlaces {
    taken: AtomicU32,
    max: u32,
}

impl WaitingPlaces {
    pub fn new(max: u32) -> Self {
        Self { taken: AtomicU32::new(0), max }
    }
}

/// Where answers of one model wait until a node has room, in order of their coming.
pub struct WaitingRoom {
    asking: Arc<Semaphore>,
    waiting: Arc<AtomicU32>,
    places: Arc<WaitingPlaces>,
}

impl WaitingRoom {
    /// `places` are shared by the rooms of all models.
    pub fn new(places: Arc<WaitingPlaces>) -> Self {
        Self {
            asking: Arc::new(Semaphore::new(ASKING_MAX)),
            waiting: Arc::new(AtomicU32::new(0)),
            places,
        }
    }

    /// Somebody waits: whoever comes now waits behind.
    pub fn is_occupied(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    pub fn enter(&self, metrics: &RouterMetrics) -> Result<Waiting, Full> {
        let max = self.places.max;
        let room = |count: u32| (count < max).then_some(count + 1);
        self.places
            .taken
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, room)
            .map_err(|_| Full::Waiting { max })?;
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Ok(Waiting {
            asking: self.asking.clone(),
            turn: None,
            _place: Place { waiting: self.waiting.clone(), places: self.places.clone() },
            _counted: metrics.request_waiting(),
        })
    }
}

/// A place in the waiting room; left when dropped.
pub struct Waiting {
    asking: Arc<Semaphore>,
    turn: Option<OwnedSemaphorePermit>,
    _place: Place,
    _counted: WaitingRequest,
}

impl Waiting {
    /// Waits for the turn; later, between two tries.
    pub async fn turn(&mut self) {
        if self.turn.is_some() {
            tokio::time::sleep(ASK_AGAIN).await;
        } else {
            // The semaphore is never closed.
            self.turn = self.asking.clone().acquire_owned().await.ok();
        }
    }
}

struct Place {
    waiting: Arc<AtomicU32>,
    places: Arc<WaitingPlaces>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        self.places.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn answers_in_work_are_bounded_and_awaited() {
        let admission = Admission::new(3);
        let two = admission.admit(2).unwrap();
        assert_eq!(admission.admit(2).unwrap_err(), Full::InWork { max: 3 });
        let one = admission.admit(1).unwrap();
        assert_eq!(admission.in_work(), 3);
        drop((one, two));
        assert_eq!(admission.in_work(), 0);
        admission.close();
        assert_eq!(admission.admit(1).unwrap_err(), Full::Stopping);
        admission.emptied().await;
    }
}
