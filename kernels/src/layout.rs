//! How the KV of 16 tokens lies in one block: `[layer][K,V][head][token][dim]`.
//!
//! A block is one contiguous range, so that a transfer or a save needs no gather; the heads of a
//! tensor-parallel rank are one range per layer and K/V.

use std::fmt;

/// Tokens whose KV one block holds.
pub const BLOCK_TOKENS: usize = 16;

/// Index of a block in the arena of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Element type of weights, activations at a matrix product's input, and KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    F32,
    Bf16,
}

impl Dtype {
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
        })
    }
}

/// The half of a KV pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvHalf {
    Key,
    Value,
}

/// The shape of one block's contents; equal on both ends of every transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    pub layer_count: usize,
    /// KV heads held by this rank.
    pub kv_head_count: usize,
    pub head_dim: usize,
    pub dtype: Dtype,
}

impl KvLayout {
    /// Elements of one head's 16 tokens: `[token][dim]`.
    pub fn head_elements(&self) -> usize {
        BLOCK_TOKENS * self.head_dim
    }

    /// Elements of one block.
    pub fn block_elements(&self) -> usize {
        self.layer_count * 2 * self.kv_head_count * self.head_elements()
    }

    /// Whether the sizes below can be computed at all.
    pub fn fits_memory(&self) -> bool {
        [2, self.kv_head_count, BLOCK_TOKENS, self.head_dim, self.dtype.bytes()]
            .into_iter()
            .try_fold(self.layer_count, usize::checked_mul)
            .is_some()
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> usize {
        self.block_elements() * self.dtype.bytes()
    }

    /// Where, in elements from the block's start, `[token][dim]` of one head begins.
    pub fn head_offset(&self, layer: usize, half: KvHalf, head: usize) -> usize {
        debug_assert!(layer < self.layer_count && head < self.kv_head_count);
        let half = match half {
            KvHalf::Key => 0,
            KvHalf::Value => 1,
        };
        ((layer * 2 + half) * self.kv_head_count + head) * self.head_elements()
    }
}

/// The description that nodes compare at HELLO.
impl fmt::Display for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "layers={} halves=kv heads={} tokens={} dim={}",
            self.layer_count, self.kv_head_count, BLOCK_TOKENS, self.head_dim
        )
    }
}
