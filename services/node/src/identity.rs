//! The identity of a node: which peers it can be paired with, and the limits that its record
//! announces.

use cluster::{ModelIdentity, NodeRecord};
use engine::CacheSeeds;
use kernels::{BLOCK_TOKENS, KvGroups, KvLayout, WeightFormat};
use kv_transfer::control;
use weight_transfer::WeightVersion;

use crate::attempt::AttemptLimits;

/// Returns the identity that must be equal on two nodes that exchange KV. `layout` is the layout of
/// a block with all heads.
pub fn model_identity(
    model_fingerprint: u128,
    weights: WeightFormat,
    layout: KvLayout,
    groups: &KvGroups,
) -> ModelIdentity {
    ModelIdentity {
        model_fingerprint,
        weight_version: WeightVersion::LOADED.0,
        kv_layout: groups.describe(layout),
        block_size: BLOCK_TOKENS as u32,
        // KV of other weights has the same layout but different values.
        dtype: weights.to_string(),
        // Blocks on the wire have all heads, at every number of ranks.
        tp: 1,
        protocol_min: control::PROTOCOL_MIN,
        protocol_max: control::PROTOCOL_MAX,
    }
}

/// Returns the seeds of the prefix cache.
pub fn cache_seeds(identity: &ModelIdentity) -> CacheSeeds {
    let ModelIdentity { model_fingerprint, weight_version, .. } = *identity;
    CacheSeeds { model_fingerprint, weight_version }
}

/// Returns the longest prompt: at least one position is left for a sampled token.
pub fn prompt_tokens_max(sequence_tokens_max: u32) -> u32 {
    sequence_tokens_max.saturating_sub(1)
}

/// Returns the window of each KV group in tokens, 0 for a group without a window.
pub fn kv_windows(groups: &KvGroups) -> Vec<u32> {
    groups.windows().map(|window| window.map_or(0, |tokens| tokens.get() as u32)).collect()
}

/// Returns the bounds of attempts at the node with this record.
pub fn attempt_limits(record: &NodeRecord) -> AttemptLimits {
    AttemptLimits {
        epoch: record.epoch,
        vocabulary_size: record.vocabulary_size,
        prompt_tokens_max: record.prompt_tokens_max,
        sequence_tokens_max: record.sequence_tokens_max,
        pooling: record.pooling,
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use kernels::KvFormat;

    use super::*;

    #[test]
    fn nodes_of_other_kv_groups_are_not_paired() {
        let format = WeightFormat::F32.kv_format();
        let whole = KvLayout { layer_count: 2, kv_head_count: 3, head_dim: 64, format };
        let identity = |windows: [usize; 2]| {
            let groups = KvGroups::of_windows(&windows.map(NonZeroUsize::new));
            model_identity(7, WeightFormat::F32, groups.block_layout(whole), &groups)
        };
        let lists = [[0, 0], [9, 9], [8, 8], [9, 0], [0, 9], [9, 8]].map(identity);
        for (index, one) in lists.iter().enumerate() {
            for (other_index, other) in lists.iter().enumerate() {
                assert_eq!(one.fits(other), index == other_index, "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn nodes_of_other_kv_formats_are_not_paired() {
        let identity = |format| {
            let layout = KvLayout { layer_count: 2, kv_head_count: 3, head_dim: 64, format };
            model_identity(7, WeightFormat::Bf16, layout, &KvGroups::default())
        };
        let (bf16, fp8) = (identity(KvFormat::Bf16), identity(KvFormat::Fp8));
        assert!(!bf16.fits(&fp8) && fp8.fits(&identity(KvFormat::Fp8)));
        assert!(fp8.kv_layout.ends_with(" kv=fp8"), "{}", fp8.kv_layout);
    }

    #[test]
    fn nodes_of_other_weight_formats_are_not_paired() {
        let identity = |weights: WeightFormat| {
            let format = weights.kv_format();
            let layout = KvLayout { layer_count: 2, kv_head_count: 3, head_dim: 64, format };
            model_identity(7, weights, layout, &KvGroups::default())
        };
        let (bf16, q8) = (identity(WeightFormat::Bf16), identity(WeightFormat::Q8));
        assert_eq!(bf16.kv_layout, q8.kv_layout);
        assert!(!bf16.fits(&q8) && q8.fits(&identity(WeightFormat::Q8)));
    }
}
