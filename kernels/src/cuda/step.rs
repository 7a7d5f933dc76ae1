//! The rows of one forward on the GPU, prepared there.

use std::sync::Arc;

use super::{batch::BatchMemory, ffi, plan::StepRows};
use crate::layout::{BLOCK_TOKENS, KvLayout};

/// One forward: what the kernels read lies on the device; this names it and its sizes.
#[derive(Debug)]
pub struct CudaStep {
    memory: Arc<BatchMemory>,
    /// No two steps of a process have the same.
    serial: u64,
    rows: usize,
    samples: usize,
    row_indptr: Vec<i32>,
    page_indptr: Vec<i32>,
    kv_lengths: Vec<i32>,
}

impl CudaStep {
    pub(super) fn new(memory: Arc<BatchMemory>, serial: u64, sequences: &[StepRows]) -> Self {
        let (mut row_indptr, mut page_indptr) = (vec![0], vec![0]);
        let mut kv_lengths = Vec::with_capacity(sequences.len());
        let (mut rows, mut pages, mut samples) = (0, 0, 0);
        for sequence in sequences {
            let length = (sequence.position + sequence.rows) as usize;
            rows += sequence.rows as usize;
            pages += length.div_ceil(BLOCK_TOKENS);
            samples += sequence.samples as usize;
            row_indptr.push(rows as i32);
            page_indptr.push(pages as i32);
            kv_lengths.push(length as i32);
        }
        Self { memory, serial, rows, samples, row_indptr, page_indptr, kv_lengths }
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

    pub fn kv_layout(&self) -> KvLayout {
        self.memory.kv_layout()
    }

    pub(super) fn serial(&self) -> u64 {
        self.serial
    }

    pub(super) fn kv(&self) -> &ffi::Kv {
        &self.memory.kv
    }

    pub(super) fn pool(&self) -> &ffi::Pool {
        &self.memory.pool
    }

    pub(super) fn arrays(&self) -> &ffi::Step {
        &self.memory.step
    }

    /// Points into this value.
    pub(super) fn host_batch(&self) -> ffi::AttentionBatch {
        ffi::AttentionBatch {
            row_indptr_host: self.row_indptr.as_ptr(),
            page_indptr_host: self.page_indptr.as_ptr(),
            kv_lengths_host: self.kv_lengths.as_ptr(),
            sequences: self.sequences() as i32,
            rows: self.rows as i32,
            is_graph: 0,
            reserved: 0,
        }
    }
}
