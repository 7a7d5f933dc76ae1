//! Sampling on the GPU matches the CPU, including ties and random draws.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kernels::{
    Backend, BlockId, KvFormat, KvGroups, KvLayout, WeightFormat,
    cpu::{SampleError, SampleRow, sample},
    cuda::{
        Admission, BatchLimits, Context, CudaBackend, CudaBuffer, CudaError, CudaGroup,
        CudaOptions, CudaStep, DeviceBatch, DeviceClock, DeviceKv, Graph, KernelLibrary,
        SampleOutcome, StepInput, StepRows,
    },
    sampling::{SampledToken, Sampling, TokenLogprobs, TokenMask},
    shard::cuts_between_runs,
};

use super::{
    bench::{Bench, gpu, numbers, short},
    collective::{TIMEOUT, group},
    ranks::{Rank, on_ranks},
};

struct Row {
    sampling: Sampling,
    tokens: Vec<u32>,
    prompt_len: usize,
    /// Position of the row whose logits are sampled.
    position: usize,
    mask: Option<TokenMask>,
}

impl Row {
    /// Returns the prompt token that follows the row.
    fn scored(&self) -> Option<u32> {
        (self.position + 1 < self.prompt_len).then(|| self.tokens[self.position + 1])
    }
}

struct Sampler {
    cuda: CudaBackend,
    logits: CudaBuffer,
    batch: DeviceBatch,
}

const SLOTS: u32 = 46;
/// More rows than the sampling kernel has CTAs that exchange data with other ranks.
const MANY_ROWS: u32 = 4 * SLOTS;

/// Returns a sampler over the whole vocabulary, or over a rank's vocabulary shard if there is a
/// `group`.
fn sampler(
    (context, library): (&Arc<Context>, &Arc<KernelLibrary>),
    group: Option<CudaGroup>,
    vocabulary: u32,
    rows: u32,
) -> Sampler {
    let options = CudaOptions::new(WeightFormat::F32);
    let mut cuda = CudaBackend::new(context, library.clone(), options).unwrap();
    if let Some(group) = group {
        cuda = cuda.in_group(group);
    }
    let tokens = cuda.shard().tokens(vocabulary as usize);
    let make = |cuda: &CudaBackend| cuda.wide_buffer(rows as usize, tokens.len());
    drop(make(&cuda));
    cuda.place().unwrap();
    let logits = make(&cuda);
    cuda.finish_loading().unwrap();
    let layout = KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 8, format: KvFormat::F32 };
    let limits = BatchLimits {
        hidden: 0,
        slots: rows,
        sequence_tokens: 256,
        rows,
        samples: rows,
        stops: 4,
        vocabulary,
        depth: 1,
    };
    let kv = DeviceKv::new(context, layout, 16).unwrap();
    let batch = DeviceBatch::new(&cuda, kv, KvGroups::whole(1), limits).unwrap();
    Sampler { cuda, logits, batch }
}

impl Sampler {
    /// Uploads the rank's vocabulary shard of the logits.
    fn put(&mut self, rows: usize, logits: &[f32]) {
        let vocabulary = logits.len() / rows;
        let own = self.cuda.shard().tokens(vocabulary);
        let mine: Vec<f32> =
            logits.chunks(vocabulary).flat_map(|row| row[own.clone()].to_vec()).collect();
        self.cuda.put(&mut self.logits, &mine);
    }

