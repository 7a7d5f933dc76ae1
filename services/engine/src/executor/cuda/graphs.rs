//! CUDA graphs of decode steps, captured before serving and replayed.
//!
//! A graph has a fixed number of rows. A graph that verifies draft tokens has a fixed number of
//! tokens per row, too. With slots of adapters there are two graphs of each size: one adds the
//! updates of adapters, the other serves steps without adapters. A decode step is padded to the
//! next larger graph. Padding rows write to a KV block that no sequence uses. The inputs of a step
//! are on the device, so a replay needs only the step's plan.
//!
//! Steps with prefill rows are launched kernel by kernel: their shapes vary, and their kernels run
//! longer than a launch takes.

use std::time::Instant;

use kernels::{
    BlockId,
    cuda::{
        Admission, CudaBackend, CudaError, DeviceBatch, DeviceClock, Drafts, Graph, StepInput,
        StepRows,
    },
    sampling::Sampling,
};
use model::Transformer;

use super::super::ExecutorLimits;
use crate::plan::{Dispatch, StepPlan};

/// Maximum rows of a captured step. Larger decode steps are launched kernel by kernel: launches are
/// a small part of their time.
const ROWS_MAX: u32 = 512;

#[derive(Debug)]
pub(super) struct Graphs {
    /// Numbers of rows that decode steps are padded to, ascending, each with its graphs if they were
    /// captured.
    sizes: Vec<(u32, Option<SizeGraphs>)>,
    /// Numbers of rows and tokens per row of steps with draft tokens, ascending, each with its
    /// graphs if they were captured.
    verifying: Vec<((u32, u32), Option<SizeGraphs>)>,
    /// Whether the configuration enables CUDA graphs.
    is_on: bool,
    limits: ExecutorLimits,
}

/// Graphs of steps of one size.
#[derive(Debug)]
struct SizeGraphs {
    base: Graph,
    /// Graph of steps with adapters; `None` without slots of adapters.
    adapted: Option<Graph>,
}

/// Model, backend and batch that run the forward passes of a capture.
pub(super) struct CaptureTarget<'a> {
    pub model: &'a mut Transformer<CudaBackend>,
    pub backend: &'a mut CudaBackend,
    pub batch: &'a mut DeviceBatch,
    pub clock: &'a mut DeviceClock,
}

impl CaptureTarget<'_> {
    /// Prefills one prompt of `tokens` tokens in the first slot.
    fn prefill(&mut self, tokens: u32, has_adapters: bool) -> Result<(), CudaError> {
        let entries =
            self.model.config().kv_groups(self.backend.options().kv).entries(tokens as usize);
        let blocks: Vec<_> = (0..entries as u32).map(BlockId).collect();
        let admission = Admission {
            slot: 0,
            tokens: &vec![0; tokens as usize],
            prompt_len: tokens,
            position: 0,
            blocks: &blocks,
            sampling: &Sampling::greedy(),
            adapter: None,
        };
        let sequence = StepRows { slot: 0, position: 0, rows: tokens, samples: 1 };
        let (admissions, sequences) = (&[admission][..], &[sequence][..]);
        self.step(&StepInput { admissions, sequences, has_adapters, ..EMPTY })
    }

    /// Runs a decode step, and captures its graphs if `captures`. With `drafts`, the step verifies
    /// draft tokens.
    fn capture(
        &mut self,
        rows: u32,
        drafts: Option<Drafts>,
        captures: bool,
    ) -> Result<Option<SizeGraphs>, CudaError> {
        let base = self.capture_with(rows, drafts, captures, false)?;
        let adapted = match self.backend.has_adapter_slots() {
            true => self.capture_with(rows, drafts, captures, true)?,
            false => None,
        };
        Ok(base.map(|base| SizeGraphs { base, adapted }))
    }

    fn capture_with(
        &mut self,
        rows: u32,
        drafts: Option<Drafts>,
        captures: bool,
        has_adapters: bool,
    ) -> Result<Option<Graph>, CudaError> {
        self.step(&StepInput { rows_min: rows, drafts, has_adapters, ..EMPTY })?;
        if !captures {
            return Ok(None);
        }
        let Self { model, backend, batch, .. } = self;
        let verified = drafts.map_or(0, |drafts| drafts.rows);
        let mut step = batch.filling(rows, verified, has_adapters);
        backend.capture(|backend| _ = model.forward(backend, &mut step)).map(Some)
    }

    /// Runs one step and waits for it.
    fn step(&mut self, input: &StepInput<'_>) -> Result<(), CudaError> {
        let Self { model, backend, batch, clock } = self;
        let mut step = batch.begin(backend, input)?;
        let logits = model.forward(backend, &mut step);
        backend.check()?;
        batch.sample(backend, logits, &step)?;
        let frame = batch.end(backend, input.step_id, vec![false; input.sequences.len()])?;
        batch.recycle(frame.finish(clock)?.output);
        Ok(())
    }
}

