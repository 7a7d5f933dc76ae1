//! Element encodings of checkpoints, and their decoding to f32.

mod blocks;

use std::ops::Range;

use gguf::TensorKind;
use half::{bf16, f16};
use kernels::{Dtype, fp8, mxfp4::GROUP as MXFP4_GROUP};

/// Format of a checkpoint's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Gguf,
    Safetensors,
}

/// Encoding of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// One of GGUF's supported kinds; safetensors have the first three.
    Gguf(TensorKind),
    /// FP8, without its scales.
    F8E4m3,
    /// Two FP4 numbers (e2m1) in a byte, the low half first, without the scales that groups of
    /// [`MXFP4_GROUP`] numbers share.
    Mxfp4,
    /// A power of two (e8m0): the scale of a group of [`MXFP4_GROUP`] numbers.
    F8E8m0,
    /// Two numbers of 4 bits without a sign in a byte, the low half first. Never decoded here, nor
    /// are the other integers.
    Int4,
    /// Words of eight numbers of [`Encoding::Int4`], each word less `0x1111_1111`.
    Int4LessOne,
    I32,
    I64,
}

/// Decodes a number of [`Encoding::Mxfp4`] from its 4 bits.
pub(crate) fn fp4(bits: u8) -> f32 {
    blocks::fp4(bits)
}

/// Reason why integers have no elements in f32.
const INTEGERS: &str = "integers are read as words";

/// Bits of the scale that is NaN.
pub(crate) const E8M0_NAN: u8 = 0xff;

impl Encoding {
    pub(crate) const F32: Self = Self::Gguf(TensorKind::F32);
    pub(crate) const BF16: Self = Self::Gguf(TensorKind::Bf16);

    pub(crate) fn of_gguf(kind: TensorKind) -> Option<Self> {
        kind.block().map(|_| Self::Gguf(kind))
    }

    pub(crate) fn of_safetensors(dtype: safetensors::Dtype) -> Option<Self> {
        Some(match dtype {
            safetensors::Dtype::F32 => Self::F32,
            safetensors::Dtype::F16 => Self::Gguf(TensorKind::F16),
            safetensors::Dtype::BF16 => Self::BF16,
            safetensors::Dtype::F8_E4M3 => Self::F8E4m3,
            _ => return None,
        })
    }

