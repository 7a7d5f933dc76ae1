//! Statistics of finished steps.

use std::time::{Duration, Instant};

use kernels::backend::ExpertLoad;

use crate::plan::{Dispatch, Span, StepId};

/// Phases of the rows of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// Every row prefills.
    Prefill,
    /// Some rows prefill and some decode.
    Mixed,
    /// Every row decodes.
    Decode,
}

/// Work of a step, on which its time depends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    pub prefill_tokens: u32,
    /// Token pairs of prefill attention: for each prefilled token, the tokens up to it.
    pub prefill_pairs: u64,
    pub decode_rows: u32,
    /// KV tokens that the decode rows attend to.
    pub context_tokens: u64,
}

/// Statistics of one collected step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRecord {
    pub step_id: StepId,
    /// Rows of the forward pass.
    pub rows: u32,
    /// Tokens of all rows, draft tokens included.
    pub tokens: u32,
    /// Rows that sampled.
    pub sampled: u32,
    pub kind: StepKind,
    pub work: StepWork,
    pub dispatch: Dispatch,
    pub uploaded_bytes: u64,
    /// Load of the experts; zero without experts and on GPUs, which do not report it.
    pub experts: ExpertLoad,
    /// Time the device worked on the step, without its wait for token bitmasks.
    pub busy: Duration,
    /// When the engine thread planned the step.
    pub plan: Span,
    /// When the engine thread launched the step.
    pub launch: Span,
    /// When the engine thread processed the result. The wait for the result is not part of it.
    pub collect: Span,
    /// When the device worked on the step, its wait for token bitmasks included, if the executor
    /// reports it.
    pub device: Option<Span>,
    /// When the results were in host memory, if the executor reports it.
    pub results_at: Option<Instant>,
}

impl StepRecord {
    /// Returns how long the device waited for token bitmasks.
    pub fn mask_wait(&self) -> Duration {
        self.device.map_or(Duration::ZERO, |device| device.duration().saturating_sub(self.busy))
    }

    /// Returns the rows that a CUDA graph computed beyond the rows of the step.
    pub fn padding_rows(&self) -> u32 {
        match self.dispatch {
            Dispatch::Graph { rows } => rows.saturating_sub(self.rows),
            Dispatch::Eager | Dispatch::Fallback => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> StepRecord {
        let now = Instant::now();
        let span = Span { begin: now, end: now };
        StepRecord {
            step_id: 0,
            rows: 5,
            tokens: 5,
            sampled: 5,
            kind: StepKind::Decode,
            work: StepWork::default(),
            dispatch: Dispatch::Eager,
            uploaded_bytes: 0,
            experts: ExpertLoad::default(),
            busy: Duration::ZERO,
            plan: span,
            launch: span,
            collect: span,
            device: None,
            results_at: None,
        }
    }

    #[test]
    fn wait_for_token_bitmasks_is_the_time_in_which_the_device_did_not_work() {
        let begin = Instant::now();
        let device = Some(Span { begin, end: begin + Duration::from_millis(9) });
        let waited = StepRecord { busy: Duration::from_millis(5), device, ..record() };
        assert_eq!(waited.mask_wait(), Duration::from_millis(4));
        assert_eq!(record().mask_wait(), Duration::ZERO);
    }

    #[test]
    fn graph_with_more_rows_than_the_step_has_padding_rows() {
        let record = record();
        let padding = |dispatch| StepRecord { dispatch, ..record }.padding_rows();
        assert_eq!(padding(Dispatch::Graph { rows: 8 }), 3);
        assert_eq!(padding(Dispatch::Fallback), 0);
    }
}
