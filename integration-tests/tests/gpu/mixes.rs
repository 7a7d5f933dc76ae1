//! Random mixes of requests. Every sequence generates the same tokens whatever the launch mode, the
//! number of steps in flight, the number of blocks and the aborts.
//!
//! Configurations with the same order of operations must give equal tokens. Where the order of a
//! sum differs (other kernels, or KV recomputed after a preemption), a sequence may diverge only at
//! a close choice: the CPU sampler makes the same choice after a small change of the logits of both
//! tokens and of the sampling cut-offs.

use std::{collections::HashMap, time::Duration};

use engine::{
    StepLoop,
    event::{NewSequence, SequenceId},
    executor::{Speculation, cuda::CudaExecutor},
};
use kernels::{
    KvFormat, WeightFormat,
    cpu::{SampleRow, sample},
    cuda::{AttentionKind, CudaOptions, StreamDelays},
    sampling::{SampledToken, Sampling, TokenLogprobs},
};

use super::{
    bench::{gpu, short},
    executor::{Outcome, config, on_gpu, run_arriving, sequence},
    model::checkpoint_with,
};

/// Number of mixes, unless `BATON_TEST_MIXES` is set.
const MIXES: u64 = 200;
const SLOTS: u32 = 8;
const ROOMY: u32 = 400;
/// Few enough blocks that sequences preempt each other.
const TIGHT: u32 = 24;

/// Largest logit error that may change the sampled token. In bf16 the error of a logit of about 1
/// is 0.01 on average and 0.1 at most; in f32 no error was seen.
const BF16: f32 = 0.1;
/// Not measured: a value between two elements of FP8 becomes either of them.
const KV_IN_FP8: f32 = 0.3;
const F32: f32 = 1e-4;

/// Pseudo-random number generator.
pub(crate) struct Numbers(pub u64);

impl Numbers {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

struct Mix {
    sequences: Vec<NewSequence>,
    at_a_time: usize,
    aborts: HashMap<SequenceId, usize>,
}

impl Mix {
    fn new(seed: u64, logprobs: bool) -> Self {
        let mut numbers = Numbers(seed);
        let count = 4 + numbers.below(10);
        let mut aborts = HashMap::new();
        let sequences = (0..count as u128).map(|index| {
            let id = u128::from(seed) * 1000 + index;
            let (length, family) = (1 + numbers.below(120) as u32, numbers.below(4) as u32);
            let tokens = (0..length).map(|i| (i * 31 + family * 101 + i / 7) % 1003).collect();
            let logprobs = logprobs.then_some(32);
            let greedy =
                Sampling { stop_token_ids: vec![5, 17, 40], logprobs, ..Sampling::greedy() };
            let seed = seed ^ index as u64;
            let sampling = match numbers.below(4) {
                0 => greedy,
                1 => Sampling {
                    presence_penalty: 0.5,
                    frequency_penalty: 0.2,
                    min_tokens: 3,
                    ..greedy
                },
                2 => Sampling { temperature: 0.8, top_k: 20, min_p: 0.05, seed, ..greedy },
                _ => Sampling { temperature: 1.0, top_k: 8, top_p: 0.9, seed, ..greedy },
            };
            let max_tokens = 1 + numbers.below(60);
            if numbers.below(5) == 0 {
                aborts.insert(SequenceId(id), 1 + numbers.below(max_tokens));
            }
            sequence(id, tokens, max_tokens as u32, sampling)
        });
        let sequences = sequences.collect();
        Self { sequences, at_a_time: 1 + numbers.below(4), aborts }
    }

