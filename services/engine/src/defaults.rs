//! Derives the settings of a node that the operator left to `auto`, each with its reason.
//!
//! [`derive()`] is called twice at start. Before the weights are loaded, it bounds the batch by
//! device, role and model. Once the executor runs, it chooses the step size within this bound by
//! measured step times.

use std::{fmt, time::Duration};

use kernels::{BLOCK_TOKENS, KvFormat, Shard, WeightFormat, mxfp4};
use model::{Checkpoint, Int4Sizes};
use serde::Serialize;

use crate::{ItlLimit, executor::StepTimes};

const MIB: u64 = 1 << 20;

const CPU_STEP_TOKENS: u32 = 512;
const CPU_CHUNK_TOKENS: u32 = 256;
const CPU_SLOTS: u32 = 64;
const CPU_TRANSFER_BYTES: u64 = 4 * MIB;

/// Minimum and maximum tokens of a step on a GPU. A model of 1B parameters reaches its peak prefill
/// throughput below the maximum.
const GPU_STEP_TOKENS: (u32, u32) = (512, 8192);
/// Maximum KV of a step on a GPU. A transfer by ipc takes 1.5 ms for this KV, at 365 GB/s. The
/// transfer of a prompt's last step is not overlapped, so this maximum bounds the hand-over gap.
const GPU_STEP_KV_BYTES: u64 = 512 * MIB;
/// KV of the last part of a split prompt: 0.2 ms by ipc, 6.6 ms by tcp. A prompt is split only if
/// it has the GPU to itself.
const GPU_TAIL_KV_BYTES: u64 = 64 * MIB;
/// Minimum tokens of the last part: a shorter step does not reach full throughput.
const GPU_TAIL_TOKENS_MIN: u32 = 1024;
/// A step's activations and KV may take 1/4 of the memory that the weights leave free. If the size
/// of the KV cache is set, the activations may take 1/4 of the memory that weights and KV cache
/// leave free.
const GPU_STEP_MEMORY_PART: u64 = 4;
/// Fraction of the best measured prefill throughput from which a step counts as having full
/// throughput.
const FULL_THROUGHPUT: f64 = 0.98;
/// Bounds of the slots of a GPU.
const GPU_SLOTS: (u32, u32) = (64, 256);
/// KV per slot, in tokens.
const SLOT_KV_TOKENS: u64 = 1024;
const GPU_TRANSFER_BYTES: u64 = 32 * MIB;
/// Default of `node.waiting_max`, in full batches.
const WAITING_BATCHES: u32 = 4;
/// Minimum default of `node.itl_max`: 50 tokens/s for every decode row.
const GPU_ITL_MAX: Duration = Duration::from_millis(20);
/// Minimum default of `node.itl_max` in decode steps. A shorter step cannot prefill at full
/// throughput.
const GPU_ITL_STEPS: u32 = 4;

/// Device that computes the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeDevice {
    Cpu,
    /// `memory_bytes`: memory of each rank's GPU for weights, activations and KV.
    Gpu {
        memory_bytes: u64,
    },
}

/// Sizes of a model, or of one rank's shard, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSizes {
    pub weights: u64,
    /// Activations of one token of a step.
    pub activations: u64,
    /// KV of one token.
    pub kv: u64,
}

