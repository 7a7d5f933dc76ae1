//! Workspaces of attention, and the attention plans of the current step.

use std::{ffi::c_void, sync::Arc};

use super::{
    context::{Compute, Context, Event, Stream},
    error::CudaError,
    ffi::{self, dtype_code},
    library::KernelLibrary,
    memory::{ALIGNMENT, DeviceMemory, PinnedMemory, Range},
    step::CudaStep,
};
use crate::{
    backend::{HeadShape, LayerAttention},
    layout::Dtype,
};

const FLOAT_BYTES: usize = 256 << 20;
const INT_BYTES: usize = 8 << 20;
/// Plans in flight: two steps with two attention windows each.
const PLAN_BUFFERS: usize = 4;

/// Limits of Baton's decode attention.
const DECODE_ROWS_MAX: usize = 1024;
const DECODE_GROUP_MAX: usize = 8;
const DECODE_KV_HEADS_MAX: usize = 128;
const DECODE_HEAD_DIMS: [usize; 2] = [64, 128];

/// Kernel that computes attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKind {
    /// The fastest that supports the shape: Baton's decode attention where every row decodes or verifies draft
    /// tokens, else FlashInfer.
    Auto,
    /// FlashInfer wherever it supports the shape.
    Flash,
    /// Baton's plain kernel, which supports every shape. A row's result does not depend on batch or chunk.
    Plain,
}

/// Attention of one stream.
pub(super) struct Attention {
    kind: AttentionKind,
    decode: Option<DecodeAttention>,
    floats: Range,
    buffers: Vec<PlanBuffer>,
    /// Index of the next entry of `buffers` to use.
    next: usize,
    /// Serial number of the step that the plans are for.
    serial: u64,
    plans: Vec<PlannedAttention>,
}

/// Buffers of Baton's decode attention, which has no host plan: its CTAs split the pages on the device.
struct DecodeAttention {
    partial: Range,
    /// Zero between launches.
    counters: Range,
    /// SMs that share the pages.
    sms: i32,
    /// Whether the kernel may start while its predecessor ends. The predecessor must release the kernel only
    /// after its own wait.
    starts_early: bool,
}

/// Buffers of one plan.
struct PlanBuffer {
    ints: Range,
    pinned: PinnedMemory<u8>,
    /// Recorded when the copy from `pinned` has completed.
    copied: Event,
}

struct PlannedAttention {
    shape: ffi::AttentionShape,
    plan: ffi::AttentionPlan,
    buffer: usize,
}

