//! Ring in shared memory that broadcasts messages from one writer to every reader, in order.
//!
//! A ring is an array of slots of equal size. Message parts are numbered from 0; part *n* is in
//! slot *n* mod slots. The writer fills a slot and then stores *n* + 1 as its sequence number
//! (release). A reader that sees this number (acquire) sees the part. Each reader has a cursor, the
//! number of parts it has taken, and the writer never fills a slot that some reader has not taken.
//! A slow reader therefore blocks the writer, up to a deadline, and loses nothing. A message longer
//! than a slot is split into several parts, which may be more than the ring's slots.
//!
//! Neither side trusts the other's memory. Lengths are bounded. Every part has a checksum over its
//! bytes, its number and the ring's seed. All accesses are atomic. Invalid data is an error, never
//! undefined behaviour.
//!
//! An idle reader spins briefly and then sleeps until a [`Bell`] rings. A blocked writer sleeps at
//! once.
//!
//! The main cost is moving cache lines between cores. So a spinning reader polls one cache line:
//! the header of the next part, which also holds the first bytes of the message. Ringing a bell
//! without sleepers only reads the bell. After publishing a part, the writer prefetches the cache
//! lines that its next part needs.

use std::{
    hint,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering, fence},
    },
    time::{Duration, Instant},
};

use kernels::shared::{Atomics, SharedRegion, futex};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Size of a cache line in bytes, to which everything here is aligned.
pub const LINE: usize = 64;
/// Maximum message size in bytes. Both sides reject longer messages.
pub const MESSAGE_BYTES_MAX: usize = 256 << 20;
/// Maximum sleep between two checks for errors and cancellation.
const SLEEP_MAX: Duration = Duration::from_millis(500);

/// Error of a ring.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// A reader did not free a slot before the deadline.
    #[error("reader {reader} has not read {parts} parts for {} ms", waited.as_millis())]
    Slow { reader: usize, parts: u64, waited: Duration },
    #[error("cannot transfer a message of {bytes} bytes; expected at most {MESSAGE_BYTES_MAX}")]
    TooLong { bytes: usize },
    /// The shared memory has an invalid cursor or part.
    #[error("part {part} is damaged: {what}")]
    Damaged { part: u64, what: &'static str },
    /// The caller cancelled the wait.
    #[error("the wait was cancelled")]
    GivenUp,
}

/// Wake-up signal for sleeping processes. A bell has its own cache line, which does not change
/// while no process sleeps.
#[derive(Clone, Debug)]
pub struct Bell {
    /// The number of wake-ups, and the number of processes that sleep or are about to.
    words: Atomics<AtomicU32>,
}

impl Bell {
    pub const BYTES: usize = LINE;

    pub fn new(region: &Arc<SharedRegion>, offset: usize) -> Self {
        Self { words: region.words(offset, 2) }
    }

    /// Wakes all sleepers. Called after data was made visible.
    pub fn ring(&self) {
        // Pairs with the fence in `wait`: either this process sees the sleeper's mark, or the
        // sleeper sees the data.
        fence(Ordering::SeqCst);
        if self.words[1].load(Ordering::Relaxed) > 0 {
            self.words[0].fetch_add(1, Ordering::Release);
            futex::wake_all(&self.words[0]);
        }
    }

    /// Sleeps until the bell rings, unless `has_news` returns true. May end spuriously.
    pub fn wait(&self, at_most: Duration, has_news: impl FnOnce() -> bool) {
        let count = self.words[0].load(Ordering::Acquire);
        self.words[1].fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !has_news() {
            // A ringer that saw the mark either has changed the count by now, which ends the
            // wait at once, or wakes this process.
            futex::wait(&self.words[0], count, at_most);
        }
        self.words[1].fetch_sub(1, Ordering::Relaxed);
    }
}

/// Dimensions of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingShape {
    pub slots: usize,
    /// Bytes of one slot: the header and one message part.
    pub slot_bytes: usize,
    pub readers: usize,
}

