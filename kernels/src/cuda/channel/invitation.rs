//! Handshake of a channel: the sender's invitation and the receiver's answer.

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::peer::EXPORT_BYTES_MAX;

/// Prefix of both messages, with the version of their format.
const MAGIC: [u8; 8] = *b"BATONNC7";

/// Largest number of communicators per link.
pub(super) const LANES_MAX: usize = 2;
/// Largest number of ranks of a node.
pub(super) const PARTS_MAX: usize = 8;
/// Largest number of communicators of a channel.
pub(super) const COMMUNICATORS_MAX: usize = LANES_MAX * PARTS_MAX;

/// The sender's half of the handshake.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Invitation {
    pub version: i32,
    /// Size of a block with all heads.
    pub block_bytes: u64,
    pub slot_bytes: u64,
    /// Runs of at least this many contiguous bytes are sent without staging.
    pub direct_bytes: u64,
    /// Communicators per link.
    pub lanes: usize,
    /// The CTAs that the sender allows the channel on each GPU; `None` means no limit.
    pub max_ctas: Option<u32>,
    /// The GPUs of the sender's parts, in order of rank.
    pub uuids: Vec<String>,
}

/// The receiver's half of the handshake.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct InvitationAnswer {
    /// The CTAs that the receiver allows the channel on each GPU; `None` means no limit.
    pub max_ctas: Option<u32>,
    /// The GPUs of the receiver's parts, in order of rank.
    pub uuids: Vec<String>,
    /// The bytes of a `UniqueId` for each communicator, in pieces because serde supports no longer
    /// arrays.
    pub ids: Vec<[[u8; 32]; 4]>,
}

/// Returns the limit of CTAs that holds for both ends: the smaller one.
pub(super) fn agreed_ctas(one: Option<u32>, other: Option<u32>) -> Option<u32> {
    one.into_iter().chain(other).min()
}

impl Invitation {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        encode(self)
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let invitation: Self = decode("invitation", bytes)?;
        check("lanes", invitation.lanes, LANES_MAX)?;
        check("parts", invitation.uuids.len(), PARTS_MAX)?;
        Ok(invitation)
    }
}

impl InvitationAnswer {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        encode(self)
    }

    /// Parses an answer. `ids` returns the number of communicator ids for the answering node's
    /// number of parts.
    pub(super) fn from_bytes(bytes: &[u8], ids: impl Fn(usize) -> usize) -> Result<Self, String> {
        let answer: Self = decode("answer", bytes)?;
        check("parts", answer.uuids.len(), PARTS_MAX)?;
        let (found, expected) = (answer.ids.len(), ids(answer.uuids.len()));
        if found != expected {
            return Err(format!("invalid answer: {found} communicator ids; expected {expected}"));
        }
        Ok(answer)
    }
}

fn check(what: &str, value: usize, max: usize) -> Result<(), String> {
    match (1..=max).contains(&value) {
        true => Ok(()),
        false => Err(format!("invalid {what}: {value}; expected 1 to {max}")),
    }
}

fn encode(message: &impl Serialize) -> Vec<u8> {
    let bytes = postcard::to_extend(message, MAGIC.to_vec()).expect("memory does not fail");
    assert!(bytes.len() <= EXPORT_BYTES_MAX, "{} bytes of a handshake", bytes.len());
    bytes
}

fn decode<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, String> {
    let Some(body) = bytes.strip_prefix(&MAGIC) else {
        let (theirs, ours) = (bytes.get(..MAGIC.len()).unwrap_or(bytes), MAGIC.escape_ascii());
        let theirs = theirs.escape_ascii();
        return Err(format!("invalid {what}: it begins with {theirs}; expected {ours}"));
    };
    let (message, rest) =
        postcard::take_from_bytes(body).map_err(|error| format!("invalid {what}: {error}"))?;
    match rest.len() {
        0 => Ok(message),
        more => Err(format!("invalid {what}: {more} bytes too many")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uuids(count: usize) -> Vec<String> {
        let uuid = |number| format!("GPU-1f2e3d4c-0506-0708-090a-0b0c0d0e0f{number:02}");
        (0..count).map(uuid).collect()
    }

    fn id(byte: u8) -> [[u8; 32]; 4] {
        [[byte; 32]; 4]
    }

    #[test]
    fn invitation_round_trips_and_malformed_ones_are_rejected() {
        for count in [1, 2, PARTS_MAX] {
            let invitation = Invitation {
                version: 22809,
                block_bytes: 4096,
                slot_bytes: 1 << 25,
                direct_bytes: 1 << 23,
                lanes: 2,
                max_ctas: (count > 1).then_some(count as u32),
                uuids: uuids(count),
            };
            let bytes = invitation.to_bytes();
            assert!(bytes.len() <= EXPORT_BYTES_MAX);
            assert_eq!(Invitation::from_bytes(&bytes), Ok(invitation.clone()));
            let rejected =
                |bytes: &[u8]| Invitation::from_bytes(bytes).expect_err("it is rejected");
            for length in 0..bytes.len() {
                let message_of = rejected(&bytes[..length]);
                assert!(message_of.contains("invalid invitation: "), "{message_of}");
            }
            assert!(rejected(&[&bytes[..], &[0]].concat()).contains("1 bytes too many"));
            let mut other = bytes.clone();
            other[0] = b'b';
            assert!(rejected(&other).contains("begins with bATONNC7; expected BATONNC7"));
            for lanes in [0, 3, usize::MAX] {
                let message_of = rejected(&Invitation { lanes, ..invitation.clone() }.to_bytes());
                assert_eq!(message_of, format!("invalid lanes: {lanes}; expected 1 to 2"));
            }
            for parts in [0, PARTS_MAX + 1] {
                let uuids = uuids(parts);
                let message_of = rejected(&Invitation { uuids, ..invitation.clone() }.to_bytes());
                assert_eq!(message_of, format!("invalid parts: {parts}; expected 1 to 8"));
            }
        }
    }

    #[test]
    fn answer_contains_an_id_for_each_communicator() {
        let ids = (0..4).map(id).collect();
        let answer = InvitationAnswer { max_ctas: Some(7), uuids: uuids(2), ids };
        let bytes = answer.to_bytes();
        assert_eq!(InvitationAnswer::from_bytes(&bytes, |parts| 2 * parts), Ok(answer));
        for (per_part, expected) in [(3, 6), (1, 2)] {
            let error = InvitationAnswer::from_bytes(&bytes, |parts| per_part * parts).unwrap_err();
            assert!(error.contains(&format!("4 communicator ids; expected {expected}")), "{error}");
        }
        for length in 0..bytes.len() {
            assert!(InvitationAnswer::from_bytes(&bytes[..length], |parts| 2 * parts).is_err());
        }
        let (ids, uuids) = (vec![id(1); COMMUNICATORS_MAX], uuids(PARTS_MAX));
        let answer = InvitationAnswer { max_ctas: Some(7), uuids, ids };
        assert!(answer.to_bytes().len() <= EXPORT_BYTES_MAX);
    }

    #[test]
    fn smaller_max_ctas_of_both_ends_holds() {
        assert_eq!(agreed_ctas(Some(4), Some(8)), Some(4));
        assert_eq!(agreed_ctas(Some(8), Some(4)), Some(4));
        assert_eq!(agreed_ctas(None, Some(4)), Some(4));
        assert_eq!(agreed_ctas(Some(4), None), Some(4));
        assert_eq!(agreed_ctas(None, None), None);
    }
}
