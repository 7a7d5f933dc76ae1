//! What one rank has of a model that several compute together.

use std::{fmt, ops::Range};

/// Most ranks of one group.
pub const RANKS_MAX: usize = 16;

/// Vocabularies are cut between runs of so many tokens, the runs in which the sampler adds
/// probabilities up: then the sums of a rank's runs are those of the whole row.
pub const VOCABULARY_RUN: usize = 1024;
/// Runs that a rank has at least, else the parts would be too unequal: the largest is no more than a
/// third above an even share, and for 32,000 tokens and more on up to 8 ranks a sixth.
const RUNS_MIN: usize = 3;

/// Rank `rank` of `of`: which part of every layer it computes.
///
/// Query, key and value heads, the rows between feed-forward's products and the tokens of the
/// vocabulary are shared out, in order of rank. Both products that lead back into the residual
/// stream then bring partial sums, which the ranks add up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    rank: usize,
    of: usize,
}

impl Shard {
    /// All of it: one rank alone.
    pub const WHOLE: Shard = Shard { rank: 0, of: 1 };

    /// `None` when there is no such rank, or there are more than [`RANKS_MAX`].
    pub fn new(rank: usize, of: usize) -> Option<Self> {
        (rank < of && of <= RANKS_MAX).then_some(Self { rank, of })
    }

    pub fn rank(self) -> usize {
        self.rank
    }

    pub fn of(self) -> usize {
        self.of
    }

    pub fn is_whole(self) -> bool {
        self.of == 1
    }

    /// Every rank of the group, in order.
    pub fn all(self) -> impl Iterator<Item = Shard> {
        (0..self.of).map(move |rank| Shard { rank, of: self.of })
    }

    /// This rank's part of `count` equal things.
    ///
    /// # Panics
    /// When they cannot be shared out evenly: whoever loads a model has refused it.
    pub fn part(self, count: usize) -> Range<usize> {
        assert!(count.is_multiple_of(self.of), "{count} are not shared out among {}", self.of);
        let each = count / self.of;
        self.rank * each..(self.rank + 1) * each
    }

    /// The tokens whose logits this rank computes: as even as whole runs allow.
    pub fn tokens(self, vocabulary: usize) -> Range<usize> {
        let border = |rank: usize| {
            let even = rank * vocabulary / self.of;
            match rank {
                _ if rank == self.of => vocabulary,
                _ if cuts_between_runs(vocabulary, self.of) => {
                    even.next_multiple_of(VOCABULARY_RUN)
                }
                _ => even,
            }
        };
        border(self.rank)..border(self.rank + 1)
    }
}

/// Whether no run of tokens belongs to two ranks.
pub fn cuts_between_runs(vocabulary: usize, of: usize) -> bool {
    of == 1 || vocabulary >= of * RUNS_MIN * VOCABULARY_RUN
}

/// As people count: `rank 0 of 2`.
impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_and_are_everything() {
        for of in 1..=RANKS_MAX {
            let shards: Vec<Shard> = Shard::new(0, of).unwrap().all().collect();
            for vocabulary in [of, 96, 8191, 32_000, 49_152, 50_257, 128_256, 151_936] {
                let mut next = 0;
                for shard in &shards {
                    let tokens = shard.tokens(vocabulary);
                    assert!(tokens.start == next && !tokens.is_empty(), "{shard}: {tokens:?}");
                    if cuts_between_runs(vocabulary, of) {
                        assert!(tokens.start.is_multiple_of(VOCABULARY_RUN));
                    }
                    // Rounding apart.
                    let even = vocabulary / of + 1;
                    assert!(tokens.len() <= even * 4 / 3, "{shard}: {tokens:?}");
                    if vocabulary >= 32_000 && of <= 8 {
                        assert!(cuts_between_runs(vocabulary, of));
                        assert!(tokens.len() <= even * 7 / 6, "{shard}: {tokens:?}");
                    }
                    next = tokens.end;
                }
                assert_eq!(next, vocabulary);
            }
            let ends = shards.iter().map(|shard| shard.part(of * 3).end);
            assert!(ends.eq((1..=of).map(|rank| rank * 3)));
        }
        assert_eq!(Shard::new(2, 2), None);
        assert_eq!(Shard::new(0, RANKS_MAX + 1), None);
    }

    #[test]
    #[should_panic(expected = "9 are not shared out among 2")]
    fn what_does_not_divide_is_not_shared_out() {
        Shard::new(0, 2).unwrap().part(9);
    }
}
