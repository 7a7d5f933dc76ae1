//! Names weights by their content.

use std::fmt;

use xxhash_rust::xxh3::Xxh3;

use crate::{Plan, Tensor};

/// Version of weights: 63 bits of a hash of their bytes, or [`Self::LOADED`] for the weights that a
/// process started with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightVersion(pub u64);

/// Set in every version that is a hash, so that none of them equals [`WeightVersion::LOADED`].
const HASHED: u64 = 1 << 63;

impl WeightVersion {
    /// The weights that a process loaded at its start. The fingerprint of the model names their
    /// content.
    pub const LOADED: Self = Self(1);
    /// No valid weights: an update in place was aborted, and the node has not restored its weights
    /// yet.
    pub const NONE: Self = Self(0);

    /// Returns the version of weights with this plan and these digests, one for each chunk.
    pub fn of_content(plan: &Plan, digests: &[u128]) -> Self {
        assert_eq!(plan.chunks().len(), digests.len(), "a digest for each chunk");
        let mut hash = Xxh3::new();
        hash.update(b"baton weights 1");
        hash.update(&plan.hash().to_le_bytes());
        digests.iter().for_each(|digest| hash.update(&digest.to_le_bytes()));
        Self(hash.digest128() as u64 | HASHED)
    }

    /// Returns the version of weights from a digest of each whole tensor. It depends on bytes,
    /// names, types and shapes, and differs from [`Self::of_content`] of the same weights.
    pub fn of_tensors(tensors: &mut [(Tensor, u64)]) -> Self {
        tensors.sort_by(|(one, _), (other, _)| one.name.cmp(&other.name));
        let mut hash = Xxh3::new();
        hash.update(b"baton weights by tensor 1");
        hash.update(&(tensors.len() as u64).to_le_bytes());
        for (tensor, digest) in tensors {
            tensor.hash_into(&mut hash);
            hash.update(&digest.to_le_bytes());
        }
        Self(hash.digest128() as u64 | HASHED)
    }
}

impl fmt::Display for WeightVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::LOADED => f.write_str("loaded"),
            Self::NONE => f.write_str("none"),
            Self(hash) => write!(f, "{hash:016x}"),
        }
    }
}

/// Digest of the bytes of a chunk, however they are divided into pieces.
#[derive(Clone, Default)]
pub struct ChunkDigest(Xxh3);

impl ChunkDigest {
    /// Adds the next bytes of the chunk.
    pub fn update(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.update(bytes);
        self
    }

    pub fn finish(&self) -> u128 {
        self.0.digest128()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(name: &str) -> Plan {
        let tensor =
            Tensor { name: name.into(), dtype: "BF16".into(), shape: vec![2, 3], bytes: 12 };
        Plan::new(vec![tensor], 8).unwrap()
    }

    #[test]
    fn version_depends_on_every_digest_and_on_the_plan() {
        let version = WeightVersion::of_content(&plan("a"), &[1, 2]);
        assert_eq!(version, WeightVersion::of_content(&plan("a"), &[1, 2]));
        assert_ne!(version, WeightVersion::of_content(&plan("a"), &[1, 3]));
        assert_ne!(version, WeightVersion::of_content(&plan("a"), &[2, 1]));
        assert_ne!(version, WeightVersion::of_content(&plan("b"), &[1, 2]));
        assert_ne!(version, WeightVersion::LOADED);
    }

    #[test]
    fn version_of_tensors_depends_on_every_tensor_but_not_on_their_order() {
        let tensor = |name: &str, rows, digest| {
            let tensor = Tensor {
                name: name.into(),
                dtype: "BF16".into(),
                shape: vec![rows, 4],
                bytes: rows * 8,
            };
            (tensor, digest)
        };
        let version = |mut tensors: Vec<_>| WeightVersion::of_tensors(&mut tensors);
        let first = version(vec![tensor("a", 2, 7), tensor("b", 3, 8)]);
        assert_eq!(version(vec![tensor("b", 3, 8), tensor("a", 2, 7)]), first);
        for other in [
            vec![tensor("a", 2, 8), tensor("b", 3, 7)],
            vec![tensor("a", 3, 7), tensor("b", 3, 8)],
            vec![tensor("c", 2, 7), tensor("b", 3, 8)],
            vec![tensor("a", 2, 7)],
        ] {
            assert_ne!(version(other), first);
        }
        assert_ne!(first, WeightVersion::LOADED);
    }

    #[test]
    fn digest_does_not_depend_on_the_cuts_of_a_chunk() {
        let digest = |pieces: &[&[u8]]| {
            let mut digest = ChunkDigest::default();
            pieces.iter().for_each(|piece| _ = digest.update(piece));
            digest.finish()
        };
        let whole = digest(&[b"abcdef"]);
        assert_eq!(digest(&[b"abc", b"def"]), whole);
        assert_eq!(digest(&[b"a", b"", b"bcde", b"f"]), whole);
        assert_ne!(digest(&[b"abcdeg"]), whole);
        assert_eq!(digest(&[]), digest(&[b""]));
    }
}
