//! Router and engine compute the prefix keys of a prompt's blocks in separate crates. This test
//! compares both.

use cluster::{CacheIdentity, ModelIdentity, PrefixKeys};
use engine::{CacheSeeds, HashChain};
use proptest::prelude::*;

fn identity(model_fingerprint: u128, weight_version: u64) -> CacheIdentity {
    CacheIdentity::of(&ModelIdentity {
        model_fingerprint,
        weight_version,
        kv_layout: "block".into(),
        block_size: kernels::BLOCK_TOKENS as u32,
        dtype: "f32".into(),
        tp: 1,
        protocol_min: 1,
        protocol_max: 1,
    })
}

proptest! {
    #[test]
    fn router_and_engine_compute_equal_prefix_keys(
        model_fingerprint: u128,
        weight_version: u64,
        salt in "\\PC{0,40}",
        tokens in prop::collection::vec(any::<u32>(), 0..200),
    ) {
        let mut chain = HashChain::new(CacheSeeds { model_fingerprint, weight_version }, &salt);
        chain.extend(&tokens);
        let engines: Vec<u128> = chain.hashes().iter().map(|hash| hash.0).collect();
        let keys = PrefixKeys::new(identity(model_fingerprint, weight_version), &salt, &tokens);
        prop_assert_eq!(keys.keys(), engines);
    }
}
