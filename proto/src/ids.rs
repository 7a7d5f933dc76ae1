//! The ids and the model identity that routers and nodes exchange. Except for [`NodeId`], an id has
//! 128 random bits and travels as 16 bytes, most significant first.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use crate::v1;

/// The operating system returned no random numbers, so no id can be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot create an id: the operating system returned no random numbers: {0}")]
pub struct NoRandomness(getrandom::Error);

/// Returns 128 bits from the operating system's random generator.
pub fn random_bits() -> Result<u128, NoRandomness> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(NoRandomness)?;
    Ok(u128::from_be_bytes(bytes))
}

/// Reads 16 bytes, most significant first; `None` for any other number of bytes.
pub fn bits(bytes: &[u8]) -> Option<u128> {
    bytes.try_into().ok().map(u128::from_be_bytes)
}

/// Id of a request, equal in all of its attempts.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestId(pub u128);

impl RequestId {
    pub fn mint() -> Result<Self, NoRandomness> {
        random_bits().map(Self)
    }

    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }
}

/// Id of one attempt and of its KV transfer. The router creates one per attempt.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(pub u128);

impl TransferId {
    pub fn mint() -> Result<Self, NoRandomness> {
        random_bits().map(Self)
    }

    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    /// Returns `None` unless `bytes` has exactly 16 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bits(bytes).map(Self)
    }
}

/// Id of one run of a process, created at its start. A restarted node has a new epoch, so it never
/// accepts a message that was meant for its predecessor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Epoch(pub u128);

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum EpochError {
    #[error(transparent)]
    NoRandomness(#[from] NoRandomness),
    #[error("invalid epoch: {byte_count} bytes; expected 16")]
    Length { byte_count: usize },
    #[error("invalid epoch {text:?}; expected 32 digits of 0-9 and a-f")]
    Text { text: String },
    /// No process has this epoch: the sender left the field unset.
    #[error("invalid epoch 0; expected the epoch of a process")]
    Zero,
}

impl Epoch {
    pub fn mint() -> Result<Self, EpochError> {
        Self::checked(random_bits()?)
    }

    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self, EpochError> {
        Self::checked(bits(bytes).ok_or(EpochError::Length { byte_count: bytes.len() })?)
    }

    /// Parses the 32 hexadecimal digits that [`fmt::Display`] writes.
    pub fn parse(text: &str) -> Result<Self, EpochError> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let invalid = || EpochError::Text { text: text.chars().take(64).collect() };
        if text.len() != 32 || !text.bytes().all(is_digit) {
            return Err(invalid());
        }
        Self::checked(u128::from_str_radix(text, 16).map_err(|_| invalid())?)
    }

    fn checked(bits: u128) -> Result<Self, EpochError> {
        if bits == 0 { Err(EpochError::Zero) } else { Ok(Self(bits)) }
    }
}

/// Maximum length of a node's name; it fits into a log line, a metric label and a Kubernetes pod
/// name.
const NODE_ID_BYTES_MAX: usize = 64;

/// A node's name: 1 to 64 ASCII letters, digits, `.`, `_` and `-`, first a letter or digit. The
/// name survives restarts; the [`Epoch`] identifies the process. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(Arc<str>);

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum NodeIdError {
    #[error("invalid node id: {byte_count} bytes; expected 1 to {NODE_ID_BYTES_MAX}")]
    Length { byte_count: usize },
    #[error(
        "invalid node id: {character:?} at byte {position}; allowed: ASCII letters, digits, '.', '_', '-', first a letter or digit"
    )]
    Character { character: char, position: usize },
}