    /// Returns all encodings that are decoded to f32.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Self> {
        let others = [Self::F8E4m3, Self::Mxfp4, Self::F8E8m0];
        TensorKind::supported().map(Self::Gguf).chain(others).collect()
    }

    /// Returns elements and bytes of one block.
    fn block(self) -> (usize, usize) {
        match self {
            Self::Gguf(kind) => {
                let block = kind.block().expect("an encoding is a supported kind");
                (block.elements as usize, block.bytes as usize)
            }
            Self::Mxfp4 => (MXFP4_GROUP, MXFP4_GROUP / 2),
            Self::F8E4m3 | Self::F8E8m0 => (1, 1),
            Self::Int4 | Self::Int4LessOne | Self::I32 | Self::I64 => unreachable!("{INTEGERS}"),
        }
    }

    /// Returns the bytes of a row of `cols` elements; `None` when they are not a whole number of
    /// blocks.
    pub(crate) fn row_bytes(self, cols: usize) -> Option<usize> {
        let (elements, bytes) = self.block();
        cols.is_multiple_of(elements).then(|| cols / elements * bytes)
    }

    /// Returns whether the file's elements have this machine's in-memory representation.
    pub(crate) fn is(self, dtype: Dtype) -> bool {
        let is_same = match dtype {
            Dtype::F32 => self == Self::F32,
            Dtype::Bf16 => self == Self::BF16,
        };
        is_same && cfg!(target_endian = "little")
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gguf(kind) => kind.name().expect("an encoding is a supported kind"),
            Self::F8E4m3 => "F8_E4M3",
            Self::Mxfp4 => "MXFP4",
            Self::F8E8m0 => "F8_E8M0",
            Self::Int4 => "INT4",
            Self::Int4LessOne => "INT4-1",
            Self::I32 => "I32",
            Self::I64 => "I64",
        }
    }

    /// Returns the range of a row's bytes that has these columns in whole blocks, and the number of
    /// elements of the first block before the first column.
    pub(crate) fn bytes_of(self, cols: Range<usize>) -> (Range<usize>, usize) {
        let (elements, bytes) = self.block();
        let begin = cols.start / elements;
        (begin * bytes..cols.end.div_ceil(elements) * bytes, cols.start - begin * elements)
    }

    /// Decodes the elements of `row` from column `first` on, as many as `out` takes.
    pub(crate) fn decode_part(self, row: &[u8], first: usize, out: &mut [f32]) {
        let (elements, bytes) = self.block();
        let (before, begin) = (first % elements, first / elements);
        let row = &row[begin * bytes..];
        if before == 0 && out.len().is_multiple_of(elements) {
            return self.decode_row(row, out);
        }
        // A block that is only partly wanted is decoded as a whole.
        let mut whole = vec![0.0; (before + out.len()).next_multiple_of(elements)];
        self.decode_row(row, &mut whole);
        out.copy_from_slice(&whole[before..before + out.len()]);
    }

    /// Decodes `row`, the `row_bytes(out.len())` bytes of one row, into `out`. Each multiplication
    /// or addition rounds once to f32; F32, F16, BF16 and the formats of safetensors do not round
    /// at all. If `row` is shorter, the elements beyond its last whole block stay unchanged; files
    /// are checked when they are opened.
    pub(crate) fn decode_row(self, row: &[u8], out: &mut [f32]) {
        let kind = match self {
            Self::Gguf(kind) => kind,
            Self::F8E4m3 => return each(row, out, |[bits], [value]| *value = fp8::decode(*bits)),
            Self::Mxfp4 => return each(row, out, blocks::mxfp4),
            Self::F8E8m0 => return each(row, out, |[bits], [value]| *value = power(*bits)),
            Self::Int4 | Self::Int4LessOne | Self::I32 | Self::I64 => unreachable!("{INTEGERS}"),
        };
        match kind {
            TensorKind::F32 => each(row, out, |bytes, [value]| *value = f32::from_le_bytes(*bytes)),
            TensorKind::F16 => {
                each(row, out, |bytes, [value]| *value = f16::from_le_bytes(*bytes).to_f32());
            }
            TensorKind::Bf16 => {
                each(row, out, |bytes, [value]| *value = bf16::from_le_bytes(*bytes).to_f32());
            }
            TensorKind::Q4_0 => each(row, out, blocks::q4_0),
            TensorKind::Q4_1 => each(row, out, blocks::q4_1),
            TensorKind::Q5_0 => each(row, out, blocks::q5_0),
            TensorKind::Q5_1 => each(row, out, blocks::q5_1),
            TensorKind::Q8_0 => each(row, out, blocks::q8_0),
            TensorKind::Q4K => each(row, out, blocks::q4_k),
            TensorKind::Q5K => each(row, out, blocks::q5_k),
            TensorKind::Q6K => each(row, out, blocks::q6_k),
            TensorKind::Other(_) => unreachable!("an encoding is a supported kind"),
        }
    }
}

/// Decodes an e8m0 number, which is a power of two or NaN.
pub(crate) fn power(bits: u8) -> f32 {
    match bits {
        // The smallest power is a subnormal f32.
        0 => f32::from_bits(1 << 22),
        E8M0_NAN => f32::NAN,
        bits => f32::from_bits(u32::from(bits) << 23),
    }
}

/// Decodes block by block; `decode` has the sizes of the blocks.
fn each<const BYTES: usize, const ELEMENTS: usize>(
    row: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    for (block, out) in row.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        decode(block, out);
    }
}

