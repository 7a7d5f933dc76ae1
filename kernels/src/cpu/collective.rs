//! Collectives (all-reduce and all-gather) of CPU ranks over shared memory. The ranks are threads
//! of one process or processes of one host.
//!
//! A collective splits a message into pieces and runs one exchange per piece. Exchanges are
//! numbered from 1. The shared region has for each rank:
//! - two slots for pieces: exchange n uses slot n mod 2,
//! - one word per slot for the kind of its piece: the operation and the number of bytes,
//! - a word for the number of the last exchange that the rank has published.
//!
//! An exchange has two steps:
//! 1. Each rank writes its piece into its slot and the piece's kind beside it. It then publishes
//!    both by storing the exchange number (release).
//! 2. Each rank waits until every other rank has published this exchange (acquire). It checks the
//!    other rank's kind and reads the other rank's slot. The sizes are equal on all ranks, except
//!    for [`CpuGroup::all_gather_ranges`], where each rank knows the sizes of all ranks.
//!
//! A rank never waits for the readers of its slot. A rank that has published exchange n + 1 has
//! finished reading exchange n, and a rank starts exchange n + 2, which reuses the slot of n, only
//! after all ranks have published n + 1.
//!
//! A wait spins briefly and then sleeps on the other rank's exchange number until the group's
//! time-out. Every failure is a [`CpuGroupError`]. The failed rank leaves the group, and its later
//! exchanges fail with the same error. Another rank fails at the first exchange that the failed
//! rank has not published. The output of a failed collective is undefined.
//!
//! An all-reduce adds in rank order, element by element, so that the result is bit-equal on all
//! ranks.

use std::{
    fmt, hint,
    ops::Range,
    ptr::NonNull,
    slice,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{
    shard::Shard,
    shared::{Atomics, SharedRegion, futex},
};

/// Maximum bytes of a piece. The two slots of a rank, 512 KiB, stay in a core's L2 cache.
const PIECE_BYTES: usize = 256 << 10;
/// Maximum f32 elements of a piece.
const PIECE_FLOATS: usize = PIECE_BYTES / size_of::<f32>();
/// Slots of a rank.
const SLOTS: usize = 2;
/// 32-bit words of a rank's line in the region: 128 bytes, two cache lines, because processors
/// prefetch cache lines in pairs. So ranks do not invalidate each other's lines.
const LINE_WORDS: usize = 32;
const LINE_BYTES: usize = LINE_WORDS * size_of::<u32>();
/// 64-bit words of a rank's line of kinds, which uses the first [`SLOTS`] of them.
const LINE_LONGS: usize = LINE_BYTES / size_of::<u64>();
/// Index in a rank's line of the number of the rank's last published exchange, modulo 2³². Only the
/// rank writes the word.
const EXCHANGE_WORD: usize = 0;
/// Index in a rank's line of the number of other ranks that sleep until the exchange number
/// changes. These ranks write the word.
const WAITERS_WORD: usize = 1;
/// Index in a rank's line of the word that is 1 when the rank has left the group, else 0. Only the
/// rank writes the word.
const LEFT_WORD: usize = 2;

/// Time for which a wait spins before it sleeps: about the latency of a futex wake-up.
const SPIN: Duration = Duration::from_micros(20);
/// Spin-loop hints between two reads of the clock and of the other rank's number.
const SPIN_HINTS: usize = 32;
/// Interval at which a sleeping rank checks whether the other rank has left.
const LEFT_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Failure of a group of CPU ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpuGroupError {
    /// A rank has not published an exchange within the time-out.
    #[error("rank {rank} of {of} did not reach exchange {exchange} within {timeout:?}")]
    Late { rank: usize, of: usize, exchange: u64, timeout: Duration },
    /// A rank left the group, because it failed or its process ended.
    #[error("rank {rank} of {of} has left the group before exchange {exchange}")]
    Left { rank: usize, of: usize, exchange: u64 },
    /// The ranks run different operations: a bug, or different versions of the program.
    #[error(
        "exchange {exchange}: rank {rank} of {of} sends {theirs}; expected {ours}, as this rank"
    )]
    Mismatch { rank: usize, of: usize, exchange: u64, theirs: String, ours: String },
}

