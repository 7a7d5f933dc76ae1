//! Metadata map and its typed getters.

use std::collections::BTreeMap;

use crate::{
    error::GgufError,
    value::{Array, Value},
};

/// Keys and values, sorted by key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    entries: BTreeMap<String, Value>,
}

impl Metadata {
    /// Returns the value of `key` with the type in the file.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.entries.get(key)
    }

    /// Returns the value of `key` as `T`; `None` when the key is absent.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, GgufError> {
        self.entries.get(key).map(|value| T::from_value(key, value)).transpose()
    }

    /// Returns the value of `key` as `T`.
    pub fn require<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, GgufError> {
        self.get(key)?.ok_or_else(|| GgufError::MissingKey { key: key.into(), wanted: T::WANTED })
    }

    /// Inserts a value. Returns false when the key exists already.
    pub(crate) fn insert(&mut self, key: String, value: Value) -> bool {
        self.entries.insert(key, value).is_none()
    }
}

/// Type to which a metadata value can be converted.
///
/// Integers of every width and sign are accepted where the number fits, because writers use
/// different types.
pub trait FromValue<'a>: Sized {
    /// Name of the type in errors.
    const WANTED: &'static str;
    /// Converts a value.
    fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError>;
}

fn wrong_type<'a, T: FromValue<'a>>(key: &str, value: &Value) -> GgufError {
    GgufError::WrongType { key: key.into(), found: value.type_name(), wanted: T::WANTED }
}

macro_rules! integers {
    ($($type:ident: $wanted:literal),*) => {$(
        impl<'a> FromValue<'a> for $type {
            const WANTED: &'static str = $wanted;
            fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError> {
                let integer = value.as_integer().ok_or_else(|| wrong_type::<Self>(key, value))?;
                $type::try_from(integer).map_err(|_| GgufError::OutOfRange {
                    key: key.into(),
                    found: integer.to_string(),
                    wanted: Self::WANTED,
                })
            }
        }
    )*};
}
integers!(u32: "u32", u64: "u64", usize: "u64", i32: "i32", i64: "i64");

/// Implements [`FromValue`] by the patterns that convert.
macro_rules! conversions {
    ($($T:ty: $wanted:literal, $($pattern:pat => $converted:expr),+;)+) => {$(
        impl<'a> FromValue<'a> for $T {
            const WANTED: &'static str = $wanted;
            fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError> {
                match value {
                    $($pattern => Ok($converted),)+
                    _ => Err(wrong_type::<Self>(key, value)),
                }
            }
        }
    )+};
}
conversions! {
    f32: "f32", Value::F32(v) => *v, Value::F64(v) => *v as f32;
    f64: "f64", Value::F32(v) => f64::from(*v), Value::F64(v) => *v;
    bool: "bool", Value::Bool(v) => *v;
    &'a str: "string", Value::String(v) => v;
    &'a [String]: "array of string", Value::Array(Array::String(v)) => v;
    &'a [i32]: "array of i32", Value::Array(Array::I32(v)) => v;
    &'a [f32]: "array of f32", Value::Array(Array::F32(v)) => v;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(key: &str, value: Value) -> Metadata {
        let mut metadata = Metadata::default();
        assert!(metadata.insert(key.into(), value));
        metadata
    }

    #[test]
    fn integers_of_any_width_are_accepted_where_they_fit() {
        assert_eq!(metadata("a", Value::U8(7)).require::<u32>("a").unwrap(), 7);
        assert_eq!(metadata("a", Value::I64(7)).require::<u32>("a").unwrap(), 7);
        let negative = metadata("a", Value::I32(-1));
        let error = negative.require::<u32>("a").unwrap_err();
        assert_eq!(error.to_string(), "metadata key \"a\" is -1; expected a number that fits u32");
    }

    #[test]
    fn wrong_types_name_key_found_and_wanted() {
        let tokens = metadata("tokens", Value::Array(Array::String(vec!["a".into(), "b".into()])));
        let error = tokens.require::<u32>("tokens").unwrap_err();
        assert_eq!(
            error.to_string(),
            "metadata key \"tokens\" is array of string[2]; expected u32"
        );
        let error = tokens.require::<&[i32]>("tokens").unwrap_err();
        assert_eq!(
            error.to_string(),
            "metadata key \"tokens\" is array of string[2]; expected array of i32"
        );
        assert_eq!(tokens.require::<&[String]>("tokens").unwrap(), ["a", "b"]);
    }

    #[test]
    fn absent_keys_are_none_or_missing() {
        let empty = Metadata::default();
        assert_eq!(empty.get::<f32>("eps").unwrap(), None);
        let error = empty.require::<f32>("eps").unwrap_err();
        assert_eq!(error.to_string(), "metadata key \"eps\" is missing; expected f32");
    }
}
