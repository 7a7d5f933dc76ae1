//! The channels and spans of the calls that the [`NodeCore`](crate::node_core::NodeCore) knows.

use std::collections::HashMap;

use kv_transfer::api::{Command, TransferId};
use proto::v1::FailureKind;

use crate::{
    inbox::Arrival,
    node_core::{AttemptEnd, Call, CallId, Reply, Stage, StageChange},
    stages::Stages,
    stream::{AttemptPermit, QueueFull, Readers, ReplySender},
};

/// Every call, by its number.
#[derive(Debug, Default)]
pub(crate) struct Callers {
    callers: HashMap<u64, Caller>,
    /// Readers of replies that [`Callers::wake`] has not woken yet.
    readers: Readers,
}

#[derive(Debug)]
struct Caller {
    request_id: u128,
    replies: ReplySender,
    stages: Stages,
    _permit: AttemptPermit,
}

impl Callers {
    /// Keeps the arrival's channels and returns the call for the core.
    pub fn add(&mut self, arrival: Arrival) -> Call {
        let Arrival { call_number, attempt, replies, permit } = arrival;
        let call = Call {
            number: call_number,
            prompt_hash: attempt.prompt_hash(),
            peer: attempt.peer,
            sequence: attempt.sequence,
        };
        let (request_id, transfer_id) = (attempt.request_id, call.sequence.id.0);
        let caller = Caller {
            request_id,
            replies,
            stages: Stages::new(attempt.traceparent, request_id, transfer_id),
            _permit: permit,
        };
        self.callers.insert(call_number, caller);
        call
    }

    pub fn remove(&mut self, call: CallId) {
        self.callers.remove(&call.number);
    }

    /// Never waits. A caller that left is no error: its cancel is on the way.
    pub fn reply(&mut self, call: CallId, reply: Reply) -> Result<(), QueueFull> {
        let Some(caller) = self.callers.get_mut(&call.number) else { return Ok(()) };
        if let Reply::Ended(AttemptEnd::Failed { kind, message }) = &reply {
            log_failure(caller.request_id, call, *kind, message);
        }
        caller.replies.send(reply, &mut self.readers)
    }

    /// Wakes the callers that got replies.
    pub fn wake(&mut self) {
        self.readers.wake();
    }

    pub fn change_stage(&mut self, call: CallId, change: StageChange) {
        if let Some(caller) = self.callers.get_mut(&call.number) {
            caller.stages.handle(change);
        }
    }

    /// Fills in the trace context that the peer continues.
    pub fn set_traceparent(&self, call: CallId, command: &mut Command) {
        let (traceparent, stage) = match command {
            Command::Receive { traceparent, .. } => (traceparent, Stage::Transfer),
            Command::Expect { traceparent, .. } => (traceparent, Stage::Queue),
            _ => return,
        };
        if let Some(caller) = self.callers.get(&call.number) {
            *traceparent = caller.stages.traceparent(stage);
        }
    }
}

/// The one log line of a failed attempt. Failures that a client or a full node causes are no warnings.
fn log_failure(request_id: u128, call: CallId, kind: FailureKind, message: &str) {
    macro_rules! log {
        ($level:ident) => {
            tracing::$level!(
                request_id = format_args!("{request_id:032x}"),
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
        | FailureKind::Invalid => log!(info),
    }
}
