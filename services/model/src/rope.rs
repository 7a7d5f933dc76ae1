//! Rope frequencies, computed as in transformers: in f32, with the same operations.

use std::f32::consts::PI;

/// RoPE scaling for contexts longer than the original training context.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// All frequencies are divided by `factor`.
    Linear {
        factor: f32,
    },
    /// Frequencies of long wavelengths are divided by `factor`, those of short ones are kept, and
    /// those between are interpolated.
    Llama3 {
        factor: f32,
        low_frequency_factor: f32,
        high_frequency_factor: f32,
        original_context_tokens: f32,
    },
    /// Frequencies of pairs with few rotations within the original context are divided by `factor`.
    /// Frequencies of pairs with many rotations are kept, and those between are interpolated by the
    /// index of the pair.
    Yarn {
        factor: f32,
        /// Minimum number of rotations within the original context at which a frequency is kept.
        fast_rotations: f32,
        /// Maximum number of rotations at which a frequency is divided by the whole `factor`.
        slow_rotations: f32,
        original_context_tokens: f32,
        /// Whether the bounds of the interpolation are rounded to whole pairs.
        has_whole_bounds: bool,
    },
    /// Each frequency is divided by its own divisor (`rotary_dim / 2` of them): GGUF's
    /// `rope_freqs`, and LongRoPE.
    Divisors(Vec<f32>),
}

/// Returns the radians per position of each of the `rotary_dim / 2` pairs.
pub(crate) fn frequencies(theta: f32, rotary_dim: usize, scaling: &RopeScaling) -> Vec<f32> {
    let plain = (0..rotary_dim / 2).map(|pair| {
        let exponent = (2 * pair) as f32 / rotary_dim as f32;
        // The power is computed in f64 and rounded once: within one ulp of every f32 library's
        // result.
        1.0 / f64::from(theta).powf(f64::from(exponent)) as f32
    });
    match scaling {
        RopeScaling::None => plain.collect(),
        RopeScaling::Linear { factor } => plain.map(|frequency| frequency / factor).collect(),
        RopeScaling::Divisors(divisors) => {
            plain.zip(divisors).map(|(frequency, divisor)| frequency / divisor).collect()
        }
        &RopeScaling::Yarn {
            factor,
            fast_rotations,
            slow_rotations,
            original_context_tokens,
            has_whole_bounds,
        } => {
            let pair_of = |rotations: f32| {
                let wavelength = f64::from(original_context_tokens) / f64::from(rotations);
                rotary_dim as f64 * (wavelength / std::f64::consts::TAU).ln()
                    / (2.0 * f64::from(theta).ln())
            };
            let (mut first, mut last) = (pair_of(fast_rotations), pair_of(slow_rotations));
            if has_whole_bounds {
                (first, last) = (first.floor(), last.ceil());
            }
            (first, last) = (first.max(0.0), last.min(rotary_dim as f64 - 1.0));
            if first == last {
                last += 0.001;
            }
            plain
                .enumerate()
                .map(|(pair, frequency)| {
                    let ramp = (pair as f32 - first as f32) / (last - first) as f32;
                    let kept = 1.0 - ramp.clamp(0.0, 1.0);
                    frequency / factor * (1.0 - kept) + frequency * kept
                })
                .collect()
        }
        &RopeScaling::Llama3 {
            factor,
            low_frequency_factor,
            high_frequency_factor,
            original_context_tokens,
        } => {
            let long_wavelength = original_context_tokens / low_frequency_factor;
            let short_wavelength = original_context_tokens / high_frequency_factor;
            plain
                .map(|frequency| {
                    let wavelength = 2.0 * PI / frequency;
                    if wavelength > long_wavelength {
                        frequency / factor
                    } else if wavelength < short_wavelength {
                        frequency
                    } else {
                        let smooth = (original_context_tokens / wavelength - low_frequency_factor)
                            / (high_frequency_factor - low_frequency_factor);
                        (1.0 - smooth) * frequency / factor + smooth * frequency
                    }
                })
                .collect()
        }
    }
}

/// Order in which a file stores the rows of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// Hugging Face's usual order (`rotate_half`): rotary pairs are rows i and i + dim/2 of a head.
    Halves,
    /// Interleaved order of ERNIE, and of llama.cpp's converter for the `llama` architecture:
    /// rotary pairs are adjacent.
    Pairs { head_dim: usize },
    /// Every second row, from this one on: the gate or up rows of gpt-oss's experts.
    Alternate { first: usize },
    /// A part of the rows of a tensor.
    Part(RowPart),
}

/// Equally spaced groups of the rows of a tensor. Other weights have the rows between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowPart {
    /// The first row; 0 for one of the weights of a tensor.
    pub first: usize,
    /// Rows of a group.
    pub group: usize,
    /// Rows from the start of a group to the start of the next one.
    pub stride: usize,
    /// Rows of the tensor.
    pub stored_rows: usize,
}

impl RowPart {
    /// Returns the `index`-th of parts with these numbers of rows in each of `groups` groups.
    pub(crate) fn of<const N: usize>(parts: [usize; N], index: usize, groups: usize) -> Self {
        let stride = parts.iter().sum::<usize>();
        let first = parts[..index].iter().sum();
        Self { first, group: parts[index], stride, stored_rows: groups * stride }
    }
}

impl RowOrder {
    /// Returns the number of rows of the tensor in the file. `rows` of them belong to the matrix.
    pub(crate) fn stored_rows(self, rows: usize) -> usize {
        match self {
            RowOrder::Halves | RowOrder::Pairs { .. } => rows,
            RowOrder::Alternate { .. } => 2 * rows,
            RowOrder::Part(part) => part.stored_rows,
        }
    }

    /// Returns the index in the file of row `row` in Hugging Face's order.
    pub(crate) fn stored_row(self, row: usize) -> usize {
        match self {
            RowOrder::Halves => row,
            RowOrder::Alternate { first } => 2 * row + first,
            RowOrder::Part(RowPart { first, group, stride, .. }) => {
                first + row / group * stride + row % group
            }
            RowOrder::Pairs { head_dim } => {
                let (head, row) = (row / head_dim, row % head_dim);
                let (half, pair) = (row / (head_dim / 2), row % (head_dim / 2));
                head * head_dim + pair * 2 + half
            }
        }
    }
}