/// Kind of a rank's piece in an exchange. Each rank checks the kinds of the other ranks.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ExchangeKind {
    operation: CollectiveOperation,
    /// Bytes of the piece.
    bytes: usize,
}

/// Bit of an [`ExchangeKind`]'s word at which the operation begins. The bits below hold the bytes.
const OPERATION_SHIFT: u32 = 56;

#[derive(Clone, Copy, PartialEq, Eq)]
enum CollectiveOperation {
    Reduce = 1,
    Gather = 2,
}

impl ExchangeKind {
    /// Returns the word that a rank writes beside its slot.
    fn word(self) -> u64 {
        (self.operation as u64) << OPERATION_SHIFT | self.bytes as u64
    }
}

/// Formats the word of a kind, which another rank may have written.
fn describe_kind(word: u64) -> String {
    const REDUCE: u64 = CollectiveOperation::Reduce as u64;
    const GATHER: u64 = CollectiveOperation::Gather as u64;
    let bytes = word & ((1 << OPERATION_SHIFT) - 1);
    match word >> OPERATION_SHIFT {
        REDUCE => format!("an all-reduce of {bytes} bytes"),
        GATHER => format!("an all-gather of {bytes} bytes"),
        _ => format!("an unknown operation (word {word:#x})"),
    }
}

/// One rank's membership in a group.
pub struct CpuGroup {
    shard: Shard,
    /// Maximum time for which an exchange waits for another rank.
    timeout: Duration,
    /// `[rank][LINE_WORDS]`: the rank's exchange number, waiters and left mark.
    words: Atomics<AtomicU32>,
    /// `[rank][LINE_LONGS]`: the kind of the piece in each of the rank's slots.
    kinds: Atomics<AtomicU64>,
    /// `[rank][slot][PIECE_BYTES]`. `words` and `kinds` keep the region mapped.
    slots: NonNull<u8>,
    /// Number of the last exchange that this rank has started.
    exchange: u64,
    /// First failure. Set once.
    fault: Option<CpuGroupError>,
}

// SAFETY: `slots` points into the region that the atomics keep, and is accessed through `&mut
// self`. The exchange numbers order accesses of other ranks.
unsafe impl Send for CpuGroup {}
// SAFETY: a shared reference accesses only the atomics and the failure.
unsafe impl Sync for CpuGroup {}

impl CpuGroup {
    /// Returns the bytes that a group of `of` ranks needs in a region. All of them must be zero
    /// before the first rank joins.
    pub fn region_bytes(of: usize) -> usize {
        of * (2 * LINE_BYTES + SLOTS * PIECE_BYTES)
    }

    /// Joins the group in `region` as the rank of `shard`. The group's bytes begin at `offset`, a
    /// multiple of 8. No exchange waits longer than `timeout` for another rank.
    ///
    /// **Hazard.** Each rank joins once, and no other code writes the group's bytes. Otherwise the
    /// results of collectives are undefined.
    pub fn new(region: &Arc<SharedRegion>, offset: usize, shard: Shard, timeout: Duration) -> Self {
        // First the lines of words of all ranks, then the lines of kinds, then the slots.
        let (of, lines_bytes) = (shard.rank_count(), shard.rank_count() * LINE_BYTES);
        let words = region.words(offset, of * LINE_WORDS);
        let kinds = region.longs(offset + lines_bytes, of * LINE_LONGS);
        let slots = region.bytes(offset + 2 * lines_bytes, of * SLOTS * PIECE_BYTES);
        Self { shard, timeout, words, kinds, slots, exchange: 0, fault: None }
    }

    pub fn shard(&self) -> Shard {
        self.shard
    }

    /// Returns the first failure of this rank, after which all its exchanges fail.
    pub fn fault(&self) -> Option<&CpuGroupError> {
        self.fault.as_ref()
    }

    /// Sums `x` over all ranks, element by element. `x` has the same length on all ranks, and the
    /// result is bit-equal on all ranks.
    pub fn all_reduce(&mut self, x: &mut [f32]) -> Result<(), CpuGroupError> {
        if self.shard.is_whole() {
            return Ok(());
        }
        for piece in x.chunks_mut(PIECE_FLOATS) {
            let kind =
                ExchangeKind { operation: CollectiveOperation::Reduce, bytes: size_of_val(piece) };
            self.publish(kind, bytemuck::cast_slice(piece))?;
            for rank in 0..self.shard.rank_count() {
                let theirs: &[f32] = bytemuck::cast_slice(self.read(kind, rank)?);
                match rank {
                    0 => piece.copy_from_slice(theirs),
                    _ => piece.iter_mut().zip(theirs).for_each(|(sum, part)| *sum += part),
                }
            }
        }
        Ok(())
    }

