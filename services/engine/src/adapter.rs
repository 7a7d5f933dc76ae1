//! LoRA adapters of an executor. A sequence names the adapter that it computes with.

use std::path::Path;

use model::{Adapter, ModelError};

/// Maximum number of adapters that an executor holds.
pub const ADAPTER_SLOTS_MAX: u32 = 64;

/// Adapter in a slot of the executor. Sequences share the value, so a slot is in use as long as a
/// sequence has it.
#[derive(Debug, PartialEq, Eq)]
pub struct LoadedAdapter {
    pub slot: u32,
    /// Hash of the adapter's weights. KV of the adapter is keyed by it.
    pub content_hash: u128,
}

/// Slots of adapters, which may change while steps run.
pub trait AdapterSlots: Send + Sync {
    /// Reads the executor's shard of the adapter in `folder`. `rank_max` is the largest allowed
    /// LoRA rank.
    fn open(&self, folder: &Path, rank_max: u32) -> Result<Adapter, ModelError>;

    /// Replaces the adapter in a slot that no sequence uses; `None` empties the slot.
    fn set(&self, slot: u32, adapter: Option<Adapter>);
}
