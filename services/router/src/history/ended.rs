//! The entries of ended requests.

use std::collections::VecDeque;

use super::RequestEntry;

/// Maximum number of entries.
const ENTRIES_MAX: usize = 4096;
/// Maximum size of all encoded entries.
const BYTES_MAX: usize = 16 << 20;

/// The last entries, encoded one after another in one allocation. Entries as objects on the heap, freed oldest first,
/// would scatter the memory of all requests over megabytes and cost every request cache misses.
#[derive(Clone, Default)]
pub(super) struct EndedEntries {
    /// The oldest entry first.
    bytes: VecDeque<u8>,
    /// Size of each entry in `bytes`.
    sizes: VecDeque<u32>,
    /// Memory in which an entry is encoded.
    encoded: Vec<u8>,
}

impl EndedEntries {
    /// Adds an entry and drops the oldest entries beyond the bounds.
    pub fn push(&mut self, entry: &RequestEntry) {
        self.encoded.clear();
        let encoded = postcard::to_extend(entry, std::mem::take(&mut self.encoded));
        // Only a serializer without memory fails.
        self.encoded = encoded.expect("a vector takes any entry");
        let size = self.encoded.len();
        if size > BYTES_MAX {
            return;
        }
        while self.sizes.len() == ENTRIES_MAX || self.bytes.len() + size > BYTES_MAX {
            let oldest = self.sizes.pop_front().expect("bytes belong to an entry");
            self.bytes.drain(..oldest as usize);
        }
        // Exact, so that the capacity never exceeds the bound.
        let wanted = (self.bytes.len() + size).next_power_of_two();
        self.bytes.reserve_exact(wanted - self.bytes.len());
        self.bytes.extend(&self.encoded);
        self.sizes.push_back(size as u32);
    }

    pub fn len(&self) -> usize {
        self.sizes.len()
    }

    /// Returns the entries, the oldest first.
    pub fn iter(&self) -> impl Iterator<Item = RequestEntry> {
        let mut begin = 0;
        self.sizes.iter().map(move |size| {
            let end = begin + *size as usize;
            let encoded: Vec<u8> = self.bytes.range(begin..end).copied().collect();
            begin = end;
            postcard::from_bytes(&encoded).expect("an encoded entry is decoded")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::*, *};
    use crate::history::ATTEMPTS_MAX;

    fn sizes(ended: &EndedEntries) -> (usize, usize) {
        (ended.len(), ended.bytes.len())
    }

    #[test]
    fn decoded_entries_equal_the_entries_that_were_added() {
        let mut failed = entry(2);
        failed.picked(attempt(true));
        failed.picked(attempt(false));
        failed.end = Some(end(ms(40), false));
        let all = [RequestEntry { label: Some("mine".into()), ..entry(1) }, failed];
        let mut ended = EndedEntries::default();
        all.iter().for_each(|entry| ended.push(entry));
        assert_eq!(ended.iter().collect::<Vec<_>>(), all);
    }

    #[test]
    fn entries_are_bounded_by_number() {
        let mut ended = EndedEntries::default();
        (0..ENTRIES_MAX as u128 + 2).for_each(|id| ended.push(&entry(id)));
        assert_eq!(ended.len(), ENTRIES_MAX);
        let ids: Vec<u128> = ended.iter().map(|entry| entry.request_id.0).collect();
        assert_eq!((ids[0], ids[ENTRIES_MAX - 1]), (2, ENTRIES_MAX as u128 + 1));
    }

    #[test]
    fn entries_are_bounded_by_bytes() {
        let mut large = entry(0);
        for _ in 0..ATTEMPTS_MAX {
            let mut attempt = attempt(true);
            attempt.considered.options = vec![attempt.considered.options[0].clone(); 16];
            large.picked(attempt);
        }
        let mut ended = EndedEntries::default();
        ended.push(&large);
        let (_, size) = sizes(&ended);
        assert!(size > ATTEMPTS_MAX * 16 * 50, "{size}");
        (1..1000).for_each(|_| ended.push(&large));
        assert_eq!(sizes(&ended), (BYTES_MAX / size, BYTES_MAX / size * size));
        assert_eq!(ended.bytes.capacity(), BYTES_MAX);
    }
}
