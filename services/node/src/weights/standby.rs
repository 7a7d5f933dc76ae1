//! The copy of the weights that is not in use. One update at a time owns the copy.

use std::sync::Arc;

use engine::executor::WeightUpdate;
use tokio::{sync::Mutex, task::spawn_blocking};
use tokio_util::sync::CancellationToken;
use weight_transfer::UpdateId;

/// Error text of work that was cancelled because its update ended.
pub(super) const CANCELLED: &str = "the update was aborted";

/// Prepares and frees the copy for updates, one after the other.
#[derive(Clone)]
pub(super) struct Standby {
    update: Arc<dyn WeightUpdate>,
    /// The update that has prepared the copy. Locked while the copy changes.
    owner: Arc<Mutex<Option<UpdateId>>>,
}

impl Standby {
    pub(super) fn new(update: Arc<dyn WeightUpdate>) -> Self {
        Self { update, owner: Arc::default() }
    }

    /// Runs `prepare` on a thread for the update `id`. Frees the copy if `prepare` fails or was
    /// cancelled.
    pub(super) async fn prepare<T: Send + 'static>(
        &self,
        id: UpdateId,
        cancelled: CancellationToken,
        prepare: impl FnOnce(&dyn WeightUpdate, &CancellationToken) -> Result<T, String>
        + Send
        + 'static,
    ) -> Result<T, String> {
        let lock = cancelled.run_until_cancelled(self.owner.clone().lock_owned()).await;
        let mut owner = lock.ok_or(CANCELLED)?;
        let update = self.update.clone();
        let prepared = spawn_blocking(move || {
            // The thread may begin late.
            if cancelled.is_cancelled() {
                return Err(CANCELLED.to_owned());
            }
            // The previous owner may not have freed the copy yet. Its later `discard` finds this
            // owner and does nothing.
            if owner.replace(id).is_some() {
                update.discard();
            }
            let outcome = prepare(&*update, &cancelled);
            let outcome = outcome.and_then(|it| match cancelled.is_cancelled() {
                true => Err(CANCELLED.to_owned()),
                false => Ok(it),
            });
            if outcome.is_err() {
                update.discard();
                *owner = None;
            }
            outcome
        });
        prepared.await.unwrap_or_else(|panic| Err(format!("reading failed: {panic}")))
    }

    /// Runs `work` on a thread while no update prepares the copy.
    pub(super) async fn between_updates(
        &self,
        work: impl FnOnce(&dyn WeightUpdate) + Send + 'static,
    ) {
        let owner = self.owner.clone().lock_owned().await;
        let update = self.update.clone();
        let work = spawn_blocking(move || {
            let _owner = owner;
            work(&*update);
        });
        // A panic ends the work only.
        let _ = work.await;
    }

    /// Frees the copy if the update `id` owns it.
    pub(super) async fn discard(&self, id: UpdateId) {
        let mut owner = self.owner.clone().lock_owned().await;
        let update = self.update.clone();
        let free = spawn_blocking(move || {
            if *owner == Some(id) {
                update.discard();
                *owner = None;
            }
        });
        // A panic leaves the memory allocated.
        let _ = free.await;
    }
}

#[cfg(test)]
mod tests {
    use std::{
        path::Path,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use engine::executor::PrepareError;
    use model::Checkpoint;

    use super::*;

    const A: UpdateId = UpdateId(1);
    const B: UpdateId = UpdateId(2);

    #[derive(Default)]
    struct Device {
        discards: AtomicUsize,
    }

    impl WeightUpdate for Device {
        fn is_in_place(&self) -> bool {
            false
        }

        fn prepare(&self, _: &Path, _: &Checkpoint) -> Result<(), PrepareError> {
            unreachable!("the tests prepare nothing")
        }

        fn discard(&self) {
            self.discards.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn standby() -> (Standby, Arc<Device>) {
        let device = Arc::new(Device::default());
        (Standby::new(device.clone()), device)
    }

    #[tokio::test]
    async fn aborted_update_does_not_free_the_weights_of_the_next() {
        let (standby, device) = standby();
        let stopped = CancellationToken::new();
        stopped.cancel();
        standby.prepare(B, CancellationToken::new(), |_, _| Ok(())).await.unwrap();
        // The update A ends late: its copy from a peer, and its discard.
        let late = standby.prepare(A, stopped, |_, _| Ok(())).await;
        assert_eq!(late, Err(CANCELLED.to_owned()));
        standby.discard(A).await;
        assert_eq!(device.discards.load(Ordering::Relaxed), 0);
        standby.discard(B).await;
        assert_eq!(device.discards.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn update_that_is_cancelled_while_it_prepares_frees_its_own_weights_once() {
        let (standby, device) = standby();
        let cancelled = CancellationToken::new();
        let outcome = standby.prepare(A, cancelled.clone(), move |_, seen| {
            cancelled.cancel();
            assert!(seen.is_cancelled());
            Ok(())
        });
        assert_eq!(outcome.await, Err(CANCELLED.to_owned()));
        standby.discard(A).await;
        assert_eq!(device.discards.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn next_update_frees_weights_whose_discard_is_late() {
        let (standby, device) = standby();
        standby.prepare(A, CancellationToken::new(), |_, _| Ok(())).await.unwrap();
        standby.prepare(B, CancellationToken::new(), |_, _| Ok(())).await.unwrap();
        assert_eq!(device.discards.load(Ordering::Relaxed), 1);
    }
}