impl ModelSizes {
    /// Returns the sizes of a rank's shard.
    pub fn of(
        checkpoint: &Checkpoint,
        shard: Shard,
        (weights, kv): (WeightFormat, KvFormat),
        is_gpu: bool,
    ) -> Self {
        let config = checkpoint.config();
        let heads = config.head_shape_of(shard);
        // Input, output and attention of a layer, the feed-forward network, and the f32 residual
        // stream.
        let width = 2 * config.hidden_size
            + heads.qkv_width()
            + heads.query_width()
            + 3 * config.ffn_size_of(shard);
        // Activations and outputs of the experts of a token, and those of the shared expert.
        let of_experts = config.experts().map_or(0, |experts| {
            let shared = experts.shared.map_or(0, |shared| shared.size);
            let shared = 3 * shard.part(shared).len() + shared.min(1) * config.hidden_size;
            let size = shard.expert_rows(experts.size).len();
            experts.choice.count * (size + config.hidden_size) + shared
        });
        let has_gate =
            config.layers.iter().any(|it| it.attention().is_some_and(|it| it.has_output_gate));
        let gate = if has_gate { heads.query_width() } else { 0 };
        // Linear attention: projections, rates and output. GPUs have intermediate values in f32.
        let state = config.state_shape().map(|state| state.part(shard.rank_count()));
        let of_delta = state.map_or(0, |state| {
            state.projected_width() + 2 * state.value_heads + state.value_width()
        });
        let mixed = state.filter(|_| is_gpu).map_or(0, |state| state.mixed_width());
        let width = width + of_experts + gate + of_delta;
        let block_bytes = config.kv_layout_of(kv, shard).block_bytes();
        Self {
            weights: weight_bytes(checkpoint, shard, weights, is_gpu),
            activations: (width * weights.dtype().bytes() + 4 * (config.hidden_size + mixed))
                as u64,
            kv: (block_bytes / BLOCK_TOKENS) as u64,
        }
    }
}

/// Returns the bytes of a rank's shard of the weights. If the checkpoint has experts in MXFP4, GPUs
/// keep them so. CPUs keep matrices in INT4, and convert all others to `weights`. GPUs keep
/// matrices in INT4 if `weights` is bf16, with memory to widen the largest.
pub fn weight_bytes(
    checkpoint: &Checkpoint,
    shard: Shard,
    weights: WeightFormat,
    is_gpu: bool,
) -> u64 {
    let config = checkpoint.config();
    // Embedding and head are not quantized to FP8.
    let tables = if config.tied_output { 1 } else { 2 };
    let tables_bytes = match weights {
        WeightFormat::Fp8 => {
            (tables * shard.tokens(config.vocab_size).len() * config.hidden_size) as u64
        }
        WeightFormat::F32 | WeightFormat::Bf16 | WeightFormat::Q8 => 0,
    };
    let mxfp4_elements = match is_gpu && config.has_mxfp4_experts() {
        true => config.expert_parameter_count_of(shard),
        false => 0,
    };
    let int4 = int4_sizes(checkpoint, shard, weights, is_gpu);
    let Int4Sizes { packed_elements, packed_bytes, largest_elements, .. } = int4;
    let widened_bytes = if is_gpu { weights.bytes(largest_elements) } else { 0 };
    let others = config.parameter_count_of(shard) - mxfp4_elements - packed_elements;
    let others_bytes = weights.bytes(others) + mxfp4::bytes(mxfp4_elements);
    others_bytes + packed_bytes + widened_bytes + tables_bytes
}

/// Returns the sizes of a rank's part of the matrices in INT4. GPUs keep such matrices packed if
/// `weights` is bf16.
pub fn int4_sizes(
    checkpoint: &Checkpoint,
    shard: Shard,
    weights: WeightFormat,
    is_gpu: bool,
) -> Int4Sizes {
    match is_gpu && weights != WeightFormat::Bf16 {
        true => Int4Sizes::default(),
        false => checkpoint.int4_sizes(shard, is_gpu),
    }
}

/// Properties of the node for which defaults are derived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeTraits {
    pub device: NodeDevice,
    /// Whether the node mostly decodes; a prefill node mostly prefills.
    pub prefers_decode: bool,
    pub model: ModelSizes,
    /// Values that the operator set.
    pub set: SetValues,
}

/// Values that the operator set; `None` is `auto`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetValues {
    pub step_tokens: Option<u32>,
    pub chunk_tokens: Option<u32>,
    pub slots: Option<u32>,
    pub waiting_max: Option<u32>,
    pub itl_max: Option<Duration>,
    pub transfer_bytes: Option<u64>,
    /// Memory of the KV cache in bytes; `None`: the memory that weights and activations leave.
    pub kv_bytes: Option<u64>,
}

