//! The ids and the model identity that routers and nodes exchange. An id has 128 random bits and travels as
//! 16 bytes, most significant first.

use std::fmt;

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

/// Id of a request, equal in all of its attempts.
#[derive(Clone, Copy, PartialEq, Eq)]
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
        Some(Self(u128::from_be_bytes(bytes.try_into().ok()?)))
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
        let array = bytes.try_into().map_err(|_| EpochError::Length { byte_count: bytes.len() })?;
        Self::checked(u128::from_be_bytes(array))
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

/// Properties that must be equal on two nodes that exchange KV.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModelIdentity {
    /// Hash of the configuration, and of names, encodings, shapes and samples of the weights; big-endian on the wire.
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
    /// Returns whether two nodes can exchange KV: all properties are equal and the protocol versions overlap.
    pub fn fits(&self, other: &Self) -> bool {
        let protocols =
            self.protocol_min <= other.protocol_max && other.protocol_min <= self.protocol_max;
        protocols
            && self.model_fingerprint == other.model_fingerprint
            && self.weight_version == other.weight_version
            && self.kv_layout == other.kv_layout
            && self.block_size == other.block_size
            && self.dtype == other.dtype
            && self.tp == other.tp
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
}
