//! Engines that compute on the CPU: with a tiny random model, or with SmolLM2.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use engine::{
    LoopOutcome, SchedulerConfig, StepLoop,
    event::{Action, FinishReason, Input, NewSequence, SequenceFailure, SequenceId},
    executor::{Executor, ExecutorLimits, cpu::CpuExecutor},
};
use kernels::{
    KvArena, KvFormat, KvLayout, WeightFormat,
    cpu::{CpuBackend, CpuOptions, Isa},
    sampling::{SampledToken, TokenLogprobs},
};
use model::{Checkpoint, LoadFormat};
use serde::Deserialize;

use super::{pair::Pair, scheduler};

pub(crate) type CpuEngine = StepLoop<CpuExecutor>;

/// Returns a model with two layers, grouped-query attention, a vocabulary of 96 tokens and random
/// weights.
pub(crate) fn tiny_model() -> Checkpoint {
    dummy_model(serde_json::json!({}))
}

/// Returns the tiny model with some configuration keys changed.
pub(crate) fn dummy_model(changes: serde_json::Value) -> Checkpoint {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "vocab_size": 96, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2
    });
    let fields = config.as_object_mut().expect("the configuration is an object");
    fields.extend(changes.as_object().expect("fields and values").clone());
    let path = folder.path().join("config.json");
    std::fs::write(&path, config.to_string()).expect("a small file");
    Checkpoint::open(&path, LoadFormat::Dummy { seed: 11 }).expect("the config is complete")
}

/// Returns a model with linear attention in two of three layers, and with experts.
pub(crate) fn hybrid_model() -> Checkpoint {
    dummy_model(serde_json::json!({
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
        "linear_value_head_dim": 10, "linear_conv_kernel_dim": 4, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24
    }))
}

/// Returns SmolLM2, which is downloaded and not part of the repository.
pub(crate) fn real_model() -> Checkpoint {
    let path = std::env::var_os("BATON_TEST_MODEL").map(PathBuf::from).unwrap_or_else(|| {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf")
    });
    assert!(path.is_file(), "{} is not there: run `make model`", path.display());
    Checkpoint::open(&path, LoadFormat::Auto).expect("the model is whole")
}

pub(crate) fn limits_of(
    checkpoint: &Checkpoint,
    slots: u32,
    step_tokens: u32,
    blocks: u32,
    depth: u32,
) -> ExecutorLimits {
    let config = checkpoint.config();
    ExecutorLimits {
        slots,
        step_tokens,
        sequence_tokens: config.context_tokens as u32,
        blocks,
        depth,
        vocabulary: config.vocab_size as u32,
        speculation: None,
    }
}

/// Returns an engine in f32, and the arena of its KV.
pub(crate) fn engine(
    checkpoint: &Checkpoint,
    config: SchedulerConfig,
    threads: usize,
) -> (CpuEngine, Arc<KvArena>) {
    engine_with(checkpoint, config, threads, WeightFormat::F32)
}

/// Returns an engine with weights in this format. KV is f32 for f32 weights, bf16 otherwise.
pub(crate) fn engine_with(
    checkpoint: &Checkpoint,
    config: SchedulerConfig,
    threads: usize,
    weights: WeightFormat,
) -> (CpuEngine, Arc<KvArena>) {
    let layout = checkpoint.config().kv_layout(weights.kv_format());
    let (executor, arena) = executor(checkpoint, config, threads, weights, layout);
    let scheduler = scheduler(config).with_kv_groups(executor.kv_groups());
    (StepLoop::new(scheduler, executor), arena)
}

/// Returns an engine in f32 with the KV groups of the model, and the arena of its KV.
pub(crate) fn engine_with_groups(
    checkpoint: &Checkpoint,
    config: SchedulerConfig,
) -> (CpuEngine, Arc<KvArena>) {
    let groups = checkpoint.config().kv_groups(KvFormat::F32);
    let layout = groups.block_layout(checkpoint.config().kv_layout(KvFormat::F32));
    let (executor, arena) = executor(checkpoint, config, 1, WeightFormat::F32, layout);
    assert_eq!(executor.kv_groups(), groups);
    (StepLoop::new(scheduler(config).with_kv_groups(groups), executor), arena)
}