impl RingShape {
    pub const fn bytes(&self) -> usize {
        self.readers * LINE + self.slots * self.slot_bytes
    }

    const fn part_bytes(&self) -> usize {
        self.slot_bytes - HEADER_LONGS * 8
    }
}

/// 64-bit words in a slot's header: sequence number, message length, offset of the part, checksum.
/// The part begins in the same cache line.
const HEADER_LONGS: usize = 4;
/// Polls between two reads of the clock while spinning.
const POLLS_PER_CLOCK_READ: usize = 16;
/// Maximum cache lines of the next slot that the writer prefetches.
const LINES_AHEAD_MAX: usize = 64;

/// The memory of a ring in a region.
#[derive(Clone, Debug)]
pub struct RingMemory {
    shape: RingShape,
    /// One cache line per reader.
    cursors: Atomics<AtomicU64>,
    slots: Atomics<AtomicU64>,
    /// `filled` wakes readers, `taken` wakes the writer.
    filled: Bell,
    taken: Bell,
    /// Checksum seed, which distinguishes this ring from other rings and from earlier uses of the
    /// same memory.
    seed: u64,
}

impl RingMemory {
    /// The region's bytes from `offset` on must be zero, or as a ring of the same shape left them.
    /// `filled` wakes readers, `taken` the writer; several rings may share bells.
    pub fn new(
        region: &Arc<SharedRegion>,
        offset: usize,
        shape: RingShape,
        (filled, taken): (Bell, Bell),
        seed: u64,
    ) -> Self {
        assert!(shape.slots > 0 && shape.slot_bytes > 0 && shape.slot_bytes.is_multiple_of(LINE));
        let cursors = region.longs(offset, shape.readers * LINE / 8);
        let slots = region.longs(offset + shape.readers * LINE, shape.slots * shape.slot_bytes / 8);
        Self { shape, cursors, slots, filled, taken, seed }
    }

    fn cursor(&self, reader: usize) -> &AtomicU64 {
        &self.cursors[reader * LINE / 8]
    }

    fn slot(&self, part: u64) -> &[AtomicU64] {
        let longs = self.shape.slot_bytes / 8;
        let first = (part % self.shape.slots as u64) as usize * longs;
        &self.slots[first..first + longs]
    }

    fn checksum(&self, part: u64, total: u64, offset: u64, bytes: &[u8]) -> u64 {
        let place = part.wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ^ total.rotate_left(32).wrapping_mul(0xc2b2_ae3d_27d4_eb4f)
            ^ offset.wrapping_mul(0x1656_67b1_9e37_79f9);
        xxh3_64_with_seed(bytes, self.seed ^ place)
    }
}

/// Writing end of a ring.
#[derive(Debug)]
pub struct RingWriter {
    memory: RingMemory,
    /// Number of the next part.
    next: u64,
    /// Parts that every reader has taken, as last read.
    free_from: u64,
}

impl RingWriter {
    /// Creates the only writer of a ring.
    pub fn new(memory: RingMemory) -> Self {
        Self { memory, next: 0, free_from: 0 }
    }

