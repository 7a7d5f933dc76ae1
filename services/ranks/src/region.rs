//! Layout of the memory that a node and its ranks share.
//!
//! Each group has one region: a header that identifies the group, a heartbeat per rank, the bells,
//! the ring of step plans with the ranks as readers, and one ring of results per rank. Weight
//! updates have separate rings.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    sync::{Arc, atomic::Ordering},
};

use kernels::shared::{Atomics, SharedError, SharedRegion};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::{
    rank_spec::RankSpec,
    ring::{Bell, LINE, RingMemory, RingShape},
};

/// Purpose in the region's file name.
pub const PURPOSE: &str = "ranks";

const MAGIC: u64 = u64::from_le_bytes(*b"batonrnk");
/// Version of this layout and of the message format.
const VERSION: u64 = 4;

/// Ring of the results of a rank. A step of 256 rows without log-probabilities is one part.
const RESULT_SHAPE: RingShape = RingShape { slots: 32, slot_bytes: 8 << 10, readers: 1 };

/// Ring of a rank's answers about new weights. The digests of a model take several parts.
const WEIGHT_ANSWER_SHAPE: RingShape = RingShape { slots: 8, slot_bytes: 4 << 10, readers: 1 };

const HEADER_BYTES: usize = 8 * LINE;

/// Number of shared bells: plans are available, the plan ring has free slots, results are
/// available, and the same for orders and answers about weights. Two bells per rank follow, which
/// tell that the rank's rings of results and of answers have free slots.
const BELLS_SHARED: usize = 6;

/// Error of joining a group.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    #[error(transparent)]
    Region(#[from] SharedError),
    #[error("the region is not a rank group's region of this version: it begins with {found:016x}")]
    Magic { found: u64 },
    #[error("the node is another build ({node:016x}) than this program ({own:016x}); restart it")]
    Build { node: u64, own: u64 },
    #[error("the region has epoch {found:032x}; expected {expected:032x}")]
    Epoch { found: u128, expected: u128 },
    #[error("the group has {found} ranks; expected {expected}")]
    Ranks { found: u64, expected: u32 },
}

/// Returns a number that identifies this build of the program. All ranks of a group must have the
/// same build.
pub fn build() -> u64 {
    let mut hash = Xxh3::with_seed(VERSION);
    hash.update(env!("CARGO_PKG_VERSION").as_bytes());
    // The running file, even if another file has its name by now.
    if let Ok(file) = fs::metadata("/proc/self/exe") {
        for number in [file.len() as i64, file.mtime(), file.mtime_nsec()] {
            hash.update(&number.to_le_bytes());
        }
    }
    hash.digest()
}

/// Mapped region of a group.
#[derive(Debug)]
pub struct GroupRegion {
    region: Arc<SharedRegion>,
    ranks: usize,
    epoch: u128,
}

impl GroupRegion {
    /// Returns the size of a group's region in bytes.
    pub fn bytes(ranks: u32) -> usize {
        Self::weight_answers_at(ranks as usize, ranks as usize)
    }

    /// Creates the region; called by the node.
    pub fn create(spec: &RankSpec, build: u64) -> Result<Self, SharedError> {
        let region = SharedRegion::create(&spec.region, Self::bytes(spec.of))?;
        let (epoch, ranks) = (spec.region.epoch, spec.of as usize);
        let header = region.longs(0, HEADER_BYTES / 8);
        let fields = [MAGIC, VERSION, build, epoch as u64, (epoch >> 64) as u64, ranks as u64];
        for (place, value) in header.iter().zip(fields) {
            place.store(value, Ordering::Relaxed);
        }
        Ok(Self { region, ranks, epoch })
    }

    /// Opens the region; called by a rank.
    pub fn open(spec: &RankSpec, own: u64) -> Result<Self, JoinError> {
        let region = SharedRegion::open(&spec.region, Self::bytes(spec.of))?;
        let header = region.longs(0, HEADER_BYTES / 8);
        let field = |at: usize| header[at].load(Ordering::Relaxed);
        if field(0) != MAGIC {
            return Err(JoinError::Magic { found: field(0) });
        }
        if field(1) != VERSION || field(2) != own {
            return Err(JoinError::Build { node: field(2), own });
        }
        let (found, expected) =
            (u128::from(field(3)) | u128::from(field(4)) << 64, spec.region.epoch);
        if found != expected {
            return Err(JoinError::Epoch { found, expected });
        }
        if field(5) != u64::from(spec.of) {
            return Err(JoinError::Ranks { found: field(5), expected: spec.of });
        }
        Ok(Self { region, ranks: spec.of as usize, epoch: expected })
    }

    /// Unlinks the region's file.
    pub fn unlink(&self) {
        self.region.unlink();
    }

    /// Returns the rank's heartbeat, which counts up as long as the rank is alive.
    pub fn heartbeat(&self, rank: usize) -> Atomics<std::sync::atomic::AtomicU64> {
        self.region.longs(HEADER_BYTES + rank * LINE, 1)
    }

    /// Returns the bell of free slots in the plan ring.
    pub fn free_plan_slot(&self) -> Bell {
        self.bell(1)
    }

    /// Returns the bell of results.
    pub fn results_bell(&self) -> Bell {
        self.bell(2)
    }

    /// Returns the ring of plans, with the ranks as readers.
    pub fn plans(&self) -> RingMemory {
        let (at, shape) = (Self::plans_at(self.ranks), Self::plan_shape(self.ranks));
        RingMemory::new(&self.region, at, shape, (self.bell(0), self.bell(1)), self.seed(0))
    }

