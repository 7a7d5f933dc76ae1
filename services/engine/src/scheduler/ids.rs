//! The table of sequences by their ids, in which every row of every step is looked up some times.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

use crate::event::SequenceId;

pub(super) type ById<T> = HashMap<SequenceId, T, BuildHasherDefault<IdHasher>>;

/// Ids are random numbers of the router, never a client's: what makes guessing collisions hard would be
/// paid a thousand times a step for nothing.
#[derive(Debug, Default)]
pub(super) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write_u128(&mut self, id: u128) {
        // Halves of a product of both halves: small and consecutive ids spread as well.
        let (low, high) = (id as u64, (id >> 64) as u64);
        let product = u128::from(self.0 ^ low ^ 0x9e37_79b9_7f4a_7c15)
            * u128::from(high ^ 0xd6e8_feb8_6659_fd93);
        self.0 = product as u64 ^ (product >> 64) as u64;
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u128(byte.into());
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, hash::BuildHasher};

    use super::*;

    #[test]
    fn ids_spread_over_both_ends_of_their_hash() {
        let hash = |id: u128| BuildHasherDefault::<IdHasher>::default().hash_one(SequenceId(id));
        for ids in [
            (0..4096).collect::<Vec<u128>>(),
            (0..4096).map(|id| id << 64).collect(),
            (0..4096).map(|id| id << 116).collect(),
            (0..4096).map(|id| id * 0x1_0000_0001).collect(),
        ] {
            // A table takes its places from the low bits and tells neighbours apart by the top seven.
            let low: HashSet<u64> = ids.iter().map(|&id| hash(id) & 0xfff).collect();
            let top: HashSet<u64> = ids.iter().map(|&id| hash(id) >> 57).collect();
            // Of 4,096 random ones 2,589 are expected to be different.
            assert!(low.len() > 2200, "{} places", low.len());
            assert_eq!(top.len(), 128);
        }
    }
}
