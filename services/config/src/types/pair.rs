//! A setting entry of the form `NAME=VALUE`.

use std::fmt;

/// `NAME=VALUE`; neither part is empty. The value may contain equals signs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pair {
    pub name: String,
    pub value: String,
}

impl Pair {
    pub fn parse(text: &str) -> Option<Self> {
        let (name, value) = text.split_once('=')?;
        let (name, value) = (name.trim(), value.trim());
        (!name.is_empty() && !value.is_empty())
            .then(|| Self { name: name.to_owned(), value: value.to_owned() })
    }
}

impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pair_needs_name_and_value() {
        let pair = Pair::parse(" llama = models/a=b.gguf ").unwrap();
        assert_eq!((pair.name.as_str(), pair.value.as_str()), ("llama", "models/a=b.gguf"));
        assert_eq!(Pair::parse(&pair.to_string()), Some(pair));
        for wrong in ["", "llama", "=x", "x=", " = "] {
            assert_eq!(Pair::parse(wrong), None, "{wrong}");
        }
    }
}
