//! Metrics of API keys. The names of the keys come from the operator's file, which has at most [`KEYS_MAX`] keys.

use std::{sync::Arc, time::Instant};

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Histogram, UpDownCounter},
};
use opentelemetry_sdk::metrics::{Instrument, Stream};

use super::{FIRST_TOKEN_SECONDS, FinishedRequest, Metrics, labels::Series, router::TokenType};

/// Maximum number of API keys of a router. Beyond it the metrics would no longer name each key.
pub const KEYS_MAX: usize = 10_000;
/// Maximum number of series of a key in one instrument.
const SERIES_OF_KEY_MAX: usize = 3;

/// Lets an instrument of API keys have a series for each key. By default the library merges all series after the first
/// 2,000 into one without labels.
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

/// The instruments of all keys.
#[derive(Clone)]
pub struct ApiKeyMetrics {
    factory: Metrics,
    rejected: Series<Counter<u64>, KeyRejection>,
}

impl ApiKeyMetrics {
    pub fn new(metrics: &Metrics) -> Self {
        let about = "Requests without a valid API key, by reason";
        let rejected = metrics.counter("baton.api_key.rejected", about, &[]);
        Self { factory: metrics.clone(), rejected }
    }

    pub fn rejected(&self, reason: KeyRejection) {
        self.rejected.add(1, reason);
    }

    pub fn of_key(&self, name: &str) -> KeyMetrics {
        let key = KeyValue::new("key", name.to_owned());
        let of_key = std::slice::from_ref(&key);
        let queue = QueueMetrics {
            waiting: self.factory.up_down_counter(
                "baton.api_key.waiting",
                "Requests of an API key that wait for a node",
                of_key,
            ),
            queue_time: self.factory.seconds(
                "baton.api_key.queue_time",
                "Time a request of an API key waited in the router for a node",
                &FIRST_TOKEN_SECONDS,
            ),
            key: key.clone(),
        };
        KeyMetrics {
            queue: Arc::new(queue),
            requests: self.factory.counter(
                "baton.api_key.requests",
                "Requests of an API key within its limits per minute",
                of_key,
            ),
            limited: self.factory.counter(
                "baton.api_key.limited",
                "Requests of an API key that one of its limits rejected, by limit",
                of_key,
            ),
            tokens: self.factory.counter(
                "baton.api_key.tokens",
                "Tokens of an API key's finished requests, by type",
                of_key,
            ),
        }
    }
}

/// The instruments of one key.
pub struct KeyMetrics {
    requests: Series<Counter<u64>, ()>,
    limited: Series<Counter<u64>, KeyLimit>,
    tokens: Series<Counter<u64>, TokenType>,
    queue: Arc<QueueMetrics>,
}

struct QueueMetrics {
    waiting: Series<UpDownCounter<i64>, ()>,
    queue_time: Histogram<f64>,
    key: KeyValue,
}

/// Guard of a key's request that waits for a node. The guard records the time.
pub struct KeyWaiting {
    queue: Arc<QueueMetrics>,
    since: Instant,
}

impl Drop for KeyWaiting {
    fn drop(&mut self) {
        let QueueMetrics { waiting, queue_time, key } = &*self.queue;
        waiting.add(-1, ());
        queue_time.record(self.since.elapsed().as_secs_f64(), std::slice::from_ref(key));
    }
}

impl KeyMetrics {
    /// Counts a request as waiting for a node until the guard is dropped.
    pub fn waiting(&self) -> KeyWaiting {
        self.queue.waiting.add(1, ());
        KeyWaiting { queue: self.queue.clone(), since: Instant::now() }
    }

    pub fn request(&self) {
        self.requests.add(1, ());
    }

    pub fn limited(&self, limit: KeyLimit) {
        self.limited.add(1, limit);
    }

    pub fn request_ended(&self, request: &FinishedRequest) {
        for (of_type, tokens) in request.tokens() {
            self.tokens.add(tokens, of_type);
        }
    }
}
