//! Speculative decoding on the GPU: draft tokens and their acceptance match the CPU rules, and no
//! token depends on them.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    time::Duration,
};

use engine::{
    SpeculationStats,
    event::NewSequence,
    executor::{
        Executor, ExecutorLimits, Speculation,
        cuda::{CudaExecutor, CudaModel},
        ngram,
    },
    plan::{AdmittedRow, RowPlan, Slot, StepPlan},
};
use kernels::{
    Backend, BlockId, KvFormat, KvGroups, KvLayout, WeightFormat,
    cuda::{
        Admission, AttentionKind, BatchLimits, CudaBackend, CudaBuffer, CudaOptions, DeviceBatch,
        DeviceClock, Drafts, SampleOutcome, StepInput, StepRows, TuningSettings,
    },
    sampling::{SampledToken, Sampling},
};
use model::{Checkpoint, LoadFormat};

use super::{
    bench::{Bench, Gpu, gpu, lacks, short},
    executor::{
        config, constrained_mix, mix, on_cpu, on_gpu, run, run_arriving, sequence, step_loop,
    },
    mixes::Numbers,
    model::checkpoint,
};

const VOCABULARY: u32 = 50;
const SLOTS: u32 = 20;
const DRAFTS_MAX: u32 = 8;
const LENGTHS: [usize; 16] =
    [1, 2, 3, 5, 15, 16, 17, 100, 1023, 1024, 1025, 8191, 8192, 8193, 8500, 9000];

struct Device {
    cuda: CudaBackend,
    logits: CudaBuffer,
    batch: DeviceBatch,
    clock: DeviceClock,
}

/// One row of a step: its known tokens, the upper bound on its draft tokens, and how many of these
/// the logits accept.
struct Row {
    tokens: Vec<u32>,
    most: u32,
    right: usize,
}

impl Device {
    fn new(gpu: &Gpu) -> Self {
        let rows = SLOTS * (1 + DRAFTS_MAX);
        let make = |cuda: &CudaBackend| cuda.wide_buffer(rows as usize, VOCABULARY as usize);
        let (cuda, logits) = gpu.backend_with(CudaOptions::new(WeightFormat::F32), make);
        let layout =
            KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 8, format: KvFormat::F32 };
        let (kv, _) = gpu.kv(layout, 16);
        let limits = BatchLimits {
            hidden: 0,
            slots: SLOTS,
            sequence_tokens: 9100,
            rows,
            samples: rows,
            stops: 4,
            vocabulary: VOCABULARY,
            depth: 1,
        };
        let batch = DeviceBatch::new(&cuda, kv, KvGroups::whole(1), limits).unwrap();
        let clock = DeviceClock::start(cuda.context(), cuda.compute()).unwrap();
        Self { cuda, logits, batch, clock }
    }

    /// Runs a step with the logits that accept `right` draft tokens of each row, and checks the
    /// outcomes. Appends the accepted and the sampled token to the rows' tokens. The rows are
    /// admitted first if `admits`. Returns the time of the device.
    fn step(
        &mut self,
        rows: &mut [Row],
        tokens: u32,
        rules: &Speculation,
        admits: bool,
    ) -> Duration {
        let blocks: Vec<BlockId> = (0..569).map(|index| BlockId(index % 16)).collect();
        let sampling = Sampling::greedy();
        let admissions: Vec<_> = (0..)
            .zip(&*rows)
            .map(|(slot, row)| Admission {
                slot,
                tokens: &row.tokens,
                prompt_len: row.tokens.len() as u32,
                position: row.tokens.len() as u32 - 1,
                blocks: &blocks,
                sampling: &sampling,
                adapter: None,
            })
            .collect();
        let sequence = |(slot, row): (u32, &Row)| StepRows {
            slot,
            position: row.tokens.len() as u32 - 1,
            rows: 1 + row.most,
            samples: 1 + row.most,
        };
        let sequences: Vec<_> = (0..).zip(&*rows).map(sequence).collect();
        let drafts =
            Drafts { rows: tokens, ngram_min: rules.ngram_min, ngram_max: rules.ngram_max };
        let input = StepInput {
            step_id: 3,
            admissions: if admits { &admissions } else { &[] },
            extensions: &[],
            sequences: &sequences,
            rows_min: (rows.len() as u32).next_multiple_of(4),
            drafts: Some(drafts),
            known_drafts: &[],
            has_adapters: false,
        };
        let step = self.batch.begin(&self.cuda, &input).unwrap();
        assert_eq!(step.samples(), (input.rows_min * tokens) as usize);

        let mut logits = vec![0.0; step.samples() * VOCABULARY as usize];
        let mut wanted = Vec::new();
        for (index, row) in rows.iter().enumerate() {
            let drafts = ngram::draft(&row.tokens, row.most as usize, rules);
            let right = row.right.min(drafts.len());
            for sample in 0..tokens as usize {
                let token = match drafts.get(sample) {
                    Some(draft) => (draft + u32::from(sample >= right)) % VOCABULARY,
                    None => 7,
                };
                let place = (index * tokens as usize + sample) * VOCABULARY as usize;
                logits[place + token as usize] = 1.0;
                wanted.push(match sample {
                    _ if sample <= right => SampleOutcome::Token(SampledToken {
                        id: token,
                        logprobs: None,
                        pooled: None,
                    }),
                    _ if sample <= drafts.len() => SampleOutcome::Rejected,
                    _ => SampleOutcome::NotDrafted,
                });
            }
        }
        self.cuda.put(&mut self.logits, &logits);
        self.batch.sample(&self.cuda, &self.logits, &step).unwrap();
        let frame = self.batch.end(&self.cuda, 3, vec![false; wanted.len()]).unwrap();
        let finished = frame.finish(&mut self.clock).unwrap();
        let busy = finished.busy();
        self.batch.recycle(finished.output);
        let outcomes = finished.outcomes.chunks(tokens as usize);
        for ((row, found), wanted) in
            rows.iter_mut().zip(outcomes).zip(wanted.chunks(tokens as usize))
        {
            let (length, most) = (row.tokens.len(), row.most);
            let end = &row.tokens[length.saturating_sub(8)..];
            assert_eq!(
                found, wanted,
                "{length} tokens that end with {end:?}, {most} drafts, {rules:?}"
            );
            row.tokens.extend(wanted.iter().filter_map(|outcome| match outcome {
                SampleOutcome::Token(token) => Some(token.id),
                _ => None,
            }));
        }
        busy
    }
}

