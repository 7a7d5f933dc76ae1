//! Metrics of a node.

use std::time::Duration;

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Gauge, Histogram},
};

use super::{FIRST_TOKEN_SECONDS, HOST_SECONDS, MASK_SECONDS, Metrics, STEP_SECONDS};

/// Outcome of a sequence at this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceEnd {
    Stop,
    Length,
    /// The prefill node sampled token 0 and transferred the KV.
    HandedOver,
    /// The router dropped the stream.
    Cancelled,
    Busy,
    TransferFailed,
    Deadline,
    Invalid,
    SlowReader,
    Internal,
}

impl SequenceEnd {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::HandedOver => "handed_over",
            Self::Cancelled => "cancelled",
            Self::Busy => "busy",
            Self::TransferFailed => "transfer_failed",
            Self::Deadline => "deadline",
            Self::Invalid => "invalid",
            Self::SlowReader => "slow_reader",
            Self::Internal => "internal",
        }
    }
}

/// Side of a transfer that this node has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferSide {
    Sender,
    Receiver,
}

/// Outcome of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferEnd {
    Complete,
    Aborted,
    PeerLost,
    Damaged,
    Deadline,
    Refused,
    Protocol,
}

impl TransferEnd {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Aborted => "aborted",
            Self::PeerLost => "peer_lost",
            Self::Damaged => "damaged",
            Self::Deadline => "deadline",
            Self::Refused => "refused",
            Self::Protocol => "protocol",
        }
    }
}

/// Current load of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadStats {
    pub running: u32,
    pub waiting: u32,
    pub pending_prompt_tokens: u64,
    pub blocks_free: u32,
    pub blocks_cached: u32,
    pub blocks_held: u32,
    pub blocks_reserved: u32,
}

/// Launch mode of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepDispatch {
    Eager,
    /// A CUDA graph, captured for this number of rows.
    Graph {
        rows: u32,
    },
    /// Eager, because no captured graph fits the step.
    Fallback,
}

/// Statistics of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepStats {
    pub rows: u32,
    pub tokens: u32,
    /// Rows computed only because the CUDA graph has more rows than the step.
    pub padding_rows: u32,
    pub dispatch: StepDispatch,
    /// Busy time of the device.
    pub busy: Duration,
    /// Time of the engine thread in each phase.
    pub plan: Duration,
    pub launch: Duration,
    pub collect: Duration,
}

/// The instruments of a node. Cheap to clone.
#[derive(Clone)]
pub struct NodeMetrics {
    model: KeyValue,
    sequences: Gauge<u64>,
    pending_prompt_tokens: Gauge<u64>,
    blocks: Gauge<u64>,
    kv_cache_usage: Gauge<f64>,
    mask_duration: Histogram<f64>,
    grammar_compile_duration: Histogram<f64>,
    step_duration: Histogram<f64>,
    step_host_duration: Histogram<f64>,
    /// Attributes of the phases plan, launch and collect.
    step_phases: [[KeyValue; 2]; 3],
    step_dispatches: Counter<u64>,
    step_padding_rows: Counter<u64>,
    steps: Counter<u64>,
    step_rows: Counter<u64>,
    step_tokens: Counter<u64>,
    queue_time: Histogram<f64>,
    prefill_time: Histogram<f64>,
    sequences_finished: Counter<u64>,
    prefix_queries: Counter<u64>,
    prefix_hits: Counter<u64>,
    preemptions: Counter<u64>,
    speculated_rows: Counter<u64>,
    speculated_drafted: Counter<u64>,
    speculated_accepted: Counter<u64>,
    speculated_accepted_at: Counter<u64>,
    transfers: Counter<u64>,
    transfer_bytes: Counter<u64>,
    transfer_duration: Histogram<f64>,
}

impl std::fmt::Debug for NodeMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeMetrics").field("model", &self.model).finish_non_exhaustive()
    }
}

