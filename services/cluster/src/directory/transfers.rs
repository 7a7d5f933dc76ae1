//! Measured transfer times of the pairs of nodes.

use std::collections::BTreeMap;

use super::NodeKey;

/// Weight of a slower transfer in the transfer time of a pair.
const TRANSFER_SHARE: f64 = 1.0 / 16.0;

/// Transfer times of a token's KV from a prefill node to a decode node, in milliseconds.
#[derive(Default)]
pub(super) struct TransferTimes {
    of_pairs: BTreeMap<(NodeKey, NodeKey), f64>,
    /// Sum over all pairs: each pick needs the mean, and 1,000 nodes have 250,000 pairs.
    sum_ms: f64,
}

impl TransferTimes {
    pub(super) fn add(&mut self, pair: (NodeKey, NodeKey), token_ms: f64) {
        let known = self.of_pairs.get(&pair).copied();
        let mean = transfer_mean(known, token_ms);
        self.of_pairs.insert(pair, mean);
        self.sum_ms += mean - known.unwrap_or(0.0);
    }

    /// Returns the transfer time of the pair; without a measurement the mean of the other pairs.
    pub(super) fn of(&self, pair: (NodeKey, NodeKey)) -> f64 {
        let mean = || self.sum_ms.max(0.0) / self.of_pairs.len().max(1) as f64;
        self.measured(pair).unwrap_or_else(mean)
    }

    pub(super) fn measured(&self, pair: (NodeKey, NodeKey)) -> Option<f64> {
        self.of_pairs.get(&pair).copied()
    }

    /// Returns the measured pairs and their times.
    pub(super) fn pairs(&self) -> impl Iterator<Item = ((NodeKey, NodeKey), f64)> {
        self.of_pairs.iter().map(|(pair, token_ms)| (*pair, *token_ms))
    }

    /// Drops the pairs of a node.
    pub(super) fn forget(&mut self, key: NodeKey) {
        self.of_pairs.retain(|(prefill, decode), _| *prefill != key && *decode != key);
        self.sum_ms = self.of_pairs.values().sum();
    }
}

/// Returns the estimate after a measurement, in milliseconds per token. A shorter time replaces the
/// estimate at once. A longer time raises it slowly (exponential moving average), because chunks
/// may have waited for prefill, not the link.
pub(super) fn transfer_mean(known: Option<f64>, token_ms: f64) -> f64 {
    let known = known.unwrap_or(token_ms);
    token_ms.min(known + (token_ms - known) * TRANSFER_SHARE)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The sum is that of the pairs after any measurements and losses of nodes.
        #[test]
        fn pair_without_measurement_has_the_mean_of_the_others(
            events in prop::collection::vec((0..5u64, 0..5u64, prop::option::of(0.001..10.0)), 0..60),
        ) {
            let mut times = TransferTimes::default();
            for (prefill, decode, token_ms) in events {
                match token_ms {
                    Some(token_ms) => times.add((NodeKey(prefill), NodeKey(10 + decode)), token_ms),
                    None => times.forget(NodeKey(prefill)),
                }
                let sum: f64 = times.of_pairs.values().sum();
                let mean = sum / times.of_pairs.len().max(1) as f64;
                prop_assert!((times.of((NodeKey(90), NodeKey(91))) - mean).abs() < 1e-9);
            }
        }
    }
}
