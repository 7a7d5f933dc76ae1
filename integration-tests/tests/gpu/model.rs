//! Whole models with random weights: logits match the CPU's, and sampled tokens stay on the GPU as
//! the next step's input.

use std::sync::Arc;

use kernels::{
    BlockId, Dtype, KvArena, KvFormat, KvGroups, WeightFormat,
    cpu::{CpuStep, StepSequence},
    cuda::{
        Admission, AttentionKind, BatchLimits, CudaOptions, DeviceBatch, DeviceClock, Graph,
        SampleOutcome, StepInput, StepRows,
    },
    sampling::Sampling,
};
use model::{Checkpoint, Limits, LoadFormat, Transformer};

use super::bench::{Bench, assert_near, cpu, gpu};

/// Returns a model of the architecture. Each architecture has a feature that the others lack.
pub(crate) fn checkpoint(architecture: &str, model_type: &str) -> Checkpoint {
    checkpoint_with(architecture, model_type, 16)
}

pub(crate) fn checkpoint_with(architecture: &str, model_type: &str, head_dim: usize) -> Checkpoint {
    checkpoint_of_size(architecture, model_type, (96, head_dim))
}

pub(crate) fn checkpoint_of_size(
    architecture: &str,
    model_type: &str,
    sizes: (usize, usize),
) -> Checkpoint {
    checkpoint_quantized(architecture, model_type, sizes, None)
}

pub(crate) fn checkpoint_quantized(
    architecture: &str,
    model_type: &str,
    (hidden, head_dim): (usize, usize),
    quantization: Option<serde_json::Value>,
) -> Checkpoint {
    let folder = tempfile::tempdir().unwrap();
    let mut config = serde_json::json!({
        "architectures": [architecture], "model_type": model_type,
        "hidden_size": hidden, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": head_dim,
        "vocab_size": 1003, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2,
        "num_experts": 24, "num_local_experts": 5, "moe_intermediate_size": 80,
        "num_experts_per_tok": 4, "norm_topk_prob": true,
        "shared_expert_intermediate_size": 48, "n_routed_experts": 24, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.5, "use_qk_norm": true, "moe_num_experts": 24, "moe_k": 4,
        "scoring_func": "sigmoid", "rotary_dim": head_dim / 2
    });
    // Layers 0 and 2 have a window, so there are three KV groups.
    let windows = serde_json::json!({
        "use_sliding_window": true, "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
    });
    let scaling = serde_json::json!({
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
            "beta_fast": 32.0, "beta_slow": 1.0
        },
        "quantization_config": {"quant_method": "mxfp4"}
    });
    // Layers 0 and 2 have linear attention.
    let hybrid = serde_json::json!({
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 24,
        "linear_value_head_dim": 20, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5
    });
    let more = match model_type {
        "qwen2" => vec![windows],
        "gpt_oss" => vec![windows, scaling],
        "gemma3_text" => vec![windows, serde_json::json!({"rope_local_base_freq": 500.0})],
        "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text" => vec![hybrid],
        _ => Vec::new(),
    };
    let fields = config.as_object_mut().expect("an object");
    more.into_iter().for_each(|more| fields.extend(more.as_object().unwrap().clone()));
    fields.extend(quantization.map(|value| ("quantization_config".to_owned(), value)));
    let path = folder.path().join("config.json");
    std::fs::write(&path, config.to_string()).unwrap();
    Checkpoint::open(&path, LoadFormat::Dummy { seed: 11 }).unwrap()
}

const ROWS: usize = 256;
const STEPS: usize = 24;

fn prompts() -> [Vec<u32>; 3] {
    [1, 40, 131].map(|length| (0..length).map(|i| (i * 37 + length * 5) % 1003).collect())
}

/// Returns the block table of a sequence of 256 tokens.
fn table(sequence: usize, groups: &KvGroups) -> Vec<BlockId> {
    let count = groups.entries(256) as u32;
    (0..count).map(|i| BlockId(sequence as u32 * count + (i * 13) % count)).collect()
}

/// Returns tokens and logits of every step, computed by the CPU.
pub(crate) fn by_cpu(checkpoint: &Checkpoint, weights: WeightFormat) -> Vec<(Vec<u32>, Vec<f32>)> {
    by_cpu_with_kv(checkpoint, weights, weights.kv_format())
}