    fn begin(&mut self, rows: &[Row]) -> (CudaStep, DeviceClock) {
        let blocks: Vec<BlockId> = (0..16).map(BlockId).collect();
        let admissions: Vec<_> = (0..)
            .zip(rows)
            .map(|(slot, row)| Admission {
                slot,
                tokens: &row.tokens,
                prompt_len: row.prompt_len as u32,
                position: row.position as u32,
                blocks: &blocks,
                sampling: &row.sampling,
                adapter: None,
            })
            .collect();
        let sequence = |(slot, row): (u32, &Row)| {
            let position = row.position as u32;
            StepRows { slot, position, rows: 1, samples: 1 }
        };
        let sequences: Vec<_> = (0..).zip(rows).map(sequence).collect();
        let input = StepInput {
            step_id: 3,
            admissions: &admissions,
            extensions: &[],
            sequences: &sequences,
            rows_min: 0,
            drafts: None,
            known_drafts: &[],
            has_adapters: false,
        };
        let clock = DeviceClock::start(self.cuda.context(), self.cuda.compute()).unwrap();
        let step = self.batch.begin(&self.cuda, &input).unwrap();
        let masked = (0..).zip(rows).filter_map(|(sample, row)| Some((sample, row.mask.clone()?)));
        let masks: Vec<_> = masked.map(|(sample, mask)| (sample, Some(Arc::new(mask)))).collect();
        self.batch.supply(&self.cuda, &step, &masks).unwrap();
        (step, clock)
    }

    fn end(&mut self, rows: &[Row], mut clock: DeviceClock) -> Vec<SampleOutcome> {
        let wants = |row: &Row| row.sampling.logprobs.is_some() || row.scored().is_some();
        let wants = rows.iter().map(wants).collect();
        let frame = self.batch.end(&self.cuda, 3, wants).unwrap();
        let finished = frame.finish(&mut clock).unwrap();
        self.batch.recycle(finished.output);
        finished.outcomes
    }
}

/// Returns the outcomes that the GPU samples from these logits.
fn sample_on_gpu(sampler: &mut Sampler, rows: &[Row], logits: &[f32]) -> Vec<SampleOutcome> {
    sampler.put(rows.len(), logits);
    let (step, clock) = sampler.begin(rows);
    sampler.batch.sample(&sampler.cuda, &sampler.logits, &step).unwrap();
    sampler.end(rows, clock)
}

fn wanted(row: &Row, logits: &[f32]) -> Result<SampledToken, SampleError> {
    let row = SampleRow {
        sampling: &row.sampling,
        tokens: &row.tokens,
        prompt_len: row.prompt_len,
        allowed: row.mask.as_ref(),
        scored: row.scored(),
    };
    sample(logits, &row)
}

#[track_caller]
fn check(sampler: &mut Sampler, rows: &[Row], logits: &[f32]) {
    let vocabulary = logits.len() / rows.len();
    for (index, outcome) in sample_on_gpu(sampler, rows, logits).into_iter().enumerate() {
        let logits = &logits[index * vocabulary..][..vocabulary];
        let sampling = &rows[index].sampling;
        match (outcome, wanted(&rows[index], logits)) {
            (SampleOutcome::Token(found), Ok(wanted)) => {
                assert_eq!(found.id, wanted.id, "row {index}: {sampling:?}");
                let (Some(found), Some(wanted)) = (&found.logprobs, &wanted.logprobs) else {
                    assert_eq!(found.logprobs.is_some(), wanted.logprobs.is_some());
                    continue;
                };
                let near = |a: f32, b: f32| (a - b).abs() < 1e-4;
                assert!(near(found.chosen, wanted.chosen), "row {index}: {found:?} {wanted:?}");
                assert_eq!(found.rank, wanted.rank, "row {index}: {sampling:?}");
                assert_eq!(found.top.len(), wanted.top.len(), "row {index}");
                for (found, wanted) in found.top.iter().zip(&wanted.top) {
                    assert_eq!(found.0, wanted.0, "row {index}");
                    assert!(near(found.1, wanted.1), "row {index}: {found:?} {wanted:?}");
                }
            }
            (SampleOutcome::NoCandidate, Err(SampleError::NoCandidate { .. })) => {}
            (
                SampleOutcome::BadLogit { token, .. },
                Err(SampleError::BadLogit { token: wanted, .. }),
            ) => {
                assert_eq!(token, wanted);
            }
            (found, wanted) => panic!("row {index}: {found:?}, not {wanted:?}: {sampling:?}"),
        }
    }
}

