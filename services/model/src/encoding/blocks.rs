//! Quantized blocks of GGUF and MXFP4. In GGUF a small block has 32 elements with one scale. A "K"
//! block has 256 elements in 8 or 16 groups whose scales are small integers. Every element is
//! `scale * integer`, plus or minus a minimum. Each function uses ggml's order of operations, so
//! that results are bit-equal.

use half::f16;

const SMALL: usize = 32;
const LARGE: usize = 256;

/// Decodes 32 FP4 numbers (e2m1) without their scale, the low half of a byte first.
pub(super) fn mxfp4(block: &[u8; 16], out: &mut [f32; SMALL]) {
    for (&byte, pair) in block.iter().zip(out.as_chunks_mut().0) {
        *pair = [byte & 15, byte >> 4].map(fp4);
    }
}

/// Decodes an FP4 number (e2m1) from its 4 bits.
pub(super) fn fp4(bits: u8) -> f32 {
    const VALUES: [f32; 16] =
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    VALUES[usize::from(bits)]
}

fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Decodes f16 scale, 32 nibbles: `scale * (nibble - 8)`. The low nibbles are the first 16
/// elements.
pub(super) fn q4_0(block: &[u8; 18], out: &mut [f32; SMALL]) {
    let scale = f16_at(block, 0);
    nibbles(&block[2..], out, |nibble, _| scale * (f32::from(nibble) - 8.0));
}

/// Decodes f16 scale, f16 minimum, 32 nibbles: `scale * nibble + minimum`.
pub(super) fn q4_1(block: &[u8; 20], out: &mut [f32; SMALL]) {
    let (scale, minimum) = (f16_at(block, 0), f16_at(block, 2));
    nibbles(&block[4..], out, |nibble, _| scale * f32::from(nibble) + minimum);
}

/// Decodes f16 scale, 32 high bits, 32 nibbles: `scale * (five bits - 16)`.
pub(super) fn q5_0(block: &[u8; 22], out: &mut [f32; SMALL]) {
    let scale = f16_at(block, 0);
    let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    nibbles(&block[6..], out, |nibble, at| scale * (f32::from(fifth_bit(nibble, high, at)) - 16.0));
}

/// Decodes f16 scale, f16 minimum, 32 high bits, 32 nibbles: `scale * five bits + minimum`.
pub(super) fn q5_1(block: &[u8; 24], out: &mut [f32; SMALL]) {
    let (scale, minimum) = (f16_at(block, 0), f16_at(block, 2));
    let high = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    nibbles(&block[8..], out, |nibble, at| {
        scale * f32::from(fifth_bit(nibble, high, at)) + minimum
    });
}

/// Decodes f16 scale, 32 signed bytes: `scale * byte`.
pub(super) fn q8_0(block: &[u8; 34], out: &mut [f32; SMALL]) {
    let scale = f16_at(block, 0);
    for (value, &byte) in out.iter_mut().zip(&block[2..]) {
        *value = scale * f32::from(byte as i8);
    }
}

fn nibbles(bytes: &[u8], out: &mut [f32; SMALL], value: impl Fn(u8, usize) -> f32) {
    const HALF: usize = SMALL / 2;
    for (at, &byte) in bytes.iter().enumerate() {
        out[at] = value(byte & 15, at);
        out[HALF + at] = value(byte >> 4, HALF + at);
    }
}

fn fifth_bit(nibble: u8, high: u32, at: usize) -> u8 {
    nibble | ((high >> at & 1) as u8) << 4
}

/// Decodes f16 scale, f16 minimum, 8 scales and 8 minima of 6 bits, 256 nibbles. Each of 8 groups
/// has 32 elements. Two groups share 32 bytes: the first group has the low nibbles, the second the
/// high nibbles.
pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; LARGE]) {
    let groups = group_scales(block);
    for (pair, bytes) in block[16..].as_chunks::<32>().0.iter().enumerate() {
        for (half, (scale, minimum)) in [groups[2 * pair], groups[2 * pair + 1]].iter().enumerate()
        {
            let out = &mut out[64 * pair + 32 * half..][..32];
            for (value, byte) in out.iter_mut().zip(bytes) {
                *value = scale * f32::from(byte >> (4 * half) & 15) - minimum;
            }
        }
    }
}

/// Decodes the fields of [`q4_k`] with 32 bytes of fifth bits before the nibbles: bit `group` of
/// byte `i` belongs to element `i` of that group.
pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; LARGE]) {
    let groups = group_scales(block);
    let high = &block[16..48];
    for (group, (scale, minimum)) in groups.iter().enumerate() {
        let (pair, half) = (group / 2, group % 2);
        let bytes = &block[48 + 32 * pair..][..32];
        for (i, value) in out[32 * group..][..32].iter_mut().enumerate() {
            let five_bits = (bytes[i] >> (4 * half) & 15) | (high[i] >> group & 1) << 4;
            *value = scale * f32::from(five_bits) - minimum;
        }
    }
}

/// Returns scale and minimum of each of the 8 groups of a Q4_K or Q5_K block.
fn group_scales(block: &[u8]) -> [(f32, f32); 8] {
    let (scale, minimum) = (f16_at(block, 0), f16_at(block, 2));
    // The low six bits of bytes 0..4 are the scales of the first four groups, those of bytes 4..8
    // are their minima. Bytes 8..12 have the low four bits of the other groups' scales and minima,
    // and the high two bits of bytes 0..8 have their high two bits.
    let bits = &block[4..16];
    std::array::from_fn(|group| {
        let (group_scale, group_minimum) = match group {
            0..4 => (bits[group] & 63, bits[group + 4] & 63),
            _ => (
                bits[group + 4] & 15 | bits[group - 4] >> 6 << 4,
                bits[group + 4] >> 4 | bits[group] >> 6 << 4,
            ),
        };
        (scale * f32::from(group_scale), minimum * f32::from(group_minimum))
    })
}

/// Decodes 256 low nibbles, 256 pairs of high bits, 16 signed group scales, f16 scale: `scale *
/// group scale * (six bits - 32)`. Each half of 128 elements has 64 bytes of nibbles and 32 bytes
/// of high bits.
pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; LARGE]) {
    let scale = f16_at(block, 208);
    for (half, out) in out.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let low = &block[64 * half..][..64];
        let high = &block[128 + 32 * half..][..32];
        let group_scales = &block[192 + 8 * half..][..8];
        // Each quarter of 32 elements uses one of the four bit pairs in every byte of high bits.
        for (quarter, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let low = &low[quarter % 2 * 32..][..32];
            for (i, value) in out.iter_mut().enumerate() {
                let nibble = low[i] >> (4 * (quarter / 2)) & 15;
                let six_bits = nibble | (high[i] >> (2 * quarter) & 3) << 4;
                let group_scale = group_scales[2 * quarter + i / 16] as i8;
                *value = scale * f32::from(group_scale) * (f32::from(six_bits) - 32.0);
            }
        }
    }
}
