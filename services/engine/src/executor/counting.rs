//! Executor that counts tokens, for simulations of many nodes.
//!
//! Unlike [`sim`](super::sim), this executor keeps neither tokens nor KV, so a step takes little
//! time and memory and detects fewer errors of the scheduler: [`Batch`] still checks every plan. A
//! step is computed when it is launched. The caller decides when its result is due. A sampled token
//! depends on its position only.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use kernels::sampling::SampledToken;

use super::{
    Executor, ExecutorError, ExecutorLimits,
    batch::{Batch, TokenCount},
};
use crate::{
    StepWork,
    plan::{RowMask, RowResult, StepId, StepPlan, StepResult, StepRun},
};

#[derive(Debug)]
pub struct CountingExecutor {
    limits: ExecutorLimits,
    batch: Batch<TokenCount>,
    launched: VecDeque<StepResult>,
    work: StepWork,
    now: Instant,
}

impl CountingExecutor {
    pub fn new(limits: ExecutorLimits, now: Instant) -> Self {
        let (batch, launched) = (Batch::new(limits), VecDeque::new());
        Self { limits, batch, launched, work: StepWork::default(), now }
    }

    /// Returns the work of the step launched last.
    pub fn work(&self) -> StepWork {
        self.work
    }
}

impl Executor for CountingExecutor {
    fn launch(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        let scheduled = self.batch.apply(&plan, |_| None, |_, _| Vec::new())?;
        let mut work = StepWork::default();
        let mut rows = Vec::with_capacity(scheduled.len());
        for row in &scheduled {
            let (end, count) = (row.end() as u64, row.token_count as u64);
            if row.samples && count == 1 {
                work.decode_rows += 1;
                work.context_tokens += end;
            } else {
                work.prefill_tokens += count as u32;
                work.prefill_pairs += count * (row.start as u64 + end) / 2;
            }
            let mut tokens = Vec::new();
            if row.samples {
                self.batch.will_sample(row);
                let id = (end % u64::from(self.limits.vocabulary)) as u32;
                tokens.push(SampledToken { id, logprobs: None, pooled: None });
            }
            let (slot, generation) = (row.slot, row.generation);
            let prompt_logprobs = Vec::new();
            let failure = None;
            rows.push(RowResult { slot, generation, tokens, prompt_logprobs, drafted: 0, failure });
        }
        self.work = work;
        let (step_id, busy, run) = (plan.step_id, Duration::ZERO, StepRun::default());
        self.launched.push_back(StepResult { step_id, rows, busy, run });
        Ok(())
    }

    fn supply(&mut self, step_id: StepId, _masks: Vec<RowMask>) -> Result<(), ExecutorError> {
        let reason = "the executor supports no token bitmasks".to_owned();
        Err(ExecutorError::BadPlan { step_id, reason })
    }

    fn masks_are_due(&self) -> bool {
        false
    }

    fn collect(&mut self, _timeout: Duration) -> Result<Option<StepResult>, ExecutorError> {
        Ok(self.launched.pop_front())
    }

    fn limits(&self) -> ExecutorLimits {
        self.limits
    }

    fn now(&self) -> Instant {
        self.now
    }
}

#[cfg(test)]
mod tests {
    use kernels::{BlockId, sampling::Sampling};

    use super::*;
    use crate::plan::{AdmittedRow, RowPlan, Slot};

    #[test]
    fn steps_count_prefill_and_decode_work() {
        let limits = ExecutorLimits {
            slots: 2,
            step_tokens: 64,
            sequence_tokens: 64,
            blocks: 4,
            depth: 2,
            vocabulary: 100,
            speculation: None,
        };
        let mut executor = CountingExecutor::new(limits, Instant::now());
        let row = |token_count, samples| RowPlan {
            slot: Slot(0),
            generation: 1,
            token_count,
            samples,
            drafts_max: 0,
        };
        let admitted = AdmittedRow {
            slot: Slot(0),
            generation: 1,
            tokens: vec![7; 20],
            prompt_len: 20,
            computed: 4,
            blocks: vec![BlockId(0), BlockId(1)],
            sampling: Sampling::greedy(),
            constrained: false,
            adapter: None,
        };
        let prefill =
            StepPlan { admitted: vec![admitted], rows: vec![row(16, true)], ..Default::default() };
        executor.launch(prefill).unwrap();
        // Each of the tokens 4 to 19 attends to itself and the tokens before it; half a token is
        // not counted.
        let wanted = StepWork { prefill_tokens: 16, prefill_pairs: 192, ..Default::default() };
        assert_eq!(executor.work(), wanted);
        let decode = |step_id| StepPlan { step_id, rows: vec![row(1, true)], ..Default::default() };
        executor.launch(decode(1)).unwrap();
        assert_eq!((executor.work().decode_rows, executor.work().context_tokens), (1, 21));
        let mut tokens = || {
            let result = executor.collect(Duration::ZERO).unwrap()?;
            Some((result.step_id, result.rows[0].tokens[0].id))
        };
        assert_eq!([tokens(), tokens(), tokens()], [Some((0, 20)), Some((1, 21)), None]);
    }
}