    /// Writes a message for every reader. Waits for free slots up to `within`, or until `give_up`,
    /// which is checked before each sleep, returns true. After an error the ring is unusable.
    pub fn write(
        &mut self,
        message: &[u8],
        within: Duration,
        give_up: impl Fn() -> bool,
    ) -> Result<(), RingError> {
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(RingError::TooLong { bytes: message.len() });
        }
        let part_bytes = self.memory.shape.part_bytes();
        let total = message.len() as u64;
        let mut offset = 0;
        loop {
            let part = &message[offset..message.len().min(offset + part_bytes)];
            self.wait_for_room(within, &give_up)?;
            self.fill(total, offset as u64, part);
            offset += part.len();
            if offset == message.len() {
                self.look_ahead(part.len());
                return Ok(());
            }
        }
    }

    fn fill(&mut self, total: u64, offset: u64, bytes: &[u8]) {
        let slot = self.memory.slot(self.next);
        let (header, body) = slot.split_at(HEADER_LONGS);
        let (longs, rest) = bytes.as_chunks::<8>();
        for (place, long) in body.iter().zip(longs) {
            place.store(u64::from_le_bytes(*long), Ordering::Relaxed);
        }
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            body[longs.len()].store(u64::from_le_bytes(last), Ordering::Relaxed);
        }
        header[1].store(total, Ordering::Relaxed);
        header[2].store(offset, Ordering::Relaxed);
        let checksum = self.memory.checksum(self.next, total, offset, bytes);
        header[3].store(checksum, Ordering::Relaxed);
        self.next += 1;
        header[0].store(self.next, Ordering::Release);
        self.memory.filled.ring();
    }

    /// Prefetches the readers' cursors and the cache lines of the next slot, for a part as long as
    /// the last one. These lines are in the caches of the readers since the previous round.
    fn look_ahead(&mut self, part_bytes: usize) {
        let slots = self.memory.shape.slots as u64;
        if self.next - self.free_from > slots / 2
            // An invalid cursor is reported when the writer next waits for a free slot.
            && let Ok((cursor, _)) = self.slowest()
        {
            self.free_from = cursor;
        }
        if self.next - self.free_from < slots {
            // As in `wait_for_room`.
            fence(Ordering::Acquire);
            let lines = (HEADER_LONGS * 8 + part_bytes).div_ceil(LINE).min(LINES_AHEAD_MAX);
            // Skips the first line, which readers poll.
            let slot = &self.memory.slot(self.next)[..lines * LINE / 8];
            for line in slot.chunks(LINE / 8).skip(1) {
                line[0].store(0, Ordering::Relaxed);
            }
        }
    }

    fn wait_for_room(
        &mut self,
        within: Duration,
        give_up: &impl Fn() -> bool,
    ) -> Result<(), RingError> {
        let slots = self.memory.shape.slots as u64;
        if self.next - self.free_from < slots {
            return Ok(());
        }
        let began = Instant::now();
        loop {
            let (cursor, reader) = self.slowest()?;
            self.free_from = cursor;
            if self.next - cursor < slots {
                // The readers' loads from the slot happen before their cursor stores.
                fence(Ordering::Acquire);
                return Ok(());
            }
            if give_up() {
                return Err(RingError::GivenUp);
            }
            let waited = began.elapsed();
            let Some(left) = within.checked_sub(waited).filter(|left| !left.is_zero()) else {
                return Err(RingError::Slow { reader, parts: self.next - cursor, waited });
            };
            let has_room = || {
                let taken = |reader| self.memory.cursor(reader).load(Ordering::Relaxed) != cursor;
                (0..self.memory.shape.readers).all(taken) || give_up()
            };
            self.memory.taken.wait(left.min(SLEEP_MAX), has_room);
        }
    }

    /// Returns the smallest cursor and its reader.
    fn slowest(&self) -> Result<(u64, usize), RingError> {
        let mut slowest = (self.next, 0);
        for reader in 0..self.memory.shape.readers {
            let cursor = self.memory.cursor(reader).load(Ordering::Acquire);
            if cursor > self.next || cursor < self.free_from {
                let what = "invalid reader cursor";
                return Err(RingError::Damaged { part: cursor, what });
            }
            slowest = slowest.min((cursor, reader));
        }
        Ok(slowest)
    }
}

/// Reading end of a ring.
#[derive(Debug)]
pub struct RingReader {
    memory: RingMemory,
    reader: usize,
    next: u64,
    /// Length of the message that is being read, in bytes.
    total: u64,
    /// Bytes read of the current message, or the whole previous message.
    message: Vec<u8>,
    is_whole: bool,
}

