//! Sizes and layout of the batch's GPU memory.

use std::sync::Arc;

use super::pooled_bytes;
use crate::{
    cuda::{
        backend::CudaBackend,
        batch_memory::{BatchLimits, BatchMemory, DequantizedKv},
        error::CudaError,
        ffi::{self, kv_format_code, window_code},
        kv::DeviceKv,
        memory::{DeviceMemory, Range},
        plan,
        sample::{self, Sampler},
    },
    layout::{BLOCK_TOKENS, GROUPS_MAX, KvFormat, KvGroups, KvLayout},
};

/// Words of a plan for the prompt tokens of admitted sequences, beyond the minimum.
const PLAN_WORDS: usize = 1 << 16;

pub(super) fn plan_words(limits: &BatchLimits) -> usize {
    plan::words_min(limits.slots as usize) + PLAN_WORDS
}

/// Returns the maximum number of words of a plan and its token masks.
pub(super) fn input_words(limits: &BatchLimits) -> usize {
    plan_words(limits) + 4 + limits.samples as usize * sample::mask_words(limits)
}

/// The ranges of [`BatchArraySizes`], the device copies of the upload buffers, the sampler, and the
/// pooled values.
type Ranges = (Vec<Range>, [Range; 2], Sampler, Range);

pub(super) fn lay_out(
    memory: &DeviceMemory,
    backend: &CudaBackend,
    limits: &BatchLimits,
    (layout, groups): (KvLayout, &KvGroups),
) -> Result<Ranges, CudaError> {
    let input_words = input_words(limits);
    let ranges = BatchArraySizes::of(limits, (layout, groups))
        .all()
        .into_iter()
        .map(|bytes| memory.cut(bytes));
    Ok((
        ranges.collect::<Result<_, _>>()?,
        [memory.cut(4 * input_words)?, memory.cut(4 * input_words)?],
        Sampler::new(memory, backend, limits)?,
        memory.cut(pooled_bytes(limits))?,
    ))
}

/// Byte sizes of the arrays of pool and step, in the order of their structs.
pub(super) struct BatchArraySizes {
    pool: [usize; Self::POOL],
    step: [usize; Self::STEP],
    /// Pages and KV of [`DequantizedKv`].
    dequantized: [usize; 2],
    table_width: usize,
    pages: usize,
}

/// Returns the layout of a page of [`DequantizedKv`].
fn dequantized_layout(layout: KvLayout) -> KvLayout {
    KvLayout { layer_count: 1, format: KvFormat::Bf16, ..layout }
}

impl BatchArraySizes {
    const POOL: usize = 7;
    const STEP: usize = 16;
    /// Index of the list of [`DequantizedKv`]'s pages among all arrays.
    pub(super) const DEQUANTIZED_PAGES: usize = Self::POOL + Self::STEP;

    pub(super) fn of(limits: &BatchLimits, (layout, groups): (KvLayout, &KvGroups)) -> Self {
        let (slots, rows) = (limits.slots as usize, limits.rows as usize);
        let samples = limits.samples as usize;
        let tokens = limits.sequence_tokens as usize;
        let table_width = groups.entries(tokens);
        // Sequences may share blocks, and each sequence lists all of its blocks of a group.
        let pages = slots * table_width / groups.count();
        let pool = [
            slots * size_of::<ffi::SlotState>(),
            slots * size_of::<ffi::SlotSampling>(),
            slots * tokens * 4,
            slots * table_width * 4,
            slots * limits.stops as usize * 4,
            slots * sample::rule_words(limits) * 4,
            slots * 4,
        ];
        let step = [
            rows,
            rows,
            groups.count() * rows,
            rows,
            slots + 1,
            slots + 1,
            groups.count() * pages,
            slots,
            slots,
            slots,
            samples,
            samples,
            samples,
            8,
            rows,
            samples,
        ]
        .map(|count| count * 4);
        // The longest sequence alone, or prompts without cached prefixes that fill a step.
        let dequantized = match layout.format {
            KvFormat::F32 | KvFormat::Bf16 => 0,
            KvFormat::Fp8 => table_width / groups.count() + rows / BLOCK_TOKENS + slots,
        };
        let page_bytes = dequantized_layout(layout).block_bytes();
        let dequantized = [dequantized * size_of::<i32>(), dequantized * page_bytes];
        Self { pool, step, dequantized, table_width, pages }
    }

