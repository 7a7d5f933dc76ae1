//! Metrics of API keys. The names of the keys come from the operator's file, so the number of series is bounded.

use opentelemetry::{KeyValue, metrics::Counter};

use super::{FinishedRequest, Metrics, labels::Series, router::TokenType};

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
        let of_key = &[KeyValue::new("key", name.to_owned())];
        KeyMetrics {
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
}

impl KeyMetrics {
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
