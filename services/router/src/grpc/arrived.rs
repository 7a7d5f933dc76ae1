//! Records generation requests from their first byte on. tonic reads and rejects messages before any
//! handler runs; a record that begins here counts those requests too.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use axum::{
    body::Body,
    extract::{Request, State},
    middleware::Next,
    response::Response,
};
use proto::{ids::RequestId, v1::inference_server::SERVICE_NAME};
use telemetry::metrics::{Operation, RequestEnd};
use tonic::{Code, Status};

use crate::{front::Front, record::RequestRecord};

/// Record of a request whose message is being read.
#[derive(Clone)]
pub struct Arrived(Arc<Reading>);

struct Reading {
    record: Mutex<Option<RequestRecord>>,
    broke_off: AtomicBool,
}

impl Arrived {
    fn new(record: RequestRecord) -> Self {
        let (record, broke_off) = (Mutex::new(Some(record)), AtomicBool::new(false));
        Self(Arc::new(Reading { record, broke_off }))
    }

    /// Returns the record: the message was read, and the caller records the rest.
    pub fn read(&self) -> Option<RequestRecord> {
        self.0.record.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The client cancelled the request before the message was complete. tonic reports this as a missing
    /// message.
    pub fn set_broke_off(&self) {
        self.0.broke_off.store(true, Ordering::Release);
    }

    fn end(&self, code: Code) -> RequestEnd {
        match code {
            _ if self.0.broke_off.load(Ordering::Acquire) => RequestEnd::ClientGone,
            Code::ResourceExhausted => RequestEnd::Overloaded,
            // As over HTTP: a late, oversized or broken message is a client error.
            _ => RequestEnd::Invalid,
        }
    }
}

/// Adds a record to every generation request, and ends the record of a request that is rejected unread.
pub async fn count(
    State(front): State<Arc<Front>>,
    mut request: Request<Body>,
    next: Next,
) -> Response {
    let Some(operation) = operation(request.uri().path()) else { return next.run(request).await };
    let request_id = match RequestId::mint() {
        Ok(request_id) => request_id,
        Err(error) => return Status::internal(error.to_string()).into_http(),
    };
    let connection = request.extensions().get().cloned().unwrap_or_default();
    let model = front.models.default_model();
    let record = RequestRecord::new(model, operation, request_id, None, connection);
    let arrived = Arrived::new(record);
    request.extensions_mut().insert(arrived.clone());
    let response = next.run(request).await;
    if let Some(record) = arrived.read() {
        let status = Status::from_header_map(response.headers())
            .unwrap_or_else(|| Status::unknown("not a gRPC request"));
        record.rejected(arrived.end(status.code()), status.message());
    }
    response
}

fn operation(path: &str) -> Option<Operation> {
    match path.strip_prefix('/')?.strip_prefix(SERVICE_NAME)? {
        "/Generate" => Some(Operation::Generate),
        "/Chat" => Some(Operation::Chat),
        _ => None,
    }
}
