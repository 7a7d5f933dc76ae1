//! A number by which both ends of a transfer tell whether blocks came as they went.
//!
//! The digest of a list of blocks is a sum, modulo 2⁶⁴, over all their words of 8 bytes:
//! `mix(word + (place + 1) · STEP)`, with the words of all blocks counted through, in the order of the
//! list and, within a block, as they lie where it has all heads. Additions may come in any order. So
//! thousands of threads of a GPU compute it as fast as they can read, and ranks that have some heads of
//! each block each compute a part of it, whatever their number at either end: the parts add up.
//!
//! What it finds. `STEP` and `mix` are those of SplitMix64 (Steele, Lea and Flood, "Fast splittable
//! pseudorandom number generators", 2014, with the finaliser that David Stafford found, his variant 13):
//! over words that are zero the terms are that generator's numbers from seed 0 on, in order.
//! * `mix` is a bijection, each of its three shifts and two odd products being one. So a single word that
//!   is changed, in whatever bits, changes its term and with it the digest: always, not just likely.
//! * The place is in the argument, and `STEP` is odd, so zeros are no nothing: each has a term of its own.
//!   A word, head or block at another place, the same one twice, or all of them a word further on, have
//!   other terms altogether.
//! * Where several terms change, the digest stays when the changes add up to 0. `mix` sends neighbouring
//!   arguments to numbers that pass all tests of randomness in use, so that is one chance in 2⁶⁴.
//! * Two words have the same term at two places only if they differ by the distance times `STEP`, a number
//!   like any other for those who do not look for it. Against those who do, a digest without a key is no
//!   protection: peers authenticate each other.

use crate::layout::KvLayout;

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const WORD_BYTES: usize = 8;

/// Which heads of whole blocks lie somewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Of a block with these heads alone.
    own: KvLayout,
    whole: KvLayout,
    first: usize,
}

impl Heads {
    pub fn all(layout: KvLayout) -> Self {
        Self { own: layout, whole: layout, first: 0 }
    }

    /// `count` heads from `first` on.
    ///
    /// # Panics
    /// When a whole block has no such heads.
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

    /// Bytes that lie together here and in a whole block, how far from each other they begin there, and
    /// where the first do.
    pub(crate) fn runs(&self) -> (usize, usize, usize) {
        if self.own == self.whole {
            let bytes = self.own.block_bytes();
            return (bytes, bytes, 0);
        }
        let head_bytes = self.own.head_elements() * self.own.dtype.bytes();
        let bytes = |heads: usize| heads * head_bytes;
        (bytes(self.own.kv_head_count), bytes(self.whole.kv_head_count), bytes(self.first))
    }
}

/// What these heads of the list's block number `index` add to the digest. `bytes` is the block as it lies
/// where it has these heads alone.
pub fn of_block(heads: &Heads, index: usize, bytes: &[u8]) -> u64 {
    debug_assert_eq!(bytes.len(), heads.own.block_bytes());
    let (run_bytes, stride, first) = heads.runs();
    let block_begin = index * heads.whole_bytes();
    let begins = (block_begin + first..).step_by(stride);
    let runs = bytes.chunks_exact(run_bytes).zip(begins);
    runs.map(|(run, begin)| of_words(begin / WORD_BYTES, run)).fold(0, u64::wrapping_add)
}

/// Of words that lie together, the first of them at this place. Layouts have whole words: 16 tokens of
/// anything are.
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
    use crate::layout::Dtype;

    const BLOCKS: usize = 3;

    fn layout(kv_head_count: usize, dtype: Dtype) -> KvLayout {
        KvLayout { layer_count: 2, kv_head_count, head_dim: 2, dtype }
    }

    fn random(bytes: usize) -> Vec<u8> {
        let mut state = 7_u64;
        let mut next = || {
            state = state.wrapping_add(STEP);
            mix(state)
        };
        (0..bytes.div_ceil(8)).flat_map(|_| next().to_le_bytes()).take(bytes).collect()
    }

    /// Of blocks behind each other.
    fn digest(layout: KvLayout, blocks: &[u8]) -> u64 {
        let blocks = blocks.chunks_exact(layout.block_bytes()).enumerate();
        blocks
            .map(|(index, block)| of_block(&Heads::all(layout), index, block))
            .fold(0, u64::wrapping_add)
    }

    /// The generator's first numbers from seed 0 on, as its authors' code prints them.
    #[test]
    fn zeros_have_the_published_numbers_as_terms() {
        let numbers = [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f];
        let mut sum = 0_u64;
        for (count, number) in (1..).zip(numbers) {
            sum = sum.wrapping_add(number);
            assert_eq!(of_words(0, &vec![0; count * 8]), sum);
        }
        assert_eq!(of_words(1, &[0; 8]), numbers[1]);
        assert_eq!(of_words(5, &[]), 0);
    }

    /// Every bit flipped, every pair of words swapped, every word copied over another or zeroed, every
    /// rotation; blocks and heads too. All digests differ, not only from the first.
    #[test]
    fn whatever_is_changed_swapped_or_moved_changes_it() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let layout = layout(2, dtype);
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
                // Of zeros all of what follows is the same again.
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
                        is_new(&changed, "all words further on");
                    }
                }
                let head_bytes = layout.head_elements() * dtype.bytes();
                for (unit, step) in [("block", block_bytes), ("head", head_bytes)] {
                    for at in (0..blocks.len() - step).step_by(step) {
                        // Rotations by whole blocks were seen above.
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
    fn parts_of_any_ranks_add_up_to_the_whole() {
        for (heads, ranks) in [(1, 1), (2, 2), (3, 1), (3, 3), (8, 2), (8, 4), (8, 8)] {
            for dtype in [Dtype::F32, Dtype::Bf16] {
                let layout = layout(heads, dtype);
                let blocks = random(BLOCKS * layout.block_bytes());
                let own_heads = heads / ranks;
                let head_bytes = layout.head_elements() * dtype.bytes();
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
