//! The connection to a trainer between two updates by `nccl`. The device keeps the trainer's
//! communicator for the same time.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{address::TrainerAddress, connection::TrainerStream};

/// The trainer of the last update, unless its connection was closed.
#[derive(Debug, Default)]
pub(in crate::weights) struct KeptTrainer(Mutex<Option<(TrainerAddress, TrainerStream)>>);

impl KeptTrainer {
    /// Returns the idle connection of this trainer. Closes the connection of another trainer.
    pub(super) fn take(&self, address: &TrainerAddress) -> Option<TrainerStream> {
        let (_, stream) = self.lock().take().filter(|(trainer, _)| trainer == address)?;
        stream.is_idle().then_some(stream)
    }

    pub(super) fn put(&self, address: &TrainerAddress, stream: TrainerStream) {
        *self.lock() = Some((address.clone(), stream));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_none()
    }

    /// Closes the connection if the trainer has closed it. Returns whether the connection was
    /// closed.
    pub(crate) fn close_if_left(&self) -> bool {
        self.lock().take_if(|(_, stream)| !stream.is_idle()).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Option<(TrainerAddress, TrainerStream)>> {
        // The value is replaced as a whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
