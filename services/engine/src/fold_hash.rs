//! Hashes for tables whose keys are numbers, and which every row of every step is looked up in.

use std::hash::{BuildHasher, Hasher, RandomState};

/// A table's own keys, drawn when it is made: who chooses ids or tokens cannot choose what collides.
#[derive(Clone, Debug)]
pub(crate) struct FoldState {
    low: u64,
    high: u64,
}

impl Default for FoldState {
    fn default() -> Self {
        let random = RandomState::new();
        Self { low: random.hash_one(0), high: random.hash_one(1) }
    }
}

impl BuildHasher for FoldState {
    type Hasher = FoldHasher;

    fn build_hasher(&self) -> FoldHasher {
        FoldHasher { low: self.low, high: self.high }
    }
}

/// The two halves of a product whose factors are a number's halves, each with a key.
#[derive(Debug)]
pub(crate) struct FoldHasher {
    low: u64,
    high: u64,
}

impl Hasher for FoldHasher {
    fn write_u128(&mut self, number: u128) {
        let (low, high) = (number as u64, (number >> 64) as u64);
        let product = u128::from(low ^ self.low) * u128::from(high ^ self.high);
        self.low = product as u64 ^ (product >> 64) as u64;
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u128(number.into());
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u128(byte.into()));
    }

    fn finish(&self) -> u64 {
        self.low
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn numbers_spread_over_both_ends_of_their_hash() {
        let state = FoldState { low: 0x9e37_79b9_7f4a_7c15, high: 0xd6e8_feb8_6659_fd93 };
        for numbers in [
            (0..4096).collect::<Vec<u128>>(),
            (0..4096).map(|number| number << 64).collect(),
            (0..4096).map(|number| number << 116).collect(),
            (0..4096).map(|number| number * 0x1_0000_0001).collect(),
        ] {
            // A table takes its places from the low bits and tells neighbours apart by the top seven.
            let hashes = || numbers.iter().map(|&number| state.hash_one(number));
            let low: HashSet<u64> = hashes().map(|hash| hash & 0xfff).collect();
            let top: HashSet<u64> = hashes().map(|hash| hash >> 57).collect();
            // Of 4,096 random ones 2,589 are expected to be different.
            assert!(low.len() > 2200, "{} places", low.len());
            assert_eq!(top.len(), 128);
        }
    }

    #[test]
    fn every_table_has_keys_of_its_own() {
        let (first, second) = (FoldState::default(), FoldState::default());
        assert_eq!(first.hash_one(7_u128), first.clone().hash_one(7_u128));
        assert!((0..9_u128).any(|number| first.hash_one(number) != second.hash_one(number)));
    }
}
