//! The shared-memory ring: order, no loss, slow and dead readers, deadlines, wrapping, long
//! messages, and corrupted contents.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use kernels::shared::{RegionName, SharedRegion};
use ranks::ring::{
    Bell, LINE, MESSAGE_BYTES_MAX, RingError, RingMemory, RingReader, RingShape, RingWriter,
};

const WITHIN: Duration = Duration::from_secs(60);
const NO_SPIN: Duration = Duration::ZERO;
const BELLS: usize = 2 * Bell::BYTES;
const SEED: u64 = 11;

struct Ring {
    region: Arc<SharedRegion>,
    shape: RingShape,
    _folder: tempfile::TempDir,
}

impl Ring {
    fn new(slots: usize, slot_bytes: usize, readers: usize) -> Self {
        let shape = RingShape { slots, slot_bytes, readers };
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let name = RegionName::own(1, "test");
        let region = SharedRegion::create_in(folder.path(), &name, BELLS + shape.bytes()).unwrap();
        Self { region, shape, _folder: folder }
    }

    fn memory(&self, seed: u64) -> RingMemory {
        let bells = (Bell::new(&self.region, 0), Bell::new(&self.region, Bell::BYTES));
        RingMemory::new(&self.region, BELLS, self.shape, bells, seed)
    }

    fn writer(&self) -> RingWriter {
        RingWriter::new(self.memory(SEED))
    }

    fn reader(&self, reader: usize) -> RingReader {
        RingReader::new(self.memory(SEED), reader)
    }
}

/// Returns message `number` of this length, distinct from all other messages.
fn message(number: usize, length: usize) -> Vec<u8> {
    (0..length).map(|at| (number * 31 + at * 7 + at / 256) as u8).collect()
}

fn write(writer: &mut RingWriter, message: &[u8]) {
    writer.write(message, WITHIN, || false).unwrap();
}

fn read(reader: &mut RingReader) -> Vec<u8> {
    reader.read(WITHIN, NO_SPIN).unwrap().expect("the message arrives in time").to_vec()
}

#[test]
fn every_reader_gets_every_message_in_order_of_any_length_and_around_the_ring() {
    let ring = Ring::new(4, 192, 3);
    let mut writer = ring.writer();
    let mut readers: Vec<_> = (0..3).map(|reader| ring.reader(reader)).collect();
    // A part holds 160 bytes, and the ring holds four parts.
    for (number, length) in (0..500).flat_map(|at| [0, 1, 159, 160, 161, 640, at]).enumerate() {
        let sent = message(number, length);
        write(&mut writer, &sent);
        for reader in &mut readers {
            assert_eq!(reader.poll().unwrap(), Some(&sent[..]), "message {number}");
            assert_eq!(reader.poll().unwrap(), None);
        }
    }
}

#[test]
fn readers_of_any_speed_lose_nothing_and_long_messages_pass_through_a_small_ring() {
    let ring = Ring::new(8, 192, 4);
    let sent: Vec<Vec<u8>> = (0..3_000)
        .map(|number| message(number, if number % 97 == 0 { 20_000 } else { number % 400 }))
        .collect();
    thread::scope(|scope| {
        for reader in 0..4 {
            let (mut end, sent) = (ring.reader(reader), &sent);
            scope.spawn(move || {
                for (number, expected) in sent.iter().enumerate() {
                    // Each reader pauses at other messages.
                    if number % 257 == reader * 13 {
                        thread::sleep(Duration::from_millis(3));
                    }
                    let spin = Duration::from_micros((number % 3) as u64 * 10);
                    let read = end.read(WITHIN, spin).unwrap();
                    assert!(read == Some(&expected[..]), "reader {reader}, {number}");
                }
                assert_eq!(end.poll().unwrap(), None);
            });
        }
        let mut writer = ring.writer();
        sent.iter().for_each(|message| write(&mut writer, message));
    });
}

