//! Launches attention kernels, and owns their workspaces and the plans of the current step.
//!
//! FlashInfer needs a plan per step and attention shape: the host computes how CTAs share the work
//! and copies the plan to the device. Baton's decode attention and plain kernel need no plan of the
//! host.
//!
//! Only Baton's decode attention reads KV in FP8. For a step with prompts, the KV of the prompts'
//! sequences is converted to bf16, layer by layer.

use std::{ffi::c_void, ops::Range as Span, sync::Arc};

use super::{
    context::{Compute, Context, Event, Stream},
    error::CudaError,
    ffi::{self, kv_format_code, window_code},
    library::KernelLibrary,
    memory::{ALIGNMENT, DeviceMemory, PinnedMemory, Range},
    step::CudaStep,
};
use crate::{
    backend::{HeadShape, LayerAttention},
    layout::{Dtype, KvFormat},
};

/// Bytes of FlashInfer's float workspace, for partial results of split sequences. FlashInfer
/// rejects a plan that needs more.
const FLOAT_BYTES: usize = 288 << 20;
/// Bytes of one plan on the device, and of its pinned copy on the host: the size that FlashInfer's
/// Python API allocates.
const INT_BYTES: usize = 8 << 20;
/// Number of plan buffers, used round-robin: enough for two steps in flight with two attention
/// shapes each (layers with and without a sliding window). With three or four shapes a step, the
/// host waits for the copies of the previous step's plans. More shapes are an error.
const PLAN_BUFFERS: usize = 4;
/// Description of [`PLAN_BUFFERS`] in an error.
const PLANS_ALLOWED: &str = "at most 4";

/// Maximum rows of a launch of Baton's decode attention. With KV in FP8, a larger step has several
/// launches. With KV in bf16, a larger decode step uses FlashInfer, and a larger step that verifies
/// draft tokens the plain kernel.
const DECODE_ROWS_MAX: usize = 1024;
/// Maximum query heads per KV head of Baton's decode attention.
const DECODE_GROUP_MAX: usize = 16;
/// Maximum KV heads of Baton's decode attention.
const DECODE_KV_HEADS_MAX: usize = 128;
/// Head dimensions of Baton's decode attention.
const DECODE_HEAD_DIMS: [usize; 3] = [64, 128, 256];

/// Choice of the attention kernel. Steps in f32 always use the plain kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKind {
    /// The fastest kernel that supports step and shape. Steps of up to 1,024 rows that all decode
    /// or verify draft tokens use Baton's decode attention, other steps FlashInfer. The plain
    /// kernel serves shapes that neither supports, and larger steps that verify draft tokens. With
    /// KV in FP8, rows of prompts use FlashInfer and other rows Baton's decode attention.
    Auto,
    /// FlashInfer also in decode steps. The plain kernel serves steps that verify draft tokens and
    /// shapes that FlashInfer does not support.
    Flash,
    /// Baton's plain kernel, which supports every shape. It is batch-invariant: the result of a row
    /// depends neither on the batch nor on the chunks of a prefill.
    Plain,
}

/// Returns whether attention of these heads can read KV in FP8.
pub fn supports_fp8_kv(heads: HeadShape) -> bool {
    DecodeAttention::supports(heads, KvFormat::Fp8)
}

/// Operands of one layer's attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionAddresses {
    pub queries: ffi::Address,
    /// Elements from one row of `queries` to the next.
    pub query_stride: usize,
    /// Attention sinks of the query heads, or null.
    pub sinks: ffi::Address,
    pub out: ffi::Address,
}

/// Attention kernels of one stream.
pub(super) struct Attention {
    kind: AttentionKind,
    /// Baton's decode attention, only with [`AttentionKind::Auto`].
    decode: Option<DecodeAttention>,
    /// FlashInfer's float workspace, which the kernels of all steps use one after another.
    floats: Range,
    buffers: Vec<PlanBuffer>,
    /// Index in `buffers` of the buffer for the next plan.
    next_buffer: usize,
    /// Serial number of the step that `plans` belong to.
    serial: u64,
    /// Plans of the current step, one per attention shape.
    plans: Vec<PlannedAttention>,
}

