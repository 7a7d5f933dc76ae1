//! Merges adjacent symbols of a word in order of priority, for `byte_pair` and `sentence_piece`.

use std::{cmp::Reverse, collections::BinaryHeap};

/// No neighbour.
const NONE: u32 = u32::MAX;

/// Part of a word, linked to its neighbours.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Symbol {
    pub id: u32,
    /// Offset in the word, in the caller's unit: bytes or initial symbols.
    pub start: u32,
    /// Length in the same unit; 0 after the symbol was merged into its left neighbour.
    pub len: u32,
    previous: u32,
    next: u32,
}

/// A merge of the symbol at `left` with its right neighbour. Ordered by priority; at equal priority
/// the leftmost is the greatest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct MergeCandidate {
    priority: u32,
    left: Reverse<u32>,
    /// Length of both symbols together.
    len: u32,
    id: u32,
}

/// Symbols of one word, and the possible merges. Further words can reuse the memory.
#[derive(Debug, Default)]
pub(crate) struct Merging {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<MergeCandidate>,
}

impl Merging {
    /// Begins the next word.
    pub(crate) fn clear(&mut self) {
        self.symbols.clear();
    }

    /// Appends a symbol of length `len`.
    pub(crate) fn push(&mut self, id: u32, len: u32) {
        let at = self.symbols.len() as u32;
        let start = self.symbols.last_mut().map_or(0, |last| {
            last.next = at;
            last.start + last.len
        });
        let previous = at.checked_sub(1).unwrap_or(NONE);
        self.symbols.push(Symbol { id, start, len, previous, next: NONE });
    }

    /// Merges until no merge applies. `merge` returns the priority and the id of a merge of two
    /// adjacent symbols.
    pub(crate) fn run(&mut self, mut merge: impl FnMut(&Symbol, &Symbol) -> Option<(u32, u32)>) {
        for right in 1..self.symbols.len() as u32 {
            self.consider(right - 1, right, &mut merge);
        }
        while let Some(MergeCandidate { left: Reverse(at), len, id, .. }) = self.queue.pop() {
            let left = self.symbols[at as usize];
            if left.len == 0 || left.next == NONE {
                continue;
            }
            let right = self.symbols[left.next as usize];
            // Symbols only grow: with an equal length these are the two symbols that were queued.
            if left.len + right.len != len {
                continue;
            }
            self.symbols[left.next as usize].len = 0;
            self.symbols[at as usize] = Symbol { id, len, next: right.next, ..left };
            if right.next != NONE {
                self.symbols[right.next as usize].previous = at;
                self.consider(at, right.next, &mut merge);
            }
            if left.previous != NONE {
                self.consider(left.previous, at, &mut merge);
            }
        }
    }

    fn consider(
        &mut self,
        left: u32,
        right: u32,
        merge: &mut impl FnMut(&Symbol, &Symbol) -> Option<(u32, u32)>,
    ) {
        let (first, second) = (&self.symbols[left as usize], &self.symbols[right as usize]);
        if let Some((priority, id)) = merge(first, second) {
            let len = first.len + second.len;
            self.queue.push(MergeCandidate { priority, left: Reverse(left), len, id });
        }
    }

    /// Returns the symbols that remain.
    pub(crate) fn merged(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols.iter().filter(|symbol| symbol.len != 0)
    }
}