#[cfg(test)]
mod tests {
    use gguf::Header;
    use proptest::prelude::*;

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
        assert_eq!(decode(Encoding::Gguf(TensorKind::F16), &bytes, 4), values);
        assert_eq!(decode(Encoding::BF16, &[0x80, 0x3f, 0xc0, 0xff], 2)[0], 1.0);
    }

    /// Compares with a fixture that holds, for every quantized kind, a tensor of random blocks and
    /// a second tensor with suffix `.f32`: the first as decoded by the `gguf` Python package.
    #[test]
    fn quantised_blocks_equal_those_of_the_python_package_bit_for_bit() {
        let file = include_bytes!("../tests/fixtures/quantised.gguf");
        let header = Header::parse(file).unwrap();
        let bytes = |name: &str| {
            let info = header.tensor(name).unwrap();
            (info, &file[info.offset as usize..][..info.bytes.unwrap() as usize])
        };
        let mut kinds = Vec::new();
        for tensor in header.tensors().iter().filter(|tensor| !tensor.name.ends_with(".f32")) {
            let (info, blocks) = bytes(&tensor.name);
            let (_, expected) = bytes(&format!("{}.f32", tensor.name));
            let encoding = Encoding::of_gguf(info.kind).unwrap();
            assert_eq!(encoding.name(), tensor.name);
            let found = decode(encoding, blocks, info.dims.iter().product::<u64>() as usize);
            let found: Vec<u8> = found.iter().flat_map(|value| value.to_le_bytes()).collect();
            assert!(found == expected, "{}", tensor.name);
            kinds.push(info.kind);
        }
        let mut quantised: Vec<_> =
            TensorKind::supported().filter(|kind| kind.block().unwrap().elements > 1).collect();
        kinds.sort_by_key(|kind| kind.number());
        quantised.sort_by_key(|kind| kind.number());
        assert_eq!(kinds, quantised);
    }

    #[test]
    fn mxfp4_numbers_and_scales_have_the_values_of_the_format() {
        let mut bytes = [0; 16];
        (bytes[0], bytes[1], bytes[15]) = (0x71, 0x2a, 0xf8);
        let numbers = decode(Encoding::Mxfp4, &bytes, 32);
        assert_eq!(numbers[..4], [0.5, 6.0, -1.0, 1.0]);
        assert_eq!((numbers[30].to_bits(), numbers[31]), ((-0.0_f32).to_bits(), -6.0));
        let all: Vec<f32> =
            (0..8).map(|bits| decode(Encoding::Mxfp4, &[bits; 16], 32)[0]).collect();
        assert_eq!(all, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        let scales = decode(Encoding::F8E8m0, &[127, 128, 0, 1, 254, 255], 6);
        let powers = [0, 1, -127, -126, 127].map(|exponent| 2_f64.powi(exponent) as f32);
        assert_eq!(scales[..5], powers);
        assert!(scales[5].is_nan());
    }

    #[test]
    fn rows_of_partial_quantised_blocks_have_no_size() {
        assert_eq!(Encoding::Gguf(TensorKind::Q4_1).row_bytes(33), None);
        assert_eq!(Encoding::Gguf(TensorKind::Q6K).row_bytes(255), None);
        assert_eq!(Encoding::Gguf(TensorKind::Q8_0).row_bytes(64), Some(68));
        assert_eq!(Encoding::Gguf(TensorKind::Q4K).row_bytes(512), Some(288));
    }

    proptest! {
        /// An incomplete block is ignored.
        #[test]
        fn truncated_rows_are_decoded_as_far_as_they_go(
            encoding in prop::sample::select(Encoding::all()),
            bytes in prop::collection::vec(any::<u8>(), 0..600),
            cols in 0_usize..600,
        ) {
            const UNTOUCHED: f32 = 1.2345e37;
            let (elements, size) = encoding.block();
            let whole = (bytes.len() / size).min(cols / elements) * elements;
            let mut out = vec![UNTOUCHED; cols];
            encoding.decode_row(&bytes, &mut out);
            prop_assert!(out[whole..].iter().all(|&value| value == UNTOUCHED));
            let mut again = vec![0.0; whole];
            encoding.decode_row(&bytes[..whole / elements * size], &mut again);
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&out[..whole]), bits(&again));
        }
    }
}
