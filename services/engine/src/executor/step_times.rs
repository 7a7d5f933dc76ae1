//! Measures the step times of an executor at start, before its scheduler exists.
//!
//! The measured rows use slot 0 and the first blocks of the arena. Both are free afterwards, and
//! serving overwrites the KV.

use std::time::{Duration, Instant};

use kernels::{BlockId, sampling::Sampling};

use super::{Executor, ExecutorError};
use crate::plan::{AdmittedRow, RowPlan, Slot, StepPlan};

/// Smallest prefill row that is measured.
const TOKENS_MIN: u32 = 256;
/// The measurement ends when twice the tokens raise prefill throughput by less than this factor.
const GAIN_MIN: f64 = 1.02;
/// Runs of each prefill step; the fastest counts. The first run may load kernels.
const RUNS: u32 = 2;
/// Number of decode steps; the fastest counts.
const DECODE_RUNS: u32 = 4;
/// Prompt tokens of the row whose decode steps are measured.
const DECODE_PROMPT: u32 = 8;
/// Time-out of a step.
const STEP_TIMEOUT: Duration = Duration::from_secs(600);

const SLOT: Slot = Slot(0);

/// Measured times of steps with one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepTimes {
    /// Time of a step that decodes one row after a short prompt.
    pub decode: Duration,
    /// Tokens and time of prefill steps, ascending. The middle of each row is at position
    /// `context_tokens` / 2.
    pub prefill: Vec<(u32, Duration)>,
    /// Length in tokens of the prompt that contains the measured rows.
    pub context_tokens: u32,
    /// Time of the first entry's row at the start of the prompt, and at the end.
    pub at_start: Duration,
    pub at_end: Duration,
}

impl StepTimes {
    /// Measures on an executor that has no row and no step in flight.
    pub fn measure(executor: &mut dyn Executor) -> Result<Self, ExecutorError> {
        let limits = executor.limits();
        let pool = executor.kv_groups().tokens(limits.blocks as usize) as u32;
        // A row that does not sample must be followed by at least one more prompt token.
        let context_tokens = limits.step_tokens.min(limits.sequence_tokens - 1).min(pool);
        let mut runner = StepTimer { executor, steps: 0, occupied: false };

        runner.prefill(0, DECODE_PROMPT.min(context_tokens), true)?;
        let mut decode = Duration::MAX;
        for _ in 0..DECODE_RUNS.min(context_tokens.saturating_sub(DECODE_PROMPT).max(1)) {
            decode = decode.min(runner.step(StepPlan::default(), 1, true)?);
        }

        let mut prefill: Vec<(u32, Duration)> = Vec::new();
        for tokens in row_sizes(context_tokens) {
            let time = runner.fastest((context_tokens - tokens) / 2, tokens)?;
            let gain = prefill.last().map(|&(before, time_before)| {
                let work = f64::from(tokens) / f64::from(before);
                work * time_before.as_secs_f64() / time.as_secs_f64().max(1e-9)
            });
            prefill.push((tokens, time));
            if gain.is_some_and(|gain| gain < GAIN_MIN) {
                break;
            }
        }
        let shortest = prefill[0].0;
        let at_start = runner.fastest(0, shortest)?;
        let at_end = runner.fastest(context_tokens - shortest, shortest)?;
        runner.release()?;
        Ok(Self { decode, prefill, context_tokens, at_start, at_end })
    }
}

/// Returns the numbers of tokens to measure: doubling up to the longest row.
fn row_sizes(longest: u32) -> Vec<u32> {
    let doubled = std::iter::successors(Some(TOKENS_MIN), |tokens| tokens.checked_mul(2));
    let mut sizes: Vec<_> = doubled.take_while(|tokens| *tokens < longest).collect();
    sizes.push(longest);
    sizes
}

struct StepTimer<'a> {
    executor: &'a mut dyn Executor,
    steps: u64,
    /// Whether slot 0 has a row.
    occupied: bool,
}

