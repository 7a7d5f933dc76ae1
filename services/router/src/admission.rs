//! Bound on the bytes of request bodies that are being read. The router core bounds the answers.

use std::sync::Arc;

use router_core::Full;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

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
