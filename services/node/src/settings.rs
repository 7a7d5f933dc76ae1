//! What a node takes from the configuration, in the engine's and the transfers' own types.

use std::thread::available_parallelism;

use cluster::Role;
use config::ConfigError;
use engine::executor::{ExecutorLimits, Speculation};
use kernels::{BLOCK_TOKENS, KvLayout, WeightFormat, cpu::Isa};
use kv_transfer::{ClusterSecret, Limits, SecretTooShort};
use model::{LoadFormat, ModelConfig};

/// The sections that a node reads.
pub const SECTIONS: &[config::Section] = &[
    config::Section::Model,
    config::Section::Node,
    config::Section::Transfer,
    config::Section::Cluster,
    config::Section::Telemetry,
];

/// A setting that does not fit the model, or that is missing.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("transfer.secret: {0}")]
    Secret(#[from] SecretTooShort),
    #[error(
        "node.kv_memory = {bytes} bytes hold {blocks} KV blocks of {block_bytes} bytes; at least 2 are needed"
    )]
    TooFewBlocks { bytes: u64, blocks: u64, block_bytes: usize },
    #[error("node.sequence_tokens_max = {value}: the model reaches {context_tokens} tokens")]
    BeyondContext { value: u32, context_tokens: usize },
}

/// Blocks of the arena: as many as asked for, or as fit into the memory.
pub(crate) fn block_count(node: &config::Node, layout: KvLayout) -> Result<u32, SettingsError> {
    if let Some(blocks) = node.blocks {
        return Ok(blocks);
    }
    let block_bytes = layout.block_bytes();
    let bytes = node.kv_memory.bytes();
    // The configuration's own limit on `node.blocks`.
    let blocks = (bytes / block_bytes.max(1) as u64).min(1 << 24);
    if blocks < 2 {
        return Err(SettingsError::TooFewBlocks { bytes, blocks, block_bytes });
    }
    Ok(blocks as u32)
}

/// What the executor is made for.
pub(crate) fn executor_limits(
    node: &config::Node,
    model: &ModelConfig,
    blocks: u32,
) -> Result<ExecutorLimits, SettingsError> {
    let context_tokens = model.context_tokens;
    let sequence_tokens = match node.sequence_tokens_max {
        Some(value) if value as usize > context_tokens => {
            return Err(SettingsError::BeyondContext { value, context_tokens });
        }
        Some(value) => value,
        None => u32::try_from(context_tokens).unwrap_or(u32::MAX),
    };
    let pool_tokens = blocks.saturating_mul(BLOCK_TOKENS as u32);
    Ok(ExecutorLimits {
        slots: node.slots,
        step_tokens: node.step_tokens,
        sequence_tokens: sequence_tokens.min(pool_tokens),
        blocks,
        depth: node.depth,
        vocabulary: u32::try_from(model.vocab_size).unwrap_or(u32::MAX),
        speculation: speculation(node),
    })
}

fn speculation(node: &config::Node) -> Option<Speculation> {
    match node.speculate {
        config::Speculate::Off => None,
        config::Speculate::Ngram => Some(Speculation {
            row_drafts: node.speculate_tokens,
            step_tokens: node.speculate_step_tokens,
            ngram_min: node.speculate_ngram_min,
            ngram_max: node.speculate_ngram_max,
        }),
    }
}

pub(crate) fn weight_format(dtype: config::Dtype) -> WeightFormat {
    match dtype {
        config::Dtype::F32 => WeightFormat::F32,
        config::Dtype::Bf16 => WeightFormat::Bf16,
        config::Dtype::Q8 => WeightFormat::Q8,
    }
}

pub(crate) fn isa(isa: config::Isa) -> Isa {
    match isa {
        config::Isa::Auto => Isa::Auto,
        config::Isa::Amx => Isa::Amx,
        config::Isa::Avx512Bf16 => Isa::Avx512Bf16,
        config::Isa::Avx512 => Isa::Avx512,
        config::Isa::Avx2 => Isa::Avx2,
        config::Isa::Portable => Isa::Portable,
        config::Isa::Reference => Isa::Reference,
    }
}

pub(crate) fn load_format(format: config::LoadFormat) -> LoadFormat {
    match format {
        config::LoadFormat::Auto => LoadFormat::Auto,
        // One seed, so that all nodes of a cluster have the same weights.
        config::LoadFormat::Dummy => LoadFormat::Dummy { seed: 0 },
    }
}

/// Threads of one forward.
pub(crate) fn threads(node: &config::Node) -> usize {
    match node.threads {
        Some(threads) => threads as usize,
        None => available_parallelism().map_or(1, usize::from),
    }
}

pub(crate) fn secret(transfer: &config::Transfer) -> Result<ClusterSecret, SettingsError> {
    Ok(ClusterSecret::new(transfer.required_secret()?.reveal())?)
}

/// Room for every transfer that the scheduler may know.
pub(crate) fn transfer_limits(transfer: &config::Transfer, transfers_max: u32) -> Limits {
    let defaults = Limits::default();
    Limits {
        transfers_max: defaults.transfers_max.max(transfers_max as usize),
        chunk_bytes_max: transfer.chunk_bytes.as_usize(),
        ..defaults
    }
}

/// The node's name where none was given: role and port.
pub(crate) fn default_node_id(role: Role, grpc_port: u16) -> String {
    format!("{role}-{grpc_port}")
}
