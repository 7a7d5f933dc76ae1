//! Errors as gRPC: the one place where causes become a status.

use tonic::{Code, Status};

use crate::{admission::Full, generation::RequestError};

/// Seconds after which a refused client may find room, as in HTTP's `Retry-After`.
const RETRY_AFTER: &str = "1";

pub fn status(error: RequestError) -> Status {
    let (code, retry) = match &error {
        RequestError::Field(_) | RequestError::Text { .. } | RequestError::Refused { .. } => {
            (Code::InvalidArgument, false)
        }
        RequestError::UnknownModel { .. } => (Code::NotFound, false),
        RequestError::Full(Full::InFlight { .. } | Full::Waiting { .. } | Full::Bodies { .. })
        | RequestError::Busy { .. } => (Code::ResourceExhausted, true),
        RequestError::Full(Full::Stopping)
        | RequestError::NoDecodeNode { .. }
        | RequestError::Stopped => (Code::Unavailable, true),
        RequestError::NoGrammar { .. } => (Code::Unimplemented, false),
        RequestError::AttemptsSpent { .. } => (Code::Unavailable, false),
        RequestError::Deadline { .. } => (Code::DeadlineExceeded, false),
        RequestError::SlowClient { .. } => (Code::Aborted, false),
        RequestError::ClientGone => (Code::Cancelled, false),
        RequestError::Contradiction { .. } | RequestError::Internal { .. } => {
            (Code::Internal, false)
        }
    };
    let mut status = Status::new(code, error.to_string());
    if retry {
        let value = tonic::metadata::MetadataValue::from_static(RETRY_AFTER);
        status.metadata_mut().insert("retry-after", value);
    }
    status
}