fn by_cpu_with_kv(
    checkpoint: &Checkpoint,
    weights: WeightFormat,
    kv: KvFormat,
) -> Vec<(Vec<u32>, Vec<f32>)> {
    let mut cpu = cpu(weights);
    let limits = Limits { rows_max: ROWS, sampled_max: 4, adapter_slots: 0 };
    let mut llama = Transformer::load(checkpoint, &cpu, limits, &mut |_| ()).unwrap();
    let (layout, groups) =
        (checkpoint.config().block_layout(kv), checkpoint.config().kv_groups(kv));
    let arena: Arc<KvArena> = KvArena::host(layout, 3 * groups.entries(256) as u32).unwrap();
    let mut known = prompts();
    let mut computed = [0; 3];
    let tables = [0, 1, 2].map(|sequence| table(sequence, &groups));
    (0..STEPS)
        .map(|_| {
            let sequences: Vec<_> = (0..3)
                .map(|i| StepSequence {
                    first_position: computed[i] as u32,
                    tokens: &known[i][computed[i]..],
                    blocks: &tables[i],
                    sampled_rows: 1,
                    adapter: None,
                })
                .collect();
            let heads = 0..layout.kv_head_count;
            let mut step = CpuStep::of_heads(&arena, heads, &groups, &sequences).unwrap();
            let logits = llama.forward(&mut cpu, &mut step);
            let logits = cpu.get(logits, 3);
            let tokens: Vec<u32> = logits
                .chunks(1003)
                .map(|row| {
                    (0..1003).rev().max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as u32
                })
                .collect();
            for (i, token) in tokens.iter().enumerate() {
                computed[i] = known[i].len();
                known[i].push(*token);
            }
            (tokens, logits)
        })
        .collect()
}

/// Returns tokens and logits of every step, computed by the GPU. The host sends the prompts and no
/// later token. `depth` steps are launched before the first result is read. With graphs, decode
/// steps are replayed with a padding row; without graphs they have the same padding row.
pub(crate) fn by_gpu(
    gpu: &super::bench::Gpu,
    checkpoint: &Checkpoint,
    options: CudaOptions,
    depth: usize,
) -> Vec<(Vec<u32>, Vec<f32>)> {
    let limits = Limits { rows_max: ROWS, sampled_max: 4, adapter_slots: 0 };
    let (mut cuda, mut llama) = gpu.backend_with(options, |backend| {
        Transformer::load(checkpoint, backend, limits, &mut |_| ()).unwrap()
    });
    let mut graph = None;
    let groups = checkpoint.config().kv_groups(options.kv);
    let layout = checkpoint.config().block_layout(options.kv);
    let (kv, _) = gpu.kv(layout, 3 * groups.entries(256) as u32);
    let limits = BatchLimits {
        hidden: 0,
        slots: 4,
        sequence_tokens: 256,
        rows: ROWS as u32,
        samples: 4,
        stops: 1,
        vocabulary: 1003,
        depth: depth as u32,
    };
    let mut batch = DeviceBatch::new(&cuda, kv, groups.clone(), limits).unwrap();
    let mut clock = DeviceClock::start(cuda.context(), cuda.compute()).unwrap();
    let tables = [0, 1, 2].map(|sequence| table(sequence, &groups));
    let (prompts, sampling) = (prompts(), Sampling::greedy());
    let slots = [3, 0, 2];
    let admissions: Vec<_> = (0..3)
        .map(|i| Admission {
            slot: slots[i],
            tokens: &prompts[i],
            prompt_len: prompts[i].len() as u32,
            position: 0,
            blocks: &tables[i],
            sampling: &sampling,
            adapter: None,
        })
        .collect();
    let mut position = [0; 3];
    let mut frames = std::collections::VecDeque::new();
    let mut results = Vec::new();
    let mut all_logits = Vec::new();
    for step_id in 0..STEPS as u64 {
        if frames.len() == depth {
            let frame: kernels::cuda::CudaFrame = frames.pop_front().unwrap();
            let finished = frame.finish(&mut clock).unwrap();
            batch.recycle(finished.output);
            results.push(tokens(finished.outcomes));
        }
        let sequences: Vec<_> = (0..3)
            .map(|i| {
                let rows = if step_id == 0 { prompts[i].len() as u32 } else { 1 };
                let first = position[i];
                position[i] += rows;
                StepRows { slot: slots[i], position: first, rows, samples: 1 }
            })
            .collect();
        let input = StepInput {
            step_id,
            admissions: if step_id == 0 { &admissions } else { &[] },
            extensions: &[],
            sequences: &sequences,
            rows_min: if step_id == 0 { 0 } else { 4 },
            drafts: None,
            known_drafts: &[],
            has_adapters: false,
        };
        let mut step = batch.begin(&cuda, &input).unwrap();
        match &mut graph {
            Some(graph) if step_id > 0 => Graph::launch(graph, cuda.compute()).unwrap(),
            _ => _ = llama.forward(&mut cuda, &mut step),
        }
        batch.sample(&cuda, llama.logits(), &step).unwrap();
        if step_id == 1 && options.graphs {
            let mut step = batch.filling(4, 0, false);
            graph = Some(cuda.capture(|cuda| _ = llama.forward(cuda, &mut step)).unwrap());
        }
        if depth == 1 {
            all_logits.push(cuda.get(llama.logits(), 3));
        }
        frames.push_back(batch.end(&cuda, step_id, vec![false; 3]).unwrap());
    }
    for frame in frames {
        results.push(tokens(frame.finish(&mut clock).unwrap().outcomes));
    }
    all_logits.resize(STEPS, Vec::new());
    results.into_iter().zip(all_logits).collect()
}

