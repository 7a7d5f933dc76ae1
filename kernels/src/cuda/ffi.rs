//! Rust declarations of `kernels/cuda/include/baton_kernels.h`,
//! `kernels/cuda/collective/collective.h`, `kernels/cuda/delta/delta.h`,
//! `kernels/cuda/experts/experts.h`, `kernels/cuda/gemm/int4.h` and `kernels/cuda/trace/ranges.h`:
//! the same structs in the same order, and the functions that Baton calls. [`STRUCT_BYTES`] is
//! compared with the library's own sizes before the first call.

use std::{
    ffi::{c_char, c_void},
    num::NonZeroUsize,
};

use cudarc::driver::sys::CUdeviceptr;

use crate::layout::{Dtype, GROUPS_MAX, KvFormat};

/// `BATON_ABI_VERSION`.
pub(super) const ABI_VERSION: i32 = 16;
/// `BATON_INVALID`.
pub(super) const INVALID: i32 = 1;
/// `BATON_UNSUPPORTED`.
pub(super) const UNSUPPORTED: i32 = 2;
/// `BATON_CUDA`.
pub(super) const CUDA: i32 = 1000;
/// `BATON_TOP_LOGPROBS_MAX`.
pub(super) const TOP_LOGPROBS_MAX: usize = 32;
/// `BATON_SEQUENCES_MAX`.
pub(super) const SEQUENCES_MAX: usize = 4096;

/// A device address; null is 0.
pub(super) type Address = CUdeviceptr;
/// A `cudaStream_t`.
pub(super) type RawStream = *mut c_void;

/// Returns the `baton_dtype` of a type.
pub(super) fn dtype_code(dtype: Dtype) -> i32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
    }
}

pub(super) fn kv_format_code(format: KvFormat) -> i32 {
    match format {
        KvFormat::F32 => dtype_code(Dtype::F32),
        KvFormat::Bf16 => dtype_code(Dtype::Bf16),
        KvFormat::Fp8 => 2,
    }
}

/// Encodes a window for the kernels: 0 for none. A window beyond `i32` is longer than every
/// sequence, so none.
pub(super) fn window_code(window: Option<NonZeroUsize>) -> i32 {
    window.and_then(|window| i32::try_from(window.get()).ok()).unwrap_or(0)
}

/// `baton_run_target`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RunTarget {
    Tokens = 0,
    Blocks = 1,
    Stops = 2,
    Rules = 3,
}

/// `baton_sample_needs`.
pub(super) const SAMPLE_DRAW: i32 = 1;
pub(super) const SAMPLE_CUT: i32 = 2;
pub(super) const SAMPLE_LOGPROBS: i32 = 4;
pub(super) const SAMPLE_PENALTIES: i32 = 8;
pub(super) const SAMPLE_RULES: i32 = 16;

pub(super) const SILU: i32 = 0;
pub(super) const GELU_TANH: i32 = 1;
pub(super) const SKINNY_PLAIN: i32 = 0;
pub(super) const SKINNY_RESIDUAL: i32 = 1;
pub(super) const SKINNY_SILU: i32 = 2;
pub(super) const SKINNY_F32: i32 = 3;
pub(super) const SKINNY_QKV: i32 = 4;

/// `baton_quantize_source`.
pub(super) const QUANTIZE_ROWS: i32 = 0;
pub(super) const QUANTIZE_NORM: i32 = 1;
pub(super) const QUANTIZE_SILU: i32 = 2;

/// `baton_attention_kind`.
pub(super) const ATTENTION_AUTO: i32 = 0;
pub(super) const ATTENTION_PLAIN: i32 = 1;

/// `BATON_GROUP_RANKS_MAX`.
pub(super) const GROUP_RANKS_MAX: usize = 8;

/// `baton_all_reduce_algorithm`.
pub(super) const ALL_REDUCE_AUTO: i32 = 0;
pub(super) const ALL_REDUCE_ONE_SHOT: i32 = 1;
pub(super) const ALL_REDUCE_TWO_SHOT: i32 = 2;

