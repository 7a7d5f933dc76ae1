//! LoRA adapters of an executor. A sequence names the adapter that it computes with.

use std::path::Path;

use model::ModelError;

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
    /// Loads the adapter in `folder` into a slot that no sequence uses, and returns its content
    /// hash. `rank_max` is the largest allowed rank.
    fn load(&self, slot: u32, folder: &Path, rank_max: u32) -> Result<u128, ModelError>;

    /// Empties a slot that no sequence uses.
    fn unload(&self, slot: u32);
}