impl StepTimer<'_> {
    fn fastest(&mut self, position: u32, tokens: u32) -> Result<Duration, ExecutorError> {
        let mut fastest = Duration::MAX;
        for _ in 0..RUNS {
            fastest = fastest.min(self.prefill(position, tokens, false)?);
        }
        Ok(fastest)
    }

    /// Runs one prefill row of a new sequence. The KV before `position` is undefined, which does
    /// not change the time of the step.
    fn prefill(
        &mut self,
        position: u32,
        tokens: u32,
        samples: bool,
    ) -> Result<Duration, ExecutorError> {
        let known = position + tokens + u32::from(!samples);
        let entries = self.executor.kv_groups().entries((known + DECODE_RUNS) as usize);
        let block_count = self.executor.limits().blocks.min(entries as u32);
        let admitted = AdmittedRow {
            slot: SLOT,
            generation: 0,
            tokens: vec![0; known as usize],
            prompt_len: known,
            computed: position,
            blocks: (0..block_count).map(BlockId).collect(),
            sampling: Sampling::greedy(),
            constrained: false,
            adapter: None,
        };
        let released = self.occupant();
        self.occupied = true;
        let plan = StepPlan { released, admitted: vec![admitted], ..StepPlan::default() };
        self.step(plan, tokens, samples)
    }

    /// Runs a step with one row and returns the time that the device worked.
    fn step(
        &mut self,
        mut plan: StepPlan,
        token_count: u32,
        samples: bool,
    ) -> Result<Duration, ExecutorError> {
        plan.rows =
            vec![RowPlan { slot: SLOT, generation: 0, token_count, samples, drafts_max: 0 }];
        self.run(plan)
    }

    /// Releases the row, so that the executor has none.
    fn release(&mut self) -> Result<(), ExecutorError> {
        let released = self.occupant();
        self.run(StepPlan { released, ..StepPlan::default() }).map(drop)
    }

    fn occupant(&self) -> Vec<Slot> {
        self.occupied.then_some(SLOT).into_iter().collect()
    }

    fn run(&mut self, mut plan: StepPlan) -> Result<Duration, ExecutorError> {
        plan.step_id = self.steps;
        self.steps += 1;
        self.executor.launch(plan)?;
        let deadline = Instant::now() + STEP_TIMEOUT;
        while Instant::now() < deadline {
            if let Some(result) = self.executor.collect(STEP_TIMEOUT)? {
                return Ok(result.busy);
            }
        }
        let reason = format!("a step took longer than {} s", STEP_TIMEOUT.as_secs());
        Err(ExecutorError::Stopped { reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        executor::{ExecutorLimits, batch::Batch},
        plan::{RowMask, StepId, StepResult, StepRun},
    };

    /// Executor that applies plans and reports times by formula.
    struct Formula {
        batch: Batch,
        limits: ExecutorLimits,
        /// Microseconds of a step by position and tokens of its row.
        micros: fn(u64, u64) -> u64,
        launched: Option<StepResult>,
        steps: Vec<(usize, usize)>,
    }

    impl Executor for Formula {
        fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
            let scheduled = self.batch.apply(&plan, |_| None, |_, _| Vec::new())?;
            let mut busy = Duration::ZERO;
            for row in &scheduled {
                let micros = (self.micros)(row.start as u64, row.token_count as u64);
                busy += Duration::from_micros(micros);
                self.steps.push((row.start, row.token_count));
                if row.samples {
                    let token =
                        kernels::sampling::SampledToken { id: 0, logprobs: None, pooled: None };
                    self.batch.sampled(row, vec![Ok(token)]);
                }
            }
            let (step_id, run) = (plan.step_id, StepRun::default());
            self.launched = Some(StepResult { step_id, rows: Vec::new(), busy, run });
            Ok(())
        }

        fn supply(&mut self, _: StepId, _: Vec<RowMask>) -> Result<(), ExecutorError> {
            unreachable!("no row is constrained")
        }

        fn masks_are_due(&self) -> bool {
            false
        }

        fn collect(&mut self, _: Duration) -> Result<Option<StepResult>, ExecutorError> {
            Ok(self.launched.take())
        }

        fn limits(&self) -> ExecutorLimits {
            self.limits
        }
    }

    fn formula(step_tokens: u32, blocks: u32, micros: fn(u64, u64) -> u64) -> Formula {
        let limits = ExecutorLimits {
            slots: 2,
            step_tokens,
            sequence_tokens: 16_384,
            blocks,
            depth: 1,
            vocabulary: 4,
            speculation: None,
        };
        Formula { batch: Batch::new(limits), limits, micros, launched: None, steps: Vec::new() }
    }

    #[test]
    fn measurement_ends_where_larger_rows_gain_nothing_and_leaves_no_row() {
        // A fixed 4 ms per step: every larger row raises the throughput.
        let mut executor = formula(8192, 1024, |position, tokens| match tokens {
            1 => 4_000,
            _ => 4_000 + tokens.max(512) * 20 + tokens * position / 1024,
        });
        let times = StepTimes::measure(&mut executor).unwrap();
        assert_eq!(times.decode, Duration::from_millis(4));
        let sizes: Vec<_> = times.prefill.iter().map(|(tokens, _)| *tokens).collect();
        assert_eq!(sizes, [256, 512, 1024, 2048, 4096, 8192]);
        assert!(times.at_end > times.at_start);
        assert_eq!(times.context_tokens, 8192);
        assert!(executor.steps.contains(&(3584, 1024)) && executor.steps.contains(&(0, 8192)));
        assert_eq!(executor.batch.rows().count(), 0);

        let mut executor = formula(8192, 1024, |_, tokens| tokens.max(900) * 20);
        let times = StepTimes::measure(&mut executor).unwrap();
        assert_eq!(times.prefill.last().unwrap().0, 2048);
    }

    #[test]
    fn a_small_pool_and_a_small_step_can_be_measured() {
        for (step_tokens, blocks, context_tokens) in [(512, 2, 32), (4, 64, 4), (1, 2, 1)] {
            let mut executor = formula(step_tokens, blocks, |_, tokens| tokens);
            let times = StepTimes::measure(&mut executor).unwrap();
            assert_eq!(times.context_tokens, context_tokens);
            assert_eq!(times.prefill.len(), 1);
            assert_eq!(executor.batch.rows().count(), 0);
        }
    }
}