/// Every length, period and position of the first rejected draft token; a second step drafts from
/// the tokens that the first one accepted.
pub(crate) fn draft_tokens_and_their_acceptance_match_the_cpu() {
    let gpu = gpu();
    let mut device = Device::new(&gpu);
    let mut numbers = Numbers(1);
    for round in 0..if short() { 4 } else { 60 } {
        let tokens = [2, 3, 5, 1 + DRAFTS_MAX][round % 4];
        let ngram_min = 1 + numbers.below(3) as u32;
        let ngram_max = ngram_min + numbers.below(5) as u32;
        let rules = Speculation {
            row_drafts: DRAFTS_MAX,
            step_tokens: 64,
            ngram_min,
            ngram_max,
            uniform: true,
        };
        let alphabet = [2, 5, 40][numbers.below(3)];
        let count = [1, 3, SLOTS as usize][round % 3];
        let mut rows: Vec<_> = (0..count)
            .map(|index| {
                let length = LENGTHS[(round + index) % LENGTHS.len()];
                let period = if numbers.below(2) == 0 { 1 + numbers.below(20) } else { length };
                let mut all: Vec<u32> =
                    (0..period.min(length)).map(|_| numbers.below(alphabet) as u32).collect();
                (period..length).for_each(|at| all.push(all[at - period]));
                let most = numbers.below(tokens as usize) as u32;
                Row { tokens: all, most, right: numbers.below(1 + tokens as usize) }
            })
            .collect();
        device.step(&mut rows, tokens, &rules, true);
        for right in [DRAFTS_MAX as usize, numbers.below(4)] {
            rows.iter_mut().for_each(|row| row.right = right);
            device.step(&mut rows, tokens, &rules, false);
        }
    }
}

