//! The whole engine on the GPU. Every sequence generates the tokens of the CPU, with one or two
//! steps in flight, also when sequences are aborted.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use engine::{
    CacheSeeds, LoopOutcome, Scheduler, SchedulerConfig, StepLoop,
    constraint::{Constraint, ConstraintFailure, Matcher},
    event::{Action, FinishReason, Input, NewSequence, SequenceId, SequenceKind},
    executor::{
        Executor, ExecutorLimits, Speculation, StepTimes,
        cpu::CpuExecutor,
        cuda::{CudaExecutor, CudaModel},
    },
    plan::{AdmittedRow, RowMask, RowPlan, Slot, StepPlan},
};
use kernels::{
    BlockId, KvArena, KvFormat, WeightFormat,
    cuda::{AttentionKind, CudaBackend, CudaOptions},
    sampling::{Pooling, SampledToken, Sampling, TokenLogprobs, TokenMask},
};
use model::Checkpoint;

use super::{
    bench::{Gpu, cpu, gpu, short},
    model::{checkpoint, checkpoint_with},
};

pub(crate) fn config(
    checkpoint: &Checkpoint,
    slots: u32,
    blocks: u32,
    depth: u32,
) -> SchedulerConfig {
    let config = checkpoint.config();
    let limits = ExecutorLimits {
        slots,
        step_tokens: 96,
        sequence_tokens: config.context_tokens.min(1024) as u32,
        blocks,
        depth,
        vocabulary: config.vocab_size as u32,
        speculation: None,
    };
    SchedulerConfig { waiting_max: 1000, ..SchedulerConfig::new(limits) }
}

pub(crate) fn step_loop<E: Executor>(config: SchedulerConfig, executor: E) -> StepLoop<E> {
    let seeds = CacheSeeds { model_fingerprint: 0x5eed, weight_version: 1 };
    let config = SchedulerConfig { limits: executor.limits(), ..config };
    let scheduler = Scheduler::new(config, seeds).unwrap();
    StepLoop::new(scheduler.with_kv_groups(executor.kv_groups()), executor)
}

pub(crate) fn on_gpu(
    gpu: &Gpu,
    checkpoint: &Checkpoint,
    options: CudaOptions,
    config: SchedulerConfig,
    prepare: impl FnOnce(&mut CudaExecutor),
) -> (StepLoop<CudaExecutor>, Arc<KvArena>) {
    let backend = CudaBackend::new(&gpu.context, gpu.library.clone(), options).unwrap();
    let model = CudaModel::load(checkpoint, backend, &config.limits, &mut |_| ()).unwrap();
    let layout = checkpoint.config().block_layout(options.kv);
    let (kv, arena) = gpu.kv(layout, config.limits.blocks);
    let mut executor = CudaExecutor::start(model, kv, &arena, config.limits).unwrap();
    prepare(&mut executor);
    (step_loop(config, executor), arena)
}

pub(crate) fn on_cpu(checkpoint: &Checkpoint, config: SchedulerConfig) -> StepLoop<CpuExecutor> {
    let layout = checkpoint.config().block_layout(WeightFormat::F32.kv_format());
    let arena = KvArena::host(layout, config.limits.blocks).unwrap();
    let backend = cpu(WeightFormat::F32);
    step_loop(
        config,
        CpuExecutor::start(checkpoint, backend, arena, config.limits, &mut |_| {}).unwrap(),
    )
}

pub(crate) fn sequence(
    id: u128,
    tokens: Vec<u32>,
    max_tokens: u32,
    sampling: Sampling,
) -> NewSequence {
    NewSequence {
        id: SequenceId(id),
        kind: SequenceKind::Compute,
        prompt_len: tokens.len() as u32,
        tokens,
        sampling,
        max_tokens,
        ignore_stop_tokens: false,
        cache_salt: String::new(),
        adapter: None,
        session: Default::default(),
        constraint: None,
        deadline: Instant::now() + Duration::from_secs(10_000),
    }
}

/// Clock error of the GPU's timestamps.
const CLOCK: Duration = Duration::from_micros(20);