fn tokens(outcomes: Vec<SampleOutcome>) -> Vec<u32> {
    let token = |outcome| match outcome {
        SampleOutcome::Token(token) => token.id,
        other => panic!("{other:?}"),
    };
    outcomes.into_iter().map(token).collect()
}

/// Returns the root mean square.
pub(crate) fn rms(values: impl Iterator<Item = f32>) -> f32 {
    let (mut sum, mut count) = (0.0, 0);
    values.for_each(|value| (sum, count) = (sum + value * value, count + 1));
    (sum / count as f32).sqrt()
}

pub(crate) fn every_architecture_matches_cpu_logits_and_tokens() {
    let gpu = gpu();
    for (architecture, model_type) in [
        ("LlamaForCausalLM", "llama"),
        ("Qwen2ForCausalLM", "qwen2"),
        ("Qwen3ForCausalLM", "qwen3"),
        ("Gemma3ForCausalLM", "gemma3_text"),
        ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    ] {
        let checkpoint = checkpoint(architecture, model_type);
        let wanted = by_cpu(&checkpoint, Dtype::F32.into());
        let exact = CudaOptions {
            attention: AttentionKind::Plain,
            graphs: false,
            ..CudaOptions::new(WeightFormat::F32)
        };
        let found = by_gpu(&gpu, &checkpoint, exact, 1);
        for (step, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            assert_near(&found.1, &wanted.1, 1e-3, &format!("{architecture}, step {step}"));
            assert_eq!(found.0, wanted.0, "{architecture}, step {step}");
        }
        let two = by_gpu(&gpu, &checkpoint, exact, 2);
        let only_tokens = |all: &[(Vec<u32>, Vec<f32>)]| -> Vec<Vec<u32>> {
            all.iter().map(|(tokens, _)| tokens.clone()).collect()
        };
        assert_eq!(only_tokens(&two), only_tokens(&found), "{architecture}, two steps in flight");
        let replayed = by_gpu(&gpu, &checkpoint, CudaOptions { graphs: true, ..exact }, 1);
        assert_eq!(replayed, found, "{architecture}, replayed");
    }
}

/// Returns the relative error of each row of logits.
pub(crate) fn row_errors(found: &[f32], wanted: &[f32]) -> Vec<f32> {
    let of_row = |(found, wanted): (&[f32], &[f32])| {
        let error = rms(found.iter().zip(wanted).map(|(found, wanted)| found - wanted));
        error / rms(wanted.iter().copied())
    };
    found.chunks(1003).zip(wanted.chunks(1003)).map(of_row).collect()
}