/// Declares the structs of the headers, and [`STRUCT_BYTES`].
macro_rules! structs {
    ($($(#[$attribute:meta])* pub struct $name:ident {
        $($(#[$doc:meta])* pub $field:ident: $type:ty,)*
    })*) => {
        $(
            #[repr(C)]
            #[derive(Clone, Copy, Debug)]
            $(#[$attribute])*
            pub(super) struct $name {
                $($(#[$doc])* pub(super) $field: $type,)*
            }
        )*

        /// Sizes in bytes of the structs, in order.
        pub(super) const STRUCT_BYTES: [usize; 29] = [$(size_of::<$name>()),*];
    };
}

structs! {
    #[derive(Default)]
    pub struct QuantizeArgs {
        pub x: Address,
        pub x_stride: i64,
        pub residual: Address,
        pub norm: Address,
        pub mirror: Address,
        pub out: Address,
        pub scales: Address,
        pub eps: f32,
        pub source: i32,
        pub rows: i32,
        pub width: i32,
        pub parts: i32,
        pub reserved: i32,
    }

    pub struct Kv {
        pub base: Address,
        pub block_elements: i64,
        pub block_count: i32,
        pub layer_count: i32,
        pub head_count: i32,
        pub head_dim: i32,
        pub dtype: i32,
        pub reserved: i32,
    }

    pub struct RopeArgs {
        pub qkv: Address,
        pub queries: Address,
        pub query_stride: i64,
        pub bias: Address,
        pub query_norm: Address,
        pub key_norm: Address,
        pub frequencies: Address,
        pub positions: Address,
        pub destinations: Address,
        pub norm_eps: f32,
        pub query_heads: i32,
        pub layer: i32,
        pub rows: i32,
        pub rotary_dim: i32,
        pub norms_all_heads: i32,
    }

    #[derive(Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
    pub struct SlotSampling {
        pub seed: u64,
        pub temperature: f32,
        pub top_p: f32,
        pub min_p: f32,
        pub repetition_penalty: f32,
        pub presence_penalty: f32,
        pub frequency_penalty: f32,
        pub top_k: u32,
        pub min_tokens: u32,
        pub stop_count: i32,
        pub logprobs: i32,
        pub prompt_len: i32,
        pub bias_count: u16,
        pub is_listed: u16,
        pub bad_count: i32,
        pub prompt_logprobs: i32,
    }

    #[derive(Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
    pub struct SlotState {
        pub position: i32,
        pub length: i32,
        pub failed: i32,
        pub drafts: i32,
    }

    pub struct SlotPool {
        pub slots: Address,
        pub sampling: Address,
        pub tokens: Address,
        pub block_tables: Address,
        pub stop_tokens: Address,
        pub rules: Address,
        pub slot_count: i32,
        pub token_width: i32,
        pub table_width: i32,
        pub stop_width: i32,
        pub trash_block: i32,
        pub rule_width: i32,
        pub zero_block: i32,
        pub group_count: i32,
        pub windows: [i32; GROUPS_MAX],
        pub adapters: Address,
    }

    #[derive(Default, bytemuck::Pod, bytemuck::Zeroable)]
    pub struct PlanHeader {
        pub word_count: u32,
        pub sequence_count: u32,
        pub row_count: u32,
        pub sample_count: u32,
        pub admission_count: u32,
        pub run_count: u32,
        pub sequences_at: u32,
        pub admissions_at: u32,
        pub runs_at: u32,
        pub step_id: u32,
        pub reserved: [u32; 6],
    }

    #[derive(Default, bytemuck::Pod, bytemuck::Zeroable)]
    pub struct PlanSequence {
        pub slot: i32,
        pub row_count: i32,
        pub sample_count: i32,
        pub drafts: i32,
    }

    #[derive(Default, bytemuck::Pod, bytemuck::Zeroable)]
    pub struct PlanAdmission {
        pub slot: i32,
        pub adapter: i32,
        pub reserved: [i32; 2],
        pub state: SlotState,
        pub sampling: SlotSampling,
    }

    #[derive(Default, bytemuck::Pod, bytemuck::Zeroable)]
    pub struct PlanRun {
        pub target: i32,
        pub slot: i32,
        pub first: i32,
        pub count: i32,
        pub at: u32,
    }

    pub struct StepArrays {
        pub row_tokens: Address,
        pub row_positions: Address,
        pub row_destinations: Address,
        pub row_sequences: Address,
        pub row_indptr: Address,
        pub page_indptr: Address,
        pub page_indices: Address,
        pub last_page_tokens: Address,
        pub kv_lengths: Address,
        pub sequence_slots: Address,
        pub sampled_rows: Address,
        pub sample_slots: Address,
        pub sample_masks: Address,
        pub counts: Address,
        pub rows_max: i32,
        pub sequences_max: i32,
        pub pages_max: i32,
        pub samples_max: i32,
        pub row_adapters: Address,
        pub sample_adapters: Address,
    }

    #[derive(PartialEq)]
    pub struct AttentionShape {
        pub query_heads: i32,
        pub kv_heads: i32,
        pub head_dim: i32,
        pub dtype: i32,
        pub window: i32,
        pub scale: f32,
    }

    pub struct AttentionBatch {
        pub row_indptr_host: *const i32,
        pub page_indptr_host: *const i32,
        pub kv_lengths_host: *const i32,
        pub sequences: i32,
        pub rows: i32,
    }

    pub struct AttentionWorkspace {
        pub floats: Address,
        pub float_bytes: u64,
        pub ints: Address,
        pub int_bytes: u64,
        pub pinned_host: *mut c_void,
    }

    #[derive(Default)]
    pub struct AttentionPlan {
        pub kind: i32,
        pub word_count: i32,
        pub words: [i64; 22],
    }

    #[derive(Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
    pub struct SampleResult {
        pub status: i32,
        pub token: i32,
        pub slot: i32,
        pub position: i32,
        pub logprob: f32,
        pub top_count: i32,
        pub step_id: u32,
        pub detail: i32,
    }

    #[derive(Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
    pub struct TopToken {
        pub token: i32,
        pub logprob: f32,
    }

    pub struct SampleArgs {
        pub logits: Address,
        pub logit_stride: i64,
        pub masks: Address,
        pub results: Address,
        pub top: Address,
        pub scratch: Address,
        pub scratch_bytes: u64,
        pub vocabulary: i32,
        pub samples: i32,
        pub needs: i32,
        pub verifies: i32,
    }

    #[derive(Default)]
    pub struct LowRank {
        pub a: Address,
        pub b: Address,
        pub ranks: Address,
        pub row_adapters: Address,
        pub shrunk: Address,
        pub progress: Address,
        pub firsts: [i32; 2],
        pub ranges: i32,
        pub rank_max: i32,
        pub slots: i32,
        pub parts: i32,
    }

    #[derive(Default)]
    pub struct SkinnyGemmArgs {
        pub weight: Address,
        pub weight_scales: Address,
        pub x: Address,
        pub x_scales: Address,
        pub x_stride: i64,
        pub squares: Address,
        pub bias: Address,
        pub out: Address,
        pub out_stride: i64,
        pub residual: Address,
        pub mirror: Address,
        pub next_norm: Address,
        pub squares_out: Address,
        pub k: Address,
        pub v: Address,
        pub stride_block: i64,
        pub stride_head: i64,
        pub stride_token: i64,
        pub frequencies: Address,
        pub positions: Address,
        pub destinations: Address,
        pub eps: f32,
        pub rows: i32,
        pub n: i32,
        pub depth: i32,
        pub epilogue: i32,
        pub query_heads: i32,
        pub kv_heads: i32,
        pub head_dim: i32,
        pub grid: i32,
        pub tile: i32,
        pub pdl: i32,
        pub squares_count: i32,
        pub weight_block: i32,
        pub parts: i32,
        pub low_rank: LowRank,
    }

    pub struct DecodeAttentionArgs {
        pub q: Address,
        pub q_stride: i64,
        pub k: Address,
        pub v: Address,
        pub stride_block: i64,
        pub stride_head: i64,
        pub stride_token: i64,
        pub pages: Address,
        pub page_indptr: Address,
        pub kv_len: Address,
        pub out: Address,
        pub out_stride: i64,
        pub partial: Address,
        pub counters: Address,
        pub rows: i32,
        pub kv_heads: i32,
        pub group: i32,
        pub head_dim: i32,
        pub window: i32,
        pub scale: f32,
        pub sms: i32,
        pub pdl: i32,
        pub tokens: i32,
        pub kv_dtype: i32,
        pub positions: Address,
        pub sinks: Address,
    }

    pub struct RawGroup {
        pub arenas: [Address; GROUP_RANKS_MAX],
        pub arena_bytes: i64,
        pub fault: *mut u32,
        pub timeout_ns: i64,
        pub rank: i32,
        pub ranks: i32,
    }

    #[derive(Default)]
    pub struct AllReduceArgs {
        pub x: Address,
        pub out: Address,
        pub residual: Address,
        pub weight: Address,
        pub eps: f32,
        pub dtype: i32,
        pub rows: i32,
        pub width: i32,
        pub algorithm: i32,
        pub pdl: i32,
    }

    #[derive(Default)]
    pub struct GatherArgs {
        pub x: Address,
        pub x_stride: i64,
        pub out: Address,
        pub out_stride: i64,
        pub firsts: [i32; GROUP_RANKS_MAX + 1],
        pub rows: i32,
        pub reserved: [i32; 2],
    }

    #[derive(Default)]
    pub struct RouteArgs {
        pub x: Address,
        pub x_stride: i64,
        pub squares: Address,
        pub router: Address,
        pub logits: Address,
        pub bias: Address,
        pub split: Address,
        pub expert_of: Address,
        pub weights: Address,
        pub scales: Address,
        pub offsets: Address,
        pub order: Address,
        pub arrivals: Address,
        pub eps: f32,
        pub squares_count: i32,
        pub rows: i32,
        pub hidden: i32,
        pub experts: i32,
        pub count: i32,
        pub is_normalized: i32,
        pub score: i32,
        pub groups: i32,
        pub groups_chosen: i32,
        pub scale: f32,
        pub reserved: i32,
    }

    #[derive(Default)]
    pub struct ExpertGemmArgs {
        pub weight: Address,
        pub weight_stride: i64,
        pub x: Address,
        pub x_stride: i64,
        pub scales: Address,
        pub out: Address,
        pub out_stride: i64,
        pub offsets: Address,
        pub order: Address,
        pub weight_scales: Address,
        pub weight_scales_stride: i64,
        pub factors: Address,
        pub rows: i32,
        pub experts: i32,
        pub count: i32,
        pub n: i32,
        pub depth: i32,
        pub is_gate_up: i32,
        pub grid: i32,
        pub pdl: i32,
        pub parts: i32,
        pub factor_stride: i32,
    }

    #[derive(Default)]
    pub struct Mxfp4GemmArgs {
        pub weight: Address,
        pub weight_stride: i64,
        pub bias: Address,
        pub bias_stride: i64,
        pub x: Address,
        pub x_stride: i64,
        pub scales: Address,
        pub out: Address,
        pub out_stride: i64,
        pub offsets: Address,
        pub order: Address,
        pub sorted: Address,
        pub rows: i32,
        pub experts: i32,
        pub count: i32,
        pub n: i32,
        pub depth: i32,
        pub is_gate_up: i32,
        pub grid: i32,
        pub pdl: i32,
        pub alpha: f32,
        pub limit: f32,
    }

    #[derive(Default)]
    pub struct CombineArgs {
        pub outputs: Address,
        pub weights: Address,
        pub residual: Address,
        pub norm: Address,
        pub out: Address,
        pub quantized: Address,
        pub scales: Address,
        pub shared: Address,
        pub shared_router: Address,
        pub x: Address,
        pub x_stride: i64,
        pub eps: f32,
        pub count: i32,
        pub rows: i32,
        pub width: i32,
        pub parts: i32,
        pub reserved: i32,
    }

    pub struct DeltaArgs {
        pub projected: Address,
        pub rates: Address,
        pub conv: Address,
        pub decay_log: Address,
        pub time_bias: Address,
        pub norm: Address,
        pub mixed: Address,
        pub out: Address,
        pub blocks: Address,
        pub tables: Address,
        pub projected_stride: i64,
        pub rates_stride: i64,
        pub mixed_stride: i64,
        pub out_stride: i64,
        pub block_bytes: i64,
        pub head_bytes: i64,
        pub table_width: i32,
        pub dtype: i32,
        pub rows: i32,
        pub sequences: i32,
        pub key_heads: i32,
        pub value_heads: i32,
        pub key_dim: i32,
        pub value_dim: i32,
        pub taps: i32,
        pub lanes: i32,
        pub pieces: i32,
        pub piece_rows: i32,
        pub layer_row: i32,
        pub eps: f32,
    }
}

/// `BATON_DIGESTS_MAX` of `kernels/cuda/digest/digest.h`.
/// [`DeviceKv::digest_with`](super::DeviceKv::digest_with) rejects a library with a smaller one.
pub(super) const DIGESTS_MAX: usize = 128;

/// `baton_digest_lists` of the same header. It is not in the function table, because only verified
/// transfers and KV tiers need it and a library may lack it.
pub(super) type DigestLists = unsafe extern "C" fn(
    Address,
    i64,
    i64,
    i64,
    i64,
    i64,
    *const i32,
    i32,
    i32,
    Address,
    *mut u64,
    RawStream,
) -> i32;

/// `baton_digest_weight` of the same header. Only weights that a trainer's GPU sends need it.
pub(super) type DigestWeight =
    unsafe extern "C" fn(i32, Address, i64, i64, i64, i64, Address, RawStream) -> i32;

functions! {
    baton_build_info: fn() -> *const c_char;
    baton_last_error: fn() -> *const c_char;
    baton_initialise: fn() -> i32;
    baton_programmatic_launch: fn(i32) -> ();
    baton_struct_sizes: fn(*mut u32, i32) -> i32;
    baton_embed: fn(i32, Address, i32, i32, f32, Address, Address, i32, i32, RawStream) -> i32;
    baton_rms_norm: fn(i32, Address, Address, f32, Address, i32, i32, RawStream) -> i32;
    baton_rms_norm_in_place: fn(i32, Address, Address, f32, i32, i32, RawStream) -> i32;
    baton_add_rms_norm:
        fn(i32, Address, Address, Address, f32, Address, i32, i32, RawStream) -> i32;
    baton_quantize: fn(*const QuantizeArgs, RawStream) -> i32;
    baton_add_bias: fn(i32, Address, Address, i32, i32, RawStream) -> i32;
    baton_activate: fn(i32, i32, Address, Address, i32, i32, RawStream) -> i32;
    baton_gather_rows: fn(i32, Address, Address, Address, i32, i32, RawStream) -> i32;
    baton_rope_store_kv: fn(*const Kv, *const RopeArgs, RawStream) -> i32;
    baton_dequantize_kv: fn(*const Kv, i32, Address, i32, Address, RawStream) -> i32;
    baton_step_prepare:
        fn(*const SlotPool, Address, *const StepArrays, i32, i32, i32, i32, RawStream) -> i32;
    baton_step_supply: fn(*const SlotPool, Address, *const StepArrays, i32, RawStream) -> i32;
    baton_attention_prepare:
        fn(
            i32,
            *const AttentionShape,
            *const AttentionBatch,
            *const AttentionWorkspace,
            *mut AttentionPlan,
            RawStream,
        ) -> i32;
    baton_attention_run:
        fn(
            *const AttentionPlan,
            *const AttentionShape,
            *const AttentionWorkspace,
            *const Kv,
            i32,
            Address,
            i64,
            *const StepArrays,
            Address,
            Address,
            i32,
            i32,
            RawStream,
        ) -> i32;
    baton_decode_attention_workspace: fn(i32, i32, i32, i32) -> i64;
    baton_decode_attention: fn(*const DecodeAttentionArgs, RawStream) -> i32;
    baton_shrink_parts: fn(i32, i32) -> i32;
    baton_shrink: fn(*const LowRank, Address, i64, i32, i32, i32, RawStream) -> i32;
    baton_expand: fn(*const LowRank, Address, i64, i32, i32, RawStream) -> i32;
    baton_skinny_gemm: fn(*const SkinnyGemmArgs, RawStream) -> i32;
    baton_skinny_gemm_rows_max: fn() -> i32;
    baton_skinny_gemm_tile: fn(*const SkinnyGemmArgs) -> i32;
    baton_int4_gemm: fn(*const SkinnyGemmArgs, RawStream) -> i32;
    baton_int4_gemm_tile: fn(*const SkinnyGemmArgs) -> i32;
    baton_int4_widen: fn(Address, i32, i32, i32, Address, RawStream) -> i32;
    baton_route: fn(*const RouteArgs, RawStream) -> i32;
    baton_expert_gemm: fn(*const ExpertGemmArgs, RawStream) -> i32;
    baton_mxfp4_gemm: fn(*const Mxfp4GemmArgs, RawStream) -> i32;
    baton_combine_experts: fn(*const CombineArgs, RawStream) -> i32;
    baton_gated_delta: fn(*const DeltaArgs, *const StepArrays, RawStream) -> i32;
    baton_apply_gate: fn(i32, Address, Address, i32, i32, RawStream) -> i32;
    baton_copy_blocks: fn(Address, i64, *const i32, i32, RawStream) -> i32;
    baton_sample: fn(*const SlotPool, *const StepArrays, *const SampleArgs, RawStream) -> i32;
    baton_draft: fn(*const SlotPool, *const StepArrays, i32, i32, i32, i32, RawStream) -> i32;
    baton_accept: fn(*const SlotPool, *const StepArrays, i32, i32, Address, RawStream) -> i32;
    baton_load_moves: fn() -> i32;
    baton_move_rows:
        fn(
            Address,
            i64,
            i64,
            i64,
            i64,
            *const i32,
            i32,
            Address,
            i32,
            i32,
            RawStream,
        ) -> i32;
    baton_delay: fn(i64, RawStream) -> i32;
    baton_read_stream: fn(Address, u64, Address, RawStream) -> i32;
    baton_group_arena_bytes: fn(i32, i64) -> i64;
    baton_group_reset: fn(*const RawGroup, RawStream) -> i32;
    baton_group_stop: fn(*const RawGroup, RawStream) -> i32;
    baton_all_reduce: fn(*const RawGroup, *const AllReduceArgs, RawStream) -> i32;
    baton_group_gather: fn(*const RawGroup, *const GatherArgs, RawStream) -> i32;
    baton_group_sample_scratch_bytes: fn(i32, i32, i32) -> u64;
    baton_group_sample:
        fn(
            *const RawGroup,
            *const SlotPool,
            *const StepArrays,
            *const SampleArgs,
            *const i32,
            RawStream,
        ) -> i32;
    baton_range_push: fn(*const c_char, u64) -> ();
    baton_range_pop: fn() -> ();
}
