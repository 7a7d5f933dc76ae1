//! Figures of the last steps, for whoever wants them, on whatever thread.
//!
//! [`StepWriter`] belongs to the engine's thread, which never waits and never allocates for it: the
//! oldest record is overwritten. Each [`StepReader`] goes through the records in order at its own
//! pace and counts those that were gone before it came.
//!
//! A record is sixteen words, all of them atomic; the first is its number, odd while the others are
//! being written. A reader takes the words only when it found the number that it wanted before and
//! after reading them, so it never sees halves of two records.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering, fence},
    },
    time::{Duration, Instant},
};

use crate::plan::{Dispatch, Span, StepId};

/// What the rows of a step do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// Read prompts.
    Prefill,
    /// Some read prompts, some write answers.
    Mixed,
    /// Write answers.
    Decode,
}

/// Figures of one collected step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRecord {
    pub step_id: StepId,
    /// Rows of the forward, their tokens with drafts, and how many of them sampled.
    pub rows: u32,
    pub tokens: u32,
    pub sampled: u32,
    pub kind: StepKind,
    pub dispatch: Dispatch,
    pub uploaded_bytes: u64,
    /// Time the device worked on it.
    pub busy: Duration,
    /// When the engine's thread planned it, gave it to the executor,
    pub plan: Span,
    pub launch: Span,
    /// and took its result, without waiting for it.
    pub collect: Span,
    /// When the device worked on it, if the executor can tell.
    pub device: Option<Span>,
    /// When its results were in the host's memory, if the executor can tell.
    pub landed_at: Option<Instant>,
}

impl StepRecord {
    /// Rows of a graph beyond the step's own. Steps that are filled up though nothing is replayed, as
    /// with graphs switched off for a comparison, do not count.
    pub fn padding_rows(&self) -> u32 {
        match self.dispatch {
            Dispatch::Graph { rows } => rows.saturating_sub(self.rows),
            Dispatch::Eager | Dispatch::Fallback => 0,
        }
    }
}

/// Words of a record beside its number.
const WORDS: usize = 15;
/// A moment that is not known.
const NEVER: u64 = u64::MAX;

/// Two lines of a cache.
#[derive(Debug)]
#[repr(align(128))]
struct Place {
    /// `2 n + 2` when record `n` is in the words, odd while it is being written.
    number: AtomicU64,
    words: [AtomicU64; WORDS],
}

#[derive(Debug)]
struct StepRing {
    places: Box<[Place]>,
    /// Records so far.
    written: AtomicU64,
    /// Moments are nanoseconds from here.
    origin: Instant,
}

/// The one end that records go in at.
#[derive(Debug)]
pub struct StepWriter {
    ring: Arc<StepRing>,
    written: u64,
}

impl StepWriter {
    /// Room for `capacity` records, none of which has a moment before `origin`.
    pub fn new(capacity: usize, origin: Instant) -> Self {
        assert!(capacity > 0, "a ring has room for a record");
        let place = || Place { number: AtomicU64::new(0), words: Default::default() };
        let places = (0..capacity).map(|_| place()).collect();
        Self { ring: Arc::new(StepRing { places, written: AtomicU64::new(0), origin }), written: 0 }
    }

    pub fn push(&mut self, record: &StepRecord) {
        let number = self.written;
        let place = self.ring.place(number);
        let words = self.ring.encode(record);
        place.number.store(2 * number + 1, Ordering::Relaxed);
        // No word is seen before the odd number is: who reads one of them finds it then.
        fence(Ordering::Release);
        for (to, word) in place.words.iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
        place.number.store(2 * number + 2, Ordering::Release);
        self.written = number + 1;
        self.ring.written.store(self.written, Ordering::Release);
    }

    /// From the oldest record that is there.
    pub fn reader(&self) -> StepReader {
        let next = self.written.saturating_sub(self.ring.places.len() as u64);
        StepReader { ring: Arc::clone(&self.ring), next, missed: 0 }
    }
}

