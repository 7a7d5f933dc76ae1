//! Proofs of nodes: the response to some calls proves that the node knows the cluster secret.

use ring::hmac;
use tonic::metadata::{Binary, MetadataMap, MetadataValue};

use super::{CallVerifier, ClusterSecret, TAG_BYTES, TOKEN_BYTES};
use crate::ids::Epoch;

/// Metadata key of the proof.
pub const PROOF_KEY: &str = "baton-proof-bin";

const EPOCH_BYTES: usize = 16;
const PROOF_BYTES: usize = EPOCH_BYTES + TAG_BYTES;

impl ClusterSecret {
    pub(super) fn proof_key(&self) -> hmac::Key {
        self.key("baton node proof 1")
    }
}

impl CallVerifier {
    /// Returns the proof for the call with this token.
    pub fn proof(&self, token: &[u8]) -> MetadataValue<Binary> {
        let epoch = self.me.to_bytes();
        let tag = hmac::sign(&self.proof_key, &[token, &epoch].concat());
        MetadataValue::from_bytes(&[&epoch, tag.as_ref()].concat())
    }
}

/// Reason why a node is not trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidProof {
    #[error(
        "the node has not proved that it knows cluster.secret; expected a node of this release"
    )]
    Missing,
    #[error(
        "the node's proof was made with another cluster.secret or for another call; expected the same cluster.secret \
         on all services"
    )]
    Secret,
}

/// Checks the proof in the response to one call.
pub struct ProofCheck {
    pub(super) key: hmac::Key,
    pub(super) token: [u8; TOKEN_BYTES],
}

impl ProofCheck {
    /// Returns the epoch of the node that knows the secret.
    pub fn check(&self, response: &MetadataMap) -> Result<Epoch, InvalidProof> {
        let proof = response.get_bin(PROOF_KEY).and_then(|value| value.to_bytes().ok());
        let proof = proof.filter(|proof| proof.len() == PROOF_BYTES);
        let proof = proof.ok_or(InvalidProof::Missing)?;
        let (epoch, tag) = proof.split_at(EPOCH_BYTES);
        // Compares in constant time.
        hmac::verify(&self.key, &[&self.token, epoch].concat(), tag)
            .map_err(|_| InvalidProof::Secret)?;
        Epoch::from_bytes(epoch).map_err(|_| InvalidProof::Secret)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::{CallSigner, OBSERVE, TOKEN_KEY};

    fn secret(text: &str) -> ClusterSecret {
        ClusterSecret::new(text).unwrap()
    }

    /// Returns the check of a call, and the call's token.
    fn call() -> (ProofCheck, Vec<u8>) {
        let mut metadata = MetadataMap::new();
        let signer = CallSigner::new(&secret("a secret of the cluster")).unwrap();
        let check = signer.sign_with_proof(OBSERVE, &mut metadata);
        let token = metadata.get_bin(TOKEN_KEY).unwrap().to_bytes().unwrap().to_vec();
        (check, token)
    }

    fn check(check: &ProofCheck, proof: &[u8]) -> Result<Epoch, InvalidProof> {
        let mut response = MetadataMap::new();
        response.insert_bin(PROOF_KEY, MetadataValue::from_bytes(proof));
        check.check(&response)
    }

    #[test]
    fn proof_of_the_secret_names_the_node() {
        let (call, token) = call();
        let node = CallVerifier::new(&secret("a secret of the cluster"), Epoch(7));
        let proof = node.proof(&token).to_bytes().unwrap();
        assert_eq!(check(&call, &proof), Ok(Epoch(7)));
        for bit in 0..8 * proof.len() {
            let mut changed = proof.to_vec();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(check(&call, &changed), Err(InvalidProof::Secret), "bit {bit}");
        }
        assert_eq!(check(&call, &proof[1..]), Err(InvalidProof::Missing));
        assert_eq!(call.check(&MetadataMap::new()), Err(InvalidProof::Missing));
    }

    #[test]
    fn proof_for_another_call_or_with_another_secret_is_rejected() {
        let ((call, token), (_, other_token)) = (call(), call());
        let node = CallVerifier::new(&secret("a secret of the cluster"), Epoch(7));
        let stranger = CallVerifier::new(&secret("a secret of another cluster"), Epoch(7));
        for proof in [node.proof(&other_token), stranger.proof(&token)] {
            let proof = proof.to_bytes().unwrap();
            assert_eq!(check(&call, &proof), Err(InvalidProof::Secret));
        }
        // The token itself is a tag of the same secret.
        assert_eq!(check(&call, &token[..PROOF_BYTES]), Err(InvalidProof::Secret));
    }
}