#[derive(Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub tokens: Vec<SampledToken>,
    pub prompt_logprobs: Vec<TokenLogprobs>,
    pub finish: Option<FinishReason>,
    pub is_failed: bool,
}

impl Outcome {
    pub(crate) fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }
}

/// Runs the sequences, two arriving at a time, and aborts a sequence once it has generated the
/// given number of tokens.
pub(crate) fn run<E: Executor>(
    engine: &mut StepLoop<E>,
    arriving: Vec<NewSequence>,
    aborts: &HashMap<SequenceId, usize>,
) -> HashMap<SequenceId, Outcome> {
    run_arriving(engine, arriving, 2, aborts)
}

pub(crate) fn run_arriving<E: Executor>(
    engine: &mut StepLoop<E>,
    arriving: Vec<NewSequence>,
    at_a_time: usize,
    aborts: &HashMap<SequenceId, usize>,
) -> HashMap<SequenceId, Outcome> {
    run_with(engine, arriving, at_a_time, aborts, |_| ())
}

/// Calls `after_turn` after every turn of the engine.
pub(crate) fn run_with<E: Executor>(
    engine: &mut StepLoop<E>,
    mut arriving: Vec<NewSequence>,
    at_a_time: usize,
    aborts: &HashMap<SequenceId, usize>,
    mut after_turn: impl FnMut(&StepLoop<E>),
) -> HashMap<SequenceId, Outcome> {
    let mut outcomes: HashMap<_, Outcome> = HashMap::new();
    let mut actions = Vec::new();
    let until = Instant::now() + Duration::from_secs(60);
    arriving.reverse();
    loop {
        for new in arriving.split_off(arriving.len().saturating_sub(at_a_time)).into_iter().rev() {
            outcomes.insert(new.id, Outcome::default());
            engine.handle(Input::Arrived(new), &mut actions);
        }
        let turn = engine.turn(Duration::from_secs(20), &mut actions).unwrap();
        after_turn(engine);
        let mut aborted = Vec::new();
        for action in actions.drain(..) {
            match action {
                Action::Tokens { id, tokens, prompt_logprobs, .. } => {
                    let outcome = outcomes.get_mut(&id).unwrap();
                    outcome.prompt_logprobs.extend(prompt_logprobs.into_iter().flatten());
                    outcome.tokens.extend(tokens);
                    if aborts.get(&id).is_some_and(|after| outcome.tokens.len() >= *after) {
                        aborted.push(id);
                    }
                }
                Action::Finished { id, reason } => outcomes.get_mut(&id).unwrap().finish = reason,
                Action::Failed { id, .. } => outcomes.get_mut(&id).unwrap().is_failed = true,
                _ => {}
            }
        }
        for id in aborted {
            engine.handle(Input::Abort { id }, &mut actions);
        }
        if turn == LoopOutcome::Idle && arriving.is_empty() {
            let load = engine.scheduler().load();
            assert_eq!((load.blocks_held, load.blocks_reserved), (0, 0));
            return outcomes;
        }
        assert!(Instant::now() < until, "time-out: {:?}", engine.scheduler());
    }
}

/// Grammar that allows about a third of the tokens, by a hash of the previous tokens. Some bitmasks
/// take as long as several forward passes, so that they are late.
#[derive(Clone, Debug)]
struct HashGrammar {
    state: u32,
}

impl HashGrammar {
    /// Returns the first of two tokens that alone are allowed, if only two are.
    fn forced_token(&self) -> Option<u32> {
        self.state.is_multiple_of(2).then_some(self.state % 1002)
    }

    fn allows(&self, token: u32) -> bool {
        if let Some(first) = self.forced_token() {
            return token == first || token == first + 1;
        }
        (self.state ^ token).wrapping_mul(0x9e37_79b9).rotate_left(7).is_multiple_of(3)
    }
}

impl Matcher for HashGrammar {
    fn accept(&mut self, token: u32) -> Result<(), ConstraintFailure> {
        assert!(self.allows(token), "token {token} was not allowed");
        self.state = (self.state ^ token).wrapping_mul(0x85eb_ca6b).rotate_left(13);
        Ok(())
    }