/// Runs bf16 in every configuration. Logits are close to the CPU's. They are bit-identical where
/// only the kind of launch differs.
pub(crate) fn fused_kernels_and_graph_replay_match_cpu_logits_in_bf16() {
    let gpu = gpu();
    let best = CudaOptions::new(WeightFormat::Bf16);
    let unfused = CudaOptions { fused: false, ..best };
    let flash = CudaOptions { attention: AttentionKind::Flash, graphs: false, ..best };
    let sparing = CudaOptions { reserved_sms: 127, ..best };
    let kv_in_fp8 = CudaOptions { kv: KvFormat::Fp8, ..best };
    for (architecture, model_type, head_dim) in [
        ("LlamaForCausalLM", "llama", 16),
        ("LlamaForCausalLM", "llama", 64),
        ("Qwen2ForCausalLM", "qwen2", 128),
        ("Qwen3ForCausalLM", "qwen3", 64),
        ("Gemma3ForCausalLM", "gemma3_text", 128),
        ("Gemma3ForCausalLM", "gemma3_text", 256),
        ("MixtralForCausalLM", "mixtral", 64),
        ("Qwen3MoeForCausalLM", "qwen3_moe", 128),
        ("Qwen2MoeForCausalLM", "qwen2_moe", 64),
        ("OlmoeForCausalLM", "olmoe", 64),
        ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", 128),
        ("Glm4MoeForCausalLM", "glm4_moe", 128),
        ("MiniMaxM2ForCausalLM", "minimax_m2", 64),
        ("GptOssForCausalLM", "gpt_oss", 64),
        ("Qwen3_5ForCausalLM", "qwen3_5_text", 256),
        ("Qwen3NextForCausalLM", "qwen3_next", 128),
        ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", 128),
    ] {
        let checkpoint = checkpoint_with(architecture, model_type, head_dim);
        let has_experts = checkpoint.config().experts().is_some();
        let in_bf16 = by_cpu(&checkpoint, WeightFormat::Bf16);
        let with_kv_in_fp8 = by_cpu_with_kv(&checkpoint, WeightFormat::Bf16, KvFormat::Fp8);
        let flash_unfused = CudaOptions { fused: false, ..flash };
        for options in [best, sparing, unfused, flash, flash_unfused, kv_in_fp8] {
            let is_fp8 = options.kv == KvFormat::Fp8;
            let wanted = if is_fp8 { &with_kv_in_fp8 } else { &in_bf16 };
            if is_fp8 && head_dim < 64 {
                continue;
            }
            let what = format!("{architecture}, heads of {head_dim}, {options:?}");
            let options = CudaOptions { graphs: false, dependent_launch: false, ..options };
            let rounded = by_gpu(&gpu, &checkpoint, options, 1);
            // Inputs are equal as long as the tokens are equal.
            let same = rounded.iter().zip(wanted).take_while(|(a, b)| a.0 == b.0).count();
            let steps = rounded.iter().zip(wanted).take(same + 1);
            let mut errors: Vec<f32> =
                steps.flat_map(|(found, wanted)| row_errors(&found.1, &wanted.1)).collect();
            errors.sort_by(f32::total_cmp);
            let (middle, most) = (errors[errors.len() / 2], errors[errors.len() - 1]);
            // Rounding may choose another expert of an almost equal score. That changes some rows
            // a lot, and most rows not at all.
            // With KV in FP8, a value between two elements becomes either of them.
            let is_near = match (has_experts, is_fp8) {
                (true, false) => middle < 0.03 && most < 0.3,
                (true, true) => middle < 0.1,
                (false, false) => most < 0.05,
                (false, true) => most < 0.15,
            };
            eprintln!("{what}: {same} of {STEPS} steps chose the CPU's tokens");
            assert!(is_near, "{what}: the relative errors of rows of logits are {errors:.3?}");
            let can_capture =
                options.attention == AttentionKind::Auto && [64, 128, 256].contains(&head_dim);
            for (graphs, dependent_launch) in [(false, true), (true, false), (true, true)] {
                if graphs && !can_capture {
                    continue;
                }
                let options = CudaOptions { graphs, dependent_launch, ..options };
                let found = by_gpu(&gpu, &checkpoint, options, 1);
                assert_eq!(found, rounded, "{what}, graphs {graphs}, early {dependent_launch}");
            }
        }
    }
}
