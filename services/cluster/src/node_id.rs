//! Node names.

use std::{fmt, sync::Arc};

/// Maximum length of a name; it fits into a log line, a metric label and a Kubernetes pod name.
const BYTES_MAX: usize = 64;

/// A node's name: 1 to 64 ASCII letters, digits, `.`, `_` and `-`, first a letter or digit. The name survives
/// restarts; the [`crate::Epoch`] identifies the process. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(Arc<str>);

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum NodeIdError {
    #[error("a node id has 1 to {BYTES_MAX} bytes, not {byte_count}")]
    Length { byte_count: usize },
    #[error(
        "invalid node id: {character:?} at byte {position}; allowed: ASCII letters, digits, '.', '_', '-', first a letter or digit"
    )]
    Character { character: char, position: usize },
}

impl NodeId {
    pub fn parse(text: &str) -> Result<Self, NodeIdError> {
        if text.is_empty() || text.len() > BYTES_MAX {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_names_and_default_names_are_valid() {
        for text in ["decode-50061", "baton-prefill-0", "a", "node_1.rack-2", "7"] {
            assert_eq!(NodeId::parse(text).unwrap().as_str(), text);
        }
    }

    #[test]
    fn invalid_names_are_rejected() {
        assert_eq!(NodeId::parse(""), Err(NodeIdError::Length { byte_count: 0 }));
        assert_eq!(NodeId::parse(&"x".repeat(65)), Err(NodeIdError::Length { byte_count: 65 }));
        for (text, character, position) in
            [("-a", '-', 0), ("a b", ' ', 1), ("a\n", '\n', 1), ("né", 'é', 1)]
        {
            assert_eq!(NodeId::parse(text), Err(NodeIdError::Character { character, position }));
        }
    }
}
