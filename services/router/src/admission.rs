//! Bounds on the router's load: answers in flight, and bytes of request bodies that are being read.
//! [`wait_queue`](crate::wait_queue) bounds the answers that wait for a node.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::Instant,
};

use crate::{
    fair_queue::{Flow, FlowLimit, FlowName, LimitReached, TooLate},
    lock::lock,
};

/// A bound on the load is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    #[error("the router has {max} requests in flight; at most {max} are allowed")]
    InFlight { max: u32 },
    #[error("{max} requests wait for a node; at most {max} are allowed")]
    Waiting { max: u32 },
    #[error(
        "the caller has its share of the {max} requests that may be in flight; expected fewer \
         requests at a time"
    )]
    ShareInFlight { max: u32 },
    #[error(
        "the caller has its share of the {max} requests that may wait for a node; expected fewer \
         requests at a time"
    )]
    ShareWaiting { max: u32 },
    #[error("{0}")]
    Late(TooLate),
    #[error(
        "cannot read the request body: all bodies being read may hold at most {bytes_max} bytes"
    )]
    Bodies { bytes_max: u64 },
    #[error("the router is stopping")]
    Stopping,
}

impl Full {
    /// Returns whether the bound is the caller's share, not a bound on all callers.
    pub fn is_of_caller(self) -> bool {
        match self {
            Self::ShareInFlight { .. } | Self::ShareWaiting { .. } => true,
            Self::Late(late) => late.is_over_share,
            _ => false,
        }
    }
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

/// Bound on the number of answers in flight. Each choice of a request is one answer.
pub struct Admission {
    in_flight: Arc<InFlight>,
    closed: AtomicBool,
}

struct InFlight {
    limit: Mutex<FlowLimit>,
    /// Number of answers in flight, for tasks that wait until it is 0.
    count: watch::Sender<u32>,
    last_admitted: Mutex<Option<Instant>>,
}

/// The answers of one request in flight, until dropped.
pub struct Admitted {
    answers: u32,
    flow: FlowName,
    in_flight: Arc<InFlight>,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        lock(&self.in_flight.limit).release(&self.flow, self.answers);
        self.in_flight.count.send_modify(|count| *count -= self.answers);
    }
}

impl Admission {
    pub fn new(max: u32) -> Self {
        let in_flight = InFlight {
            limit: Mutex::new(FlowLimit::new(max)),
            count: watch::Sender::new(0),
            last_admitted: Mutex::default(),
        };
        Self { in_flight: Arc::new(in_flight), closed: AtomicBool::new(false) }
    }

    pub fn max(&self) -> u32 {
        lock(&self.in_flight.limit).max()
    }

    /// Admits all of these answers, or none.
    pub fn admit(&self, flow: &Flow, answers: u32) -> Result<Admitted, Full> {
        // Checked under the lock of the limit, so that no answer is admitted after the last answer has ended.
        let mut limit = lock(&self.in_flight.limit);
        if self.closed.load(Ordering::SeqCst) {
            return Err(Full::Stopping);
        }
        let max = limit.max();
        limit.take(flow, answers).map_err(|reached| match reached {
            LimitReached::All => Full::InFlight { max },
            LimitReached::Share => Full::ShareInFlight { max },
        })?;
        self.in_flight.count.send_modify(|count| *count += answers);
        *lock(&self.in_flight.last_admitted) = Some(Instant::now());
        Ok(Admitted { answers, flow: flow.name.clone(), in_flight: self.in_flight.clone() })
    }

    /// Rejects every further answer.
    pub fn close(&self) {
        let _limit = lock(&self.in_flight.limit);
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Returns the number of answers in flight.
    pub fn in_flight(&self) -> u32 {
        *self.in_flight.count.borrow()
    }

    /// Blocks until no answer has been admitted for `quiet_min`. Callers bound the wait.
    pub async fn quiet_for(&self, quiet_min: Duration) {
        let quiet_at = || Some((*lock(&self.in_flight.last_admitted))? + quiet_min);
        while let Some(at) = quiet_at().filter(|at| *at > Instant::now()) {
            tokio::time::sleep_until(at).await;
        }
    }

    /// Blocks until no answer has been in flight for `idle_min`. Callers bound the wait.
    pub async fn idle_for(&self, idle_min: Duration) {
        let mut in_flight = self.in_flight.count.subscribe();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn answers_in_flight_are_bounded_and_drained() {
        let (admission, flow) = (Admission::new(3), Flow::new(FlowName::Shared));
        let two = admission.admit(&flow, 2).unwrap();
        assert_eq!(admission.admit(&flow, 2).err(), Some(Full::InFlight { max: 3 }));
        let one = admission.admit(&flow, 1).unwrap();
        assert_eq!(admission.in_flight(), 3);
        drop((one, two));
        assert_eq!(admission.in_flight(), 0);
        let quiet_min = Duration::from_millis(50);
        let admitted = Instant::now();
        drop(admission.admit(&flow, 1).unwrap());
        admission.quiet_for(quiet_min).await;
        assert!(admitted.elapsed() >= quiet_min);
        admission.close();
        assert_eq!(admission.admit(&flow, 1).err(), Some(Full::Stopping));
        admission.idle_for(Duration::ZERO).await;
    }
}