impl Graphs {
    /// Runs a forward pass of every kind, so that no kernel is loaded or selected while serving,
    /// and captures CUDA graphs of decode steps if enabled and supported. Serving overwrites the KV
    /// written here.
    pub(super) fn capture(
        mut parts: CaptureTarget<'_>,
        limits: &ExecutorLimits,
    ) -> Result<Self, CudaError> {
        let started = Instant::now();
        let longest = limits.step_tokens.min(limits.sequence_tokens);
        let groups = parts.model.config().kv_groups(parts.backend.options().kv);
        let longest =
            longest.min(u32::try_from(groups.tokens(limits.blocks as usize)).unwrap_or(u32::MAX));
        for tokens in [longest, longest.min(32)] {
            parts.prefill(tokens, false)?;
            if parts.backend.has_adapter_slots() {
                parts.prefill(tokens, true)?;
            }
        }
        let prefilled = started.elapsed();
        let heads = parts.model.config().head_shape_of(parts.model.shard());
        let is_on = parts.backend.options().graphs;
        let can_capture = is_on && parts.backend.can_capture(heads);
        let rows_max = limits.slots.min(limits.step_tokens);
        let mut sizes = Vec::new();
        // Capture the largest graph first: it needs the largest shared workspace.
        for rows in decode_sizes(rows_max).into_iter().rev() {
            sizes.push((rows, parts.capture(rows, None, can_capture)?));
        }
        sizes.reverse();
        let mut verifying = Vec::new();
        for (rows, tokens) in limits.verified_sizes() {
            let drafts = Some(Drafts { rows: tokens, ngram_min: 1, ngram_max: 1 });
            verifying.push(((rows, tokens), parts.capture(rows, drafts, is_on)?));
        }
        tracing::info!(
            captured = sizes.iter().filter(|(_, graph)| graph.is_some()).count(),
            verifying = verifying.len(),
            prefill_s = prefilled.as_secs_f64(),
            decode_s = (started.elapsed() - prefilled).as_secs_f64(),
            "warmed up the GPU"
        );
        Ok(Self { sizes, verifying, is_on, limits: *limits })
    }

    /// Returns the tokens per row of a step that verifies draft tokens. Returns 0 for a step that
    /// has no draft tokens, has prefill rows, or has too many rows.
    pub(super) fn verified_tokens(&self, plan: &StepPlan) -> u32 {
        let wanted = plan.rows.iter().map(|row| row.drafts_max).max().unwrap_or(0);
        if plan.drafts_max == 0 || wanted == 0 || !is_decode(plan) {
            return 0;
        }
        self.limits.verified_tokens(plan.rows.len() as u32, wanted)
    }

