//! The failure of an attempt: its cause, and the nodes that may be at fault.

use std::time::Duration;

use proto::v1::{Failure, FailureKind};

use super::emitted::EmissionError;

/// Maximum bytes of a peer's message that the router copies into a log or an error body.
const MESSAGE_BYTES_MAX: usize = 300;
/// Maximum time by which a node may end a request before the router's deadline: the node counts
/// whole milliseconds on its own clock.
const DEADLINE_EARLY_MAX: Duration = Duration::from_millis(100);

/// A status code of gRPC by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrpcCode(pub i32);

impl GrpcCode {
    pub const UNKNOWN: Self = Self(2);
    pub const INVALID_ARGUMENT: Self = Self(3);
    pub const DEADLINE_EXCEEDED: Self = Self(4);
    pub const NOT_FOUND: Self = Self(5);
    pub const ALREADY_EXISTS: Self = Self(6);
    pub const RESOURCE_EXHAUSTED: Self = Self(8);
    pub const FAILED_PRECONDITION: Self = Self(9);
    pub const ABORTED: Self = Self(10);
    pub const OUT_OF_RANGE: Self = Self(11);
    pub const UNIMPLEMENTED: Self = Self(12);
    pub const UNAVAILABLE: Self = Self(14);
    pub const DATA_LOSS: Self = Self(15);
    pub const UNAUTHENTICATED: Self = Self(16);
}

/// A call that a node refused, or whose stream broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallError {
    pub code: GrpcCode,
    /// Whether the connection failed. Otherwise the node sent the code.
    pub is_broken: bool,
    pub message: String,
}

/// The prefill or the decode node of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
pub enum AttemptSide {
    #[error("prefill")]
    Prefill,
    #[error("decode")]
    Decode,
}

/// Cause of a failed attempt; decides which nodes the next attempt avoids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FailureCause {
    /// The node's queue is full, or the node has too few free KV blocks.
    #[error("busy")]
    Busy,
    /// The node is draining.
    #[error("draining")]
    Draining,
    /// The node drains, and another node continues the answer.
    #[error("migrated")]
    Migrated,
    /// The connection failed, or the node is silent.
    #[error("lost")]
    Lost,
    /// The KV did not arrive completely.
    #[error("transfer_failed")]
    TransferFailed,
    /// The request's deadline passed at the node.
    #[error("deadline")]
    Deadline,
    /// The node ended the stream: its event queue overflowed, because the router or the network took
    /// the events too slowly.
    #[error("slow_reader")]
    SlowReader,
    /// The two nodes have different models, weights or layouts.
    #[error("mismatch")]
    Mismatch,
    /// The node is another process than the router expected, or rejects the router's token.
    #[error("stale")]
    Stale,
    /// The node has other weights than the router expected. The node's report of the change is in
    /// flight.
    #[error("other_weights")]
    OtherWeights,
    /// The node's weights changed during the attempt.
    #[error("weights_changed")]
    WeightsChanged,
    /// The node knows this transfer id already.
    #[error("duplicate")]
    Duplicate,
    /// The emitted tokens complete the answer's grammar, so no token can follow.
    #[error("answer_complete")]
    AnswerComplete,
    /// The matcher of the answer's grammar failed on the emitted tokens: a bug, which every node
    /// has.
    #[error("matcher_failed")]
    MatcherFailed,
    /// The node cannot follow grammars now. It serves other requests.
    #[error("no_grammar")]
    NoGrammar,
    /// A bug in the node.
    #[error("internal")]
    Internal,
    /// The node can never serve this request.
    #[error("invalid")]
    Invalid,
    /// The node violated the protocol.
    #[error("violation")]
    Violation,
    /// The node sent another value for a token that the router has already emitted.
    #[error("contradiction")]
    Contradiction,
}

impl FailureCause {
    fn of_kind(kind: FailureKind) -> Self {
        match kind {
            FailureKind::Busy => Self::Busy,
            FailureKind::TransferFailed => Self::TransferFailed,
            FailureKind::Deadline => Self::Deadline,
            FailureKind::Draining => Self::Draining,
            FailureKind::SlowReader => Self::SlowReader,
            FailureKind::Mismatch => Self::Mismatch,
            FailureKind::Internal | FailureKind::Unspecified => Self::Internal,
            FailureKind::Invalid => Self::Invalid,
            FailureKind::WeightsChanged => Self::WeightsChanged,
        }
    }
}

/// A report to the directory about the node of a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeFeedback {
    Busy,
    /// The connection broke, or another process answered.
    Lost,
}