    fn allowed(&mut self) -> Result<TokenMask, ConstraintFailure> {
        if self.state.is_multiple_of(8) {
            std::thread::sleep(Duration::from_millis(2));
        }
        let mut words = vec![0; 1024_usize.div_ceil(32)];
        for token in (0..1003).filter(|&token| self.allows(token)) {
            words[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(TokenMask::new(words, 1003))
    }

    fn is_complete(&self) -> bool {
        false
    }

    /// Returns tokens of which about half are sampled.
    fn forced(&self) -> Vec<u32> {
        let (mut ahead, mut tokens) = (self.clone(), Vec::new());
        while let Some(token) = ahead.forced_token()
            && tokens.len() < 9
        {
            tokens.push(token);
            ahead.accept(token).expect("the grammar allows the token");
        }
        tokens
    }

    fn boxed_clone(&self) -> Box<dyn Matcher> {
        Box::new(self.clone())
    }
}

/// Returns prompts with shared prefixes and all sampling settings.
pub(crate) fn mix(round: u128, count: u128) -> Vec<NewSequence> {
    (0..count)
        .map(|index| {
            let id = round * 1000 + index;
            let length = 1 + (id * 37 % 110) as u32;
            let family = (id % 3) as u32;
            let tokens = (0..length).map(|i| (i * 31 + family * 101 + i / 7) % 1003).collect();
            let greedy = Sampling { stop_token_ids: vec![5, 17, 40], ..Sampling::greedy() };
            let sampling = match id % 4 {
                0 | 1 => greedy,
                2 => {
                    Sampling { temperature: 0.8, top_k: 50, top_p: 0.9, seed: id as u64, ..greedy }
                }
                _ => Sampling { repetition_penalty: 1.2, min_tokens: 3, ..greedy },
            };
            sequence(id, tokens, 1 + (id * 13 % 60) as u32, sampling)
        })
        .collect()
}

/// Returns the mix with a grammar for every third sequence.
pub(crate) fn constrained_mix(round: u128, count: u128) -> Vec<NewSequence> {
    let mut mix = mix(round, count);
    for new in mix.iter_mut().step_by(3) {
        let grammar = HashGrammar { state: new.id.0 as u32 };
        new.constraint = Some(Constraint::new(Box::new(grammar)).unwrap());
    }
    mix
}

/// Returns the mix with biases, bad words, listed tokens and log-probabilities of prompts.
fn ruled_mix(round: u128, count: u128) -> Vec<NewSequence> {
    let mut mix = constrained_mix(round, count);
    for new in &mut mix {
        let sampling = &mut new.sampling;
        let id = new.id.0 as u32;
        sampling.prompt_logprobs = id.is_multiple_of(2).then_some(id % 5);
        sampling.logprobs = id.is_multiple_of(7).then_some(2);
        // A grammar may allow only two tokens, and other rules must not exclude both.
        match new.constraint {
            Some(_) => sampling.logit_bias = (0..40).map(|i| (i * 25, 0.2 * i as f32)).collect(),
            None if id.is_multiple_of(4) => {
                sampling.allowed_token_ids = (0..1003).filter(|token| token % 3 != 1).collect();
            }
            None => {
                let pairs = (0..900).map(|token| vec![token, token * 7 % 1003]);
                sampling.bad_words = pairs.chain((0..90).map(|token| vec![token * 11])).collect();
            }
        }
    }
    mix
}

/// Rows with rules and rows whose prompt tokens are scored share steps with other rows, chunks of
/// prompts and draft tokens.
pub(crate) fn rules_and_prompt_logprobs_match_cpu_with_steps_in_flight() {
    let gpu = gpu();
    let checkpoint = checkpoint("Qwen3ForCausalLM", "qwen3");
    let mut reference = on_cpu(&checkpoint, config(&checkpoint, 8, 200, 1));
    let speculation =
        Speculation { row_drafts: 4, step_tokens: 32, ngram_min: 1, ngram_max: 3, uniform: true };
    let mut engines: Vec<_> = [(1, 200, None), (2, 40, None), (2, 200, Some(speculation))]
        .map(|(depth, blocks, speculation)| {
            let mut config = config(&checkpoint, 8, blocks, depth);
            config.limits.speculation = speculation;
            let options = CudaOptions {
                attention: AttentionKind::Plain,
                ..CudaOptions::new(WeightFormat::F32)
            };
            let (engine, arena) = on_gpu(&gpu, &checkpoint, options, config, |_| ());
            (engine.with_mask_threads(2).unwrap(), arena, format!("depth {depth}, {blocks} blocks"))
        })
        .into();
    for round in 0..if short() { 1 } else { 6 } {
        let wanted = run(&mut reference, ruled_mix(round, 14), &HashMap::new());
        let scored: usize = wanted.values().map(|outcome| outcome.prompt_logprobs.len()).sum();
        assert!(scored > 100, "{scored} prompt tokens are scored");
        for (engine, _, name) in &mut engines {
            let found = run(engine, ruled_mix(round, 14), &HashMap::new());
            for (id, found) in &found {
                let (what, wanted) =
                    (format!("round {round}, sequence {}, {name}", id.0), &wanted[id]);
                assert_eq!(found.ids(), wanted.ids(), "{what}");
                assert_eq!(found.finish, wanted.finish, "{what}");
                let (found, wanted) = (&found.prompt_logprobs, &wanted.prompt_logprobs);
                assert_eq!(found.len(), wanted.len(), "{what}");
                for (found, wanted) in found.iter().zip(wanted) {
                    assert!(
                        (found.chosen - wanted.chosen).abs() < 1e-3,
                        "{what}: {found:?} {wanted:?}"
                    );
                    assert_eq!(found.top.len(), wanted.top.len(), "{what}");
                    let difference = found.rank.unwrap().abs_diff(wanted.rank.unwrap());
                    assert!(difference <= 1, "{what}: {found:?} {wanted:?}");
                }
            }
        }
    }
}

/// Blocks without an owner, among them those behind windows, are filled with NaN after every turn
/// of the engine. No token changes.
pub(crate) fn released_blocks_are_poisoned_and_never_read() {
    let gpu = gpu();
    let speculation =
        Speculation { row_drafts: 4, step_tokens: 32, ngram_min: 1, ngram_max: 3, uniform: true };
    for (architecture, name) in [("Qwen2ForCausalLM", "qwen2"), ("GptOssForCausalLM", "gpt_oss")] {
        let checkpoint = checkpoint_with(architecture, name, 64);
        let groups = checkpoint.config().kv_groups(KvFormat::Bf16);
        assert_eq!(groups.count(), 3);
        for speculation in [None, Some(speculation)] {
            let mut config = config(&checkpoint, 8, 200 * groups.count() as u32, 2);
            config.limits.speculation = speculation;
            config.measures_drafts = false;
            // The cache would keep blocks behind windows.
            config.prefix_cache = false;
            let options = CudaOptions::new(WeightFormat::Bf16);
            let start = || on_gpu(&gpu, &checkpoint, options, config, |_| ());
            let ((mut engine, _), (mut poisoned, arena)) = (start(), start());
            let nan = vec![0xff; arena.block_bytes()];
            for round in 0..if short() { 1 } else { 4 } {
                let wanted = run(&mut engine, mix(round, 14), &HashMap::new());
                // Two at a time, so that steps mix decoding rows and prompts.
                let found = run_with(&mut poisoned, mix(round, 14), 2, &HashMap::new(), |engine| {
                    for block in engine.scheduler().free_blocks() {
                        let mut block = arena.write(block).expect("no step uses a free block");
                        block.copy_from_host(&nan).unwrap();
                    }
                });
                assert_eq!(found, wanted, "{architecture}, {speculation:?}, round {round}");
                assert!(found.values().all(|outcome| !outcome.is_failed));
            }
        }
    }
}

/// Pooled values of prompts of any length, among sequences that generate, are those of the CPU.
pub(crate) fn pooled_values_match_cpu_among_other_rows() {
    let gpu = gpu();
    for (architecture, name) in [("Qwen3ForCausalLM", "qwen3"), ("LlamaForCausalLM", "llama")] {
        let checkpoint = checkpoint(architecture, name);
        let pooled_mix = |round| {
            let mut mix = mix(round, 14);
            for new in mix.iter_mut().filter(|new| new.id.0 % 3 > 0) {
                let id = new.id.0 as u32;
                new.max_tokens = 1;
                new.sampling.pooling = Some(match id % 3 {
                    1 => Pooling::Hidden,
                    _ => Pooling::Logits(
                        (0..1 + id % 16).map(|i| (id * 7 + i * 63) % 1003).collect(),
                    ),
                });
            }
            mix
        };
        let mut reference = on_cpu(&checkpoint, config(&checkpoint, 8, 200, 1));
        for (weights, tolerance) in [(WeightFormat::F32, 1e-3), (WeightFormat::Bf16, 0.1)] {
            let config = config(&checkpoint, 8, 200, 2);
            let options = CudaOptions::new(weights);
            let (mut engine, _) = on_gpu(&gpu, &checkpoint, options, config, |_| ());
            for round in 0..if short() { 1 } else { 4 } {
                let wanted = run(&mut reference, pooled_mix(round), &HashMap::new());
                let found = run(&mut engine, pooled_mix(round), &HashMap::new());
                for (id, found) in &found {
                    let what = format!("{name}, {weights}, round {round}, sequence {}", id.0);
                    let pooled = |outcome: &Outcome| outcome.tokens[0].pooled.clone();
                    let (found, wanted) = (pooled(found), pooled(&wanted[id]));
                    assert_eq!(found.is_some(), id.0 % 3 > 0, "{what}");
                    let (found, wanted) = (found.unwrap_or_default(), wanted.unwrap_or_default());
                    assert_eq!(found.len(), wanted.len(), "{what}");
                    for (found, wanted) in found.iter().zip(&wanted) {
                        let scale = wanted.abs().max(1.0);
                        assert!(
                            (found - wanted).abs() < tolerance * scale,
                            "{what}: {found} {wanted}"
                        );
                    }
                }
            }
        }
    }
}

/// The GPU does not work while a step waits for its token bitmasks.
pub(crate) fn wait_for_token_bitmasks_is_no_busy_time() {
    let gpu = gpu();
    let checkpoint = checkpoint("Qwen3ForCausalLM", "qwen3");
    let config = config(&checkpoint, 2, 20, 2);
    let (mut engine, _) =
        on_gpu(&gpu, &checkpoint, CudaOptions::new(WeightFormat::Bf16), config, |_| ());
    let executor = engine.executor_mut();
    let wait = Duration::from_millis(50);
    let row = AdmittedRow {
        slot: Slot(0),
        generation: 0,
        tokens: vec![1, 2, 3],
        prompt_len: 3,
        computed: 0,
        blocks: vec![BlockId(0)],
        sampling: Sampling::greedy(),
        constrained: true,
        adapter: None,
    };
    let planned =
        RowPlan { slot: Slot(0), generation: 0, token_count: 3, samples: true, drafts_max: 0 };
    let plan = StepPlan {
        admitted: vec![row],
        rows: vec![planned],
        awaits_masks: true,
        ..StepPlan::default()
    };
    executor.launch(plan).unwrap();
    while !executor.masks_are_due() {
        executor.collect(Duration::from_secs(20)).unwrap();
    }
    std::thread::sleep(wait);
    let vocabulary = executor.limits().vocabulary;
    let words = vec![u32::MAX; vocabulary.div_ceil(32) as usize];
    let allowed = Arc::new(TokenMask::new(words, vocabulary));
    executor.supply(0, vec![RowMask { slot: Slot(0), length: 3, allowed }]).unwrap();
    let result = executor.collect(Duration::from_secs(20)).unwrap().expect("the step ends");
    let device = result.run.device.expect("the GPU reports its time");
    assert!(device.duration() >= wait && result.busy + wait <= device.duration(), "{result:?}");
}

pub(crate) fn request_mixes_match_cpu_tokens_with_one_and_two_steps_in_flight() {
    let gpu = gpu();
    let checkpoint = checkpoint("Qwen3ForCausalLM", "qwen3");
    let mut reference = on_cpu(&checkpoint, config(&checkpoint, 8, 200, 1));
    let mut engines: Vec<_> = [(1, 200), (2, 200), (2, 40)]
        .map(|(depth, blocks)| {
            let config = config(&checkpoint, 8, blocks, depth);
            let options = CudaOptions {
                attention: AttentionKind::Plain,
                ..CudaOptions::new(WeightFormat::F32)
            };
            // A node measures step times before it serves, which must leave no trace.
            let measure = |executor: &mut CudaExecutor| {
                let times = StepTimes::measure(executor).unwrap();
                assert!(times.decode > Duration::ZERO && times.at_end > Duration::ZERO);
            };
            let (engine, arena) = on_gpu(&gpu, &checkpoint, options, config, measure);
            let mask_threads = depth as usize;
            ((engine.with_mask_threads(mask_threads).unwrap(), arena), depth, blocks)
        })
        .into();
    for round in 0..if short() { 2 } else { 12 } {
        let wanted = run(&mut reference, constrained_mix(round, 14), &HashMap::new());
        let mut lengths: Vec<usize> = wanted.values().map(|outcome| outcome.tokens.len()).collect();
        lengths.sort_unstable();
        assert!(lengths[13] > 20, "answers are too short for this test: {lengths:?}");
        // Some sequences are aborted while a step that contains them is in flight.
        let aborts: HashMap<_, _> = wanted
            .iter()
            .filter(|(id, outcome)| id.0 % 5 == 1 && outcome.tokens.len() > 3)
            .map(|(id, outcome)| (*id, outcome.tokens.len() / 2))
            .collect();
        for ((engine, arena), depth, blocks) in &mut engines {
            let found = run(engine, constrained_mix(round, 14), &aborts);
            for (id, found) in &found {
                let (found_ids, wanted_ids) = (found.ids(), wanted[id].ids());
                let what =
                    format!("round {round}, sequence {}, depth {depth}, {blocks} blocks", id.0);
                assert!(!found.is_failed, "{what} failed");
                if aborts.contains_key(id) {
                    assert_eq!(found_ids[..], wanted_ids[..found_ids.len()], "{what}, aborted");
                } else {
                    assert_eq!(found_ids, wanted_ids, "{what}");
                    assert_eq!(found.finish, wanted[id].finish, "{what}");
                }
            }
            let pins = |id| arena.pins(kernels::BlockId(id)).unwrap();
            assert!((0..*blocks).all(|id| pins(id) == 0), "a block is still pinned");
        }
    }
}

pub(crate) fn step_synchronises_with_the_gpu_once() {
    let gpu = gpu();
    let checkpoint = checkpoint("LlamaForCausalLM", "llama");
    let config = config(&checkpoint, 8, 200, 2);
    let (mut engine, _) =
        on_gpu(&gpu, &checkpoint, CudaOptions::new(WeightFormat::Bf16), config, |_| ());
    run(&mut engine, mix(1, 8), &HashMap::new());
    engine.take_records();
    let before = engine.executor().waits();
    run(&mut engine, mix(2, 8), &HashMap::new());
    let steps = engine.take_records().len() as u64;
    let waits = engine.executor().waits() - before;
    assert!(steps > 20 && waits <= steps, "{waits} synchronisations in {steps} steps");
}

pub(crate) fn step_records_contain_gpu_start_and_end() {
    let gpu = gpu();
    let checkpoint = checkpoint("LlamaForCausalLM", "llama");
    for depth in [1, 2] {
        let config = config(&checkpoint, 8, 200, depth);
        let (mut engine, _) =
            on_gpu(&gpu, &checkpoint, CudaOptions::new(WeightFormat::Bf16), config, |_| ());
        run(&mut engine, mix(3, 8), &HashMap::new());
        let records = engine.take_records();
        assert!(records.len() > 20, "{} steps", records.len());
        let mut idle_from = None;
        for record in &records {
            let device = record.device.expect("a GPU step has timestamps");
            assert!(idle_from.is_none_or(|from| from <= device.begin + CLOCK), "{record:?}");
            assert!(record.launch.begin <= device.begin + CLOCK, "{record:?}");
            let results_at = record.results_at.expect("a GPU step has timestamps");
            assert!(device.end <= results_at && results_at <= record.collect.begin, "{record:?}");
            assert!(record.busy > Duration::ZERO && record.uploaded_bytes > 0, "{record:?}");
            idle_from = Some(device.end);
        }
    }
}