/// The derived values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Defaults {
    /// Largest step of the executor.
    pub step_tokens_max: u32,
    /// Largest step of the scheduler; equal to `step_tokens_max` until step times are measured.
    pub step_tokens: u32,
    pub chunk_tokens: u32,
    /// Tokens of the last part of a split prompt whose KV is sent; `None` on a CPU, whose chunks
    /// are short.
    pub tail_tokens: Option<u32>,
    pub slots: u32,
    pub waiting_max: u32,
    /// Bound on steps that decode; `None` on a prefill node, where it is off, and until step times
    /// are measured.
    pub itl: Option<ItlLimit>,
    /// `transfer.chunk_bytes`.
    pub transfer_bytes: u64,
    pub reasons: Vec<DerivedSetting>,
}

/// A setting's value and why it has this value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DerivedSetting {
    pub key: &'static str,
    pub value: String,
    pub why: String,
}

impl fmt::Display for DerivedSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {} ({})", self.key, self.value, self.why)
    }
}

/// Reason why settings cannot be derived.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DefaultsError {
    #[error(
        "cannot derive node.step_tokens: weights of {}{} leave too little of the GPU's {} for a step of {tokens} tokens, \
         which takes {}; expected more ranks (node.tp), a larger node.gpu_memory_percent, a smaller model, a smaller \
         node.kv_memory or node.blocks, or a set node.step_tokens",
        size(*weights), set_kv(*kv), size(*memory), size(*step)
    )]
    Memory { weights: u64, kv: Option<u64>, memory: u64, tokens: u32, step: u64 },
    #[error(
        "node.itl_max = {}: a step that decodes one row takes {} on this device; expected at least {}",
        milliseconds(*itl_max), milliseconds(*decode), milliseconds(ceil_milliseconds(*decode))
    )]
    ItlMax { itl_max: Duration, decode: Duration },
}

impl NodeTraits {
    /// Returns whether [`derive()`] uses step times.
    pub fn needs_step_times(&self) -> bool {
        self.device != NodeDevice::Cpu || self.set.itl_max.is_some()
    }
}

/// Derives every value that is not set.
///
/// # Errors
/// When the smallest step does not fit into the memory, or a decode step exceeds the set `itl_max`.
pub fn derive(node: &NodeTraits, times: Option<&StepTimes>) -> Result<Defaults, DefaultsError> {
    let set = &node.set;
    let mut reasons = Vec::new();
    let mut note = |key, value: &dyn fmt::Display, is_set: bool, why: String| {
        let why = if is_set { "set".to_owned() } else { why };
        reasons.push(DerivedSetting { key, value: value.to_string(), why });
    };

    // Set values of slots and chunk raise the step.
    let step_min = set.slots.max(set.chunk_tokens).unwrap_or(1);
    let (step_tokens_max, bound) = match set.step_tokens {
        Some(tokens) => (tokens, String::new()),
        None => step_bound(node)?,
    };
    let step_tokens_max = step_tokens_max.max(step_min);
    let (step_tokens, why) = match (node.device, times) {
        // A prompt takes longer in smaller steps, because each step attends to all KV before it. So
        // a prefill node takes the largest step. On a decode node a prompt also waits for the step
        // in flight, so a decode node takes the smallest step of full throughput.
        (NodeDevice::Gpu { .. }, Some(times))
            if node.prefers_decode && set.step_tokens.is_none() =>
        {
            full_step(times)
        }
        _ => (step_tokens_max, bound),
    };
    let (slots, slots_why) = match set.slots {
        Some(slots) => (slots, String::new()),
        None => slots_of(node, step_tokens_max),
    };
    let step_tokens = step_tokens.max(step_min).max(slots).min(step_tokens_max);
    note("node.step_tokens", &step_tokens, set.step_tokens.is_some(), why);

    let (chunk, why) = match node.device {
        NodeDevice::Cpu => (CPU_CHUNK_TOKENS, "two prompts share a step of a CPU"),
        NodeDevice::Gpu { .. } => (step_tokens, "node.step_tokens"),
    };
    let chunk_tokens = set.chunk_tokens.unwrap_or(chunk).min(step_tokens);
    note("node.chunk_tokens", &chunk_tokens, set.chunk_tokens.is_some(), why.to_owned());
    let tail_tokens = match node.device {
        NodeDevice::Cpu => None,
        NodeDevice::Gpu { .. } => {
            let tokens = GPU_TAIL_KV_BYTES / node.model.kv.max(1);
            Some(u32::try_from(tokens).unwrap_or(u32::MAX).max(GPU_TAIL_TOKENS_MIN))
        }
    };
    note("node.slots", &slots, set.slots.is_some(), slots_why);

    let waiting_max = set.waiting_max.unwrap_or(slots.saturating_mul(WAITING_BATCHES));
    let why = format!("{WAITING_BATCHES} full batches");
    note("node.waiting_max", &waiting_max, set.waiting_max.is_some(), why);

    let itl = match times {
        Some(times) => itl_limit(node, times, step_tokens)?,
        None => None,
    };
    let (value, why) = itl_reason(itl.as_ref(), node);
    note("node.itl_max", &value, set.itl_max.is_some(), why);

    let (bytes, why) = match node.device {
        NodeDevice::Cpu => (CPU_TRANSFER_BYTES, "2 ms at 2 GB/s, so that transfers overlap steps"),
        NodeDevice::Gpu { .. } => {
            (GPU_TRANSFER_BYTES, "0.1 ms at 365 GB/s, so that transfers overlap steps")
        }
    };
    let transfer_bytes = set.transfer_bytes.unwrap_or(bytes);
    let value = match transfer_bytes.is_multiple_of(MIB) {
        true => format!("{}MiB", transfer_bytes / MIB),
        false => transfer_bytes.to_string(),
    };
    note("transfer.chunk_bytes", &value, set.transfer_bytes.is_some(), why.to_owned());

    Ok(Defaults {
        step_tokens_max,
        step_tokens,
        chunk_tokens,
        tail_tokens,
        slots,
        waiting_max,
        itl,
        transfer_bytes,
        reasons,
    })
}

