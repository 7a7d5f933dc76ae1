//! Metrics of a node.

use std::{sync::Arc, time::Duration};

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Gauge, Histogram},
};

use super::{
    FIRST_TOKEN_SECONDS, HOST_SECONDS, MASK_SECONDS, MetricRow, Metrics, STEP_SECONDS,
    router::RequestState,
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
    /// Layers with experts.
    pub expert_layers: u64,
    /// Experts with rows, summed over the layers.
    pub experts_distinct: u64,
    /// Rows of the experts of every rank, summed over the layers.
    pub expert_rows: u64,
    /// Number of ranks times the rows of the rank with the most rows, summed over the layers.
    pub expert_rows_max: u64,
    /// Busy time of the device.
    pub busy: Duration,
    /// Time of the engine thread in each phase.
    pub plan: Duration,
    pub launch: Duration,
    pub collect: Duration,
}

labels! {
    /// State of a KV block.
    enum BlockStateLabel("state") {
        Free = "free",
        Cached = "cached",
        Held = "held",
        Reserved = "reserved",
    }
}

labels! {
    /// Phase of a step on the engine thread.
    enum StepPhase("phase") {
        Plan = "plan",
        Launch = "launch",
        Collect = "collect",
    }
}

instruments! {
    #[derive(Debug)]
    struct NodeInstruments ["gen_ai.request.model"] {
        sequences: Gauge<u64>, RequestState => "baton.sequences", "Sequences on this node, by state";
        pending_prompt_tokens: Gauge<u64>, () => "baton.pending_prompt_tokens",
            "Prompt tokens that are not prefilled yet";
        blocks: Gauge<u64>, BlockStateLabel => "baton.kv_blocks", "KV blocks, by state";
        blocks_kept: Gauge<u64>, () => "baton.kv_blocks.kept",
            "Cached KV blocks that are kept for the next turn of their conversation";
        kv_cache_usage: Gauge<f64>, () => "baton.kv_cache_usage", "Fraction of KV blocks that are held or reserved";
        mask_duration: Histogram<f64>, (), MASK_SECONDS => "baton.grammar.mask.duration" "s",
            "Time to compute the token bitmask of a grammar for one step";
        grammar_compile_duration: Histogram<f64>, (), STEP_SECONDS => "baton.grammar.compile.duration" "s",
            "Time to compile a grammar, without its first token bitmask";
        step_duration: Histogram<f64>, (), STEP_SECONDS => "baton.step.duration" "s", "Device time of one step";
        step_host_duration: Histogram<f64>, StepPhase, HOST_SECONDS => "baton.step.host.duration" "s",
            "Engine thread time of one step by phase, without waiting for the device";
        step_dispatches: Counter<u64>, DispatchMode, + "rows" => "baton.step.dispatches",
            "Steps by launch mode: eager, graph (by its rows), or fallback (eager because no CUDA graph fits)";
        step_padding_rows: Counter<u64>, () => "baton.step.padding_rows",
            "Padding rows computed because a CUDA graph has more rows than the step";
        steps: Counter<u64>, () => "baton.steps", "Steps (forward passes)";
        step_rows: Counter<u64>, () => "baton.step.rows", "Rows of all steps";
        step_tokens: Counter<u64>, () => "baton.step.tokens", "Tokens of all steps";
        expert_layers: Counter<u64>, () => "baton.experts.layers",
            "Layers with experts, over all steps; CPUs report the metrics of experts";
        experts_distinct: Counter<u64>, () => "baton.experts.distinct",
            "Experts that computed rows, over all layers and steps; divided by baton.experts.layers: distinct experts of a step";
        expert_rows: Counter<u64>, () => "baton.experts.rows",
            "Rows of the experts of every rank, over all layers and steps; a row counts once for each of its experts";
        expert_rows_max: Counter<u64>, () => "baton.experts.rows_max",
            "Number of ranks times the rows of the rank with the most rows; divided by baton.experts.rows: imbalance between ranks";
        queue_time: Histogram<f64>, (), FIRST_TOKEN_SECONDS => "baton.sequence.queue_time" "s",
            "Time from a sequence's arrival to its first step";
        prefill_time: Histogram<f64>, (), FIRST_TOKEN_SECONDS => "baton.sequence.prefill_time" "s",
            "Time from a sequence's first step to its first token";
        sequences_finished: Counter<u64>, SequenceEnd => "baton.sequences.finished", "Finished sequences, by outcome";
        prefix_queries: Counter<u64>, () => "baton.prefix_cache.queries", "Prompt tokens looked up in the prefix cache";
        prefix_hits: Counter<u64>, () => "baton.prefix_cache.hits", "Prompt tokens found in the prefix cache";
        preemptions: Counter<u64>, () => "baton.preemptions", "Sequences preempted because no KV block was free";
        speculated_rows: Counter<u64>, () => "baton.speculation.rows", "Rows of steps with draft tokens";
        speculated_drafted: Counter<u64>, () => "baton.speculation.drafted",
            "Draft tokens proposed by speculative decoding";
        speculated_accepted: Counter<u64>, () => "baton.speculation.accepted", "Draft tokens accepted";
        calls_rejected: Counter<u64>, TokenRejection => "baton.node.calls.rejected",
            "gRPC calls rejected because of their token, by reason";
        transfers: Counter<u64>, (TransferSide, TransferEnd) => "baton.kv_transfers",
            "KV transfers, by side and outcome";
        transfer_bytes: Counter<u64>, TransferSide => "baton.kv_transfer.bytes", "KV bytes transferred, by side";
        transfer_duration: Histogram<f64>, TransferSide, STEP_SECONDS => "baton.kv_transfer.duration" "s",
            "Time of complete KV transfers, by side: sender from the first chunk to ACK, receiver from RESERVE to the last block";
    }
}