impl NodeId {
    pub fn parse(text: &str) -> Result<Self, NodeIdError> {
        if text.is_empty() || text.len() > NODE_ID_BYTES_MAX {
            return Err(NodeIdError::Length { byte_count: text.len() });
        }
        let allowed = |(position, character): (usize, char)| {
            character.is_ascii_alphanumeric() || (position > 0 && "._-".contains(character))
        };
        match text.char_indices().find(|found| !allowed(*found)) {
            Some((position, character)) => Err(NodeIdError::Character { character, position }),
            None => Ok(Self(text.into())),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Serialize for NodeId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for NodeId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Properties that must be equal on two nodes that exchange KV.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModelIdentity {
    /// Hash of the configuration and the weights, as in `ModelIdentity` of `node.proto`; big-endian
    /// on the wire.
    pub model_fingerprint: u128,
    pub weight_version: u64,
    pub kv_layout: String,
    /// Tokens per block.
    pub block_size: u32,
    pub dtype: String,
    /// Number of tensor-parallel ranks.
    pub tp: u32,
    pub protocol_min: u32,
    pub protocol_max: u32,
}

impl ModelIdentity {
    /// Returns whether two nodes can exchange KV: all properties are equal and the protocol
    /// versions overlap.
    pub fn fits(&self, other: &Self) -> bool {
        self.protocols_overlap(other) && self.properties() == other.properties()
    }

    /// Returns whether two nodes can exchange KV if their weight versions are disregarded.
    pub fn fits_but_weights(&self, other: &Self) -> bool {
        self.fits(&Self { weight_version: self.weight_version, ..other.clone() })
    }

    /// Returns the differences in one line with both fingerprints; `None` if the two nodes can
    /// exchange KV.
    pub fn difference(&self, other: &Self) -> Option<String> {
        if self.fits(other) {
            return None;
        }
        let pairs = self.properties().into_iter().zip(other.properties());
        let mut differences: Vec<String> = pairs
            .filter(|(ours, theirs)| ours != theirs)
            .map(|((name, ours), (_, theirs))| format!("{name} {ours} against {theirs}"))
            .collect();
        if !self.protocols_overlap(other) {
            differences.push(format!(
                "protocol {} to {} against {} to {}",
                self.protocol_min, self.protocol_max, other.protocol_min, other.protocol_max
            ));
        }
        Some(format!(
            "model {:032x} cannot exchange KV with model {:032x}: {}",
            self.model_fingerprint,
            other.model_fingerprint,
            differences.join(", ")
        ))
    }

    /// Returns why KV of this fingerprint and weight version is incompatible; `None` if it is
    /// compatible.
    pub fn weights_difference(
        &self,
        model_fingerprint: u128,
        weight_version: u64,
    ) -> Option<String> {
        self.difference(&Self { model_fingerprint, weight_version, ..self.clone() })
    }

    fn protocols_overlap(&self, other: &Self) -> bool {
        self.protocol_min <= other.protocol_max && other.protocol_min <= self.protocol_max
    }

    /// Returns the properties that must be equal.
    fn properties(&self) -> [(&'static str, Property<'_>); 6] {
        [
            ("model_fingerprint", Property::Hash(self.model_fingerprint)),
            ("weight_version", Property::Number(self.weight_version)),
            ("kv_layout", Property::Text(&self.kv_layout)),
            ("block_size", Property::Number(self.block_size.into())),
            ("dtype", Property::Text(&self.dtype)),
            ("tp", Property::Number(self.tp.into())),
        ]
    }
}

/// Value of a property of a [`ModelIdentity`].
#[derive(PartialEq)]
enum Property<'a> {
    Hash(u128),
    Number(u64),
    Text(&'a str),
}

impl fmt::Display for Property<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hash(hash) => write!(f, "{hash:032x}"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Text(text) => write!(f, "{text:?}"),
        }
    }
}

impl From<&ModelIdentity> for v1::ModelIdentity {
    fn from(identity: &ModelIdentity) -> Self {
        Self {
            model_fingerprint: identity.model_fingerprint.to_be_bytes().to_vec().into(),
            weight_version: identity.weight_version,
            kv_layout: identity.kv_layout.clone(),
            block_size: identity.block_size,
            dtype: identity.dtype.clone(),
            tp: identity.tp,
            protocol_min: identity.protocol_min,
            protocol_max: identity.protocol_max,
        }
    }
}

/// Writes an id as 32 hexadecimal digits, in logs and in `Debug` output of larger types.
macro_rules! hexadecimal {
    ($id:ty, $($format:ident),+) => {
        $(impl fmt::$format for $id {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", self.0)
            }
        })+
    };
}

