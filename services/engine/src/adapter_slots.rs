//! LoRA adapters of an executor, which reads them from files.

use std::path::Path;

use model::{Adapter, ModelError};

/// Maximum number of adapters that an executor holds.
pub const ADAPTER_SLOTS_MAX: u32 = 64;

/// Slots of adapters, which may change while steps run.
pub trait AdapterSlots: Send + Sync {
    /// Reads the executor's shard of the adapter in `folder`. `rank_max` is the largest allowed
    /// LoRA rank.
    fn open(&self, folder: &Path, rank_max: u32) -> Result<Adapter, ModelError>;

    /// Replaces the adapter in a slot that no sequence uses; `None` empties the slot.
    fn set(&self, slot: u32, adapter: Option<Adapter>);
}