/// Returns a row for every sampling setting, with distinct seeds and histories.
fn rows(vocabulary: u32, round: u64) -> Vec<Row> {
    let random = Sampling { temperature: 1.0, ..Sampling::greedy() };
    let biases = |count: u32| -> Vec<(u32, f32)> {
        let bias = |i: u32| (i * 97 % vocabulary, (i % 200) as f32 - 100.0);
        (0..count.min(vocabulary))
            .map(bias)
            .collect::<std::collections::BTreeMap<_, _>>()
            .into_iter()
            .collect()
    };
    let listed: Vec<u32> = (0..vocabulary).filter(|token| token % 11 < 4).take(16_384).collect();
    let settings = [
        Sampling::greedy(),
        random.clone(),
        Sampling { temperature: 0.3, ..random.clone() },
        Sampling { temperature: 1.7, top_k: 5, ..random.clone() },
        Sampling { top_k: 1, ..random.clone() },
        Sampling { top_k: 300, ..random.clone() },
        Sampling { top_p: 0.9, ..random.clone() },
        Sampling { top_p: 0.05, ..random.clone() },
        Sampling { min_p: 0.2, ..random.clone() },
        Sampling { top_k: 40, top_p: 0.8, min_p: 0.05, ..random.clone() },
        Sampling { repetition_penalty: 1.3, ..random.clone() },
        Sampling { presence_penalty: 1.5, frequency_penalty: 0.5, ..random.clone() },
        Sampling { frequency_penalty: -1.0, ..Sampling::greedy() },
        Sampling { logprobs: Some(0), ..random.clone() },
        Sampling { logprobs: Some(20), top_p: 0.7, ..random.clone() },
        Sampling { logprobs: Some(3), ..Sampling::greedy() },
        Sampling { min_tokens: 200, stop_token_ids: vec![1, 2, 3], ..random.clone() },
        Sampling { logit_bias: biases(1024), ..Sampling::greedy() },
        Sampling { allowed_token_ids: listed.clone(), top_p: 0.9, ..random.clone() },
        Sampling { bad_words: vec![vec![0]], ..Sampling::greedy() },
        Sampling {
            logit_bias: biases(5),
            allowed_token_ids: listed,
            bad_words: vec![vec![0]],
            repetition_penalty: 1.2,
            logprobs: Some(2),
            ..random.clone()
        },
        Sampling { prompt_logprobs: Some(0), ..random.clone() },
        Sampling { prompt_logprobs: Some(7), logit_bias: biases(5), min_tokens: 9, ..random },
    ];
    let mut rows = Vec::new();
    for (index, sampling) in settings.into_iter().enumerate() {
        for has_mask in [false, true] {
            let length = 1 + (index * 13 + round as usize * 29) % 200;
            let seed = round * 1000 + index as u64 * 2 + u64::from(has_mask);
            let tokens: Vec<u32> = (0..length as u32)
                .map(|i| (i * i * 31 + i / 3 + seed as u32) % vocabulary)
                .collect();
            let words = vocabulary.div_ceil(32);
            let mask = has_mask.then(|| {
                let words = (0..words).map(|i| (i ^ seed as u32).wrapping_mul(0x9e37_79b9));
                TokenMask::new(words.collect(), vocabulary)
            });
            let mut sampling = Sampling { seed: seed << 33 | seed, ..sampling.clone() };
            let is_scored = sampling.prompt_logprobs.is_some();
            let prompt_len = if is_scored { tokens.len() } else { tokens.len() / 2 };
            let position = if is_scored { tokens.len() / 2 } else { tokens.len() - 1 };
            if !sampling.bad_words.is_empty() {
                let end = |count: usize| tokens[tokens.len() - count..].to_vec();
                // Ends of the output and of the prompt, and words that are not at the end.
                let word = |i: u32| match i % 3 {
                    0 => vec![i % vocabulary],
                    1 => [end(1), vec![i % vocabulary]].concat(),
                    _ => [end(tokens.len().min(2)), vec![i * 7 % vocabulary]].concat(),
                };
                let whole = [end(tokens.len()), vec![9]].concat();
                sampling.bad_words = (0..2000).map(word).chain([whole, vec![9, 9, 9, 8]]).collect();
            }
            rows.push(Row { sampling, prompt_len, position, tokens, mask });
        }
    }
    rows
}

