//! The rows of one forward pass, prepared on the GPU.

use std::{ops::Range, sync::Arc};

use super::{
    batch_memory::{BatchMemory, DequantizedKv},
    ffi,
    plan::StepRows,
};
use crate::layout::{BLOCK_TOKENS, KvHalf, KvLayout};

/// One forward pass: addresses and sizes of the arrays that its kernels read.
#[derive(Debug)]
pub struct CudaStep {
    memory: Arc<BatchMemory>,
    /// Unique within the process.
    serial: u64,
    rows: usize,
    samples: usize,
    /// Rows of every sequence in a step that verifies draft tokens, else 0.
    verified: usize,
    /// Whether every sequence has one row, which samples.
    is_decode: bool,
    /// Whether a row may have an adapter.
    has_adapters: bool,
    /// Sampling kernels that any row needs.
    needs: i32,
    row_indptr: Vec<i32>,
    page_indptr: Vec<i32>,
    kv_lengths: Vec<i32>,
}

impl CudaStep {
    /// Creates a step of these sequences. The device pads the step with sequences of one row up to
    /// `sequences_min`. With `verified` above 0, every sequence has this many rows, all of which
    /// sample.
    pub(super) fn new(
        memory: Arc<BatchMemory>,
        serial: u64,
        sequences: &[StepRows],
        sequences_min: usize,
        verified: usize,
        (needs, has_adapters): (i32, bool),
    ) -> Self {
        let (mut row_indptr, mut page_indptr) = (vec![0], vec![0]);
        let mut kv_lengths = Vec::with_capacity(sequences.len());
        let (mut rows, mut pages, mut samples) = (0, 0, 0);
        let is_decode = verified == 0
            && sequences.iter().all(|sequence| (sequence.rows, sequence.samples) == (1, 1));
        let filling = sequences_min.saturating_sub(sequences.len());
        let filling = std::iter::repeat_n(StepRows::FILLING, filling);
        for sequence in sequences.iter().copied().chain(filling) {
            let length = (sequence.position + sequence.rows) as usize;
            rows += if verified > 0 { verified } else { sequence.rows as usize };
            pages += length.div_ceil(BLOCK_TOKENS);
            samples += if verified > 0 { verified } else { sequence.samples as usize };
            row_indptr.push(rows as i32);
            page_indptr.push(pages as i32);
            kv_lengths.push(length as i32);
        }
        Self {
            memory,
            serial,
            rows,
            samples,
            verified,
            is_decode,
            has_adapters,
            needs,
            row_indptr,
            page_indptr,
            kv_lengths,
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn samples(&self) -> usize {
        self.samples
    }

    pub fn sequences(&self) -> usize {
        self.kv_lengths.len()
    }

    /// Returns whether every sequence has one row, which samples. Then the sampled rows are all
    /// rows in order; for padding rows the first row is sampled again.
    pub fn is_decode(&self) -> bool {
        self.is_decode
    }

    /// Returns the rows of every sequence in a step that verifies draft tokens, else 0. Only the
    /// device knows the lengths of such a step's sequences.
    pub fn verified(&self) -> usize {
        self.verified
    }

    /// Returns the layout of the KV of all layers.
    pub fn kv_layout(&self) -> KvLayout {
        self.memory.kv_layout()
    }

    pub(super) fn has_adapters(&self) -> bool {
        self.has_adapters
    }

    pub(super) fn serial(&self) -> u64 {
        self.serial
    }

    pub(super) fn kv(&self) -> &ffi::Kv {
        &self.memory.kv
    }

    pub(super) fn pool(&self) -> &ffi::SlotPool {
        &self.memory.pool
    }

    /// Returns the address of the first entry of the recurrent state in the block table of slot 0.
    pub(super) fn state_tables(&self) -> ffi::Address {
        let entries = self.state_entries();
        self.pool().block_tables - (entries * size_of::<i32>()) as u64
    }

    /// Returns the entries of the recurrent state in a block table.
    pub(super) fn state_entries(&self) -> usize {
        self.memory.groups.state_entries()
    }

    /// Returns the layout of a block.
    pub(super) fn block_layout(&self) -> KvLayout {
        self.memory.blocks.layout()
    }

    /// Returns the arrays with the destinations and pages of the first KV group.
    pub(super) fn arrays(&self) -> &ffi::StepArrays {
        &self.memory.step
    }

    /// Returns the arrays with the destinations and pages of the layer's KV group.
    pub(super) fn layer_arrays(&self, layer: usize) -> ffi::StepArrays {
        let (group, arrays) = (self.memory.places[layer].0 as u64, self.memory.step);
        let offset = |count: i32| group * count as u64 * size_of::<i32>() as u64;
        ffi::StepArrays {
            row_destinations: arrays.row_destinations + offset(arrays.rows_max),
            page_indices: arrays.page_indices + offset(arrays.pages_max),
            ..arrays
        }
    }

    /// Returns the index of a layer in the blocks of its KV group.
    pub(super) fn layer_in_block(&self, layer: usize) -> usize {
        self.memory.places[layer].1
    }

    pub(super) fn needs(&self) -> i32 {
        self.needs
    }

    /// Returns the addresses of a layer's keys and values in the blocks of its KV group.
    pub(super) fn layer_addresses(&self, layer: usize) -> LayerAddresses {
        let (kv, layout) = (self.kv(), self.kv_layout());
        let half = |half| kv.base + layout.head_offset(self.layer_in_block(layer), half, 0) as u64;
        LayerAddresses {
            keys: half(KvHalf::Key),
            values: half(KvHalf::Value),
            block_stride: kv.block_elements,
            head_stride: (layout.head_bytes() / layout.format.element_bytes()) as i64,
            token_stride: i64::from(kv.head_dim),
        }
    }

    /// Returns the rows of some consecutive sequences.
    pub(super) fn rows_of(&self, sequences: Range<usize>) -> Range<usize> {
        self.row_indptr[sequences.start] as usize..self.row_indptr[sequences.end] as usize
    }

    /// Returns the number of KV pages of the first sequences.
    pub(super) fn pages_of_first(&self, sequences: usize) -> usize {
        self.page_indptr[sequences] as usize
    }

    /// Returns the memory for KV in bf16, if the blocks are in FP8.
    pub(super) fn dequantized(&self) -> Option<&DequantizedKv> {
        self.memory.dequantized.as_ref()
    }

    /// Returns a struct that points into this value, for the first sequences.
    pub(super) fn host_batch(&self, sequences: usize) -> ffi::AttentionBatch {
        ffi::AttentionBatch {
            row_indptr_host: self.row_indptr.as_ptr(),
            page_indptr_host: self.page_indptr.as_ptr(),
            kv_lengths_host: self.kv_lengths.as_ptr(),
            sequences: sequences as i32,
            rows: self.row_indptr[sequences],
        }
    }
}

/// Addresses of a layer's keys and values in block 0, and strides in elements from one block, head
/// and token to the next.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerAddresses {
    pub keys: ffi::Address,
    pub values: ffi::Address,
    pub block_stride: i64,
    pub head_stride: i64,
    pub token_stride: i64,
}
