//! Labels with a closed set of values, and instruments that know all their series.

use std::{marker::PhantomData, sync::Arc};

use opentelemetry::{KeyValue, metrics::Meter};

use super::table::{Instrument, MetricRow};

/// Any number of labels, each with a closed set of values.
pub(super) trait Labels: Copy {
    /// Number of combinations of values.
    const COUNT: usize;

    /// Returns the names of the labels.
    fn keys() -> Vec<&'static str>;

    /// Returns the index of this combination, below [`Self::COUNT`].
    fn index(self) -> usize;

    /// Returns the attributes of the combination with this index.
    fn attributes(index: usize) -> Vec<KeyValue>;
}

impl Labels for () {
    const COUNT: usize = 1;

    fn keys() -> Vec<&'static str> {
        Vec::new()
    }

    fn index(self) -> usize {
        0
    }

    fn attributes(_: usize) -> Vec<KeyValue> {
        Vec::new()
    }
}

impl<A: Labels, B: Labels> Labels for (A, B) {
    const COUNT: usize = A::COUNT * B::COUNT;

    fn keys() -> Vec<&'static str> {
        [A::keys(), B::keys()].concat()
    }

    fn index(self) -> usize {
        self.0.index() * B::COUNT + self.1.index()
    }

    fn attributes(index: usize) -> Vec<KeyValue> {
        let mut attributes = A::attributes(index / B::COUNT);
        attributes.extend(B::attributes(index % B::COUNT));
        attributes
    }
}

/// Declares an enum whose variants are values of a label, or of several labels separated by `/`.
macro_rules! labels {
    ($(#[$meta:meta])* $visibility:vis enum $name:ident($($key:literal)/+) {
        $($(#[$variant_meta:meta])* $variant:ident = $($label:literal)/+,)+
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $visibility enum $name {
            $($(#[$variant_meta])* $variant,)+
        }

        impl $name {
            const VALUES: &[&[&str]] = &[$(&[$($label),+]),+];

            /// Returns the value of the first label.
            #[allow(dead_code, reason = "not every label is also text elsewhere")]
            $visibility fn as_str(self) -> &'static str {
                Self::VALUES[self as usize][0]
            }
        }

        impl $crate::metrics::labels::Labels for $name {
            const COUNT: usize = Self::VALUES.len();

            fn keys() -> Vec<&'static str> {
                vec![$($key),+]
            }

            fn index(self) -> usize {
                self as usize
            }

            fn attributes(index: usize) -> Vec<opentelemetry::KeyValue> {
                let pairs = [$($key),+].into_iter().zip(Self::VALUES[index]);
                pairs.map(|(key, value)| opentelemetry::KeyValue::new(key, *value)).collect()
            }
        }
    };
}

/// An instrument and the attributes of each of its series.
#[derive(Clone, Debug)]
pub(super) struct Series<I, L> {
    instrument: I,
    /// Attributes of each series, by [`Labels::index`].
    attributes: Arc<[Vec<KeyValue>]>,
    labels: PhantomData<L>,
}

impl<I: Instrument, L: Labels> Series<I, L> {
    /// Creates the instrument of a row. `constants`: attributes that every series has.
    pub(super) fn new(meter: &Meter, row: &MetricRow, constants: &[KeyValue]) -> Self {
        let instrument = I::build(meter, row);
        let attributes = (0..L::COUNT).map(|index| [constants, &L::attributes(index)].concat());
        let attributes: Arc<[Vec<KeyValue>]> = attributes.collect();
        if let Some(start) = I::START {
            attributes.iter().for_each(|attributes| instrument.record(start, attributes));
        }
        Self { instrument, attributes, labels: PhantomData }
    }

    /// Adds the value to a counter, or records it.
    pub(super) fn record(&self, value: I::Value, labels: L) {
        self.instrument.record(value, &self.attributes[labels.index()]);
    }

    /// Records the value with further labels whose values are not known at the start.
    pub(super) fn record_with(&self, value: I::Value, labels: L, further: &[KeyValue]) {
        self.instrument.record(value, &[&self.attributes[labels.index()], further].concat());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    labels! {
        /// A label with two values.
        pub(super) enum Side("side") {
            Left = "left",
            Right = "right",
        }
    }

    labels! {
        /// Two labels in three combinations.
        pub(super) enum End("outcome" / "reason") {
            Done = "complete" / "stop",
            Lost = "failed" / "lost",
            Late = "failed" / "deadline",
        }
    }

    #[test]
    fn every_combination_has_its_attributes_at_its_index() {
        assert_eq!(<(Side, End)>::COUNT, 6);
        let expected = [
            KeyValue::new("side", "right"),
            KeyValue::new("outcome", "failed"),
            KeyValue::new("reason", "lost"),
        ];
        assert_eq!(<(Side, End)>::attributes((Side::Right, End::Lost).index()), expected);
        let combinations = [Side::Left, Side::Right]
            .map(|side| [End::Done, End::Lost, End::Late].map(|end| (side, end).index()));
        assert_eq!(combinations.as_flattened(), [0, 1, 2, 3, 4, 5]);
        assert_eq!((End::Late.as_str(), <()>::attributes(0)), ("failed", Vec::new()));
    }
}
