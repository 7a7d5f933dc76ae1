//! Tests models sharded over ranks.

mod common;

use std::{fs, path::Path, sync::Arc, thread, time::Duration};

use common::{
    ranks::{group, region, shards, together, whole_rows},
    sequence::{BLOCKS, Runner},
};
use kernels::{
    BlockId, KvArena, Shard, WeightFormat,
    cpu::{CpuBackend, CpuGroup, CpuOptions, Isa},
};
use model::{
    Checkpoint, LayerWeight, Limits, LoadFormat, LoadProgress, ModelError, Transformer, Weight,
    WeightShape,
};
use serde_json::{Value, json};

fn worst_difference(found: &[Vec<f32>], expected: &[Vec<f32>]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let rows = found.iter().zip(expected).flat_map(|(found, expected)| {
        assert_eq!(found.len(), expected.len());
        found.iter().zip(expected)
    });
    rows.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn tokens(count: usize, vocabulary: usize) -> Vec<u32> {
    (0..count).map(|index| ((index * 3637 + index / 3) % vocabulary) as u32).collect()
}

fn all_logits(runner: &mut Runner, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut sequence = runner.sequence(tokens.len());
    runner.forward(&mut [(&mut sequence, tokens, tokens.len() as u32)])
}

/// Compares a model on one rank and on the ranks of the group of `first`: the logits agree within
/// `tolerance`. In f32, the KV agrees as well, and chunked prefill changes no bit of the logits.
fn check(checkpoint: &Checkpoint, weights: WeightFormat, first: Shard, tolerance: f32, name: &str) {
    let of = first.rank_count();
    let tokens = tokens(40, checkpoint.config().vocab_size);
    let (alone, alone_kv) = together(checkpoint, weights, Shard::WHOLE, name, |runner| {
        assert!(runner.shard().is_whole());
        all_logits(runner, &tokens)
    });
    let (ranks, kv) = together(checkpoint, weights, first, name, |runner| {
        let whole = all_logits(runner, &tokens);
        for chunk in [1, 7, 16] {
            let mut sequence = runner.sequence(tokens.len());
            let last = runner.prefill(&mut sequence, &tokens, chunk);
            if weights == WeightFormat::F32 {
                assert!(last == *whole.last().unwrap(), "{name}: chunks of {chunk}");
            }
        }
        whole
    });
    for (shard, rows) in shards(of).zip(&ranks) {
        let own = shard.tokens(checkpoint.config().vocab_size);
        assert!(rows.iter().all(|row| row.len() == own.len()));
    }
    let worst = worst_difference(&whole_rows(&ranks), &alone[0]);
    assert!(worst < tolerance, "{name} on {of} ranks is off by {worst}");
    if weights != WeightFormat::F32 {
        return;
    }
    // The blocks of the first sequence: KV of 40 tokens, then the recurrent state.
    let state = checkpoint.config().state_shape().map_or(0, |it| it.block_count(kv.layout()));
    for block in (0..3 + state as u32).map(BlockId) {
        let values = |arena: &Arc<KvArena>| -> Vec<f32> {
            let block = arena.read(block).unwrap();
            let bytes = block.host_view().unwrap().as_chunks().0;
            bytes.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
        };
        let (found, expected) = (values(&kv), values(&alone_kv));
        let worst = worst_difference(&[found], std::slice::from_ref(&expected));
        assert!(worst < tolerance, "{name} on {of} ranks: {block:?} is off by {worst}");
        assert!(expected.iter().any(|value| *value != 0.0));
    }
}

#[test]
fn every_architecture_and_format_agrees_on_two_ranks() {
    let folder = common::fixture("architectures");
    let mut checked = 0;
    for name in ["llama3", "mistral", "qwen2", "qwen2_window", "qwen3", "qwen3_next"] {
        for path in [folder.join(name), folder.join(name).join("model.gguf")] {
            if path.exists() {
                let checkpoint = Checkpoint::open(&path, LoadFormat::Auto).unwrap();
                check(&checkpoint, WeightFormat::F32, group(2), 1e-4, name);
                checked += 1;
            }
        }
    }
    assert_eq!(checked, 10);
}

fn dummy(folder: &Path, changes: Value) -> Checkpoint {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8,
        "vocab_size": 301, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2
    });
    let fields = config.as_object_mut().unwrap();
    fields.extend(changes.as_object().unwrap().clone());
    let path = folder.join("config.json");
    fs::write(&path, config.to_string()).unwrap();
    Checkpoint::open(&path, LoadFormat::Dummy { seed: 5 }).unwrap()
}

