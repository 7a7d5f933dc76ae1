//! Token strings by id, and ids by token string.

use std::hash::BuildHasher;

use hashbrown::HashTable;

use crate::{error::VocabularyError, packed::PackedStrings};

/// Maximum vocabulary size, more than ten times the largest in use. Bounds the allocation for a corrupt id.
pub const VOCABULARY_SIZE_MAX: u32 = 1 << 22;

/// Strings of all ids. An id without a string (a hole) has the empty string.
#[derive(Clone, Debug)]
pub(crate) struct Vocabulary {
    strings: PackedStrings,
    /// Ids by the hash of their string.
    index: HashTable<u32>,
}

impl Vocabulary {
    /// Creates a vocabulary from strings in any order and the id of each. For equal strings,
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
        let mut order = vec![None; size as usize];
        for (at, &id) in ids.iter().enumerate() {
            if let Some(first) = order[id as usize].replace(at as u32) {
                let first = strings.get(first as usize).to_owned();
                let second = strings.get(at).to_owned();
                return Err(VocabularyError::IdTwice { id, first, second });
            }
        }
        let mut in_order = PackedStrings::default();
        for at in order {
            if !in_order.push(at.map_or("", |at| strings.get(at as usize))) {
                return Err(VocabularyError::TooLarge);
            }
        }
        in_order.shrink();
        let index = HashTable::with_capacity(in_order.len());
        let mut vocabulary = Self { strings: in_order, index };
        for id in 0..vocabulary.size() {
            let Some(string) = vocabulary.string(id) else { continue };
            if vocabulary.id(string).is_none() {
                let (hash, strings) = (hash(string), &vocabulary.strings);
                let rehash = |id: &u32| self::hash(strings.get(*id as usize));
                vocabulary.index.insert_unique(hash, id, rehash);
            }
        }
        Ok(vocabulary)
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
        self.index.find(hash(string), |id| self.strings.get(*id as usize) == string).copied()
    }
}

/// Marks an absent id in a table of ids.
pub(crate) const NO_ID: u32 = u32::MAX;

/// Returns the ids of `<0x00>` to `<0xFF>`.
pub(crate) fn byte_ids(id_of: impl Fn(&str) -> Option<u32>) -> Box<[u32; 256]> {
    let id = |byte| id_of(&format!("<0x{byte:02X}>")).unwrap_or(NO_ID);
    Box::new(std::array::from_fn(id))
}

fn hash(string: &str) -> u64 {
    WordHasher::default().hash_one(string)
}

/// Fast hash with a fixed seed. Hash flooding is impossible: the tables contain only strings of the model, and user
/// text is looked up and never inserted.
pub(crate) type WordHasher = foldhash::fast::FixedState;

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
