//! Sampling defaults of a model's authors, for requests without their own parameters.

use std::{ops::RangeInclusive, path::Path};

/// Defaults of the model (`generation_config.json`, or `general.sampling.*` in GGUF); `None` where
/// the model has none. Every number is within the limits of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    pub temperature: Option<f32>,
    /// 0 keeps every token.
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

/// Numbers of a file, each with its key.
#[derive(Debug)]
pub(crate) struct UncheckedDefaults {
    pub temperature: (&'static str, Option<f64>),
    pub top_k: (&'static str, Option<f64>),
    pub top_p: (&'static str, Option<f64>),
    pub min_p: (&'static str, Option<f64>),
    pub repetition_penalty: (&'static str, Option<f64>),
}

impl UncheckedDefaults {
    /// Returns the numbers that requests may have. Logs and ignores any other number of `file`:
    /// other servers load the model.
    pub(crate) fn check(self, file: &Path) -> SamplingDefaults {
        let (defaults, ignored) = self.split();
        for problem in ignored {
            tracing::warn!("ignoring a sampling default of {}: {problem}", file.display());
        }
        defaults
    }

    /// Returns the numbers that requests may have, and the problems of the others.
    fn split(self) -> (SamplingDefaults, Vec<String>) {
        let mut ignored = Vec::new();
        let mut number = |(key, value): (&str, Option<f64>), allowed: RangeInclusive<f64>| {
            value.filter(|value| {
                let (is_allowed, (min, max)) = (allowed.contains(value), allowed.into_inner());
                if !is_allowed {
                    ignored.push(format!("{key} is {value}; expected {min} to {max}"));
                }
                is_allowed
            })
        };
        let temperature = number(self.temperature, 0.0..=2.0);
        // 0 would keep no token.
        let top_p = number(self.top_p, 1e-6..=1.0);
        let min_p = number(self.min_p, 0.0..=1.0);
        let repetition_penalty = number(self.repetition_penalty, 0.01..=100.0);
        let top_k = number(self.top_k, -1.0..=f64::from(i32::MAX)).filter(|top_k| {
            let is_whole = top_k.fract() == 0.0;
            if !is_whole {
                ignored.push(format!("{} is {top_k}; expected a whole number", self.top_k.0));
            }
            is_whole
        });
        let defaults = SamplingDefaults {
            temperature: temperature.map(|value| value as f32),
            // -1 becomes 0.
            top_k: top_k.map(|value| value as u32),
            top_p: top_p.map(|value| value as f32),
            min_p: min_p.map(|value| value as f32),
            repetition_penalty: repetition_penalty.map(|value| value as f32),
        };
        (defaults, ignored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_requests_may_not_have_are_ignored_with_key_and_value() {
        let unchecked = UncheckedDefaults {
            temperature: ("temperature", Some(3.0)),
            top_k: ("top_k", Some(1.5)),
            top_p: ("top_p", Some(0.0)),
            min_p: ("min_p", Some(0.1)),
            repetition_penalty: ("repetition_penalty", Some(f64::NAN)),
        };
        let (defaults, ignored) = unchecked.split();
        assert_eq!(defaults, SamplingDefaults { min_p: Some(0.1), ..Default::default() });
        let expected = [
            "temperature is 3; expected 0 to 2",
            "top_p is 0; expected 0.000001 to 1",
            "repetition_penalty is NaN; expected 0.01 to 100",
            "top_k is 1.5; expected a whole number",
        ];
        assert_eq!(ignored, expected);
    }
}
