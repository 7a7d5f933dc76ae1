//! The gRPC status of each refusal.

use tonic::{Code, Status};

pub(crate) use crate::node_core::Refusal;

impl From<Refusal> for Status {
    /// Maps refusals as `node.proto` documents.
    fn from(refusal: Refusal) -> Self {
        let code = match &refusal {
            Refusal::Field { .. } | Refusal::Invalid { .. } => Code::InvalidArgument,
            Refusal::Busy { .. } => Code::ResourceExhausted,
            Refusal::Draining => Code::Unavailable,
            Refusal::Duplicate { .. } => Code::AlreadyExists,
            Refusal::OtherEpoch { .. }
            | Refusal::OtherWeights { .. }
            | Refusal::OtherRole { .. } => Code::FailedPrecondition,
            Refusal::Deadline => Code::DeadlineExceeded,
            Refusal::Internal { .. } | Refusal::Stopped => Code::Internal,
        };
        Self::new(code, refusal.to_string())
    }
}
