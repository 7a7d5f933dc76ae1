//! Parsing, display, description and limits of the types that settings have.

use std::{net::SocketAddr, ops::RangeInclusive, path::PathBuf, time::Duration};

use serde_json::{Value as Json, json};
use toml::de::DeValue;

use crate::types::{
    Auto, ByteSize, CpuList, EtcdPrefix, GrpcUrl, ModelPath, NodeUrl, Origin, Pair, Password,
    Secret, ServerUrl, format_duration, parse_duration,
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
    /// Returns the JSON Schema of the TOML value.
    fn schema() -> Json;
    /// Returns the TOML value as JSON; the default implementation returns a string.
    fn json(&self) -> Json {
        self.show().into()
    }
}

/// A type whose values can be limited to a range.
pub(crate) trait Ranged: Value {
    type Bound: PartialOrd + Value;
    fn within(&self, range: &RangeInclusive<Self::Bound>) -> bool;

    fn allowed_within(range: &RangeInclusive<Self::Bound>) -> String {
        format!("{} from {} to {}", Self::allowed(), range.start().show(), range.end().show())
    }

    /// Returns the JSON Schema of a value in this range. A pattern cannot bound a text with a unit,
    /// so only numbers are bounded.
    fn schema_within(range: &RangeInclusive<Self::Bound>) -> Json;
}

fn toml_integer(value: &DeValue<'_>) -> Option<u64> {
    let integer = value.as_integer()?;
    u64::from_str_radix(&integer.as_str().replace('_', ""), integer.radix()).ok()
}

/// Implements [`Value`] for scalar types. Each line has the placeholder, the allowed values, the
/// parser and the JSON Schema. By default a value is shown through `Display`, and is a string in
/// TOML.
macro_rules! values {
    ($(
        $T:ty: $placeholder:literal, $allowed:expr, $parse:expr, $schema:expr
        $(, show = $show:expr)? $(, toml = $toml:expr, json = $json:expr)? $(, secret = $secret:literal)?;
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
            }

            fn json(&self) -> serde_json::Value {
                $json(self)
            })?

            fn schema() -> serde_json::Value {
                $schema
            }

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
        integer(0, u32::MAX.into()),
        toml = |value| toml_integer(value)?.try_into().ok(), json = |count: &Self| (*count).into();
    bool: "BOOL", "true or false", |text: &str| text.trim().parse().ok(), json!({"type": "boolean"}),
        toml = DeValue::as_bool, json = |yes: &Self| (*yes).into();
    ByteSize: "BYTES", "a size such as 512KiB, 4MiB, 1GiB or a number of bytes", Self::parse,
        size(0, i64::MAX as u64),
        toml = |value| toml_integer(value).map(Self).or_else(|| Self::parse(value.as_str()?)),
        json = |size: &Self| size.show().into();
    Duration: "DURATION", "a duration with its unit such as 500ms, 2s, 10m or 1h,", parse_duration,
        pattern("^[0-9]+ *(h|m|s|ms|us)$"),
        show = |duration: &Self| format_duration(*duration);
    PathBuf: "PATH", "a path", |text| not_empty(text).map(PathBuf::from), text(1),
        show = |path: &Self| path.display().to_string();
    String: "TEXT", NOT_EMPTY, |text: &str| not_empty(text.trim()).map(str::to_owned), text(1);
    ModelPath: "PATH", "a path, or hf:ORG/NAME[@REVISION][/FILE.gguf] for a model of the hub", Self::parse,
        text(1);
    SocketAddr: "ADDR:PORT",
        "an IP address and a port such as 127.0.0.1:8000, 0.0.0.0:8000 or [::]:8000",
        |text: &str| text.trim().parse().ok(),
        pattern(r"^([0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9A-Fa-f:.%]+\]):[0-9]{1,5}$");
    GrpcUrl: "URL", "host:port or http://host:port", Self::parse, url("(http://)?");
    NodeUrl: "URL", "host:port, http://host:port, or dns:host:port for a node at each address of the host",
        Self::parse, url("(dns:|http://)?");
    Origin: "URL", "scheme://host or scheme://host:port, or * for any", Self::parse,
        pattern(r"^(\*|[A-Za-z0-9-]+://[A-Za-z0-9.:_\[\]-]+/?)$");
    CpuList: "CPUS", "CPU numbers below 8192 and ranges of them such as 0-3,8, no CPU twice", Self::parse,
        pattern("^[0-9]+(-[0-9]+)?( *, *[0-9]+(-[0-9]+)?)*$");
    Pair: "NAME=VALUE", "NAME=VALUE", Self::parse, pattern("^[^=]+=.+$");
    ServerUrl: "URL", "host:port, http://host:port or https://host:port", Self::parse, url("(https?://)?");
    EtcdPrefix: "TEXT",
        "words of ASCII letters, digits, '.', '_' and '-' with '/' between them, at most 128 bytes",
        Self::parse,
        pattern("^/*[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*/*$");
    Password: "SECRET", NOT_EMPTY, |text| not_empty(text).map(Self::new), text(1), secret = true;
    Secret: "SECRET", format!("text of at least {SECRET_BYTES_MIN} bytes"),
        |text: &str| {
            Some(Self::new(text.trim())).filter(|secret| secret.reveal().len() >= SECRET_BYTES_MIN)
        },
        // The minimum counts bytes; a JSON Schema counts characters.
        text(1),
        secret = true;
}