    /// Returns the ring of a rank's results.
    pub fn results(&self, rank: usize) -> RingMemory {
        let (at, seed) = (Self::results_at(self.ranks, rank), self.seed(1 + rank as u64));
        let bells = (self.bell(2), self.bell(BELLS_SHARED + rank));
        RingMemory::new(&self.region, at, RESULT_SHAPE, bells, seed)
    }

    /// Returns the bell of answers about weights.
    pub fn weight_answers_bell(&self) -> Bell {
        self.bell(5)
    }

    /// Returns the ring of orders about weights, with the ranks as readers.
    pub fn weight_orders(&self) -> RingMemory {
        let at = Self::results_at(self.ranks, self.ranks);
        let (shape, seed) = (Self::weight_order_shape(self.ranks), self.seed(1 << 32));
        RingMemory::new(&self.region, at, shape, (self.bell(3), self.bell(4)), seed)
    }

    /// Returns the ring of a rank's answers about weights.
    pub fn weight_answers(&self, rank: usize) -> RingMemory {
        let at = Self::weight_answers_at(self.ranks, rank);
        let bells = (self.bell(5), self.bell(BELLS_SHARED + self.ranks + rank));
        let seed = self.seed((1 << 32) + 1 + rank as u64);
        RingMemory::new(&self.region, at, WEIGHT_ANSWER_SHAPE, bells, seed)
    }

    fn seed(&self, ring: u64) -> u64 {
        xxh3_64(&self.epoch.to_le_bytes()) ^ ring
    }

    fn bell(&self, index: usize) -> Bell {
        Bell::new(&self.region, HEADER_BYTES + self.ranks * LINE + index * Bell::BYTES)
    }

    /// Returns the shape of the plan ring. A step of 256 rows is one part, and a prompt of 100,000
    /// tokens fits as a whole.
    fn plan_shape(ranks: usize) -> RingShape {
        RingShape { slots: 64, slot_bytes: 8 << 10, readers: ranks }
    }

    /// Returns the shape of the ring of orders about weights. A chunk's pieces are one part, and
    /// the tensors of a model a few hundred.
    fn weight_order_shape(ranks: usize) -> RingShape {
        RingShape { slots: 16, slot_bytes: 8 << 10, readers: ranks }
    }

    fn plans_at(ranks: usize) -> usize {
        HEADER_BYTES + ranks * LINE + (BELLS_SHARED + 2 * ranks) * Bell::BYTES
    }

    fn weight_answers_at(ranks: usize, rank: usize) -> usize {
        let orders = Self::weight_order_shape(ranks).bytes();
        Self::results_at(ranks, ranks) + orders + rank * WEIGHT_ANSWER_SHAPE.bytes()
    }

    fn results_at(ranks: usize, rank: usize) -> usize {
        let plans = Self::plan_shape(ranks).bytes();
        Self::plans_at(ranks) + plans + rank * RESULT_SHAPE.bytes()
    }
}

#[cfg(test)]
mod tests {
    use kernels::shared::RegionName;

    use super::*;

    #[test]
    fn another_build_or_group_is_rejected_in_one_line() {
        let spec = RankSpec { region: RegionName::own(0xfeed_5eed, "ranks_test"), rank: 0, of: 2 };
        let made = GroupRegion::create(&spec, 5).unwrap();
        assert!(GroupRegion::open(&spec, 5).is_ok());
        let refused = |spec: &RankSpec, own| {
            let line = GroupRegion::open(spec, own).unwrap_err().to_string();
            assert!(!line.contains('\n'), "{line}");
            line
        };
        let line = refused(&spec, 6);
        assert!(line.contains("another build (0000000000000005) than this program (00"), "{line}");
        let line = refused(&RankSpec { of: 3, ..spec.clone() }, 5);
        assert!(line.contains("bytes; expected "), "{line}");
        let field = |at: usize, value| {
            made.region.longs(0, HEADER_BYTES / 8)[at].store(value, Ordering::Relaxed);
        };
        field(5, 1);
        assert!(refused(&spec, 5).contains("has 1 ranks; expected 2"));
        field(3, 1);
        assert!(refused(&spec, 5).contains("expected 000000000000000000000000feed5eed"));
        field(0, 1);
        assert!(refused(&spec, 5).contains("begins with 0000000000000001"));
        made.unlink();
        assert!(refused(&spec, 5).contains("cannot open "));
    }

    #[test]
    fn parts_of_the_region_do_not_overlap_and_cover_it() {
        for ranks in [1, 2, 8] {
            let spec = RankSpec { region: RegionName::own(9, "ranks_test2"), rank: 0, of: ranks };
            let made = GroupRegion::create(&spec, 5).unwrap();
            let ranks = ranks as usize;
            let mut ends = vec![HEADER_BYTES, HEADER_BYTES + ranks * LINE];
            ends.push(GroupRegion::plans_at(ranks));
            assert_eq!(ends[2] - ends[1], (BELLS_SHARED + 2 * ranks) * Bell::BYTES);
            ends.extend((0..=ranks).map(|rank| GroupRegion::results_at(ranks, rank)));
            ends.extend((0..=ranks).map(|rank| GroupRegion::weight_answers_at(ranks, rank)));
            assert!(ends.is_sorted() && ends.iter().all(|end| end.is_multiple_of(LINE)));
            assert_eq!(ends.last(), Some(&made.region.byte_count()));
            // Overlapping atomics of different kinds panic.
            let _all = (made.plans(), made.heartbeat(ranks - 1), made.free_plan_slot());
            let _results: Vec<_> = (0..ranks).map(|rank| made.results(rank)).collect();
            let _weights = (made.weight_orders(), made.weight_answers(ranks - 1));
        }
    }
}
