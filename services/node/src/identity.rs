//! The identity of this node: which peers it can be paired with.

use cluster::{ModelIdentity, NodeRecord};
use kernels::{BLOCK_TOKENS, KvLayout, WeightFormat};
use kv_transfer::{api::Identity, control};

/// Weights are loaded once, at start.
pub(crate) const WEIGHT_VERSION: u64 = 1;

/// Returns what must be equal on two nodes that exchange KV.
pub(crate) fn identity(
    model_fingerprint: u128,
    weights: WeightFormat,
    layout: KvLayout,
) -> Identity {
    Identity {
        model_fingerprint,
        weight_version: WEIGHT_VERSION,
        kv_layout: layout.to_string(),
        block_size: BLOCK_TOKENS as u32,
        // KV of other weights has the same layout but different values.
        dtype: weights.to_string(),
        // Blocks on the wire have all heads, at every number of ranks.
        tp: 1,
        protocol_min: control::PROTOCOL_MIN,
        protocol_max: control::PROTOCOL_MAX,
    }
}

/// Returns the identity for the node's record.
pub(crate) fn model_identity(identity: &Identity) -> ModelIdentity {
    ModelIdentity {
        model_fingerprint: identity.model_fingerprint,
        weight_version: identity.weight_version,
        kv_layout: identity.kv_layout.clone(),
        block_size: identity.block_size,
        dtype: identity.dtype.clone(),
        tp: identity.tp,
        protocol_min: identity.protocol_min,
        protocol_max: identity.protocol_max,
    }
}

/// Returns the longest prompt: at least one position is left for a sampled token.
pub(crate) fn prompt_tokens_max(record_sequence_tokens_max: u32) -> u32 {
    record_sequence_tokens_max.saturating_sub(1)
}

/// Returns role, id and model for logs.
pub(crate) fn describe(record: &NodeRecord) -> String {
    format!("{} node {} for {}", record.role, record.node_id, record.model)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_whose_weights_are_in_other_formats_are_no_pair_though_their_kv_is_alike() {
        let identity = |weights: WeightFormat| {
            let dtype = weights.kv_dtype();
            let layout = KvLayout { layer_count: 2, kv_head_count: 3, head_dim: 64, dtype };
            model_identity(&identity(7, weights, layout))
        };
        let (bf16, q8) = (identity(WeightFormat::Bf16), identity(WeightFormat::Q8));
        assert_eq!(bf16.kv_layout, q8.kv_layout);
        assert!(!bf16.fits(&q8) && q8.fits(&identity(WeightFormat::Q8)));
    }
}