pub(crate) fn sampled_tokens_match_cpu() {
    let gpu = gpu();
    for vocabulary in [33, 1003, 49_152, 151_936] {
        let mut sampler = sampler((&gpu.context, &gpu.library), None, vocabulary, SLOTS);
        for round in 0..4 {
            let rows = rows(vocabulary, round);
            // The last round has few distinct logits: ties are broken by token id.
            let scale = if round == 3 { 1.0 } else { 9.0 };
            let logits = numbers(round as u32 + 50, rows.len() * vocabulary as usize);
            let logits: Vec<f32> = logits
                .iter()
                .map(|logit| if round == 3 { (logit * 2.0).round() } else { logit * scale })
                .collect();
            check(&mut sampler, &rows, &logits);
        }
    }
}

pub(crate) fn non_finite_logits_fail_only_their_row() {
    let gpu = gpu();
    let vocabulary = 1003;
    let mut sampler = sampler((&gpu.context, &gpu.library), None, vocabulary, SLOTS);
    let mut rows: Vec<Row> = rows(vocabulary, 1).into_iter().step_by(2).take(6).collect();
    let mut logits = numbers(1, rows.len() * vocabulary as usize);
    let at = |row: usize, token: usize| row * vocabulary as usize + token;
    logits[at(0, 1002)] = f32::NAN;
    logits[at(1, 700)] = f32::INFINITY;
    logits[at(1, 900)] = f32::NAN;
    logits[at(2, 5)] = f32::NEG_INFINITY;
    rows[3].mask = Some(TokenMask::new(vec![], vocabulary));
    check(&mut sampler, &rows, &logits);
}

/// Encodes the outcomes as words, for bitwise comparison.
fn words(outcomes: &[SampleOutcome]) -> Vec<u32> {
    let mut words = Vec::new();
    for outcome in outcomes {
        match outcome {
            SampleOutcome::Token(SampledToken { id, logprobs, .. }) => {
                words.extend([0, *id]);
                if let Some(TokenLogprobs { chosen, top, rank }) = logprobs {
                    words.extend([chosen.to_bits(), rank.unwrap_or(0)]);
                    words.extend(top.iter().flat_map(|(id, logprob)| [*id, logprob.to_bits()]));
                }
            }
            SampleOutcome::BadLogit { token, value } => words.extend([1, *token, value.to_bits()]),
            SampleOutcome::NoCandidate => words.push(2),
            SampleOutcome::Rejected | SampleOutcome::NotDrafted => {
                unreachable!("no draft tokens are verified")
            }
        }
    }
    words
}