instruments! {
    /// The instruments of one position of draft tokens in a row.
    #[derive(Debug)]
    struct PositionInstruments ["gen_ai.request.model", "position"] {
        accepted: Counter<u64>, () => "baton.speculation.accepted_at",
            "Draft tokens accepted, by position in the row from 0";
    }
}

pub(super) fn rows() -> Vec<MetricRow> {
    [NodeInstruments::rows(), PositionInstruments::rows()].concat()
}

/// The instruments of a node. Cheap to clone.
#[derive(Clone, Debug)]
pub struct NodeMetrics {
    of_model: Arc<NodeInstruments>,
    /// By position in the row.
    of_position: Arc<[PositionInstruments]>,
}

impl NodeMetrics {
    /// Creates the instruments for a model by its served name. `row_drafts_max`: largest number of
    /// draft tokens of a row.
    pub fn new(factory: &Metrics, model: &str, row_drafts_max: u32) -> Self {
        let model = KeyValue::new("gen_ai.request.model", model.to_owned());
        let of_position = |position| {
            let position = KeyValue::new("position", i64::from(position));
            PositionInstruments::new(factory, &[model.clone(), position])
        };
        Self {
            of_position: (0..row_drafts_max).map(of_position).collect(),
            of_model: Arc::new(NodeInstruments::new(factory, std::slice::from_ref(&model))),
        }
    }

    /// Sets the load that the node also reports to routers.
    pub fn set_load(&self, load: &LoadStats) {
        let of_model = &self.of_model;
        of_model.sequences.record(load.running.into(), RequestState::Running);
        of_model.sequences.record(load.waiting.into(), RequestState::Waiting);
        of_model.pending_prompt_tokens.record(load.pending_prompt_tokens, ());
        let blocks = [
            (BlockStateLabel::Free, load.blocks_free),
            (BlockStateLabel::Cached, load.blocks_cached),
            (BlockStateLabel::Held, load.blocks_held),
            (BlockStateLabel::Reserved, load.blocks_reserved),
        ];
        for (state, count) in blocks {
            of_model.blocks.record(count.into(), state);
        }
        of_model.blocks_kept.record(load.blocks_kept.into(), ());
        let total: u64 = blocks.iter().map(|(_, count)| u64::from(*count)).sum();
        let used = u64::from(load.blocks_held) + u64::from(load.blocks_reserved);
        of_model.kv_cache_usage.record(used as f64 / total.max(1) as f64, ());
    }

