//! Tags of peers: a node connects only to an address that another member of the cluster has tagged
//! as its own.

use ring::hmac;

use super::{ClusterSecret, TAG_BYTES};
use crate::v1;

impl ClusterSecret {
    fn peer_key(&self) -> hmac::Key {
        self.key("baton peer 1")
    }

    /// Returns the tag of this peer's id, epoch and endpoint.
    pub fn peer_tag(&self, peer: &v1::Peer) -> [u8; TAG_BYTES] {
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(hmac::sign(&self.peer_key(), &tagged(peer)).as_ref());
        tag
    }

    /// Returns whether the peer has the tag of its other fields.
    pub fn is_tagged(&self, peer: &v1::Peer) -> bool {
        // Compares in constant time.
        hmac::verify(&self.peer_key(), &tagged(peer), &peer.tag).is_ok()
    }
}

/// Returns the bytes under the tag. Each field follows its length.
fn tagged(peer: &v1::Peer) -> Vec<u8> {
    let fields = [peer.node_id.as_bytes(), &peer.epoch, peer.control_endpoint.as_bytes()];
    let with_length = |field: &[u8]| [&(field.len() as u64).to_be_bytes(), field].concat();
    fields.into_iter().flat_map(with_length).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tag_covers_every_field_and_the_secret() {
        let secret = ClusterSecret::new("a secret of the cluster").unwrap();
        let mut peer = v1::Peer {
            node_id: "prefill-0".into(),
            epoch: vec![1; 16].into(),
            control_endpoint: "tcp://10.0.0.1:5555".into(),
            ..Default::default()
        };
        assert!(!secret.is_tagged(&peer));
        peer.tag = secret.peer_tag(&peer).to_vec().into();
        assert!(secret.is_tagged(&peer));
        let other = ClusterSecret::new("a secret of another cluster").unwrap();
        assert!(!other.is_tagged(&peer));
        let changes: [fn(&mut v1::Peer); 5] = [
            |peer| peer.node_id = "prefill-1".into(),
            |peer| peer.epoch = vec![2; 16].into(),
            |peer| peer.control_endpoint = "tcp://10.0.0.2:5555".into(),
            |peer| peer.tag = peer.tag.slice(1..),
            |peer| {
                // The same bytes in a row, in other fields.
                peer.node_id = "prefill-".into();
                peer.epoch = [&b"0"[..], &[1; 16]].concat().into();
            },
        ];
        for (index, change) in changes.iter().enumerate() {
            let mut changed = peer.clone();
            change(&mut changed);
            assert!(!secret.is_tagged(&changed), "change {index}");
        }
    }
}
