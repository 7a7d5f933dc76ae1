//! The shard of a model that a tensor-parallel rank computes.

use std::{fmt, ops::Range};

/// Maximum ranks of one group.
pub const RANKS_MAX: usize = 16;

/// Tokens of one run. The sampler adds probabilities run by run, and vocabularies are sharded at
/// run boundaries, so a rank's partial sums over its runs equal those of the whole row.
pub const VOCABULARY_RUN: usize = 1024;
/// Minimum runs of a rank, which keeps shards even: the largest is at most a third above an even
/// share, and at most a sixth for 32,000 tokens and more on up to 8 ranks.
const RUNS_MIN: usize = 3;

/// Rank `rank` of `of` tensor-parallel ranks.
///
/// Query, key and value heads, the intermediate rows of the feed-forward and the tokens of the
/// vocabulary are sharded in rank order. The embedding and the two GEMMs that write to the residual
/// stream give partial sums, which the ranks all-reduce. Each rank has a part of every expert, or
/// with expert parallelism some whole experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    rank: usize,
    of: usize,
    has_whole_experts: bool,
}

impl Shard {
    /// The whole model: a single rank.
    pub const WHOLE: Shard = Shard { rank: 0, of: 1, has_whole_experts: false };

    /// Creates a shard; returns `None` for an invalid rank or more than [`RANKS_MAX`] ranks.
    pub fn new(rank: usize, of: usize) -> Option<Self> {
        (rank < of && of <= RANKS_MAX).then_some(Self { rank, of, has_whole_experts: false })
    }

    /// Returns the shard with or without expert parallelism.
    pub fn with_whole_experts(self, has_whole_experts: bool) -> Self {
        Self { has_whole_experts, ..self }
    }

    /// Returns whether experts are sharded by expert parallelism: each rank has whole experts.
    pub fn has_whole_experts(self) -> bool {
        self.has_whole_experts
    }

    pub fn rank(self) -> usize {
        self.rank
    }

    pub fn rank_count(self) -> usize {
        self.of
    }

    pub fn is_whole(self) -> bool {
        self.of == 1
    }

    /// Returns every rank of the group, in order.
    pub fn all(self) -> impl Iterator<Item = Shard> {
        (0..self.of).map(move |rank| Shard { rank, ..self })
    }

    /// Returns this rank's range of `count` equal items.
    ///
    /// # Panics
    /// When `count` is not a multiple of the ranks: loading a model checks this.
    pub fn part(self, count: usize) -> Range<usize> {
        assert!(
            count.is_multiple_of(self.of),
            "{count} items cannot be split evenly over {} ranks",
            self.of
        );
        let each = count / self.of;
        self.rank * each..(self.rank + 1) * each
    }

    /// Returns the experts of `count` that this rank has, whole or in part.
    ///
    /// # Panics
    /// As [`Self::part`], with expert parallelism.
    pub fn experts(self, count: usize) -> Range<usize> {
        if self.has_whole_experts { self.part(count) } else { 0..count }
    }

    /// Returns the intermediate rows of `size` that this rank has of each of its experts.
    ///
    /// # Panics
    /// As [`Self::part`], without expert parallelism.
    pub fn expert_rows(self, size: usize) -> Range<usize> {
        if self.has_whole_experts { 0..size } else { self.part(size) }
    }

    /// Returns the tokens whose embeddings this rank has and whose logits it computes. Shards are
    /// as even as whole runs allow.
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

/// Returns whether every run of tokens belongs to one rank only.
pub fn cuts_between_runs(vocabulary: usize, of: usize) -> bool {
    of == 1 || vocabulary >= of * RUNS_MIN * VOCABULARY_RUN
}

/// Prints `rank 0 of 2`.
impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_contiguous_and_cover_everything() {
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
                    // Up to rounding.
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
    #[should_panic(expected = "9 items cannot be split evenly over 2 ranks")]
    fn uneven_count_panics() {
        Shard::new(0, 2).unwrap().part(9);
    }
}
