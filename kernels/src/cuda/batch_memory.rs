//! Capacity of the running batch, and its memory on the GPU.

use std::sync::Arc;

use super::{ffi, kv::DeviceKv, memory::Range};
use crate::layout::{KvGroups, KvLayout};

/// Capacity of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    pub slots: u32,
    /// Tokens of the longest sequence, including those that a step in flight adds.
    pub sequence_tokens: u32,
    /// Maximum token rows of one step.
    pub rows: u32,
    pub samples: u32,
    /// Maximum stop tokens of one slot.
    pub stops: u32,
    pub vocabulary: u32,
    /// Width of the hidden states that may be pooled.
    pub hidden: u32,
    /// Maximum number of steps in flight.
    pub depth: u32,
}

/// GPU memory of the batch. The addresses in `pool`, `step` and `kv` point into the other fields'
/// memory.
#[derive(Debug)]
pub(super) struct BatchMemory {
    pub kv: ffi::Kv,
    pub pool: ffi::SlotPool,
    pub step: ffi::StepArrays,
    pub blocks: Arc<DeviceKv>,
    pub groups: KvGroups,
    /// KV group of each layer, and index of the layer in the group's blocks.
    pub places: Vec<(usize, usize)>,
    /// Only if the blocks are in FP8.
    pub dequantized: Option<DequantizedKv>,
    pub _ranges: Vec<Range>,
}

/// Memory for the KV of one layer in bf16, which attention of prompts reads instead of FP8 blocks.
#[derive(Debug)]
pub(super) struct DequantizedKv {
    /// Blocks of one layer: block i is page i of a step.
    pub kv: ffi::Kv,
    /// Array `[blocks]` of the blocks' indices: a list of pages.
    pub pages: ffi::Address,
}

impl BatchMemory {
    /// Returns the layout of the KV of all layers.
    pub(super) fn kv_layout(&self) -> KvLayout {
        KvLayout { layer_count: self.places.len(), ..self.blocks.layout() }
    }
}