    /// Returns whether a step without draft tokens replays a graph. A graph reads the lengths of
    /// the rows from the device.
    pub(super) fn replays(&self, plan: &StepPlan) -> bool {
        let fits = |(rows, graphs): &(u32, Option<SizeGraphs>)| {
            *rows >= plan.rows.len() as u32 && graphs.is_some()
        };
        is_decode(plan) && self.sizes.iter().any(fits)
    }

    /// Returns the number of rows that a step is padded to (0: no padding) and how to launch the
    /// step.
    pub(super) fn dispatch(&self, sequences: &[StepRows], verified: u32) -> (u32, Dispatch) {
        if verified > 0 && !sequences.is_empty() {
            let fits = |size: &&((u32, u32), Option<SizeGraphs>)| {
                size.0.1 == verified && size.0.0 >= sequences.len() as u32
            };
            return match self.verifying.iter().find(fits) {
                Some(((rows, _), Some(_))) => (*rows, Dispatch::Graph { rows: *rows }),
                _ => (0, Dispatch::Eager),
            };
        }
        let is_decode =
            sequences.iter().all(|sequence| (sequence.rows, sequence.samples) == (1, 1));
        if sequences.is_empty() || !is_decode {
            return (0, Dispatch::Eager);
        }
        let none = if self.is_on { Dispatch::Fallback } else { Dispatch::Eager };
        match self.sizes.iter().find(|(rows, _)| *rows >= sequences.len() as u32) {
            None => (0, none),
            Some((rows, None)) => (*rows, none),
            Some((rows, Some(_))) => (*rows, Dispatch::Graph { rows: *rows }),
        }
    }

    /// Returns the graph to replay a step with.
    pub(super) fn of(
        &mut self,
        dispatch: Dispatch,
        verified: u32,
        has_adapters: bool,
    ) -> Option<&mut Graph> {
        let Dispatch::Graph { rows } = dispatch else { return None };
        let graphs = if verified > 0 {
            let size = (rows, verified);
            let place = self.verifying.binary_search_by_key(&size, |(size, _)| *size).ok()?;
            self.verifying[place].1.as_mut()?
        } else {
            let place = self.sizes.binary_search_by_key(&rows, |(rows, _)| *rows).ok()?;
            self.sizes[place].1.as_mut()?
        };
        if has_adapters { graphs.adapted.as_mut() } else { Some(&mut graphs.base) }
    }
}

const EMPTY: StepInput<'_> = StepInput {
    step_id: 0,
    admissions: &[],
    extensions: &[],
    sequences: &[],
    rows_min: 0,
    drafts: None,
    known_drafts: &[],
    has_adapters: false,
};

/// Returns whether every row decodes.
fn is_decode(plan: &StepPlan) -> bool {
    plan.rows.iter().all(|row| row.token_count == 1 && row.samples)
}

