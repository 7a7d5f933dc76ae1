//! Cache keys of a prompt's blocks, as nodes compute them.

use proto::cache_keys::KeyChain;

use crate::ModelIdentity;

/// Properties of a model that determine cache keys, together with tokens and salt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheIdentity {
    model_fingerprint: u128,
    weight_version: u64,
    block_size: u32,
}

impl CacheIdentity {
    pub fn of(identity: &ModelIdentity) -> Self {
        Self {
            model_fingerprint: identity.model_fingerprint,
            weight_version: identity.weight_version,
            block_size: identity.block_size,
        }
    }

    fn block_tokens(&self) -> usize {
        self.block_size.max(1) as usize
    }
}

/// Cache keys of one prompt on nodes of one identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixKeys {
    identity: CacheIdentity,
    keys: Vec<u128>,
    /// The last key; before the first block, the key that the first block's key derives from.
    last: u128,
}

impl PrefixKeys {
    /// Computes the keys of the full blocks of `tokens`, in order. `adapter` is the content hash of
    /// the request's adapter.
    pub fn new(
        identity: CacheIdentity,
        adapter: Option<u128>,
        cache_salt: &str,
        tokens: &[u32],
    ) -> Self {
        let CacheIdentity { model_fingerprint, weight_version, .. } = identity;
        let mut chain = KeyChain::new(model_fingerprint, weight_version, adapter, cache_salt);
        let blocks = tokens.chunks_exact(identity.block_tokens());
        let keys = blocks.map(|block| chain.add(block)).collect();
        Self { identity, keys, last: chain.last() }
    }

    /// Returns the key of the last full block of the prompt of these keys, followed by `output`;
    /// `None` without a full block.
    pub fn last_after(&self, prompt: &[u32], output: &[u32]) -> Option<u128> {
        let block_tokens = self.identity.block_tokens();
        let rest = [&prompt[self.keys.len() * block_tokens..], output].concat();
        let mut chain = KeyChain::after(self.last);
        let last = self.keys.last().copied();
        rest.chunks_exact(block_tokens).fold(last, |_, block| Some(chain.add(block)))
    }

    /// Returns the keys in the order of the blocks.
    pub fn keys(&self) -> &[u128] {
        &self.keys
    }

    /// Returns whether nodes of this identity use these keys.
    pub fn are_of(&self, identity: &ModelIdentity) -> bool {
        self.identity == CacheIdentity::of(identity)
    }
}

/// Identity of the nodes in unit tests.
#[cfg(test)]
pub(crate) fn test_identity() -> ModelIdentity {
    ModelIdentity {
        model_fingerprint: 5,
        weight_version: 1,
        kv_layout: "block".into(),
        block_size: 16,
        dtype: "f32".into(),
        tp: 1,
        protocol_min: 1,
        protocol_max: 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_a_prefix_are_a_prefix_of_the_keys() {
        let tokens: Vec<u32> = (0..100).collect();
        let long = PrefixKeys::new(CacheIdentity::of(&test_identity()), None, "", &tokens);
        assert_eq!(long.keys().len(), 6);
        for count in 0..tokens.len() {
            let short =
                PrefixKeys::new(CacheIdentity::of(&test_identity()), None, "", &tokens[..count]);
            assert_eq!(short.keys(), &long.keys()[..count / 16]);
        }
    }

    #[test]
    fn last_key_after_an_answer_is_that_of_a_prompt_with_the_answer() {
        let tokens: Vec<u32> = (0..100).collect();
        let keys_of = |count: usize| {
            PrefixKeys::new(CacheIdentity::of(&test_identity()), None, "salt", &tokens[..count])
        };
        for prompt in [0, 10, 16, 40, 100] {
            for end in prompt..=tokens.len() {
                let last = keys_of(prompt).last_after(&tokens[..prompt], &tokens[prompt..end]);
                assert_eq!(last, keys_of(end).keys().last().copied(), "{prompt} {end}");
            }
        }
    }

    #[test]
    fn keys_depend_on_adapter_salt_tokens_and_identity() {
        let tokens: Vec<u32> = (0..48).collect();
        let ours = PrefixKeys::new(CacheIdentity::of(&test_identity()), None, "", &tokens);
        let mut other = tokens.clone();
        other[20] += 1;
        let other = PrefixKeys::new(CacheIdentity::of(&test_identity()), None, "", &other);
        assert_eq!(other.keys()[0], ours.keys()[0]);
        assert!(other.keys()[1] != ours.keys()[1] && other.keys()[2] != ours.keys()[2]);

        let retrained = ModelIdentity { weight_version: 2, ..test_identity() };
        for foreign in [
            PrefixKeys::new(CacheIdentity::of(&test_identity()), Some(9), "", &tokens),
            PrefixKeys::new(CacheIdentity::of(&test_identity()), None, "tenant", &tokens),
            PrefixKeys::new(CacheIdentity::of(&retrained), None, "", &tokens),
        ] {
            assert!(foreign.keys().iter().all(|key| !ours.keys().contains(key)));
        }
        assert!(ours.are_of(&test_identity()) && !ours.are_of(&retrained));
    }
}
