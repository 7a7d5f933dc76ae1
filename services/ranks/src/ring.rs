//! Messages from one writer to every reader, in order, through shared memory.
//!
//! A ring is a row of slots of equal size. Message parts are numbered from 0; part *n* lies in slot
//! *n* mod slots. The writer fills a slot and then stores *n* + 1 as its sequence number (release);
//! a reader that sees that number (acquire) sees the part. Each reader has a cursor, the number of
//! parts it has taken, and the writer never fills a slot that some reader has yet to take: a slow
//! reader makes it wait, up to a deadline, and loses nothing. A message longer than a slot goes in
//! several parts, also in more than the ring has slots at once.
//!
//! Nobody trusts the other side's memory: lengths are bounded, every part has a checksum that goes
//! with its number and with the ring's epoch, and all of it is read and written as atomics. What does
//! not fit is an error, never undefined.
//!
//! Who finds nothing to do spins for a moment and then sleeps in the system until a [`Bell`] rings.
//!
//! What costs time here is memory that one core has written last and another one needs. So readers that
//! spin look at one line, the header of the part to come, which holds the first bytes of the message
//! too; a bell that nobody sleeps by is only read; and what the writer will need for its next part it
//! fetches after it has published one, not before.

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

/// A cache line, and the grain of everything here.
pub const LINE: usize = 64;
/// Longer ones are refused by both sides.
pub const MESSAGE_BYTES_MAX: usize = 256 << 20;
/// Longest sleep between two looks at what else may have happened.
const SLEEP_MAX: Duration = Duration::from_millis(500);

/// What went wrong with a ring.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// A reader did not make room in time.
    #[error("reader {reader} left {parts} parts unread for {} ms", waited.as_millis())]
    Slow { reader: usize, parts: u64, waited: Duration },
    #[error("a message of {bytes} bytes is too long: {MESSAGE_BYTES_MAX} are allowed")]
    TooLong { bytes: usize },
    /// Something else than the other side wrote there.
    #[error("part {part} is damaged: {what}")]
    Damaged { part: u64, what: &'static str },
    /// The caller's reason to wait no longer came true.
    #[error("the wait was given up")]
    GivenUp,
}

/// Wakes those who sleep; a cache line of its own, which stays as it is while nobody does.
#[derive(Clone, Debug)]
pub struct Bell {
    /// How often it woke somebody, and how many sleep or are about to.
    words: Atomics<AtomicU32>,
}

impl Bell {
    pub const BYTES: usize = LINE;

    pub fn new(region: &Arc<SharedRegion>, offset: usize) -> Self {
        Self { words: region.words(offset, 2) }
    }

    /// After something was made visible.
    pub fn ring(&self) {
        // Against the fence of who goes to sleep: either we see its mark here, or it sees what was
        // made visible before.
        fence(Ordering::SeqCst);
        if self.words[1].load(Ordering::Relaxed) > 0 {
            self.words[0].fetch_add(1, Ordering::Release);
            futex::wake_all(&self.words[0]);
        }
    }

    /// Sleeps until it rings, unless there is news already. May end for no reason.
    pub fn wait(&self, at_most: Duration, has_news: impl FnOnce() -> bool) {
        let count = self.words[0].load(Ordering::Acquire);
        self.words[1].fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !has_news() {
            // A ring that saw the mark has changed the count by now, or wakes.
            futex::wait(&self.words[0], count, at_most);
        }
        self.words[1].fetch_sub(1, Ordering::Relaxed);
    }
}

/// The measures of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingShape {
    pub slots: usize,
    /// Of one slot: its header, the rest is a part of a message.
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

/// Numbers of 64 bits in a slot's header: sequence, message length, offset of the part, checksum. The
/// part begins in the same line.
const HEADER_LONGS: usize = 4;
/// How often who spins looks between two looks at the clock.
const LOOKS: usize = 16;
/// Of the next slot, how much the writer fetches ahead.
const LINES_AHEAD_MAX: usize = 64;

#[derive(Clone, Debug)]
struct Memory {
    shape: RingShape,
    /// A line for each reader.
    cursors: Atomics<AtomicU64>,
    slots: Atomics<AtomicU64>,
    /// For readers, and for the writer.
    filled: Bell,
    taken: Bell,
    /// Told from other rings, and from this one's former lives.
    seed: u64,
}

