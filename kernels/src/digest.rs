//! Digest by which both ends of a transfer check that the blocks arrived intact, and of weights
//! that a trainer sends.
//!
//! The digest of a list of blocks is a sum modulo 2⁶⁴ over all their 8-byte words: `mix(word +
//! (place + 1) · STEP)`. `place` counts the words of all blocks in list order and, within a block,
//! in the layout with all heads. The order of the additions does not matter. So thousands of GPU
//! threads compute the digest at memory bandwidth. Each rank computes the part of its own heads,
//! and the parts add up to the same digest for any number of ranks at either end.
//!
//! Detected changes. `STEP` and `mix` are those of SplitMix64 (Steele, Lea and Flood, "Fast
//! splittable pseudorandom number generators", 2014, with David Stafford's finalizer variant 13):
//! for zero words the terms are that generator's output from seed 0, in order.
//! * `mix` is a bijection, because its three shifts and two odd multiplications are. So a change of
//!   one word, in any of its bits, always changes the digest.
//! * The place is part of the argument and `STEP` is odd, so zero words at different places have
//!   different terms. A word, head or block that is moved, duplicated or shifted has different
//!   terms.
//! * When several terms change, the digest stays the same only if the changes add up to 0. The
//!   outputs of `mix` pass the usual randomness tests, so this happens with probability 2⁻⁶⁴.
//! * Two words have the same term at two places only if they differ by the distance times `STEP`.
//!   Random corruption does not produce this difference. The digest has no key and does not protect
//!   against an attacker: peers authenticate each other.

use crate::layout::KvLayout;

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const WORD_BYTES: usize = 8;

/// Purpose of digests. Digests of one purpose do not wait for those of another.
#[derive(Clone, Copy, Debug)]
pub enum DigestPurpose {
    Transfer,
    SaveToHost,
    LoadFromHost,
}

/// The heads of whole blocks that one rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Layout of a block with these heads only.
    own: KvLayout,
    whole: KvLayout,
    first: usize,
}

impl Heads {
    pub fn all(layout: KvLayout) -> Self {
        Self { own: layout, whole: layout, first: 0 }
    }

    /// Returns `count` heads from `first` on.
    ///
    /// # Panics
    /// When a whole block does not have these heads.
    pub fn some(whole: KvLayout, first: usize, count: usize) -> Self {
        let end = first.checked_add(count).filter(|end| *end <= whole.kv_head_count);
        assert!(end.is_some() && count > 0, "heads {first} + {count} of {}", whole.kv_head_count);
        Self { own: whole.with_heads(count), whole, first }
    }

    pub(crate) fn own(&self) -> KvLayout {
        self.own
    }

    pub(crate) fn whole_bytes(&self) -> usize {
        self.whole.block_bytes()
    }

    /// Returns the bytes that are contiguous both here and in a whole block, the stride between
    /// their starts in a whole block, and the offset of the first, all in bytes.
    pub(crate) fn runs(&self) -> (usize, usize, usize) {
        if self.own == self.whole {
            let bytes = self.own.block_bytes();
            return (bytes, bytes, 0);
        }
        let head_bytes = self.own.head_bytes();
        let bytes = |heads: usize| heads * head_bytes;
        (bytes(self.own.kv_head_count), bytes(self.whole.kv_head_count), bytes(self.first))
    }
}

/// Returns the part that these heads add to the digest in block `index` of the list. `bytes` holds
/// the block with these heads only.
pub fn of_block(heads: &Heads, index: usize, bytes: &[u8]) -> u64 {
    debug_assert_eq!(bytes.len(), heads.own.block_bytes());
    let (run_bytes, stride, first) = heads.runs();
    let block_begin = index * heads.whole_bytes();
    let begins = (block_begin + first..).step_by(stride);
    let runs = bytes.chunks_exact(run_bytes).zip(begins);
    runs.map(|(run, begin)| of_words(begin / WORD_BYTES, run)).fold(0, u64::wrapping_add)
}

