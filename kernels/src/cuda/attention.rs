//! The workspaces of attention, and the plans that the present step has made in them.

use std::{ffi::c_void, num::NonZeroUsize, sync::Arc};

use super::{
    context::{Compute, Context, Event, Stream},
    error::CudaError,
    ffi,
    library::KernelLibrary,
    memory::{ALIGNMENT, DeviceMemory, Pinned, Range},
    step::CudaStep,
};
use crate::{backend::HeadShape, layout::Dtype};

const FLOAT_BYTES: usize = 256 << 20;
const INT_BYTES: usize = 8 << 20;
/// Plans that may be under way: two steps with two windows each.
const PLACES: usize = 4;

/// What our own decode attention is made for.
const DECODE_ROWS_MAX: usize = 1024;
const DECODE_GROUP_MAX: usize = 8;
const DECODE_KV_HEADS_MAX: usize = 128;
const DECODE_HEAD_DIMS: [usize; 2] = [64, 128];

/// Which kernel computes attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKind {
    /// The quickest that serves the shape: our own where every row decodes, FlashInfer's for prompts.
    Auto,
    /// FlashInfer's wherever it serves the shape.
    Flash,
    /// Our own, of every shape. A row's result does not depend on batch or chunk.
    Plain,
}

/// Attention of one stream.
pub(super) struct Attention {
    kind: AttentionKind,
    decode: Option<Decode>,
    floats: Range,
    places: Vec<Place>,
    /// Of `places`, the next to be used.
    next: usize,
    /// Plans of step `serial`.
    serial: u64,
    plans: Vec<Planned>,
}

/// What our own decode attention needs. It makes no plan: its blocks share out the pages on the device.
struct Decode {
    partial: Range,
    /// Zero between calls.
    counters: Range,
    /// Those that share the pages.
    sms: i32,
}

/// Where one plan lies.
struct Place {
    ints: Range,
    pinned: Pinned<u8>,
    /// The copy from `pinned` is over.
    copied: Event,
}

struct Planned {
    shape: ffi::AttentionShape,
    plan: ffi::AttentionPlan,
    place: usize,
}

impl Attention {
    pub fn new(
        context: &Arc<Context>,
        library: &KernelLibrary,
        stream: &Stream<Compute>,
        kind: AttentionKind,
        sms: i32,
    ) -> Result<Self, CudaError> {
        let (floats, ints, places) = match kind {
            AttentionKind::Auto | AttentionKind::Flash => (FLOAT_BYTES, INT_BYTES, PLACES),
            AttentionKind::Plain => (0, 0, PLACES),
        };
        let decode = match kind {
            AttentionKind::Auto => Some(Decode::new(context, library, stream, sms)?),
            AttentionKind::Flash | AttentionKind::Plain => None,
        };
        let memory = DeviceMemory::new(context, "attention's workspace", floats + places * ints)?;
        let floats = memory.cut(floats)?;
        let places = (0..places)
            .map(|_| {
                Ok(Place {
                    ints: memory.cut(ints)?,
                    pinned: Pinned::zeroed(context, "attention's plans", ints)?,
                    copied: Event::new(context)?,
                })
            })
            .collect::<Result<_, CudaError>>()?;
        Ok(Self { kind, decode, floats, places, next: 0, serial: 0, plans: Vec::new() })
    }

    /// True when a decoding step's attention can be recorded: no plan is made for it on the host.
    pub fn can_be_recorded(&self, heads: HeadShape, dtype: Dtype) -> bool {
        match self.kind_of(dtype) {
            AttentionKind::Auto => Decode::serves(heads, dtype),
            AttentionKind::Plain => true,
            AttentionKind::Flash => false,
        }
    }

    /// Nothing but the plain kernel serves f32.
    fn kind_of(&self, dtype: Dtype) -> AttentionKind {
        match dtype {
            Dtype::F32 => AttentionKind::Plain,
            Dtype::Bf16 => self.kind,
        }
    }

