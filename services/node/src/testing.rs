//! Helpers that unit tests of several modules share.

use std::sync::{Arc, Mutex};

use cluster::{Epoch, ModelIdentity, NodeId, NodeRecord, Role};
use telemetry::{LogSink, NodeMetrics, Resource, Telemetry, TelemetryConfig};

/// Returns telemetry without an exporter.
pub(crate) fn telemetry() -> Telemetry {
    let config = TelemetryConfig {
        log: "off".into(),
        log_sink: LogSink::Memory(Arc::new(Mutex::new(Vec::new()))),
        ..TelemetryConfig::default()
    };
    let resource = Resource { service: "test".into(), instance: "test".into() };
    Telemetry::start(&config, resource).unwrap()
}

/// Returns instruments without an exporter.
pub(crate) fn metrics() -> NodeMetrics {
    NodeMetrics::new(&telemetry().metrics(), "model", 0)
}

/// Returns the record of a decode node.
pub(crate) fn record() -> NodeRecord {
    NodeRecord {
        node_id: NodeId::parse("decode-1").unwrap(),
        epoch: Epoch::from_bytes(&[1; 16]).unwrap(),
        role: Role::Decode,
        control_endpoint: "tcp://127.0.0.1:5555".into(),
        model: "model".into(),
        identity: ModelIdentity {
            model_fingerprint: 1,
            weight_version: 1,
            kv_layout: "layout".into(),
            block_size: 16,
            dtype: "f32".into(),
            tp: 1,
            protocol_min: 1,
            protocol_max: 1,
        },
        prompt_tokens_max: 63,
        sequence_tokens_max: 64,
        block_count: 16,
        vocabulary_size: 10,
        grammar_version: crate::constraint::GRAMMAR_VERSION,
        cpu_fallback: None,
        peer_tag: vec![1; 32],
        pooling: false,
        sampling_version: 0,
        adapters: Vec::new(),
        both_roles: true,
        kv_windows: vec![0],
        state_blocks: 0,
    }
}
