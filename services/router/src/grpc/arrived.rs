//! Starts the record of a generation request before tonic reads its message. tonic may reject a
//! message before any handler runs; these requests are counted too. The bytes of a message count
//! against the memory limit of all request bodies until tonic has decoded the message.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use axum::{
    body::{Body, Bytes},
    extract::{Request, State},
    middleware::Next,
    response::Response,
};
use hyper::body::{Frame, SizeHint};
use proto::{ids::RequestId, v1::inference_server::SERVICE_NAME};
use telemetry::metrics::{Operation, RequestEnd};
use tokio::time::{Sleep, sleep};
use tonic::{Code, Status};

use super::status;
use crate::{
    admission::{BodyBudget, ReservedBytes},
    front::Front,
    http::BODY_COUNTS_AFTER,
    keys::{Caller, OpenStreams},
    lock::lock,
    record::RequestRecord,
    request::error::RequestError,
};

/// Record of a request whose message is being read.
#[derive(Clone)]
pub(super) struct ArrivingRequest(Arc<ArrivedState>);

struct ArrivedState {
    record: Mutex<Option<RequestRecord>>,
    broke_off: AtomicBool,
}

impl ArrivingRequest {
    fn new(record: RequestRecord) -> Self {
        let (record, broke_off) = (Mutex::new(Some(record)), AtomicBool::new(false));
        Self(Arc::new(ArrivedState { record, broke_off }))
    }

    /// Takes the record once the message was read. The caller finishes the record.
    pub(super) fn read(&self) -> Option<RequestRecord> {
        lock(&self.0.record).take()
    }

    /// Records that the client cancelled the request before the message was complete. tonic reports
    /// this as a missing message.
    pub(super) fn set_broke_off(&self) {
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

/// Adds a record to every generation request. Ends the record if no handler has read the message.
pub(super) async fn count(
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
    let caller = request.extensions().get().cloned().unwrap_or_default();
    let record = RequestRecord::new(&front, operation, request_id, None, connection, caller);
    let arrived = ArrivingRequest::new(record);
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

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A request body that reserves its bytes until dropped: tonic drops the body once the message is
/// decoded. The body of a generation request that takes long counts as a stream of its key.
pub(super) struct BoundedBody {
    body: Body,
    reserved: ReservedBytes,
    caller: Caller,
    /// Record of a generation request, to notify when the body breaks off.
    arrived: Option<ArrivingRequest>,
    /// Timer until the body of a generation request counts as a stream.
    counts_after: Option<Pin<Box<Sleep>>>,
    stream: Option<OpenStreams>,
}

impl BoundedBody {
    pub(super) fn new(
        body: Body,
        budget: &BodyBudget,
        caller: Caller,
        arrived: Option<ArrivingRequest>,
    ) -> Self {
        let reserved = budget.reserve(caller.flow(None));
        let counts_after = arrived.is_some().then(|| Box::pin(sleep(BODY_COUNTS_AFTER)));
        Self { body, reserved, caller, arrived, counts_after, stream: None }
    }

    /// Counts a body that has taken long as a stream.
    fn count_stream(&mut self, context: &mut Context<'_>) -> Result<(), RequestError> {
        if let Some(timer) = &mut self.counts_after
            && timer.as_mut().poll(context).is_ready()
        {
            self.counts_after = None;
            self.stream = Some(self.caller.open_streams(1)?);
        }
        Ok(())
    }
}

impl hyper::body::Body for BoundedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let rejected = |error: RequestError| Poll::Ready(Some(Err(status(error).into())));
        if let Err(error) = self.count_stream(context) {
            return rejected(error);
        }
        let frame = match ready!(Pin::new(&mut self.body).poll_frame(context)) {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => {
                let error = error.into_inner();
                // A status error comes from the router: the message was late.
                if let Some(arrived) = &self.arrived
                    && !error.is::<Status>()
                {
                    arrived.set_broke_off();
                }
                return Poll::Ready(Some(Err(error)));
            }
            None => return Poll::Ready(None),
        };
        match self.reserved.add(frame.data_ref().map_or(0, Bytes::len)) {
            Ok(()) => Poll::Ready(Some(Ok(frame))),
            Err(full) => rejected(full.into()),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