/// The nodes that may be at fault for a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The node of the failure's side.
    Node,
    /// The prefill node, the decode node, or their link.
    Pair,
}

/// The failure of one attempt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{side} node: {cause}: {message}")]
pub struct AttemptFailure {
    pub side: AttemptSide,
    pub cause: FailureCause,
    /// Message on one line.
    pub message: String,
}

impl AttemptFailure {
    /// Converts the node's Failure event.
    pub fn reported(side: AttemptSide, failure: Failure) -> Self {
        Self {
            side,
            cause: FailureCause::of_kind(failure.kind()),
            message: one_line(&failure.message),
        }
    }

    /// Converts a refused call or a broken stream.
    fn call(side: AttemptSide, error: &CallError) -> Self {
        let is_broken = error.is_broken;
        let cause = match error.code {
            GrpcCode::RESOURCE_EXHAUSTED if !is_broken => FailureCause::Busy,
            GrpcCode::UNAVAILABLE if is_broken => FailureCause::Lost,
            GrpcCode::UNAVAILABLE => FailureCause::Draining,
            // tonic's code of a message that is too large is OUT_OF_RANGE.
            GrpcCode::INVALID_ARGUMENT | GrpcCode::OUT_OF_RANGE => FailureCause::Invalid,
            GrpcCode::NOT_FOUND if !is_broken => FailureCause::AnswerComplete,
            GrpcCode::ALREADY_EXISTS => FailureCause::Duplicate,
            GrpcCode::ABORTED => FailureCause::OtherWeights,
            GrpcCode::DATA_LOSS if !is_broken => FailureCause::MatcherFailed,
            GrpcCode::UNIMPLEMENTED if !is_broken => FailureCause::NoGrammar,
            GrpcCode::FAILED_PRECONDITION | GrpcCode::UNAUTHENTICATED => FailureCause::Stale,
            GrpcCode::DEADLINE_EXCEEDED => FailureCause::Deadline,
            _ if is_broken => FailureCause::Lost,
            _ => FailureCause::Internal,
        };
        Self { side, cause, message: one_line(&error.message) }
    }

    /// Converts the end of a stream that broke or had no final event.
    pub fn stream_end(side: AttemptSide, error: Option<CallError>) -> Self {
        if let Some(error) = error {
            return Self::call(side, &error);
        }
        let message = "the stream ended without a final event".to_owned();
        Self { side, cause: FailureCause::Lost, message }
    }

    /// Returns the failure of a node that sent no event for the time `silence`.
    pub fn silent(side: AttemptSide, silence: Duration) -> Self {
        let message = format!("no event for {silence:?} (router.idle_timeout)");
        Self { side, cause: FailureCause::Lost, message }
    }

    /// Returns the failure of an attempt whose decode node drains. `needed`: predicted time until
    /// the answer ends.
    pub fn migrated(needed: Duration) -> Self {
        let seconds = needed.as_secs_f64();
        let message = format!("the node drains, and the answer may take {seconds:.1} s");
        Self { side: AttemptSide::Decode, cause: FailureCause::Migrated, message }
    }

    /// Returns the failure of a request that has `time_left`. A node that reports the deadline as
    /// passed although it is not has failed: perhaps it could not read the call in time.
    pub(super) fn before_deadline(self, time_left: Duration) -> Self {
        let is_early = self.cause == FailureCause::Deadline && time_left > DEADLINE_EARLY_MAX;
        Self { cause: if is_early { FailureCause::Internal } else { self.cause }, ..self }
    }

    /// Returns the report about the node of [`Self::side`], if the failure says anything about it.
    pub fn node_feedback(&self) -> Option<NodeFeedback> {
        match self.cause {
            FailureCause::Busy | FailureCause::OtherWeights => Some(NodeFeedback::Busy),
            FailureCause::Lost | FailureCause::Stale => Some(NodeFeedback::Lost),
            _ => None,
        }
    }

