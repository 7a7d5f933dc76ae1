//! The last events of a stream, numbered from 0. Pure.

use std::collections::VecDeque;

use bytes::Bytes;

/// Every event ends with an empty line, and has no other one.
const EVENT_END: &[u8] = b"\n\n";

#[derive(Debug, Default)]
pub(super) struct EventLog {
    writes: VecDeque<LoggedWrite>,
    /// Bytes of all writes.
    bytes: usize,
    /// Number of the next event.
    end: u64,
    is_over: bool,
}

/// One or several events.
#[derive(Debug)]
struct LoggedWrite {
    /// Number of the first event.
    first: u64,
    bytes: Bytes,
}

impl EventLog {
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Appends events.
    pub(super) fn push(&mut self, bytes: Bytes) {
        let first = self.end;
        self.end += ends(&bytes).count() as u64;
        self.bytes += bytes.len();
        self.writes.push_back(LoggedWrite { first, bytes });
    }

    /// Marks the end: no event follows.
    pub(super) fn end(&mut self) {
        self.is_over = true;
    }

    /// Returns the numbers of the first event in the log and of the event after the last one.
    pub(super) fn range(&self) -> (u64, u64) {
        (self.writes.front().map_or(self.end, |write| write.first), self.end)
    }

    /// Returns some events from number `from` on, and the number of the event after them; `None` if
    /// there is none yet. Events before `from` must not have been dropped.
    pub(super) fn read(&self, from: u64) -> Option<(Bytes, u64)> {
        let after = self.writes.partition_point(|write| write.first <= from);
        let write = self.writes.get(after.checked_sub(1)?)?;
        let next = self.writes.get(after).map_or(self.end, |following| following.first);
        let skipped = (from - write.first) as usize;
        let begin = match skipped {
            0 => 0,
            count => ends(&write.bytes).nth(count - 1)?,
        };
        (from < next).then(|| (write.bytes.slice(begin..), next))
    }

    /// Returns the bytes of the writes that begin at event `read` or after it.
    pub(super) fn unread_bytes(&self, read: u64) -> usize {
        let unread = self.writes.iter().rev().take_while(|write| write.first >= read);
        unread.map(|write| write.bytes.len()).sum()
    }

    /// Drops the oldest events before number `read`, until at most `read_max` bytes of such events
    /// are left. Returns the freed bytes.
    pub(super) fn drop_read(&mut self, read: u64, read_max: usize) -> usize {
        let before = self.bytes;
        let bytes_max = self.unread_bytes(read) + read_max;
        while self.bytes > bytes_max {
            let next = self.writes.get(1).map_or(self.end, |following| following.first);
            if self.writes.is_empty() || next > read {
                break;
            }
            self.bytes -= self.writes.pop_front().map_or(0, |write| write.bytes.len());
        }
        before - self.bytes
    }
}

/// Returns the offset after each event.
fn ends(bytes: &[u8]) -> impl Iterator<Item = usize> {
    let pairs = bytes.windows(EVENT_END.len()).enumerate();
    pairs.filter(|(_, pair)| *pair == EVENT_END).map(|(at, _)| at + EVENT_END.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(writes: &[&str]) -> EventLog {
        let mut log = EventLog::default();
        for write in writes {
            log.push(Bytes::copy_from_slice(write.as_bytes()));
        }
        log
    }

    fn rest(log: &EventLog, mut from: u64) -> String {
        let mut rest = String::new();
        while let Some((bytes, next)) = log.read(from) {
            rest.push_str(std::str::from_utf8(&bytes).unwrap());
            from = next;
        }
        rest
    }

    #[test]
    fn a_reader_may_begin_at_every_event() {
        let events = ["data: 0\n\n", "data: 1\n\n", "event: x\ndata: 2\n\n", "data: 3\n\n"];
        let log = log(&[&events[..3].concat(), events[3]]);
        for from in 0..=4 {
            assert_eq!(rest(&log, from as u64), events[from..].concat(), "from {from}");
        }
        assert_eq!((log.range(), log.bytes()), ((0, 4), events.concat().len()));
    }

    #[test]
    fn only_events_that_were_read_are_dropped() {
        let mut log = log(&["data: 0\n\ndata: 1\n\n", "data: 2\n\n", "data: 3\n\n"]);
        assert_eq!(log.drop_read(1, 0), 0, "event 1 was not read");
        assert_eq!((log.unread_bytes(1), log.unread_bytes(3)), (18, 9));
        assert_eq!(log.drop_read(3, 9), 18, "events 0 and 1, in one write");
        assert_eq!(log.range(), (2, 4));
        assert_eq!(log.drop_read(4, 0), 18);
        assert_eq!((log.range(), log.bytes(), log.read(4)), ((4, 4), 0, None));
    }
}
