//! Random changes to bytes, equal for equal seeds.

/// Sizes that no input has, ends of ranges, and numbers whose products overflow.
const NUMBERS: [u64; 10] =
    [0, 1, 0x7f, 0xffff, u32::MAX as u64, 1 << 31, 1 << 34, 1 << 40, u64::MAX / 2, u64::MAX];
/// Text pieces that close, open, escape or nest.
const WORDS: [&str; 12] = [
    "\"",
    "{",
    "]",
    "\\u0000",
    "\\ud800",
    "null",
    "-1",
    "1e999",
    "18446744073709551616",
    "[[[[[[[[[[[[[[[[",
    "{{ range(999999999) }}",
    "\u{feff}\u{10ffff}",
];
const CHANGES_MAX: u64 = 6;

/// A small pseudo-random generator.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed ^ 0x9e37_79b9_7f4a_7c15)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }
}

/// Returns a few changes to `bytes`. Pieces may come from `other`, an input of the same kind.
pub(crate) fn mutate(random: &mut Random, bytes: &[u8], other: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..=random.next() % CHANGES_MAX {
        change(random, &mut bytes, other);
    }
    bytes
}

fn change(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    // Most formats have their sizes at the beginning.
    let near = if random.next().is_multiple_of(2) { bytes.len().min(512) } else { bytes.len() };
    let at = random.below(near);
    match random.next() % 8 {
        0 => bytes.truncate(at),
        1 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
        2 if !bytes.is_empty() => bytes[at] = random.next() as u8,
        3 | 4 => {
            let number = NUMBERS[random.below(NUMBERS.len())].to_le_bytes();
            let width = [4, 8][random.below(2)];
            for (byte, new) in bytes[at..].iter_mut().zip(&number[..width]) {
                *byte = *new;
            }
        }
        5 => drop(bytes.splice(at..at, WORDS[random.below(WORDS.len())].bytes())),
        6 => {
            let end = (at + random.below(64)).min(bytes.len());
            let copied = bytes[at..end].to_vec();
            let to = random.below(bytes.len());
            bytes.splice(to..to, copied);
        }
        _ => {
            let from = random.below(other.len());
            let piece = &other[from..(from + random.below(64)).min(other.len())];
            let end = (at + piece.len()).min(bytes.len());
            bytes.splice(at..end, piece.iter().copied());
        }
    }
}
