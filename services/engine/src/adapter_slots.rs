//! LoRA adapters of an executor, which reads them from files.

use std::path::Path;

use model::{Adapter, ModelError};

use crate::executor::ExecutorError;

/// Maximum number of adapters that an executor holds.
pub const ADAPTER_SLOTS_MAX: u32 = 64;

/// Slots of adapters, which may change while steps run.
pub trait AdapterSlots: Send + Sync {
    /// Reads the executor's shard of the adapter in `folder`. `rank_max` is the largest allowed
    /// LoRA rank.
    fn open(&self, folder: &Path, rank_max: u32) -> Result<Adapter, ModelError>;

    /// Replaces the adapter in a slot that no sequence uses; `None` empties the slot.
    ///
    /// # Errors
    /// When the device fails.
    fn set(&self, slot: u32, adapter: Option<Adapter>) -> Result<(), ExecutorError>;

    /// Returns the bytes of host memory that an adapter in a slot takes.
    fn bytes(&self, adapter: &Adapter) -> u64;
}
