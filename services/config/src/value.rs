//! Parsing, display, description and limits of the types that settings have.

use std::{net::SocketAddr, ops::RangeInclusive, path::PathBuf, time::Duration};

use toml::de::DeValue;

use crate::types::{
    ByteSize, CpuList, EtcdPrefix, EtcdUrl, GrpcUrl, ModelPath, Pair, Password, Secret,
    format_duration, parse_duration,
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

impl Value for PathBuf {
    const PLACEHOLDER: &'static str = "PATH";

    fn allowed() -> String {
        "a path".into()
    }

    fn from_text(text: &str) -> Option<Self> {
        not_empty(text).map(PathBuf::from)
    }

    fn show(&self) -> String {
        self.display().to_string()
    }
}

/// Implements [`Value`] for types that `Display` shows and that TOML holds as strings. Each line has the placeholder,
/// the allowed values and the parser.
macro_rules! text_values {
    ($($T:ty: $placeholder:literal, $allowed:expr, $parse:expr;)+) => { $(
        impl $crate::value::Value for $T {
            const PLACEHOLDER: &'static str = $placeholder;

            fn allowed() -> String {
                $allowed.into()
            }

            fn from_text(text: &str) -> Option<Self> {
                $parse(text)
            }

            fn show(&self) -> String {
                self.to_string()
            }
        }
    )+ };
}

pub(crate) use text_values;

text_values! {
    String: "TEXT", NOT_EMPTY, |text: &str| not_empty(text.trim()).map(str::to_owned);
    ModelPath: "PATH", "a path, or hf:ORG/NAME[@REVISION][/FILE.gguf] for a model of the hub", Self::parse;
    SocketAddr: "ADDR:PORT",
        "an IP address and a port such as 127.0.0.1:8000, 0.0.0.0:8000 or [::]:8000",
        |text: &str| text.trim().parse().ok();
    GrpcUrl: "URL", "host:port or http://host:port", Self::parse;
    CpuList: "CPUS", "CPU numbers below 8192 and ranges of them such as 0-3,8, no CPU twice", Self::parse;
    Pair: "NAME=VALUE", "NAME=VALUE", Self::parse;
    EtcdUrl: "URL", "host:port, http://host:port or https://host:port", Self::parse;
    EtcdPrefix: "TEXT",
        "words of ASCII letters, digits, '.', '_' and '-' with '/' between them, at most 128 bytes",
        Self::parse;
}

const NOT_EMPTY: &str = "text that is not empty";

fn not_empty(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

impl Value for Password {
    const PLACEHOLDER: &'static str = "SECRET";
    const SECRET: bool = true;

    fn allowed() -> String {
        NOT_EMPTY.into()
    }

    fn from_text(text: &str) -> Option<Self> {
        not_empty(text).map(Self::new)
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
        Some(Self::new(text.trim())).filter(|secret| secret.reveal().len() >= SECRET_BYTES_MIN)
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