/// Returns the value of `node.itl_max`, and why it is not set.
fn itl_reason(itl: Option<&ItlLimit>, node: &NodeTraits) -> (String, String) {
    match (itl, node.set.itl_max, node.device) {
        (_, Some(max), _) => (milliseconds(max), String::new()),
        (_, None, NodeDevice::Cpu) => {
            ("off".to_owned(), "node.chunk_tokens bounds the step of a CPU".to_owned())
        }
        (Some(itl), ..) => (
            milliseconds(itl.max),
            format!(
                "the longer of {} and {GPU_ITL_STEPS} decode steps of {}; {} prompt tokens fit into a step with one row",
                milliseconds(GPU_ITL_MAX),
                milliseconds(itl.decode),
                itl.prefill_tokens(Duration::ZERO),
            ),
        ),
        (None, ..) => (
            format!("at least {}", milliseconds(GPU_ITL_MAX)),
            format!("the longer of it and {GPU_ITL_STEPS} decode steps, measured at start"),
        ),
    }
}

/// Returns the largest step that the device should run, and why.
fn step_bound(node: &NodeTraits) -> Result<(u32, String), DefaultsError> {
    let NodeDevice::Gpu { memory_bytes: memory } = node.device else {
        let why = "512 tokens keep a CPU's matrix units busy and a step short".to_owned();
        return Ok((CPU_STEP_TOKENS, why));
    };
    let ModelSizes { weights, activations, kv } = node.model;
    let (least, most) = GPU_STEP_TOKENS;
    let set_kv_bytes = node.set.kv_bytes;
    let token_bytes = activations + if set_kv_bytes.is_some() { 0 } else { kv };
    let token_bytes = token_bytes.max(1);
    let left = memory.saturating_sub(weights).saturating_sub(set_kv_bytes.unwrap_or(0));
    let by_memory = left / GPU_STEP_MEMORY_PART / token_bytes;
    if left / token_bytes < u64::from(least) {
        let step = token_bytes * u64::from(least);
        return Err(DefaultsError::Memory {
            weights,
            kv: set_kv_bytes,
            memory,
            tokens: least,
            step,
        });
    }
    let by_kv = GPU_STEP_KV_BYTES / kv.max(1);
    let bound = by_memory.min(by_kv).clamp(u64::from(least), u64::from(most)) as u32;
    // The largest power of two within the bound.
    let tokens = 1 << bound.ilog2();
    let why = format!(
        "at most {most} tokens, {} of KV, a quarter of the {} left by the weights{}",
        size(GPU_STEP_KV_BYTES),
        size(left),
        set_kv(set_kv_bytes),
    );
    Ok((tokens, why))
}

