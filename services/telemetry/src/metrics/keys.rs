//! Metrics of API keys. The names of the keys come from the operator's file, which has at most
//! [`KEYS_MAX`] keys.

use std::{sync::Arc, time::Instant};

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Histogram, UpDownCounter},
};
use opentelemetry_sdk::metrics::{Instrument, Stream};

use super::{
    FIRST_TOKEN_SECONDS, FinishedRequest, KEY_LABEL, MetricRow, Metrics, router::TokenType,
};

/// Maximum number of API keys of a router. Beyond it the metrics would no longer name each key.
pub const KEYS_MAX: usize = 10_000;
/// Maximum number of series of a key in one instrument.
const SERIES_OF_KEY_MAX: usize = 3;

/// Lets an instrument of API keys have a series for each key. By default the library merges all
/// series after the first 2,000 into one without labels.
pub(super) fn view(instrument: &Instrument) -> Option<Stream> {
    let limit = SERIES_OF_KEY_MAX * KEYS_MAX;
    let is_of_key = instrument.name().starts_with("baton.api_key.");
    is_of_key.then(|| Stream::builder().with_cardinality_limit(limit).build().ok()).flatten()
}

labels! {
    /// Limit of a key.
    pub enum KeyLimit("limit") {
        Requests = "requests_per_minute",
        Tokens = "tokens_per_minute",
        Streams = "streams_max",
    }
}

labels! {
    /// Reason why a request had no valid key.
    pub enum KeyRejection("reason") {
        Missing = "missing",
        Unknown = "unknown",
    }
}

instruments! {
    struct AllKeysInstruments [] {
        rejected: Counter<u64>, KeyRejection => "baton.api_key.rejected", "Requests without a valid API key, by reason";
    }
}

instruments! {
    struct KeyInstruments ["key"] {
        requests: Counter<u64>, () => "baton.api_key.requests", "Requests of an API key within its limits per minute";
        limited: Counter<u64>, KeyLimit => "baton.api_key.limited",
            "Requests of an API key that one of its limits rejected, by limit";
        tokens: Counter<u64>, TokenType => "baton.api_key.tokens", "Tokens of an API key's finished requests, by type";
        waiting: UpDownCounter<i64>, () => "baton.api_key.waiting", "Requests of an API key that wait for a node";
        queue_time: Histogram<f64>, (), FIRST_TOKEN_SECONDS => "baton.api_key.queue_time" "s",
            "Time a request of an API key waited in the router for a node";
    }
}

pub(super) fn rows() -> Vec<MetricRow> {
    [AllKeysInstruments::rows(), KeyInstruments::rows()].concat()
}

/// The instruments of all keys.
#[derive(Clone)]
pub struct ApiKeyMetrics {
    factory: Metrics,
    of_all: Arc<AllKeysInstruments>,
}

impl ApiKeyMetrics {
    pub fn new(metrics: &Metrics) -> Self {
        let of_all = Arc::new(AllKeysInstruments::new(metrics, &[]));
        Self { factory: metrics.clone(), of_all }
    }

    pub fn rejected(&self, reason: KeyRejection) {
        self.of_all.rejected.record(1, reason);
    }

    pub fn of_key(&self, name: &str) -> KeyMetrics {
        let key = KeyValue::new(KEY_LABEL, name.to_owned());
        KeyMetrics(Arc::new(KeyInstruments::new(&self.factory, &[key])))
    }
}

/// The instruments of one key.
pub struct KeyMetrics(Arc<KeyInstruments>);

/// Guard of a key's request that waits for a node. The guard records the time.
pub struct KeyWaiting {
    key: Arc<KeyInstruments>,
    since: Instant,
}

impl Drop for KeyWaiting {
    fn drop(&mut self) {
        self.key.waiting.record(-1, ());
        self.key.queue_time.record(self.since.elapsed().as_secs_f64(), ());
    }
}

impl KeyMetrics {
    /// Counts a request as waiting for a node until the guard is dropped.
    pub fn waiting(&self) -> KeyWaiting {
        self.0.waiting.record(1, ());
        KeyWaiting { key: self.0.clone(), since: Instant::now() }
    }

    pub fn request(&self) {
        self.0.requests.record(1, ());
    }

    pub fn limited(&self, limit: KeyLimit) {
        self.0.limited.record(1, limit);
    }

    pub fn request_ended(&self, request: &FinishedRequest) {
        for (of_type, tokens) in request.tokens() {
            self.0.tokens.record(tokens, of_type);
        }
    }
}