#[test]
fn a_reader_that_has_stopped_stops_the_writer_in_time_and_nothing_is_overwritten() {
    let ring = Ring::new(4, 128, 2);
    let (mut writer, mut quick, mut dead) = (ring.writer(), ring.reader(0), ring.reader(1));
    for number in 0..4 {
        write(&mut writer, &[number; 8]);
        assert_eq!(read(&mut quick), [number; 8]);
    }
    let within = Duration::from_millis(50);
    let error = writer.write(&[4; 8], within, || false).unwrap_err();
    let RingError::Slow { reader: 1, parts: 4, waited } = error else { panic!("{error}") };
    assert!(waited >= within);
    assert!(error.to_string().starts_with("reader 1 has not read 4 parts for "), "{error}");
    // The reader was only slow. It has lost no message.
    for number in 0..4 {
        assert_eq!(read(&mut dead), [number; 8]);
    }
    write(&mut writer, &[4; 8]);
    assert_eq!((read(&mut quick), read(&mut dead)), (vec![4; 8], vec![4; 8]));
}

#[test]
fn a_writer_stops_waiting_when_its_group_has_ended() {
    let ring = Ring::new(1, 128, 1);
    let mut writer = ring.writer();
    write(&mut writer, b"unread");
    let gone = AtomicBool::new(false);
    let taken = Bell::new(&ring.region, Bell::BYTES);
    thread::scope(|scope| {
        let waiting =
            scope.spawn(|| writer.write(b"more", WITHIN, || gone.load(Ordering::Acquire)));
        gone.store(true, Ordering::Release);
        taken.ring();
        assert_eq!(waiting.join().unwrap(), Err(RingError::GivenUp));
    });
}

#[test]
fn a_reader_times_out_without_a_message_and_is_woken_by_one() {
    let ring = Ring::new(4, 128, 1);
    let (mut writer, mut reader) = (ring.writer(), ring.reader(0));
    assert_eq!(reader.read(Duration::from_millis(5), NO_SPIN), Ok(None));
    for _ in 0..200 {
        thread::scope(|scope| {
            let asleep = scope.spawn(|| read(&mut reader));
            write(&mut writer, b"wake");
            assert_eq!(asleep.join().unwrap(), b"wake");
        });
    }
}

#[test]
fn oversized_messages_are_rejected() {
    let ring = Ring::new(4, 128, 1);
    let error = ring.writer().write(&vec![0; MESSAGE_BYTES_MAX + 1], WITHIN, || false);
    assert_eq!(error, Err(RingError::TooLong { bytes: MESSAGE_BYTES_MAX + 1 }));
}

/// Corrupts every number in the ring, one at a time. Each corruption is detected or harmless, and
/// nothing panics.
#[test]
fn corrupted_ring_contents_are_detected_or_harmless() {
    let sent = message(5, 300);
    let probe = Ring::new(4, 192, 1);
    let longs = probe.shape.bytes() / 8;
    let mut found = 0;
    for at in 0..longs {
        for flipped in [1_u64, 1 << 40, u64::MAX] {
            let ring = Ring::new(4, 192, 1);
            let (mut writer, mut reader) = (ring.writer(), ring.reader(0));
            write(&mut writer, &sent);
            ring.region.longs(BELLS, longs)[at].fetch_xor(flipped, Ordering::Relaxed);
            match reader.poll() {
                Ok(Some(read)) => assert_eq!(read, sent),
                // The sequence number went back, so the message looks as if it was not written yet.
                Ok(None) => {
                    assert_eq!((at, flipped), (LINE / 8, 1), "the message is lost without an error")
                }
                Err(RingError::Damaged { .. }) => found += 1,
                Err(other) => panic!("{other}"),
            }
            // The writer checks the cursors when it needs room.
            let _ = writer.write(&message(6, 700), Duration::from_millis(1), || false);
        }
    }
    assert!(found > 3 * 300 / 8, "{found}");
}

#[test]
fn slots_of_another_ring_are_rejected() {
    let ring = Ring::new(4, 128, 1);
    write(&mut ring.writer(), b"of a former life");
    let mut reader = RingReader::new(ring.memory(SEED + 1), 0);
    assert!(matches!(reader.poll(), Err(RingError::Damaged { part: 0, .. })));
}

#[test]
fn an_invalid_reader_cursor_is_detected_by_the_writer() {
    let ring = Ring::new(1, 128, 1);
    let mut writer = ring.writer();
    write(&mut writer, b"one");
    ring.region.longs(BELLS, 1)[0].store(7, Ordering::Relaxed);
    let error = writer.write(b"two", WITHIN, || false).unwrap_err();
    assert!(matches!(error, RingError::Damaged { part: 7, .. }), "{error}");
}
