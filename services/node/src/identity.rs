//! Who this process is and what it can be paired with.

use cluster::{ModelIdentity, NodeRecord};
use kernels::{BLOCK_TOKENS, KvLayout};
use kv_transfer::{api::Identity, notice};

/// Weights are loaded once, at start; an update at run time would count up.
pub(crate) const WEIGHT_VERSION: u64 = 1;

/// What must be equal on two nodes that exchange KV.
pub(crate) fn identity(model_fingerprint: u128, layout: KvLayout) -> Identity {
    Identity {
        model_fingerprint,
        weight_version: WEIGHT_VERSION,
        kv_layout: layout.to_string(),
        block_size: BLOCK_TOKENS as u32,
        dtype: layout.dtype.to_string(),
        // One rank holds all heads.
        tp: 1,
        protocol_min: notice::PROTOCOL_MIN,
        protocol_max: notice::PROTOCOL_MAX,
    }
}

/// The same, as routers are told.
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

/// A prompt leaves room for at least one token.
pub(crate) fn prompt_tokens_max(record_sequence_tokens_max: u32) -> u32 {
    record_sequence_tokens_max.saturating_sub(1)
}

/// For logs: what kind of node, of which model.
pub(crate) fn describe(record: &NodeRecord) -> String {
    format!("{} node {} for {}", record.role, record.node_id, record.model)
}
