//! The channels and spans of the calls that the [`NodeCore`](crate::node_core::NodeCore) knows.

use std::collections::HashMap;

use kv_transfer::api::{Command, TransferId};
use proto::v1::FailureKind;
use telemetry::{propagation, spans};
use tracing::{Span, field::Empty, info_span};

use crate::{
    inbox::Arrival,
    node_core::{AttemptEnd, AttemptStage, Call, CallId, Reply, StageAttributes, StageChange},
    stream::{AttemptPermit, QueueFull, Readers, ReplySender},
};

/// Channels and open spans of each call, by the call's number.
#[derive(Debug, Default)]
pub(crate) struct Callers {
    callers: HashMap<u64, AttemptCaller>,
    /// Readers of replies that [`Callers::wake`] has not woken yet.
    readers: Readers,
}

#[derive(Debug)]
struct AttemptCaller {
    request_id: u128,
    replies: ReplySender,
    stages: StageSpans,
    _permit: AttemptPermit,
}

impl Callers {
    /// Keeps the arrival's channels and returns the call for the core.
    pub(crate) fn add(&mut self, arrival: Arrival) -> Call {
        let Arrival { call_number, attempt, prompt_hash, replies, permit } = arrival;
        let call = Call {
            number: call_number,
            request_id: attempt.request_id,
            weight_version: attempt.weight_version,
            prompt_hash,
            peer: attempt.peer,
            sequence: attempt.sequence,
        };
        let (request_id, transfer_id) = (attempt.request_id, call.sequence.id.0);
        let caller = AttemptCaller {
            request_id,
            replies,
            stages: StageSpans::new(attempt.traceparent, request_id, transfer_id),
            _permit: permit,
        };
        self.callers.insert(call_number, caller);
        call
    }

    pub(crate) fn remove(&mut self, call: CallId) {
        self.callers.remove(&call.number);
    }

    /// Sends a reply to a caller. Never waits. A caller that has disconnected is not an error: its
    /// cancel follows.
    pub(crate) fn reply(&mut self, call: CallId, reply: Reply) -> Result<(), QueueFull> {
        let Some(caller) = self.callers.get_mut(&call.number) else { return Ok(()) };
        if let Reply::Ended(AttemptEnd::Failed { kind, message }) = &reply {
            log_failure(caller, call, *kind, message);
        }
        caller.replies.send(reply, &mut self.readers)
    }

    /// Wakes the callers that got replies.
    pub(crate) fn wake(&mut self) {
        self.readers.wake();
    }

    pub(crate) fn change_stage(&mut self, call: CallId, change: StageChange) {
        if let Some(caller) = self.callers.get_mut(&call.number) {
            caller.stages.handle(change);
        }
    }

    /// Fills in the trace context that the peer continues.
    pub(crate) fn set_traceparent(&self, call: CallId, command: &mut Command) {
        let (traceparent, stage) = match command {
            Command::Receive { traceparent, .. } => (traceparent, AttemptStage::Transfer),
            Command::Send { traceparent, .. } => (traceparent, AttemptStage::Queue),
            _ => return,
        };
        if let Some(caller) = self.callers.get(&call.number) {
            *traceparent = caller.stages.traceparent(stage);
        }
    }
}

/// Logs a failed attempt in one line. A failure that a client or a full node causes is not logged
/// as a warning.
fn log_failure(caller: &AttemptCaller, call: CallId, kind: FailureKind, message: &str) {
    // The spans of the call's stages have ended, so the line names the caller's span.
    let (trace_id, span_id) = propagation::ids(&caller.stages.traceparent).unzip();
    macro_rules! log {
        ($level:ident) => {
            tracing::$level!(
                trace_id,
                span_id,
                request_id = format_args!("{:032x}", caller.request_id),
                transfer_id = %TransferId(call.sequence.0),
                kind = kind.as_str_name(),
                "attempt failed: {message}"
            )
        };
    }
    match kind {
        FailureKind::Internal | FailureKind::Unspecified => log!(error),
        FailureKind::TransferFailed | FailureKind::Mismatch => log!(warn),
        FailureKind::Busy
        | FailureKind::Deadline
        | FailureKind::Draining
        | FailureKind::SlowReader
        | FailureKind::WeightsChanged
        | FailureKind::Invalid => log!(info),
    }
}

