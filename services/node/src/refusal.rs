//! Why a request is not taken at all, and the gRPC status that says so.

use kv_transfer::api::Epoch;
use tonic::{Code, Status};

/// The request is refused before it begins; nothing of it is kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("{field} = {value}: {allowed}")]
    Field { field: &'static str, value: String, allowed: String },
    /// The scheduler found that it can never run here.
    #[error("{reason}")]
    Invalid { reason: String },
    #[error("busy: {reason}")]
    Busy { reason: String },
    #[error("this node drains; ask another one")]
    Draining,
    #[error("transfer_id {id:032x} is known here")]
    Duplicate { id: u128 },
    #[error("node_epoch = {named}: this process is {own}")]
    OtherEpoch { named: Epoch, own: Epoch },
    #[error("weight_version = {named}: this node has {own}")]
    OtherWeights { named: u64, own: u64 },
    #[error("this is a {own} node; it does not serve {method}")]
    OtherRole { own: &'static str, method: &'static str },
    #[error("the request's time was over before it began")]
    Deadline,
    /// A defect of the node.
    #[error("{reason}")]
    Internal { reason: String },
    #[error("the engine stopped")]
    Stopped,
}

impl Refusal {
    /// The one place where refusals become statuses, as `node.proto` documents them.
    fn code(&self) -> Code {
        match self {
            Self::Field { .. } | Self::Invalid { .. } => Code::InvalidArgument,
            Self::Busy { .. } => Code::ResourceExhausted,
            Self::Draining => Code::Unavailable,
            Self::Duplicate { .. } => Code::AlreadyExists,
            Self::OtherEpoch { .. } | Self::OtherWeights { .. } | Self::OtherRole { .. } => {
                Code::FailedPrecondition
            }
            Self::Deadline => Code::DeadlineExceeded,
            Self::Internal { .. } | Self::Stopped => Code::Internal,
        }
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        Status::new(refusal.code(), refusal.to_string())
    }
}
