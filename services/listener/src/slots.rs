//! The slots of a port, shared by its connections.

use std::{
    net::IpAddr,
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::table::{AdmissionRetry, AdmissionVerdict, ConnectionClose, SlotLimits, SlotTable};

/// The slots of one port. Clones share their state.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionSlots {
    table: Arc<Mutex<SlotTable>>,
    /// Notified whenever a connection ends.
    freed: Arc<Notify>,
}

/// Guard of a connection's slot.
#[derive(Debug)]
pub struct ConnectionSlot(SlotHandle);

/// A connection's slot, for the requests of the connection. Without effect after the connection has
/// ended.
#[derive(Clone, Debug)]
pub struct SlotHandle {
    id: u64,
    slots: ConnectionSlots,
    close: CancellationToken,
}

impl ConnectionSlots {
    pub(crate) fn new(limits: SlotLimits) -> Self {
        Self { table: Arc::new(Mutex::new(SlotTable::new(limits))), freed: Arc::default() }
    }

    /// Waits until the port has a slot for a connection from this address, and takes the slot. The
    /// table may close another connection for it.
    pub(crate) async fn admit(&self, address: IpAddr) -> ConnectionSlot {
        let close = CancellationToken::new();
        loop {
            let freed = self.freed.notified();
            let admitted = self.lock().admit(Instant::now().into_std(), address, close.clone());
            match admitted {
                Ok(id) => return ConnectionSlot(SlotHandle { id, slots: self.clone(), close }),
                Err(AdmissionRetry::UntilFreed) => freed.await,
                Err(AdmissionRetry::Until(at)) => tokio::select! {
                    () = freed => {}
                    () = sleep_until(at.into()) => {}
                },
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, SlotTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionSlot {
    pub fn handle(&self) -> SlotHandle {
        self.0.clone()
    }
}

impl Deref for ConnectionSlot {
    type Target = SlotHandle;

    fn deref(&self) -> &SlotHandle {
        &self.0
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.slots.lock().remove(self.id);
        self.slots.freed.notify_waiters();
    }
}

impl SlotHandle {
    /// Returns the number of the connection, unique on its port.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns whether the connection is in the reserve.
    pub fn is_reserved(&self) -> bool {
        self.slots.lock().is_reserved(self.id)
    }

    /// Returns whether the client has presented a valid credential.
    pub fn is_authenticated(&self) -> bool {
        self.slots.lock().is_authenticated(self.id)
    }

    /// Records that the client has presented a valid credential. Returns whether this is the first
    /// one.
    pub fn authenticate(&self) -> bool {
        self.slots.lock().authenticate(self.id)
    }

    /// Waits until the connection must close.
    pub fn closing(&self) -> impl Future<Output = ConnectionClose> + Send + use<> {
        let handle = self.clone();
        async move {
            handle.close.cancelled().await;
            handle.slots.lock().closing(handle.id)
        }
    }

    /// Counts a request after its head has arrived. `may_use_reserve`: whether the request is
    /// served on a connection in the reserve. The caller must call [`Self::end_request`] for any
    /// verdict.
    pub fn begin_request(&self, may_use_reserve: bool) -> AdmissionVerdict {
        self.slots.lock().begin_request(self.id, may_use_reserve)
    }

    /// Ends a request whose response was written or dropped.
    pub fn end_request(&self) {
        self.slots.lock().end_request(self.id);
    }
}
