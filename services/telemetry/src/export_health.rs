//! Notices when the collector stops taking spans, and says so once.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use opentelemetry_sdk::{
    error::OTelSdkResult,
    trace::{SpanData, SpanExporter},
};

/// Whether the last export failed; shared with who shuts down.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExportHealth(Arc<AtomicBool>);

impl ExportHealth {
    pub(crate) fn is_failing(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// An exporter whose failures are logged when they begin and when they end, not with every batch.
#[derive(Debug)]
pub(crate) struct Watched<E> {
    exporter: E,
    health: ExportHealth,
}

impl<E> Watched<E> {
    pub(crate) fn new(exporter: E, health: ExportHealth) -> Self {
        Self { exporter, health }
    }
}

impl<E: SpanExporter> SpanExporter for Watched<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let outcome = self.exporter.export(batch).await;
        let was_failing = self.health.0.swap(outcome.is_err(), Ordering::Relaxed);
        match &outcome {
            Err(error) if !was_failing => {
                tracing::warn!(%error, "traces do not reach telemetry.otlp and are dropped");
            }
            Ok(()) if was_failing => tracing::info!("traces reach telemetry.otlp again"),
            _ => {}
        }
        outcome
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &opentelemetry_sdk::Resource) {
        self.exporter.set_resource(resource);
    }
}
