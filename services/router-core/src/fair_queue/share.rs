//! Shares of the flows: where a flow begins in the order of service, and whether it was served more
//! than its share.

use std::{hash::Hash, time::Instant};

use super::{ACTIVE_FOR, CREDIT_REQUESTS, FairQueue, FlowName, FlowState, predict::RATE_SHARE};

impl<Id: Copy + Eq + Hash> FairQueue<Id> {
    /// Returns whether another active flow has a lower virtual time, so this flow was served more
    /// than its share. A flow stays active for [`ACTIVE_FOR`] after its last request.
    pub fn is_over_share(&self, now: Instant, name: &FlowName) -> bool {
        let Some(flow) = self.flows.get(name).filter(|flow| flow.started > 0) else { return false };
        let waiting = self.waiting_virtual_time();
        let is_active = |flow: &FlowState<Id>| {
            !flow.is_idle() || now.saturating_duration_since(flow.active_at) < ACTIVE_FOR
        };
        let mut others =
            self.flows.iter().filter(|(other, flow)| *other != name && is_active(flow));
        others
            .any(|(_, other)| self.begin_of(Some(other), other.weight, waiting) < flow.virtual_time)
    }

    /// Returns the virtual time at which the next request of a flow begins. `waiting`:
    /// [`Self::waiting_virtual_time`], once for many flows.
    pub(super) fn begin_of(&self, flow: Option<&FlowState<Id>>, weight: f64, waiting: f64) -> f64 {
        match flow {
            Some(flow) if !flow.queue.is_empty() => flow.virtual_time,
            _ => {
                // The decayed sum is the cost of the last `1 / RATE_SHARE` requests.
                let request = RATE_SHARE * self.rate.cost / weight;
                let credit = CREDIT_REQUESTS * request;
                match flow {
                    Some(flow) => flow.virtual_time.max(waiting - credit),
                    None if self.is_empty() => waiting + credit,
                    None => waiting - request,
                }
            }
        }
    }

    /// Returns the virtual time of the waiting flow that is served next; without one, of the last
    /// served flow.
    pub(super) fn waiting_virtual_time(&self) -> f64 {
        self.order.least_virtual_time().unwrap_or(self.last_served)
    }
}