/// Baton's decode attention, which needs no plan of the host: its CTAs divide the KV pages among
/// themselves on the device.
struct DecodeAttention {
    /// Partial results of sequences that several CTAs share.
    partial: Range,
    /// Number of finished CTAs per row and KV head: the last CTA adds the partial results. Zero
    /// between launches.
    counters: Range,
    /// Number of SMs that the kernel uses.
    sms: i32,
    /// Whether the kernel is launched with programmatic dependent launch (PDL): it may start while
    /// earlier kernels run. Before its wait it reads only data that are older than the GEMM of
    /// queries, keys and values.
    dependent_launch: bool,
}

/// Rows of one launch of [`DecodeAttention`].
struct DecodeRows {
    sequences: Span<usize>,
    /// Index of the first row among the rows of its sequence; above 0 only for one sequence.
    first: usize,
    /// Rows of every sequence.
    tokens: usize,
}

/// Buffers of one plan.
struct PlanBuffer {
    /// The plan on the device.
    ints: Range,
    /// The plan on the host, from which the stream copies it to `ints`.
    pinned: PinnedMemory<u8>,
    /// Event that the stream passes after the copy from `pinned`. The host may write `pinned` when
    /// the event is done.
    copied: Event,
}

/// Plan of the current step for one attention shape.
struct PlannedAttention {
    shape: ffi::AttentionShape,
    plan: ffi::AttentionPlan,
    /// Index in `Attention::buffers`.
    buffer: usize,
}

impl Attention {
    pub(super) fn new(
        context: &Arc<Context>,
        library: &KernelLibrary,
        stream: &Stream<Compute>,
        kind: AttentionKind,
        sms: i32,
        dependent_launch: bool,
    ) -> Result<Self, CudaError> {
        let (floats, ints) = match kind {
            AttentionKind::Auto | AttentionKind::Flash => (FLOAT_BYTES, INT_BYTES),
            AttentionKind::Plain => (0, 0),
        };
        let decode = match kind {
            AttentionKind::Auto => {
                Some(DecodeAttention::new(context, library, stream, sms, dependent_launch)?)
            }
            AttentionKind::Flash | AttentionKind::Plain => None,
        };
        let memory =
            DeviceMemory::new(context, "attention's workspace", floats + PLAN_BUFFERS * ints)?;
        let floats = memory.cut(floats)?;
        let buffer = |_| {
            let pinned = PinnedMemory::zeroed(context, "attention's plans", ints)?;
            Ok(PlanBuffer { ints: memory.cut(ints)?, pinned, copied: Event::new(context)? })
        };
        let buffers = (0..PLAN_BUFFERS).map(buffer).collect::<Result<_, CudaError>>()?;
        Ok(Self { kind, decode, floats, buffers, next_buffer: 0, serial: 0, plans: Vec::new() })
    }

    /// Returns whether a CUDA graph can capture the attention of a decode step: only kernels
    /// without a plan of the host can be replayed with other sequence lengths.
    pub(super) fn can_be_captured(&self, heads: HeadShape, format: KvFormat) -> bool {
        match self.kind_of(format) {
            AttentionKind::Auto => DecodeAttention::supports(heads, format),
            AttentionKind::Plain => true,
            AttentionKind::Flash => false,
        }
    }

    /// Returns the choice of the kernel for a format of KV. Only the plain kernel supports f32.
    fn kind_of(&self, format: KvFormat) -> AttentionKind {
        match format {
            KvFormat::F32 => AttentionKind::Plain,
            KvFormat::Bf16 | KvFormat::Fp8 => self.kind,
        }
    }