/// Checks that ranks sample the same tokens as one GPU with the whole vocabulary, also in a CUDA
/// graph replay.
fn check_ranks_match_one_gpu(rank: Rank) {
    let mut turns = 0;
    for vocabulary in [33, 1003, 20_000, 49_152, 50_257, 128_256] {
        let parts = (&rank.context, &rank.library);
        let mut alone = sampler(parts, None, vocabulary, MANY_ROWS);
        let mut ours = sampler(parts, Some(group(&rank, TIMEOUT)), vocabulary, MANY_ROWS);
        let mut asked = 0;
        let mut compare = |rows: &[Row], logits: &[f32], what: &str| {
            let wanted = sample_on_gpu(&mut alone, rows, logits);
            let found = sample_on_gpu(&mut ours, rows, logits);
            for (index, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
                let (found, wanted) = (std::slice::from_ref(found), std::slice::from_ref(wanted));
                let sampling = &rows[index].sampling;
                assert!(
                    words(found) == words(wanted),
                    "{what}, {vocabulary} tokens, row {index}: {found:?}, not {wanted:?}: {sampling:?}"
                );
            }
            let mut bytes: Vec<u8> = words(&found).iter().flat_map(|w| w.to_le_bytes()).collect();
            // The replay overwrites the outcomes of the first launch.
            let (step, clock) = ours.begin(rows);
            let Sampler { cuda, logits, batch } = &mut ours;
            let compute = Arc::clone(cuda.compute());
            let capture = || batch.capture_sample(cuda, logits, &step);
            let mut graph = Graph::capture(&compute, capture).unwrap();
            graph.launch(&compute).unwrap();
            let replayed = ours.end(rows, clock);
            assert!(
                words(&replayed) == words(&wanted),
                "{what}, {vocabulary} tokens: the replay differs"
            );
            bytes.truncate(4096);
            let received = rank.exchange(&bytes);
            assert!(received.iter().all(|other| *other == bytes), "{what}: ranks differ");
            turns += 1;
            asked += 2 * rows.len() as u64;
        };
        for round in 0..if short() { 2 } else { 5 } {
            let rows = rows(vocabulary, round);
            let logits = numbers(round as u32 + 50, rows.len() * vocabulary as usize);
            let logits: Vec<f32> = match round {
                // Few distinct logits: ties across ranks are broken by token id.
                3 => logits.iter().map(|logit| (logit * 2.0).round()).collect(),
                // As in real models, few tokens are likely.
                4 => logits.iter().map(|x| (x * x * x * 14.0 * 8.0).round() / 8.0).collect(),
                _ => logits.iter().map(|logit| logit * 9.0).collect(),
            };
            compare(&rows, &logits, &format!("round {round}"));
            // One kind of sampling at a time: kernels of the other kinds are not launched.
            for kind in rows.chunks(2).filter(|_| round == 4) {
                let logits = &logits[..kind.len() * vocabulary as usize];
                compare(kind, logits, &format!("{:?}", kind[0].sampling));
                compare(&kind[..1], &logits[..vocabulary as usize], "alone");
            }
        }
        if vocabulary < 60_000 {
            let many: Vec<Row> = (6..10).flat_map(|round| rows(vocabulary, round)).collect();
            let logits = numbers(77, many.len() * vocabulary as usize);
            let logits: Vec<f32> =
                logits.iter().map(|x| (x * x * x * 112.0).round() / 8.0).collect();
            compare(&many, &logits, "many rows");
        }
        let mut odd: Vec<Row> = rows(vocabulary, 1).into_iter().step_by(2).collect();
        let mut logits = numbers(1, odd.len() * vocabulary as usize);
        let all = vocabulary as usize;
        for (row, logits) in logits.chunks_mut(all).enumerate() {
            match row % 6 {
                0 => logits[all - 1] = f32::from_bits(u32::MAX),
                1 => (logits[all * 2 / 3], logits[all - 2]) = (f32::INFINITY, f32::NAN),
                2 => logits[..all / 2].fill(f32::NEG_INFINITY),
                3 => logits.fill(f32::NEG_INFINITY),
                4 => odd[row].mask = Some(TokenMask::new(vec![], vocabulary)),
                // Equal logits on different ranks.
                _ => (logits[1], logits[all - 1]) = (3.0, 3.0),
            }
        }
        compare(&odd, &logits, "invalid rows");
        ours.cuda.check().unwrap();
        // Few rows need a gather. If shards split a run of tokens, all rows need a gather.
        let gathered = ours.batch.rows_gathered();
        println!("{vocabulary} tokens: {gathered} of {asked} rows were gathered");
        let runs_are_whole = cuts_between_runs(vocabulary as usize, rank.ranks);
        assert!(if runs_are_whole { gathered * 10 < asked } else { gathered == asked });
        // A rank must not free its arena while another rank may write to it.
        rank.barrier();
    }
    println!("{turns} calls match one GPU");
}

pub(crate) fn two_ranks_sample_the_tokens_of_one_gpu() {
    on_ranks("sampling::two_ranks_sample_the_tokens_of_one_gpu", 2, check_ranks_match_one_gpu);
}

pub(crate) fn four_ranks_sample_the_tokens_of_one_gpu() {
    on_ranks("sampling::four_ranks_sample_the_tokens_of_one_gpu", 4, check_ranks_match_one_gpu);
}

