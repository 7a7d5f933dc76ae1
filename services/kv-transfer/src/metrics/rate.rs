//! The rate at which chunks arrive from a peer.

use std::time::{Duration, Instant};

/// Minimum bytes of a period that is measured. Latency dominates the duration of shorter periods.
const MEASURED_BYTES_MIN: u64 = 1 << 20;

/// Measures the rate over periods in which at least one chunk is always in flight, so that pauses
/// of the sender do not count.
#[derive(Debug, Default)]
pub(super) struct ReceiveRate {
    in_flight: u32,
    /// Start of the current period.
    since: Option<Instant>,
    /// Bytes that have arrived in the current period.
    bytes: u64,
    /// Rate of the last period that was measured, in bytes/s.
    pub last: u64,
}

impl ReceiveRate {
    pub(super) fn probed(&mut self, rate: u64) {
        self.last = rate;
    }

    pub(super) fn began(&mut self, now: Instant) {
        self.in_flight += 1;
        if self.since.is_none() {
            (self.since, self.bytes) = (Some(now), 0);
        }
    }

    pub(super) fn ended(&mut self, now: Instant, bytes: u64) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.bytes += bytes;
        if self.in_flight > 0 {
            return;
        }
        let took = self.since.take().map_or(Duration::ZERO, |since| now.duration_since(since));
        if self.bytes >= MEASURED_BYTES_MIN && !took.is_zero() {
            self.last = (self.bytes as f64 / took.as_secs_f64()) as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_excludes_pauses_and_short_periods() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut rate = ReceiveRate::default();
        // Two chunks overlap: 16 MiB in 4 ms.
        rate.began(at(0));
        rate.began(at(2));
        rate.ended(at(3), 8 << 20);
        assert_eq!(rate.last, 0, "the period has not ended");
        rate.ended(at(4), 8 << 20);
        assert_eq!(rate.last, (16 << 20) * 250);
        // After a pause: 8 MiB in 1 ms.
        rate.began(at(1000));
        rate.ended(at(1001), 8 << 20);
        assert_eq!(rate.last, (8 << 20) * 1000);
        // A small chunk, and a failed one, are not measured.
        rate.began(at(2000));
        rate.ended(at(2001), 1);
        rate.began(at(3000));
        rate.ended(at(3001), 0);
        assert_eq!(rate.last, (8 << 20) * 1000);
        rate.probed(7);
        assert_eq!(rate.last, 7);
    }
}
