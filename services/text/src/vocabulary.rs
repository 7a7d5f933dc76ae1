//! Token strings by id, and ids by token string.

use std::hash::Hasher;

use crate::{error::VocabularyError, packed::PackedStrings};

/// Maximum vocabulary size, ten times the largest in use. Bounds the allocation for a corrupt id.
pub const VOCABULARY_SIZE_MAX: u32 = 1 << 22;

/// Marks a free entry of the index.
const FREE: u32 = u32::MAX;

/// Strings of all ids. An id without a string (a hole) has the empty string.
#[derive(Clone, Debug)]
pub(crate) struct Vocabulary {
    strings: PackedStrings,
    /// Open addressing with linear probing, at most two thirds full; holds ids.
    index: Box<[u32]>,
}

impl Vocabulary {
    /// Creates a vocabulary from strings in any order and the id of each. Of equal strings,
    /// [`id`](Self::id) returns the lowest id.
    pub fn new(strings: &PackedStrings, ids: &[u32]) -> Result<Self, VocabularyError> {
        assert_eq!(strings.len(), ids.len(), "every string has an id");
        let size = ids.iter().map(|id| u64::from(*id) + 1).max().unwrap_or(0);
        if size == 0 {
            return Err(VocabularyError::Empty);
        }
        if size > u64::from(VOCABULARY_SIZE_MAX) {
            let id = (size - 1) as u32;
            let at = ids.iter().position(|other| *other == id).unwrap_or(0);
            return Err(VocabularyError::IdTooLarge { id, token: strings.get(at).to_owned() });
        }
        // `order[id]` is the index of the id's string.
        let mut order = vec![FREE; size as usize];
        for (at, &id) in ids.iter().enumerate() {
            let place = &mut order[id as usize];
            if *place != FREE {
                let first = strings.get(*place as usize).to_owned();
                let second = strings.get(at).to_owned();
                return Err(VocabularyError::IdTwice { id, first, second });
            }
            *place = at as u32;
        }
        let mut in_order = PackedStrings::default();
        for place in order {
            let string = if place == FREE { "" } else { strings.get(place as usize) };
            if !in_order.push(string) {
                return Err(VocabularyError::TooLarge);
            }
        }
        in_order.shrink();
        let capacity = (in_order.len() * 3 / 2 + 1).next_power_of_two();
        let mut vocabulary =
            Self { strings: in_order, index: vec![FREE; capacity].into_boxed_slice() };
        for id in 0..vocabulary.strings.len() as u32 {
            vocabulary.insert(id);
        }
        Ok(vocabulary)
    }

    fn insert(&mut self, id: u32) {
        let string = self.strings.get(id as usize);
        if string.is_empty() {
            return;
        }
        let mask = self.index.len() - 1;
        let mut at = hash(string) as usize & mask;
        while self.index[at] != FREE {
            if self.strings.get(self.index[at] as usize) == string {
                return;
            }
            at = (at + 1) & mask;
        }
        self.index[at] = id;
    }

    /// Returns the highest id + 1.
    pub fn size(&self) -> u32 {
        self.strings.len() as u32
    }

    /// Returns the string of `id`; `None` for holes and ids above the highest.
    pub fn string(&self, id: u32) -> Option<&str> {
        let string = ((id as usize) < self.strings.len()).then(|| self.strings.get(id as usize))?;
        (!string.is_empty()).then_some(string)
    }

    pub fn id(&self, string: &str) -> Option<u32> {
        if string.is_empty() {
            return None;
        }
        let mask = self.index.len() - 1;
        let mut at = hash(string) as usize & mask;
        loop {
            match self.index[at] {
                FREE => return None,
                id if self.strings.get(id as usize) == string => return Some(id),
                _ => at = (at + 1) & mask,
            }
        }
    }
}

fn hash(string: &str) -> u64 {
    let mut hasher = WordHasher::default();
    hasher.write(string.as_bytes());
    hasher.finish()
}

/// Multiply-and-fold hash, eight bytes at a time. Tables keyed by a model's own vocabulary need speed and
/// no resistance to chosen keys: user text is looked up and never inserted.
#[derive(Clone, Copy, Default)]
pub(crate) struct WordHasher(u64);

impl WordHasher {
    fn mix(&mut self, word: u64) {
        let product =
            u128::from(self.0 ^ word ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93_u128;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}

impl Hasher for WordHasher {
    fn write(&mut self, bytes: &[u8]) {
        let mut words = bytes.chunks_exact(8);
        for word in &mut words {
            self.mix(u64::from_le_bytes(word.try_into().expect("chunks of eight")));
        }
        let mut last = [0; 8];
        last[..words.remainder().len()].copy_from_slice(words.remainder());
        self.mix(u64::from_le_bytes(last) ^ ((bytes.len() as u64) << 56));
    }

    fn write_u64(&mut self, word: u64) {
        self.mix(word);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(strings: &[&str]) -> PackedStrings {
        let mut packed = PackedStrings::default();
        for string in strings {
            assert!(packed.push(string));
        }
        packed
    }

    #[test]
    fn strings_and_ids_find_each_other_in_any_order() {
        let vocabulary = Vocabulary::new(&packed(&["b", "a", "ccc"]), &[1, 0, 5]).unwrap();
        assert_eq!(vocabulary.size(), 6);
        assert_eq!(vocabulary.id("a"), Some(0));
        assert_eq!(vocabulary.id("ccc"), Some(5));
        assert_eq!(vocabulary.string(1), Some("b"));
        assert_eq!(vocabulary.string(3), None, "a hole");
        assert_eq!(vocabulary.string(6), None, "beyond the end");
        assert_eq!(vocabulary.id("d"), None);
        assert_eq!(vocabulary.id(""), None);
    }

    #[test]
    fn of_equal_strings_the_lowest_id_is_found() {
        let vocabulary = Vocabulary::new(&packed(&["x", "a", "a"]), &[0, 2, 1]).unwrap();
        assert_eq!(vocabulary.id("a"), Some(1));
        assert_eq!(vocabulary.string(2), Some("a"));
    }

    #[test]
    fn broken_ids_are_refused_without_a_large_allocation() {
        let error = Vocabulary::new(&packed(&["a", "b"]), &[0, u32::MAX]).unwrap_err();
        assert_eq!(error.to_string(), "token \"b\" has id 4294967295; ids are less than 4194304");
        let error = Vocabulary::new(&packed(&["a", "b"]), &[3, 3]).unwrap_err();
        assert_eq!(error.to_string(), "tokens \"a\" and \"b\" have the same id 3");
        assert!(matches!(Vocabulary::new(&packed(&[]), &[]), Err(VocabularyError::Empty)));
    }

    #[test]
    fn every_one_of_many_strings_is_found() {
        let names: Vec<String> = (0..10_000).map(|n| format!("token {n}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let ids: Vec<u32> = (0..10_000).rev().collect();
        let vocabulary = Vocabulary::new(&packed(&names), &ids).unwrap();
        for (name, id) in names.iter().zip(ids) {
            assert_eq!((vocabulary.id(name), vocabulary.string(id)), (Some(id), Some(*name)));
        }
    }
}