/// Place of a part of a weight in the whole weight: equal runs at equal distances, all multiples of
/// 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightRuns {
    pub runs: usize,
    pub run_bytes: usize,
    /// Bytes between the starts of two runs in the whole weight.
    pub run_stride: usize,
    /// Offset of the first run in the whole weight, in bytes.
    pub first: usize,
}

impl WeightRuns {
    /// Returns the bytes of the part.
    pub fn bytes(&self) -> usize {
        self.runs * self.run_bytes
    }
}

/// Returns what a part of a weight adds to the weight's digest. `bytes` holds the part's runs one
/// after the other.
pub fn of_weight(part: &WeightRuns, bytes: &[u8]) -> u64 {
    assert_eq!(bytes.len(), part.bytes(), "a part has {} bytes", part.bytes());
    let begins = (part.first..).step_by(part.run_stride.max(1));
    let runs = bytes.chunks_exact(part.run_bytes.max(1)).zip(begins);
    runs.map(|(run, begin)| of_words(begin / WORD_BYTES, run)).fold(0, u64::wrapping_add)
}

/// Returns the sum of the terms of contiguous words, the first of them at `place`. Every layout has
/// whole words, because a block has 16 tokens.
fn of_words(place: usize, bytes: &[u8]) -> u64 {
    let first = (place as u64 + 1).wrapping_mul(STEP);
    let (words, []) = bytes.as_chunks::<WORD_BYTES>() else {
        unreachable!("{} bytes are whole words", bytes.len());
    };
    let terms = (0..).zip(words).map(|(at, word)| {
        mix(u64::from_le_bytes(*word).wrapping_add(first.wrapping_add(STEP.wrapping_mul(at))))
    });
    terms.fold(0, u64::wrapping_add)
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::layout::KvFormat;

    const BLOCKS: usize = 3;

    fn layout(kv_head_count: usize, format: KvFormat) -> KvLayout {
        KvLayout { layer_count: 2, kv_head_count, head_dim: 2, format }
    }

    fn random(bytes: usize) -> Vec<u8> {
        let mut state = 7_u64;
        let mut next = || {
            state = state.wrapping_add(STEP);
            mix(state)
        };
        (0..bytes.div_ceil(8)).flat_map(|_| next().to_le_bytes()).take(bytes).collect()
    }

    /// Returns the digest of consecutive blocks.
    fn digest(layout: KvLayout, blocks: &[u8]) -> u64 {
        let blocks = blocks.chunks_exact(layout.block_bytes()).enumerate();
        blocks
            .map(|(index, block)| of_block(&Heads::all(layout), index, block))
            .fold(0, u64::wrapping_add)
    }

    /// Checks the terms against the generator's first numbers from seed 0, as its authors' code
    /// prints them.
    #[test]
    fn zero_words_have_the_published_splitmix64_terms() {
        let numbers = [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f];
        let mut sum = 0_u64;
        for (count, number) in (1..).zip(numbers) {
            sum = sum.wrapping_add(number);
            assert_eq!(of_words(0, &vec![0; count * 8]), sum);
        }
        assert_eq!(of_words(1, &[0; 8]), numbers[1]);
        assert_eq!(of_words(5, &[]), 0);
    }

    /// Flips every bit, swaps every pair of words, copies every word over another, zeroes every
    /// word and rotates by every distance; heads and blocks too. All digests must differ from each
    /// other.
    #[test]
    fn digest_changes_with_any_change_swap_or_move() {
        for format in [KvFormat::F32, KvFormat::Bf16, KvFormat::Fp8] {
            let layout = layout(2, format);
            let block_bytes = layout.block_bytes();
            for blocks in [random(BLOCKS * block_bytes), vec![0; BLOCKS * block_bytes]] {
                let is_random = blocks[0] != 0 || blocks[1] != 0;
                let mut seen = HashSet::from([digest(layout, &blocks)]);
                let mut is_new = |blocks: &[u8], what: &str| {
                    assert!(seen.insert(digest(layout, blocks)), "{what}");
                };
                for bit in 0..blocks.len() * 8 {
                    let mut changed = blocks.clone();
                    changed[bit / 8] ^= 1 << (bit % 8);
                    is_new(&changed, "a flipped bit");
                }
                // For zero blocks the changes below change nothing.
                if !is_random {
                    continue;
                }
                let words = blocks.len() / 8;
                for word in 0..words {
                    let mut changed = blocks.clone();
                    changed[word * 8..][..8].fill(0);
                    is_new(&changed, "a word of zeros");
                    for other in (word + 1..words).step_by(7) {
                        let mut changed = blocks.clone();
                        changed.copy_within(word * 8..word * 8 + 8, other * 8);
                        is_new(&changed, "a word twice");
                        changed[word * 8..][..8].copy_from_slice(&blocks[other * 8..][..8]);
                        is_new(&changed, "two words swapped");
                    }
                    if word > 0 {
                        let mut changed = blocks.clone();
                        changed.rotate_left(word * 8);
                        is_new(&changed, "all words rotated");
                    }
                }
                let head_bytes = layout.head_bytes();
                for (unit, step) in [("block", block_bytes), ("head", head_bytes)] {
                    for at in (0..blocks.len() - step).step_by(step) {
                        // Rotations by whole blocks are tested above.
                        let mut changed = blocks.clone();
                        changed.copy_within(at..at + step, at + step);
                        is_new(&changed, unit);
                        changed[at..at + step].copy_from_slice(&blocks[at + step..][..step]);
                        is_new(&changed, unit);
                    }
                }
                assert_ne!(digest(layout, &blocks[block_bytes..]), digest(layout, &blocks));
            }
        }
    }

    #[test]
    fn digests_of_parts_of_a_weight_add_up_to_the_whole_digest() {
        let (rows, row_bytes) = (6, 96);
        let weight = random(rows * row_bytes);
        let bytes = weight.len();
        let whole = WeightRuns { runs: 1, run_bytes: bytes, run_stride: bytes, first: 0 };
        let expected = of_weight(&whole, &weight);
        // Rows 0 to 2 and 2 to 6, then columns 0 to 32 and 32 to 96.
        let by_rows = [(0, 192), (192, 384)].map(|(first, run_bytes)| {
            let part = WeightRuns { runs: 1, run_bytes, run_stride: run_bytes, first };
            of_weight(&part, &weight[first..first + run_bytes])
        });
        assert_eq!(by_rows[0].wrapping_add(by_rows[1]), expected);
        let by_cols = [(0, 32), (32, 64)].map(|(first, run_bytes)| {
            let part = WeightRuns { runs: rows, run_bytes, run_stride: row_bytes, first };
            let own = weight.chunks(row_bytes).flat_map(|row| &row[first..first + run_bytes]);
            of_weight(&part, &own.copied().collect::<Vec<_>>())
        });
        assert_eq!(by_cols[0].wrapping_add(by_cols[1]), expected);
        let mut moved = weight.clone();
        moved.rotate_left(8);
        assert_ne!(of_weight(&whole, &moved), expected);
    }

    #[test]
    fn digests_of_ranks_add_up_to_the_whole_digest() {
        for (heads, ranks) in [(1, 1), (2, 2), (3, 1), (3, 3), (8, 2), (8, 4), (8, 8)] {
            for format in [KvFormat::F32, KvFormat::Bf16, KvFormat::Fp8] {
                let layout = layout(heads, format);
                let blocks = random(BLOCKS * layout.block_bytes());
                let own_heads = heads / ranks;
                let head_bytes = layout.head_bytes();
                let mut sum = 0_u64;
                for rank in 0..ranks {
                    let part = Heads::some(layout, rank * own_heads, own_heads);
                    for (index, block) in blocks.chunks_exact(layout.block_bytes()).enumerate() {
                        let halves = block.chunks_exact(heads * head_bytes);
                        let own = halves.flat_map(|half| {
                            &half[rank * own_heads * head_bytes..][..own_heads * head_bytes]
                        });
                        let own: Vec<u8> = own.copied().collect();
                        sum = sum.wrapping_add(of_block(&part, index, &own));
                    }
                }
                assert_eq!(sum, digest(layout, &blocks), "{heads} heads, {ranks} ranks");
            }
        }
    }
}