fn integer(minimum: u64, maximum: u64) -> Json {
    json!({"type": "integer", "minimum": minimum, "maximum": maximum})
}

fn size(minimum: u64, maximum: u64) -> Json {
    let with_unit = pattern("^[0-9]+ *([KkMmGgTt]?[Bb]|[KkMmGgTt][Ii][Bb])?$");
    json!({"anyOf": [integer(minimum, maximum), with_unit]})
}

fn text(length_min: u32) -> Json {
    json!({"type": "string", "minLength": length_min})
}

fn pattern(pattern: &str) -> Json {
    json!({"type": "string", "pattern": pattern})
}

fn url(scheme: &str) -> Json {
    pattern(&format!(r"^{scheme}([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{{1,5}}/?$"))
}

const NOT_EMPTY: &str = "text that is not empty";
/// Minimum length of a secret in bytes. A shorter secret is open to brute force.
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

    fn schema() -> Json {
        word_or("", T::schema())
    }

    fn json(&self) -> Json {
        self.as_ref().map_or(Json::Null, T::json)
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

    fn schema() -> Json {
        word_or(AUTO, T::schema())
    }
}

/// Returns the schema of a value with one more word: the empty text of an unset value, or `auto`.
fn word_or(word: &str, value: Json) -> Json {
    json!({"anyOf": [{"const": word}, value]})
}

/// A list is an array in TOML and comma-separated in flags and variables. Empty text is an empty
/// list.
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

    fn schema() -> Json {
        json!({"type": "array", "items": T::schema()})
    }

    fn json(&self) -> Json {
        self.iter().map(T::json).collect()
    }
}

macro_rules! ranged {
    ($($Scalar:ty: $schema:expr;)+) => { $(
        impl Ranged for $Scalar {
            type Bound = $Scalar;

            fn within(&self, range: &RangeInclusive<$Scalar>) -> bool {
                range.contains(self)
            }

            fn schema_within(range: &RangeInclusive<$Scalar>) -> Json {
                $schema(range)
            }
        }
    )+ };
}

ranged! {
    u32: |range: &RangeInclusive<u32>| integer((*range.start()).into(), (*range.end()).into());
    ByteSize: |range: &RangeInclusive<ByteSize>| size(range.start().bytes(), range.end().bytes());
    Duration: |_: &RangeInclusive<Duration>| Duration::schema();
}

impl<T: Ranged<Bound = T> + PartialOrd> Ranged for Option<T> {
    type Bound = T;

    fn within(&self, range: &RangeInclusive<T>) -> bool {
        self.as_ref().is_none_or(|value| value.within(range))
    }

    fn schema_within(range: &RangeInclusive<T>) -> Json {
        word_or("", T::schema_within(range))
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

    fn schema_within(range: &RangeInclusive<T>) -> Json {
        word_or(AUTO, T::schema_within(range))
    }
}
