//! The LoRA adapter that a sequence computes with.

/// Adapter in a slot of the executor. Sequences share the value, so a slot is in use as long as a
/// sequence has it.
#[derive(Debug, PartialEq, Eq)]
pub struct LoadedAdapter {
    pub slot: u32,
    /// Hash of the adapter's weights. KV of the adapter is keyed by it.
    pub content_hash: u128,
}