fn executor(
    checkpoint: &Checkpoint,
    config: SchedulerConfig,
    threads: usize,
    weights: WeightFormat,
    layout: KvLayout,
) -> (CpuExecutor, Arc<KvArena>) {
    let options = CpuOptions { weights, threads, isa: Isa::Auto };
    let backend = CpuBackend::new(options).expect("the options fit this machine");
    let arena = KvArena::host(layout, config.limits.blocks).expect("memory for the arena");
    let executor =
        CpuExecutor::start(checkpoint, backend, Arc::clone(&arena), config.limits, &mut |_| {});
    (executor.expect("model, arena and limits agree"), arena)
}

pub(crate) fn pair(checkpoint: &Checkpoint, config: SchedulerConfig) -> Pair<CpuExecutor> {
    let (prefill, from) = engine_with_groups(checkpoint, config);
    let (decode, to) = engine_with_groups(checkpoint, config);
    Pair::new(prefill, decode, (from, to))
}

/// Outcome of one sequence.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub tokens: Vec<SampledToken>,
    pub cached_tokens: u32,
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    pub finish: Option<FinishReason>,
    pub failure: Option<SequenceFailure>,
}

impl Outcome {
    pub(crate) fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }
}

/// Runs all sequences together until the engine is idle.
pub(crate) fn run<E: Executor>(
    engine: &mut StepLoop<E>,
    all: Vec<NewSequence>,
) -> HashMap<SequenceId, Outcome> {
    run_with(engine, all, |_| ())
}

/// Runs all sequences together until the engine is idle. Calls `between_turns` before every turn.
pub(crate) fn run_with<E: Executor>(
    engine: &mut StepLoop<E>,
    all: Vec<NewSequence>,
    mut between_turns: impl FnMut(&StepLoop<E>),
) -> HashMap<SequenceId, Outcome> {
    let mut outcomes: HashMap<_, _> = all.iter().map(|new| (new.id, Outcome::default())).collect();
    let mut actions = Vec::new();
    for new in all {
        engine.handle(Input::Arrived(new), &mut actions);
    }
    let stalled = Instant::now() + Duration::from_secs(300);
    loop {
        between_turns(engine);
        let turn = engine.turn(Duration::from_secs(60), &mut actions).expect("steps succeed");
        for action in actions.drain(..) {
            note(&mut outcomes, action);
        }
        if turn == LoopOutcome::Idle {
            return outcomes;
        }
        assert!(Instant::now() < stalled, "no end: {:?}", engine.scheduler());
    }
}

fn note(outcomes: &mut HashMap<SequenceId, Outcome>, action: Action) {
    match action {
        Action::Tokens { id, tokens, cached_tokens, prompt_logprobs, .. } => {
            let outcome = outcomes.get_mut(&id).expect("known");
            if outcome.tokens.is_empty() {
                outcome.prompt_logprobs = prompt_logprobs;
            } else {
                assert_eq!(prompt_logprobs, None, "only token 0 has them");
            }
            outcome.tokens.extend(tokens);
            outcome.cached_tokens = cached_tokens;
        }
        Action::Finished { id, reason } => outcomes.get_mut(&id).expect("known").finish = reason,
        Action::Failed { id, failure } => {
            outcomes.get_mut(&id).expect("known").failure = Some(failure);
        }
        Action::Admitted { .. } => {}
        action => panic!("a sequence without a transfer says {action:?}"),
    }
}

#[derive(Deserialize)]
pub(crate) struct GoldenRun {
    pub name: String,
    pub prompt_ids: Vec<u32>,
    pub output_ids: Vec<u32>,
    /// Difference between the logits of the best and the second-best token at each step.
    #[serde(rename = "top1_top2_margin_per_step")]
    pub margins: Vec<f32>,
    /// The most likely tokens after the prompt.
    pub first_step_top5: Vec<GoldenToken>,
}

#[derive(Deserialize)]
pub(crate) struct GoldenToken {
    pub id: u32,
    pub logprob: f32,
}

pub(crate) fn golden() -> Vec<GoldenRun> {
    #[derive(Deserialize)]
    struct Golden {
        runs: Vec<GoldenRun>,
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../integration-tests/golden/smollm2_greedy.json");
    let text = std::fs::read(path).expect("the golden outputs are part of the repository");
    let golden: Golden = serde_json::from_slice(&text).expect("it is JSON of this shape");
    assert_eq!(golden.runs.len(), 4);
    golden.runs
}
