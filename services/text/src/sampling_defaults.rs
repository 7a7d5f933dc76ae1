//! Sampling defaults of a model's authors, for requests without their own parameters.

use std::ops::RangeInclusive;

/// Defaults of the model (`generation_config.json`, or `general.sampling.*` in GGUF); `None` where the
/// model has none. Every number is within the limits of requests.
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

/// Key, and the error of its value.
pub(crate) type BadDefault = (&'static str, String);

impl UncheckedDefaults {
    pub fn check(self) -> Result<SamplingDefaults, BadDefault> {
        let number = |(key, value), allowed: RangeInclusive<f64>| {
            Ok::<_, BadDefault>(within(key, value, allowed)?.map(|value| value as f32))
        };
        let top_k = within(self.top_k.0, self.top_k.1, -1.0..=f64::from(i32::MAX))?;
        if let Some(top_k) = top_k.filter(|top_k| top_k.fract() != 0.0) {
            return Err((self.top_k.0, format!("is {top_k}; allowed: whole numbers")));
        }
        Ok(SamplingDefaults {
            temperature: number(self.temperature, 0.0..=2.0)?,
            // -1 becomes 0.
            top_k: top_k.map(|top_k| top_k as u32),
            // 0 would keep no token.
            top_p: number(self.top_p, 1e-6..=1.0)?,
            min_p: number(self.min_p, 0.0..=1.0)?,
            repetition_penalty: number(self.repetition_penalty, 0.01..=100.0)?,
        })
    }
}

fn within(
    key: &'static str,
    value: Option<f64>,
    allowed: RangeInclusive<f64>,
) -> Result<Option<f64>, BadDefault> {
    match value {
        Some(value) if !allowed.contains(&value) => {
            let (least, most) = allowed.into_inner();
            Err((key, format!("is {value}; allowed: {least} to {most}")))
        }
        value => Ok(value),
    }
}
