//! Parsing, display, description and limits of the types that settings have.

use std::{net::SocketAddr, ops::RangeInclusive, path::PathBuf, time::Duration};

use toml::de::DeValue;

use crate::types::{
    ByteSize, CpuList, Device, Dtype, EtcdPrefix, EtcdUrl, GrpcUrl, Isa, LoadFormat, LogFormat,
    ModelPath, Pair, Password, Secret, Speculate, ToolFormat, Transport, format_duration,
    parse_duration,
};

/// A type that a setting can have.
pub(crate) trait Value: Sized + Clone {
    /// Placeholder of the value in help texts, such as `BYTES`.
    const PLACEHOLDER: &'static str;
    /// Hides the value in every output.
    const SECRET: bool = false;
    /// Returns the allowed values, as the end of the sentence "allowed: ...".
    fn allowed() -> String;
    /// Parses the text of a flag or an environment variable; `None` if the text is not allowed.
    fn from_text(text: &str) -> Option<Self>;
    /// Parses a TOML value; the default implementation takes a string.
    fn from_toml(value: &DeValue<'_>) -> Option<Self> {
        value.as_str().and_then(Self::from_text)
    }
    fn show(&self) -> String;
}

/// A type whose values can be limited to a range.
pub(crate) trait Ranged: Value {
    type Bound: PartialOrd + Value;
    fn within(&self, range: &RangeInclusive<Self::Bound>) -> bool;

    fn allowed_within(range: &RangeInclusive<Self::Bound>) -> String {
        format!("{} from {} to {}", Self::allowed(), range.start().show(), range.end().show())
    }
}

fn toml_integer(value: &DeValue<'_>) -> Option<u64> {
    let integer = value.as_integer()?;
    u64::from_str_radix(&integer.as_str().replace('_', ""), integer.radix()).ok()
}

impl Value for u32 {
    const PLACEHOLDER: &'static str = "N";

    fn allowed() -> String {
        "a whole number".into()
    }

    fn from_text(text: &str) -> Option<Self> {
        text.trim().replace('_', "").parse().ok()
    }

