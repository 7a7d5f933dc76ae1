//! Metrics of a node.

use std::time::Duration;

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Gauge, Histogram},
};

use super::{
    FIRST_TOKEN_SECONDS, HOST_SECONDS, MASK_SECONDS, Metrics, STEP_SECONDS, labels::Series,
};

labels! {
    /// Outcome of a sequence at this node.
    pub enum SequenceEnd("outcome") {
        Stop = "stop",
        Length = "length",
        /// The prefill node sampled token 0 and transferred the KV.
        HandedOver = "handed_over",
        /// The router dropped the stream.
        Cancelled = "cancelled",
        Busy = "busy",
        TransferFailed = "transfer_failed",
        Deadline = "deadline",
        Invalid = "invalid",
        SlowReader = "slow_reader",
        /// The node's weights changed while the KV was transferred.
        WeightsChanged = "weights_changed",
        Internal = "internal",
    }
}

labels! {
    /// This node's side of a transfer.
    pub enum TransferSide("side") {
        Sender = "sender",
        Receiver = "receiver",
    }
}

labels! {
    /// Outcome of a transfer.
    pub enum TransferEnd("outcome") {
        Complete = "complete",
        Aborted = "aborted",
        PeerLost = "peer_lost",
        Damaged = "damaged",
        Deadline = "deadline",
        Refused = "refused",
        Protocol = "protocol",
    }
}