    fn run(self, engine: &mut StepLoop<CudaExecutor>) -> HashMap<SequenceId, Outcome> {
        run_arriving(engine, self.sequences, self.at_a_time, &self.aborts)
    }
}

/// One configuration of the executor, and the earlier one that it is compared with.
struct Configuration {
    name: &'static str,
    options: CudaOptions,
    depth: u32,
    blocks: u32,
    /// Whether rows verify draft tokens.
    drafts: bool,
    baseline: Baseline,
}

#[derive(Clone, Copy)]
enum Baseline {
    /// The first configuration of its data type.
    None,
    /// Equal tokens.
    Exactly(&'static str),
    /// Equal tokens, except after choices that a logit change of this size can reverse.
    Nearly(&'static str, f32),
}

fn configurations() -> Vec<Configuration> {
    let best = CudaOptions::new(WeightFormat::Bf16);
    let eager = CudaOptions { graphs: false, ..best };
    let exact = CudaOptions {
        attention: AttentionKind::Plain,
        graphs: false,
        ..CudaOptions::new(WeightFormat::F32)
    };
    let case = |name, options, depth, blocks, baseline| Configuration {
        name,
        options,
        depth,
        blocks,
        drafts: false,
        baseline,
    };
    let drafting = |configuration| Configuration { drafts: true, ..configuration };
    let late = CudaOptions { dependent_launch: false, ..best };
    let unfused = CudaOptions { fused: false, ..eager };
    let flash = CudaOptions { attention: AttentionKind::Flash, ..eager };
    let reserving = CudaOptions { reserved_sms: 127, ..best };
    let replayed = CudaOptions { graphs: true, ..exact };
    let kv_in_fp8 = CudaOptions { kv: KvFormat::Fp8, ..best };
    let kv_in_fp8_eager = CudaOptions { graphs: false, ..kv_in_fp8 };
    vec![
        case("f32", exact, 1, ROOMY, Baseline::None),
        case("f32, depth 2", exact, 2, ROOMY, Baseline::Nearly("f32", F32)),
        case("f32, depth 2, replayed", replayed, 2, ROOMY, Baseline::Exactly("f32, depth 2")),
        case("f32, preempted", replayed, 2, TIGHT, Baseline::Nearly("f32", F32)),
        drafting(case("f32, draft tokens", replayed, 2, TIGHT, Baseline::Nearly("f32", F32))),
        case("bf16", eager, 1, ROOMY, Baseline::None),
        case("bf16, replayed", best, 1, ROOMY, Baseline::Exactly("bf16")),
        case("bf16, depth 2", eager, 2, ROOMY, Baseline::Nearly("bf16", BF16)),
        case("bf16, depth 2, replayed", best, 2, ROOMY, Baseline::Exactly("bf16, depth 2")),
        case("bf16, depth 2, no early start", late, 2, ROOMY, Baseline::Exactly("bf16, depth 2")),
        case("bf16, unfused", unfused, 2, ROOMY, Baseline::Nearly("bf16", BF16)),
        case("bf16, FlashInfer", flash, 2, ROOMY, Baseline::Nearly("bf16", BF16)),
        case("bf16, SMs reserved", reserving, 2, ROOMY, Baseline::Nearly("bf16", BF16)),
        case("bf16, preempted", best, 2, TIGHT, Baseline::Nearly("bf16", BF16)),
        drafting(case("bf16, draft tokens", best, 2, TIGHT, Baseline::Nearly("bf16", BF16))),
        drafting(case(
            "bf16, FlashInfer, draft tokens",
            flash,
            2,
            ROOMY,
            Baseline::Nearly("bf16", BF16),
        )),
        case("KV in fp8", kv_in_fp8_eager, 1, ROOMY, Baseline::None),
        case("KV in fp8, replayed", kv_in_fp8, 1, ROOMY, Baseline::Exactly("KV in fp8")),
        case("KV in fp8, depth 2", kv_in_fp8, 2, ROOMY, Baseline::Nearly("KV in fp8", KV_IN_FP8)),
        case("KV in fp8, preempted", kv_in_fp8, 2, TIGHT, Baseline::Nearly("KV in fp8", KV_IN_FP8)),
        drafting(case(
            "KV in fp8, draft tokens",
            kv_in_fp8,
            2,
            TIGHT,
            Baseline::Nearly("KV in fp8", KV_IN_FP8),
        )),
    ]
}

/// Returns how far the logits of the two tokens and the sampling cut-offs must move until the CPU
/// samples the second token as well.
fn distance(new: &NewSequence, known: &[SampledToken], chosen: &SampledToken, other: u32) -> f32 {
    const FAR: f32 = -1e4;
    let tokens: Vec<u32> =
        new.tokens.iter().copied().chain(known.iter().map(|token| token.id)).collect();
    let row = SampleRow {
        sampling: &new.sampling,
        tokens: &tokens,
        prompt_len: new.tokens.len(),
        allowed: None,
        scored: None,
    };
    let mut logits = vec![FAR; 1003];
    let top = &chosen.logprobs.as_ref().expect("log-probabilities were requested").top;
    top.iter().for_each(|(token, logprob)| logits[*token as usize] = *logprob);
    assert_eq!(
        sample(&logits, &row).map(|token| token.id),
        Ok(chosen.id),
        "the CPU samples another token"
    );
    let mut moved = 1e-6;
    while moved < 100.0 {
        let mut logits = logits.clone();
        logits[chosen.id as usize] -= moved;
        logits[other as usize] += moved;
        let is_turned = [0.0, moved, -moved].iter().any(|cut| {
            let sampling = Sampling {
                top_p: (row.sampling.top_p + cut).clamp(f32::MIN_POSITIVE, 1.0),
                min_p: (row.sampling.min_p * (1.0 + cut)).clamp(0.0, 1.0),
                ..row.sampling.clone()
            };
            let row = SampleRow { sampling: &sampling, ..row };
            sample(&logits, &row).is_ok_and(|token| token.id == other)
        });
        if is_turned {
            return moved;
        }
        moved *= 1.2;
    }
    f32::INFINITY
}

/// Result of a comparison of two configurations.
#[derive(Default)]
struct Compared {
    sequences: usize,
    tokens: usize,
    turned: usize,
    farthest: f32,
}

impl Compared {
    fn add(&mut self, what: &str, mix: &Mix, [wanted, found]: [&HashMap<SequenceId, Outcome>; 2]) {
        for new in &mix.sequences {
            let what = format!("{what}, sequence {}", new.id.0);
            let (wanted, found) = (&wanted[&new.id], &found[&new.id]);
            assert!(!wanted.is_failed && !found.is_failed, "{what} failed");
            self.sequences += 1;
            let same = wanted.tokens.iter().zip(&found.tokens).take_while(|(a, b)| a.id == b.id);
            let same = same.count();
            self.tokens += same;
            match (wanted.tokens.get(same), found.tokens.get(same)) {
                (Some(chosen), Some(other)) => {
                    self.turned += 1;
                    let far = distance(new, &wanted.tokens[..same], chosen, other.id);
                    eprintln!("{what}: token {same} is {}, {far:.1e} from {}", other.id, chosen.id);
                    self.farthest = self.farthest.max(far);
                }
                // An aborted sequence has a token more or less with more steps in flight.
                _ if mix.aborts.contains_key(&new.id) => {}
                _ => assert_eq!(
                    (wanted.tokens.len(), wanted.finish),
                    (found.tokens.len(), found.finish),
                    "{what}"
                ),
            }
        }
    }
}

pub(crate) fn random_request_mixes_give_equal_tokens_in_every_configuration() {
    let gpu = gpu();
    let checkpoint = checkpoint_with("Qwen3ForCausalLM", "qwen3", 64);
    let configurations = configurations();
    let mut engines: Vec<_> = configurations
        .iter()
        .map(|configuration| {
            let mut config = config(&checkpoint, SLOTS, configuration.blocks, configuration.depth);
            let rules = Speculation {
                row_drafts: 8,
                step_tokens: 64,
                ngram_min: 1,
                ngram_max: 4,
                uniform: true,
            };
            config.limits.speculation = configuration.drafts.then_some(rules);
            config.measures_drafts = false;
            on_gpu(&gpu, &checkpoint, configuration.options, config, |_| ())
        })
        .collect();
    let mut compared: Vec<_> = configurations.iter().map(|_| Compared::default()).collect();
    let place = |name: &str| {
        configurations
            .iter()
            .position(|configuration| configuration.name == name)
            .expect("a configuration's name")
    };
    let mixes = std::env::var("BATON_TEST_MIXES").map_or(MIXES, |mixes| mixes.parse().unwrap());
    for seed in 0..if short() { 3 } else { mixes } {
        let outcomes: Vec<_> = engines
            .iter_mut()
            .zip(&configurations)
            // The distance needs the log-probabilities of the baseline.
            .map(|((engine, _), configuration)| {
                Mix::new(seed, matches!(configuration.baseline, Baseline::None)).run(engine)
            })
            .collect();
        let mix = Mix::new(seed, false);
        for (index, configuration) in configurations.iter().enumerate() {
            let baseline = match configuration.baseline {
                Baseline::None => continue,
                Baseline::Exactly(baseline) => {
                    let ids = |outcomes: &HashMap<SequenceId, Outcome>| -> Vec<Vec<u32>> {
                        mix.sequences.iter().map(|new| outcomes[&new.id].ids()).collect()
                    };
                    let (wanted, found) = (ids(&outcomes[place(baseline)]), ids(&outcomes[index]));
                    assert_eq!(found, wanted, "mix {seed}: {} and {baseline}", configuration.name);
                    continue;
                }
                Baseline::Nearly(baseline, _) => place(baseline),
            };
            let what = format!("mix {seed}, {}", configuration.name);
            compared[index].add(&what, &mix, [&outcomes[baseline], &outcomes[index]]);
        }
    }
    for ((configuration, compared), (engine, _)) in
        configurations.iter().zip(&compared).zip(&engines)
    {
        let preemptions = engine.scheduler().preemptions();
        let Compared { sequences, tokens, turned, farthest } = compared;
        eprintln!(
            "{}: {turned} of {sequences} sequences turned, by {farthest:.1e} at most; {tokens} tokens \
             were the same; {preemptions} preemptions",
            configuration.name
        );
        assert_eq!(configuration.blocks == TIGHT, preemptions > 0, "{}", configuration.name);
        if let Baseline::Nearly(_, most) = configuration.baseline {
            assert!(*farthest <= most, "{}: a clear choice differs", configuration.name);
            assert!(
                *tokens > 10 * sequences,
                "{}: too few tokens for this test",
                configuration.name
            );
        }
    }
}

pub(crate) fn randomly_delayed_streams_change_no_token() {
    let gpu = gpu();
    let checkpoint = checkpoint_with("Qwen3ForCausalLM", "qwen3", 64);
    let best = CudaOptions::new(WeightFormat::Bf16);
    for options in [best, CudaOptions { graphs: false, ..best }] {
        let config = config(&checkpoint, SLOTS, ROOMY, 2);
        let (mut prompt, _) = on_gpu(&gpu, &checkpoint, options, config, |_| ());
        let longest = Duration::from_micros(300);
        let (mut late, _) = on_gpu(&gpu, &checkpoint, options, config, |executor| {
            executor.delay_streams(StreamDelays::new(gpu.library.clone(), longest, 1));
        });
        for seed in 1000..if short() { 1002 } else { 1030 } {
            let wanted = Mix::new(seed, false).run(&mut prompt);
            let found = Mix::new(seed, false).run(&mut late);
            assert_eq!(found, wanted, "mix {seed}");
        }
    }
}

/// Checks `distance`, on which the other tests rely. Needs no GPU.
pub(crate) fn margin_check_separates_close_from_clear_choices() {
    let token = |id: u32, likely: &[f32]| {
        let top = likely.iter().enumerate().map(|(id, share)| (id as u32, share.ln())).collect();
        let logprobs = Some(TokenLogprobs { chosen: likely[id as usize].ln(), top, rank: None });
        SampledToken { id, logprobs, pooled: None }
    };
    let new = |sampling| sequence(1, vec![1, 2, 3], 8, sampling);
    let greedy = new(Sampling::greedy());
    let close = distance(&greedy, &[], &token(0, &[0.5, 0.4999]), 1);
    assert!(close < 2e-4, "{close}");
    let clear = distance(&greedy, &[], &token(0, &[0.9, 0.05]), 1);
    assert!(clear > 1.0, "{clear}");
    // The last token is just below the cut-off, and would be sampled above it.
    let likely = [0.6, 0.3001, 0.0999];
    let logits: Vec<f32> = likely.iter().map(|share: &f32| share.ln()).collect();
    let drawn = |top_p, seed| {
        let sampling = Sampling { temperature: 1.0, top_p, seed, ..Sampling::greedy() };
        let row = SampleRow {
            sampling: &sampling,
            tokens: &[1, 2, 3],
            prompt_len: 3,
            allowed: None,
            scored: None,
        };
        sample(&logits, &row).unwrap().id
    };
    let seed = (0..1000).find(|seed| drawn(1.0, *seed) == 2).expect("one seed in ten samples it");
    assert_ne!(drawn(0.9, seed), 2);
    let cut = new(Sampling { temperature: 1.0, top_p: 0.9, seed, ..Sampling::greedy() });
    let close = distance(&cut, &[], &token(drawn(0.9, seed), &likely), 2);
    assert!(close < 1e-3, "{close}");
}