    /// Launches the attention of one layer on `stream`.
    pub(super) fn run(
        &mut self,
        library: &KernelLibrary,
        stream: &Stream<Compute>,
        step: &CudaStep,
        attention: LayerAttention,
        addresses: AttentionAddresses,
    ) -> Result<(), CudaError> {
        if step.kv_layout().format == KvFormat::Fp8 {
            return self.run_fp8(library, stream, step, attention, addresses);
        }
        let whole = 0..step.sequences();
        if let Some(decode) = &self.decode
            && (step.is_decode() || step.verified() > 0)
            && step.rows() <= DECODE_ROWS_MAX
            && DecodeAttention::supports(attention.heads, step.kv_layout().format)
        {
            let rows = DecodeRows { sequences: whole, first: 0, tokens: step.verified().max(1) };
            return decode.run(library, stream, step, rows, attention, addresses);
        }
        let layer = step.layer_in_block(attention.layer);
        let pages = step.layer_arrays(attention.layer).page_indices;
        let kv = (step.kv(), layer, pages);
        self.run_planned(library, stream, step, (whole.end, kv), attention, addresses)
    }

    /// Launches the attention of one layer whose KV is in FP8. The KV of the prompts at the front of
    /// the step is converted as far as the memory for it suffices, which it does unless several
    /// prompts have long cached prefixes. Decode attention serves all other sequences.
    fn run_fp8(
        &mut self,
        library: &KernelLibrary,
        stream: &Stream<Compute>,
        step: &CudaStep,
        attention: LayerAttention,
        addresses: AttentionAddresses,
    ) -> Result<(), CudaError> {
        let memory = step.dequantized().expect("a batch with KV in FP8 has memory for bf16");
        let last_is_prompt_that_fits = |count: usize| {
            step.rows_of(count - 1..count).len() > 1
                && step.pages_of_first(count) <= memory.kv.block_count as usize
        };
        let prompts = match step.verified() {
            0 => (1..=step.sequences()).take_while(|it| last_is_prompt_that_fits(*it)).count(),
            _ => 0,
        };
        if prompts > 0 {
            let layer = step.layer_in_block(attention.layer) as i32;
            let pages = step.layer_arrays(attention.layer).page_indices;
            let count = step.pages_of_first(prompts) as i32;
            // SAFETY: the step's pages are blocks of the arena, and as many fit into the memory.
            unsafe {
                launch!(
                    library,
                    stream,
                    baton_dequantize_kv(step.kv(), layer, pages, count, memory.kv.base)
                )
            }?;
            let kv = (&memory.kv, 0, memory.pages);
            self.run_planned(library, stream, step, (prompts, kv), attention, addresses)?;
        }
        let decode = self.decode.as_ref().expect("FP8 was checked when the model was loaded");
        let row_count = |sequence: usize| step.rows_of(sequence..sequence + 1).len();
        let mut begin = prompts;
        while begin < step.sequences() {
            let rows = row_count(begin);
            let sequences_max = (DECODE_ROWS_MAX / rows).max(1);
            let equal = (begin..step.sequences()).take_while(|it| row_count(*it) == rows);
            let end = begin + equal.take(sequences_max).count();
            for first in (0..rows).step_by(DECODE_ROWS_MAX) {
                let tokens = (rows - first).min(DECODE_ROWS_MAX);
                let rows = DecodeRows { sequences: begin..end, first, tokens };
                decode.run(library, stream, step, rows, attention, addresses)?;
            }
            begin = end;
        }
        Ok(())
    }