/// The open spans of one attempt's stages, each a child of the caller's span. Dropping it closes
/// them.
#[derive(Debug)]
struct StageSpans {
    traceparent: String,
    request_id: u128,
    transfer_id: u128,
    /// The receiver's trace context on a prefill node; empty until the `RESERVE` brings it.
    transfer_parent: String,
    open: [Option<Span>; AttemptStage::COUNT],
}

impl StageSpans {
    fn new(traceparent: String, request_id: u128, transfer_id: u128) -> Self {
        Self {
            traceparent,
            request_id,
            transfer_id,
            transfer_parent: String::new(),
            open: [const { None }; AttemptStage::COUNT],
        }
    }

    fn handle(&mut self, change: StageChange) {
        match change {
            StageChange::Began(stage) => self.begin(stage),
            StageChange::Ended { stage, attributes } => self.end(stage, &attributes),
            StageChange::Failed { error } => {
                for span in self.open.iter_mut().filter_map(Option::take) {
                    span.record("error", error.as_str());
                    spans::failed(&span, error.clone());
                }
            }
            StageChange::TransferParent { traceparent } => self.transfer_parent = traceparent,
        }
    }

    fn begin(&mut self, stage: AttemptStage) {
        // A decode node requests the transfer from the prefill node; a router requests the other
        // stages.
        let kind = match stage {
            AttemptStage::Transfer if self.transfer_parent.is_empty() => "client",
            _ => "server",
        };
        macro_rules! stage_span {
            ($name:literal) => {
                info_span!(
                    parent: None,
                    $name,
                    otel.kind = kind,
                    request_id = %format_args!("{:032x}", self.request_id),
                    transfer_id = %format_args!("{:032x}", self.transfer_id),
                    cached_tokens = Empty,
                    loaded_tokens = Empty,
                    bytes = Empty,
                    chunks = Empty,
                    error = Empty,
                )
            };
        }
        let span = match stage {
            AttemptStage::Queue => stage_span!("queue"),
            AttemptStage::Prefill => stage_span!("prefill"),
            AttemptStage::Reserve => stage_span!("reserve"),
            AttemptStage::Transfer => stage_span!("transfer"),
            AttemptStage::Load => stage_span!("load"),
            AttemptStage::Decode => stage_span!("decode"),
        };
        let parent = match stage {
            AttemptStage::Transfer if !self.transfer_parent.is_empty() => &self.transfer_parent,
            _ => &self.traceparent,
        };
        propagation::set_parent(&span, parent);
        self.open[stage as usize] = Some(span);
    }

    fn end(&mut self, stage: AttemptStage, attributes: &StageAttributes) {
        let Some(span) = self.open[stage as usize].take() else { return };
        if let Some(cached_tokens) = attributes.cached_tokens {
            span.record("cached_tokens", spans::integer(cached_tokens));
        }
        if let Some(loaded_tokens) = attributes.loaded_tokens {
            span.record("loaded_tokens", spans::integer(loaded_tokens));
        }
        if let Some(error) = &attributes.error {
            span.record("error", error.as_str());
            spans::failed(&span, error.clone());
        }
        if let Some(stats) = &attributes.transferred {
            span.record("bytes", spans::integer(stats.bytes));
            span.record("chunks", spans::integer(stats.chunks));
        }
    }

    /// Returns the trace context of an open stage, for a peer; else the caller's own.
    fn traceparent(&self, stage: AttemptStage) -> String {
        let span = self.open[stage as usize].as_ref();
        let own = span.map(propagation::traceparent).filter(|text| !text.is_empty());
        own.unwrap_or_else(|| self.traceparent.clone())
    }
}