pub(crate) fn missing_rank_in_sampling_times_out() {
    on_ranks("sampling::missing_rank_in_sampling_times_out", 2, |rank| {
        let timeout = Duration::from_millis(200);
        let vocabulary = 20_000;
        let parts = (&rank.context, &rank.library);
        let mut ours = sampler(parts, Some(group(&rank, timeout)), vocabulary, SLOTS);
        let rows = rows(vocabulary, 1);
        let logits = numbers(5, rows.len() * vocabulary as usize);
        if rank.rank == 0 {
            let begin = Instant::now();
            sample_on_gpu(&mut ours, &rows, &logits);
            let took = begin.elapsed();
            assert!(took >= timeout && took < TIMEOUT, "{took:?}");
            let error = ours.cuda.check().unwrap_err();
            assert_eq!(error, CudaError::GroupStopped { rank: 0, timeout });
        }
        rank.barrier();
        ours.cuda.group().unwrap().reset().unwrap();
        let mut alone = sampler(parts, None, vocabulary, SLOTS);
        let wanted = sample_on_gpu(&mut alone, &rows, &logits);
        rank.barrier();
        assert!(
            words(&sample_on_gpu(&mut ours, &rows, &logits)) == words(&wanted),
            "after a reset"
        );
        ours.cuda.check().unwrap();
        rank.barrier();
    });
}

/// Returns the latency of one call in µs, measured in a CUDA graph of many calls.
fn time(sampler: &mut Sampler, rows: &[Row]) -> f64 {
    const CALLS: usize = 20;
    let (step, clock) = sampler.begin(rows);
    let Sampler { cuda, logits, batch } = sampler;
    let compute = Arc::clone(cuda.compute());
    let capture = || (0..CALLS).try_for_each(|_| batch.capture_sample(cuda, logits, &step));
    let mut graph = Graph::capture(&compute, capture).unwrap();
    graph.launch(&compute).unwrap();
    compute.synchronize().unwrap();
    let mut times: Vec<f64> = (0..15)
        .map(|_| {
            let begin = Instant::now();
            graph.launch(&compute).unwrap();
            compute.synchronize().unwrap();
            begin.elapsed().as_secs_f64() * 1e6 / CALLS as f64
        })
        .collect();
    sampler.end(rows, clock);
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Prints the sampling latency for the docs and asserts nothing about time.
pub(crate) fn sampling_latency_of_two_ranks_is_reported() {
    on_ranks("sampling::sampling_latency_of_two_ranks_is_reported", 2, |rank| {
        let vocabulary = 128_256;
        let parts = (&rank.context, &rank.library);
        let mut alone = sampler(parts, None, vocabulary, 128);
        let mut ours = sampler(parts, Some(group(&rank, TIMEOUT)), vocabulary, 128);
        let warm = Sampling { temperature: 0.8, ..Sampling::greedy() };
        let kinds = [
            ("greedy", Sampling::greedy()),
            ("biased", Sampling { logit_bias: vec![(1, 1.0); 100], ..Sampling::greedy() }),
            ("random", warm.clone()),
            ("min-p", Sampling { min_p: 0.05, ..warm.clone() }),
            ("top-k 50", Sampling { top_k: 50, ..warm.clone() }),
            ("top-p 0.95", Sampling { top_p: 0.95, ..warm }),
            ("log-probabilities", Sampling { logprobs: Some(5), ..Sampling::greedy() }),
        ];
        for count in [1, 32, 128] {
            let logits: Vec<f32> = numbers(9, count * vocabulary as usize)
                .iter()
                .map(|x| (x * x * x * 14.0 * 64.0).round() / 64.0)
                .collect();
            alone.put(count, &logits);
            ours.put(count, &logits);
            for (name, sampling) in &kinds {
                let row = |seed| Row {
                    sampling: Sampling { seed, ..sampling.clone() },
                    tokens: vec![1, 2, 3],
                    prompt_len: 3,
                    position: 2,
                    mask: None,
                };
                let rows: Vec<Row> = (0..count as u64).map(row).collect();
                rank.barrier();
                let one = time(&mut alone, &rows);
                rank.barrier();
                let two = time(&mut ours, &rows);
                if rank.rank == 0 {
                    println!("{name}, {count} rows: one GPU {one:.1} us, two ranks {two:.1} us");
                }
            }
        }
        ours.cuda.check().unwrap();
        println!("{} rows were gathered", ours.batch.rows_gathered());
        rank.barrier();
    });
}