labels! {
    /// Reason why a node rejected a call because of its token.
    pub enum TokenRejection("reason") {
        Missing = "missing",
        Malformed = "malformed",
        /// Another cluster secret, or a token for another call.
        Secret = "secret",
        OtherNode = "other_node",
        Expired = "expired",
        Replayed = "replayed",
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
    /// Part of `blocks_cached`.
    pub blocks_kept: u32,
    pub blocks_held: u32,
    pub blocks_reserved: u32,
}

labels! {
    /// Launch mode of a step.
    enum DispatchMode("mode") {
        Eager = "eager",
        Graph = "graph",
        Fallback = "fallback",
    }
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
#[derive(Clone, Debug)]
pub struct NodeMetrics {
    model: KeyValue,
    sequences: Gauge<u64>,
    pending_prompt_tokens: Gauge<u64>,
    blocks: Gauge<u64>,
    blocks_kept: Gauge<u64>,
    kv_cache_usage: Gauge<f64>,
    mask_duration: Histogram<f64>,
    grammar_compile_duration: Histogram<f64>,
    step_duration: Histogram<f64>,
    step_host_duration: Histogram<f64>,
    /// Attributes of the phases plan, launch and collect.
    step_phases: [[KeyValue; 2]; 3],
    step_dispatches: Series<Counter<u64>, DispatchMode>,
    step_padding_rows: Series<Counter<u64>, ()>,
    steps: Series<Counter<u64>, ()>,
    step_rows: Series<Counter<u64>, ()>,
    step_tokens: Series<Counter<u64>, ()>,
    queue_time: Histogram<f64>,
    prefill_time: Histogram<f64>,
    sequences_finished: Series<Counter<u64>, SequenceEnd>,
    prefix_queries: Series<Counter<u64>, ()>,
    prefix_hits: Series<Counter<u64>, ()>,
    preemptions: Series<Counter<u64>, ()>,
    speculated_rows: Series<Counter<u64>, ()>,
    speculated_drafted: Series<Counter<u64>, ()>,
    speculated_accepted: Series<Counter<u64>, ()>,
    /// By position in the row.
    speculated_accepted_at: Vec<Series<Counter<u64>, ()>>,
    calls_rejected: Series<Counter<u64>, TokenRejection>,
    transfers: Series<Counter<u64>, (TransferSide, TransferEnd)>,
    transfer_bytes: Series<Counter<u64>, TransferSide>,
    transfer_duration: Histogram<f64>,
}

impl NodeMetrics {
    /// Creates the instruments for a model by its served name. `row_drafts_max`: largest number of draft tokens of a row.
    pub fn new(factory: &Metrics, model: &str, row_drafts_max: u32) -> Self {
        let model = KeyValue::new("gen_ai.request.model", model.to_owned());
        let of_model = std::slice::from_ref(&model);
        Self {
            step_phases: ["plan", "launch", "collect"]
                .map(|phase| [model.clone(), KeyValue::new("phase", phase)]),
            sequences: factory.gauge("baton.sequences", "Sequences on this node, by state"),
            pending_prompt_tokens: factory.gauge(
                "baton.pending_prompt_tokens",
                "Prompt tokens that are not prefilled yet",
            ),
            blocks: factory.gauge("baton.kv_blocks", "KV blocks, by state"),
            blocks_kept: factory.gauge(
                "baton.kv_blocks.kept",
                "Cached KV blocks that are kept for the next turn of their conversation",
            ),
            kv_cache_usage: factory
                .meter
                .f64_gauge("baton.kv_cache_usage")
                .with_description("Fraction of KV blocks that are held or reserved")
                .build(),
            mask_duration: factory.seconds(
                "baton.grammar.mask.duration",
                "Time to compute the token bitmask of a grammar for one step",
                &MASK_SECONDS,
            ),
            grammar_compile_duration: factory.seconds(
                "baton.grammar.compile.duration",
                "Time to compile a grammar, without its first token bitmask",
                &STEP_SECONDS,
            ),
            step_duration: factory.seconds("baton.step.duration", "Device time of one step", &STEP_SECONDS),
            step_host_duration: factory.seconds(
                "baton.step.host.duration",
                "Engine thread time of one step by phase, without waiting for the device",
                &HOST_SECONDS,
            ),
            step_dispatches: factory.counter(
                "baton.step.dispatches",
                "Steps by launch mode: eager, graph (by its rows), or fallback (eager because no CUDA graph fits)", of_model),
            step_padding_rows: factory.counter(
                "baton.step.padding_rows",
                "Padding rows computed because a CUDA graph has more rows than the step", of_model),
            steps: factory.counter("baton.steps", "Steps (forward passes)", of_model),
            step_rows: factory.counter("baton.step.rows", "Rows of all steps", of_model),
            step_tokens: factory.counter("baton.step.tokens", "Tokens of all steps", of_model),
            queue_time: factory.seconds(
                "baton.sequence.queue_time",
                "Time from a sequence's arrival to its first step",
                &FIRST_TOKEN_SECONDS,
            ),
            prefill_time: factory.seconds(
                "baton.sequence.prefill_time",
                "Time from a sequence's first step to its first token",
                &FIRST_TOKEN_SECONDS,
            ),
            sequences_finished: factory.counter(
                "baton.sequences.finished",
                "Finished sequences, by outcome", of_model),
            prefix_queries: factory.counter(
                "baton.prefix_cache.queries",
                "Prompt tokens looked up in the prefix cache", of_model),
            prefix_hits: factory.counter(
                "baton.prefix_cache.hits",
                "Prompt tokens found in the prefix cache", of_model),
            preemptions: factory.counter(
                "baton.preemptions",
                "Sequences preempted because no KV block was free", of_model),
            speculated_rows: factory.counter("baton.speculation.rows", "Rows of steps with draft tokens", of_model),
            speculated_drafted: factory.counter(
                "baton.speculation.drafted",
                "Draft tokens proposed by speculative decoding", of_model),
            speculated_accepted: factory.counter("baton.speculation.accepted", "Draft tokens accepted", of_model),
            speculated_accepted_at: (0..row_drafts_max)
                .map(|position| {
                    let position = KeyValue::new("position", i64::from(position));
                    factory.counter(
                        "baton.speculation.accepted_at",
                        "Draft tokens accepted, by position in the row from 0",
                        &[model.clone(), position],
                    )
                })
                .collect(),
            calls_rejected: factory.counter(
                "baton.node.calls.rejected",
                "gRPC calls rejected because of their token, by reason", of_model),
            transfers: factory.counter("baton.kv_transfers", "KV transfers, by side and outcome", of_model),
            transfer_bytes: factory.counter("baton.kv_transfer.bytes", "KV bytes transferred, by side", of_model),
            transfer_duration: factory.seconds(
                "baton.kv_transfer.duration",
                "Time of complete KV transfers, by side: sender from the first chunk to ACK, receiver from RESERVE to the last block",
                &STEP_SECONDS,
            ),
            model,
        }
    }

    fn model(&self) -> &[KeyValue] {
        std::slice::from_ref(&self.model)
    }

    /// Sets the load that the node also reports to routers.
    pub fn set_load(&self, load: &LoadStats) {
        let state = |name| [self.model.clone(), KeyValue::new("state", name)];
        self.sequences.record(load.running.into(), &state("running"));
        self.sequences.record(load.waiting.into(), &state("waiting"));
        self.pending_prompt_tokens.record(load.pending_prompt_tokens, self.model());
        let blocks = [
            ("free", load.blocks_free),
            ("cached", load.blocks_cached),
            ("held", load.blocks_held),
            ("reserved", load.blocks_reserved),
        ];
        for (name, count) in blocks {
            self.blocks.record(count.into(), &state(name));
        }
        self.blocks_kept.record(load.blocks_kept.into(), self.model());
        let total: u64 = blocks.iter().map(|(_, count)| u64::from(*count)).sum();
        let used = u64::from(load.blocks_held) + u64::from(load.blocks_reserved);
        self.kv_cache_usage.record(used as f64 / total.max(1) as f64, self.model());
    }

    /// Records a collected step.
    pub fn step(&self, step: &StepStats) {
        self.step_duration.record(step.busy.as_secs_f64(), self.model());
        for (time, phase) in [step.plan, step.launch, step.collect].iter().zip(&self.step_phases) {
            self.step_host_duration.record(time.as_secs_f64(), phase);
        }
        match step.dispatch {
            StepDispatch::Eager => self.step_dispatches.add(1, DispatchMode::Eager),
            StepDispatch::Fallback => self.step_dispatches.add(1, DispatchMode::Fallback),
            StepDispatch::Graph { rows } => {
                let rows = KeyValue::new("rows", i64::from(rows));
                self.step_dispatches.add_with(1, DispatchMode::Graph, rows);
            }
        }
        self.step_padding_rows.add(step.padding_rows.into(), ());
        self.steps.add(1, ());
        self.step_rows.add(step.rows.into(), ());
        self.step_tokens.add(step.tokens.into(), ());
    }

    /// Records the computation of a token bitmask, also a failed one.
    pub fn mask_computed(&self, took: Duration) {
        self.mask_duration.record(took.as_secs_f64(), self.model());
    }

    /// Records the compilation of a grammar, also a rejected one.
    pub fn grammar_compiled(&self, took: Duration) {
        self.grammar_compile_duration.record(took.as_secs_f64(), self.model());
    }

    /// Records the time from the arrival of a sequence to its first step.
    pub fn queued(&self, waited: Duration) {
        self.queue_time.record(waited.as_secs_f64(), self.model());
    }

    /// Records the time from the start of a sequence's first step to its first token.
    pub fn prefilled(&self, took: Duration) {
        self.prefill_time.record(took.as_secs_f64(), self.model());
    }

    pub fn call_rejected(&self, reason: TokenRejection) {
        self.calls_rejected.add(1, reason);
    }

    pub fn sequence_ended(&self, end: SequenceEnd) {
        self.sequences_finished.add(1, end);
    }

    /// Records a prefix cache lookup: `hit_tokens` of `prompt_tokens` were cached.
    pub fn prefix_lookup(&self, prompt_tokens: u64, hit_tokens: u64) {
        self.prefix_queries.add(prompt_tokens, ());
        self.prefix_hits.add(hit_tokens, ());
    }

    pub fn preempted(&self, count: u64) {
        self.preemptions.add(count, ());
    }

    /// Records speculative decoding over some steps: rows with draft tokens, draft tokens, accepted
    /// draft tokens, and the accepted ones by position in the row.
    pub fn speculated(&self, rows: u64, drafted: u64, accepted: u64, accepted_at: &[u64]) {
        self.speculated_rows.add(rows, ());
        self.speculated_drafted.add(drafted, ());
        self.speculated_accepted.add(accepted, ());
        for (counter, &count) in self.speculated_accepted_at.iter().zip(accepted_at) {
            counter.add(count, ());
        }
    }

    /// Records a transfer with the bytes that it moved, complete or not.
    pub fn transfer_ended(&self, side: TransferSide, end: TransferEnd, bytes: u64, took: Duration) {
        self.transfer_bytes.add(bytes, side);
        if end == TransferEnd::Complete {
            let side = KeyValue::new("side", side.as_str());
            self.transfer_duration.record(took.as_secs_f64(), &[self.model.clone(), side]);
        }
        self.transfers.add(1, (side, end));
    }
}