/// Returns the smallest measured step of full prefill throughput, and why.
fn full_step(times: &StepTimes) -> (u32, String) {
    let rate = |&(tokens, time): &(u32, Duration)| f64::from(tokens) / time.as_secs_f64().max(1e-9);
    let best = times.prefill.iter().map(rate).fold(0.0, f64::max);
    let is_full = |entry: &&(u32, Duration)| rate(entry) >= FULL_THROUGHPUT * best;
    let chosen = times.prefill.iter().find(is_full).expect("the best entry is one of them");
    let why = format!(
        "the smallest step within 2 % of the best prefill throughput measured, {:.0} of {best:.0} tokens/s",
        rate(chosen),
    );
    (chosen.0, why)
}

/// Returns the slots of a node, and why.
fn slots_of(node: &NodeTraits, step_tokens: u32) -> (u32, String) {
    let NodeDevice::Gpu { memory_bytes: memory } = node.device else {
        let why = "decode throughput of a CPU grows little beyond 64 rows".to_owned();
        return (CPU_SLOTS.min(step_tokens), why);
    };
    let ModelSizes { weights, activations, kv } = node.model;
    let left = memory.saturating_sub(weights + activations * u64::from(step_tokens));
    let tokens = node.set.kv_bytes.unwrap_or(left) / kv.max(1);
    let (least, most) = GPU_SLOTS;
    let fitting = (tokens / SLOT_KV_TOKENS).clamp(u64::from(least), u64::from(most)) as u32;
    let why = format!(
        "{least} to {most}, as the KV memory of {tokens} tokens has {SLOT_KV_TOKENS} tokens for each",
    );
    // CUDA graphs are captured for multiples of 8.
    ((fitting - fitting % 8).min(step_tokens), why)
}

/// Returns the bound on steps that decode, from measured times.
fn itl_limit(
    node: &NodeTraits,
    times: &StepTimes,
    step_tokens: u32,
) -> Result<Option<ItlLimit>, DefaultsError> {
    let decode = times.decode;
    let max = match (node.set.itl_max, node.device) {
        (Some(itl_max), _) if itl_max < decode => {
            return Err(DefaultsError::ItlMax { itl_max, decode });
        }
        (Some(itl_max), _) => itl_max,
        (None, NodeDevice::Cpu) => return Ok(None),
        (None, NodeDevice::Gpu { .. }) => {
            GPU_ITL_MAX.max(ceil_milliseconds(decode * GPU_ITL_STEPS))
        }
    };
    // Fits a line through the times of the shortest row and of the row of a full step.
    let nanos = |time: Duration| time.as_nanos() as f64;
    let (first, first_time) = times.prefill[0];
    let (last, last_time) = times
        .prefill
        .iter()
        .rfind(|(tokens, _)| *tokens <= step_tokens.max(first))
        .map_or((first, first_time), |&entry| entry);
    let per_token = if last > first {
        (nanos(last_time) - nanos(first_time)) / f64::from(last - first)
    } else {
        nanos(first_time) / f64::from(first)
    };
    let per_token = per_token.max(1.0);
    let fixed = (nanos(first_time) - per_token * f64::from(first)).max(0.0);
    // The rows were measured in the middle of the prompt: attention grows with the position.
    let distance = f64::from(times.context_tokens - first).max(1.0);
    let growth =
        (nanos(times.at_end) - nanos(times.at_start)).max(0.0) / f64::from(first) / distance;
    let at_start =
        (per_token - growth * f64::from(times.context_tokens) / 2.0).max(per_token / 2.0);
    let doubling = if growth > 0.0 { at_start / growth } else { f64::INFINITY };
    Ok(Some(ItlLimit {
        max,
        decode,
        prefill: Duration::from_nanos(fixed as u64),
        token: Duration::from_nanos(at_start as u64),
        doubling_tokens: doubling.clamp(1.0, f64::from(u32::MAX)) as u32,
    }))
}