/// Goes through the records, oldest first. Clones go on by themselves.
#[derive(Clone, Debug)]
pub struct StepReader {
    ring: Arc<StepRing>,
    next: u64,
    missed: u64,
}

impl StepReader {
    /// Records that were overwritten before they were read, so far.
    pub fn missed(&self) -> u64 {
        self.missed
    }
}

/// `None` when every record so far was read; later there may be more.
impl Iterator for StepReader {
    type Item = StepRecord;

    fn next(&mut self) -> Option<StepRecord> {
        loop {
            let written = self.ring.written.load(Ordering::Acquire);
            if self.next >= written {
                return None;
            }
            let oldest = written.saturating_sub(self.ring.places.len() as u64);
            self.missed += oldest.saturating_sub(self.next);
            let number = self.next.max(oldest);
            self.next = number + 1;
            match self.ring.read(number) {
                Some(record) => return Some(record),
                // The writer has come round to it: nobody waits for anybody here.
                None => self.missed += 1,
            }
        }
    }
}

impl StepRing {
    fn place(&self, number: u64) -> &Place {
        &self.places[(number % self.places.len() as u64) as usize]
    }

    /// Record `number`, unless it is not there any more.
    fn read(&self, number: u64) -> Option<StepRecord> {
        let place = self.place(number);
        let whole = 2 * number + 2;
        if place.number.load(Ordering::Acquire) != whole {
            return None;
        }
        let words = place.words.each_ref().map(|word| word.load(Ordering::Relaxed));
        // A word of a later record comes with the odd number before it.
        fence(Ordering::Acquire);
        (place.number.load(Ordering::Relaxed) == whole).then(|| self.decode(&words))
    }

    fn encode(&self, record: &StepRecord) -> [u64; WORDS] {
        let at = |moment: Instant| nanoseconds(moment.saturating_duration_since(self.origin));
        let maybe = |moment: Option<Instant>| moment.map_or(NEVER, at);
        let (dispatch, graph_rows) = match record.dispatch {
            Dispatch::Eager => (0, 0),
            Dispatch::Graph { rows } => (1, rows),
            Dispatch::Fallback => (2, 0),
        };
        let kind = match record.kind {
            StepKind::Prefill => 0,
            StepKind::Mixed => 1,
            StepKind::Decode => 2,
        };
        [
            record.step_id,
            pair(record.rows, record.tokens),
            pair(record.sampled, graph_rows),
            pair(kind, dispatch),
            record.uploaded_bytes,
            nanoseconds(record.busy),
            at(record.plan.begin),
            at(record.plan.end),
            at(record.launch.begin),
            at(record.launch.end),
            at(record.collect.begin),
            at(record.collect.end),
            maybe(record.device.map(|span| span.begin)),
            maybe(record.device.map(|span| span.end)),
            maybe(record.landed_at),
        ]
    }

