//! Lengths in tokens, fixed or drawn.

use std::fmt;

use serde::Serialize;

use crate::bench::stats::WorkloadRng;

const TOKENS_MAX: u32 = 1_000_000;

/// Length of a prompt or an answer in tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Length {
    /// Uniform, both ends included.
    Uniform { low: u32, high: u32 },
    /// Normal distribution, at least 1.
    Normal { mean: f64, deviation: f64 },
    /// Log-normal distribution; `sigma` is the deviation of the logarithm.
    LogNormal { median: f64, sigma: f64 },
}

impl Length {
    /// Parses `N`, `LOW..HIGH`, `normal:MEAN:DEVIATION` or `lognormal:MEDIAN:SIGMA`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split(':').collect();
        match parts[..] {
            ["normal", mean, deviation] => Ok(Self::Normal {
                mean: number(mean, 1.0, TOKENS_MAX.into())?,
                deviation: number(deviation, 0.0, TOKENS_MAX.into())?,
            }),
            ["lognormal", median, sigma] => Ok(Self::LogNormal {
                median: number(median, 1.0, TOKENS_MAX.into())?,
                sigma: number(sigma, 0.0, 4.0)?,
            }),
            [range] => {
                let (low, high) = range.split_once("..").unwrap_or((range, range));
                let (low, high) = (tokens(low)?, tokens(high)?);
                if low > high {
                    return Err(format!("invalid range {text:?}; expected LOW <= HIGH"));
                }
                Ok(Self::Uniform { low, high })
            }
            _ => Err(format!(
                "invalid length {text:?}; expected N, LOW..HIGH, normal:MEAN:DEVIATION or lognormal:MEDIAN:SIGMA"
            )),
        }
    }

    /// Draws a length from 1 to `longest`.
    pub(super) fn draw(&self, rng: &mut WorkloadRng, longest: u32) -> u32 {
        let drawn = match *self {
            Self::Uniform { low, high } => return rng.within(low, high).min(longest),
            Self::Normal { mean, deviation } => mean + deviation * rng.normal(),
            Self::LogNormal { median, sigma } => median * (sigma * rng.normal()).exp(),
        };
        // The cast saturates.
        (drawn.round() as u32).clamp(1, longest)
    }
}

impl fmt::Display for Length {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform { low, high } if low == high => write!(f, "{low}"),
            Self::Uniform { low, high } => write!(f, "{low}..{high}"),
            Self::Normal { mean, deviation } => write!(f, "normal:{mean}:{deviation}"),
            Self::LogNormal { median, sigma } => write!(f, "lognormal:{median}:{sigma}"),
        }
    }
}

impl Serialize for Length {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

fn tokens(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(tokens) if (1..=TOKENS_MAX).contains(&tokens) => Ok(tokens),
        _ => Err(format!("invalid number of tokens {text:?}; expected 1 to {TOKENS_MAX}")),
    }
}

fn number(text: &str, low: f64, high: f64) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (low..=high).contains(&number) => Ok(number),
        _ => Err(format!("invalid number {text:?}; expected {low} to {high}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_lengths_parse_to_the_same_length() {
        for text in ["128", "16..512", "normal:200:50", "lognormal:98:1.5"] {
            assert_eq!(Length::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Length::parse("7..7"), Ok(Length::Uniform { low: 7, high: 7 }));
    }

    #[test]
    fn invalid_lengths_are_rejected() {
        let refused = [
            "",
            "0",
            "512..16",
            "-1",
            "a..b",
            "1..2..3",
            "normal:5",
            "normal:0:1",
            "normal:5:-1",
            "lognormal:5:9",
            "lognormal:nan:1",
            "normal:5:inf",
            "uniform:1:2",
            "1:2",
        ];
        for text in refused {
            assert!(Length::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn draws_have_the_requested_distribution() {
        let mut rng = WorkloadRng::new(3);
        let mut draw = |length: &str| {
            let length = Length::parse(length).unwrap();
            let mut drawn: Vec<u32> = (0..4001).map(|_| length.draw(&mut rng, 5000)).collect();
            drawn.sort_unstable();
            drawn
        };
        let normal = draw("normal:300:30");
        assert!((295..305).contains(&normal[2000]), "{}", normal[2000]);
        // One deviation: 84 % lie below.
        assert!((325..335).contains(&normal[3366]), "{}", normal[3366]);
        let lognormal = draw("lognormal:100:1");
        assert!((90..110).contains(&lognormal[2000]), "{}", lognormal[2000]);
        assert!((245..300).contains(&lognormal[3366]), "{}", lognormal[3366]);
        assert!(lognormal.iter().all(|tokens| (1..=5000).contains(tokens)));
        assert!(draw("4000..6000").iter().all(|tokens| (4000..=5000).contains(tokens)));
    }
}
