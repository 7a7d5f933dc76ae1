//! Ids that the router creates, and labels that clients send.

use std::fmt;

use proto::ids::random_bits;
pub use proto::ids::{NoRandomness, TransferId};

/// Maximum length of a client's label.
const LABEL_CHARS_MAX: usize = 128;

/// Id of a request at the nodes: 128 random bits, equal for all attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(pub u128);

/// Returns a seed for a request without one.
pub fn mint_seed() -> Result<u64, NoRandomness> {
    random_bits().map(|bits| bits as u64)
}

/// Returns a random marker text that occurs nowhere else.
pub fn mint_mark() -> Result<String, NoRandomness> {
    random_bits().map(|bits| format!("{bits:032x}"))
}

impl RequestId {
    pub fn mint() -> Result<Self, NoRandomness> {
        random_bits().map(Self)
    }

    pub fn to_bytes(self) -> bytes::Bytes {
        bytes::Bytes::copy_from_slice(&self.0.to_be_bytes())
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Sanitises a client's label for headers and log lines: visible ASCII of bounded length. `None` if nothing is
/// left. The label is never a key.
pub fn label(text: &str) -> Option<String> {
    let label: String = text.chars().filter(char::is_ascii_graphic).take(LABEL_CHARS_MAX).collect();
    (!label.is_empty()).then_some(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_visible_and_bounded() {
        assert_eq!(label("req-1").as_deref(), Some("req-1"));
        assert_eq!(label("a\r\nb: c\u{7f}é").as_deref(), Some("ab:c"));
        assert_eq!(label("\n\t ").as_deref(), None);
        assert_eq!(label(&"x".repeat(4000)).unwrap().len(), LABEL_CHARS_MAX);
    }

    #[test]
    fn minted_ids_differ() {
        let ids = [RequestId::mint().unwrap(), RequestId::mint().unwrap()];
        assert_ne!(ids[0], ids[1]);
        assert_eq!(ids[0].to_string().len(), 32);
    }
}