impl NodeMetrics {
    /// Creates the instruments for a model by its served name.
    pub fn new(metrics: &Metrics, model: &str) -> Self {
        let meter = metrics.meter();
        let seconds = |name: &'static str, description: &'static str, bounds: &[f64]| {
            meter
                .f64_histogram(name)
                .with_unit("s")
                .with_description(description)
                .with_boundaries(bounds.to_vec())
                .build()
        };
        let counter = |name: &'static str, description: &'static str| {
            meter.u64_counter(name).with_description(description).build()
        };
        let gauge = |name: &'static str, description: &'static str| {
            meter.u64_gauge(name).with_description(description).build()
        };
        let model = KeyValue::new("gen_ai.request.model", model.to_owned());
        let metrics = Self {
            step_phases: ["plan", "launch", "collect"]
                .map(|phase| [model.clone(), KeyValue::new("phase", phase)]),
            model,
            sequences: gauge("baton.sequences", "Sequences on this node, by state"),
            pending_prompt_tokens: gauge(
                "baton.pending_prompt_tokens",
                "Prompt tokens that are not prefilled yet",
            ),
            blocks: gauge("baton.kv_blocks", "KV blocks, by state"),
            kv_cache_usage: meter
                .f64_gauge("baton.kv_cache_usage")
                .with_description("Fraction of KV blocks that are held or reserved")
                .build(),
            mask_duration: seconds(
                "baton.grammar.mask.duration",
                "Time to compute the token bitmask of a grammar for one step",
                &MASK_SECONDS,
            ),
            grammar_compile_duration: seconds(
                "baton.grammar.compile.duration",
                "Time to compile a grammar, without its first token bitmask",
                &STEP_SECONDS,
            ),
            step_duration: seconds("baton.step.duration", "Device time of one step", &STEP_SECONDS),
            step_host_duration: seconds(
                "baton.step.host.duration",
                "Engine thread time of one step by phase, without waiting for the device",
                &HOST_SECONDS,
            ),
            step_dispatches: counter(
                "baton.step.dispatches",
                "Steps by launch mode: eager, graph (by its rows), or fallback (eager because no CUDA graph fits)",
            ),
            step_padding_rows: counter(
                "baton.step.padding_rows",
                "Padding rows computed because a CUDA graph has more rows than the step",
            ),
            steps: counter("baton.steps", "Steps (forward passes)"),
            step_rows: counter("baton.step.rows", "Rows of all steps"),
            step_tokens: counter("baton.step.tokens", "Tokens of all steps"),
            queue_time: seconds(
                "baton.sequence.queue_time",
                "From a sequence's arrival to its first step",
                &FIRST_TOKEN_SECONDS,
            ),
            prefill_time: seconds(
                "baton.sequence.prefill_time",
                "From a sequence's first step to its first token",
                &FIRST_TOKEN_SECONDS,
            ),
            sequences_finished: counter(
                "baton.sequences.finished",
                "Finished sequences, by outcome",
            ),
            prefix_queries: counter(
                "baton.prefix_cache.queries",
                "Prompt tokens looked up in the prefix cache",
            ),
            prefix_hits: counter(
                "baton.prefix_cache.hits",
                "Prompt tokens found in the prefix cache",
            ),
            preemptions: counter(
                "baton.preemptions",
                "Sequences preempted because no KV block was free",
            ),
            speculated_rows: counter("baton.speculation.rows", "Rows of steps with draft tokens"),
            speculated_drafted: counter(
                "baton.speculation.drafted",
                "Draft tokens proposed by speculative decoding",
            ),
            speculated_accepted: counter("baton.speculation.accepted", "Draft tokens accepted"),
            speculated_accepted_at: counter(
                "baton.speculation.accepted_at",
                "Draft tokens accepted, by position in the row from 0",
            ),
            transfers: counter("baton.kv_transfers", "KV transfers, by side and outcome"),
            transfer_bytes: counter("baton.kv_transfer.bytes", "KV bytes transferred, by side"),
            transfer_duration: seconds(
                "baton.kv_transfer.duration",
                "Duration of complete KV transfers, by side",
                &STEP_SECONDS,
            ),
        };
        // Rates and alerts need a first value: counters start at 0 instead of being absent.
        for counter in [&metrics.preemptions, &metrics.prefix_queries, &metrics.prefix_hits] {
            counter.add(0, std::slice::from_ref(&metrics.model));
        }
        metrics
    }

    /// Sets the load that the node also reports to routers.
    pub fn set_load(&self, load: &LoadStats) {
        let state = |name| [self.model.clone(), KeyValue::new("state", name)];
        self.sequences.record(load.running.into(), &state("running"));
        self.sequences.record(load.waiting.into(), &state("waiting"));
        let model = std::slice::from_ref(&self.model);
        self.pending_prompt_tokens.record(load.pending_prompt_tokens, model);
        let blocks = [
            ("free", load.blocks_free),
            ("cached", load.blocks_cached),
            ("held", load.blocks_held),
            ("reserved", load.blocks_reserved),
        ];
        for (name, count) in blocks {
            self.blocks.record(count.into(), &state(name));
        }
        let total: u64 = blocks.iter().map(|(_, count)| u64::from(*count)).sum();
        let used = u64::from(load.blocks_held) + u64::from(load.blocks_reserved);
        self.kv_cache_usage.record(used as f64 / total.max(1) as f64, model);
    }