    /// Returns `mine` of all ranks, concatenated in rank order. `mine` has the same length on all
    /// ranks.
    pub fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<u8>, CpuGroupError> {
        let mut all = vec![0; self.shard.rank_count() * mine.len()];
        for (number, piece) in mine.chunks(PIECE_BYTES).enumerate() {
            let kind = ExchangeKind { operation: CollectiveOperation::Gather, bytes: piece.len() };
            self.publish(kind, piece)?;
            for rank in 0..self.shard.rank_count() {
                let begin = rank * mine.len() + number * PIECE_BYTES;
                all[begin..begin + piece.len()].copy_from_slice(self.read(kind, rank)?);
            }
        }
        Ok(all)
    }

    /// Gathers a row that is sharded over the ranks: writes `mine` of each rank to
    /// `row[ranges[rank]]`. The ranges may have different lengths.
    pub fn all_gather_ranges(
        &mut self,
        mine: &[f32],
        ranges: &[Range<usize>],
        row: &mut [f32],
    ) -> Result<(), CpuGroupError> {
        let own = &ranges[self.shard.rank()];
        assert_eq!(
            (mine.len(), ranges.len()),
            (own.len(), self.shard.rank_count()),
            "`mine` has the length of this rank's range, and there is a range per rank"
        );
        let longest = ranges.iter().map(Range::len).max().unwrap_or(0);
        for begin in (0..longest).step_by(PIECE_FLOATS) {
            // Ranks with fewer elements publish empty pieces, so that all ranks run equally many
            // exchanges.
            let piece = |range: &Range<usize>| {
                let begin = (range.start + begin).min(range.end);
                begin..(begin + PIECE_FLOATS).min(range.end)
            };
            let gather = |part: &Range<usize>| ExchangeKind {
                operation: CollectiveOperation::Gather,
                bytes: part.len() * size_of::<f32>(),
            };
            let part = piece(own);
            let ours = &mine[part.start - own.start..part.end - own.start];
            self.publish(gather(&part), bytemuck::cast_slice(ours))?;
            for (rank, range) in ranges.iter().enumerate() {
                let part = piece(range);
                let theirs = self.read(gather(&part), rank)?;
                row[part].copy_from_slice(bytemuck::cast_slice(theirs));
            }
        }
        Ok(())
    }

