//! Parsing, display, description and limits of the types that settings have.

use std::{net::SocketAddr, ops::RangeInclusive, path::PathBuf, time::Duration};

use toml::de::DeValue;

use crate::types::{
    Auto, ByteSize, CpuList, EtcdPrefix, EtcdUrl, GrpcUrl, ModelPath, Pair, Password, Secret,
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

/// Implements [`Value`] for scalar types. Each line has the placeholder, the allowed values and the parser. By default
/// a value is shown through `Display`, and is a string in TOML.
macro_rules! values {
    ($(
        $T:ty: $placeholder:literal, $allowed:expr, $parse:expr
        $(, show = $show:expr)? $(, toml = $toml:expr)? $(, secret = $secret:literal)?;
    )+) => { $(
        impl $crate::value::Value for $T {
            const PLACEHOLDER: &'static str = $placeholder;
            $(const SECRET: bool = $secret;)?

            fn allowed() -> String {
                $allowed.into()
            }

            fn from_text(text: &str) -> Option<Self> {
                $parse(text)
            }

            $(fn from_toml(value: &DeValue<'_>) -> Option<Self> {
                $toml(value)
            })?

            fn show(&self) -> String {
                $crate::value::values!(@show self $(, $show)?)
            }
        }
    )+ };
    (@show $value:expr) => { $value.to_string() };
    (@show $value:expr, $show:expr) => { $show($value) };
}

pub(crate) use values;

values! {
    u32: "N", "a whole number", |text: &str| text.trim().replace('_', "").parse().ok(),
        toml = |value| toml_integer(value)?.try_into().ok();
    bool: "BOOL", "true or false", |text: &str| text.trim().parse().ok(), toml = DeValue::as_bool;
    ByteSize: "BYTES", "a size such as 512KiB, 4MiB, 1GiB or a number of bytes", Self::parse,
        toml = |value| toml_integer(value).map(Self).or_else(|| Self::parse(value.as_str()?));
    Duration: "DURATION", "a duration with its unit such as 500ms, 2s, 10m or 1h,", parse_duration,
        show = |duration: &Self| format_duration(*duration);
    PathBuf: "PATH", "a path", |text| not_empty(text).map(PathBuf::from),
        show = |path: &Self| path.display().to_string();
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
    Password: "SECRET", NOT_EMPTY, |text| not_empty(text).map(Self::new), secret = true;
    Secret: "SECRET", format!("text of at least {SECRET_BYTES_MIN} bytes"),
        |text: &str| {
            Some(Self::new(text.trim())).filter(|secret| secret.reveal().len() >= SECRET_BYTES_MIN)
        },
        secret = true;
}

const NOT_EMPTY: &str = "text that is not empty";
/// A shorter secret is open to brute force.
const SECRET_BYTES_MIN: usize = 16;

fn not_empty(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
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

/// Text of a setting whose value the service derives.
const AUTO: &str = "auto";

impl<T: Value> Value for Auto<T> {
    const PLACEHOLDER: &'static str = T::PLACEHOLDER;
    const SECRET: bool = T::SECRET;

    fn allowed() -> String {
        format!("{AUTO} or {}", T::allowed())
    }

    fn from_text(text: &str) -> Option<Self> {
        if text.trim() == AUTO { Some(Self::Derived) } else { T::from_text(text).map(Self::Set) }
    }

    fn from_toml(value: &DeValue<'_>) -> Option<Self> {
        match value.as_str() {
            Some(AUTO) => Some(Self::Derived),
            _ => T::from_toml(value).map(Self::Set),
        }
    }

    fn show(&self) -> String {
        match self {
            Self::Derived => AUTO.into(),
            Self::Set(value) => value.show(),
        }
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

impl<T: Ranged<Bound = T> + PartialOrd> Ranged for Auto<T> {
    type Bound = T;

    fn within(&self, range: &RangeInclusive<T>) -> bool {
        match self {
            Self::Derived => true,
            Self::Set(value) => value.within(range),
        }
    }
}
