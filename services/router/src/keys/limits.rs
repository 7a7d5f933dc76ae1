//! Limits of one API key. Pure: no clock.

use std::time::{Duration, Instant};

use telemetry::metrics::KeyLimit;

use crate::request::error::RETRY_AFTER_S;

/// Rounding errors of [`MinuteUse`], far below one request or token.
const ROUNDING: f64 = 1e-6;

/// Limits of a key; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KeyLimits {
    pub requests_per_minute: Option<u32>,
    /// Prompt and completion tokens.
    pub tokens_per_minute: Option<u32>,
    /// Maximum number of answers in flight, and of request bodies that take long.
    pub streams_max: Option<u32>,
}

/// A key has reached one of its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the API key allows {max} {}; retry after {} s", unit(*limit), self.retry_after_s())]
pub(crate) struct LimitExceeded {
    pub limit: KeyLimit,
    pub max: u32,
    /// Time until the key may send a request again.
    pub retry_after: Duration,
}

impl LimitExceeded {
    /// Returns the time in whole seconds, rounded up.
    pub(crate) fn retry_after_s(&self) -> u32 {
        let seconds = self.retry_after.as_secs_f64().ceil();
        (seconds as u32).max(RETRY_AFTER_S)
    }
}

fn unit(limit: KeyLimit) -> &'static str {
    match limit {
        KeyLimit::Requests => "requests per minute",
        KeyLimit::Tokens => "tokens per minute",
        KeyLimit::Streams => "streams at a time",
    }
}

/// Use of the limits of one key.
#[derive(Debug, Default)]
pub(super) struct KeyUsage {
    requests: MinuteUse,
    tokens: MinuteUse,
    streams: u32,
}

impl KeyUsage {
    /// Counts a request, unless the key has used up a limit per minute.
    pub(super) fn request(
        &mut self,
        limits: &KeyLimits,
        now: Instant,
    ) -> Result<(), LimitExceeded> {
        for (limit, used, max) in [
            (KeyLimit::Requests, &mut self.requests, limits.requests_per_minute),
            (KeyLimit::Tokens, &mut self.tokens, limits.tokens_per_minute),
        ] {
            let Some(max) = max else { continue };
            let retry_after = used.time_until_one_more(max, now);
            if !retry_after.is_zero() {
                return Err(LimitExceeded { limit, max, retry_after });
            }
        }
        // The use of an absent limit does not decay.
        if limits.requests_per_minute.is_some() {
            self.requests.amount += 1.0;
        }
        Ok(())
    }

    /// Counts tokens. The count may exceed the limit: then the key waits until the excess has
    /// decayed.
    pub(super) fn tokens(&mut self, limits: &KeyLimits, count: u32, now: Instant) {
        if let Some(max) = limits.tokens_per_minute {
            self.tokens.decay(max, now);
            self.tokens.amount += f64::from(count);
        }
    }

    /// Counts answers in flight until [`Self::close_streams`].
    pub(super) fn open_streams(
        &mut self,
        limits: &KeyLimits,
        count: u32,
    ) -> Result<(), LimitExceeded> {
        let streams = self.streams.saturating_add(count);
        if let Some(max) = limits.streams_max.filter(|max| streams > *max) {
            // Streams end at times that are not known in advance.
            let retry_after = Duration::from_secs(RETRY_AFTER_S.into());
            return Err(LimitExceeded { limit: KeyLimit::Streams, max, retry_after });
        }
        self.streams = streams;
        Ok(())
    }

    pub(super) fn close_streams(&mut self, count: u32) {
        self.streams -= count;
    }
}

/// The use of a limit per minute. The amount decays by the whole limit in a minute, so an idle key
/// may use the whole limit at once.
#[derive(Debug, Default)]
struct MinuteUse {
    amount: f64,
    since: Option<Instant>,
}

impl MinuteUse {
    fn decay(&mut self, max: u32, now: Instant) {
        let since = self.since.replace(now).unwrap_or(now);
        let decayed = now.saturating_duration_since(since).as_secs_f64() * f64::from(max) / 60.0;
        self.amount = (self.amount - decayed).max(0.0);
    }