fn ceil_milliseconds(time: Duration) -> Duration {
    Duration::from_millis(time.as_nanos().div_ceil(1_000_000) as u64)
}

fn milliseconds(time: Duration) -> String {
    let micros = time.as_micros() as f64;
    // At most one digit after the point.
    format!("{}ms", (micros / 100.0).round() / 10.0)
}

fn set_kv(bytes: Option<u64>) -> String {
    bytes.map_or_else(String::new, |bytes| format!(" and a set KV cache of {}", size(bytes)))
}

fn size(bytes: u64) -> String {
    match bytes {
        0..0x4000_0000 => format!("{} MiB", bytes / MIB),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

#[cfg(test)]
mod tests {
    use model::{Checkpoint, LoadFormat};

    use super::*;

    const GIB: u64 = 1 << 30;
    /// Sizes of Llama-3.1-8B in bf16.
    const SIZES_8B: ModelSizes =
        ModelSizes { weights: 15 * GIB, activations: 139_264, kv: 131_072 };
    /// Sizes of Llama-3.2-1B in bf16.
    const SIZES_1B: ModelSizes =
        ModelSizes { weights: 5 * GIB / 2, activations: 75_776, kv: 32_768 };
    /// 90 % of an H200 less the reserve.
    const H200: NodeDevice = NodeDevice::Gpu { memory_bytes: 125 * GIB };

    #[test]
    fn gpus_keep_experts_in_mxfp4() {
        let config = "../model/tests/fixtures/architectures/gpt_oss/config.json";
        let config = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(config);
        let checkpoint = Checkpoint::open(config, LoadFormat::Dummy { seed: 1 }).unwrap();
        let of = |is_gpu| {
            let formats = (WeightFormat::Bf16, KvFormat::Bf16);
            ModelSizes::of(&checkpoint, Shard::WHOLE, formats, is_gpu).weights
        };
        // 2 layers of 6 experts, with 3 matrices of 32 x 96 elements each.
        let elements = 2 * 6 * 3 * 32 * 96;
        assert_eq!(of(false) - of(true), elements * 2 - elements * 17 / 32);
    }

    fn node(device: NodeDevice, prefers_decode: bool, model: ModelSizes) -> NodeTraits {
        NodeTraits { device, prefers_decode, model, set: SetValues::default() }
    }

    fn with(device: NodeDevice, set: SetValues) -> NodeTraits {
        NodeTraits { set, ..node(device, true, SIZES_8B) }
    }

    /// Returns step times like those of an 8B model on an H200.
    fn times_8b() -> StepTimes {
        let prefill = [(256, 9_800), (512, 14_600), (1024, 24_600), (2048, 48_500), (4096, 97_000)];
        StepTimes {
            decode: Duration::from_micros(4_050),
            prefill: prefill.map(|(tokens, micros)| (tokens, Duration::from_micros(micros))).into(),
            context_tokens: 4096,
            at_start: Duration::from_micros(9_200),
            at_end: Duration::from_micros(10_400),
        }
    }

    fn why<'a>(defaults: &'a Defaults, key: &str) -> &'a DerivedSetting {
        defaults.reasons.iter().find(|reason| reason.key == key).unwrap()
    }

    #[test]
    fn cpu_defaults_do_not_depend_on_role_and_model() {
        for prefers_decode in [false, true] {
            for model in [SIZES_8B, SIZES_1B] {
                let defaults = derive(&node(NodeDevice::Cpu, prefers_decode, model), None).unwrap();
                let Defaults { step_tokens, chunk_tokens, slots, waiting_max, .. } = defaults;
                assert_eq!((step_tokens, chunk_tokens, slots, waiting_max), (512, 256, 64, 256));
                assert_eq!((defaults.step_tokens_max, defaults.transfer_bytes), (512, 4 << 20));
                assert_eq!(defaults.itl, None);
                assert_eq!(defaults.reasons.len(), 6);
            }
        }
    }

    #[test]
    fn set_values_stay_and_the_others_follow_them() {
        let derived = |set: SetValues| {
            let defaults = derive(&with(NodeDevice::Cpu, set), None).unwrap();
            let Defaults { step_tokens, chunk_tokens, slots, waiting_max, .. } = defaults;
            assert_eq!(defaults.step_tokens_max, step_tokens);
            (step_tokens, chunk_tokens, slots, waiting_max)
        };
        let none = SetValues::default();
        assert_eq!(derived(SetValues { step_tokens: Some(32), ..none }), (32, 32, 32, 128));
        assert_eq!(derived(SetValues { slots: Some(1000), ..none }), (1000, 256, 1000, 4000));
        assert_eq!(derived(SetValues { chunk_tokens: Some(1024), ..none }), (1024, 1024, 64, 256));
        assert_eq!(derived(SetValues { waiting_max: Some(0), ..none }), (512, 256, 64, 0));
        let set = SetValues { step_tokens: Some(4096), transfer_bytes: Some(1 << 20), ..none };
        let defaults = derive(&with(H200, set), Some(&times_8b())).unwrap();
        assert_eq!((defaults.step_tokens, defaults.step_tokens_max), (4096, 4096));
        assert_eq!((defaults.chunk_tokens, defaults.transfer_bytes), (4096, 1 << 20));
        assert_eq!(why(&defaults, "node.step_tokens").why, "set");
        assert_ne!(why(&defaults, "node.chunk_tokens").why, "set");
    }

    #[test]
    fn a_gpu_step_is_bounded_by_kv_and_memory() {
        let derived = |device, model| {
            let defaults = derive(&node(device, false, model), None).unwrap();
            assert_eq!((defaults.chunk_tokens, defaults.itl), (defaults.step_tokens, None));
            (defaults.step_tokens, defaults.slots, defaults.waiting_max)
        };
        let gib = |gib: u64| NodeDevice::Gpu { memory_bytes: gib * GIB };
        assert_eq!(derived(H200, SIZES_8B), (4096, 256, 1024), "512 MiB of KV");
        assert_eq!(derived(H200, SIZES_1B), (8192, 256, 1024));
        assert_eq!(derived(gib(20), SIZES_8B), (4096, 64, 256), "KV of 36 slots");
        assert_eq!(derived(gib(24), SIZES_8B), (4096, 64, 256));
        assert_eq!(derived(gib(30), SIZES_8B), (4096, 112, 448), "KV of 115 slots");
        assert_eq!(derived(gib(16), SIZES_8B), (512, 64, 256), "a quarter of 1 GiB");
        assert_eq!(derived(gib(4), SIZES_1B), (2048, 64, 256), "a quarter of 1.5 GiB");
        let set = SetValues { kv_bytes: Some(16 << 30), ..SetValues::default() };
        assert_eq!(derive(&with(H200, set), None).unwrap().slots, 128);
        let tail = |device, model| derive(&node(device, false, model), None).unwrap().tail_tokens;
        let large = ModelSizes { kv: 4 * SIZES_8B.kv, ..SIZES_8B };
        assert_eq!(tail(H200, large), Some(1024), "a step of full throughput");
        let small = ModelSizes { kv: SIZES_8B.kv / 4, ..SIZES_8B };
        assert_eq!(tail(H200, small), Some(2048), "64 MiB of KV");
        assert_eq!(tail(NodeDevice::Cpu, SIZES_8B), None);
    }

    #[test]
    fn a_gpu_step_is_bounded_by_the_memory_that_a_set_kv_cache_leaves() {
        // The weights leave 110 GiB of memory.
        let derived = |mib: u64| {
            let set = SetValues { kv_bytes: Some(110 * GIB - mib * MIB), ..SetValues::default() };
            derive(&with(H200, set), None)
        };
        let defaults = derived(1024).unwrap();
        assert_eq!(defaults.step_tokens, 1024, "a quarter of 1 GiB holds 1927 tokens");
        let reason = &why(&defaults, "node.step_tokens").why;
        assert!(
            reason.ends_with("left by the weights and a set KV cache of 109.0 GiB"),
            "{reason}"
        );
        assert_eq!(derived(68).unwrap().step_tokens, 512, "512 tokens take all 68 MiB");
        let error = derived(67).unwrap_err().to_string();
        for word in ["109.9 GiB", "node.kv_memory", "512 tokens", "68 MiB"] {
            assert!(error.contains(word), "{word}: {error}");
        }
    }

    #[test]
    fn a_gpu_too_small_for_the_weights_and_a_step_is_one_clear_error() {
        let small = node(NodeDevice::Gpu { memory_bytes: 15 * GIB }, true, SIZES_8B);
        let error = derive(&small, None).unwrap_err().to_string();
        for word in ["node.step_tokens", "15.0 GiB", "512 tokens", "132 MiB", "node.tp"] {
            assert!(error.contains(word) && !error.contains('\n'), "{word}: {error}");
        }
        let set = SetValues { step_tokens: Some(256), ..SetValues::default() };
        assert!(derive(&NodeTraits { set, ..small }, None).is_ok(), "the operator decides");
    }

    #[test]
    fn measured_step_times_choose_the_smallest_step_of_full_throughput() {
        let mut times = times_8b();
        let derived = |times: &StepTimes| {
            let defaults = derive(&node(H200, true, SIZES_8B), Some(times)).unwrap();
            assert_eq!(defaults.step_tokens_max, 4096, "the executor is already built");
            (defaults.step_tokens, defaults.chunk_tokens, defaults.slots)
        };
        // 2048 tokens are 1.4 % faster.
        assert_eq!(derived(&times), (1024, 1024, 256));
        times.prefill[2].1 = Duration::from_micros(26_000);
        assert_eq!(derived(&times), (2048, 2048, 256));
        let defaults = derive(&node(H200, true, SIZES_8B), Some(&times)).unwrap();
        let reason = &why(&defaults, "node.step_tokens").why;
        assert!(reason.contains("42227 of 42227 tokens/s"), "{reason}");
        // The smallest step is the fastest, but every slot needs a token in each step.
        times.prefill = vec![(128, Duration::from_millis(1)), (256, Duration::from_millis(4))];
        assert_eq!(derived(&times), (256, 256, 256));
    }

    #[test]
    fn itl_max_bounds_prefill_with_decode_rows_by_measured_times() {
        let times = times_8b();
        let decode = |set, times| derive(&with(H200, set), Some(times)).map(|it| it.itl.unwrap());
        let itl = decode(SetValues::default(), &times).unwrap();
        assert_eq!((itl.max, itl.decode), (GPU_ITL_MAX, times.decode));
        let tokens = itl.prefill_tokens(Duration::ZERO);
        assert!((850..950).contains(&tokens), "{tokens}: 512 take 14.6 ms, 1024 take 24.6 ms");
        assert!((13_000..14_500).contains(&itl.doubling_tokens), "{itl:?}");
        // 4 decode steps of a slower GPU are longer than 20 ms.
        let slow = StepTimes { decode: Duration::from_micros(52_900), ..times.clone() };
        assert_eq!(decode(SetValues::default(), &slow).unwrap().max, Duration::from_millis(212));
        let set = |millis| SetValues {
            itl_max: Some(Duration::from_millis(millis)),
            ..SetValues::default()
        };
        assert_eq!(decode(set(5), &times).unwrap().max, Duration::from_millis(5));
        let error = decode(set(4), &times).unwrap_err().to_string();
        assert_eq!(
            error,
            "node.itl_max = 4ms: a step that decodes one row takes 4.1ms on this device; expected \
             at least 5ms"
        );
        // It also bounds a prefill node, which may decode. A CPU has none by default.
        let prefill = NodeTraits { prefers_decode: false, ..with(H200, set(5)) };
        let itl = derive(&prefill, Some(&times)).unwrap().itl;
        assert_eq!(itl.unwrap().max, Duration::from_millis(5));
        let cpu = |set| derive(&with(NodeDevice::Cpu, set), Some(&times)).unwrap().itl;
        assert_eq!(cpu(SetValues::default()), None);
        assert_eq!(cpu(set(50)).unwrap().max, Duration::from_millis(50));
    }
}
