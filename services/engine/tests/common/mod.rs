//! Helpers of the engine's tests: limits, sequences and the synchronous oracle.
#![allow(dead_code)] // Each test file uses a part.

pub(crate) mod cpu;
pub(crate) mod grammar;
pub(crate) mod node;
pub(crate) mod pair;
pub(crate) mod ranks;
pub(crate) mod tiers;

use std::{
    num::NonZeroUsize,
    time::{Duration, Instant},
};

use engine::{
    CacheSeeds, Scheduler, SchedulerConfig,
    constraint::Constraint,
    event::{FinishReason, NewSequence, SequenceId, SequenceKind},
    executor::{
        ExecutorLimits, Speculation,
        sim::{CostModel, SimExecutor, next_token},
    },
};
use kernels::{KvGroups, sampling::Sampling};
use proptest::prelude::*;

pub(crate) const SEEDS: CacheSeeds = CacheSeeds { model_fingerprint: 0x5eed, weight_version: 1 };
pub(crate) const VOCABULARY: u32 = 40;

pub(crate) fn limits(slots: u32, step_tokens: u32, blocks: u32, depth: u32) -> ExecutorLimits {
    ExecutorLimits {
        slots,
        step_tokens,
        sequence_tokens: 256,
        blocks,
        depth,
        vocabulary: VOCABULARY,
        speculation: None,
    }
}

/// Returns limits of speculation with n-grams of two to four tokens.
pub(crate) fn speculation(row_drafts: u32, step_tokens: u32) -> Speculation {
    Speculation { row_drafts, step_tokens, ngram_min: 2, ngram_max: 4, uniform: false }
}

/// Returns a config whose queues never overflow and whose waits end with the sequence's deadline
/// only.
pub(crate) fn unbounded_waits(limits: ExecutorLimits) -> SchedulerConfig {
    SchedulerConfig {
        waiting_max: 1000,
        transfers_max: 1000,
        reserve_timeout: Duration::from_secs(100_000),
        ready_timeout: Duration::from_secs(100_000),
        measures_drafts: false,
        ..SchedulerConfig::new(limits)
    }
}

pub(crate) fn scheduler(config: SchedulerConfig) -> Scheduler {
    Scheduler::new(config, SEEDS).expect("the config is consistent")
}

pub(crate) fn sim(limits: ExecutorLimits, start: Instant) -> SimExecutor {
    SimExecutor::new(limits, CostModel::default(), start)
}

/// Returns KV groups of layers with and without windows, often a single one, and with or without a
/// state.
pub(crate) fn kv_groups() -> impl Strategy<Value = KvGroups> {
    let windows = prop::collection::vec(prop_oneof![Just(0), 2..80usize], 1..4);
    let windows =
        prop_oneof![2 => Just(vec![0]), 1 => (2..80usize).prop_map(|it| vec![it]), 2 => windows];
    let groups = windows.prop_map(|windows| {
        KvGroups::of_windows(&windows.into_iter().map(NonZeroUsize::new).collect::<Vec<_>>())
    });
    let with_state = |entries| KvGroups::default().with_state_entries(entries);
    prop_oneof![3 => groups, 1 => (1..5usize).prop_map(with_state)]
}

/// Returns a greedy sequence whose deadline is far beyond every test.
pub(crate) fn sequence(
    id: u128,
    kind: SequenceKind,
    tokens: Vec<u32>,
    start: Instant,
) -> NewSequence {
    NewSequence {
        id: SequenceId(id),
        kind,
        prompt_len: tokens.len() as u32,
        tokens,
        sampling: Sampling::greedy(),
        max_tokens: 20,
        ignore_stop_tokens: false,
        cache_salt: String::new(),
        adapter: None,
        session: Default::default(),
        constraint: None,
        deadline: start + Duration::from_secs(1_000_000),
    }
}

/// Returns tokens of one of a few families; equal families share every prefix.
pub(crate) fn family_tokens(family: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|index| (family * 11 + index * 7 + index / 5) % VOCABULARY).collect()
}

/// Returns the expected output of a sequence on the sim executor: one token at a time, alone.
pub(crate) fn oracle(
    new: &NewSequence,
    sequence_tokens_max: usize,
) -> (Vec<u32>, Option<FinishReason>) {
    let mut tokens = new.tokens.clone();
    let length_max = (new.prompt_len as usize + new.max_tokens as usize).min(sequence_tokens_max);
    let mut output = Vec::new();
    let mut matcher = new.constraint.clone().map(Constraint::into_matcher);
    loop {
        let prompt_len = new.prompt_len as usize;
        let allowed =
            matcher.as_mut().map(|matcher| matcher.allowed().expect("the grammar continues"));
        let token = next_token(&tokens, prompt_len, &new.sampling, allowed.as_ref(), VOCABULARY)
            .expect("some token is not masked");
        tokens.push(token);
        output.push(token);
        let stops = new.sampling.stop_token_ids.contains(&token) && !new.ignore_stop_tokens;
        let mut accept = |token| {
            matcher.as_mut().is_some_and(|matcher| {
                matcher.accept(token).expect("the grammar allowed the token");
                matcher.is_complete()
            })
        };
        let reason = if stops || accept(token) {
            Some(FinishReason::Stop)
        } else if tokens.len() >= length_max {
            Some(FinishReason::Length)
        } else {
            None
        };
        if reason.is_some() || new.kind == SequenceKind::Send {
            return (output, reason);
        }
    }
}
