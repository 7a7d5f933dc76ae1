//! `baton-bench admission`: time of the scheduler for a turn of a long conversation whose KV is in
//! the prefix cache, and for a prefill step, with and without KV tiers; no model, no copies.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use baton::bench::stats::Percentiles;
use clap::Args;
use engine::{
    CacheSeeds, Scheduler, SchedulerConfig,
    event::{Action, Input, NewSequence, SequenceId, SequenceKind, SessionHint},
    executor::ExecutorLimits,
    plan::{RowPlan, RowResult, StepPlan, StepResult, StepRun},
    tiers::{Tier, TierAdmission, TierConfig, TierEvent},
};
use kernels::{
    BLOCK_TOKENS,
    sampling::{SampledToken, Sampling},
};
use serde::Serialize;

/// Tokens of the largest step.
const STEP_TOKENS: u32 = 8192;
/// Tokens that each turn generates, one a step.
const OUTPUT_TOKENS: u32 = 64;
const VOCABULARY: u32 = 50_000;
/// Turns of each conversation, and new prompts, that are not measured. The tiers save a long prompt
/// over several turns.
const WARM_UP: u32 = 10;
const DEADLINE: Duration = Duration::from_secs(3600);

#[derive(Args)]
pub(crate) struct AdmissionArgs {
    /// Cached blocks of each prompt; a block has 16 tokens.
    #[arg(long, default_value_t = 8750, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    blocks: u32,
    /// Conversations that take turns, so that the data of one conversation leaves the CPU's caches.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    conversations: u32,
    /// Measured turns of each conversation.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    turns: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct AdmissionReport {
    blocks: u32,
    without_tiers_us: TurnTimes,
    with_tiers_us: TurnTimes,
}

/// Times of the engine thread, in µs.
#[derive(Debug, Serialize)]
struct TurnTimes {
    /// Putting the request into the queue.
    arrival: Percentiles,
    /// Planning the step that admits the prompt. The device may wait for this.
    admission: Percentiles,
    /// Collecting a later step: the longest time of the turn.
    step: Percentiles,
    /// Collecting the last step, after which the sequence releases its blocks.
    end: Percentiles,
    /// Collecting a step that computed a new prompt, before the next step is launched. The tiers
    /// save every block.
    prefill: Percentiles,
}

pub(crate) fn run(args: AdmissionArgs) -> Result<()> {
    let report = AdmissionReport {
        blocks: args.blocks,
        without_tiers_us: measure(&args, false)?,
        with_tiers_us: measure(&args, true)?,
    };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(());
    }
    println!("times of the engine thread with {} cached blocks, µs:", report.blocks);
    for (tiers, times) in [("off", &report.without_tiers_us), ("on", &report.with_tiers_us)] {
        println!("  tiers {tiers}");
        let TurnTimes { arrival, admission, step, end, prefill } = times;
        for (part, it) in [
            ("arrival", arrival),
            ("admission", admission),
            ("largest step", step),
            ("end", end),
            ("prefill step", prefill),
        ] {
            println!("    {part:<12} p50 {:8.1}  p90 {:8.1}  max {:8.1}", it.p50, it.p90, it.max);
        }
    }
    Ok(())
}

/// Measures turns whose prompts stay in the prefix cache, and then new prompts.
fn measure(args: &AdmissionArgs, has_tiers: bool) -> Result<TurnTimes> {
    let mut node = InstantNode::new(args, has_tiers.then_some(TierAdmission::SecondTouch))?;
    let mut samples: [Vec<f64>; 4] = Default::default();
    for turn in 0..WARM_UP + args.turns {
        for conversation in 0..args.conversations {
            let times = node.turn(conversation, turn > 0)?;
            if turn >= WARM_UP {
                let micros = times.map(|time| time.as_secs_f64() * 1e6);
                samples.iter_mut().zip(micros).for_each(|(all, time)| all.push(time));
            }
        }
    }
    let saved = node.scheduler.tier_stats(Tier::Host).map(|stats| stats.saved);
    let blocks = u64::from(args.blocks * args.conversations);
    ensure!(saved.is_none_or(|saved| saved >= blocks), "the tiers did not save {blocks} blocks");
    let mut node = InstantNode::new(args, has_tiers.then_some(TierAdmission::Always))?;
    let prompts = (0..WARM_UP + args.turns).map(|number| node.prefill(number));
    let times = prompts.collect::<Result<Vec<_>>>()?.split_off(WARM_UP as usize);
    let prefill = times.into_iter().map(|time| time.as_secs_f64() * 1e6).collect();
    let [arrival, admission, step, end] = samples.map(Percentiles::of);
    Ok(TurnTimes { arrival, admission, step, end, prefill: Percentiles::of(prefill) })
}

/// A scheduler whose steps and copies end at once.
struct InstantNode {
    scheduler: Scheduler,
    blocks: u32,
    turns: u128,
}

impl InstantNode {
    fn new(args: &AdmissionArgs, tiers: Option<TierAdmission>) -> Result<Self> {
        let blocks = args.conversations * (args.blocks + 2 * OUTPUT_TOKENS);
        let limits = ExecutorLimits {
            slots: 1,
            step_tokens: STEP_TOKENS,
            sequence_tokens: blocks * BLOCK_TOKENS as u32,
            blocks,
            depth: 1,
            vocabulary: VOCABULARY,
            speculation: None,
        };
        let seeds = CacheSeeds { model_fingerprint: 1, weight_version: 1 };
        let mut scheduler = Scheduler::new(SchedulerConfig::new(limits), seeds)?;
        if let Some(admission) = tiers {
            let config = TierConfig {
                admission,
                host: true,
                disk_slots: 4 * blocks,
                sessions: true,
                load_timeout: Duration::from_secs(4),
            };
            let now = Instant::now();
            scheduler = scheduler.with_tiers(config, now);
            let grown = TierEvent::Grown { tier: Tier::Host, slots: 4 * blocks };
            let recovered =
                TierEvent::Recovered { tier: Tier::Disk, blocks: Vec::new(), is_complete: true };
            for event in [grown, recovered] {
                scheduler.handle(now, Input::Tier(event), &mut Vec::new());
            }
        }
        Ok(Self { scheduler, blocks: args.blocks, turns: 0 })
    }

