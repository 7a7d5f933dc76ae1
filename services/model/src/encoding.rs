//! How elements lie in a checkpoint, and how a row of them becomes f32.

use gguf::TensorKind;
use half::{bf16, f16};

/// The encodings that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    F32,
    F16,
    Bf16,
    /// Blocks of 32: f16 scale, f16 minimum, 32 nibbles; element = scale * nibble + minimum.
    Q4_1,
    /// Blocks of 32: f16 scale, 32 signed bytes; element = scale * byte.
    Q8_0,
}

const BLOCK_ELEMENTS: usize = 32;
const Q4_1_BLOCK_BYTES: usize = 4 + BLOCK_ELEMENTS / 2;
const Q8_0_BLOCK_BYTES: usize = 2 + BLOCK_ELEMENTS;

impl Encoding {
    pub fn of_gguf(kind: TensorKind) -> Option<Self> {
        Some(match kind {
            TensorKind::F32 => Encoding::F32,
            TensorKind::F16 => Encoding::F16,
            TensorKind::Bf16 => Encoding::Bf16,
            TensorKind::Q4_1 => Encoding::Q4_1,
            TensorKind::Q8_0 => Encoding::Q8_0,
            TensorKind::Other(_) => return None,
        })
    }

    pub fn of_safetensors(dtype: safetensors::Dtype) -> Option<Self> {
        Some(match dtype {
            safetensors::Dtype::F32 => Encoding::F32,
            safetensors::Dtype::F16 => Encoding::F16,
            safetensors::Dtype::BF16 => Encoding::Bf16,
            _ => return None,
        })
    }

    /// Bytes of a row of `cols` elements; `None` when they are no whole number of blocks.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        let (elements, bytes) = match self {
            Encoding::F32 => (1, 4),
            Encoding::F16 | Encoding::Bf16 => (1, 2),
            Encoding::Q4_1 => (BLOCK_ELEMENTS, Q4_1_BLOCK_BYTES),
            Encoding::Q8_0 => (BLOCK_ELEMENTS, Q8_0_BLOCK_BYTES),
        };
        cols.is_multiple_of(elements).then(|| cols / elements * bytes)
    }

    pub fn name(self) -> &'static str {
        match self {
            Encoding::F32 => "F32",
            Encoding::F16 => "F16",
            Encoding::Bf16 => "BF16",
            Encoding::Q4_1 => "Q4_1",
            Encoding::Q8_0 => "Q8_0",
        }
    }

    /// Decodes `row`, the `row_bytes(out.len())` bytes of one row, into `out`. Exact: every value of
    /// every encoding but the products of Q4_1 and Q8_0 is an f32, and those round once.
    pub fn decode_row(self, row: &[u8], out: &mut [f32]) {
        debug_assert_eq!(Some(row.len()), self.row_bytes(out.len()));
        match self {
            Encoding::F32 => {
                for (value, &bytes) in out.iter_mut().zip(row.as_chunks::<4>().0) {
                    *value = f32::from_le_bytes(bytes);
                }
            }
            Encoding::F16 => {
                for (value, &bytes) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                    *value = f16::from_le_bytes(bytes).to_f32();
                }
            }
            Encoding::Bf16 => {
                for (value, &bytes) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                    *value = bf16::from_le_bytes(bytes).to_f32();
                }
            }
            Encoding::Q4_1 => {
                let blocks = row.as_chunks::<Q4_1_BLOCK_BYTES>().0;
                for (block, out) in blocks.iter().zip(out.as_chunks_mut().0) {
                    decode_q4_1(block, out);
                }
            }
            Encoding::Q8_0 => {
                let blocks = row.as_chunks::<Q8_0_BLOCK_BYTES>().0;
                for (block, out) in blocks.iter().zip(out.as_chunks_mut().0) {
                    decode_q8_0(block, out);
                }
            }
        }
    }
}

fn decode_q4_1(block: &[u8; Q4_1_BLOCK_BYTES], out: &mut [f32; BLOCK_ELEMENTS]) {
    let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
    let minimum = f16::from_le_bytes([block[2], block[3]]).to_f32();
    let (low, high) = out.split_at_mut(BLOCK_ELEMENTS / 2);
    for ((low, high), &nibbles) in low.iter_mut().zip(high).zip(&block[4..]) {
        *low = scale * f32::from(nibbles & 15) + minimum;
        *high = scale * f32::from(nibbles >> 4) + minimum;
    }
}

fn decode_q8_0(block: &[u8; Q8_0_BLOCK_BYTES], out: &mut [f32; BLOCK_ELEMENTS]) {
    let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
    for (value, &byte) in out.iter_mut().zip(&block[2..]) {
        *value = scale * f32::from(byte as i8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(encoding: Encoding, bytes: &[u8], cols: usize) -> Vec<f32> {
        assert_eq!(encoding.row_bytes(cols), Some(bytes.len()));
        let mut out = vec![f32::NAN; cols];
        encoding.decode_row(bytes, &mut out);
        out
    }

    #[test]
    fn plain_encodings_are_decoded_exactly() {
        let values = [1.0f32, -0.5, 65504.0, 0.0];
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(decode(Encoding::F32, &bytes, 4), values);
        let bytes: Vec<u8> = values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect();
        assert_eq!(decode(Encoding::F16, &bytes, 4), values);
        assert_eq!(decode(Encoding::Bf16, &[0x80, 0x3f, 0xc0, 0xff], 2)[0], 1.0);
    }

    #[test]
    fn q4_1_takes_low_nibbles_first() {
        let mut row = Vec::new();
        for (scale, minimum) in [(0.5f32, -2.0f32), (1.0, 0.0)] {
            row.extend(f16::from_f32(scale).to_le_bytes());
            row.extend(f16::from_f32(minimum).to_le_bytes());
            row.extend((0..16u8).map(|i| i | (15 - i) << 4));
        }
        let out = decode(Encoding::Q4_1, &row, 64);
        let expected: Vec<f32> = [(0.5, -2.0), (1.0, 0.0)]
            .into_iter()
            .flat_map(|(scale, minimum)| {
                let nibbles = (0..16).chain((0..16).rev());
                nibbles.map(move |nibble| scale * nibble as f32 + minimum)
            })
            .collect();
        assert_eq!(out, expected);
    }

    #[test]
    fn q8_0_is_signed() {
        let mut row = f16::from_f32(0.25).to_le_bytes().to_vec();
        row.extend((0..32i8).map(|i| (i - 16) as u8));
        let expected: Vec<f32> = (0..32).map(|i| 0.25 * (i - 16) as f32).collect();
        assert_eq!(decode(Encoding::Q8_0, &row, 32), expected);
    }

    #[test]
    fn rows_of_broken_blocks_have_no_size() {
        assert_eq!(Encoding::Q4_1.row_bytes(33), None);
        assert_eq!(Encoding::Q8_0.row_bytes(64), Some(68));
    }
}
