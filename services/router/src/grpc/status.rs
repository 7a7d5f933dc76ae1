//! Errors as gRPC.

use tonic::{Status, metadata::MetadataValue};

use crate::request::error::RequestError;

/// Seconds after which a rejected client may find room, as in HTTP's `Retry-After`.
const RETRY_AFTER: &str = "1";

pub fn status(error: RequestError) -> Status {
    let report = error.report();
    let mut status = Status::new(report.grpc, error.to_string());
    if report.retry {
        status.metadata_mut().insert("retry-after", MetadataValue::from_static(RETRY_AFTER));
    }
    status
}