    /// Returns whether the node refused the attempt, so that the caller does not pay for the
    /// prompt.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self.cause,
            FailureCause::Busy
                | FailureCause::Draining
                | FailureCause::Stale
                | FailureCause::OtherWeights
                | FailureCause::Duplicate
                | FailureCause::NoGrammar
        )
    }

    /// Returns the nodes that may be at fault, for the circuit breakers; `None` for a busy or
    /// draining node, a node that cannot follow grammars, or a node that received an invalid
    /// request.
    pub fn blame(&self) -> Option<Blame> {
        match self.cause {
            FailureCause::Lost
            | FailureCause::Internal
            | FailureCause::Violation
            | FailureCause::Contradiction => Some(Blame::Node),
            FailureCause::TransferFailed => Some(Blame::Pair),
            _ => None,
        }
    }

    pub fn violation(side: AttemptSide, message: impl Into<String>) -> Self {
        Self { side, cause: FailureCause::Violation, message: message.into() }
    }

    pub fn emission(side: AttemptSide, error: &EmissionError) -> Self {
        let cause = match error {
            EmissionError::Contradiction { .. } => FailureCause::Contradiction,
            EmissionError::Gap { .. }
            | EmissionError::TooMany { .. }
            | EmissionError::OutsideVocabulary { .. }
            | EmissionError::Empty { .. } => FailureCause::Violation,
        };
        Self { side, cause, message: error.to_string() }
    }
}

/// Returns a peer's text as one bounded line.
fn one_line(text: &str) -> String {
    let mut line: String =
        text.chars().map(|char| if char.is_control() { ' ' } else { char }).collect();
    if line.len() > MESSAGE_BYTES_MAX {
        let end = (0..=MESSAGE_BYTES_MAX).rev().find(|&end| line.is_char_boundary(end));
        line.truncate(end.expect("0 is a boundary"));
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_call_differs_from_a_broken_connection() {
        let failure = |side, code, is_broken| {
            AttemptFailure::call(side, &CallError { code, is_broken, message: "a test".into() })
        };
        let refused = failure(AttemptSide::Decode, GrpcCode::UNAVAILABLE, false);
        assert_eq!(refused.cause, FailureCause::Draining);
        let broken = failure(AttemptSide::Decode, GrpcCode::UNAVAILABLE, true);
        assert_eq!(broken.cause, FailureCause::Lost);
        let busy = failure(AttemptSide::Prefill, GrpcCode::RESOURCE_EXHAUSTED, false);
        assert_eq!((busy.cause, busy.side), (FailureCause::Busy, AttemptSide::Prefill));
        assert!(busy.is_refusal() && refused.is_refusal() && !broken.is_refusal());
        // A connection that is closed because of its many resets.
        let closed = failure(AttemptSide::Decode, GrpcCode::RESOURCE_EXHAUSTED, true);
        assert_eq!((closed.cause, closed.blame()), (FailureCause::Lost, Some(Blame::Node)));
        // The router observes the node again, and logs why the node rejects its tokens.
        let unread = failure(AttemptSide::Decode, GrpcCode::UNIMPLEMENTED, false);
        assert_eq!((unread.cause, unread.blame()), (FailureCause::NoGrammar, None));
        let failed = failure(AttemptSide::Decode, GrpcCode::DATA_LOSS, false);
        assert_eq!((failed.cause, failed.blame()), (FailureCause::MatcherFailed, None));
        assert!(!failed.is_refusal());
        // A message that is too large must not end an answer as complete.
        let too_large = failure(AttemptSide::Decode, GrpcCode::OUT_OF_RANGE, false);
        assert_eq!(too_large.cause, FailureCause::Invalid);
        let rejected = failure(AttemptSide::Decode, GrpcCode::UNAUTHENTICATED, false);
        assert_eq!(rejected.node_feedback(), Some(NodeFeedback::Lost));
    }

    #[test]
    fn a_node_that_calls_a_request_late_too_early_has_failed() {
        let code = GrpcCode::DEADLINE_EXCEEDED;
        let error = CallError { code, is_broken: false, message: "a test".into() };
        let late = AttemptFailure::call(AttemptSide::Decode, &error);
        for (left, cause) in [
            (DEADLINE_EARLY_MAX, FailureCause::Deadline),
            (DEADLINE_EARLY_MAX + Duration::from_nanos(1), FailureCause::Internal),
        ] {
            assert_eq!(late.clone().before_deadline(left).cause, cause);
        }
        let busy = AttemptFailure { cause: FailureCause::Busy, ..late };
        assert_eq!(busy.clone().before_deadline(Duration::MAX), busy);
    }

    #[test]
    fn a_peers_message_is_one_bounded_line() {
        let failure = Failure { kind: 99, message: format!("a\nb{}", "ü".repeat(500)) };
        let failure = AttemptFailure::reported(AttemptSide::Decode, failure);
        assert_eq!(failure.cause, FailureCause::Internal);
        assert!(failure.message.starts_with("a b") && failure.message.len() < 310);
    }
}