pub(crate) fn request_mixes_with_draft_tokens_match_cpu_tokens() {
    let gpu = gpu();
    let checkpoint = checkpoint("Qwen3ForCausalLM", "qwen3");
    let mut reference = on_cpu(&checkpoint, config(&checkpoint, 8, 200, 1));
    let rules =
        Speculation { row_drafts: 8, step_tokens: 64, ngram_min: 1, ngram_max: 4, uniform: true };
    let cases = [
        (1, 200, true, 8),
        (2, 200, true, 8),
        (2, 40, true, 8),
        (2, 200, false, 8),
        // More draft tokens than a block has.
        (2, 200, true, 32),
    ];
    let mut engines: Vec<_> = cases
        .map(|(depth, blocks, graphs, row_drafts)| {
            let mut config = config(&checkpoint, 8, blocks, depth);
            config.limits.speculation = Some(Speculation { row_drafts, ..rules });
            config.measures_drafts = false;
            let options = CudaOptions {
                attention: AttentionKind::Plain,
                graphs,
                ..CudaOptions::new(WeightFormat::F32)
            };
            let engine = on_gpu(&gpu, &checkpoint, options, config, |_| ()).0;
            let engine = engine.with_mask_threads(depth as usize).unwrap();
            let name = format!(
                "depth {depth}, {blocks} blocks, graphs {graphs}, {row_drafts} draft tokens"
            );
            (engine, name)
        })
        .into();
    for round in 0..if short() { 2 } else { 12 } {
        let requests = || match round % 2 {
            0 => mix(round, 14),
            _ => constrained_mix(round, 14),
        };
        let wanted = run(&mut reference, requests(), &HashMap::new());
        // Some sequences are aborted while a step that contains them is in flight.
        let aborts: HashMap<_, _> = wanted
            .iter()
            .filter(|(id, outcome)| id.0 % 5 == 1 && outcome.tokens.len() > 3)
            .map(|(id, outcome)| (*id, outcome.tokens.len() / 2))
            .collect();
        for (engine, name) in &mut engines {
            let found = run(engine, requests(), &aborts);
            for (id, found) in &found {
                let (found_ids, wanted_ids) = (found.ids(), wanted[id].ids());
                let what = format!("round {round}, sequence {}, {name}", id.0);
                assert!(!found.is_failed, "{what} failed");
                if aborts.contains_key(id) {
                    let common = found_ids.len().min(wanted_ids.len());
                    assert_eq!(found_ids[..common], wanted_ids[..common], "{what}, aborted");
                } else {
                    assert_eq!(found_ids, wanted_ids, "{what}");
                    assert_eq!(found.finish, wanted[id].finish, "{what}");
                }
            }
        }
    }
    for (engine, name) in &mut engines {
        let SpeculationStats { drafted, accepted, .. } = engine.take_speculated();
        eprintln!("{name}: {accepted} of {drafted} draft tokens accepted");
        assert!(accepted > 20 && accepted < drafted, "{name}: {accepted} of {drafted}");
    }
}

const CONTEXT: u32 = 1024;
const BATCHES: [u32; 4] = [1, 8, 32, 128];
/// Number of measured steps, after the same number of warm-up steps.
const STEPS: u32 = 20;

/// Returns limits for the largest batch, with as many drafts per row as fit into a step.
fn timed_limits(checkpoint: &Checkpoint, drafts: bool) -> ExecutorLimits {
    let sequence_tokens = CONTEXT + 512;
    let rules =
        Speculation { row_drafts: 8, step_tokens: 288, ngram_min: 3, ngram_max: 8, uniform: true };
    ExecutorLimits {
        slots: BATCHES[3],
        step_tokens: 2048,
        sequence_tokens,
        blocks: BATCHES[3] * sequence_tokens.div_ceil(16),
        depth: 2,
        vocabulary: checkpoint.config().vocab_size as u32,
        speculation: drafts.then_some(rules),
    }
}

fn timed_executor(gpu: &Gpu, checkpoint: &Checkpoint, drafts: bool) -> CudaExecutor {
    let limits = timed_limits(checkpoint, drafts);
    let options = CudaOptions::new(WeightFormat::Bf16);
    let backend = CudaBackend::new(&gpu.context, gpu.library.clone(), options).unwrap();
    let mut model = CudaModel::load(checkpoint, backend, &limits, &mut |_| ()).unwrap();
    let tuning = TuningSettings { folder: None, within: Duration::from_secs(20) };
    model.tune(&limits, &tuning).unwrap();
    let layout = checkpoint.config().block_layout(options.kv);
    let (kv, arena) = gpu.kv(layout, limits.blocks);
    CudaExecutor::start(model, kv, &arena, limits).unwrap()
}

/// Runs decode steps with `drafts` draft tokens in each of `batch` rows, two in flight, and returns
/// the median time. The first `occupied` slots are released before.
fn step_time(
    executor: &mut CudaExecutor,
    (batch, drafts): (u32, u32),
    step_id: &mut u64,
    occupied: &mut u32,
) -> Duration {
    let limits = executor.limits();
    let table = limits.sequence_tokens / 16;
    let admitted = |slot: u32| AdmittedRow {
        slot: Slot(slot),
        generation: *step_id as u32,
        tokens: (0..CONTEXT).map(|at| at.wrapping_mul(2_654_435_761) % limits.vocabulary).collect(),
        prompt_len: CONTEXT,
        computed: CONTEXT - 1,
        blocks: (slot * table..(slot + 1) * table).map(BlockId).collect(),
        sampling: Sampling::greedy(),
        constrained: false,
        adapter: None,
    };
    let mut admitted: Vec<_> = (0..batch).map(admitted).collect();
    let rows: Vec<_> = admitted
        .iter()
        .map(|row| RowPlan {
            slot: row.slot,
            generation: row.generation,
            token_count: 1,
            samples: true,
            drafts_max: drafts,
        })
        .collect();
    let mut times = Vec::new();
    let mut released: Vec<_> = (0..*occupied).map(Slot).collect();
    *occupied = batch;
    for step in 0..2 * STEPS + 2 {
        if step >= 2 {
            let result = executor.collect(Duration::from_secs(20)).unwrap().unwrap();
            if step > STEPS {
                times.push(result.busy);
            }
        }
        if step < 2 * STEPS {
            let plan = StepPlan {
                step_id: *step_id,
                released: std::mem::take(&mut released),
                admitted: std::mem::take(&mut admitted),
                rows: rows.clone(),
                drafts_max: batch * drafts,
                ..StepPlan::default()
            };
            *step_id += 1;
            executor.launch(plan).unwrap();
        }
    }
    times.sort_unstable();
    times[times.len() / 2]
}

