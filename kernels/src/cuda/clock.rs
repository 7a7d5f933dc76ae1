//! Converts GPU event times to the host's clock.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    context::{Context, Event, Stream, StreamRole},
    error::CudaError,
};

/// Number of attempts to observe a GPU event at a known host time. The most exact one is used.
const TRIES: usize = 8;
/// Maximum age of the reference event in ms. `cuEventElapsedTime` returns an `f32` in ms, which is
/// exact to 0.5 µs up to this age.
const REFERENCE_AGE_MAX_MS: f32 = 4000.0;

/// Converter of timed events to host time. An event's host time is that of a reference event plus
/// the GPU time between the two events. [`DeviceClock::span`] replaces a reference that is too old.
#[derive(Debug)]
pub struct DeviceClock {
    reference: Event,
    host: HostTime,
}

impl DeviceClock {
    /// Creates the clock. Blocks until the stream is idle, several times, so it is called at start
    /// only.
    pub fn start<R: StreamRole>(
        context: &Arc<Context>,
        stream: &Stream<R>,
    ) -> Result<Self, CudaError> {
        let mut best: Option<(Duration, Event, Instant)> = None;
        for _ in 0..TRIES {
            let event = Event::timed(context)?;
            stream.synchronize()?;
            let before = Instant::now();
            event.record(stream)?;
            event.synchronize()?;
            let elapsed = before.elapsed();
            if best.as_ref().is_none_or(|(shortest, ..)| elapsed < *shortest) {
                best = Some((elapsed, event, before + elapsed / 2));
            }
        }
        let (_, reference, at) = best.expect("there was at least one attempt");
        Ok(Self { reference, host: HostTime { reference: at } })
    }

    /// Returns the time between two completed events.
    pub fn between(begin: &Event, end: &Event) -> Result<Duration, CudaError> {
        Ok(from_ms(end.milliseconds_since(begin)?))
    }

    /// Returns the host times of two completed events, `begin` and `end`. The work between them
    /// began at `launched_at` or later, and ended at `seen_at` or earlier. These bounds correct
    /// clock drift. If the reference event is too old, `end` becomes the reference, and the old
    /// reference is left in `end`.
    pub fn span(
        &mut self,
        begin: &Event,
        end: &mut Event,
        launched_at: Instant,
        seen_at: Instant,
    ) -> Result<(Instant, Instant), CudaError> {
        let busy = Self::between(begin, end)?;
        let since = end.milliseconds_since(&self.reference)?;
        let ended_at = self.host.end_time(from_ms(since), busy, launched_at, seen_at);
        if since > REFERENCE_AGE_MAX_MS {
            std::mem::swap(&mut self.reference, end);
            self.host.reference = ended_at;
        }
        Ok((ended_at.checked_sub(busy).unwrap_or(launched_at), ended_at))
    }
}

/// Host time of the reference event.
#[derive(Debug)]
struct HostTime {
    reference: Instant,
}

impl HostTime {
    /// Returns the host time at which work ended: `since` after the reference event, but at least
    /// `busy` after `launched_at`, and at most `seen_at`. If a bound applies, the host time of the
    /// reference event moves by the same amount.
    fn end_time(
        &mut self,
        since: Duration,
        busy: Duration,
        launched_at: Instant,
        seen_at: Instant,
    ) -> Instant {
        let mut ended_at = self.reference + since;
        ended_at += (launched_at + busy).saturating_duration_since(ended_at);
        // `seen_at` overrules the other bound: the GPU may stall between the two events that
        // measure `busy`.
        ended_at = ended_at.min(seen_at);
        self.reference = ended_at.checked_sub(since).unwrap_or(self.reference);
        ended_at
    }
}

fn from_ms(milliseconds: f32) -> Duration {
    Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(microseconds: u64) -> Duration {
        Duration::from_micros(microseconds)
    }

    #[test]
    fn device_span_is_bounded_by_launch_and_observation() {
        let start = Instant::now();
        let mut host = HostTime { reference: start };
        let mut end_time = |since, launched, seen| {
            let ended = host.end_time(us(since), us(100), start + us(launched), start + us(seen));
            (ended - start, host.reference.saturating_duration_since(start))
        };
        assert_eq!(end_time(1000, 10, 2000), (us(1000), us(0)));
        // By the GPU's clock the work began before its launch, so this clock is slow.
        assert_eq!(end_time(2000, 1930, 4000), (us(2030), us(30)));
        assert_eq!(end_time(3000, 100, 4000), (us(3030), us(30)));
        // By the GPU's clock the work ended after the host saw its end, so this clock is fast.
        assert_eq!(end_time(4000, 100, 4010), (us(4010), us(10)));
        assert_eq!(end_time(5000, 100, 6000), (us(5010), us(10)));
    }
}
