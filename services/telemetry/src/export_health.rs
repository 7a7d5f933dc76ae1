//! Logs once when the collector stops accepting spans, and once when it accepts them again.

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

/// Result of the last export, shared with the shutdown.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExportHealth(Arc<AtomicBool>);

impl ExportHealth {
    pub(crate) fn is_failing(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Exporter that logs the first failure and the recovery instead of every failed batch.
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
                tracing::warn!(%error, "cannot send traces to telemetry.otlp; spans are dropped");
            }
            Ok(()) if was_failing => tracing::info!("telemetry.otlp accepts traces again"),
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