    /// Returns the number of pages of [`DequantizedKv`].
    pub(super) fn dequantized_pages(&self) -> usize {
        self.dequantized[0] / size_of::<i32>()
    }

    fn all(&self) -> Vec<usize> {
        self.pool.iter().chain(&self.step).chain(&self.dequantized).copied().collect()
    }

    /// Fills the structs from the ranges of [`Self::all`].
    pub(super) fn memory(
        &self,
        limits: &BatchLimits,
        ranges: Vec<Range>,
        blocks: Arc<DeviceKv>,
        groups: KvGroups,
    ) -> BatchMemory {
        let at: Vec<ffi::Address> = ranges.iter().map(Range::address).collect();
        let layout = blocks.layout();
        let kv_of = |layout: KvLayout, base, block_count| ffi::Kv {
            base,
            block_elements: (layout.block_bytes() / layout.format.element_bytes()) as i64,
            block_count: block_count as i32,
            layer_count: layout.layer_count as i32,
            head_count: layout.kv_head_count as i32,
            head_dim: layout.head_dim as i32,
            dtype: kv_format_code(layout.format),
            reserved: 0,
        };
        let block_count = blocks.block_count() + DeviceKv::EXTRA_BLOCKS;
        let kv = kv_of(layout, blocks.data().address(), block_count as usize);
        let dequantized_pages = self.dequantized_pages();
        let dequantized = (dequantized_pages > 0).then(|| DequantizedKv {
            kv: kv_of(
                dequantized_layout(layout),
                at[Self::DEQUANTIZED_PAGES + 1],
                dequantized_pages,
            ),
            pages: at[Self::DEQUANTIZED_PAGES],
        });
        let mut windows = [0; GROUPS_MAX];
        for (group, window) in windows.iter_mut().take(groups.count()).enumerate() {
            *window = window_code(groups.window(group));
        }
        let pool = ffi::SlotPool {
            slots: at[0],
            sampling: at[1],
            tokens: at[2],
            // The entries of a state are before those of the KV.
            block_tables: at[3] + (groups.state_entries() * size_of::<i32>()) as u64,
            stop_tokens: at[4],
            rules: at[5],
            slot_count: limits.slots as i32,
            token_width: limits.sequence_tokens as i32,
            table_width: self.table_width as i32,
            stop_width: limits.stops as i32,
            trash_block: blocks.trash_block() as i32,
            rule_width: sample::rule_words(limits) as i32,
            zero_block: blocks.zero_block() as i32,
            group_count: groups.count() as i32,
            windows,
            adapters: at[6],
        };
        let step = ffi::StepArrays {
            row_tokens: at[7],
            row_positions: at[8],
            row_destinations: at[9],
            row_sequences: at[10],
            row_indptr: at[11],
            page_indptr: at[12],
            page_indices: at[13],
            last_page_tokens: at[14],
            kv_lengths: at[15],
            sequence_slots: at[16],
            sampled_rows: at[17],
            sample_slots: at[18],
            sample_masks: at[19],
            counts: at[20],
            rows_max: limits.rows as i32,
            sequences_max: limits.slots as i32,
            pages_max: self.pages as i32,
            samples_max: limits.samples as i32,
            row_adapters: at[21],
            sample_adapters: at[22],
        };
        let places = groups.places();
        BatchMemory { kv, pool, step, blocks, groups, places, dequantized, _ranges: ranges }
    }
}