#[test]
fn dummy_weights_of_ranks_are_parts_of_the_whole_weights() {
    let folder = tempfile::tempdir().unwrap();
    let changes = [
        (json!({}), vec![2, 4, 8]),
        (json!({"tie_word_embeddings": true}), vec![4]),
        // The vocabulary is cut between runs.
        (json!({"tie_word_embeddings": true, "vocab_size": 6200}), vec![2]),
        (json!({"num_key_value_heads": 4}), vec![2, 4]),
        (json!({"num_attention_heads": 9, "num_key_value_heads": 3}), vec![3]),
        (json!({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}), vec![2, 4]),
        (json!({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}), vec![2, 4]),
        (
            json!({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
                "num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 48}),
            vec![2, 4],
        ),
        (
            json!({"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
                "num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 48,
                "shared_expert_intermediate_size": 48, "num_key_value_heads": 4,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8,
                "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}),
            vec![2, 4],
        ),
        // The parts are not whole blocks of 32 or 256 elements, nor whole panels.
        (json!({"intermediate_size": 72, "vocab_size": 45}), vec![2, 4]),
    ];
    for (changes, counts) in changes {
        let checkpoint = dummy(folder.path(), changes.clone());
        for of in counts {
            check(&checkpoint, WeightFormat::F32, group(of), 1e-4, "dummy");
            check(&checkpoint, WeightFormat::Bf16, group(of), 0.15, "dummy_bf16");
        }
    }
    let checkpoint = dummy(folder.path(), json!({}));
    check(&checkpoint, WeightFormat::Q8, group(2), 0.3, "dummy_q8");
}

#[test]
fn ranks_with_whole_experts_agree_with_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    // No number of ranks but 1 divides the width of an expert.
    let experts = json!({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 43});
    // The shared expert is divided by its width.
    let shared = json!({"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 43,
        "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]});
    for changes in [experts, shared] {
        let checkpoint = dummy(folder.path(), changes);
        let config = checkpoint.config();
        assert_eq!(config.rank_counts(false).collect::<Vec<_>>(), [1]);
        assert_eq!(config.rank_counts(true).collect::<Vec<_>>(), [1, 2, 4, 8]);
        for of in [2, 4] {
            assert!(config.prefers_whole_experts(of));
            let first = group(of).with_whole_experts(true);
            check(&checkpoint, WeightFormat::F32, first, 1e-4, "experts");
            check(&checkpoint, WeightFormat::Bf16, first, 0.15, "experts_bf16");
            // Every expert is on one rank.
            for weight in Weight::all(config) {
                let parts: Vec<u64> =
                    first.all().map(|rank| weight.part(config, rank).elements()).collect();
                if matches!(weight, Weight::Layer(_, LayerWeight::Expert(..))) {
                    let whole = weight.shape(config).elements();
                    assert_eq!(parts.iter().filter(|part| **part == whole).count(), 1);
                    assert_eq!(parts.iter().sum::<u64>(), whole, "{weight:?}");
                }
            }
        }
        assert!(!config.prefers_whole_experts(1) && !config.prefers_whole_experts(16));
        let error = config.check_shard(group(16).with_whole_experts(true)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot shard the model's 8 KV heads and number of experts 8 over 16 ranks; expected one of 1, 2, 4, 8"
        );
    }
    let even = dummy(
        folder.path(),
        json!({"architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 48}),
    );
    assert!(!even.config().prefers_whole_experts(2), "equal parts keep the ranks equally busy");
    assert!(!dummy(folder.path(), json!({})).config().prefers_whole_experts(3));
}

#[test]
fn a_rank_may_keep_its_heads_in_memory_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = dummy(folder.path(), json!({}));
    let (config, tokens) = (checkpoint.config(), tokens(40, checkpoint.config().vocab_size));
    let (shared, _) = together(&checkpoint, WeightFormat::F32, group(2), "shared_kv", |runner| {
        all_logits(runner, &tokens)
    });
    let region = region("own_kv", CpuGroup::region_bytes(2));
    thread::scope(|scope| {
        let ranks: Vec<_> = shards(2)
            .map(|shard| {
                let group = CpuGroup::new(&region, 0, shard, Duration::from_secs(120));
                let (checkpoint, tokens) = (&checkpoint, &tokens);
                scope.spawn(move || {
                    let layout = config.kv_layout_of(kernels::KvFormat::F32, shard);
                    assert_eq!(layout.kv_head_count, 4);
                    let arena = KvArena::host(layout, BLOCKS).unwrap();
                    let mut runner = Runner::rank(checkpoint, WeightFormat::F32, group, arena, 64);
                    all_logits(&mut runner, tokens)
                })
            })
            .collect();
        for (rank, shared) in ranks.into_iter().zip(&shared) {
            assert!(rank.join().unwrap() == *shared);
        }
    });
}

#[test]
fn unsupported_rank_counts_are_rejected_with_the_supported_ones() {
    let folder = tempfile::tempdir().unwrap();
    let load = |checkpoint: &Checkpoint, shard: Shard, progress: &mut dyn FnMut(LoadProgress)| {
        let options = CpuOptions { weights: WeightFormat::F32, threads: 1, isa: Isa::Auto };
        // No collective runs, so the other ranks are not needed.
        let region = region("refused", CpuGroup::region_bytes(shard.rank_count()));
        let group = CpuGroup::new(&region, 0, shard, Duration::from_secs(1));
        let backend = CpuBackend::new(options).unwrap().in_group(group);
        let limits = Limits { rows_max: 1, sampled_max: 1, adapter_slots: 0 };
        Transformer::load(checkpoint, &backend, limits, progress).map(drop)
    };
    let three = dummy(folder.path(), json!({"num_attention_heads": 9, "num_key_value_heads": 3}));
    let error = load(&three, Shard::new(1, 2).unwrap(), &mut |_| ()).unwrap_err();
    assert!(matches!(&error, ModelError::RankCount { ranks: 2, kv_heads: 3, .. }));
    assert_eq!(
        error.to_string(),
        "cannot shard the model's 3 KV heads and feed-forward size 192 over 2 ranks; expected one of 1, 3"
    );
    // More ranks than heads.
    let eight = dummy(folder.path(), json!({}));
    let error = load(&eight, Shard::new(0, 16).unwrap(), &mut |_| ()).unwrap_err();
    assert!(error.to_string().ends_with("expected one of 1, 2, 4, 8"), "{error}");
    let narrow = dummy(folder.path(), json!({"intermediate_size": 12}));
    assert_eq!(narrow.config().rank_counts(false).collect::<Vec<_>>(), [1, 2, 4]);

    // Loading reports the rank's parameters.
    for checkpoint in [eight, dummy(folder.path(), json!({"tie_word_embeddings": true}))] {
        let config = checkpoint.config();
        let mut sum = 0;
        for shard in shards(4) {
            let mut seen = Vec::new();
            load(&checkpoint, shard, &mut |progress| seen.push(progress)).unwrap();
            let total = config.parameter_count_of(shard);
            assert!(seen.iter().all(|progress| progress.parameters_total == total));
            assert!(seen.is_sorted_by(|a, b| a.parameters_done < b.parameters_done));
            assert_eq!(seen.last().unwrap().parameters_done, total);
            sum += total;
        }
        // Every rank has all norms.
        let norms = (2 * 3 + 1) * 64;
        assert_eq!(sum, config.parameter_count() + 3 * norms);
        assert_eq!(config.parameter_count_of(Shard::WHOLE), config.parameter_count());
    }
}

#[test]
fn parts_of_a_weight_form_the_whole_weight() {
    let folder = tempfile::tempdir().unwrap();
    let changes = json!({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"});
    let checkpoint = dummy(folder.path(), changes);
    let config = checkpoint.config();
    for weight in Weight::all(config) {
        let whole = weight.part(config, Shard::WHOLE);
        assert_eq!(whole.elements(), weight.shape(config).elements());
        let parts: Vec<_> = shards(4).map(|shard| weight.part(config, shard)).collect();
        if parts.iter().all(|part| *part == whole) {
            // Only norms are on every rank.
            assert!(matches!(weight.shape(config), WeightShape::Vector { .. }), "{weight:?}");
            continue;
        }
        assert_eq!(parts.iter().map(|part| part.elements()).sum::<u64>(), whole.elements());
        for pair in parts.windows(2) {
            let (a, b) = (&pair[0], &pair[1]);
            let follows = a.rows.end == b.rows.start && a.cols == b.cols
                || a.cols.end == b.cols.start && a.rows == b.rows;
            assert!(follows, "{weight:?}: {a:?}, {b:?}");
        }
    }
}