impl Attention {
    pub fn new(
        context: &Arc<Context>,
        library: &KernelLibrary,
        stream: &Stream<Compute>,
        kind: AttentionKind,
        sms: i32,
        starts_early: bool,
    ) -> Result<Self, CudaError> {
        let (floats, ints) = match kind {
            AttentionKind::Auto | AttentionKind::Flash => (FLOAT_BYTES, INT_BYTES),
            AttentionKind::Plain => (0, 0),
        };
        let decode = match kind {
            AttentionKind::Auto => {
                Some(DecodeAttention::new(context, library, stream, sms, starts_early)?)
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
        Ok(Self { kind, decode, floats, buffers, next: 0, serial: 0, plans: Vec::new() })
    }

    /// Returns whether a decode step's attention can be captured: it has no host plan.
    pub fn can_be_captured(&self, heads: HeadShape, dtype: Dtype) -> bool {
        match self.kind_of(dtype) {
            AttentionKind::Auto => DecodeAttention::serves(heads, dtype),
            AttentionKind::Plain => true,
            AttentionKind::Flash => false,
        }
    }

    /// Returns the kernel for this type; only the plain kernel supports f32.
    fn kind_of(&self, dtype: Dtype) -> AttentionKind {
        match dtype {
            Dtype::F32 => AttentionKind::Plain,
            Dtype::Bf16 => self.kind,
        }
    }

    /// Launches the attention of one layer on `stream`.
    pub fn run(
        &mut self,
        library: &KernelLibrary,
        stream: &Stream<Compute>,
        step: &CudaStep,
        attention: LayerAttention,
        (queries, query_stride): (ffi::Address, usize),
        out: ffi::Address,
    ) -> Result<(), CudaError> {
        let LayerAttention { layer, heads, scale, window } = attention;
        if let Some(decode) = &self.decode
            && (step.is_decode() || step.verified() > 0)
            && step.rows() <= DECODE_ROWS_MAX
            && DecodeAttention::serves(heads, step.kv_layout().dtype)
        {
            let queries = (queries, query_stride);
            return decode.run(library, stream, step, attention, queries, out);
        }
        let shape = ffi::AttentionShape {
            query_heads: heads.query_heads as i32,
            kv_heads: heads.kv_heads as i32,
            head_dim: heads.head_dim as i32,
            dtype: dtype_code(step.kv_layout().dtype),
            window: window.map_or(0, |window| i32::try_from(window.get()).unwrap_or(0)),
            scale,
        };
        let index = self.planned(library, stream, step, shape)?;
        let planned = &self.plans[index];
        let workspace = self.workspace(planned.buffer);
        // SAFETY: the step's arrays and KV blocks were allocated for its rows; the caller has checked the
        // sizes of queries and output; plan and workspace belong together.
        unsafe {
            launch!(
                library,
                stream,
                baton_attention_run(
                    &planned.plan,
                    &shape,
                    &workspace,
                    step.kv(),
                    layer as i32,
                    queries,
                    query_stride as i64,
                    step.arrays(),
                    out,
                    step.sequences() as i32,
                    step.rows() as i32
                )
            )
        }
    }

    /// Returns the plan of this shape, which the first layer of that shape creates.
    fn planned(
        &mut self,
        library: &KernelLibrary,
        stream: &Stream<Compute>,
        step: &CudaStep,
        shape: ffi::AttentionShape,
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
                what: "the number of different attention windows",
                value: (self.plans.len() + 1).to_string(),
                allowed: "at most 4",
            });
        }
        let kind = match step.verified() {
            0 => self.kind_of(step.kv_layout().dtype),
            // The other kernels need a host plan, and only the device knows the lengths.
            _ => AttentionKind::Plain,
        };
        let buffer = self.next;
        self.next = (self.next + 1) % self.buffers.len();
        // The plain kernel's plan is empty. No copy is enqueued, so the kernel can be captured.
        let copies = kind != AttentionKind::Plain;
        // This buffer belongs to the step before last, which is complete unless the host is far ahead.
        let copied = &self.buffers[buffer].copied;
        if copies && !copied.is_done()? {
            copied.synchronize()?;
        }
        let mut plan = ffi::AttentionPlan::default();
        let workspace = self.workspace(buffer);
        let kind_code = match kind {
            AttentionKind::Auto | AttentionKind::Flash => 0,
            AttentionKind::Plain => 1,
        };
        // SAFETY: the host arrays have an element per sequence, and one more where required; nothing else
        // accesses the pinned buffer until its copy completes.
        unsafe {
            let batch = step.host_batch();
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
    fn new(
        context: &Arc<Context>,
        library: &KernelLibrary,
        stream: &Stream<Compute>,
        sms: i32,
        starts_early: bool,
    ) -> Result<Self, CudaError> {
        // SAFETY: the function only computes a size from four numbers. The size grows with each of them.
        let partial = unsafe {
            (library.functions().baton_decode_attention_workspace)(
                sms,
                DECODE_KV_HEADS_MAX as i32,
                DECODE_GROUP_MAX as i32,
                DECODE_HEAD_DIMS[1] as i32,
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
        Ok(Self { partial, counters, sms, starts_early })
    }

    fn serves(heads: HeadShape, dtype: Dtype) -> bool {
        dtype == Dtype::Bf16
            && DECODE_HEAD_DIMS.contains(&heads.head_dim)
            && heads.kv_heads <= DECODE_KV_HEADS_MAX
            && heads.query_heads / heads.kv_heads <= DECODE_GROUP_MAX
    }

    fn run(
        &self,
        library: &KernelLibrary,
        stream: &Stream<Compute>,
        step: &CudaStep,
        attention: LayerAttention,
        (queries, query_stride): (ffi::Address, usize),
        out: ffi::Address,
    ) -> Result<(), CudaError> {
        let LayerAttention { layer, heads, scale, window } = attention;
        let addresses = step.layer_addresses(layer);
        let arrays = step.arrays();
        let args = ffi::DecodeAttentionArgs {
            q: queries,
            q_stride: query_stride as i64,
            k: addresses.keys,
            v: addresses.values,
            stride_block: addresses.block_stride,
            stride_head: addresses.head_stride,
            stride_token: addresses.token_stride,
            pages: arrays.page_indices,
            page_indptr: arrays.page_indptr,
            kv_len: arrays.kv_lengths,
            positions: arrays.row_positions,
            out,
            out_stride: heads.query_width() as i64,
            partial: self.partial.address(),
            counters: self.counters.address(),
            rows: step.sequences() as i32,
            tokens: step.verified() as i32,
            kv_heads: heads.kv_heads as i32,
            group: (heads.query_heads / heads.kv_heads) as i32,
            head_dim: heads.head_dim as i32,
            window: window.map_or(0, |window| i32::try_from(window.get()).unwrap_or(0)),
            scale,
            sms: self.sms,
            pdl: self.starts_early.into(),
            ..ffi::DecodeAttentionArgs::default()
        };
        // SAFETY: the step's arrays and KV blocks were allocated for its rows; the caller has checked the
        // sizes of queries and output; the workspace fits the largest shape and belongs to this stream.
        unsafe { launch!(library, stream, baton_decode_attention(&args)) }
    }
}