    fn decode(&self, words: &[u64; WORDS]) -> StepRecord {
        let at = |index: usize| self.origin + Duration::from_nanos(words[index]);
        let maybe = |index: usize| (words[index] != NEVER).then(|| at(index));
        let span = |index: usize| Span { begin: at(index), end: at(index + 1) };
        let (rows, tokens) = halves(words[1]);
        let (sampled, graph_rows) = halves(words[2]);
        let (kind, dispatch) = halves(words[3]);
        StepRecord {
            step_id: words[0],
            rows,
            tokens,
            sampled,
            kind: match kind {
                0 => StepKind::Prefill,
                1 => StepKind::Mixed,
                _ => StepKind::Decode,
            },
            dispatch: match dispatch {
                0 => Dispatch::Eager,
                1 => Dispatch::Graph { rows: graph_rows },
                _ => Dispatch::Fallback,
            },
            uploaded_bytes: words[4],
            busy: Duration::from_nanos(words[5]),
            plan: span(6),
            launch: span(8),
            collect: span(10),
            device: maybe(12).zip(maybe(13)).map(|(begin, end)| Span { begin, end }),
            landed_at: maybe(14),
        }
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    // Of 584 years.
    duration.as_nanos() as u64
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

#[cfg(test)]
mod tests {
    use std::{sync::atomic::AtomicBool, thread};

    use super::*;

    /// Every field says which record it is of.
    fn record(origin: Instant, number: u64) -> StepRecord {
        let at = |place: u64| origin + Duration::from_nanos(16 * number + place);
        let span = |place| Span { begin: at(place), end: at(place + 1) };
        let few = number as u32;
        StepRecord {
            step_id: number,
            rows: few,
            tokens: few.wrapping_add(1),
            sampled: few.wrapping_add(2),
            kind: [StepKind::Prefill, StepKind::Mixed, StepKind::Decode][(number % 3) as usize],
            dispatch: match number % 4 {
                0 => Dispatch::Eager,
                1 => Dispatch::Fallback,
                _ => Dispatch::Graph { rows: few.wrapping_add(3) },
            },
            uploaded_bytes: number << 20,
            busy: Duration::from_nanos(number),
            plan: span(0),
            launch: span(2),
            collect: span(4),
            device: (!number.is_multiple_of(5)).then(|| span(6)),
            landed_at: (!number.is_multiple_of(7)).then(|| at(8)),
        }
    }

    #[test]
    fn records_come_back_as_they_went_in_and_the_oldest_are_overwritten() {
        let origin = Instant::now();
        let mut writer = StepWriter::new(4, origin);
        let mut reader = writer.reader();
        assert_eq!(reader.next(), None);
        for number in 0..3 {
            writer.push(&record(origin, number));
        }
        assert_eq!(reader.next(), Some(record(origin, 0)));
        for number in 3..9 {
            writer.push(&record(origin, number));
        }
        let rest: Vec<_> = reader.by_ref().collect();
        assert_eq!(rest, (5..9).map(|number| record(origin, number)).collect::<Vec<_>>());
        assert_eq!((reader.missed(), reader.next()), (4, None));
        let mut newcomer = writer.reader();
        assert_eq!((newcomer.by_ref().count(), newcomer.missed()), (4, 0));
    }

    #[test]
    fn a_graph_of_more_rows_than_the_step_has_is_padded() {
        let origin = Instant::now();
        let padded = |dispatch| StepRecord { rows: 5, dispatch, ..record(origin, 0) };
        assert_eq!(padded(Dispatch::Graph { rows: 8 }).padding_rows(), 3);
        assert_eq!(padded(Dispatch::Fallback).padding_rows(), 0);
    }

    /// Readers race a writer that goes round a small ring all the time.
    #[test]
    fn no_reader_sees_halves_of_two_records() {
        const RECORDS: u64 = 300_000;
        let origin = Instant::now();
        let mut writer = StepWriter::new(2, origin);
        let stopped = AtomicBool::new(false);
        thread::scope(|scope| {
            let readers: Vec<_> = (0..3)
                .map(|_| {
                    let (mut reader, stopped) = (writer.reader(), &stopped);
                    scope.spawn(move || {
                        let (mut seen, mut last) = (0, None);
                        loop {
                            let is_last = stopped.load(Ordering::Acquire);
                            for found in reader.by_ref() {
                                assert_eq!(found, record(origin, found.step_id));
                                assert!(last < Some(found.step_id), "in their order");
                                last = Some(found.step_id);
                                seen += 1;
                            }
                            if is_last {
                                return (seen, reader.missed(), last);
                            }
                        }
                    })
                })
                .collect();
            for number in 0..RECORDS {
                writer.push(&record(origin, number));
                // Lets readers in on a machine with one core.
                if number % 1024 == 0 {
                    thread::yield_now();
                }
            }
            stopped.store(true, Ordering::Release);
            for reader in readers {
                let (seen, missed, last) = reader.join().unwrap();
                assert_eq!((seen + missed, last), (RECORDS, Some(RECORDS - 1)));
            }
        });
    }
}
