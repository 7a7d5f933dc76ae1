//! Sizes in bytes, such as `4MiB`.

use std::fmt;

/// A number of bytes, written as `4MiB`, `1GiB`, `100MB`, or without a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

/// Units, largest first: `Display` uses the first unit that divides the size.
const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("kB", 1_000),
    ("B", 1),
];

impl ByteSize {
    pub const fn kib(count: u64) -> Self {
        Self(count << 10)
    }

    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }

    pub const fn gib(count: u64) -> Self {
        Self(count << 30)
    }

    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// Parses a whole number with an optional known unit; `None` for other text or on overflow.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let count: u64 = text[..digits].parse().ok()?;
        let unit = text[digits..].trim_start();
        let factor = if unit.is_empty() {
            1
        } else {
            UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?.1
        };
        count.checked_mul(factor).map(Self)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = |(_, factor): &&(&str, u64)| self.0 >= *factor && self.0.is_multiple_of(*factor);
        match UNITS.iter().find(fits) {
            Some((unit, factor)) => write!(f, "{}{unit}", self.0 / factor),
            None => write!(f, "{}B", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_every_unit() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64KiB", 65_536),
            ("64 kib", 65_536),
            ("3MB", 3_000_000),
            ("2GiB", 2 << 30),
            ("1TiB", 1 << 40),
        ] {
            assert_eq!(ByteSize::parse(text), Some(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn invalid_sizes_are_rejected() {
        for text in ["", "MiB", "-1", "1.5GiB", "12 apples", "99999999999TiB", "0x10", "１MiB"] {
            assert_eq!(ByteSize::parse(text), None, "{text}");
        }
    }

    #[test]
    fn sizes_round_trip() {
        for bytes in [0, 1, 1000, 1023, 1024, 1_500_000, 3 << 20, 5 << 30, u64::MAX] {
            let shown = ByteSize(bytes).to_string();
            assert_eq!(ByteSize::parse(&shown), Some(ByteSize(bytes)), "{shown}");
        }
    }
}
