//! Lists of CPUs in Linux notation.

use std::fmt;

/// Exclusive upper bound of CPU numbers.
const CPUS_MAX: u32 = 8192;

/// CPU numbers and ranges such as `0-3,8`, in the given order. The list is not empty and has no
/// duplicates.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CpuList(Vec<u32>);

impl CpuList {
    pub fn parse(text: &str) -> Option<Self> {
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return None;
            }
            cpus.extend(first..=last);
            // A list longer than the number of CPUs has duplicates.
            if cpus.len() > CPUS_MAX as usize {
                return None;
            }
        }
        let mut sorted = cpus.clone();
        sorted.sort_unstable();
        let is_twice = sorted.windows(2).any(|pair| pair[0] == pair[1]);
        (!is_twice).then_some(Self(cpus))
    }

    pub fn cpus(&self) -> &[u32] {
        &self.0
    }
}

fn number(text: &str) -> Option<u32> {
    let text = text.trim();
    let is_plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|cpu| is_plain && *cpu < CPUS_MAX)
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.0.chunk_by(|one, next| one + 1 == *next);
        for (index, run) in runs.enumerate() {
            let comma = if index > 0 { "," } else { "" };
            match run {
                [only] => write!(f, "{comma}{only}")?,
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_keep_their_order_and_round_trip() {
        for (text, cpus, shown) in [
            ("0", &[0][..], "0"),
            ("0-3,8", &[0, 1, 2, 3, 8], "0-3,8"),
            (" 5 , 2-3\n", &[5, 2, 3], "5,2-3"),
            ("7,6,0,1", &[7, 6, 0, 1], "7,6,0-1"),
            ("8191", &[8191], "8191"),
        ] {
            let list = CpuList::parse(text).unwrap();
            assert_eq!((list.cpus(), list.to_string().as_str()), (cpus, shown), "{text}");
            assert_eq!(CpuList::parse(shown), Some(list));
        }
    }

    #[test]
    fn invalid_lists_and_repeated_cpus_are_rejected() {
        let wrong = [
            "",
            ",",
            "0,",
            "a",
            "-1",
            "1-",
            "3-1",
            "0-3,2",
            "1,1",
            "8192",
            "0-8192",
            "0x1",
            "+1",
            "1.5",
            "0..3",
            "0-1-2",
            "99999999999",
        ];
        for text in wrong {
            assert_eq!(CpuList::parse(text), None, "{text}");
        }
    }
}
