//! Every decision of the router, without I/O: which requests are admitted, in which order they
//! start, on which nodes their attempts run, and what follows each event and failure.
//!
//! * [`RouterCore`] is what all requests of a router share: the directory of nodes with its circuit
//!   breakers, the bounds on requests, and for each model the fair queue and the sessions.
//! * [`AnswerCore`] is one answer. It composes a [`RequestCore`], which owns the list of emitted
//!   tokens, with the answer's place in the queue, its turn in a session, its nodes and its charge.
//!   Tokens do not pass [`RouterCore`].
//! * [`FairQueue`] is the order in which waiting answers start.
//!
//! Life of an answer:
//! 1. [`RouterCore::handle_request`] admits its request or refuses it.
//! 2. [`AnswerCore::start`] takes the turn of its session. It picks nodes at once, or waits behind
//!    other answers.
//! 3. [`AnswerCore::pick`] charges the flow and returns the calls of an attempt; the owner opens
//!    them.
//! 4. The owner passes the messages of the calls to the answer and performs its outputs.
//! 5. When an attempt has ended, the nodes get their feedback and the next answers get their turns.
//!    The answer starts the next attempt, or ends.
//!
//! The router drives these cores with tonic streams and tokio timers ([`SharedCore`] is a lock
//! there), the simulation of a cluster with a simulated network and clock. The crate has no socket,
//! clock, task, metric or gRPC type: none of its dependencies has.

#![forbid(unsafe_code)]

mod admission;
mod answer;
mod fair_queue;
mod request_core;
mod router;

pub use admission::{LoadBound, Overload, RETRY_AFTER_S};
pub use answer::{AnswerCore, AnswerOutput, PickedNode, SharedCore, StartedAttempt};
pub use fair_queue::{
    Charge, ChargeEnd, FairQueue, Flow, FlowLimit, FlowName, LimitReached, PassReason,
    SessionIdentity, SessionTurn, StartLimit, StartedPrompt, TooLate, WaitLimits, WaitRequest,
};
pub use request_core::{
    AnswerSpec, AttemptCalls, AttemptFailure, AttemptOutcome, AttemptSide, AttemptStats, Blame,
    CallError, EndedAttempt, FailureCause, FinishedAnswer, GiveUp, GrpcCode, HandOverStats,
    NodeFeedback, NodeStats, RecoveryPolicy, RequestCore, RequestSession, StopCause, peer,
    sampling_version,
};
pub use router::{AnswerId, ArrivedRequest, RouterCore, RouterLimits, RouterOutput};