    /// Starts the next exchange and publishes this rank's piece.
    fn publish(&mut self, kind: ExchangeKind, piece: &[u8]) -> Result<(), CpuGroupError> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        self.exchange += 1;
        let rank = self.shard.rank();
        let slot = self.slot(rank);
        // SAFETY: the slot is this rank's, and has the size of the largest piece. No other rank
        // reads it: all ranks have published the previous exchange, so they have finished the
        // exchange before that, which used this slot.
        unsafe {
            slice::from_raw_parts_mut(slot.as_ptr(), piece.len()).copy_from_slice(piece);
        }
        self.kind_of(rank).store(kind.word(), Ordering::Relaxed);
        let published = self.published(rank);
        // Sequentially consistent with the count of waiters: either a waiter sees the new number
        // before it sleeps, or this rank sees the waiter and wakes it.
        published.store(self.exchange as u32, Ordering::SeqCst);
        if self.word(rank, WAITERS_WORD).load(Ordering::SeqCst) > 0 {
            futex::wake_all(published);
        }
        Ok(())
    }

    /// Waits until `rank` has published the current exchange, and returns its piece. On an error,
    /// leaves the group.
    fn read(&mut self, kind: ExchangeKind, rank: usize) -> Result<&[u8], CpuGroupError> {
        if let Err(error) = self.wait(kind, rank) {
            self.leave();
            self.fault = Some(error.clone());
            return Err(error);
        }
        // SAFETY: the rank has published this exchange, so its piece is written and has the length
        // of the kind. The rank reuses the slot only after this rank has published the next
        // exchange, which needs `&mut self`.
        Ok(unsafe { slice::from_raw_parts(self.slot(rank).as_ptr(), kind.bytes) })
    }

    /// Waits until `rank` has published the current exchange, and checks the kind of its piece.
    fn wait(&self, kind: ExchangeKind, rank: usize) -> Result<(), CpuGroupError> {
        let (of, exchange) = (self.shard.rank_count(), self.exchange);
        if rank == self.shard.rank() {
            return Ok(());
        }
        let published = self.published(rank);
        let begun = Instant::now();
        let mut ahead = self.ahead(published.load(Ordering::Acquire));
        while ahead < 0 {
            if begun.elapsed() < SPIN {
                (0..SPIN_HINTS).for_each(|_| hint::spin_loop());
                ahead = self.ahead(published.load(Ordering::Acquire));
                continue;
            }
            // A rank publishes before it leaves. So a rank that has left publishes nothing after
            // this load, and the number that is read next is its last one.
            let has_left = self.word(rank, LEFT_WORD).load(Ordering::Acquire) != 0;
            let waiters = self.word(rank, WAITERS_WORD);
            waiters.fetch_add(1, Ordering::SeqCst);
            let seen = published.load(Ordering::SeqCst);
            ahead = self.ahead(seen);
            let remaining = self.timeout.saturating_sub(begun.elapsed());
            if ahead < 0 && !has_left && !remaining.is_zero() {
                futex::wait(published, seen, remaining.min(LEFT_CHECK_INTERVAL));
                ahead = self.ahead(published.load(Ordering::Acquire));
            }
            waiters.fetch_sub(1, Ordering::SeqCst);
            if ahead >= 0 {
                break;
            }
            if has_left {
                return Err(CpuGroupError::Left { rank, of, exchange });
            }
            if remaining.is_zero() {
                let timeout = self.timeout;
                return Err(CpuGroupError::Late { rank, of, exchange, timeout });
            }
        }
        let theirs = self.kind_of(rank).load(Ordering::Relaxed);
        // A rank cannot be two exchanges ahead: that would mean that it did not wait for this rank.
        if ahead > 1 || theirs != kind.word() {
            let theirs = match ahead {
                0 | 1 => describe_kind(theirs),
                _ => format!("exchange {}", exchange + ahead as u64),
            };
            let ours = describe_kind(kind.word());
            return Err(CpuGroupError::Mismatch { rank, of, exchange, theirs, ours });
        }
        Ok(())
    }

    /// Returns how many exchanges another rank's published number is ahead of this rank's current
    /// exchange. Published numbers wrap around.
    fn ahead(&self, published: u32) -> i32 {
        published.wrapping_sub(self.exchange as u32) as i32
    }

    /// Marks this rank as left and wakes the ranks that wait for it.
    fn leave(&self) {
        let rank = self.shard.rank();
        self.word(rank, LEFT_WORD).store(1, Ordering::Release);
        futex::wake_all(self.published(rank));
    }

    fn word(&self, rank: usize, word: usize) -> &AtomicU32 {
        &self.words[rank * LINE_WORDS + word]
    }

    /// Returns the word of the rank's last published exchange.
    fn published(&self, rank: usize) -> &AtomicU32 {
        self.word(rank, EXCHANGE_WORD)
    }

    /// Returns the kind of the rank's piece in the current exchange.
    fn kind_of(&self, rank: usize) -> &AtomicU64 {
        &self.kinds[rank * LINE_LONGS + self.exchange as usize % SLOTS]
    }

    /// Returns the rank's slot of the current exchange.
    fn slot(&self, rank: usize) -> NonNull<u8> {
        let slot = rank * SLOTS + self.exchange as usize % SLOTS;
        // SAFETY: `slots` has `SLOTS` slots of `PIECE_BYTES` for each rank of the group.
        unsafe { self.slots.add(slot * PIECE_BYTES) }
    }
}

impl Drop for CpuGroup {
    fn drop(&mut self) {
        self.leave();
    }
}