    /// Runs a turn of a conversation. Returns the four times of [`TurnTimes`].
    fn turn(&mut self, conversation: u32, is_cached: bool) -> Result<[Duration; 4]> {
        let mut actions = Vec::new();
        let request = self.request(conversation);
        let begin = Instant::now();
        self.scheduler.handle(begin, Input::Arrived(request), &mut actions);
        let arrival = begin.elapsed();
        let begin = Instant::now();
        let mut plan = self.scheduler.plan(&mut actions);
        let admission = begin.elapsed();
        let expected = if is_cached { self.blocks * BLOCK_TOKENS as u32 } else { 0 };
        let is_admitted = |action: &Action| matches!(action, Action::Admitted { cached_tokens, .. } if *cached_tokens == expected);
        ensure!(
            actions.iter().any(is_admitted),
            "the prompt does not have {expected} cached tokens"
        );
        let (mut step, mut end) = (Duration::ZERO, Duration::ZERO);
        while let Some(planned) = plan {
            self.play(std::mem::take(&mut actions));
            let result = result_of(&planned);
            let begin = Instant::now();
            self.scheduler.complete(result, &mut actions);
            self.scheduler.start_saves(begin, &mut actions);
            // The last of these times is that of the last step.
            step = step.max(end);
            end = begin.elapsed();
            plan = self.scheduler.plan(&mut actions);
        }
        self.play(actions);
        ensure!(self.scheduler.is_idle(), "the turn did not finish");
        Ok([arrival, admission, step, end])
    }

    /// Computes a new prompt in one step. Returns the time to collect the step.
    fn prefill(&mut self, number: u32) -> Result<Duration> {
        let mut request = self.request(0);
        request.tokens.truncate(STEP_TOKENS as usize);
        request.prompt_len = request.tokens.len() as u32;
        request.max_tokens = 1;
        request.cache_salt = number.to_string();
        let mut actions = Vec::new();
        self.scheduler.handle(Instant::now(), Input::Arrived(request), &mut actions);
        let Some(step) = self.scheduler.plan(&mut actions) else { bail!("no step is planned") };
        let result = result_of(&step);
        let begin = Instant::now();
        self.scheduler.complete(result, &mut actions);
        let took = begin.elapsed();
        self.scheduler.start_saves(begin, &mut actions);
        self.play(actions);
        ensure!(self.scheduler.is_idle(), "the prompt needs more than a step");
        Ok(took)
    }

    fn request(&mut self, conversation: u32) -> NewSequence {
        self.turns += 1;
        // One further token, because the last token of a prompt is always computed.
        let count = u64::from(self.blocks) * BLOCK_TOKENS as u64 + 1;
        let token =
            |index: u64| ((index * 7919 + u64::from(conversation)) % u64::from(VOCABULARY)) as u32;
        let tokens: Vec<u32> = (0..count).map(token).collect();
        let keep = Some(Duration::from_secs(60));
        NewSequence {
            id: SequenceId(self.turns),
            kind: SequenceKind::Compute,
            prompt_len: tokens.len() as u32,
            tokens,
            sampling: Sampling::greedy(),
            max_tokens: OUTPUT_TOKENS,
            ignore_stop_tokens: true,
            cache_salt: String::new(),
            adapter: None,
            session: SessionHint { session: Some(conversation.into()), keep },
            constraint: None,
            deadline: Instant::now() + DEADLINE,
        }
    }

    /// Ends the saves that the scheduler starts.
    fn play(&mut self, mut actions: Vec<Action>) {
        while let Some(action) = actions.pop() {
            let Action::Save(save) = action else { continue };
            for event in [TierEvent::Copied { job: save.job }, TierEvent::Saved { job: save.job }] {
                self.scheduler.handle(Instant::now(), Input::Tier(event), &mut actions);
            }
        }
    }
}

/// Returns the result of a step that samples token 1 everywhere.
fn result_of(plan: &StepPlan) -> StepResult {
    let row = |row: &RowPlan| RowResult {
        slot: row.slot,
        generation: row.generation,
        tokens: row
            .samples
            .then_some(SampledToken { id: 1, logprobs: None, pooled: None })
            .into_iter()
            .collect(),
        prompt_logprobs: Vec::new(),
        drafted: 0,
        failure: None,
    };
    let (step_id, rows) = (plan.step_id, plan.rows.iter().map(row).collect());
    StepResult { step_id, rows, busy: Duration::from_millis(1), run: StepRun::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_of_cached_conversations_are_measured_with_and_without_tiers() -> Result<()> {
        let args = AdmissionArgs { blocks: 30, conversations: 2, turns: 3, json: false };
        for has_tiers in [false, true] {
            let TurnTimes { arrival, admission, step, end, prefill } = measure(&args, has_tiers)?;
            for (times, count) in [(arrival, 6), (admission, 6), (step, 6), (end, 6), (prefill, 3)]
            {
                assert_eq!(times.count, count);
                assert!(times.max > 0.0);
            }
        }
        Ok(())
    }
}
