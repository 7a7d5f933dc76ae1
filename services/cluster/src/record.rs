//! A node's validated record and load.

use std::fmt;

use proto::v1;
use serde::{Deserialize, Serialize};

use crate::{Epoch, EpochError, ModelIdentity, NodeId, NodeIdError};

/// Maximum length of a text in a record, in bytes.
pub const TEXT_BYTES_MAX: usize = 256;
/// Maximum number of blocks (256 Mi tokens); the limit prevents overflow.
const BLOCKS_MAX: u32 = 1 << 24;
const PEER_TAG_BYTES: usize = 32;
const BLOCK_TOKENS_MAX: u32 = 1024;
const KV_GROUPS_MAX: u32 = 16;

/// The part of a request that a node serves, or prefers to serve (`router.roles`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Role {
    /// Prefills prompts and sends KV.
    Prefill,
    /// Receives KV and decodes; can also prefill.
    Decode,
}

impl Role {
    pub const ALL: [Role; 2] = [Role::Prefill, Role::Decode];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.as_str() == text)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl From<Role> for v1::Role {
    fn from(role: Role) -> Self {
        match role {
            Role::Prefill => Self::Prefill,
            Role::Decode => Self::Decode,
        }
    }
}

/// Reason for rejecting a record, snapshot or delta of a node.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RecordError {
    #[error("{field} is missing")]
    Missing { field: &'static str },
    #[error("node_id: {0}")]
    NodeId(#[from] NodeIdError),
    #[error("epoch: {0}")]
    Epoch(#[from] EpochError),
    #[error("role {value} is unknown; allowed: 1 (prefill), 2 (decode)")]
    Role { value: i32 },
    #[error(
        "the node is a {found} node, but it is listed as a {listed} node; expected its address in cluster.{found}"
    )]
    OtherRole { found: Role, listed: Role },
    #[error("{field} has {byte_count} bytes; allowed: {allowed}")]
    Length { field: &'static str, byte_count: usize, allowed: &'static str },
    #[error("{field} = {value} is out of range; allowed: {min} to {max}")]
    Range { field: &'static str, value: u64, min: u64, max: u64 },
    #[error("invalid {field}: {value:?}; allowed: {allowed}")]
    Text { field: &'static str, value: String, allowed: &'static str },
    #[error("impossible load: {what} = {value}; expected at most {value_max}")]
    Load { what: &'static str, value: u64, value_max: u64 },
    #[error("the node lists {count} cached blocks; it has {count_max}")]
    TooManyCached { count: usize, count_max: usize },
    #[error("event {found} follows event {last}")]
    SequenceGap { last: u64, found: u64 },
    #[error("the first event of a stream is snapshot 0, not {found}")]
    NoSnapshot { found: &'static str },
}

fn model_identity(wire: v1::ModelIdentity) -> Result<ModelIdentity, RecordError> {
    range("protocol_min", wire.protocol_min, 0, wire.protocol_max)?;
    Ok(ModelIdentity {
        model_fingerprint: sixteen_bytes("model_fingerprint", &wire.model_fingerprint)?,
        weight_version: wire.weight_version,
        kv_layout: text("kv_layout", wire.kv_layout)?,
        block_size: range("block_size", wire.block_size, 1, BLOCK_TOKENS_MAX)?,
        dtype: text("dtype", wire.dtype)?,
        tp: range("tp", wire.tp, 1, 1024)?,
        protocol_min: wire.protocol_min,
        protocol_max: wire.protocol_max,
    })
}

/// Checks that a node with this record can have this load.
pub(crate) fn check_load(load: &v1::NodeLoad, record: &NodeRecord) -> Result<(), RecordError> {
    let blocks = [load.blocks_free, load.blocks_cached, load.blocks_held, load.blocks_reserved];
    let sequences = u64::from(load.running) + u64::from(load.waiting);
    let pending_max = sequences.saturating_mul(record.sequence_tokens_max.into());
    for (what, value, value_max) in [
        ("blocks in all states", blocks.map(u64::from).iter().sum(), record.block_count.into()),
        ("prefilling", load.prefilling.into(), load.running.into()),
        ("pending_prompt_tokens", load.pending_prompt_tokens, pending_max),
    ] {
        if value > value_max {
            return Err(RecordError::Load { what, value, value_max });
        }
    }
    Ok(())
}

/// Identity and limits of a node process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRecord {
    pub node_id: NodeId,
    pub epoch: Epoch,
    pub role: Role,
    /// ZeroMQ endpoint of its listener for control messages, `tcp://host:port`.
    pub control_endpoint: String,
    /// Name of the model in client requests.
    pub model: String,
    pub identity: ModelIdentity,
    /// Maximum length of a prompt, in tokens.
    pub prompt_tokens_max: u32,
    /// Maximum length of a sequence (prompt and output), in tokens.
    pub sequence_tokens_max: u32,
    pub block_count: u32,
    pub vocabulary_size: u32,
    /// Newest grammar version that the node supports; 0 for none.
    pub grammar_version: u32,
    /// Reason why the node computes on the CPU although its host has a GPU.
    pub cpu_fallback: Option<String>,
    /// Proves to peers that the control endpoint belongs to a member ([`proto::auth`]).
    pub peer_tag: Vec<u8>,
    /// Whether the node returns pooled values, such as embeddings.
    pub pooling: bool,
    /// Newest version of [`v1::Sampling`] that the node supports.
    pub sampling_version: u32,
    /// LoRA adapters of the model, at most 64.
    pub adapters: Vec<Adapter>,
    /// Whether the node serves the calls of both roles.
    pub both_roles: bool,
    /// Sliding window of each KV group in tokens, 0 for a group without a window; 1 to 16 groups.
    pub kv_windows: Vec<u32>,
    /// Blocks of the recurrent state of a sequence.
    pub state_blocks: u32,
}

/// LoRA adapter that a node has loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    pub name: String,
    /// Hash of the scale and the weights. KV of the adapter is keyed by it.
    pub content_hash: u128,
}

/// Form of an adapter's name.
pub const ADAPTER_NAME_ALLOWED: &str = "1 to 64 letters, digits, '.', '_' and '-'";

/// Maximum number of adapters of a node.
const ADAPTERS_MAX: usize = 64;

/// Returns whether the name has the form [`ADAPTER_NAME_ALLOWED`].
pub fn is_adapter_name(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    (1..=64).contains(&name.len()) && name.chars().all(is_allowed)
}

/// Checks the adapters of a record.
pub(crate) fn adapters(wire: Vec<v1::Adapter>) -> Result<Vec<Adapter>, RecordError> {
    range("adapters", wire.len() as u32, 0, ADAPTERS_MAX as u32)?;
    let checked = wire.into_iter().map(|v1::Adapter { name, content_hash }| {
        if !is_adapter_name(&name) {
            let (field, allowed) = ("adapters.name", ADAPTER_NAME_ALLOWED);
            return Err(RecordError::Text { field, value: name, allowed });
        }
        let content_hash = sixteen_bytes("adapters.content_hash", &content_hash)?;
        Ok(Adapter { name, content_hash })
    });
    checked.collect()
}

/// Returns the windows of the KV groups. Nodes of older releases have one group without a window.
fn kv_windows(wire: Vec<u32>) -> Result<Vec<u32>, RecordError> {
    range("the number of kv_windows", wire.len() as u32, 0, KV_GROUPS_MAX)?;
    Ok(if wire.is_empty() { vec![0] } else { wire })
}

impl TryFrom<v1::NodeRecord> for NodeRecord {
    type Error = RecordError;

    fn try_from(wire: v1::NodeRecord) -> Result<Self, RecordError> {
        let role = match wire.role() {
            v1::Role::Prefill => Role::Prefill,
            v1::Role::Decode => Role::Decode,
            v1::Role::Unspecified => return Err(RecordError::Role { value: wire.role }),
        };
        let identity = wire.identity.ok_or(RecordError::Missing { field: "identity" })?;
        let tokens_max = range("sequence_tokens_max", wire.sequence_tokens_max, 1, u32::MAX)?;
        let block_count = range("block_count", wire.block_count, 1, BLOCKS_MAX)?;
        Ok(Self {
            node_id: NodeId::parse(&wire.node_id)?,
            epoch: Epoch::from_bytes(&wire.epoch)?,
            role,
            control_endpoint: parse_url(
                "control_endpoint",
                "tcp://host:port",
                wire.control_endpoint,
            )?,
            model: text("model", wire.model)?,
            identity: model_identity(identity)?,
            prompt_tokens_max: range("prompt_tokens_max", wire.prompt_tokens_max, 1, tokens_max)?,
            sequence_tokens_max: tokens_max,
            block_count,
            vocabulary_size: range("vocabulary_size", wire.vocabulary_size, 1, u32::MAX)?,
            grammar_version: wire.grammar_version,
            cpu_fallback: Some(wire.cpu_fallback)
                .filter(|reason| !reason.is_empty())
                .map(|reason| text("cpu_fallback", reason))
                .transpose()?,
            peer_tag: length("peer_tag", wire.peer_tag.to_vec(), PEER_TAG_BYTES, "32")?,
            pooling: wire.pooling,
            sampling_version: wire.sampling_version,
            adapters: adapters(wire.adapters)?,
            both_roles: wire.both_roles,
            kv_windows: kv_windows(wire.kv_windows)?,
            state_blocks: range("state_blocks", wire.state_blocks, 0, block_count)?,
        })
    }
}

impl From<&NodeRecord> for v1::NodeRecord {
    fn from(record: &NodeRecord) -> Self {
        Self {
            node_id: record.node_id.as_str().into(),
            epoch: record.epoch.to_bytes().to_vec().into(),
            role: v1::Role::from(record.role).into(),
            control_endpoint: record.control_endpoint.clone(),
            model: record.model.clone(),
            identity: Some((&record.identity).into()),
            prompt_tokens_max: record.prompt_tokens_max,
            sequence_tokens_max: record.sequence_tokens_max,
            block_count: record.block_count,
            vocabulary_size: record.vocabulary_size,
            grammar_version: record.grammar_version,
            cpu_fallback: record.cpu_fallback.clone().unwrap_or_default(),
            peer_tag: record.peer_tag.clone().into(),
            pooling: record.pooling,
            sampling_version: record.sampling_version,
            adapters: record.adapters.iter().map(Into::into).collect(),
            both_roles: record.both_roles,
            kv_windows: record.kv_windows.clone(),
            state_blocks: record.state_blocks,
        }
    }
}

impl From<&Adapter> for v1::Adapter {
    fn from(adapter: &Adapter) -> Self {
        let content_hash = adapter.content_hash.to_be_bytes().to_vec().into();
        Self { name: adapter.name.clone(), content_hash }
    }
}

/// Reads 16 bytes as a big-endian number.
pub(crate) fn sixteen_bytes(field: &'static str, bytes: &[u8]) -> Result<u128, RecordError> {
    let byte_count = bytes.len();
    proto::ids::bits(bytes).ok_or(RecordError::Length { field, byte_count, allowed: "16" })
}

fn length(
    field: &'static str,
    bytes: Vec<u8>,
    expected: usize,
    allowed: &'static str,
) -> Result<Vec<u8>, RecordError> {
    let byte_count = bytes.len();
    match byte_count == expected {
        true => Ok(bytes),
        false => Err(RecordError::Length { field, byte_count, allowed }),
    }
}

fn text(field: &'static str, value: String) -> Result<String, RecordError> {
    if value.is_empty() || value.len() > TEXT_BYTES_MAX {
        return Err(RecordError::Length { field, byte_count: value.len(), allowed: "1 to 256" });
    }
    if value.chars().any(char::is_control) {
        let allowed = "text without control characters";
        return Err(RecordError::Text { field, value, allowed });
    }
    Ok(value)
}

/// Checks that the value has the form of `allowed`: a scheme, then `host:port`.
pub fn parse_url(
    field: &'static str,
    allowed: &'static str,
    value: String,
) -> Result<String, RecordError> {
    let value = text(field, value)?;
    let host_byte = |c: char| c.is_ascii_alphanumeric() || "._-:[]%".contains(c);
    let port = value
        .strip_prefix(allowed.trim_end_matches("host:port"))
        .and_then(|rest| rest.rsplit_once(':'))
        .filter(|(host, _)| !host.is_empty() && host.chars().all(host_byte))
        .and_then(|(_, port)| port.parse::<u16>().ok());
    match port {
        Some(1..) => Ok(value),
        _ => Err(RecordError::Text { field, value, allowed }),
    }
}

fn range(field: &'static str, value: u32, min: u32, max: u32) -> Result<u32, RecordError> {
    if (min..=max).contains(&value) {
        return Ok(value);
    }
    let (value, min, max) = (value.into(), min.into(), max.into());
    Err(RecordError::Range { field, value, min, max })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefix::test_identity;

    fn record() -> NodeRecord {
        NodeRecord {
            node_id: NodeId::parse("decode-1").unwrap(),
            epoch: Epoch::from_bytes(&[7; 16]).unwrap(),
            role: Role::Decode,
            control_endpoint: "tcp://127.0.0.1:5555".into(),
            model: "smollm2".into(),
            identity: ModelIdentity { protocol_max: 2, ..test_identity() },
            prompt_tokens_max: 2047,
            sequence_tokens_max: 2048,
            block_count: 100,
            vocabulary_size: 49152,
            grammar_version: 2,
            cpu_fallback: Some("the kernels are missing".into()),
            peer_tag: vec![9; 32],
            pooling: true,
            sampling_version: 1,
            adapters: vec![Adapter { name: "sql-1.0".into(), content_hash: 9 }],
            both_roles: true,
            kv_windows: vec![0, 128],
            state_blocks: 7,
        }
    }

    #[test]
    fn record_round_trips() {
        for cpu_fallback in [None, record().cpu_fallback] {
            let record = NodeRecord { cpu_fallback, ..record() };
            assert_eq!(NodeRecord::try_from(v1::NodeRecord::from(&record)), Ok(record));
        }
    }

    #[test]
    fn load_of_the_largest_counts_is_checked() {
        let record = NodeRecord { sequence_tokens_max: u32::MAX, ..record() };
        let most = v1::NodeLoad { running: u32::MAX, waiting: u32::MAX, ..Default::default() };
        let load = v1::NodeLoad { pending_prompt_tokens: u64::MAX, ..most };
        assert_eq!(check_load(&load, &record), Ok(()));
    }

    #[test]
    fn every_field_of_a_record_is_validated() {
        let breakers: [fn(&mut v1::NodeRecord); 24] = [
            |record| record.adapters[0].name = "a:b".into(),
            |record| record.adapters[0].content_hash = vec![1; 15].into(),
            |record| record.adapters = vec![record.adapters[0].clone(); 65],
            |record| record.peer_tag = vec![1; 31].into(),
            |record| record.cpu_fallback = "a\nb".into(),
            |record| record.cpu_fallback = "x".repeat(257),
            |record| record.node_id = "a b".into(),
            |record| record.node_id.clear(),
            |record| record.epoch = vec![0; 16].into(),
            |record| record.epoch = vec![1; 15].into(),
            |record| record.role = 0,
            |record| record.role = 77,
            |record| record.control_endpoint = "udp://h:1".into(),
            |record| record.control_endpoint = "tcp://:1".into(),
            |record| record.control_endpoint = "tcp://h:0".into(),
            |record| record.model = "x".repeat(257),
            |record| record.model = "a\nb".into(),
            |record| record.identity = None,
            |record| record.identity.as_mut().unwrap().model_fingerprint = vec![1; 3].into(),
            |record| record.identity.as_mut().unwrap().block_size = 0,
            |record| record.prompt_tokens_max = 2049,
            |record| record.block_count = u32::MAX,
            |record| record.kv_windows = vec![0; 17],
            |record| record.state_blocks = record.block_count + 1,
        ];
        for (index, breaker) in breakers.iter().enumerate() {
            let mut wire = v1::NodeRecord::from(&record());
            breaker(&mut wire);
            assert!(NodeRecord::try_from(wire).is_err(), "breaker {index}");
        }
    }
}
