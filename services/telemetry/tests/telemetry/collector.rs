//! A minimal OTLP collector for tests.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use opentelemetry_proto::tonic::{
    collector::{
        metrics::v1::{
            ExportMetricsServiceRequest, ExportMetricsServiceResponse,
            metrics_service_server::{MetricsService, MetricsServiceServer},
        },
        trace::v1::{
            ExportTraceServiceRequest, ExportTraceServiceResponse,
            trace_service_server::{TraceService, TraceServiceServer},
        },
    },
    common::v1::any_value::Value,
    metrics::v1::Metric,
    resource::v1::Resource,
    trace::v1::Span,
};
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, transport::Server};

/// A span that the collector received.
#[derive(Clone, Debug)]
pub(crate) struct Received {
    pub service: String,
    pub span: Span,
}

#[derive(Clone, Default)]
struct Inbox {
    spans: Arc<Mutex<Vec<Received>>>,
    metrics: Arc<Mutex<Vec<Metric>>>,
}

pub(crate) struct Collector {
    pub url: String,
    inbox: Inbox,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Collector {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let inbox = Inbox::default();
        let (stop, stopped) = oneshot::channel::<()>();
        let server = Server::builder()
            .add_service(TraceServiceServer::new(inbox.clone()))
            .add_service(MetricsServiceServer::new(inbox.clone()))
            .serve_with_incoming_shutdown(TcpListenerStream::new(listener), async {
                let _ = stopped.await;
            });
        Self { url, inbox, stop, task: tokio::spawn(server) }
    }

    /// Stops the collector and returns its spans by name, and its metrics.
    pub(crate) async fn finish(self) -> (BTreeMap<String, Received>, Vec<Metric>) {
        let _ = self.stop.send(());
        self.task.await.unwrap().unwrap();
        let spans = std::mem::take(&mut *self.inbox.spans.lock().unwrap());
        let metrics = std::mem::take(&mut *self.inbox.metrics.lock().unwrap());
        (spans.into_iter().map(|found| (found.span.name.clone(), found)).collect(), metrics)
    }
}

fn service_of(resource: Option<&Resource>) -> String {
    let attributes = resource.map(|resource| resource.attributes.as_slice()).unwrap_or_default();
    attributes
        .iter()
        .find(|attribute| attribute.key == "service.name")
        .and_then(|attribute| attribute.value.as_ref()?.value.as_ref())
        .map(|value| match value {
            Value::StringValue(text) => text.clone(),
            other => panic!("service.name is text, not {other:?}"),
        })
        .unwrap_or_default()
}

#[tonic::async_trait]
impl TraceService for Inbox {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for group in request.into_inner().resource_spans {
            let service = service_of(group.resource.as_ref());
            let spans = group.scope_spans.into_iter().flat_map(|scope| scope.spans);
            let received = spans.map(|span| Received { service: service.clone(), span });
            self.spans.lock().unwrap().extend(received);
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl MetricsService for Inbox {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        let groups = request.into_inner().resource_metrics.into_iter();
        let scopes = groups.flat_map(|group| group.scope_metrics);
        self.metrics.lock().unwrap().extend(scopes.flat_map(|scope| scope.metrics));
        Ok(Response::new(ExportMetricsServiceResponse::default()))
    }
}