    /// Records a collected step.
    pub fn step(&self, step: &StepStats) {
        let of_model = &self.of_model;
        of_model.step_duration.record(step.busy.as_secs_f64(), ());
        for (phase, time) in [
            (StepPhase::Plan, step.plan),
            (StepPhase::Launch, step.launch),
            (StepPhase::Collect, step.collect),
        ] {
            of_model.step_host_duration.record(time.as_secs_f64(), phase);
        }
        match step.dispatch {
            StepDispatch::Eager => of_model.step_dispatches.record(1, DispatchMode::Eager),
            StepDispatch::Fallback => of_model.step_dispatches.record(1, DispatchMode::Fallback),
            StepDispatch::Graph { rows } => {
                let rows = KeyValue::new("rows", i64::from(rows));
                of_model.step_dispatches.record_with(1, DispatchMode::Graph, &[rows]);
            }
        }
        of_model.step_padding_rows.record(step.padding_rows.into(), ());
        of_model.steps.record(1, ());
        of_model.step_rows.record(step.rows.into(), ());
        of_model.step_tokens.record(step.tokens.into(), ());
        of_model.expert_layers.record(step.expert_layers, ());
        of_model.experts_distinct.record(step.experts_distinct, ());
        of_model.expert_rows.record(step.expert_rows, ());
        of_model.expert_rows_max.record(step.expert_rows_max, ());
    }

    /// Records the computation of a token bitmask, also a failed one.
    pub fn mask_computed(&self, took: Duration) {
        self.of_model.mask_duration.record(took.as_secs_f64(), ());
    }

    /// Records the compilation of a grammar, also a rejected one.
    pub fn grammar_compiled(&self, took: Duration) {
        self.of_model.grammar_compile_duration.record(took.as_secs_f64(), ());
    }

    /// Records the time from the arrival of a sequence to its first step.
    pub fn queued(&self, waited: Duration) {
        self.of_model.queue_time.record(waited.as_secs_f64(), ());
    }

    /// Records the time from the start of a sequence's first step to its first token.
    pub fn prefilled(&self, took: Duration) {
        self.of_model.prefill_time.record(took.as_secs_f64(), ());
    }

    pub fn call_rejected(&self, reason: TokenRejection) {
        self.of_model.calls_rejected.record(1, reason);
    }

    pub fn sequence_ended(&self, end: SequenceEnd) {
        self.of_model.sequences_finished.record(1, end);
    }

    /// Records a prefix cache lookup: `hit_tokens` of `prompt_tokens` were cached.
    pub fn prefix_lookup(&self, prompt_tokens: u64, hit_tokens: u64) {
        self.of_model.prefix_queries.record(prompt_tokens, ());
        self.of_model.prefix_hits.record(hit_tokens, ());
    }

    pub fn preempted(&self, count: u64) {
        self.of_model.preemptions.record(count, ());
    }

    /// Records speculative decoding over some steps: rows with draft tokens, draft tokens, accepted
    /// draft tokens, and the accepted ones by position in the row.
    pub fn speculated(&self, rows: u64, drafted: u64, accepted: u64, accepted_at: &[u64]) {
        self.of_model.speculated_rows.record(rows, ());
        self.of_model.speculated_drafted.record(drafted, ());
        self.of_model.speculated_accepted.record(accepted, ());
        for (position, &count) in self.of_position.iter().zip(accepted_at) {
            position.accepted.record(count, ());
        }
    }

    /// Records a transfer with the bytes that it moved, complete or not.
    pub fn transfer_ended(&self, side: TransferSide, end: TransferEnd, bytes: u64, took: Duration) {
        self.of_model.transfer_bytes.record(bytes, side);
        if end == TransferEnd::Complete {
            self.of_model.transfer_duration.record(took.as_secs_f64(), side);
        }
        self.of_model.transfers.record(1, (side, end));
    }
}