    /// Returns the time after which one more fits under the limit.
    fn time_until_one_more(&mut self, max: u32, now: Instant) -> Duration {
        self.decay(max, now);
        let excess = self.amount + 1.0 - f64::from(max);
        match excess > ROUNDING {
            true => Duration::from_secs_f64(excess * 60.0 / f64::from(max)),
            false => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(start: Instant, seconds: f64) -> Instant {
        start + Duration::from_secs_f64(seconds)
    }

    #[test]
    fn requests_beyond_the_limit_fit_after_the_returned_time() {
        let limits = KeyLimits { requests_per_minute: Some(3), ..KeyLimits::default() };
        let (mut usage, start) = (KeyUsage::default(), Instant::now());
        for _ in 0..3 {
            usage.request(&limits, start).unwrap();
        }
        let exceeded = usage.request(&limits, after(start, 5.0)).unwrap_err();
        assert_eq!((exceeded.limit, exceeded.max), (KeyLimit::Requests, 3));
        assert_eq!(exceeded.retry_after_s(), 15);
        assert!(usage.request(&limits, after(start, 19.0)).is_err());
        usage.request(&limits, after(start, 20.0)).unwrap();
        assert_eq!(usage.request(&limits, after(start, 20.0)).unwrap_err().retry_after_s(), 20);
    }

    #[test]
    fn tokens_beyond_the_limit_are_paid_back_before_the_next_request() {
        let limits = KeyLimits { tokens_per_minute: Some(60), ..KeyLimits::default() };
        let (mut usage, start) = (KeyUsage::default(), Instant::now());
        usage.request(&limits, start).unwrap();
        usage.tokens(&limits, 100, start);
        usage.tokens(&limits, 20, start);
        let exceeded = usage.request(&limits, start).unwrap_err();
        assert_eq!((exceeded.limit, exceeded.retry_after_s()), (KeyLimit::Tokens, 61));
        assert!(usage.request(&limits, after(start, 60.0)).is_err());
        usage.request(&limits, after(start, 61.0)).unwrap();
    }

    #[test]
    fn streams_are_limited_while_they_are_open() {
        let limits = KeyLimits { streams_max: Some(2), ..KeyLimits::default() };
        let mut usage = KeyUsage::default();
        usage.open_streams(&limits, 2).unwrap();
        assert_eq!(usage.open_streams(&limits, 1).unwrap_err().limit, KeyLimit::Streams);
        usage.close_streams(1);
        usage.open_streams(&limits, 1).unwrap();
    }

    #[test]
    fn key_without_limits_is_not_limited() {
        let (limits, now) = (KeyLimits::default(), Instant::now());
        let mut usage = KeyUsage::default();
        for _ in 0..1000 {
            usage.request(&limits, now).unwrap();
            usage.tokens(&limits, u32::MAX, now);
            usage.open_streams(&limits, 128).unwrap();
        }
    }

    #[test]
    fn new_limit_does_not_count_earlier_use() {
        let limits = KeyLimits {
            requests_per_minute: Some(2),
            tokens_per_minute: Some(9),
            ..KeyLimits::default()
        };
        let (mut usage, now) = (KeyUsage::default(), Instant::now());
        for _ in 0..1000 {
            usage.request(&KeyLimits::default(), now).unwrap();
            usage.tokens(&KeyLimits::default(), 100, now);
        }
        usage.request(&limits, now).unwrap();
        usage.request(&limits, now).unwrap();
        assert!(usage.request(&limits, now).is_err());
    }

    #[test]
    fn raised_limit_applies_to_earlier_use() {
        let limit = |max| KeyLimits { requests_per_minute: Some(max), ..KeyLimits::default() };
        let (mut usage, now) = (KeyUsage::default(), Instant::now());
        usage.request(&limit(1), now).unwrap();
        assert!(usage.request(&limit(1), now).is_err());
        usage.request(&limit(2), now).unwrap();
        assert!(usage.request(&limit(2), now).is_err());
    }
}
