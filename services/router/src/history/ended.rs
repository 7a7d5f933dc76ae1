//! The entries of ended requests.

use std::{collections::VecDeque, ops::Range};

use super::RequestEntry;

/// Maximum number of entries.
const ENTRIES_MAX: usize = 4096;
/// Maximum size of all encoded entries.
const BYTES_MAX: usize = 16 << 20;
/// Size from which on a copy ends, so that a query does not hold the history's lock for long.
const COPY_BYTES: usize = 64 << 10;

/// The last entries, encoded one after another in one allocation. Entries as objects on the heap,
/// freed oldest first, would scatter the memory of all requests over megabytes and cost every
/// request cache misses.
#[derive(Default)]
pub(super) struct EndedEntries {
    /// The oldest entry first.
    bytes: VecDeque<u8>,
    /// Size of each entry in `bytes`.
    sizes: VecDeque<u32>,
    /// Number of entries that were dropped: the number of the oldest entry.
    dropped: u64,
    /// Memory in which an entry is encoded.
    encoded: Vec<u8>,
}

impl EndedEntries {
    /// Adds an entry and drops the oldest entries beyond the bounds.
    pub(super) fn push(&mut self, entry: &RequestEntry) {
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
            self.dropped += 1;
        }
        // Exact, so that the capacity never exceeds the bound.
        let wanted = (self.bytes.len() + size).next_power_of_two();
        self.bytes.reserve_exact(wanted - self.bytes.len());
        self.bytes.extend(&self.encoded);
        self.sizes.push_back(size as u32);
    }

    /// Returns the numbers of the entries.
    pub(super) fn numbers(&self) -> Range<u64> {
        self.dropped..self.dropped + self.sizes.len() as u64
    }

    /// Copies encoded entries out of `wanted`, the oldest first, and returns the numbers that are
    /// left to copy. The copy lacks entries that were dropped.
    pub(super) fn copy(&self, wanted: Range<u64>, copied: &mut CopiedEntries) -> Range<u64> {
        copied.bytes.clear();
        copied.sizes.clear();
        let next = wanted.start.max(self.dropped);
        let skipped = (next - self.dropped) as usize;
        let begin: usize = self.sizes.iter().take(skipped).map(|size| *size as usize).sum();
        let mut end = begin;
        let left = wanted.end.saturating_sub(next) as usize;
        for size in self.sizes.iter().skip(skipped).take(left) {
            if end - begin >= COPY_BYTES {
                break;
            }
            copied.sizes.push(*size);
            end += *size as usize;
        }
        copied.bytes.extend(self.bytes.range(begin..end));
        let next = next + copied.sizes.len() as u64;
        next..wanted.end.max(next)
    }
}

/// A copy of encoded entries.
#[derive(Default)]
pub(super) struct CopiedEntries {
    bytes: Vec<u8>,
    sizes: Vec<u32>,
}

impl CopiedEntries {
    /// Decodes the entries, the oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = RequestEntry> {
        let mut rest = &self.bytes[..];
        self.sizes.iter().map(move |size| {
            let (encoded, after) = rest.split_at(*size as usize);
            rest = after;
            postcard::from_bytes(encoded).expect("an encoded entry is decoded")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::*, *};
    use crate::history::ATTEMPTS_MAX;

    fn sizes(ended: &EndedEntries) -> (usize, usize) {
        (ended.sizes.len(), ended.bytes.len())
    }

    fn decoded(ended: &EndedEntries) -> Vec<RequestEntry> {
        let (mut all, mut copied) = (Vec::new(), CopiedEntries::default());
        let mut left = ended.numbers();
        while !left.is_empty() {
            left = ended.copy(left, &mut copied);
            all.extend(copied.iter());
        }
        all
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
        assert_eq!(decoded(&ended), all);
    }

    #[test]
    fn entries_dropped_between_two_copies_are_left_out() {
        let mut ended = EndedEntries::default();
        (0..ENTRIES_MAX as u128).for_each(|id| ended.push(&entry(id)));
        let mut copied = CopiedEntries::default();
        let ids = |copied: &CopiedEntries| -> Vec<u128> {
            copied.iter().map(|entry| entry.request_id.0).collect()
        };
        let left = ended.copy(ended.numbers(), &mut copied);
        let first = ids(&copied);
        assert_eq!((first[0], *first.last().unwrap() + 1), (0, left.start.into()));
        assert!(copied.bytes.len() < COPY_BYTES + 1000 && !left.is_empty(), "{left:?}");
        // The next copy begins at the oldest entry, and ends at the entries of the first copy's
        // time.
        let dropped = left.start as u128 + 10;
        (0..dropped).for_each(|id| ended.push(&entry(ENTRIES_MAX as u128 + id)));
        let left = ended.copy(left, &mut copied);
        assert_eq!((ids(&copied)[0], left.end), (dropped, ENTRIES_MAX as u64));
        (0..ENTRIES_MAX as u128).for_each(|id| ended.push(&entry(id)));
        assert!(ended.copy(left, &mut copied).is_empty() && ids(&copied).is_empty());
    }

    #[test]
    fn entries_are_bounded_by_number() {
        let mut ended = EndedEntries::default();
        (0..ENTRIES_MAX as u128 + 2).for_each(|id| ended.push(&entry(id)));
        assert_eq!(ended.sizes.len(), ENTRIES_MAX);
        let ids: Vec<u128> = decoded(&ended).iter().map(|entry| entry.request_id.0).collect();
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