    /// Launches the attention of the first `sequences` sequences by a kernel with a plan. `kv`: the
    /// blocks, the index of the layer in a block, and the list of the step's pages.
    fn run_planned(
        &mut self,
        library: &KernelLibrary,
        stream: &Stream<Compute>,
        step: &CudaStep,
        (sequences, (kv, layer, page_indices)): (usize, (&ffi::Kv, usize, ffi::Address)),
        attention: LayerAttention,
        addresses: AttentionAddresses,
    ) -> Result<(), CudaError> {
        let LayerAttention { heads, scale, window, .. } = attention;
        let shape = ffi::AttentionShape {
            query_heads: heads.query_heads as i32,
            kv_heads: heads.kv_heads as i32,
            head_dim: heads.head_dim as i32,
            dtype: kv.dtype,
            window: window_code(window),
            scale,
        };
        let batch = step.host_batch(sequences);
        let rows = batch.rows;
        let index = self.plan_index(library, stream, step, (shape, batch))?;
        let planned = &self.plans[index];
        let workspace = self.workspace(planned.buffer);
        let AttentionAddresses { queries, query_stride, sinks, out } = addresses;
        // SAFETY: the step's arrays and KV blocks were allocated for its rows; the caller has
        // checked the sizes of queries and output; plan and workspace belong together.
        unsafe {
            launch!(
                library,
                stream,
                baton_attention_run(
                    &planned.plan,
                    &shape,
                    &workspace,
                    kv,
                    layer as i32,
                    queries,
                    query_stride as i64,
                    &ffi::StepArrays { page_indices, ..*step.arrays() },
                    sinks,
                    out,
                    sequences as i32,
                    rows
                )
            )
        }
    }

    /// Returns the index in `plans` of the current step's plan for `shape`. The first layer with
    /// this shape creates the plan and enqueues its copy.
    fn plan_index(
        &mut self,
        library: &KernelLibrary,
        stream: &Stream<Compute>,
        step: &CudaStep,
        (shape, batch): (ffi::AttentionShape, ffi::AttentionBatch),
    ) -> Result<usize, CudaError> {
        if self.serial != step.serial() {
            self.serial = step.serial();
            self.plans.clear();
        }
        if let Some(index) = self.plans.iter().position(|planned| planned.shape == shape) {
            return Ok(index);
        }
        if self.plans.len() == self.buffers.len() {
            return Err(CudaError::Unsupported {
                what: "the number of different attention shapes in one step",
                value: (self.plans.len() + 1).to_string(),
                allowed: PLANS_ALLOWED,
            });
        }
        let kind = match step.verified() {
            0 => self.kind_of(step.kv_layout().format),
            // FlashInfer's plan needs the sequence lengths. With draft tokens, only the device
            // knows them.
            _ => AttentionKind::Plain,
        };
        let buffer = self.next_buffer;
        self.next_buffer = (self.next_buffer + 1) % self.buffers.len();
        // The plain kernel's plan is empty. Without a copy, a CUDA graph can capture the kernel.
        let copies = kind != AttentionKind::Plain;
        // An earlier step used the buffer. Its copy is usually complete: the host is at most two
        // steps ahead of the device.
        let copied = &self.buffers[buffer].copied;
        if copies && !copied.is_done()? {
            copied.synchronize()?;
        }
        let mut plan = ffi::AttentionPlan::default();
        let workspace = self.workspace(buffer);
        let kind_code = match kind {
            AttentionKind::Auto | AttentionKind::Flash => ffi::ATTENTION_AUTO,
            AttentionKind::Plain => ffi::ATTENTION_PLAIN,
        };
        // SAFETY: the host arrays have an element per sequence, and one more where required;
        // nothing else accesses the pinned buffer until its copy completes.
        unsafe {
            launch!(
                library,
                stream,
                baton_attention_prepare(kind_code, &shape, &batch, &workspace, &mut plan)
            )
        }?;
        if copies {
            self.buffers[buffer].copied.record(stream)?;
        }
        self.plans.push(PlannedAttention { shape, plan, buffer });
        Ok(self.plans.len() - 1)
    }

    /// Returns the workspace of FlashInfer with the plan buffer at index `buffer`.
    fn workspace(&self, buffer: usize) -> ffi::AttentionWorkspace {
        let PlanBuffer { ints, pinned, .. } = &self.buffers[buffer];
        ffi::AttentionWorkspace {
            floats: self.floats.address(),
            float_bytes: self.floats.bytes() as u64,
            ints: ints.address(),
            int_bytes: ints.bytes() as u64,
            pinned_host: pinned.base().cast::<c_void>(),
        }
    }
}