    fn from_toml(value: &DeValue<'_>) -> Option<Self> {
        toml_integer(value).and_then(|number| number.try_into().ok())
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for bool {
    const PLACEHOLDER: &'static str = "BOOL";

    fn allowed() -> String {
        "true or false".into()
    }

    fn from_text(text: &str) -> Option<Self> {
        text.trim().parse().ok()
    }

    fn from_toml(value: &DeValue<'_>) -> Option<Self> {
        value.as_bool()
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for ByteSize {
    const PLACEHOLDER: &'static str = "BYTES";

    fn allowed() -> String {
        "a size such as 512KiB, 4MiB, 1GiB or a number of bytes".into()
    }

    fn from_text(text: &str) -> Option<Self> {
        Self::parse(text)
    }

    fn from_toml(value: &DeValue<'_>) -> Option<Self> {
        toml_integer(value).map(Self).or_else(|| value.as_str().and_then(Self::parse))
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for Duration {
    const PLACEHOLDER: &'static str = "DURATION";

    fn allowed() -> String {
        "a duration with its unit such as 500ms, 2s, 10m or 1h,".into()
    }

    fn from_text(text: &str) -> Option<Self> {
        parse_duration(text)
    }

    fn show(&self) -> String {
        format_duration(*self)
    }
}

impl Value for String {
    const PLACEHOLDER: &'static str = "TEXT";

    fn allowed() -> String {
        "text that is not empty".into()
    }

    fn from_text(text: &str) -> Option<Self> {
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    fn show(&self) -> String {
        self.clone()
    }
}

impl Value for PathBuf {
    const PLACEHOLDER: &'static str = "PATH";

    fn allowed() -> String {
        "a path".into()
    }

    fn from_text(text: &str) -> Option<Self> {
        (!text.is_empty()).then(|| text.into())
    }

    fn show(&self) -> String {
        self.display().to_string()
    }
}

impl Value for ModelPath {
    const PLACEHOLDER: &'static str = "PATH";

    fn allowed() -> String {
        "a path, or hf:ORG/NAME[@REVISION][/FILE.gguf] for a model of the hub".into()
    }

    fn from_text(text: &str) -> Option<Self> {
        Self::parse(text)
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for SocketAddr {
    const PLACEHOLDER: &'static str = "ADDR:PORT";

    fn allowed() -> String {
        "an IP address and a port such as 127.0.0.1:8000, 0.0.0.0:8000 or [::]:8000".into()
    }

    fn from_text(text: &str) -> Option<Self> {
        text.trim().parse().ok()
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for GrpcUrl {
    const PLACEHOLDER: &'static str = "URL";

    fn allowed() -> String {
        "host:port or http://host:port".into()
    }

    fn from_text(text: &str) -> Option<Self> {
        Self::parse(text)
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for CpuList {
    const PLACEHOLDER: &'static str = "CPUS";

    fn allowed() -> String {
        "CPU numbers below 8192 and ranges of them such as 0-3,8, no CPU twice".into()
    }

    fn from_text(text: &str) -> Option<Self> {
        Self::parse(text)
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for Pair {
    const PLACEHOLDER: &'static str = "NAME=VALUE";

    fn allowed() -> String {
        "NAME=VALUE".into()
    }

    fn from_text(text: &str) -> Option<Self> {
        Self::parse(text)
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for EtcdUrl {
    const PLACEHOLDER: &'static str = "URL";

    fn allowed() -> String {
        "host:port, http://host:port or https://host:port".into()
    }

    fn from_text(text: &str) -> Option<Self> {
        Self::parse(text)
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for EtcdPrefix {
    const PLACEHOLDER: &'static str = "TEXT";

    fn allowed() -> String {
        "words of ASCII letters, digits, '.', '_' and '-' with '/' between them, at most 128 bytes"
            .into()
    }

    fn from_text(text: &str) -> Option<Self> {
        Self::parse(text)
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for Password {
    const PLACEHOLDER: &'static str = "SECRET";
    const SECRET: bool = true;

    fn allowed() -> String {
        "text that is not empty".into()
    }

    fn from_text(text: &str) -> Option<Self> {
        (!text.is_empty()).then(|| Self::new(text))
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

/// A shorter secret is open to brute force.
const SECRET_BYTES_MIN: usize = 16;

impl Value for Secret {
    const PLACEHOLDER: &'static str = "SECRET";
    const SECRET: bool = true;

    fn allowed() -> String {
        format!("text of at least {SECRET_BYTES_MIN} bytes")
    }

    fn from_text(text: &str) -> Option<Self> {
        Some(Self::new(text.trim())).filter(|secret| secret.byte_count() >= SECRET_BYTES_MIN)
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

/// An absent value is unset. An empty flag or variable unsets the value of the file.
impl<T: Value> Value for Option<T> {
    const PLACEHOLDER: &'static str = T::PLACEHOLDER;
    const SECRET: bool = T::SECRET;

    fn allowed() -> String {
        T::allowed()
    }

    fn from_text(text: &str) -> Option<Self> {
        if text.is_empty() { Some(None) } else { T::from_text(text).map(Some) }
    }

    fn from_toml(value: &DeValue<'_>) -> Option<Self> {
        if value.as_str() == Some("") { Some(None) } else { T::from_toml(value).map(Some) }
    }

    fn show(&self) -> String {
        self.as_ref().map_or_else(|| "unset".into(), T::show)
    }
}

/// A list is an array in TOML and comma-separated in flags and variables. Empty text is an empty list.
impl<T: Value> Value for Vec<T> {
    const PLACEHOLDER: &'static str = "LIST";
    const SECRET: bool = T::SECRET;

    fn allowed() -> String {
        format!(
            "a list with entries of the form {}; an array in the file, otherwise separated by commas",
            T::allowed()
        )
    }

    fn from_text(text: &str) -> Option<Self> {
        text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(T::from_text).collect()
    }

    fn from_toml(value: &DeValue<'_>) -> Option<Self> {
        value.as_array()?.iter().map(|entry| T::from_toml(entry.get_ref())).collect()
    }

    fn show(&self) -> String {
        if self.is_empty() {
            return "empty".into();
        }
        self.iter().map(T::show).collect::<Vec<_>>().join(",")
    }
}

macro_rules! choice_value {
    ($($Choice:ident),+) => { $(
        impl Value for $Choice {
            const PLACEHOLDER: &'static str = "WORD";

            fn allowed() -> String {
                match Self::WORDS {
                    [first @ .., last] if !first.is_empty() => {
                        format!("{} or {last}", first.join(", "))
                    }
                    words => words.concat(),
                }
            }

            fn from_text(text: &str) -> Option<Self> {
                Self::parse(text)
            }

            fn show(&self) -> String {
                self.to_string()
            }
        }
    )+ };
}

choice_value!(Device, Dtype, Isa, LoadFormat, LogFormat, Speculate, ToolFormat, Transport);

macro_rules! ranged {
    ($($Scalar:ty),+) => { $(
        impl Ranged for $Scalar {
            type Bound = $Scalar;

            fn within(&self, range: &RangeInclusive<$Scalar>) -> bool {
                range.contains(self)
            }
        }
    )+ };
}

ranged!(u32, ByteSize, Duration);

impl<T: Ranged<Bound = T> + PartialOrd> Ranged for Option<T> {
    type Bound = T;

    fn within(&self, range: &RangeInclusive<T>) -> bool {
        self.as_ref().is_none_or(|value| value.within(range))
    }
}
