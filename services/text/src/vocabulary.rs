//! Two-way mapping between token ids and token strings.

use std::hash::BuildHasher;

use hashbrown::HashTable;

use crate::{error::VocabularyError, packed::PackedStrings};

/// Maximum vocabulary size: more than ten times the largest known vocabulary. A corrupt id cannot
/// cause a larger allocation.
pub const VOCABULARY_SIZE_MAX: u32 = 1 << 22;

/// Mapping between the ids and the strings of all tokens.
#[derive(Clone, Debug)]
pub(crate) struct Vocabulary {
    /// String of each id, by id. An id that no token has (a hole) has the empty string.
    strings: PackedStrings,
    /// One id of each different string, by the hash of the string.
    ids: HashTable<u32>,
}

impl Vocabulary {
    /// Creates a vocabulary from strings in any order: `ids[i]` is the id of `strings.get(i)`. For
    /// equal strings, [`id`](Self::id) returns the lowest id.
    pub(crate) fn new(strings: &PackedStrings, ids: &[u32]) -> Result<Self, VocabularyError> {
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
        // `order[id]` is the index in `strings` of the id's string.
        let mut order = vec![None; size as usize];
        for (at, &id) in ids.iter().enumerate() {
            if let Some(first) = order[id as usize].replace(at as u32) {
                let first = strings.get(first as usize).to_owned();
                let second = strings.get(at).to_owned();
                return Err(VocabularyError::IdTwice { id, first, second });
            }
        }
        let mut strings_by_id = PackedStrings::default();
        for at in order {
            if !strings_by_id.push(at.map_or("", |at| strings.get(at as usize))) {
                return Err(VocabularyError::TooLarge);
            }
        }
        strings_by_id.shrink();
        let ids = HashTable::with_capacity(strings_by_id.len());
        let mut vocabulary = Self { strings: strings_by_id, ids };
        for id in 0..vocabulary.size() {
            let Some(string) = vocabulary.string(id) else { continue };
            if vocabulary.id(string).is_none() {
                let (hash, strings) = (hash_of(string), &vocabulary.strings);
                let rehash = |id: &u32| hash_of(strings.get(*id as usize));
                vocabulary.ids.insert_unique(hash, id, rehash);
            }
        }
        Ok(vocabulary)
    }

    /// Returns the highest id + 1, holes included.
    pub(crate) fn size(&self) -> u32 {
        self.strings.len() as u32
    }

    /// Returns the string of `id`; `None` for holes and ids above the highest.
    pub(crate) fn string(&self, id: u32) -> Option<&str> {
        let string = ((id as usize) < self.strings.len()).then(|| self.strings.get(id as usize))?;
        (!string.is_empty()).then_some(string)
    }

    /// Returns the lowest id of `string`; `None` if no token has this string.
    pub(crate) fn id(&self, string: &str) -> Option<u32> {
        self.ids.find(hash_of(string), |id| self.strings.get(*id as usize) == string).copied()
    }
}

/// Marks an absent id in a table of ids.
pub(crate) const NO_ID: u32 = u32::MAX;

/// Returns the ids of the byte tokens `<0x00>` to `<0xFF>`, with [`NO_ID`] for missing tokens. Byte
/// tokens encode text that no other token covers (byte fallback).
pub(crate) fn byte_ids(id_of: impl Fn(&str) -> Option<u32>) -> Box<[u32; 256]> {
    let id = |byte| id_of(&format!("<0x{byte:02X}>")).unwrap_or(NO_ID);
    Box::new(std::array::from_fn(id))
}

fn hash_of(string: &str) -> u64 {
    FixedSeedBuildHasher::default().hash_one(string)
}

/// Builder of a fast hasher with a fixed seed. Clients cannot cause collisions: the tables contain
/// only tokens and merges of the model, and a client's text is looked up but never inserted.
pub(crate) type FixedSeedBuildHasher = foldhash::fast::FixedState;

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
    fn vocabulary_maps_strings_and_ids_both_ways() {
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
    fn equal_strings_map_to_the_lowest_id() {
        let vocabulary = Vocabulary::new(&packed(&["x", "a", "a"]), &[0, 2, 1]).unwrap();
        assert_eq!(vocabulary.id("a"), Some(1));
        assert_eq!(vocabulary.string(2), Some("a"));
    }

    #[test]
    fn invalid_ids_are_rejected_without_a_large_allocation() {
        let error = Vocabulary::new(&packed(&["a", "b"]), &[0, u32::MAX]).unwrap_err();
        assert_eq!(error.to_string(), "token \"b\" has id 4294967295; ids are less than 4194304");
        let error = Vocabulary::new(&packed(&["a", "b"]), &[3, 3]).unwrap_err();
        assert_eq!(error.to_string(), "tokens \"a\" and \"b\" have the same id 3");
        assert!(matches!(Vocabulary::new(&packed(&[]), &[]), Err(VocabularyError::Empty)));
    }

    #[test]
    fn vocabulary_finds_every_string() {
        let names: Vec<String> = (0..10_000).map(|n| format!("token {n}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let ids: Vec<u32> = (0..10_000).rev().collect();
        let vocabulary = Vocabulary::new(&packed(&names), &ids).unwrap();
        for (name, id) in names.iter().zip(ids) {
            assert_eq!((vocabulary.id(name), vocabulary.string(id)), (Some(id), Some(*name)));
        }
    }
}