/// Returns the numbers of rows that decode steps are padded to, ascending.
fn decode_sizes(rows_max: u32) -> Vec<u32> {
    let rows_max = rows_max.min(ROWS_MAX);
    let mut sizes: Vec<_> = [1, 2, 4]
        .into_iter()
        .chain((8..256).step_by(8))
        .chain((256..=ROWS_MAX).step_by(16))
        .take_while(|rows| *rows < rows_max)
        .collect();
    sizes.push(rows_max);
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        executor::Speculation,
        plan::{RowPlan, Slot},
    };

    const LIMITS: ExecutorLimits = ExecutorLimits {
        slots: 6,
        step_tokens: 64,
        sequence_tokens: 64,
        blocks: 8,
        depth: 2,
        vocabulary: 100,
        speculation: None,
    };

    #[test]
    fn every_number_of_rows_has_a_graph_with_little_padding() {
        for rows_max in [1, 2, 3, 7, 8, 100, 256, 500, 512, 4096] {
            let sizes = decode_sizes(rows_max);
            assert!(sizes.is_sorted_by(|a, b| a < b), "{sizes:?}");
            assert_eq!(*sizes.last().unwrap(), rows_max.min(ROWS_MAX));
            for rows in 1..=rows_max.min(ROWS_MAX) {
                let size = sizes.iter().find(|size| **size >= rows).unwrap();
                assert!(size - rows < 16 && *size <= 2 * rows, "{rows} rows in {size}");
            }
        }
    }

    #[test]
    fn steps_with_draft_tokens_take_the_next_larger_size_that_fits() {
        let speculation = Speculation {
            row_drafts: 6,
            step_tokens: 20,
            ngram_min: 1,
            ngram_max: 1,
            uniform: true,
        };
        let limits = ExecutorLimits { speculation: Some(speculation), ..LIMITS };
        let sizes = limits.verified_sizes();
        let few = [1, 2].into_iter().flat_map(|rows| [2, 3, 5, 7].map(|tokens| (rows, tokens)));
        let many = [(4, 2), (4, 3), (4, 5), (6, 2), (6, 3)];
        assert_eq!(sizes, few.chain(many).collect::<Vec<_>>());
        let verifying = sizes.into_iter().map(|size| (size, None)).collect();
        let graphs = Graphs { sizes: vec![(6, None)], verifying, is_on: true, limits };
        let row = |drafts_max| RowPlan {
            slot: Slot(0),
            generation: 0,
            token_count: 1,
            samples: true,
            drafts_max,
        };
        let plan = |rows: &[RowPlan]| StepPlan {
            rows: rows.to_vec(),
            drafts_max: 20,
            ..StepPlan::default()
        };
        let of = |drafts: &[u32]| {
            graphs.verified_tokens(&plan(
                &drafts.iter().map(|drafts| row(*drafts)).collect::<Vec<_>>(),
            ))
        };
        assert_eq!((of(&[1]), of(&[3]), of(&[6]), of(&[0])), (2, 5, 7, 0));
        assert_eq!((of(&[6, 1, 0]), of(&[2, 1, 0]), of(&[6; 5]), of(&[1; 7])), (5, 3, 3, 0));
        let mixed = plan(&[row(3), RowPlan { token_count: 9, ..row(0) }]);
        assert_eq!(graphs.verified_tokens(&mixed), 0, "a step with prefill rows");
        assert_eq!(graphs.verified_tokens(&StepPlan { drafts_max: 0, ..plan(&[row(3)]) }), 0);
        let sequence = StepRows { slot: 0, position: 9, rows: 4, samples: 4 };
        assert_eq!(graphs.dispatch(&[sequence; 3], 5), (0, Dispatch::Eager), "nothing is captured");
    }

    #[test]
    fn decode_steps_are_padded_and_prefill_steps_are_not() {
        let sizes = || vec![(1, None), (2, None), (4, None)];
        let mut graphs =
            Graphs { sizes: sizes(), verifying: Vec::new(), is_on: true, limits: LIMITS };
        let row = |slot| StepRows { slot, position: 9, rows: 1, samples: 1 };
        let rows: Vec<_> = (0..5).map(row).collect();
        let prompt = StepRows { rows: 7, samples: 0, ..row(0) };
        assert_eq!(graphs.dispatch(&rows[..3], 0), (4, Dispatch::Fallback));
        assert_eq!(graphs.dispatch(&rows[..1], 0), (1, Dispatch::Fallback));
        assert_eq!(graphs.dispatch(&rows, 0), (0, Dispatch::Fallback));
        assert_eq!(graphs.dispatch(&[], 0), (0, Dispatch::Eager));
        assert_eq!(graphs.dispatch(&[rows[1], prompt], 0), (0, Dispatch::Eager));
        assert!(graphs.of(Dispatch::Graph { rows: 4 }, 0, false).is_none());
        assert!(graphs.of(Dispatch::Graph { rows: 3 }, 0, false).is_none());
        graphs.is_on = false;
        assert_eq!(graphs.dispatch(&rows[..3], 0), (4, Dispatch::Eager));
    }
}
