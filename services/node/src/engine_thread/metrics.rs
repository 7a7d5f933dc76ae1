//! Records the measurements of the node core in the node's metrics.

use engine::{
    SpeculationStats, StepRecord,
    event::{FinishReason, Load},
    plan::Dispatch,
};
use kv_transfer::api::{TransferFailure, TransferStats};
use proto::v1::FailureKind;
use telemetry::{
    NodeMetrics,
    metrics::{LoadStats, SequenceEnd, StepDispatch, StepStats, TransferEnd, TransferSide},
};

use crate::node_core::{Metric, SequenceOutcome};

/// Records a measurement. Ignores [`Metric::Tier`].
pub(super) fn record(metrics: &NodeMetrics, metric: Metric) {
    match metric {
        Metric::QueueTime(waited) => metrics.queued(waited),
        Metric::PrefillTime(took) => metrics.prefilled(took),
        Metric::PrefixLookup { prompt_tokens, cached_tokens } => {
            metrics.prefix_lookup(prompt_tokens.into(), cached_tokens.into());
        }
        Metric::SequenceFinished(outcome) => metrics.sequence_ended(sequence_end(outcome)),
        Metric::Sent(ended) => record_transfer(metrics, TransferSide::Sender, &ended),
        Metric::Received(ended) => record_transfer(metrics, TransferSide::Receiver, &ended),
        Metric::Step(step) => metrics.step(&step_stats(&step)),
        Metric::Speculated(SpeculationStats { rows, drafted, accepted, accepted_at }) => {
            metrics.speculated(rows, drafted, accepted, &accepted_at);
        }
        Metric::Preempted(count) => metrics.preempted(count),
        Metric::Load(load) => metrics.set_load(&load_stats(&load)),
        // `TierMetrics` exports the statistics of KV tiers.
        Metric::Tier(..) => {}
    }
}

fn record_transfer(
    metrics: &NodeMetrics,
    side: TransferSide,
    ended: &Result<TransferStats, TransferFailure>,
) {
    let end = match ended {
        Ok(_) => TransferEnd::Complete,
        Err(TransferFailure::Refused { .. }) => TransferEnd::Refused,
        Err(TransferFailure::PeerLost { .. }) => TransferEnd::PeerLost,
        Err(TransferFailure::PeerAborted { .. } | TransferFailure::Aborted { .. }) => {
            TransferEnd::Aborted
        }
        Err(TransferFailure::Deadline { .. }) => TransferEnd::Deadline,
        Err(TransferFailure::Damaged { .. }) => TransferEnd::Damaged,
        Err(TransferFailure::Protocol { .. }) => TransferEnd::Protocol,
    };
    let stats = ended.as_ref().copied().unwrap_or_default();
    metrics.transfer_ended(side, end, stats.bytes, stats.elapsed);
}

fn sequence_end(outcome: SequenceOutcome) -> SequenceEnd {
    match outcome {
        SequenceOutcome::Finished(FinishReason::Stop) => SequenceEnd::Stop,
        SequenceOutcome::Finished(FinishReason::Length) => SequenceEnd::Length,
        SequenceOutcome::Finished(FinishReason::Abort) => SequenceEnd::WeightsChanged,
        SequenceOutcome::HandedOver => SequenceEnd::HandedOver,
        SequenceOutcome::Cancelled => SequenceEnd::Cancelled,
        SequenceOutcome::Failed(kind) => match kind {
            FailureKind::Busy => SequenceEnd::Busy,
            FailureKind::TransferFailed | FailureKind::Mismatch => SequenceEnd::TransferFailed,
            FailureKind::Deadline => SequenceEnd::Deadline,
            FailureKind::Invalid => SequenceEnd::Invalid,
            FailureKind::SlowReader => SequenceEnd::SlowReader,
            FailureKind::WeightsChanged => SequenceEnd::WeightsChanged,
            FailureKind::Draining => SequenceEnd::Cancelled,
            FailureKind::Internal | FailureKind::Unspecified => SequenceEnd::Internal,
        },
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
        expert_layers: step.experts.layers,
        experts_distinct: step.experts.distinct,
        expert_rows: step.experts.rows,
        expert_rows_max: step.experts.rows_max,
        busy: step.busy,
        plan: step.plan.duration(),
        launch: step.launch.duration(),
        collect: step.collect.duration(),
    }
}