    /// Records a collected step.
    pub fn step(&self, step: &StepStats) {
        let model = std::slice::from_ref(&self.model);
        self.step_duration.record(step.busy.as_secs_f64(), model);
        for (time, phase) in [step.plan, step.launch, step.collect].iter().zip(&self.step_phases) {
            self.step_host_duration.record(time.as_secs_f64(), phase);
        }
        let mode = |mode| KeyValue::new("mode", mode);
        match step.dispatch {
            StepDispatch::Eager => {
                self.step_dispatches.add(1, &[self.model.clone(), mode("eager")])
            }
            StepDispatch::Fallback => {
                self.step_dispatches.add(1, &[self.model.clone(), mode("fallback")]);
            }
            StepDispatch::Graph { rows } => {
                let rows = KeyValue::new("rows", i64::from(rows));
                self.step_dispatches.add(1, &[self.model.clone(), mode("graph"), rows]);
            }
        }
        self.step_padding_rows.add(step.padding_rows.into(), model);
        self.steps.add(1, model);
        self.step_rows.add(step.rows.into(), model);
        self.step_tokens.add(step.tokens.into(), model);
    }

    /// Records the computation of a token bitmask, also a failed one.
    pub fn mask_computed(&self, took: Duration) {
        self.mask_duration.record(took.as_secs_f64(), std::slice::from_ref(&self.model));
    }

    /// Records the compilation of a grammar, also a rejected one.
    pub fn grammar_compiled(&self, took: Duration) {
        let model = std::slice::from_ref(&self.model);
        self.grammar_compile_duration.record(took.as_secs_f64(), model);
    }

    /// Records the time from the arrival of a sequence to its first step.
    pub fn queued(&self, waited: Duration) {
        self.queue_time.record(waited.as_secs_f64(), std::slice::from_ref(&self.model));
    }

    /// Records the time from the begin of a sequence's first step to its first token.
    pub fn prefilled(&self, took: Duration) {
        self.prefill_time.record(took.as_secs_f64(), std::slice::from_ref(&self.model));
    }

    pub fn sequence_ended(&self, end: SequenceEnd) {
        let outcome = KeyValue::new("outcome", end.as_str());
        self.sequences_finished.add(1, &[self.model.clone(), outcome]);
    }

    /// Records a prefix cache lookup: `hit_tokens` of `prompt_tokens` were cached.
    pub fn prefix_lookup(&self, prompt_tokens: u64, hit_tokens: u64) {
        let model = std::slice::from_ref(&self.model);
        self.prefix_queries.add(prompt_tokens, model);
        self.prefix_hits.add(hit_tokens, model);
    }

    pub fn preempted(&self, count: u64) {
        self.preemptions.add(count, std::slice::from_ref(&self.model));
    }

    /// Records speculative decoding over some steps: rows with draft tokens, draft tokens, accepted
    /// draft tokens, and the accepted ones by position in the row.
    pub fn speculated(&self, rows: u64, drafted: u64, accepted: u64, accepted_at: &[u64]) {
        let model = std::slice::from_ref(&self.model);
        self.speculated_rows.add(rows, model);
        self.speculated_drafted.add(drafted, model);
        self.speculated_accepted.add(accepted, model);
        for (position, &count) in accepted_at.iter().enumerate() {
            let position = KeyValue::new("position", position as i64);
            self.speculated_accepted_at.add(count, &[self.model.clone(), position]);
        }
    }

    /// Records a transfer with the bytes that it moved, complete or not.
    pub fn transfer_ended(&self, side: TransferSide, end: TransferEnd, bytes: u64, took: Duration) {
        let side = KeyValue::new(
            "side",
            match side {
                TransferSide::Sender => "sender",
                TransferSide::Receiver => "receiver",
            },
        );
        let attributes = [self.model.clone(), side];
        self.transfer_bytes.add(bytes, &attributes);
        if end == TransferEnd::Complete {
            self.transfer_duration.record(took.as_secs_f64(), &attributes);
        }
        let [model, side] = attributes;
        self.transfers.add(1, &[model, side, KeyValue::new("outcome", end.as_str())]);
    }
}