hexadecimal!(RequestId, Debug, Display);
hexadecimal!(TransferId, Debug, Display);
hexadecimal!(Epoch, Debug, Display);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epoch_survives_bytes_and_text() {
        let (a, b) = (Epoch::mint().unwrap(), Epoch::mint().unwrap());
        assert_ne!(a, b);
        assert_eq!(Epoch::from_bytes(&a.to_bytes()), Ok(a));
        assert_eq!(Epoch::parse(&a.to_string()), Ok(a));
    }

    #[test]
    fn zero_or_truncated_epoch_is_rejected() {
        assert_eq!(Epoch::from_bytes(&[0; 16]), Err(EpochError::Zero));
        assert_eq!(Epoch::from_bytes(&[]), Err(EpochError::Length { byte_count: 0 }));
        assert_eq!(Epoch::from_bytes(&[1; 17]), Err(EpochError::Length { byte_count: 17 }));
        assert_eq!(Epoch::parse(&"0".repeat(32)), Err(EpochError::Zero));
        assert!(matches!(Epoch::parse("0A"), Err(EpochError::Text { .. })));
    }

    #[test]
    fn transfer_id_survives_bytes_and_needs_all_of_them() {
        let (a, b) = (TransferId::mint().unwrap(), TransferId::mint().unwrap());
        assert_ne!(a, b);
        assert_eq!(TransferId::from_bytes(&a.to_bytes()), Some(a));
        assert_eq!(TransferId::from_bytes(&a.to_bytes()[1..]), None);
        assert_eq!(TransferId(0xab).to_string(), format!("{:0>32}", "ab"));
    }

    #[test]
    fn pod_names_and_default_names_are_valid_node_ids() {
        for text in ["decode-50061", "baton-prefill-0", "a", "node_1.rack-2", "7"] {
            assert_eq!(NodeId::parse(text).unwrap().as_str(), text);
        }
    }

    #[test]
    fn invalid_node_ids_are_rejected() {
        assert_eq!(NodeId::parse(""), Err(NodeIdError::Length { byte_count: 0 }));
        assert_eq!(NodeId::parse(&"x".repeat(65)), Err(NodeIdError::Length { byte_count: 65 }));
        for (text, character, position) in
            [("-a", '-', 0), ("a b", ' ', 1), ("a\n", '\n', 1), ("né", 'é', 1)]
        {
            assert_eq!(NodeId::parse(text), Err(NodeIdError::Character { character, position }));
        }
    }

    fn identity() -> ModelIdentity {
        ModelIdentity {
            model_fingerprint: 0xaa,
            weight_version: 1,
            kv_layout: "layers=2".to_owned(),
            block_size: 16,
            dtype: "bf16".to_owned(),
            tp: 1,
            protocol_min: 1,
            protocol_max: 2,
        }
    }

    #[test]
    fn equal_identities_and_overlapping_protocols_match() {
        let newer = ModelIdentity { protocol_min: 2, protocol_max: 3, ..identity() };
        assert_eq!(identity().difference(&identity()), None);
        assert_eq!(identity().difference(&newer), None);
        assert_eq!(newer.difference(&identity()), None);
    }

    #[test]
    fn every_difference_is_listed_with_both_fingerprints() {
        let theirs = ModelIdentity {
            model_fingerprint: 0xbb,
            weight_version: 7,
            kv_layout: "layers=3".to_owned(),
            block_size: 32,
            dtype: "f32".to_owned(),
            tp: 2,
            protocol_min: 3,
            protocol_max: 3,
        };
        let line = identity().difference(&theirs).expect("nothing is equal");
        for part in [
            "000000000000000000000000000000aa",
            "000000000000000000000000000000bb",
            "weight_version 1 against 7",
            "\"layers=2\" against \"layers=3\"",
            "block_size 16 against 32",
            "\"bf16\" against \"f32\"",
            "tp 1 against 2",
            "protocol 1 to 2 against 3 to 3",
        ] {
            assert!(line.contains(part), "{line} lacks {part}");
        }
    }
}