/// Reports the time of steps with draft tokens, and the throughput of text that does not repeat.
/// The model's weights are random; `BATON_TEST_CONFIG` names the file of its sizes.
pub(crate) fn cost_of_draft_tokens_is_reported() {
    let gpu = gpu();
    let Some(path) = std::env::var_os("BATON_TEST_CONFIG").map(PathBuf::from) else {
        lacks(1, "BATON_TEST_CONFIG names no model configuration")
    };
    let checkpoint = Checkpoint::open(Path::new(&path), LoadFormat::Dummy { seed: 1 }).unwrap();
    report_step_times(&mut timed_executor(&gpu, &checkpoint, true));
    let mut device = Device::new(&gpu);
    for length in [16, 8192] {
        let rules = Speculation {
            row_drafts: 8,
            step_tokens: 9,
            ngram_min: 3,
            ngram_max: 8,
            uniform: true,
        };
        let token = |at: usize| ((at * at) as u32 / 3) % VOCABULARY;
        let times = (0..20).map(|_| {
            let mut rows = [Row { tokens: (0..length).map(token).collect(), most: 8, right: 0 }];
            device.step(&mut rows, 9, &rules, true);
            device.step(&mut rows, 9, &rules, false)
        });
        eprintln!("draft, sample and accept, {length} tokens: {:?}", times.min());
    }
    drop(device);
    let mut throughput = Vec::new();
    for drafts in [true, false] {
        let executor = timed_executor(&gpu, &checkpoint, drafts);
        let config = engine::SchedulerConfig {
            waiting_max: 1000,
            ..engine::SchedulerConfig::new(timed_limits(&checkpoint, drafts))
        };
        let mut engine = step_loop(config, executor);
        for batch in BATCHES {
            let vocabulary = checkpoint.config().vocab_size as u32;
            let request = |index: u32| {
                let token = |at: u32| (at * 7919 + index * 104_729 + at / 7) % vocabulary;
                let sampling =
                    Sampling { temperature: 1.0, seed: index.into(), ..Sampling::greedy() };
                let tokens = (0..CONTEXT).map(token).collect();
                let new = sequence(u128::from(batch * 1000 + index), tokens, 256, sampling);
                NewSequence { ignore_stop_tokens: true, ..new }
            };
            let requests = (0..batch).map(request).collect();
            engine.take_records();
            run_arriving(&mut engine, requests, batch as usize, &HashMap::new());
            let records = engine.take_records();
            let decoding = records
                .iter()
                .filter(|record| record.rows == batch && record.kind == engine::StepKind::Decode);
            let decoding: Vec<_> = decoding.collect();
            let (first, last) = (decoding[0], decoding[decoding.len() - 1]);
            let span = last.device.unwrap().end - first.device.unwrap().begin;
            let idle = 1.0
                - decoding.iter().map(|record| record.busy).sum::<Duration>().as_secs_f64()
                    / span.as_secs_f64();
            let step = span / decoding.len() as u32;
            let SpeculationStats { rows, drafted, accepted, .. } = engine.take_speculated();
            eprintln!(
                "batch {batch}, drafts {drafts}: {} steps of {step:?}, idle {idle:.4}; \
                 {accepted} of {drafted} accepted in {rows} rows",
                decoding.len()
            );
            throughput.push(step.as_secs_f64());
        }
    }
    for (index, batch) in BATCHES.into_iter().enumerate() {
        let ratio = throughput[BATCHES.len() + index] / throughput[index];
        eprintln!("batch {batch}: throughput with speculation / without: {ratio:.4}");
    }
}

/// Reports the time of steps by batch and draft tokens per row.
fn report_step_times(executor: &mut CudaExecutor) {
    let (mut step_id, mut occupied) = (0, 0);
    for batch in BATCHES {
        let mut plain = None;
        for drafts in [0, 1, 2, 4, 8].into_iter().filter(|drafts| batch * (1 + drafts) <= 288) {
            let time = step_time(executor, (batch, drafts), &mut step_id, &mut occupied);
            let ratio = time.as_secs_f64() / plain.get_or_insert(time).as_secs_f64();
            eprintln!("batch {batch}, {drafts} draft tokens a row: {time:?}, {ratio:.3}");
        }
    }
}