impl DecodeAttention {
    /// Allocates the buffers for the largest supported shape.
    fn new(
        context: &Arc<Context>,
        library: &KernelLibrary,
        stream: &Stream<Compute>,
        sms: i32,
        dependent_launch: bool,
    ) -> Result<Self, CudaError> {
        // The size grows with each argument, so the workspace for the limits is enough for every
        // supported shape.
        // SAFETY: the function only computes a size from its arguments.
        let partial = unsafe {
            (library.functions().baton_decode_attention_workspace)(
                sms,
                DECODE_KV_HEADS_MAX as i32,
                DECODE_GROUP_MAX as i32,
                DECODE_HEAD_DIMS[2] as i32,
            )
        };
        let Some(partial) = usize::try_from(partial).ok().filter(|bytes| *bytes > 0) else {
            return Err(library.failure("baton_decode_attention_workspace"));
        };
        let counters = DECODE_ROWS_MAX * DECODE_KV_HEADS_MAX * size_of::<i32>();
        let bytes = partial.next_multiple_of(ALIGNMENT) + counters;
        let memory = DeviceMemory::new(context, "decode attention's workspace", bytes)?;
        let (partial, counters) = (memory.cut(partial)?, memory.cut(counters)?);
        counters.fill(0, stream)?;
        Ok(Self { partial, counters, sms, dependent_launch })
    }

    /// Returns whether the kernel supports these heads and this format of KV.
    fn supports(heads: HeadShape, format: KvFormat) -> bool {
        format != KvFormat::F32
            && DECODE_HEAD_DIMS.contains(&heads.head_dim)
            && heads.kv_heads <= DECODE_KV_HEADS_MAX
            && heads.query_heads / heads.kv_heads <= DECODE_GROUP_MAX
    }

    fn run(
        &self,
        library: &KernelLibrary,
        stream: &Stream<Compute>,
        step: &CudaStep,
        DecodeRows { sequences, first, tokens }: DecodeRows,
        attention: LayerAttention,
        AttentionAddresses { queries, query_stride, sinks, out }: AttentionAddresses,
    ) -> Result<(), CudaError> {
        let LayerAttention { layer, heads, scale, window } = attention;
        let first_row = step.rows_of(sequences.clone()).start + first;
        let row_offset = |width: usize| (first_row * width * Dtype::Bf16.bytes()) as u64;
        let int_offset = |index: usize| (index * size_of::<i32>()) as u64;
        let addresses = step.layer_addresses(layer);
        let arrays = step.layer_arrays(layer);
        let args = ffi::DecodeAttentionArgs {
            q: queries + row_offset(query_stride),
            q_stride: query_stride as i64,
            k: addresses.keys,
            v: addresses.values,
            stride_block: addresses.block_stride,
            stride_head: addresses.head_stride,
            stride_token: addresses.token_stride,
            pages: arrays.page_indices,
            page_indptr: arrays.page_indptr + int_offset(sequences.start),
            kv_len: arrays.kv_lengths + int_offset(sequences.start),
            positions: arrays.row_positions + int_offset(first_row),
            out: out + row_offset(heads.query_width()),
            out_stride: heads.query_width() as i64,
            partial: self.partial.address(),
            counters: self.counters.address(),
            rows: sequences.len() as i32,
            tokens: tokens as i32,
            kv_dtype: kv_format_code(step.kv_layout().format),
            kv_heads: heads.kv_heads as i32,
            group: (heads.query_heads / heads.kv_heads) as i32,
            head_dim: heads.head_dim as i32,
            window: window_code(window),
            scale,
            sms: self.sms,
            pdl: self.dependent_launch.into(),
            sinks,
        };
        // SAFETY: the step's arrays and KV blocks were allocated for its rows; the caller has
        // checked the sizes of queries and output; the workspace fits the largest shape and belongs
        // to this stream.
        unsafe { launch!(library, stream, baton_decode_attention(&args)) }
    }
}
