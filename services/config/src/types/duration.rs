//! Durations as text: a whole number and one unit.

use std::time::Duration;

/// Units in microseconds, largest first: a duration is shown in the first unit that divides it.
const UNITS: [(&str, u64); 5] =
    [("h", 3_600_000_000), ("m", 60_000_000), ("s", 1_000_000), ("ms", 1_000), ("us", 1)];

/// Parses `2s`, `500ms`, `10m`, `1h` or `250us`. A number without a unit is invalid.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let count: u64 = text[..digits].parse().ok()?;
    let unit = text[digits..].trim_start();
    let (_, micros) = UNITS.iter().find(|(name, _)| *name == unit)?;
    count.checked_mul(*micros).map(Duration::from_micros)
}

/// Returns the shortest text that parses to the same duration, to the microsecond.
pub fn format_duration(duration: Duration) -> String {
    let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
    let (unit, factor) = UNITS
        .iter()
        .find(|(_, factor)| micros >= *factor && micros.is_multiple_of(*factor))
        .unwrap_or(&("ms", 1_000));
    format!("{}{unit}", micros / factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_in_every_unit() {
        for (text, micros) in [
            ("0s", 0),
            ("250us", 250),
            ("500ms", 500_000),
            ("2s", 2_000_000),
            ("10 m", 600_000_000),
        ] {
            assert_eq!(parse_duration(text), Some(Duration::from_micros(micros)), "{text}");
        }
        assert_eq!(parse_duration("1h"), Some(Duration::from_secs(3600)));
    }

    #[test]
    fn invalid_durations_are_rejected() {
        for text in ["", "5", "s", "-1s", "1.5s", "2 weeks", "99999999999999999h"] {
            assert_eq!(parse_duration(text), None, "{text}");
        }
    }

    #[test]
    fn durations_round_trip() {
        for micros in [0, 1, 999, 1_000, 1_500_000, 60_000_000, 5_400_000_000] {
            let duration = Duration::from_micros(micros);
            let shown = format_duration(duration);
            assert_eq!(parse_duration(&shown), Some(duration), "{shown}");
        }
    }
}
