//! Layout of the KV of 16 tokens in one block: `[layer][K,V][head][token][dim]`.
//!
//! A block is one contiguous range, so that a transfer needs no gather. The heads of a
//! tensor-parallel rank are one range per layer and K/V. In FP8, the scales of a head's 16 tokens
//! follow its elements: see [`crate::kv_fp8`].

mod groups;
mod states;

use std::fmt;

pub(crate) use groups::GROUPS_MAX;
pub use groups::{KvGroups, NO_BLOCK, hit_blocks};
use serde::{Deserialize, Serialize};
pub use states::StateShape;
pub(crate) use states::{LaneHead, StatePlaces};

/// Tokens per block.
pub const BLOCK_TOKENS: usize = 16;

/// Index of a block in the arena of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockId(pub u32);

impl BlockId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Number format of weight matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    F32,
    Bf16,
    /// 8-bit integers with one scale for each 32 of them. GEMM inputs are quantized likewise.
    Q8,
    /// The matrices of layers in FP8 (e4m3) with a scale for each row, others in bf16. The inputs
    /// of GEMMs of many rows are quantized likewise. CPUs keep all matrices in bf16.
    Fp8,
}

impl WeightFormat {
    /// Returns the element type of activations on GPUs.
    pub fn dtype(self) -> Dtype {
        match self {
            WeightFormat::F32 => Dtype::F32,
            WeightFormat::Bf16 | WeightFormat::Q8 | WeightFormat::Fp8 => Dtype::Bf16,
        }
    }

    /// Returns the default format of KV: that of the activations.
    pub fn kv_format(self) -> KvFormat {
        self.dtype().into()
    }

    /// Returns the bytes of `weights` weights, without padding and the scales of rows.
    pub fn bytes(self, weights: u64) -> u64 {
        match self {
            WeightFormat::F32 => weights * 4,
            WeightFormat::Bf16 => weights * 2,
            // 32 bytes and one f16 scale.
            WeightFormat::Q8 => weights + weights / 16,
            WeightFormat::Fp8 => weights,
        }
    }
}

impl From<Dtype> for WeightFormat {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => WeightFormat::F32,
            Dtype::Bf16 => WeightFormat::Bf16,
        }
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WeightFormat::F32 => "f32",
            WeightFormat::Bf16 => "bf16",
            WeightFormat::Q8 => "q8",
            WeightFormat::Fp8 => "fp8",
        })
    }
}

/// Element type of activations.
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

/// Number format of KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvFormat {
    F32,
    Bf16,
    /// FP8 (e4m3) with a scale for each token and head.
    Fp8,
}

impl KvFormat {
    /// Returns the bytes of one element.
    pub fn element_bytes(self) -> usize {
        match self {
            KvFormat::F32 => 4,
            KvFormat::Bf16 => 2,
            KvFormat::Fp8 => 1,
        }
    }

    /// Returns the bytes of one token's keys or values of a head, scale included.
    pub fn token_bytes(self, head_dim: usize) -> usize {
        let scale_bytes = usize::from(self == KvFormat::Fp8);
        head_dim * self.element_bytes() + scale_bytes
    }

    /// Returns whether keys and values of activations of this type can be stored in the format.
    pub fn fits(self, activations: Dtype) -> bool {
        self == activations.into() || (self, activations) == (KvFormat::Fp8, Dtype::Bf16)
    }
}

impl From<Dtype> for KvFormat {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => KvFormat::F32,
            Dtype::Bf16 => KvFormat::Bf16,
        }
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KvFormat::F32 => "f32",
            KvFormat::Bf16 => "bf16",
            KvFormat::Fp8 => "fp8",
        })
    }
}

/// Half of a KV pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvHalf {
    Key,
    Value,
}

/// Shape of one block's contents; equal on both ends of every transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    pub layer_count: usize,
    /// KV heads held by this rank.
    pub kv_head_count: usize,
    pub head_dim: usize,
    pub format: KvFormat,
}

