//! The GPU's time on the host's clock.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    context::{Context, Event, Role, Stream},
    error::CudaError,
};

/// Tries to see an event of the GPU at a known moment.
const TRIES: usize = 8;
/// A difference of events is an `f32` of milliseconds: up to here it is exact to half a microsecond.
const REFERENCE_AGE_MAX_MS: f32 = 4000.0;

/// Puts the moments of timed events on the host's clock, by their distance to one event that was seen
/// from both sides at the start.
#[derive(Debug)]
pub struct DeviceClock {
    reference: Event,
    host: HostTime,
}

impl DeviceClock {
    /// Waits for the stream a few times: for the start.
    pub fn start<R: Role>(context: &Arc<Context>, stream: &Stream<R>) -> Result<Self, CudaError> {
        let mut best: Option<(Duration, Event, Instant)> = None;
        for _ in 0..TRIES {
            let event = Event::timed(context)?;
            stream.synchronize()?;
            let before = Instant::now();
            event.record(stream)?;
            event.synchronize()?;
            let between = before.elapsed();
            if best.as_ref().is_none_or(|(shortest, ..)| between < *shortest) {
                best = Some((between, event, before + between / 2));
            }
        }
        let (_, reference, at) = best.expect("it was tried");
        Ok(Self { reference, host: HostTime { reference: at } })
    }

    /// From `begin` to `end`, both done. Work that was given to the GPU at `launched_at` begins after
    /// that, and ends before `seen_at`: so the two clocks do not drift apart. `end` may be exchanged
    /// for another event.
    pub fn span(
        &mut self,
        begin: &Event,
        end: &mut Event,
        launched_at: Instant,
        seen_at: Instant,
    ) -> Result<(Instant, Instant), CudaError> {
        let busy = milliseconds(end.milliseconds_since(begin)?);
        let since = end.milliseconds_since(&self.reference)?;
        let ended_at = self.host.place(milliseconds(since), busy, launched_at, seen_at);
        if since > REFERENCE_AGE_MAX_MS {
            std::mem::swap(&mut self.reference, end);
            self.host.reference = ended_at;
        }
        Ok((ended_at.checked_sub(busy).unwrap_or(launched_at), ended_at))
    }
}

/// When the reference was on the host's clock.
#[derive(Debug)]
struct HostTime {
    reference: Instant,
}

impl HostTime {
    /// The end of work, so long after the reference. Where cause and effect disagree with it, the
    /// reference moves.
    fn place(
        &mut self,
        since: Duration,
        busy: Duration,
        launched_at: Instant,
        seen_at: Instant,
    ) -> Instant {
        let mut ended_at = self.reference + since;
        ended_at += (launched_at + busy).saturating_duration_since(ended_at);
        // What the host has seen is the surer of the two: between the GPU's two marks it may wait.
        ended_at = ended_at.min(seen_at);
        self.reference = ended_at.checked_sub(since).unwrap_or(self.reference);
        ended_at
    }
}

fn milliseconds(milliseconds: f32) -> Duration {
    Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(microseconds: u64) -> Duration {
        Duration::from_micros(microseconds)
    }

    #[test]
    fn work_lies_where_the_reference_says_unless_that_cannot_be() {
        let start = Instant::now();
        let mut host = HostTime { reference: start };
        let mut place = |since, launched, seen| {
            let ended = host.place(us(since), us(100), start + us(launched), start + us(seen));
            (ended - start, host.reference.saturating_duration_since(start))
        };
        assert_eq!(place(1000, 10, 2000), (us(1000), us(0)));
        // Begun before it was launched: the GPU's clock is slow.
        assert_eq!(place(2000, 1930, 4000), (us(2030), us(30)));
        assert_eq!(place(3000, 100, 4000), (us(3030), us(30)));
        // Seen before it was done: it is fast.
        assert_eq!(place(4000, 100, 4010), (us(4010), us(10)));
        assert_eq!(place(5000, 100, 6000), (us(5010), us(10)));
    }
}
