//! Which run of a node this is.

use std::fmt;

/// 128 random bits minted once per process start. Two processes never share one, so a message meant
/// for a process that is gone is never taken by its successor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Epoch(u128);

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum EpochError {
    #[error("the operating system gave no random bits: {reason}")]
    NoRandomness { reason: String },
    #[error("an epoch has 16 bytes, not {byte_count}")]
    Length { byte_count: usize },
    #[error("{text:?} is no epoch; allowed: 32 digits of 0-9 and a-f")]
    Text { text: String },
    /// Nobody mints it; it would be a forgotten field.
    #[error("an epoch of zero names no process")]
    Zero,
}

impl Epoch {
    /// A new one. Fails only where the operating system has no randomness.
    pub fn mint() -> Result<Self, EpochError> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)
            .map_err(|error| EpochError::NoRandomness { reason: error.to_string() })?;
        Self::from_bytes(&bytes)
    }

    /// From the 16 bytes that stand for it on the wire, most significant first.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, EpochError> {
        let array: [u8; 16] =
            bytes.try_into().map_err(|_| EpochError::Length { byte_count: bytes.len() })?;
        match u128::from_be_bytes(array) {
            0 => Err(EpochError::Zero),
            value => Ok(Self(value)),
        }
    }

    /// From its 32 hexadecimal digits, as [`fmt::Display`] writes them.
    pub fn parse(text: &str) -> Result<Self, EpochError> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let wrong = || EpochError::Text { text: text.chars().take(64).collect() };
        if text.len() != 32 || !text.bytes().all(is_digit) {
            return Err(wrong());
        }
        let value = u128::from_str_radix(text, 16).map_err(|_| wrong())?;
        Self::from_bytes(&value.to_be_bytes())
    }

    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    pub fn value(self) -> u128 {
        self.0
    }
}

impl fmt::Debug for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minted_epochs_differ_and_survive_the_wire() {
        let (a, b) = (Epoch::mint().unwrap(), Epoch::mint().unwrap());
        assert_ne!(a, b);
        assert_eq!(Epoch::from_bytes(&a.to_bytes()), Ok(a));
        assert_eq!(Epoch::parse(&a.to_string()), Ok(a));
    }

    #[test]
    fn a_forgotten_or_cut_epoch_is_refused() {
        assert_eq!(Epoch::from_bytes(&[0; 16]), Err(EpochError::Zero));
        assert_eq!(Epoch::from_bytes(&[]), Err(EpochError::Length { byte_count: 0 }));
        assert_eq!(Epoch::from_bytes(&[1; 17]), Err(EpochError::Length { byte_count: 17 }));
    }
}