impl fmt::Debug for CpuGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuGroup")
            .field("shard", &self.shard)
            .field("exchange", &self.exchange)
            .field("fault", &self.fault)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Mutex, mpsc},
        thread,
    };

    use super::*;
    use crate::{cpu::testing::region, shard::RANKS_MAX};

    const TIMEOUT: Duration = Duration::from_secs(60);

    fn shards(of: usize) -> Vec<Shard> {
        Shard::new(0, of).unwrap().all().collect()
    }

    /// Runs `run` in a thread for each rank and returns the results in rank order.
    fn run_ranks<T: Send>(
        of: usize,
        timeout: Duration,
        run: impl Fn(&mut CpuGroup) -> T + Sync,
    ) -> Vec<T> {
        // At an offset, as in a node's region.
        let region = region(64 + CpuGroup::region_bytes(of));
        thread::scope(|scope| {
            let threads: Vec<_> = shards(of)
                .into_iter()
                .map(|shard| {
                    let (region, run) = (&region, &run);
                    scope.spawn(move || run(&mut CpuGroup::new(region, 64, shard, timeout)))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Returns reproducible numbers of all magnitudes, so that the order of additions shows.
    fn numbers(seed: u64, count: usize) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        (0..count)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let scale = [1e-3, 1.0, 300.0][state as usize % 3];
                ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
            })
            .collect()
    }

    #[test]
    fn all_reduce_adds_in_order_of_rank_when_ranks_are_late() {
        for of in [1, 2, 3, 4, 7] {
            // Odd lengths, empty, and more than one piece.
            let lengths = [0, 1, 5, 576, 3 * 576, PIECE_FLOATS, PIECE_FLOATS * 2 + 77];
            let rounds = 40;
            let sums = run_ranks(of, TIMEOUT, |group| {
                let rank = group.shard().rank();
                let mut sums = Vec::new();
                for round in 0..rounds {
                    // Each rank is late sometimes.
                    if (round * 7 + rank * 3) % 11 == 0 {
                        thread::sleep(Duration::from_micros(300));
                    }
                    let length = lengths[round % lengths.len()];
                    let mut x = numbers((round * RANKS_MAX + rank) as u64, length);
                    group.all_reduce(&mut x).unwrap();
                    sums.push(x);
                }
                sums
            });
            for round in 0..rounds {
                let length = lengths[round % lengths.len()];
                let parts: Vec<_> = (0..of)
                    .map(|rank| numbers((round * RANKS_MAX + rank) as u64, length))
                    .collect();
                let mut expected = parts[0].clone();
                for part in &parts[1..] {
                    expected.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
                }
                for sums in &sums {
                    assert!(sums[round] == expected, "{of} ranks, round {round}");
                }
            }
        }
    }

    #[test]
    fn many_small_all_gathers_and_all_reduces_agree_on_all_ranks() {
        let gathered = run_ranks(3, TIMEOUT, |group| {
            let rank = group.shard().rank() as u32;
            for round in 0..2_000_u32 {
                let all = group.all_gather(&(round * 3 + rank).to_le_bytes()).unwrap();
                let all: Vec<u32> = all
                    .chunks(4)
                    .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
                    .collect();
                assert_eq!(all, [round * 3, round * 3 + 1, round * 3 + 2]);
                let mut x = [rank as f32];
                group.all_reduce(&mut x).unwrap();
                assert_eq!(x, [3.0]);
            }
            group.all_gather(&vec![rank as u8; PIECE_BYTES + 3]).unwrap()
        });
        let expected: Vec<u8> =
            (0..3).flat_map(|rank| std::iter::repeat_n(rank, PIECE_BYTES + 3)).collect();
        assert!(gathered.iter().all(|all| *all == expected));
    }

    #[test]
    fn exchange_numbers_wrap() {
        let region = region(CpuGroup::region_bytes(2));
        let near_the_end = u64::from(u32::MAX) - 5;
        thread::scope(|scope| {
            for shard in shards(2) {
                let region = &region;
                scope.spawn(move || {
                    let mut group = CpuGroup::new(region, 0, shard, TIMEOUT);
                    group.exchange = near_the_end;
                    group.published(shard.rank()).store(near_the_end as u32, Ordering::SeqCst);
                    // Both ranks have their numbers before one waits for the other's.
                    let other = group.published(1 - shard.rank());
                    let begun = Instant::now();
                    while other.load(Ordering::SeqCst) == 0 {
                        assert!(begun.elapsed() < TIMEOUT, "the other rank joins");
                        thread::yield_now();
                    }
                    for round in 0..50 {
                        let mut x = [round as f32, shard.rank() as f32];
                        group.all_reduce(&mut x).unwrap();
                        assert_eq!(x, [2.0 * round as f32, 1.0]);
                    }
                });
            }
        });
    }

    #[test]
    fn late_rank_is_named_and_fails_the_group() {
        let timeout = Duration::from_millis(200);
        let region = region(CpuGroup::region_bytes(3));
        let mut groups: Vec<_> =
            shards(3).into_iter().map(|shard| CpuGroup::new(&region, 0, shard, timeout)).collect();
        let mut third = groups.pop().unwrap();
        let kind = ExchangeKind { operation: CollectiveOperation::Reduce, bytes: 4 };
        for group in &mut groups {
            group.publish(kind, &1.0_f32.to_ne_bytes()).unwrap();
        }
        let begun = Instant::now();
        let late = CpuGroupError::Late { rank: 2, of: 3, exchange: 1, timeout };
        for group in &mut groups {
            for rank in 0..2 {
                assert_eq!(group.read(kind, rank), Ok(&1.0_f32.to_ne_bytes()[..]));
            }
            assert_eq!(group.read(kind, 2), Err(late.clone()));
        }
        assert!(begun.elapsed() >= timeout * 2);
        // Every later exchange fails at once with the same error.
        assert_eq!(groups[0].all_reduce(&mut [1.0]), Err(late.clone()));
        assert_eq!(groups[1].all_gather(&[1]), Err(late.clone()));
        assert_eq!(groups[1].fault(), Some(&late));
        // A rank that arrives later fails when it needs an exchange that the others have not
        // published.
        let mut x = [1.0];
        assert_eq!((third.all_reduce(&mut x), x), (Ok(()), [3.0]));
        let error = third.all_reduce(&mut x).unwrap_err();
        assert_eq!(error, CpuGroupError::Left { rank: 0, of: 3, exchange: 2 });
    }

    #[test]
    fn rank_that_leaves_wakes_waiting_ranks_and_its_last_exchange_counts() {
        let region = region(CpuGroup::region_bytes(2));
        let mut groups: Vec<_> =
            shards(2).into_iter().map(|shard| CpuGroup::new(&region, 0, shard, TIMEOUT)).collect();
        let (mut second, mut first) = (groups.pop().unwrap(), groups.pop().unwrap());
        let (first_sum, first_sums) = mpsc::channel();
        let waiting = thread::spawn(move || {
            let mut x = [1.0];
            first.all_reduce(&mut x).unwrap();
            first_sum.send(x[0]).unwrap();
            (first.all_reduce(&mut x).unwrap_err(), Instant::now())
        });
        second.all_reduce(&mut [2.0]).unwrap();
        assert_eq!(first_sums.recv_timeout(TIMEOUT), Ok(3.0));
        // Long enough that the other rank usually sleeps; the outcome does not depend on it.
        thread::sleep(Duration::from_millis(100));
        let left_at = Instant::now();
        drop(second);
        let (error, seen) = waiting.join().unwrap();
        assert_eq!(error, CpuGroupError::Left { rank: 1, of: 2, exchange: 2 });
        assert!(seen.saturating_duration_since(left_at) < TIMEOUT / 2);
    }

    #[test]
    fn ranks_with_different_operations_fail() {
        let errors = Mutex::new(Vec::new());
        run_ranks(2, TIMEOUT, |group| {
            let mut x = vec![1.0; 3 + group.shard().rank()];
            if let Err(error) = group.all_reduce(&mut x) {
                errors.lock().unwrap().push(error.to_string());
            }
        });
        let errors = errors.into_inner().unwrap();
        // The first rank that sees the difference leaves; the other rank sees the difference
        // itself.
        assert_eq!(errors.len(), 2, "{errors:?}");
        for error in errors {
            assert!(
                error.contains("an all-reduce of 12 bytes")
                    && error.contains("an all-reduce of 16"),
                "{error}"
            );
        }
        let outcomes = run_ranks(2, TIMEOUT, |group| match group.shard().rank() {
            0 => group.all_reduce(&mut [1.0]),
            _ => group.all_gather(&[]).and_then(|_| group.all_gather(&[7])).map(drop),
        });
        assert!(
            outcomes.iter().all(|outcome| matches!(outcome, Err(CpuGroupError::Mismatch { .. })))
        );
    }
}
