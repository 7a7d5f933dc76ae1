//! Benchmarks the host time of one decode step: planning it and processing its result. No model runs.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use engine::{
    CacheSeeds, Scheduler, SchedulerConfig,
    event::{Action, Input, NewSequence, SequenceId, SequenceKind},
    executor::ExecutorLimits,
    plan::{RowResult, StepPlan, StepResult, StepRun},
};
use kernels::sampling::{SampledToken, Sampling};

const PROMPT_TOKENS: u32 = 512;

/// Returns the result of a plan; every sampled token is 7.
fn answer(plan: &StepPlan) -> StepResult {
    let rows = plan.rows.iter().map(|row| {
        let token = SampledToken { id: 7, logprobs: None };
        let tokens = if row.samples { vec![token] } else { Vec::new() };
        RowResult { slot: row.slot, generation: row.generation, tokens, drafted: 0, failure: None }
    });
    StepResult {
        step_id: plan.step_id,
        rows: rows.collect(),
        busy: Duration::ZERO,
        run: StepRun::default(),
    }
}

/// Returns a scheduler whose `batch` sequences have finished prefill.
fn decoding(batch: u32) -> Scheduler {
    let limits = ExecutorLimits {
        // One slot stays free for the arriving sequence.
        slots: batch + 1,
        step_tokens: 8192,
        sequence_tokens: 1 << 20,
        blocks: batch * 512,
        depth: 1,
        vocabulary: 50_000,
        speculation: None,
    };
    let config = SchedulerConfig { waiting_max: batch, ..SchedulerConfig::new(limits) };
    let seeds = CacheSeeds { model_fingerprint: 0, weight_version: 0 };
    let mut scheduler = Scheduler::new(config, seeds).expect("the config is consistent");
    let (now, mut actions) = (Instant::now(), Vec::new());
    for id in 0..batch {
        let sequence = NewSequence {
            id: SequenceId(u128::from(id)),
            kind: SequenceKind::Compute,
            tokens: (0..PROMPT_TOKENS).map(|index| (index + id * 997) % 50_000).collect(),
            prompt_len: PROMPT_TOKENS,
            sampling: Sampling::greedy(),
            max_tokens: 1 << 16,
            ignore_stop_tokens: true,
            cache_salt: String::new(),
            session: Default::default(),
            constraint: None,
            deadline: now + Duration::from_secs(3600),
        };
        scheduler.handle(now, Input::Arrived(sequence), &mut actions);
    }
    while let Some(plan) = scheduler.plan(&mut actions) {
        let decodes = plan.rows.len() == batch as usize && plan.admitted.is_empty();
        scheduler.complete(answer(&plan), &mut actions);
        if decodes {
            break;
        }
    }
    assert_eq!(scheduler.load().pending_prompt_tokens, 0);
    scheduler
}

fn decode_step(criterion: &mut Criterion) {
    // The pool cannot hold endless answers, so a new scheduler replaces the old one after some steps.
    const STEPS: u64 = 4_000;
    for batch in [1, 64, 256] {
        criterion.bench_function(&format!("decode step, batch {batch}"), |bencher| {
            bencher.iter_custom(|steps| {
                let mut spent = Duration::ZERO;
                let mut left = steps;
                while left > 0 {
                    let mut scheduler = decoding(batch);
                    let started = Instant::now();
                    for _ in 0..left.min(STEPS) {
                        let mut actions: Vec<Action> = Vec::new();
                        let plan = scheduler.plan(&mut actions).expect("every row decodes");
                        scheduler.complete(answer(&plan), &mut actions);
                        black_box(&actions);
                    }
                    spent += started.elapsed();
                    left -= left.min(STEPS);
                }
                spent
            });
        });
    }
}

fn arrival(criterion: &mut Criterion) {
    let mut scheduler = decoding(1);
    let mut next_id = 1_000u128;
    criterion.bench_function("arrival and abort of 4,096 tokens", |bencher| {
        bencher.iter_batched(
            || {
                next_id += 1;
                NewSequence {
                    id: SequenceId(next_id),
                    kind: SequenceKind::Receive,
                    tokens: (0..4096).collect(),
                    prompt_len: 4096,
                    sampling: Sampling::greedy(),
                    max_tokens: 16,
                    ignore_stop_tokens: true,
                    cache_salt: String::new(),
                    session: Default::default(),
                    constraint: None,
                    deadline: Instant::now() + Duration::from_secs(3600),
                }
            },
            |sequence| {
                let (id, now, mut actions) = (sequence.id, Instant::now(), Vec::new());
                scheduler.handle(now, Input::Arrived(sequence), &mut actions);
                scheduler.handle(now, Input::Abort { id }, &mut actions);
                scheduler.handle(now, Input::TransferEnded { id }, &mut actions);
                black_box(actions)
            },
            BatchSize::SmallInput,
        );
    });
}

criterion_group!(benches, decode_step, arrival);
criterion_main!(benches);