impl RingReader {
    /// Creates the only reader number `reader` of a ring.
    pub fn new(memory: RingMemory, reader: usize) -> Self {
        let readers = memory.shape.readers;
        assert!(reader < readers, "invalid reader {reader}; expected less than {readers}");
        Self { memory, reader, next: 0, total: 0, message: Vec::new(), is_whole: true }
    }

    /// Returns whether [`poll`](Self::poll) would find a part or report an error.
    pub fn has_news(&self) -> bool {
        self.memory.slot(self.next)[0].load(Ordering::Acquire) != self.before()
    }

    /// Returns the next message if all its parts have arrived.
    pub fn poll(&mut self) -> Result<Option<&[u8]>, RingError> {
        let is_there = self.advance()?;
        Ok(is_there.then_some(&self.message))
    }

    /// Polls for the next message as [`poll`](Self::poll) does, for up to `within`: spins for up to
    /// `spin`, then sleeps.
    pub fn read(&mut self, within: Duration, spin: Duration) -> Result<Option<&[u8]>, RingError> {
        let began = Instant::now();
        while !self.advance()? {
            let waited = began.elapsed();
            if waited < spin.min(within) {
                for _ in 0..POLLS_PER_CLOCK_READ {
                    if self.has_news() {
                        break;
                    }
                    hint::spin_loop();
                }
            } else if waited < within {
                self.memory.filled.wait(within - waited, || self.has_news());
            } else {
                return Ok(None);
            }
        }
        Ok(Some(&self.message))
    }

    /// Returns the slot's sequence number from the previous round, or of an unused slot.
    fn before(&self) -> u64 {
        (self.next + 1).saturating_sub(self.memory.shape.slots as u64)
    }

    /// Takes the available parts. Returns true at the end of a message.
    fn advance(&mut self) -> Result<bool, RingError> {
        loop {
            let sequence = self.memory.slot(self.next)[0].load(Ordering::Acquire);
            if sequence != self.next + 1 {
                return match sequence == self.before() {
                    true => Ok(false),
                    false => Err(self.damaged("unexpected sequence number")),
                };
            }
            self.take()?;
            if self.is_whole {
                return Ok(true);
            }
        }
    }

    /// Takes the part in the slot.
    fn take(&mut self) -> Result<(), RingError> {
        let slot = self.memory.slot(self.next);
        let (header, body) = slot.split_at(HEADER_LONGS);
        let total = header[1].load(Ordering::Relaxed);
        let offset = header[2].load(Ordering::Relaxed);
        let checksum = header[3].load(Ordering::Relaxed);
        if self.is_whole {
            self.message.clear();
        }
        let read = self.message.len();
        if total > MESSAGE_BYTES_MAX as u64 {
            return Err(self.damaged("the message is too long"));
        }
        if offset != read as u64 || offset > total || (offset > 0 && total != self.total) {
            return Err(self.damaged("it does not follow the previous part"));
        }
        let bytes = ((total - offset) as usize).min(self.memory.shape.part_bytes());
        if bytes == 0 && total > 0 {
            return Err(self.damaged("it is empty"));
        }
        self.message.resize(read + bytes.next_multiple_of(8), 0);
        for (place, long) in self.message[read..].as_chunks_mut::<8>().0.iter_mut().zip(body) {
            *place = long.load(Ordering::Relaxed).to_le_bytes();
        }
        self.message.truncate(read + bytes);
        if self.memory.checksum(self.next, total, offset, &self.message[read..]) != checksum {
            return Err(self.damaged("the checksum does not match"));
        }
        self.total = total;
        self.is_whole = self.message.len() as u64 == total;
        self.next += 1;
        self.memory.cursor(self.reader).store(self.next, Ordering::Release);
        self.memory.taken.ring();
        Ok(())
    }

    fn damaged(&self, what: &'static str) -> RingError {
        RingError::Damaged { part: self.next, what }
    }
}
