//! Statistics of finished steps.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use crate::plan::{Dispatch, Span, StepId};

/// Which phases the rows of a step belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// Every row prefills.
    Prefill,
    /// Some rows prefill and some decode.
    Mixed,
    /// Every row decodes.
    Decode,
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
    pub dispatch: Dispatch,
    pub uploaded_bytes: u64,
    /// Time the device worked on the step.
    pub busy: Duration,
    /// When the engine thread planned the step.
    pub plan: Span,
    /// When the engine thread launched the step.
    pub launch: Span,
    /// When the engine thread processed the result. The wait for the result is not part of it.
    pub collect: Span,
    /// When the device worked on the step, if the executor reports it.
    pub device: Option<Span>,
    /// When the results were in host memory, if the executor reports it.
    pub landed_at: Option<Instant>,
}

impl StepRecord {
    /// Returns the rows that a CUDA graph computed beyond the rows of the step.
    pub fn padding_rows(&self) -> u32 {
        match self.dispatch {
            Dispatch::Graph { rows } => rows.saturating_sub(self.rows),
            Dispatch::Eager | Dispatch::Fallback => 0,
        }
    }
}

/// Bounded queue of step records with one reader. When the queue is full, the oldest record is dropped
/// and counted.
#[derive(Debug)]
pub(crate) struct StepRecords {
    queue: VecDeque<StepRecord>,
    capacity: usize,
    dropped: u64,
}

impl StepRecords {
    pub(crate) fn new(capacity: usize) -> Self {
        assert!(capacity > 0, "a queue holds at least one record");
        Self { queue: VecDeque::with_capacity(capacity), capacity, dropped: 0 }
    }

    pub(crate) fn push(&mut self, record: StepRecord) {
        if self.queue.len() == self.capacity {
            self.queue.pop_front();
            self.dropped += 1;
        }
        self.queue.push_back(record);
    }

    /// Takes the oldest record.
    pub(crate) fn pop(&mut self) -> Option<StepRecord> {
        self.queue.pop_front()
    }

    /// Takes the number of records dropped since the last call.
    pub(crate) fn take_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step_id: StepId) -> StepRecord {
        let now = Instant::now();
        let span = Span { begin: now, end: now };
        StepRecord {
            step_id,
            rows: 5,
            tokens: 5,
            sampled: 5,
            kind: StepKind::Decode,
            dispatch: Dispatch::Eager,
            uploaded_bytes: 0,
            busy: Duration::ZERO,
            plan: span,
            launch: span,
            collect: span,
            device: None,
            landed_at: None,
        }
    }

    #[test]
    fn full_queue_drops_and_counts_the_oldest_records() {
        let mut records = StepRecords::new(4);
        (0..3).for_each(|id| records.push(record(id)));
        assert_eq!(records.pop().map(|record| record.step_id), Some(0));
        (3..9).for_each(|id| records.push(record(id)));
        assert_eq!((records.take_dropped(), records.take_dropped()), (4, 0));
        let kept = std::iter::from_fn(|| records.pop()).map(|record| record.step_id);
        assert!(kept.eq(5..9));
    }

    #[test]
    fn graph_with_more_rows_than_the_step_has_padding_rows() {
        let padding = |dispatch| StepRecord { dispatch, ..record(0) }.padding_rows();
        assert_eq!(padding(Dispatch::Graph { rows: 8 }), 3);
        assert_eq!(padding(Dispatch::Fallback), 0);
    }
}
