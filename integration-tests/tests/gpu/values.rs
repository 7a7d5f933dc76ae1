//! Cost of log-probabilities of prompts, of pooled values and of sampling rules in a model of real
//! size. Its weights are random; `BATON_TEST_CONFIG` names the file of its sizes.

use std::{collections::HashMap, path::Path, time::Duration};

use engine::{
    SchedulerConfig, StepKind, StepLoop,
    event::NewSequence,
    executor::{
        ExecutorLimits,
        cuda::{CudaExecutor, CudaModel},
    },
};
use kernels::{
    WeightFormat,
    cuda::{CudaBackend, CudaOptions, TuningSettings},
    sampling::{Pooling, Sampling},
};
use model::{Checkpoint, LoadFormat};

use super::{
    bench::{Gpu, gpu, lacks},
    executor::{run_arriving, sequence, step_loop},
};

/// Numbers of slots: the default, and more, so that a step computes more logits of prompt tokens.
const SLOTS: [u32; 2] = [256, 1024];
const BATCH: u32 = 128;

/// Returns an engine with the limits of a node on a GPU.
fn real_engine(gpu: &Gpu, checkpoint: &Checkpoint, slots: u32) -> StepLoop<CudaExecutor> {
    let limits = ExecutorLimits {
        slots,
        step_tokens: 8192,
        sequence_tokens: 8192,
        blocks: 16_384,
        depth: 2,
        vocabulary: checkpoint.config().vocab_size as u32,
        speculation: None,
    };
    let options = CudaOptions::new(WeightFormat::Bf16);
    let backend = CudaBackend::new(&gpu.context, gpu.library.clone(), options).unwrap();
    let mut model = CudaModel::load(checkpoint, backend, &limits, &mut |_| ()).unwrap();
    let tuning = TuningSettings { folder: None, within: Duration::from_secs(15) };
    model.tune(&limits, &tuning).unwrap();
    let layout = checkpoint.config().block_layout(options.kv);
    let (kv, arena) = gpu.kv(layout, limits.blocks);
    let executor = CudaExecutor::start(model, kv, &arena, limits).unwrap();
    step_loop(SchedulerConfig { waiting_max: 1000, ..SchedulerConfig::new(limits) }, executor)
}

/// Runs the sequences, which all arrive at once. Returns the GPU time from the start of the first
/// step to the end of the last step, and the median time of the decode steps that have all rows.
fn times(engine: &mut StepLoop<CudaExecutor>, new: &[NewSequence]) -> (Duration, Duration) {
    engine.take_records();
    run_arriving(engine, new.to_vec(), new.len(), &HashMap::new());
    let records = engine.take_records();
    let span = |record: &engine::StepRecord| record.device.expect("a GPU step has timestamps");
    let (first, last) = (span(&records[0]), span(&records[records.len() - 1]));
    let rows = new.len() as u32;
    let decode =
        |record: &&engine::StepRecord| record.kind == StepKind::Decode && record.rows == rows;
    let mut steps: Vec<_> = records.iter().filter(decode).map(|record| record.busy).collect();
    steps.sort_unstable();
    (last.end - first.begin, steps.get(steps.len() / 2).copied().unwrap_or_default())
}

pub(crate) fn cost_of_prompt_logprobs_pooling_and_rules_is_reported() {
    let gpu = gpu();
    let Some(path) = std::env::var_os("BATON_TEST_CONFIG") else {
        lacks(1, "BATON_TEST_CONFIG names no model configuration")
    };
    let checkpoint = Checkpoint::open(Path::new(&path), LoadFormat::Dummy { seed: 1 }).unwrap();
    let vocabulary = checkpoint.config().vocab_size as u32;
    for slots in SLOTS {
        report(&mut real_engine(&gpu, &checkpoint, slots), vocabulary, slots);
    }
}

fn report(engine: &mut StepLoop<CudaExecutor>, vocabulary: u32, slots: u32) {
    let mut id = 0;
    let mut sequences = |count: u32,
                         length: u32,
                         max_tokens: u32,
                         sampling: &dyn Fn(u32) -> Sampling| {
        let new = |index: u32| {
            id += 1;
            let token =
                |at: u32| at.wrapping_mul(2_654_435_761).wrapping_add(id * 7919) % vocabulary;
            let new =
                sequence(id.into(), (0..length).map(token).collect(), max_tokens, sampling(index));
            NewSequence { ignore_stop_tokens: true, ..new }
        };
        (0..count).map(new).collect::<Vec<_>>()
    };
    let greedy = |_| Sampling::greedy();
    let mut compare = |what: &str, pair: [Vec<NewSequence>; 2]| {
        let [plain, with] = pair.map(|new| times(engine, &new));
        let ratio = |a: Duration, b: Duration| a.as_secs_f64() / b.as_secs_f64();
        eprintln!(
            "{slots} slots, {what}: {plain:?} without, {with:?} with; {:.4} of the span, {:.4} of a decode step",
            ratio(with.0, plain.0),
            ratio(with.1, plain.1),
        );
    };
    for _ in 0..2 {
        let scored = |_| Sampling { prompt_logprobs: Some(5), ..Sampling::greedy() };
        let pair = [sequences(1, 4096, 1, &greedy), sequences(1, 4096, 1, &scored)];
        compare("prompt log-probabilities, 4,096 tokens", pair);
        let pooled = |_| Sampling { pooling: Some(Pooling::Hidden), ..Sampling::greedy() };
        let pair = [sequences(512, 256, 1, &greedy), sequences(512, 256, 1, &pooled)];
        compare("hidden states, 512 texts of 256 tokens", pair);
        let rules = || Sampling {
            logit_bias: (0..100).map(|i| (i * 50, 0.5)).collect(),
            allowed_token_ids: (0..16_384).collect(),
            bad_words: (0..500).map(|i| vec![i * 5 % 16_384, i]).collect(),
            ..Sampling::greedy()
        };
        let pair = [sequences(BATCH, 64, 40, &greedy), sequences(BATCH, 64, 40, &|_| rules())];
        compare("rules in all of 128 rows", pair);
        let one = |index| if index == 0 { rules() } else { Sampling::greedy() };
        let pair = [sequences(BATCH, 64, 40, &greedy), sequences(BATCH, 64, 40, &one)];
        compare("rules in one of 128 rows", pair);
    }
}