    /// Puts the attention of one layer into `stream`. With `starts_early` it may begin while the
    /// kernel before it ends, which must have waited for its own predecessor before it allowed that.
    pub fn run(
        &mut self,
        library: &KernelLibrary,
        stream: &Stream<Compute>,
        step: &CudaStep,
        layer: usize,
        (heads, scale, window): (HeadShape, f32, Option<NonZeroUsize>),
        (queries, query_stride): (ffi::Address, usize),
        out: ffi::Address,
        starts_early: bool,
    ) -> Result<(), CudaError> {
        if let Some(decode) = &self.decode
            && step.is_decode()
            && step.rows() <= DECODE_ROWS_MAX
            && Decode::serves(heads, step.kv_layout().dtype)
        {
            let head = (heads, scale, window);
            let queries = (queries, query_stride);
            return decode.run(library, stream, step, layer, head, queries, out, starts_early);
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
        let workspace = self.workspace(planned.place);
        // SAFETY: the step's arrays and blocks were made for its rows; queries and output were
        // checked by the caller to hold them; plan and workspace belong together.
        let code = unsafe {
            (library.functions().baton_attention_run)(
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
                step.rows() as i32,
                stream.raw().cast(),
            )
        };
        library.check("baton_attention_run", code)
    }

    /// The plan of this shape, made by the first layer that has it.
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
        if self.plans.len() == self.places.len() {
            return Err(CudaError::Unsupported {
                what: "the number of different attention windows",
                value: (self.plans.len() + 1).to_string(),
                allowed: "room for 4",
            });
        }
        let kind = self.kind_of(step.kv_layout().dtype);
        let place = self.next;
        self.next = (self.next + 1) % self.places.len();
        // The plain kernel's plan is nothing but its name: no copy is made, so it can be recorded.
        let copies = kind != AttentionKind::Plain;
        // Of the step before last: over, unless the host is far ahead.
        let copied = &self.places[place].copied;
        if copies && !copied.is_done()? {
            copied.synchronize()?;
        }
        let mut plan = ffi::AttentionPlan::default();
        let workspace = self.workspace(place);
        let kind_code = match kind {
            AttentionKind::Auto | AttentionKind::Flash => 0,
            AttentionKind::Plain => 1,
        };
        // SAFETY: the host's arrays have as many elements as the step has sequences, and one more
        // where that is wanted; nobody else touches the pinned place until its copy is over.
        let code = unsafe {
            (library.functions().baton_attention_prepare)(
                kind_code,
                &shape,
                &step.host_batch(),
                &workspace,
                &mut plan,
                stream.raw().cast(),
            )
        };
        library.check("baton_attention_prepare", code)?;
        if copies {
            self.places[place].copied.record(stream)?;
        }
        self.plans.push(Planned { shape, plan, place });
        Ok(self.plans.len() - 1)
    }

    fn workspace(&self, place: usize) -> ffi::AttentionWorkspace {
        let Place { ints, pinned, .. } = &self.places[place];
        ffi::AttentionWorkspace {
            floats: self.floats.address(),
            float_bytes: self.floats.bytes() as u64,
            ints: ints.address(),
            int_bytes: ints.bytes() as u64,
            pinned_host: pinned.base().cast::<c_void>(),
        }
    }
}

impl Decode {
    fn new(
        context: &Arc<Context>,
        library: &KernelLibrary,
        stream: &Stream<Compute>,
        sms: i32,
    ) -> Result<Self, CudaError> {
        // SAFETY: a function of four numbers, which grows with each of them.
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
        Ok(Self { partial, counters, sms })
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
        layer: usize,
        (heads, scale, window): (HeadShape, f32, Option<NonZeroUsize>),
        (queries, query_stride): (ffi::Address, usize),
        out: ffi::Address,
        starts_early: bool,
    ) -> Result<(), CudaError> {
        let places = step.places(layer);
        let arrays = step.arrays();
        let args = ffi::DecodeAttentionArgs {
            q: queries,
            q_stride: query_stride as i64,
            k: places.keys,
            v: places.values,
            stride_block: places.block_stride,
            stride_head: places.head_stride,
            stride_token: places.token_stride,
            pages: arrays.page_indices,
            page_indptr: arrays.page_indptr,
            kv_len: arrays.kv_lengths,
            out,
            out_stride: heads.query_width() as i64,
            partial: self.partial.address(),
            counters: self.counters.address(),
            rows: step.rows() as i32,
            kv_heads: heads.kv_heads as i32,
            group: (heads.query_heads / heads.kv_heads) as i32,
            head_dim: heads.head_dim as i32,
            window: window.map_or(0, |window| i32::try_from(window.get()).unwrap_or(0)),
            scale,
            sms: self.sms,
            pdl: starts_early.into(),
            ..ffi::DecodeAttentionArgs::default()
        };
        // SAFETY: the step's arrays and blocks were made for its rows; queries and output were
        // checked by the caller to hold them; the workspace is for the greatest shape, and one
        // stream's alone.
        let code =
            unsafe { (library.functions().baton_decode_attention)(&args, stream.raw().cast()) };
        library.check("baton_decode_attention", code)
    }
}

pub(super) fn dtype_code(dtype: Dtype) -> i32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
    }
}
