//! The router core that all requests share, behind one lock. Tokens do not pass this lock.

use std::{
    collections::HashMap,
    mem,
    sync::{Arc, Mutex},
    time::Duration,
};

use router_core::{
    AnswerId, ArrivedRequest, Flow, FlowName, LoadBound, Overload, RouterCore, RouterOutput,
    SharedCore,
};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

use crate::lock::lock;

/// The shared router core; clones share it.
#[derive(Clone)]
pub struct SharedRouter(Arc<SharedRouterState>);

struct SharedRouterState {
    locked: Mutex<LockedRouter>,
    /// Wakes the task that performs the outputs about nodes.
    has_node_outputs: Notify,
    /// Number of answers in flight, for tasks that wait until it is 0.
    in_flight: watch::Sender<u32>,
}

struct LockedRouter {
    core: RouterCore,
    /// The running answers.
    answers: HashMap<AnswerId, Arc<Notify>>,
    /// Outputs about nodes that the watch of the nodes has not performed yet. Bounded by the state
    /// changes of the nodes in this time.
    node_outputs: Vec<RouterOutput>,
}

impl SharedCore for &SharedRouter {
    fn with<T>(&mut self, work: impl FnOnce(&mut RouterCore) -> T) -> T {
        SharedRouter::with(self, work)
    }
}

impl SharedRouter {
    pub fn new(core: RouterCore) -> Self {
        let locked = LockedRouter { core, answers: HashMap::new(), node_outputs: Vec::new() };
        Self(Arc::new(SharedRouterState {
            locked: Mutex::new(locked),
            has_node_outputs: Notify::new(),
            in_flight: watch::Sender::new(0),
        }))
    }

    /// Passes an input to the core, for a few microseconds and never across an await. Wakes the
    /// answers that the core names, and the watch of the nodes.
    pub fn with<T>(&self, work: impl FnOnce(&mut RouterCore) -> T) -> T {
        let mut locked = lock(&self.0.locked);
        let LockedRouter { core, answers, node_outputs } = &mut *locked;
        let before = (node_outputs.len(), core.in_flight());
        let result = work(core);
        while let Some(output) = core.poll_output() {
            match output {
                RouterOutput::Wake(id) => {
                    answers.get(&id).into_iter().for_each(|it| it.notify_one())
                }
                output => node_outputs.push(output),
            }
        }
        let after = (node_outputs.len(), core.in_flight());
        if after.0 > before.0 {
            self.0.has_node_outputs.notify_one();
        }
        if after.1 != before.1 {
            self.0.in_flight.send_replace(after.1);
        }
        result
    }

    /// Returns the outputs about nodes since the last call.
    pub fn take_node_outputs(&self) -> Vec<RouterOutput> {
        mem::take(&mut lock(&self.0.locked).node_outputs)
    }

    /// Blocks until [`Self::take_node_outputs`] may return outputs. Cancel-safe.
    pub async fn node_outputs(&self) {
        self.0.has_node_outputs.notified().await;
    }

    /// Registers a running answer, which waits on the returned value for its wake-ups.
    pub fn register(&self, id: AnswerId) -> Arc<Notify> {
        let woken = Arc::new(Notify::new());
        lock(&self.0.locked).answers.insert(id, woken.clone());
        woken
    }

    /// Forgets an answer that has ended.
    pub fn forget(&self, id: AnswerId) {
        lock(&self.0.locked).answers.remove(&id);
    }

    /// Admits a request with all of its answers, or none.
    pub fn admit(&self, request: &ArrivedRequest<'_>) -> Result<AdmittedRequest, Overload> {
        self.with(|core| core.handle_request(Instant::now().into_std(), request))?;
        Ok(self.admitted(request.flow, request.answers))
    }

    /// Admits work of one flow that needs no node.
    pub fn admit_work(&self, flow: &Flow) -> Result<AdmittedRequest, LoadBound> {
        self.with(|core| core.admit(flow, 1))?;
        Ok(self.admitted(flow, 1))
    }

    fn admitted(&self, flow: &Flow, answers: u32) -> AdmittedRequest {
        AdmittedRequest { router: self.clone(), flow: flow.name.clone(), answers }
    }

    /// Returns the number of answers in flight.
    pub fn in_flight(&self) -> u32 {
        *self.0.in_flight.borrow()
    }

    /// Blocks until no answer has been in flight for `idle_min`. Callers bound the wait.
    pub async fn idle_for(&self, idle_min: Duration) {
        let mut in_flight = self.0.in_flight.subscribe();
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

/// The answers of one request in flight, until dropped.
pub struct AdmittedRequest {
    router: SharedRouter,
    flow: FlowName,
    answers: u32,
}

impl Drop for AdmittedRequest {
    fn drop(&mut self) {
        self.router.with(|core| core.handle_request_ended(&self.flow, self.answers));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use config::{Disaggregate, NodePolicy, Roles};
    use router_core::{Flow, RouterLimits};

    use super::*;

    /// Returns a router without nodes that admits this many answers.
    pub(crate) fn router(requests_max: u32) -> SharedRouter {
        let selection = cluster::Selection {
            disaggregate: Disaggregate::Auto,
            roles: Roles::Fixed,
            policy: NodePolicy::Predicted,
        };
        let limits = RouterLimits { requests_max, waiting_max: 8 };
        SharedRouter::new(RouterCore::new(1, selection, limits))
    }

    #[tokio::test]
    async fn answers_in_flight_are_bounded_and_drained() {
        let (router, flow) = (router(2), Flow::new(FlowName::Shared));
        let one = router.admit_work(&flow).unwrap();
        let two = router.admit_work(&flow).unwrap();
        assert_eq!(router.admit_work(&flow).err(), Some(LoadBound::InFlight { max: 2 }));
        assert_eq!(router.in_flight(), 2);
        drop((one, two));
        assert_eq!(router.in_flight(), 0);
        router.with(RouterCore::close);
        assert_eq!(router.admit_work(&flow).err(), Some(LoadBound::Stopping));
        router.idle_for(Duration::ZERO).await;
    }
}