impl Memory {
    fn new(
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

/// The one end that writes.
#[derive(Debug)]
pub struct RingWriter {
    memory: Memory,
    /// The number of the next part.
    next: u64,
    /// Parts that every reader has taken, as last seen.
    free_from: u64,
}

impl RingWriter {
    /// The region's bytes from `offset` on are zero or as a ring of the same shape left them, and
    /// this is the ring's only writer. `filled` wakes readers, `taken` the writer; several rings may
    /// share bells.
    pub fn new(
        region: &Arc<SharedRegion>,
        offset: usize,
        shape: RingShape,
        bells: (Bell, Bell),
        seed: u64,
    ) -> Self {
        Self { memory: Memory::new(region, offset, shape, bells, seed), next: 0, free_from: 0 }
    }

    /// Writes a message for every reader. Waits for room up to `within`, and no longer than until
    /// `give_up`, which is asked before each sleep. After an error the ring is of no more use.
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

    /// Takes now what the next part will need, one as long as the last: where readers are, and the
    /// lines of its slot, which are still with those who read them a round ago.
    fn look_ahead(&mut self, part_bytes: usize) {
        let slots = self.memory.shape.slots as u64;
        if self.next - self.free_from > slots / 2
            // What is wrong with a cursor is said when there is no room.
            && let Ok((cursor, _)) = self.slowest()
        {
            self.free_from = cursor;
        }
        if self.next - self.free_from < slots {
            // As in `wait_for_room`.
            fence(Ordering::Acquire);
            let lines = (HEADER_LONGS * 8 + part_bytes).div_ceil(LINE).min(LINES_AHEAD_MAX);
            // Not the first: who spins has it.
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
                // What readers loaded from the slot came before their cursor's store.
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

    /// The least cursor and its reader.
    fn slowest(&self) -> Result<(u64, usize), RingError> {
        let mut slowest = (self.next, 0);
        for reader in 0..self.memory.shape.readers {
            let cursor = self.memory.cursor(reader).load(Ordering::Acquire);
            if cursor > self.next || cursor < self.free_from {
                let what = "a reader's cursor is not where it can be";
                return Err(RingError::Damaged { part: cursor, what });
            }
            slowest = slowest.min((cursor, reader));
        }
        Ok(slowest)
    }
}

/// One of the ends that read.
#[derive(Debug)]
pub struct RingReader {
    memory: Memory,
    reader: usize,
    next: u64,
    /// Of the message being read.
    total: u64,
    /// What is there of it, or the whole of the one before.
    message: Vec<u8>,
    is_whole: bool,
}

impl RingReader {
    /// As [`RingWriter::new`]; nobody else is this reader.
    pub fn new(
        region: &Arc<SharedRegion>,
        offset: usize,
        shape: RingShape,
        reader: usize,
        bells: (Bell, Bell),
        seed: u64,
    ) -> Self {
        assert!(reader < shape.readers, "reader {reader} is one of {}", shape.readers);
        let memory = Memory::new(region, offset, shape, bells, seed);
        Self { memory, reader, next: 0, total: 0, message: Vec::new(), is_whole: true }
    }

    /// Whether [`poll`](Self::poll) has something to do, be it to say what is wrong.
    pub fn has_news(&self) -> bool {
        self.memory.slot(self.next)[0].load(Ordering::Acquire) != self.before()
    }

    /// The next message, if it is there whole.
    pub fn poll(&mut self) -> Result<Option<&[u8]>, RingError> {
        let is_there = self.advance()?;
        Ok(is_there.then_some(&self.message))
    }

    /// As [`poll`](Self::poll), after waiting up to `within` for it: spinning at first, for as long
    /// as said, then asleep.
    pub fn read(&mut self, within: Duration, spin: Duration) -> Result<Option<&[u8]>, RingError> {
        let mut is_there = self.advance()?;
        let began = Instant::now();
        while !is_there && began.elapsed() < spin.min(within) {
            for _ in 0..LOOKS {
                if self.has_news() {
                    break;
                }
                hint::spin_loop();
            }
            is_there = self.advance()?;
        }
        while !is_there {
            let left = within.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            self.memory.filled.wait(left, || self.has_news());
            is_there = self.advance()?;
        }
        Ok(Some(&self.message))
    }

    /// The sequence number of the slot's part of the round before, or that of none yet.
    fn before(&self) -> u64 {
        (self.next + 1).saturating_sub(self.memory.shape.slots as u64)
    }

    /// Takes the parts that are there; true at the end of a message.
    fn advance(&mut self) -> Result<bool, RingError> {
        loop {
            let sequence = self.memory.slot(self.next)[0].load(Ordering::Acquire);
            if sequence != self.next + 1 {
                return match sequence == self.before() {
                    true => Ok(false),
                    false => Err(self.damaged("its sequence number is another's")),
                };
            }
            self.take()?;
            if self.is_whole {
                return Ok(true);
            }
        }
    }

    /// Takes the part that is there.
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
            return Err(self.damaged("its message is too long"));
        }
        if offset != read as u64 || offset > total || (offset > 0 && total != self.total) {
            return Err(self.damaged("it does not follow the part before"));
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
            return Err(self.damaged("its checksum is another's"));
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
