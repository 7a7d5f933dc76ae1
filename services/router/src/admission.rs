//! Bound on the bytes of request bodies that are being read. The router core bounds the answers.

use std::sync::{Arc, Mutex};

use router_core::{Flow, FlowLimit, LimitReached, LoadBound};

use crate::lock::lock;

/// Bound on the bytes of request bodies before admission, shared by the keys. Only received bytes
/// count: a client that announces a large body and sends nothing takes no bytes.
#[derive(Clone)]
pub(crate) struct BodyBudget(Arc<Mutex<FlowLimit>>);

/// The bytes of one body, until dropped.
pub(crate) struct ReservedBytes {
    budget: BodyBudget,
    flow: Flow,
    count: u32,
}

impl BodyBudget {
    pub(crate) fn new(bytes_max: u64) -> Self {
        let limit = FlowLimit::new(u32::try_from(bytes_max).unwrap_or(u32::MAX));
        Self(Arc::new(Mutex::new(limit)))
    }

    /// Begins the count of a body of this flow, at 0 bytes.
    pub(crate) fn reserve(&self, flow: Flow) -> ReservedBytes {
        ReservedBytes { budget: self.clone(), flow, count: 0 }
    }
}

impl ReservedBytes {
    /// Reserves these bytes too, or fails at once.
    pub(crate) fn add(&mut self, bytes: usize) -> Result<(), LoadBound> {
        let mut limit = lock(&self.budget.0);
        let bytes_max = limit.max();
        let bytes = u32::try_from(bytes).map_err(|_| LoadBound::Bodies { bytes_max })?;
        limit.take(&self.flow, bytes).map_err(|reached| match reached {
            LimitReached::All => LoadBound::Bodies { bytes_max },
            LimitReached::Share => LoadBound::ShareBodies { bytes_max },
        })?;
        self.count += bytes;
        Ok(())
    }
}

impl Drop for ReservedBytes {
    fn drop(&mut self) {
        if self.count > 0 {
            lock(&self.budget.0).release(&self.flow.name, self.count);
        }
    }
}
