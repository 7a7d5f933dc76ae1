//! The record that a node writes into etcd, and its strict parser.
//!
//! Key: `PREFIX/nodes/NODE_ID/EPOCH`. The epoch ties the key to one process: no other process
//! overwrites or deletes the key, and registering again writes the same key. The value is a line of
//! JSON with the node's address. Routers learn everything else from the node's `Observe` stream.

use cluster::{Epoch, EpochError, NodeAddress, NodeId, NodeIdError, RecordError, Role, parse_url};
use serde::{Deserialize, Serialize};

/// Version of the format; it grows when the meaning of a field changes or a required field is
/// added.
const VERSION: u32 = 1;
/// Maximum size of a value in bytes; the longest valid value has less than 600.
const VALUE_BYTES_MAX: usize = 1024;

/// A node process and its address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeEntry {
    pub node_id: NodeId,
    pub epoch: Epoch,
    pub address: NodeAddress,
}

/// Reason why a record below the prefix is not a node.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum EntryError {
    #[error("the key is not PREFIX/nodes/NODE_ID/EPOCH")]
    Key,
    #[error("the value has {byte_count} bytes; allowed: at most {VALUE_BYTES_MAX}")]
    TooLong { byte_count: usize },
    #[error("the value is not the JSON of a node: {reason}")]
    Json { reason: String },
    #[error("unknown version {found}; allowed: {VERSION}")]
    Version { found: u32 },
    #[error("node_id: {0}")]
    NodeId(#[from] NodeIdError),
    #[error("epoch: {0}")]
    Epoch(#[from] EpochError),
    #[error(transparent)]
    Field(#[from] RecordError),
    #[error("the value names {value}, the key names {key}")]
    Mismatch { key: String, value: String },
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RecordValue {
    version: u32,
    node_id: String,
    epoch: String,
    role: String,
    grpc: String,
}

/// Version of a value. Other fields are ignored, because another version may have other fields.
#[derive(Deserialize)]
struct RecordVersion {
    version: u32,
}

/// Returns the common prefix of all nodes' keys.
pub(super) fn keys(prefix: &str) -> String {
    format!("{prefix}/nodes/")
}

impl NodeEntry {
    pub(super) fn key(&self, prefix: &str) -> String {
        format!("{}{}/{}", keys(prefix), self.node_id, self.epoch)
    }

    pub(super) fn value(&self) -> String {
        let value = RecordValue {
            version: VERSION,
            node_id: self.node_id.as_str().into(),
            epoch: self.epoch.to_string(),
            role: self.address.role.as_str().into(),
            grpc: self.address.grpc.clone(),
        };
        serde_json::to_string(&value).expect("texts and a number are JSON")
    }

    /// Parses and validates a record, which any client of etcd may have written.
    pub fn parse(prefix: &str, key: &[u8], value: &[u8]) -> Result<Self, EntryError> {
        let name = std::str::from_utf8(key)
            .ok()
            .and_then(|key| key.strip_prefix(&keys(prefix)))
            .filter(|name| name.split('/').count() == 2)
            .ok_or(EntryError::Key)?;
        if value.len() > VALUE_BYTES_MAX {
            return Err(EntryError::TooLong { byte_count: value.len() });
        }
        let json = |error: serde_json::Error| EntryError::Json { reason: error.to_string() };
        let RecordVersion { version } = serde_json::from_slice(value).map_err(json)?;
        if version != VERSION {
            return Err(EntryError::Version { found: version });
        }
        let value: RecordValue = serde_json::from_slice(value).map_err(json)?;
        let found = format!("{}/{}", value.node_id, value.epoch);
        if found != name {
            return Err(EntryError::Mismatch { key: name.into(), value: found });
        }
        let role = Role::parse(&value.role).ok_or(RecordError::Text {
            field: "role",
            value: value.role,
            allowed: "prefill or decode",
        })?;
        Ok(Self {
            node_id: NodeId::parse(&value.node_id)?,
            epoch: Epoch::parse(&value.epoch)?,
            address: NodeAddress { role, grpc: parse_url("grpc", "http://host:port", value.grpc)? },
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry() -> NodeEntry {
        NodeEntry {
            node_id: NodeId::parse("decode-1").unwrap(),
            epoch: Epoch::from_bytes(&[7; 16]).unwrap(),
            address: NodeAddress { role: Role::Decode, grpc: "http://10.0.0.7:50061".into() },
        }
    }

    #[test]
    fn entry_round_trips() {
        let entry = entry();
        let (key, value) = (entry.key("/baton"), entry.value());
        assert_eq!(key, "/baton/nodes/decode-1/07070707070707070707070707070707");
        assert_eq!(NodeEntry::parse("/baton", key.as_bytes(), value.as_bytes()), Ok(entry));
    }

    #[test]
    fn every_field_is_validated_and_named_in_the_error() {
        let (key, value) = (entry().key("/baton"), entry().value());
        for (from, to, named) in [
            ("\"version\":1", "\"version\":2", "version 2"),
            ("\"version\":1", "\"version\":2,\"more\":true", "version 2"),
            ("\"version\":1,", "", "version"),
            ("\"version\":1", "\"version\":1,\"more\":1", "more"),
            ("\"decode\"", "\"router\"", "role"),
            ("http://10", "ftp://10", "grpc"),
            ("http://10.0.0.7", "http://u@h", "grpc"),
            ("50061", "0", "grpc"),
            ("50061", "1/path", "grpc"),
            ("0707\"", "0708\"", "the key"),
            ("decode-1", "decode-2", "the key"),
            ("{", "[", "JSON"),
            ("}", "", "JSON"),
            ("}", "}}", "JSON"),
        ] {
            let changed = value.replacen(from, to, 1);
            assert_ne!(changed, value);
            let error = NodeEntry::parse("/baton", key.as_bytes(), changed.as_bytes()).unwrap_err();
            assert!(error.to_string().contains(named), "{changed}: {error}");
        }
        let long = format!("{value}{}", " ".repeat(VALUE_BYTES_MAX));
        let error = NodeEntry::parse("/baton", key.as_bytes(), long.as_bytes()).unwrap_err();
        assert!(matches!(error, EntryError::TooLong { .. }));
    }

    #[test]
    fn malformed_keys_are_rejected() {
        let value = entry().value();
        for key in ["/baton/nodes/a", "/baton/nodes/a/b/c", "/other/nodes/a/b", "", "\u{fffd}"] {
            let parsed = NodeEntry::parse("/baton", key.as_bytes(), value.as_bytes());
            assert_eq!(parsed, Err(EntryError::Key), "{key}");
        }
        // A zero epoch, or an epoch without exactly 32 lowercase hex digits, is invalid even if key
        // and value agree.
        for epoch in ["0".repeat(32), "7".repeat(31), "g".repeat(32), "F".repeat(32)] {
            let key = format!("/baton/nodes/decode-1/{epoch}");
            let value = value.replace(&entry().epoch.to_string(), &epoch);
            let error = NodeEntry::parse("/baton", key.as_bytes(), value.as_bytes()).unwrap_err();
            assert!(matches!(error, EntryError::Epoch(_)), "{error}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic_the_parser(key: Vec<u8>, value: Vec<u8>, cut in 0usize..140) {
            let _ = NodeEntry::parse("/baton", &key, &value);
            let (key, whole) = (entry().key("/baton"), entry().value());
            let _ = NodeEntry::parse("/baton", key.as_bytes(), &value);
            let mut mixed = whole.as_bytes()[..cut.min(whole.len())].to_vec();
            mixed.extend(value);
            let _ = NodeEntry::parse("/baton", key.as_bytes(), &mixed);
        }
    }
}
