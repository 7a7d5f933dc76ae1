//! Records the measurements of the core in the node's instruments.

use engine::{Speculated, StepRecord, event::Load, plan::Dispatch};
use telemetry::{
    NodeMetrics,
    metrics::{LoadStats, StepDispatch, StepStats},
};

use crate::node_core::Metric;

/// Records a measurement that is not of a KV tier.
pub(super) fn record(metrics: &NodeMetrics, metric: Metric) {
    match metric {
        Metric::QueueTime(waited) => metrics.queued(waited),
        Metric::PrefillTime(took) => metrics.prefilled(took),
        Metric::PrefixLookup { prompt_tokens, cached_tokens } => {
            metrics.prefix_lookup(prompt_tokens.into(), cached_tokens.into());
        }
        Metric::SequenceFinished(end) => metrics.sequence_ended(end),
        Metric::TransferFinished { side, end, stats } => {
            metrics.transfer_ended(side, end, stats.bytes, stats.elapsed);
        }
        Metric::Step(step) => metrics.step(&step_stats(&step)),
        Metric::Speculated(Speculated { rows, drafted, accepted, accepted_at }) => {
            metrics.speculated(rows, drafted, accepted, &accepted_at);
        }
        Metric::Preempted(count) => metrics.preempted(count),
        Metric::Load(load) => metrics.set_load(&load_stats(&load)),
        // `TierMetrics` exports these statistics.
        Metric::Tier(..) => {}
    }
}

fn load_stats(load: &Load) -> LoadStats {
    LoadStats {
        running: load.running,
        waiting: load.waiting,
        pending_prompt_tokens: load.pending_prompt_tokens,
        blocks_free: load.blocks_free,
        blocks_cached: load.blocks_cached,
        blocks_kept: load.blocks_kept,
        blocks_held: load.blocks_held,
        blocks_reserved: load.blocks_reserved,
    }
}

fn step_stats(step: &StepRecord) -> StepStats {
    StepStats {
        rows: step.rows,
        tokens: step.tokens,
        padding_rows: step.padding_rows(),
        dispatch: match step.dispatch {
            Dispatch::Eager => StepDispatch::Eager,
            Dispatch::Graph { rows } => StepDispatch::Graph { rows },
            Dispatch::Fallback => StepDispatch::Fallback,
        },
        busy: step.busy,
        plan: step.plan.duration(),
        launch: step.launch.duration(),
        collect: step.collect.duration(),
    }
}