impl KvLayout {
    /// Returns the layout of a block with `kv_head_count` heads.
    pub fn with_heads(self, kv_head_count: usize) -> Self {
        Self { kv_head_count, ..self }
    }

    /// Returns the elements of one head's 16 tokens: `[token][dim]`.
    pub fn head_elements(&self) -> usize {
        BLOCK_TOKENS * self.head_dim
    }

    /// Returns the bytes of one head's 16 tokens, scales included.
    pub fn head_bytes(&self) -> usize {
        BLOCK_TOKENS * self.format.token_bytes(self.head_dim)
    }

    /// Returns the bytes of one block.
    pub fn block_bytes(&self) -> usize {
        self.layer_count * 2 * self.kv_head_count * self.head_bytes()
    }

    /// Returns [`Self::block_bytes`], or `None` when that exceeds the address space.
    pub fn checked_block_bytes(&self) -> Option<usize> {
        // No token has more bytes than in f32.
        self.head_dim.checked_mul(4 * BLOCK_TOKENS)?;
        self.head_bytes()
            .checked_mul(self.kv_head_count)?
            .checked_mul(self.layer_count)?
            .checked_mul(2)
    }

    /// Returns the offset in bytes, from the block's start, of one head's 16 tokens.
    pub fn head_offset(&self, layer: usize, half: KvHalf, head: usize) -> usize {
        debug_assert!(layer < self.layer_count && head < self.kv_head_count);
        let half = match half {
            KvHalf::Key => 0,
            KvHalf::Value => 1,
        };
        ((layer * 2 + half) * self.kv_head_count + head) * self.head_bytes()
    }
}

/// Formats the description that nodes compare during the handshake (HELLO). It names FP8 only:
/// other formats follow from the format of weights, which nodes compare too.
impl fmt::Display for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "layers={} halves=kv heads={} tokens={} dim={}",
            self.layer_count, self.kv_head_count, BLOCK_TOKENS, self.head_dim
        )?;
        match self.format {
            KvFormat::F32 | KvFormat::Bf16 => Ok(()),
            KvFormat::Fp8 => f.write_str(" kv=fp8"),
        }
    }
}

/// Rounds to the nearest bf16, ties to even; NaN stays NaN.
#[inline(always)]
pub(crate) fn to_bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet_nan = (bits >> 16) | 0x40;
    (if x.is_nan() { quiet_nan } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_of_fp8_takes_one_byte() {
        let of = |format| KvLayout { layer_count: 3, kv_head_count: 2, head_dim: 64, format };
        for (format, token_bytes) in
            [(KvFormat::F32, 256), (KvFormat::Bf16, 128), (KvFormat::Fp8, 65)]
        {
            let layout = of(format);
            assert_eq!(layout.head_bytes(), 16 * token_bytes, "{format}");
            assert_eq!(layout.block_bytes(), 3 * 2 * 2 * 16 * token_bytes, "{format}");
            assert_eq!(layout.checked_block_bytes(), Some(layout.block_bytes()));
            let last = layout.head_offset(2, KvHalf::Value, 1) + layout.head_bytes();
            assert_eq!(last, layout.block_bytes(), "{format}");
        }
        let huge = KvLayout { head_dim: usize::MAX / 64, ..of(KvFormat::Fp8) };
        assert_eq!(huge.checked_block_bytes(), None);
    }

    #[test]
    fn fp8_fits_activations_in_bf16_only() {
        for (format, activations, expected) in [
            (KvFormat::F32, Dtype::F32, true),
            (KvFormat::Bf16, Dtype::F32, false),
            (KvFormat::Fp8, Dtype::F32, false),
            (KvFormat::F32, Dtype::Bf16, false),
            (KvFormat::Bf16, Dtype::Bf16, true),
            (KvFormat::Fp8, Dtype::Bf16, true),
        ] {
            assert_eq!(format.fits(activations), expected, "{format} {activations}");
        }
    }
}
